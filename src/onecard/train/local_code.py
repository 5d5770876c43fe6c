"""local_map: run hand-written code on this rank's parts, inside a program of whole tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Placement, Replicate, Shard

from onecard.errors import DispatchError, LayoutError
from onecard.place.layout import Layout, as_code, check_placements
from onecard.place.mesh import ProcessMesh
from onecard.tensor import DistTensor
from onecard.tensor import reshard as move
from onecard.tensor.convert import join
from onecard.tensor.dist_tensor import describe, wrap
from onecard.tensor.moves import ShardTensor
from onecard.tensor.spec import Spec, contiguous_stride

Placements = tuple[Placement, ...]


def local_map(
    fn: Callable[..., Any],
    in_placements: Sequence[Any],
    out_placements: Sequence[Any],
    mesh: ProcessMesh | None = None,
    *,
    reshard: bool = True,
    out_shapes: Sequence[Any] | None = None,
) -> Callable[..., Any]:
    """A function of whole tensors that runs ``fn`` on local ones: kernels, custom autograd functions, rank-wise tricks.

    Args:
        fn: takes and returns plain tensors, this rank's parts. Other values pass through.
        in_placements: one entry for each tensor among the positional arguments: placements, or None to pass it as it is.
        out_placements: placements of the output; for several outputs one entry each (None: not a tensor, or returned as
            this rank's own).
        mesh: where it runs; by default the mesh of the first DistTensor among the arguments.
        reshard: bring arguments to ``in_placements`` first; else refuse others.
        out_shapes: for each output its whole shape, or a meta tensor of it. Needed where an argument is cut into
            unequal parts, and on ranks outside the mesh; else the parts of an output are taken to be equal.

    Returns:
        The wrapped function; differentiable. The gradient of a replicated argument is a pending sum over each axis on
        which an output is cut or pending: there each rank's gradient covers its own part of the output only.

    Raises:
        LayoutError: layouts that do not fit, outputs whose whole shape cannot be told, or a gradient that is ambiguous:
            on one axis some outputs are replicated and others not.

    Source: ``local_map`` of PyTorch's DTensor, ``shard_map`` of JAX.

    Example:
        >>> from onecard import shard_tensor
        >>> mesh = ProcessMesh([0], ["tp"])
        >>> double = local_map(lambda part: part * 2, [[Shard(0)]], [Shard(0)])
        >>> double(shard_tensor(torch.ones(4), mesh, [Shard(0)])).shape
        torch.Size([4])
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        where = mesh or _mesh_of(fn, args)
        wanted = _per_tensor(fn, args, in_placements, where)
        laid_out = [
            value if placements is None else _arranged(fn, i, value, where, placements, reshard)
            for i, (value, placements) in enumerate(zip(args, wanted, strict=True))
        ]
        if where.coordinate() is None:
            return _elsewhere(fn, laid_out, where, out_placements, out_shapes)
        outs = _entries(out_placements, where)
        pending = _pending_axes(where, [p for p in outs if p is not None])
        _check_gradients(fn, laid_out, wanted, outs, where)
        local = [_enter(v, pending) if p is not None else v for v, p in zip(laid_out, wanted, strict=True)]
        result = fn(*local, **kwargs)
        uneven = _uneven_axes([v for v, p in zip(laid_out, wanted, strict=True) if p is not None], where)
        left = _leave(fn, result, outs, where, out_shapes, uneven)
        _refuse_writes(_name(fn), [(v, p is not None) for v, p in zip(laid_out, wanted, strict=True)], left)
        return left

    return run


def _name(fn: Any) -> str:
    return f"local_map({getattr(fn, '__name__', type(fn).__name__)})"


def _mesh_of(fn: Any, args: Sequence[Any]) -> ProcessMesh:
    for value in args:
        if isinstance(value, DistTensor):
            return value.mesh
    raise LayoutError(
        f"{_name(fn)}: no argument is a DistTensor, so pass the mesh: onecard.local_map(fn, ..., mesh=mesh)"
    )


def _per_tensor(
    fn: Any, args: Sequence[Any], in_placements: Sequence[Any], mesh: ProcessMesh
) -> list[Placements | None]:
    """For each positional argument its placements, None for those that are passed as they are."""
    tensors = [i for i, value in enumerate(args) if isinstance(value, Tensor)]
    if len(in_placements) != len(tensors):
        raise LayoutError(
            f"{_name(fn)}: {len(in_placements)} entries in in_placements for {len(tensors)} tensor(s); give one for each "
            "(None: pass it as it is)"
        )
    wanted: list[Placements | None] = [None] * len(args)
    for i, entry in zip(tensors, in_placements, strict=True):
        wanted[i] = None if entry is None else check_placements(mesh, entry)
        if entry is None and isinstance(args[i], DistTensor):
            raise LayoutError(f"{_name(fn)}: argument {i} is {describe(args[i])}; say in in_placements how fn wants it")
    return wanted


def _arranged(
    fn: Any, index: int, value: Tensor, mesh: ProcessMesh, placements: Placements, reshard: bool
) -> DistTensor:
    """The argument as a DistTensor under the placements that fn wants."""
    layout = Layout.of(mesh, value.dim(), placements)
    if not isinstance(value, DistTensor):  # shard_tensor would make a new leaf of a parameter
        return ShardTensor.apply(value, layout, None)
    if value._spec.layout is not layout and not reshard:
        listed = ", ".join(map(as_code, placements))
        raise LayoutError(
            f"{_name(fn)}: argument {index} is {describe(value)}, but fn wants [{layout}]. Lay it out before: "
            f"x = onecard.reshard(x, mesh, [{listed}]), or leave reshard=True"
        )
    return move(value, mesh, placements)


def _entries(out_placements: Sequence[Any], mesh: ProcessMesh) -> list[Placements | None]:
    """One entry for each output; placements alone stand for a single output."""
    single = bool(out_placements) and all(isinstance(p, Placement) for p in out_placements)
    return [None if e is None else check_placements(mesh, e) for e in ([out_placements] if single else out_placements)]


def _pending_axes(mesh: ProcessMesh, outs: Sequence[Placements]) -> tuple[int, ...]:
    """Axes on which each rank makes only a part or a summand of some output."""
    return tuple(a for a in range(mesh.ndim) if any(not isinstance(p[a], Replicate) for p in outs))


def _check_gradients(
    fn: Any,
    args: Sequence[Any],
    wanted: Sequence[Placements | None],
    outs: Sequence[Placements | None],
    mesh: ProcessMesh,
) -> None:
    """Refuse what has no one answer: replicated outputs count once, cut ones once a rank; a sum cannot do both."""
    known = [p for p in outs if p is not None]
    for axis in _pending_axes(mesh, known):
        mixed = any(isinstance(p[axis], Replicate) for p in known)
        for i, (value, placements) in enumerate(zip(args, wanted, strict=True)):
            asks = placements is not None and torch.is_grad_enabled() and value.requires_grad
            if mixed and asks and placements is not None and isinstance(placements[axis], Replicate):
                raise LayoutError(
                    f"{_name(fn)}: on axis {mesh.dim_names[axis]!r} some outputs are replicated and some are not, so the "
                    f"gradient of the replicated argument {i} is ambiguous. Use one local_map for each kind of output, or "
                    "return the replicated one from a rank's own part with Partial()"
                )


def _enter(x: DistTensor, pending: tuple[int, ...]) -> Tensor:
    return _Enter.apply(x, pending) if x.requires_grad and torch.is_grad_enabled() else x._local.detach()


def _refuse_writes(name: str, entered: Sequence[tuple[Any, Any]], left: Any) -> None:
    """Let backward raise if an argument was written to after the call.

    Autograd counts the writes to a DistTensor; what the local code keeps for backward are parts, with counters of their
    own. Whether it keeps one may depend on a rank's part (a copy here, the memory itself there), and an error may not.
    """
    given = [(i, x, x._version) for i, (x, inside) in enumerate(entered) if inside and not x._local.is_inference()]

    def check(grad: Tensor) -> None:
        for i, x, version in given:
            if x._version != version:
                raise RuntimeError(
                    f"{name}: argument {i} ({x._spec!r}) has been modified by an inplace operation after the call, and its "
                    "backward may need what was there before. Give it a copy, x.clone(), or write to one"
                )

    for y in left if isinstance(left, list | tuple) else [left]:
        if isinstance(y, DistTensor) and y.requires_grad:
            y.register_hook(check)


def _gradient_spec(x: DistTensor, pending: tuple[int, ...]) -> Spec:
    layout = x._spec.layout
    idle = [a for a in pending if layout.dim_of(a) is None and all(a != axis for axis, _ in layout.pending)]
    return x._spec.with_layout(Layout.make(layout.mesh, layout.dims, tuple((a, "sum") for a in idle)))


class _Enter(torch.autograd.Function):
    """This rank's part; its gradient is a summand on the axes where the argument is replicated and outputs are not."""

    @staticmethod
    def forward(ctx: Any, x: Any, pending: tuple[int, ...]) -> Any:
        ctx.spec = _gradient_spec(x, pending)
        return x._local.detach()

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return wrap(grad.contiguous(), ctx.spec), None


def _uneven_axes(args: Sequence[DistTensor], mesh: ProcessMesh) -> set[int]:
    """Axes that cut an argument into unequal parts."""
    found = set()
    for x in args:
        layout, shape = x._spec.layout.opened(x.shape)
        for size, axes in zip(shape, layout.dims, strict=True):
            parts = torch.Size([mesh.shape[a] for a in axes]).numel()
            if size % parts:
                found |= set(axes)
    return found


def _leave(
    fn: Any,
    result: Any,
    outs: Sequence[Placements | None],
    mesh: ProcessMesh,
    shapes: Sequence[Any] | None,
    uneven: set[int],
) -> Any:
    many = isinstance(result, list | tuple)
    values = list(result) if many else [result]
    if len(values) != len(outs):
        raise LayoutError(
            f"{_name(fn)}: {len(outs)} entries in out_placements for {len(values)} output(s); give one for each"
        )
    known = [None] * len(values) if shapes is None else _shapes(fn, shapes, len(values))
    made = []
    for i, (value, placements, shape) in enumerate(zip(values, outs, known, strict=True)):
        if placements is None:
            made.append(value)
            continue
        if not isinstance(value, Tensor) or isinstance(value, DistTensor):
            raise DispatchError(
                f"{_name(fn)}: output {i} is {describe(value)}; fn works on plain local tensors, so it must return one "
                "(or say None in out_placements to pass it on)"
            )
        if shape is None and uneven & {a for a, p in enumerate(placements) if isinstance(p, Shard)}:
            raise LayoutError(
                f"{_name(fn)}: an argument is cut into unequal parts, so the whole shape of output {i} cannot be told from "
                f"one part of shape {list(value.shape)}; pass out_shapes=[...] with the whole shape of each output"
            )
        output = f"{_name(fn)}, output {i}"
        made.append(join(output, value.contiguous(), mesh, placements, None if shape is None else shape.shape))
    if not many:
        return made[0]
    return type(result)(*made) if hasattr(result, "_fields") else type(result)(made)


def _shapes(fn: Any, shapes: Sequence[Any], count: int) -> list[Tensor | None]:
    if shapes and all(isinstance(n, int) for n in shapes):
        shapes = [shapes]
    if len(shapes) != count:
        raise LayoutError(f"{_name(fn)}: {len(shapes)} entries in out_shapes for {count} output(s); give one for each")
    return [s if s is None or isinstance(s, Tensor) else torch.empty(tuple(s), device="meta") for s in shapes]


def _elsewhere(
    fn: Any, args: Sequence[Any], mesh: ProcessMesh, out_placements: Sequence[Any], shapes: Sequence[Any] | None
) -> Any:
    """On a rank outside the mesh: empty parts of the same whole tensors."""
    outs = _entries(out_placements, mesh)
    if shapes is None or any(p is None for p in outs):
        raise LayoutError(
            f"{_name(fn)}: this rank is not in {mesh!r}, so it cannot know the outputs; pass out_shapes=[...] with the "
            "whole shape of each (a meta tensor, if its dtype is not that of the first argument)"
        )
    inputs = [v for v in args if isinstance(v, DistTensor)]
    first, specs = inputs[0], []
    for given, known, placements in zip(shapes, _shapes(fn, shapes, len(outs)), outs, strict=True):
        assert known is not None and placements is not None
        dtype = given.dtype if isinstance(given, Tensor) else first.dtype
        layout = Layout.of(mesh, known.dim(), placements)
        specs.append(Spec.make(layout, known.shape, contiguous_stride(known.shape), dtype, first._spec.device))
    made = _Outside.apply(specs, _pending_axes(mesh, [p for p in outs if p is not None]), *inputs)
    return made[0] if len(made) == 1 else made


class _Outside(torch.autograd.Function):
    """Empty parts in, empty parts out; so are the gradients."""

    @staticmethod
    def forward(ctx: Any, specs: Sequence[Spec], pending: tuple[int, ...], *inputs: Any) -> Any:
        ctx.specs = [_gradient_spec(x, pending) for x in inputs]
        return tuple(_nothing(spec) for spec in specs)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return None, None, *(_nothing(spec) for spec in ctx.specs)


def _nothing(spec: Spec) -> DistTensor:
    return wrap(torch.empty(0, dtype=spec.dtype, device=spec.device), spec)


__all__ = ["local_map"]
