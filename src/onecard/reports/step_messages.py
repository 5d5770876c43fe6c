"""The messages of one recorded step of one rank: for each the line that needs it, what is sent, how long it takes and why."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onecard.comm.base.record import Notice
from onecard.planning.job import bytes_in_words, seconds_in_words
from onecard.reports.messages import why
from onecard.static.price.messages import axis_of, is_message, kind_of
from onecard.static.price.price import Cost
from onecard.static.step.step import RecordedStep

if TYPE_CHECKING:  # rich is loaded by what prints
    from rich.console import Group

VERSION = 1
ASKED = "the program calls it"


@dataclass(frozen=True, slots=True)
class Sent:
    """One message.

    Attributes:
        phase, module, line: where the program is; operator: what needs it; tensor: of which of its operands.
        collective, axis: what is sent along which mesh axis, or group of ranks; bytes: from this rank; far: those of them that
            leave the host; seconds: on the machine.
        source, target: the layouts, where onecard sends it; why: the rule's reason; implicit: whether nobody asked for it.
    """

    phase: str
    module: str
    line: str
    operator: str
    tensor: str
    collective: str
    axis: str
    bytes: int
    far: int
    seconds: float
    source: str
    target: str
    why: str
    implicit: bool

    def data(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    @property
    def place(self) -> tuple[Any, ...]:
        """What messages of one line that are alike have in common."""
        return (
            self.phase, self.line, self.operator, self.collective, self.axis, self.bytes, self.source, self.target, self.why
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class StepMessages:
    """The messages of a step of one rank; ``print`` it for a table.

    Attributes:
        rank, world: which rank of how many; machine: what they are priced on; messages: in order.
    """

    rank: int
    world: int
    machine: str
    messages: tuple[Sent, ...]

    @property
    def implicit(self) -> tuple[Sent, ...]:
        """Those that the program did not ask for."""
        return tuple(sent for sent in self.messages if sent.implicit)

    @property
    def by_axis(self) -> dict[str, int]:
        """Bytes that this rank sends along each axis."""
        found: dict[str, int] = {}
        for sent in self.messages:
            found[sent.axis] = found.get(sent.axis, 0) + sent.bytes
        return found

    def data(self) -> dict[str, Any]:
        """All of it as JSON can hold it."""
        return {
            "onecard": "StepMessages", "version": VERSION, "rank": self.rank, "world": self.world, "machine": self.machine,
            "sent": self.by_axis, "messages": [sent.data() for sent in self.messages],
        }  # fmt: skip

    def __str__(self) -> str:
        from rich.console import Console

        text = StringIO()
        Console(file=text, width=170).print(self)
        return text.getvalue().rstrip()

    def __rich__(self) -> Group:
        from rich.console import Group
        from rich.table import Table

        of = f"rank {self.rank} of {self.world:,}"
        if not self.messages:
            return Group(f"a step of {of} sends nothing")
        made = Table()
        for name in ("phase", "line", "operator", "tensor", "collective", "axis"):
            made.add_column(name, overflow="fold")
        for name in ("times", "bytes", "time"):
            made.add_column(name, justify="right")
        made.add_column("why", overflow="fold")
        for sent, times in _alike(self.messages):
            more = f" and {times - 1} more" if times > 1 and sent.tensor else ""
            made.add_row(
                sent.phase, _short(sent.line), sent.operator, sent.tensor + more, sent.collective, sent.axis, f"{times}",
                f"{sent.bytes * times:,}", seconds_in_words(sent.seconds * times), sent.why,
            )  # fmt: skip
        total = ", ".join(f"{bytes_in_words(count)} along {axis!r}" for axis, count in self.by_axis.items())
        far = sum(sent.far for sent in self.messages)
        total += f", {bytes_in_words(far)} of it to other hosts" if far else ""
        count = f"{len(self.messages)} message{'s' * (len(self.messages) > 1)}"
        head = f"a step of {of} on {self.machine or 'a machine'}: {count}, {total}"
        return Group(head, made)


def _alike(messages: tuple[Sent, ...]) -> Iterator[tuple[Sent, int]]:
    times: dict[tuple[Any, ...], int] = {}
    first: dict[tuple[Any, ...], Sent] = {}
    for sent in messages:
        first.setdefault(sent.place, sent)
        times[sent.place] = times.get(sent.place, 0) + 1
    for place, sent in first.items():
        yield sent, times[place]


def _short(line: str) -> str:
    file, _, number = line.rpartition(":")
    return f"{Path(file).name}:{number}" if file else line


def step_messages(step: RecordedStep, cost: Cost, asked: Mapping[str, Notice], rank: int, world: int) -> StepMessages:
    """The messages of a recording.

    Args:
        step, cost: the recording, and its price, node by node.
        asked: for names of nodes what needs the message, where onecard sends it.
    """
    found = []
    for node, priced in zip(step.nodes(), cost.nodes, strict=True):
        if not is_message(node):
            continue
        need = asked.get(node.name)
        source, target = ("", "") if need is None else (repr(need.step.source), repr(need.step.target))
        found.append(
            Sent(
                priced.phase,
                priced.module,
                priced.line if need is None else need.source,
                "" if need is None else need.operator,
                "" if need is None else _tensor(need),
                kind_of(node).removesuffix("_into_tensor").removesuffix("_tensor").removesuffix("_single"),
                axis_of(node),
                priced.sent,
                priced.far,
                priced.seconds,
                source,
                target,
                ASKED if need is None else why(need),
                need is not None and not need.explicit,
            )
        )
    return StepMessages(rank, world, cost.machine.name, tuple(found))


def _tensor(need: Notice) -> str:
    return f"{need.operand} {list(need.shape)}" + (f" x{need.tensors}" if need.tensors > 1 else "")
