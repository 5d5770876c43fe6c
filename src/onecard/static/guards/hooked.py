"""Whether the classes of modules, what they compute, and the hooks around it are as they were."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from operator import attrgetter
from typing import Any

from torch import nn

from onecard._torch import names as _torch
from onecard.train import unreduced

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
TENSOR_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


def stands_for_another(x: Any) -> bool:
    """Whether a parameter stands for a distributed one, which has its gradient (``fleet``'s levels of ZeRO)."""
    return getattr(type(x), "is_local_parameter", False)


def own_gradient(x: Any) -> Any:
    """``x.grad``; of a parameter that stands for a distributed one not that one's, and without having it summed."""
    return _torch.gradient(x) if stands_for_another(x) or unreduced.watched(x) is not None else x.grad


def same_code(fits: Any, roots: Sequence[Any]) -> None:
    """The classes of modules, what these compute, and the hooks of all modules and optimizers (``fits``: ``fits.py``)."""
    modules = [m for root in roots if isinstance(root, nn.Module) for m in root.modules()]
    if modules:
        kinds = fits.fact("kinds", [*map(type, modules)])
        asked = fits.code("[*map(type, {})] != {}", fits.slot(modules), fits.slot(kinds))
        fits.miss(asked, "the class of a module")
        each = [*dict.fromkeys(kinds)]
        known = fits.fact("forwards", [kind.forward for kind in each])
        names = map(fits.slot, (attrgetter("forward"), each, known))
        fits.miss(fits.code("[*map({}, {})] != {}", *names), "forward of a class of modules")
    _same_of_all(fits)


def _same_of_all(fits: Any) -> None:
    """Which hooks of all modules and optimizers there are, but for ours, which come with the first distributed tensor."""
    held = _torch.hooks_of_all
    keys = fits.code("({},)", fits.joined(", ", (fits.code("*{}", fits.slot(h)) for h in held)))
    known = fits.fact("hooks of all", fits.value(keys))
    others = fits.slot(partial(_users_differ, known))
    fits.miss(fits.code("{} != {} and {}()", keys, fits.slot(known), others), "hooks of all modules and optimizers")


def _users_differ(known: Sequence[int]) -> bool:
    now = [(i, hook) for held in _torch.hooks_of_all for i, hook in held.items()]
    ours = {i for i, hook in now if str(getattr(hook, "__module__", "")).partition(".")[0] == "onecard"}
    return [i for i, _ in now if i not in ours] != [i for i in known if i not in ours]


def same_keys(fits: Any, hooks: Sequence[Any], name: str) -> None:
    """Which hooks there are."""
    held = [*map(fits.slot, hooks)]
    keys = fits.code("({},)", fits.joined(", ", (fits.code("*{}", h) for h in held)))
    known = fits.fact((name, "hooks"), fits.value(keys))
    other = fits.joined(" or ", held) if not known else fits.code("{} != {}", keys, fits.slot(known))
    fits.miss(other, f"hooks of {name}")
