"""What a rehearsed program finds in place of devices, other ranks and files: for as long as it runs, and no longer."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.utils.data import DataLoader

import onecard
from onecard import recorded
from onecard._torch import fakes
from onecard._torch.names import no_fakes
from onecard._torch.uncompiled import uncompiled
from onecard.auto.one_card import LAUNCHERS
from onecard.launch.rehearsal.loaded import load_by
from onecard.launch.rehearsal.replicated import Replicated
from onecard.launch.rehearsal.values import on_cpu


@contextmanager
def stage(world: int, rank: int, per_host: int, launched: bool = True) -> Iterator[None]:
    """Inside, the process looks as one that a launcher has started as a rank of a world, on a machine with GPUs or without; if
    not ``launched``, as one that nobody's launcher has started.
    """
    local = rank % (per_host or world)
    environment = {
        "RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": min(per_host or world, world),
        "GROUP_RANK": rank // (per_host or world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29500,
    }  # fmt: skip
    with ExitStack() as stack:
        stack.enter_context(patch.dict(os.environ, {name: str(value) for name, value in environment.items()}))
        for name in () if launched else LAUNCHERS:
            os.environ.pop(name, None)
        stack.enter_context(redirect_stdout(sys.stderr))
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", ".*available devices, and torch.random.fork_rng")
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")  # torch's own, copying parameters
        for target, name, instead in [
            *_ranks(rank),
            *_programs(),
            *_sharded(),
            *_cuda(local),
        ]:
            if hasattr(target, name):
                stack.enter_context(patch.object(target, name, instead))
        yield


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _ranks(rank: int) -> list[tuple[Any, str, Any]]:
    """Ranks are those of the pretended world; what they tell each other is what this one says."""

    def filled(into: list[Any], value: Any, *_: Any, **__: Any) -> None:
        into[:] = [value] * len(into)

    def gathered(value: Any, into: list[Any] | None = None, *_: Any, **__: Any) -> None:
        if into is not None:
            into[:] = [value] * len(into)

    def scattered(into: list[Any], values: list[Any] | None = None, *_: Any, **__: Any) -> None:
        if values:
            into[0] = values[min(rank, len(values) - 1)]

    def spawned(fn: Callable[..., Any], args: tuple[Any, ...] = (), *_: Any, **__: Any) -> None:
        fn(rank, *args)

    def ours(func: Callable[..., Any], args: tuple[Any, ...] = (), *_: Any, **__: Any) -> list[Any]:
        return [func(*args)]

    made = dist.new_group

    def new_group(ranks: Any = None, timeout: Any = None, backend: Any = None, *rest: Any, **given: Any) -> Any:
        return made(ranks, timeout, None, *rest, **given)

    mesh = torch.distributed.device_mesh.init_device_mesh

    def init_device_mesh(device_type: str, *rest: Any, **given: Any) -> Any:
        return mesh(on_cpu(device_type), *rest, **given)

    return [
        (dist, "init_process_group", _nothing), (dist, "destroy_process_group", _nothing), (dist, "new_group", new_group),
        (dist, "all_gather_object", filled), (dist, "gather_object", gathered), (dist, "broadcast_object_list", _nothing),
        (dist, "scatter_object_list", scattered), (dist, "init_device_mesh", init_device_mesh),
        (dist.device_mesh, "init_device_mesh", init_device_mesh), (mp, "spawn", spawned), (onecard, "spawn", ours),
        (nn.parallel, "DistributedDataParallel", Replicated), (nn.parallel.distributed, "DistributedDataParallel", Replicated),
    ]  # fmt: skip


def _programs() -> list[tuple[Any, str, Any]]:
    """Nothing is compiled or written; batches are read as ever, with data, in this process."""
    begin, go_on, begun = DataLoader.__init__, fakes.loader_iterator.__next__, fakes.loader_iterator.__init__

    def loader(self: Any, *args: Any, **given: Any) -> None:
        if len(args) > 5:
            args = (*args[:5], 0, *args[6:])
        for name in ("num_workers", "prefetch_factor", "persistent_workers", "multiprocessing_context", "pin_memory"):
            given.pop(name, None)
        begin(self, *args, **given)

    def start(self: Any, *args: Any, **given: Any) -> None:
        with no_fakes(), _unrecorded():
            begun(self, *args, **given)

    def next_batch(self: Any) -> Any:
        with no_fakes(), _unrecorded():
            return go_on(self)

    return [
        (nn.Module, "_apply", _applied), (torch, "save", _nothing), (torch, "compile", uncompiled),
        (torch, "load", load_by(torch.load)), (torch.serialization, "load", load_by(torch.load)),
        (nn.Module, "compile", _nothing),
        (onecard.checkpoint, "save", _nothing), (DataLoader, "__init__", loader),
        (torch.distributions.Distribution, "_validate_args", False),  # of values, which there are none of
        (fakes.loader_iterator, "__init__", start), (fakes.loader_iterator, "__next__", next_batch),
    ]  # fmt: skip


def _sharded() -> list[tuple[Any, str, Any]]:
    """Memory that ``fully_shard`` takes again: a recorder is told, which sees no storages."""

    def told(take: Any) -> Any:
        def again(tensor: Any) -> None:
            take(tensor)
            if hasattr(recorded.recorder, "filled"):
                recorded.recorder.filled(tensor)

        return again

    return [(module, "alloc_storage", told(module.alloc_storage)) for module in fakes.sharded_memory()]


def _applied(self: Any, fn: Callable[[Any], Any], recurse: bool = True) -> Any:
    """``Module.to`` and its kin. torch's own swaps tensors without data, which nobody else may refer to."""
    if recurse:
        for child in self.children():
            child._apply(fn)
    with torch.no_grad():
        for name, p in self._parameters.items():
            for x in () if p is None else (p,) if p.grad is None else (p, p.grad):
                made = fn(x)
                try:
                    if made is not x:
                        x.data = made
                except RuntimeError:  # from the meta device
                    self._parameters[name] = nn.Parameter(made, p.requires_grad)
        for name, x in self._buffers.items():
            self._buffers[name] = x if x is None else fn(x)
    return self


@contextmanager
def _unrecorded() -> Iterator[None]:
    with recorded.unrecorded():
        yield


def _cuda(local: int) -> list[tuple[Any, str, Any]]:
    """As without CUDA, also where it is: calls to GPUs do nothing, and autocast for them is that for the CPU."""
    cast = torch.autocast.__init__

    def autocast(self: Any, device_type: str, dtype: Any = None, *rest: Any, **given: Any) -> None:
        if on_cpu(device_type) != device_type and dtype is None:
            dtype = torch.float16
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            cast(self, on_cpu(device_type), dtype, *rest, **given)

    class Quiet:
        """A stream or an event."""

        def __init__(self, *_: Any, **__: Any) -> None:
            pass

        def __enter__(self) -> Quiet:
            return self

        def __exit__(self, *_: Any) -> None:
            pass

        def elapsed_time(self, other: Any) -> float:
            return 1.0

        def query(self) -> bool:
            return True

        record = wait = synchronize = wait_stream = wait_event = record_event = _nothing

    def number(*_: Any, **__: Any) -> int:
        return 0

    names = (
        "set_device",
        "synchronize",
        "empty_cache",
        "reset_peak_memory_stats",
        "manual_seed",
        "manual_seed_all",
        "init",
        "set_rng_state",
    )
    numbers = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved")
    return [
        (torch.autocast, "__init__", autocast), (torch.cuda, "current_device", lambda: local),
        (torch.cuda, "device", Quiet), (torch.cuda, "Stream", Quiet), (torch.cuda, "Event", Quiet),
        (torch.cuda, "stream", Quiet), (torch.cuda, "current_stream", Quiet), (torch.cuda, "default_stream", Quiet),
        (torch.cuda, "get_device_name", lambda *_: "GPU"), (torch.cuda, "device_count", lambda: 8),
        (torch.cuda, "get_rng_state", lambda *_, **__: torch.zeros(16, dtype=torch.uint8, device="cpu")),
        (torch.cuda, "is_bf16_supported", lambda *_, **__: True),
        *((torch.cuda, name, _nothing) for name in names), *((torch.cuda, name, number) for name in numbers),
    ]  # fmt: skip
