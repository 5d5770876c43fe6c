"""A recording folded by modules: blocks of nodes that belong together, what goes from one to the next, and messages between."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

from torch import fx

from onecard.static.price.live import is_name
from onecard.static.price.messages import axis_of, is_message, is_wait, kind_of, sent_by
from onecard.static.price.price import called
from onecard.static.step.order import only_moves
from onecard.static.step.step import RecordedStep

PHASES = ("forward", "backward", "optimizer")
MOST = 24
"""Blocks of a phase; with more, modules are folded higher up."""


@dataclass(slots=True)
class SentAlong:
    """Messages of one kind along one axis: how many, and the bytes that this rank sends."""

    kind: str
    axis: str
    first: bool = False  # before the block's operators
    count: int = 0
    nbytes: int = 0


@dataclass(slots=True)
class Block:
    """Nodes of one module, one after the other.

    Attributes:
        module: its path; of several alike, that of the first and of the last.
        nodes: all of them; ``times``: how many blocks alike it stands for.
        given: parameters and buffers: name, local shape, layout.
        sent: its messages.
        out: what the next block takes of it: shape, dtype and layout.
    """

    module: str
    nodes: list[fx.Node]
    times: int = 1
    given: list[tuple[str, str, str]] = field(default_factory=list)
    sent: list[SentAlong] = field(default_factory=list)
    out: tuple[str, str] | None = None

    def operators(self) -> list[tuple[str, int]]:
        """What it calls and how often, without names of memory and messages; the most frequent first."""
        counts = Counter(
            called(n).removeprefix("aten.").partition(".")[0]
            for n in self.nodes
            if not (is_name(n) or is_message(n) or is_wait(n))
        )
        return counts.most_common()


def folded(recording: RecordedStep, depth: int | None = None) -> dict[str, list[Block]]:
    """For each phase its blocks.

    Args:
        depth: how many parts of a module's path tell blocks apart; by default as many as give no more than ``MOST`` blocks.
    """
    homes = _homes(recording)
    found = {}
    phases = _phases(recording)
    for phase in PHASES:
        nodes = [n for n, its in phases.items() if its == phase]
        depths = (
            [depth]
            if depth is not None
            else [*range(max((m.count(".") + 1 for m in homes.values() if m), default=1), 0, -1)]
        )
        for d in depths:
            blocks = _alike(_split(nodes, homes, d))
            if len(blocks) <= MOST:
                break
        _outs(blocks)
        if blocks:
            found[phase] = blocks
    return found


def _phases(recording: RecordedStep) -> dict[fx.Node, str]:
    """The phase of each node; what comes after the last backward one (sums, clipping) is the optimizer's."""
    found = {n: str(n.meta.get("phase", "forward")) for n in recording.nodes()}
    places = [i for i, phase in enumerate(found.values()) if phase == "backward"]
    late = places[-1] if places else len(found)
    return {n: "optimizer" if i > late else phase for i, (n, phase) in enumerate(found.items())}


def _homes(recording: RecordedStep) -> dict[fx.Node, str]:
    """The module of each node; backward ones belong to the module whose tensors they take."""
    owners = {known.where: known.name for known in recording.inputs if known.kind in ("parameter", "buffer")}
    placeholders = [n for n in recording.graph.nodes if n.op == "placeholder"]
    parameters = {
        node: owners[known.where].partition(".")[2].rpartition(".")[0]
        for node, known in zip(placeholders, recording.inputs, strict=True)
        if known.where in owners
    }
    homes: dict[fx.Node, str] = {}
    last = ""
    for node in recording.nodes():
        phase = node.meta.get("phase")
        if phase == "forward":
            homes[node] = node.meta.get("module", "")
        elif phase == "backward":
            used = [parameters[n] for n in node.all_input_nodes if n in parameters]
            used += [homes[n] for n in node.all_input_nodes if n.meta.get("phase") == "forward" and homes.get(n)]
            last = homes[node] = used[0] if used else last
        else:
            homes[node] = ""
    return homes


def _split(nodes: Sequence[fx.Node], homes: dict[fx.Node, str], depth: int) -> list[Block]:
    blocks: list[Block] = []
    for node in nodes:
        module = ".".join(homes[node].split(".")[:depth])
        if is_wait(node) and blocks:
            module = blocks[-1].module
        if not blocks or blocks[-1].module != module:
            blocks.append(Block(module, []))
        blocks[-1].nodes.append(node)
    merged: list[Block] = []
    before: list[fx.Node] = []
    for i, block in enumerate(blocks):
        block.nodes, before = before + block.nodes, []
        if not any(map(_computes, block.nodes)) and i + 1 < len(blocks):
            before = block.nodes  # what only names, copies or sends belongs to what comes next
        elif merged and merged[-1].module == block.module:
            merged[-1].nodes += block.nodes
        else:
            merged.append(block)
    for block in merged:
        block.given, block.sent = _given(block.nodes), _sent(block.nodes)
    return merged


def _given(nodes: Sequence[fx.Node]) -> list[tuple[str, str, str]]:
    found: dict[str, tuple[str, str, str]] = {}
    for node in nodes:
        for n in node.all_input_nodes:
            known = n.meta.get("input")
            if known is not None and known.kind in ("parameter", "buffer"):
                layout = str(known.spec.layout) if known.spec is not None else ""
                found.setdefault(known.name, (known.name.rpartition(".")[2], str(list(known.facts[0])), layout))
    return [*found.values()]


def _sent(nodes: Sequence[fx.Node]) -> list[SentAlong]:
    found: dict[tuple[str, str, bool], SentAlong] = {}
    begun = False
    for node in nodes:
        if not is_message(node):
            begun = begun or _computes(node)
            continue
        kind = kind_of(node).removesuffix("_into_tensor").removesuffix("_tensor").removesuffix("_single")
        key = (kind, axis_of(node), not begun)
        made = found.setdefault(key, SentAlong(*key))
        made.count, made.nbytes = made.count + 1, made.nbytes + sent_by(node)
    return [*found.values()]


def _alike(blocks: list[Block]) -> list[Block]:
    """Runs of blocks that differ in a number of their path alone become one, of that many."""
    for period in range(1, 1 + len(blocks) // 2):
        made: list[Block] = []
        i = 0
        while i < len(blocks):
            times = 1
            while _same(blocks[i : i + period], blocks[i + times * period : i + (times + 1) * period]):
                times += 1
            if times > 2 and _numbered(blocks[i : i + period]):
                made += [_many(blocks[i + k], blocks[i + (times - 1) * period + k], times) for k in range(period)]
                i += times * period
            else:
                made.append(blocks[i])
                i += 1
        if len(made) < len(blocks):
            return made
    return blocks


def _same(some: Sequence[Block], others: Sequence[Block]) -> bool:
    return len(some) == len(others) and all(_key(a) == _key(b) for a, b in zip(some, others, strict=True))


def _key(block: Block) -> Any:
    return (
        re.sub(r"\d+", "#", block.module),
        block.operators(),
        block.given,
        [(s.kind, s.axis, s.count, s.nbytes) for s in block.sent],
    )


def _numbered(blocks: Sequence[Block]) -> bool:
    return any(re.search(r"\d", block.module) for block in blocks)


def _many(first: Block, last: Block, times: int) -> Block:
    name = first.module if first.module == last.module else f"{first.module} … {last.module}"
    return Block(name, last.nodes, times, first.given, first.sent)


def _outs(blocks: Sequence[Block]) -> None:
    for block, following in pairwise(blocks):
        taken = {n for node in following.nodes for n in node.all_input_nodes}
        order = {n: i for i, n in enumerate(block.nodes)}
        made = [n for n in block.nodes if n in taken and n.meta.get("tensor")]
        best = max(
            made,
            key=lambda n: (n.meta["tensor"][2].is_floating_point, n.meta.get("spec") is not None, order[n]),
            default=None,
        )
        if best is not None:
            block.out = described(best)


def described(node: fx.Node) -> tuple[str, str]:
    """Shape and dtype of a node's result on this rank, and its layout."""
    shape, _, dtype, _ = node.meta["tensor"]
    spec = node.meta.get("spec")
    return f"{list(shape)} {str(dtype).removeprefix('torch.')}", str(spec.layout) if spec is not None else ""


def as_text(recording: RecordedStep, depth: int | None = None) -> Iterator[str]:
    """The blocks as lines."""
    for phase, blocks in folded(recording, depth).items():
        yield phase
        for block in blocks:
            times = f"  x {block.times}" if block.times > 1 else ""
            yield f"  {block.module or '(function)'}{times}: {words(block.operators(), 80)}"
            for given in block.given:
                yield f"      {' '.join(given)}"
            for sent in block.sent:
                yield f"  >>> {sent.kind} x {sent.count} along {sent.axis!r}, {sent.nbytes:,} bytes"
            if block.out:
                yield f"    | {block.out[0]} [{block.out[1]}]"


def as_data(recording: RecordedStep, depth: int | None = None) -> dict[str, list[dict[str, Any]]]:
    """The blocks as JSON has them, by phase."""
    return {
        phase: [
            {
                "module": block.module,
                "times": block.times,
                "operators": dict(block.operators()),
                "given": [dict(zip(("name", "shape", "layout"), given, strict=True)) for given in block.given],
                "sent": [asdict(sent) for sent in block.sent],
                "out": block.out,
            }
            for block in blocks
        ]
        for phase, blocks in folded(recording, depth).items()
    }


def _computes(node: fx.Node) -> bool:
    return not (is_message(node) or is_name(node) or is_wait(node) or only_moves(node))


def words(counts: Sequence[tuple[str, int]], width: int) -> str:
    """Operators with how often they come, in no more than so many letters."""
    said = ""
    for i, (name, count) in enumerate(counts):
        more = (", " if said else "") + (name if count == 1 else f"{name} ×{count}")
        if len(said) + len(more) > width - 4:
            return f"{said}, +{len(counts) - i}" if said else more[: width - 1] + "…"
        said += more
    return said
