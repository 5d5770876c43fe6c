"""What several tensors share on one card stays shared on a mesh: pending sums with their views, and copies that stand for views.

*A pending sum.* One that an operator needed whole stays whole for the next one, so it is summed once. Its views must
follow. What a tensor's *layout* becomes may depend only on the program, which is the same on all ranks, and never on who
else on this rank happens to hold the memory (a rank may keep a ``to_local()`` for a log): or else ranks would disagree
about which messages are due. So reducing always changes the layouts of the tensor and its views; the memory decides only
whether the sum can be made where it lies or needs a new place.

*A copy.* On one card ``x[1:3]`` is a view. Where its elements lie on other ranks it has memory of its own here, and
remembers the operator and the tensor that it was taken from. A write to that tensor makes the copy stale, and the next
operator that reads it takes it again. A write to the copy goes back at once. Stale is a part of the spec and so of the
dispatcher's cache key: what is no copy pays nothing.

Source: the functionalization pass of PyTorch (``torch.func.functionalize``), which replays views likewise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef

from onecard._torch import names as _torch
from onecard.errors import DispatchError
from onecard.place.layout import Layout
from onecard.tensor.aliasing.strides import expanded, overlaps
from onecard.tensor.spec import COPY, OWN, STALE, WINDOWS

if TYPE_CHECKING:
    from onecard.tensor.dist_tensor import DistTensor

aten = torch.ops.aten

copies: dict[int, list[ref[Copy]]] = {}  # by the storage that each was taken from; only of those that are alive
_OVERLAP = ("unfold", "as_strided")  # as many elements as the base has need not be all of its elements


class Memory:
    """Local memory and the tensors that see it. While it is a pending sum, each of them sees all of its elements."""

    __slots__ = ("__weakref__", "members")

    def __init__(self) -> None:
        self.members: list[TensorWeakRef] = []

    def add(self, member: DistTensor) -> None:
        """Note one more tensor over this memory."""
        if len(self.members) & 15 == 15:
            self.members = [r for r in self.members if r() is not None]
        self.members.append(TensorWeakRef(member))
        member._memory = self

    def alive(self) -> list[DistTensor]:
        """The tensors that still see it."""
        return [m for r in self.members if (m := r()) is not None and m._memory is self]


class Copy(Memory):
    """Memory of a copy that stands for a view.

    Attributes:
        base: an alias of what it was taken from, which lives as long as the copy; as on one card the memory does.
        kind: COPY or WINDOWS.
        take: takes it from the base, or from a plain tensor like the base.
        whole: the copy itself, for when only views of it are alive.
        window: the call, if it is a slice or a select.
        key: the base's storage.
    """

    __slots__ = ("base", "key", "kind", "name", "take", "whole", "window")

    def __init__(
        self, func: Any, index: int | None, args: Sequence[Any], kwargs: dict[str, Any], made: DistTensor
    ) -> None:
        super().__init__()
        rest = args[1:]

        def take(base: Any) -> Any:
            result = func(base, *rest, **kwargs)
            return result if index is None else result[index]

        self.take, self.base, self.name = take, args[0]._alias(), func._schema.name.removeprefix("aten::")
        self.window = (func, rest, kwargs) if func in (aten.slice.Tensor, aten.select.int) else None
        overlap = overlaps(made._spec) or args[0]._spec.alias == WINDOWS
        self.kind = WINDOWS if overlap else COPY
        made._spec = made._spec.with_alias(self.kind)
        self.whole = made._alias()
        self.add(made)
        self.key = _storage(self.base)
        copies.setdefault(self.key, []).append(ref(self))

    def __del__(self) -> None:
        others = [r for r in copies.pop(self.key, ()) if r() is not None and r() is not self]
        if others:
            copies[self.key] = others

    def alive(self) -> list[DistTensor]:
        return [self.whole, *super().alive()]

    def mark(self, alias: str) -> None:
        """Say of all tensors over this memory whether they are stale."""
        for member in self.alive():
            member._spec = member._spec.with_alias(alias)

    def name_of_whole(self) -> DistTensor:
        """A tensor of the whole copy; of what befalls it (a pending sum that is reduced) all others are told."""
        made = self.whole._alias()
        self.add(made)
        return made


class UnderWay(Memory):
    """Memory of a tensor whose value is under way: a sum, or the last message of a ``reshard`` that was started. Whoever
    reads or writes it first awaits that: ``arrive``."""

    __slots__ = ("arrive", "before")

    def __init__(self, x: DistTensor, arrive: Callable[[], None]) -> None:
        super().__init__()
        self.arrive = arrive
        self.before = [(member, member._spec, member._memory) for member in _same(x)]
        for member, spec, _ in self.before:
            self.add(member)
            member._spec = spec.with_alias(STALE)

    def end(self) -> None:
        """Its tensors are what they were."""
        for member, spec, known in self.before:
            if member._memory is self:
                member._spec, member._memory = spec, known
        self.before.clear()


def arrived(x: DistTensor) -> None:
    """Await a value that is under way: there is no memory of it before."""
    if isinstance(x._memory, UnderWay):
        x._memory.arrive()


def view(func: Any, args: Sequence[Any], kwargs: dict[str, Any], made: Any, copied: bool) -> None:
    """Note what a view operator gave: one or several views of its first argument, or copies that stand for them."""
    several = isinstance(made, list | tuple)
    for index, result in enumerate(made if several else [made]):
        if copied:
            Copy(func, index if several else None, args, kwargs, result)
        elif args[0]._memory is not None or result._spec.layout.pending:
            share(args[0], result)


def covers(func: Any, base: Tensor, results: Sequence[Tensor]) -> bool:
    """Whether each view has every element of its base, so that reducing either reduces the other."""
    name = func._schema.name.removeprefix("aten::")
    return name not in _OVERLAP and all(result.numel() >= base.numel() for result in results)


def share(base: DistTensor, view: DistTensor) -> None:
    """Note that a view shares its base's memory."""
    if base._memory is None:
        Memory().add(base)
    base._memory.add(view)  # type: ignore[union-attr]
    if base._spec.alias != OWN:
        view._spec = view._spec.with_alias(base._spec.alias)


def check_writable(x: Any, name: str) -> None:
    """Refuse to write where an element has several places in a tensor, on every rank alike.

    On one card torch refuses most such writes, deprecates some, and lets the order decide others.
    """
    if not hasattr(x, "_spec") or (name in ("fill_", "zero_") and x._spec.alias != WINDOWS):
        return
    if any(expanded(x._spec)):
        raise DispatchError(
            f"{name}: {x._spec!r} is expanded: several of its elements are one in memory, and cannot be written one by one. "
            "Write to what it was expanded from, or to a copy: x = x.clone()"
        )
    if x._spec.alias == WINDOWS or overlaps(x._spec):
        raise DispatchError(
            f"{name}: {x._spec!r} consists of windows that overlap in memory (of unfold or as_strided) or is a view of a copy "
            "of such windows: an element would be written in one window and not in the next. Write to what the windows "
            "were taken from, or to a copy: x = x.clone()"
        )


def wrote(x: Any) -> None:
    """After a write to the local memory of a tensor: copies that stand for views of it are stale, and what it is itself a
    copy of is written to."""
    if copies and hasattr(x, "_spec"):
        _outdate(_storage(x), None)
        if isinstance(x._memory, Copy):
            _write_back(x._memory)


def _outdate(key: int, but: Copy | None) -> None:
    for reference in copies.get(key, ()):
        copy = reference()
        if copy is not None and copy is not but and copy.whole._spec.alias != STALE:
            copy.mark(STALE)
            _outdate(_storage(copy.whole), None)


def refresh(x: DistTensor) -> None:
    """Take a stale copy again; await a sum that is under way."""
    copy: Any = x._memory
    if isinstance(copy, UnderWay):
        return copy.arrive()
    made, whole = copy.take(copy.base), copy.name_of_whole()
    copy.mark(copy.kind)
    layout = whole._spec.layout
    if layout.pending and made._spec.layout is not layout:
        adopt(whole, made._become(layout.reduced(), copy.name, "self", "written to since", explicit=False))
    else:
        local = made._become(layout, copy.name, "self", "written to since", explicit=False)
        _overwrite(whole._local, local)


def _write_back(copy: Copy) -> None:
    """Write a copy to what it is a view of on one card."""
    base = copy.base
    base.reduce_partial()
    _outdate(copy.key, copy)
    if copy.window is not None and not any(expanded(base._spec)) and not base._spec.layout.merged:
        _write_window(copy, base, *copy.window)
    else:
        value = _laid_out(copy, Layout.replicated(base.mesh, copy.whole.dim()))
        if base._spec.here:
            _write_through(copy.take, base, value)
    if isinstance(base._memory, Copy):
        _write_back(base._memory)


def _laid_out(copy: Copy, layout: Layout) -> Tensor:
    reason = "written to, and on one card a view"
    return copy.name_of_whole()._become(layout, copy.name, "self", reason, explicit=False)


def _write_through(take: Callable[[Tensor], Tensor], base: DistTensor, value: Tensor) -> None:
    """Write a view of a whole tensor to this rank's part: the operator, on plain tensors, says where the elements go."""
    spec = base._spec
    fresh = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=spec.device)
    written = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=spec.device).zero_()
    _overwrite(take(fresh), value)
    _overwrite(take(written), torch.ones_like(value))
    written, fresh = spec.layout.local_part(written), spec.layout.local_part(fresh)
    _overwrite(base._local, torch.where(written != 0, fresh, base._local))


def _write_window(copy: Copy, base: DistTensor, func: Any, rest: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """``_write_through`` for slice and select, which leave the other dims alone: nothing is made whole but one dim."""
    spec = base._spec
    dim = (rest[0] if rest else kwargs.get("dim", 0)) % base.dim()
    at = func(
        torch.arange(spec.shape[dim], device="cpu"), 0, *rest[1:], **{k: v for k, v in kwargs.items() if k != "dim"}
    )
    dims = list(spec.layout.dims)
    dims[dim : dim + 1] = [()] * at.dim()
    value = _laid_out(copy, Layout.make(base.mesh, tuple(dims)))
    if not spec.here:
        return
    mine = spec.layout.local_slices(spec.shape)[dim]
    at = at.reshape(-1)
    found = ((at >= mine.start) & (at < mine.stop)).nonzero().reshape(-1).to(spec.device)
    value = value if value.dim() == base.dim() else value.unsqueeze(dim)
    base._local.index_copy_(dim, at.to(spec.device)[found] - mine.start, value.index_select(dim, found))


def reduce_partial(x: DistTensor, reduce: Callable[[Tensor, bool], Tensor]) -> None:
    """Sum a pending tensor and its views.

    Args:
        x: the tensor.
        reduce: from this rank's summand, and whether it may be overwritten, to the sum.
    """
    same = _same(x)
    if len(same) > 1 and _holds_all(x._local, same):
        reduce(x._local.as_strided((x._local.numel(),), (1,), 0), True)
        _relabel(x, same)
    else:
        adopt(x, reduce(x._local, len(same) == 1 and users(x._local) == 1))


def adopt(x: DistTensor, total: Tensor) -> None:
    """Take the sum of a pending tensor, of its local shape, as its value and that of its views."""
    same = _same(x)
    if len(same) == 1:
        x._local = total if total.stride() == x._local.stride() else torch.empty_like(x._local).copy_(total)
    else:
        key, old = _storage(x), x._local.untyped_storage()
        fresh = x._local.new_empty(old.nbytes() // x._local.element_size())
        fresh.copy_(x._local.as_strided((fresh.numel(),), (1,), 0))
        _overwrite(_like(fresh, x._local), total)
        for member in same:
            member._local = _like(fresh, member._local)
        _follow(key, _storage(x))
    _relabel(x, same)


def _follow(old: int, new: int) -> None:
    """Copies of what moved: where it lies now."""
    if old in copies:
        copies[new] = copies.pop(old)
        for reference in copies[new]:
            copy = reference()
            if copy is not None:
                copy.key = new


def _relabel(x: DistTensor, same: list[DistTensor]) -> None:
    """Nobody is pending any more."""
    done = not isinstance(x._memory, Copy)
    for member in same:
        spec = member._spec
        member._spec = spec.with_layout(spec.layout.reduced()).with_alias(spec.alias)
        if done:
            member._memory = None


def alone(x: DistTensor) -> bool:
    """Whether nobody else sees a tensor's memory, as far as this rank knows: it may be overwritten."""
    return len(_same(x)) == 1 and users(x._local) == 1 and x._local.untyped_storage().nbytes() == x._local.nbytes


def _same(x: DistTensor) -> list[DistTensor]:
    return x._memory.alive() if x._memory is not None else [x]


def _holds_all(local: Tensor, same: list[DistTensor]) -> bool:
    """Whether these tensors, and nobody else, see a memory that holds nothing else."""
    alone = len({id(member._local) for member in same}) == users(local)
    return alone and local.untyped_storage().nbytes() == local.nbytes


def users(local: Tensor) -> int:
    """How many tensors share this one's memory (the storage handle made here counts as one more)."""
    storage = local.untyped_storage()
    return _torch.storage_users(storage._cdata) - 1


def _storage(x: DistTensor) -> int:
    return x._local.untyped_storage()._cdata


def _like(memory: Tensor, local: Tensor) -> Tensor:
    return memory.as_strided(local.size(), local.stride(), local.storage_offset())


def _overwrite(target: Tensor, value: Tensor) -> None:
    """Copy, where dims of the target may be expanded."""
    once = tuple(slice(0, 1) if step == 0 else slice(None) for step in target.stride())
    target[once].copy_(value[once])
