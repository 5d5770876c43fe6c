"""Which tensors of a rehearsed program have data: whole numbers that it makes itself (tokens, indices, lengths, orders) have,
until they meet tensors without; numbers with a point that it computes have not. What Python reads of those is a stand-in.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from onecard._torch import fakes
from onecard._torch.names import TorchDispatchMode, no_fakes, tree_leaves, tree_map
from onecard.comm.base import own, record
from onecard.static.guards.reads import note, stand_in
from onecard.tensor.dist_tensor import DistTensor

aten = torch.ops.aten
MOST = 2**24  # elements with data that a program makes; more of them have none
_FROM_LISTS = (torch.tensor, torch.as_tensor)  # as they are when onecard is imported
_READS = {aten._local_scalar_dense.default: None, aten.equal.default: True, aten.allclose.default: True}


class RehearsedValues(TorchDispatchMode):
    """Below autograd: runs operators on data where there is data, and without it where there is none."""

    def __init__(self) -> None:
        super().__init__()
        self.told: set[str] = set()
        self._fakes = fakes.mode_now()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(map(holds_others, types)):
            return NotImplemented
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        without = [x for x in given if fakes.is_fake(x)]
        if func in _READS:
            return self._read(func, args, kwargs, without)
        if not given:
            return self._made(func, args, kwargs)
        if not without:
            if func is aten.lift_fresh.default and given[0].is_floating_point():
                return func(*args, **kwargs)
            with no_fakes():
                return func(*args, **kwargs)
        with fakes.again(self._fakes):  # a loader reads with data, and may meet a mean that the program computed before
            return self._without(func, args, kwargs)

    def _without(self, func: Any, args: Any, kwargs: Any) -> Any:
        """An operator on tensors of which one has no data."""
        if func in (aten.index.Tensor, aten.index_put_.default, aten._index_put_impl_.default):
            args = (args[0], [x for index in args[1] for x in _positions(index)], *args[2:])
        if func is aten.masked_select.default and args[0].shape == args[1].shape:
            func, args = aten.index.Tensor, (args[0], _positions(args[1]))
        if func is aten._pack_padded_sequence.default and not fakes.is_fake(args[1]):
            return _packed(*args)
        args, kwargs = tree_map(_without_data, (args, kwargs))
        result = func(*args, **kwargs)
        note(func, args, kwargs, result)
        if func is aten._amp_foreach_non_finite_check_and_unscale_.default:
            args[1]._stand_in = 0.0  # no gradient is infinite, or no optimizer would step
        return result

    def _made(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A tensor that is made of no other."""
        made = func(*args, **kwargs)
        if not isinstance(made, Tensor) or not has_data(made):
            return made
        with no_fakes():
            return func(*args, **kwargs)

    def _read(self, func: Any, args: Any, kwargs: Any, without: list[Tensor]) -> Any:
        if not without:
            with no_fakes():
                return func(*args, **kwargs)
        if _READS[func] is not None:
            self.tell()
            return _READS[func]
        kept = fakes.known(args[0])
        if kept is not None:
            with no_fakes():
                return kept.item()
        self.tell()
        return getattr(args[0], "_stand_in", stand_in(args[0].dtype))

    def tell(self) -> None:
        """Says once that a number is none."""
        if not self.told:
            self.told.add("values")
            line = record.user_line()
            print(
                f"note: {line} reads a value that is not computed here: it gets 1, here and from now on",
                file=sys.stderr,
            )


def has_data(x: Tensor) -> bool:
    """Whether a tensor of its kind has data: whole numbers on the CPU that are not too many.

    Example:
        >>> has_data(torch.arange(3)), has_data(torch.ones(3))
        (True, False)
    """
    return not (x.is_floating_point() or x.is_complex()) and x.numel() <= MOST and x.device.type == "cpu"


def holds_others(kind: type) -> bool:
    """Whether tensors of a class are made of others, which are what runs: distributed ones, torch's too."""
    return issubclass(kind, DistTensor) or hasattr(kind, "__tensor_flatten__") or own.is_under_way(kind)


def _without_data(x: Any) -> Any:
    return fakes.as_fake(x) if isinstance(x, Tensor) and not fakes.is_fake(x) else x


def _positions(index: Any) -> list[Any]:
    """A mask with data as the positions that it takes, in each of its dims: how many there are is known then."""
    if not isinstance(index, Tensor) or index.dtype not in (torch.bool, torch.uint8) or fakes.is_fake(index):
        return [index]
    with no_fakes():
        return [*index.nonzero().unbind(1)] if index.ndim else [index]


def _packed(x: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
    """Sequences without data packed by lengths that have some: these say how many elements there are."""
    batch, time = x.shape[:2] if batch_first else (x.shape[1], x.shape[0])
    with no_fakes():
        places, sizes = aten._pack_padded_sequence(torch.zeros(batch, time, device="cpu"), lengths, True)
    return x.new_empty(places.shape[0], *x.shape[2:]), sizes


class RehearsedCalls(TorchFunctionMode):
    """Above autograd: calls that ask for a GPU, which a rehearsal needs none of, and those that hand data to NumPy or Python.

    Attributes:
        listeners: are told of each call and its result.
    """

    def __init__(self, values: RehearsedValues) -> None:
        super().__init__()
        self.values = values
        self.listeners: list[Callable[[Any, Any, Any, Any], None]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (Tensor.numpy, Tensor.tolist, Tensor.__array__) and fakes.is_fake(args[0]):
            return self._read(func, args[0])
        if func is Tensor.__format__ and fakes.is_fake(args[0]) and args[0].numel() == 1:
            return format(args[0].item(), *args[1:])
        if func in _FROM_LISTS and args and isinstance(args[0], list | tuple):
            args = (tree_map(self._number, args[0]), *args[1:])
        if func is not torch.device:
            if func in (Tensor.cuda, Tensor.pin_memory):
                return args[0]
            if func is Tensor.record_stream:
                return None
            args, kwargs = tree_map(on_cpu, (tuple(args), dict(kwargs)), is_leaf=_is_leaf)
        result = func(*args, **kwargs)
        for listener in self.listeners:
            listener(func, args, kwargs, result)
        return result

    def _number(self, x: Any) -> Any:
        """What torch would read in C++ of a tensor in a list, past all modes."""
        return self._read(Tensor.tolist, x) if isinstance(x, Tensor) and fakes.is_fake(x) else x

    def _read(self, func: Any, x: Tensor) -> Any:
        kept = fakes.known(x)
        with no_fakes():
            if kept is None:
                self.values.tell()
                kept = (
                    torch.ones(x.shape, dtype=x.dtype, device="cpu")
                    if x.dtype != torch.bool
                    else torch.zeros(x.shape, dtype=x.dtype, device="cpu")
                )
            return kept.tolist() if func is Tensor.tolist else kept.numpy()


def _is_leaf(x: Any) -> bool:
    return isinstance(x, torch.Size) or not isinstance(x, list | tuple | dict)


def on_cpu(x: Any) -> Any:
    """A GPU's name as the CPU's; all else as it is.

    Example:
        >>> on_cpu("cuda:1"), on_cpu(torch.device("cuda")), on_cpu("dim")
        ('cpu', device(type='cpu'), 'dim')
    """
    if isinstance(x, torch.device) and x.type == "cuda":
        return torch.device("cpu")
    if isinstance(x, str) and x.partition(":")[0] == "cuda":
        return "cpu"
    return x
