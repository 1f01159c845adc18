"""PNG plots of a run, one a panel, in the order of `rayapp.runs.view.panels`. Drawn with matplotlib, without a
display."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rayapp.runs.view.panels import Panel

COLOURS = ("#1f5fbf", "#c2500a", "#1b7a46", "#8a3ab0", "#b0186e", "#7a6200", "#0a7683", "#66513d")
# Any: the stubs of matplotlib want a literal type of every key it has.
_STYLE: Any = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#8a8a82",
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": "#e2e2dc",
    "legend.frameon": False,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Curves:
    """A panel with its data: metric -> {"steps": [...], "values": [...]}."""

    panel: Panel
    curves: dict[str, dict[str, list[float]]]


def draw_panels(panels: list[Curves], folder: Path) -> dict[str, Path]:
    """Write `<title>.png` for each panel.

    Returns:
        The files by title, in the panels' order.
    """
    import matplotlib

    matplotlib.use("Agg")
    with matplotlib.rc_context(_STYLE):
        return {one.panel.title: _draw(one, folder) for one in panels}


def _draw(one: Curves, folder: Path) -> Path:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6.4, 3.2))
    try:
        for number, (key, curve) in enumerate(one.curves.items()):
            marker = "o" if len(curve["steps"]) == 1 else None
            colour = COLOURS[number % len(COLOURS)]
            axes.plot(curve["steps"], curve["values"], color=colour, linewidth=1.6, marker=marker, label=key)
        _dress(axes, one.panel)
        figure.tight_layout()
        path = folder / f"{re.sub(r'[^a-z0-9]+', '-', one.panel.title.lower()).strip('-')}.png"
        pending = path.with_name(f".{path.name}.pending.png")
        figure.savefig(pending, dpi=120)
        pending.replace(path)
    finally:
        pyplot.close(figure)
    return path


def _dress(axes: Any, panel: Panel) -> None:
    axes.set_title(panel.title, loc="left", fontweight="bold", fontsize=10)
    axes.set_xlabel("optimizer step")
    if panel.unit:
        axes.set_ylabel(panel.unit)
    if panel.floor is not None and panel.ceiling is not None:
        margin = (panel.ceiling - panel.floor) * 0.03
        axes.set_ylim(panel.floor - margin, panel.ceiling + margin)
    # Keys that begin with an underscore would be left out of the legend; ours never do.
    axes.legend(fontsize=7, ncols=2, loc="best")
