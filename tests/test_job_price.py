"""The price of a job, composed of pieces, beside the recording of the whole step of one rank."""

from __future__ import annotations

import pytest
import torch

import onecard as oc
from onecard import fleet
from onecard.plan.decoder import build

A100 = oc.Machine.preset("A100")
SIZES = oc.Transformer(layers=7, hidden=256, heads=8, vocab=1024, sequence=128)
LLAMA = oc.Transformer(
    layers=6, hidden=256, heads=8, kv_heads=4, ffn=640, gated=True, vocab=512, sequence=64, norm="rms", positions="rotary",
    bias=False,
)  # fmt: skip


def whole(sizes: oc.Transformer, plan: oc.Plan) -> oc.Recording:
    """Forward and backward of all blocks, as the first rank runs them."""
    with oc.pretend(plan.tp * plan.cp, fake=True):
        strategy = fleet.DistributedStrategy()
        strategy.hybrid_configs = {"mp_degree": plan.tp, "sep_degree": plan.cp}
        fleet.init(is_collective=True, strategy=strategy)
        model = build(sizes, plan)
        tokens = torch.zeros(plan.microbatch, sizes.sequence // plan.cp, dtype=torch.int64)

        def step(x: torch.Tensor, y: torch.Tensor) -> None:
            model(x, y).backward()

        return oc.record(step)(tokens, tokens)


PLANS = [
    (SIZES, {}),
    (SIZES, {"tp": 2, "sequence_parallel": True, "microbatch": 2}),
    (SIZES, {"tp": 4, "recompute": "full"}),
    (SIZES, {"tp": 2, "recompute": "selective", "sequence_parallel": True}),
    (LLAMA, {"tp": 2, "microbatch": 3}),
    (LLAMA, {"cp": 2, "tp": 2}),
]


@pytest.mark.parametrize(("sizes", "given"), PLANS)
def test_pieces_add_up_to_the_whole_step(sizes, given):
    plan = oc.Plan(gradients="bfloat16", master=False, **given)
    real = whole(sizes, plan).cost(oc.Machine.preset("A100"))
    found = oc.price(sizes, plan, A100)
    (rank,) = found.ranks
    assert sum(found.terms.values()) == pytest.approx(found.seconds, rel=1e-9)
    forward_and_backward = found.seconds - rank.terms["optimizer"] - rank.terms.get("messages along 'dp'", 0.0)
    assert forward_and_backward == pytest.approx(real.seconds, rel=0.005)
    assert found.hardware_flops == pytest.approx(real.flops * plan.tp * plan.cp, rel=1e-9)
    sent = {{"mp": "tp", "sep": "cp"}[axis]: count for axis, count in real.sent.items()}
    assert {axis: count for axis, count in rank.sent.items() if axis != "dp"} == sent
    assert rank.peak - rank.memory["states"] - rank.memory["buffers"] == pytest.approx(real.peak, rel=0.01)
