"""Where the variance of the return lies: tasks, prefixes, the world's luck, the policy's own draws.

Var(R) = prompt + prefix + luck + policy, from products of returns that share more and more:

    C0  different prompts          C1  same prompt, different roots
    C2  same prefix, other luck    C3  same prefix and luck, other draws of the policy    C4  E R^2

    prompt = C1 - C0    prefix = C2 - C1    luck = C3 - C2    policy = C4 - C3

Luck is that after the prefix, its main effect; policy holds the interaction of both. All are unbiased for a fixed
design (nested analysis of variance, when balanced) and may come out negative: they are reported as they are.
What a design cannot tell apart is None, with a remark that says what is missing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import numpy as np

from branchpoint.probe.trace import Estimate, Interval, ProbeError
from branchpoint.tree import Array

NAMES = ("prompt", "prefix", "luck", "policy")


class Leaf(NamedTuple):
    """One rollout: of which prompt, from which prefix (a branch node, one of each root), under which luck after it
    (a schedule), and its return."""

    prompt: Hashable
    prefix: Hashable
    schedule: Hashable
    score: float


@dataclass(frozen=True, slots=True)
class Components:
    """The four components, unclipped, with jackknife errors over prompts. None where not identified; ``remarks`` say
    why. ``total``: Var(R), that is C4 - C0, or within a prompt (C4 - C1) where there is one only."""

    prompt: Estimate | None
    prefix: Estimate | None
    luck: Estimate | None
    policy: Estimate | None
    total: Estimate | None
    remaining: Estimate | None
    remarks: tuple[str, ...]


def decompose(leaves: Iterable[Leaf]) -> Components:
    """The nested decomposition. ``remaining`` = C4 - C2: what the prefix does not explain, luck and policy together.

    Pairs are averaged inside a prefix (each schedule alike), then prefixes inside a prompt, then prompts. Needed for
    everything: 2 prompts, 2 prefixes of each, and under one prefix 3 rollouts, two of which share a schedule that the
    third does not. What has less is left out where something has enough, and remarked. Raises ProbeError for no leaves,
    and for returns that are not finite.
    """
    given = list(leaves)
    if not given:
        raise ProbeError("no scored rollout: there is no variance to decompose")
    if not all(math.isfinite(x.score) for x in given):
        raise ProbeError("returns: NaN or infinite; a rollout without a score has to be left out, never counted")
    remarks: list[str] = []
    prompts = [_prompt(list(group)) for _, group in groupby(sorted(given, key=_key), lambda x: x.prompt)]
    prompts = _preferred(prompts, lambda p: [n for n in p if not np.isnan(n[1:3]).any()], 1, remarks, _UNPAIRED)
    prompts = _preferred(prompts, lambda p: p if len(p) > 1 else [], 2, remarks, _ONE_ROOT)
    if len(prompts) < 2:
        remarks.append("one prompt only: its share of the variance is not identified; give at least 2")
    if len({x.score for x in given}) == 1:
        remarks.append("all returns are alike: there is no variance")
    rows = np.array([_products(p) for p in prompts])

    def of(k: int) -> Estimate | None:
        return _jackknifed(rows, lambda r: _moments(r)[k + 1] - _moments(r)[k])

    def between(a: int, b: int) -> Estimate | None:
        return _jackknifed(rows, lambda r: _moments(r)[b] - _moments(r)[a])

    total = between(0, 4) or between(1, 4)
    return Components(of(0), of(1), of(2), of(3), total, between(2, 4), tuple(remarks))


_UNPAIRED = "no prefix with 2 rollouts that share a schedule and 1 that does not: luck and policy cannot be told apart"
_ONE_ROOT = "one prefix of each prompt only: what the prefix decides is not identified; give at least 2 roots"


def _key(x: Leaf) -> tuple[str, str]:
    return str(x.prompt), str(x.prefix)


def _prompt(leaves: list[Leaf]) -> list[Array]:
    """Of each prefix of a prompt: mean, C2, C3, C4 (NaN where there is no such pair)."""
    return [_node(list(group)) for _, group in groupby(leaves, lambda x: x.prefix)]


def _node(leaves: list[Leaf]) -> Array:
    schedules: dict[Hashable, list[float]] = {}
    for x in leaves:
        schedules.setdefault(x.schedule, []).append(x.score)
    groups = [np.array(g) for g in schedules.values()]
    means = np.array([g.mean() for g in groups])
    shared = [_pairs(g) for g in groups if len(g) > 1]
    c3 = float(np.mean(shared)) if shared else np.nan
    return np.array([means.mean(), _pairs(means), c3, np.mean([np.mean(g * g) for g in groups])])


def _pairs(x: Array) -> float:
    """The mean product of two different entries; NaN for one entry."""
    n = len(x)
    return float((x.sum() ** 2 - np.sum(x * x)) / (n * (n - 1))) if n > 1 else np.nan


def _preferred(
    prompts: list[list[Array]],
    keep: Callable[[list[Array]], list[Array]],
    least: int,
    remarks: list[str],
    missing: str,
) -> list[list[Array]]:
    """The prompts with what ``keep`` leaves of them, where at least one has enough; else all as they are."""
    kept = [k for p in prompts if len(k := keep(p)) >= least]
    if not kept:
        remarks.append(missing)
        return prompts
    left_out = sum(map(len, prompts)) - sum(map(len, kept))
    if left_out:
        remarks.append(f"{left_out} incomplete prefixes are left out")
    return kept


def _products(nodes: list[Array]) -> Array:
    """Of a prompt: its mean, C1, C2, C3, C4."""
    at = np.array(nodes)
    return np.array([at[:, 0].mean(), _pairs(at[:, 0]), *at[:, 1:].mean(axis=0)])


def _moments(rows: Array) -> Array:
    """C0 .. C4 over prompts."""
    return np.array([_pairs(rows[:, 0]), *rows[:, 1:].mean(axis=0)])


def _jackknifed(rows: Array, of: Callable[[Array], float]) -> Estimate | None:
    """The number and its error, leaving out one prompt at a time (NaN error where that cannot be done)."""
    value, n = float(of(rows)), len(rows)
    if math.isnan(value):
        return None
    left = np.array([of(np.delete(rows, i, axis=0)) for i in range(n)]) if n > 1 else np.array([np.nan])
    error = math.sqrt((n - 1) / n * float(np.sum((left - left.mean()) ** 2)))
    return Estimate(value, error, max(n - 1, 0))


# --- the share of luck --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Share:
    """lambda = luck / (luck + rest), unclipped; ``interval`` on the log scale, None where it is not defined."""

    value: float | None
    luck: float
    rest: float
    interval: Interval | None
    remarks: tuple[str, ...] = ()


def luck_share(tables: Sequence[Array], level: float = 0.9) -> Share:
    """The luck share from tables of returns [schedules, rollouts], one for each prefix or prompt.

    lambda = L / (L + MSW), L = (MSB - MSW) / P, from n schedules with P rollouts each; L and MSW are unbiased for
    Var(E[R | schedule]) and E Var(R | schedule), and averaged over the tables before the ratio is taken. Jackknife over
    the tables (over the schedules, where there is one table). Raises ProbeError for tables without 2 schedules and 2
    rollouts.
    """
    for t in tables:
        if t.ndim != 2 or min(t.shape) < 2 or not np.isfinite(t).all():
            raise ProbeError(f"luck share: a table of {t.shape} finite returns; 2 schedules x 2 rollouts are the least")
    if not tables:
        raise ProbeError("luck share: no table with 2 schedules x 2 rollouts; give paired siblings")
    parts = np.array([_between_and_within(t) for t in tables])
    luck, rest = map(float, parts.mean(axis=0))
    if not luck + rest > 0:
        return Share(None, luck, rest, None, ("all returns are alike: the share of luck is not defined",))
    if len(tables) > 1:
        left = [np.delete(parts, i, axis=0).mean(axis=0) for i in range(len(parts))]
    else:
        rows = tables[0]
        left = [_between_and_within(np.delete(rows, i, axis=0)) for i in range(len(rows))] if len(rows) > 2 else []
    value = luck / (luck + rest)
    if not value > 0:
        return Share(value, luck, rest, None, ("no luck was seen: a logarithmic interval does not exist",))
    if len(left) < 2:
        return Share(value, luck, rest, None, ("an interval needs 3 schedules, or 2 tables",))
    shares = np.array([a / (a + b) if a + b > 0 else np.nan for a, b in left])
    n = len(shares)
    error = math.sqrt((n - 1) / n * float(np.sum((shares - shares.mean()) ** 2)))
    interval = Estimate(value, error, n - 1).interval(level) if math.isfinite(error) else None
    return Share(value, luck, rest, interval)


def _between_and_within(table: Array) -> tuple[float, float]:
    """(MSB - MSW) / P and MSW of a balanced table."""
    p = table.shape[1]
    within = float(np.mean(np.var(table, axis=1, ddof=1)))
    return (float(np.var(table.mean(axis=1), ddof=1)) * p - within) / p, within


def luck_share_of_arms(paired: Sequence[Array], independent: Sequence[Array]) -> float | None:
    """The other estimate: 1 - mean s^2 of paired groups / mean s^2 of independent ones. None without variance."""
    below = float(np.mean([np.var(g, ddof=1) for g in independent]))
    return 1.0 - float(np.mean([np.var(g, ddof=1) for g in paired])) / below if below > 0 else None


# --- spurious variance --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Spurious:
    """Groups whose true outcomes were all alike. ``seen``: the share of them whose observed rewards differed, so that
    they teach noise; ``expected``: 1 - (1-q)^G - q^G for independent flips of probability ``q``."""

    groups: int
    q: float
    seen: float
    expected: float


def spurious(truth: Sequence[Array], observed: Sequence[Array]) -> dict[str, Spurious | None]:
    """For groups that truly succeeded, and that truly failed, throughout: how often noise made a difference.

    ``truth``, ``observed``: one vector of zeros and ones for each group. q is estimated from *all* rollouts of that
    outcome. None where there is no such group.
    """
    if any(len(t) != len(o) for t, o in zip(truth, observed, strict=True)):
        raise ProbeError("spurious variance: every rollout needs a true outcome and an observed one")
    flat_t, flat_o = (np.concatenate([*x, np.zeros(0)]) for x in (truth, observed))
    out: dict[str, Spurious | None] = {}
    for name, outcome in (("succeeded", 1.0), ("failed", 0.0)):
        groups = [o for t, o in zip(truth, observed, strict=True) if len(t) and np.all(t == outcome)]
        if not groups:
            out[name] = None
            continue
        q = float(np.mean(flat_o[flat_t == outcome] != outcome))
        sizes = np.array([len(g) for g in groups])
        out[name] = Spurious(
            len(groups),
            q,
            float(np.mean([np.ptp(g) > 0 for g in groups])),
            float(np.mean(1.0 - (1.0 - q) ** sizes - q**sizes)),
        )
    return out


# --- whether pairing helps ----------------------------------------------------------------------------------------


def flip_sides(gram: Array, rewards: Array) -> tuple[float, float]:
    """Both sides of the condition for one-sided flips, of one group: (|g_c|^2, (1/G^2) sum r_i^2 |S_i - Sbar|^2).

    Pairing helps iff the mean of the first over groups is the smaller: with flips of probability q on rewards r_i,
    tr_paired - tr_independent = q (1-q) (E first - E second). ``gram``: inner products <S_i, S_j> of the rollouts'
    scores. The group's mean is the baseline, g_c = (1/G) sum (r_i - rbar) S_i.
    """
    centred = _centred(gram)
    r = np.asarray(rewards, np.float64)
    weight = (r - r.mean()) / len(r)
    return float(weight @ gram @ weight), float(np.sum(r**2 * np.diag(centred))) / len(r) ** 2


def pairing_difference(gram: Array, replayed: Array) -> float:
    """tr_paired - tr_independent of one group for any luck: sum over i != j of C(a_i, a_j) <T_i, T_j>.

    T_i = (S_i - Sbar) / G; ``replayed`` [schedules, G]: the returns of the G action sequences under the same schedules,
    of which C is the unbiased covariance. Negative: pairing helps. Average it over groups. Raises ProbeError for fewer
    than 2 schedules.
    """
    if len(replayed) < 2:
        raise ProbeError("the covariance of two action sequences needs them replayed under 2 schedules or more")
    c = np.cov(np.asarray(replayed, np.float64), rowvar=False, ddof=1)
    t = _centred(gram) / len(gram) ** 2
    return float(np.sum(c * t) - np.sum(np.diag(c) * np.diag(t)))


def _centred(gram: Array) -> Array:
    """<S_i - Sbar, S_j - Sbar>."""
    g = np.asarray(gram, np.float64)
    return g - g.mean(axis=0) - g.mean(axis=1)[:, None] + g.mean()
