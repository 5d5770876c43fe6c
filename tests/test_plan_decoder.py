"""A decoder by its sizes and a plan: one card's losses and gradients; recordable without devices."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from fleet_programs import begin, close, part_of, seeded
from torch import Tensor

import onecard as oc
from onecard import fleet
from onecard.fleet.layers import context
from onecard.planning.activations import saved_bytes
from onecard.planning.decoder import build
from onecard.planning.plan import Plan
from onecard.planning.transformer import Transformer
from onecard.testing import run_ranks

GPT = Transformer(layers=2, hidden=16, heads=4, vocab=24, sequence=8, attention="scores", tied=True)
LLAMA = Transformer(
    layers=2, hidden=16, heads=4, kv_heads=2, head_dim=6, ffn=24, gated=True, norm="rms", positions="rotary", bias=False,
    vocab=24, sequence=8,
)  # fmt: skip
LATENT = replace(LLAMA, kv_heads=0, kv_latent=10, q_latent=6, rope_dim=4)
AGAIN = ("none", "selective", "operators", "full")
OTHERS = replace(LLAMA, qkv_bias=True, qk_norm=True, embedding_norm=True, positions="learned", rows=11)


def batch() -> tuple[Tensor, Tensor]:
    ids = torch.randint(24, (3, 9), generator=torch.Generator().manual_seed(5))
    return ids[:, :-1], ids[:, 1:]


def plan(**changed: Any) -> Plan:
    return Plan(parameters="float32", compute="float32", **changed)


def one_card(sizes: Transformer, again: Any = "none") -> tuple[Tensor, dict[str, Tensor]]:
    """The loss and gradients of a plain model with the parallel one's names: ``build`` for one rank."""
    begin(dp=oc.get_world_size())
    model = seeded(build, sizes, plan(recompute=again))
    loss = model(*batch())
    loss.backward()
    assert sum(p.numel() for p in model.parameters()) == sizes.parameters
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def ways() -> list[str]:
    found = []
    for sizes in (GPT, LLAMA, OTHERS, LATENT):
        for again, parallel in product(AGAIN, (False, True)):
            # Gate and up are one weight, or two, whose first values are others.
            expected, gradients = one_card(sizes, "operators" if again == "operators" else "none")
            begin(mp=2)
            model = seeded(build, sizes, plan(tp=2, sequence_parallel=parallel, recompute=again))
            loss = model(*batch())
            loss.backward()
            fleet.sync(model.parameters())
            close(loss.detach(), expected, f"loss, {again}, {parallel}")
            mine = dict(model.named_parameters())
            assert mine.keys() == gradients.keys()
            for name, p in mine.items():
                assert p.grad is not None
                close(p.grad, part_of(p, gradients[name]), f"{name}, {again}, {parallel}")
            found.append(f"{again} {parallel}")
    return found


@pytest.mark.proof
def test_losses_and_gradients_are_one_cards() -> None:
    assert run_ranks(ways, 2)[0] == [f"{a} {p}" for a in AGAIN for p in (False, True)] * 4


def cut_in_time() -> float:
    expected, gradients = one_card(LLAMA)
    begin(sep=2)
    model = seeded(build, LLAMA, plan(cp=2))
    loss = model(*(context.cut(x) for x in batch()))
    loss.backward()
    whole = oc.differentiable.all_reduce(loss.detach()[None])[0] / 2
    close(whole, expected, "loss of both parts of the time")
    for name, p in model.named_parameters():
        close(oc.differentiable.all_reduce(p.grad) / 2, gradients[name], name)
    return float(whole)


def test_a_sequence_cut_over_the_ranks() -> None:
    first, second = run_ranks(cut_in_time, 2)
    assert first == second


def recorded(sizes: Transformer, how: Plan) -> tuple[oc.Recording, int, int]:
    """A step's recording, and bytes that one block keeps for backward, without devices."""
    with oc.pretend(8, 1, fake=True):
        begin(mp=how.tp, dp=8 // how.tp)
        model = build(sizes, how)
        tokens = torch.zeros(how.microbatch, sizes.sequence, dtype=torch.long)

        def step(tokens: Tensor, labels: Tensor) -> Tensor:
            loss = model(tokens, labels)
            loss.backward()
            return loss.detach()

        recording = oc.record(step)(tokens, tokens)
        time = sizes.sequence // how.tp if how.sequence_parallel else sizes.sequence
        x = torch.zeros(time, how.microbatch, sizes.hidden, dtype=getattr(torch, how.compute), requires_grad=True)
        held = [*model.blocks[0].parameters(), *model.buffers()]
        kept = saved_bytes(lambda: model.blocks[0](x, model.turns), held)
        return recording, kept, sum(p.numel() for p in model.parameters())


def test_it_is_recorded_without_devices() -> None:
    large = Transformer(layers=1, hidden=1024, heads=16, vocab=51200, sequence=512, attention="scores", dropout=0.1)
    how = Plan(tp=8, microbatch=2, sequence_parallel=True)
    recording, kept, _ = recorded(large, how)
    sbh = large.sequence * how.microbatch * large.hidden
    assert kept == pytest.approx(sbh * (34 + 5 * large.heads * large.sequence / large.hidden) / 8, rel=0.01)
    price = recording.cost(oc.Machine.preset("A100"))
    tokens = how.microbatch * large.sequence
    multiplied = (12 * large.hidden**2 + large.vocab * large.hidden + 2 * large.sequence * large.hidden) * tokens // 8
    assert price.products == 3 * multiplied
    assert [*price.sent] == ["mp"]


def test_flash_attention_keeps_no_scores() -> None:
    sizes = {"layers": 1, "hidden": 1024, "heads": 16, "vocab": 51200, "sequence": 512, "dropout": 0.0}
    how = Plan(tp=2)
    _, flash, count = recorded(Transformer(**sizes), how)  # type: ignore[arg-type]
    _, scores, same = recorded(Transformer(attention="scores", **sizes), how)  # type: ignore[arg-type]
    log_sums = 512 * 8 * 4
    assert count == same and scores - flash == 512 * 512 * 8 * 2 - log_sums


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: build(GPT, Plan(tp=2)), "the plan has tp=2, cp=1"),
    ],
)
def test_what_cannot_be_built_is_told(make: Any, message: str) -> None:
    begin()
    with pytest.raises(fleet.FleetError, match=message):
        make()
