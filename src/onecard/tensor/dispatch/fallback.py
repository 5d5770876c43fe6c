"""What to do where the table has no rule: out-of-place and copy, decompose, or gather, run, and say so once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from onecard._torch import names as _torch
from onecard._torch.names import no_dispatch, tree_leaves, tree_map
from onecard.comm.base.state import Kept, machine
from onecard.comm.base.warned import warn
from onecard.errors import DispatchError, OnecardError, each_ranks_own
from onecard.moves import resharding
from onecard.place.layout import Layout
from onecard.rules.call import Call, schema_of, tensors_in
from onecard.tensor import dist_tensor, metrics
from onecard.tensor.aliasing import memory
from onecard.tensor.dist_tensor import DistTensor, describe, wrap
from onecard.tensor.spec import Spec

_warned: Kept[set[Any]] = Kept(set)


@dataclass(frozen=True, slots=True)
class FallbackCall:
    """An operator without a row was run otherwise: ``how`` is "decomposed" or "gathered"."""

    func: Any
    how: str


# Told of each such call (``coverage``); one list for the process.
observers: Kept[list[Callable[[FallbackCall], None]]] = Kept(list)


def _tell(func: Any, how: str) -> None:
    for observer in list(observers.here):
        observer(FallbackCall(func, how))


class GatheredOperatorWarning(UserWarning):
    """An operator without a rule gathered its operands. It is right, but it communicates; a row makes it fast.

    Said once for each operator. ``warnings.simplefilter("error", onecard.GatheredOperatorWarning)`` shows the line.
    """


def out_of_place(func: Any) -> Callable[..., Any]:
    """Run an ``out=`` operator as its functional form, then copy each result into its place."""
    functional = _functional(func)
    names = schema_of(func).out
    if functional is None:
        raise DispatchError(f"{func} has no out-of-place form that onecard could run; use one that returns its result")

    def expand(*args: Any, **kwargs: Any) -> Any:
        outs = [kwargs.pop(name) for name in names]
        results = functional(*args, **kwargs)
        for out, result in zip(outs, [results] if isinstance(results, Tensor) else results, strict=True):
            if out.shape == result.shape:
                write(out, result)
            elif out.numel() == 0:
                _fill_empty(out, result)
            else:
                raise DispatchError(
                    f"{func}: out= is {describe(out)}, the result is {describe(result)}; make them alike"
                )
        return outs[0] if len(outs) == 1 else tuple(outs)

    return expand


def _fill_empty(out: Tensor, result: Tensor) -> None:
    """An empty ``out=`` takes the result's shape, as in torch."""
    if not isinstance(out, DistTensor):
        out.resize_(result.shape)
        write(out, result)
        return
    with no_dispatch():
        torch.ops.aten.resize_.default(out, result.shape)
    if not isinstance(result, DistTensor):
        layout = Layout.replicated(out.mesh, result.dim())
        result = wrap(result, Spec.like(layout, result, out._spec.device))
    local = result._local if result._local.dtype == out.dtype else result._local.to(out.dtype)
    out._local, out._spec = local, Spec.like(result._spec.layout, out, out._spec.device)


def shape_in_place(func: Any, call: Call) -> Callable[..., Any]:
    """Run squeeze_, t_ and their kin: the tensor becomes the view that the out-of-place form returns."""
    functional = _functional(func) if call.schema.name in _SHAPES_IN_PLACE else None
    if functional is None:
        raise DispatchError(
            f"{func}: the memory of a DistTensor cannot change its size in place; make a new tensor, for example with "
            "x = x.reshape(...), x.new_empty(...) or torch.nn.functional.pad(x, ...)"
        )

    def expand(target: Any, *args: Any, **kwargs: Any) -> Any:
        made = functional(target, *args, **kwargs)
        with no_dispatch():
            func(target, *args, **kwargs)
        target._take(made)
        return target

    return expand


_SHAPES_IN_PLACE = frozenset({"squeeze_", "unsqueeze_", "t_", "transpose_", "swapaxes_", "swapdims_", "as_strided_"})


def copy_back(func: Any) -> Callable[..., Any]:
    """Run an in-place operator whose operand cannot keep its layout as its functional form, and copy the result back."""
    functional = _functional(func)

    def expand(target: Any, *args: Any, **kwargs: Any) -> Any:
        if functional is None:
            return gather(func, [target, *args], kwargs)
        if not isinstance(target, DistTensor) or not target._spec.layout.pending:
            write(target, functional(target, *args, **kwargs))
        else:
            # A sum cannot absorb this while it is pending: reduce it in place, which keeps its value, and try again.
            return func(target.reduce_partial(), *args, **kwargs)
        return target

    return expand


def write(target: Any, value: Tensor) -> None:
    """Copy a value into a tensor in place, keeping the target's layout (and dtype, device)."""
    memory.check_writable(target, "copy_")
    if not isinstance(target, DistTensor):
        whole = value.full_tensor() if isinstance(value, DistTensor) else value
        target.copy_(whole)
        if whole is not value and metrics.there():
            metrics.counts_the_whole()
        return
    local = (
        value._become(target._spec.layout, "copy_", "src", "keeps the target's layout", explicit=False)
        if isinstance(value, DistTensor)
        else target._spec.layout.local_part(value)
    )
    target._local.copy_(local)
    memory.wrote(target)


def _functional(func: Any) -> Callable[..., Any] | None:
    """The form of an in-place or ``out=`` operator that writes to nothing; None if there is none."""
    schema = schema_of(func)
    packet = getattr(torch.ops.aten, schema.functional, None)
    wanted = _typed(func, schema.out)
    for overload in packet.overloads() if packet is not None else ():
        candidate = getattr(packet, overload)
        if schema_of(candidate).written or len(candidate._schema.returns) != len(func._schema.returns):
            continue
        found = _typed(candidate, ())
        if found == wanted:
            return candidate
        if sorted(found) == sorted(wanted):  # polygamma(n, self), but polygamma_(self, n)
            return _renamed(candidate, [name for name, _ in wanted])
    return None


def _typed(func: Any, without: tuple[str, ...]) -> list[tuple[str, str]]:
    return [(a.name, str(a.type)) for a in func._schema.arguments if a.name not in without]


def _renamed(func: Any, names: list[str]) -> Callable[..., Any]:
    return lambda *args, **kwargs: func(**dict(zip(names, args, strict=False)), **kwargs)


def refuse_collective(func: Any, operands: list[DistTensor]) -> None:
    """Refuse the collectives of torch.distributed: they mean each rank's own tensor, and there is only one here."""
    if func.namespace in ("c10d", "_c10d_functional", "_c10d_functional_autograd"):
        raise DispatchError(each_ranks_own(f"{schema_of(func).name} of {describe(operands[0])}"))


class _NoRule(Exception):
    """A decomposition met an operator that has no row either: better gather the operator that the user called."""


def without_rule(func: Any, call: Call) -> Callable[..., Any]:
    """Run an operator that has no row: by its decomposition, else on gathered operands."""
    composite = func.has_kernel_for_dispatch_key(_torch.DispatchKey.CompositeImplicitAutograd)
    decomposition = func.decompose if composite else _OURS.get(func) or _torch.decompositions.get(func)
    if schema_of(func).written:
        decomposition = None
    checked = composite

    def expand(*args: Any, **kwargs: Any) -> Any:
        nonlocal decomposition, checked
        if decomposition is not None:
            try:
                result = _decompose(decomposition, args, kwargs)
                if result is not NotImplemented and (checked or _same_results(result, call)):
                    checked = True
                    _tell(func, "decomposed")
                    return result
            except DispatchError:  # it writes to a view that would have to be copied
                pass
            except OnecardError:
                raise
            except Exception:  # whatever stops a decomposition: the gathered call decides whether the call is wrong
                pass
            decomposition = None
        if dist_tensor.decomposing:
            raise _NoRule
        return gather(func, args, kwargs)

    return expand


def _weight_norm_backward(
    grad_w: Tensor, saved_v: Tensor, saved_g: Tensor, saved_norms: Tensor, dim: int
) -> tuple[Tensor, Tensor]:
    """w = v * g / |v|, with norms over all dims but one; torch decomposes the forward operator only."""
    others = [d for d in range(saved_v.dim()) if d != dim % saved_v.dim()]
    along = (grad_w * saved_v).sum(others, keepdim=True)
    return saved_g / saved_norms * (grad_w - saved_v * (along / saved_norms**2)), along / saved_norms


# Decompositions that torch's table lacks.
_OURS: dict[Any, Callable[..., Any]] = {torch.ops.aten._weight_norm_interface_backward.default: _weight_norm_backward}


def _decompose(decomposition: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    dist_tensor.decomposing += 1
    try:
        return decomposition(*args, **kwargs)
    finally:
        dist_tensor.decomposing -= 1


def _same_results(result: Any, call: Call) -> bool:
    """Whether a decomposition gives what the operator gives. Some do not: that of CPU flash attention gives the weights
    where its backward expects the log-sum-exp."""
    try:
        expected = call.meta_results()
    except NotImplementedError:
        return False
    found = list(tensors_in(result))
    return [(t.shape, t.dtype) for t in found] == [(t.shape, t.dtype) for t in expected]


def gather(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operator on whole operands on every rank; results are replicated. Warns once for each operator, the first
    time that it costs a message."""
    operands = [t for t in tree_leaves((args, kwargs)) if isinstance(t, DistTensor)]
    mesh, device = operands[0].mesh, operands[0]._spec.device
    if schema_of(func).name in _SPARSE or Call(func, args, kwargs).values.get("sparse"):
        raise _of_layout(func, "sparse_coo")  # before anything is sent, and said about rules
    if func not in _warned.here and not all(t._spec.layout.is_replicated for t in operands):
        _warned.here.add(func)
        _warn(func, operands)
    _tell(func, "gathered")
    originals, moved = {}, []

    def whole(value: Any) -> Any:
        if not isinstance(value, DistTensor):
            return value
        target = Layout.replicated(mesh, value.dim())
        local = value._local
        if value._spec.layout is not target:
            local = value._become(
                target, schema_of(func).name, "operand", "no rule, so it must be whole", explicit=False
            )
            if value._spec.layout is not target:
                moved.append(value)
        originals[id(local)] = (value, local)
        return local

    local_args, local_kwargs = tree_map(whole, list(args)), tree_map(whole, kwargs)
    if mesh.coordinate() is None:
        raise _unknown_shape(func, mesh)
    result = func(*local_args, **local_kwargs)
    for name in schema_of(func).written:
        _write_back(func, name, args, kwargs, local_args, local_kwargs)

    def rewrap(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if id(value) in originals:
            return originals[id(value)][0]
        if value.layout is not torch.strided:
            raise _of_layout(func, str(value.layout).removeprefix("torch."))
        return wrap(value, Spec.like(Layout.replicated(mesh, value.dim()), value, device))

    made = tree_map(rewrap, result)
    if schema_of(func).views:
        memory.view(func, args, kwargs, made, copied=bool(moved))
    return made


def _unknown_shape(func: Any, mesh: Any) -> DispatchError:
    """On a rank outside the mesh, which runs the program without its values."""
    if torch.Tag.dynamic_output_shape not in func.tags:
        return DispatchError(f"{func} has no rule, so a rank outside {mesh!r} cannot know its result's shape")
    return DispatchError(
        f"{func}: the shape of its result depends on values, which are on {mesh!r} alone, and this rank is outside of it. What "
        "has one shape for all values works: counts by torch.nn.functional.one_hot(numbers, n).sum(0) or torch.histc, and "
        "torch.nn.functional.grouped_mm on sorted tokens in place of a loop over experts"
    )


def _write_back(func: Any, name: str, args: Any, kwargs: Any, local_args: Any, local_kwargs: Any) -> None:
    """Copy what an operator wrote to gathered operands back into the operands themselves."""
    place = schema_of(func).arguments.index(name)
    given = args[place] if place < len(args) else kwargs.get(name)
    local = local_args[place] if place < len(args) else local_kwargs.get(name)
    if isinstance(given, DistTensor) and given._local is local:
        memory.wrote(given)
    elif isinstance(given, DistTensor):
        spec = Spec.like(Layout.replicated(given.mesh, local.dim()), local, given._spec.device)
        write(given, wrap(local, spec))


_SPARSE = {"_sparse_coo_tensor_with_dims_and_tensors", "_sparse_coo_tensor_unsafe", "sparse_coo_tensor"}


def _of_layout(func: Any, layout: str) -> DispatchError:
    return DispatchError(
        f"{func} makes a {layout} tensor, which cannot be distributed. Compute it on every rank from the whole: "
        "x.full_tensor(). If an embedding's gradient does: nn.Embedding(..., sparse=False)"
    )


def _warn(func: Any, operands: list[DistTensor]) -> None:
    sent = sum(
        step.bytes
        for t in operands
        for step in resharding.plan(
            tuple(t.shape), t.dtype.itemsize, t._spec.layout, Layout.replicated(t.mesh, t.dim()), machine.here
        )
    )
    schema = schema_of(func)
    terms = ", ".join(" ".join(f"{chr(97 + d)}{i}" for d in range(t.dim())) or "()" for i, t in enumerate(operands))
    name = schema.name if "::" in schema.name else f"aten::{schema.name}"
    cure = (
        f'To make it fast, state how it divides: oc.register_rule("{name}", "{terms} -> ...", verify=[a sample call])'
    )
    if torch.Tag.dynamic_output_shape in func.tags:
        cure = "The shape of its result depends on data, so no rule can divide it"
    warn(
        f"{schema.name}.{schema.overload or 'default'} has no sharding rule: its operands were gathered ({sent} bytes sent by "
        f"this rank, "
        f"{', '.join(repr(t._spec) for t in operands[:4])}). The result is right. {cure}",
        GatheredOperatorWarning,
    )
