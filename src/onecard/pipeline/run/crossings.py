"""MarkedMicrobatch: one microbatch's way through a program whose values go from mesh to mesh, cut where they do.

Every rank runs the whole program; outside its own meshes nothing is there to compute. Where a value that wants a gradient goes to
a later stage's mesh, autograd's graph is cut: the value is a leaf there. So each stage's backward can run by itself, whole or in
halves, and gradients go back as transfers between them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from onecard.comm.issue.transfer import sends_under_way
from onecard.errors import ScheduleError
from onecard.pipeline.run.halves import WeightHalf, input_half, whole_backward
from onecard.pipeline.run.paused import Paused
from onecard.pipeline.run.stage import given
from onecard.place.layout import Layout
from onecard.place.mesh import ProcessMesh
from onecard.tensor import moves
from onecard.tensor.dist_tensor import DistTensor

_IN_ORDER = (
    "where a mesh has several stages, values go to the meshes in the order of stages, and each where it is needed. A schedule "
    "with one stage for each mesh (1F1B, ZBH1) takes any order"
)


class Route:
    """The meshes of the stages, first stage first. A mesh that comes again has several stages.

    Attributes:
        places: the different meshes; a stage's place is that of its mesh in it.
    """

    def __init__(self, meshes: Sequence[ProcessMesh]) -> None:
        self._ranks = [tuple(sorted(mesh.process_ids)) for mesh in meshes]
        self.places = list(dict.fromkeys(self._ranks))
        self.stages = len(meshes)
        self.comes_again = len(self.places) < len(meshes)

    def place_of(self, rank: int) -> list[int]:
        """The places of a rank."""
        return [place for place, ranks in enumerate(self.places) if rank in ranks]

    def place_at(self, stage: int) -> int:
        """The place of a stage."""
        return self.places.index(self._ranks[stage])

    def stages_of(self, place: int) -> list[int]:
        """The stages of a place."""
        return [stage for stage, ranks in enumerate(self._ranks) if ranks == self.places[place]]

    def towards(self, mesh: ProcessMesh, now: int) -> int | None:
        """The stage of a value that goes to a mesh while the program is in stage ``now``; None: no stage's any more."""
        ranks = tuple(sorted(mesh.process_ids))
        first = now if self.comes_again else 0
        return next((stage for stage in range(first, self.stages) if self._ranks[stage] == ranks), None)

    def whence(self, mesh: ProcessMesh, now: int) -> int | None:
        """The stage of a value that is on a mesh; None: no stage's so far."""
        ranks = tuple(sorted(mesh.process_ids))
        last = now if self.comes_again else self.stages - 1
        return next((stage for stage in range(last, -1, -1) if self._ranks[stage] == ranks), None)


class _Crossing:
    """A value that goes from a stage to a later one, and its gradient, which comes back."""

    __slots__ = ("edge", "grad", "layout", "leaf", "source", "target")

    def __init__(self, source: int, target: int, x: DistTensor, leaf: Tensor) -> None:
        self.source, self.target, self.leaf = source, target, leaf
        self.edge, self.layout = get_gradient_edge(x), x._spec.layout.reduced()
        self.grad: Tensor | None = None

    def bring_back(self) -> None:
        """Move the gradient to where the value came from: one rank's send, another one's receive."""
        grad, self.leaf = self.leaf.grad, self.leaf.new_empty(0)  # what came in is not needed any more
        if isinstance(grad, DistTensor):
            self.grad = moves.transferred(grad, self.layout, "gradient of reshard")


class MarkedMicrobatch:
    """The forward of one microbatch, piece by piece, and the backward of each stage.

    Args:
        number: of the microbatch.
        mine: the stages of this rank.
        program: makes its part of the loss; None of one that has no part in it.
    """

    def __init__(self, route: Route, number: int, mine: Sequence[int], program: Callable[[], Tensor | None]) -> None:
        self.number = number
        self.loss: Tensor | None = None
        self.began = 0.0
        """When the present piece had what it needs."""
        self._route, self._mine, self._program = route, mine, program
        self._now, self._left = 0, route.stages
        self._reached: set[int] = set()
        self._keeps = route.comes_again
        self._crossings: list[_Crossing] = []
        self._weights: dict[int, WeightHalf] = {}
        self._ending: list[tuple[Any, Tensor]] = []
        self._paused = Paused(self._whole) if route.comes_again else None

    def forward(self, around: Callable[[], AbstractContextManager[Any]]) -> None:
        """F of the next of this rank's stages. ``around``: what is entered around it."""
        self.began = time.perf_counter()
        with self._asked():
            if self._paused is not None:
                self._paused.resume(around)
            else:
                with around():
                    self._whole()

    def _whole(self) -> None:
        loss = self._program()
        if self._route.comes_again and self._now != self._route.stages - 1:
            raise ScheduleError(f"the program ends in stage {self._now} of {self._route.stages}: {_IN_ORDER}")
        if loss is not None:
            self.loss = loss.detach()
            self._ending = [(get_gradient_edge(loss), torch.ones_like(loss))] if loss.requires_grad else []

    @contextmanager
    def _asked(self) -> Iterator[None]:
        """Inside, values that go to other meshes are this microbatch's."""
        with sends_under_way(self.number):
            moves.crossings.here.append(self)
            try:
                yield
            finally:
                moves.crossings.here.pop()

    def cross(self, x: DistTensor, layout: Layout) -> DistTensor:
        """A value goes to another mesh."""
        target = self._route.towards(layout.mesh, self._now)
        source = self._route.whence(x.mesh, self._now)
        if target is not None and target > self._now:
            self._enter(target)
        differentiable = torch.is_grad_enabled() and x.requires_grad
        if source is None or target is None or source >= target or not differentiable:
            self._keeps |= differentiable and x.grad_fn is not None
            made = moves.MeshTransfer.apply(x, layout)
            self._arrived(target)
            return made
        leaf = moves.transferred(x.detach(), layout, "reshard").requires_grad_()  # type: ignore[arg-type]
        self._crossings.append(_Crossing(source, target, x, leaf))
        self._arrived(target)
        return given([leaf])[0]  # type: ignore[return-value]

    def _arrived(self, stage: int | None) -> None:
        if stage is not None and stage in self._mine and stage not in self._reached:
            self._reached.add(stage)
            self.began = time.perf_counter()

    def _enter(self, stage: int) -> None:
        """The program goes on to a stage; on a rank that has it, when the schedule says so."""
        if self._route.comes_again and stage != self._now + 1:
            raise ScheduleError(f"the program goes from stage {self._now} to stage {stage}: {_IN_ORDER}")
        self._now = stage
        if self._paused is not None and stage in self._mine[1:]:
            self._paused.pause()

    def backward(self, stage: int, halves: bool = False) -> None:
        """B of a stage of this rank, or I; before it what the ranks of later ones do, of which here nothing is there."""
        with sends_under_way(self.number):
            for later in range(self._left - 1, stage - 1, -1):
                self._backward(later, halves and later == stage)
        self._left = stage

    def _backward(self, stage: int, halves: bool) -> None:
        """Of one stage; then the gradients of what came in go back."""
        last = stage == self._route.stages - 1
        found = [*self._ending] if last else []
        found += [(c.edge, c.grad) for c in self._crossings if c.source == stage and c.grad is not None]
        edges, grads = [edge for edge, _ in found], [grad for _, grad in found]
        into = [c for c in reversed(self._crossings) if c.target == stage]
        self.began = time.perf_counter()
        if halves:
            self._weights[stage] = input_half(edges, grads, [c.leaf for c in into])
        else:
            whole_backward(edges, grads, self._keeps)
        for crossing in into:
            crossing.bring_back()
        self._crossings = [c for c in self._crossings if c.source != stage]
        if last:
            self._ending = []

    def backward_weight(self, stage: int) -> None:
        """W of a stage."""
        self.began = time.perf_counter()
        with sends_under_way(self.number):
            self._weights.pop(stage).run()

    def end(self) -> None:
        """What is left of the backward: that of earlier stages on other ranks."""
        self.backward(0)

    def forget(self) -> None:
        """Drop what is under way, after an error."""
        if self._paused is not None:
            self._paused.abandon()
        self._crossings, self._ending = [], []
        self._weights.clear()
