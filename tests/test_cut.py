"""Pipelines cut out of recorded steps: programs that nobody prepared, under any schedule, against one card."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from amounts import PROOF, patience
from cut_programs import MODELS, K, trained
from torch import Tensor, nn

import onecard as oc
from onecard.comm.issue import staged
from onecard.testing import run_ranks

MODES = ["F-then-B", "1F1B", "VPP", "ZBH1", "ZBV"]
SHARE = {"resnet": ["ZBV"]}
"""What `make test` runs; `make proof` runs all. Other schedules, a GPT, a U-Net and other axes are in test_cut_beside.py."""


TIED = {"gpt": {"embedding.weight"}, "llama": {"model.embed_tokens.weight"}, "t5": {"shared.weight"}}
"""Parameters that more than one stage reads."""


def _each_cell(cells: dict[str, list[str]]) -> tuple[list[str], dict[str, list[str]]]:
    """On each rank: what is not as on one card; of each cell the parameters that are here."""
    wrong, held = [], {}
    for name, modes in cells.items():
        reference, *_ = trained(name)
        for mode in modes:
            found, model, run = trained(name, oc.Stages(K, schedule=mode))
            for one, other in zip(reference, found, strict=True):
                if not torch.allclose(torch.tensor(one), torch.tensor(other), rtol=1e-5):
                    wrong.append(f"{name} {mode}: {one} on one card, {other}")
            held[f"{name} {mode}"] = [path for path, p in model.named_parameters() if p.untyped_storage().nbytes()]
            if len(run.recordings) != 1:
                wrong.append(f"{name} {mode}: {len(run.recordings)} recordings")
    return wrong, held


@pytest.mark.proof
@pytest.mark.parametrize(("ranks", "name"), [(n, name) for n in (2, 4) for name in MODELS] if PROOF else [(2, "")])
def test_models_as_on_one_card(ranks, name):
    """No rank holds more than its stages: each parameter is on one of them, but for tied ones."""
    cells = {name: MODES} if name else SHARE
    found = run_ranks(_each_cell, ranks, cells, timeout=patience(300.0))
    assert [wrong for wrong, _ in found if wrong] == []
    for cell in found[0][1]:
        homes = Counter(path for _, held in found for path in held[cell])
        model = cell.split()[0]
        assert {path for path, count in homes.items() if count > 1} <= TIED.get(model, set()), cell
        assert len(homes) == len([*MODELS[model][0]().named_parameters()]), cell


class Notes(nn.Module):
    """As a library's model, which notes at its first call which kind of labels it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.kind = nn.ModuleList(nn.Linear(4, 4) for _ in range(2)), None

    def forward(self, x: Tensor) -> Tensor:
        if self.kind is None:
            self.kind = "one number"
        return self.layers[1](self.layers[0](x).tanh()) if self.kind == "one number" else x


def _notes_once(stages: bool) -> tuple[list[float], int]:
    torch.manual_seed(0)
    model = Notes()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    run = oc.to_static(step, stages=oc.Stages(2)) if stages else step
    losses = [float(run(torch.arange(16.0).view(4, 4) / 16)) for _ in range(3)]
    return losses, len(run.recordings) if stages else 0


def test_a_step_that_notes_something_once_in_python():
    wanted, _ = _notes_once(False)
    for found, recordings in run_ranks(_notes_once, 2, True):
        assert found == pytest.approx(wanted, rel=1e-5) and recordings == 1


def _sends_and_sums() -> tuple[int, int, int]:
    """Messages of a rank's graph, those of several values, and products that are added where the sum is."""
    *_, run = trained("gpt", oc.Stages(K, schedule="1F1B"))
    targets = [n.target for n in run.recordings[0].graph.nodes]
    packed = targets.count(staged.send_packed)
    return targets.count(staged.send) + packed, packed, targets.count(torch.ops.aten.addmm_.default)


@pytest.mark.proof
def test_few_messages_and_products():
    for sends, packed, products in run_ranks(_sends_and_sums, 2):
        assert packed >= 1
        assert sends <= K + 4  # a value of each microbatch, and the tail's
        assert products >= K - 1


def _fine_tuned() -> tuple[list[float], list[float]]:
    """Losses of a net whose batch norm takes its statistics as they are; in two stages, and on one card."""

    def losses(stages: bool) -> list[float]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))
        net[1].eval()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

        def step(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = net(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        run = oc.to_static(step, stages=oc.Stages(K, schedule="1F1B")) if stages else step
        return [run(torch.randn(8, 6)).item() for _ in range(3)]

    return losses(True), losses(False)


@pytest.mark.proof
def test_batch_norm_that_is_frozen():
    for found, wanted in run_ranks(_fine_tuned, 2):
        assert found == pytest.approx(wanted, rel=1e-5)


class TurnedBlock(nn.Module):
    """Its result is a view with time first in memory, of which the gradient is none of kernels that make contiguous ones."""

    def __init__(self, inside: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.norm, self.inside = nn.Linear(8, 8), nn.LayerNorm(8), inside

    def forward(self, x: Tensor) -> Tensor:
        made = self.layer(self.norm(x)).transpose(0, 1).reshape(-1, 8)
        return self.inside(made).view(x.shape[1], x.shape[0], 8).transpose(0, 1)


LOSSES = [F.mse_loss, F.smooth_l1_loss, F.huber_loss, lambda x, y: F.binary_cross_entropy(x.sigmoid(), y.sigmoid())]


def _time_major(loss: Callable[..., Tensor], stages: bool) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(*(TurnedBlock(f) for f in (torch.tanh, F.hardtanh, F.logsigmoid, F.hardswish)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor, y: Tensor) -> Tensor:
        found = loss(model(x), y)
        found.backward()
        optimizer.step()
        optimizer.zero_grad()
        return found.detach()

    run = oc.to_static(step, stages=oc.Stages(K, schedule="1F1B")) if stages else step
    draw = torch.Generator().manual_seed(9)
    return [run(*torch.randn(2, 8, 3, 8, generator=draw)).item() for _ in range(3)]


def _all_time_major() -> list[tuple[list[float], list[float]]]:
    return [(_time_major(loss, True), _time_major(loss, False)) for loss in LOSSES]


def test_strides_that_only_kernels_know():
    """A step is written down without data, where torch gives some gradients other strides than its kernels do."""
    for pairs in run_ranks(_all_time_major, 2):
        for found, wanted in pairs:
            assert found == pytest.approx(wanted, rel=1e-5)
