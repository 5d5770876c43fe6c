"""How tensors get onto meshes, off them, and from one layout to another: the functions behind convert.py, with gradients."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from onecard._torch.leaves import has_tangent
from onecard.comm.base import record
from onecard.comm.base.state import Kept, machine
from onecard.comm.issue import collectives, groups
from onecard.comm.issue.run import messages
from onecard.comm.issue.run import run as run_steps
from onecard.comm.issue.run import start as start_steps
from onecard.comm.issue.transfer import microbatch_under_way, run_transfer
from onecard.comm.world import hosts, pretend, world
from onecard.errors import LayoutError, MeshError
from onecard.moves import resharding
from onecard.moves.transfer import plan_transfer, reduced_source
from onecard.place.layout import Layout
from onecard.place.mesh import ProcessMesh
from onecard.tensor.aliasing import memory, strides
from onecard.tensor.deferred.calls import record_of
from onecard.tensor.deferred.replay import materialise
from onecard.tensor.dist_tensor import DistTensor, wrap
from onecard.tensor.spec import Spec, contiguous_stride


def refuse_dual(call: str, x: Tensor) -> None:
    """Refuse a tensor of forward-mode differentiation, of which the values alone would be laid out."""
    if has_tangent(x):
        raise LayoutError(
            f"{call}: a dual tensor (forward_ad) would lose its tangent: make_dual(x, tangent) of two distributed tensors keeps "
            "it; or torch.func.jvp of the model"
        )


def distribute(whole: Tensor, layout: Layout, src: int | None = None, taken: bool = False) -> DistTensor:
    """This rank's part of a value that every rank holds whole.

    ``taken``: nobody needs ``whole`` any more, so that its memory may become the part's, where that is all of it.
    """
    if whole.device.type == "meta" and not _only_shapes(whole):
        return materialise(whole, layout)
    shape, device = whole.shape, whole.device
    spec = Spec.make(layout, shape, contiguous_stride(shape), whole.dtype, device)
    if not spec.here:
        return wrap(torch.empty(0, dtype=whole.dtype, device=device), spec)
    if src is not None:
        whole = _from_rank(whole.to(device), layout.mesh, src)
    if taken and layout.is_replicated and whole.is_contiguous():
        return wrap(whole, spec)
    local = layout.local_part(whole).to(device).clone(memory_format=torch.contiguous_format)
    pending = Layout.make(layout.mesh, layout.dims)
    steps = resharding.plan(tuple(shape), whole.element_size(), pending, layout, machine.here)
    return wrap(run_steps(steps, local, shape).contiguous(), spec)


def _only_shapes(whole: Tensor) -> bool:
    """Whether a meta tensor stands for a value that nobody needs, and not for one that is still to be made."""
    return pretend.rehearsing.here or (pretend.pretending() and record_of(whole) is None)


def _from_rank(whole: Tensor, mesh: ProcessMesh, src: int) -> Tensor:
    """One rank's value on every rank of the mesh: broadcast along each axis in turn."""
    at = mesh.coordinate(src)
    if at is None:
        raise MeshError(f"src={src} is not in {mesh!r}; give one of its ranks {mesh.process_ids}")
    whole = whole.clone(memory_format=torch.contiguous_format)
    for axis in range(mesh.ndim):
        collectives.broadcast(whole, groups.group(mesh, axis), at[axis])
    return whole


def _differentiated(grad: Any) -> bool:
    """Within a backward, whether this gradient is to have one itself (``create_graph``): then a move must be recorded, too."""
    return torch.is_grad_enabled() and isinstance(grad, Tensor) and grad.requires_grad


class ShardTensor(torch.autograd.Function):
    """A whole value, laid out; its gradient is whole."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, layout: Layout, src: int | None) -> Any:
        return distribute(whole, layout, src)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        if _differentiated(grad):
            return Unshard.apply(grad) if isinstance(grad, DistTensor) else grad, None, None
        return whole_everywhere(grad, "gradient of shard_tensor"), None, None


class FromLocal(torch.autograd.Function):
    """The parts that ranks hold; each part's gradient is its part."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, spec: Spec) -> Any:
        ctx.set_materialize_grads(False)
        ctx.spec = spec
        return wrap(local.detach(), spec)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        if _differentiated(grad):
            return ToLocal.apply(Reshard.apply(grad, ctx.spec.layout.reduced())), None
        return None if grad is None else _to_layout(grad, ctx.spec.layout.reduced(), "gradient of from_local"), None


class ToLocal(torch.autograd.Function):
    """This rank's part; its gradient is a part of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        ctx.spec = x._spec
        return x._local.detach()

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        spec = ctx.spec.with_layout(ctx.spec.layout.reduced())
        return FromLocal.apply(grad.contiguous(), spec) if _differentiated(grad) else wrap(grad.contiguous(), spec)


class Reshard(torch.autograd.Function):
    """Another layout on the same mesh."""

    @staticmethod
    def forward(ctx: Any, x: Any, layout: Layout, later: bool = False) -> Any:
        ctx.set_materialize_grads(False)  # zeros would be a plain tensor
        ctx.layout = x._spec.layout.reduced()
        return _start(x, layout, "reshard") if later else _reshard(x, layout, "reshard")

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        if grad is None:
            return None, None, None
        # Where the input was replicated, a pending gradient may stay pending: it is summed once, later.
        kept = tuple(
            p
            for p in grad._spec.layout.pending
            if grad._spec.layout.mesh is ctx.layout.mesh and _idle(ctx.layout, p[0])
        )
        layout = Layout.make(ctx.layout.mesh, ctx.layout.dims, kept)
        if _differentiated(grad):
            return Reshard.apply(grad, layout), None, None
        return _reshard(grad, layout, "gradient of reshard"), None, None


class MeshTransfer(torch.autograd.Function):
    """Another layout on another mesh; the gradient goes back."""

    @staticmethod
    def forward(ctx: Any, x: Any, layout: Layout) -> Any:
        ctx.set_materialize_grads(False)
        ctx.layout = x._spec.layout.reduced()
        return transferred(x, layout, "reshard")

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        if _differentiated(grad):
            return MeshTransfer.apply(grad, ctx.layout), None
        return None if grad is None else transferred(grad, ctx.layout, "gradient of reshard"), None


class Crossings(Protocol):
    """Who is asked where a program moves a value to another mesh: a pipeline, which cuts its program there."""

    def cross(self, x: DistTensor, layout: Layout) -> DistTensor:
        """The value under this layout, on another mesh."""


crossings: Kept[list[Crossings]] = Kept(list)
"""Who is asked now: the last one. Nobody: gradients go back within autograd."""


def to_mesh(x: DistTensor, layout: Layout) -> DistTensor:
    """A tensor on another mesh, differentiable."""
    if crossings.here:
        return crossings.here[-1].cross(x, layout)
    return MeshTransfer.apply(x, layout)


def transferred(x: DistTensor, layout: Layout, name: str, answered: bool = False) -> DistTensor:
    """The tensor on another mesh; what is pending is summed on its own mesh first."""
    groups.check_world(layout.mesh)
    resharding.check_norms(x._spec.layout, layout)
    shape = tuple(x.shape)
    source = reduced_source(x._spec.layout, shape)
    if resharding.alike(shape, source, layout) is None:
        source = resharding.one_piece(shape, source, layout)
    local = _to_layout(x, source, name)
    ranks = {*source.mesh.process_ids, *layout.mesh.process_ids}
    near = () if local.is_meta else hosts.among(ranks)
    if source.merged or layout.merged:
        sizes, opened, goal = resharding.alike(shape, source, layout)  # type: ignore[misc]
        plan = plan_transfer(
            tuple(n for parts in sizes for n in parts), x.dtype.itemsize, opened, goal, near, machine.here
        )
        local = local.reshape(opened.local_shape(plan.shape)) if x._spec.here else local
    else:
        plan = plan_transfer(shape, x.dtype.itemsize, source, layout, near, machine.here)
    if record.observers.here:
        sent, reason = plan.sent_by(world.get_rank()), f"changes the mesh: {plan.bounds()}"
        step = resharding.Step("transfer", -1, source, layout, bytes=sent, seconds=plan.seconds)
        record.tell(record.Notice(step, name, "x", shape, reason, record.user_line(), explicit=True))
    made = run_transfer(plan, local, answered, microbatch_under_way())
    if plan.target is not layout and layout.mesh.coordinate() is not None:
        made = made.reshape(layout.local_shape(shape))
    return _own(made, x._spec.with_layout(layout))


def _idle(layout: Layout, axis: int) -> bool:
    return layout.dim_of(axis) is None


def _reshard(x: DistTensor, layout: Layout, name: str) -> DistTensor:
    local = _to_layout(x, layout, name)
    if local is x._local:
        return wrap(local.detach(), x._spec.with_layout(layout))
    return _own(local, x._spec.with_layout(layout))


def _start(x: DistTensor, layout: Layout, name: str) -> DistTensor:
    """``_reshard`` whose last message is left under way. The result awaits it where it is first read or written, and so does
    ``x`` where it is a pending value that becomes whole."""
    x._refresh()
    shape = tuple(x.shape)
    steps = resharding.plan(shape, x.element_size(), x._spec.layout, layout, machine.here)
    if not x._spec.here or not messages(steps):
        return _reshard(x, layout, name)
    steps, reduces = x._steps_to(layout, name, "x", "asked for", explicit=True), x._only_reduces(layout)
    coming = start_steps(steps, x._local, shape)
    spec = x._spec.with_layout(layout) if reduces else _own_spec(x._spec.with_layout(layout))
    made = wrap(x._local.new_empty(()).expand(layout.local_shape(shape)), spec)  # no memory before there is a value

    def arrive() -> None:
        value = coming.wait()
        for guard in guards:
            guard.end()
        if reduces:
            memory.adopt(x, value)
            made._local = x._local.detach()
        else:
            made._local = strides.named(strides.place(spec)(value), spec)

    guards = [memory.UnderWay(t, arrive) for t in ((x, made) if reduces else (made,))]
    if not coming.under_way:
        arrive()
    return made


def _own(local: Tensor, spec: Spec) -> DistTensor:
    """The value in memory of its own, as a clone has it."""
    made = _own_spec(spec)
    return wrap(strides.named(strides.place(made)(local), made) if made.here else local, made)


def _own_spec(spec: Spec) -> Spec:
    return Spec.make(spec.layout, spec.shape, strides.own_stride(spec), spec.dtype, spec.device)


def _to_layout(x: DistTensor, layout: Layout, name: str) -> Tensor:
    return x._become(layout, name, "x", "asked for", explicit=True)


class Unshard(torch.autograd.Function):
    """The whole value on every rank of the world."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        ctx.spec = x._spec
        return whole_everywhere(x, "full_tensor")

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        spec = ctx.spec
        if _differentiated(grad):
            again: Any = Unshard.apply(grad) if isinstance(grad, DistTensor) else grad
            return ShardTensor.apply(again, spec.layout.reduced(), None)
        whole = grad.full_tensor() if isinstance(grad, DistTensor) else grad
        return distribute(whole, spec.layout.reduced())


def whole_everywhere(x: Tensor, name: str) -> Tensor:
    """The whole tensor on every rank of the world, which all take part."""
    if not isinstance(x, DistTensor):
        return x
    if x.mesh.size < world.get_world_size() and x.mesh not in groups.apart.here:
        everyone = ProcessMesh(range(world.get_world_size()), ["world"])
        moved = transferred(x, Layout.replicated(everyone, x.dim()), name, answered=True)
        return strides.named(moved._local, moved._spec)
    return whole_on_mesh(x, name)


def whole_on_mesh(x: DistTensor, name: str) -> Tensor:
    """The whole tensor on the ranks of its mesh; only they take part."""
    local = _to_layout(x, Layout.replicated(x.mesh, x.dim()), name)
    return strides.named(local.detach() if local is x._local else local, x._spec)
