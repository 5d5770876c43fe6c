"""Panels of events as text and as pictures: one row for each rank and stream, on one axis of time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.text import Text

from onecard.machine.events import Panel, kinds_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Colours = Mapping[str, str]  # of each kind of event, as "#rrggbb"


def text_of(panel: Panel, colours: Colours, width: int | None = None) -> Text:
    """A panel as text, one line for each row; coloured where rich prints it, plain for ``print``.

    Args:
        width: columns to fit it into; by default as many as the names need, but for those of very short events.
    """
    zero, rows = panel.zero, panel.rows()
    lengths = [event.seconds for event in panel.events]
    least = sum(lengths) / max(1, 10 * len(lengths))  # what is far shorter, in a measured run, gets one letter
    shortest = min((length for length in lengths if length > least), default=1.0)
    columns = (1 + max((len(event.name) for event in panel.events), default=1)) / shortest
    begins = [(event.begin - zero) * columns for event in panel.events]
    if any(abs(begin - round(begin)) > 1e-6 for begin in begins):
        columns += 1 / shortest  # rounding costs a name at most one column
    heads = [head.removeprefix("rank ") for head in rows]
    margin = max(map(len, heads), default=1) + 2
    if width is not None and panel.length:
        columns = min(columns, (width - margin) / panel.length)
    text = Text(panel.title)
    for head, line in zip(heads, rows.values(), strict=True):
        text.append(f"\n{head:>{margin - 2}} │")
        at = 0
        for event in line:
            start, end = (round((moment - zero) * columns) for moment in (event.begin, event.end))
            if width is not None and (start < at or start >= width - margin):
                continue  # too short for a letter of its own: the row has no room for it
            text.append(" " * max(0, start - at))
            text.append(_cell(event.name, end - start - 1), style=f"black on {colours[event.kind]}")
            at = start + max(1, end - start - 1)
    return text


def _cell(name: str, size: int) -> str:
    """A name in so many columns, or its first letter where it does not fit."""
    return (name if len(name) <= size else name[:1]).ljust(size, "─")


def write_figure(path: str | PathLike[str], panels: Sequence[Panel], colours: Colours, unit: str = "") -> None:
    """Write panels, one below the other on one axis of time, as PNG, SVG or PDF by the file's ending.

    Args:
        colours: those that are there make the legend. In a box stands its event's name, where it would be legible.
        unit: of the times, for the axis.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError("draw_figure needs matplotlib, an extra of onecard: pip install 'onecard[plot]'") from None
    heights = [0.55 + 0.32 * len(panel.rows()) for panel in panels]
    # Fixed: else ids and the date differ from run to run, and so does the file.
    with matplotlib.rc_context({"svg.hashsalt": "onecard", "svg.fonttype": "none", "font.size": 9}):
        figure = Figure(figsize=(13, sum(heights) + 0.9), layout="constrained")
        axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
        longest = max(panel.length for panel in panels)
        for axis, panel in zip(axes, panels, strict=True):
            _draw_panel(axis, panel, longest, colours)
        axes[-1].set_xlabel(f"time ({unit})" if unit else "time")
        _draw_legend(figure, panels, colours)
        figure.savefig(path, dpi=150, metadata={"Date": None} if Path(path).suffix == ".svg" else None)


def _draw_panel(axis: Axes, panel: Panel, longest: float, colours: Colours) -> None:
    rows, zero = panel.rows(), panel.zero
    size_of = _label_sizes(panel, 12.0 / (longest or 1.0))
    for row, line in enumerate(rows.values()):
        looks: dict[tuple[str, int], list[tuple[float, float]]] = {}
        for event in line:
            looks.setdefault((event.kind, event.shade), []).append((event.begin - zero, event.seconds))
            if size_of[event.kind]:
                centre = (event.begin + event.end) / 2 - zero
                axis.text(centre, row, event.name, ha="center", va="center", fontsize=size_of[event.kind])
        for (kind, shade), bars in looks.items():
            face = _shaded(colours[kind], shade)
            axis.broken_barh(bars, (row - 0.42, 0.84), facecolor=face, edgecolor="#333333", linewidth=0.4)
    axis.set_xlim(0, longest or 1.0)
    axis.set_ylim(len(rows) - 0.4, -0.6)
    axis.set_yticks(range(len(rows)), list(rows))
    axis.tick_params(left=False)
    axis.set_title(panel.title, loc="left", fontsize=10)
    axis.spines[["top", "right", "left"]].set_visible(False)


def _label_sizes(panel: Panel, inches: float) -> dict[str, float]:
    """For each kind the size of its labels in points; 0 if the longest would not be legible in its box."""
    letters = max((len(event.name) for event in panel.events), default=1)
    sizes = {}
    for kind in kinds_of([panel]):
        narrowest = min(event.seconds for event in panel.events if event.kind == kind)
        points = narrowest * inches * 100 / letters  # a digit is about 0.64 as wide as high, a point 1/72 inch
        sizes[kind] = 0.0 if points < 5.5 else min(points, 8.0)
    return sizes


def _draw_legend(figure: Any, panels: Sequence[Panel], colours: Colours) -> None:
    from matplotlib.patches import Patch

    kinds = kinds_of(panels)
    shades = 1 + max((event.shade for panel in panels for event in panel.events), default=0)
    patches = [
        Patch(
            facecolor=_shaded(colour, shade), edgecolor="#333333", linewidth=0.4,
            label=kind if shades == 1 else f"{kind}, chunk {shade}",
        )
        for kind, colour in colours.items() if kind in kinds for shade in range(shades)
    ]  # fmt: skip
    figure.legend(handles=patches, loc="outside lower center", ncols=len(kinds), frameon=False)


def _shaded(colour: str, shade: int) -> tuple[float, float, float]:
    """A colour, lighter for each later stage of a rank."""
    part = 0.55**shade
    red, green, blue = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    return 1 - part * (1 - red), 1 - part * (1 - green), 1 - part * (1 - blue)
