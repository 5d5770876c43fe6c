"""Master weights: an optimizer that updates 32-bit copies of 16-bit parameters, on the CPU if it is asked to.

During a step the copies stand in the optimizer's groups, so its states are made like them and its arithmetic is theirs;
before and after it everybody sees the model's own parameters. A copy is a state of its parameter, "master_weight".

What a program writes to a parameter counts: where a parameter is no longer its copy rounded, the copy takes its value before
the next step. Values are compared, since a write to ``p.data`` counts no version.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from onecard.tensor import DistTensor
from onecard.tensor.aliasing import memory
from onecard.tensor.buckets import Cut
from onecard.tensor.dist_tensor import wrap
from onecard.tensor.spec import Spec, contiguous_stride

KEY = "master_weight"


class Masters:
    """The copies of an optimizer's parameters.

    Args:
        cuts: (parameter, how it is cut or None, this rank's part of it).
        offload: copies and states live on the CPU, and the update runs there.
    """

    def __init__(
        self, optimizer: Optimizer, cuts: Iterable[tuple[DistTensor, Cut | None, Tensor]], offload: bool
    ) -> None:
        self._of: dict[Any, Any] = {}
        self._swapped = False
        for param, cut, part in cuts:
            if offload or param.dtype in (torch.float16, torch.bfloat16):
                layout = param._spec.layout.reduced() if cut is None else cut.layout
                device = torch.device("cpu") if offload and not part.is_meta else part.device
                dtype = torch.promote_types(param.dtype, torch.float32)
                spec = Spec.make(layout, param.shape, contiguous_stride(param.shape), dtype, device)
                copy = part.detach().to(device, dtype, copy=True).contiguous()
                self._of[param] = nn.Parameter(wrap(copy, spec))
        optimizer.register_load_state_dict_pre_hook(lambda opt, state: self._show(opt))
        optimizer.register_load_state_dict_post_hook(self._hide)

    def begin(self, optimizer: Optimizer) -> None:
        """Before a step: the copies and their gradients take the parameters' places."""
        for param, master in self._of.items():
            grad = param.grad
            if grad is not None:
                _follow(master._local, param._local)
                spec = master._spec
                master.grad = wrap(grad._local.to(spec.device, spec.dtype), spec.with_layout(grad._spec.layout))
        self._show(optimizer)

    def end(self, optimizer: Optimizer) -> None:
        """After a step: what was updated, rounded, is the parameters' value."""
        if self._swapped:
            with torch.no_grad():
                for param, master in self._of.items():
                    if master.grad is not None:
                        param._local.copy_(master._local)
                        memory.wrote(param)
                    master.grad = None
            self._hide(optimizer)

    def _show(self, optimizer: Optimizer) -> None:
        if self._swapped:
            return
        self._swapped = True
        for param, master in self._of.items():
            state = optimizer.state.pop(param, {})
            known = state.pop(KEY, None)
            if isinstance(known, DistTensor) and known._local.data_ptr() != master._local.data_ptr():
                with torch.no_grad():
                    master.copy_(known)  # it was loaded
            if state:
                optimizer.state[master] = state  # the same dict: an optimizer may hold it while its closure runs
        exchange(optimizer, self._of)

    def _hide(self, optimizer: Optimizer) -> None:
        self._swapped = False
        for param, master in self._of.items():
            state = optimizer.state.pop(master, None)
            if state:
                loaded = state.pop(KEY, None)
                if loaded is not None:
                    with torch.no_grad():
                        master.copy_(loaded)
                state[KEY] = master.detach()
                optimizer.state[param] = state
        exchange(optimizer, {master: param for param, master in self._of.items()})


def exchange(optimizer: Optimizer, by: dict[Any, Any]) -> None:
    """Put others in the places of an optimizer's parameters, in the lists that it has (LBFGS keeps its own name of one)."""
    for group in optimizer.param_groups:
        group["params"][:] = [by.get(p, p) for p in group["params"]]


def exchange_all(optimizer: Optimizer, by: dict[Any, Any]) -> None:
    """Others in the places of an optimizer's parameters, with their states."""
    exchange(optimizer, by)
    for p in [p for p in optimizer.state if p in by]:
        optimizer.state[by[p]] = optimizer.state.pop(p)


def _follow(master: Tensor, param: Tensor) -> None:
    """A copy takes the elements of its parameter that are not its own, rounded."""
    now = param.to(master.device)
    if now.dtype == master.dtype:
        master.copy_(now)
    else:
        torch.where(now == master.to(now.dtype), master, now.to(master.dtype), out=master)
