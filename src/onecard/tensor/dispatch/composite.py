"""Composite operators that DistTensors take whole, instead of the parts that torch makes of them (see ``intercept``).

* ``linear``, ``matmul``, ``einsum``: torch merges their leading dims into one before it multiplies. A merged dim of which
  only the inner part is cut (a batch and a cut sequence, a batch and cut heads) is no shard of the merged one, so it would
  be gathered.
* Composite operators with ``out=``: they may write to its memory directly. They run as their functional form and a copy.
* Operators that write to views on their way, forward or backward, where a cut dim would make the view a copy.
* Operators that read a tensor's numbers while they are taken apart (sections, lengths): they get those whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from string import ascii_lowercase, ascii_uppercase
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.distributed.tensor import Replicate

from onecard._torch import names as _torch
from onecard._torch.leaves import forward_mode
from onecard._torch.names import DispatchKey, DispatchKeySet
from onecard.comm.world.world import get_rank
from onecard.errors import DispatchError
from onecard.rules.call import schema_of, tensors_in
from onecard.rules.table.matmul import linear_backward, subscripts
from onecard.tensor.convert import reshard
from onecard.tensor.dispatch.counts import added_up
from onecard.tensor.dispatch.entries import whole
from onecard.tensor.dispatch.fallback import out_of_place
from onecard.tensor.dispatch.intercept import DISPATCH, KEY, onward
from onecard.tensor.dist_tensor import DistTensor, describe
from onecard.tensor.moves import whole_on_mesh

aten = torch.ops.aten


# ---- Products with leading dims

# Torch's own autograd formula for linear as one operator is kept under this key, for another kind of tensor (nested ones).
_AS_ONE = DispatchKey.AutogradNestedTensor


@whole(aten.linear.default)
def _linear(keyset: DispatchKeySet, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if input.dim() < 2 or weight.dim() != 2 or (bias is not None and bias.dim() != 1) or forward_mode():
        return onward(aten.linear.default, keyset, input, weight, bias)
    return aten.linear.default.redispatch(keyset.remove(KEY).add(_AS_ONE), input, weight, bias)


class _Matmul(torch.autograd.Function):
    """Batches of products; torch's own ``matmul_backward`` cannot be differentiated again."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return aten.matmul.default.redispatch(DISPATCH, a, b)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        (grad,), (a, b) = grads, ctx.saved_tensors
        of_a, of_b = ctx.needs_input_grad
        return (
            torch.matmul(grad, b.mH).sum_to_size(a.shape) if of_a else None,
            torch.matmul(a.mH, grad).sum_to_size(b.shape) if of_b else None,
        )


def _autocasts(x: Tensor) -> bool:
    """Whether autocast is on for a tensor; it knows no meta tensors."""
    return not x.is_meta and torch.is_autocast_enabled(x.device.type)


@whole(aten.matmul.default)
def _matmul(keyset: DispatchKeySet, a: Tensor, b: Tensor) -> Tensor:
    dims = a.dim(), b.dim()
    if max(dims) < 3 or min(dims) < 1 or _autocasts(a) or forward_mode():
        # Autocast casts, and comes here again.
        return onward(aten.matmul.default, keyset, a, b)
    if dims[1] == 2:
        return aten.linear(a, b.mT)
    if dims[0] == 2:
        return aten.linear(b.mT, a).mT
    if min(dims) == 1:
        return (aten.linear(a, b[None]) if dims[1] == 1 else aten.linear(b.mT, a[None])).squeeze(-1)
    return _Matmul.apply(a, b)


class _Einsum(torch.autograd.Function):
    """A product of two operands in which each index is in the result or in both; so the gradients are such products."""

    @staticmethod
    def forward(ctx: Any, terms: tuple[str, str, str], a: Tensor, b: Tensor) -> Tensor:
        ctx.terms = terms
        ctx.save_for_backward(a, b)
        return aten.einsum.default.redispatch(DISPATCH, "{},{}->{}".format(*terms), [a, b])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor | None, Tensor | None]:
        (grad,), (a, b), (one, other, result) = grads, ctx.saved_tensors, ctx.terms
        _, of_a, of_b = ctx.needs_input_grad
        return (
            None,
            torch.einsum(f"{result},{other}->{one}", grad, b.conj()).sum_to_size(a.shape) if of_a else None,
            torch.einsum(f"{result},{one}->{other}", grad, a.conj()).sum_to_size(b.shape) if of_b else None,
        )


@whole(aten.einsum.default)
def _einsum(keyset: DispatchKeySet, equation: str, tensors: Sequence[Tensor], *, path: Any = None) -> Tensor:
    terms = subscripts(equation)
    fits = terms is not None and [len(term) for term in terms[:2]] == [t.dim() for t in tensors]
    if terms is None or not fits or _autocasts(tensors[0]):
        return onward(aten.einsum.default, keyset, equation, tensors, path=path)
    return _Einsum.apply(terms, *tensors)


@whole(aten.tensordot.default)
def _tensordot(
    keyset: DispatchKeySet, a: Tensor, b: Tensor, dims_self: Sequence[int], dims_other: Sequence[int]
) -> Tensor:
    """An einsum; torch makes it one product of matrices."""
    one, other = list(ascii_lowercase[: a.dim()]), list(ascii_uppercase[: b.dim()])
    sizes = [(a.shape[i], b.shape[j]) for i, j in zip(dims_self, dims_other, strict=False)]
    if len(dims_self) != len(dims_other) or any(m != n for m, n in sizes):
        return onward(aten.tensordot.default, keyset, a, b, dims_self, dims_other)
    for i, j in zip(dims_self, dims_other, strict=True):
        other[j] = one[i]
    result = [name for name in (*one, *other) if (name in one) != (name in other)]
    return torch.einsum(f"{''.join(one)},{''.join(other)}->{''.join(result)}", a, b)


# ---- Losses

_MEAN, _SUM = 1, 2  # torch's numbers of reductions


@whole(aten.cross_entropy_loss.default)
def _cross_entropy(
    keyset: DispatchKeySet, x: Tensor, target: Tensor, weight: Tensor | None = None, reduction: int = _MEAN,
    ignore_index: int = -100, label_smoothing: float = 0.0,
) -> Tensor:  # fmt: skip
    """Smoothed, with weights of classes: torch selects the labels that count, and so how many there are is no static size."""
    if not label_smoothing or weight is None or reduction != _MEAN or target.is_floating_point():
        return onward(
            aten.cross_entropy_loss.default, keyset, x, target, weight, reduction, ignore_index, label_smoothing
        )
    summed = aten.cross_entropy_loss(x, target, weight, _SUM, ignore_index, label_smoothing)
    counts = target != ignore_index
    # Of labels and weights alone: microbatches count it ahead of what the model makes.
    weights = aten.embedding(weight.detach().to(summed.dtype).unsqueeze(1), torch.where(counts, target, 0).long())
    return summed / (weights.squeeze(-1) * counts).sum()


# ---- Composite operators with out=


def _into_out(op: Any) -> Callable[..., Any]:
    out = schema_of(op).out

    def kernel(keyset: DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and any(t.requires_grad for t in tensors_in([*args, *kwargs.values()])):
            raise RuntimeError(
                f"{schema_of(op).name}(): functions with out=... arguments don't support automatic differentiation, but one "
                "of the arguments requires grad."
            )
        with torch.no_grad():
            result = out_of_place(op)(*args, **kwargs)
        increment_version([kwargs[name] for name in out])
        return result

    return kernel


def _composites_with_out() -> Iterator[Any]:
    """Those with another tensor among their operands: the values of a new tensor (rand, empty) do not depend on one."""
    for name in _torch.registrations("CompositeImplicitAutograd"):
        namespace, _, rest = name.partition("::")
        base, _, overload = rest.partition(".")
        if namespace == "aten":
            op = getattr(getattr(aten, base), overload or "default")
            tensors = [a for a in op._schema.arguments if "Tensor" in str(a.type)]
            if any(a.is_out for a in tensors) and not all(a.is_out for a in tensors):
                yield op


# ---- Operators that write to views


@whole(aten._pad_circular.default)
def _pad_circular(keyset: DispatchKeySet, x: Tensor, pad: Sequence[int]) -> Tensor:
    """Each dim, from the last one, between a piece of its end and one of its beginning; torch fills a new tensor by views."""
    made, spatial = x, len(pad) // 2
    fits = len(pad) == 2 * spatial and x.dim() - spatial in (1, 2)  # without and with a batch
    for dim, before, after in zip(range(-1, -1 - spatial, -1), pad[::2], pad[1::2], strict=False):
        length = made.shape[dim] + min(before, 0) + min(after, 0) if fits else -1
        if length < max(before, after, 0):
            return onward(aten._pad_circular.default, keyset, x, pad)  # an error, which torch words
        inner = made.narrow(dim, max(-before, 0), length)
        parts = [inner.narrow(dim, length - before, before)] if before > 0 else []
        parts += [inner, inner.narrow(dim, 0, after)] if after > 0 else [inner]
        made = torch.cat(parts, dim)
    return made


def _on_wholes(op: Any) -> Callable[..., Any]:
    """For operators whose backward formula fills diagonals of its operands."""

    def kernel(keyset: DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        return onward(op, keyset, *map(_replicated, args), **kwargs)

    return kernel


def _replicated(value: Any) -> Any:
    return reshard(value, value.mesh, [Replicate()] * value.mesh.ndim) if isinstance(value, DistTensor) else value


# ---- Means


def _mean(op: Any, total_of: Any) -> Callable[..., Any]:
    """A mean that has a gradient, as a sum that is divided: torch's formula divides the expanded gradient, of the whole shape.

    The expanded gradient of a sum has no memory, and whoever takes it further takes this rank's part of it.
    """

    def kernel(keyset: DispatchKeySet, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        wide = isinstance(x, DistTensor) and (x.is_floating_point() or x.is_complex()) and x.element_size() >= 4
        if not (wide and x.requires_grad and torch.is_grad_enabled() and kwargs.get("dtype") in (None, x.dtype)):
            return onward(op, keyset, added_up(x), *args, **kwargs)
        total = total_of(x, *args, **kwargs)
        return total / (x.numel() // max(total.numel(), 1))

    return kernel


# ---- Operators that read numbers while they are taken apart

_READ = {
    aten.tensor_split.tensor_indices_or_sections: ("tensor_indices_or_sections",),
    aten._pad_packed_sequence.default: ("batch_sizes",),
}


def _with_numbers(op: Any, names: Sequence[str]) -> Callable[..., Any]:
    places = [schema_of(op).arguments.index(name) for name in names]

    def kernel(keyset: DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        given = list(args)
        for place in places:
            given[place] = numbers_of(op, given[place])
        return onward(op, keyset, *given, **kwargs)

    return kernel


def numbers_of(op: Any, value: Any) -> Any:
    """A plain tensor with the whole value, for an operator that reads it."""
    if not isinstance(value, DistTensor):
        return value
    if not value._spec.here:
        raise DispatchError(
            f"{schema_of(op).name} reads the numbers of {describe(value)}: rank {get_rank()} is not in {value.mesh!r}, so it "
            "does not hold them. Pass a plain tensor (x.full_tensor(), called on every rank of the world)"
        )
    return whole_on_mesh(value, schema_of(op).name)


@whole(aten._pack_padded_sequence.default)
def _pack_padded(keyset: DispatchKeySet, input: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
    """Which places of the padded batch come in which order is computed on plain tensors; then they are taken.

    ``batch_sizes`` stays plain: autograd's own formula and the recurrent kernels read it.
    """
    lengths = numbers_of(aten._pack_padded_sequence.default, lengths)
    padded = input if batch_first else input.transpose(0, 1)
    batch, time = padded.shape[:2]
    places = torch.arange(batch * time, device="cpu").view(batch, time)
    order, batch_sizes = aten._pack_padded_sequence(places, lengths, True)
    return padded.flatten(0, 1).index_select(0, order.to(input.device)), batch_sizes


def _register() -> torch.library.Library:
    for op in _composites_with_out():
        whole(op)(_into_out(op))
    for op in (aten.linalg_householder_product.default, aten.ormqr.default):
        whole(op)(_on_wholes(op))
    whole(aten.mean.default)(_mean(aten.mean.default, aten.sum.default))
    whole(aten.mean.dim)(_mean(aten.mean.dim, aten.sum.dim_IntList))
    for op, names in _READ.items():
        whole(op)(_with_numbers(op, names))
    library = torch.library.Library("aten", "IMPL")  # torch has no kernel of this one for plain tensors
    library.impl("linear_backward", linear_backward, "CompositeExplicitAutograd")
    return library


_library = _register()  # a kernel lives as long as its library
