"""Runs a pipeline on 2 ranks and keeps when each rank computed what: measured.json, which make.py draws."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from onecard import fleet
from onecard.testing import run_ranks


def run(mode: str, microbatches: int) -> list[tuple[int, str, float, float]]:
    """The last of some steps of a stack of layers; times in ms."""
    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = {"pp_degree": 2}
    strategy.pipeline_configs = {"accumulate_steps": microbatches, "micro_batch_size": 64, "schedule_mode": mode}
    fleet.init(strategy=strategy)
    torch.manual_seed(0)
    layers = [fleet.LayerDesc(nn.Linear, 512, 512) if i % 2 else nn.GELU() for i in range(16)]
    model = fleet.distributed_model(fleet.PipelineLayer(layers, loss_fn=F.mse_loss))
    x = torch.randn(64 * microbatches, 512)
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.01))
    for _ in range(6):
        model.train_batch([x, x], optimizer)
    spans = model.timeline().spans
    begin = min(span.start for span in spans)
    return [
        (s.rank, str(s.action), round(1000 * (s.start - begin), 3), round(1000 * (s.end - begin), 3)) for s in spans
    ]


if __name__ == "__main__":
    made = {mode: run_ranks(run, 2, mode, 6)[0] for mode in ("1F1B", "ZBH1")}
    path = Path(__file__).with_name("measured.json")
    path.write_text(json.dumps(made).replace("]], ", "]],\n") + "\n", encoding="utf-8")
