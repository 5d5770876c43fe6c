"""Groups of any ranks, by name, for programs that send plain tensors. A rank outside has no place in one, and may hold it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from onecard.comm.base.state import Kept
from onecard.comm.issue import groups
from onecard.comm.issue.groups import Group
from onecard.comm.world import world
from onecard.errors import CommunicationError
from onecard.place.mesh import ProcessMesh


@dataclass(frozen=True, slots=True, eq=False)
class Ranks(Group):
    """Some ranks of the world, in the order in which they count; ``index`` is -1 on a rank outside."""

    @property
    def rank(self) -> int:
        """This process' place among them; -1 outside. Paddle's name for ``index``."""
        return self.index

    @property
    def nranks(self) -> int:
        """How many they are. Paddle's name for ``size``."""
        return self.size

    @property
    def process_ids(self) -> tuple[int, ...]:
        """Their ranks in the world."""
        return self.ranks

    def get_group_rank(self, rank: int) -> int:
        """The place of a rank of the world among them; -1 if it is outside."""
        return self.ranks.index(rank) if rank in self.ranks else -1

    def is_member(self) -> bool:
        """Whether this process is one of them."""
        return self.index >= 0

    @property
    def turn(self) -> tuple[Any, ...]:
        """By which every rank takes its groups: those along one axis of a grid together.

        By their ranks alone, some ranks would sum along one axis first, and some along the other.

        Example:
            >>> of_ranks([0], "mp").turn
            ('mp', (0,), (0,))
        """
        return self.name, tuple(rank - self.ranks[0] for rank in self.ranks), self.ranks

    def mesh(self) -> ProcessMesh:
        """They as a mesh of one axis."""
        return ProcessMesh(self.ranks, [self.name])

    def __deepcopy__(self, memo: object) -> Ranks:
        return self

    def __reduce__(self) -> Any:
        return of_ranks, (self.ranks, self.name)  # what has a group is saved without it

    def __repr__(self) -> str:
        return f"Ranks({list(self.ranks)}, name={self.name!r})"


_made: Kept[dict[tuple[tuple[int, ...], str], Ranks]] = Kept(dict)
groups.also_forget.append(lambda: _made.here.clear())


def of_ranks(ranks: Sequence[int] | None = None, name: str = "group") -> Ranks:
    """The group of some ranks; all of the world if none are named. Only its members make it, at once or never.

    Args:
        ranks: ranks of the world, each once; their order is the order of the parts of what is gathered.
        name: what ``explain`` calls the axis.

    Raises:
        CommunicationError: no ranks, one twice, or one that the world does not have.

    Example:
        >>> of_ranks([0]).index, of_ranks([0]).size
        (0, 1)
    """
    size = world.get_world_size()
    wanted = tuple(range(size)) if ranks is None else tuple(int(rank) for rank in ranks)
    found = _made.here.get((wanted, name))
    if found is None:
        _check(wanted, size)
        world.init()
        me = world.get_rank()
        ascending = tuple(sorted(wanted))
        order = None if ascending == wanted else tuple(wanted.index(rank) for rank in ascending)
        if me in wanted:
            parts = (groups._process_group(ascending), order, groups._clock(ascending))
            found = Ranks(wanted, wanted.index(me), *parts, name)
        else:
            found = Ranks(wanted, -1, None, order, None, name)
        groups.forget_at_exit()
        _made.here[wanted, name] = found
    return found


def as_ranks(group: Any) -> Ranks:
    """A group of ours, also of one that ``torch.distributed.new_group`` made."""
    if isinstance(group, Ranks):
        return group
    if isinstance(group, torch.distributed.ProcessGroup):
        return of_ranks(torch.distributed.get_process_group_ranks(group))
    raise CommunicationError(f"want a group of ranks, not {type(group).__name__}: onecard.new_group([0, 1])")


def _check(ranks: tuple[int, ...], size: int) -> None:
    missing = [rank for rank in ranks if not 0 <= rank < size]
    if not ranks or missing or len(set(ranks)) != len(ranks):
        fault = "names no rank" if not ranks else f"names rank(s) {missing}" if missing else "names a rank twice"
        raise CommunicationError(
            f"a group of ranks {list(ranks)} {fault}; this world has ranks 0 to {size - 1}: onecard.new_group([0, 1]), "
            f"or onecard run --nproc_per_node {max([size, *[r + 1 for r in ranks]])} script.py for a larger world"
        )
