"""Pictures: the learning curve, and figures for pages. The only file that imports matplotlib (extra ``train``)."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from branchpoint.store import replace


def new_figure(width: float, height: float) -> Any:
    """An empty matplotlib figure (inches) that needs no display. Raises ModuleNotFoundError without the extra."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError as e:
        raise ModuleNotFoundError('plots need matplotlib: pip install "branchpoint[train]"') from e
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def svg(figure: Any) -> str:
    """A figure as an ``<svg>`` element to put into a page; equal figures give equal text."""
    import matplotlib

    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "branchpoint", "svg.fonttype": "none"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def learning_curve(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Training score per update and true success on held-out tasks, as a PNG. Needs the extra ``train``."""
    figure = new_figure(8, 4.5)
    axes = figure.add_subplot()
    trained = [r for r in rows if "score" in r]
    axes.plot([r["update"] for r in trained], [r["success"] for r in trained], color="0.7", label="training (sampled)")
    names = sorted({k for r in rows for k in r if k.startswith("eval/")})
    for name in names:
        points = [(r["update"], r[name]) for r in rows if name in r]
        axes.plot(*zip(*points, strict=True), marker="o", label=f"held-out {name.removeprefix('eval/')}")
    axes.set(xlabel="update", ylabel="success", ylim=(-0.02, 1.02), title="Learning curve")
    axes.grid(alpha=0.3)
    axes.legend(loc="best")
    replace(path, lambda p: figure.savefig(p, format="png", dpi=110))
