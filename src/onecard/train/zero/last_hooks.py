"""Hooks before an optimizer's step that run behind the program's own, and those after it ahead of them, whenever registered.

Stages of ZeRO take a part of each gradient when the step begins, for the masters if there are some. A hook that the program
registers later (it clips, scales or logs gradients) would come too late: what it writes to ``p.grad`` would be lost. When the
step ends, parameters are whole again before a hook that was there earlier reads or writes them (averages, norms of weights).
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from torch.optim import Optimizer

_ours: WeakKeyDictionary[Optimizer, list[int]] = WeakKeyDictionary()
_behind: WeakKeyDictionary[Optimizer, list[int]] = WeakKeyDictionary()


def register_last(optimizer: Optimizer, hook: Any) -> None:
    """``register_step_pre_hook``, behind all others but those that come to be last themselves."""
    _ours.setdefault(optimizer, []).append(optimizer.register_step_pre_hook(hook).id)


def register_first_behind(optimizer: Optimizer, hook: Any) -> None:
    """``register_step_post_hook``, ahead of all others but those that have come to be first themselves."""
    hooks: Any = optimizer._optimizer_step_post_hooks
    ours = _behind.setdefault(optimizer, [])
    ours.append(optimizer.register_step_post_hook(hook).id)
    for key in reversed(ours):
        if key in hooks:
            hooks.move_to_end(key, last=False)


def keep_last(optimizer: Optimizer, args: Any = (), kwargs: Any = None) -> None:
    """Before any step, and before its optimizer's own hooks are gone through: put ours behind them."""
    ours = _ours.get(optimizer)
    hooks: Any = getattr(optimizer, "_optimizer_step_pre_hooks", ())
    if ours and [*hooks][-len(ours) :] != ours:
        for key in ours:
            if key in hooks:
                hooks.move_to_end(key)
