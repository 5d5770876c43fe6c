"""Recordings that check themselves: what no guard knows of is told, with the line and both values, and then done rightly."""

from __future__ import annotations

import ctypes
import gc
import warnings
from collections.abc import Callable, Iterable
from datetime import timedelta
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from comparing import compared, each, each_other
from torch import Tensor, nn

import onecard as oc
from onecard.comm.agree import sparse_check
from onecard.comm.world import world
from onecard.errors import RecordingError
from onecard.static.guards import before
from onecard.static.run.rechecked import next_check
from onecard.tensor.deferred.calls import storage_of
from onecard.testing import RankError, run_ranks

X = torch.arange(6.0).reshape(2, 3)
TOLD = "does not do what was recorded"
getenv = ctypes.CDLL(None).getenv
getenv.restype = ctypes.c_char_p


def from_elsewhere(name: str) -> float:
    """A value that no guard can know of: this process' environment, as C reads it."""
    return float(getenv(name.encode()) or b"1")


def calls(step: Callable[..., Any], change: Callable[[int], None], count: int = 9) -> tuple[list[Any], list[str]]:
    """What a recorded step gives at each call, and what was told."""
    static, found = oc.to_static(step), []
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for i in range(1, count + 1):
            change(i)
            found.append(static(X))
    return found, [str(w.message) for w in told]


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Sets the value: 1 up to call 4, then 3."""
    return lambda i: monkeypatch.setenv("ONECARD_TEST_VALUE", "1" if i < 5 else "3")


hidden = {"value": from_elsewhere}


def constant(x: Tensor) -> Tensor:
    return x * hidden["value"]("ONECARD_TEST_VALUE")


def branch(x: Tensor) -> Tensor:
    return x * 1.0 if hidden["value"]("ONECARD_TEST_VALUE") < 2 else x + x + x


def more(x: Tensor) -> Tensor:
    for _ in range(int(hidden["value"]("ONECARD_TEST_VALUE")) - 1):
        x = x + X
    return x * 1.0


def made_of_values(x: Tensor) -> Tensor:
    return x * torch.tensor([hidden["value"]("ONECARD_TEST_VALUE"), 1.0, 2.0])


def optional(x: Tensor) -> Tensor:
    return x.clamp(1.0) if hidden["value"]("ONECARD_TEST_VALUE") < 2 else x.clamp(1.0, 3.0)


def listed(x: Tensor) -> Tensor:
    return torch.cat([x, X] if hidden["value"]("ONECARD_TEST_VALUE") < 2 else [x, X, X])


def option(x: Tensor) -> Tensor:
    return torch.add(x, X) if hidden["value"]("ONECARD_TEST_VALUE") < 2 else torch.add(x, X, alpha=3)


def plain_result(x: Tensor) -> tuple[Tensor, float]:
    return x + 1.0, hidden["value"]("ONECARD_TEST_VALUE")


def form(x: Tensor) -> list[Tensor]:
    return [x * 1.0] * int(hidden["value"]("ONECARD_TEST_VALUE"))


@pytest.mark.parametrize(
    "step",
    [constant, branch, more, made_of_values, optional, listed, option, plain_result, form],
    ids=lambda f: f.__name__,
)
def test_what_no_guard_knows_is_told_at_the_next_check(step: Callable[..., Any], table: Callable[[int], None]) -> None:
    found, told = calls(step, table)
    table(9)
    for i in (8, 9):  # call 8 is compared, call 9 recorded anew
        assert same(found[i - 1], step(X))
    (said,) = [words for words in told if TOLD in words]
    assert "call 8" in said and ("test_static_checked.py" in said or "result" in said or "form" in said)


def same(a: Any, b: Any) -> bool:
    one, other = (torch.utils._pytree.tree_leaves(x) for x in (a, b))
    return len(one) == len(other) and all(
        torch.equal(x, y) if isinstance(x, Tensor) else x == y for x, y in zip(one, other, strict=True)
    )


def test_the_words_name_line_and_both_values(table: Callable[[int], None]) -> None:
    _, told = calls(constant, table)
    assert r"aten.mul.Tensor at " in told[-1] and "return x * hidden" in told[-1] and "was 1.0 and is 3.0" in told[-1]


def test_the_second_finding_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recorded, found at 8, recorded at 9, found at 10; from then on each call is the step's own."""
    values = iter([1, 1, 1, 1, 1, 1, 1, 2, 2, 3, 4, 5])
    now = [0]

    def change(i: int) -> None:
        now[0] = next(values)
        monkeypatch.setenv("ONECARD_TEST_VALUE", str(now[0]))

    found, told = calls(constant, change, 12)
    assert [f[0, 1].item() for f in found] == [1, 1, 1, 1, 1, 1, 1, 2, 2, 3, 4, 5]
    assert [("recorded anew" in w, "runs as it is" in w) for w in told if TOLD in w] == [(True, False), (False, True)]


def test_switched_off(monkeypatch: pytest.MonkeyPatch, table: Callable[[int], None]) -> None:
    monkeypatch.setattr(sparse_check.on, "here", False)
    found, told = calls(constant, table)
    assert not told and found[-1][0, 1] == 1.0


def test_the_schedule() -> None:
    due = [next_check(2)]
    while due[-1] < 5000:
        due.append(next_check(due[-1]))
    assert due[:8] == [3, 4, 8, 16, 32, 64, 128, 256] and max(b - a for a, b in pairwise(due)) == 512


def test_another_tensor_is_told() -> None:
    """Weights that no name leads to, exchanged for others."""
    held: dict[str, Any] = {"w": nn.Linear(3, 2)}
    take = held.__getitem__  # a function of C: what it reads no guard knows

    def step(x: Tensor) -> Tensor:
        with torch.no_grad():
            return take("w")(x)

    def change(i: int) -> None:
        if i == 5:
            held["w"] = nn.Linear(3, 2)

    found, told = calls(step, change)
    assert all(torch.equal(f, held["w"](X)) for f in (found[7], found[8]))
    assert told


def test_nothing_is_found_in_training_with_a_schedule() -> None:
    """Learning rates, counts of Adam, dropout, gradients that autograd keeps or copies: all of it may change."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.BatchNorm1d(4), nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x).pow(2).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.detach()

    static = oc.to_static(step)
    with compared(each):
        for _ in range(8):
            static(torch.randn(4, 3))
            schedule.step()
    assert len(static.recordings) == 1


def test_microbatches_are_compared_and_taken_back(table: Callable[[int], None]) -> None:
    runs = {}
    for static in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(3, 1)
        optimizer = torch.optim.Adam(model.parameters())

        def step(x: Tensor, model: Any = model, optimizer: Any = optimizer) -> Tensor:
            optimizer.zero_grad()
            loss = model(x).pow(2).mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        run = oc.to_static(step, k_steps=2) if static else step
        with compared(each_other):
            runs[static] = [run(X * (i + 1)).item() for i in range(8)]
    assert runs[True] == pytest.approx(runs[False], rel=1e-6)


# -- on ranks -----------------------------------------------------------------------------------------------------------


def found_on_one_rank() -> list[Any]:
    """A way that only rank 1 goes: both drop the recording at the same call, and nobody waits."""
    mesh = oc.ProcessMesh([0, 1], ["dp"])
    weight = oc.shard_tensor(torch.ones(3), mesh, [oc.Replicate()]).requires_grad_()
    kept = {"changed": False}
    changed = kept.__getitem__

    def step(x: Tensor) -> Tensor:
        weight.grad = None
        loss = (oc.reshard(x, mesh, [oc.Shard(0)]) * weight).sum()
        loss = loss / 1.0 if changed("changed") else loss * 1.0
        loss.backward()
        return oc.unshard(weight.grad).sum()

    static, found, told = oc.to_static(step), [], []
    x = oc.shard_tensor(torch.ones(4, 3), mesh, [oc.Replicate()])
    for i in range(1, 12):
        kept["changed"] = i >= 6 and world.get_rank() == 1
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            found.append(float(static(x)))
        told += [(i, str(w.message)) for w in seen if TOLD in str(w.message)]
    return [found, told]


def test_a_rank_that_finds_something_tells_the_others() -> None:
    (found, told), (others, told_there) = run_ranks(found_on_one_rank, 2)
    assert found == others == [12.0] * 11
    assert [i for i, _ in told] == [i for i, _ in told_there] == [8]
    assert "another rank" in told[0][1] and "aten.div" in told_there[0][1]


def flag_on_one_rank() -> None:
    """A flag that is true on rank 1 alone: it records, while rank 0 replays."""
    world.TIMEOUT = timedelta(seconds=2)
    mesh = oc.ProcessMesh([0, 1], ["dp"])
    weight = oc.shard_tensor(torch.ones(3), mesh, [oc.Replicate()]).requires_grad_()
    model = nn.Dropout(0.0)

    def step(x: Tensor) -> Tensor:
        weight.grad = None
        (model(x) * weight).sum().backward()
        return oc.unshard(weight.grad).sum()

    static = oc.to_static(step)
    x = oc.shard_tensor(torch.ones(4, 3), mesh, [oc.Shard(0)])
    for i in range(1, 8):
        model.train(i < 6 or world.get_rank() == 0)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="step is recorded anew")
            static(x)


@pytest.mark.share(1)
@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_a_rank_that_records_while_the_others_replay_says_so(backend: str) -> None:
    with pytest.raises(RankError) as fault:
        run_ranks(flag_on_one_rank, 2, backend=backend)
    assert "step fits no recording on rank 1" in str(fault.value) and "training" in str(fault.value)


OWN = {
    "all_reduce": lambda g: dist.all_reduce(g),
    "async": lambda g: dist.all_reduce(g, async_op=True).wait(),
    "all_gather": lambda g: g.copy_(sum(gathered(g))),
    "into": lambda g: g.copy_(joined(g).sum(0)),
    "broadcast": lambda g: dist.broadcast(g, 1),
    "max": lambda g: dist.all_reduce(g, dist.ReduceOp.MAX),
}


def gathered(g: Tensor) -> list[Tensor]:
    parts = [torch.empty_like(g) for _ in range(2)]
    dist.all_gather(parts, g)
    return parts


def joined(g: Tensor) -> Tensor:
    into = torch.empty(2, *g.shape)
    dist.all_gather_into_tensor(into.view(-1), g.reshape(-1))
    return into


def own_messages() -> list[str]:
    """Programs that send by hand, as they are and recorded; the names of those that differ."""
    world.init()
    wrong = []
    for name, send in OWN.items():
        runs = []
        for static in (False, True):
            torch.manual_seed(0)
            model = nn.Linear(3, 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

            def step(x: Tensor, model: Any = model, optimizer: Any = optimizer, send: Any = send) -> Tensor:
                optimizer.zero_grad()
                loss = model(x).pow(2).mean()
                loss.backward()
                for p in model.parameters():
                    send(p.grad)
                optimizer.step()
                shown = loss.detach().clone()
                dist.all_reduce(shown)
                return shown

            run = oc.to_static(step) if static else step
            rows = torch.Generator().manual_seed(world.get_rank())
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)
                runs.append([run(torch.randn(4, 3, generator=rows)).item() for _ in range(9)])
        if runs[0] != runs[1]:
            wrong.append(name)
    return wrong


@pytest.mark.share(1)
@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_messages_of_the_programs_own_are_replayed(backend: str) -> None:
    assert run_ranks(own_messages, 2, backend=backend) == [[], []]


def ddp() -> str:
    world.init()
    model = nn.parallel.DistributedDataParallel(nn.Linear(3, 1))
    static = oc.to_static(lambda x: model(x).sum().backward())
    static(X)
    try:
        static(X)
    except RecordingError as fault:
        return str(fault)
    return ""


def test_a_wrapper_that_sends_by_itself_is_refused() -> None:
    for said in run_ranks(ddp, 2):
        assert "DistributedDataParallel at " in said and "onecard.fleet.distributed_model" in said


# -- what a step leaves in Python ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kept", ["list", "dict", "attribute", "nothing", "handed over"])
def test_what_a_replay_does_not_repeat_is_told(kept: str) -> None:
    log: list[Any] = []
    table: dict[str, Any] = {}
    model = nn.Linear(3, 1)

    def step(x: Tensor) -> Tensor:
        y = model(x).detach()
        if kept == "list":
            log.append(y)
        elif kept == "dict":
            table["y"] = y
        elif kept == "attribute":
            model.last = y
        elif kept == "handed over":  # the step reads it again itself
            table["z"] = y
            y = table["z"] * 2
        return y

    static = oc.to_static(step)
    static(X)
    if kept in ("nothing", "handed over"):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            static(X)
    else:
        with pytest.warns(UserWarning, match=r"test_static_checked.py:\d+, in Python, which a replay does not repeat"):
            static(X)


def _program() -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 4), nn.Tanh(), nn.Linear(4, 7))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return model, step


@pytest.mark.parametrize("options", [{}, {"k_steps": 2}])
def test_the_order_in_which_python_lists_objects_says_nothing(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Effects have the order of their places: a look that finds the same tensors in another order finds the same step."""
    listed = before.alive
    _, step = _program()
    forwards = oc.to_static(step, **options)
    forwards(torch.ones(4, 4))
    forwards(torch.ones(4, 4))
    monkeypatch.setattr(before, "alive", lambda *wanted: [found[::-1] for found in listed(*wanted)])
    backwards = oc.to_static(step, **options)
    backwards(torch.ones(4, 4))
    backwards(torch.ones(4, 4))
    one, other = (each.recordings[0] for each in (forwards, backwards))
    assert [(e.kind, e.where) for e in one.effects] == [(e.kind, e.where) for e in other.effects]
    assert one.gradients == other.gradients and len(one.gradients) == 6


@pytest.mark.parametrize("options", [{}, {"k_steps": 2}])
def test_looks_keep_no_gradients(options: dict[str, Any]) -> None:
    """What a recording or a check has held is free when it ends, though Python's collector has not come by."""
    model, step = _program()
    run = oc.to_static(step, **options)
    gc.collect()
    gc.disable()
    try:
        for _ in range(9):
            run(torch.ones(4, 4))
        held = {storage_of(x) for p in model.parameters() for x in (p, p.grad) if x is not None}
        alike = [x for x in gc.get_objects() if type(x) is Tensor and x.shape == (7, 4) and not x.is_meta]
        kept = [x for x in alike if storage_of(x) not in held]
    finally:
        gc.enable()
    assert kept == []


class _Replaces(torch.optim.Optimizer):
    """Puts new tensors into its states, as many optimizers of papers do, and writes into none."""

    def __init__(self, params: Iterable[Tensor]) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            if p.grad is None:
                continue
            state = self.state[p]
            mean = state.get("mean")
            state["mean"] = p.grad.clone() if mean is None else 0.5 * mean + p.grad
            p.sub_(state["mean"] if mean is None else state["mean"] + 0.1 * mean, alpha=0.1)


def _replaced(options: Any) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 4))
    optimizer = _Replaces(model.parameters())

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    run = step if options is None else oc.to_static(step, **options)
    return [run(torch.linspace(-1, 1, 32).view(8, 4)).item() for _ in range(10)]


@pytest.mark.proof
def test_states_that_an_optimizer_replaces_are_read_anew() -> None:
    """Each replay reads what the one before has put there; nothing is told, as all is repeated."""
    wanted = _replaced(None)
    for options, ranks in (({}, 1), ({"k_steps": 4}, 1), ({"stages": oc.Stages(4, at=["2"])}, 2)):
        for losses in run_ranks(_replaced, ranks, options):
            assert losses == pytest.approx(wanted, rel=1e-5)
