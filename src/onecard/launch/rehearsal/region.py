"""The part of a program from the end of its first optimizer step to the end of its second one, written down. Of one that has no
optimizer and changes its parameters itself: from the forward behind one ``backward()`` to the one behind the next.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NoReturn
from unittest.mock import patch

import torch
from torch import Tensor, fx, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer

from onecard import recorded
from onecard._torch import fakes
from onecard._torch import names as _torch
from onecard._torch.names import tree_leaves
from onecard.comm.base import record
from onecard.comm.base.record import Notice
from onecard.comm.issue.message import COLLECTIVES
from onecard.launch.rehearsal.region_recorder import RegionRecorder
from onecard.static.step.facts import facts
from onecard.static.step.phases import Phases
from onecard.static.step.step import Input, RecordedStep
from onecard.tensor.deferred.calls import storage_of
from onecard.tensor.dist_tensor import DistTensor
from onecard.train.common_memory import shared


class SecondStepEnded(BaseException):
    """Ends a program whose second step is written down."""


@dataclass(frozen=True, slots=True)
class Rehearsed:
    """What was written down.

    Attributes:
        step: the region's graph; roots: the outermost modules that ran in it; optimizer: whose steps bound it; None: by hand.
        kinds: for each input what it is: "parameters", "gradients", "states", "buffers", "batch and others".
        gradients: nodes that make gradients of parameters.
        unpriced: names of messages that no price knows.
        asked: for names of nodes that are messages of onecard's what needs them.
    """

    step: RecordedStep
    roots: tuple[nn.Module, ...]
    optimizer: Optimizer | None
    kinds: dict[fx.Node, str]
    gradients: frozenset[fx.Node]
    unpriced: tuple[str, ...]
    asked: dict[str, Notice]


class RehearsedSteps:
    """Waits for the first step, then writes down until the second one has ended.

    Attributes:
        steps: that the first optimizer has done, or the program by hand; found: the region, once it is there.
    """

    def __init__(self) -> None:
        self.phases = Phases()
        self.steps = 0
        self.found: Rehearsed | None = None
        self.recorder: RegionRecorder | None = None
        self._optimizer: Optimizer | None = None
        self._has_modules = self._armed = self._by_hand = self._backward = self._over = False
        self._stack = ExitStack()

    def __enter__(self) -> RehearsedSteps:
        self._hooks = ExitStack()
        self._hooks.callback(register_module_forward_pre_hook(self._module).remove)
        self._hooks.enter_context(self.phases.watched(lambda optimizer: None, self._stepped))
        self._hooks.enter_context(patch.object(Optimizer, "__init__", self._made(Optimizer.__init__)))
        self._by_hand = True
        return self

    def __exit__(self, *fault: Any) -> None:
        self._leave()
        self._hooks.close()

    def _module(self, module: nn.Module, _: Any) -> None:
        """A module is about to run: the first one that trains after the first step begins the region."""
        if self._over:
            self._end_at_second_step()
        if not torch.is_grad_enabled() or not module.training:
            return
        self._has_modules = True
        if self._by_hand and self._backward:
            self._stepped_by_hand()
        if self._armed:
            self._begin()

    def heard(self, func: Any, *_: Any) -> None:
        """A call of torch's."""
        self._backward |= func is Tensor.backward

    def ended(self) -> None:
        """The program has ended: its last step by hand has, too."""
        if self._over or (self._by_hand and self._backward and self.recorder is not None):
            self._end()

    def _made(self, made: Any) -> Any:
        def __init__(optimizer: Any, *args: Any, **given: Any) -> None:
            self._by_hand &= self.recorder is not None
            made(optimizer, *args, **given)

        return __init__

    def _stepped_by_hand(self) -> None:
        self.steps, self._backward = self.steps + 1, False
        if self.steps == 1:
            self._armed = True
        elif self.recorder is not None:
            self._end_at_second_step()

    def _end_at_second_step(self) -> NoReturn:
        self._end()
        raise SecondStepEnded

    def _stepped(self, optimizer: Optimizer) -> None:
        if self._by_hand or not _torch.fakes():  # a trial of the library's own, on data
            return
        if self._optimizer is None:
            self._optimizer = optimizer
        if optimizer is not self._optimizer:
            return
        self.steps += 1
        if self.steps == 1:
            self._armed = True
            if not self._has_modules:
                self._begin()
        elif self.recorder is not None:
            if _torch.in_backward():  # in a hook of its: others step behind it, and only outside may a mode be left
                self._over = True
            else:
                self._end_at_second_step()

    def _begin(self) -> None:
        self._armed = False
        self.phases.roots.clear()
        self.phases.optimizers.clear()
        self.recorder = recorded.recorder = RegionRecorder(self.phases)
        self._stack.enter_context(_torch.beneath(self.recorder.below))
        record.observers.here.append(self.recorder.tell)
        self._stack.callback(record.observers.here.remove, self.recorder.tell)

    def _leave(self) -> None:
        if recorded.recorder is not None and recorded.recorder is self.recorder:
            recorded.recorder = None
            self._stack.close()

    def _end(self) -> None:
        recorder, optimizer = self.recorder, self._optimizer
        assert recorder is not None
        self._leave()
        roots = tuple(self.phases.roots)
        kinds = _kinds(roots, self.phases.optimizers)
        alive = [*recorder.alive()]
        recorder.finish([*dict.fromkeys(node for _, node in alive)])
        _tell_what_follows(recorder.graph)
        inputs, kind_of = [], {}
        shares = shared([*recorder.outside.values()])
        for i, (node, value) in enumerate(recorder.outside.items()):
            name = kinds.get(_memory(value), "batch and others")
            kind_of[node] = name
            made = Input(
                name, name, ("object", i), None, facts(value) if isinstance(value, Tensor) else (), shares.get(i, ())
            )
            inputs.append(made)
            node.meta["input"] = made
        step = RecordedStep("step", recorder.graph, tuple(inputs), (), None, (), None, (), ())
        made_gradients = frozenset(node for x, node in alive if kinds.get(_memory(x)) == "gradients")
        self.found = Rehearsed(
            step,
            roots,
            optimizer,
            kind_of,
            made_gradients,
            tuple(sorted(recorder.unpriced - set(COLLECTIVES))),
            recorder.asked,
        )


def _tell_what_follows(graph: fx.Graph) -> None:
    """What runs after the last backward, ahead of the optimizer, belongs to it: clipping, sums of gradients."""
    last = None
    for node in graph.nodes:
        if node.meta.get("phase") == "backward":
            last = node
    seen = last is None
    for node in graph.nodes:
        if seen and node.meta.get("phase") == "forward" and last is not None:
            node.meta["phase"] = "after backward"
        seen = seen or node is last


def _kinds(roots: tuple[nn.Module, ...], optimizers: list[Optimizer]) -> dict[int, str]:
    """What tensors of the program are, by their memory; of distributed ones that of their local parts."""
    found: dict[int, str] = {}

    def put(x: Any, kind: str) -> None:
        if isinstance(x, Tensor):
            found[_memory(_local(x))] = kind

    parameters = [p for root in roots for p in root.parameters()]
    for optimizer in optimizers:
        parameters += [p for group in optimizer.param_groups for p in group["params"]]
        for states in optimizer.state.values():
            for x in tree_leaves(states):
                put(x, "states")
    for root in roots:
        for x in root.buffers():
            put(x, "buffers")
    for p in parameters:
        put(p, "parameters")
        put(p.grad, "gradients")
    return found


def _memory(x: Any) -> int:
    return storage_of(x) if isinstance(x, Tensor) and x.layout is torch.strided else -id(x)


def _local(x: Tensor) -> Tensor:
    if isinstance(x, DistTensor):
        return x._local
    return fakes.local_of(x) if isinstance(x, DTensor) else x
