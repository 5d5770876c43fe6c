"""Links between neighbouring stages on two ranks: packets and their gradients, each tensor a message with a tag of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from onecard.comm.base import failed
from onecard.comm.base.state import Kept
from onecard.comm.issue import started
from onecard.comm.issue.handle import Handle
from onecard.comm.issue.ranks import Ranks
from onecard.comm.world import pretend
from onecard.errors import ScheduleError
from onecard.pipeline.run.packets import PacketForm, PacketSlot
from onecard.pipeline.schedule.action import Action

HEADER = 2048  # bytes of the message that says a packet's form; a longer form has a second one
_FORWARD, _BACKWARD, _FORM, LOSS = range(4)
_THERE = 2  # the place of the message that says which gradients there are, beside those of a form


_STEPS = 512
STEP, EVALUATION = _NAMES = "a step of the pipeline", "an evaluation of the pipeline"
_broken: Kept[bool] = Kept(bool)
"""Whether a step has failed, of which messages may lie about."""


def tag(kind: int, stage: int, microbatch: int = 0, place: int = 0) -> int:
    """The tag of one tensor, in this step: what one that failed has sent, or waits for, is nothing of the next one's.

    Those of microbatches 64 apart, and of steps 256 apart, are the same, and keep their order.
    """
    step = failed.doing.here
    # Within a recorded step ranks may do it in other ways: one records it, another one runs it.
    number = 0 if step is None or step.name not in _NAMES else (2 * step.number + _NAMES.index(step.name)) % _STEPS
    return 1 << 29 | number << 20 | (stage % 64) << 14 | kind << 12 | (microbatch % 64) << 6 | place % 64


@contextmanager
def own_messages(group: Ranks) -> Iterator[None]:
    """Around a step, within ``joint_step``: it takes no messages that are left of one that has failed."""
    if _broken.here:
        now = tag(0, 0) >> 20 & _STEPS - 1
        # A neighbour may be some steps ahead, where nobody waits for it.
        old = lambda given: given >> 29 == 1 and (now - (given >> 20)) % _STEPS in range(2, _STEPS // 2, 2)  # noqa: E731
        started.forget(group, old)
    try:
        yield
    except BaseException:
        _broken.here = True
        raise


class ArrivingPacket:
    """A packet under way to here."""

    def __init__(self, messages: list[Handle], form: PacketForm) -> None:
        self._messages, self.form = messages, form

    def wait(self, timeout: float | None) -> list[Tensor]:
        """Its tensors."""
        return [message.wait(timeout) for message in self._messages]


class ArrivingGradients:
    """Gradients under way to here; of those that do not exist None arrives."""

    def __init__(self, there: Handle | None, grads: list[Handle], form: PacketForm) -> None:
        self._there, self._grads, self.form = there, grads, form

    def wait(self, timeout: float | None) -> list[Tensor | None]:
        """They."""
        there = [True] * len(self._grads) if self._there is None else self._there.wait(timeout).tolist()
        grads = [message.wait(timeout) for message in self._grads]
        return [grad if here else None for grad, here in zip(grads, there, strict=True)]


class StageLink:
    """The way between stage ``stage`` and the next, which are on other ranks, in one step.

    The first packet of each kind of microbatch is preceded by its form: both ends know by the batch which kinds there are.
    In a pretended world nothing arrives: what would come is said by ``know``, and is zeros.

    Args:
        stage: the earlier one.
        peer: the place of the other rank in the group.
    """

    def __init__(self, group: Ranks, stage: int, peer: int, device: torch.device) -> None:
        self.group, self.stage, self.peer, self.device = group, stage, peer, device
        self._forms: dict[Any, PacketForm] = {}
        self._expected: dict[Any, PacketForm] = {}
        self._pretends = pretend.pretending()

    def know(self, key: Any, form: PacketForm) -> None:
        """In a pretended world: the form of what would arrive."""
        self._expected[key] = form

    def send(self, action: Action, key: Any, form: PacketForm, tensors: Sequence[Tensor]) -> list[Handle]:
        """Send a packet; its form first, where microbatches of this kind are new."""
        known = self._forms.get(key)
        if known is None:
            self._send_form(form)
            self._forms[key] = form
        elif known != form:
            raise ScheduleError(
                f"{action}: stage {self.stage} returned {_words(form)} for a microbatch, and {_words(known)} before for one of "
                "the same shapes: what it hands on may depend on the shapes of its input only"
            )
        return self._send(_FORWARD, action, tensors)

    def receive(self, action: Action, key: Any, timeout: float | None) -> ArrivingPacket:
        """Begin to receive a packet."""
        form = self._forms.get(key)
        if form is None:
            form = self._receive_form(timeout, self._expected.get(key))
            self._forms[key] = form
        return ArrivingPacket(self._receive(_FORWARD, action, form.slots), form)

    def send_gradients(self, action: Action, key: Any, grads: Sequence[Tensor | None]) -> None:
        """Send the gradients of a packet's tensors back, and which of them there are: what is not there is not zero.

        Optimizers leave alone what has no gradient, and decay what has one of zero. The receives are under way before
        anybody knows, so that in place of a gradient that does not exist anything is sent.
        """
        if not grads:
            return
        slots = [slot for slot in self._forms[key].slots if slot.needs_grad]
        there = torch.tensor([grad is not None for grad in grads], dtype=torch.uint8, device=self.device)
        said = tag(_FORM, self.stage, action.microbatch, _THERE)
        started.isend(there, self.peer, said, self.group, f"pipeline {action}")
        given = zip(slots, grads, strict=True)
        self._send(_BACKWARD, action, [slot.empty(self.device) if g is None else g for slot, g in given])

    def receive_gradients(self, action: Action, form: PacketForm) -> ArrivingGradients:
        """Begin to receive the gradients of those tensors of a packet that want one."""
        slots = [slot for slot in form.slots if slot.needs_grad]
        if not slots:
            return ArrivingGradients(None, [], form)
        there = torch.ones(len(slots), dtype=torch.uint8, device=self.device)
        said = tag(_FORM, self.stage, action.microbatch, _THERE)
        first = started.irecv(there, self.peer, said, self.group, f"pipeline {action}")
        grads = self._receive(_BACKWARD, action, slots)
        return ArrivingGradients(None if self._pretends else first, grads, form)

    def _send(self, kind: int, action: Action, tensors: Sequence[Tensor]) -> list[Handle]:
        tags = [tag(kind, self.stage, action.microbatch, i) for i in range(len(tensors))]
        return [
            started.isend(x.detach(), self.peer, t, self.group, f"pipeline {action}")
            for t, x in zip(tags, tensors, strict=True)
        ]

    def _receive(self, kind: int, action: Action, slots: Sequence[PacketSlot]) -> list[Handle]:
        tags = [tag(kind, self.stage, action.microbatch, i) for i in range(len(slots))]
        return [
            started.irecv(self._place_for(slot), self.peer, t, self.group, f"pipeline {action}")
            for t, slot in zip(tags, slots, strict=True)
        ]

    def _place_for(self, slot: PacketSlot) -> Tensor:
        made = slot.empty(self.device)
        return made.zero_() if self._pretends else made

    def _send_form(self, form: PacketForm) -> None:
        data = form.dumps()
        whole = len(data).to_bytes(8, "little") + data
        for at, part in enumerate((whole[:HEADER].ljust(HEADER, b"\0"), whole[HEADER:])):
            if part:
                message = (
                    self._blank(len(part)) if self._pretends else torch.frombuffer(bytearray(part), dtype=torch.uint8)
                )
                said = tag(_FORM, self.stage, 0, at)
                started.isend(message.to(self.device), self.peer, said, self.group, "pipeline, the form")

    def _receive_form(self, timeout: float | None, expected: PacketForm | None) -> PacketForm:
        """The form that the other end sends; ``expected``: what it would be in a pretended world."""
        head = self._receive_bytes(HEADER, 0, timeout)
        size = len(expected.dumps()) if expected is not None else int.from_bytes(_bytes(head[:8]), "little")
        rest = [self._receive_bytes(8 + size - HEADER, 1, timeout)] if 8 + size > HEADER else []
        return expected or PacketForm.loads(_bytes(torch.cat([head[8:], *rest])[:size]))

    def _receive_bytes(self, size: int, at: int, timeout: float | None) -> Tensor:
        said = tag(_FORM, self.stage, 0, at)
        return started.irecv(self._blank(size), self.peer, said, self.group, "pipeline, the form").wait(timeout)

    def _blank(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self.device)


def _bytes(message: Tensor) -> bytes:
    return bytes(message.cpu().numpy().tobytes())


def _words(form: PacketForm) -> str:
    return ", ".join(f"{str(s.dtype).removeprefix('torch.')}{list(s.shape)}" for s in form.slots) or "no tensor"
