"""A study's results for people: one self-contained HTML page (plots inside, nothing fetched), and a table in text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from branchpoint import plot
from branchpoint.experiment import stats

Results = Mapping[str, Any]
Row = Mapping[str, Any]

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
table { border-collapse: collapse; margin: 0.8rem 0 } th, td { padding: 0.2rem 0.7rem; border-bottom: 1px solid #ddd }
td { text-align: right; font-variant-numeric: tabular-nums } td:first-child, th:first-child { text-align: left }
.verdict { padding: 0.6rem 1rem; background: #eef3f8; border-left: 4px solid #4a78a8 }
.deviation { padding: 0.4rem 1rem; background: #fbf1e1; border-left: 4px solid #c98a2b; margin: 0.4rem 0 }
svg { max-width: 100%; height: auto } code { font-size: 0.9em } .note { color: #555 }
"""


def page(found: Results) -> str:
    """The page as HTML text. Needs the extra ``train`` for the plots."""
    parts = [
        f"<h1>{escape(found['name'])}</h1>",
        f"<p><b>Claim:</b> {escape(found['claim'])}</p>",
        f'<p class="note">Frozen on {escape(found["frozen"])}, SHA-256 <code>{found["sha256"]}</code>; '
        f"{len(found['seeds'])} seeds; Branchpoint {escape(found['branchpoint'])}.</p>",
        _deviations(found["deviations"]),
        f'<p class="verdict">{escape(sentence(found))}</p>',
        "<h2>Comparisons</h2>",
        _endpoint_note(found),
        _comparisons(found),
    ]
    for environment in found["environments"]:
        parts += [f"<h2>{escape(environment)}</h2>", _summaries(found, environment), curves(found, environment)]
        measured = [v for v in found["variance"] if v["environment"] == environment]
        if measured:
            parts.append(variances(found, environment))
            unknown = sum(v["ratio"] is None for v in measured)
            parts.append(
                f'<p class="note">{unknown} of {len(measured)} checkpoints gave no ratio.</p>' if unknown else ""
            )
    parts += ["<h2>Steps to the threshold</h2>", thresholds(found), "<h2>Chosen on validation</h2>", _tuned(found)]
    parts += ["<h2>Ledger</h2>", _ledger(found)]
    head = f'<meta charset="utf-8"><title>{escape(found["name"])}</title><style>{_STYLE}</style>'
    return f'<!doctype html><html lang="en"><head>{head}</head><body>\n' + "\n".join(parts) + "\n</body></html>\n"


def sentence(found: Results) -> str:
    """The verdict in words."""
    d, v = found["decision"], found["verdict"]
    won, lost = ", ".join(v["better_in"]) or "none", ", ".join(v["worse_in"]) or "none"
    return (
        f"{'Shown' if v['shown'] else 'Not shown'}: {d['arm']} against {', '.join(d['against'])}, by more than "
        f"{d['margin']:g} in the area under the curve. Better in: {won} ({v['needed']} needed); worse in: {lost}. "
        f"Intervals of {d['level_of_each']:.1%} each, {d['level']:.0%} together."
    )


def table(found: Results) -> str:
    """The verdict and all comparisons as lines of text."""
    lines = [sentence(found)]
    for c in found["comparisons"]:
        a, f = c["area"], c["final"]
        lines.append(
            f"{c['environment']:<20} {c['arm']} - {c['against']}: area {_points(a)}, final {_points(f)}, p {a['p']:.3g}"
        )
    lines += [f"deviation of {d['date']}: {d['what']}" for d in found["deviations"]]
    return "\n".join(lines)


def curves(found: Results, environment: str) -> str:
    """Success on validation over training: the mean over seeds of each arm, with a band of one standard error."""
    amount = found["environments"][environment]["amount"]
    figure = plot.new_figure(9, 4.5)
    axes = figure.add_subplot()
    for color, arm in _colored(found["arms"]):
        x, mean, error = stats.band([r["curve"] for r in _rows(found["runs"], environment, arm)], amount)
        axes.plot(x, mean, color=color, label=arm)
        axes.fill_between(x, mean - error, mean + error, color=color, alpha=0.15, linewidth=0)
    axes.axhline(found["environments"][environment]["threshold"], color="0.6", linestyle=":", label="threshold")
    axes.set(xlabel=_column(found), ylabel="success on validation", ylim=(-0.02, 1.02), title=environment)
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return plot.svg(figure)


def variances(found: Results, environment: str) -> str:
    """The gradient's variance at equal cost over training, relative to the flat design at the same checkpoint."""
    figure = plot.new_figure(9, 3.2)
    axes = figure.add_subplot()
    for color, arm in _colored(found["arms"]):
        rows = [v for v in _rows(found["variance"], environment, arm) if v["ratio"] is not None]
        if rows:
            y = [v["ratio"]["value"] for v in rows]
            reach = [
                [v["ratio"]["value"] - v["ratio"]["low"] for v in rows],
                [v["ratio"]["high"] - v["ratio"]["value"] for v in rows],
            ]
            axes.errorbar([v["spent"] for v in rows], y, yerr=reach, color=color, marker="o", capsize=2, label=arm)
    axes.axhline(1, color="0.6", linestyle=":")
    axes.set(xlabel=_column(found), ylabel="variance, flat = 1", yscale="log", title=f"{environment}: gradient")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return plot.svg(figure)


def thresholds(found: Results) -> str:
    """Each seed's steps to the threshold; those that did not get there stand at the budget, hollow."""
    names = list(found["environments"])
    figure = plot.new_figure(9, 0.6 + len(names) * (0.4 + 0.22 * len(found["arms"])))
    for i, environment in enumerate(names):
        amount, axes = found["environments"][environment]["amount"], figure.add_subplot(len(names), 1, i + 1)
        for y, (color, arm) in enumerate(_colored(found["arms"])):
            steps = [r["steps_to_threshold"] for r in _rows(found["runs"], environment, arm)]
            there = [s for s in steps if s is not None]
            axes.plot(there, [y] * len(there), "o", color=color)
            axes.plot(
                [amount] * (len(steps) - len(there)), [y] * (len(steps) - len(there)), ">", color=color, mfc="none"
            )
        axes.set_yticks(range(len(found["arms"])), found["arms"])
        axes.set(
            xlim=(-0.02 * amount, 1.05 * amount),
            title=f"{environment}: {found['environments'][environment]['threshold']:.0%}",
        )
        axes.invert_yaxis()
    figure.supxlabel(f"{_column(found)}; hollow: not reached within the budget")
    return plot.svg(figure)


def _comparisons(found: Results) -> str:
    head = [
        "comparison",
        "environment",
        "area",
        "t interval",
        "bootstrap",
        "p",
        "final test",
        "t interval",
        "each seed",
    ]
    rows = []
    for c in found["comparisons"]:
        a, f = c["area"], c["final"]
        each = " ".join(f"{100 * d:+.1f}" for d in a["differences"])
        rows.append(
            [
                f"{c['arm']} - {c['against']}", c["environment"], f"{100 * a['mean']:+.1f}", _interval(a["t"]),
                _interval(a["bootstrap"]), f"{a['p']:.3f}", f"{100 * f['mean']:+.1f}", _interval(f["t"]), each,
            ]
        )  # fmt: skip
    return _table(head, rows)


def _summaries(found: Results, environment: str) -> str:
    head = ["arm", "area", "at the budget", "final test", "reached", "median steps", "mean steps within the budget"]
    rows = []
    for s in found["summary"]:
        if s["environment"] == environment:
            steps, median = s["steps"], s["steps"]["median"]
            shown = f"{median:,.0f}" if median is not None else "not reached"
            rows.append(
                [
                    s["arm"],
                    *(f"{100 * s[k]:.1f}" for k in ("area", "last", "final")),
                    *(f"{steps['reached']} of {steps['seeds']}", shown, f"{steps['restricted']:,.0f}"),
                ]
            )
    return _table(head, rows)


def _tuned(found: Results) -> str:
    rows = [
        [
            f"{t['environment']}, {t['arm']}",
            ", ".join(f"{k} = {v}" for k, v in t["values"].items()) or "nothing to choose",
            "; ".join(f"{name}: {100 * score:.1f}" for name, score in t["scores"].items()) or "-",
        ]
        for t in found["tuned"]
    ]
    return _table(["environment, arm", "chosen", "area of the candidates"], rows)


def _ledger(found: Results) -> str:
    """Means over seeds; every run's own ledger is in the JSON file."""
    summary = found["summary"]
    columns = [c for c in summary[0]["ledger"] if any(s["ledger"][c] for s in summary)]
    rows = [
        [f"{s['environment']}, {s['arm']}", *(f"{s['ledger'][c]:,.0f}" for c in columns)] for s in summary
    ]  # evaluations included, as in every ledger
    note = '<p class="note">Means over seeds, evaluations included. The common starts are booked apart (JSON).</p>'
    return note + _table(["environment, arm", *(c.replace("_", " ") for c in columns)], rows)


def _endpoint_note(found: Results) -> str:
    return (
        '<p class="note">Points of success (0 to 100), paired over seeds. Area: mean success on validation from the '
        f"start to the budget of {escape(_column(found))}. Intervals of {found['decision']['level']:.0%}; the "
        "bootstrap's is too narrow with few seeds. p: all sign flips.</p>"
    )


def _deviations(deviations: Sequence[Row]) -> str:
    if not deviations:
        return '<p class="note">No deviation from what was frozen.</p>'
    shown = []
    for d in deviations:
        changes = "; ".join(f"{k} = {v}" for k, v in d["changes"].items())
        text = f"Deviation of {d['date']} (recorded {d['recorded']}): {d['what']}" + (
            f" [{changes}]" if changes else ""
        )
        shown.append(f'<p class="deviation">{escape(text)}</p>')
    return "".join(shown)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    top = "".join(f"<th>{escape(h)}</th>" for h in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(c)}</td>" for c in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"


def _rows(rows: Iterable[Row], environment: str, arm: str) -> list[Row]:
    return [r for r in rows if (r["environment"], r["arm"]) == (environment, arm)]


def _colored(arms: Sequence[str]) -> list[tuple[str, str]]:
    """A color of matplotlib's cycle for each arm."""
    return [(f"C{i % 10}", arm) for i, arm in enumerate(arms)]


def _column(found: Results) -> str:
    return str(found["column"]).replace("_", " ")


def _interval(bounds: Sequence[float]) -> str:
    return f"{100 * bounds[0]:+.1f} to {100 * bounds[1]:+.1f}"


def _points(p: Row) -> str:
    return f"{100 * p['mean']:+.1f} ({_interval(p['t'])})"
