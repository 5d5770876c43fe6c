"""One rank's graph of a step that is cut into stages: its actions in the order of a schedule, and what it sends and takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from onecard.comm.issue import staged
from onecard.errors import RecordingError
from onecard.pipeline.cut.messages import Crossing, NodeTimes, Tick, crossings
from onecard.pipeline.cut.packing import Packet, numel, packed
from onecard.pipeline.cut.places import NodeRanks, is_free
from onecard.pipeline.schedule.action import Schedule
from onecard.static.passes.once import phase_of, words
from onecard.static.step.nodes import called, copied_to

aten = torch.ops.aten


class Weave:
    """The graphs of all ranks of a pipeline, each made when it is asked for.

    Args:
        places: where the nodes of the whole step run.
        schedule: for all ranks.
        ranks: of the world, in the pipeline's order; name: of the axis, for who watches messages.

    Raises:
        RecordingError: a value that cannot cross, or is changed by several stages.
    """

    def __init__(self, places: NodeRanks, schedule: Schedule, ranks: tuple[int, ...], name: str = "pp") -> None:
        places.check()
        self.places, self.schedule, self.ranks, self.name = places, schedule, ranks, name
        self.clock = NodeTimes(places, schedule)
        self.crossings = crossings(places, self.clock)
        self.packets = {pair: packed(found) for pair, found in self.crossings.items()}

    def graph_of(self, rank: int) -> fx.Graph:
        """The graph of the rank at a place. Its inputs are those of the whole step; outputs that it has not are None."""
        return _Rank(self, rank).made

    def taken_by(self, rank: int) -> list[Crossing]:
        """What others send it."""
        return [c for (_, target), found in self.crossings.items() if target == rank for c in found]


class _Rank:
    """One rank's graph as it is made."""

    def __init__(self, weave: Weave, rank: int) -> None:
        self.weave, self.rank, self.places = weave, rank, weave.places
        self.made, self.names = fx.Graph(), dict[fx.Node, fx.Node]()
        self.posted: dict[Packet, tuple[fx.Node, fx.Node]] = {}
        self.done: set[fx.Node] = set()
        ticks = [*weave.clock.end_of(rank), (3, 0)]
        self._plan(ticks)
        for node in self.places.nodes:
            if node.op == "placeholder":
                self.names[node] = copied_to(self.made, node, self.names.__getitem__)
        for node in self.places.nodes:
            if node.meta.get("key") and is_free(node):
                self._name(node)  # by all ranks, in the program's order, so that all have the same ones
        for tick in ticks:
            self._tick(tick)
        (output,) = weave.places.graph.find_nodes(op="output")
        results: Any = output.args[0]
        others = {n for n, ranks in self.places.wanted_at_end.items() if rank not in ranks}  # which it makes for them
        self.made.output(tuple(None if n in others else self._shown(n) for n in results))

    def _plan(self, ticks: Sequence[Tick]) -> None:
        """What happens at each tick."""
        at = {tick: i for i, tick in enumerate(ticks)}
        self.nodes: dict[Tick, list[fx.Node]] = {}
        for node, tick in self.weave.clock.ticks.items():
            if self.rank in self.places.at[node]:
                self.nodes.setdefault(tick, []).append(node)
        self.posts: dict[Tick, list[tuple[int, Packet]]] = {}
        self.waits: dict[Tick, list[Packet]] = {}
        self.sends: dict[Tick, list[tuple[int, Packet]]] = {}
        for (source, target), found in sorted(self.weave.packets.items()):
            if source == self.rank:
                for i, packet in enumerate(found):
                    self.sends.setdefault(packet[0].sent, []).append((i, packet))
            if target == self.rank:
                latest = len(ticks)
                for i, packet in reversed([*enumerate(found)]):  # posted in the order in which they are sent
                    wanted = min(c.wanted for c in packet)
                    latest = min(latest, max(at[wanted] - 1, 0))
                    self.posts.setdefault(ticks[latest], []).insert(0, (i, packet))
                    self.waits.setdefault(wanted, []).append(packet)

    def _tick(self, tick: Tick) -> None:
        for i, packet in self.posts.get(tick, ()):
            self._post(i, packet)
        for packet in self.waits.get(tick, ()):
            handle, x = self.posted.pop(packet)
            self._put(packet[0].value, staged.wait, handle, x)
            self._unpack(packet, x)
        for node in self.nodes.get(tick, ()):
            self._check(node)
            self.names[node] = self._copied(node)
            self.done.add(node)
        for i, packet in self.sends.get(tick, ()):
            given = [self._name(c.value) for c in packet]
            how, what = (staged.send, given[0]) if len(given) == 1 else (staged.send_packed, given)
            self._put(packet[0].value, how, what, packet[0].target, i, self.weave.ranks, self.weave.name)

    def _post(self, i: int, packet: Packet) -> None:
        first = packet[0]
        shape, stride, dtype, device = first.value.meta["tensor"]
        if len(packet) > 1:
            shape, stride = (sum(numel(c.value) for c in packet),), (1,)
        dense = _dense(shape, stride)
        x = self._put(first.value, aten.empty_strided.default, [*shape], [*dense], dtype=dtype, device=device)
        x.meta.update(tensor=(shape, dense, dtype, device), own=True)
        place = first.source, i, self.weave.ranks, self.weave.name
        self.posted[packet] = self._put(first.value, staged.post, x, *place), x

    def _unpack(self, packet: Packet, x: fx.Node) -> None:
        """The tensors of a message that has come: of several, parts of its memory."""
        begin = 0
        for crossing in packet:
            value, part = crossing.value, x
            if len(packet) > 1:
                shape, _, dtype, device = value.meta["tensor"]
                end = begin + numel(value)
                flat = self._put(value, aten.slice.Tensor, x, 0, begin, end)
                flat.meta["tensor"] = ((end - begin,), (1,), dtype, device)
                part = self._put(value, aten.view.default, flat, [*shape])
                part.meta["tensor"] = (shape, _dense(shape, value.meta["tensor"][1]), dtype, device)
                begin = end
            if "spec" in value.meta:
                part.meta["spec"] = value.meta["spec"]
            self.names[value] = part

    def _put(self, like: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = called(self.made, target, args, kwargs)
        node.meta.update({k: like.meta[k] for k in ("phase", "module", "line", "microbatch", "part") if k in like.meta})
        node.meta["data"] = True
        return node

    def _name(self, node: fx.Node) -> fx.Node:
        """A value here; what is made wherever it is wanted is made now."""
        if node not in self.names:
            if not is_free(node):
                raise RecordingError(
                    f"stages: {words(node)} is wanted on place {self.rank} before it is there: please report it"
                )
            self.names[node] = self._copied(node)
        return self.names[node]

    def _copied(self, node: fx.Node) -> fx.Node:
        """A node here. The step was written down without data, and torch's functions without data give some results other strides
        than kernels do (gradients of ``mse_loss``, ``layer_norm``, ``hardtanh``), of which a view need not exist: it may be a
        copy wherever nobody writes to it."""
        made = copied_to(self.made, node, self._name)
        if made.target is aten.view.default and self.places.order.memory.steady(node):
            made.target = aten.reshape.default
        return made

    def _check(self, node: fx.Node) -> None:
        """The order of the whole step's memory holds in this rank's, too."""
        for before in self.places.order.needs[node]:
            if before in self.weave.clock.ticks and self.rank in self.places.at[before] and before not in self.done:
                raise RecordingError(f"stages: {_out_of_turn(node, before, self.weave.schedule.name)}")

    def _shown(self, node: Any) -> Any:
        if not isinstance(node, fx.Node):
            return node
        if node in self.names or is_free(node):
            return self._name(node)
        return None


def _out_of_turn(node: fx.Node, before: fx.Node, schedule: str) -> str:
    """Why a node cannot run ahead of one that it needs."""
    if phase_of(node) == "forward" and phase_of(before) == "backward":
        return (
            f"{words(node)} writes in a microbatch's forward to what the backward of an earlier one reads, {words(before)}, "
            f"which {schedule} runs later, so that it would read another value than its forward did. Write to it outside of the "
            "forward, behind the optimizer's step, or to a copy that the forward goes on with; or leave the pipeline out (pp=1)"
        )
    return (
        f"under {schedule}, {words(node)} runs before {words(before)}, which it needs: the schedule does microbatches out of "
        "turn. Give one that does them in their order, as those of onecard.pipeline do"
    )


def _dense(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...]:
    """Strides of a tensor that arrives: in the order of its dims in memory as it was, without gaps."""
    order = sorted(range(len(shape)), key=lambda d: (stride[d], -d))
    found, step = [0] * len(shape), 1
    for d in order:
        found[d] = step
        step *= max(shape[d], 1)
    return tuple(found)
