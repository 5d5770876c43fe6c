"""Tensors without data among tensors that have some: what torch does not promise to keep of both."""

from __future__ import annotations

from functools import lru_cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from onecard._torch import names

loader_iterator: Any = import_module("torch.utils.data.dataloader")._BaseDataLoaderIter
"""What goes through a data loader, with or without workers."""


def sharded_memory() -> list[Any]:
    """The modules of torch's ``fully_shard`` that give up memory of gathered parameters and take it again: ``alloc_storage``."""
    folder = "torch.distributed.fsdp._fully_shard"
    found = [names._take(f"{folder}.{name}:alloc_storage", None) for name in ("_fsdp_param", "_fsdp_param_group")]
    return [
        import_module(f"{folder}.{name}")
        for name, there in zip(("_fsdp_param", "_fsdp_param_group"), found, strict=True)
        if there
    ]


def is_fake(x: Any) -> bool:
    """Whether a tensor has no data."""
    return isinstance(x, _kind())


def device_of(x: Tensor) -> torch.device:
    """A tensor's device; one without data would run an operator to tell, which every mode sees."""
    return x.fake_device if is_fake(x) else x.device  # type: ignore[attr-defined]


@lru_cache(maxsize=1)
def _kind() -> type:
    return import_module("torch._subclasses.fake_tensor").FakeTensor


def as_fake(x: Tensor) -> Tensor:
    """The tensor without data that stands for one with data: the same one each time."""
    mode: Any = names._mode_of(names._FAKE)
    return mode.from_tensor(x)


def stand_in(x: Tensor) -> Tensor:
    """A tensor without data of the same shape, strides, dtype and device, in a mode that makes such."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device_of(x))


def known(x: Any) -> Tensor | None:
    """The data of a tensor that was made of Python's numbers and is kept beside it; None where there is none."""
    return getattr(x, "constant", None)


def local_of(x: Any) -> Tensor:
    """What a rank holds of a ``DTensor``: itself, of which ``to_local`` gives a view."""
    return x._local_tensor


def has_cuda() -> bool:
    """Whether this torch is built for GPUs; without, it refuses to make tensors there, also such as have no data."""
    return torch.backends.cuda.is_built() and torch.cuda.is_available()
