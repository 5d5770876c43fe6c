"""Stages: a step that is recorded once, cut into the stages of a pipeline: ``to_static(step, stages=Stages(...))``."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar
from zlib import crc32

import torch
from torch import Tensor, fx
from torch.distributed.tensor import Replicate

from onecard._torch.graphs import emptied
from onecard.comm.base import own
from onecard.comm.base.state import machine
from onecard.comm.base.warned import warn
from onecard.comm.issue import again, groups
from onecard.comm.world import world
from onecard.errors import RecordingError, ScheduleError
from onecard.pipeline.cut.alike import check_alike, check_batch
from onecard.pipeline.cut.copies import with_copies
from onecard.pipeline.cut.halved import halved
from onecard.pipeline.cut.lists import by_place
from onecard.pipeline.cut.on_rank import on_rank
from onecard.pipeline.cut.parts import Parts
from onecard.pipeline.cut.places import NodeRanks
from onecard.pipeline.cut.products import adding_products
from onecard.pipeline.cut.starts import as_first, starts_of
from onecard.pipeline.cut.unread import without_unread
from onecard.pipeline.cut.weave import Weave
from onecard.pipeline.schedule.action import Action, Schedule
from onecard.pipeline.schedule.modes import plan
from onecard.place.layout import Layout
from onecard.static.passes.dependence import Doubt, Verdict
from onecard.static.passes.microbatches import BatchRows, Microbatches, asked, check_mergeable
from onecard.static.passes.once import Once, phase_of, words
from onecard.static.run.agreed import all_or_none
from onecard.static.step.step import AnyStep, RecordedStep
from onecard.tensor.buckets import apart
from onecard.tensor.dispatch.entry import divided
from onecard.tensor.dist_tensor import DistTensor
from onecard.tensor.random_operators.one_card import one_card_random


@dataclass(frozen=True)
class Stages(Microbatches):
    """How a recorded step becomes a pipeline.

    The batch is cut in microbatches as by ``k_steps``, the program into stages; each rank along the axis runs its own, and has
    the parameters and states of those. Loss and gradients are those of one card with as many microbatches.

    Args:
        k_steps: microbatches.
        avg: as of ``to_static``.
        schedule: a name of ``pipeline.schedule.modes.MODES``, a ``Schedule``, or a function (ranks, microbatches) -> Schedule.
        virtual: stages of each rank; None: as the schedule has.
        at: the modules with which the stages begin, the first left out ("blocks.3"); none: the price is balanced.
        axis: of the mesh that the program's tensors lie on: the ranks along it are the pipeline. A program of plain tensors is
            cut over all ranks, or over ``ranks``.
        ranks: the pipeline's, in its order, for a program of plain tensors.

    Raises:
        ScheduleError: there is no such schedule.

    Source: cutting a traced program: PiPPy (Reed et al., 2022); Alpa (Zheng et al., 2022).
    """

    k_steps: int = 4
    avg: bool | None = None
    schedule: Any = "1F1B"
    virtual: int | None = None
    at: Sequence[str] = ()
    axis: str = "pp"
    ranks: Sequence[int] | None = None
    sketched: ClassVar[bool] = True

    def __post_init__(self) -> None:
        asked(self.k_steps, self.avg)
        if self.virtual is not None and (type(self.virtual) is not int or self.virtual < 1):
            raise ScheduleError(
                f"stages: virtual={self.virtual!r}: want how many stages a rank has, 1 or more, or None"
            )
        plan(self.schedule, 2, self.virtual)  # refuses what there is not
        if isinstance(self.at, str) or not all(isinstance(path, str) for path in self.at):
            raise RecordingError(
                f"stages: at={self.at!r}: want a list of modules' paths, one for each stage but the first: "
                "onecard.Stages(at=['blocks.2', 'blocks.4'])"
            )
        if self.ranks is not None and len({*self.ranks}) != len(self.ranks):
            raise RecordingError(f"stages: ranks={[*self.ranks]}: a rank is one place of the pipeline: name each once")

    @contextmanager
    def around(self) -> Iterator[None]:
        """What the step is recorded in: random numbers are drawn by keys, and tensors of several stages travel apart."""
        before, apart.here = apart.here, True
        fast = torch.backends.mha.get_fastpath_enabled()  # asks each tensor what it is: absent ones are not as others
        torch.backends.mha.set_fastpath_enabled(False)
        ours = {self.axis} - divided.here  # ranks along it are to read the whole batch: each does its stages of it
        divided.here |= ours
        try:
            with one_card_random():
                yield
        finally:
            torch.backends.mha.set_fastpath_enabled(fast)
            apart.here = before
            divided.here -= ours

    def ranks_of(self, recording: RecordedStep) -> tuple[int, ...]:
        """The ranks of the pipeline."""
        return self.line_of(recording)[0]

    def everyone(self, recording: RecordedStep) -> tuple[int, ...]:
        """All ranks of the meshes that the program lies on; of a program of plain tensors the pipeline's."""
        found = {r for i in recording.inputs if i.spec is not None for r in i.spec.layout.mesh.process_ids}
        return tuple(sorted(found)) or self.ranks_of(recording)

    def line_of(self, recording: RecordedStep) -> tuple[tuple[int, ...], int, str]:
        """The ranks of the pipeline, this one's place among them, and the name of the axis."""
        meshes = {i.spec.layout.mesh for i in recording.inputs if i.spec is not None}
        if not meshes:
            ranks = tuple(range(world.get_world_size())) if self.ranks is None else tuple(self.ranks)
            if wrong := [rank for rank in ranks if rank not in range(world.get_world_size())]:
                raise RecordingError(
                    f"stages: ranks={[*ranks]} names {wrong}; this world has ranks 0 to {world.get_world_size() - 1}: leave "
                    f"ranks out, or start more: onecard run --nproc_per_node {max(wrong) + 1} script.py"
                )
            if world.get_rank() not in ranks:
                raise RecordingError(f"stages: rank {world.get_rank()} is none of the pipeline's ranks {list(ranks)}")
            return ranks, ranks.index(world.get_rank()), self.axis
        found = [(mesh, mesh.dim_names.index(self.axis)) for mesh in meshes if self.axis in mesh.dim_names]
        lines = {tuple(groups.group(mesh, at).ranks) for mesh, at in found}
        if len(lines) != 1 or len(found) != len(meshes):
            raise RecordingError(
                f"stages: the program's tensors lie on {', '.join(map(str, meshes))}; all need one axis {self.axis!r} for "
                "the stages, along which nothing is cut: oc.ProcessMesh(ranks, ['pp', 'dp'])"
            )
        (line,) = lines
        if self.ranks is not None and tuple(self.ranks) != line:
            raise RecordingError(
                f"stages: ranks={[*self.ranks]}: the program's tensors lie on a mesh, whose axis {self.axis!r} is the pipeline, "
                f"here ranks {[*line]}: leave ranks out, or lay the tensors on another mesh"
            )
        for known in recording.inputs:
            layout = known.spec.layout if known.spec is not None else None
            if layout is not None and _is_cut(layout, self.axis):
                raise RecordingError(
                    f"stages: {known.name} is {known.spec!r}, cut along {self.axis!r}, the pipeline's axis, along which each "
                    "rank has other stages: cut it along another one, as of oc.ProcessMesh(ranks, ['pp', 'tp']), and say "
                    f"Replicate() along {self.axis!r}"
                )
        return line, line.index(world.get_rank()), self.axis

    def look_at(self, name: str, leaves: Sequence[Any]) -> tuple[int, ...]:
        """Whether all ranks of the pipeline were given one batch, now and then; which ranks these are."""
        lines: dict[tuple[int, ...], list[Tensor]] = {}
        laid_out = any(isinstance(x, DistTensor) for x in leaves)
        for x in leaves:
            if isinstance(x, DistTensor) and self.axis in x.mesh.dim_names and x._spec.here:
                line = tuple(groups.group(x.mesh, x.mesh.axis(self.axis)).ranks)
                lines.setdefault(line, []).append(x._local)
            elif isinstance(x, Tensor) and not laid_out:
                line = tuple(range(world.get_world_size()) if self.ranks is None else self.ranks)
                lines.setdefault(line, []).append(x)
        for line, tensors in lines.items():
            check_batch(name, line, tensors)
        everyone = {rank for line in lines for rank in line}
        return tuple(sorted(everyone & {*range(world.get_world_size())}))  # others are refused when it is recorded

    def schedule_for(self, ranks: int) -> Schedule:
        """The schedule on so many ranks."""
        make: Callable[[int], Schedule] = plan(self.schedule, ranks, self.virtual)
        found = make(self.k_steps)
        if len(found.ranks) != ranks or found.num_microbatches != self.k_steps:
            raise RecordingError(
                f"stages: {found!r}, and the pipeline has {ranks} ranks and {self.k_steps} microbatches (k_steps)"
            )
        return found

    def forward(self, microbatches: int = 1) -> Stages:
        """The same stages for steps without gradients, on so many microbatches: to evaluate and to predict."""

        def make(ranks: int, count: int) -> Schedule:
            homes = self.schedule_for(ranks).stage_to_rank
            rows = [[stage for stage in sorted(homes) if homes[stage] == rank] for rank in range(ranks)]
            return Schedule.of(
                [[Action("F", stage, m) for stage in row for m in range(count)] for row in rows], "forward"
            )

        return replace(self, k_steps=microbatches, schedule=make, virtual=None)

    def merged(
        self,
        recording: AnyStep,
        leaves: Sequence[Any],
        whole: Callable[[], BatchRows | None] = lambda: None,
        late: Collection[fx.Node] = (),
        seen: Verdict | None = None,
        once: Once | None = None,
        more: Sequence[Doubt] = (),
    ) -> AnyStep:
        """The recording of this rank's share of the step."""
        ranks, place, name = self.line_of(recording)
        schedule = self.schedule_for(len(ranks))
        trains = any(True for _ in recording.nodes("backward"))
        if not trains:
            schedule = forward_of(schedule)
        recorded_graph = recording.graph
        recording = recording.with_graph(without_unread(halved(self.counting(recording, seen).graph)))
        once = Once(recording.graph, training=False)
        everyone = self.everyone(recording)
        beside = everyone if len(everyone) > len(ranks) else ()
        with all_or_none(recording.name, "cut", lambda: everyone):
            check_mergeable(recording)  # a rank has those of its own stage alone
            starts = starts_of(recording.graph, schedule.num_stages, self.at, machine.here, once, bool(beside))
        with all_or_none(recording.name, "alike", lambda: everyone):  # all have come; it fails on a whole line
            starts = starts if self.at else as_first(recording.graph, once, starts, beside)
            check_alike(ranks, self._said(leaves, schedule, starts, self._as_seen(recording, seen)[0]), recording.graph)
        with all_or_none(recording.name, "merge", lambda: everyone):
            parts = Parts(recording.graph, starts, once)
            _check_gradients(recording, parts)
            made = super().merged(recording, leaves, whole, parts.late, seen, once, more)
            if recording.graph is not recorded_graph:
                emptied(recording.graph)
            made = replaced(made, adding_products(made.graph))
            made, weave = woven(made, schedule, ranks, name)
            mine = on_rank(made, weave, place)
        if trains and not recording.makes_states and (said := _without_parameters(recording, weave, self.at)):
            warn(f"{recording.name}: {said}")
        emptied(weave.places.graph)
        return mine

    def _said(self, leaves: Sequence[Any], schedule: Schedule, starts: Sequence[fx.Node], avg: bool) -> dict[str, str]:
        """How this rank cuts, in words."""
        return {
            "the batch": ", ".join(f"{[*x.shape]} {x.dtype}" for x in leaves if isinstance(x, Tensor)),
            "k_steps": f"k_steps={self.k_steps}, avg={avg}",
            "the schedule": f"{schedule!r}, whose orders have the code {crc32(repr(schedule.ranks).encode()):08x}",
            "where it is cut": ", ".join(f"{n.meta.get('module') or 'the step'}: {words(n)}" for n in starts),
        }


def _check_gradients(recording: RecordedStep, parts: Parts) -> None:
    """Whether the step takes the gradients that it makes: those that stay are there on some ranks alone, and grow.

    Raises:
        RecordingError: no optimizer of the step has a parameter that gets a gradient, or the step has none.
    """
    left = {effect.where for effect in recording.effects if effect.kind == "gradient" and effect.output is not None}
    steps = [n for n in recording.graph.nodes if n.op == "call_function" and phase_of(n) == "optimizer"]
    written = {root for n in steps for root in parts.order.memory.writes.get(n, ())}
    trained = {n.meta["input"].where for n in written if "input" in n.meta and n.meta["input"].kind == "parameter"}
    names = [known.name for known in recording.inputs if known.where in left - trained]
    if not names or (steps and not trained):
        return
    several = f"{names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''}"
    if not steps:
        raise RecordingError(
            f"stages: {several} gets a gradient, and this call of the step has no optimizer.step(): it would stay, and grow, on "
            "one stage alone: put optimizer.step() and optimizer.zero_grad() into the step. Gradients that several calls add up "
            "are those of one call with all their rows (torch.cat), in as many more microbatches"
        )
    raise RecordingError(
        f"stages: {several} gets a gradient, and no optimizer of the "
        "step takes it, so that it would grow from step to step: give it to the optimizer "
        "(torch.optim.AdamW(model.parameters())), freeze it (requires_grad_(False)), and put optimizer.step() and "
        "optimizer.zero_grad() into the step"
    )


def _without_parameters(recording: RecordedStep, weave: Weave, at: Sequence[str]) -> str:
    """What to say of ranks that have nothing to train, of a step that trains."""
    nodes = zip(recording.inputs, weave.places.graph.find_nodes(op="placeholder"), strict=True)
    used: set[int] = set()
    for known, node in nodes:
        used |= weave.places.holders(node) if known.kind == "parameter" else set()
    idle = [rank for i, rank in enumerate(weave.ranks) if i not in used]
    if not idle or not used:
        return ""
    why = f"at={[*at]} leaves them none" if at else "layers are small beside messages, by the price of the step"
    return (
        f"rank(s) {idle} have no parameter: {why}. Fewer ranks along the pipeline do as much, or say where it is cut: "
        "at=['blocks.2'] of oc.Stages or strategy.pipeline, stages=(2, 2) of oc.Plan"
    )


def _is_cut(layout: Layout, name: str) -> bool:
    """Whether the axis of a name cuts a dim, or waits for its summands."""
    at = layout.mesh.axis(name)
    return not isinstance(layout.placements[at], Replicate)


def forward_of(schedule: Schedule) -> Schedule:
    """The forwards of a schedule alone, for a step without gradients."""
    rows = tuple(tuple(action for action in row if action.kind == "F") for row in schedule.ranks)
    return Schedule(rows, f"{schedule.name}, forward")


def replaced(step: AnyStep, graph: fx.Graph) -> AnyStep:
    """A step with another graph. Its own one, which is all ranks' and as large, is taken apart at once."""
    made = step.with_graph(graph)
    if graph is not step.graph:
        emptied(step.graph)
    return made


def woven(recording: AnyStep, schedule: Schedule, ranks: tuple[int, ...], name: str) -> tuple[AnyStep, Weave]:
    """What all ranks do, for a whole step with parts; and the step as it was taken then."""
    homes = [schedule.stage_to_rank[s] for s in range(schedule.num_stages)]
    effects = {e.output.position: e.where for e in recording.effects if e.output is not None}
    places = NodeRanks(recording.graph, homes, len(ranks), effects, recording.owners)
    _check_own_messages(places, ranks)
    graph = recording.graph
    for rewritten in (by_place, with_copies):
        given, graph = graph, rewritten(graph, places)
        if graph is not given:
            places = NodeRanks(graph, homes, len(ranks), effects, recording.owners)
    return replaced(recording, graph), Weave(places, schedule, ranks, name)


def _check_own_messages(places: NodeRanks, ranks: tuple[int, ...]) -> None:
    """Whether each message of the program's own runs on all ranks: it was written for ranks that all do the whole step.

    Raises:
        RecordingError: it is of what some stages have: others would not send it, or another tensor's in its place.
    """
    for node in places.nodes:
        words: Any = {own.send_own: 1, own.functional: 0, again.message: 2}.get(node.target)
        if words is None:
            continue
        met: Any = places.all
        if node.target is again.message:  # those of layouts meet one rank of a pipeline
            line = groups.group(*node.args[4]).ranks
            met = {place for place, rank in enumerate(ranks) if rank in line}
        if len(met) > 1 and not places.at[node] >= met:
            what = str(node.args[words]).split()[0].strip("_")
            raise RecordingError(
                f"stages: your own {what} at {node.meta.get('line') or 'an unknown line'} is of what not every stage of the "
                "pipeline has, so that other ranks would not send it, or send another tensor. Leave it out: each rank is given "
                "the whole batch, the loss and the gradients are the whole batch's, and clipping takes the norm of all stages"
            )
