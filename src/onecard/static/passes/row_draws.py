"""Random numbers of microbatches as those of their batch: each row has its own, whichever microbatch it is in.

On one card an operator draws one key for the whole batch, and an element's number follows from its place (``random``). So all
microbatches take the batch's keys, and each draws for the places of its rows. Where rows lie in what is drawn is seen by
comparison with the whole batch. It is all or nothing: while one draw cannot be placed, keys would not be one card's.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from inspect import unwrap
from typing import Any

from torch import fx

from onecard._torch.names import OpOverload
from onecard.random import fill, key, permutation
from onecard.random.key import RowShare
from onecard.random.variates import variates
from onecard.static.capture import randomness
from onecard.static.passes.dependence import Doubt, Drawn, placed
from onecard.static.step.nodes import called, draws_by

_KEY: Any = unwrap(key._drawn)
_PACKS: Any = unwrap(key._packed), unwrap(key._unpacked)
_SHARED: Any = unwrap(key.shared)
_FILL: Any = unwrap(fill)
_VARIATES: Any = unwrap(variates)
_DRAWN: Any = _FILL, _VARIATES, unwrap(permutation)
_STATES: Any = unwrap(randomness.get_state), unwrap(randomness.set_state)
_COPIED = "microbatch", "part", "phase", "module", "line", "data"


def note(
    mine: Sequence[fx.Node], whole: Sequence[fx.Node], rows: int, k: int, seen: Sequence[Drawn | None]
) -> Iterator[Doubt]:
    """Note at the draws of a microbatch, in their meta as "drawn", how rows lie in them; tells where nobody knows.

    Args:
        mine: the calls of a microbatch of ``rows`` rows; ``whole``: those of its batch, of ``k`` times as many.
        seen: of each operator that draws, where it has the rows of what it is given.
    """
    ours, theirs = ([n for n in calls if n.target in (_KEY, *_DRAWN)] for calls in (mine, whole))
    if [n.target for n in ours] != [n.target for n in theirs]:
        yield _doubt(ours or theirs, k)
        return
    forward = [n for n in ours if n.target is _KEY and n.meta["phase"] != "backward"]
    of_keys = dict(zip(forward, seen, strict=True)) if len(forward) == len(seen) else {}
    for node, other in zip(ours, theirs, strict=True):
        if node.target is not _KEY and (found := _placed(node, other, rows, k, of_keys)) is not None:
            node.meta["drawn"] = found
    if lost := [n for n in ours if n.target is not _KEY and "drawn" not in n.meta]:
        yield _doubt(lost, k)


def _doubt(lost: Sequence[fx.Node], k: int) -> Doubt:
    return Doubt(
        f"in what is drawn at {lost[0].meta['line']} nobody can tell where the batch's rows are: all random numbers of the step "
        f"are drawn for one of {k} microbatches after the other, and are not those of the batch",
        False,
    )


def _placed(node: fx.Node, other: fx.Node, rows: int, k: int, seen: dict[fx.Node, Drawn | None]) -> Drawn | None:
    if node.target not in (_FILL, _VARIATES):
        return Drawn() if node.args[0] == other.args[0] else None
    return placed(_shape(node), _shape(other), rows, k, seen.get(_key_of(node)))


def _shape(node: fx.Node) -> tuple[int, ...]:
    """Of all that is drawn, of which a rank has a part."""
    if len(node.args) > 3 and node.args[3] is not None:
        return tuple(node.args[3])  # type: ignore[arg-type]
    given: Any = node.args[0]
    return tuple(given.meta["tensor"][0])


def _key_of(node: fx.Node) -> fx.Node:
    found: Any = node.args[2]
    while found.target in _PACKS:
        found = found.args[0]
    return found


def of_batch(nodes: Sequence[fx.Node], tail: Collection[fx.Node]) -> set[fx.Node]:
    """What draws keys, and sets random states back and forth, of a microbatch: once for all, if each draw is placed."""
    found, late = set[fx.Node](), False
    for node in nodes:
        keyed = node.target is _KEY or node.target in _STATES
        if not keyed and not (isinstance(node.target, OpOverload) and draws_by(node.target, node.args, node.kwargs)):
            continue
        if node in tail:
            late = True
        elif late or not keyed or (node.target is _KEY and not _is_placed(node)):
            return set()
        else:
            found.add(node)
    return found


def left_out(nodes: Sequence[fx.Node], keys: Collection[fx.Node], tail: Collection[fx.Node]) -> list[fx.Node]:
    """Draws that are placed, of a step whose keys are not drawn once for all: something else draws besides."""
    mine = [n for n in nodes if n.target is _KEY and n not in tail]
    return [] if keys or not all(map(_is_placed, mine)) else mine


def _is_placed(node: fx.Node) -> bool:
    return all(_is_placed(n) if n.target in _PACKS else "drawn" in n.meta for n in node.users)


def has_rows(node: fx.Node) -> bool:
    """Whether a draw has a row for each row of the batch."""
    known: Drawn | None = node.meta.get("drawn")
    return known is not None and known.dim >= 0


def share_out(made: fx.Node, ranks: int, number: int, k: int) -> None:
    """Let a draw of a microbatch give its rows' part of the batch's. ``ranks``: on which the batch's rows lie."""
    known: Drawn = made.meta["drawn"]
    args: Any = made.args
    with made.graph.inserting_before(made):
        share = RowShare(known.dim, known.before, ranks, known.rows, number, k)
        mine = called(made.graph, _SHARED, (args[2], *share))
    mine.meta.update({name: made.meta[name] for name in _COPIED if name in made.meta}, key=True)
    made.args = (*args[:2], mine, *args[3:])
