"""Experts in plans and prices: what ep divides, what it sends, and that each term is one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from amounts import share

import onecard as oc
from onecard.errors import PlanError
from onecard.planning.known_models import known_model
from onecard.planning.pieces import Pieces
from onecard.planning.record import record_decoder, recorded
from onecard.planning.search.find import Search
from onecard.planning.search.rows import of_ranks_of_experts
from onecard.planning.search.subject import subject_of
from onecard.planning.state import TrainingState

H100 = oc.Machine.preset("H100")
SIZES = oc.Transformer(
    layers=4, hidden=64, heads=4, vocab=256, sequence=32, experts=8, top_k=2, expert_ffn=96, shared_ffn=48, gated=True,
    norm="rms", positions="rotary", bias=False, attention="flash",
)  # fmt: skip
EXPERTS = SIZES.layers * 8 * 3 * 64 * 96
OTHERS = SIZES.parameters - EXPERTS


def priced(sizes: oc.Transformer = SIZES, **how: Any) -> Any:
    return oc.price(sizes, oc.Plan(**({"dp": 4, "zero": 0} | how)), H100)


@pytest.mark.proof
def test_a_mixture_does_the_operations_that_its_sizes_say() -> None:
    for how in share(({}, {"ep": 4}, {"dp": 2, "ep": 2, "tp": 2, "sequence_parallel": True}), 2):
        cost = priced(**how)
        assert cost.model_flops == cost.tokens * SIZES.flops_per_token, how


def test_latent_attention_and_blocks_without_experts() -> None:
    assert round(known_model("deepseek-v3").parameters / 1e9, 2) == 671.03  # arXiv 2412.19437: 671B
    latent = replace(SIZES, kv_latent=24, q_latent=40, rope_dim=8, head_dim=16, dense_layers=2, ffn=128, layers=6)
    for how in share(({"dp": 2, "ep": 2, "tp": 2, "sequence_parallel": True}, {"ep": 4}), 1):
        cost = priced(latent, **how)
        # Values are as wide as keys for the kernel.
        wide = 6 * latent.layers * latent.heads * latent.rope_dim * latent.sequence
        assert cost.model_flops == cost.tokens * (latent.flops_per_token + wide), how
    for part, words in (
        ({"rope_dim": 3}, "even number"),
        ({"kv_latent": 0}, "give kv_latent too"),
        ({"dense_layers": 6}, "fewer"),
    ):
        with pytest.raises(PlanError, match=words):
            replace(latent, **part)


@pytest.mark.proof
def test_only_tokens_travel_along_ep() -> None:
    for ep in share((2, 4, 8), 2):
        sent = priced(dp=8, ep=ep).ranks[0].sent["ep"]
        assert sent == SIZES.layers * 4 * SIZES.sequence * 2 * 64 * 2 * (ep - 1) // ep, "there, back, and in backward"
    assert "ep" not in priced().ranks[0].sent
    wider = priced(replace(SIZES, top_k=4), ep=2).ranks[0].sent["ep"]
    assert wider == 2 * priced(ep=2).ranks[0].sent["ep"]


def test_memory_falls_with_ep() -> None:
    for ep in share((1, 2, 4), 2):
        memory = priced(ep=ep).ranks[0].memory
        assert memory["parameters"] == 2 * (OTHERS + EXPERTS // ep)
        assert memory["states"] == 12 * (OTHERS + EXPERTS // ep)


def test_zero_divides_experts_over_fewer_ranks() -> None:
    for ep in share((1, 2, 4), 2):
        state = priced(ep=ep, zero=1).ranks[0].memory["states"]
        assert abs(state - 12 * (OTHERS // 4 + EXPERTS // 4)) < 600, "each number lies on one rank, whatever ep is"


def test_gradients_of_experts_are_summed_over_fewer_ranks() -> None:
    plan = oc.Plan(dp=4, ep=2, zero=0)
    pieces = recorded(SIZES, plan, None, None).costs(H100)
    mine = sum(p.alike * p.experts for p in pieces)
    assert mine == EXPERTS // 2
    sums = [(line.count, line.stride, given) for _, line, given in TrainingState(plan, H100).gradient_messages(100, 60)]
    assert sums[0] == (4, 1, 40 * 4) and sums[2] == (2, 2, 60 * 4)
    # The control: were they summed over all, the same elements would take more.
    right = TrainingState(plan, H100).sum_seconds(pieces)
    everywhere = TrainingState(plan, H100).sum_seconds([replace(p, expert_tensors=()) for p in pieces])
    assert right != everywhere


def test_what_does_not_fit_is_told() -> None:
    said = {f.kind: str(f) for f in oc.Plan(dp=16, ep=16).check(SIZES)}
    assert said["mistake"] == "ep=16 is more than the 8 experts; ep=8 has one on each rank"
    assert "ep=3 does not divide 8 experts" in str(oc.Plan(dp=3, ep=3).check(experts=8)[0])
    assert [str(f) for f in oc.Plan(dp=2, ep=2).check(experts=0)] == [
        "ep=2 divides experts, of which the model has none; ep=1"
    ]
    with pytest.raises(PlanError, match="ep=3: does not divide dp=4"):
        oc.Plan(dp=4, ep=3)


def test_a_search_finds_ep_where_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    wide = replace(SIZES, layers=1, experts=16, expert_ffn=512)
    least = oc.price(wide, oc.Plan(dp=4, ep=4), H100).peak
    fixed = {"tp": 1, "pp": 1, "zero": 0, "microbatch": 1, "recompute": "none"}
    seen: list[int] = []
    monkeypatch.setattr(
        "onecard.planning.search.subject.record_decoder",
        lambda *given: seen.append(given[1].ep) or record_decoder(*given),
    )
    tight = oc.plan(wide, world=4, machine=H100, batch=4, memory=int(least * 1.05), fixed=fixed)
    assert tight.best.ep == 4 and seen and 1 not in seen, "all experts on each rank: no memory for that, by sizes alone"
    monkeypatch.setattr(Search, "_too_large", lambda *_: False)
    again = oc.plan(wide, world=4, machine=H100, batch=4, memory=int(least * 1.05), fixed=fixed)
    assert again.best == tight.best and 1 in seen


@pytest.mark.share(1)
@pytest.mark.parametrize("how", [{}, {"tp": 2, "sequence_parallel": True, "recompute": "full"}])
def test_a_recording_over_any_ranks_of_experts_from_two(how: dict[str, Any]) -> None:
    sizes = replace(SIZES, experts=16)
    few, many, real = (record_decoder(sizes, oc.Plan(dp=n, ep=n, microbatch=2, **how)) for n in (2, 4, 8))
    made = of_ranks_of_experts(few.pieces.recording, many.pieces.recording, (2, 4), 8)
    assert made is not None
    assert Pieces(made, few.folded).costs(H100) == Pieces(real.pieces.recording, few.folded).costs(H100)
    # Control: taken for those of other numbers of ranks, they give something else, or nothing.
    wrong = of_ranks_of_experts(few.pieces.recording, many.pieces.recording, (2, 8), 8)
    assert wrong is None or Pieces(wrong, few.folded).costs(H100) != real.costs(H100)
    assert of_ranks_of_experts(few.pieces.recording, real.pieces.recording, (2, 4), 8) is None


@pytest.mark.proof
def test_recordings_of_a_search_are_few_whatever_ep_is(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    monkeypatch.setattr(
        "onecard.planning.search.subject.record_decoder",
        lambda *given: seen.append(given[1].ep) or record_decoder(*given),
    )
    subject = subject_of(replace(SIZES, experts=32, hidden=128), 64, None, {})
    for ep in (4, 8, 16):
        subject.pieces(oc.Plan(dp=ep, ep=ep, microbatch=2), H100)
    assert sorted(seen) == [2, 4]
