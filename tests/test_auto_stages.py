"""A plain model in stages, its loop its own: one card's numbers, each part on its stage's ranks, and microbatches."""

from __future__ import annotations

import copy
import random
import re
import warnings
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import onecard as oc
import onecard.paddle as dist
from onecard.auto.apply import Applied, found_plain
from onecard.auto.stages.places import stages_of
from onecard.comm.base import record
from onecard.comm.issue import groups
from onecard.errors import DispatchError, NothingFits, PlanError
from onecard.testing import run_ranks

FIRST = {"microbatches": 2, "schedule": "F-then-B"}


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Any) -> Any:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Tied weights, a table of positions that all stages read, and a value that goes from the first stage to the last."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.blocks, self.head = (
            nn.Embedding(11, 8),
            nn.ModuleList(Block(8) for _ in range(4)),
            nn.Linear(8, 11),
        )
        self.head.weight = self.words.weight
        self.register_buffer("places", torch.linspace(-1, 1, 6)[:, None])

    def forward(self, x: Any) -> Any:
        first = h = self.words(x) + self.places
        for block in self.blocks:
            h = block(h) * (1 + 0.1 * self.places)
        return self.head(h + 0.5 * first)


def trained(plan: dict[str, Any] | None) -> list[float]:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if plan is not None:
        oc.parallelize(model, optimizer, plan=oc.Plan(**plan))
    seen = list[float]()
    for _ in range(3):
        x, y = torch.randint(11, (8, 6)), torch.randint(11, (8, 6))
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten()) + 1e-3 * sum(
            p.square().sum() for p in model.parameters()
        )
        loss.backward()
        seen += [loss.item(), nn.utils.clip_grad_norm_(model.parameters(), 0.5).item()]
        optimizer.step()
        optimizer.zero_grad()
    twin = copy.deepcopy(model).eval()
    with torch.no_grad():
        seen.append(twin(torch.arange(6)[None]).sum().item())
    return seen


PLANS = [
    {"pp": 2}, {"pp": 2, **FIRST}, {"pp": 2, "stages": (1, 3), **FIRST}, {"pp": 2, "dp": 2, "zero": 3, **FIRST},
    {"pp": 2, "dp": 2, "zero": 1, "recompute": "full", **FIRST}, {"pp": 4, "microbatches": 4, "schedule": "F-then-B"},
    {"pp": 2, "tp": 2, "placements": (("*.up.*", "tp: Shard(0)"), ("*.down.weight", "tp: Shard(1)"))},
]  # fmt: skip


@pytest.mark.share(2)
@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_numbers_are_one_cards(plan):
    wanted = trained(None)
    for found in run_ranks(trained, oc.Plan(**plan).world, plan):
        assert found == pytest.approx(wanted, rel=1e-5)


# -- where things are ------------------------------------------------------------------------------------------------------


def test_stages_begin_at_blocks():
    of = stages_of(Net(), oc.Plan(pp=2))
    assert {name: of[name] for name in ("words.weight", "blocks.1.up.weight", "blocks.2.up.weight", "head.bias")} == {
        "words.weight": 0, "blocks.1.up.weight": 0, "blocks.2.up.weight": 1, "head.bias": 1,
    }  # fmt: skip
    assert of["places"] is None
    assert stages_of(Net(), oc.Plan(pp=2, stages=(3, 1)))["blocks.2.up.weight"] == 0


def test_layers_are_divided_where_there_are_no_blocks():
    model = nn.Sequential(nn.Linear(8, 64), nn.BatchNorm1d(64, affine=False), nn.Tanh(), nn.Linear(64, 8))
    of = stages_of(model, oc.Plan(pp=2))
    assert [of["0.weight"], of["1.running_mean"], of["3.weight"]] == [0, 0, 1]
    with pytest.raises(
        PlanError, match="pp=3: Sequential has 2 layers with parameters, too few for 3 stages; pp=2 or less"
    ):
        stages_of(model, oc.Plan(pp=3))
    with pytest.raises(PlanError, match=r"stages=\(3, 2\) are of 5 blocks, and Net has 4"):
        stages_of(Net(), oc.Plan(pp=2, stages=(3, 2)))


def _held() -> dict[str, int]:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    oc.parallelize(model, optimizer, plan=oc.Plan(pp=2))
    model(torch.randint(11, (4, 6))).sum().backward()
    optimizer.step()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        states = {n: optimizer.state[p]["exp_avg"].to_local().numel() for n, p in model.named_parameters()}
    return {n: p.to_local().numel() + p.grad.to_local().numel() + states[n] for n, p in model.named_parameters()}


def test_a_rank_has_its_stage_alone():
    first, last = run_ranks(_held, 2)
    own = {name: 3 * p.numel() for name, p in Net().named_parameters()}
    of = stages_of(Net(), oc.Plan(pp=2))
    assert first == {name: own[name] * (of[name] == 0) for name in own}
    assert last == {name: own[name] * (of[name] == 1) for name in own}


class Attention(nn.Module):
    """Three readers of one value: it comes to their stage once."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Any) -> Any:
        return x + F.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x))


def _sent(microbatches: int) -> list[int]:
    """The bytes of each message of this rank, forward and backward."""
    model = nn.Sequential(Attention(), Attention())
    oc.parallelize(model, plan=oc.Plan(pp=2, microbatches=microbatches, schedule="F-then-B"))
    heard: list[record.Notice] = []
    record.observers.here.append(heard.append)
    model(torch.randn(4, 6, 8)).square().mean().backward()
    record.observers.here.remove(heard.append)
    return [notice.step.bytes for notice in heard if notice.step.bytes]


@pytest.mark.parametrize("microbatches", [1, 4])
def test_a_value_crosses_once_and_its_gradient_comes_back(microbatches):
    value = 4 * 6 * 8 * 4 // microbatches
    assert run_ranks(_sent, 2, microbatches) == [[value] * microbatches] * 2


# -- what programs do ------------------------------------------------------------------------------------------------------


def _habits(ranks: bool) -> list[Any]:
    torch.manual_seed(0)
    model = Net()
    before = copy.deepcopy(model)
    if ranks:
        with torch.device("cpu"), oc.one_card_random():  # whose ends take the top of torch's modes off, whatever it is
            oc.parallelize(model, plan=oc.Plan(pp=2))
    x = torch.randint(11, (4, 6))
    out = model(x)
    (out.square().mean() + model.blocks[3].up.weight.norm() * model.blocks[0].up.weight.norm()).backward()
    params = [*model.parameters()]
    norms = torch.stack([p.grad.norm() for p in params])
    seen = [
        norms.norm().item(),
        norms.tolist(),
        [float(g) for g in nn.utils.get_total_norm([p.grad for p in params])[None]],
    ]
    total = torch.zeros(11)
    total += out.detach().sum((0, 1))
    total.add_(params[-1].detach())
    seen += [total.tolist(), np.asarray(out.detach()).sum().item(), f"{out.sum():.3f}"]
    seen += [len(out.flatten().detach().nonzero()), out.detach()[out.detach() > 0].sum().item(), bool(out.max() > 0)]
    with torch.no_grad():
        for mine, theirs in zip(before.parameters(), params, strict=True):
            mine.lerp_(theirs.grad, 0.5)  # plain tensors follow those of all stages
        torch._foreach_mul_([p.grad for p in params], norms.max())
        for p in params:
            p.add_(p.grad, alpha=-0.1 / norms.max())
    seen += [[p.sum().item() for p in before.parameters()], [p.sum().item() for p in params]]
    y = model.blocks[0](model.words(x))  # layers, one by one
    grads = torch.autograd.grad(model.blocks[3](y).sum(), [model.words.weight, model.blocks[3].norm.bias])
    seen += [[g.sum().item() for g in grads]]
    state = {name: oc.unshard(p) if ranks else p for name, p in model.state_dict().items()}
    model.load_state_dict({name: x.detach().clone() * 2 for name, x in state.items()})
    return [*seen, model(x).sum().item()]


def _flat(values: Any) -> list[float]:
    if isinstance(values, list):
        return [x for value in values for x in _flat(value)]
    return [float(values)]


def test_programs_read_and_write_as_on_one_card():
    wanted = _flat(_habits(False))
    for found in run_ranks(_habits, 2, True):
        assert _flat(found) == pytest.approx(wanted, rel=2e-5, abs=1e-5)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(6, 9), nn.BatchNorm1d(9, affine=False), nn.Linear(9, 3)

    def forward(self, x: Any) -> Any:
        return self.b(torch.relu(self.norm(self.a(x))))


def _statistics(plan: dict[str, Any] | None) -> list[float]:
    torch.manual_seed(0)
    model = Normed()
    if plan is not None:
        oc.parallelize(model, plan=oc.Plan(**plan))
    for _ in range(2):
        model(torch.randn(8, 6)).square().mean().backward()
    return [
        model.norm.running_mean.sum().item(),
        model.norm.running_var.sum().item(),
        model.a.weight.grad.norm().item(),
    ]


def test_a_norm_of_the_batch_is_the_batchs():
    wanted = _statistics(None)
    for plan in ({"pp": 2}, {"pp": 2, "dp": 2}):
        for found in run_ranks(_statistics, oc.Plan(**plan).world, plan):
            assert found == pytest.approx(wanted, rel=1e-5)


# -- microbatches ----------------------------------------------------------------------------------------------------------


class Odd(nn.Module):
    """What a forward may do that is another thing in microbatches."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.calls, self.scale, self.first = kind, 0, None, True
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.register_buffer("seen", torch.zeros(6))

    def forward(self, x: Any) -> Any:
        h = self.a(x)
        if self.kind == "batch norm":
            h = self.norm(h)
        elif self.kind == "a buffer":
            self.seen += 1
        elif self.kind == "an attribute":
            self.calls += 1
        elif self.kind == "rows together":
            h = h - h.mean(0)
        elif self.kind == "a number":
            h = h / len(x)
        elif self.kind == "a parameter":
            with torch.no_grad():
                self.a.bias.clamp_(-1, 1)
        elif self.kind == "a first call":
            self.scale = h.detach().std(0) if self.scale is None else self.scale
            h = h / self.scale
        elif self.kind == "a second call":
            h, self.first = (h, False) if self.first else (h - h.mean(0), False)
        elif self.kind == "a norm that is kept":
            self.kept = h.detach().norm()
        elif self.kind == "a value that is kept":
            self.kept = h
        elif self.kind == "a draw":
            h = h * torch.rand(6)
        elif self.kind == "a value" and h.sum() > 0:
            h = h * 2
        elif self.kind == "a hook":
            h.register_hook(lambda grad: grad / grad.norm())
        elif self.kind == "a loss":
            return self.b(h).square().mean()
        elif self.kind == "time first":
            return self.b(h).t()
        elif self.kind == "a length":
            return self.b(h), len(x)
        return self.b(h)


REFUSED = {
    "batch norm": "batch norm at .* takes the mean and variance of the batch",
    "a buffer": "it writes to its buffer 'seen', once for each microbatch",
    "an attribute": "it changes Odd.calls, once for each microbatch",
    "rows together": "result 0 of its forward, .* is no row for each of the batch: sub at .* puts what all rows give",
    "a number": "result 0 of its forward, .* is no row for each of the batch",
    "a parameter": "it writes to its parameter 'a.bias', once for each microbatch",
    "a first call": r"scale keeps a value of its forward, \[6\], which would be one microbatch's",
    "a norm that is kept": r"kept keeps a value of its forward, \[\], which would be one microbatch's",
    "a second call": "result 0 of its forward, .* is no row for each of the batch: sub at",
    "a value that is kept": r"kept keeps a value of its forward, \[8, 6\], which would be one microbatch's",
    "a draw": "rand at .* draws for the batch, not for each of its rows",
    "a value": r"test_auto_stages.py:\d+ reads a value, which may be another one for each",
    "a hook": "a hook, or a backward of its own, has a part in the gradient of 'a.weight'",
    "a loss": "a loss that the model computes itself: return the outputs, and compute it outside",
    "time first": "result 0 of its forward, .* is no row for each of the batch",
    "a length": "what it gives back, int, is no tensor, or goes by the number of rows",
}


def _refused(kind: str) -> tuple[str, Any]:
    model = Odd(kind)
    with oc.pretend(world_size=2, rank=1):
        oc.parallelize(model, plan=oc.Plan(pp=2, **FIRST))
        try:
            model(torch.randn(8, 6))
        except PlanError as error:
            return str(error), model.calls
    return "", model.calls


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_another_thing_in_microbatches_is_refused(kind):
    said, calls = run_ranks(_refused, 1, kind)[0]
    assert re.search(REFUSED[kind], said), said
    assert "microbatches=2: Odd goes" in said and "microbatches=1, or oc.to_static(step, plan=plan)" in said
    assert calls == 0


def _later(how: str) -> list[Any]:
    """A model that is changed once it has run in microbatches."""
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    switch = {"dim": 1}
    model[0].register_forward_hook(lambda _, args, out: out - out.mean(switch["dim"], keepdim=True))
    with oc.pretend(world_size=2, rank=1):
        oc.parallelize(model, plan=oc.Plan(pp=2, **FIRST))
        seen: list[Any] = [tuple(model(torch.randn(8, 6)).shape) for _ in range(2)]
        if how == "a flag":
            switch["dim"] = 0
        else:
            model[1].register_forward_hook(lambda _, args, out: out / out.max())
        try:
            model(torch.randn(8, 6))
        except PlanError as error:
            seen.append(str(error))
    return seen


@pytest.mark.parametrize(("how", "what"), [("a flag", "sub at"), ("a hook", "max at")])
def test_a_model_that_goes_another_way_later_is_looked_at_again(how, what):
    *shapes, said = run_ranks(_later, 1, how)[0]
    assert shapes == [(8, 6), (8, 6)] and re.search(f"is no row for each of the batch: {what}", said), said


class Free(nn.Module):
    """What may be in microbatches: hooks and functions that leave rows apart, Python's draws, tables, rows put in one dim."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.table, self.asked = None, False

    def forward(self, x: Any, keep: Any, scale: float = 1.0, names: Any = None) -> Any:
        if keep.all():  # of an argument that is no batch
            x = x + 1
        mask = (torch.arange(6) > 0)[None].expand(len(x), 6)  # made of numbers, the same for all rows
        x = torch.where(mask, x, x.sin())
        if self.table is None:
            self.table, self.asked = torch.linspace(0, 1, 6), True
        x = x + self.table
        for block in self.blocks:
            if random.random() < 0.7:
                x = x + torch.tanh(block(x)) * float(np.random.rand())
        x.register_hook(lambda grad: grad * 2)
        return {"rows": x * scale, "flat": x.flatten(), "table": torch.arange(3), "names": names}


def _free(plan: dict[str, Any] | None) -> list[float]:
    torch.manual_seed(0)
    random.seed(1)
    np.random.seed(1)
    model = Free()
    if plan is not None:
        oc.parallelize(model, plan=oc.Plan(**plan))
    seen = []
    for rows in (8, 8, 5, 8):  # of five rows there are no halves: they go in one
        out = model(torch.randn(rows, 6), torch.tensor([True, rows > 5]), scale=0.5, names="x")
        assert out["names"] == "x" and len(out["table"]) == 3 and out["flat"].shape == (rows * 6,)
        loss = (out["rows"] * torch.arange(rows)[:, None]).sum() + out["flat"].cumsum(0).square().mean()
        slopes = torch.autograd.grad(loss, [*model.parameters()], create_graph=True, allow_unused=True)
        (loss + 1e-3 * sum(slope.square().sum() for slope in slopes if slope is not None)).backward(retain_graph=True)
        bends = torch.autograd.grad(sum(slope.sum() for slope in slopes if slope is not None), [*model.parameters()],
                                    allow_unused=True)  # fmt: skip
        seen += [loss.item(), random.random(), float(np.random.rand()), float(sum(bend is not None for bend in bends))]
    return [*seen, *(p.grad.norm().item() for p in model.parameters() if p.grad is not None)]


@pytest.mark.share(1)
@pytest.mark.parametrize("plan", [{"pp": 2, **FIRST}, {"pp": 2, "dp": 2, **FIRST}], ids=str)
def test_rows_keep_their_places(plan):
    wanted = _free(None)
    for found in run_ranks(_free, oc.Plan(**plan).world, plan):
        assert found == pytest.approx(wanted, rel=1e-5)


# -- plans -----------------------------------------------------------------------------------------------------------------


def test_what_a_loop_of_its_own_cannot_have():
    with oc.pretend(world_size=2, rank=0):
        with pytest.raises(PlanError, match="virtual=2: in a loop of its own each rank has one stage"):
            Applied(oc.Plan(pp=2, virtual=2, microbatches=4))
        with pytest.warns(
            UserWarning, match="schedule='1F1B': in a loop of its own a model goes through its stages as F-then-B"
        ):
            Applied(oc.Plan(pp=2, microbatches=4))


def test_stages_are_looked_for_where_nothing_else_has_room():
    asked = []

    def searched(fixed: dict[str, Any]) -> Any:
        asked.append(fixed)
        if "pp" in fixed:
            raise NothingFits("no room")
        return "in stages"

    assert found_plain(searched, {"tp": 1}) == "in stages"
    assert [fixed.get("pp") for fixed in asked] == [1, None] and all(f["microbatches"] == 1 == f["tp"] for f in asked)
    with pytest.raises(NothingFits, match="no room"):
        found_plain(searched, {"pp": 2})


def _outside() -> list[Any]:
    mesh = oc.ProcessMesh([0], ["x"])
    x = oc.shard_tensor(torch.ones(2, 3), mesh, [oc.Replicate()])
    (part,) = x.chunk(1)
    seen = [tuple(part.shape), tuple(x.as_strided((3,), (1,)).shape)]
    groups.stages.here.add(mesh)
    try:
        torch.zeros(2, 3).add_(x)
    except DispatchError as error:
        seen.append(str(error))
    return seen


def test_a_rank_outside_a_mesh():
    first, other = run_ranks(_outside, 2)
    assert first == [(2, 3), (3,)] == other[:2]
    assert "add_ writes a value of ProcessMesh([0]" in other[2].replace(", dim_names=['x'])", "")
    assert "Send the value to all: x.full_tensor()" in other[2]


# -- scalers ---------------------------------------------------------------------------------------------------------------


def _scaled(how: str) -> list[float]:
    """Gradients that are infinite, or no number, on one stage alone: all skip the step, and have one scale."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)])
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    if how == "stages":
        oc.parallelize(model, optimizer, plan=oc.Plan(pp=2))
    elif how == "marks":
        split = {"pp_config": {"split_spec": {"1": dist.SplitPoint.END}}}
        dist.parallelize(model, optimizer, oc.ProcessMesh([0, 1], ["pp"]), split)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    seen = list[float]()
    for step in range(5):
        x = torch.randn(8, 4)
        x = oc.shard_tensor(x, oc.ProcessMesh([0], ["x"]), [oc.Replicate()]) if how == "marks" else x
        scaler.scale(model(x).square().mean()).backward()
        if step == 1:
            model[3][0].weight.grad.mul_(float("inf"))
        if step == 3:
            model[0][0].bias.grad.fill_(float("nan"))
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        seen.append(scaler.get_scale())
    return [*seen, *(oc.unshard(p).sum().item() if how else p.sum().item() for p in model.parameters())]


@pytest.mark.parametrize("how", ["stages", "marks"])
def test_an_infinity_of_one_stage_skips_the_step_of_all(how):
    wanted = _scaled("")
    for found in run_ranks(_scaled, 2, how):
        assert found == pytest.approx(wanted, rel=1e-5)
