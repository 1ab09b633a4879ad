"""What the variance probe found, as JSON values and in words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from branchpoint import plan
from branchpoint.plan import MARGIN, Plan, Profile
from branchpoint.probe.quarters import Found, number
from branchpoint.probe.variance import NAMES, Share

WHAT = {
    "prompt": "which task it is",
    "prefix": "what was done before",
    "luck": "the world's luck after it",
    "policy": "what the policy draws after it",
}
MOST = 12
"""Designs of the menu that are shown."""


def summary(found: Found) -> dict[str, Any]:
    """JSON values of all that was found."""
    return {
        "quarters": [
            {
                "at": q.at,
                "turn": q.turn,
                "missing": q.missing,
                **{n: number(getattr(q.components, n)) for n in (*NAMES, "total", "remaining")},
                "luck_share": None if q.luck is None else _share(q.luck),
            }
            for q in found.quarters
        ],
        "profile": None if found.profile is None else asdict(found.profile),
        "explained": None if found.profile is None else list(found.profile.explained),
        "length": found.length,
        "spurious": None
        if found.spurious is None
        else {n: None if s is None else asdict(s) for n, s in found.spurious.items()},
        "flips": found.flips,
        "pairing": found.pairing,
        "rollouts": found.rollouts,
        "failed": found.failed,
        "env_steps": found.env_steps,
        "remarks": list(found.remarks),
    }


def _share(share: Share) -> dict[str, Any]:
    interval = share.interval
    return {
        "value": share.value,
        "low": interval and interval.low,
        "high": interval and interval.high,
        "remarks": list(share.remarks),
    }


def planned(result: Mapping[str, Any], budget: float) -> dict[str, Any]:
    """The menu for a budget, the design to use, and the lines of configuration. Without a profile: the flat group."""
    if result["profile"] is None:
        return {"budget": budget, "menu": [], "best": None, "config": _config(None, int(budget), result["length"])}
    profile = Profile(**{k: tuple(v) for k, v in result["profile"].items()})
    cuts = [round(q["at"] * len(profile.cost)) for q in result["quarters"]]
    menu = plan.menu(profile, budget, 2, whole=True, allowed=cuts)
    best = plan.choose(profile, budget, 2, whole=True, allowed=cuts)
    shown = [p for p in menu if p.at][:MOST]
    flat = plan.predict(profile, budget, whole=True)
    return {
        "budget": budget,
        "menu": [asdict(p) | {"name": str(p)} for p in sorted([flat, *shown], key=lambda p: p.gain)],
        "best": asdict(best) | {"name": str(best)},
        "config": _config(best, int(budget), result["length"]),
    }


def _config(best: Plan | None, budget: int, length: float) -> list[str]:
    if best is None or not best.at:
        return [f"scheduler: {{kind: flat, roots: {budget}}}", "estimator: {kind: tree}"]
    at, width = list(best.at), list(best.widths)
    gamma = [round(g, 3) for g in best.gamma]
    return [
        f"scheduler: {{kind: fixed, roots: {best.roots:g}, at: {at}, width: {width}, expected: {length:.1f}}}",
        f"estimator: {{kind: tree, gamma: {gamma}}}",
        "# or let it follow the policy:",
        f"# scheduler: {{kind: planned, roots: {budget}}}",
    ]


def variance_text(result: Mapping[str, Any]) -> str:
    """What a person reads of the measurement."""
    lines = [
        f"{result['rollouts']} rollouts of {len(result['prompts'])} prompts, {result['env_steps']} steps; "
        f"an episode takes {result['length']:.1f} turns"
    ]
    for q in result["quarters"]:
        parts = ", ".join(f"{n} {_number(q[n])}" for n in NAMES)
        share = q["luck_share"]
        told = "" if not share or share["value"] is None else f"; luck's share after it {_ranged(share)}"
        lines.append(f"before turn {q['turn'] + 1} ({q['at']:.0%}): {parts}{told}")
    lines.append(where(result))
    for name, s in (result["spurious"] or {}).items():
        if s is not None and s["q"] > 0:
            lines.append(
                f"groups that all {name}: {s['seen']:.0%} of {s['groups']} show a difference that is noise "
                f"({s['expected']:.0%} expected of independent flips of {s['q']:.1%})"
            )
    if result["flips"] is not None:
        left, right = result["flips"]
        verdict = "would help" if left < right else "would hurt" if left > right else "makes no difference"
        if left or right:
            lines.append(f"one-sided flips: {left:.3g} against {right:.3g}, so pairing {verdict}")
    if result["pairing"] is not None:
        verdict = "lowers" if result["pairing"] < 0 else "raises" if result["pairing"] > 0 else "does not change"
        lines.append(f"the world's luck: pairing {verdict} the gradient's variance (by {abs(result['pairing']):.3g})")
    return "\n".join([*lines, *result["remarks"]])


def where(result: Mapping[str, Any]) -> str:
    """In one sentence, in which part of an episode the return is decided."""
    if result["profile"] is None:
        return (
            "There is no variance within a prompt to place: all returns of a prompt are alike, or too few are scored."
        )
    variance = result["profile"]["variance"]
    total, count = sum(variance), len(variance)
    most = max(range(count), key=lambda i: variance[i])
    shares = ", ".join(f"{v / total:.0%}" for v in variance)
    last = result["quarters"][-1]
    names = ("first", "second", "third", "last")
    which = f"Most of the return's variance within a prompt arises in the {names[most]} quarter ({shares})"
    rest = {n: (last[n] or {}).get("value") for n in ("luck", "policy")}
    if None in rest.values() or most != count - 1:
        return which + "."
    cause = max(rest, key=lambda n: rest[n] or 0.0)
    return f"{which}, by {WHAT[cause]}."


def plan_text(result: Mapping[str, Any]) -> str:
    """What a person reads of the plan."""
    config = "\n".join(f"  {line}" for line in result["config"])
    best = result["best"]
    if best is None:
        return f"Nothing to plan from; keep the flat group:\n{config}"
    lines = [
        f"Predicted variance of the gradient at the cost of {result['budget']:g} rollouts, the flat group being 1:"
    ]
    lines += [f"  {p['gain']:.2f}  {p['name']}" for p in result["menu"]]
    if best["at"]:
        lines.append(f"Use: {best['name']} ({1 - best['gain']:.0%} less variance than the flat group, predicted).")
    else:
        lines.append(f"Use the flat group: no fork promises {MARGIN:.0%} less variance.")
    if len(best["at"]) > 1:
        lines.append("Two forks are the bolder choice: try the best single one first and see that it pays.")
    return "\n".join([*lines, config])


def _number(value: Mapping[str, Any] | None) -> str:
    if value is None:
        return "not identified"
    error = value["error"]
    return f"{value['value']:+.3g}" + ("" if error is None else f" ± {error:.2g}")


def _ranged(share: Mapping[str, Any]) -> str:
    if share["low"] is None:
        return f"{share['value']:.0%}"
    return f"{share['value']:.0%} ({share['low']:.0%} to {min(share['high'], 1.0):.0%})"
