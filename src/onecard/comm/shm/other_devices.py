"""What a process group needs beside collectives: backends of other devices, splitting, and torch's questions about it.

torch makes the Python group the whole process group, whatever other backends its configuration names
("cpu:shm,cuda:nccl"), so the group makes those itself, when the first tensor of such a device comes.
"""

from __future__ import annotations

import functools
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from onecard._torch import names as _torch
from onecard._torch import patches
from onecard.errors import CommunicationError

_CPU = torch.device("cpu")


class OtherDevices(dist.ProcessGroup):
    """The base of the shared-memory group."""

    _timeout: float
    _seq: int  # collectives called so far

    def __init__(self, store: Any, rank: int, size: int) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # with a store, torch makes no Python class
        self._store = store
        self._backends: dict[str, Any] = {}
        self._names = {"name": "", "desc": ""}

    def getBackendName(self) -> str:
        """The name by which it is registered."""
        return "shm"

    # torch keeps a group's name in its backends, of which this one has none.
    def setGroupName(self, name: str) -> None:
        """Notes the name by which torch finds this group."""
        self._names["name"] = name

    def getGroupName(self) -> str:
        """The name by which torch finds this group."""
        return self._names["name"]

    def setGroupDesc(self, text: str) -> None:
        """Notes what the group is for."""
        self._names["desc"] = text

    def getGroupDesc(self) -> str:
        """What the group is for."""
        return self._names["desc"]

    def get_group_store(self) -> Any:
        """The store by which the ranks found each other."""
        return self._store

    def _elsewhere(self, tensor: Tensor) -> Any:
        """The backend of the device that a tensor is on. Raises CommunicationError."""
        kind = tensor.device.type
        if kind not in self._backends:
            self._backends[kind] = self._make(kind)
        return self._backends[kind]

    def _configured(self) -> dict[str, str]:
        text = _torch.backend_config(self, "cpu:shm")
        return dict(item.split(":") for item in text.split(",") if ":" in item)

    def _make(self, kind: str) -> Any:
        name = self._configured().get(kind)
        timeout = timedelta(seconds=self._timeout)
        store = dist.PrefixStore(f"{kind}/", self._store)
        if name == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            backend = dist.ProcessGroupNCCL(store, self.rank(), self.size(), options)
            self._register_backend(torch.device(kind), dist.ProcessGroup.BackendType.NCCL, backend)
            return backend
        if name == "gloo":
            return dist.ProcessGroupGloo(store, self.rank(), self.size(), timeout=timeout)
        plugin = _torch.backend_makers.get((name or "").upper())
        if plugin is not None and not plugin.extended_api:
            return plugin.creator_fn(store, self.rank(), self.size(), timeout)
        if plugin is not None:
            return plugin.creator_fn(self._options(store, timeout), None)
        raise CommunicationError(
            f"a tensor is on {kind}, and this process group was made for {self._configured()}: "
            f'name a backend for it, as in init_process_group("cpu:shm,{kind}:nccl")'
        )

    def _options(self, store: Any, timeout: timedelta) -> Any:
        made = _torch.DistributedBackendOptions()
        made.store, made.timeout = store, timeout
        made.group_rank, made.group_size = self.rank(), self.size()
        made.group_id = self.getGroupName()
        made.global_ranks_in_group = dist.get_process_group_ranks(self)
        return made

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(kind) for kind in self._configured()]

    def _get_backend(self, device: torch.device) -> Any:
        return self if device.type == "cpu" else self._elsewhere(torch.empty(0, device=device))

    @property
    def supports_splitting(self) -> bool:
        """Whether split_group works: it does, by making the parts anew."""
        return True

    @property
    def supports_coalescing(self) -> bool:
        """Whether calls can be collected between two others; the coalesced calls themselves are always there."""
        return False

    @property
    def options(self) -> Any:
        """What `split_group` copies: nothing."""
        return None

    def _has_hooks(self) -> bool:
        return False

    def _wait_for_pending_works(self) -> None:
        pass

    def _set_sequence_number_for_group(self) -> None:
        pass

    def _get_sequence_number_for_group(self) -> int:
        return self._seq

    def shutdown(self) -> None:
        """Shuts the other devices' backends down."""
        for backend in self._backends.values():
            backend.shutdown()


def unrecorded() -> None:
    """Keeps torch's flight recorder (2.14 and later) from groups in Python: it asks them for what only C++ has, and fails."""
    name = "_maybe_attach_flight_recorder"
    if hasattr(c10d, name):
        patches.replace(f"{c10d.__name__}.{name}", c10d, name, functools.partial(functools.partial, _attach))


def _attach(torchs: Any, group: Any, *rest: Any, **more: Any) -> Any:
    return None if isinstance(group, OtherDevices) else torchs(group, *rest, **more)
