"""What of a call a recording depends on: of its arguments, and of torch's modes around it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from onecard._torch import names as _torch
from onecard.static.guards.before import STILL
from onecard.tensor.deferred.calls import storage_of
from onecard.tensor.dist_tensor import DistTensor

ADVICE = {
    None: "; what changes from step to step should be a float or a tensor",
    Tensor: "; give batches of one shape (drop_last=True, or pad the last)",
    DistTensor: "; give batches of one shape and layout (drop_last=True, or pad the last)",
}


def kinds_of(leaves: Sequence[Any]) -> tuple[Any, ...]:
    """What of the arguments a recording depends on; taken before the step, which may note things on them."""
    first: dict[int, int] = {}  # an argument that is given twice is one input
    return tuple((*kind_of(x), first.setdefault(id(x), i)) for i, x in enumerate(leaves))


def in_words(kind: Any, other: Any = None) -> str:
    """A kind for people; where it looks like ``other``, with what tells them apart."""
    words = _in_words(kind)
    if other is None or _in_words(other) != words or kind[0] not in (Tensor, DistTensor):
        return words
    more = [what for what, differs in _finer(kind, other) if differs]
    return f"{words} {', '.join(more)}".rstrip()


def _in_words(kind: Any) -> str:
    if kind[0] is DistTensor:
        return repr(kind[1])
    if kind[0] is Tensor:
        return f"a tensor {list(kind[1])} {str(kind[3]).removeprefix('torch.')}"
    return "a float" if kind[0] is float else repr(kind[2])


def _finer(kind: Any, other: Any) -> Iterator[tuple[str, bool]]:
    """What the words for a tensor leave out, and whether another has it otherwise."""
    now, then = (k[1] if k[0] is DistTensor else None for k in (kind, other))
    stride, device, wants = (now.stride, now.device, kind[2]) if now else (kind[2], kind[4], kind[5])
    strides, devices, wanted = (then.stride, then.device, other[2]) if then else (other[2], other[4], other[5])
    yield f"with strides {list(stride)}", tuple(stride) != tuple(strides)
    yield f"on {device}", device != devices
    yield "with requires_grad" if wants else "without requires_grad", wants is not wanted
    if now is not None and then is not None:
        yield f"that is {now.alias or 'its own'}", now.alias != then.alias


def kind_of(x: Any) -> Any:
    """What of an argument a recording depends on."""
    if isinstance(x, DistTensor):
        return (DistTensor, x._spec.with_hint(()), x.requires_grad)  # a step hints on a batch, which then comes again
    if isinstance(x, Tensor):
        return (Tensor, x.shape, x.stride(), x.dtype, x.device, x.requires_grad)
    return (float,) if type(x) is float else (None, type(x), x)


def is_same(kind: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    """Whether two kinds are equal. Objects are the same one or not: what their class says of equality may be tensors."""
    if kind[0] is not None or other[0] is not None or isinstance(kind[2], STILL):
        return kind == other
    return kind[1] is other[1] and kind[2] is other[2] and kind[3:] == other[3:]


def one_memory(x: Tensor, *others: Tensor) -> bool:
    """Whether a tensor has memory in common with one of some others.

    Example:
        >>> x = torch.ones(4)
        >>> one_memory(x, torch.ones(4)), one_memory(x, torch.ones(4), x[2:])
        (False, True)
    """
    local = (t._local if isinstance(t, DistTensor) else t for t in (x, *others))
    mine, *theirs = (storage_of(t) if t.layout is torch.strided else None for t in local)
    return mine is not None and mine in theirs


def modes() -> Any:
    """What changes the operators of a step from outside of it: torch's default dtype, and autocast, if any is on."""
    default = torch.get_default_dtype()
    if not _torch.any_autocast():
        return default
    return default, *((torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda"))


def changed(name: str, still: dict[str, Any], holder: dict[str, Any]) -> str:
    """Which value is not what it was."""
    k = next((k for k, v in still.items() if k not in holder or holder[k] != v), "")
    where = f"{name}[{k!r}]" if name.endswith("]") else f"{name}.{k}"
    return f"{where} was {still.get(k)!r} and is {holder.get(k)!r}"


def is_like(x: Tensor, *facts: Any) -> bool:
    """Whether a tensor has this shape, these strides, dtype and device."""
    return (tuple(x.shape), tuple(x.stride()), x.dtype, x.device) == facts
