"""draw_text, draw_figure, draw_trace: a schedule, or a measured run, or several side by side, as timelines."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.text import Text

from onecard.errors import ScheduleError
from onecard.pipeline.action import Schedule
from onecard.pipeline.timing import Span, Timeline, Times, simulate

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Told apart by people with any of the common kinds of colour blindness: Okabe and Ito (2008).
COLOURS = {"F": "#56b4e9", "B": "#e69f00", "I": "#f0e442", "W": "#009e73"}
WORDS = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}


def draw_text(what: Schedule | Timeline, times: Times | None = None, width: int | None = None) -> Text:
    """The timeline as text, one line for each rank; coloured where rich prints it, plain for ``print``.

    A label is the kind, the microbatch, and, where a rank has several stages, a letter for the stage (a is the earliest).

    Args:
        what: a schedule, or a timeline such as that of a measured run.
        times: for a schedule, what stages and messages take.
        width: columns to fit it into; by default as many as the labels need, but for those of very short actions.

    Example:
        >>> from onecard.pipeline import one_f_one_b
        >>> print(draw_text(one_f_one_b(2, 3)))
        1F1B: 2 ranks, 3 microbatches, step 12, bubble 25.0%
        0 │F0 F1       B0─── F2 B1───       B2───
        1 │   F0 B0─── F1 B1─── F2 B2───
    """
    timeline = timeline_of(what, times)
    label, lines = _labels(timeline), rows_of(timeline)
    spans = [span for line in lines.values() for span in line]
    lengths = [s.end - s.start for s in spans]
    least = sum(lengths) / max(1, 10 * len(lengths))  # what is far shorter, in a measured run, gets one letter
    shortest = min((length for length in lengths if length > least), default=1.0)
    columns = (1 + max((len(label(s)) for s in spans), default=1)) / shortest
    if any(abs(s.start * columns - round(s.start * columns)) > 1e-6 for s in spans):
        columns += 1 / shortest  # rounding costs a label at most one column
    margin = len(str(max(lines, default=0))) + 2
    if width is not None and timeline.makespan:
        columns = min(columns, (width - margin) / timeline.makespan)
    text = Text(title_of(timeline))
    for rank, line in lines.items():
        text.append(f"\n{rank:>{margin - 2}} │")
        at = 0
        for span in line:
            start, end = round(span.start * columns), round(span.end * columns)
            text.append(" " * max(0, start - at))
            text.append(_cell(label(span), end - start - 1), style=f"black on {COLOURS[span.action.kind]}")
            at = start + max(1, end - start - 1)
    return text


def _cell(label: str, size: int) -> str:
    """A label in so many columns, or its first letter where it does not fit."""
    return (label if len(label) <= size else label[:1]).ljust(size, "─")


def draw_figure(
    path: str | PathLike[str], *panels: Schedule | Timeline, times: Times | None = None, unit: str = ""
) -> None:
    """Write the timelines, one panel below the other on one axis of time, as PNG, SVG or PDF by the file's ending.

    Args:
        path: the file to write.
        panels: schedules and timelines, such as a schedule and ``Timeline.of(measured)``.
        times: for schedules, what stages and messages take.
        unit: of the times, for the axis.

    Raises:
        ImportError: matplotlib is not installed.
        ScheduleError: another ending, or nothing to draw.
    """
    suffix = Path(path).suffix
    if suffix not in (".png", ".svg", ".pdf"):
        raise ScheduleError(f"draw_figure({str(path)!r}): the ending says the format: .png, .svg or .pdf")
    if not panels:
        raise ScheduleError("draw_figure: nothing to draw: give a schedule or a timeline after the path")
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError("draw_figure needs matplotlib, an extra of onecard: pip install 'onecard[plot]'") from None
    timelines = [timeline_of(panel, times) for panel in panels]
    heights = [0.55 + 0.32 * len(rows_of(timeline)) for timeline in timelines]
    # Fixed: else ids and the date differ from run to run, and so does the file.
    with matplotlib.rc_context({"svg.hashsalt": "onecard", "svg.fonttype": "none", "font.size": 9}):
        figure = Figure(figsize=(13, sum(heights) + 0.9), layout="constrained")
        axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
        longest = max(timeline.makespan for timeline in timelines)
        for axis, timeline in zip(axes, timelines, strict=True):
            _draw_panel(axis, timeline, longest, unit)
        axes[-1].set_xlabel(f"time ({unit})" if unit else "time")
        _draw_legend(figure, timelines)
        figure.savefig(path, dpi=150, metadata={"Date": None} if suffix == ".svg" else None)


def _draw_panel(axis: Axes, timeline: Timeline, longest: float, unit: str) -> None:
    lines, chunk_of = rows_of(timeline), _chunks(timeline)
    size_of = _number_sizes(timeline, 12.0 / (longest or 1.0))
    for row, line in enumerate(lines.values()):
        looks: dict[tuple[str, int], list[tuple[float, float]]] = {}
        for span in line:
            kind, _, microbatch = span.action
            looks.setdefault((kind, chunk_of(span)), []).append((span.start, span.end - span.start))
            if size_of[kind]:
                centre = (span.start + span.end) / 2
                axis.text(centre, row, str(microbatch), ha="center", va="center", fontsize=size_of[kind])
        for (kind, chunk), bars in looks.items():
            axis.broken_barh(
                bars, (row - 0.42, 0.84), facecolor=_shade(COLOURS[kind], chunk), edgecolor="#333333", linewidth=0.4
            )
    axis.set_xlim(0, longest or 1.0)
    axis.set_ylim(len(lines) - 0.4, -0.6)
    axis.set_yticks(range(len(lines)), [f"rank {rank}" for rank in lines])
    axis.tick_params(left=False)
    axis.set_title(title_of(timeline, unit), loc="left", fontsize=10)
    axis.spines[["top", "right", "left"]].set_visible(False)


def _number_sizes(timeline: Timeline, inches: float) -> dict[str, float]:
    """For each kind the size of its microbatches' numbers in points; 0 if the longest would not be legible in its box."""
    digits = len(str(max((span.action.microbatch for span in timeline.computing), default=0)))
    sizes = {}
    for kind in COLOURS:
        narrowest = min((s.end - s.start for s in timeline.computing if s.action.kind == kind), default=0.0)
        points = narrowest * inches * 100 / digits  # a digit is about 0.64 as wide as high, a point 1/72 inch
        sizes[kind] = 0.0 if points < 5.5 else min(points, 8.0)
    return sizes


def _draw_legend(figure: Any, timelines: list[Timeline]) -> None:
    from matplotlib.patches import Patch

    kinds = {span.action.kind for timeline in timelines for span in timeline.computing}
    chunks = max(len(stages) for timeline in timelines for stages in _stages(timeline).values())
    patches = [
        Patch(facecolor=_shade(COLOURS[kind], chunk), edgecolor="#333333", linewidth=0.4, label=_named(kind, chunk, chunks))
        for kind in COLOURS if kind in kinds for chunk in range(chunks)
    ]  # fmt: skip
    figure.legend(handles=patches, loc="outside lower center", ncols=len(kinds), frameon=False)


def _named(kind: str, chunk: int, chunks: int) -> str:
    return WORDS[kind] if chunks == 1 else f"{WORDS[kind]}, chunk {chunk}"


def _shade(colour: str, chunk: int) -> tuple[float, float, float]:
    """A colour, lighter for each later chunk of a rank."""
    part = 0.55**chunk
    red, green, blue = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    return 1 - part * (1 - red), 1 - part * (1 - green), 1 - part * (1 - blue)


def draw_trace(
    path: str | PathLike[str], *panels: Schedule | Timeline, times: Times | None = None, microseconds: float = 1.0
) -> None:
    """Write the timelines as a trace for chrome://tracing or ui.perfetto.dev: one process each, ranks as threads.

    Args:
        path: the JSON file to write.
        panels: schedules and timelines.
        times: for schedules, what stages and messages take.
        microseconds: what a unit of time is; 1000 if times are milliseconds.
    """
    events = [e for i, panel in enumerate(panels) for e in _events(timeline_of(panel, times), i, microseconds)]
    Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), encoding="utf-8")


def _events(timeline: Timeline, process: int, microseconds: float) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "name": "process_name", "pid": process, "args": {"name": title_of(timeline)}}
    for rank, line in rows_of(timeline).items():
        yield {"ph": "M", "name": "thread_name", "pid": process, "tid": rank, "args": {"name": f"rank {rank}"}}
        for span in line:
            kind, stage, microbatch = span.action
            yield {
                "ph": "X", "name": f"{kind} {microbatch}", "cat": WORDS[kind], "pid": process, "tid": rank,
                "ts": span.start * microseconds, "dur": (span.end - span.start) * microseconds,
                "args": {"action": str(span.action), "stage": stage, "microbatch": microbatch},
            }  # fmt: skip


def timeline_of(what: Schedule | Timeline, times: Times | None) -> Timeline:
    """A timeline as it is, or the simulated one of a schedule."""
    return what if isinstance(what, Timeline) else simulate(what, times)


def title_of(timeline: Timeline, unit: str = "") -> str:
    """What it is, its size, how long a step takes and how much of it is bubble."""
    microbatches, ranks = len({span.action.microbatch for span in timeline.computing}), len(timeline.per_rank)
    step = f"{timeline.step:.6g} {unit}".rstrip()
    return (
        f"{timeline.name}: {ranks} ranks, {microbatches} microbatches, step {step}, bubble {timeline.bubble_rate:.1%}"
    )


def rows_of(timeline: Timeline) -> dict[int, list[Span]]:
    """For each rank its computations in order of time, from 0 on."""
    zero = min((start for start, _, _ in timeline.per_rank.values()), default=0.0)
    rows: dict[int, list[Span]] = {rank: [] for rank in timeline.per_rank}
    for span in sorted(timeline.computing, key=lambda span: (span.start, span.end)):
        rows[span.rank].append(span._replace(start=span.start - zero, end=span.end - zero))
    return rows


def _stages(timeline: Timeline) -> dict[int, list[int]]:
    """For each rank its stages in order."""
    found: dict[int, set[int]] = {rank: set() for rank in timeline.per_rank}
    for span in timeline.computing:
        found[span.rank].add(span.action.stage)
    return {rank: sorted(stages) for rank, stages in found.items()}


def _chunks(timeline: Timeline) -> Callable[[Span], int]:
    place = {(rank, stage): i for rank, stages in _stages(timeline).items() for i, stage in enumerate(stages)}
    return lambda span: place[span.rank, span.action.stage]


def _labels(timeline: Timeline) -> Callable[[Span], str]:
    several, chunk_of = any(len(s) > 1 for s in _stages(timeline).values()), _chunks(timeline)
    letters = "abcdefghijklmnopqrstuvwxyz"
    return lambda s: f"{s.action.kind}{s.action.microbatch}" + (letters[chunk_of(s) % 26] if several else "")
