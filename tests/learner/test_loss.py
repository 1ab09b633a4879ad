"""Numbers worked by hand, and brute force over whole vocabularies."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from branchpoint.loss import clipped, clipped_surrogate, distribution, entropy, k3, read, token_logprobs


def pairs(sets: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    rows = [i for i, s in enumerate(sets) for _ in s]
    return torch.tensor(rows), torch.tensor([t for s in sets for t in s])


def test_temperature_divides_logits():
    # known fault 7a: raw -0.407606 and raw / T -0.815212 are the wrong values
    logits = torch.tensor([[2.0, 1.0, 0.0]], dtype=torch.float64)
    got = token_logprobs(distribution(logits, temperature=0.5), torch.tensor([0]))
    assert float(got) == pytest.approx(-0.142932, abs=1e-6)


def test_the_kept_set_of_top_p_is_renormalised():
    # known fault 7b: one-sided renormalisation gives the ratio 0.95
    logits = torch.log(torch.tensor([[0.6, 0.35, 0.05]], dtype=torch.float64))
    got = token_logprobs(distribution(logits, allowed=pairs([[0, 1]])), torch.tensor([0]))
    assert float(got) == pytest.approx(-0.459532, abs=1e-6)


def test_temperature_zero_is_refused():
    with pytest.raises(ValueError, match="temperature is 0"):
        distribution(torch.zeros(1, 3), temperature=0.0)


def test_ids_beyond_the_vocabulary_have_no_probability():
    logits = torch.randn(4, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    table = distribution(logits, vocabulary=13)
    assert table.shape == (4, 13)
    assert torch.allclose(table.exp().sum(-1), torch.ones(4, dtype=torch.float64))


def test_log_probabilities_of_bfloat16_logits_are_float32():
    assert distribution(torch.zeros(1, 3, dtype=torch.bfloat16)).dtype == torch.float32


def test_entropy_counts_only_what_is_allowed():
    logits = torch.zeros(2, 8, dtype=torch.float64, requires_grad=True)
    h = entropy(distribution(logits, allowed=pairs([[1, 2, 5, 7], []])))
    assert h.tolist() == pytest.approx([math.log(4), math.log(8)])


def test_kl_numbers():
    # known fault 6: direction and estimator
    pi, ref = torch.tensor([0.7, 0.3], dtype=torch.float64), torch.tensor([0.5, 0.5], dtype=torch.float64)
    assert float((pi * k3(pi.log(), ref.log())).sum()) == pytest.approx(0.0822829, abs=1e-7)
    assert float((pi * (pi / ref).log()).sum()) == pytest.approx(0.0822829, abs=1e-7)
    d = torch.tensor([0.5, -0.5], dtype=torch.float64)
    assert k3(d, torch.zeros(2)).tolist() == pytest.approx([0.1065307, 0.1487213], abs=1e-7)
    assert (k3(torch.linspace(-5, 5, 101), torch.zeros(101)) >= 0).all()


def test_kl_gradient_moves_towards_the_reference():
    for start in (-1.0, 1.0):
        lp = torch.tensor([start], requires_grad=True)
        (grad,) = torch.autograd.grad(k3(lp, torch.zeros(1)).sum(), lp)
        assert math.copysign(1, float(grad)) == math.copysign(1, start)


def test_clipping_of_single_tokens():
    new = torch.log(torch.tensor([1.5, 1.5, 0.5, 0.5], dtype=torch.float64)).requires_grad_()
    up, down = torch.tensor([2.0, 0.0, 2.0, 0.0]), torch.tensor([0.0, -2.0, 0.0, -2.0])
    old = torch.zeros(4)
    loss = clipped_surrogate(new, old, up, down, 0.2, 0.3)
    assert float(loss.detach()) == pytest.approx(-(2 * 1.3 - 2 * 1.5 + 2 * 0.5 - 2 * 0.8))
    (grad,) = torch.autograd.grad(loss, new)
    assert grad.tolist() == pytest.approx([0, 3.0, -1.0, 0])
    assert clipped(new.detach(), old, up, down, 0.2, 0.3).tolist() == [True, False, False, True]


def test_a_token_pushed_both_ways_keeps_the_side_that_is_not_clipped():
    new = torch.log(torch.tensor([1.5], dtype=torch.float64)).requires_grad_()
    loss = clipped_surrogate(new, torch.zeros(1), torch.tensor([2.0]), torch.tensor([-0.5]), 0.2, 0.2)
    (grad,) = torch.autograd.grad(loss, new)
    assert float(grad) == pytest.approx(0.5 * 1.5)


@pytest.mark.parametrize("at_once", [1, 12 * 3, 12 * 7])
def test_reading_in_chunks_changes_nothing(at_once):
    torch.manual_seed(0)
    head = torch.nn.Linear(5, 12, bias=False).double()
    hidden, tokens = torch.randn(10, 5, dtype=torch.float64, requires_grad=True), torch.arange(10)
    sets = [[t, 11] if t % 3 == 0 else [] for t in range(10)]
    allowed = tuple(x.numpy() for x in pairs(sets))
    results = []
    for limit in (1 << 20, at_once):
        lp, h = read(head, hidden, tokens, 0.8, allowed, None, at_once=limit)
        grads = torch.autograd.grad((lp * torch.linspace(0, 1, 10)).sum(), [hidden, head.weight])
        results.append([lp, h, *grads])
    for a, b in zip(*results, strict=True):
        assert torch.allclose(a, b, rtol=0, atol=1e-12)
    logits = head(hidden) / 0.8
    want = [logits[i, i] - torch.logsumexp(logits[i, s] if s else logits[i], 0) for i, s in enumerate(sets)]
    assert torch.allclose(results[0][0], torch.stack(want), rtol=0, atol=1e-12)
    assert np.all(results[0][1].detach().numpy() >= 0)
