"""What goes into recordings that are proved: one card's values, and of them each rank's part."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.optim import Optimizer

from onecard._torch.names import tree_flatten
from onecard.comm.issue import again
from onecard.errors import ProofError
from onecard.place.layout import Layout
from onecard.place.mesh import ProcessMesh
from onecard.proof.begun import restored
from onecard.static.guards.places import at
from onecard.static.step.memory import GraphMemory
from onecard.static.step.step import Input, RecordedStep
from onecard.tensor.dist_tensor import DistTensor
from onecard.train.shard import Shard, noted

Values = dict[str, Any]
"""One card's, by the names of its inputs: tensors whole."""


def check(ranks: Sequence[RecordedStep], one: RecordedStep) -> None:
    """Whether recordings are those of all ranks of one world, in order, and of one card.

    Raises:
        ProofError: one is missing or stands elsewhere, meshes differ, or what should be one card's has several ranks.
    """
    for place, step in [*enumerate(ranks), ("against", one)]:
        if not isinstance(step, RecordedStep):
            where = "against=" if place == "against" else f"recordings[{place}]"
            raise ProofError(
                f"prove(recordings, against=...): {where} is {type(step).__name__}: want what oc.record(step)(...) gives, or "
                "static.recordings[0]"
            )
    if many := next((mesh for mesh in _meshes(one) if mesh.size > 1), None):
        raise ProofError(
            f"prove(recordings, against=...): against= was recorded on {many}: record it on one card, alone"
        )
    if made := [rank for rank, step in enumerate(ranks) if step.makes_states != one.makes_states]:
        which = "the ranks'" if ranks[made[0]].makes_states else "one card's"
        raise ProofError(
            f"prove(recordings, against=...): in {which} recording an optimizer makes its states, in the other it has them: "
            "run the step once before it is recorded, on all ranks and on one card"
        )
    world = len(ranks)
    named = sorted({rank for step in ranks for mesh in _meshes(step) for rank in mesh.process_ids})
    if missing := [rank for rank in named if rank >= world]:
        raise ProofError(
            f"prove(recordings, against=...): {world} recordings, and their meshes have rank {', '.join(map(str, missing))}, too"
            ": give one of each rank, in order"
        )
    laid: dict[str, tuple[int, ProcessMesh]] = {}
    _check_memory(one)
    for rank, step in enumerate(ranks):
        _check_rank(rank, step)
        _check_memory(step)
        for known in step.inputs:
            if known.spec is not None:
                mesh = known.spec.layout.mesh
                other, first = laid.setdefault(known.name, (rank, mesh))
                if mesh is not first:
                    raise ProofError(
                        f"prove(recordings, against=...): {known.name} lies on {first} on rank {other}, and on {mesh} on rank "
                        f"{rank}: record all ranks of one program on one mesh"
                    )


def _check_rank(rank: int, step: RecordedStep) -> None:
    """Whether a recording is that of its place: what it sends, and how large its parts are."""
    was = next((node.meta["rank"] for node in step.nodes() if "rank" in node.meta), rank)
    if was != rank:
        raise ProofError(
            f"prove(recordings, against=...): recordings[{rank}] was made on rank {was}: give one of each rank, in order"
        )
    for known in step.inputs:
        if known.spec is None or (place := known.spec.layout.mesh.coordinate(rank)) is None:
            continue
        want = known.spec.layout.local_shape(known.spec.shape, place)
        if tuple(known.facts[0]) != tuple(want):
            raise ProofError(
                f"prove(recordings, against=...): recordings[{rank}] has a part of {list(known.facts[0])} of {known.name}; rank "
                f"{rank} of [{known.spec.layout}] has {list(want)}: give one of each rank, in order"
            )


def _check_memory(step: RecordedStep) -> None:
    """Whether inputs that share memory are only read, so that each may be a copy."""
    shared = [(i, other) for other, known in enumerate(step.inputs) for i in known.shares]
    if not shared:
        return
    nodes = [node for node in step.graph.nodes if node.op == "placeholder"]
    written = GraphMemory(step.graph).written
    for i, other in shared:
        if nodes[i] in written or nodes[other] in written:
            raise ProofError(
                f"prove(recordings, against=...): {step.inputs[i].name} lies in the memory of {step.inputs[other].name}, and "
                f"{step.name} writes to it: each has a copy here. Prove the program itself: oc.prove(program, world=...)"
            )


def _meshes(step: RecordedStep) -> Iterator[ProcessMesh]:
    for known in step.inputs:
        if known.spec is not None:
            yield known.spec.layout.mesh
    for node in step.nodes():
        if node.target is again.message:
            line: Any = node.args[4]
            yield line.mesh
        elif isinstance(node, fx.Node) and node.meta.get("spec") is not None:
            yield node.meta["spec"].layout.mesh


# -- one card's ------------------------------------------------------------------------------------------------------------


def of_one(one: RecordedStep, args: Any, start: str | Path | None = None) -> Values:
    """The values of one card's inputs.

    Args:
        args: the arguments of the step, or values by the names of inputs; what is in neither comes from what the recording is
            bound to.
        start: a checkpoint that fills copies of the models and optimizers that it is bound to.

    Raises:
        ProofError: a value is missing, or does not fit.
    """
    roots = () if one.bound is None else one.bound.roots
    if start is not None:
        roots = _filled(one, start)
    named = dict(args) if isinstance(args, Mapping) else {}
    leaves = () if isinstance(args, Mapping) or args is None else _leaves(one, args)
    found, names = dict(named), [known.name for known in one.inputs]
    for i, known in enumerate(one.inputs):
        value = named.get(known.name, _MISSING)
        if value is _MISSING and known.where[0] == "argument" and known.where[1] < len(leaves):
            value = leaves[known.where[1]]
        elif value is _MISSING:
            value = at_place(one, i, roots)
        if value is _MISSING:
            raise ProofError(
                f"prove(recordings, against=...): {one.name} of one card reads {known.name}, and nobody says what it is: bind "
                f"the recording (against.bind(model=model, ...)), or args={{{known.name!r}: value}}"
            )
        found[known.name if names.count(known.name) == 1 else _placed_name(known)] = _fitting(known, value)
    return found


def _placed_name(known: Input) -> str:
    """What an input is called that shares its name with another one, as weights of modules in a list do: by its place, too."""
    return f"{known.name} {known.where}"


_MISSING = object()


def _leaves(one: RecordedStep, args: Any) -> list[Any]:
    given = tuple(args) if isinstance(args, list | tuple) else (args,)
    leaves, tree = tree_flatten((given, {}))
    names = [name for name, _ in one.arguments]
    if len(leaves) != len(names) or (one.call is not None and tree != one.call):
        raise ProofError(
            f"prove(recordings, against=..., args=...): {one.name} was recorded with {', '.join(names) or 'no arguments'}; "
            f"args= has {len(leaves)} values: args=({', '.join(names)}{',' if len(names) == 1 else ''})"
        )
    return leaves


def _filled(one: RecordedStep, start: str | Path) -> list[Any]:
    if one.bound is None:
        raise ProofError(
            f"prove(recordings, start={str(start)!r}): against= is bound to nothing that could be filled: "
            "against.bind(model=model, optimizer=optimizer)"
        )
    roots = copy.deepcopy([x for x in one.bound.roots if isinstance(x, nn.Module | Optimizer)])
    restored(start, roots)
    copies = iter(roots)
    return [next(copies) if isinstance(x, nn.Module | Optimizer) else x for x in one.bound.roots]


def bound_to(step: RecordedStep, i: int) -> Any:
    """What an input is in the program that a recording is bound to; ``_MISSING``: nobody knows."""
    return at_place(step, i, () if step.bound is None else step.bound.roots)


def at_place(step: RecordedStep, i: int, roots: Sequence[Any]) -> Any:
    """What an input is among some objects."""
    known = step.inputs[i]
    if i in step.constants:
        return step.constants[i]
    if known.where[0] == "argument":
        return _MISSING
    try:
        return at(known.where, roots, ())
    except (KeyError, IndexError, AttributeError):
        return _MISSING


def _fitting(known: Input, value: Any) -> Any:
    if not known.facts:
        return value
    if isinstance(value, DistTensor):
        value = value._local
    shape, dtype = tuple(known.facts[0] if known.spec is None else known.spec.shape), known.facts[2]
    says = f"args= has {_words(value)} for {known.name}, which is {list(shape)} {str(dtype).removeprefix('torch.')}"
    if not isinstance(value, Tensor) or tuple(value.shape) != shape:
        raise ProofError(f"prove(recordings, against=..., args=...): {says} on one card: give the whole")
    if value.is_floating_point() != dtype.is_floating_point:
        raise ProofError(f"prove(recordings, against=..., args=...): {says}")
    return value.detach()


def _words(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{list(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    return type(value).__name__


# -- a rank's --------------------------------------------------------------------------------------------------------------


def of_rank(rank: int, step: RecordedStep, values: Values) -> tuple[list[str], list[Any]]:
    """The inputs of a rank's recording: its part of each of one card's values; and what each is called on one card.

    Raises:
        ProofError: one card has no value of the name, or nobody can tell which part of it the rank has.
    """
    short: dict[str, str | None] = {}
    for full in values:
        short[_without_root(full)] = None if _without_root(full) in short else full
    names, made = list[str](), list[Any]()
    name: str | None
    for i, known in enumerate(step.inputs):
        placed = _placed_name(known)
        name = (
            placed if placed in values else known.name if known.name in values else short.get(_without_root(known.name))
        )
        value = values[name] if name is not None else bound_to(step, i)
        if name is None and (value is _MISSING or known.kind in ("parameter", "state")):
            raise ProofError(
                f"prove(recordings, against=...): rank {rank} reads {known.name} ({known.kind}), which one card does not: "
                f"args={{..., {known.name!r}: value}}; it has {', '.join(sorted(values)[:8])}"
            )
        names.append(name or known.name)
        made.append(_part(rank, step, i, value, name is None))
    return names, made


def _without_root(name: str) -> str:
    """A name without that of the module or optimizer: what programs call these may differ.

    Example:
        >>> _without_root("exp_avg of net.fc.weight")
        'exp_avg of fc.weight'
    """
    state, of, path = name.rpartition(" of ")
    return state + of + path.partition(".")[2] if "." in path else name


def _part(rank: int, step: RecordedStep, i: int, value: Any, own: bool) -> Any:
    """This rank's part of a value; ``own``: it is its part already."""
    known = step.inputs[i]
    if isinstance(value, DistTensor):
        value = value._local
    if isinstance(value, list | tuple) and known.facts:
        if rank >= len(value):
            raise ProofError(
                f"args= has {len(value)} parts of {known.name}, and none of rank {rank}: one for each rank"
            )
        value, own = value[rank], True
    if not isinstance(value, Tensor):
        return value
    shape = tuple(known.facts[0])
    if own or (tuple(value.shape) == shape and known.spec is None):
        part = value
    elif known.spec is not None:
        part = _laid(known.spec.layout, rank, value, known.name)
    else:
        shard = _shard(step, known)
        if shard is None:
            raise ProofError(
                f"prove(recordings, against=..., args=...): {known.name} is {list(shape)} on rank {rank} and {list(value.shape)} "
                "on one card, and nothing says which part: args={..., "
                f"{known.name!r}: [one for each rank]}}"
            )
        part = shard.take(value)
    if tuple(part.shape) != shape:
        raise ProofError(f"args=: rank {rank} wants {list(shape)} of {known.name}, and is given {list(part.shape)}")
    return _placed(part, known)


def _shard(step: RecordedStep, known: Input) -> Shard | None:
    """What a layer of fleet says of its parameter; its gradient and its states are cut like it."""
    where = known.where
    if where[0] == "gradient":
        where = where[1]
    elif where[0] == "state":
        where = ("member", *where[1:4])
    try:
        held = None if step.bound is None else at(where, step.bound.roots, ())
    except (KeyError, IndexError, AttributeError):
        return None
    shard = noted(held) if isinstance(held, Tensor) else None
    return shard if isinstance(shard, Shard) else None


def _placed(part: Tensor, known: Input) -> Tensor:
    """A copy with the strides that were recorded."""
    if part.layout is not torch.strided or any(step == 0 for step in known.facts[1]):
        return part.detach().clone()
    made = torch.empty_strided(known.facts[0], known.facts[1], dtype=part.dtype, device="cpu")
    return made.copy_(part.detach())


def _laid(layout: Layout, rank: int, value: Tensor, name: str) -> Tensor:
    """A rank's part under a layout; of a pending sum the first rank along its axes has all."""
    place = layout.mesh.coordinate(rank)
    if place is None:
        return value.new_empty(0)
    part = layout.local_part(value, place)
    summands = any(place[axis] for axis, op in layout.pending if op == "sum")
    return torch.zeros_like(part) if summands else part
