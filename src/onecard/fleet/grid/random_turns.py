"""Random states that pass from rank to rank, so that parts that are drawn on several ranks are what one card draws."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from onecard.comm.base.state import arrives
from onecard.comm.issue import started
from onecard.comm.issue.ranks import Ranks
from onecard.comm.world import world


@contextmanager
def not_drawn(yes: bool) -> Iterator[None]:
    """Inside, what is drawn is drawn again after it: one card makes a shared layer once."""
    with torch.random.fork_rng(enabled=yes):
        yield


def _moves(group: Ranks) -> bool:
    return group.size > 1 and arrives()


def give(group: Ranks, place: int, number: int) -> None:
    """Send this rank's random state to a place of the group; ``number`` tells messages apart."""
    if _moves(group) and place != group.index:
        state = torch.get_rng_state()
        if world.device().type == "cuda":
            state = torch.cat([state, torch.cuda.get_rng_state()])
        tag = started.tag_of("random state", number)
        started.isend(state, place, tag, group, "PipelineLayer, random state")


def take(group: Ranks, place: int, number: int) -> None:
    """Go on from the random state that a place of the group sends."""
    if _moves(group):
        size = torch.get_rng_state().numel()
        more = torch.cuda.get_rng_state().numel() if world.device().type == "cuda" else 0
        state = torch.empty(size + more, dtype=torch.uint8, device="cpu")
        tag = started.tag_of("random state", number)
        started.irecv(state, place, tag, group, "PipelineLayer, random state").wait()
        torch.set_rng_state(state[:size])
        if more:
            torch.cuda.set_rng_state(state[size:])
