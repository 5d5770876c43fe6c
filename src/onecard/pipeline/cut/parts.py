"""Parts: which stage each node of a recorded microbatch belongs to, and whether to its forward or a half of its backward. Pure.

A part is (stage, "F", "I" or "W"). What has none is made wherever it is wanted: views of parameters, constants, and what follows
from the batch alone, which every rank has.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from torch import fx

from onecard import recorded
from onecard._torch.names import OpOverload
from onecard.errors import RecordingError
from onecard.static.passes.once import Once, cut, phase_of, words
from onecard.static.passes.whole_counts import is_whole
from onecard.static.step.memory import effects
from onecard.static.step.nodes import traits
from onecard.static.step.order import Order, name_of, only_moves, only_names

Part = tuple[int, str]
_GIVEN = ("argument", "constant", "number", "generator")
"""Kinds of inputs that every rank has."""
_FILLS = ("new_full", "new_zeros", "new_ones", "full_like", "zeros_like", "ones_like")
"""Operators that take an operand's shape and none of its values."""


class ProgramOrder(Order):
    """The order that a graph's meaning depends on, tensors of the program told apart: a recording knows which share memory."""

    def _place(self, given: fx.Node) -> Any:
        return given


def part_of(node: fx.Node) -> Part | None:
    """The part of a node; None of what has none."""
    try:
        return node.meta["part"]
    except KeyError:
        return None


class Parts:
    """The parts of a microbatch's nodes, noted in their meta as "part".

    Args:
        graph: of one microbatch, with what runs once.
        starts: the first node of each stage but the first, in order.
        once: what of the graph runs once.

    Attributes:
        late: sums of a shared weight's gradients from two stages: they run once, over sums of microbatches.

    Raises:
        RecordingError: a forward that needs gradients.
    """

    def __init__(self, graph: fx.Graph, starts: Sequence[fx.Node], once: Once) -> None:
        self.once, self.last = once, len(starts)
        skip = self.once.tail | self.once.head
        self.nodes = [n for n in graph.nodes if n.op == "call_function" and n not in skip]
        self.order = ProgramOrder(graph)
        self.free = self._free(graph)
        self._stage: dict[fx.Node, int] = {}
        self._calls: dict[int, int] = {}
        self._modules: dict[str, int] = {}
        self._stand_ins: set[fx.Node] = set()
        self._backward = False
        now, waiting = 0, _with_their_counts(self.nodes, starts)
        for node in self.nodes:
            while waiting and node is waiting[0]:
                now += 1
                waiting.pop(0)
            self._place(node, now)
        for node in self.nodes:
            if node in self._stage:
                node.meta["part"] = (self._stage[node], "F" if phase_of(node) == "forward" else "W")
        self._halve()
        self.late = self._shared()

    # -- what is made again wherever it is wanted ----------------------------------------------------------------------------

    def _free(self, graph: fx.Graph) -> set[fx.Node]:
        memory, free = self.order.memory, set[fx.Node]()
        given = {n for n in graph.nodes if n.op == "placeholder" and (cut(n) or _kind(n) in _GIVEN)}
        for node in self.nodes:
            inputs = node.all_input_nodes
            if node.meta.get("key") and all(n in free or n in given for n in inputs):
                free.add(node)  # random keys are drawn by all, in the program's order
                continue
            if effects(node) or node in memory.writes or traits(node).product:
                continue
            if only_names(node) and all(n in free or n.op == "placeholder" for n in inputs):
                free.add(node)
            elif self._plain(node) and all(n in free or n in given for n in inputs):
                steady = all(memory.steady(n) for n in (node, *inputs) if "tensor" in n.meta)
                free |= {node} if steady else set()
        return free

    @staticmethod
    def _plain(node: fx.Node) -> bool:
        known = isinstance(node.target, OpOverload) or node.target in (operator.getitem, *recorded.pure)
        return known or "tensor" not in node.meta

    # -- stages --------------------------------------------------------------------------------------------------------------

    def _place(self, node: fx.Node, now: int) -> None:
        number = node.meta.get("call")
        if phase_of(node) == "backward":
            self._backward = True
            if node not in self.free:
                self._stage[node] = self._of_backward(node, number)
            return
        if self._backward:
            if node not in self.free:
                self._stage[node] = self._of_late_forward(node)
            now = self._stage.get(node, self.last)
        elif node not in self.free:
            self._stage[node] = now = self._of_maker(node, now)
            self._modules.setdefault(node.meta.get("module", ""), now)
        if number is not None and node not in self.free:  # a view's gradient follows what it meets
            self._calls.setdefault(number, now)

    def _of_maker(self, node: fx.Node, otherwise: int) -> int:
        """One of several results is where all of them are."""
        return self._stage.get(node.args[0], otherwise) if node.target is operator.getitem else otherwise  # type: ignore[arg-type]

    def _of_backward(self, node: fx.Node, number: int | None) -> int:
        if (maker := self._of_maker(node, -1)) >= 0:
            return maker
        if (stands_for := self._stands_for(node)) is not None:
            return self._stage[stands_for]
        before = [n for n in self.order.needs[node] if n in self._stage]
        gradients = [self._stage[n] for n in before if phase_of(n) == "backward"]
        forward = [self._stage[n] for n in before if phase_of(n) == "forward"]
        at = self._calls.get(number) if number is not None else None
        if at is None:
            at = min(gradients) if gradients else max(forward, default=self.last)
        return min([at, *gradients])

    def _stands_for(self, node: fx.Node) -> fx.Node | None:
        """The gradient of whose shape this is a constant: zeros on all ranks of a sum but the first, which has the gradient
        itself. They are where it is, or ranks along another axis would cut their sums apart differently.
        """
        filled = name_of(node) in _FILLS
        if not filled and not only_moves(node):
            return None
        for given in node.all_input_nodes:
            if given in self._stage and phase_of(given) == "backward" and (filled or given in self._stand_ins):
                self._stand_ins.add(node)
                return given
        return None

    def _of_late_forward(self, node: fx.Node) -> int:
        """Forward after a backward: of a second loss, or of what is returned."""
        before = [n for n in self.order.needs[node] if n in self._stage]
        if wrong := [n for n in before if phase_of(n) == "backward"]:
            raise RecordingError(
                f"stages: {words(node)} needs {words(wrong[0])}, a gradient of one microbatch, in a forward pass: a pipeline's "
                "stages do forward, then backward. Leave the pipeline out for this step, or take the second pass out of it"
            )
        # Memory for results is made where most of what is written to it is.
        otherwise = 0 if node.all_input_nodes else self.last
        at = self._modules.get(node.meta.get("module", ""), 0) if node.meta.get("inside") else otherwise
        return max([at, *(self._stage[n] for n in before)])

    # -- halves of backward ----------------------------------------------------------------------------------------------------

    def _halve(self) -> None:
        """What an earlier stage waits for is I; the rest, W. Where nobody waits all is I: W would only keep memory longer."""
        back = [n for n in self.nodes if (p := part_of(n)) is not None and p[1] == "W"]
        wanted: set[fx.Node] = set()
        for node in reversed(back):
            mine = self._stage[node]
            below = [n for n in self.order.needs[node] if n in self._stage and phase_of(n) == "backward"]
            for n in below:
                if self._stage[n] > mine or node in wanted:
                    wanted.add(n)
        crossed = {self._stage[n] for n in wanted}
        for node in back:
            if node in wanted or self._stage[node] not in crossed:
                node.meta["part"] = (self._stage[node], "I")

    # -- shared weights --------------------------------------------------------------------------------------------------------

    def _shared(self) -> set[fx.Node]:
        late: set[fx.Node] = set()
        users = {n: [u for u in n.users if u.op != "output" and u not in self.once.tail] for n in self.nodes}
        for node in reversed(self.nodes):
            if phase_of(node) != "backward" or name_of(node) != "add" or node.kwargs or len(node.all_input_nodes) != 2:
                continue
            views = _views_of(node, users, late)
            stages = {self._stage.get(n) for n in node.all_input_nodes}
            if views is not None and len(stages) == 2 and None not in stages:
                late |= {node, *views}
        for node in late:
            node.meta.pop("part", None)
        return late


def _with_their_counts(nodes: Sequence[fx.Node], starts: Sequence[fx.Node]) -> list[fx.Node]:
    """The starts of stages, from the counts on that are taken right ahead of them: what divides reads weights where they are."""
    order = {n: i for i, n in enumerate(nodes)}
    found = []
    for start in starts:
        at = order.get(start, 0)
        while at and is_whole(nodes[at - 1]):
            at -= 1
        found.append(nodes[at] if start in order else start)
    return found


def _views_of(node: fx.Node, users: dict[fx.Node, list[fx.Node]], late: set[fx.Node]) -> set[fx.Node] | None:
    """The views of a node, if a microbatch has no other use of it, but for another such sum."""
    found, waiting = set[fx.Node](), [*users.get(node, ())]
    while waiting:
        user = waiting.pop()
        if user in late:
            continue
        if not only_names(user):
            return None
        found.add(user)
        waiting += users.get(user, ())
    return found


def _kind(node: fx.Node) -> str:
    return node.meta["input"].kind if "input" in node.meta else ""


__all__ = ["Part", "Parts", "ProgramOrder", "part_of"]
