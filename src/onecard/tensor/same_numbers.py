"""Numbers of Python in operators on distributed tensors: they count for the whole tensor, so ranks compare them now and then.

A count of this rank's rows, a norm of its part, or a weight that it has read otherwise is a number like any other: no layout
shows it, and the sum that follows mixes what ranks have made with it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import torch

from onecard import recorded
from onecard.comm.agree import sparse_check
from onecard.comm.agree.numbers import alike, is_number
from onecard.comm.base import record
from onecard.comm.issue import groups
from onecard.comm.world import world
from onecard.place.mesh import ProcessMesh
from onecard.rules.call import schema_of
from onecard.tensor.dist_tensor import DistTensor
from onecard.tensor.staged import own_stages

_SHAPES = ("List[int]", "List[SymInt]", "Optional[List[int]]", "Optional[List[SymInt]]")
"""Types of arguments that say shapes and dims, as those whose names begin with "dim" do: what differs there has another shape."""


class GivenNumbers:
    """Those of one kind of call.

    Outside autograd only what is written in place is compared: one rank may evaluate on its own.

    Args:
        operator: its name; ``places``: where its numbers are, by name; ``label``: the same on all ranks for such calls.
        writes: whether it writes to an operand; ``apart``: ranks have other data, of which onecard does not know.
    """

    __slots__ = ("apart", "label", "mesh", "operator", "places", "site", "writes")

    def __init__(
        self, operator: str, places: Sequence[tuple[int, str]], mesh: ProcessMesh, label: str, writes: bool, apart: bool
    ) -> None:
        self.operator, self.places, self.mesh, self.label = operator, tuple(places), mesh, label
        self.writes, self.apart = writes, apart
        self.site = sparse_check.site((mesh, label), lambda: f"{mesh!r}/{label}")

    def compare(self, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Compare them, if it is time to.

        Raises:
            CommunicationError: another rank has given another number.
        """
        if self.apart if torch.is_grad_enabled() else not self.writes:
            return
        if recorded.recorder is not None and not recorded.is_followed():
            return
        site, stages = self.site, own_stages.here
        if stages:
            label = f"{self.label}/{stages}"
            site = sparse_check.site((self.mesh, label), lambda: f"{self.mesh!r}/{label}")
        if site.tick():
            self._ask(site, args, kwargs)

    def _ask(self, site: sparse_check.Site, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        world.init()  # a program in which nothing is sent would never meet
        line = record.user_line()
        mine = [args[at] if at < len(args) else kwargs.get(name) for at, name in self.places]

        def answered(rank: int, word: str) -> None:
            there, theirs = json.loads(word)
            for (_, name), here, other in zip(self.places, mine, theirs, strict=False):
                if is_number(here) and not alike(json.loads(json.dumps(here)), other):
                    self._differs(name, {world.get_rank(): (here, line), rank: (other, there)})

        site.ask(json.dumps([line, mine]), answered)

    def _differs(self, name: str, sides: dict[int, tuple[Any, str]]) -> None:
        lines = {line for _, line in sides.values()}
        shown = " and ".join(
            f"{value} on rank {rank}{f', at {line}' if len(lines) > 1 else ''}"
            for rank, (value, line) in sorted(sides.items())
        )
        at = sides[world.get_rank()][1]
        sparse_check.stop(f"{self.operator} at {at}: {name!r} is {shown}. {_CURE}")

    def ahead_of(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """A call on local tensors that compares them first; ``of`` is the call."""

        def run(*args: Any, **kwargs: Any) -> Any:
            self.compare(args, kwargs)
            return call(*args, **kwargs)

        run.of = call  # type: ignore[attr-defined]
        return run


_CURE = (
    "A number of Python counts for the whole tensor, on every rank. Where it is of this rank's part (a count of its rows, a norm "
    "of its part, a rate by its loss), compute it with the distributed tensor, and leave it one: n = mask.sum(); loss / n. "
    "ONECARD_CHECK=0 compares nothing"
)


def numbers_of(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> GivenNumbers | None:
    """What ranks have to compare of such calls; None where there is nothing, or nobody to compare with."""
    if not sparse_check.on.here:
        return None
    schema = func._schema.arguments
    given = [
        (i, argument.name)
        for i, argument in enumerate(schema)
        if is_number(args[i] if i < len(args) else kwargs.get(argument.name))
        and str(argument.type) not in _SHAPES
        and not argument.name.startswith("dim")
    ]
    first = next((x for x in _flat((*args, *kwargs.values())) if isinstance(x, DistTensor)), None)
    if not given or first is None or first.mesh.size == 1 or first.mesh.coordinate() is None:
        return None
    known, layout = schema_of(func), first._spec.layout
    label = f"{known.name}.{known.overload}/{layout}/{first.dim()}/numbers"
    return GivenNumbers(known.name, given, first.mesh, label, bool(known.written), first.mesh in groups.apart.here)


def _flat(values: Sequence[Any]) -> list[Any]:
    return [item for v in values for item in (v if isinstance(v, list | tuple) else (v,))]
