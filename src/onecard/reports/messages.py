"""explain: every message of a program, with the operator and the line that need it; and a way to forbid them."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

from onecard.comm.base import record
from onecard.comm.base.own import OwnSent, listening
from onecard.comm.base.record import Notice
from onecard.comm.base.state import machine
from onecard.errors import ImplicitCommunication
from onecard.place.layout import as_code


class _Printed(Table):
    """A table that prints itself as text."""

    def __str__(self) -> str:
        out = io.StringIO()
        Console(file=out, width=170).print(self)
        return out.getvalue()


@dataclass
class Report:
    """The messages of a ``with onecard.explain()`` block on this rank.

    Attributes:
        steps: for each step of the program (see ``next_step``) its messages in order.
        own: messages that the program sends itself with ``torch.distributed``; totals are without them.

    Example:
        >>> report = Report()
        >>> report.messages, report.bytes, report.seconds
        ([], 0, 0)
    """

    steps: list[list[Notice]] = field(default_factory=lambda: [[]])
    own: list[OwnSent] = field(default_factory=list)

    @property
    def messages(self) -> list[Notice]:
        """All messages, slices and fills (0 bytes) included."""
        return [message for step in self.steps for message in step]

    @property
    def bytes(self) -> int:
        """Bytes that this rank sent."""
        return sum(message.step.bytes for message in self.messages)

    @property
    def between_hosts(self) -> int:
        """Those of them that leave the host, where all ranks send alike; 0 where hosts have not as many ranks each."""
        return sum(map(_between_hosts, self.messages))

    @property
    def seconds(self) -> float:
        """Time that the cost model expects for them."""
        return sum(message.step.seconds for message in self.messages)

    def next_step(self) -> None:
        """Begin another step: messages from here on are totalled on their own."""
        self.steps.append([])

    def table(self) -> Table:
        """One row for each message; ``print`` shows it."""
        table = _Printed(title="messages of this rank", title_justify="left")
        for name in ("operator", "line", "tensor", "from", "to", "collective", "axis"):
            table.add_column(name, overflow="fold")
        table.add_column("bytes", justify="right")
        table.add_column("est. us", justify="right")
        table.add_column("why", overflow="fold")
        for message in self.messages:
            table.add_row(*_cells(message))
        return table

    def totals(self) -> Table:
        """Bytes and expected time by step and collective; ``print`` shows it."""
        table = _Printed(title="totals", title_justify="left")
        for name in ("step", "collective", "axis", "messages", "bytes", "est. us"):
            table.add_column(name, justify="left" if name in ("collective", "axis") else "right")
        for number, step in enumerate(self.steps):
            for (kind, axis), members in sorted(_grouped(step).items()):
                sent, time = sum(m.step.bytes for m in members), sum(m.step.seconds for m in members)
                table.add_row(str(number), kind, axis, str(len(members)), f"{sent:,}", f"{time * 1e6:.0f}")
        return table

    def __str__(self) -> str:
        far = f", {self.between_hosts:,} of them to other hosts" if self.between_hosts else ""
        own = "".join(f"and {sent}{f', {n} times' if n > 1 else ''}\n" for sent, n in Counter(self.own).items())
        return f"{self.table()}{self.totals()}sent {self.bytes:,} bytes{far}, about {self.seconds * 1e6:.0f} us\n{own}"


def _cells(message: Notice) -> list[str]:
    step = message.step
    file, _, line = message.source.rpartition(":")
    tensor = f"{message.operand} {list(message.shape)}" + (f" x{message.tensors}" if message.tensors > 1 else "")
    kind = step.kind + (f"({step.op})" if step.op else "")
    return [
        message.operator,
        f"{Path(file).name}:{line}" if file else message.source,
        tensor,
        repr(step.source),
        repr(step.target),
        kind,
        _axis(message),
        f"{step.bytes:,}",
        f"{step.seconds * 1e6:.1f}",
        why(message),
    ]


def _between_hosts(message: Notice) -> int:
    step = message.step
    return machine.here.far(step.bytes, step.source.mesh, step.axis, step.kind) if step.axis >= 0 else 0


def why(message: Notice) -> str:
    """Why the layout must change: the rule's reason, in front of it what could not enter the operator pending."""
    op = message.step.op
    if op and f"{_axis(message)} cuts nothing" in message.reason:
        return f"{message.operator} needs the pending {op} whole; {message.reason}"
    return message.reason


def _axis(message: Notice) -> str:
    """The name of the axis whose ranks take part; between meshes there is none."""
    axis = message.step.axis
    return message.step.source.mesh.dim_names[axis] if axis >= 0 else "between meshes"


def _grouped(messages: list[Notice]) -> dict[tuple[str, str], list[Notice]]:
    groups: dict[tuple[str, str], list[Notice]] = {}
    for message in messages:
        groups.setdefault((message.step.kind, _axis(message)), []).append(message)
    return groups


@contextmanager
def explain() -> Iterator[Report]:
    """List every message that onecard sends inside the block, and those that the program sends itself.

    Yields:
        A Report: ``print(report)`` is a table; ``report.messages``, ``report.bytes``, ``report.seconds``.

    Source: the idea of ``CommDebugMode`` of PyTorch, with operator, line, layouts, bytes and reason.

    Example:
        >>> with explain() as report:
        ...     pass
        >>> report.bytes
        0
    """
    report = Report()

    def observe(message: Notice) -> None:
        report.steps[-1].append(message)

    record.observers.here.append(observe)
    try:
        with listening(report.own.append):
            yield report
    finally:
        record.observers.here.remove(observe)


@contextmanager
def no_implicit_communication() -> Iterator[None]:
    """Raise at the first message that an operator needs and the program did not ask for. Local slices are free.

    Raises:
        ImplicitCommunication: with the operator, the line, the layouts and the call that asks for it.

    Source: the idea of ``torch.distributed.tensor._utils.ExplicitRedistributionContext``.

    Example:
        >>> import torch
        >>> from onecard import ProcessMesh, Shard, shard_tensor
        >>> x = shard_tensor(torch.ones(2, 2), ProcessMesh([0], ["x"]), [Shard(0)])
        >>> with no_implicit_communication():
        ...     print((x @ x).shape)
        torch.Size([2, 2])
    """

    def forbid(message: Notice) -> None:
        step = message.step
        if message.explicit or not step.bytes:
            return
        wanted = ", ".join(as_code(p) for p in step.target.in_one_piece().placements)
        raise ImplicitCommunication(
            f"{message.operator} at {message.source} needs {step.kind} of {step.bytes:,} bytes on axis "
            f"{_axis(message)!r}: its operand {message.operand!r} {list(message.shape)} is "
            f"[{step.source}] and must become [{step.target}] ({why(message)}). To allow it, ask for it: "
            f"x = onecard.reshard(x, mesh, [{wanted}])"
        )

    record.observers.here.append(forbid)
    try:
        yield
    finally:
        record.observers.here.remove(forbid)
