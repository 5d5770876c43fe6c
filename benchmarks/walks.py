"""``python benchmarks/walks.py``: how many files a program goes through, and how often one calls another.

Rank 0 of two, in this process (``oc.pretend``); checkpoints of one rank. Counted is a walk that was taken before, as every later
one is like it, but for "recorded", of which there is one. ``--package FOLDER`` counts another checkout's, as far as it has these
calls.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any


def counted(package: str, run: Callable[[], Any]) -> tuple[int, Counter[tuple[str, str]]]:
    """Files whose functions run, and calls from a function to one of another file (or from outside)."""
    files, calls = set[str](), Counter[tuple[str, str]]()

    def ours(frame: FrameType | None) -> FrameType | None:
        while frame is not None and not frame.f_code.co_filename.startswith(package):
            frame = frame.f_back
        return frame

    def name(frame: FrameType | None) -> str:
        return f"{frame.f_code.co_filename[len(package) :]}:{frame.f_code.co_qualname}" if frame else "outside"

    def see(frame: FrameType, event: str, arg: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(package):
            files.add(frame.f_code.co_filename)
            caller = ours(frame.f_back)
            if caller is None or caller.f_code.co_filename != frame.f_code.co_filename:
                calls[name(caller), name(frame)] += 1

    sys.setprofile(see)
    try:
        run()
    finally:
        sys.setprofile(None)
    return len(files), calls


def checkpoints(folder: Path) -> dict[str, tuple[Callable[[], Any], int]]:
    """The same of a world of one rank, whose files are on a disk."""
    import torch
    from torch import nn

    import onecard as oc

    net = nn.Linear(8, 16)
    state = {"model": net, "optimizer": torch.optim.AdamW(net.parameters(), 0.01)}
    return {
        "save": (lambda: oc.checkpoint.save(state, folder / "step"), 1),
        "load": (lambda: oc.checkpoint.load(folder / "step", state), 1),
    }


def walks() -> dict[str, tuple[Callable[[], Any], int]]:
    """The programs, and how often each has run when it is counted: a step checks its recording at calls 3 and 4."""
    import torch
    from torch import nn

    import onecard as oc

    mesh = oc.ProcessMesh([0, 1], ["dp"])
    x = oc.shard_tensor(torch.ones(4, 8), mesh, [oc.Shard(0)])

    def model(stage: Any) -> tuple[nn.Module, Any]:
        torch.manual_seed(0)
        net = oc.shard_layer(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)), mesh)
        optimizer = torch.optim.AdamW(net.parameters(), 0.01)
        return net, oc.shard_optimizer(optimizer, stage) if stage else oc.shard_optimizer(optimizer)

    def step_of(net: nn.Module, optimizer: Any) -> Callable[[], Any]:
        def step() -> None:
            net(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    eager, zero3, bound = (model(s) for s in (None, oc.ShardingStage3("dp", mesh), None))
    static = oc.to_static(step_of(*bound))
    recorded = oc.record(step_of(*model(None)))()
    return {
        "eager step": (step_of(*eager), 1),
        "ZeRO-3 step": (step_of(*zero3), 1),
        "recorded": (oc.record(step_of(*model(None))), 0),
        "replay": (static, 4),
        "cost": (recorded.cost, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--package", type=Path, default=Path(__file__).parents[1] / "src")
    parser.add_argument("--most", type=int, default=0, help="so many of the calls that are made most, below each walk")
    asked = parser.parse_args()
    sys.path.insert(0, str(asked.package))
    import onecard as oc

    package = f"{Path(oc.__file__).parent}/"
    with tempfile.TemporaryDirectory() as folder:
        with oc.pretend(world_size=2, rank=0):
            told(package, walks(), asked.most)
        told(package, checkpoints(Path(folder)), asked.most)


def told(package: str, programs: dict[str, tuple[Callable[[], Any], int]], most: int) -> None:
    """A line for each walk."""
    for name, (run, before) in programs.items():
        for _ in range(before):
            run()
        files, calls = counted(package, run)
        print(f"| {name} | {files} | {calls.total():,} |", flush=True)
        for (caller, callee), count in calls.most_common(most):
            print(f"  {count:5} {caller} -> {callee}")


if __name__ == "__main__":
    main()
