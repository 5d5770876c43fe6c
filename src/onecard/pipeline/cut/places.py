"""Places: on which ranks of a pipeline each node of a whole step runs. Pure.

A stage's nodes run where the stage is. What runs once (clipping, the optimizer) runs where its operands are: a parameter, its
gradient and its states are on the ranks of the stages that read the parameter. What needs values of several stages, such as the
norm of all gradients, runs on every rank that wants it, and its operands are sent there. A scaler's scale is kept by all.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import fx

from onecard._torch.names import OpOverload
from onecard.errors import RecordingError
from onecard.pipeline.cut.parts import ProgramOrder, part_of
from onecard.static.passes.once import is_scale, words
from onecard.static.step.memory import effects

Ranks = frozenset[int]
_ALONE = ("argument", "constant", "number", "generator")


class NodeRanks:
    """The ranks of each node.

    Args:
        graph: a whole step: nodes of microbatches have their "part", others run once or wherever they are wanted.
        homes: for each stage, its rank's place in the pipeline.
        ranks: how many there are.
        effects_at: for the positions of outputs that are effects, where in the program: gradients and states are left where their
            parameter is. All others are results, which every rank is given.
        owners: of optimizers' states, as of a recording.

    Attributes:
        at: for each node the ranks on which it runs; empty: nobody wants it.
        near: for each node where its operands are; None: anywhere.
        stages: for each input that stages read, which.
        wanted_at_end: for each output the ranks that give it back.
        writers: for each piece of memory the nodes that write to it.
    """

    def __init__(
        self,
        graph: fx.Graph,
        homes: list[int],
        ranks: int,
        effects_at: Mapping[int, Any] | None = None,
        owners: Mapping[Any, Any] | None = None,
    ) -> None:
        self.graph, self.homes, self.all = graph, homes, Ranks(range(ranks))
        self.order = ProgramOrder(graph)
        self.nodes = list(graph.nodes)
        self._number = {node: i for i, node in enumerate(self.nodes)}
        self.writers: dict[fx.Node, list[fx.Node]] = {}
        for node, roots in self.order.memory.writes.items():
            for root in roots:
                self.writers.setdefault(root, []).append(node)
        self.near: dict[fx.Node, Ranks | None] = {}
        self.stages: dict[fx.Node, tuple[int, ...]] = {}
        for node in self.nodes:
            self.near[node] = self._body(node)
        self._read_by_stages()
        self._place_states(owners or {})
        self._of: dict[fx.Node, Ranks | None] = {}  # of what is made wherever it is wanted, where it is made of
        outside = [n for n in self.nodes if n.op == "call_function" and part_of(n) is None]
        learning = True
        while learning:
            self.near.update((node, None) for node in outside)
            for node in outside:
                if is_free(node):
                    self._of[node] = self._together(node.all_input_nodes)
                else:
                    self.near[node] = self._once(node)
            learning = self._learn()
        self.at = self._wanted(effects_at or {})

    def _body(self, node: fx.Node) -> Ranks | None:
        part = part_of(node)
        return None if part is None else Ranks([self.homes[part[0]]])

    def _read_by_stages(self) -> None:
        """What of the program the stages read is theirs, through what is made again on the way."""
        reads: dict[fx.Node, set[int]] = {}
        for node in reversed(self.nodes):
            part = part_of(node)
            here = {part[0]} if part is not None else reads.get(node, set())
            if node.op == "call_function" and (part is not None or is_free(node)):
                for given in self.order.needs[node]:
                    if part_of(given) is None:
                        reads.setdefault(given, set()).update(here)
        for node in self.nodes:
            if node.op == "placeholder" and reads.get(node) and not _is_everywhere(node):
                self.stages[node] = tuple(sorted(reads[node]))
                self.near[node] = Ranks(self.homes[stage] for stage in reads[node]) | self._earlier(node)

    def _earlier(self, node: fx.Node) -> Ranks:
        """The ranks that have an input by an earlier step: they go on with it, and update it, too."""
        stages = node.meta.get("stages")
        return self.all if stages == () else Ranks(self.homes[stage] for stage in stages or ())

    def _place_states(self, owners: Mapping[Any, Any]) -> None:
        """States are where their parameters are, whatever they meet first; counts, which have no dims, are kept by all."""
        self._read = {n.meta["input"].where: n for n in self.stages}
        self._owners = owners
        for node in self.graph.find_nodes(op="placeholder"):
            known = node.meta.get("input")
            if known is not None and known.kind == "state" and node.meta["tensor"][0] and node not in self.stages:
                self.near[node] = self._beside_parameter(known.where)

    def _beside_parameter(self, where: Any) -> Ranks | None:
        """Where the parameter is whose state this is, or whose gradient, by its own place; None if no stage reads it."""
        parameter = self._read.get(self._owners.get(where[1:4]) if where[0] == "state" else where)
        return None if parameter is None else self.near[parameter]

    def _learn(self) -> bool:
        """States of nothing that a stage reads are where what they are used with is, at once or by way of what is made of them
        alone; whether any was found.
        """
        found: dict[fx.Node, Ranks] = {}
        behind: dict[fx.Node, Ranks] = {}  # of nodes that could be anywhere, where what is made of them is
        for node in reversed(self.nodes):
            if self.near[node] is not None or _is_everywhere(node) or node.op == "output":
                continue
            known = [near for user in node.users if (near := self._near_in(user, node)) is not None]
            further = known or [x for user in node.users for x in self._behind(user, node, behind)]
            if further:
                behind[node] = frozenset.union(*further)
            # A state without dims is a count, which each rank keeps: as all count alike, it need not be anywhere.
            there = further if node.meta.get("tensor", ((),))[0] else known
            if there and node.op == "placeholder" and "tensor" in node.meta:
                found[node] = frozenset.union(*there)
        self.near.update(found)
        return bool(found)

    def _behind(self, user: fx.Node, node: fx.Node, behind: dict[fx.Node, Ranks]) -> Iterator[Ranks]:
        """Where what a user makes of a node is; an operator on lists makes one of each."""
        made: Iterable[fx.Node] = (user,)
        if (at := _elements(user, node)) is not None:
            made = [n for n in user.users if n.target is operator.getitem and n.args[1] in at]
        yield from (behind[n] for n in made if n in behind)

    def _near_in(self, user: fx.Node, node: fx.Node) -> Ranks | None:
        """Where a user of an input runs; an operator on lists: where it does what it does to this one."""
        if not _is_list(user) or part_of(user) is not None:
            return self.near.get(user)
        places = _elements(user, node) or ()
        known = [near for i in places if (near := self.of_element(user, i)) is not None]
        return frozenset.union(*known) if known else None

    def _once(self, node: fx.Node) -> Ranks | None:
        if "ranks" in node.meta:
            return Ranks(node.meta["ranks"])
        if node.target is operator.getitem and _is_list(maker := node.args[0]):
            return self.of_element(maker, node.args[1])  # type: ignore[arg-type]
        return self._together(node.all_input_nodes)

    def of_element(self, node: Any, i: int) -> Ranks | None:
        """Where one element of an operator on lists is done: on all ranks that have what it writes to, or by its operands."""
        operands = [x[i] for x in _lists(node) if i < len(x) and isinstance(x[i], fx.Node)]
        memory = self.order.memory
        roots = {
            r for x in operands for r in memory.roots[x] if r in memory.writes.get(node, ()) and r.op == "placeholder"
        }
        return frozenset[int]().union(*(self.near[r] or () for r in roots)) or self._together(operands)

    def _together(self, operands: Iterable[fx.Node]) -> Ranks | None:
        known = [near for n in operands if (near := self.near[n] or self._of.get(n)) is not None]
        if not known:
            return None
        return frozenset.intersection(*known) or frozenset.union(*known)

    # -- who runs what ---------------------------------------------------------------------------------------------------------

    def _left_at(self, node: fx.Node, where: Any) -> Ranks:
        """Where an effect is left; counts, which have no dims, where they are made."""
        is_count = where[0] == "state" and not node.meta.get("tensor", ((),))[0]
        return (None if is_count else self._beside_parameter(where)) or self.near[node] or self.all

    def _wanted(self, effects_at: Mapping[int, Any]) -> dict[fx.Node, Ranks]:
        wanted: dict[fx.Node, set[int]] = {n: set() for n in self.nodes}
        (output,) = self.graph.find_nodes(op="output")
        results: Any = output.args[0]
        for i, node in enumerate(results):
            if isinstance(node, fx.Node):
                wanted[node] |= self._left_at(node, effects_at[i]) if i in effects_at else self.all
        self.wanted_at_end = {n: Ranks(ranks) for n, ranks in wanted.items() if ranks}
        last = {root: node for node, roots in self.order.memory.writes.items() for root in roots}
        for node, ranks in self.wanted_at_end.items():  # as they are when all is done
            for writer in {last[root] for root in self.order.memory.roots[node] if root in last}:
                wanted[writer] |= ranks
        at: dict[fx.Node, Ranks] = {}
        for node in reversed(self.nodes):
            at[node] = Ranks(self._runs_on(node, wanted[node])) if node.op == "call_function" else Ranks(wanted[node])
            for before in self.order.needs.get(node, ()) if node.op == "call_function" else ():
                wanted[before] |= at[node]
        return at

    def _runs_on(self, node: fx.Node, wanted: set[int]) -> Iterable[int]:
        if part_of(node) is not None:
            return self.near[node] or ()
        if node.meta.get("key"):
            return self.all
        near = self.near[node]
        if "ranks" in node.meta:
            return near or ()
        held = self._holders(node)
        if held is not None:  # each rank that has it writes to its own; what has no place is kept by all
            return held or (self.all if near is None else wanted or near)
        if node in self.order.memory.writes and wanted:
            return wanted
        if effects(node):
            return near or wanted or self.all
        if near is None or not wanted:
            return wanted
        return (near & wanted) or [min(near)]

    def _holders(self, node: fx.Node) -> Ranks | None:
        """The ranks that have the program's memory that a node writes to; None of one that writes to none."""
        roots = [r for r in self.order.memory.writes.get(node, ()) if r.op == "placeholder"]
        if not roots:
            return None
        return frozenset[int]().union(*(self.near[r] or () for r in roots))

    def holders(self, node: fx.Node) -> Ranks:
        """The ranks that use an input."""
        return frozenset[int]().union(self.near[node] or (), *(self.at[u] for u in node.users if u.op != "output"))

    def check(self) -> None:
        """Whether what is written is read where it was written.

        Raises:
            RecordingError: a cut inside of a chain of writes, or other cuts than an earlier step's.
        """
        for root, nodes in self._accesses().items():
            self._check_memory(root, nodes)
        behind = self._reads_behind()
        for root, writers in self.writers.items():
            self._check_written(root, [node for node in writers if part_of(node) is None])
            if root.op == "placeholder":
                self._check_kept(root, [node for node in writers if part_of(node) is not None])
            if root.op == "call_function":
                self._check_left(root, [node for node in writers if part_of(node) is not None], behind.get(root, ()))
        for node in self.graph.find_nodes(op="placeholder"):
            had = {self.homes[stage] for stage in node.meta.get("stages", ())}
            if had and not self.holders(node) <= had:
                raise RecordingError(
                    f"stages: {node.meta['input'].name} is on place {sorted(had)} of the pipeline by an earlier step, and this "
                    f"one reads it on {sorted(self.holders(node))}: name the same cuts for both: oc.Stages(..., at=[...]), "
                    "a Strategy's pipeline.at, an oc.Plan's stages"
                )

    def _accesses(self) -> dict[fx.Node, list[fx.Node]]:
        written = {r for roots in self.order.memory.writes.values() for r in roots}
        found: dict[fx.Node, list[fx.Node]] = {r: [] for r in written}
        for node in self.nodes:
            if node.op == "call_function" and part_of(node) is not None:
                for root in frozenset[fx.Node]().union(*(self.order.memory.roots[n] for n in node.all_input_nodes)):
                    if root in found:
                        found[root].append(node)
        return found

    def _check_memory(self, root: fx.Node, nodes: list[fx.Node]) -> None:
        """Ranks have copies of what another one made: a write makes the others' stale."""
        maker = self.at[root]
        fresh, had = set(maker), set(maker)
        for node in nodes:
            (rank,) = self.at[node]
            if rank not in fresh:
                stale = rank in had or not maker & fresh  # who made it sends it, as it is there
                if stale or (root.op == "placeholder" and root not in self._given()):
                    raise self._inside(root, node)
                fresh.add(rank)
                had.add(rank)
            if root in self.order.memory.writes.get(node, ()):
                names = {n for n in node.all_input_nodes if root in self.order.memory.roots[n]}
                others = [n for m in nodes if self.at[m] == {rank} for n in m.all_input_nodes]
                aliased = {n for n in others if root in self.order.memory.roots[n] and self.at[n] != {rank}} - names
                if maker != {rank} and root.op != "placeholder" and aliased:
                    raise self._inside(root, node)
                fresh = {rank}

    def _check_written(self, root: fx.Node, writers: list[fx.Node]) -> None:
        """Whether each rank that uses a tensor of the program writes to it, too: others would go on with an old one."""
        missed = next((n for n in writers if root.op == "placeholder" and not self.holders(root) <= self.at[n]), None)
        if missed is not None:
            raise RecordingError(
                f"stages: {root.meta['input'].name} is used on places {sorted(self.holders(root))} of the pipeline, and "
                f"{words(missed)} writes to it on {sorted(self.at[missed])} alone: the others would go on with what it was. "
                "Use it where it is written (in the update of the parameter that it belongs to), or write a copy of it"
            )

    def _check_kept(self, root: fx.Node, writers: list[fx.Node]) -> None:
        """What a stage writes into the program, no other rank may have: it would go on with what it was."""
        there = frozenset[int]().union(*(self.at[w] for w in writers))
        if writers and root not in self._given() and not self.holders(root) <= there:
            raise self._inside(root, writers[-1])

    def _reads_behind(self) -> dict[fx.Node, list[tuple[int, fx.Node]]]:
        """Under what names memory is read outside of stages, and by which node of all."""
        found: dict[fx.Node, list[tuple[int, fx.Node]]] = {}
        for node, number in self._number.items():
            for name in node.all_input_nodes if part_of(node) is None else ():
                for root in self.order.memory.roots[name]:
                    found.setdefault(root, []).append((number, name))
        return found

    def _check_left(self, root: fx.Node, writers: list[fx.Node], reads: Iterable[tuple[int, fx.Node]]) -> None:
        """What stages have written to is read behind them as they have left it, not as another rank has made it."""
        if not writers:
            return
        there = frozenset[int]().union(*(self.at[w] for w in writers))
        begun = self._number[writers[0]]
        if any(at > begun and name not in writers and not self.at[name] <= there for at, name in reads):
            raise self._inside(root, writers[-1])

    def _given(self) -> set[fx.Node]:
        return {n for n in self.nodes if n.op == "placeholder" and _is_everywhere(n)}

    def _inside(self, root: fx.Node, node: fx.Node) -> RecordingError:
        what = root.meta["input"].name if "input" in root.meta else words(root)
        return RecordingError(
            f"stages: a cut goes through what is written in place: {what} is used by several stages and changed by "
            f"{words(node)}. Cut before the first of them or after the last, oc.Stages(..., at=[...]), or write the result "
            "to a new tensor"
        )


def is_free(node: fx.Node) -> bool:
    """Whether a node of a microbatch is made wherever it is wanted."""
    return "microbatch" in node.meta and node.op == "call_function" and part_of(node) is None


def _is_everywhere(node: fx.Node) -> bool:
    return "input" in node.meta and (node.meta["input"].kind in _ALONE or is_scale(node))


def _lists(node: fx.Node) -> list[Any]:
    return [x for x in (*node.args, *node.kwargs.values()) if isinstance(x, list | tuple)]


def _elements(node: fx.Node, given: fx.Node) -> set[int] | None:
    """At which places of its lists an operator on lists has an operand; None of another operator."""
    return {i for x in _lists(node) for i, n in enumerate(x) if n is given} if _is_list(node) else None


def _is_list(node: Any) -> bool:
    return isinstance(node, fx.Node) and is_list_operator(node)


def is_list_operator(node: fx.Node) -> bool:
    """Whether an operator does one thing to each element of lists of tensors."""
    if not isinstance(node.target, OpOverload):
        return False
    return node.target._schema.name.startswith(("aten::_foreach_", "aten::_fused_", "aten::_amp_foreach_"))
