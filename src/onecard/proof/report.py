"""What a proof says: equal, or the first value that is not, and what would explain it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from os import PathLike
from typing import Any

import torch
from torch import Tensor

from onecard.proof import page
from onecard.proof.explain import explained, near, worst
from onecard.proof.holding import wrong_ranks
from onecard.proof.nodes import Node
from onecard.proof.origin import comes_of, origin
from onecard.proof.partners import Found
from onecard.proof.results import Result
from onecard.proof.seen import Watched
from onecard.proof.whole import apart
from onecard.proof.words import ranks_of, with_code

SHOWN = 8  # results that are listed, and messages


@dataclass(frozen=True, slots=True)
class Divergence:
    """A value that is not the one card's.

    Attributes:
        operator, phase, module, line: what made it; layout: how it lies; shape: of the whole.
        ranks: whose part is wrong; place, value, right: the worst element, in the whole value or in the first wrong part.
        beside: the numbers around it, of the ranks and of one card.
        messages: that came before it on the first wrong rank.
        why: what would explain it; "" where nothing known does.
        before: how many values before it are equal.
        inside: the library's own line, where it runs the operator; leads_to: the first wrong result that comes of it.
    """

    operator: str
    phase: str
    module: str
    line: str
    layout: str
    shape: tuple[int, ...]
    ranks: tuple[int, ...]
    place: tuple[int, ...]
    value: float
    right: float
    beside: tuple[str, str]
    messages: tuple[str, ...]
    why: str
    before: int
    inside: str = ""
    leads_to: str = ""

    def __str__(self) -> str:
        module = f", module {self.module!r}" if self.module else ""
        lines = [
            f"First value that is not one card's: {self.operator} in {self.phase}{module}",
            f"  at {with_code(self.line)}" + (f", inside onecard at {with_code(self.inside)}" if self.inside else ""),
            f"  {list(self.shape)} {self.layout}; wrong on {ranks_of(self.ranks)}; {self.before} values before it are equal",
        ]
        if self.beside[0]:
            lines.append(f"  worst at {list(self.place)}: {self.value:.9g}, on one card {self.right:.9g}")
            lines.append(f"    ranks {self.beside[0]}  one card {self.beside[1]}")
        lines += [f"  message before it: {said}" for said in self.messages]
        if self.leads_to:
            lines.append(f"  leads to {self.leads_to}")
        if self.why:
            lines.append(f"  what explains it: {self.why}")
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Proof:
    """A program on all ranks, held against one card. True if they are equal.

    Attributes:
        world: how many ranks; equal: the verdict; exact: it was reached in float64, so that rounding plays no part.
        values: how many values one card has; share: of them those that values of the ranks are equal to.
        results: all that the programs leave, with how far they are apart; ``wrong`` of them.
        first: the first value that is not one card's, if there is one.
        rounding: how far results are apart in the program's own precision, and which one; None where that was not run.
        unpaired: parameters that only the ranks have.
        seconds: that it took; why: what kept it from float64.
        passes: which pass over recordings is at fault, in words, where that was asked.
        widths: which widths were made small, or why none, in words.
        rounded: which differences are rounding that the program multiplies, in words.
        alone: one card's values that none of the ranks' is equal to: operator, phase, module, line, how many.
        numbered: those that each rank counts in its own way, as indices of its own rows: what they pick is compared instead, and
            they are not among ``values``.
        begun: which parameters begin with other values than on one card, or that the program draws by nobody's seed, in words.
        zero: which gradients are zero but for rounding, so that ``rounding`` leaves them out, in words.
        undivided: that no rank has sent anything, in words.
    """

    world: int
    equal: bool
    exact: bool
    values: int
    share: float
    results: tuple[Result, ...]
    wrong: tuple[Result, ...]
    first: Divergence | None
    rounding: tuple[float, str] | None
    unpaired: tuple[str, ...]
    seconds: float
    why: str = ""
    passes: str = ""
    widths: str = ""
    rounded: str = ""
    alone: tuple[str, ...] = ()
    numbered: tuple[str, ...] = ()
    zero: str = ""
    begun: str = ""
    undivided: str = ""

    @property
    def compared(self) -> int:
        """How many of one card's values values of the ranks are equal to."""
        return round(self.values * self.share)

    def __bool__(self) -> bool:
        return self.equal

    def __str__(self) -> str:
        return self.text()

    def text(self) -> str:
        """All of it, in lines."""
        compared = f"{len(self.results)} results" + (f", {self.values} values" if self.values else "")
        compared += f" on {self.world} ranks" + (f" ({self.share:.1%} with a partner)" if self.values else "")
        if self.equal:
            lines = [f"Equal: {compared}", f"  {self._precision()}"]
        else:
            lines = [f"Not equal: {len(self.wrong)} of {compared}"]
            lines += [f"  {said(result)}" for result in self.wrong[:SHOWN]]
            if len(self.wrong) > SHOWN:
                lines.append(f"  and {len(self.wrong) - SHOWN} more")
            lines += [f"  {self.begun}"] if self.begun else []
            if self.first is not None:
                lines.append(str(self.first))
        if self.numbered:
            counts = sum(int(said.partition(" ")[0]) for said in self.numbered)
            lines.append(
                f"  {counts} indices and sizes that each rank counts in its own way: what they pick is compared"
            )
        if self.passes:
            lines.append(f"  {self.passes}")
        if self.unpaired:
            lines.append(f"  not on one card: {', '.join(self.unpaired[:SHOWN])}")
        lines += [f"  {said}" for said in (self.undivided, self.zero, self.why, self.rounded, self.widths) if said]
        return "\n".join(lines)

    def html(self, path: str | PathLike[str], title: str = "") -> None:
        """Write it as one HTML file that needs no network; ``title``: of the program."""
        page.write(self, path, title)

    def data(self) -> dict[str, Any]:
        """It as data that JSON can hold, without tensors."""
        return page.data_of(self)

    def _precision(self) -> str:
        worst_one = max(self.results, key=lambda r: r.off, default=None)
        if worst_one is None:
            return "nothing was left to compare"
        where = "in float64:" if self.exact else "in the program's own precision:"
        last = worst_one.off / torch.finfo(torch.float64 if self.exact else torch.float32).eps
        lines = f"{where} largest difference {worst_one.off:.1e}, {last:.3g} ulp, at {worst_one.what}"
        if self.rounding is not None and self.exact:
            lines += f"; in its own precision {self.rounding[0]:.1e} at {self.rounding[1]}: rounding"
        return lines


def said(result: Result) -> str:
    """A result in words.

    Example:
        >>> said(Result("fc.weight", "final", 0.5, (1,)))
        'fc.weight: off by 0.5 of its largest number on rank 1'
    """
    if result.why and result.off == float("inf"):
        return f"{result.what}: {result.why}"
    off = f"off by {result.off:.2g} of its largest number on {ranks_of(result.ranks)}" if result.ranks else result.why
    why = f": {result.why}" if result.why and result.ranks else ""
    found = ""
    if result.local and result.right:
        reason = explained(result.local, result.right, [tuple(result.local)])
        found = f" ({reason})" if reason else ""
    return f"{result.what}: {off or f'off by {result.off:.2g}'}{why}{found}"


def divergence(node: Node, found: Found, ranks: Sequence[Watched]) -> Divergence:
    """A node in words and numbers."""
    partner = node.partner
    right = partner.value if partner is not None else None
    held = node.whole
    local, want = _parts(node, right)
    whole_one = held is not None and held.value is not None and right is not None and not held.odd
    place: tuple[int, ...] = ()
    value, other, beside = float("nan"), float("nan"), ("", "")
    first = next((r for r in node.wrong if r in local and r in want), None)
    pair: tuple[Tensor, Tensor] | None = None
    if (
        whole_one
        and held is not None
        and held.value is not None
        and right is not None
        and held.value.shape == right.shape
    ):
        pair = held.value, right
    elif first is not None:
        pair = local[first], want[first]
    if pair is not None and pair[0].shape == pair[1].shape:
        place, value, other = worst(*pair)
        beside = near(pair[0], place), near(pair[1], place)
    shape = tuple(right.shape) if right is not None else tuple(next(iter(node.local.values())).shape)
    layout = f"[{held.layout}] on {held.layout.mesh!r}" if held is not None else "on each rank"
    earlier = _earlier(node, found)
    pending = {-1: held.value} if held is not None and held.layout.pending and held.value is not None else None
    if pending is not None and right is not None:
        why = explained(pending, {-1: right}, found.groups, [{-1: x} for x in earlier])
    else:
        why = explained(local, want, found.groups, _cut(earlier, node), any(e.draws for e in node.entries.values()))
    why = f"{why}{_since(node)}" if why else _operands(node) or _own_rows(node)
    if held is not None and held.odd and not why:
        why = f"copies that should be equal are not: {ranks_of(held.odd)}"
    if node.unlike and not why:
        why = f"ranks {list(node.unlike)} should have the same: each has something else"
    before = sum(other.equal is True for other in found.nodes if other.order < node.order)
    return Divergence(
        node.name, node.phase, node.module, node.line, layout, shape, node.wrong, place, value, other, beside,
        _messages(node, ranks), why, before, next(iter(node.entries.values())).inside,
    )  # fmt: skip


def _operands(node: Node) -> str:
    """What of its operands explains a value: one that only the ranks together have."""
    for x in node.inputs:
        if x.equal and x.among and x.how in _MISSING:
            return (
                f"its operand, {x.name} at {with_code(x.line)}, is {_MISSING[x.how]} on each of ranks {list(x.among)}: their "
                f"{x.how} is missing"
            )
    return ""


def _since(node: Node) -> str:
    """Where a value that is a summand on each rank, which nobody adds up, first is one."""
    found = node
    while not node.wrong and (made := [x for x in found.inputs if x.equal and x.among and x.how == "sum"]):
        found = min(made, key=lambda x: x.order)
    if found is node:
        return ""
    return f"; each has a summand from {found.name} in {found.phase} at {with_code(found.line)} on"


def _own_rows(node: Node) -> str:
    """Batch norm of each rank's own rows."""
    shapes = {x.shape for x in node.local.values()}
    if "batch_norm" not in node.name or len(node.local) < 2 or node.phase != "forward" or len(shapes) != 1:
        return ""
    return (
        "each rank takes mean and variance of its own rows, one card of all of them: marks on the batch, a plan, or "
        "torch.nn.SyncBatchNorm"
    )


_MISSING = {"sum": "a summand", "mean": "a part of a mean", "max": "a part of a maximum", "min": "a part of a minimum"}


def _parts(node: Node, right: Tensor | None) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
    """Each rank's part, and what it should be where that can be told."""
    local = dict(node.local)
    if right is None:
        return local, {}
    held = node.whole
    if held is None:
        return local, {rank: right for rank, x in local.items() if x.shape == right.shape}
    if held.layout.pending or (held.value is not None and held.value.shape != right.shape):
        return local, {}
    mesh = held.layout.mesh
    here = {rank: x for rank, x in local.items() if rank in mesh}
    return here, {rank: held.layout.local_part(right, mesh.coordinate(rank)) for rank in here}


def _earlier(node: Node, found: Found) -> list[Tensor]:
    """The right values of the same place in steps before, newest first."""
    partner = node.partner
    if partner is None:
        return []
    same = [
        other.value
        for other in found.one
        if other.order < partner.order
        and _place(other) == _place(partner)
        and other.value.shape == partner.value.shape
    ]  # fmt: skip
    return same[::-1][:8]


def _place(node: Node) -> tuple[str, str, str, int]:
    return node.name, node.line, node.module, node.position


def _cut(values: Sequence[Tensor], node: Node) -> list[dict[int, Tensor]]:
    return [_parts(node, value)[1] for value in values]


def _messages(node: Node, ranks: Sequence[Watched]) -> tuple[str, ...]:
    """What the wrong ranks were sent before the value, newest last."""
    wrong = [rank for rank in node.wrong or node.entries if rank in node.entries]
    told = {(m.kind, m.ranks, m.number): (rank, m) for rank in wrong[::-1] for m in node.entries[rank].messages}
    if told or not wrong:
        return tuple(f"rank {rank} {message}" for rank, message in [*told.values()][-SHOWN:])
    number = node.entries[wrong[0]].number
    before = [m for entry in ranks[wrong[0]].entries[:number] for m in entry.messages]
    return tuple(f"rank {wrong[0]} {message}" for message in before[-1:])


def first_divergence(
    found: Found, ranks: Sequence[Watched], wrong: Sequence[Result], bound: float
) -> Divergence | None:
    """Where what is wrong in the end begins; None if no value shows it."""
    node = origin(found, [place for result in wrong for place in result.made], bound)
    if node is None:
        return None
    brought = next((x.partner for x in node.inputs if x.moved and x.equal), None)
    if node.partner is None and brought is not None and node.whole is not None:  # it should still be what was brought
        node.partner, node.wrong = brought, wrong_ranks(node.whole, brought.value, bound)
    comes = next(
        (r for r in wrong if any(comes_of(found.places[end], node) for end in r.made if end in found.places)), None
    )
    said = replace(divergence(node, found, ranks), leads_to="" if comes is None else comes.what)
    if not said.ranks and comes is not None:
        said = replace(said, ranks=comes.ranks)
    if node.partner is None and comes is not None and any(found.places.get(end) is node for end in comes.made):
        rank = next((r for r in comes.ranks if comes.local and comes.right and r in comes.right), None)
        if rank is not None and comes.local and comes.right:  # the result itself says what it should be
            mine, want = comes.local[rank], comes.right[rank]
            place, value, other = worst(mine, want)
            beside, why = (near(mine, place), near(want, place)), explained(comes.local, comes.right, found.groups)
            said = replace(
                said, ranks=comes.ranks, place=place, value=value, right=other, beside=beside, why=said.why or why
            )
    return said


__all__ = ["Divergence", "Proof", "apart", "first_divergence", "said"]
