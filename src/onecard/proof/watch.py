"""What a program computes, as it runs: each operator's results with their layouts, its line, module and phase."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from onecard import recorded
from onecard._torch import fakes
from onecard._torch import names as _torch
from onecard._torch.names import TorchDispatchMode, tree_leaves
from onecard.comm.base import record
from onecard.comm.joined.hub import Told
from onecard.rules.call import schema_of
from onecard.static.step.writes import arguments_written
from onecard.tensor.dist_tensor import DistTensor
from onecard.tensor.spec import Spec

_SKIPPED = ("profiler", "prim", "c10d", "_c10d_functional")
_ROOM = (
    "empty",
    "new_empty",
    "empty_like",
    "empty_strided",
    "new_empty_strided",
    "detach",
    "alias",
    "lift_fresh",
    "set_",
)


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor as a rank had it at one place of the program: its local part, and how it lies; no spec: a plain tensor."""

    local: Tensor
    spec: Spec | None

    @staticmethod
    def of(x: Tensor) -> Value:
        """A copy of what a tensor is now."""
        with torch.no_grad():
            if isinstance(x, DistTensor):
                return Value(x._local.detach().clone(), x._spec)
            return Value((fakes.local_of(x) if isinstance(x, DTensor) else x).detach().clone(), None)


@dataclass(slots=True)
class Entry:
    """One operator as one rank ran it.

    Attributes:
        number: how many this rank ran before.
        name: "aten.mm"; values: of its results, in order.
        phase: forward, backward or optimizer; module: its path; line: the user's; in backward those of the forward call.
        messages: that the rank began since the entry before.
        draws: whether it draws random numbers.
    """

    number: int
    name: str
    values: list[Value]
    phase: str
    module: str
    line: str
    messages: tuple[Told, ...]
    draws: bool


@dataclass(slots=True)
class Held:
    """A parameter, buffer, gradient or state of the program at one time."""

    name: str
    kind: str  # "initial", "gradient", "final", "buffer", "state"
    step: int
    value: Value


@dataclass(slots=True)
class Watched:
    """All that was seen of one rank."""

    entries: list[Entry] = field(default_factory=list)
    held: list[Held] = field(default_factory=list)
    messages: list[Told] = field(default_factory=list)
    steps: int = 0
    returned: Any = None


class Enough(BaseException):
    """Ends a rank that has done its steps."""


class Watch(TorchDispatchMode):
    """Looks on while one rank runs.

    Args:
        keep: whether values of operators are kept; False: only parameters and results.
        most: steps of the first optimizer after which the rank ends; 0: it runs to its end.
    """

    def __init__(self, keep: bool = True, most: int = 0) -> None:
        super().__init__()
        self.seen, self.keep, self.most = Watched(), keep, most
        self.roots: list[nn.Module] = []
        self.optimizers: list[Optimizer] = []
        self._stack: list[str] = []
        self._paths: dict[int, str] = {}
        self._calls: dict[int, tuple[str, str]] = {}
        self._told: list[Told] = []
        self._stepping = self._off = 0

    def told(self, message: Told) -> None:
        """A message begins."""
        if not self._off:
            self._told.append(message)
            self.seen.messages.append(message)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, nothing is looked at."""
        self._off += 1
        try:
            yield
        finally:
            self._off -= 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not self._off and self.keep and func.namespace not in _SKIPPED:
            with self.paused():
                self._note(func, args, kwargs, result)
        return result

    def _note(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        schema = schema_of(func)
        name = schema.functional
        if schema.views or name.removeprefix("aten::") in _ROOM:
            return
        written = arguments_written(func, args, kwargs)
        made = written or [x for x in tree_leaves(result) if isinstance(x, Tensor)]
        values = [Value.of(x) for x in made if isinstance(x, Tensor) and not fakes.is_fake(x)]
        if not values:
            return
        phase = "optimizer" if self._stepping else "backward" if _torch.in_backward() else "forward"
        module, line = self._stack[-1] if self._stack else "", record.user_line()
        call = _torch.call_number()
        if phase == "forward" and call is not None:
            self._calls[call + 1] = self._calls[call] = (module, line)
        elif phase == "backward" and call in self._calls:
            module, line = self._calls[call]
        told, self._told = tuple(self._told), []
        draws = torch.Tag.nondeterministic_seeded in func.tags
        self.seen.entries.append(Entry(len(self.seen.entries), name, values, phase, module, line, told, draws))

    # -- modules and optimizers ------------------------------------------------------------------------------------------

    def module_begins(self, module: nn.Module) -> None:
        if not self._stack and all(module is not root for root in self.roots):
            self.roots.append(module)
            self._paths.update({id(m): name for name, m in module.named_modules()})
            self._hold("initial", [module])
        self._stack.append(self._paths.get(id(module), type(module).__name__))

    def module_ends(self) -> None:
        if self._stack:
            self._stack.pop()

    def step_begins(self, optimizer: Optimizer) -> None:
        self._stepping += 1
        if all(optimizer is not known for known in self.optimizers):
            self.optimizers.append(optimizer)
        if self._stepping == 1 and optimizer is self.optimizers[0]:
            self._hold("gradient", self.roots)

    def step_ends(self, optimizer: Optimizer) -> None:
        self._stepping -= 1
        if self._stepping or optimizer is not self.optimizers[0]:
            return
        self.seen.steps += 1
        if self.most and self.seen.steps >= self.most:
            raise Enough

    def end(self) -> None:
        """The program has ended: what its modules are now."""
        self._hold("final", self.roots)
        self._hold("buffer", self.roots)

    def _hold(self, kind: str, roots: Sequence[nn.Module]) -> None:
        with self.paused():
            for name, x in _named(kind, roots, self.roots):
                if isinstance(x, Tensor) and not fakes.is_fake(x) and x.device.type != "meta":
                    self.seen.held.append(Held(name, kind, self.seen.steps, Value.of(x)))


def _named(kind: str, roots: Sequence[nn.Module], all_roots: Sequence[nn.Module]) -> Iterator[tuple[str, Any]]:
    seen: set[int] = set()
    for root in roots:
        place = next(i for i, known in enumerate(all_roots) if known is root)
        prefix = f"module {place}: " if place else ""
        for name, x in root.named_buffers() if kind == "buffer" else root.named_parameters():
            if id(x) not in seen:
                seen.add(id(x))
                yield prefix + name, x.grad if kind == "gradient" else x


def _told_of(call: Callable[..., None]) -> Callable[..., None]:
    def hook(subject: Any, *_: Any) -> None:
        watch = recorded.watcher
        if watch is not None and not watch._off:
            call(watch, subject)

    return hook


@contextmanager
def hooks() -> Iterator[None]:
    """Inside, modules and optimizers of all worlds tell the watch of theirs."""
    with ExitStack() as stack:
        for register, call, more in (
            (register_module_forward_pre_hook, Watch.module_begins, {}),
            (register_module_forward_hook, lambda watch, _: watch.module_ends(), {"always_call": True}),
            (register_optimizer_step_pre_hook, Watch.step_begins, {}),
            (register_optimizer_step_post_hook, Watch.step_ends, {}),
        ):
            stack.callback(register(_told_of(call), **more).remove)
        yield
