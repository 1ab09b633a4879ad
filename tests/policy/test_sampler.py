"""The sampler says what the model says: against full forward passes, after forks, and bit for bit in company."""

import asyncio
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from sampler_kit import NONE, act, chosen, ids, model, policy, run, same, teacher

from branchpoint.config import Sampling
from branchpoint.noise import Noise
from branchpoint.policy import kvcache
from branchpoint.policy.hf import HFPolicy, HFSession
from branchpoint.session import Action
from branchpoint.world import PolicyFailure, Step


def check(made: Any, context: np.ndarray, a: Action) -> None:
    expected = teacher(made, context, a.tokens)
    np.testing.assert_allclose(a.logprobs, chosen(expected, a.tokens), atol=1e-5)
    np.testing.assert_allclose(a.raw_logprobs, a.logprobs, atol=1e-6)
    np.testing.assert_allclose(a.entropies, -(np.exp(expected) * expected).sum(-1), atol=1e-5)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_logprobs_equal_a_full_forward_pass_through_turns_and_forks(family: str) -> None:
    made = model(family)
    p = policy(made, stop=59)

    async def main() -> None:
        s = p.open()
        first, second = ids(0, length=70), ids(1, length=9)
        a = await act(s, first, 0, 30)
        middle = np.concatenate([first, a.tokens, second])
        b = await act(s, second, 1, 30)
        check(made, first, a)
        check(made, middle, b)
        assert s.length == len(middle) + len(b.tokens)
        # a sibling at the turn boundary, one in the middle of each action, one of a sibling
        x = s.fork(len(first) + len(a.tokens))
        again = await act(x, second, 2, 30)
        check(made, middle, again)
        for key, (start, whole) in enumerate([(len(first), a), (len(middle), b)], 3):
            for depth in (1, len(whole.tokens) - 1):
                prefix = whole.tokens[:depth]
                y = s.fork(start + depth)
                c = await act(y, NONE, key, 30, prefix=prefix)
                context = np.concatenate([first if start == len(first) else middle, prefix])
                check(made, context, c)
                assert c.text == p.codec.text([*prefix, *c.tokens])
                z = y.fork(y.length)
                check(made, np.concatenate([context, c.tokens, second]), await act(z, second, 9, 5))

    run(main())


def test_long_observations_are_read_in_chunks() -> None:
    made = model()
    p = policy(made)

    async def main() -> None:
        s = p.open()
        first, second = ids(0, length=300), ids(1, length=270)
        a = await act(s, first, 0, 4)
        check(made, first, a)
        check(made, np.concatenate([first, a.tokens, second]), await act(s, second, 1, 4))

    run(main())


async def story(p: HFPolicy, key: int, length: int, delay: int = 0) -> list[Action]:
    """Two turns and a fork in the middle of an action."""
    for _ in range(delay):
        await asyncio.sleep(0)
    s = p.open()
    a = await act(s, ids(key, length=length), key, 20)
    b = await act(s, ids(key, 1, length=7), key, 20)
    cut = max(1, len(b.tokens) // 2)
    f = s.fork(s.length - len(b.tokens) + cut)
    c = await act(f, NONE, key + 1000, 20, prefix=b.tokens[:cut])
    s.close()
    f.close()
    return [a, b, c]


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.7, top_p=0.9)])
def test_a_session_is_the_same_bit_for_bit_alone_and_in_any_company(family: str, sampling: Sampling) -> None:
    made = model(family)

    async def among(others: int, salt: int) -> list[Action]:
        p = policy(made, sampling)
        stories = [story(p, 100 + i, 3 + 5 * i % 90, (i * (7 + salt)) % 31) for i in range(others)]
        at = others // 2
        results = await asyncio.gather(*stories[:at], story(p, 7, 61, 3 * bool(others)), *stories[at:])
        return results[at]

    alone = run(among(0, 0))
    assert sum(len(a.tokens) for a in alone) > 20
    for others, salt in ((2, 0), (40, 0), (40, 4)):
        assert all(same(x, y) for x, y in zip(alone, run(among(others, salt)), strict=True))


@pytest.mark.parametrize("heads", [1, 2, 4])
def test_forks_of_forks_read_shared_rows_as_if_they_were_their_own(heads: int) -> None:
    """Each level adds a part to the shared context, short or long, more of them than are read in place."""
    made = model(num_key_value_heads=heads)
    p = policy(made, stop=59)

    async def main() -> None:
        s, context = p.open(), ids(0, length=100)
        new, parts = context, []
        for level, length in enumerate((70, 3, 66, 90, 80, 65, 20), 1):
            a = await act(s, new, level, 8)
            check(made, context, a)
            context = np.concatenate([context, a.tokens])
            parts.append(len(s._context.shared))
            siblings = [s.fork(s.length) for _ in range(3)]
            s.close()
            new = ids(level, length=length)
            for k, sibling in enumerate(siblings):
                check(made, np.concatenate([context, new]), await act(sibling, new, 100 + k, 4))
                sibling.close() if k else None
            s, new = siblings[0].fork(siblings[0].length), ids(level, 1, length=1)
            context = np.concatenate([context, ids(level, length=length)])
            siblings[0].close()
            context = np.array([*s._context.tokens, *new], np.int32)
        assert max(parts) == kvcache.PARTS
        s.close()
        assert p.engine.store.used == 0

    run(main())


@pytest.mark.parametrize("width", [2, 5, 9])
def test_siblings_that_read_a_shared_prefix_together_get_the_bits_of_each_alone(width: int) -> None:
    made = model(num_key_value_heads=1)

    async def main(among: tuple[int, ...]) -> dict[int, Action]:
        p = policy(made, stop=59)
        roots = [p.open() for _ in range(2)]
        await asyncio.gather(*(act(r, ids(k, length=150), k, 12) for k, r in enumerate(roots)))
        forks = {k: roots[k % 2].fork(130 if k % 3 else 140) for k in among}
        answers = await asyncio.gather(*(act(f, ids(5, length=5), k, 40) for k, f in forks.items()))
        return dict(zip(among, answers, strict=True))

    together = run(main(tuple(range(2 * width))))
    for k in range(0, 2 * width, 3):
        assert same(together[k], run(main((k,)))[k])


def test_a_fork_gives_the_same_bits_whenever_it_is_made() -> None:
    made = model()
    turns = [ids(i, length=20) for i in range(3)]

    async def main(late: bool) -> Action:
        p = policy(made)
        s = p.open()
        await act(s, turns[0], 0)
        point = s.length
        f = None if late else s.fork(point)
        await act(s, turns[1], 1)
        f = f or s.fork(point)
        s.close()
        return await act(f, turns[2], 2)

    assert same(run(main(False)), run(main(True)))


def test_siblings_over_uniform_logits_differ_and_do_not_depend_on_order() -> None:
    made = model(vocab=1000)
    torch.nn.init.zeros_(made.lm_head.weight)

    async def main(order: list[int]) -> dict[int, Action]:
        p = policy(made)
        root = p.open()
        await act(root, ids(0, length=10), 99, 1)
        keys = Noise(5)
        forks = {k: root.fork(10) for k in order}
        work = [forks[k].act(NONE, Step(""), keys.branch("independent", k), 8) for k in order]
        return dict(zip(order, await asyncio.gather(*work), strict=True))

    forward, backward = run(main(list(range(8)))), run(main(list(range(7, -1, -1))))
    assert len({a.tokens.tobytes() for a in forward.values()}) == 8
    assert all(same(forward[k], backward[k]) for k in range(8))
    assert np.allclose(forward[0].logprobs, -np.log(1000))
    assert np.allclose(forward[0].entropies, np.log(1000))


def test_equal_keys_draw_anew_at_every_turn() -> None:
    made = model(vocab=1000)
    torch.nn.init.zeros_(made.lm_head.weight)

    async def main() -> None:
        s = policy(made).open()
        a, b = await act(s, ids(0, length=5), 0, 8), await act(s, ids(1, length=5), 0, 8)
        assert a.tokens.tolist() != b.tokens.tolist()

    run(main())


def test_temperature_and_top_p_are_recorded_as_sampled() -> None:
    made = model()
    context = ids(0, length=30)
    a = run(act(policy(made, Sampling(temperature=0.5, top_p=0.8)).open(), context, 0, 25))
    raw, tempered = teacher(made, context, a.tokens), teacher(made, context, a.tokens, 0.5)
    np.testing.assert_allclose(a.raw_logprobs, chosen(raw, a.tokens), atol=1e-5)
    assert a.allowed is not None
    for i, kept in enumerate(a.allowed):
        assert kept is not None
        probabilities = np.exp(tempered[i])
        assert a.tokens[i] in kept
        assert probabilities[kept].sum() >= 0.8
        assert probabilities[kept].sum() - probabilities[kept].min() < 0.8
        log_mass = np.log(probabilities[kept].sum())
        assert a.logprobs[i] == pytest.approx(tempered[i, a.tokens[i]] - log_mass, abs=1e-5)
        inside = tempered[i, kept] - log_mass
        assert a.entropies[i] == pytest.approx(-(np.exp(inside) * inside).sum(), abs=1e-5)


def test_the_models_generation_config_is_not_read() -> None:
    made = model()
    made.generation_config.repetition_penalty = 1.1
    made.generation_config.top_k = 20
    made.generation_config.temperature = 0.7
    context = ids(0, length=30)
    a = run(act(policy(made).open(), context, 0, 25))
    check(made, context, a)
    assert a.allowed is None


def test_greedy_takes_the_most_probable_token() -> None:
    made = model()
    context = ids(0, length=30)
    a = run(act(policy(made, Sampling(greedy=True)).open(), context, 0, 15))
    assert a.tokens.tolist() == teacher(made, context, a.tokens).argmax(-1).tolist()
    assert not a.logprobs.any()
    assert not a.entropies.any()
    assert a.raw_logprobs.all()


def test_zero_temperature_is_refused() -> None:
    for value in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValidationError, match=r"temperature is .* greedy"):
            Sampling(temperature=value)


def test_padding_ids_of_the_vocabulary_are_never_sampled() -> None:
    made = model(vocab=16)
    torch.nn.init.zeros_(made.lm_head.weight)
    p = policy(made, stop=12, vocabulary=13)

    async def main() -> list[Action]:
        return await asyncio.gather(*(act(p.open(), ids(0, length=5, vocab=12), k, 10) for k in range(40)))

    tokens = np.concatenate([a.tokens for a in run(main())])
    assert len(tokens) > 200
    assert tokens.max() == 12
    one = run(act(p.open(), ids(0, length=5, vocab=12), 0, 3))
    assert np.allclose(one.raw_logprobs, -np.log(13))
    assert np.allclose(one.logprobs, -np.log(13))


def test_token_frequencies_match_the_models_probabilities() -> None:
    made = model(vocab=6)
    context = ids(0, length=12, vocab=6)
    p = policy(made, Sampling(temperature=1.5))

    async def main() -> list[Action]:
        root = p.open()
        await act(root, context, 0, 1)
        return await asyncio.gather(*(act(root.fork(12), NONE, k, 1) for k in range(600)))

    counts = np.bincount(np.concatenate([a.tokens for a in run(main())]), minlength=6)
    expected = 600 * np.exp(teacher(made, context, np.zeros(1, np.int32), 1.5)[0])
    assert ((counts - expected) ** 2 / expected).sum() < 32.0  # chi-square with 5 degrees of freedom: p = 6e-6


def test_an_action_ends_with_its_stop_token_or_at_the_limit() -> None:
    made = model(vocab=8)
    torch.nn.init.zeros_(made.lm_head.weight)
    p = policy(made, stop=7)

    async def main() -> list[Action]:
        return await asyncio.gather(*(act(p.open(), ids(0, length=5, vocab=7), k, 6) for k in range(60)))

    actions = run(main())
    assert {a.stopped for a in actions} == {True, False}
    for a in actions:
        assert 7 not in a.tokens[:-1]
        assert a.stopped == (a.tokens[-1] == 7)
        assert a.stopped or len(a.tokens) == 6


def test_the_prefix_counts_for_the_limit_and_must_be_there() -> None:
    p = policy(model(), stop=59)

    async def main(s: HFSession) -> None:
        a = await act(s, ids(0, length=10), 3, 12)
        f = s.fork(10 + 5)
        assert len((await act(f, NONE, 4, 7, prefix=a.tokens[:5])).tokens) <= 2
        with pytest.raises(ValueError, match="prefix must be the last tokens"):
            await act(s.fork(15), NONE, 4, 7, prefix=a.tokens[:4])
        with pytest.raises(ValueError, match="max_tokens is 5"):
            await act(s.fork(15), NONE, 4, 5, prefix=a.tokens[:5])
        with pytest.raises(ValueError, match="fork at token 99"):
            s.fork(99)

    run(main(p.open()))


def test_a_full_context_is_a_failure_before_the_first_token_and_a_cut_after_it() -> None:
    made = model(max_position_embeddings=40)
    p = policy(made, stop=59)

    async def main() -> None:
        with pytest.raises(PolicyFailure, match="context is full before the action: 40 tokens"):
            await act(p.open(), ids(0, length=40), 0)
        s = p.open()
        a = await act(s, ids(0, length=36), 0)
        assert len(a.tokens) == 4
        assert not a.stopped
        check(made, ids(0, length=36), a)
        with pytest.raises(PolicyFailure, match="nothing to condition on"):
            await act(p.open(), NONE, 0)

    run(main())
