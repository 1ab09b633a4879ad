"""Drawing: the recorded distribution is the sampled one."""

import numpy as np
import pytest
import torch

from branchpoint.noise import Noise
from branchpoint.policy.draw import draw


def logits(*rows: list[float]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float32)


def first(x: torch.Tensor, **how: float) -> tuple[float, float]:
    """Log-probability and raw log-probability of the draw at u = 0: the lowest id that has any mass."""
    drawn = draw(x, np.zeros(1), [None], **how)
    assert drawn.tokens == [0]
    return drawn.logprobs[0], drawn.raw_logprobs[0]


def test_temperature_divides_logits() -> None:
    assert first(logits([2, 1, 0]), temperature=0.5) == pytest.approx((-0.142932, -0.407606), abs=1e-6)


def test_top_p_renormalises_over_the_kept_set() -> None:
    x = logits(np.log([0.6, 0.35, 0.05]).tolist())
    assert first(x, top_p=0.9) == pytest.approx((-0.459532, np.log(0.6)), abs=1e-6)
    (kept,) = draw(x, np.zeros(1), [None], top_p=0.9).kept
    assert kept is not None
    assert kept.tolist() == [0, 1]


def test_nothing_penalises_repetition() -> None:
    assert first(logits([2, 1, -1])) == pytest.approx((-0.349012, -0.349012), abs=1e-6)


def oracle(x: np.ndarray, allowed: list[int], temperature: float = 1.0, top_p: float = 1.0) -> dict[int, float]:
    """Token by token, straight from the definition."""
    mass = {t: float(np.exp(x[t] / temperature)) for t in allowed}
    total, kept = sum(mass.values()), {}
    for t in sorted(mass, key=lambda t: -mass[t]):
        if sum(kept.values()) < top_p * total:
            kept[t] = mass[t]
    return {t: m / sum(kept.values()) for t, m in sorted(kept.items())}


@pytest.mark.parametrize("allowed", [None, [1, 2, 5, 7], [3]])
@pytest.mark.parametrize("how", [{}, {"temperature": 0.6}, {"top_p": 0.7}, {"temperature": 2.0, "top_p": 0.5}])
def test_frequencies_are_the_recorded_probabilities(allowed: list[int] | None, how: dict[str, float]) -> None:
    x = torch.from_numpy(Noise(0).at("logits").normal(0, 1.0, 9)).float()
    n = 20_000
    sets = [None if allowed is None else np.array(allowed, np.int32)] * n
    drawn = draw(x.expand(n, 9), Noise(3).at("uniforms").random(n), sets, **how)
    expected = oracle(x.double().numpy(), allowed or list(range(9)), **how)
    counts = np.bincount(drawn.tokens, minlength=9)
    assert counts[list(expected)].sum() == n
    assert sum((counts[t] - n * p) ** 2 / (n * p) for t, p in expected.items()) < 45.0  # 8 degrees: p < 4e-7
    np.testing.assert_allclose(drawn.logprobs, [np.log(expected[t]) for t in drawn.tokens], atol=1e-12)
    np.testing.assert_allclose(drawn.entropies, -sum(p * np.log(p) for p in expected.values()), atol=1e-12)
    if allowed or "top_p" in how:
        assert drawn.kept[0] is not None
        assert drawn.kept[0].tolist() == list(expected)


def test_one_open_id_is_certain() -> None:
    drawn = draw(logits([1, 2, 3, 4]), np.array([0.7]), [np.array([1], np.int32)])
    assert (drawn.tokens, drawn.logprobs, drawn.entropies) == ([1], [0.0], [0.0])
    assert drawn.raw_logprobs[0] == pytest.approx(float(logits([1, 2, 3, 4]).log_softmax(-1)[0, 1]), abs=1e-6)


def test_ids_without_mass_are_never_drawn() -> None:
    inf = float("inf")
    x = logits([-inf, 0, -inf, 0, -inf]).expand(4, 5)
    u = np.array([0.0, 0.5, np.nextafter(0.5, 0), np.nextafter(1.0, 0)])
    drawn = draw(x, u, [None] * 4)
    assert drawn.tokens == [1, 3, 1, 3]
    assert np.allclose(drawn.entropies, np.log(2))


def test_rows_do_not_depend_on_the_rows_beside_them() -> None:
    rng = Noise(1).at("rows")
    x = torch.from_numpy(rng.normal(0, 3, (30, 130))).float()
    sets: list[np.ndarray | None] = [
        None if i % 3 == 0 else np.sort(rng.choice(130, int(rng.integers(1, 60)), replace=False)).astype(np.int32)
        for i in range(30)
    ]
    u = rng.random(30)
    for how in ({}, {"top_p": 0.6, "temperature": 0.8}):
        whole = draw(x, u, sets, **how)
        for i in range(30):
            alone = draw(x[i : i + 1], u[i : i + 1], sets[i : i + 1], **how)
            for name in ("tokens", "logprobs", "raw_logprobs", "entropies"):
                assert getattr(alone, name)[0] == getattr(whole, name)[i]
            if sets[i] is not None:
                assert whole.tokens[i] in sets[i]


def test_logits_that_are_not_finite_are_refused() -> None:
    for bad in (float("nan"), float("inf"), float("-inf")):
        with pytest.raises(ValueError, match="not finite"):
            draw(logits([bad, bad]), np.zeros(1), [None])
