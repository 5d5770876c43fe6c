"""Messages between the stages of a recorded step, as nodes of its graph: sent, posted, awaited."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from onecard.comm.issue import started
from onecard.comm.issue.handle import Handle
from onecard.comm.issue.ranks import of_ranks
from onecard.recorded import register

CALL = "stages"


def send(x: Tensor, place: int, tag: int, ranks: tuple[int, ...], name: str) -> None:
    """Send ``x`` to the rank at a place of the pipeline, and go on. Of a copy: the step may use its memory again."""
    started.isend(
        x.clone(memory_format=torch.contiguous_format), place, tag, of_ranks(tuple(ranks), name), CALL, ways=True
    )


def send_packed(tensors: Sequence[Tensor], place: int, tag: int, ranks: tuple[int, ...], name: str) -> None:
    """Send several tensors of one dtype as one message: their elements, one tensor after the other."""
    packed = torch.cat([x.reshape(-1) for x in tensors])
    started.isend(packed, place, tag, of_ranks(tuple(ranks), name), CALL, ways=True)


def post(x: Tensor, place: int, tag: int, ranks: tuple[int, ...], name: str) -> Handle:
    """Be ready for what the rank at a place sends: it is in ``x`` after ``wait``."""
    return started.irecv(x, place, tag, of_ranks(tuple(ranks), name), CALL, ways=True)


def wait(handle: Handle, x: Tensor) -> None:
    """What was posted has come."""
    handle.wait()


register(send)
register(send_packed)
register(post, 0)
register(wait, 1)
