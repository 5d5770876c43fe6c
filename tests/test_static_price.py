"""The price of a recording beside what a run counts: messages by axis, products, memory."""

from __future__ import annotations

from functools import partial
from itertools import islice

import torch
from static_programs import gpt, mesh, mixed
from torch import Tensor

import onecard as oc
from onecard.testing import run_ranks


def counted() -> list[tuple[dict[str, int], dict[str, int]]]:
    """Bytes by axis: what the recording says, and what ``explain`` counts in the step as it is."""
    found = []
    for make in (partial(gpt, mesh(2, 2), dropout=0.0), partial(mixed, mesh(4, 1)), partial(gpt, mesh(1, 4))):
        torch.manual_seed(3)
        _, _, step, data = make()
        run = oc.to_static(step, without=["equal"])
        batches = [*islice(data, 3)]
        for batch in batches[:2]:
            run(*batch)
        with oc.explain() as report:
            step(*batches[2])
        sent: dict[str, int] = {}
        for message in report.messages:
            if message.step.bytes:
                axis = message.step.source.mesh.dim_names[message.step.axis]
                sent[axis] = sent.get(axis, 0) + message.step.bytes
        found.append((run.recordings[0].cost().sent, sent))
    return found


def test_bytes_of_messages_are_those_of_a_run() -> None:
    for ranks in run_ranks(counted, 4):
        for priced, sent in ranks:
            assert priced == sent and sum(sent.values()) > 0


def test_products_and_memory() -> None:
    def step(x: Tensor, w: Tensor) -> Tensor:
        a = x @ w  # 4 x 8 @ 8 x 16
        b = a.relu()
        c = b.t() @ b
        return c.sum() + c.view(-1)[:3].sum()

    recording = oc.record(step)(torch.ones(4, 8), torch.ones(8, 16))
    found = recording.cost()
    assert found.products == 4 * 8 * 16 + 16 * 4 * 16
    assert found.inputs == 4 * (32 + 128)
    # The product of b with itself is made while b is alive; a is not any more, and views cost nothing.
    assert found.peak == found.inputs + 4 * (64 + 256) and found.peak_at.startswith("mm")
    assert found.nodes[-1].alive == found.inputs + 4  # the result
    assert "peak memory" in str(found)
