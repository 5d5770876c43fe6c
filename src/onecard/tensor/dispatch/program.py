"""Program: everything decided about one call on this rank, built once for each cache key and then only run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from onecard import resharding
from onecard.comm import record, sparse_check
from onecard.comm.run import run as run_steps
from onecard.comm.state import machine
from onecard.layout import Layout
from onecard.rules.call import Path, schema_of
from onecard.tensor.aliasing import memory, strides
from onecard.tensor.dist_tensor import DistTensor, announce, wrap, wrap_view
from onecard.tensor.spec import Spec
from onecard.tensor.watched import Operands, written

Move = tuple[Path, Layout, str]  # which operand, to which layout, its schema name


class Program:
    """One call, decided.

    Attributes:
        func: the operator; ``call``: what runs on local tensors, the operator itself or what a row's hook puts in its
            place.
        specs: of the result tensors; ``spec``: the only one, if ``simple``.
        frame: where some results are no tensors, all of them with True for each that is; else ().
        simple: local tensors go in as they are, ``swaps`` (position, value) in place of static arguments, and one new
            tensor comes out.
        moves: operands whose layout must change first.
        replace: arguments that differ on this rank: (position, name, value).
        pointwise: the kernel takes its operands with any strides.
        pending: operands that stay pending while others are moved, with their layouts.
        aliases: for each result, the path of the argument that it is (in-place operators), or None.
        hint: axes to hint on an operand for its backward operator.
        view: the result shares memory with the first argument.
        combines: it reads several tensors.
        copies: this is a view on one card, but here its result is a copy.
        shares: this is a view of memory that must know of it (see ``memory``).
        new: it was never called.
        writes: operands that are written to.
        plain: the plain operands, for the sparse check; None where there are none, or it is off.
        wrap: makes the result's DistTensor.
        expand: run the whole call as other operators instead (no rule, or a row's ``instead``).
    """

    __slots__ = (
        "aliases",
        "call",
        "combines",
        "copies",
        "expand",
        "frame",
        "func",
        "hint",
        "moves",
        "name",
        "new",
        "pending",
        "plain",
        "pointwise",
        "reason",
        "replace",
        "shares",
        "simple",
        "spec",
        "specs",
        "swaps",
        "view",
        "wrap",
        "writes",
    )  # fmt: skip

    def __init__(self, func: Any) -> None:
        self.func = func
        schema = schema_of(func)
        self.name = schema.name
        self.view = schema.views
        self.wrap = wrap_view if schema.views else wrap
        self.reason = ""
        self.spec: Any = None
        self.specs: tuple[Spec, ...] = ()
        self.frame: tuple[Any, ...] = ()
        self.simple = False
        self.new = True
        self.swaps: tuple[tuple[int, Any], ...] = ()
        self.moves: tuple[Move, ...] = ()
        self.replace: tuple[tuple[int, str, Any], ...] = ()
        self.aliases: tuple[Path | None, ...] = ()
        self.writes: tuple[Path, ...] = ()
        self.combines = False
        self.copies = False
        self.shares = False
        self.hint: tuple[Path, tuple[int, ...]] | None = None
        self.plain: Operands | None = None
        self.pending: tuple[tuple[Path, Layout], ...] = ()
        self.pointwise = torch.Tag.pointwise in func.tags
        self.call: Callable[..., Any] = func
        self.expand: Callable[..., Any] | None = None

    def __call__(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if self.expand is not None:
            return self.expand(*args, **kwargs)
        if self.plain is not None:
            self.plain.compare(lambda path: _at(path, args, kwargs))
        if self.specs and not self.specs[0].here:
            return self._elsewhere(args, kwargs)
        local = [a._local if type(a) is DistTensor else _local(a) if type(a) is list else a for a in args]
        keywords = {name: _local(value) for name, value in kwargs.items()}
        for path, target, name in self.moves:
            self._put(local, keywords, path, self._move(_at(path, args, kwargs), target, name))
        for position, name, value in self.replace:
            if position < len(local):
                local[position] = value
            else:
                keywords[name] = value
        for path, layout in self.pending:
            if _at(path, args, kwargs)._spec.layout is not layout:
                # Reducing one operand reduced another one that shares its memory: decide again.
                return self.func(*args, **kwargs)
        if self.hint is not None:
            _take_hint(_at(self.hint[0], args, kwargs), self.hint[1])
        result = self.call(*local, **keywords)
        if self.new:
            result = self._looked_at(result)
        if self.frame:
            result = tuple(r if part is True else part for r, part in zip(result, self.frame, strict=True))
        if type(result) is Tensor and not self.aliases:
            made = self.wrap(result, self.specs[0])
        else:
            made = self._wrap(result, iter(self.specs), iter(self.aliases or (None,) * len(self.specs)), args, kwargs)
        return self._kept(made, args, kwargs)

    def _looked_at(self, result: Any) -> Any:
        """The first result. Kernels may order memory otherwise than torch foretells: from now on it is put as the spec says."""
        self.new = False
        if self.view or self.aliases or self.writes:
            return result
        made = [part for part in (result if isinstance(result, list | tuple) else [result]) if isinstance(part, Tensor)]
        if len(made) != len(self.specs) or all(map(strides.placed, made, self.specs)):
            return result
        self.call = placed(self.call, self.specs)
        return placed(lambda: result, self.specs)()

    def _kept(self, made: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """The results, after what shares memory with them or with what was written was told."""
        if self.copies or self.shares:
            memory.view(self.func, args, kwargs, made, self.copies)
        elif memory.copies:
            for path in self.writes:
                memory.wrote(_at(path, args, kwargs))
        if self.writes and sparse_check.on.here:
            written(self.name, [_at(path, args, kwargs) for path in self.writes], self.combines)
        return made

    def _put(self, local: list[Any], keywords: dict[str, Any], path: Path, value: Tensor) -> None:
        if not self.pointwise and 0 in value.stride():
            # A rank that adds nothing holds one zero, expanded. Kernels may read memory as the whole tensor's strides have it.
            value = value.contiguous()
        place, index = path
        holder: Any = local if isinstance(place, int) else keywords
        if index >= 0:
            holder, place = holder[place], index
        holder[place] = value

    def _move(self, value: Any, target: Layout, name: str) -> Tensor:
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
        for moved, target, name in self.moves:  # what is reduced on the mesh is reduced here, or layouts would differ
            if isinstance(_at(moved, args, kwargs), DistTensor):
                self._move(_at(moved, args, kwargs), target, name)
        shares = self.view and not self.copies
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
        one = len(self.func._schema.returns) == 1 and len(made) == 1
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
    expanded where they are expanded there (but not the one zero of a rank that adds nothing to a pending sum)."""
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
