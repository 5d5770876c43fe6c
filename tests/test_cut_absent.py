"""Programs that touch what only other stages of a pipeline have: each is told, none reads memory that is not there."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cut_programs import K
from test_cut_beside import Program
from torch import nn

import onecard as oc
from onecard.comm.issue.message import issue, message
from onecard.comm.issue.ranks import of_ranks
from onecard.errors import StageError
from onecard.fleet.gradients import hooks
from onecard.tensor.staged import is_elsewhere, note_read, note_stage
from onecard.testing import RankError, run_ranks
from onecard.train.absent import let_go

HABITS: dict[str, Callable[[Any], Any]] = {
    "a norm of all": lambda p: float(torch.nn.utils.parameters_to_vector(p.model.parameters()).norm()),
    "a number": lambda p: sum(q.sum().item() for q in p.model.parameters()),
    "forward by hand": lambda p: p.model(torch.zeros(2, 3, dtype=torch.int64)).sum().item(),
    "numpy": lambda p: [q.detach().numpy() for q in p.model.parameters()],
    "torch.save": lambda p: torch.save(p.model.state_dict(), io.BytesIO()),
    "torch.save of states": lambda p: torch.save(p.optimizer.state_dict(), io.BytesIO()),
    "drawn anew": lambda p: [q.data.normal_() for q in p.model.parameters()],
    "a sum that is trained": lambda p: sum(q.square().sum() for q in p.model.parameters()).backward(),
    "other data": lambda p: [setattr(q, "data", torch.ones(2, 5)) for q in p.model.parameters() if is_elsewhere(q)],
    "another dtype": lambda p: p.model.double(),
    "copied by torch.tensor": lambda p: [torch.tensor(q.detach()).sum().item() for q in p.model.parameters()],
    "as_tensor": lambda p: [torch.as_tensor(q, dtype=torch.float64).sum().item() for q in p.model.parameters()],
    "asarray": lambda p: [torch.asarray(q.detach(), copy=True).sum().item() for q in p.model.parameters()],
    "new_tensor": lambda p: [torch.zeros(1).new_tensor(q).sum().item() for q in p.model.parameters()],
}


def _told() -> dict[str, str]:
    warnings.filterwarnings("ignore", "To copy construct from a tensor")
    program = Program(oc.Stages(K))
    before = program.trained(range(2))
    found = {"before": str(before)}
    for name, habit in HABITS.items():
        if name == "drawn anew":  # the first ones are, until one that is not here
            found["after"] = str(program.trained(range(2, 3)))
        with torch.no_grad():
            try:
                habit(program)
                found[name] = "nothing was said"
            except StageError as error:
                found[name] = str(error)
    assert "which stage" in repr([*program.model.parameters()])
    absent = [p for p in program.model.parameters() if is_elsewhere(p)]
    assert absent and all(isinstance(p, torch.nn.Parameter) and p.requires_grad and p.is_leaf for p in absent)
    return found


@pytest.mark.proof
def test_every_habit_is_told():
    for rank, found in enumerate(run_ranks(_told, 2, timeout=120.0)):
        silent = {name: said for name, said in found.items() if name in HABITS and "of the pipeline ha" not in said}
        assert not silent
        assert f"on rank {rank}, was given back" in found["a number"]
        assert "test_cut_absent.py" in found["a number"] and "model." in found["a number"]
        assert "oc.checkpoint.save" in found["torch.save"]


def _lost(shape: tuple[int, ...], stage: int = 1) -> nn.Parameter:
    x = nn.Parameter(torch.ones(shape))
    x.untyped_storage().resize_(0)
    let_go(x, (stage,), "x")
    return x


def test_what_is_computed_of_it_is_as_absent():
    x, y = _lost((3, 2)), torch.ones(3, 2)
    with torch.no_grad():
        x.mul_(2).add_(y).clamp_(-1, 1)[0] = 3
        x.data = 0.9 * x.data
        made = [x + y, x.T, x[0], x.norm(), torch.stack([x.norm(), y.norm()]), x.detach().double(), copy.deepcopy(x)]
        made += torch._foreach_norm([x])
        mixed = torch._foreach_mul([y, x], [2.0, 3.0])
    assert all(is_elsewhere(each) for each in (*made, mixed[1]))
    assert [tuple(each.shape) for each in made[:5]] == [(3, 2), (2, 3), (2,), (), (2,)]
    assert (made[5].dtype, made[0].device.type, type(made[6])) == (torch.float64, "cpu", type(x))
    assert torch.equal(mixed[0], 2 * y)


def test_what_it_is_written_into_becomes_absent_with_all_that_have_its_memory():
    x, average = _lost((3, 2)), nn.Linear(2, 3)
    seen, assigned, listed = average.weight.detach(), torch.ones(3, 2), torch.ones(3, 2)
    with torch.no_grad():
        average.weight.mul_(0.9).add_(x, alpha=0.1)
        assigned.data = 0.5 * x.data
        torch._foreach_lerp_([listed], [x], 0.1)
    assert all("which stage 1" in repr(each) for each in (average.weight, seen, assigned, listed))
    assert isinstance(average.weight, nn.Parameter) and average.weight.requires_grad
    count, number = torch.tensor(3.0), _lost((2,)).detach().sum()
    count.copy_(number)
    assert (
        "which stage 1" in repr(count) and count.untyped_storage().nbytes()
    )  # a look at a step computes with counters
    base, trained, read = torch.ones(3, 2), torch.ones(3, 2), torch.ones(3, 2)
    note_stage(trained, True, (0,))
    note_read(read)
    for into, why in ((base[1:], "another tensor has"), (trained, "this rank trains"), (read, "or reads")):
        with torch.no_grad(), pytest.raises(StageError, match=why):
            into.add_(x[: len(into)])
        assert torch.equal(into, torch.ones_like(into))


def test_nothing_is_drawn_nor_sent_of_it():
    x = _lost((3, 2))
    for draws in (torch.randn_like, lambda x: x.data.uniform_(), lambda x: F.dropout(x, 0.5)):
        before = torch.get_rng_state()
        with torch.no_grad(), pytest.raises(StageError, match="random numbers"):
            draws(x)
        assert torch.equal(torch.get_rng_state(), before)
    with pytest.raises(StageError, match="all_gather of x"):
        issue(message(of_ranks([0]), "all_gather_into_tensor", 1), torch.ones(3, 2), x.detach())


def test_a_gradient_may_be_asked_for_where_fleet_is_in_use():
    hooks.install()  # Tensor.grad is a property of ours then, which has no name
    x = torch.nn.Parameter(torch.ones(2))
    let_go(x, (1,), "x")
    assert x.grad is None
    with torch.no_grad(), pytest.raises(StageError, match="of x"):
        x.sum().item()


def _weighed() -> dict[str, Any]:
    """A loss' class weights in its module, others beside it, and a table that the step writes to."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    beside, table = torch.tensor([2.0, 1.0, 1.0, 0.5]), torch.zeros(4)
    x, y = torch.randn(8, 6), torch.randint(0, 4, (8,))
    loss_of = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 0.5, 3.0]))

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        out = model(x)
        loss = loss_of(out, y) + F.cross_entropy(out, y, weight=beside)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        table.add_(model[4].bias.detach())
        return loss.detach()

    run = oc.to_static(step, stages=oc.Stages(2, at=["2"])) if oc.get_world_size() > 1 else step
    losses = [run(x, y).item() for _ in range(3)]
    plain = loss_of(torch.zeros(4, 4), y[:4]).item(), beside.sum().item()
    try:
        return {"losses": losses, "plain": plain, "table": table.sum().item(), "weight": loss_of.weight}
    except StageError as told:
        return {"losses": losses, "plain": plain, "table": str(told)}


def test_what_a_loss_reads_and_nobody_writes_all_ranks_keep():
    plain = _weighed()
    first, last = run_ranks(_weighed, 2)
    assert last["losses"] == first["losses"] == pytest.approx(plain["losses"], rel=1e-5)
    assert last["plain"] == first["plain"] == plain["plain"]
    assert last["table"] == pytest.approx(plain["table"], rel=1e-5)
    assert "table" in first["table"] and "was given back" in first["table"]  # it would be an old one


def _trained(habit: str) -> list[Any]:
    """Steps that leave their gradients, and what the program does with them, with parameters and states between."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    average = [p.detach().clone() for p in model.parameters()]
    x, y = torch.randn(8, 6), torch.rand(8, 6)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    run, found = step, list[Any]()
    if oc.get_world_size() > 1:
        axes = {"dp": 2, "zero": 1} if oc.get_world_size() > 2 else {}
        plan = oc.Plan(pp=2, microbatches=2, per_host=0, parameters="float32", compute="float32", **axes)
        run = oc.to_static(step, plan=plan)
    for _ in range(4):
        found.append(run(x, y).item())
        with torch.no_grad():
            if habit == "norm":
                found.append(nn.utils.clip_grad_norm_(model.parameters(), float("inf")).item())
            elif habit == "each":  # what each parameter has is its own affair
                for p in model.parameters():
                    if p.grad is not None:
                        p.add_(p.grad, alpha=0.5)
            elif habit == "lists":
                ps = [*model.parameters()]
                torch._foreach_lerp_(average, ps, 0.1)
                torch._foreach_copy_(ps, average)
            elif habit == "states":
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    return [*found, {"model": model, "optimizer": optimizer}]


@pytest.mark.share(1)
@pytest.mark.parametrize("ranks", [2, 4])
def test_gradients_that_a_step_leaves_are_absent_with_their_parameters(ranks: int):
    """They were None: a norm was that of one stage, without a word."""
    with pytest.raises(RankError, match=r"item of model\.\d\.0\.weight\.grad .* which stage \d of the pipeline has"):
        run_ranks(_trained, ranks, "norm")


def _saved(habit: str, path: str) -> list[float]:
    *losses, state = _trained(habit)
    oc.save_state_dict(state, path)
    return losses


@pytest.mark.share(2)
@pytest.mark.parametrize("habit", ["each", "lists", "states"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_what_is_done_with_each_parameter_is_one_cards_and_saved(ranks: int, habit: str, tmp_path: Path):
    *losses, state = _trained(habit)
    for found in run_ranks(_saved, ranks, habit, str(tmp_path / "saved")):
        assert found == pytest.approx(losses, rel=1e-5)
    saved = oc.checkpoint.load(tmp_path / "saved")
    for name, value in state["model"].state_dict().items():
        torch.testing.assert_close(saved["model"][name], value, rtol=1e-4, atol=1e-5)
