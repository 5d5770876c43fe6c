"""docs/design/architecture.md walks a tensor through the library: the files that a real program goes through, each named once."""

from __future__ import annotations

import graphlib
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import onecard as oc
from onecard.rules import decide, rule

PAGE = (Path(__file__).parents[1] / "docs" / "design" / "architecture.md").read_text()
SECTION = PAGE.split("## The walk", 1)[1].split("\n## ", 1)[0]
PACKAGE = f"{Path(oc.__file__).parent}/"
PHASES = ("`x @ w`", "`torch.relu`", "`backward`", "`optimizer.step`")
FILE = re.compile(r"`((?:\w+/)*\w+\.py)`")


def named() -> tuple[dict[str, list[str]], set[str]]:
    """What the page says: the files of each phase, and those of values, which every step may use."""
    rows = [line for line in SECTION.splitlines() if line.startswith("|")]
    phases = {p: [f for row in rows if row.split("|")[1].strip() == p for f in FILE.findall(row)] for p in PHASES}
    return phases, set(FILE.findall(next(line for line in SECTION.splitlines() if line.startswith("Values"))))


def calls_of(run: Callable[[], Any]) -> list[tuple[str, str]]:
    """(file that calls, file that is called) of each call between functions of the library; "" is the program."""
    found: list[tuple[str, str]] = []

    def file_of(frame: FrameType | None) -> str:
        while frame is not None and not frame.f_code.co_filename.startswith(PACKAGE):
            frame = frame.f_back
        return "" if frame is None else frame.f_code.co_filename.removeprefix(PACKAGE)

    def see(frame: FrameType, event: str, arg: Any) -> None:
        # A nested function runs where its maker handed it to.
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE) and "<" not in frame.f_code.co_qualname:
            found.append((file_of(frame.f_back), file_of(frame)))

    sys.setprofile(see)
    try:
        run()
    finally:
        sys.setprofile(None)
    return found


@pytest.fixture(scope="module")
def walked() -> dict[str, list[tuple[str, str]]]:
    """The calls of each phase of a small step, as rank 0 of 2."""
    rule._like.cache_clear()  # a first call, whatever ran before in this process
    decide._known.cache_clear()
    with oc.pretend(world_size=2, rank=0):
        mesh = oc.ProcessMesh([0, 1], ["dp"])
        x = oc.shard_tensor(torch.ones(4, 3), mesh, [oc.Shard(0)])
        w = torch.nn.Parameter(oc.shard_tensor(torch.ones(3, 5), mesh, [oc.Replicate()]))
        optimizer = oc.shard_optimizer(torch.optim.SGD([w], 0.1))
        gradient = oc.shard_tensor(torch.ones(4, 5), mesh, [oc.Shard(0)])
        made: dict[str, Any] = {}
        steps: tuple[Callable[[], Any], ...] = (
            lambda: made.update(y=x @ w),
            lambda: made.update(z=torch.relu(made["y"])),
            lambda: made["z"].backward(gradient),
            optimizer.step,
        )
        return {phase: calls_of(step) for phase, step in zip(PHASES, steps, strict=True)}


def test_each_file_is_named_once_where_it_is_first_needed(walked):
    phases, values = named()
    listed = [file for files in phases.values() for file in files]
    assert len(listed) == len({*listed}) and not values & {*listed}
    seen: set[str] = set()
    for phase, files in phases.items():
        # fleet.init, if it ran in this process before, has every optimizer ask for fleet's own parameters.
        # An import of torch's, wherever it is, asks the finder of addresses, and what waits for a library to be imported.
        first = (
            {
                file
                for _, file in walked[phase]
                if not file.startswith(("fleet/", "_addresses", "_torch/imported", "train/shard"))
            }
            - seen
            - values
        )
        assert {*files} == first, phase
        seen |= first


def test_no_step_goes_back_up(walked):
    """Among the files that are named nobody calls one that, by others or itself, calls it."""
    _, values = named()
    below: dict[str, set[str]] = {}
    for caller, file in (pair for calls in walked.values() for pair in calls):
        if caller not in ("", file) and not {caller, file} & values:
            below.setdefault(caller, set()).add(file)
    graphlib.TopologicalSorter(below).prepare()  # raises a CycleError
    below["comm/issue/run.py"].add("tensor/dispatch/entry.py")  # so it would be seen
    with pytest.raises(graphlib.CycleError):
        graphlib.TopologicalSorter(below).prepare()
