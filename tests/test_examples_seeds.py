"""examples/seeds: each program against its one-card twin, and the tables that the seeds print."""

from __future__ import annotations

import importlib
import multiprocessing
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from onecard.testing import assert_close, run_ranks

EXAMPLES = Path(__file__).parents[1] / "examples"
SEEDS = EXAMPLES / "seeds"
if str(SEEDS) not in sys.path:  # the ranks import this file too
    sys.path.insert(0, str(SEEDS))

STEPS = 10
SMALL_002 = {"seq_len": 8, "hidden": 64, "inner": 128, "num_samples": 4 * STEPS}
SMALL_003 = {"inner_size": 64, "epoch": 2, "batch_num": STEPS // 2, "base_lr": 0.1}  # the seed's own rate


def load(name: str) -> Any:
    return importlib.import_module(name)


def as_in_a_program() -> None:
    """A rank of a test comes from a fork server, and the workers of its loaders would, slowly."""
    multiprocessing.set_start_method("fork", force=True)


def run_main(name: str, *arguments: str) -> None:
    """What `python examples/seeds/name.py arguments` does."""
    as_in_a_program()
    sys.argv = [name, *arguments]
    runpy.run_path(str(SEEDS / f"{name}.py"), run_name="__main__")


def options(values: dict[str, Any]) -> list[str]:
    return [word for key, value in values.items() for word in (f"--{key.replace('_', '-')}", str(value))]


def assert_losses(ranks: list[list[float]], expected: list[float]) -> None:
    """Equal on all ranks, and to one card to 1e-5.

    The tolerance is relative to the mean size of the losses, because those of seed 002 pass through zero.
    """
    assert len(expected) == STEPS
    assert len({round(loss, 3) for loss in expected}) > STEPS // 2, "a run that stands still compares nothing"
    assert all(losses == ranks[0] for losses in ranks)
    assert_close(torch.tensor(ranks[0]), torch.tensor(expected), rtol=1e-5)


# seed 002


def shard_tensor_on_this_rank() -> tuple[torch.Tensor, tuple[int, ...]]:
    program = load("shard_tensor_002")
    dist_tensor = program.shard()
    assert dist_tensor.shape == (4, 3)
    assert_close(dist_tensor, program.dense_tensor)
    return dist_tensor.to_local(), dist_tensor.layout.local_offset(dist_tensor.shape)


def test_six_ranks_hold_two_by_one_each() -> None:
    parts = run_ranks(shard_tensor_on_this_rank, 6)
    assert [tuple(local.shape) for local, _ in parts] == [(2, 1)] * 6
    for x, row in enumerate([[2, 4, 5], [0, 1, 3]]):
        for y, rank in enumerate(row):
            expected = torch.tensor([[6 * x + y + 1], [6 * x + y + 4]])
            assert torch.equal(parts[rank][0], expected) and parts[rank][1] == (2 * x, y)


def reshard_on_this_rank() -> list[torch.Tensor]:
    program = load("reshard_002")
    before, within = program.reshard(program.mesh0)
    _, across = program.reshard(program.mesh1)
    assert [str(x.placements[0]) for x in (before, within, across)] == ["R", "S(0)", "S(0)"]
    assert within.mesh is before.mesh is program.mesh0 and across.mesh is program.mesh1
    return [x.to_local() for x in (before, within, across)]


def test_reshard_from_replicate_to_shard() -> None:
    whole = torch.tensor([[1, 2, 3], [4, 5, 6]])
    held = [[part.tolist() for part in parts] for parts in run_ranks(reshard_on_this_rank, 4)]
    for rank in (0, 1):
        assert held[rank] == [whole.tolist(), whole[rank : rank + 1].tolist(), []]
        assert held[2 + rank] == [[], [], whole[rank : rank + 1].tolist()]


def matmul_relu_on_this_rank() -> list[str]:
    program = load("matmul_relu_002")
    C, D, report = program.run()
    expected = program.matmul_relu(program.dense_tensorA, program.dense_tensorB)
    assert_close((C, D), expected)
    return [f"{m.operator}: {m.step.kind} {m.step.bytes}" for m in report.messages]


def test_matmul_relu() -> None:
    assert run_ranks(matmul_relu_on_this_rank, 2) == [["mm: slice 0", "relu: all_reduce 16"]] * 2


def train_002(name: str, arguments: dict[str, Any]) -> list[float]:
    return load(name).train_model(**arguments)


@pytest.mark.share(1)
@pytest.mark.parametrize(
    ("name", "more"),
    [("data_parallel_002", {}), ("data_parallel_002", {"shard_reading": True}), ("tensor_parallel_002", {})],
)
def test_mlp_of_seed_002(name: str, more: dict[str, Any]) -> None:
    ranks = run_ranks(train_002, 4, name, SMALL_002 | more)
    assert_losses(ranks, train_002("single_card_002", SMALL_002))


@pytest.mark.proof
@pytest.mark.share(1)
@pytest.mark.parametrize("name", ["pipeline_parallel_002", "hybrid_parallel_002"])
def test_two_stages_of_seed_002(name: str) -> None:
    ranks = run_ranks(train_002, 8, name, SMALL_002)
    assert_losses(ranks, train_002("single_card_002", SMALL_002))


def local_shapes_002(name: str) -> list[tuple[int, ...]]:
    model = load(name).MlpModel(8, 12)
    x = torch.ones(4, 2, 8)
    z = model(x)
    return [tuple(getattr(t, "_local", t).shape) for t in (model.w0, model.w1, z)] + [str(z.placements[0])]


@pytest.mark.proof
def test_what_each_rank_of_seed_002_holds() -> None:
    assert run_ranks(local_shapes_002, 4, "data_parallel_002") == [[(8, 12), (12, 8), (1, 2, 8), "S(0)"]] * 4
    assert run_ranks(local_shapes_002, 4, "tensor_parallel_002") == [[(8, 3), (3, 8), (4, 2, 8), "P(sum)"]] * 4
    first, second = run_ranks(local_shapes_002, 8, "hybrid_parallel_002")[::4]
    assert first == [(8, 6), (0,), (0,), "S(0)"] and second == [(0,), (6, 8), (2, 2, 8), "S(0)"]


# seed 003


def train_003(name: str, arguments: dict[str, Any]) -> list[float]:
    program = load(name)
    return program.train_model(program.TrainArgs(**arguments))


def train_003_on_this_rank(name: str, arguments: dict[str, Any]) -> list[float]:
    as_in_a_program()
    return train_003(name, arguments)


@pytest.mark.share(1)
@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("static_data_parallel_003", {}),
        ("static_model_parallel_003", {}),
        ("static_pipeline_parallel_003", {}),
        ("static_group_sharded_003", {"stage": 3}),  # all of them on four ranks, below
        ("semi_auto_data_parallel_003", {}),
        ("semi_auto_model_parallel_003", {}),
        ("semi_auto_pipeline_parallel_003", {}),
        ("manual_data_parallel_003", {}),
        *[("manual_group_sharded_003", {"level": level}) for level in ("os", "os_g", "p_g_os")],
        *[("semi_auto_group_sharded_003", {"stage": stage}) for stage in (1, 2, 3)],
    ],
)
def test_net_of_seed_003(name: str, more: dict[str, Any], capfd: pytest.CaptureFixture[str]) -> None:
    expected = train_003("single_card_003", SMALL_003)
    printed = capfd.readouterr().out.splitlines()
    assert_losses(run_ranks(train_003_on_this_rank, 2, name, SMALL_003 | more), expected)
    # Accuracies included, which the seed could not compute on a mesh.
    assert [
        line.removeprefix("[rank 1] ") for line in capfd.readouterr().out.splitlines() if "[rank 1]" in line
    ] == printed
    assert len(printed) == 2
    form = r"\[Epoch \d, batch 0\] loss: \d\.\d{5}, acc1: [01]\.\d{5}, acc5: [01]\.\d{5}"
    assert all(re.fullmatch(form, line) for line in printed)


def static_003_on_this_rank() -> list[list[float]]:
    """Twenty steps on four ranks: data parallel, and two copies of what two ranks divide."""
    as_in_a_program()
    twenty = SMALL_003 | {"batch_num": 10}
    return [train_003("static_data_parallel_003", twenty)] + [
        train_003("static_group_sharded_003", twenty | {"stage": stage}) for stage in (1, 2, 3)
    ]


@pytest.mark.proof
def test_static_programs_of_seed_003_on_four_ranks() -> None:
    expected = train_003("single_card_003", SMALL_003 | {"batch_num": 10})
    for runs in run_ranks(static_003_on_this_rank, 4):
        for losses in runs:
            assert len(losses) == 20 and losses == pytest.approx(expected, rel=1e-5)


def parameter_shapes_003() -> dict[str, tuple[int, ...]]:
    net = load("semi_auto_model_parallel_003").SimpleNet(6, 8, 4)
    return {name: tuple(getattr(p, "_local", p).shape) for name, p in net.named_parameters()}


def test_what_each_rank_of_seed_003_holds() -> None:
    shapes = {"linear1.weight": (4, 6), "linear1.bias": (4,), "linear2.weight": (6, 4), "linear2.bias": (6,)}
    shapes |= {"linear3.weight": (4, 6), "linear3.bias": (4,)}
    assert run_ranks(parameter_shapes_003, 2) == [shapes] * 2


# seed 000

TABLES = {
    "static": [11.943981, -2.2283082, -13.341571, -29.284101, -63.219418],
    "dynamic": [0.0, -0.14513375, -0.2902736, -0.43542737, -0.5806184],
}


def train_000(program: str) -> tuple[list[float], list[float]]:
    return load("model_parallel_000").train_model(program)


@pytest.mark.parametrize("program", ["static", "dynamic"])
def test_losses_that_seed_000_prints(program: str, capfd: pytest.CaptureFixture[str]) -> None:
    table = pytest.approx(TABLES[program], rel=1e-5, abs=1e-6 if program == "dynamic" else 0)
    for mp_losses, single_losses in run_ranks(train_000, 2, program):
        assert mp_losses == table
        assert single_losses == table
    lines = [line for line in capfd.readouterr().out.splitlines() if line.startswith("[rank 0] mp_loss: ")]
    assert len(lines) == 5 and all("single_loss: " in line for line in lines)


def parameter_shapes_000() -> dict[str, tuple[int, ...]]:
    program = load("model_parallel_000")
    np_fc1, np_fc2 = program.first_weights(program.np.random.RandomState(0))
    net = program.SimpleMPNet(np_fc1, np_fc2, 0.1)
    return {name: tuple(p.to_local().shape) for name, p in net.named_parameters() if "linear3" not in name}


def test_what_each_rank_of_seed_000_holds() -> None:
    shapes = {"embedding.weight": (10, 10), "linear1.weight": (4, 10), "linear1.bias": (4,)}
    shapes |= {"linear2.weight": (10, 4), "linear2.bias": (10,)}
    assert run_ranks(parameter_shapes_000, 2) == [shapes] * 2


# as programs

MAINS = [
    ("shard_tensor_002", 6, [], "local shape (2, 1)"),
    ("reshard_002", 4, [], "after, on ranks [2, 3] DistTensor([2, 3] int64 [x=Shard(0)]"),
    ("matmul_relu_002", 2, [], "all_reduce(sum)"),
    ("single_card_002", 1, options(SMALL_002), "9 "),
    ("data_parallel_002", 4, [*options(SMALL_002), "--shard-reading"], "9 "),
    ("tensor_parallel_002", 4, options(SMALL_002), "9 "),
    ("pipeline_parallel_002", 8, options(SMALL_002), "9 "),
    ("hybrid_parallel_002", 8, options(SMALL_002), "9 "),
    ("single_card_003", 1, options(SMALL_003), "[Epoch 1, batch 0] loss: "),
    ("semi_auto_data_parallel_003", 2, options(SMALL_003), "[Epoch 1, batch 0] loss: "),
    ("semi_auto_model_parallel_003", 2, options(SMALL_003), "[Epoch 1, batch 0] loss: "),
    ("semi_auto_pipeline_parallel_003", 2, options(SMALL_003), "[Epoch 1, batch 0] loss: "),
    ("model_parallel_000", 2, ["--program", "dynamic"], "mp_loss: "),
    ("manual_model_parallel_000", 2, ["--program", "static"], "mp_loss: "),
    ("manual_classifier_001", 2, ["--images", "random", "--epochs", "1"], "epoch 0: loss "),
    ("manual_model_parallel_003", 2, options(SMALL_003), "[Epoch 1, batch 0] loss: "),
    ("manual_data_parallel_003", 2, options(SMALL_003), "[Epoch 1, batch 0] loss: "),
    ("manual_group_sharded_003", 2, [*options(SMALL_003), "--level", "os_g"], "[Epoch 1, batch 0] loss: "),
    ("semi_auto_group_sharded_003", 2, [*options(SMALL_003), "--stage", "2"], "[Epoch 1, batch 0] loss: "),
    ("manual_pipeline_parallel_003", 2, options(SMALL_003), "[Epoch 1, batch 0] loss: "),
    ("static_data_parallel_003", 2, options(SMALL_003), "[Epoch 1, batch 0] loss: "),
    ("static_group_sharded_003", 2, [*options(SMALL_003), "--stage", "2"], "[Epoch 1, batch 0] loss: "),
    ("static_pipeline_parallel_003", 2, options(SMALL_003), "[Epoch 1, batch 0] loss: "),
    ("static_model_parallel_003", 2, options(SMALL_003), "[Epoch 1, batch 0] loss: "),
    ("manual_demos_004", 2, [], "self_attention: out and gradients differ by "),
]


@pytest.mark.share(1)
@pytest.mark.parametrize(("name", "nproc", "arguments", "said"), MAINS)
def test_program(name: str, nproc: int, arguments: list[str], said: str, capfd: pytest.CaptureFixture[str]) -> None:
    run_ranks(run_main, nproc, name, *arguments)
    out = capfd.readouterr().out
    for rank in range(nproc):
        assert any(said in line for line in out.splitlines() if line.startswith(f"[rank {rank}] "))


def test_every_program_is_tested_and_listed() -> None:
    elsewhere = {
        "graphs_003",
        "what_changes_003",
    }  # what draws, what compares: test_static_draw.py, test_what_changes.py
    programs = sorted({path.stem for path in SEEDS.glob("*.py")} - elsewhere)
    assert programs == sorted(name for name, *_ in MAINS)
    text = (EXAMPLES / "README.md").read_text()
    for name, nproc, *_ in MAINS:
        launcher = "python" if nproc == 1 else f"onecard run --nproc_per_node {nproc}"
        assert f"{launcher} examples/seeds/{name}.py" in text
        assert f"{launcher} examples/seeds/{name}.py" in (SEEDS / f"{name}.py").read_text()
