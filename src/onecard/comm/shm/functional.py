"""The functional collective that C++ does not bring to a process group written in Python.

``_c10d_functional.all_gather_into_tensor_out`` calls a method for which torch has no trampoline. It gets a kernel for
CPU tensors of its own here; groups of other backends go on to torch's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from onecard._torch import names as _torch

_REST = _torch.DispatchKeySet(_torch.DispatchKey.CompositeExplicitAutograd)
_kept: list[torch.library.Library] = []  # a registration lasts as long as its object
ours: list[Any] = []
"""Classes of process groups in Python, which the kernel serves."""


def serve() -> None:
    """Registers the kernel."""
    resolve, register = _torch.resolve_group, _torch.register_work
    if resolve is None or register is None:
        return
    operator = torch.ops._c10d_functional.all_gather_into_tensor_out.default

    def all_gather_into_tensor_out(source: Tensor, size: int, group: Any, *, out: Tensor) -> Tensor:
        found: Any = resolve(group) if isinstance(group, str) else group
        if type(found) not in ours:
            return operator.redispatch(_REST, source, size, group, out=out)
        options = _torch.AllgatherOptions()
        options.asyncOp = True
        register(out, found._allgather_base(out, source.contiguous(), options))
        return out

    library = torch.library.Library("_c10d_functional", "IMPL")
    library.impl("all_gather_into_tensor_out", all_gather_into_tensor_out, "CPU")
    _kept.append(library)
