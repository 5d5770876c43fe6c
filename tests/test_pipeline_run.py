"""The pipeline runtime: every schedule on real ranks against the one-card program."""

from __future__ import annotations

import pytest
import torch
from amounts import cells
from fleet_programs import close
from pipeline_programs import OneCard, begin, compare, gpt, token_loss, tokens

import onecard as oc
from onecard import fleet
from onecard.pipeline.schedule.modes import MODES
from onecard.testing import run_ranks

SIZE = 2  # of microbatches; the last of every second case is smaller


def one_card_steps(blocks: int, batch: int, steps: int):
    """Losses and the model after some steps of the plain program."""
    torch.manual_seed(3)
    model = OneCard(gpt(blocks))
    after = torch.get_rng_state()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    losses = []
    for step in range(steps):
        x, y = tokens(batch, step)
        loss = token_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model, after


def every_schedule(chosen: list[tuple[int, str]]) -> int:
    """Numbers of microbatches and schedules: two steps with two microbatches, one with other numbers of them."""
    p, done = oc.get_world_size(), 0
    blocks = 2 * p - 3  # with embedding, norm and head: 2 p layers, one for each stage of a V
    for m in dict.fromkeys(m for m, _ in chosen):
        modes = [mode for count, mode in chosen if count == m]
        batch = SIZE * m - (m % 2)
        losses, single, after = one_card_steps(blocks, batch, 2 if m == 2 else 1)
        for mode in modes:
            begin(mode, m, SIZE, pp=p)
            torch.manual_seed(3)
            layer = fleet.PipelineLayer(gpt(blocks), loss_fn=token_loss)
            assert torch.equal(torch.get_rng_state(), after), "what is drawn next is not what one card draws"
            model = fleet.distributed_model(layer)
            optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9))
            for step, expected in enumerate(losses):
                loss = model.train_batch(tokens(batch, step), optimizer)
                close(loss, torch.tensor(expected), f"{mode}, {m}: loss of step {step}")
            compare(layer, single, f"{mode}, {m}")
            done += 1
    for mode in dict.fromkeys(mode for _, mode in chosen):
        begin(mode, 3, SIZE, pp=p)
        torch.manual_seed(3)
        model = fleet.distributed_model(fleet.PipelineLayer(gpt(blocks), loss_fn=token_loss))
        torch.manual_seed(3)
        x, y = tokens(9, 9)  # more than a training batch
        expected = OneCard(gpt(blocks))(x).detach()
        close(model(x), expected, f"{mode}: forward")
        close(model.eval_batch([x, y]), token_loss(expected, y), f"{mode}: eval_batch")
        close(model.eval_batch([x, y], compute_loss=False), expected, f"{mode}: outputs")
    return done


@pytest.mark.proof
@pytest.mark.share(1)
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_schedule_is_one_card(ranks: int) -> None:
    chosen = cells([2, 1, 3, 4, 5, 6, 7, 8], MODES, every=5)
    assert run_ranks(every_schedule, ranks, chosen) == [len(chosen)] * ranks
