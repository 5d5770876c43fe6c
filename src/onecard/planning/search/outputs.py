"""Which modules' outputs do not stay as their last operator leaves them, by the solution of how tensors lie. Pure.

The eager dispatcher chooses for each operator by itself: a pending sum that a norm takes is made whole on every rank. To divide
it, so that norms, dropout and sums behind it do and keep a part on each rank, is what the module's output says.

Source: sequence parallelism (Korthikanti et al., 2022).
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from torch import fx, nn

from onecard.planning.pieces import Pieces
from onecard.planning.search.kinds import FIRST


@dataclass(frozen=True, slots=True)
class Lies:
    """How a tensor lies as it is made, and once it has been moved; ``by_parameter``: whether a divided parameter made it so."""

    made: int
    moved: int
    by_parameter: bool = False

    @property
    def changes(self) -> bool:
        """Whether the module has to say it: it comes to be divided, or it was divided as its operands, and comes to be whole.

        What is divided since a parameter is, the dispatcher moves as it has to.
        """
        if self.made == self.moved:
            return False
        return self.moved >= FIRST if self.made < FIRST else not self.by_parameter


def outputs_of(pieces: Pieces, lies: Mapping[fx.Node, Lies]) -> dict[str, int]:
    """The kind of the output of each module that has to say it, by its name in the folded model.

    A tensor is the output of the modules in which it is made and out of which it is taken. The innermost of them says it whose
    outputs lie alike in all of its calls. What is no module's output is left to the dispatcher.
    """
    made: dict[str, list[fx.Node]] = {}
    of: dict[fx.Node, list[str]] = {}
    for node in lies:
        users = [user for user in node.users if user in pieces.at and pieces.is_forward(user)]
        for name in _around(_module(node)):
            if any(not _is_within(_module(user), name) for user in users):
                made.setdefault(name, []).append(node)
                of.setdefault(node, []).append(name)
    found: dict[str, int] = {}
    for node, names in of.items():
        if not lies[node].changes or any(name in found for name in names):
            continue
        for name in names:
            if len({(tuple(n.meta["tensor"][0]), lies[n]) for n in made[name]}) == 1:
                found[name] = lies[node].moved
                break
    return found


def patterns_of(
    kinds: Mapping[str, int], pattern_of: Callable[[str], str], model: nn.Module
) -> tuple[tuple[str, str], ...]:
    """Patterns of names of modules of the whole model; where one would fit others too, their names one by one."""
    wanted: dict[str, int] = {}
    for name, kind in kinds.items():
        wanted[pattern_of(name)] = kind  # of blocks, what the last one has that stands for several
    names = [name for name, _ in model.named_modules(remove_duplicate=False) if name]
    found = []
    for pattern, kind in sorted(wanted.items()):
        mine = [name for name in names if pattern_of(name) == pattern]
        fits = [name for name in names if fnmatch.fnmatchcase(name, pattern)]
        text = f"tp: Shard({kind - FIRST})" if kind >= FIRST else "tp: Replicate()"
        found += [(name, text) for name in ([pattern] if fits == mine else mine)]
    return tuple(found)


def _module(node: fx.Node) -> str:
    return str(node.meta.get("module", ""))


def _around(name: str) -> Iterator[str]:
    """A module and those around it, the innermost first."""
    while name:
        yield name
        name = name.rpartition(".")[0]


def _is_within(name: str, module: str) -> bool:
    return name == module or name.startswith(f"{module}.")
