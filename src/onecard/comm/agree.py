"""Whether ranks say the same: a word left in the attempt's store, compared without waiting for anybody."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist

from onecard.comm import attempt, pretend, world


def when_met(compare: Callable[[], None]) -> None:
    """Run a comparison now, or, where the ranks have not met yet, at the first message: seeds and loaders come before it.

    Example:
        >>> when_met(lambda: print("compared"))  # a world of one has nothing to wait for
        compared
    """
    if world.get_world_size() == 1 or dist.is_initialized():
        compare()
    else:
        world.waiting.append(compare)


def first_to_say(label: str, word: str) -> tuple[int, str] | None:
    """The rank that came first to a label, and its word; None in a world of one or before there is a process group.

    Costs one round trip to the store (about 0.1 ms on one host) and waits for nobody, so a rank that never comes is no
    hang. Labels are never used twice.

    Example:
        >>> first_to_say("seed", "0") is None
        True
    """
    if world.get_world_size() == 1 or not dist.is_initialized() or pretend.rehearsing or dist.get_backend() == "fake":
        return None
    found = attempt.store().compare_set(f"agree/{label}", "", f"{world.get_rank()} {word}").decode()
    rank, _, said = found.partition(" ")
    return int(rank), said
