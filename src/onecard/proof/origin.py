"""Where a wrong result begins: the first wrong value on the way to it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from onecard.proof.explain import NEAR, ratio_of
from onecard.proof.found import Found
from onecard.proof.holding import MOVES, SUMMANDS, is_part
from onecard.proof.nodes import Node


def origin(found: Found, ends: Sequence[tuple[int, int, int]], bound: float) -> Node | None:
    """The first value that is not what it stands for, of those that lead to a wrong result.

    Not every value has a partner that is like it: a mask of a shard, a bucket, a partial result. They are no faults where what is
    made of them is right. A message of which nothing right is made, though all that was given to it is, is the fault itself;
    an operator whose operands are right as it reads them, and whose value is not, is one too.

    Args:
        found: the ranks' values with their partners.
        ends: what has made the wrong results: rank, entry, and which of its values.
        bound: how far equal values may be apart.
    """
    last = [found.places[end] for end in ends if end in found.places]
    for healed in (True, False):
        ways = _Ways(found, bound, last if healed else None)
        nodes = ways.backwards(last)
        among = {id(node) for node in last}
        served = [node for node in found.divergent if node.messages and not node.message and not ways.right(node)]
        known = [node for node in nodes if node.equal is False or id(node) in among or ways.reads_right(node)]
        if known:
            return _forward_of(ways.before(ways.first([*known, *served])), ways)
    return ways.first(found.divergent or nodes)


def _forward_of(node: Node | None, ways: _Ways) -> Node | None:
    """The operator whose derivative a wrong value is, if it is wrong by the same operands: no gradient comes of its own value."""
    if node is None or node.phase != "backward":
        return node
    given = {id(x) for x in node.inputs}
    earlier = [
        x
        for x in ways.found.divergent
        if x.phase == "forward" and (x.line, x.module) == (node.line, node.module) and x.inputs
        and {*x.entries} & {*node.entries} and {id(y) for y in x.inputs} <= given and ways.reads_right(x)
    ]  # fmt: skip
    return ways.first(earlier) or node


class _Ways:
    """The ways by which values come from others.

    Args:
        last: the wrong results; values of which something right is made are taken for right, but for these. None: no value is.
    """

    def __init__(self, found: Found, bound: float, last: Sequence[Node] | None) -> None:
        self.found, self.bound = found, bound
        self._ones = {(node.entries[0].number, node.position): node for node in found.one}
        self._healed = set() if last is None else _of_which_right_comes(found.nodes, {id(node) for node in last})
        self._read: dict[int, bool] = {}
        spoilt = [node for node in found.nodes if node.equal is False and _reads_a_message(node)]
        self._spoils = {id(x) for node in spoilt for x in (node, *read(node))}

    def right(self, node: Node) -> bool:
        """Whether a value is right, or harmless. What ranks still have to add up after a message among them is not.

        Nor is a message of right values of which alone a wrong one is made, though what is made of that may be right again: of
        numbers that are divided by the largest of them a factor is gone.
        """
        if node.equal is True and not _left_apart(node) and not self._strays(node):
            return True
        if id(node) not in self._healed:
            return False
        given = read(node if node.message or not read(node) else read(node)[0])
        return id(node) not in self._spoils or not given or not all(map(self.right, given))

    def backwards(self, last: Iterable[Node]) -> list[Node]:
        """All values from which others come without one between that is right."""
        seen: dict[int, Node] = {}
        waiting = [node for node in last if not self.right(node) or node.how in SUMMANDS]
        while waiting:
            node = waiting.pop()
            if id(node) not in seen:
                seen[id(node)] = node
                if not self.reads_right(node):
                    waiting += [x for x in read(node) if not self.right(x)]
        return [*seen.values()]

    def first(self, nodes: Sequence[Node]) -> Node | None:
        """The one that comes from no other, the earliest of these."""
        among = {id(node) for node in nodes}
        alone = [
            node
            for node in nodes
            if not any(id(x) in among and x is not node for x in self.backwards([node]) if x is not node)
        ]
        return min(alone or nodes, key=lambda node: node.order, default=None)

    def before(self, node: Node | None) -> Node | None:
        """What has most likely made a wrong value of operands that are not right, if nobody knows what these stand for.

        The first message of which nothing right is made; else what has changed a value that ranks were brought; else what has
        made a right one so many times too large or too small as there are ranks; else the value.
        """
        if node is None or self.reads_right(node):
            return node
        ways = [x for x in self.backwards([node]) if x.equal is not False and x is not node]
        told = [x for x in ways if x.message]
        made = [x for x in ways if x.name not in MOVES and any(y.moved and self.right(y) for y in read(x))]
        times = [x for x in ways if self._multiplies(x)]
        return self.first(told or made or times) or node

    def _multiplies(self, node: Node) -> bool:
        """Whether an operator has multiplied or divided a right value by the number of some ranks, and no more."""
        if (
            node.equal is not None
            or node.message
            or not node.value.is_floating_point()
            or not all(map(self.right, read(node)))
        ):
            return False
        sizes = {len(ranks) for ranks in self.found.groups} - {1}
        return any(
            ratio is not None and any(abs(ratio - n) < NEAR * n or abs(ratio * n - 1) < NEAR for n in sizes)
            for x in read(node) if x.equal and x.whole is None and x.how in ("whole", "part") and {*node.local} <= {*x.local}
            for ratio in [_ratio(node, x)]
        )  # fmt: skip

    def _strays(self, node: Node) -> bool:
        """Whether a message has brought a value of one card, and not the one that ranks gave."""
        if not node.message or node.partner is None or not self.reads_right(node):
            return False
        given = [x.partner.value for x in node.inputs if x.partner is not None]
        return not any(is_part(node.partner.value, value, self.bound) for value in given)

    def reads_right(self, node: Node) -> bool:
        """Whether all operands are right as the operator reads them, though ranks may have made them by other operators."""
        if id(node) not in self._read:
            self._read[id(node)] = self._reads_right(node)
        return self._read[id(node)]

    def _reads_right(self, node: Node) -> bool:
        if node.message:
            return self._gives_right(node)
        partner = node.partner
        if partner is None or node.equal is not False:
            return False
        want = [self._ones.get(source) for source in partner.entries[0].inputs[partner.position]]
        given = self._read_by(node)
        if not want or any(len(nodes) != len(want) for nodes in given.values()):
            return False
        for i, right in enumerate(want):
            nodes = {rank: each[i] for rank, each in given.items()}
            if right is None or any(x.unlike or _left_apart(x) or self._strays(x) for x in nodes.values()):
                return False
            if len({*map(id, nodes.values())}) == 1 and next(iter(nodes.values())).equal:
                continue
            local = {rank: x.local[rank] for rank, x in nodes.items() if x.whole is None}
            if len(local) != len(nodes) or not self._is(local, right.value):
                return False
        return True

    def _read_by(self, node: Node) -> dict[int, list[Node]]:
        """What each rank's operator read, in the order of its operands."""
        return {
            rank: [self.found.places[rank, number, i] for number, i in entry.inputs[node.position]]
            for rank, entry in node.entries.items()
        }

    def _gives_right(self, node: Node) -> bool:
        """Whether what ranks give to a message, one tensor each, is together a value of one card."""
        given = self._read_by(node)
        if any(len(x) != 1 or x[0].whole is not None or _left_apart(x[0]) for x in given.values()):
            return False
        local = {rank: x[0].local[rank] for rank, x in given.items()}
        return any(self._is(local, x.partner.value) for x in node.inputs if x.partner is not None)

    def _is(self, local: Mapping[int, Tensor], value: Tensor) -> bool:
        """Whether the ranks' tensors are a value in one of the ways in which ranks hold one."""
        if all(is_part(x, value, self.bound) for x in local.values()):
            return True
        for ranks in self.found.groups:
            parts = [local[rank] for rank in ranks if rank in local]
            if len(parts) != len(ranks) or len({x.shape for x in parts}) != 1 or not parts[0].is_floating_point():
                continue
            stacked = torch.stack(parts)
            if all(torch.equal(x, parts[0]) for x in parts[1:]) or (
                parts[0].numel() == 1 and stacked.count_nonzero() < 2
            ):
                continue  # as much on each rank, or all of it on one: no sum
            if any(is_part(x, value, self.bound) for x in (stacked.sum(0), stacked.mean(0))):
                return True
        return False


def read(node: Node) -> list[Node]:
    """What a value was made of: of a copy what was copied, not what was there before."""
    return node.inputs[-1:] if node.name == "copy" else node.inputs


def _reads_a_message(node: Node) -> bool:
    """Whether a value is made of what a message has brought, and of nothing else."""
    return len(read(node)) == 1 and bool(read(node)[0].message) and read(node)[0].equal is None


def comes_of(node: Node, source: Node) -> bool:
    """Whether a value comes of another one, or is it."""
    seen, waiting = {id(node)}, [node]
    while waiting:
        x = waiting.pop()
        if x is source:
            return True
        new = [y for y in read(x) if id(y) not in seen and y.order <= x.order]
        seen |= {id(y) for y in new}
        waiting += new
    return False


def _of_which_right_comes(nodes: Sequence[Node], wrong: set[int]) -> set[int]:
    """Values that are like nothing, or unlike what is in their place on one card, and of which right ones are made.

    What is right says nothing of floats if only numbers without a fraction lead there. A float that is wrong may be mended by
    what follows: a norm takes a factor away. So it is taken for right only near to where ranks put together what comes of it.
    """
    seen: dict[int, int] = {}
    often: set[int] = set()  # norms that count what is the same on some ranks once for each, and what comes of them
    for node in nodes:
        if not node.equal and (_counts_copies(node) or any(id(x) in often for x in read(node))):
            often.add(id(node))
    waiting = [(node, _reach(node)) for node in nodes if _shows(node) and id(node) not in wrong]
    while waiting:
        node, reach = waiting.pop()
        for x in read(node):
            if x.equal or id(x) in wrong or id(x) in often or x.unlike or (x.whole is not None and x.whole.odd):
                continue
            left = _left(x, reach)
            if left is not None and (id(x) not in seen or seen[id(x)] < left):
                seen[id(x)] = left
                waiting.append((x, left))
    return {*seen}


_WHOLE, _FAR = -1, 3
"""How many wrong floats may follow each other on the way to a right value: none but numbers without a fraction; some."""


def _left(x: Node, reach: int) -> int | None:
    """How many may precede a value, if so many may precede what is made of it; None: it is not taken for right."""
    if not x.value.is_floating_point():
        return _WHOLE
    if reach == _WHOLE or (x.equal is False and not x.message and not reach):
        return None
    return max(reach, _FAR) if x.message else reach - (x.equal is False)


def _counts_copies(node: Node) -> bool:
    """Whether a norm that ranks say they have together counts what is the same on some of them once for each."""
    held, partner = node.whole, node.partner
    if (
        held is None
        or partner is None
        or not node.sure
        or not any(op.startswith("norm") for _, op in held.layout.pending)
    ):
        return False
    ratio = ratio_of(node.value, partner.value)
    return ratio is not None and any(abs(ratio - n**0.5) <= NEAR * n for n in range(2, len(node.local) + 1))


def _reach(node: Node) -> int:
    return _FAR if node.message else int(_pending(node))


def _left_apart(node: Node) -> bool:
    """Whether ranks still have to add up what a message among them has brought, or each has as much of it as the others."""
    if node.how not in SUMMANDS:
        return False
    if node.message:
        return any({*node.among} & {*told.ranks} for _, told in node.messages)
    parts = [node.local[rank] for rank in node.among]
    if parts[0].numel() == 1:  # one rank has all of it
        return node.how in ("max", "min") or sum(bool(x.any()) for x in parts) < 2
    if node.how == "mean":  # no two ranks have anything of the same element: each has too much of its own
        return len(parts) > 1 and not bool((torch.stack(parts).count_nonzero(0) > 1).any())
    return node.how == "sum" and all(torch.equal(x, parts[0]) for x in parts)


def _ratio(node: Node, source: Node) -> float | None:
    """The one factor between the ranks' values and what they were made of; None if there is none."""
    found = {rank: ratio_of(x, source.local[rank]) for rank, x in node.local.items()}
    first = next(iter(found.values()), None)
    same = first is not None and all(x is not None and abs(x - first) < NEAR * abs(first) for x in found.values())
    return first if same else None


def _pending(node: Node) -> bool:
    return node.how in SUMMANDS or (node.whole is not None and bool(node.whole.layout.pending))


def _shows(node: Node) -> bool:
    """Whether a value is right, and says something of what it was made of: no constant, no comparison."""
    x = node.value
    if not node.equal or _left_apart(node) or not x.is_floating_point() or not x.numel():
        return False
    return x.unique().numel() > 1 if x.numel() > 1 else float(x) not in (0.0, 1.0)


__all__ = ["comes_of", "origin"]
