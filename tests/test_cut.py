"""Pipelines cut out of recorded steps: programs that nobody prepared, under any schedule, against one card."""

from __future__ import annotations

import pytest
import torch
from amounts import PROOF, patience
from cut_programs import MODELS, K, trained

import onecard as oc
from onecard.comm.issue import staged
from onecard.testing import run_ranks

MODES = ["F-then-B", "1F1B", "VPP", "ZBH1", "ZBV"]
SHARE = {"gpt": ["F-then-B"], "resnet": ["ZBV"], "t5": ["VPP"]}
"""What `make test` runs; `make proof` runs all. 1F1B and ZBH1, a U-Net and other axes are in test_cut_beside.py."""


def _each_cell(cells: dict[str, list[str]]) -> list[str]:
    """On each rank: what is not as on one card."""
    wrong = []
    for name, modes in cells.items():
        reference, *_ = trained(name)
        for mode in modes:
            found, model, run = trained(name, oc.Stages(K, schedule=mode))
            for one, other in zip(reference, found, strict=True):
                if not torch.allclose(torch.tensor(one), torch.tensor(other), rtol=1e-5):
                    wrong.append(f"{name} {mode}: {one} on one card, {other}")
            held = sum(p.untyped_storage().nbytes() for p in model.parameters())
            if held > 0.7 * sum(p.nbytes for p in model.parameters()):
                wrong.append(f"{name} {mode}: {held} bytes of parameters are here")
            if len(run.recordings) != 1:
                wrong.append(f"{name} {mode}: {len(run.recordings)} recordings")
    return wrong


@pytest.mark.parametrize(("ranks", "name"), [(n, name) for n in (2, 4) for name in MODELS] if PROOF else [(2, "")])
def test_models_as_on_one_card(ranks, name):
    cells = {name: MODES} if name else SHARE
    for found in run_ranks(_each_cell, ranks, cells, timeout=patience(300.0)):
        assert found == []


def _sends_and_sums() -> tuple[int, int, int]:
    """Messages of a rank's graph, those of several values, and products that are added where the sum is."""
    *_, run = trained("gpt", oc.Stages(K, schedule="1F1B"))
    targets = [n.target for n in run.recordings[0].graph.nodes]
    packed = targets.count(staged.send_packed)
    return targets.count(staged.send) + packed, packed, targets.count(torch.ops.aten.addmm_.default)


def test_few_messages_and_products():
    for sends, packed, products in run_ranks(_sends_and_sums, 2):
        assert packed >= 1
        assert sends <= K + 4  # a value of each microbatch, and the tail's
        assert products >= K - 1
