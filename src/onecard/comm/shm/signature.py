"""What a rank is about to do, on a card that the other ranks compare with theirs before they touch its data."""

from __future__ import annotations

import struct
from typing import NamedTuple

import torch

KINDS = (
    *("all_reduce", "reduce", "broadcast", "all_gather", "gather", "scatter", "reduce_scatter", "all_to_all"),
    *("barrier", "monitored_barrier", "all_reduce_sparse"),
)
OPS = ("", "sum", "avg", "product", "min", "max", "band", "bor", "bxor")
DTYPES = tuple(sorted((d for d in vars(torch).values() if isinstance(d, torch.dtype)), key=str))

_CARD = struct.Struct("<QqqiBBBxI")
SIZE = _CARD.size
_KIND = {name: index for index, name in enumerate(KINDS)}
_OP = {name: index for index, name in enumerate(OPS)}
_DTYPE = {dtype: index for index, dtype in enumerate(dict.fromkeys(DTYPES))}
_NAMES = tuple(str(dtype).removeprefix("torch.") for dtype in dict.fromkeys(DTYPES))


class CollectiveSignature(NamedTuple):
    """A collective: its number in the group, what it does, and on how many elements of what.

    `elements` is -1 where ranks may differ (their tables are compared instead); `extra` tells apart what the other
    fields do not: the sizes of tensors that travel together. `stamp` says what the collective is for, and what was before.
    """

    seq: int
    kind: str
    elements: int = 0
    dtype: torch.dtype = torch.uint8
    op: str = ""
    root: int = -1
    extra: int = 0
    stamp: int = 0

    def pack(self) -> bytes:
        """The card's bytes, equal if and only if the signatures are."""
        return _CARD.pack(
            *(self.seq, self.elements, self.extra, self.root),
            *(_KIND[self.kind], _OP[self.op], _DTYPE[self.dtype], self.stamp),
        )

    def __str__(self) -> str:
        return describe(self.pack())


def number(card: bytes) -> int:
    """The collective's number in its group; 0: none was ever written on this card."""
    return int(_CARD.unpack_from(card)[0])


def describe(card: bytes) -> str:
    """Says what a card says.

    >>> describe(CollectiveSignature(3, "all_reduce", 8, torch.float32, "sum").pack())
    'all_reduce(sum) #3 of 8 float32'
    """
    seq, count, extra, root, kind, op, dtype, _ = _CARD.unpack_from(card)
    what = f"{KINDS[kind]}({OPS[op]})" if op else KINDS[kind]
    size = f" of {count} {_NAMES[dtype]}" if count > 0 else (f" of {_NAMES[dtype]}" if count < 0 else "")
    together = f" in tensors of sizes with checksum {extra:08x}" if extra else ""
    return f"{what} #{seq}{size}{together}" + (f" with root {root}" if root >= 0 else "")
