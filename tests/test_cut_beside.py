"""Pipelines cut out of recorded steps beside all else: other axes, ZeRO, half precision, optimizers, evaluation, checkpoints."""

from __future__ import annotations

import time
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from amounts import PROOF, patience
from cut_programs import GPT, MODELS, K, trained
from torch import Tensor, nn

import onecard as oc
from onecard.testing import RankError, run_ranks


class Program:
    """A GPT's training, on one card or as a pipeline."""

    def __init__(self, stages: Any = None, mesh: Any = None, zero: Any = None, kind: str = "") -> None:
        torch.manual_seed(0)
        self.stages, self.mesh, self.kind, self.model = stages, mesh, kind, GPT()
        self.average = GPT() if "ema" in kind else None
        if mesh is not None:
            self._lay_out()
        foreach, fused = "foreach" in kind or None, "fused" in kind or None
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, eps=1e-4, foreach=foreach, fused=fused)
        if mesh is not None:
            self.optimizer = oc.shard_optimizer(self.optimizer, zero)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled="scaler" in kind)
        self.rate = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.9)
        self.run = self.step if stages is None else oc.to_static(self.step, stages=stages)

    def _lay_out(self) -> None:
        known: dict[int, Any] = {}
        cut = {"qkv.weight": 0, "qkv.bias": 0, "out.weight": 1} if "tp" in self.mesh.dim_names else {}

        def place(name: str, layer: nn.Module, mesh: Any) -> None:
            for short, p in list(layer.named_parameters(recurse=False)):
                dim = cut.get(f"{name.split('.')[-1]}.{short}")
                where = [oc.Replicate(), oc.Replicate() if dim is None else oc.Shard(dim)]
                if not isinstance(p, oc.DistTensor):
                    known.setdefault(id(p), nn.Parameter(oc.shard_tensor(p, mesh, where)))
                    setattr(layer, short, known[id(p)])

        oc.shard_layer(self.model, self.mesh, place)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled="amp" in self.kind):
            return F.cross_entropy(self.model(x).flatten(0, 1).float(), y.flatten())

    def finish(self) -> Tensor:
        self.scaler.unscale_(self.optimizer)
        if "decay" in self.kind:  # beside dp only the first rank adds it to the pending sum
            for p in self.model.parameters():
                p.grad.add_(p.detach(), alpha=0.1)
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        if self.average is not None:
            with torch.no_grad():
                for a, p in zip(self.average.parameters(), self.model.parameters(), strict=True):
                    a.lerp_(p, 0.1)
        return norm

    def step(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        loss = self.loss(x, y)
        self.scaler.scale(loss).backward()
        return loss.detach(), self.finish()

    def trained(self, steps: range, rows: tuple[int, ...] = (16,)) -> list[list[float]]:
        found = []
        for i in steps:
            torch.manual_seed(i)
            n = rows[i % len(rows)]
            x, y = torch.randint(10, (n, 3)), torch.randint(10, (n, 3))
            if self.stages is None:
                with oc.one_card_random():
                    found.append([float(v) for v in self.step(x, y)])
            else:
                if self.mesh is not None:
                    rows_of = oc.Shard(0) if "dp" in self.mesh.dim_names else oc.Replicate()
                    x, y = (oc.shard_tensor(t, self.mesh, [oc.Replicate(), rows_of]) for t in (x, y))
                found.append([float(v) for v in self.run(x, y)])
            self.rate.step()
        return found


def close(one: Any, other: Any, rtol: float = 1e-5) -> bool:
    return torch.allclose(torch.tensor(one), torch.tensor(other), rtol=rtol)


ZERO = {"dp": None, "zero1": oc.ShardingStage1, "zero2": oc.ShardingStage2, "zero3": oc.ShardingStage3}


def _beside_axes(cells: list[tuple[str, str]]) -> list[str]:
    wrong = []
    for kind, mode in cells:
        axis = "tp" if kind == "tp" else "dp"
        mesh, make = oc.ProcessMesh([[0, 1], [2, 3]], ["pp", axis]), ZERO.get(kind)
        found = Program(oc.Stages(K, schedule=mode), mesh, make and make("dp")).trained(range(3))
        if not close(found, Program().trained(range(3))):
            wrong.append(f"{kind} {mode}: {found}")
    return wrong


@pytest.mark.proof
@pytest.mark.parametrize("kind", (*ZERO, "tp") if PROOF else ["zero3"])
def test_other_axes_and_zero(kind):
    cells = [(kind, mode) for mode in (MODES if PROOF else ["ZBV"])]
    for found in run_ranks(_beside_axes, 4, cells, timeout=patience(300.0)):
        assert found == []


def _beside_habits(kinds: list[str]) -> list[str]:
    wrong = []
    for kind in kinds:
        found = Program(oc.Stages(K, schedule="ZBH1"), kind=kind).trained(range(3))
        # In bfloat16 the gradients of four microbatches are rounded apart.
        if not close(found, Program(kind=kind).trained(range(3)), 1e-3 if "amp" in kind else 1e-5):
            wrong.append(f"{kind}: {found}")
    return wrong


@pytest.mark.proof
def test_habits():
    kinds = ["fused scaler amp"]
    if PROOF:
        kinds += ["", "fused", "amp", "ema", "fused scaler", "foreach ema"]
    for found in run_ranks(_beside_habits, 2, kinds, timeout=patience(300.0)):
        assert found == []


def _beside_decay() -> tuple[list[float], list[float]]:
    mesh = oc.ProcessMesh([[0, 1], [2, 3]], ["pp", "dp"])
    found = Program(oc.Stages(K, schedule="1F1B"), mesh, kind="decay").trained(range(3))
    return found, Program(kind="decay").trained(range(3))


@pytest.mark.proof
def test_weight_decay_by_hand_beside_dp():
    for found, expected in run_ranks(_beside_decay, 4, timeout=patience(120.0)):
        assert close(found, expected)


def _attends_with_dropout() -> tuple[list[float], list[float]]:
    x, y = torch.randint(10, (2, 16, 3), generator=torch.Generator().manual_seed(0))
    one, other = Program(), Program()
    planned = oc.to_static(other.step, plan=oc.Plan(dp=2, microbatches=K))
    torch.manual_seed(1)
    with oc.one_card_random():
        expected = [float(v) for v in one.step(x, y)]
    torch.manual_seed(1)
    found = [float(v) for v in planned(x, y)]
    planned(x, y)  # the first call runs as it is; this one is recorded, and each microbatch draws for itself
    return expected, found


@pytest.mark.proof
def test_dropout_in_attention_beside_dp_is_not_doubted():
    """A warning is an error in tests."""
    for expected, found in run_ranks(_attends_with_dropout, 2, timeout=patience(120.0)):
        assert close(found, expected)


def _evaluated(program: Program, evaluate: Any, rows: int) -> Tensor:
    x = torch.arange(3 * rows).view(rows, 3) % 10
    program.model.eval()
    with torch.no_grad(), nullcontext() if program.stages is not None else oc.one_card_random():
        found = evaluate(x)
    program.model.train()
    return found


def _other_steps() -> tuple[list[str], int, dict[str, int]]:
    """Batches of two sizes, and steps without gradients between them: what is wrong; what a step more sends, and is priced."""
    program, one_card = Program(stages := oc.Stages(K, schedule="ZBV")), Program()
    wrong: list[str] = []
    warnings.filterwarnings("ignore", "step is recorded anew")

    @torch.no_grad()
    def evaluate(x: Tensor) -> Tensor:
        return program.model(x)

    recorded = oc.to_static(evaluate, stages=stages)
    for i in range(4):
        found, wanted = program.trained(range(i, i + 1), rows=(16, 8)), one_card.trained(range(i, i + 1), rows=(16, 8))
        if not close(found, wanted):
            wrong.append(f"step {i}: {found}, {wanted}")
        given = _evaluated(program, recorded, 8), _evaluated(one_card, one_card.model, 8)
        if not torch.allclose(*given, rtol=1e-5, atol=1e-5):
            wrong.append(f"evaluation {i}: {given}")
    with oc.explain() as report:
        program.trained(range(4, 5), rows=(16, 8))
    return wrong, report.bytes, dict(program.run.recordings[0].cost().sent)


@pytest.fixture(scope="module")
def other_steps() -> list[tuple[list[str], int, dict[str, int]]]:
    return run_ranks(_other_steps, 2, timeout=patience(300.0))


@pytest.mark.proof
def test_batches_of_other_sizes_and_evaluation(other_steps: list[tuple[list[str], int, dict[str, int]]]) -> None:
    for wrong, *_ in other_steps:
        assert wrong == []


def test_the_price_knows_what_is_sent(other_steps: list[tuple[list[str], int, dict[str, int]]]) -> None:
    for _, sent, cost in other_steps:
        assert cost == {"pp": sent} and sent > 0


def _saved(folder: str) -> list[str]:
    """Saved by a pipeline under the names of one card; loaded by it, by another pipeline, and on one card."""
    wrong = []
    whole = Program()
    wanted = whole.trained(range(4))[2:]
    program = Program(oc.Stages(K))
    program.trained(range(2))
    oc.save_state_dict({"model": program.model, "optimizer": program.optimizer, "rate": program.rate}, folder)
    program.trained(range(7, 8))
    for other in (program, Program(oc.Stages(K, schedule="ZBV")), Program()):
        oc.load_state_dict({"model": other.model, "optimizer": other.optimizer, "rate": other.rate}, folder)
        if not close(other.trained(range(2, 4)), wanted):
            wrong.append(f"{other.stages}")
    return wrong


@pytest.mark.proof
def test_checkpoints_as_of_one_card(tmp_path: Path):
    for found in run_ranks(_saved, 2, str(tmp_path / "saved"), timeout=patience(300.0)):
        assert found == []


def test_a_rank_that_is_no_place_of_the_pipeline():
    stages = oc.Stages(2, ranks=[3])
    with pytest.raises(oc.errors.RecordingError, match=r"ranks=\[3\] names \[3\]; this world has ranks 0 to 0"):
        oc.to_static(lambda x: x * 2, stages=stages)(torch.ones(4))


def _fails_in_a_stage() -> None:
    program = Program(oc.Stages(K))
    program.trained(range(2))
    x = torch.zeros(16, 3, dtype=torch.int64)
    x[9, 1] = 99  # no row of the embedding, in the third microbatch
    program.run(x, x)


@pytest.mark.proof
def test_an_error_in_a_stage_names_it_its_microbatch_and_the_line():
    with pytest.raises(RankError) as caught:
        run_ranks(_fails_in_a_stage, 2, timeout=120.0)
    said = str(caught.value)
    assert "stage 0, forward of microbatch 2" in said and "cut_programs.py" in said and "rank 0" in said


MODES = ("F-then-B", "1F1B", "VPP", "ZBH1", "ZBV")
ZOO = [(name, axis, mode) for name in MODELS for axis in ("dp", "tp") for mode in MODES]
BAR = 1e-5


def _beside_zoo(cells: list[tuple[str, str, str]]) -> dict[str, float]:
    """For each cell the largest relative error of a loss or of a norm of gradients."""
    errors = {}
    for name, axis, mode in cells:
        mesh = oc.ProcessMesh([[0, 1], [2, 3]], ["pp", axis])
        reference, *_ = trained(name, rows_of=2 if axis == "dp" else 1)
        found, model, _ = trained(name, oc.Stages(K, schedule=mode), mesh=mesh)
        cut = any(isinstance(p, oc.DistTensor) and p.placements[1] != oc.Replicate() for p in model.parameters())
        assert cut == (axis == "tp"), f"{name} {axis}: marks"
        pairs = [pair for one, other in zip(reference, found, strict=True) for pair in zip(one, other, strict=True)]
        errors[f"{name} {axis} {mode}"] = max(abs(a - b) / abs(a) for a, b in pairs)
    return errors


@pytest.mark.proof
@pytest.mark.parametrize(
    ("name", "axis"), [(n, a) for n in MODELS for a in ("dp", "tp")] if PROOF else [("unet", "tp")]
)
def test_models_beside_other_axes(name, axis):
    cells = [cell for cell in ZOO if cell[:2] == (name, axis)] if PROOF else [(name, axis, "1F1B")]
    for errors in run_ranks(_beside_zoo, 4, cells, timeout=patience(300.0)):
        assert len(errors) == len(cells) and max(errors.values()) <= BAR, errors


class Sums(nn.Module):
    """Residuals that tp adds to summands: one rank adds them, and the others zeros, so that they have other work."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(8, 8) for _ in range(5))
        self.down = nn.ModuleList(nn.Linear(8, 8) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        for up, down in zip(self.up, self.down, strict=True):
            x = x + down(up(x).tanh())
        return x


class TiedSums(Sums):
    """Where the gradient of the tied weight is whole in the head, and summands at the embedding: the first rank along tp adds the
    two, the others zeros and summands. All have to see a sum of two stages."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(super().forward(self.embedding(x)).tanh(), self.embedding.weight)


def _cut_beside_sums(build: type[Sums]) -> list[list[float]]:
    mesh = oc.ProcessMesh([[0, 1], [2, 3]], ["pp", "tp"])
    found = []
    for stages in (None, oc.Stages(2), oc.Stages(2, schedule="ZBV")):
        torch.manual_seed(0)
        model, x = build(), torch.randn(4, 8)
        if stages is not None:
            for column, row in zip(model.up, model.down, strict=True):
                column.weight = oc.shard_tensor(column.weight, mesh, [oc.Replicate(), oc.Shard(0)])
                column.bias = oc.shard_tensor(column.bias, mesh, [oc.Replicate(), oc.Shard(0)])
                row.weight = oc.shard_tensor(row.weight, mesh, [oc.Replicate(), oc.Shard(1)])
            oc.shard_layer(model, mesh)
            x = oc.shard_tensor(x, mesh, [oc.Replicate(), oc.Replicate()])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: Tensor, model: nn.Module = model, optimizer: torch.optim.Optimizer = optimizer) -> Tensor:
            loss = model(x).square().mean()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        run = step if stages is None else oc.to_static(step, stages=stages)
        found.append([float(run(x)) for _ in range(3)])
    return found


@pytest.mark.proof
@pytest.mark.share(1)
@pytest.mark.parametrize("build", [TiedSums, Sums])
def test_ranks_with_other_work_cut_alike(build):
    for one_card, *found in run_ranks(_cut_beside_sums, 4, build, timeout=120.0):
        assert all(close(one, one_card) for one in found), (one_card, found)


def _refused_by_one() -> tuple[str, float]:
    mesh = oc.ProcessMesh([[0, 1], [2, 3]], ["pp", "tp"])
    model = oc.shard_layer(Sums(), mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    at = ["up.2"] if oc.get_rank() != 3 else ["up.9"]

    def step(x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    run = oc.to_static(step, stages=oc.Stages(2, at=at))
    before = time.monotonic()
    try:
        run(oc.shard_tensor(torch.ones(4, 8), mesh, [oc.Replicate(), oc.Replicate()]))
    except oc.errors.RecordingError as why:
        return str(why), time.monotonic() - before
    return "", 0.0


@pytest.mark.proof
def test_a_refusal_on_one_rank_reaches_all_at_once():
    found = run_ranks(_refused_by_one, 4, timeout=120.0)
    assert "no module of that path" in found[3][0]
    for said, seconds in found[:3]:
        assert "rank(s) [3] could not record this step" in said and seconds < 30, found
