"""Rows in recorded steps: they go where data says at each replay, as they do outside of a recording."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from amounts import amount
from fuzz.rows import run
from torch import Tensor, nn

import onecard as oc
from onecard.errors import RecordingError
from onecard.random import Key
from onecard.tensor.rows import one_call
from onecard.testing import run_ranks

CALLS = 6  # the second records; the fourth and fifth are compared with the step itself
TOKENS, D, HIDDEN, EXPERTS, K = 12, 16, 8, 4, 2
S, R = oc.Shard, oc.Replicate


def values(seed: int) -> list[Tensor]:
    draw = torch.Generator().manual_seed(seed)
    shapes = (TOKENS, D), (EXPERTS, D), (EXPERTS, D, HIDDEN), (EXPERTS, HIDDEN, D)
    return [torch.randn(shape, generator=draw) / 3 for shape in shapes]


def mixture(x: Any, gate: Any, up: Any, down: Any, dropped: float = 0.0) -> Any:
    weights, chosen = F.linear(x, gate).softmax(-1).topk(K, -1)
    flat = chosen.flatten()
    order = flat.argsort(stable=True)
    ends = F.one_hot(flat, EXPERTS).sum(0).cumsum(0).int()
    made = F.gelu(F.grouped_mm(x[order // K], up, offs=ends))
    made = F.dropout(made, dropped) if dropped else made
    weighed = F.grouped_mm(made, down, offs=ends) * weights.flatten()[order, None]
    return weighed[order.argsort()].view(-1, K, D).sum(1)


def placed() -> tuple[list[Any], list[Any], Any]:
    """Tokens and weights, cut; the same whole; how they lie."""
    mesh = oc.ProcessMesh(range(oc.get_world_size()), ["ep"])
    lie = [[S(0)], [R()], [S(0)], [S(0)]]
    parts = [nn.Parameter(oc.shard_tensor(v, mesh, p)) for v, p in zip(values(0), lie, strict=True)]
    return parts, [nn.Parameter(v) for v in values(0)], (mesh, lie)


def far(a: Any, b: Tensor) -> float:
    return float((oc.unshard(a.detach()) - b.detach()).abs().max() / b.detach().abs().max())


def trained(kind: str) -> list[float]:
    """Training with a rate that the program changes, read in Python; how far weights and losses are off, call by call."""
    warnings.simplefilter("error", UserWarning)
    parts, plain, (mesh, lie) = placed()

    def step_of(params: list[Any]) -> Any:
        optimizer = torch.optim.SGD(params[1:], 0.1)

        def step(x: Any) -> Any:
            rate = optimizer.param_groups[0]["lr"]
            made = mixture(x, *params[1:])
            if kind == "scaled rows":  # a number of the optimizer, on rows
                made = x[torch.arange(TOKENS).flip(0)] * rate + made
            if kind == "returned":
                made, loss = x[torch.arange(TOKENS).flip(0)] * 2, made.square().sum()
            elif kind == "written":
                made = made[torch.arange(TOKENS).flip(0)]
                made.mul_(2)
                loss = made.square().sum()
            else:
                loss = made.square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return (loss, made) if kind == "returned" else loss

        return optimizer, step

    (one, step), (many, plain_step) = step_of(parts), step_of(plain)
    recorded = oc.to_static(step)
    found = []
    for call in range(CALLS):
        for optimizer in (one, many):
            optimizer.param_groups[0]["lr"] = 0.1 / (call + 1)
        batch = values(10 + call)[0]
        made, wanted = recorded(oc.shard_tensor(batch, mesh, lie[0])), plain_step(batch)
        if kind == "returned":
            (made, other), (wanted, another) = made, wanted
            found.append(far(other, another))
        found.append(max(far(made, wanted), *(far(a, b) for a, b in zip(parts[1:], plain[1:], strict=True))))
    return found


@pytest.mark.share(1)
@pytest.mark.parametrize("kind", ["plain", "scaled rows", "returned", "written"])
def test_a_recorded_step_trains_as_one_card(kind: str) -> None:
    for found in run_ranks(trained, 2, kind):
        assert len(found) >= CALLS and max(found) <= 1e-5


def dropped() -> list[float]:
    """Losses of a step that drops rows' elements, unrecorded and recorded, from the same state of the generator."""
    parts, _, (mesh, lie) = placed()

    def step(x: Any) -> Any:
        loss = mixture(x, *parts[1:], dropped=0.5).square().sum()
        loss.backward()
        for p in parts:
            p.grad = None
        return loss.detach()

    recorded, found = oc.to_static(step), []
    for call in range(CALLS):
        batch = oc.shard_tensor(values(10 + call)[0], mesh, lie[0])
        made = []
        for run_step in (step, recorded):
            torch.manual_seed(call)
            made.append(float(oc.unshard(run_step(batch))))
        found.append(abs(made[0] - made[1]) / made[0])
    return found


def test_a_recorded_step_draws_anew_on_rows() -> None:
    for found in run_ranks(dropped, 2):
        assert max(found) <= 1e-6


def looked_at(path: str) -> dict[str, Any]:
    """What is sent by the step and by its recordings, and what is said of one with rows that shall be saved."""
    parts, plain, (mesh, lie) = placed()
    x = oc.shard_tensor(values(1)[0], mesh, lie[0]).requires_grad_()
    _, gate, up, down = parts

    def step() -> Any:
        for p in (x, gate, up, down):
            p.grad = None
        loss = mixture(x, gate, up, down).square().sum()
        loss.backward()
        return loss.detach()

    with oc.explain() as told:
        step()
    rows, dense = oc.to_static(step), oc.to_static(step, without=["rows"])
    for recorded in (rows, dense):
        recorded(), recorded()
    one = oc.record(lambda: mixture(values(1)[0].requires_grad_(), *plain[1:]).square().sum().backward())()
    file = f"{path}/{oc.get_rank()}"
    with pytest.raises(RecordingError) as said:
        rows.recordings[0].save(file)
    dense.recordings[0].save(file)
    cost = rows.recordings[0].cost()
    return {
        "explained": told.bytes, "rows": sum(cost.sent.values()), "dense": sum(dense.recordings[0].cost().sent.values()),
        "products": cost.products, "one card": one.cost().products, "said": str(said.value), "text": str(rows.recordings[0]),
        "peak": (cost.peak, dense.recordings[0].cost().peak),
    }  # fmt: skip


def test_a_recording_with_rows_is_priced_by_what_they_were(tmp_path: Any) -> None:
    found = run_ranks(looked_at, 2, str(tmp_path))
    for each in found:
        assert each["explained"] == each["rows"] < 0.75 * each["dense"]
        assert each["peak"][0] < each["peak"][1]
        assert 'without=["rows"]' in each["said"]
        assert "rows: aten._grouped_mm(" in each["text"] and "bytes along 'ep'" in each["text"]
    assert sum(each["products"] for each in found) == pytest.approx(found[0]["one card"], rel=1e-3)


def otherwise() -> str:
    """What a replay says whose rows lie otherwise than when it was recorded."""
    parts, _, (mesh, lie) = placed()
    recorded = oc.to_static(torch.no_grad()(lambda x: mixture(x, *parts[1:]).square().sum()))
    x = oc.shard_tensor(values(1)[0], mesh, lie[0])
    for _ in range(4):  # the third and fourth are compared with the step itself
        recorded(x)
    for node in recorded.recordings[0].nodes():
        if node.args and isinstance(node.args[0], one_call.RowsCall):
            node.args[0].results = ["something else"]
    with pytest.raises(RecordingError) as said:
        recorded(x)
    return str(said.value)


def test_a_replay_that_gives_something_else_is_told() -> None:
    for said in run_ranks(otherwise, 2):
        assert "rows: of_numbers" in said and "something else" in said


def beside_a_view() -> list[float]:
    """Losses of rows times a copy that stands for a view, after what it is a view of was written to."""
    mesh = oc.ProcessMesh([0, 1], ["dp"])
    numbers = torch.tensor([2, 0, 3])

    def step(x: Any, base: Any) -> Any:
        base = base * 1
        view = base.view(3, 8)  # by halves of 4 rows there are no 3
        base.add_(1)
        return (x[numbers] * view).square().sum()

    recorded, found = oc.to_static(step), []
    for call in range(CALLS):
        draw = torch.Generator().manual_seed(call)
        plain = torch.randn(4, 8, generator=draw), torch.randn(4, 6, generator=draw)
        found.append(far(recorded(*(oc.shard_tensor(x, mesh, [S(0)]) for x in plain)), step(*plain)))
    return found


def test_rows_meet_a_view_as_it_is() -> None:
    for found in run_ranks(beside_a_view, 2):
        assert max(found) <= 1e-6


def test_what_a_recording_follows_is_no_constant_of_a_call() -> None:
    """Tensors, numbers of optimizers, keys and generators: each would be that of the first call for ever."""
    followed = torch.ones(2), 0.5, Key(1, 2), torch.Generator()
    taken: list[Any] = []
    rest = one_call._apart(([followed[0], 3], {"by": followed[1]}, *followed[2:], "word"), taken)
    assert [a is b for a, b in zip(taken, followed, strict=True)] == [True] * 4
    assert rest[0][1] == 3 and rest[4] == "word"
    assert one_call.together(rest, taken) == ([followed[0], 3], {"by": 0.5}, *followed[2:], "word")


def test_random_programs_recorded_on_a_line_of_ranks_are_one_cards() -> None:
    assert run(range(2000, 2000 + amount(4, 200)), 2, recorded=True) == {}


@pytest.mark.proof
def test_random_programs_recorded_on_a_grid_are_one_cards() -> None:
    assert run(range(3000, 3000 + amount(2, 200)), 4, grid=True, recorded=True) == {}
