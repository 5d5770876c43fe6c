"""What a call became: a Program (runs on local tensors), or a Rewritten (runs as other operators). Kept by cache key."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from onecard.comm.agree import sparse_check
from onecard.comm.base import record
from onecard.comm.base.state import machine
from onecard.comm.issue import groups
from onecard.comm.issue.run import run as run_steps
from onecard.comm.world.world import get_rank
from onecard.errors import DispatchError
from onecard.moves import resharding
from onecard.place.layout import Layout
from onecard.rules.call import Path, schema_of, tensors_in
from onecard.tensor import metrics
from onecard.tensor.aliasing import memory, strides
from onecard.tensor.dist_tensor import DistTensor, announce
from onecard.tensor.same_numbers import GivenNumbers
from onecard.tensor.spec import Spec
from onecard.tensor.watched import Operands, written

Move = tuple[Path, Layout, str]  # which operand, to which layout, its schema name
Replacement = tuple[int, str, Any]  # position and name of an argument, and its value on this rank


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """One call, decided. Made by ``build`` with all that it needs; nothing of it changes when it runs.

    Attributes:
        func: the operator; ``name``: its name in the schema.
        call: what runs on local tensors, the operator itself or what a row's hook puts in its place.
        wrap: makes the result's DistTensor.
        specs: of the result tensors; ``spec``: the first one.
        simple: local tensors go in as they are, ``swaps`` (position, value) in place of static arguments, and one new
            tensor comes out.
        moves: operands whose layout must change first; ``reason``: why.
        replace: arguments that differ on this rank: (position, name, value).
        aliases: for each result, the path of the argument that it is (in-place operators), or None; () if all are None.
        writes: operands that are written to.
        combines: it reads several tensors.
        copies: this is a view on one card, but here its result is a copy.
        shares: this is a view of memory that must know of it (see ``memory``).
        hint: axes to hint on an operand for its backward operator.
        frame: where some results are no tensors, all of them with True for each that is; else ().
        plain: the plain operands, for the sparse check; None where there are none, or it is off.
        pointwise: the kernel takes its operands with any strides.
    """

    func: Any
    name: str
    call: Callable[..., Any]
    wrap: Callable[[Tensor, Spec], DistTensor]
    specs: tuple[Spec, ...]
    spec: Spec | None
    simple: bool
    swaps: tuple[tuple[int, Any], ...]
    moves: tuple[Move, ...]
    reason: str
    replace: tuple[Replacement, ...]
    aliases: tuple[Path | None, ...]
    writes: tuple[Path, ...]
    combines: bool
    copies: bool
    shares: bool
    hint: tuple[Path, tuple[int, ...]] | None
    frame: tuple[Any, ...]
    plain: Operands | None
    pointwise: bool

    def __call__(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if self.plain is not None:
            self.plain.compare(lambda path: _at(path, args, kwargs))
        if self.specs and not self.specs[0].here:
            return self._elsewhere(args, kwargs)
        if not self.moves:
            return self._run(args, kwargs, ())
        moved = [self.move(_at(path, args, kwargs), target, name) for path, target, name in self.moves]
        return self._run(args, kwargs, moved)

    def _run(self, args: Sequence[Any], kwargs: dict[str, Any], moved: Sequence[Tensor]) -> Any:
        """The call on local tensors, after its operands were moved."""
        local = [a._local if type(a) is DistTensor else _local(a) if type(a) is list else a for a in args]
        keywords = {name: _local(value) for name, value in kwargs.items()} if kwargs else {}
        if moved:
            for (path, _, _), value in zip(self.moves, moved, strict=True):
                self._put(local, keywords, path, value)
        for position, name, value in self.replace:
            if position < len(local):
                local[position] = value
            else:
                keywords[name] = value
        if self.hint is not None:
            _take_hint(_at(self.hint[0], args, kwargs), self.hint[1])
        result = self.call(*local, **keywords)
        if self.frame:
            result = tuple(r if part is True else part for r, part in zip(result, self.frame, strict=True))
        if type(result) is Tensor and not self.aliases:
            made = self.wrap(result, self.specs[0])
        else:
            made = self._wrap(result, iter(self.specs), iter(self.aliases or (None,) * len(self.specs)), args, kwargs)
        return self._kept(made, args, kwargs)

    def _kept(self, made: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """The results, after what shares memory with them or with what was written was told."""
        if self.copies or self.shares:
            memory.view(self.func, args, kwargs, made, self.copies)
        elif memory.copies:
            for path in self.writes:
                memory.wrote(_at(path, args, kwargs))
        if self.writes and metrics.there() and any(type(_at(p, args, kwargs)) is Tensor for p in self.writes):
            metrics.counts_the_whole()
        if self.writes and sparse_check.on.here:
            written(self.name, [_at(path, args, kwargs) for path in self.writes], self.combines)
        return made

    def _put(self, local: list[Any], keywords: dict[str, Any], path: Path, value: Tensor) -> None:
        if not self.pointwise and 0 in value.stride():
            # The identity of a reduction is a broadcast element (see ``comm.run``). Other kernels may assume the whole's strides.
            value = value.contiguous()
        place, index = path
        holder: Any = local if isinstance(place, int) else keywords
        if index >= 0:
            holder, place = holder[place], index
        holder[place] = value

    def move(self, value: Any, target: Layout, name: str) -> Tensor:
        """An operand's local tensor under another layout."""
        if isinstance(value, DistTensor):
            return value._become(target, self.name, name, self.reason, explicit=False)
        whole = Layout.replicated(target.mesh, value.dim())
        steps = resharding.plan(tuple(value.shape), value.element_size(), whole, target, machine.here)
        if record.observers.here:
            announce(steps, self.name, name, tuple(value.shape), self.reason, explicit=False)
        record.serving.here = (self.name, name, tuple(value.shape))
        moved = run_steps(steps, value, value.shape)
        return strides.place(Spec.like(whole, value, value.device))(moved) if moved is not value else moved

    def _elsewhere(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """On a rank outside the mesh: the same results, with empty local tensors."""
        mesh = self.specs[0].layout.mesh
        if mesh in groups.stages.here and any(not isinstance(_at(p, args, kwargs), DistTensor) for p in self.writes):
            raise _written_by_some(self.name, self.specs[0])
        for moved, target, name in self.moves:  # what is reduced on the mesh is reduced here, or layouts would differ
            if isinstance(_at(moved, args, kwargs), DistTensor):
                self.move(_at(moved, args, kwargs), target, name)
        shares = schema_of(self.func).views and not self.copies
        empty = [
            args[0]._local.detach().view(s.dtype) if shares else torch.empty(0, dtype=s.dtype, device=s.device)
            for s in self.specs
        ]
        made: list[Any] = [self.wrap(local, s) for local, s in zip(empty, self.specs, strict=True)]
        for i, path in enumerate(self.aliases):
            if path is not None:
                made[i] = _at(path, args, kwargs)
        if self.frame:
            present = iter(made)
            return tuple(next(present) if part is True else part for part in self.frame)
        returns = self.func._schema.returns
        one = len(returns) == 1 == len(made) and not isinstance(returns[0].type, torch.ListType)
        return self._kept(made[0] if one else made, args, kwargs)

    def _wrap(
        self, result: Any, specs: Iterator[Spec], aliases: Iterator[Path | None], args: Sequence[Any], kwargs: Any
    ) -> Any:
        if isinstance(result, Tensor):
            spec, path = next(specs), next(aliases)
            if path is not None:
                return _at(path, args, kwargs)
            return self.wrap(result, spec)
        if isinstance(result, list | tuple):
            return type(result)([self._wrap(item, specs, aliases, args, kwargs) for item in result])
        return result


def _written_by_some(name: str, spec: Spec) -> DispatchError:
    return DispatchError(
        f"{name} writes a value of {spec.layout.mesh!r} to a plain tensor, which each rank has, and rank {get_rank()} is not in "
        "this mesh: it would keep what it had, and ranks would differ. Send the value to all: x.full_tensor(), called on "
        "every rank"
    )


@dataclass(frozen=True, slots=True, eq=False)
class Rechecked(Program):
    """A program that reduces or moves some operands while others stay pending.

    Reducing one operand also reduces another that shares its memory. The call is then decided again.

    Attributes:
        pending: the operands that stay pending, with their layouts.
    """

    pending: tuple[tuple[Path, Layout], ...]

    def _run(self, args: Sequence[Any], kwargs: dict[str, Any], moved: Sequence[Tensor]) -> Any:
        if any(_at(path, args, kwargs)._spec.layout is not layout for path, layout in self.pending):
            return self.func(*args, **kwargs)
        return Program._run(self, args, kwargs, moved)


class Rewritten:
    """A call that runs as other operators: it has no rule, or a row's ``instead`` stands for it."""

    simple, reason = False, ""
    __slots__ = ("func", "run")

    def __init__(self, func: Any, run: Callable[..., Any]) -> None:
        self.func, self.run = func, run

    def __call__(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        return self.run(*args, **kwargs)


class FirstRun:
    """A program that has not run yet. Afterwards ``keep`` is given what runs from then on.

    torch's meta functions do not always foretell the strides of a result. Where the first one lies in memory otherwise than
    its spec says, results are put in that order.
    """

    simple = False
    __slots__ = ("keep", "program")

    def __init__(self, program: Program, keep: Callable[[Program], None]) -> None:
        self.program, self.keep = program, keep

    @property
    def func(self) -> Any:
        """The operator."""
        return self.program.func

    def __call__(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        made = self.program(args, kwargs)
        self.keep(in_order(self.program, made))
        return made


class Compared:
    """What runs a call otherwise than a ``Program``, whose numbers ranks compare first."""

    simple = False
    __slots__ = ("numbers", "program")

    def __init__(self, program: Any, numbers: GivenNumbers) -> None:
        self.program, self.numbers = program, numbers

    @property
    def func(self) -> Any:
        """The operator."""
        return self.program.func

    def __call__(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        self.numbers.compare(args, kwargs)
        return self.program(args, kwargs)


def in_order(program: Program, made: Any) -> Program:
    """A program whose results lie in memory as their specs say; those that it has just ``made`` are put so."""
    if schema_of(program.func).views or program.aliases or program.writes:
        return program
    results = [x for x in tensors_in(made) if isinstance(x, DistTensor) and x._spec.here]
    if all(strides.placed(x._local, x._spec) for x in results):
        return program
    for x in results:
        x._local = strides.place(x._spec)(x._local)
    return replace(program, call=placed(program.call, program.specs))


def _at(path: Path, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    place, index = path
    value = args[place] if isinstance(place, int) else kwargs[place]
    return value if index < 0 else value[index]


def _local(value: Any) -> Any:
    """An argument with every DistTensor in it replaced by its local tensor; lists are copied."""
    if isinstance(value, DistTensor):
        return value._local
    if isinstance(value, list | tuple):
        return [_local(item) for item in value]
    return value


def _take_hint(operand: Any, axes: tuple[int, ...]) -> None:
    if isinstance(operand, DistTensor) and operand._spec.hint != axes:
        operand._spec = operand._spec.with_hint(axes)


def own_result(run: Callable[..., Any]) -> Callable[..., Any]:
    """A hook's function, except that an argument that it returns becomes a tensor of its own.

    Two DistTensors never hold the same local tensor: each could be reduced in place.
    """

    def call(*local: Any, **keywords: Any) -> Any:
        return _unalias(run(*local, **keywords), local)

    return call


def placed(run: Callable[..., Any], specs: Sequence[Spec]) -> Callable[..., Any]:
    """Results in memory as on one card: dims in the order of their strides, so that the same views of it can be taken, and
    broadcast (stride 0) in the dims that are broadcast there, and in no others."""
    places = [strides.place(spec) for spec in specs]

    def call(*local: Any, **keywords: Any) -> Any:
        made = run(*local, **keywords)
        if isinstance(made, Tensor):
            return places[0](made)
        place = iter(places)
        return type(made)([next(place)(part) if isinstance(part, Tensor) else part for part in made])

    return call


def _unalias(result: Any, local: Sequence[Any]) -> Any:
    if isinstance(result, Tensor):
        return result.detach() if any(result is a for a in local) else result
    return type(result)([_unalias(r, local) for r in result]) if isinstance(result, list | tuple) else result
