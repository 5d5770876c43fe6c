"""Where in the program a node comes from: forward, backward or optimizer, and in which module."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from onecard._torch import names as _torch
from onecard.static.step import refusals


class Phases:
    """What runs now, told by torch's own hooks.

    Attributes:
        roots: the outermost modules that were called; ``optimizers``: those that stepped.
        operators: of distributed tensors, that have begun: as many on all ranks, whatever each does for one.
    """

    def __init__(self) -> None:
        self.roots: list[nn.Module] = []
        self.optimizers: list[Optimizer] = []
        self.operators = self._entries = 0
        self._stack: list[str] = []
        self._root = 0
        self._buffers: list[
            tuple[dict[str, Any], dict[str, Any]]
        ] = []  # of modules, as they were when the first one ran
        self._paths: dict[int, str] = {}
        self._stepping = 0

    def put_buffers_back(self) -> None:
        """Put buffers back in the places where the step has left others."""
        for holder, held in self._buffers:
            holder.update({name: x for name, x in held.items() if holder.get(name) is not x})

    def here(self) -> dict[str, Any]:
        """The phase, the module path, whether a module runs at all, and the numbers of autograd's call and of the operator.

        In backward the call's is the number of the call whose backward runs: it tells which part of forward it belongs to. What a
        module's hooks do before its own first call (ZeRO gathers its parameters) has the number of the call before: the number of
        the module's entry tells them apart.
        """
        phase = "optimizer" if self._stepping else "backward" if _torch.in_backward() else "forward"
        module = self._stack[-1] if self._stack and phase == "forward" else ""  # the outermost one's path is "", too
        numbers = {"call": _torch.call_number(), "operator": self.operators, "entry": self._entries, "root": self._root}
        return {"phase": phase, "module": module, "inside": bool(self._stack), **numbers}

    def say_roots(self, nodes: Iterable[fx.Node], known: Iterable[tuple[str, Any]]) -> None:
        """Where a step calls several modules, paths say which: of parts of one model by their paths in it, of others by the names
        under which the program knows them. The one model beside others without parameters (losses) needs no name."""
        if len(self.roots) < 2:
            return
        modules = [(name, base) for name, base in known if isinstance(base, nn.Module)]
        within = {id(m): (name, path) for name, base in reversed(modules) for path, m in base.named_modules()}
        found = [within[id(root)] for root in self.roots]
        names = {name for name, _ in found}
        trained = {
            name for (name, _), root in zip(found, self.roots, strict=True) if next(root.parameters(), None) is not None
        }
        if len(only := trained or names) == 1:
            names -= only
        heads = [".".join(part for part in (name if name in names else "", path) if part) for name, path in found]
        for node in nodes:
            if "module" in node.meta and node.meta.get("phase") == "forward" and node.meta.get("inside"):
                inner, head = node.meta["module"], heads[node.meta["root"]]
                node.meta["module"] = f"{head}.{inner}" if head and inner else head or inner

    @contextmanager
    def watched(self, before: Callable[[Optimizer], None], after: Callable[[Optimizer], None]) -> Iterator[None]:
        """Inside, modules and optimizers are seen; the two functions are told of each optimizer's step."""

        def enter(module: nn.Module, _: Any) -> None:
            if why := _OTHERS.get(type(module).__name__):
                raise refusals.sends_by_itself(type(module).__name__, why)
            if not self._stack and module not in self.roots:
                self.roots.append(module)
                self._paths.update({id(m): name for name, m in module.named_modules()})
                self._buffers += [(m._buffers, dict(m._buffers)) for m in module.modules()]
            if not self._stack:
                self._root = self.roots.index(module)
            self._stack.append(self._paths.get(id(module), type(module).__name__))
            if torch.is_grad_enabled():  # else it may be one of a call that has one backward
                self.operators += 1
                self._entries += 1

        def leave(module: nn.Module, *_: Any) -> None:
            self._stack.pop()

        def begin(optimizer: Optimizer) -> None:
            self._stepping += 1
            if optimizer not in self.optimizers:
                self.optimizers.append(optimizer)
            before(optimizer)

        def end(optimizer: Optimizer) -> None:
            self._stepping -= 1
            after(optimizer)

        hooks = (
            register_module_forward_pre_hook(enter),
            register_module_forward_hook(leave, always_call=True),
        )
        try:
            with steps(begin, end):
                yield
        finally:
            for hook in hooks:
                hook.remove()


_OTHERS = {
    "DistributedDataParallel": "onecard.fleet.distributed_model(model), or a batch that is Shard(0) and onecard.shard_optimizer",
    "FullyShardedDataParallel": "onecard.shard_optimizer(optimizer, onecard.ShardingStage3(...))",
    "DataParallel": "one process for each device (onecard run)",
}
"""Wrappers whose messages are sent by code that no recording sees, and what takes their place."""


@contextmanager
def steps(before: Callable[[Optimizer], None], after: Callable[[Optimizer], None]) -> Iterator[None]:
    """Inside, the two functions are told of each optimizer's step.

    Once, where a class of the user's calls the ``step`` of torch's class that it is made from: torch's hooks run for both, if
    any program of this process has made an optimizer of that class.
    """
    within: list[Optimizer] = []

    def begin(optimizer: Optimizer, *_: Any) -> None:
        within.append(optimizer)
        if sum(x is optimizer for x in within) == 1:
            before(optimizer)

    def end(optimizer: Optimizer, *_: Any) -> None:
        del within[max(i for i, x in enumerate(within) if x is optimizer)]
        if all(x is not optimizer for x in within):
            after(optimizer)

    hooks = register_optimizer_step_pre_hook(begin), register_optimizer_step_post_hook(end)
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
