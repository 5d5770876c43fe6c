"""One call of an operator, seen through its schema: which arguments are tensors, which are static. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from onecard._torch.names import OpOverload, no_dispatch
from onecard.recorded import unrecorded

Path = tuple[int | str, int]  # (position or keyword, index in a list or -1)


@dataclass(frozen=True, slots=True)
class Schema:
    """What a schema says of an operator.

    Attributes:
        name: e.g. "add" (other namespaces than aten: "mylib::add"); overload: e.g. "Tensor".
        arguments: names in order; ``positional`` of them may be given by position.
        defaults: by name.
        written: names of the arguments that the operator writes to.
        out: names of the ``out=`` arguments among them.
        views: whether a result shares memory with an operand without writing to it.
        effects: whether it does more than give a result and write to tensors: it draws random numbers, or raises.
    """

    name: str
    overload: str
    arguments: tuple[str, ...]
    positional: int
    defaults: dict[str, Any]
    written: tuple[str, ...]
    out: tuple[str, ...]
    views: bool
    effects: bool

    @property
    def functional(self) -> str:
        """The name of the out-of-place form."""
        return self.name[:-1] if self.written and self.name.endswith("_") else self.name


@cache
def schema_of(func: OpOverload) -> Schema:
    """The schema of an operator."""
    raw = func._schema
    namespace, _, name = raw.name.partition("::")
    written = [a for a in raw.arguments if a.alias_info is not None and a.alias_info.is_write]
    return Schema(
        name=name if namespace == "aten" else raw.name,
        overload=raw.overload_name,
        arguments=tuple(a.name for a in raw.arguments),
        positional=sum(not a.kwarg_only for a in raw.arguments),
        defaults={a.name: a.default_value for a in raw.arguments if a.has_default_value()},
        written=tuple(a.name for a in written),
        out=tuple(a.name for a in written if a.is_out),
        views=any(r.alias_info is not None and not r.alias_info.is_write for r in raw.returns),
        effects=torch.Tag.nondeterministic_seeded in func.tags or "assert" in raw.name,
    )


def named(func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments that a call gives, by their names in the schema.

    Example:
        >>> import torch
        >>> named(torch.ops.aten.narrow.default, ("x", 1), {"start": 0})
        {'self': 'x', 'dim': 1, 'start': 0}
    """
    return {**dict(zip(schema_of(func).arguments, args, strict=False)), **kwargs}


def arguments(func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """All arguments of a call by their names: defaults filled in, None where there is neither."""
    schema = schema_of(func)
    return dict.fromkeys(schema.arguments) | schema.defaults | named(func, args, kwargs)


def written(func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """The tensors that a call writes to, each with its argument's name; those in lists one by one."""
    names = schema_of(func).written
    for name, value in named(func, args, kwargs).items() if names else ():
        if name in names:
            yield from ((name, x) for x in tensors_in(value))


class Call:
    """A call whose tensors are meta tensors: what a row's function looks at.

    Arguments read as attributes by their schema names, defaults filled in: ``call.dim``, ``call.self.shape``.

    Attributes:
        func: the operator; ``schema``: its schema.
        operands: the tensors among the arguments, lists flattened, in schema order; ``out=`` tensors left out.
        names: the schema name of each operand; ``paths``: where each stands in (args, kwargs).
        results: the result tensors (meta), absent ones left out.
    """

    __slots__ = ("func", "given", "names", "operands", "paths", "results", "schema", "values")

    def __init__(self, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        self.func = func
        self.schema = schema_of(func)
        self.given = (args, kwargs)
        self.values = dict(self.schema.defaults)
        self.operands: list[Tensor] = []
        self.names: list[str] = []
        self.paths: list[Path] = []
        self.results: list[Tensor] = []
        given: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
        for place, value in given:
            name = self.schema.arguments[place] if isinstance(place, int) else place
            self.values[name] = value
            if name not in self.schema.out:
                self._collect(name, place, value)

    def _collect(self, name: str, place: int | str, value: Any) -> None:
        if isinstance(value, Tensor):
            self.operands.append(value)
            self.names.append(name)
            self.paths.append((place, -1))
        elif isinstance(value, list | tuple):
            for i, item in enumerate(value):
                if isinstance(item, Tensor):
                    self.operands.append(item)
                    self.names.append(name)
                    self.paths.append((place, i))

    def with_values(self, **values: Any) -> Call:
        """The same call with other values of arguments that are no tensors."""
        other = Call.__new__(Call)
        for name in self.__slots__:
            setattr(other, name, getattr(self, name))
        other.values = {**self.values, **values}
        return other

    def __getattr__(self, name: str) -> Any:
        try:
            return self.values[name]
        except KeyError:
            raise AttributeError(f"{self.schema.name} has no argument {name!r}") from None

    def meta_results(self) -> list[Tensor]:
        """The result tensors without their data. Raises NotImplementedError where data decides their shapes."""
        args, kwargs = self.given
        plain = all(type(x) is Tensor for x in self.operands)  # in a world without data they are of its mode
        with no_dispatch() if plain else unrecorded():  # who looks on has no business with them
            return list(tensors_in(self.func(*args, **kwargs)))

    def index(self, name: str) -> int:
        """The operand number of an argument, or -1 if it is absent."""
        return self.names.index(name) if name in self.names else -1

    def dims(self, value: Any, ndim: int | None = None) -> tuple[int, ...]:
        """Dim numbers as a sorted tuple of non-negative ints; None and () mean all of them."""
        rank = self.operands[0].dim() if ndim is None else ndim
        listed = [value] if isinstance(value, int) else list(value or range(rank))
        return tuple(sorted({d % rank for d in listed})) if rank else ()


def dtype_of(call: Call) -> str:
    """The dtype in which a call computes: of its first tensor."""
    return str(call.operands[0].dtype).removeprefix("torch.") if call.operands else ""


def tensors_in(result: Any) -> Iterator[Tensor]:
    """The tensors of an operator's result in order, absent ones left out."""
    if isinstance(result, Tensor):
        yield result
    elif isinstance(result, list | tuple):
        for item in result:
            yield from tensors_in(item)
