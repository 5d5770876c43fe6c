"""LossWord: the loss of a step, from the rank that has the last stage to the others; nobody waits who does not ask."""

from __future__ import annotations

import torch
from torch import Tensor

from onecard.comm.issue import started
from onecard.comm.issue.ranks import Ranks
from onecard.comm.world import pretend
from onecard.pipeline.run.links import LOSS, tag

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class LossWord:
    """One number from the place ``home`` of a group to all others, sent while the backwards still run."""

    def __init__(self, group: Ranks, home: int, device: torch.device) -> None:
        self._group, self._home, self._device = group, home, device
        self.sent = group.size == 1
        # NCCL knows no tags: there messages of two ranks keep one order, and this one comes last.
        self.at_once = device.type == "cpu"

    def send(self, loss: Tensor | None) -> None:
        """Send it to everyone; on the rank that has it."""
        if self.sent or loss is None:
            return
        self.sent = True
        word = torch.stack([loss.double(), loss.new_tensor(_DTYPES.index(loss.dtype), dtype=torch.float64)])
        for place in range(self._group.size):
            if place != self._group.index:
                started.isend(word.to(self._device), place, tag(LOSS, 0), self._group, "pipeline, the loss")

    def receive(self, timeout: float | None) -> Tensor:
        """It; elsewhere."""
        word = torch.empty(2, dtype=torch.float64, device=self._device)
        started.irecv(word, self._home, tag(LOSS, 0), self._group, "pipeline, the loss").wait(timeout)
        if pretend.pretending():
            return word.new_zeros((), dtype=torch.float32)
        return word[0].to(_DTYPES[int(word[1])])
