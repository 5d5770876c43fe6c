"""Models that nobody here wrote, recorded: Hugging Face transformers, four steps of AdamW on two ranks, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from amounts import share

import onecard as oc
from onecard.testing import run_ranks

pytest.importorskip("transformers", reason="pip install onecard[test]")

from static_programs import held
from test_models import MODELS, column_row

STEPS = 4


def losses(name: str, how: str, static: bool) -> tuple[list[Any], list[Any], int]:
    mesh = oc.ProcessMesh([0, 1], ["x"])
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    model.set_attn_implementation("sdpa")
    model.train()
    oc.shard_layer(model, mesh, None if how == "dp" else column_row)
    given = {k: oc.shard_tensor(v, mesh, [oc.Shard(0) if how == "dp" else oc.Replicate()]) for k, v in inputs.items()}
    optimizer = oc.shard_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)

    def step(**inputs: Any) -> Any:
        optimizer.zero_grad()
        loss = model(**inputs).loss
        loss.backward()
        optimizer.step()
        return loss.detach()

    run = oc.to_static(step, ask=True) if static else step
    found = []
    for _ in range(STEPS):
        found.append(held(run(**given)))
        schedule.step()
    return found, [held(p) for p in model.parameters()], len(run.recordings) if static else 0


BOTH = ("gpt2", "mixtral")  # of the others one way each: recordings of Hugging Face's models take their time


CASES = [(name, how) for name in ("gpt2", "llama", "bert", "t5", "vit", "mixtral")
         for how in (("dp", "tp") if name in BOTH else ("dp",) if name in ("bert", "vit") else ("tp",))]  # fmt: skip


def compare(cases: list[tuple[str, str]]) -> dict[str, str]:
    said = {}
    for name, how in cases:
        try:
            (a, p, _), (b, q, count) = losses(name, how, False), losses(name, how, True)
            same = all(torch.equal(x, y) for x, y in zip((*a, *p), (*b, *q), strict=True))
            said[f"{name} {how}"] = "" if same and count == 1 else f"same {same}, {count} recordings"
        except Exception as fault:
            said[f"{name} {how}"] = f"{type(fault).__name__}: {fault}"
    return said


@pytest.mark.proof
def test_models_are_recorded() -> None:
    found = run_ranks(compare, 2, share(CASES, 2))
    assert {case: why for case, why in found[0].items() if why} == {}
