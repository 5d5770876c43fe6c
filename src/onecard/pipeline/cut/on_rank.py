"""What of a recorded step that is cut into stages one rank has: its graph, its effects and its tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from onecard.pipeline.cut.weave import Weave
from onecard.static.step.step import AnyStep, Effect, Elsewhere, Output, RecordedStep, holders


def on_rank(recording: AnyStep, weave: Weave, place: int) -> AnyStep:
    """The recording of the rank at a place: what other ranks leave in the program is not there."""
    graph = weave.graph_of(place)
    (output,) = graph.find_nodes(op="output")
    (output_before,) = weave.places.graph.find_nodes(op="output")
    given: Any = output.args[0]
    given_before: Any = output_before.args[0]
    kept = [i for i, n in enumerate(given) if n is not None]
    numbers = {old: new for new, old in enumerate(kept)}
    graph.erase_node(output)
    graph.output(tuple(given[i] for i in kept))

    def moved(x: Any) -> Any:
        return replace(x, position=numbers[x.position]) if isinstance(x, Output) else x

    effects, staged = list[Effect](), [*_held(recording, weave, place)]
    absent = {  # as their parameters lie, so that nothing that is done with both moves
        x.where: replace(x, where=("gradient", x.where), here=False, name=f"{x.name}.grad") for x in staged
    }
    for effect in recording.effects:
        if effect.output is None or effect.output.position in numbers:
            effects.append(replace(effect, output=moved(effect.output)))
        elif effect.kind == "gradient":  # who reads it between steps is told, as of the parameter
            effects.append(replace(effect, output=None, absent=absent.get(effect.where)))
        if effect.kind == "new state" and effect.output is not None:
            node = given_before[effect.output.position]
            here = effect.output.position in numbers
            name = f"the optimizer's {effect.where[-1]}"
            staged.append(Elsewhere(effect.where, node.meta["tensor"], effect.output.spec, here, (), name, True))
    made = recording.with_graph(graph)
    made.results, made.effects, made.elsewhere = tuple(map(moved, recording.results)), tuple(effects), tuple(staged)
    return made


def _held(recording: RecordedStep, weave: Weave, place: int) -> Iterator[Elsewhere]:
    """Which of the program's tensors this rank has; such as share memory go together.

    What nobody writes, and no model has (a loss' class weights), the program may read itself: all keep it. What an earlier step
    has on more ranks stays there: an evaluation reads less than the step of training, which goes on.
    """
    nodes, memory = weave.places.graph.find_nodes(op="placeholder"), weave.places.order.memory
    memories = holders(recording.inputs)
    used, homes = dict[int, set[int]](), weave.places.homes
    for i, node in zip(memories, nodes, strict=True):
        used.setdefault(i, set()).update(
            weave.places.holders(node), map(homes.__getitem__, node.meta.get("stages", ()))
        )
    written = {i for i, node in zip(memories, nodes, strict=True) if not memory.steady(node)}
    models = {known.where[1] for known in recording.inputs if known.kind == "parameter"}
    for known, node, i in zip(recording.inputs, nodes, memories, strict=True):
        kept = len(used[i]) in (0, len(weave.ranks)) or node.meta.get("stages") == ()
        if known.kind == "tensor" or (known.kind == "buffer" and known.where[1] not in models):
            kept = kept or i not in written
        if known.kind in _OF_STAGES and known.facts and not kept:
            stages = tuple(sorted({*weave.places.stages.get(node, ()), *node.meta.get("stages", ())}))
            yield Elsewhere(known.where, known.facts, known.spec, place in used[i], stages, known.name)


_OF_STAGES = ("parameter", "buffer", "state", "tensor")
