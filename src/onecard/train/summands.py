"""Which gradients there are: ranks that run programs of their own ask each other, before they sum."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from onecard import recorded
from onecard.comm.issue import plain, trace
from onecard.comm.issue.ranks import Ranks


def anywhere(
    words: Sequence[Sequence[bool]], group: Ranks, device: torch.device, call: str = "gradients"
) -> list[list[bool]]:
    """For each parameter what any rank of a group says of its gradient: one message of a byte for each word.

    Where nothing is sent (a pretended world, meta tensors, a look at a step) it is what this rank says.
    """
    if recorded.recorder is not None and recorded.recorder.looks:
        return [*map(list, words)]
    with recorded.unrecorded():  # the same in every replay
        mine = torch.tensor([*map(list, words)], dtype=torch.uint8, device=device)
        found = plain.all_reduce(mine, group, "max", inplace=True, call=call)
        if found.is_meta or trace.faking():
            return [*map(list, words)]
        return [[bool(n) for n in word] for word in found.tolist()]
