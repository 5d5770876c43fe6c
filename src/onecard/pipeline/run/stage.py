"""Stage: one part of a model on this rank; runs microbatches forward and backward and keeps what lies between. No messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from onecard._torch.names import tree_leaves
from onecard.errors import ScheduleError
from onecard.pipeline.run.halves import WeightHalf, input_half, whole_backward
from onecard.pipeline.run.packets import PacketForm

Grads = Sequence[Tensor | None]


class _Flight:
    """A microbatch between its forward and its backward. Of outputs only edges are kept: their memory is the receiver's."""

    __slots__ = ("edges", "form", "inputs", "scale", "weights")

    def __init__(self, inputs: list[Tensor], edges: list[Any], form: PacketForm | None, scale: Tensor | None) -> None:
        self.inputs, self.edges, self.form, self.scale = inputs, edges, form, scale
        self.weights: WeightHalf | None = None


class Stage:
    """A function of one value, or a module, with what its microbatches under way need.

    Args:
        run: the value of a microbatch -> that for the next stage.
        around: makes the context of each forward, such as autocast.
        halves: whether I leaves the weights to W; else it does the whole backward.
        beside: whether ``run`` gives (value, number): a number that is added to the loss, of whatever this and earlier stages
            lose besides (routers of experts).
    """

    def __init__(
        self,
        run: Callable[[Any], Any],
        around: Callable[[], AbstractContextManager[Any]] | None = None,
        halves: bool = True,
        beside: bool = False,
    ) -> None:
        self.run, self.around, self.halves, self.beside = run, around, halves, beside
        self._flights: dict[int, _Flight] = {}

    def forward(
        self, microbatch: int, form: PacketForm, tensors: Sequence[Tensor], index: int
    ) -> tuple[PacketForm, list[Tensor]]:
        """F: the outputs for the next stage."""
        inputs = self._enter(form, tensors)
        value = self._run(form.join(given(inputs)))
        made, outputs = PacketForm.of(value, index)
        wanted = [x for x in inputs if x.requires_grad]
        if torch.is_grad_enabled():
            edges = [get_gradient_edge(x) for x in outputs if x.requires_grad]
            self._flights[microbatch] = _Flight(wanted, edges, made, None)
        return made, [_kept(x) for x in outputs]

    def forward_loss(
        self,
        microbatch: int,
        form: PacketForm,
        tensors: Sequence[Tensor],
        lose: Callable[[Any], tuple[Any, Any]],
        scale: Any,
        share: float = 1.0,
    ) -> Tensor:
        """F of the last stage: its loss. ``lose``: what the stage returns -> loss (None of nothing), what it weighs; it is
        multiplied with that and with ``scale`` before its backward. ``share``: of the microbatch in the batch, which weighs what
        is lost besides; the loss is then the microbatch's summand of the batch's."""
        inputs = self._enter(form, tensors)
        with nullcontext() if self.around is None else self.around():
            value, more = (
                self.run(form.join(given(inputs))) if self.beside else (self.run(form.join(given(inputs))), None)
            )
            lost, weight = lose(value)
            # A mean over nothing (all labels ignored) is no number, and weighs nothing: on one card it is not there.
            loss = _nothing(value) if lost is None else one_number(lost)
            if more is not None:
                loss, weight = loss * weight + more.to(loss.device) * share, 1.0
        wanted = [x for x in inputs if x.requires_grad]
        if torch.is_grad_enabled():
            edges = [get_gradient_edge(loss)] if loss.requires_grad else []
            seed = torch.as_tensor(weight * scale, dtype=loss.dtype, device=loss.device)
            self._flights[microbatch] = _Flight(wanted, edges, None, seed)
        return loss.detach().clone()

    def forward_output(self, form: PacketForm, tensors: Sequence[Tensor]) -> Any:
        """F of the last stage where nobody asks for a loss: what the model returns."""
        value = self._run(form.join(self._enter(form, tensors)))
        made, outputs = PacketForm.of(value[0] if self.beside else value)
        return made.join([_kept(x) for x in outputs])

    def _run(self, value: Any) -> Any:
        with nullcontext() if self.around is None else self.around():
            return self.run(value)

    def _enter(self, form: PacketForm, tensors: Sequence[Tensor]) -> list[Tensor]:
        """What was received, as leaves of this stage's graph; the stage computes with ``given`` of them."""
        grad = torch.is_grad_enabled()
        return [
            x.detach().requires_grad_() if grad and slot.needs_grad else x.detach()
            for slot, x in zip(form.slots, tensors, strict=True)
        ]

    def form_of(self, microbatch: int) -> PacketForm:
        """That of the outputs whose gradients are awaited."""
        form = self._flights[microbatch].form
        if form is None:
            raise KeyError(microbatch)
        return form

    def backward(self, microbatch: int, grads: Grads) -> list[Tensor | None]:
        """B: the gradients of the inputs that want one; None of one on which nothing depends.

        Args:
            grads: of the outputs, None likewise.
        """
        flight = self._flights.pop(microbatch)
        whole_backward(*_there(flight, grads))
        return [x.grad for x in flight.inputs]

    def backward_input(self, microbatch: int, grads: Grads) -> list[Tensor | None]:
        """I: the same, without the gradients of the weights."""
        flight = self._flights[microbatch]
        edges, given = _there(flight, grads)
        if self.halves:
            flight.weights = input_half(edges, given, flight.inputs)
        else:
            whole_backward(edges, given)
        found = [x.grad for x in flight.inputs]
        flight.edges, flight.inputs, flight.scale = [], [], None
        return found

    def backward_weight(self, microbatch: int) -> None:
        """W: the gradients of the weights."""
        flight = self._flights.pop(microbatch)
        if flight.weights is not None:
            flight.weights.run()

    def forget(self) -> None:
        """Drop what is under way, after an error."""
        self._flights.clear()


class _Given(torch.autograd.Function):
    """The same memory, and no leaf any more: a stage may begin with an operator that writes to what it is given."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


def given(inputs: list[Tensor]) -> list[Tensor]:
    """Leaves as what a stage may write to."""
    return [_Given.apply(x) if x.requires_grad else x for x in inputs]


def _there(flight: _Flight, grads: Grads) -> tuple[list[Any], list[Tensor]]:
    """The outputs that have a gradient, and it: those that have none take no part, as on one card."""
    found = list(
        zip(flight.edges, [flight.scale] * len(flight.edges) if flight.scale is not None else grads, strict=True)
    )
    return [edge for edge, grad in found if grad is not None], [grad for _, grad in found if grad is not None]


def one_number(loss: Any) -> Tensor:
    """The loss; the words for what is none."""
    if isinstance(loss, Tensor) and loss.numel() == 1:
        return loss
    what = str(list(loss.shape)) if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
    first = isinstance(loss, tuple | list) and loss and isinstance(loss[0], Tensor) and loss[0].numel() == 1
    better = ". Of a loss beside other values: loss_fn=lambda out, labels: your_loss(out, labels)[0]" if first else ""
    raise ScheduleError(f"loss_fn returned {what}; want one number, the mean over a microbatch{better}")


def _nothing(value: Any) -> Tensor:
    """A loss that weighs nothing, where the others are."""
    return torch.zeros((), device=next((x.device for x in tree_leaves(value) if isinstance(x, Tensor)), "cpu"))


def _kept(x: Tensor) -> Tensor:
    """A copy: the stage may write to what it returned, in its next microbatch, while this one is still to be read."""
    return x.detach().clone(memory_format=torch.contiguous_format)
