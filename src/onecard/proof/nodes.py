"""The values of a program, those that are parts of one put together, and what each was made of."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from onecard.comm.joined.hub import Told
from onecard.proof.seen import Entry, Value, Watched
from onecard.proof.whole import Whole, apart, whole


@dataclass(slots=True, eq=False)
class Node:
    """One value of the program: of one card, or of all ranks that have it.

    Attributes:
        order: its place in the program; entries: the operator on each rank.
        whole: put together, where ranks say how they hold it; local: each rank's part.
        inputs: what it was made of, on any rank; message: it is what arrived.
        partner: the one card's; sure: found by the line that made both, not by its value.
        equal: whether it is its partner's value; None: nobody can tell.
        others: partners of further ranks, whose operator of the same kind stands for another one: stages of a pipeline.
        how: in which way it is, where ranks do not say it: "whole", "part", "sum", "mean", ...; among: whose sum.
        times: so many times the part of its partner's, as gradients are of a mean over a rank's own rows; 0: it is not.
        moved: what it is where it came from, if it only came from other ranks, as the library says.
        off: how far it is from its partner, relatively; wrong: whose part is wrong.
        unlike: ranks whose plain tensors should be the same, as the library says, and are not.
    """

    order: int
    name: str
    phase: str
    module: str
    line: str
    position: int
    entries: dict[int, Entry]
    local: dict[int, Tensor]
    message: bool = False
    inputs: list[Node] = field(default_factory=list)
    moved: Node | None = None
    whole: Whole | None = None
    partner: Node | None = None
    others: tuple[Node, ...] = ()
    sure: bool = False
    equal: bool | None = None
    how: str = ""
    among: tuple[int, ...] = ()
    times: int = 0
    off: float = 0.0
    wrong: tuple[int, ...] = ()
    unlike: tuple[int, ...] = ()

    @property
    def partners(self) -> tuple[Node, ...]:
        """One card's values that it stands for."""
        return (() if self.partner is None else (self.partner,)) + self.others

    @property
    def value(self) -> Tensor:
        """Of one card's: the whole tensor."""
        found = self.whole.value if self.whole is not None else None
        return next(iter(self.local.values())) if found is None else found

    @property
    def messages(self) -> list[tuple[int, Told]]:
        """That ranks began for it."""
        return [(rank, told) for rank, entry in self.entries.items() for told in entry.messages]


Places = dict[tuple[int, int, int], Node]
"""The node of a rank's entry and of which of its values."""


def nodes_of(ranks: Sequence[Watched], bound: float) -> tuple[list[Node], Places]:
    """The values of all ranks in the order of the program."""
    found: dict[Hashable, Node] = {}
    places: Places = {}
    for rank, watched in enumerate(ranks):
        seen: Counter[Hashable] = Counter()
        for entry in watched.entries:
            for i, value in enumerate(entry.values):
                key = (*_key(entry), i, _kind(value))
                seen[key] += 1
                node = found.get((key, seen[key]))
                if node is None:
                    node = found[key, seen[key]] = Node(
                        entry.number, entry.name, entry.phase, entry.module, entry.line, i, {}, {},
                        entry.message is not None,
                    )  # fmt: skip
                node.entries[rank], node.local[rank] = entry, value.local
                places[rank, entry.number, i] = node
    for node in found.values():
        idle = [rank for rank in node.entries if _idle(ranks[rank], node.entries[rank], node.position)]
        if 0 < len(idle) < len(node.entries):
            for rank in idle:
                del node.entries[rank], node.local[rank]
    made = sorted(found.values(), key=lambda node: node.order)
    for node in made:
        values = {rank: entry.values[node.position] for rank, entry in node.entries.items()}
        if next(iter(values.values())).spec is not None:
            node.whole = whole({rank: v for rank, v in values.items() if v.spec is not None and v.spec.here}, bound)
        node.unlike = _unlike(values, bound)
    _link(ranks, made, places)
    return made, places


def _key(entry: Entry) -> tuple[Hashable, ...]:
    between = (entry.message.ranks, entry.message.number) if entry.message is not None else ()
    return entry.name, entry.phase, entry.module, entry.line, between


def _unlike(values: Mapping[int, Value], bound: float) -> tuple[int, ...]:
    """Ranks of groups that should have the same, and do not: nobody knows which of them is right."""
    groups = {tuple(r for r in value.alike if r in values) for value in values.values() if value.alike}
    return tuple(sorted(
        rank for ranks in groups for rank in ranks
        if any(_differ(values[r].local, values[ranks[0]].local, bound) for r in ranks)
    ))  # fmt: skip


def _differ(a: Tensor, b: Tensor, bound: float) -> bool:
    return a.shape != b.shape or apart(a, b) > bound


def _idle(watched: Watched, entry: Entry, position: int) -> bool:
    """Whether a plain value was made of a tensor that lies on other ranks: nothing was done here, it is what it was before."""
    if entry.values[position].spec is not None:
        return False
    given = [watched.entries[number].values[i].spec for number, i in entry.inputs[position]]
    return any(spec is not None and not spec.here for spec in given)


def _kind(value: Value) -> Hashable:
    spec = value.spec
    return ("plain", value.local.dim()) if spec is None else (spec.layout, spec.shape, spec.dtype)


def _link(ranks: Sequence[Watched], made: Sequence[Node], places: Places) -> None:
    """What each value was made of: what its operator read, and of a message what all ranks gave."""
    given: defaultdict[Hashable, list[Node]] = defaultdict(list)
    mail: defaultdict[Hashable, deque[Node]] = defaultdict(deque)
    for node in made:
        sources = [
            places[rank, *source]
            for rank, entry in node.entries.items()
            for source in entry.inputs[node.position]
            if (rank, *source) in places
        ]
        node.inputs = [x for x in dict.fromkeys(sources) if x is not node]
        came = [(r, *e.moved[node.position]) for r, e in node.entries.items() if node.position in e.moved]
        node.moved = next((places[source] for source in came if source in places), None)
        if node.message and node.name not in ("send", "recv"):
            for each in {entry.message for entry in node.entries.values() if entry.message is not None}:
                given[each.kind, each.ranks, each.number] += node.inputs
    for rank, watched in enumerate(ranks):
        for entry in watched.entries:
            if entry.message is not None and entry.name == "send" and entry.values:
                mail[entry.message.ranks, entry.message.number].append(places[rank, entry.number, 0])
    for watched_rank, watched in enumerate(ranks):
        for entry in watched.entries:
            told = entry.message
            if told is None or not entry.values or entry.name == "send":
                continue
            if entry.name == "recv":
                sent = mail[told.ranks, told.number]
                others = [sent.popleft()] if sent else []
            else:
                others = given[told.kind, told.ranks, told.number]
            for i in range(len(entry.values)):
                node = places[watched_rank, entry.number, i]
                node.inputs = [*dict.fromkeys([*node.inputs, *(x for x in others if x is not node)])]
