"""The probe's report: one HTML page that needs nothing else, for people."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from branchpoint.probe.words import plan_text, variance_text, where

STYLE = """
body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}
body{color:#1b1f24;background:#fff}
h1{font-size:1.5rem}h2{font-size:1.15rem;margin-top:2rem}table{border-collapse:collapse}
td,th{padding:.2rem .8rem;text-align:right;border-bottom:1px solid #d5d9de}
td:first-child,th:first-child{text-align:left}
pre{background:#f3f5f7;padding:.8rem;overflow-x:auto;white-space:pre-wrap}svg{max-width:100%;height:auto}
tr.best{font-weight:600;background:#eaf4ec}text{font:13px system-ui,sans-serif;fill:#1b1f24}figcaption{color:#57606a}
"""
WIDTH, LINE = 880, 26
BLUE, GREY, GREEN = "#2f6fb3", "#9aa4ae", "#3a8f56"


def page(result: Mapping[str, Any], gradients: Mapping[str, Any] | None = None) -> str:
    """The page, from what ``probe plan`` writes, and what ``probe gradient`` wrote of the same checkpoint, if given."""
    title = "Where the return varies, and where to fork"
    parts = [
        f"<h1>{title}</h1>",
        f"<p>{escape(where(result))}</p>",
        _section("Variance within a prompt, by quarter", _profile(result)),
        _section("Components at each quarter", _components(result["quarters"])),
        _section("Designs at equal cost", _menu(result)),
        _section("What to use", f"<pre id='config'>{escape(chr(10).join(result['config']))}</pre>"),
    ]
    if gradients is not None:
        parts.append(_section("Measured gradients", _gradients(gradients)))
    words = variance_text(result) + "\n\n" + plan_text(result)
    parts.append(_section("In words", f"<pre>{escape(words)}</pre>"))
    meta = "<meta charset='utf-8'><meta name='viewport' content='width=device-width'>"
    head = f"<head>{meta}<title>{title}</title><style>{STYLE}</style></head>"
    return f"<!doctype html>\n<html lang='en'>{head}<body>{''.join(parts)}</body></html>\n"


def _section(title: str, body: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{body}</section>"


def _profile(result: Mapping[str, Any]) -> str:
    profile = result["profile"]
    if profile is None:
        return "<p>No profile: " + escape("; ".join(result["remarks"]) or "there is no variance to place") + ".</p>"
    total = sum(profile["variance"])
    rows = [
        (f"quarter {i + 1}", v / total, None, None, f"{v / total:.0%} of the variance, {c:.1f} turns, |S|² {s:.2g}")
        for i, (v, c, s) in enumerate(zip(*(profile[k] for k in ("variance", "cost", "score")), strict=True))
    ]
    return _bars("profile", rows, "Share of the return's variance that arises in each quarter of an episode.")


def _components(quarters: Sequence[Mapping[str, Any]]) -> str:
    names = ("prompt", "prefix", "luck", "policy")
    head = "".join(f"<th>{n}</th>" for n in ("before turn", *names, "luck's share after it"))
    rows = []
    for q in quarters:
        share = q["luck_share"]
        cells = [str(q["turn"] + 1), *(_with_error(q[n]) for n in names), _interval(share, "{:.0%}")]
        rows.append("<tr>" + "".join(f"<td>{escape(c)}</td>" for c in cells) + "</tr>")
    note = (
        "<p>Unclipped: an unbiased estimate of a small share may be negative. ± one jackknife error over prompts.</p>"
    )
    return f"<table id='components'><tr>{head}</tr>{''.join(rows)}</table>{note}"


def _menu(result: Mapping[str, Any]) -> str:
    if not result["menu"]:
        return "<p>Nothing to plan from; keep the flat group.</p>"
    best = result["best"]["name"]
    rows = [
        (p["name"], p["gain"], None, None, f"{p['gain']:.2f}" + (" (to use)" if p["name"] == best else ""))
        for p in result["menu"]
    ]
    caption = f"Predicted variance of the gradient at the cost of {result['budget']:g} rollouts; the flat group is 1."
    return _bars("menu", rows, caption, mark=best)


def _gradients(found: Mapping[str, Any]) -> str:
    rows, unknown = [], []
    for d in found["designs"]:
        trace = d["trace"]
        if trace is None:
            unknown.append(f"{d['name']}: not positive, so without an interval")
            continue
        told = f"{trace['value']:.3g} ({trace['low']:.3g} to {trace['high']:.3g})"
        rows.append((d["name"], trace["value"], trace["low"], trace["high"], told))
    level = f"{found.get('level', 0.9):.0%}"
    notes = "".join(f"<p>{escape(u)}</p>" for u in unknown)
    return _bars("traces", rows, f"Trace of the gradient's covariance within a prompt, with {level} intervals.") + notes


Row = tuple[str, float, float | None, float | None, str]


def _bars(name: str, rows: Iterable[Row], caption: str, mark: str | None = None) -> str:
    """Horizontal bars with labels, values in words, and whiskers where there is an interval."""
    rows = list(rows)
    label, room = 340, WIDTH - 340 - 250
    largest = max([max(v, high or 0.0) for _, v, _, high, _ in rows] or [1.0]) or 1.0
    marks = []
    for i, (what, value, low, high, told) in enumerate(rows):
        y, length = i * LINE + 4, max(value, 0.0) / largest * room
        colour = GREEN if what == mark else BLUE
        marks.append(f"<text x='0' y='{y + 14}'>{escape(what)}</text>")
        marks.append(f"<rect x='{label}' y='{y}' width='{length:.1f}' height='{LINE - 8}' fill='{colour}'/>")
        end = length
        if low is not None and high is not None:
            a, end = (max(x, 0.0) / largest * room for x in (low, high))
            middle = y + (LINE - 8) / 2
            marks.append(
                f"<line class='interval' x1='{label + a:.1f}' x2='{label + end:.1f}' y1='{middle}' y2='{middle}' "
                f"stroke='{GREY}' stroke-width='3'/>"
            )
        marks.append(f"<text x='{label + max(length, end) + 6:.1f}' y='{y + 14}'>{escape(told)}</text>")
    height = len(rows) * LINE + 8
    picture = f"<svg role='img' aria-label='{escape(caption)}' viewBox='0 0 {WIDTH} {height}'>{''.join(marks)}</svg>"
    return f"<figure id='{name}'>{picture}<figcaption>{escape(caption)}</figcaption></figure>"


def _with_error(value: Mapping[str, Any] | None) -> str:
    if value is None:
        return "not identified"
    return f"{value['value']:+.3g}" + ("" if value["error"] is None else f" ± {value['error']:.2g}")


def _interval(share: Mapping[str, Any] | None, form: str) -> str:
    if share is None or share["value"] is None:
        return "not defined"
    told = form.format(share["value"])
    return told if share["low"] is None else f"{told} ({form.format(share['low'])} to {form.format(share['high'])})"
