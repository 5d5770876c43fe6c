"""The key of one random operator: 64 bits of torch's generator.

So all that torch has for random state works: ``torch.manual_seed``, ``get_rng_state`` and ``set_rng_state``,
``fork_rng``, the recomputation of ``torch.utils.checkpoint``, and ``generator=`` arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from onecard._torch import names as _torch
from onecard.random.philox import MASK, Word
from onecard.recorded import one_node


class RowShare(NamedTuple):
    """Which rows of a batch a microbatch has: of the rows that each of ``ranks`` has, the part ``number`` ``of`` so many.

    ``dim`` of what is drawn has ``rows`` rows of the microbatch, with ``before`` combinations of others ahead of each.
    """

    dim: int
    before: int
    ranks: int
    rows: int
    number: int
    of: int


class Key(NamedTuple):
    """The two key words of Philox: ints, or while a graph is traced 0-dim int64 tensors, so that it draws anew.

    ``share``: what is drawn is a microbatch's part of what the key gives for its batch.
    """

    low: Word
    high: Word
    share: RowShare | None = None

    def pack(self) -> Tensor:
        """As a tensor on the CPU, in the place of a kernel's own seed."""
        return _packed(self)

    def with_dims(self, apart: Sequence[Sequence[int]]) -> Key:
        """The same, of a tensor whose dims are taken apart, each in dims of these sizes."""
        if self.share is None:
            return self
        dim, before = sum(map(len, apart[: self.share.dim])), self.share.before
        for size in apart[self.share.dim]:
            if size % (before * self.share.rows) == 0:
                return Key(self.low, self.high, self.share._replace(dim=dim, before=before))
            dim, (before, rest) = dim + 1, divmod(before, size)
            if rest or not before:
                break
        raise ValueError(
            f"the rows of a microbatch do not lie in one of the dims {[*apart[self.share.dim]]} of what is drawn: "
            "microbatches=1, or draw ahead of the view that folds them"
        )

    @staticmethod
    def unpack(packed: Tensor) -> Key:
        """The key that was packed."""
        return _unpacked(packed)


@one_node(is_pure=True)
def _packed(key: Key) -> Tensor:
    words = key.low, key.high
    if isinstance(key.low, Tensor):
        return torch.stack(list(words))
    return torch.tensor((*words, *(key.share or ())), device="cpu")


@one_node(is_pure=True)
def _unpacked(packed: Tensor) -> Key:
    if tracing():
        low, high = packed.unbind()
        return Key(low, high)
    words: list[int] = packed.tolist()
    return Key(words[0], words[1], RowShare(*words[2:]) if words[2:] else None)


@one_node(is_pure=True)
def shared(key: Key, *share: int) -> Key:
    """The key of a microbatch's part of a draw, from the batch's; the numbers are those of ``RowShare``."""
    return Key(key.low, key.high, RowShare(*share))


def new_key(generator: Any = None) -> Key:
    """Draw the key of one operator.

    Args:
        generator: a ``torch.Generator``; None for torch's default CPU generator, whatever the device of the operator,
            so that CPU and GPU draw the same. A Key is returned as it is.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> state = torch.get_rng_state()
        >>> key = new_key()
        >>> torch.set_rng_state(state)
        >>> new_key() == key, new_key() == key
        (True, False)
    """
    return generator if isinstance(generator, Key) else _drawn(generator)


@one_node()
def _drawn(generator: Any) -> Key:
    device = generator.device if generator is not None else "cpu"
    # By torch's generator itself: what draws by keys would draw one for a key.
    with nullcontext() if tracing() or not _torch.modes_on() else _torch.no_dispatch():
        bits = torch.randint(-(2**63), 2**63 - 1, (), generator=generator, device=device)
    if not tracing():
        value = int(bits)
        return Key(value & MASK, (value >> 32) & MASK)
    return Key(bits & MASK, (bits >> 32) & MASK)


def tracing() -> bool:
    """Whether operators are now recorded into a graph, in which nothing may depend on a value."""
    if torch.compiler.is_compiling():
        return True
    if not _torch.modes_on():  # fake tensors and proxies come with a mode; to ask them takes 11 us
        return False
    return get_proxy_mode() is not None or _torch.fake_mode() is not None
