"""Which modules of a model are its blocks, whose parameters ZeRO stage 3 gathers together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from onecard.errors import LayoutError

BlockSpec = Iterable[nn.Module | type[nn.Module] | str] | None
LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def blocks_of(
    model: nn.Module, pieces: Iterable[Any], blocks: BlockSpec = None
) -> Iterator[tuple[str, nn.Module, list[Any]]]:
    """The blocks of a model, each with its parameters; what several share, or none has, is the model's own.

    Named ones are as ``fully_shard``'s: a block within a block has its own. Found ones are the modules below the model that are
    no mere lists; where one holds a list of composite modules, such as a transformer's layers, they are its children instead.

    Raises:
        LayoutError: a name, or a module, that the model does not have.
    """
    known = {id(p): p for p in pieces}
    found = [*_children("", model)] if blocks is None else _named(model, blocks)
    owners: dict[int, set[str]] = {}
    for name, module in found:  # the inner ones come first
        for p in module.parameters():
            inner = any(other.startswith(f"{name}.") for other in owners.get(id(p), ()))
            if blocks is None or not inner:
                owners.setdefault(id(p), set()).add(name)
    taken: set[int] = set()
    for name, module in found:
        mine = {id(p): p for p in module.parameters() if id(p) in known and owners[id(p)] == {name}}
        taken |= set(mine)
        if mine:
            yield name, module, [*mine.values()]
    rest = {id(p): p for p in model.parameters() if id(p) in known and id(p) not in taken}
    if rest:
        yield "", model, [*rest.values()]


def _children(prefix: str, module: nn.Module, inside: bool = False) -> Iterator[tuple[str, nn.Module]]:
    """``inside``: of a list, whose members are blocks whatever they hold."""
    children = [*module.named_children()]
    for name, child in children:
        path = f"{prefix}.{name}" if prefix else name
        if isinstance(child, LISTS):
            yield from _children(path, child, inside=True)
        elif not inside and (_repeats(child) or (len(children) == 1 and [*child.children()])):
            yield from _children(path, child)
        else:
            yield path, child


def _repeats(module: nn.Module) -> bool:
    """Whether a list below it has several members of one kind that are made of modules."""
    return any(_alike(each) for each in module.modules() if isinstance(each, LISTS))


def _alike(members: nn.Module) -> bool:
    """Whether several are of one kind, made of modules."""
    kinds = [
        type(m)
        for m in members.children()
        if any(map(bool, m.named_children())) and any(map(bool, m.named_parameters()))
    ]
    return len({*kinds}) < len(kinds)


def _named(model: nn.Module, blocks: Iterable[Any]) -> list[tuple[str, nn.Module]]:
    """The blocks that were asked for, the inner ones first."""
    modules = dict(model.named_modules())
    chosen: dict[str, nn.Module] = {}
    for each in [*blocks]:
        if isinstance(each, type):
            names = [name for name, m in modules.items() if isinstance(m, each)]
        else:
            names = [name for name, m in modules.items() if m is each or name == each]
        if not names or "" in names:
            what = each if isinstance(each, str) else getattr(each, "__name__", type(each).__name__)
            raise LayoutError(
                f"blocks: {type(model).__name__} has no module {what!r} below it; give modules of the model, their names or "
                f"their classes, for example blocks=[{next((n for n in modules if n), '')!r}]"
            )
        chosen |= {name: modules[name] for name in names}
    return sorted(chosen.items(), key=lambda item: -item[0].count("."))
