"""Numbers of Python in operators on distributed tensors: they count for the whole tensor, so ranks compare them now and then.

A count of this rank's rows, a norm of its part, or a weight that it has read otherwise is a number like any other: no layout
shows it, and the sum that follows mixes what ranks have made with it.

Ranks compare what they give at one line, between the same messages: a call that one rank makes alone (it prints a loss) is none
of the others'.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import torch

from onecard import recorded
from onecard.comm.agree import clock, sparse_check
from onecard.comm.agree.claims import Claim
from onecard.comm.agree.numbers import alike, is_number
from onecard.comm.agree.sparse_check import OFTEN, SELDOM
from onecard.comm.base import record
from onecard.comm.base.state import Kept
from onecard.comm.issue import groups
from onecard.comm.world import world
from onecard.place.mesh import ProcessMesh
from onecard.rules.call import schema_of, tensors_in
from onecard.tensor.dist_tensor import DistTensor

ALWAYS = 32
"""Messages at the beginning of a program, between which each call is looked at."""
_SHAPES = ("List[int]", "List[SymInt]", "Optional[List[int]]", "Optional[List[SymInt]]")
"""Types of arguments that say shapes and dims, as those whose names begin with "dim" do: what differs there has another shape."""


class Between:
    """What ranks of a mesh do between two messages, and whether they compare it.

    That is decided by what all of them know, and not by their own calls, of which one rank may make some alone: after the first
    messages, and later after those whose hash says so.

    Attributes:
        due: whether numbers are compared now; calls: of each line, since the last message.
    """

    __slots__ = ("calls", "code", "due", "looks", "mesh", "seen")

    def __init__(self, mesh: ProcessMesh) -> None:
        self.mesh, self.seen, self.looks, self.due = mesh, -1, 0, True
        self.code: int | None = None
        self.calls: dict[Any, int] = {}

    def look(self) -> None:
        """A message has been sent since the last call, along this mesh or elsewhere."""
        self.seen = clock.sent.here
        count, code = groups.history(self.mesh)
        if code != self.code:
            self.code, self.looks = code, 0
            self.calls.clear()
            self.due = count < ALWAYS or not (code ^ code >> 20) % (OFTEN if count < SELDOM else SELDOM)

    def number(self, what: Any) -> int:
        """Which call of a line this is, of all that there are; 0: one that is not compared."""
        self.looks += 1
        self.due = self.looks < SELDOM
        found = self.calls[what] = self.calls.get(what, 0) + 1
        compared = sparse_check.each.here or found < OFTEN or not found % OFTEN
        return abs(hash((self.code, found))) if compared else 0


_between: Kept[dict[ProcessMesh, Between]] = Kept(dict)


class GivenNumbers:
    """Those of one kind of call.

    Outside autograd only what is written in place is compared: one rank may evaluate on its own.

    Args:
        operator: its name; ``places``: where its numbers are, by name; ``label``: the same on all ranks for such calls.
        writes: whether it writes to an operand; ``apart``: ranks have other data, of which onecard does not know.
    """

    __slots__ = ("apart", "between", "label", "mesh", "operator", "places", "writes")

    def __init__(
        self, operator: str, places: Sequence[tuple[int, str]], mesh: ProcessMesh, label: str, writes: bool, apart: bool
    ) -> None:
        self.operator, self.places, self.mesh, self.label = operator, tuple(places), mesh, label
        self.writes, self.apart = writes, apart
        self.between = _between.here.setdefault(mesh, Between(mesh))

    def compare(self, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Compare them, if it is time to.

        Raises:
            CommunicationError: another rank has given another number.
        """
        between = self.between
        if clock.sent.here != between.seen:
            between.look()
        if not between.due and not sparse_check.each.here:
            return
        if self.apart if torch.is_grad_enabled() else not self.writes:
            return
        if recorded.recorder is None or recorded.is_followed():
            self._ask(args, kwargs)

    def _ask(self, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        line = record.user_line()
        number = self.between.number((self.label, line))
        if not number:
            return
        world.init()  # a program in which nothing is sent would never meet
        label = f"{self.mesh!r}/{self.label}/{line}"
        site = sparse_check.site(("numbers", label), lambda: label)
        site.count = number
        mine = [args[at] if at < len(args) else kwargs.get(name) for at, name in self.places]

        def answered(rank: int, word: str) -> None:
            for (_, name), own, other in zip(self.places, mine, json.loads(word), strict=False):
                if is_number(own) and not alike(json.loads(json.dumps(own)), other):
                    sides = sorted([(world.get_rank(), own), (rank, other)])
                    shown = " and ".join(f"{value} on rank {which}" for which, value in sides)
                    sparse_check.stop(f"{self.operator} at {line}: {name!r} is {shown}. {_CURE}. {_HOW}")

        site.ask(json.dumps(mine), answered)

    def ahead_of(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """A call on local tensors that compares them first; ``of`` is the call. Not where numbers are replaced by this rank's."""

        def run(*args: Any, **kwargs: Any) -> Any:
            self.compare(args, kwargs)
            return call(*args, **kwargs)

        run.of = call  # type: ignore[attr-defined]
        return run


_HOW = "ONECARD_CHECK=1 compares them at every call; ONECARD_CHECK=0 compares nothing"
_CURE = (
    "A number of Python counts for the whole tensor, on every rank. Where it is of this rank's part (a count of its rows, a norm "
    "of its part, a rate by its loss), compute it with the distributed tensor, and leave it one: n = mask.sum(); loss / n"
)


def claims_of(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Claim]:
    """The numbers of a call, for the debug check."""
    given = [(name, args[at] if at < len(args) else kwargs.get(name)) for at, name in _places(func, args, kwargs)]
    return [
        Claim(
            f"the number {name!r}",
            torch.tensor(value, dtype=torch.float64, device="cpu"),
            "counts for the whole",
            _CURE,
        )
        for name, value in given
    ]


def _places(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[tuple[int, str]]:
    """Where a call has numbers that count, and their names."""
    return [
        (i, argument.name)
        for i, argument in enumerate(func._schema.arguments)
        if is_number(args[i] if i < len(args) else kwargs.get(argument.name))
        and str(argument.type) not in _SHAPES
        and not argument.name.startswith("dim")
    ]


def numbers_of(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> GivenNumbers | None:
    """What ranks have to compare of such calls; None where there is nothing, or nobody to compare with."""
    if not sparse_check.on.here:
        return None
    given = _places(func, args, kwargs)
    first = next((x for x in tensors_in((*args, *kwargs.values())) if isinstance(x, DistTensor)), None)
    if not given or first is None or first.mesh.size == 1 or first.mesh.coordinate() is None:
        return None
    known, layout = schema_of(func), first._spec.layout
    label = f"{known.name}.{known.overload}/{layout}/{first.dim()}/numbers"
    return GivenNumbers(known.name, given, first.mesh, label, bool(known.written), first.mesh in groups.apart.here)
