"""The covariance trace of a gradient from independent groups: unbiased, with an interval on the log scale.

Everything is computed from a Gram matrix G_ij = <g_i, g_j> of the groups' gradients. Groups are independent given their
prompt; the trace is that *within* a prompt, averaged over the prompts, which are taken as given.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from branchpoint.tree import Array

Labels = npt.NDArray[np.int64]


class ProbeError(Exception):
    """What was asked for cannot be measured; one line that says what is missing."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A positive estimate and its two-sided interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Estimate:
    """A number and its jackknife standard error. ``df``: degrees of freedom of the t distribution to use with it."""

    value: float
    error: float
    df: int

    def interval(self, level: float = 0.9) -> Interval | None:
        """exp(log T +- t se / T), t of ``df`` degrees of freedom. None where the number is not positive: its logarithm
        does not exist."""
        return _log_interval(self.value, self.error / self.value, self.df, level) if self.value > 0 else None


def ratio(over: Estimate, under: Estimate, level: float = 0.9) -> Interval | None:
    """over / under of two *independent* estimates: log difference, squared relative errors added, t with the degrees of
    freedom added (n1 + n2 - 2 for one prompt). None where one of them is not positive."""
    if not (over.value > 0 and under.value > 0):
        return None
    error = math.hypot(over.error / over.value, under.error / under.value)
    return _log_interval(over.value / under.value, error, over.df + under.df, level)


def within(gram: Array, prompts: Labels, cost: Array | None = None) -> Estimate:
    """The within-prompt trace, times the mean cost of a group if ``cost`` is given.

    For the n groups of one prompt T = (1/(n-1)) sum |g_i - gbar|^2 = mean_i G_ii - mean_{i != j} G_ij, unbiased for
    tr Cov(g); the mean of T over the prompts is the trace. A mean over C / cost groups has the trace T cost / C, so
    T times the mean cost compares designs at equal cost.

    Jackknife: one group at a time, each prompt a stratum of its own; se^2 = sum over the strata of
    (n-1)/n sum (T_{-i} - mean)^2, where leaving out group i gives (sum d - n/(n-1) d_i)/(n-2), d_i = |g_i - gbar|^2.
    Where some prompt has two groups only, one prompt at a time (T = |g_1 - g_2|^2 / 2 for each).

    Args:
        gram: [n, n], float64.
        prompts: [n] the prompt of each group.
        cost: [n] what each group has cost.

    Raises ProbeError when there are too few groups for an error.
    """
    cost = np.ones(len(gram)) if cost is None else np.asarray(cost, np.float64)
    members = [np.flatnonzero(prompts == p) for p in np.unique(prompts)]
    sizes = np.array([len(m) for m in members])
    if not len(sizes) or sizes.min() < 2:
        raise ProbeError("a trace needs at least 2 groups of each prompt; raise --groups")
    traces = np.array([np.sum(spread(gram[np.ix_(m, m)])) / (len(m) - 1) for m in members], np.float64)
    costs = np.array([np.mean(cost[m]) for m in members], np.float64)
    value = float(np.mean(traces) * np.mean(costs))
    if sizes.min() >= 3:
        left = [_leave_out(gram[np.ix_(m, m)], cost[m], k, traces, costs) for k, m in enumerate(members)]
        return Estimate(value, math.sqrt(sum(map(_jackknife, left))), int(np.sum(sizes - 1)))
    if len(sizes) < 3:
        raise ProbeError("an interval needs 3 groups of each prompt, or 3 prompts; raise --groups or --prompts")
    rest = (len(sizes) - 1) ** 2
    left = (np.sum(traces) - traces) * (np.sum(costs) - costs) / rest
    return Estimate(value, math.sqrt(_jackknife(left)), len(sizes) - 1)


def spread(gram: Array) -> Array:
    """[n] d_i = |g_i - gbar|^2 from the Gram matrix of one prompt."""
    return np.maximum(np.diag(gram) - 2 * np.mean(gram, axis=1) + np.mean(gram), 0.0)


def mean_square(gram: Array, prompts: Labels) -> float:
    """Unbiased for the mean over prompts of |E g|^2: mean_{i != j} G_ij within a prompt. It may be negative."""
    return inner(gram, prompts, prompts, same=True)


def between(gram: Array, prompts: Labels) -> float | None:
    """Unbiased for the trace *between* prompts, tr Cov(E[g | prompt]): inner products within a prompt less those across
    prompts. It may be negative; None for one prompt only, where it is not identified."""
    apart = prompts[:, None] != prompts[None, :]
    if not apart.any():
        return None
    labels = np.unique(prompts)
    across = [np.mean(gram[np.ix_(prompts == p, prompts == q)]) for p in labels for q in labels if p != q]
    return mean_square(gram, prompts) - float(np.mean(across))


def inner(gram: Array, rows: Labels, columns: Labels, same: bool = False) -> float:
    """Unbiased for the mean over prompts of <E g, E g'>, given the block of inner products of two designs and the
    prompts of its rows and columns. ``same``: the two are one design, so the diagonal is left out."""
    out = []
    for p in np.unique(rows):
        block = gram[np.ix_(rows == p, columns == p)]
        total = np.sum(block) - (np.trace(block) if same else 0.0)
        out.append(total / (block.size - (len(block) if same else 0)))
    return float(np.mean(out))


def t_cdf(t: float, df: int) -> float:
    """P(T <= t) of Student's t with a whole number of degrees of freedom (Abramowitz and Stegun 26.7.3, 26.7.4)."""
    angle, odd = math.atan(t / math.sqrt(df)), df % 2
    term, total = math.cos(angle) if odd else 1.0, 0.0
    for k in range(df // 2):
        total += term
        term *= math.cos(angle) ** 2 * (2 * k + 1 + odd) / (2 * k + 2 + odd)
    inside = math.sin(angle) * total
    return 0.5 + 0.5 * ((angle + inside) * 2 / math.pi if odd else inside)


def t_quantile(p: float, df: int) -> float:
    """The t with P(T <= t) = p, 0.5 <= p < 1, by bisection."""
    high = 1.0
    while t_cdf(high, df) < p:
        high *= 2
    return _bisect(lambda t: t_cdf(t, df) < p, 0.0, high)


def _bisect(below: Callable[[float], bool], low: float, high: float) -> float:
    while (middle := (low + high) / 2) not in (low, high):
        low, high = (middle, high) if below(middle) else (low, middle)
    return middle


def _log_interval(value: float, relative: float, df: int, level: float) -> Interval:
    reach = math.exp(t_quantile(0.5 + level / 2, df) * relative)
    return Interval(value, value / reach, value * reach)


def _leave_out(gram: Array, cost: Array, k: int, traces: Array, costs: Array) -> Array:
    """[n] the whole statistic without each group of prompt k in turn."""
    n, d = len(gram), spread(gram)
    without = (np.sum(d) - n / (n - 1) * d) / (n - 2)
    cheaper = (np.sum(cost) - cost) / (n - 1)
    trace = np.mean(traces) + (without - traces[k]) / len(traces)
    return trace * (np.mean(costs) + (cheaper - costs[k]) / len(costs))


def _jackknife(left_out: Array) -> float:
    """The squared standard error from the n values with one part left out."""
    n = len(left_out)
    return (n - 1) / n * float(np.sum((left_out - np.mean(left_out)) ** 2))
