"""The hybrid communicate group: the grid of ranks of a fleet program, and this process' group along each axis."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from math import prod
from typing import Any

from onecard.comm.base.state import Kept
from onecard.comm.issue.ranks import Ranks, of_ranks
from onecard.comm.world import world
from onecard.errors import FleetError
from onecard.fleet.grid.strategy import DistributedStrategy
from onecard.place.mesh import ProcessMesh


class HybridCommunicateGroup:
    """The ranks as a grid with the axes dp, pp, sharding, sep and mp. Groups are made when they are first asked for.

    Attributes:
        mesh: the grid, for ``oc.shard_tensor`` and its kin too.

    Source: ``paddle.distributed.fleet.base.topology.HybridCommunicateGroup``.
    """

    def __init__(self, degrees: dict[str, int], experts: int = 1) -> None:
        names = list(degrees)
        size = prod(degrees.values())
        self.mesh = ProcessMesh(_grid(list(range(size)), [degrees[n] for n in names]), names)
        self.degrees, self._experts = degrees, experts

    def group(self, *axes: str) -> Ranks:
        """The ranks that differ from this one along these axes only, in the grid's order.

        Raises:
            FleetError: an axis that there is not.
        """
        for axis in axes:
            if axis not in self.degrees:
                raise FleetError(f"there is no axis {axis!r}; there are {', '.join(self.degrees)}")
        return of_ranks(self.ranks_along(axes), "+".join(axes))

    def ranks_along(self, axes: tuple[str, ...]) -> list[int]:
        """Their ranks."""
        here = self._place()
        fixed = {axis: at for axis, at in here.items() if axis not in axes}
        return [
            rank for rank in self.mesh.process_ids if all(self._place(rank)[axis] == at for axis, at in fixed.items())
        ]

    def _place(self, rank: int | None = None) -> dict[str, int]:
        place = self.mesh.coordinate(self.get_global_rank() if rank is None else rank)
        if place is None:
            raise FleetError(f"rank {self.get_global_rank()} is not in the grid {self.mesh!r}")
        return dict(zip(self.degrees, place, strict=True))

    def index(self, axis: str) -> int:
        """This rank's place along an axis."""
        return self._place()[axis]

    def data(self, without: str = "") -> Ranks:
        """The ranks that see other data (batch or part of the sequence) and hold copies of one model; ``without`` an axis."""
        return self.group(*(axis for axis in self.degrees if axis in ("dp", "sharding", "sep") and axis != without))

    def experts(self) -> Ranks:
        """The ranks that have different experts (``ep_degree``): neighbours among those that see other data."""
        ranks = self.data().ranks
        begin = ranks.index(self.get_global_rank()) // self._experts * self._experts
        return of_ranks(ranks[begin : begin + self._experts], "ep")

    def same_experts(self, experts: Ranks) -> Ranks:
        """The ranks that see other data and have the experts of this one, where ``experts`` have different ones.

        Raises:
            FleetError: ranks that do not divide those that see other data into groups like them.
        """
        data, me = self.data().ranks, self.get_global_rank()
        among = [rank for rank in data if rank in experts.ranks]
        axes = [axis for axis in self.degrees if axis in ("dp", "sharding", "sep") and self.degrees[axis] > 1]
        for chosen in (c for n in range(len(axes) + 1) for c in combinations(axes, n)):
            if among == self.ranks_along(chosen):
                return self.group(*(axis for axis in axes if axis not in chosen))
        begin = data.index(among[0])
        if me in among and not begin % len(among) and among == list(data[begin : begin + len(among)]):
            return of_ranks(data[data.index(me) - begin :: len(among)], "copies of experts")
        raise FleetError(
            f"moe_group: ranks {list(experts.ranks)} do not divide those that see other data, {list(data)}, into groups alike: "
            "hcg.get_expert_parallel_group() (ep_degree), or all ranks along an axis"
        )

    def get_global_rank(self) -> int:
        """The rank in the world."""
        return world.get_rank()

    def topology(self) -> dict[str, int]:
        """The degree of each axis."""
        return dict(self.degrees)

    def get_parallel_mode(self) -> str:
        """ "data", "tensor", "pipeline", "sharding" or "segment": the first of them that has more than one rank."""
        for mode, axis in (("pipeline", "pp"), ("tensor", "mp"), ("segment", "sep"), ("sharding", "sharding")):
            if self.degrees[axis] > 1:
                return mode
        return "data"

    def get_stage_id(self) -> int:
        """This rank's pipeline stage."""
        return self.index("pp")

    def is_first_stage(self) -> bool:
        """Whether it is the first."""
        return self.index("pp") == 0

    def is_last_stage(self) -> bool:
        """Whether it is the last."""
        return self.index("pp") == self.degrees["pp"] - 1

    def get_check_parallel_group(self) -> Ranks:
        """The ranks that hold one whole model together: those over which a norm of all gradients goes."""
        return self.group(*(axis for axis in self.degrees if axis in ("pp", "sharding", "mp")))

    def get_dp_sep_parallel_group(self) -> Ranks:
        """The ranks along dp and sep."""
        return self.group(*(axis for axis in self.degrees if axis in ("dp", "sep")))

    def get_pp_mp_parallel_group(self) -> Ranks:
        """The ranks along pp and mp."""
        return self.group(*(axis for axis in self.degrees if axis in ("pp", "mp")))


_PADDLE = {"data": "dp", "model": "mp", "pipe": "pp", "sharding": "sharding", "sep": "sep"}


def _getters() -> None:
    """``get_model_parallel_rank()``, ``..._world_size()``, ``..._group()``, ``..._group_src_rank()`` for each axis."""

    def make(word: str, axis: str) -> None:
        for name, function, text in (
            ("rank", lambda self: self.index(axis), f"This rank's place along {axis}."),
            ("world_size", lambda self: self.degrees[axis], f"How many ranks there are along {axis}."),
            ("group", lambda self: self.group(axis), f"The ranks along {axis} through this one."),
            ("group_src_rank", lambda self: self.group(axis).ranks[0], "The first of them, as a rank of the world."),
        ):
            function.__name__, function.__doc__ = f"get_{word}_parallel_{name}", text
            setattr(HybridCommunicateGroup, function.__name__, function)

    for word, axis in _PADDLE.items():
        make(word, axis)
    for word, group in (
        ("expert", lambda self: self.experts()),
        ("moe_sharding", lambda self: self.same_experts(self.experts())),
    ):
        _of_group(word, group)


def _of_group(word: str, group: Callable[[Any], Ranks]) -> None:
    for name, function, text in (
        ("rank", lambda self: group(self).index, "This rank's place in it."),
        ("world_size", lambda self: group(self).size, "How many ranks there are in it."),
        ("group", group, "The ranks that have different experts, or copies of this one's."),
        ("group_src_rank", lambda self: group(self).ranks[0], "The first of them, as a rank of the world."),
    ):
        function.__name__, function.__doc__ = f"get_{word}_parallel_{name}", text
        setattr(HybridCommunicateGroup, function.__name__, function)


_getters()


def _grid(ranks: list[int], sizes: list[int]) -> list:
    if len(sizes) == 1:
        return ranks
    step = len(ranks) // sizes[0]
    return [_grid(ranks[i * step : (i + 1) * step], sizes[1:]) for i in range(sizes[0])]


_state: Kept[dict[str, Any]] = Kept(dict)


def degrees_of(strategy: DistributedStrategy) -> dict[str, int]:
    """The degree of each axis in this world; 1 where a program of many ranks is read as one card's.

    Raises:
        FleetError: their product is not the world.
    """
    if world.alone.here:
        return dict.fromkeys(strategy.hybrid_configs["order"], 1)
    return strategy.degrees(world.get_world_size())


def begin(strategy: DistributedStrategy) -> HybridCommunicateGroup:
    """Lay the grid of a strategy."""
    _state.here["strategy"] = strategy
    experts = 1 if world.alone.here else strategy.hybrid_configs["ep_degree"]
    _state.here["hcg"] = HybridCommunicateGroup(degrees_of(strategy), experts)
    return _state.here["hcg"]


def get_hybrid_communicate_group() -> HybridCommunicateGroup:
    """The grid that ``fleet.init`` laid.

    Raises:
        FleetError: before ``fleet.init``.
    """
    found = _state.here.get("hcg")
    if not isinstance(found, HybridCommunicateGroup):
        raise FleetError("fleet.init(is_collective=True, strategy=...) comes first: it says which ranks do what")
    return found


def begun() -> bool:
    """Whether ``fleet.init`` was called."""
    return "hcg" in _state.here


def data_ranks() -> Ranks:
    """The ranks that see other data; all of the world before ``fleet.init``."""
    return get_hybrid_communicate_group().data() if begun() else of_ranks(name="world")


def strategy() -> DistributedStrategy:
    """The strategy that ``fleet.init`` was given."""
    get_hybrid_communicate_group()
    return _state.here["strategy"]
