"""The search for a plan: as good as looking at everything; its bounds hold; placements are found over factors, not by names."""

from __future__ import annotations

import itertools
import random
from contextlib import suppress
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from amounts import PROOF
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_programs import GPT, MLP
from plan_spaces import A100, MACHINES, SIZES, compared, spaces, subjects_of
from torch import nn

import onecard as oc
from onecard.errors import PlanError
from onecard.machine.cost import DIVIDED, Machine
from onecard.pipeline.schedule.modes import plan as schedule_named
from onecard.planning.lines import AxisLine
from onecard.planning.price import on_hosts
from onecard.planning.search.api import in_order
from onecard.planning.search.bounds import in_flight
from onecard.planning.search.eliminate import Problem
from onecard.planning.search.find import Search
from onecard.planning.search.rows import of_rows
from onecard.planning.search.space import Space
from onecard.planning.search.subject import PlanSubject, subject_of


@pytest.fixture(scope="module")
def subjects() -> list[PlanSubject]:
    """Of which each keeps what was recorded of it."""
    return subjects_of(len(SIZES) if PROOF else 1)


@pytest.mark.proof
def test_few_microbatches_say_what_many_take_at_least(subjects):
    """Of pipelines with more than six for each stage, under every schedule: no more than the price, and near it."""
    search = Search(Space(subjects[0], 2, A100, {"pp": 2}), A100, 0)
    seen = set()
    for group in search.space.groups():
        for plan in search.members(group):
            if plan.microbatches <= 12 or (plan.schedule, plan.virtual, bool(plan.stages)) in seen:
                continue
            seconds, peak = search._steadily(group, plan)
            cost = search.cost(group, plan)
            assert 0.97 * cost.seconds < seconds <= cost.seconds and 0 < peak <= cost.peak, plan
            seen.add((plan.schedule, plan.virtual, bool(plan.stages)))
    assert len(seen) > 3, seen


@pytest.mark.proof
def test_as_good_as_looking_at_everything(subjects):
    """Over random spaces the best of all; of memory limits, so that it matters what fits."""
    priced = looked = 0
    for number, space in enumerate(spaces(200 if PROOF else 2, subjects)):
        found = compared(number, *space)
        if found is not None:
            assert found.good, (number, found, space[1:])
            priced, looked = priced + found.priced, looked + found.looked
    assert priced * 4 < looked  # the bounds leave most of them out


def test_bounds_are_below_prices(subjects):
    """For every plan of some spaces, schedules and stages of all kinds among them."""
    seen = set()
    for subject, world, machine, fixed in spaces(24 if PROOF else 2, subjects):
        search = Search(Space(subject, world, machine, {**fixed, "tp": 1}), machine, 0)
        for group in search.space.groups():
            for one in (group, *search.space.again(group)):
                bounds, _ = search.opened(one)
                for plan in search.members(one):
                    with suppress(PlanError):
                        cost = search.cost(one, plan)
                        seconds, nbytes = bounds.quickly(plan)
                        assert seconds <= cost.seconds * (1 + 1e-9) and nbytes <= cost.peak, plan
                        assert seconds <= bounds.closely(plan) * (1 + 1e-9) <= cost.seconds * (1 + 2e-9), plan
                        seen.add(plan.schedule)
    assert seen >= {"1F1B", "ZBH1", "ZBV", "VPP"}


@pytest.mark.parametrize(("name", "virtual"), [("1F1B", 1), ("ZBH1", 1), ("ZBV", 2), ("VPP", 2), ("VPP", 4)])
def test_what_is_in_flight_is_counted(name, virtual):
    for pp, count in itertools.product((2, 3, 4, 8), (1, 2, 4, 8, 16, 24)):
        if name == "VPP" and count % pp:
            continue
        plan = oc.Plan(pp=pp, virtual=virtual, schedule=name, microbatches=count)
        schedule = schedule_named(name, pp, virtual)(count)
        for rank in range(pp):
            now = most = 0
            for action in schedule.ranks[rank]:
                kind = action.kind if action.kind != "I" or action.stage else "W"
                now += (kind == "F") - (kind in ("B", "W") and not (action.kind == "W" and not action.stage))
                most = max(most, now)
            assert in_flight(plan, rank) <= most, (pp, count, rank)


def test_a_microbatch_of_any_size_from_two_recordings(subjects):
    subject = subjects[0]
    plan = replace(subject.base, tp=2, sequence_parallel=True)
    found = {n: subject._whole(replace(plan, microbatch=n)) for n in (2, 4, 8)}
    made = of_rows(found[2].pieces.recording, found[4].pieces.recording, 8)
    assert made is not None
    real = type(found[8].pieces)(found[8].pieces.recording, found[8].folded)
    assert type(real)(made, found[8].folded).costs(A100) == real.costs(A100)
    full = subject._whole(replace(plan, microbatch=4, recompute="full"))
    assert of_rows(found[2].pieces.recording, full.pieces.recording, 8) is None  # another program


# -- placements --------------------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6))
def test_elimination_is_exact(seed):
    draw = random.Random(seed)
    problem = Problem()
    for _ in range(draw.randint(1, 6)):
        problem.variable(draw.randint(1, 4))
    count = len(problem.sizes)
    for _ in range(draw.randint(1, 8)):
        some = draw.sample(range(count), draw.randint(1, min(3, count)))
        table = torch.tensor([draw.choice((0.0, 1.0, 2.5, float("inf"))) for _ in range(_entries(problem, some))])
        problem.add(some, table.reshape([problem.sizes[v] for v in some]).numpy())
    cost, chosen = problem.solve()
    every = [_cost(problem, choice) for choice in itertools.product(*map(range, problem.sizes))]
    assert cost == min(every)
    assert cost == float("inf") or _cost(problem, chosen) == cost


def _entries(problem: Problem, variables: list[int]) -> int:
    return int(torch.tensor([problem.sizes[v] for v in variables]).prod())


def _cost(problem: Problem, choice: Any) -> float:
    return sum(float(table[tuple(choice[v] for v in variables)]) for variables, table in problem.terms)


def _placed(
    model: nn.Module, batch: tuple[Any, ...], loss: Any, tp: int = 2, machine: Machine = A100
) -> list[dict[str, str]]:
    subject = subject_of(model, batch, loss, {})
    plan = replace(subject.base, tp=tp, microbatch=len(batch[0]))
    return [dict(found.placements) for found in subject.placed(plan, machine)]


def _token_loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())


@pytest.mark.proof
def test_of_a_transformer_megatrons_cuts_come_out():
    """Queries, keys, values and the MLP's first layer by columns, what follows them by rows, the head by its vocabulary."""
    text = torch.zeros(32, 128, dtype=torch.int64)
    found = _placed(GPT(512, 5, 16384, 128, heads=8), (text, text), _token_loss, tp=4)[0]
    columns, rows = "tp: Shard(0)", "tp: Shard(1)"
    for name in ("query", "key", "value", "up"):
        assert found[f"blocks.*.{name}.weight"] == found[f"blocks.*.{name}.bias"] == columns
    for name in ("out", "down"):
        assert found[f"blocks.*.{name}.weight"] == rows and f"blocks.*.{name}.bias" not in found
    assert found["head.weight"] == columns
    assert not any("norm" in name or "behind" in name for name in found)


def test_names_say_nothing():
    """The same model with its layers renamed has the same cuts."""

    class Other(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down, self.up = nn.Linear(256, 1024), nn.Linear(1024, 256)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.up(torch.relu(self.down(x)))

    found = _placed(Other(), (torch.zeros(512, 256),), lambda m, x: m(x).square().mean())[0]
    assert found == {"down.weight": "tp: Shard(0)", "down.bias": "tp: Shard(0)", "up.weight": "tp: Shard(1)"}


@pytest.mark.proof
def test_the_seeds_network_is_cut_in_its_middle_and_nothing_is_faster():
    """Of all placements of its two matrices that can be priced, and of none."""
    model, batch = MLP(512, 2048), (torch.zeros(256, 512), torch.zeros(256, 512))
    loss = lambda m, x, y: nn.functional.mse_loss(m(x), y)  # noqa: E731
    found = _placed(model, batch, loss)[0]
    assert found == {"w0.weight": "tp: Shard(0)", "w1.weight": "tp: Shard(1)"}
    base = subject_of(model, batch, loss, {}).base

    def seconds(placements: dict[str, str]) -> float:
        plan = replace(base, tp=2, microbatch=256, placements=tuple(placements.items()))
        return oc.price(model, plan, A100, batch=batch, loss=loss).seconds

    ways = ("tp: Shard(0)", "tp: Shard(1)", "tp: Replicate()")
    every = {(a, b): seconds({"w0.weight": a, "w1.weight": b}) for a in ways for b in ways}
    assert seconds(found) <= min(every.values()) * 1.01
    assert max(every.values()) > 1.3 * seconds(found)  # it matters


# -- what is asked -------------------------------------------------------------------------------------------------------------


def _found(**more: Any) -> oc.Plans:
    return oc.plan(SIZES[0], **{"world": 8, "machine": A100, "batch": 16, **more})


def test_the_best_first_and_why():
    found = _found()
    assert found.best is found[0].plan and found.best.world == 8 and found.best.batch == 16
    assert [c.cost.seconds for c in found] == sorted(c.cost.seconds for c in found)
    assert "the fastest of" in found.why and "%" in found.why
    assert {c.name for c in found.obvious} <= {"pure dp", "ZeRO-3", "Megatron's recipe"}
    said = str(found)
    assert "not pure dp: dp=8: " in said and "plans looked at" in said
    assert found.diff(1) == found.best.diff(found[1].plan)
    assert str(_found()) == said  # again the same


def test_what_if_and_fixed():
    found = _found(fixed={"pp": 2, "schedule": "zbh1"})
    assert found.best.pp == 2 and found.best.schedule == "ZBH1"
    other = found.what_if(tp=4)
    assert other.plan.tp == 4 and other.plan.pp == 2 and "slower" in other.why
    assert found.what_if(**{"zero": found.best.zero}).why == "it is the best one"


@pytest.mark.share(2)
@pytest.mark.parametrize("field", ["offload", "overlap", "states", "compute"])
def test_what_if_of_what_a_search_does_not_vary(field):
    """As if it had been given from the beginning: another price, of another plan."""
    value = {"offload": True, "overlap": False, "states": "bfloat16", "compute": "float32"}[field]
    other, given = _found().what_if(**{field: value}), _found(fixed={field: value})
    assert getattr(other.plan, field) == getattr(given.best, field) == value
    assert other.plan == given.best and other.cost.seconds == given.cost.seconds != _found().cost.seconds


ASKED = {
    "dp": 2, "tp": 2, "cp": 2, "pp": 2, "per_host": 4, "sequence_parallel": True, "schedule": "ZBV", "virtual": 2,
    "stages": (1, 2, 2, 1), "microbatch": 1, "microbatches": 4, "zero": 3, "replicas": 2, "recompute": "full",
    "recompute_blocks": 1, "parameters": "float32", "gradients": "float32", "states": "bfloat16", "compute": "float32",
    "master": False, "offload": True, "compiled": True, "overlap": False, "overlap_tp": True, "overlap_pp": False,
    "partial_sends": True,
}  # fmt: skip


def test_what_is_asked_for_is_in_the_answer():
    """Whatever it goes along with: a schedule is of a pipeline, copies are of divided states, some blocks of recomputation."""
    found, free = _found(), {f.name for f in fields(oc.Plan)} - {"placements", "outputs", "ep"}
    assert free <= {*ASKED}, "a field that nobody asks for here"
    together = ("schedule", "stages", "replicas", "recompute_blocks", "sequence_parallel")
    for name, value in ASKED.items() if PROOF else ((name, ASKED[name]) for name in together):
        assert getattr(found.what_if(**{name: value}).plan, name) == value, name
    for name, together in (
        ("schedule", {"pp": 1}),
        ("sequence_parallel", {"tp": 1}),
        ("recompute_blocks", {"recompute": "none"}),
    ):
        with pytest.raises(PlanError, match=f"{name}=.* says nothing where"):
            found.what_if(**{name: ASKED[name], **together})


@pytest.mark.proof
def test_memory_is_a_limit():
    free = _found(memory=0)
    limit = free.cost.peak * 2 // 3
    found = _found(memory=limit)
    assert found.cost.peak <= limit and found.cost.seconds >= free.cost.seconds
    assert all(choice.fits == (choice.cost.peak <= limit) for choice in (*found, *found.obvious))
    assert any("too much" in str(choice) and "fits with" in str(choice) for choice in found.obvious)
    smallest = _found(memory=0, objective="memory")
    assert "the smallest of" in smallest.why
    least = smallest.cost.peak
    with pytest.raises(PlanError, match=r"nothing fits into .* on 8 rank\(s\): .* takes least"):
        _found(memory=least - 1)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"world": 0}, "world=0: want a whole number"),
        ({"fixed": {"dpp": 2}}, "fixed names 'dpp'"),
        ({"fixed": {"tp": 3}}, "tp=3 does not divide 8 ranks"),
        ({"batch": None}, "rows .sequences. of a step"),
        ({"objective": "speed"}, "want one of time, memory"),
        ({"memory": 24.0}, r"want a whole number of bytes, such as 24 \* 2\*\*30"),
        ({"fixed": {"tp": "2"}}, "want a whole number, not a string; write tp=2"),
        ({"fixed": {"schedule": "foo"}}, "there is none of this name"),
        ({"machine": "B900"}, "there is no machine 'B900'"),
        ({"world": 8, "batch": 3, "fixed": {"dp": 8}}, "nothing can run on 8 ranks"),
    ],
)
def test_mistakes(given, message):
    with pytest.raises((PlanError, oc.errors.CostError), match=message):
        _found(**given)


def test_a_runner_up_that_there_is_not():
    found = _found(memory=0)
    with pytest.raises(PlanError, match=r"diff\(99\): there is no plan 99, as the search kept"):
        found.diff(99)


def test_a_degree_that_gains_nothing_says_so():
    given = {"batch": (torch.zeros(16, 8), torch.zeros(16, 8)), "loss": nn.functional.mse_loss, "machine": "A100"}
    small = nn.Sequential(nn.Linear(8, 4), nn.GELU(), nn.Linear(4, 8))
    slow = replace(oc.Machine.preset("A100"), name="slow", latency=1.0)
    with pytest.raises(
        PlanError, match=r"every cut of parameters over tp=2 ranks sends more than it saves on slow\. To have"
    ):
        oc.plan(small, world=2, **{**given, "machine": slow}, fixed={"tp": 2})


def test_modules_need_a_batch_and_a_loss():
    with pytest.raises(PlanError, match="an example of the batch"):
        oc.plan(MLP(8, 16), world=2)
    with pytest.raises(PlanError, match="is no loss: say how it is made"):
        oc.plan(MLP(8, 16), world=2, batch=torch.zeros(4, 8))
    with pytest.raises(PlanError, match=r"want .model, loss, optimizer, batch"):
        oc.plan((MLP(8, 16),), world=2)


class Named(nn.Module):
    """Called with names, gives a dict with its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = MLP(64, 256)

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": nn.functional.mse_loss(self.net(inputs), labels)}


@pytest.mark.proof
def test_batches_as_loaders_give_them():
    x = torch.zeros(8, 64)
    plans = [
        oc.plan(Named(), world=2, machine="A100", batch=b).best for b in ([x, x], (x, x), {"inputs": x, "labels": x})
    ]
    assert plans[0] == plans[1] == plans[2]
    with pytest.raises(PlanError, match="no parameter that is trained"):
        oc.plan(nn.ReLU(), world=2, batch=x, loss=lambda m, x: m(x).sum())
    with pytest.raises(PlanError, match="taken for a step, as it takes arguments; it calls no backward"):
        oc.plan(lambda x: x, world=2, batch=x)


def test_marks_are_pins():
    model, x = MLP(512, 2048), torch.zeros(256, 512)
    model.w0.weight = oc.shard_tensor(model.w0.weight, oc.ProcessMesh([0], ["tp"]), [oc.Shard(1)])
    found = oc.plan((model, nn.MSELoss(), None, (x, x)), world=2, machine=A100)
    assert found.best.tp == 2 and dict(found.best.placements)["w0.weight"] == "tp: Shard(1)"
    model.w0.weight = oc.shard_tensor(
        nn.Parameter(torch.zeros(2048, 512)), oc.ProcessMesh([0], ["dp"]), [oc.Shard(0)]
    )  # by ZeRO-3
    assert oc.plan((model, nn.MSELoss(), None, (x, x)), world=2, machine=A100, fixed={"tp": 1}).best.dp == 2


def test_a_criterion_is_a_loss():
    found = oc.plan((MLP(64, 256), nn.MSELoss(), None, (torch.zeros(8, 64), torch.zeros(8, 64))), world=2, machine=A100)
    assert found.best.world == 2 and oc.Plan.from_json(found.best.to_json()) == found.best


# -- negative controls: each of these faults is seen ----------------------------------------------------------------------------


@pytest.mark.proof
def test_messages_that_cost_nothing_are_seen(monkeypatch, subjects):
    """The plan that is found then is not the best one, by the price that counts them."""
    machine = MACHINES[2]  # of slow links
    true = {cost.plan: cost.seconds for cost in Search(Space(subjects[0], 8, machine, {}), machine, 0).everything()}
    with monkeypatch.context() as fault:
        fault.setattr(AxisLine, "seconds", lambda *given: 0.0)
        fault.setattr(AxisLine, "send", lambda *given: 0.0)
        wrong = subject_of(SIZES[0], 16, None, {})
        without = replace(machine, latency=0.0, bandwidth=1e18, between_hosts=1e18)
        found = in_order(Search(Space(wrong, 8, without, {}), without, 0).run().priced)[0].plan
    right = in_order(Search(Space(subjects[0], 8, machine, {}), machine, 0).run().priced)[0].plan
    assert true[right] <= 1.01 * min(true.values()) < true[found]


def test_a_limit_that_is_ignored_is_seen(monkeypatch, subjects):
    limit = Search(Space(subjects[0], 4, A100, {}), A100, 0).run().priced[0].peak // 2
    assert Search(Space(subjects[0], 4, A100, {}), A100, limit).run().priced[0].peak <= limit
    monkeypatch.setattr(Search, "_fits", lambda self, nbytes: True)
    assert Search(Space(subjects[0], 4, A100, {}), A100, limit).run().priced[0].peak > limit


def test_a_placement_that_is_changed_afterwards_is_seen():
    """Its price is another one: a plan says all that its price depends on."""
    model, batch = MLP(512, 2048), (torch.zeros(256, 512), torch.zeros(256, 512))
    loss = lambda m, x, y: nn.functional.mse_loss(m(x), y)  # noqa: E731
    found = oc.plan(model, world=2, machine=A100, batch=batch, loss=loss, fixed={"tp": 2})
    priced = oc.price(model, found.best, A100, batch=batch, loss=loss)
    assert priced.seconds == pytest.approx(found.cost.seconds, rel=1e-9) and priced.peak == found.cost.peak
    changed = replace(found.best, placements=(("w0.weight", "tp: Shard(1)"), ("w1.weight", "tp: Shard(1)")))
    assert oc.price(model, changed, A100, batch=batch, loss=loss).seconds > 1.05 * found.cost.seconds


@pytest.mark.proof
def test_on_a_measured_cpu_messages_do_not_run_beside_computation():
    """As ranks apply it there: gradients are summed once all are made, so that all of them are there at once."""
    cpu = Machine(curves={"all_reduce": ((1.0, 1e-6), (2.0**30, 1.0))})
    ask = {
        "world": 2,
        "batch": (torch.zeros(4, 512), torch.zeros(4, 512)),
        "loss": nn.MSELoss(),
        "fixed": {"dp": 2, "zero": 2},
    }
    model = nn.Sequential(*[nn.Linear(512, 512) for _ in range(6)])
    here, there = (oc.plan(model, machine=machine, **ask) for machine in (cpu, A100))
    assert not here.best.overlap and there.best.overlap
    assert oc.plan(model, machine=cpu, **{**ask, "fixed": {**ask["fixed"], "overlap": True}}).best.overlap


def test_hosts_are_those_of_the_plan():
    assert on_hosts(A100, 4).per_host == 4 and on_hosts(A100, A100.per_host) is A100


@pytest.mark.proof
def test_what_python_does_for_a_divided_parameter_is_priced():
    """Many small parameters on a machine that is slow: their states are divided only where Python's part is left out."""
    other = {"unknown": ((1.0, 1.0),)}  # so that both are measured machines
    cpu = replace(Machine(name="CPU", flops=1e11, memory=1e10, latency=1e-5, bandwidth=1e10), curves=other)
    host = replace(cpu, curves={**other, DIVIDED: ((1.0, 1e-4),)})
    model, batch = GPT(128, 8, 2048, 64), torch.zeros(16, 64, dtype=torch.int64)
    given = {"world": 4, "batch": (batch, batch), "loss": _token_loss, "memory": 0}
    only = {
        "tp": 1,
        "cp": 1,
        "pp": 1,
        "microbatches": 1,
        "recompute": "none",
        "parameters": "float32",
        "compute": "float32",
    }
    prices = {}
    for machine in (cpu, host):
        for zero in (0, 1):
            fixed = {**only, "zero": zero}
            prices[machine is host, zero] = oc.plan(model, machine=machine, fixed=fixed, **given).cost.seconds
    count = len([*model.parameters()])
    assert prices[True, 0] == prices[False, 0]
    assert prices[True, 1] - prices[False, 1] == pytest.approx(1e-4 * count, rel=0.05)
    assert oc.plan(model, machine=cpu, fixed=only, **given).best.zero > 0
    assert oc.plan(model, machine=host, fixed=only, **given).best.zero == 0
    assert (
        oc.plan(model, machine=host.recorded(), fixed=only, **given).best.zero > 0
    )  # a recorded step has no Python in it


_kept: dict[int, list[torch.Tensor]] = {}


class Remembering(nn.Module):
    """A block that puts its keys into a cache of the file, of which nobody knows: run once more, it finds its own."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number, self.keys, self.out = number, nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mine = _kept.setdefault(self.number, [])
        mine.append(self.keys(x))
        scores = x @ torch.cat(mine, 1).transpose(1, 2) + torch.zeros(4, 4)
        return x + self.out(scores.softmax(-1) @ x)


class WithCache(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Remembering(i) for i in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _kept.clear()
        for block in self.blocks:
            x = block(x)
        return x


def test_blocks_that_cannot_run_once_more_leave_recomputation_out() -> None:
    given: dict[str, Any] = dict(batch=torch.zeros(8, 4, 8), loss=lambda m, x: m(x).square().mean(), machine="A100")
    found = oc.plan(WithCache(), world=2, objective="memory", **given)
    assert found.best.recompute == "none"
    with pytest.raises(RuntimeError, match=r"broadcast|size of tensor"):
        oc.plan(WithCache(), world=2, fixed={"recompute": "full"}, **given)
