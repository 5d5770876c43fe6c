"""A GPT's training step on pretended ranks: decisions, layouts and messages are those of real ranks, and leave no trace."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import onecard as oc
from onecard.machine.cost import Machine
from onecard.tensor.dispatch.entry import programs
from onecard.tensor.dispatch.program import Compared
from onecard.testing import assert_close, run_ranks

GPT_FOLDER = Path(__file__).parents[1] / "examples" / "gpt"
Seen = dict[str, Any]


def load(name: str) -> ModuleType:
    """A module of the example, under a name of its own."""
    spec: Any = importlib.util.spec_from_file_location(f"example_gpt_{name}", GPT_FOLDER / f"{name}.py")
    sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


gpt = load("model"), load("placements")


def step(mesh: oc.ProcessMesh, model: nn.Module, ids: Tensor) -> tuple[float, Seen]:
    """Forward, backward, clipping and AdamW on a mesh: the loss, and what was decided for it on this rank."""
    model_file, placements = gpt
    programs.here.forget()
    placements.shard_model(model, mesh)
    optimizer = oc.shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.1))
    with oc.explain() as report:
        inputs, targets = placements.shard_batch((ids[:, :-1], ids[:, 1:]), mesh)
        loss = model_file.next_byte_loss(model(inputs), targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    value = 0.0 if loss.is_meta else loss.item()
    return value, {
        "messages": [(m.operator, m.operand, m.shape, m.reason, *described(m.step)) for m in report.messages],
        "decisions": [decided(program) for program in programs.here.values()],
        "layouts": {name: laid_out(p, optimizer.state[p]["exp_avg"]) for name, p in model.named_parameters()},
        "parts": {name: tuple(p.to_local().shape) for name, p in model.named_parameters()},
    }


def described(s: Any) -> tuple[Any, ...]:
    return s.kind, s.axis, s.dim, s.to_dim, s.op, s.bytes, round(s.seconds * 1e9), str(s.source), str(s.target)


def decided(program: Any) -> Any:
    if isinstance(program, Compared):  # where there are others to compare numbers with
        program = program.program
    if not hasattr(program, "specs"):
        return type(program).__name__
    moves = [(path, str(target), name) for path, target, name in program.moves]
    return program.name, [str(spec) for spec in program.specs], moves, program.reason


def laid_out(p: Any, state: Any) -> tuple[str, ...]:
    return tuple(str(x.layout) for x in (p, p.grad, state))


def pretended(
    size: int, rank: int, mesh: oc.ProcessMesh, batch: int, device: str, machine: Machine | None = None
) -> Seen:
    with oc.pretend(world_size=size, rank=rank, machine=machine):
        with torch.device(device):
            model, ids = small_gpt(mesh.shape[-1]), torch.zeros(batch, 9, dtype=torch.long)
        seen = step(mesh, model, ids)[1]
        assert {p.to_local().device.type for p in model.parameters()} == {device}
    return seen


def small_gpt(heads: int) -> nn.Module:
    return gpt[0].GPT(gpt[0].GPTConfig(vocab_size=50, max_seq_len=8, n_layer=1, n_head=heads, d_model=2 * heads))


def unsized(messages: list[Any]) -> list[Any]:
    """Messages without the sizes of buckets, which hold what the rank has: the last rank of an axis may have less."""
    return [m if "bucket" not in m[3] else (*m[:2], *m[3:9], *m[11:]) for m in messages]


@pytest.mark.proof
def test_ranks_of_64_that_are_pretended_decide_alike() -> None:
    """dp=8 x tp=8: one program, so one list of decisions and messages; each rank has its own part, of 50 words an uneven one.

    The first row of the mesh, its first column and its diagonal: each place on each axis, alone and with the other axis'.
    """
    mesh = oc.ProcessMesh(torch.arange(64).view(8, 8), ["dp", "tp"])
    before, known = torch.get_rng_state(), [*programs.here.values()]
    ranks = [rank for rank in range(64) if rank < 8 or rank % 8 in (0, rank // 8)]
    seen = {rank: pretended(64, rank, mesh, 12, "cpu") for rank in ranks}
    assert torch.equal(torch.get_rng_state(), before) and not dist.is_initialized()
    assert [*programs.here.values()] == known
    first = seen[0]
    assert len(first["messages"]) > 20 and len(first["decisions"]) > 100
    for rank, other in seen.items():
        assert (other["decisions"], other["layouts"]) == (first["decisions"], first["layouts"]), rank
        assert other["messages"] == seen[rank % 8]["messages"], rank  # ranks that reduce together
        assert unsized(other["messages"]) == unsized(first["messages"]), rank
        assert other["parts"]["token_embedding.weight"] == ((7, 16) if rank % 8 < 7 else (1, 16))
        assert other["parts"]["blocks.0.mlp.proj.weight"] == (16, 8)


def test_without_memory() -> None:
    """On the meta device, of a world that is far too large for this machine; what rank 17 holds is what the layouts say."""
    mesh = oc.ProcessMesh(torch.arange(1024).view(128, 8), ["dp", "tp"])
    seen = pretended(1024, 17, mesh, 256, "meta")
    other = pretended(1024, 1023, mesh, 256, "meta")
    assert seen["parts"]["token_embedding.weight"] == (7, 16) and other["parts"]["token_embedding.weight"] == (1, 16)
    assert {what for what in seen if seen[what] != other[what]} == {"parts"}
    layout = oc.Layout.of(mesh, 2, [oc.Replicate(), oc.Shard(0)])
    assert layout.local_shape((50, 16), mesh.coordinate(17)) == (7, 16)
    assert layout.local_shape((50, 16), mesh.coordinate(1023)) == (1, 16)


def plain_step(model: nn.Module, ids: Tensor) -> float:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    loss = gpt[0].next_byte_loss(model(ids[:, :-1]), ids[:, 1:])
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.item()


def pretend_then_run() -> Seen:
    """A real rank that has been others before: as many as its number says, with groups of the same names as the real ones."""
    me, mesh = dist.get_rank(), oc.ProcessMesh([[0, 1], [2, 3]], ["dp", "tp"])
    group = dist.group.WORLD
    named = oc.shard_tensor(torch.ones(4, requires_grad=True), mesh, [oc.Shard(0), oc.Replicate()])
    state = torch.manual_seed(3).get_state()
    for rank in range(me + 1):
        pretended(4, rank, mesh, 6, "cpu")
        assert (dist.get_rank(), dist.group.WORLD) == (me, group) and torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(0)
    model, ids = small_gpt(2), torch.randint(50, (6, 9))
    plain = small_gpt(2)
    plain.load_state_dict(model.state_dict())
    expected = plain_step(plain, ids)
    loss, seen = step(mesh, model, ids)
    assert_close(torch.tensor(loss), torch.tensor(expected))
    for whole, p in zip(plain.parameters(), model.parameters(), strict=True):
        assert_close(p.full_tensor(), whole, rtol=1e-4, atol=1e-5)
    assert (named * 2).full_tensor().sum() == 8
    return seen


@pytest.mark.proof
def test_pretended_ranks_are_as_real_ones_and_leave_them_alone() -> None:
    mesh = oc.ProcessMesh([[0, 1], [2, 3]], ["dp", "tp"])
    for rank, real in enumerate(run_ranks(pretend_then_run, 4)):
        seen = pretended(4, rank, mesh, 6, "cpu")
        assert [what for what in seen if seen[what] != real[what]] == [], rank


def kinds_and_seconds(machine: Machine | None) -> tuple[list[str], float]:
    mesh = oc.ProcessMesh([0, 1], ["x"])
    with oc.pretend(2, 1, machine), oc.explain() as report:
        x = oc.shard_tensor(torch.ones(64, 64), mesh, [oc.Shard(1)])
        torch.relu(x @ oc.shard_tensor(torch.ones(64, 4096), mesh, [oc.Replicate()]))
    return [m.step.kind for m in report.messages if m.step.bytes], report.seconds


def test_another_machine_decides_otherwise() -> None:
    """Where products are slow, the ranks divide them, and add; where they are fast, each makes all of its own."""
    assert kinds_and_seconds(Machine(flops=1e9))[0] == ["all_reduce"]
    assert kinds_and_seconds(Machine(flops=1e15))[0] == ["all_gather"]
    usual = kinds_and_seconds(None)
    assert usual[1] < 0.01 < 1 < kinds_and_seconds(Machine(latency=1.0))[1]
    assert kinds_and_seconds(None) == usual
