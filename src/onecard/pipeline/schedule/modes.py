"""Schedules by the names that ``pipeline_configs["schedule_mode"]`` takes: Paddle's, and those of the papers."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import nullcontext
from functools import lru_cache
from typing import Any

from onecard.errors import ScheduleError
from onecard.pipeline.schedule.action import Schedule
from onecard.pipeline.schedule.orders import (
    breadth_first,
    eager_one_f_one_b,
    gpipe,
    interleaved,
    naive,
    one_f_one_b,
    zb_h1,
    zb_h2,
)
from onecard.pipeline.schedule.schedule_auto import zb_1p, zb_2p
from onecard.pipeline.schedule.schedule_messages import computations_alone
from onecard.pipeline.schedule.schedule_v import dualpipe_v, v_half, v_min, zb_v

KEPT = 128  # schedules, one for each number of microbatches in use
Make = Callable[..., Schedule]
_PLAIN: dict[str, Make] = {
    "1F1B": one_f_one_b, "F-then-B": gpipe, "naive": naive, "Eager1F1B": eager_one_f_one_b,
    "ZBH1": zb_h1, "ZBH2": zb_h2, "ZB1P": zb_1p, "ZB2P": zb_2p,
}  # fmt: skip
_CHUNKED: dict[str, Make] = {"VPP": interleaved, "BFS": breadth_first, "ZBH1": zb_h1}
_FOLDED: dict[str, Make] = {
    "ZBV": zb_v, "VHalf": v_half, "VMin": v_min, "DualPipeV": dualpipe_v,
}  # fmt: skip
_ALSO = {
    "gpipe": "F-then-B", "fthenb": "F-then-B", "interleaved": "VPP", "interleaved1f1b": "VPP", "breadthfirst": "BFS",
    "zbvpp": "ZBV", "zerobubble": "ZBH1",
}  # fmt: skip
MODES = list(dict.fromkeys([*_PLAIN, *_CHUNKED, *_FOLDED]))


class ModeError(ScheduleError):
    """A name that no schedule has, or chunks that it cannot have."""


def plan(mode: Any, ranks: int, chunks: int | None = None, messages: bool = True) -> Callable[[int], Schedule]:
    """For a number of microbatches the schedule of this name; a Schedule is itself, a function is called.

    Args:
        mode: one of ``MODES``, in any spelling; a ``pipeline.Schedule``; or a function (ranks, microbatches) -> Schedule.
        chunks: stages for each rank; None: as the schedule has. 1F1B and F-then-B with several are interleaved 1F1B (VPP)
            and breadth-first (BFS), as in Paddle.
        messages: whether sends and receives are in it; to simulate one they need not be, and are most of what it takes to make.

    Example:
        >>> plan("1F1B", 2)(4), plan("vpp", 2, 3)(4).num_stages
        (Schedule(1F1B: 2 ranks, 2 stages, 4 microbatches), 6)
    """
    if isinstance(mode, Schedule):
        return lambda microbatches: mode
    if callable(mode):
        return lambda microbatches: mode(ranks, microbatches)
    name = known(mode)
    if name in _FOLDED:
        if chunks not in (None, 1, 2):
            raise ModeError(f"schedule_mode {mode!r} folds the layers into 2 stages for each rank, not {chunks}")
        return lambda microbatches: _made(messages, _FOLDED[name], ranks, microbatches)
    if chunks is not None and chunks > 1:
        name = {"1F1B": "VPP", "F-then-B": "BFS"}.get(name, name)
    if name not in _CHUNKED or (name in _PLAIN and chunks in (None, 1)):
        if chunks not in (None, 1):
            raise ModeError(
                f"schedule_mode {mode!r} has one stage for each rank, but num_virtual_pipeline_stages={chunks}; with several go: "
                f"{', '.join(_CHUNKED)}"
            )
        return lambda microbatches: _made(messages, _PLAIN[name], ranks, microbatches)
    return lambda microbatches: _made(messages, _CHUNKED[name], ranks, microbatches, chunks or 2)


@lru_cache(KEPT)
def _made(messages: bool, make: Make, *sizes: int) -> Schedule:
    with nullcontext() if messages else computations_alone():
        return make(*sizes)


def known(mode: Any) -> str:
    """The name of a mode as it stands in ``MODES``; ModeError with all of them if it is none.

    Example:
        >>> known("FThenB"), known("zb-v")
        ('F-then-B', 'ZBV')
    """
    plain = {_bare(name): name for name in MODES} | _ALSO
    found = plain.get(_bare(mode)) if isinstance(mode, str) else None
    if found is None:
        raise ModeError(
            f"schedule_mode is {mode!r}; want one of {', '.join(MODES)}, a onecard.pipeline.Schedule, or a function (ranks, "
            "microbatches) -> Schedule"
        )
    return found


@lru_cache(256)
def _bare(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())
