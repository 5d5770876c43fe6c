"""Event: something that took time on a rank, simulated, priced or measured; pictures and traces are made of events. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Event:
    """Something that took time on a rank.

    Attributes:
        rank: whose it is; ``stream``: what of the rank it kept busy (operators, messages along an axis); "" for all of it.
        begin, end: in the unit of who made it: seconds where it was measured or priced.
        bytes: that it sent.
        name: as pictures show it.
        kind: what it is coloured by, such as forward; ``shade``: how light, as of a rank's second stage.
        told: what a trace says of it.

    Example:
        >>> Event(0, "", 1.0, 3.5, name="F0").seconds
        2.5
    """

    rank: int
    stream: str
    begin: float
    end: float
    bytes: int = 0
    name: str = ""
    kind: str = ""
    shade: int = 0
    told: Mapping[str, Any] = field(default_factory=dict)

    @property
    def start(self) -> float:
        """When it began."""
        return self.begin

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class Panel:
    """Events that are shown together.

    Attributes:
        title: above them.
        events: in any order; times count from the first one's begin.
        counted: (name, ((time, value), ...)): what a trace shows over time beside them.
    """

    title: str
    events: tuple[Event, ...]
    counted: tuple[tuple[str, tuple[tuple[float, float], ...]], ...] = ()

    @property
    def zero(self) -> float:
        """When the first event begins."""
        return min((event.begin for event in self.events), default=0.0)

    @property
    def length(self) -> float:
        """From the first begin to the last end."""
        return max((event.end for event in self.events), default=0.0) - self.zero

    def rows(self) -> dict[str, list[Event]]:
        """For each stream of each rank its events in order of time, and what it is called."""
        found: dict[tuple[int, str], list[Event]] = {}
        for event in sorted(self.events, key=lambda event: event.rank):
            found.setdefault((event.rank, event.stream), []).append(event)
        several = len({rank for rank, _ in found}) > 1
        named = {
            key: f"rank {key[0]}" if not key[1] else f"rank {key[0]}, {key[1]}" if several else key[1] for key in found
        }
        return {named[key]: sorted(events, key=lambda e: (e.begin, e.end)) for key, events in found.items()}


def write_trace(path: str | PathLike[str], panels: Iterable[Panel], microseconds: float = 1e6) -> None:
    """Write a trace for chrome://tracing or ui.perfetto.dev: a process for each panel, a thread for each row.

    Args:
        path: the JSON file to write.
        microseconds: what a unit of time is.
    """
    events = [event for i, panel in enumerate(panels) for event in _traced(panel, i, microseconds)]
    Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), encoding="utf-8")


def _traced(panel: Panel, process: int, microseconds: float) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "name": "process_name", "pid": process, "args": {"name": panel.title}}
    for thread, (name, events) in enumerate(panel.rows().items()):
        yield {"ph": "M", "name": "thread_name", "pid": process, "tid": thread, "args": {"name": name}}
        for event in events:
            yield {
                "ph": "X", "name": event.name, "cat": event.kind, "pid": process, "tid": thread,
                "ts": (event.begin - panel.zero) * microseconds, "dur": event.seconds * microseconds, "args": dict(event.told),
            }  # fmt: skip
    for what, values in panel.counted:
        for moment, value in values:
            yield {
                "ph": "C", "name": what, "pid": process, "ts": (moment - panel.zero) * microseconds, "args": {"bytes": value},
            }  # fmt: skip


def kinds_of(panels: Sequence[Panel]) -> set[str]:
    """Those of all events."""
    return {event.kind for panel in panels for event in panel.events}
