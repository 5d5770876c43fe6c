"""What is not made yet: a deferred model's tensors that a pipeline will divide, before it is known which rank has which.

Each keeps its place, without memory, while the step is looked at. Then a rank makes what its own stages have (``make``), and lets
the rest go (``absent.py``): none ever has the whole model. Who wants a value earlier makes that tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from onecard import recorded
from onecard._torch.names import without_torch_function
from onecard.comm.base.state import Kept, faked
from onecard.comm.world import pretend, world
from onecard.errors import DispatchError
from onecard.place.layout import Layout
from onecard.random import Key
from onecard.tensor.become import become
from onecard.tensor.deferred.calls import record_of, storage_of
from onecard.tensor.deferred.replay import materialise, whole
from onecard.tensor.dist_tensor import DistTensor, wrap
from onecard.tensor.random_operators.draw import by_stage, compare_keys
from onecard.tensor.spec import Spec, contiguous_stride
from onecard.train.absent import TOLD, Absent, name_of
from onecard.train.of_absent import tensors

_ORIGIN, _PART = "_onecard_origin", "_onecard_part"
_TOLD = TOLD - {"untyped_storage", "data_ptr"}

looking: Kept[bool] = Kept(bool)
"""Whether a step is looked at, so that no tensor needs values."""


class Unmade(Absent):
    """A tensor without memory that is made when it is known to be here, or when somebody wants its values."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if recorded.recorder is None and not looking.here and name_of(func) not in _TOLD:
            for x in [x for x in tensors((args, kwargs)) if isinstance(x, Unmade)]:
                make(x)
            return func(*args, **kwargs)
        with without_torch_function():
            return func(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return make(self).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Any) -> Any:
        return make(self).__deepcopy__(memo)


class UnmadeParameter(Unmade, nn.Parameter):
    """A parameter that is not made yet."""


class UnmadePart(DistTensor):
    """A distributed tensor of which this rank's part is not made yet; it is made for who asks for it."""

    @property
    def _local(self) -> Tensor:
        self.opened()
        make(self._local)
        return self._local

    @_local.setter
    def _local(self, value: Tensor) -> None:
        self.opened()
        self._local = value

    def opened(self) -> None:
        """Its part can be seen, without memory as it is."""
        part = vars(self).pop(_PART)
        self.__class__ = DistTensor  # type: ignore[assignment]
        self._local = part


def closed(x: DistTensor) -> None:
    """Make the part of a distributed tensor for who asks for it, unless it is made or let go."""
    if isinstance(vars(x).get("_local"), Unmade):
        vars(x)[_PART] = vars(x).pop("_local")
        x.__class__ = UnmadePart


def make(x: Tensor) -> Tensor:
    """Give a tensor its memory and its values; the same object. One that is made stays as it is."""
    if isinstance(x, Unmade):
        origin, layout = _taken(x)
        with torch.no_grad(), by_stage():
            value = whole(origin) if layout is None else materialise(origin, layout)._local
            x.untyped_storage().resize_(value.nbytes)
            x.copy_(value)
    return x


def wait(modules: Iterable[nn.Module]) -> None:
    """What deferred modules hold themselves become plain tensors that are not made yet, and stay the objects that they are.

    Raises:
        DispatchError: two of them share memory, and are not one object.
    """
    known: dict[int, tuple[str, Tensor]] = {}
    for name, x in _held(modules):
        if isinstance(x, Unmade) or not is_unmade(x):
            continue
        first, other = known.setdefault(storage_of(x), (name, x))
        if other is not x:
            raise DispatchError(
                f"{first} and {name} of a deferred model share memory, and a pipeline may have them on different ranks: make "
                "them one parameter (model.head.weight = model.embed.weight), or build the model without "
                "onecard.deferred_init()"
            )
    for _, x in known.values():
        origin = x.detach()
        if not x.dim():  # what steps count in has a value
            become(x, whole(origin))
        else:
            become(x, _without_memory(x.shape, x.dtype))
            _unmade(x, origin, None)


def _held(modules: Iterable[nn.Module]) -> Iterator[tuple[str, Tensor]]:
    for module in modules:
        for name, x in {**vars(module), **module._parameters, **module._buffers}.items():
            if isinstance(x, Tensor):
                yield f"{type(module).__name__}.{name}", x


def source(x: Tensor) -> Tensor:
    """What another tensor is made of that takes this one's place, outside autograd: of one that is not made the deferred one."""
    return _taken(x)[0] if isinstance(x, Unmade) else x.detach()


def lay_out(x: Tensor, layout: Layout) -> None:
    """A tensor that is not made becomes a distributed one, the same object; its part is made when it is known to be here."""
    origin = source(x)
    if not x.dim():
        become(x, materialise(origin, layout))
        return
    _compare(origin, layout)
    spec = Spec.make(layout, x.shape, contiguous_stride(x.shape), x.dtype, world.device())
    local = _without_memory(layout.local_shape(x.shape) if spec.here else (0,), x.dtype)
    become(x, wrap(local, spec))
    laid_out: Any = x
    _unmade(laid_out._local, origin, layout)
    closed(laid_out)


def forget(x: Tensor) -> None:
    """A tensor is not made here: a plain one without memory is left."""
    if isinstance(x, Unmade):
        _taken(x)


def _compare(origin: Any, layout: Layout) -> None:
    """All ranks of a mesh would draw the same for a tensor: asked here, as only its stage's will draw."""
    record = record_of(origin)
    for call in record.needed(storage_of(origin)) if record is not None else ():
        if isinstance(key := call.kwargs.get("generator"), Key):
            compare_keys(key, call.func, origin.shape, layout.mesh, world.get_rank() in layout.mesh.process_ids)


def is_unmade(x: Tensor) -> bool:
    """Whether a tensor's values are still to be made from what ``deferred_init`` has noted; there are none without data."""
    if faked.here or pretend.pretending() or isinstance(x, DistTensor):
        return False
    return isinstance(x, Unmade) or record_of(x) is not None


def _without_memory(shape: Any, dtype: torch.dtype) -> Tensor:
    made = torch.empty(shape, dtype=dtype, device=world.device())
    made.untyped_storage().resize_(0)
    return made


def _unmade(x: Tensor, origin: Tensor, layout: Layout | None) -> None:
    vars(x)[_ORIGIN] = origin, layout
    x.__class__ = UnmadeParameter if isinstance(x, nn.Parameter) else Unmade


def _taken(x: Tensor) -> tuple[Any, Layout | None]:
    x.__class__ = nn.Parameter if isinstance(x, UnmadeParameter) else Tensor
    found: tuple[Any, Layout | None] = vars(x).pop(_ORIGIN)
    return found


__all__ = ["Unmade", "UnmadePart", "closed", "forget", "is_unmade", "lay_out", "looking", "make", "source", "wait"]
