"""ZeRO by layouts: the data-parallel axis cuts an optimizer's states, the gradients too, the parameters too.

The update runs where the state is. While an optimizer steps, its parameters *are* the parts that this rank updates: tensors
of the same value under a layout with one more cut, whose memory is a piece of the parameter's own. So any optimizer works,
fused ones stay fused, its states come out cut, and a parameter is a right tensor at every moment, also where a step is
interrupted.

Source: Rajbhandari et al., ZeRO (arXiv 1910.02054); the names are those of ``paddle.distributed``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from onecard.errors import LayoutError
from onecard.place.layout import Layout
from onecard.place.mesh import ProcessMesh
from onecard.place.parts import chunk
from onecard.tensor import DistTensor
from onecard.tensor.aliasing import memory, strides
from onecard.tensor.buckets import Cut, gather_all, reduce_all
from onecard.tensor.spec import OWN, Spec
from onecard.train.unmade import UnmadePart
from onecard.train.zero import undivided
from onecard.train.zero.blocks import BlockSpec, Policy, of_marks
from onecard.train.zero.last_hooks import register_first_behind, register_last
from onecard.train.zero.master import Masters
from onecard.train.zero.reducer import Reducer, reduce_gradients
from onecard.train.zero.resume import lay_out_with


@dataclass(frozen=True)
class ShardingStage1:
    """ZeRO stage 1 for ``shard_optimizer``: each rank along an axis keeps and updates a part of the optimizer's states.

    Args:
        axis: the mesh axis along which the data are divided, "dp" or its number; left out on a mesh of one axis.
        mesh: the mesh; parameters on other meshes are left alone. Left out: every parameter whose mesh has the axis.
        overlap: whether gradients are summed while ``backward`` runs; left out: on a GPU they are. The same numbers, bit for
            bit. With accumulation stage 1 sums in the last ``backward`` of a step; it takes as many as the step before had.
        master_weights: update 32-bit copies of 16-bit parameters, which are states too ("master_weight").
        reduce_dtype: in which gradients travel and are summed, ``torch.float32`` for 16-bit ones; their own if left out.
        offload: states live on the CPU, and the update runs there.

    A step sends what data parallelism sends: a reduce-scatter of the gradients and an all-gather of the updated parameters.

    Source: ZeRO (arXiv 1910.02054), P_os; ``paddle.distributed.ShardingStage1``.

    Example:
        >>> from onecard import ProcessMesh, Replicate, Shard, shard_optimizer, shard_tensor
        >>> mesh = ProcessMesh([0], ["dp"])
        >>> weight = torch.nn.Parameter(shard_tensor(torch.ones(4, 2), mesh, [Replicate()]))
        >>> optimizer = shard_optimizer(torch.optim.AdamW([weight]), ShardingStage1("dp", mesh))
        >>> weight.sum().backward()
        >>> optimizer.step()
        >>> optimizer.state[weight]["exp_avg"].placements, weight.placements
        ((Shard(dim=0),), (Replicate(),))
    """

    axis: str | int | None = None
    mesh: ProcessMesh | None = None
    overlap: bool | None = None
    master_weights: bool = False
    reduce_dtype: torch.dtype | None = None
    offload: bool = False
    stage = 1

    def __post_init__(self) -> None:
        if isinstance(self.axis, ProcessMesh):  # ShardingStage1(mesh), as older versions of Paddle have it
            object.__setattr__(self, "mesh", self.axis)
            object.__setattr__(self, "axis", None)
        if self.mesh is not None:
            self._axis(self.mesh)

    def _axis(self, mesh: ProcessMesh) -> int | None:
        """The number of the axis; None if this mesh does not have it."""
        name = type(self).__name__
        if self.axis is None:
            if mesh.ndim > 1:
                raise LayoutError(
                    f"{name}: {mesh!r} has {mesh.ndim} axes; name the one along which the data are divided, for example "
                    f"onecard.{name}({mesh.dim_names[0]!r}, mesh)"
                )
            return 0
        if isinstance(self.axis, int):
            return self.axis if self.axis < mesh.ndim else None
        if self.axis in mesh.dim_names:
            return mesh.axis(self.axis)
        if self.mesh is not None:
            raise LayoutError(f"{name}: {mesh!r} has no axis {self.axis!r}; its axes are {mesh.dim_names}")
        return None

    def cut(self, x: DistTensor) -> Cut | None:
        """How the axis cuts a parameter; None where it does not: it has another mesh, or its layout uses the axis already.

        The same on ranks outside the parameter's mesh: what lies where must be known to all, or messages between meshes differ.
        """
        layout, mesh = x._spec.layout, x.mesh
        if self.mesh is not None and mesh is not self.mesh:
            return None
        axis = self._axis(mesh)
        if axis is None or layout.merged or layout.pending or x._spec.alias != OWN:
            return None
        if x.dim() == 0 or x._memory is not None:
            return None
        cut = layout.dim_of(axis)
        if cut is not None:
            return Cut(x, x._local, layout, axis, cut) if self.stage == 3 and layout.dims[cut][-1] == axis else None
        first = layout.local_shape(x.shape, (0,) * mesh.ndim)  # not this rank's: all must choose the same
        if max(first) == 1:
            return None  # one element, which all ranks update: operators have a dim of size 1 whole, so a copy would be, too
        dim = _best_dim(first, mesh.shape[axis])
        dims = list(layout.dims)
        dims[dim] = (*dims[dim], axis)
        return Cut(x, x._local, Layout.make(mesh, tuple(dims)), axis, dim)


@dataclass(frozen=True)
class ShardingStage2(ShardingStage1):
    """ZeRO stage 2 for ``shard_optimizer``: gradients are cut too, as soon as ``backward`` has them.

    Args, messages and source: see ``ShardingStage1``. Each ``backward`` reduces what it has made, so that with accumulation
    over n microbatches the reduce-scatter runs n times; stage 1 runs it once.
    """

    stage = 2


@dataclass(frozen=True)
class ShardingStage3(ShardingStage2):
    """ZeRO stage 3 for ``shard_optimizer``: parameters are cut too, from now on.

    Args, and source: see ``ShardingStage1``. A step sends an all-gather of the parameters for forward, one for backward, and the
    reduce-scatter of the gradients. Without ``model`` an operator gathers what it needs, when it comes to it.

    Args:
        model: gathers the parameters of each block (the modules below it that are no mere lists) in one message, before the
            block's forward and backward; with ``overlap`` those of the next block while one computes.
        reshard_after_forward: whether a block gives the whole parameters up after its forward: always (True), never, or
            by ``fn(name, block)``. Where it does not, backward needs no all-gather.
        blocks: which modules they are: modules, their names or classes, as for ``fully_shard``; the model's repeated layers if
            left out.

    Example:
        >>> from onecard import ProcessMesh, shard_layer, shard_optimizer
        >>> mesh = ProcessMesh([0], ["dp"])
        >>> model = shard_layer(torch.nn.Sequential(torch.nn.Linear(4, 2)), mesh)
        >>> stage = ShardingStage3("dp", mesh, model=model, reshard_after_forward=lambda name, block: name != "0")
        >>> _ = shard_optimizer(torch.optim.AdamW(model.parameters()), stage)
        >>> model[0].weight.placements
        (Shard(dim=0),)
    """

    model: nn.Module | None = None
    reshard_after_forward: Policy = True
    blocks: BlockSpec = None
    stage = 3


def _best_dim(shape: Sequence[int], ranks: int) -> int:
    """The outermost dim that divides nearly as evenly as any: its parts lie in one piece."""
    shares = [chunk(size, ranks, 0)[1] / max(size, 1) for size in shape]
    return next(d for d, share in enumerate(shares) if share <= 1.1 * min(shares))


class ShardedUpdate:
    """Runs an optimizer's step on the parts that this rank updates.

    Args:
        reducer: sums its parameters' gradients; one of its own if left out.
        joined: what a closure's loss on this rank is as one card's; itself if left out.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        stage: ShardingStage1,
        reducer: Reducer | None = None,
        joined: Callable[[Any], Any] | None = None,
    ) -> None:
        self.stage, self._joined = stage, joined
        self._during: list[tuple[Cut, Spec]] = []  # what is cut while a step runs, and how it was before
        self._programs: list[tuple[Any, Any]] = []  # gradients that a program has put there, in memory of its own
        params = [p for p in params_of(optimizer) if isinstance(p, DistTensor)]
        if not params and any(True for _ in params_of(optimizer)):
            raise LayoutError(
                f"{type(stage).__name__}: the optimizer holds plain parameters only, which nothing divides. Make it of a model "
                "with placements, after oc.shard_layer(model, mesh); for local parameters: "
                'fleet.group_sharded_parallel(model, optimizer, "os")'
            )
        if params and stage.axis is not None and all(stage._axis(mesh) is None for mesh in (p.mesh for p in params)):
            name = type(stage).__name__
            raise LayoutError(
                f"{name}({stage.axis!r}): no mesh of the optimizer's parameters has this axis; {params[0].mesh!r} has "
                f"{params[0].mesh.dim_names}: onecard.{name}({params[0].mesh.dim_names[0]!r})"
            )
        register_last(optimizer, self._begin)
        register_first_behind(optimizer, self._end)
        overlap = overlaps(stage.overlap, params)
        if isinstance(stage, ShardingStage3):
            taken = []
            for p in params:
                made_now, cut = isinstance(p, UnmadePart), stage.cut(p)
                if cut is not None and cut.layout is not cut.x._spec.layout:
                    taken.append((cut.x, cut.x._spec, cut))
                    own_part(cut)  # the rest of the memory is free then
                    if made_now:  # of a deferred model, one after the other, for nobody else
                        cut.whole.untyped_storage().resize_(0)
            if stage.model is not None:
                of_marks(stage.model, taken, stage.reshard_after_forward, overlap, stage.blocks)
        self.reducer = reducer or Reducer(params, stage.cut, stage.stage > 1, overlap, None, stage.reduce_dtype)
        self._masters: Masters | None = None
        if stage.master_weights or stage.offload:
            cuts = [(p, stage.cut(p)) for p in params]
            self._masters = Masters(optimizer, [(p, cut, _own(p, cut)) for p, cut in cuts], stage.offload)

    def lay_out(self, key: str, param: Any, state: Any) -> Any:
        """A state under the layout in which it is kept: for those that are loaded."""
        cut = self.stage.cut(param)
        return state if cut is None else lay_out_with(state, cut.layout)

    def _begin(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        self._programs = []  # of a step that was interrupted: later gradients are in their place by now
        self._end(optimizer, args, kwargs)
        undivided.tell(p for p in params_of(optimizer) if p.grad is not None)
        self.reducer.before_step()
        self._take_parts(optimizer)
        return with_closure(args, kwargs, lambda given: self._evaluate(optimizer, given))

    @torch.no_grad()
    def _evaluate(self, optimizer: Optimizer, closure: Callable[[], Any]) -> Any:
        """A closure sees the model as it is: what the optimizer has updated so far is everybody's."""
        self._end(optimizer, (), {})
        with torch.enable_grad():
            loss = closure()
        self.reducer.finish()
        self._take_parts(optimizer)
        return loss if self._joined is None else self._joined(loss)

    def _take_parts(self, optimizer: Optimizer) -> None:
        for blocks in {b for p in params_of(optimizer) if (b := getattr(p, "_blocks", None)) is not None}:
            blocks.begin_step()
        cuts, others = [], []
        for param in params_of(optimizer):
            cut = self.stage.cut(param) if isinstance(param, DistTensor) and param.grad is not None else None
            cuts.append(cut) if cut is not None else others.append(param.grad)
        self._programs = [(cut.x, grad) for cut in cuts if not isinstance(grad := cut.x.grad, DistTensor)]
        reduce_gradients(cuts)
        reduce_all(others, "gradients", explicit=False)
        for cut in cuts:
            if cut.layout is not cut.x._spec.layout:
                self._during.append((cut, cut.x._spec))
                _take_part(cut)
        if self._masters is not None:
            self._masters.begin(optimizer)

    def _end(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._masters is not None:
            self._masters.end(optimizer)
        during, self._during = self._during, []
        gather_all([cut for cut, _ in during], "parameters")
        for cut, spec in during:
            cut.x._local, cut.x._spec = cut.whole, spec
            memory.wrote(cut.x)
        programs, self._programs = self._programs, []
        for param, grad in programs:  # the next backward adds to it
            param.grad = None if param.grad is None else grad


def _take_part(cut: Cut) -> None:
    """A tensor becomes its part under the layout with the cut, in the same memory if that is one piece."""
    spec = cut.x._spec
    part = cut.own()
    cut.x._local, cut.x._spec = strides.place(spec)(part) if spec.here else part, spec.with_layout(cut.layout)


def _own(param: DistTensor, cut: Cut | None) -> Any:
    """This rank's part of a parameter that is cut, or is to be."""
    if cut is None or cut.layout is param._spec.layout:
        return param._local
    return cut.own()


def own_part(cut: Cut) -> Cut:
    """Make a tensor its part, in memory of its own; what it was is in the cut."""
    _take_part(cut)
    cut.x._local = cut.x._local.clone()
    return cut


def with_closure(args: Any, kwargs: Any, evaluate: Callable[[Callable[[], Any]], Any]) -> tuple[Any, Any] | None:
    """Arguments of ``step`` whose closure, if there is one, is called by ``evaluate``; None: there is none."""
    given = kwargs.get("closure", args[1] if len(args) > 1 else None)
    return None if given is None else (args[:1], {**kwargs, "closure": lambda: evaluate(given)})


def overlaps(asked: bool | None, params: Sequence[DistTensor]) -> bool:
    """Whether sums run while backward does: as asked, or else where a message does not take the processor beside it."""
    return any(p._spec.device.type not in ("cpu", "meta") for p in params) if asked is None else asked


def params_of(optimizer: Optimizer) -> Iterable[Any]:
    """An optimizer's parameters, in order."""
    return (param for each in optimizer.param_groups for param in each["params"])
