"""draw_text, draw_figure, draw_trace: a schedule, or a measured run, or several side by side, as timelines."""

from __future__ import annotations

from collections.abc import Callable
from os import PathLike
from pathlib import Path

from rich.text import Text

from onecard.errors import ScheduleError
from onecard.machine.events import Event, Panel, write_trace
from onecard.machine.pictures import text_of, write_figure
from onecard.pipeline.schedule.action import Schedule
from onecard.pipeline.schedule.timing import Span, Timeline, Times, simulate

# Told apart by people with any of the common kinds of colour blindness: Okabe and Ito (2008).
WORDS = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}
COLOURS = dict(zip(WORDS.values(), ("#56b4e9", "#e69f00", "#f0e442", "#009e73"), strict=True))


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
    return text_of(_panel(timeline, _labels(timeline)), COLOURS, width)


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
    timelines = [timeline_of(panel, times) for panel in panels]
    drawn = [_panel(timeline, lambda span: str(span.action.microbatch), unit) for timeline in timelines]
    write_figure(path, drawn, COLOURS, unit)


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
    timelines = [timeline_of(panel, times) for panel in panels]
    named = [_panel(timeline, lambda span: f"{span.action.kind} {span.action.microbatch}") for timeline in timelines]
    write_trace(path, named, microseconds)


def _panel(timeline: Timeline, named: Callable[[Span], str], unit: str = "") -> Panel:
    """A timeline's computations as events."""
    chunk_of = _chunks(timeline)
    events = tuple(
        Event(
            rank, "", start, end, name=named(span), kind=WORDS[action.kind], shade=chunk_of(span),
            told={"action": str(action), "stage": action.stage, "microbatch": action.microbatch},
        )
        for span in timeline.computing for rank, action, start, end in [span]
    )  # fmt: skip
    return Panel(title_of(timeline, unit), events)


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
