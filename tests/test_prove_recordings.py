"""prove(recordings, against=): what users recorded themselves, interpreted together; right ones are equal, faults are named."""

from __future__ import annotations

from typing import Any

import pytest
import recorded_programs as programs
import torch
from amounts import share
from recorded_programs import alone, batch, on_ranks

import onecard as oc
from onecard.comm.issue import again
from onecard.errors import ProofError

RIGHT: dict[str, Any] = {
    "tp": (programs.marked, 2),
    "dp x tp": (programs.marked, 4),
    **{f"zero {n}": (programs.marked, 2, n) for n in (1, 2, 3)},
    "k_steps": (programs.marked, 2, 0, 2),
    "by hand": (programs.by_hand, 2),
}
SCHEDULES = ["1F1B", "F-then-B", "VPP", "ZBH1", "ZBV"]


@pytest.mark.parametrize("case", share([*RIGHT], 2))
def test_recordings_of_all_ranks_are_one_cards(case):
    program, world, *args = RIGHT[case]
    proof = oc.prove(on_ranks(program, world, *args), against=alone(program, *args), args=batch(3), steps=2)
    assert proof and proof.exact and proof.world == world, str(proof)
    assert proof.share > (0.9 if case != "k_steps" else 0.6), f"{proof.share:.1%}"
    assert any("exp_avg of" in result.what for result in proof.results)


@pytest.mark.proof
@pytest.mark.parametrize("schedule", share(SCHEDULES, 1))
def test_a_pipelines_recordings_are_one_cards(schedule):
    ranks = on_ranks(programs.pipeline, 2, schedule)
    proof = oc.prove(ranks, against=programs.pipeline(), args=batch(3), steps=2, rounding=False)
    assert proof and proof.exact, str(proof)
    send = next(n for n in ranks[1].nodes() if n.target.__name__ == "send")
    with ranks[1].graph.inserting_before(send):
        send.args = (ranks[1].graph.call_function(torch.ops.aten.mul.Scalar, (send.args[0], 2.0)), *send.args[1:])
    assert not oc.prove(ranks, against=programs.pipeline(), args=batch(3), rounding=False)


@pytest.fixture(scope="module")
def one() -> Any:
    return alone(programs.marked)


def sent(recording: Any, axis: int = 0) -> Any:
    """The first message of the forward pass along an axis."""
    return next(n for n in recording.nodes("forward") if n.target is again.message and n.args[4].axis == axis)


@pytest.mark.proof
def test_recordings_without_data_do(one):
    assert oc.prove(on_ranks(programs.marked, 2, fake=True), against=one, args=batch(), rounding=False)


def test_a_message_that_is_missing_is_named(one):
    ranks = on_ranks(programs.marked, 4)
    for recording in ranks:
        recording.graph.erase_node(sent(recording, axis=1))
    proof = oc.prove(ranks, against=one, args=batch(), rounding=False)
    assert not proof and proof.first is not None
    assert proof.first.operator == "linear" and proof.first.module == "3", str(proof)
    assert "their sum is missing" in str(proof)


@pytest.mark.parametrize("op", share(["max", "min"], 1))
def test_another_reduction_is_named(one, op):
    ranks = on_ranks(programs.marked, 4)
    for recording in ranks:
        node = sent(recording, axis=1)
        node.args = (*node.args[:3], (op, *node.args[3][1:]), node.args[4])
    proof = oc.prove(ranks, against=one, args=batch(), rounding=False)
    assert not proof and proof.first is not None and proof.first.operator == "all_reduce", str(proof)
    assert "recorded_programs.py" in proof.first.line


def test_files_are_proved_by_names(one, tmp_path):
    ranks = on_ranks(programs.marked, 2)
    for rank, recording in enumerate([*ranks, one]):
        recording.save(tmp_path / str(rank))
    *loaded, alone_loaded = (oc.load_recording(tmp_path / str(i)) for i in range(3))
    assert oc.prove(loaded, against=one, args=batch(), rounding=False)
    with pytest.raises(ProofError, match=r"reads model\.0\.weight, and nobody says what it is"):
        oc.prove(loaded, against=alone_loaded, args=batch())
    values = {i.name: torch.rand(i.spec.shape if i.spec else i.facts[0]) if i.facts else 0.1 for i in one.inputs}
    assert oc.prove(loaded, against=alone_loaded, args=values, rounding=False)


def test_what_does_not_fit_is_told(one):
    x, y = batch()
    ranks = on_ranks(programs.marked, 2)
    refused: list[tuple[str, Any, Any, Any]] = [
        ("their meshes have rank 1, too", ranks[:1], one, (x, y)),
        ("was made on rank 1", ranks[::-1], one, (x, y)),
        ("lies on", [ranks[0], on_ranks(programs.marked, 4)[1], *ranks[:2]], one, (x, y)),
        (r"has \[4, 8\] float32 for x, which is \[8, 8\]", ranks, one, (x[:4], y)),
        ("was recorded with x, y; args= has 1", ranks, one, (x,)),
        (r"args= has \[8, 8\] int64 for x", ranks, one, {"x": x.long(), "y": y}),
        ("record it on one card, alone", ranks, ranks[0], (x, y)),
        ("against= is NoneType", ranks, None, (x, y)),
        (r"recordings\[1\] is int", [ranks[0], 3], one, (x, y)),
        ("makes its states", [r.with_graph(r.graph) for r in on_ranks(_first, 2)], one, (x, y)),
    ]
    for said, recordings, against, args in refused:
        with pytest.raises(ProofError, match=said):
            oc.prove(recordings, against=against, args=args)
    with pytest.raises(ProofError, match="2 recordings: one of each rank"):
        oc.prove(ranks, against=one, args=(x, y), world=4)
    with pytest.raises(ProofError, match="are for recordings"):
        oc.prove(torch.nn.Linear(2, 2), args={"x": x})


def _first() -> Any:
    """A step in which an optimizer makes its states."""
    model = torch.nn.Linear(8, 8)
    return oc.record(programs.stepped(model, torch.optim.AdamW(model.parameters())))(*batch())


def test_ranks_that_send_other_messages_are_told(one):
    ranks = on_ranks(programs.marked, 2)
    ranks[0].graph.erase_node(sent(ranks[0]))
    with pytest.raises(ProofError, match="fails on 2 ranks"):
        oc.prove(ranks, against=one, args=batch())


def test_shared_memory_that_is_written_to_is_refused():
    flat = torch.zeros(8)
    view = flat[:4]

    def step(x: torch.Tensor) -> torch.Tensor:
        flat.add_(1)
        return (view * x).sum()

    recording = oc.record(step)(torch.ones(4))
    with pytest.raises(ProofError, match="view lies in the memory of flat"):
        oc.prove([recording], against=recording, args=(torch.ones(4),))
