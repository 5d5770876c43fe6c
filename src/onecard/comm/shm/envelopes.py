"""Messages on their way: what is being sent, what is wanted, what arrives."""

from __future__ import annotations

import struct
from collections import deque
from dataclasses import dataclass, field

import torch
from torch import Tensor

from onecard.comm.shm.signature import DTYPES
from onecard.comm.shm.work import ShmWork

HEADER = struct.Struct("<qqqi")  # number of the message, elements, bytes, tag with the dtype before it
CODES = {dtype: code for code, dtype in enumerate(DTYPES)}


@dataclass(eq=False)
class Sending:
    work: ShmWork
    to: int
    dense: Tensor
    header: bytes
    deadline: float
    done: int = -1  # bytes; -1: not even the header

    @property
    def number(self) -> int:
        """How many messages this rank has sent to that one, with this."""
        return int(HEADER.unpack_from(self.header)[0])


@dataclass(eq=False)
class Receiving:
    work: ShmWork
    source: int | None
    tag: int
    tensor: Tensor
    dense: Tensor
    deadline: float
    number: int  # how many messages this rank has asked of that source, with this


@dataclass(eq=False)
class Arriving:
    number: int
    count: int
    size: int
    tag: int
    dtype: torch.dtype
    receiving: Receiving | None = None
    buffer: Tensor | None = None
    done: int = 0

    def __str__(self) -> str:
        return f"{self.count} {str(self.dtype).removeprefix('torch.')}"


@dataclass
class Inbox:
    """What comes from one rank: the message on its way, and those that nobody has asked for yet."""

    current: Arriving | None = None
    early: deque[Arriving] = field(default_factory=deque)
