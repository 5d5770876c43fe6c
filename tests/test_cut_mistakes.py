"""Mistakes with pipelines that are cut out of recorded steps: one error each, on all ranks, with the call that works."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, fx, nn

import onecard as oc
from onecard.comm.agree import meeting
from onecard.errors import OnecardError
from onecard.pipeline.cut import starts
from onecard.testing import RankError, run_ranks


class Buffered(nn.Module):
    """A buffer that both stages write to."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 3)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        self.seen += h.detach().max()
        y = self.second(h)
        self.seen += y.detach().max()
        return y


class Twice(nn.Module):
    """A module that runs at the beginning and again."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.third(self.first(self.second(self.first(x))))


def layers(act: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), act(), nn.Linear(8, 3))


def trained(
    model: nn.Module | None = None, some: bool = False, steps: bool = True, rows: int = 8, one: float = 1.0, **how: Any
) -> list[float]:
    """Two steps of a pipeline. ``some``: the optimizer has the first layer alone; ``steps``: the step has one."""
    model = model or layers()
    first: Any = next(iter(model.children()))
    optimizer = torch.optim.SGD((first if some else model).parameters(), lr=0.1)

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        if steps:
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    run = oc.to_static(step, stages=how.pop("stages", None) or oc.Stages(**how))
    return [run(torch.full((rows, 4), one), torch.arange(rows) % 3).item() for _ in range(2)]


def sends(what: str) -> list[float]:
    """Steps of a pipeline with a message of the program's own, as programs have that divided their data by hand."""
    model = layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        for p in model.parameters() if what in ("gradients", "sums") else ():
            (dist if what == "gradients" else oc).all_reduce(p.grad)  # type: ignore[attr-defined]
            p.grad /= 2  # type: ignore[operator]
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        if what == "loss":
            dist.all_reduce(mean, async_op=True).wait()
            mean /= 2
        return mean

    oc.barrier()
    run = oc.to_static(step, stages=oc.Stages(2, at=["2"]))
    return [run(torch.full((8, 4), 1.0), torch.arange(8) % 3).item() for _ in range(3)]


def laid_out(name: str, cut: bool = False) -> nn.Module:
    def place(_: str, layer: nn.Module, mesh: Any) -> None:
        for key, p in [*layer.named_parameters(recurse=False)]:
            setattr(layer, key, nn.Parameter(oc.shard_tensor(p, mesh, [oc.Shard(0)])))

    return oc.shard_layer(layers(), oc.ProcessMesh([0, 1], [name]), place if cut else None)


def _reordered(ranks: int, microbatches: int) -> Any:
    """As of times that each rank has measured itself: other orders under one name."""
    make = (oc.pipeline.gpipe, oc.pipeline.one_f_one_b)[oc.get_rank()]
    return dataclasses.replace(make(ranks, microbatches), name="mine")


three = {"schedule": "VPP", "virtual": 2}
alike = "record one step alike, and cut it alike, but "
TABLE: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {
    "a cut in a chain of writes": (
        lambda: trained(Buffered(), stages=oc.Stages(1, at=["second"])),
        (
            "written in place: model.seen is used by several stages and changed by",
            "at=[...]",
            "test_cut_mistakes.py",
            "new tensor",
        ),
    ),
    "more stages than operators": (
        lambda: trained(nn.Sequential(nn.Linear(4, 3)), schedule="VPP", virtual=8),
        ("16 of them, and the forward pass has 8 operators", "take fewer ranks, or virtual=1"),
    ),
    "a module that is not there": (lambda: trained(at=["5"]), ("at='5': no module of that path runs", "there are 4")),
    "a module named twice": (lambda: trained(at=["2", "2", "4"], **three), ("names '2' twice", "begins one stage")),
    "modules out of order": (lambda: trained(at=["2", "1", "4"], **three), ("'1' runs before '2'", "order in which")),
    "the first module": (lambda: trained(at=["0"]), ("'0' is the first module", "first stage would be empty")),
    "a module that runs twice": (lambda: trained(Twice(), at=["first"]), ("'first' is the first module",)),
    "too many modules": (lambda: trained(at=["2", "4"]), ("begins 2 stages", "2 in all: name 1 modules, or none")),
    "a string": (lambda: trained(at="2"), ("at='2': want a list of modules' paths", "onecard.Stages(at=['blocks.2'")),
    "no list of strings": (lambda: trained(at=[2]), ("at=[2]: want a list of modules' paths",)),
    "microbatches that do not divide": (lambda: trained(k_steps=3), ("k_steps=3: argument 'x' has 8 rows", "cut in 3")),
    "no microbatches": (lambda: trained(k_steps=0), ("k_steps=0: how many microbatches", "1 or more")),
    "ranks that are not there": (
        lambda: trained(ranks=[0, 5]),
        ("ranks=[0, 5] names [5]", "ranks 0 to 1", "--nproc_per_node 6"),
    ),
    "a rank named twice": (lambda: trained(ranks=[0, 0]), ("ranks=[0, 0]", "name each once")),
    "ranks beside a mesh": (
        lambda: trained(laid_out("pp"), ranks=[1, 0]),
        ("ranks=[1, 0]", "whose axis 'pp' is the pipeline, here ranks [0, 1]", "leave ranks out"),
    ),
    "an axis that is not there": (
        lambda: trained(laid_out("stage")),
        ("all need one axis 'pp'", "oc.ProcessMesh(ranks, ['pp', 'dp'])"),
    ),
    "an axis that cuts": (
        lambda: trained(laid_out("pp", cut=True)),
        ("model.0.weight is [8, 4] float32 [pp=Shard(0)], cut along 'pp'", "Replicate() along 'pp'"),
    ),
    "no such schedule": (lambda: trained(schedule="2F2B"), ("schedule_mode is '2F2B'; want one of 1F1B, F-then-B",)),
    "no virtual stages": (
        lambda: trained(schedule="ZBH2", virtual=2),
        ("'ZBH2' has one stage for each rank", "with several go: VPP, BFS, ZBH1"),
    ),
    "half a stage": (lambda: trained(virtual=0), ("virtual=0", "1 or more, or None")),
    "a schedule for others": (
        lambda: trained(schedule=oc.pipeline.zb_v(ranks=3, microbatches=4)),
        ("3 ranks", "the pipeline has 2 ranks and 4 microbatches (k_steps)"),
    ),
    "a number of stages": (lambda: trained(stages=2), ("stages=2: want onecard.Stages(k_steps, schedule='1F1B')",)),
    "an optimizer of one stage": (
        lambda: trained(some=True),
        (
            "model.2.weight and 3 more gets a gradient, and no optimizer of the step takes it",
            "AdamW(model.parameters())",
        ),
    ),
    "no optimizer": (
        lambda: trained(steps=False),
        ("model.0.weight and 5 more", "put optimizer.step()", "one call with all their rows"),
    ),
    "other batches": (
        lambda: trained(rows=8 - 4 * oc.get_rank()),
        (f"{alike}the batch differs", "rank 0: [8, 4] torch.float32", "rank 1: [4, 4] torch.float32"),
    ),
    "other models": (
        lambda: trained(layers(nn.Tanh if oc.get_rank() else nn.ReLU)),
        (f"{alike}the program differs", "rank 0: relu at ", "rank 1: tanh at ", "test_cut_mistakes.py"),
    ),
    "other cuts": (
        lambda: trained(at=["2"] if oc.get_rank() else ["4"]),
        (f"{alike}where it is cut differs", "rank 0: 4: ", "rank 1: 2: "),
    ),
    "other schedules": (
        lambda: trained(schedule="ZBH1" if oc.get_rank() else "1F1B"),
        (f"{alike}the schedule differs", "rank 0: Schedule(1F1B", "rank 1: Schedule(ZB-H1"),
    ),
    "other orders": (
        lambda: trained(schedule=_reordered),
        (f"{alike}the schedule differs", "rank 0: Schedule(mine", "rank 1: Schedule(mine"),
    ),
    "own gradients": (lambda: sends("gradients"), ("your own allreduce at", "test_cut_mistakes.py", "Leave it out")),
    "own sums": (lambda: sends("sums"), ("your own all_reduce at", "test_cut_mistakes.py", "Leave it out")),
    "own loss": (lambda: sends("loss"), ("your own allreduce at", "the loss and the gradients are the whole batch's")),
    "other microbatches": (
        lambda: trained(k_steps=4 if oc.get_rank() else 2),
        (f"{alike}k_steps differs", "rank 0: k_steps=2", "rank 1: k_steps=4"),
    ),
}


def _said() -> dict[str, str]:
    found = {}
    for name, (mistake, _) in TABLE.items():
        try:
            found[name] = f"nothing was said: {mistake()}"
        except OnecardError as fault:
            found[name] = str(fault)
    return found


def test_each_mistake_is_told_on_all_ranks() -> None:
    """The mistakes are made one after the other on the same ranks: none leaves messages behind that the next one takes."""
    for found in run_ranks(_said, 2, timeout=120.0):
        assert found.keys() == TABLE.keys()
        wrong = {name: said for name, said in found.items() if not all(part in said for part in TABLE[name][1])}
        assert wrong == {}


def _other_values() -> None:
    trained(one=1.0 + oc.get_rank())


def test_batches_of_one_shape_that_differ_are_told() -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(_other_values, 2, timeout=60.0)
    assert "argument tensor 0 [8, 4]" in str(caught.value) and "seed the loader alike" in str(caught.value)
    assert "the whole batch" in str(caught.value)


def _no_mistakes() -> list[list[float]]:
    """A stage without parameters, a module that runs in two stages, frozen parameters."""
    frozen = layers()
    frozen[:2].requires_grad_(False)
    rows = [(nn.Sequential(nn.Linear(4, 3), nn.Tanh()), ["1"]), (Twice(), ["second"]), (frozen, ["2"])]
    warnings.filterwarnings("ignore", ".*have no parameter")
    return [trained(model, at=at) for model, at in rows]


@pytest.mark.proof
def test_no_mistakes() -> None:
    for found in run_ranks(_no_mistakes, 2, timeout=120.0):
        assert all(second < first for first, second in found)


def _alone() -> None:
    """Rank 1 alone is wrong, after steps that went well."""
    warnings.simplefilter("ignore")
    model = layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    run = oc.to_static(step, stages=oc.Stages(4))
    for i in range(3):
        rows = 6 if i == 2 and oc.get_rank() else 8
        run(torch.ones(rows, 4), torch.arange(rows) % 3)


def test_who_has_ended_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    store, told = torch.distributed.HashStore(), list[Any]()
    monkeypatch.setattr(meeting.attempt, "store", lambda: store)
    monkeypatch.setattr(meeting.gone, "ended", lambda ranks: [r for r in ranks if r == 2])
    monkeypatch.setattr(meeting.world, "TIMEOUT", timedelta(seconds=8))
    store.set("come/ended/1/1", "a word")
    assert meeting.come("ended", (0, 1, 2), told.append) == ({1: "a word"}, [2])
    assert not told  # which takes some seconds


@pytest.mark.proof
def test_a_mistake_of_one_rank_ends_all() -> None:
    with pytest.raises(RankError, match="has 6 rows, which cannot be cut in 4") as caught:
        run_ranks(_alone, 2, timeout=60.0)
    assert "rank 1: RecordingError" in str(caught.value)  # as rank 0 quotes it


def test_a_cut_is_named_with_or_without_the_name_of_the_model():
    graph = fx.Graph()
    paths = ("model.blocks.0", "model.blocks.2.up", "head.0", "encoder.0", "encoder.last")
    nodes = [graph.placeholder(f"n{i}") for i in range(len(paths))]
    for node, path in zip(nodes, paths, strict=True):
        node.meta["module"] = path
    asked = ("model.blocks.2", "blocks.2", "head", "last", "0", "blocks.1")
    found = [starts._first_inside(nodes, path) for path in asked]
    assert found == [nodes[1], nodes[1], nodes[2], nodes[4], None, None]  # two models have a "0"
