"""Static steps: what is recorded replays bit for bit, on one rank and on several, and nothing that may change is baked in."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from amounts import share
from static_programs import assert_replays, gpt, mesh, mixed, seed_000, seed_002, seed_003
from torch import Tensor, nn

import onecard as oc
from onecard.testing import run_ranks

OPTIMIZERS = ["sgd", "adamw", "fused", "foreach", "rmsprop", "adagrad", "adamax", "nadam", "asgd"]


@pytest.mark.share(3)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_every_optimizer_on_one_card(kind: str) -> None:
    assert_replays(partial(mixed, None, kind))


def test_one_cards_programs() -> None:
    programs = (
        partial(mixed, None, parts=4), partial(gpt, None), partial(gpt, None, dropout=0.0), partial(seed_002, "single_card_002"),
        partial(seed_003, "single_card_003"),
    )  # fmt: skip
    for make in share(programs, 2):
        assert_replays(make)


def on_two_ranks() -> None:
    dp = oc.ProcessMesh([0, 1], ["dp"])
    tp = oc.ProcessMesh([0, 1], ["tp"])
    programs = {
        "mixed": partial(mixed, dp), "mixed accumulated": partial(mixed, dp, parts=4), "mixed fused": partial(mixed, dp, "fused"),
        "gpt dp": partial(gpt, dp), "gpt tp": partial(gpt, tp), "gpt sp": partial(gpt, tp, sequence_parallel=True),
        "gpt tp foreach": partial(gpt, tp, kind="foreach"), "seed 000": seed_000,
        **{name: partial(seed_003, f"semi_auto_{name}_parallel_003") for name in ("data", "model", "pipeline")},
    }  # fmt: skip
    for name, make in share(programs.items(), 2):
        check(name, make)


def check(name: str, make: Any) -> None:
    try:
        assert_replays(make)
    except BaseException as fault:
        fault.add_note(f"the program {name!r}")
        raise


@pytest.mark.proof
def test_two_ranks() -> None:
    run_ranks(on_two_ranks, 2)


def on_four_ranks() -> None:
    both = mesh(2, 2)
    programs = {
        "gpt dp x tp": partial(gpt, both), "mixed dp x tp": partial(mixed, both),
        **{name: partial(seed_002, name) for name in ("tensor_parallel_002", "data_parallel_002")},
    }  # fmt: skip
    for name, make in share(programs.items(), 1):
        check(name, make)


@pytest.mark.proof
def test_four_ranks() -> None:
    run_ranks(on_four_ranks, 4)


@pytest.mark.proof
def test_eight_ranks_and_two_meshes() -> None:
    run_ranks(on_eight_ranks, 8)


def on_eight_ranks() -> None:
    for name in share(("hybrid_parallel_002", "pipeline_parallel_002"), 1):
        check(name, partial(seed_002, name))


def test_modules_that_a_step_calls_itself_are_told_apart():
    """By their paths in the one model that they are parts of, else by the names under which the step knows them."""
    encoder, decoder = (nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2))
    both = nn.ModuleDict({"encoder": encoder, "decoder": decoder})
    kept = SimpleNamespace(head=nn.Linear(4, 4))

    def of_one(x: Tensor) -> Tensor:
        return both["decoder"](both["encoder"](x))

    def by_names(x: Tensor) -> Tensor:
        return kept.head(decoder(encoder(x)))

    @torch.no_grad()
    def paths(step: Any) -> list[str]:
        run = oc.to_static(step)
        for _ in range(2):
            run(torch.randn(2, 4))
        (recording,) = run.recordings
        return [n.meta["module"] for n in recording.graph.nodes if n.op == "call_function"]

    found = paths(of_one)
    assert [*dict.fromkeys(found)] == ["encoder.0", "encoder.1", "decoder.0", "decoder.1"]
    found = paths(by_names)
    assert [*dict.fromkeys(found)] == ["encoder.0", "encoder.1", "decoder.0", "decoder.1", "kept.head"]
    assert {*paths(lambda x: encoder(x))} == {"0", "1"}
    loss = nn.MSELoss()
    assert {*paths(lambda x: loss(encoder(x), x))} == {
        "0",
        "1",
        "loss",
    }  # a loss has no parameters: the model needs no name
