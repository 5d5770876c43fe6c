"""What a plan says of messages: which run beside computation, what stages send, what is gathered in float8."""

from __future__ import annotations

from dataclasses import replace

import pytest

import onecard as oc
from onecard.planning.activations import LayerSizes, formula

A100 = oc.Machine.preset("A100")
SIZES = oc.Transformer(layers=8, hidden=2048, heads=16, vocab=51200, sequence=1024, attention="scores")
PLAN = oc.Plan(tp=4, pp=4, microbatch=2, microbatches=8)


def price(machine: oc.Machine = A100, **changed: object) -> oc.JobCost:
    return oc.price(SIZES, replace(PLAN, **changed), machine)  # type: ignore[arg-type]


def test_parts_of_what_stages_send() -> None:
    whole, parts = price(), price(partial_sends=True)
    assert parts.ranks[1].sent["pp"] == whole.ranks[1].sent["pp"] // 4
    sent = SIZES.sequence * PLAN.microbatch * SIZES.hidden * 2
    assert whole.ranks[1].sent["pp"] == 2 * PLAN.microbatches * sent
    assert parts.ranks[1].sent["tp"] - whole.ranks[1].sent["tp"] == 2 * PLAN.microbatches * sent // 4 * 3
    cut = price(sequence_parallel=True)
    assert (
        cut.ranks[1].sent["pp"]
        == parts.ranks[1].sent["pp"]
        == price(sequence_parallel=True, partial_sends=True).ranks[1].sent["pp"]
    )


def test_stages_that_wait_for_what_they_send() -> None:
    sent = SIZES.sequence * PLAN.microbatch * SIZES.hidden * 2
    message = A100.message(sent, far=sent)
    free, waits = price(per_host=4), price(per_host=4, overlap_pp=False)  # each stage on its own host
    # A rank in the middle waits twice for each microbatch, but for what falls into its bubble.
    assert PLAN.microbatches * message < waits.terms["messages along 'pp'"] < 2 * (PLAN.microbatches + 4) * message
    assert waits.seconds > free.seconds and waits.ranks[1].sent == free.ranks[1].sent
    assert sum(waits.terms.values()) == pytest.approx(waits.seconds)


def test_messages_of_layers_beside_products() -> None:
    waited, beside = price(), price(overlap_tp=True)
    assert beside.seconds < waited.seconds and beside.ranks[1].sent == waited.ranks[1].sent
    assert beside.model_flops == waited.model_flops
    nothing_hides = price(replace(A100, beside=0.0), overlap_tp=True)
    assert nothing_hides.seconds == pytest.approx(waited.seconds, rel=0.01)


@pytest.mark.proof
@pytest.mark.share(1)
@pytest.mark.parametrize("compiled", [False, True])
def test_a_block_keeps_the_same_whatever_runs_beside(compiled: bool) -> None:
    """Bytes of the formula of Korthikanti et al. (2022), from each piece of the composed price."""
    sizes = replace(SIZES, dropout=0.1)
    for parallel, again in ((False, "none"), (True, "none"), (True, "selective"), (False, "full")):
        plan = replace(PLAN, compiled=compiled, overlap_tp=True, sequence_parallel=parallel, recompute=again)
        pieces = oc.price(sizes, plan, A100).pieces
        told = formula(LayerSizes(sizes.heads, sizes.sequence, sizes.hidden, plan.microbatch), plan.tp, parallel, again)
        assert [piece.kept for piece in pieces[1:-1]] == pytest.approx([told] * (len(pieces) - 2), rel=0.01)


def test_float8_is_faster_and_gathers_less() -> None:
    h100 = oc.Machine.preset("H100")
    plain = price(h100, sequence_parallel=True)
    rounded = price(h100, sequence_parallel=True, compute="float8_e4m3fn")
    assert rounded.model_flops == plain.model_flops
    # Six of ten messages of a layer gather: two in forward, four in backward.
    assert rounded.ranks[1].sent["tp"] == plain.ranks[1].sent["tp"] * 7 // 10
    large = replace(SIZES, hidden=8192, heads=64)  # of small products, to round the operands takes longer than it saves
    way = replace(PLAN, sequence_parallel=True, microbatch=8)
    times = [
        oc.price(large, replace(way, compute=dtype), h100).terms["compute"] for dtype in ("bfloat16", "float8_e4m3fn")
    ]
    assert 1.2 < times[0] / times[1] < 2


def test_recompute_by_operators_lies_between() -> None:
    sizes = replace(SIZES, attention="flash", gated=True, norm="rms", positions="rotary", bias=False)
    none, some, full = (
        oc.price(sizes, oc.Plan(microbatch=2, recompute=how), A100) for how in ("none", "operators", "full")
    )
    assert none.hardware_flops < some.hardware_flops < full.hardware_flops
    kept = [found.pieces[1].kept for found in (none, some, full)]
    assert kept[0] > kept[1] > kept[2]
