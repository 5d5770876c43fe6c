"""Spec: what every rank knows of a distributed tensor without asking: layout, whole shape, strides, dtype, device."""

from __future__ import annotations

from typing import Any
from weakref import WeakValueDictionary

import torch

from onecard._torch import patches
from onecard.comm.base.state import REAL, Kept, home
from onecard.errors import DispatchError
from onecard.place.layout import Layout

# What a tensor's memory is (see ``memory``): its own or shared as on one card; a copy that stands for a view; such a copy
# of windows that overlap, which cannot be written to; a copy after a write to what it was taken from. A part of the cache
# key, so that only a copy pays for being one.
OWN, COPY, WINDOWS, STALE = "", "copy", "windows", "stale"
# Of a spec that nobody has any more nobody can tell that its successor is another object.
_interned: Kept[WeakValueDictionary[tuple[Any, ...], Spec]] = Kept(WeakValueDictionary)


class Spec:
    """The description of a distributed tensor. Interned, so that it hashes and compares by identity.

    Attributes:
        layout: how it lies on its mesh.
        shape, stride: of the whole tensor on one card.
        dtype, device: of the local tensors.
        here: whether this process is in the mesh.
        home: the world in which it was made.
        hint: axes that an operator hinted on this tensor for its backward (see ``Row.hint``).
        alias: OWN, COPY, WINDOWS or STALE.
    """

    __slots__ = ("__weakref__", "alias", "device", "dtype", "here", "hint", "home", "layout", "shape", "stride")
    layout: Layout
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    here: bool
    home: object
    hint: tuple[int, ...]
    alias: str

    @staticmethod
    def make(
        layout: Layout,
        shape: torch.Size,
        stride: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        hint: tuple[int, ...] = (),
        alias: str = OWN,
    ) -> Spec:
        """The one spec with these properties."""
        key = (layout, shape, stride, dtype, device, hint, alias)
        found = _interned.here.get(key)
        if found is None:
            found = object.__new__(Spec)
            found.layout, found.shape, found.stride, found.dtype, found.device = layout, shape, stride, dtype, device
            found.hint, found.alias = hint, alias
            found.here = layout.mesh.coordinate() is not None
            found.home = home.here
            _interned.here[key] = found
            if not patches.begun:
                patches.begin()
        return found

    @staticmethod
    def like(layout: Layout, whole: torch.Tensor, device: torch.device) -> Spec:
        """The spec of a tensor that is ``whole`` on one card."""
        return Spec.make(layout, whole.shape, whole.stride(), whole.dtype, device)

    def with_layout(self, layout: Layout) -> Spec:
        """A tensor with memory of its own, laid out otherwise."""
        return Spec.make(layout, self.shape, self.stride, self.dtype, self.device)

    def with_hint(self, hint: tuple[int, ...]) -> Spec:
        """The same spec with another hint."""
        return Spec.make(self.layout, self.shape, self.stride, self.dtype, self.device, hint, self.alias)

    def with_alias(self, alias: str) -> Spec:
        """The same spec of other memory."""
        return Spec.make(self.layout, self.shape, self.stride, self.dtype, self.device, self.hint, alias)

    def check_home(self, changes: bool) -> None:
        """Raise a DispatchError if the tensor is of another world; one of the real world may be read by a pretended rank."""
        if self.home is home.here or (self.home is REAL and not changes):
            return
        if home.here is REAL or self.home is not REAL:
            raise DispatchError(
                f"{self!r} was made by a pretended rank, so its values mean nothing: use it inside the same onecard.pretend(...)"
            )
        raise DispatchError(
            f"{self!r} is a real tensor with a pending value, which a pretended rank cannot reduce: nothing would be sent, and "
            "the value would be lost. Reduce it before onecard.pretend(...): x.reduce_partial()"
        )

    def meta(self) -> torch.Tensor:
        """The whole tensor without its data."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")

    def __reduce__(self) -> tuple[Any, ...]:
        return Spec.make, (self.layout, self.shape, self.stride, self.dtype, self.device)

    def __repr__(self) -> str:
        return f"{list(self.shape)} {str(self.dtype).removeprefix('torch.')} [{self.layout}]"


def contiguous_stride(shape: torch.Size) -> tuple[int, ...]:
    """Strides of a contiguous tensor of this shape.

    Example:
        >>> contiguous_stride(torch.Size([2, 3, 4]))
        (12, 4, 1)
    """
    stride, step = [], 1
    for size in reversed(shape):
        stride.append(step)
        step *= max(size, 1)
    return tuple(reversed(stride))
