"""Whether all ranks of a pipeline have recorded one program to cut, and cut it alike: asked when it is recorded."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from onecard._torch.names import OpOverload, tree_leaves
from onecard.comm.agree import sparse_check
from onecard.comm.agree.sparse_check import Subject
from onecard.comm.base import record
from onecard.comm.issue import collectives, trace
from onecard.comm.issue.ranks import of_ranks
from onecard.comm.world.pretend import pretending
from onecard.errors import RecordingError
from onecard.static.passes.once import words

LENGTH = 300
"""Bytes of what a rank is quoted with."""


def check_alike(ranks: tuple[int, ...], said: Mapping[str, str], graph: fx.Graph) -> None:
    """Compare what this rank is about to cut with what the others are. One small message.

    Args:
        said: by what it is, how this rank cuts: in words.
        graph: of one microbatch.

    Raises:
        RecordingError: they differ: a rank would send what another does not expect. On all ranks, with what each has.
    """
    if len(ranks) < 2 or pretending() or trace.faking():
        return
    lines = [_line(node) for node in graph.nodes if node.op == "call_function"]
    codes = [_code(text) for text in (*said.values(), "\n".join(lines))]
    theirs = _gathered(torch.tensor([*codes, len(lines)], device="cpu"), ranks)
    differs = [i for i in range(len(codes)) if len(set(theirs[:, i].tolist())) > 1]
    if not differs:
        return
    what = [*said, "the program"][differs[0]]
    mine = said[what] if what in said else _first(lines, int(theirs[:, -1].max()), ranks)
    found = _quoted(mine, ranks)
    raise RecordingError(
        f"stages: the ranks of a pipeline record one step alike, and cut it alike, but {what} differs:\n"
        + "\n".join(f"  rank {rank}: {text}" for rank, text in zip(ranks, found, strict=True))
        + "\nEvery rank gives the whole batch, the same one, to the same step with the same onecard.Stages(...): "
        "let no shape and no option depend on onecard.get_rank()"
    )


def first_of(numbers: Sequence[int], ranks: Sequence[int]) -> list[int]:
    """What the first of some ranks has; one's own where nobody can be asked."""
    if pretending() or trace.faking():
        return [*numbers]
    counts = _gathered(torch.tensor([len(numbers)], device="cpu"), tuple(ranks))
    if not numbers or len(set(counts[:, 0].tolist())) > 1:  # of another program, as the check of all messages will say
        return [*numbers]
    return [int(n) for n in _gathered(torch.tensor([*numbers], device="cpu"), tuple(ranks))[0]]


_BELIEF = (
    "is given to every rank of a pipeline alike, the whole batch: one rank reads the inputs, another one the labels"
)
_CURE = (
    "Give every rank the same batch: seed the loader alike (onecard.manual_seed before it is made), and take a "
    "DistributedSampler away (beside dp it goes over the ranks along dp alone)"
)


def check_batch(name: str, ranks: tuple[int, ...], tensors: Sequence[Tensor]) -> None:
    """Now and then, compare digests of a batch with those of the rank that came first; it waits for none.

    Args:
        name: of the step.
        tensors: what this rank was given, local ones.

    Raises:
        CommunicationError: the ranks have other batches of one shape: inputs would be trained on labels that are not theirs.
    """
    if len(ranks) < 2 or not tensors or not sparse_check.on.here or pretending() or trace.faking():
        return
    site = sparse_check.site(("stages", name, ranks), lambda: f"stages {name} {[*ranks]}")
    if site.tick():
        said = [
            Subject(f"argument tensor {i} {[*x.shape]}", x.detach(), _BELIEF, _CURE)
            for i, x in enumerate(tensors)
            if x.numel()
        ]
        sparse_check.equal(site, f"{name} in stages", said)


def _first(lines: Sequence[str], length: int, ranks: tuple[int, ...]) -> str:
    """This rank's operator at the first place where two ranks have different ones."""
    codes = torch.tensor([*map(_code, lines), *[0] * (length - len(lines))], device="cpu")
    theirs = _gathered(codes, ranks)
    at = next(i for i in range(length) if len(set(theirs[:, i].tolist())) > 1)
    return lines[at] if at < len(lines) else "no more operators"


def _quoted(text: str, ranks: tuple[int, ...]) -> list[str]:
    mine = text.encode()[:LENGTH].ljust(LENGTH)
    theirs = _gathered(torch.tensor([*mine], device="cpu"), ranks)
    return [bytes(row.tolist()).decode(errors="replace").strip() for row in theirs]


def _gathered(x: Tensor, ranks: tuple[int, ...]) -> Tensor:
    group = of_ranks(ranks, "stages")
    record.serving.here = ("to_static", "stages", (len(ranks),))
    found: Any = collectives.all_gather(x.to(torch.int64)[None], group, 0, [1] * len(ranks))
    return torch.as_tensor(found)


def _line(node: fx.Node) -> str:
    facts = node.meta.get("tensor")
    given = ""
    if isinstance(node.target, OpOverload):
        numbers = [x for x in tree_leaves([node.args, node.kwargs]) if type(x) in (int, float, bool)]
        given = f" given {numbers}" if numbers else ""
    return f"{words(node)}{f' of shape {[*facts[0]]}' if facts else ''}{given}"


def _code(text: str) -> int:
    return zlib.crc32(text.encode())
