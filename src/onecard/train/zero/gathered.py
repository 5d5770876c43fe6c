"""A parameter of which a rank keeps a part, and the memory in which it is whole for a while."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef

from onecard import recorded
from onecard._torch import names as _torch
from onecard.errors import DispatchError
from onecard.tensor.buckets import Cut
from onecard.tensor.spec import Spec


class GatheredParameter:
    """A parameter of which this rank keeps a part, and the memory in which it is whole.

    Attributes:
        x: the part, a distributed tensor.
        seen: what the module computes with: ``x`` itself, or a plain parameter.
    """

    def __init__(self, cut: Cut, spec: Spec, seen: Any) -> None:
        self.x, self.seen, self.layout, self.axis, self.dim = cut.x, seen, cut.layout, cut.axis, cut.dim
        self.part, self.cut_spec, self.whole_spec = cut.x._local, cut.x._spec, spec
        like = cut.whole
        self._facts = {"size": like.shape, "stride": like.stride(), "dtype": like.dtype, "device": like.device}
        self.whole = self._buffer = torch.empty_strided(**self._facts)  # type: ignore[arg-type]
        self._nbytes = self.whole.untyped_storage().nbytes()
        storage = like.untyped_storage()
        self._beside: Any = (storage, like.storage_offset()) if storage.nbytes() > self._nbytes else None
        self._was: Tensor | None = None
        self._part_at: Any = None
        self.part_given = False  # the program has the part's data, while the whole is shown
        self.lent = False  # the program has the memory of the whole (``kept = p.data``)
        self.kept: list[tuple[TensorWeakRef, int]] = []  # what it was given, after how many steps
        self._shown_at = self._versions()
        self.forget(False, False)
        self.give_up()

    def cut(self) -> Cut:
        """How it is cut, with the memory of the whole."""
        # Not the version counter of what autograd keeps: to fill the memory again changes nothing.
        whole = self.whole if recorded.recorder is not None else self.whole.data
        return Cut(self.x, whole, self.layout, self.axis, self.dim)

    def mend(self) -> None:
        """The part is one again, if the program has given the parameter other data than a part (``p.data = ...``).

        Raises:
            DispatchError: of another dtype or device.
        """
        kept = self._facts["dtype"], self._facts["device"]
        for now in (p for p in (self.seen, self.x) if (p.dtype, p.device) != kept):
            raise DispatchError(
                f"a parameter {list(self.whole_spec.shape)}, of which a rank keeps a part, is now {now.dtype} on "
                f"{now.device}, and was {kept[0]} on {kept[1]} when its memory was laid out: convert the model before "
                "(model.to(...), then group_sharded_parallel, shard_optimizer or parallelize)"
            )
        if self.x._spec.layout is not self.cut_spec.layout and self.x._local is not self.whole:
            with (
                torch.no_grad()
            ):  # in memory of its own: what was given before, and what is given now, may be the program's
                part = self.x._become(self.cut_spec.layout, "data", "self", "other data were given", True)
                self.part = torch.empty_like(self.part).copy_(part)
            self.x._local, self.x._spec = self.part, self.cut_spec

    def allocate(self) -> None:
        """Memory for the whole. A recording has its own: a replay could not empty and fill this one."""
        if recorded.recorder is not None:
            self.whole = torch.empty_strided(**self._facts)  # type: ignore[arg-type]
            recorded.recorder.refilled(self, self.whole)
            if not recorded.recorder.computes:
                self.whole.untyped_storage().resize_(0)
        else:
            self._resize(self._nbytes)

    def show(self) -> None:
        """The module sees the whole."""
        if self.seen is self.x:
            self.part = self.x._local
            self.x._local, self.x._spec = self.whole, self.whole_spec
        else:
            self._give(self.whole)
        self._shown_at = self._versions()

    def _versions(self) -> tuple[int, int]:
        own, seen = (-1 if x.is_inference() else x._version for x in (self.whole, self.seen))
        return own, seen

    def was_written(self) -> bool:
        """Whether a block that is being recorded has written to what it was shown: an embedding's ``max_norm``."""
        return self._versions() != self._shown_at

    def _give(self, value: Tensor | None) -> None:
        """The plain parameter's memory is that of a tensor, or none."""
        with recorded.unrecorded():
            # None is of no other tensor: in a step that is only looked at, what is made of one is on no device.
            none = torch.empty(0, dtype=self._buffer.dtype, device=self._buffer.device)
            _torch.set_data(self.seen, none if value is None else value)
        if recorded.recorder is not None:
            recorded.recorder.renamed(self.seen, value)

    def remember(self) -> None:
        """The program goes on while the whole is shown: it may write to that, or to the part."""
        if self.seen is not self.x and recorded.recorder is None:
            self._was = self.x._local.clone()
            self._part_at, self.part_given = self._part_now(), False

    def _part_now(self) -> tuple[Any, ...]:
        local = self.x._local
        versions = tuple(-1 if x.is_inference() else x._version for x in (self.x, local))
        return local, versions, self.x._spec

    def part_was_written(self) -> bool:
        """Whether the program, while the whole is shown to it, has written to the part: by who is given all parameters."""
        if self._was is None:
            return False
        (local, versions, spec), (known, at, of) = self._part_now(), self._part_at
        return self.part_given or local is not known or versions != at or spec is not of

    def forget(self, shown: bool, written: bool) -> None:
        """The module sees the part, and the memory is given up. ``written``: somebody may have written to the whole.

        Versions do not say whether: a write to ``p.data`` counts none.
        """
        self.mend()
        if self.seen is self.x:
            if self.x._spec is self.whole_spec:
                if written:
                    self.part.copy_(self.cut().own())
                self.x._local, self.x._spec = self.part, self.cut_spec
        else:
            if shown and written and (recorded.recorder is None or self.was_written()):
                self.take_back()
            self._was, self.part_given = None, False
            self._give(None)
        self.whole = self._buffer

    def take_back(self) -> None:
        """What was written to the whole that the module sees is the part's; elsewhere the part may have been written to."""
        alike = not self.part_was_written()
        self.mend()
        own, part = Cut(self.x, Tensor.detach(self.seen), self.layout, self.axis, self.dim).own(), self.x._local
        part.copy_(own if self._was is None else torch.where(own == self._was, part, own))
        if self._was is not None:
            self._was.copy_(own)
            if alike:
                self._part_at = self._part_now()

    def give_up(self) -> None:
        """The memory of the whole, which nobody of those beside it in it needs either."""
        if self.lent:
            self.lent = False
            self.whole = self._buffer = torch.empty_strided(**self._facts)  # type: ignore[arg-type]
            self._nbytes = self.whole.untyped_storage().nbytes()
        self._resize(0)

    def lie_in(self, flat: Tensor, begin: int) -> None:
        """The whole has its place in a memory that others have, too."""
        place = (flat.untyped_storage(), begin, self._facts["size"], self._facts["stride"])
        self.whole = self._buffer = torch.empty(0, dtype=flat.dtype, device=flat.device).set_(*place)  # type: ignore[call-overload]
        self._nbytes = flat.untyped_storage().nbytes()
        self._shown_at = self._versions()

    @staticmethod
    def together(pieces: list[GatheredParameter]) -> None:
        """Wholes that lay one behind the other in one memory do so still: cuDNN takes a recurrent layer's weights as one."""
        memories: dict[int, list[tuple[int, GatheredParameter]]] = {}
        for piece in pieces:
            if piece._beside is not None:
                memories.setdefault(piece._beside[0]._cdata, []).append((piece._beside[1], piece))
        for members in memories.values():
            first = min(begin for begin, _ in members)
            ends = max(begin + piece.whole.numel() for begin, piece in members) - first
            alike = len({piece.whole.dtype for _, piece in members}) == 1
            if alike and len(members) > 1 and sum(piece.whole.numel() for _, piece in members) == ends:
                flat = members[0][1].whole.new_empty(ends)
                for begin, piece in members:
                    piece.lie_in(flat, begin - first)
                members[0][1].give_up()
        for piece in pieces:
            piece._beside = None

    def _resize(self, nbytes: int) -> None:
        storage = self._buffer.untyped_storage()
        if (
            storage.nbytes() != nbytes and storage.resizable()
        ):  # not once somebody has an array of numpy of it, who then keeps it
            storage.resize_(nbytes)
