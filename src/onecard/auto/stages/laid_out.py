"""A plain model laid out in the stages of a plan, in place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from torch import nn
from torch.distributed.tensor import Placement

from onecard._torch.hooks import LeftBehind
from onecard._torch.modes import put_below
from onecard.auto.entrance import Behind, Entrance, HandedIn
from onecard.auto.stages.between import BetweenStages, begun, on_mesh
from onecard.auto.stages.places import meshes, stages_of
from onecard.auto.stages.rows import InMicrobatches
from onecard.auto.swap import lay_out
from onecard.errors import PlanError
from onecard.place.mesh import ProcessMesh
from onecard.planning.plan import Plan
from onecard.train.lazy import refuse_lazy

Where = Callable[[str, ProcessMesh], Sequence[Placement]]


class StagedEntrance(Entrance):
    """An entrance behind which values go from stage to stage."""

    def __init__(self, mesh: ProcessMesh, axes: tuple[str, ...], between: BetweenStages) -> None:
        super().__init__(mesh, axes)
        self.between = between
        self._entered: list[ExitStack] = []

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        forward = vars(module).get("forward")
        if isinstance(forward, InMicrobatches) and forward.looking:
            self._entered.append(ExitStack())
            self._under_way.append(None)
            return args, kwargs
        put_below(self.between)  # of another thread than before, too
        given = super().__call__(module, args, kwargs)
        stack = ExitStack()
        stack.enter_context(self.between.within())
        self._entered.append(stack)
        return given

    def behind(self) -> None:
        if self._entered:
            self._entered.pop().close()
        super().behind()


class _Brought(LeftBehind):
    """What a block is called with comes to its stage ahead of it: so what runs again in backward has it."""

    def __init__(self, mesh: ProcessMesh) -> None:
        self._mesh = mesh
        self._under_way: list[tuple[nn.Module, HandedIn]] = []

    def __deepcopy__(self, memo: Any) -> _Brought:
        return self

    def before(self, block: nn.Module) -> None:
        """From now on, ahead of each forward of a block."""
        block.register_forward_pre_hook(self, with_kwargs=True)
        block.register_forward_hook(Behind(self), always_call=True)

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        given = HandedIn(lambda x: on_mesh(x, self._mesh), args, kwargs)
        self._under_way.append((module, given))
        return given.found

    def behind(self) -> None:
        """A list that it has filled is the program's own again."""
        if not self._under_way:
            return
        module, given = self._under_way.pop()
        if written := given.written():
            raise PlanError(
                f"parallelize: {type(module).__name__} writes to a tensor that it is given, {list(written[0][0].shape)}, which "
                "comes from another stage, and its forward is to run again in backward: recompute='none', or write to a clone",
                "recompute",
            )
        given.write_back()


def in_stages(
    model: nn.Module,
    plan: Plan,
    mesh: ProcessMesh,
    axes: tuple[str, ...],
    where: Where,
    again: Sequence[nn.Module],
    zero: int,
) -> Entrance:
    """Lay a model out, each part of it on its stage's ranks.

    Args:
        mesh: all ranks; axes: along which it divides the batch.
        where: (the name of a parameter, its stage's mesh) -> how it lies there.
        again: blocks whose forward runs again in backward.
    """
    refuse_lazy(model, "laying a model out", PlanError)
    places, of = meshes(mesh), stages_of(model, plan)
    at = {name: mesh if stage is None else places[stage] for name, stage in of.items()}
    lay_out(model, mesh, lambda name: where(name, at[name]), zero=zero, on=at.__getitem__)
    between = begun(mesh, places)
    for block in again:
        own = next(iter(block.parameters()), None)
        if own is not None:
            _Brought(own.process_mesh).before(block)  # type: ignore[attr-defined]
    entrance = StagedEntrance(mesh, axes, between)
    entrance.before(model)
    if plan.microbatches > 1:
        model.forward = InMicrobatches(model, model.forward, plan.microbatches, axes, between)
    return entrance
