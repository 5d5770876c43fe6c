"""What stands for torch's DistributedDataParallel, whose messages are sent by code in C++ that no recording sees."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from onecard._torch.names import queue_callback

MEGABYTES = 25  # of a bucket, as DDP has them


class Replicated(nn.Module):
    """A module on all ranks of a group; backward sums gradients in buckets, each as soon as it is full, and waits at its end."""

    def __init__(
        self, module: nn.Module, *_: Any, process_group: Any = None, bucket_cap_mb: float | None = None, **__: Any
    ) -> None:
        super().__init__()
        self.module = module
        self.process_group = process_group
        self.require_backward_grad_sync = True
        self._most = int((bucket_cap_mb or MEGABYTES) * 2**20)
        self._full: list[Tensor] = []
        self._bytes = 0
        self._under_way: list[tuple[Any, Tensor, list[Tensor]]] = []
        self._asked = False
        for p in module.parameters():
            if p.requires_grad:
                p.register_post_accumulate_grad_hook(self._ready)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, gradients are not summed."""
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def _ready(self, p: Tensor) -> None:
        if not self.require_backward_grad_sync or p.grad is None:
            return
        if not self._asked:
            self._asked = True
            queue_callback(self._end)
        self._full.append(p.grad)
        self._bytes += p.grad.nbytes
        if self._bytes >= self._most:
            self._send()

    def _send(self) -> None:
        flat = torch.cat([grad.flatten() for grad in self._full])
        self._under_way.append((dist.all_reduce(flat, group=self.process_group, async_op=True), flat, self._full))
        self._full, self._bytes = [], 0

    def _end(self) -> None:
        if self._full:
            self._send()
        for work, flat, grads in self._under_way:
            work.wait()
            flat.div_(dist.get_world_size(self.process_group))
            for grad, part in zip(grads, flat.split([g.numel() for g in grads]), strict=True):
                grad.copy_(part.view_as(grad))
        self._under_way, self._asked = [], False
