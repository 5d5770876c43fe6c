"""Whether ranks that step one optimizer together do so with the same numbers: rate, decay, betas.

Where each rank updates a part (ZeRO, tensors divided over ranks), no copy would show that one rank steps otherwise, as where a
scheduler follows this rank's own loss.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor
from torch.optim import Optimizer

from onecard import recorded
from onecard.comm.agree import clock, sparse_check
from onecard.comm.agree.numbers import alike
from onecard.comm.base import record
from onecard.comm.world import world

_known: WeakKeyDictionary[Optimizer, tuple[int, tuple[int, ...]]] = WeakKeyDictionary()


def compare(optimizer: Optimizer, ranks: Callable[[], Sequence[int]]) -> None:
    """Ahead of a step: what an optimizer's groups say; by name at steps 1, 2, 4, 8, 16, 24, ..., else as messages carry it.

    Args:
        ranks: those whose optimizers have the same groups, this one among them; asked for once.

    Raises:
        CommunicationError: they say different numbers. Names them, the group and both ranks.
    """
    if not sparse_check.on.here or (recorded.recorder is not None and not recorded.is_followed()):
        return
    if optimizer not in _known:
        found = tuple(sorted(ranks()))
        _known[optimizer] = sparse_check.serial(f"rates/{found}"), found
    number, among = _known[optimizer]
    if len(among) < 2:
        return
    clock.mark(among, _in_words(optimizer))
    site = sparse_check.site(("rates", number, among), lambda: f"rates/{number}/{among}")
    if not site.tick():
        return
    world.init()
    line = record.user_line()
    with recorded.unrecorded():
        mine = _said(optimizer)

    def answered(rank: int, word: str) -> None:
        if differs := _difference(mine, json.loads(word)):
            group, field, here, theirs = differs
            sides = sorted(((world.get_rank(), here), (rank, theirs)))
            shown = " and ".join(f"{value} on rank {which}" for which, value in sides)
            sparse_check.stop(
                f"{type(optimizer).__name__}.step at {line}: {field!r} of group {group} is {shown}. Ranks {list(among)} "
                f"train one model, each of them parts of it perhaps, and all with one rate. {_CURE}"
            )

    site.ask(json.dumps(mine), answered)


_CURE = (
    "Compute it from what all ranks know: the number of the step; a loss that is the mean over all ranks, for a scheduler that "
    "follows it. ONECARD_CHECK=0 compares nothing"
)


def _said(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The numbers of the optimizer's own options, by group."""
    keys = ("lr", *(key for key in optimizer.defaults if key != "lr"))
    found = ({key: _plain(group.get(key)) for key in keys} for group in optimizer.param_groups)
    return [{key: value for key, value in group.items() if value is not None} for group in found]


_words: WeakKeyDictionary[Optimizer, tuple[list[Any], str]] = WeakKeyDictionary()


def _in_words(optimizer: Optimizer) -> str:
    """The step with the options of all groups, for the messages' history: in as many digits as all processors round alike."""
    given = [group.get(key) for group in optimizer.param_groups for key in ("lr", *optimizer.defaults)]
    last, words = _words.get(optimizer, (None, ""))
    tensors = any(isinstance(value, Tensor) for value in given)  # they may be written to
    if tensors or given != last:
        with recorded.unrecorded():
            kinds = dict.fromkeys(
                ", ".join(f"{key} {_rounded(v)}" for key, v in group.items() if not isinstance(v, bool))
                for group in _said(optimizer)
            )
        words = f"{type(optimizer).__name__}.step with {'; '.join(kinds)}"
        if not tensors:
            _words[optimizer] = given, words
    return words


def _rounded(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_rounded, value))}]"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _plain(value: Any) -> Any:
    """A value that JSON can hold; None of others, which are not compared."""
    if isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, tuple | list):
        return [_plain(v) for v in value]
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_cuda and sparse_check.comparable(value):
        return value.item()
    return None


def _difference(mine: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> tuple[int, str, Any, Any] | None:
    """The first field that differs; groups of which a rank has more are told elsewhere, where their gradients are summed."""
    for i, (here, there) in enumerate(zip(mine, theirs, strict=False)):
        for key in here.keys() & there.keys():
            if not alike(here[key], there[key]):
                return i, key, here[key], there[key]
    return None
