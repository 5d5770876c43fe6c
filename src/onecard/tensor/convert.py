"""Into and out of distributed tensors: shard_tensor, from_local, reshard, unshard, to and from torch DTensor.

All are differentiable. None changes a value: only where its parts are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement

from onecard.comm.agree import check, sparse_check
from onecard.comm.base.state import Kept
from onecard.comm.issue import groups
from onecard.comm.world import world
from onecard.errors import LayoutError
from onecard.place.layout import Layout, as_code
from onecard.place.mesh import ProcessMesh
from onecard.tensor import watched
from onecard.tensor.dist_tensor import DistTensor, copies_claim, has_copies, wrap
from onecard.tensor.moves import FromLocal, Reshard, ShardTensor, ToLocal, Unshard, distribute, refuse_dual, to_mesh
from onecard.tensor.spec import Spec, contiguous_stride

_watchers: Kept[list[Callable[[Tensor, Tensor], None]]] = Kept(list)


@contextmanager
def telling(watcher: Callable[[Tensor, Tensor], None]) -> Iterator[None]:
    """Inside, a function is told of each value that a program lays out, reshards or makes whole: as it was, and as it lies now.

    To operators, and whoever watches them, these are two tensors that have nothing to do with each other.
    """
    _watchers.here.append(watcher)
    try:
        yield
    finally:
        _watchers.here.remove(watcher)


def told(x: Tensor, made: Any) -> Any:
    for watcher in _watchers.here:
        watcher(x, made)
    return made


def shard_tensor(
    data: Any,
    mesh: ProcessMesh,
    placements: Sequence[Placement],
    dtype: torch.dtype | None = None,
    requires_grad: bool | None = None,
    src: int | None = None,
) -> DistTensor:
    """Lay a whole tensor out on a mesh; each rank keeps its part.

    Args:
        data: the whole value (tensor, Parameter, array or nested list). Every rank passes the same; with ``src`` only
            that rank's is used, the others pass one of the same shape and dtype.
        mesh: where it lives.
        placements: one for each mesh axis.
        dtype: of the result; that of ``data`` if left out.
        requires_grad: of the result; that of ``data`` if left out. A Parameter gives a Parameter. For any other tensor
            that requires grad the result stays connected to it.
        src: the rank whose value counts.

    Returns:
        A DistTensor of the whole shape.

    Raises:
        LayoutError: placements that do not fit the mesh or the tensor.
        CommunicationError: the mesh names ranks that the world does not have.
        TypeError: a dtype that is not torch's.

    Source: ``paddle.distributed.shard_tensor``.

    Example:
        >>> mesh = ProcessMesh([0], ["x"])
        >>> x = shard_tensor([[1.0, 2.0], [3.0, 4.0]], mesh, [torch.distributed.tensor.Shard(0)])
        >>> x.shape, x.placements
        (torch.Size([2, 2]), (Shard(dim=0),))
    """
    if not isinstance(dtype, torch.dtype | None):
        raise TypeError(f"shard_tensor: dtype is {dtype!r}; want one of torch's, such as dtype=torch.float32")
    if isinstance(data, DistTensor):
        return _again(data, mesh, placements, dtype, requires_grad)
    tensor = data if isinstance(data, Tensor) else torch.as_tensor(data)
    if dtype is not None:
        tensor = tensor.to(dtype) if not isinstance(data, torch.nn.Parameter) else tensor.detach().to(dtype)
    layout = checked(tensor, mesh, placements, src)
    if isinstance(data, torch.nn.Parameter):
        made = distribute(tensor.detach(), layout, src)
        return torch.nn.Parameter(made, data.requires_grad if requires_grad is None else requires_grad)  # type: ignore[return-value]
    if tensor.requires_grad and requires_grad is not False:
        return told(tensor, ShardTensor.apply(tensor, layout, src))
    made = told(tensor, distribute(tensor.detach(), layout, src))
    return made.requires_grad_() if requires_grad else made


def checked(whole: Tensor, mesh: ProcessMesh, placements: Sequence[Placement], src: int | None) -> Layout:
    """The layout of a value that all ranks give."""
    layout = _layout("shard_tensor", whole, mesh, placements)
    groups.check_world(mesh)
    if check.on and src is None and mesh.coordinate() is not None:
        check.equal(f"shard_tensor as [{layout}]", mesh.process_ids, [check.plain("data", whole)])
    elif sparse_check.on.here and src is None and mesh.size > 1 and mesh.coordinate() is not None:
        watched.whole("shard_tensor", whole, layout)
    return layout


def _layout(call: str, x: Tensor, mesh: ProcessMesh, placements: Sequence[Placement]) -> Layout:
    """The layout that a call asks for; its errors name the call and the tensor."""
    if not isinstance(x, DistTensor) and (x.layout is not torch.strided or x.is_nested):
        kind = "nested" if x.is_nested else str(x.layout).removeprefix("torch.")
        dense = "torch.nested.to_padded_tensor(x, padding)" if x.is_nested else "x.to_dense()"
        raise LayoutError(
            f"{call}: a {kind} tensor cannot be divided; make it dense first: onecard.{call}({dense}, mesh, placements)"
        )
    refuse_dual(call, x)
    try:
        return Layout.of(mesh, x.dim(), placements, call)
    except LayoutError as fault:
        raise LayoutError(f"{call} of {list(x.shape)} {str(x.dtype).removeprefix('torch.')}: {fault}") from None


def _again(
    x: DistTensor,
    mesh: ProcessMesh,
    placements: Sequence[Placement],
    dtype: torch.dtype | None,
    requires_grad: bool | None,
) -> DistTensor:
    """``shard_tensor`` of what is distributed already: a Parameter gives a Parameter."""
    wanted = x.requires_grad if requires_grad is None else requires_grad
    if not isinstance(x, torch.nn.Parameter) and wanted == x.requires_grad:
        moved: Any = reshard(x, mesh, placements)
        return moved if dtype is None else moved.to(dtype)
    moved = reshard(x.detach(), mesh, placements)  # type: ignore[arg-type]
    moved = moved if dtype is None else moved.to(dtype)
    if isinstance(x, torch.nn.Parameter):
        same = moved.layout is x._spec.layout and moved.dtype == x.dtype and wanted == x.requires_grad
        return x if same else torch.nn.Parameter(moved, wanted)  # type: ignore[return-value]
    return moved.requires_grad_(wanted)


def from_local(
    local: Tensor,
    mesh: ProcessMesh,
    placements: Sequence[Placement],
    shape: Sequence[int] | None = None,
) -> DistTensor:
    """A DistTensor from the parts that the ranks already hold; nothing is copied or sent.

    Args:
        local: this rank's part.
        mesh, placements: how the parts lie.
        shape: the whole shape. Left out, every rank's part is taken to have this rank's shape; give it when sizes do
            not divide.

    Returns:
        A DistTensor that shares the part's memory; differentiable.

    Raises:
        LayoutError: the part does not have the shape that the layout gives this rank.

    Source: ``paddle.distributed.dtensor_from_local``; ``DTensor.from_local``.

    Example:
        >>> x = from_local(torch.ones(2, 3), ProcessMesh([0], ["x"]), [torch.distributed.tensor.Shard(0)])
        >>> x.shape
        torch.Size([2, 3])
    """
    return join("from_local", local, mesh, placements, shape)


def join(
    call: str, local: Tensor, mesh: ProcessMesh, placements: Sequence[Placement], shape: Sequence[int] | None
) -> DistTensor:
    """``from_local`` for the call that errors shall name."""
    layout = _layout(call, local, mesh, placements)
    groups.check_world(mesh)
    if shape is None:
        shape = [
            size * torch.Size([mesh.shape[a] for a in axes]).numel()
            for size, axes in zip(local.shape, layout.dims, strict=True)
        ]
    spec = Spec.make(layout, torch.Size(shape), contiguous_stride(torch.Size(shape)), local.dtype, local.device)
    if check.on and spec.here:
        whole = f"{call} of a part of {list(shape)} {str(local.dtype).removeprefix('torch.')} as [{layout}]"
        check.agreed(whole, mesh.process_ids, _WHOLE)
    expected = layout.local_shape(shape)
    if spec.here and tuple(local.shape) != expected:
        raise LayoutError(
            f"{call}: rank {world.get_rank()} passes a part of shape {list(local.shape)}, but [{layout}] gives it "
            f"{list(expected)} of a whole of {list(shape)}; pass shape=[...] with the whole tensor's shape"
        )
    if check.on and spec.here:
        _check_parts(call, wrap(local.detach(), spec))
    elif sparse_check.on.here and mesh.size > 1 and spec.here:
        watched.part(call, local.detach(), layout, _ALL_ONE)
    return FromLocal.apply(local, spec)


def _check_parts(call: str, x: DistTensor) -> None:
    """Under the debug check: copies are equal, and parts are not all one."""
    claim = copies_claim("the part", x)
    check.equal(call, x.mesh.process_ids, [claim] if has_copies(x) else [])
    if any(x._spec.layout.dims) and not x._spec.layout.pending:
        check.same_parts(call, x.mesh.process_ids, x._local, claim.part, _ALL_ONE)


_ALL_ONE = (
    "If each rank has read the whole: onecard.shard_tensor(x, mesh, placements); if each shall read its own part: give the "
    "loaders different samples, or use onecard.shard_dataloader"
)


_WHOLE = (
    "Say the same on every rank. Where parts are uneven, every rank gives the whole tensor's shape: "
    "onecard.from_local(x, mesh, placements, shape=[...])"
)


def to_local(x: DistTensor) -> Tensor:
    """This rank's part as a plain tensor that shares memory; its gradient is the gradient of the part."""
    x._refresh()
    return ToLocal.apply(x) if x.requires_grad and torch.is_grad_enabled() else x._local.detach()


def reshard(x: DistTensor, mesh: ProcessMesh, placements: Sequence[Placement], async_op: bool = False) -> DistTensor:
    """The same tensor under other placements on its mesh, by the cheapest chain of collectives.

    Args:
        x: a DistTensor (a plain tensor is laid out as by ``shard_tensor``).
        mesh: its mesh, or any other: disjoint, overlapping, of another shape. Then every rank of both meshes must call
            this, and any other rank may.
        placements: one for each mesh axis.
        async_op: leave the last message under way. Whoever first uses the result waits for it; ``result.wait()`` does no more
            than that. ``x`` may be written to at once. To another mesh a rank that receives waits at once.

    Returns:
        A DistTensor with the same values. The gradient comes back in the layout that ``x`` has.

    Raises:
        LayoutError: placements that do not fit. CommunicationError: ranks that the world does not have.

    Source: ``paddle.distributed.reshard``; ``async_op`` of ``DTensor.redistribute``.

    Example:
        >>> mesh = ProcessMesh([0], ["x"])
        >>> x = shard_tensor(torch.eye(2), mesh, [torch.distributed.tensor.Shard(0)])
        >>> reshard(x, mesh, [torch.distributed.tensor.Replicate()]).placements
        (Replicate(),)
    """
    if not isinstance(x, DistTensor):
        return shard_tensor(x, mesh, placements)
    layout = _layout("reshard", x, mesh, placements)
    if mesh is not x.mesh:
        return told(x, to_mesh(x, layout))
    if layout is x._spec.layout:
        return x
    return told(x, Reshard.apply(x, layout, async_op))


def unshard(x: Tensor) -> Tensor:
    """The whole tensor as a plain tensor on every rank of the world; differentiable. Plain tensors pass through.

    Every rank of the world calls it, those outside the tensor's mesh included: they are sent the value.

    Returns:
        A plain tensor of the whole shape.

    Raises:
        CommunicationError: a rank did not call it.

    Source: ``paddle.distributed.unshard_dtensor``; ``DTensor.full_tensor``.

    Example:
        >>> x = shard_tensor([1.0, 2.0], ProcessMesh([0], ["x"]), [torch.distributed.tensor.Shard(0)])
        >>> unshard(x)
        tensor([1., 2.])
    """
    if isinstance(x, DistTensor):
        return told(x, Unshard.apply(x))
    return x


def to_dtensor(x: DistTensor) -> DTensor:
    """The torch DTensor with the same local tensor (no copy). Every rank of the world must call it once for each mesh.

    Returns:
        A DTensor of the same shape, placements and ranks; differentiable.

    Raises:
        LayoutError: several axes cut one dim in another order than the mesh's, which placements cannot say; or the ranks
            along a cut axis do not ascend, as torch's groups do: it would join the parts in another order.
    """
    if x._spec.layout.merged:
        fits = ", ".join(map(as_code, x._spec.layout.in_one_piece().placements))
        raise LayoutError(
            f"[{x._spec.layout}]: a merged dim, of which each rank holds several stretches. DTensor has no placement for it; "
            f"bring it into one piece first: onecard.reshard(x, x.mesh, [{fits}]).to_dtensor()"
        )
    if turned := _turned(x._spec.layout):
        ascending = ProcessMesh(np.sort(x.mesh.process_ids).reshape(x.mesh.shape), x.mesh.dim_names)
        raise LayoutError(
            f"to_dtensor of {x._spec!r}: {turned}. Put it on a mesh whose ranks ascend first: onecard.reshard(x, "
            f"onecard.{ascending!r}, [{', '.join(map(as_code, x.placements))}]).to_dtensor()"
        )
    if any(list(axes) != sorted(axes) for axes in x._spec.layout.dims):
        raise LayoutError(f"[{x._spec.layout}]: DTensor cannot say this order of axes; reshard first")
    mesh = groups.to_device_mesh(x.mesh)
    return DTensor.from_local(
        to_local(x), mesh, x.placements, run_check=False, shape=x.shape, stride=contiguous_stride(x.shape)
    )


def from_dtensor(x: DTensor) -> DistTensor:
    """The DistTensor with the local tensor of a torch DTensor (no copy); the way back from ``to_dtensor``.

    Returns:
        A DistTensor of the same shape, placements and ranks; differentiable.

    Raises:
        LayoutError: placements of its own that are none of Shard, Replicate and Partial (``_StridedShard``); or the ranks
            along a cut axis do not ascend, so that nobody can say which part a rank holds.

    Example:
        >>> x = shard_tensor([1.0, 2.0], ProcessMesh([0], ["x"]), [torch.distributed.tensor.Shard(0)])
        >>> from_dtensor(to_dtensor(x)).layout  # doctest: +SKIP
        x=Shard(0)
    """
    mesh = ProcessMesh.from_device_mesh(x.device_mesh)
    if turned := _turned(_layout("from_dtensor", x, mesh, x.placements)):
        raise LayoutError(
            f"from_dtensor of {list(x.shape)}: {turned}. Make the DTensor on a DeviceMesh whose ranks ascend. If this rank's "
            "local tensor is its part by the mesh's order: onecard.from_local(x.to_local(), onecard."
            f"{mesh!r}, [{', '.join(map(as_code, x.placements))}], shape={list(x.shape)})"
        )
    return from_local(x.to_local(), mesh, x.placements, shape=x.shape)


def _turned(layout: Layout) -> str:
    """Why torch would take the parts of a layout in another order than they have; "" if it does not."""
    cut = {axis for axes in layout.dims for axis in axes}
    axis = next((a for a in sorted(cut) if (np.diff(layout.mesh.mesh, axis=a) < 0).any()), None)
    if axis is None:
        return ""
    name = layout.mesh.dim_names[axis]
    return (
        f"axis {name!r} of {layout.mesh!r} cuts it and its ranks do not ascend. torch counts the ranks of a group ascending, "
        "whatever the mesh says, so that DTensor's parts would change places"
    )


def _methods() -> None:
    DistTensor.to_local = to_local  # type: ignore[assignment]
    DistTensor.full_tensor = unshard  # type: ignore[assignment]
    DistTensor.to_dtensor = to_dtensor  # type: ignore[assignment]

    def redistribute(self: DistTensor, placements: Sequence[Placement], async_op: bool = False) -> DistTensor:
        """``reshard`` on the tensor's own mesh (the name that DTensor uses)."""
        return reshard(self, self.mesh, placements, async_op)

    def wait(self: DistTensor) -> DistTensor:
        """The tensor itself, after a ``reshard`` with ``async_op`` that gave it has arrived."""
        self._refresh()
        return self

    DistTensor.redistribute, DistTensor.wait = redistribute, wait  # type: ignore[assignment]


_methods()
__all__ = ["from_dtensor", "from_local", "reshard", "shard_tensor", "to_dtensor", "to_local", "unshard"]
