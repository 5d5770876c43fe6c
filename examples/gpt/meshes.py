"""The `--mesh` option: "dp=2,tp=2" -> a ProcessMesh over all ranks."""

from __future__ import annotations

import math
import os

import numpy as np
import torch.distributed as dist

import onecard as oc

AXES = ("dp", "tp")


def rank_and_world_size() -> tuple[int, int]:
    """This process' rank and the number of ranks; (0, 1) without a launcher."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def parse_mesh(text: str) -> dict[str, int]:
    """Sizes by axis, in the order written; empty for "single".

    Exits with the forms that work if the text is none of them.

    >>> parse_mesh("dp=2,tp=4")
    {'dp': 2, 'tp': 4}
    """
    if text == "single":
        return {}
    sizes: dict[str, int] = {}
    for part in text.split(","):
        axis, _, size = part.strip().partition("=")
        if axis not in AXES or axis in sizes or not size.isdecimal() or int(size) < 1:
            raise SystemExit(
                f"--mesh {text}: {part!r} is not an axis of this example; write single, tp=2, dp=2 or dp=2,tp=2"
            )
        sizes[axis] = int(size)
    return sizes


def make_mesh(text: str) -> oc.ProcessMesh | None:
    """The mesh over all ranks, None for "single"; exits with the call that works if the ranks do not fit."""
    sizes = parse_mesh(text)
    needed = math.prod(sizes.values())
    _, world_size = rank_and_world_size()
    if needed != world_size:
        launcher = f"onecard run --nproc_per_node {needed}" if sizes else "python"
        raise SystemExit(
            f"--mesh {text} is for {needed} rank(s), but this run has {world_size}. "
            f"Start it with:\n  {launcher} examples/gpt/train.py --mesh {text}"
        )
    return oc.ProcessMesh(np.arange(needed).reshape(tuple(sizes.values())), list(sizes)) if sizes else None
