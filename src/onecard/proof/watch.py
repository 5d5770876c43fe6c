"""What a program computes, as it runs: each operator's results with their layouts, its line, module and phase."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from onecard import recorded
from onecard._torch import fakes
from onecard._torch import names as _torch
from onecard._torch.modes import DispatchMode
from onecard.comm.base import record
from onecard.comm.joined.hub import Told
from onecard.proof.begun import Begun
from onecard.proof.makers import Makers, Source
from onecard.proof.seen import Entry, Held, Value, Watched
from onecard.proof.words import library_line
from onecard.rules.call import schema_of
from onecard.static.step.writes import arguments_written
from onecard.tensor.dist_tensor import DistTensor
from onecard.tensor.spec import Spec
from onecard.train.absent import Absent
from onecard.train.shard import Shard, noted

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


class Enough(BaseException):
    """Ends a rank that has done its steps."""


class Watch(recorded.Listener, DispatchMode):
    """Looks on while one rank runs.

    Args:
        keep: whether values of operators are kept; False: only parameters and results.
        most: steps of the first optimizer after which the rank ends; 0: it runs to its end.
        count: whether optimizers' steps are those, with a look at gradients before each; False: who calls ``stepped`` counts.
        begun: what models and optimizers are filled from as they are first used; None: they are as the program makes them.
    """

    def __init__(self, keep: bool = True, most: int = 0, count: bool = True, begun: Begun | None = None) -> None:
        super().__init__()
        self.begun = begun
        self.seen, self.keep, self.most, self.count = Watched(), keep, most, count
        self.roots: list[nn.Module] = []
        self.around: list[nn.Module] = []
        self.optimizers: list[Optimizer] = []
        self._stack: list[str] = []
        self._paths: dict[int, str] = {}
        self._calls: dict[int, tuple[str, str]] = {}
        self._told: list[Told] = []
        self._made = Makers()
        self._read: dict[float, Source] = {}  # numbers that Python has read, by their value
        self._stepping = 0
        self._given: list[Tensor] = []  # to the call of torch.distributed that runs
        self.serving: list[str] = []  # operators that run now, the innermost last

    def told(self, message: Told, given: Sequence[Tensor]) -> Callable[[Sequence[Tensor]], None] | None:
        """A message begins; gives who is to be told of what arrives, where no operator is being served."""
        if not self.listens or recorded.recorder is not None:
            return None
        self.seen.messages.append(message)
        if self.serving or not self.keep:
            self._told.append(message)
            return None
        with self.paused():
            return self._message(message, given)

    def _message(self, message: Told, given: Sequence[Tensor]) -> Callable[[Sequence[Tensor]], None]:
        """A message as an entry of its own: its values are those that come."""
        module, line = self._place()
        entry = Entry(
            len(self.seen.entries), message.kind, [], self._phase(), module, message.source if line == "?" else line,
            (message,), False, [], message, {}, library_line(),
        )  # fmt: skip
        self.seen.entries.append(entry)
        inputs = self._sources(self._given or given)

        def arrived(into: Sequence[Tensor]) -> None:
            watch = recorded.watcher  # of the rank that runs, which need not be this one
            with watch.paused() if watch is not None else nullcontext():
                for i, x in enumerate(into):
                    entry.values.append(Value.of(x))
                    entry.inputs.append(inputs)
                    self._made.note(x, (entry.number, i))

        if message.kind == "send":
            arrived(given)
        return arrived

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace in _SKIPPED:
            self._given = tensors(args)  # functional collectives send a copy, which nobody has seen made
            try:
                return func(*args, **kwargs)
            finally:
                self._given = []
        schema = schema_of(func)
        self.serving.append(schema.functional)
        try:
            result = func(*args, **kwargs)
        finally:
            self.serving.pop()
        if self.listens and self.keep and not schema.views and recorded.recorder is None:
            # A program in float64 has a mode for functions, which what is noted needs not.
            with self.paused(), _torch.as_it_is():
                self._note(func, args, kwargs, result)
        return result

    def _note(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        draws = torch.Tag.nondeterministic_seeded in func.tags
        self.note(schema_of(func).functional, arguments_written(func, args, kwargs), args, kwargs, result, draws)

    def note(self, name: str, written: Sequence[Any], args: Any, kwargs: Any, result: Any, draws: bool) -> None:
        """What an operator has made, or ``written`` to, is an entry."""
        if name in _ROOM:
            for x in tensors((result,)):
                self._made.forget(x)
            return
        if isinstance(result, float):
            self._read |= dict.fromkeys([result], self._sources(args)[0]) if self._sources(args) else {}
            return
        made = tensors(written or (result,))
        if not made:
            return
        values = [Value.of(x) for x in made]
        if any(fakes.is_fake(v.local) or v.local.is_meta for v in values):  # priced, or looked at ahead of a run
            return
        module, line = self._place()
        told, self._told = tuple(self._told), []
        number, inputs = len(self.seen.entries), self._inputs(args, kwargs, len(made))
        self.seen.entries.append(
            Entry(number, name, values, self._phase(), module, line, told, draws, inputs, None, {}, library_line())
        )
        for i, x in enumerate(made):
            self._made.note(x, (number, i))

    def source_of(self, x: Tensor) -> Source | None:
        """What has made a tensor."""
        return self._made.of(x)

    def laid(self, part: Tensor, spec: Spec, source: Source | None = None) -> None:
        """The library says that a plain tensor is a rank's part under a layout; ``source``: of the value that this has made.

        A tensor that has been made as such is that from now on; a stretch of a larger one becomes an entry of its own.
        """
        at = self._made.of(part)
        if not self.listens or self.serving or not self.keep or recorded.recorder is not None:
            return  # what serves an operator is seen by its result
        if at is None or not spec.here:
            return
        maker, (_, i) = self.seen.entries[at[0]], at
        with self.paused():
            value = replace(Value.of(part), spec=spec)
        moved = {} if source is None else {i: source}
        if maker.values[i].local.numel() == part.numel() and maker.values[i].spec is None and maker.message is None:
            maker.values[i], maker.moved = value, maker.moved | moved
            return
        number, moved = len(self.seen.entries), dict.fromkeys([0][: len(moved)], at if source is None else source)
        made = replace(maker, number=number, values=[value], draws=False, inputs=[(at,)], message=None, moved=moved)
        self.seen.entries.append(made)
        self._made.note(part, (number, 0))

    def alike(self, x: Tensor, ranks: Sequence[int]) -> None:
        """The library says that some ranks have the same plain tensor."""
        at = self._made.of(x)
        if not self.listens or self.serving or not self.keep or recorded.recorder is not None or at is None:
            return
        values, i = self.seen.entries[at[0]].values, at[1]
        if values[i].local.numel() == x.numel():
            values[i] = replace(values[i], alike=tuple(ranks))

    def _lies(self, x: Tensor, source: Source | None) -> Source | None:
        """What was made as a plain tensor and is a part of one with a layout by now was that part as it was made."""
        if source is not None and isinstance(x, DistTensor) and x._spec.here:
            entry, i = self.seen.entries[source[0]], source[1]
            value = entry.values[i]
            if value.spec is None and entry.message is None and value.local.shape == x._local.shape:
                entry.values[i] = replace(value, spec=x._spec)
        return source

    def _phase(self) -> str:
        return "optimizer" if self._stepping else "backward" if _torch.in_backward() else "forward"

    def _place(self) -> tuple[str, str]:
        """Module and line; in backward those of the forward call."""
        call, phase = _torch.call_number(), self._phase()
        if phase == "backward" and call in self._calls:
            return self._calls[call]
        place = self._stack[-1] if self._stack else "", record.user_line()
        if phase == "forward" and call is not None:
            self._calls[call + 1] = self._calls[call] = place
        return place

    def _sources(self, given: Any) -> tuple[Source, ...]:
        """What some tensors were made by."""
        found = [self._lies(x, self._made.of(x)) for x in tensors(given)]
        return tuple(dict.fromkeys([source for source in found if source is not None]))

    def _inputs(self, args: Any, kwargs: Any, count: int) -> list[tuple[Source, ...]]:
        """For each value what it was made of: of lists as long as there are values, each has its own element."""
        given = [*args, *kwargs.values()]
        lists = [x for x in given if isinstance(x, list | tuple) and len(x) == count]
        if count == 1 or not lists:
            return [self._sources(given)] * count
        rest = self._sources([x for x in given if all(x is not each for each in lists)])
        return [self._sources([each[i] for each in lists]) + rest for i in range(count)]

    def value(self, x: Tensor) -> Value:
        """A copy of what a tensor is now, with what has made it."""
        found, shard = Value.of(x), noted(x)
        return Value(
            found.local,
            found.spec,
            self._lies(x, self._made.of(x)),
            shard if isinstance(shard, Shard) and shard.is_cut() else None,
        )

    def left(self, x: Any) -> Any:
        """What is returned, as it is now: a tensor, or a number that was read from one, with what has made it."""
        if isinstance(x, Tensor):
            return self.value(x)
        known = self._read.get(x) if isinstance(x, float) else None
        return x if known is None else Value(torch.tensor(x, dtype=torch.float64, device="cpu"), None, known)

    # -- modules and optimizers ------------------------------------------------------------------------------------------

    def module_begins(self, module: nn.Module) -> None:
        if not self._stack and all(module is not root for root in (*self.roots, *self.around)):
            known = {id(x) for root in self.roots for x in root.parameters()}
            own = [x for x in module.parameters() if id(x) not in known]
            (self.roots if own or not known else self.around).append(module)  # what wraps a model is no other one
            self._paths.update({id(m): name for name, m in module.named_modules()})
            if self.begun is not None:
                with self.paused(), _torch.as_it_is():
                    self.begun.model(module)
            self._hold("initial", [module] if own or not known else [])
        self._stack.append(self._paths.get(id(module), type(module).__name__))

    def replay_begins(self, roots: Sequence[Any]) -> None:
        """A recorded step is done on some objects: its modules are the program's, though nobody calls them."""
        for root in roots:
            if isinstance(root, nn.Module) and not self._stack:
                self.module_begins(root)
                self.module_ends()

    def module_ends(self) -> None:
        if self._stack:
            self._stack.pop()

    def step_begins(self, optimizer: Optimizer) -> None:
        self._stepping += 1
        if all(optimizer is not known for known in self.optimizers):
            self.optimizers.append(optimizer)
            if self.begun is not None:
                with self.paused(), _torch.as_it_is():
                    self.begun.optimizer(optimizer)
        if self.count and self._stepping == 1 and optimizer is self.optimizers[0]:
            self._hold("gradient", self.roots, getattr(optimizer, "grad_scale", None))

    def step_ends(self, optimizer: Optimizer) -> None:
        self._stepping -= 1
        if self.count and not self._stepping and optimizer is self.optimizers[0]:
            self.stepped()

    def stepped(self) -> None:
        """A step of the program has ended."""
        self.seen.steps += 1
        if self.most and self.seen.steps >= self.most:
            raise Enough

    def end(self) -> None:
        """The program has ended: what its modules are now."""
        self._hold("final", self.roots)
        self._hold("buffer", self.roots)

    def _hold(self, kind: str, roots: Sequence[nn.Module], scale: Tensor | None = None) -> None:
        """Note what modules hold; ``scale``: by which a fused optimizer is going to divide gradients itself."""
        with self.paused():
            for name, x in _named(kind, roots, self.roots):
                if isinstance(x, Absent):  # another stage's
                    continue
                if isinstance(x, Tensor) and not fakes.is_fake(x) and x.device.type != "meta":
                    value = self.value(_summed(x))
                    value = value if scale is None else replace(value, local=value.local / scale)
                    self.seen.held.append(Held(name, kind, self.seen.steps, value))


def tensors(given: Iterable[Any]) -> list[Tensor]:
    """Those with data among an operator's arguments or results, in order; lists of them are one deep."""
    found: list[Tensor] = []
    for x in given:
        if isinstance(x, Tensor):
            if not fakes.is_fake(x):
                found.append(x)
        elif isinstance(x, list | tuple):
            found += tensors(x)
    return found


@torch.no_grad()
def _summed(x: Tensor) -> Tensor:
    """A ``DTensor`` whose parts are summands, as a gradient whose optimizer sums it: summed. Others as they are."""
    if isinstance(x, DTensor) and any(p.is_partial() for p in x.placements):
        return x.redistribute(placements=[Replicate() if p.is_partial() else p for p in x.placements])
    return x


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
        if watch is not None and watch.listens and recorded.recorder is None:  # what is recorded has no values
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
