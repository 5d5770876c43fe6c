"""Draws of a batch that a plain model takes in microbatches: all take the batch's keys, each the numbers of its own rows."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from onecard._torch.names import in_backward
from onecard.comm.base.record import user_line
from onecard.comm.base.state import Kept
from onecard.errors import DispatchError
from onecard.random import Key, new_key
from onecard.random.key import RowShare

_MANY = 2**16

Shape = tuple[int, ...]


class OfBatch:
    """The draws of one batch, which is taken in ``count`` microbatches of ``rows`` rows, divided over ``ranks`` ranks.

    Each microbatch draws from a state of its own, which torch may set back where a forward runs once more
    (``torch.utils.checkpoint``): so what is drawn tells whose it is. It stands for a key of the batch: the first microbatch takes
    these from torch's generator, as one card does.

    Args:
        lies: of what is drawn, by its shape: the dim of its rows, with how many combinations ahead of each; None: it has none.
    """

    def __init__(self, count: int, rows: int, ranks: int, lies: Mapping[Shape, tuple[int, int] | None]) -> None:
        self.count, self.rows, self.ranks, self.lies = count, rows, ranks, lies
        self.number, self.at, self.own = 0, 0, 0
        self.keys, self.drawn = list[Key](), dict[Key, Key]()
        self._state = torch.get_rng_state()  # one card's
        low, high, _ = new_key()
        self._seed = (int(high) << 32 | int(low)) % 2**62

    @contextmanager
    def microbatch(self, number: int) -> Iterator[None]:
        """Inside, the forward of a microbatch draws. Behind it, torch's generator is as one card leaves it behind the batch.

        Raises:
            DispatchError: it does not draw as the first one has.
        """
        self.number, self.at, self.own, before = number, 0, 0, _now.here
        _latest.here = self if self.count > 1 else None
        torch.default_generator.manual_seed(self._seed + number)
        _now.here = self
        try:
            yield
            if not number and self._draws_otherwise():
                with self._as_on_one_card():
                    new_key()
        finally:
            _now.here = before
            torch.set_rng_state(self._state)
        if self.at != len(self.keys):
            raise self._refused(f"a microbatch draws {self.at} times, and the first one {len(self.keys)} times")

    def _draws_otherwise(self) -> bool:
        """Whether something was drawn by torch itself: numbers of plain tensors."""
        again = torch.Generator(device="cpu").manual_seed(self._seed + self.number)
        for _ in range(self.own):
            new_key(again)
        return not torch.equal(again.get_state(), torch.get_rng_state())

    @contextmanager
    def _as_on_one_card(self) -> Iterator[None]:
        mine = torch.get_rng_state()
        torch.set_rng_state(self._state)
        try:
            yield
        finally:
            self._state = torch.get_rng_state()
            torch.set_rng_state(mine)

    def take(self, generator: Any, shape: Sequence[int]) -> Key:
        """The key of a draw of a shape."""
        drawn = None
        if generator is None:
            drawn = new_key()
            self.own += 1
        if not self.number:
            with self._as_on_one_card():
                self.keys.append(new_key(generator))
        elif self.at == len(self.keys):
            raise self._refused("a microbatch draws once more than the first one")
        key = self.keys[self.at]
        self.at += 1
        if (place := self._place(tuple(shape))) is not None:
            key = Key(key.low, key.high, RowShare(*place, self.ranks, self.rows, self.number, self.count))
        if drawn is not None:
            self._note(drawn, key)
        return key

    def _note(self, drawn: Key, key: Key) -> None:
        if self.drawn.setdefault(drawn, key) != key:
            raise self._refused("it seeds torch's generator, or sets it back")
        seen = _seen.here
        seen[drawn] = key
        if len(seen) > _MANY:
            seen.popitem(last=False)

    def _place(self, shape: Shape) -> tuple[int, int] | None:
        if shape in self.lies:
            return self.lies[shape]
        found = [d for d, n in enumerate(shape) if n == self.rows]  # of an operator that is another one without data
        if len(found) != 1:
            raise self._refused(f"in what is drawn, {list(shape)}, nobody can tell where the batch's rows are")
        return found[0], 1

    def in_backward(self) -> DispatchError:
        """The error for what is drawn in the batch's backward, and was not drawn in a forward."""
        return self._refused(
            "it draws anew in backward, where the ranks' microbatches come in an order of their own (a hook, or "
            "checkpoint(preserve_rng_state=False))"
        )

    def _refused(self, why: str) -> DispatchError:
        return DispatchError(
            f"a random operator at {user_line()}, of a model that is taken in {self.count} microbatches: {why}, so that its "
            "numbers would not be one card's: parallelize(..., microbatches=1)"
        )


_now: Kept[OfBatch | None] = Kept(lambda: None)
_latest: Kept[OfBatch | None] = Kept(lambda: None)
"""Of the batch whose backward comes next."""
_seen: Kept[OrderedDict[Key, Key]] = Kept(OrderedDict)
"""The latest keys that microbatches have drawn, and what each stands for: a forward may run again."""


def of_batch(generator: Any, shape: Sequence[int]) -> Key:
    """The key by which an operator draws what has a shape."""
    if _now.here is not None:
        return _now.here.take(generator, shape)
    drawn = new_key(generator)
    found = _seen.here.get(drawn) if _seen.here else None
    if found is None and _latest.here is not None and in_backward():
        raise _latest.here.in_backward()
    return drawn if found is None else found
