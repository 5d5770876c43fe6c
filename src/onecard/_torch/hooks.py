"""Hooks of all modules, taken off without a rest; and what hooks of pruning and of weight norm make."""

from __future__ import annotations

import pickle
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType, SimpleNamespace
from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as modules
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import parametrize
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm


class LeftBehind:
    """A hook that a saved module has not (``module_pickler``). Where Python's own pickler writes it, one of Python's that does
    nothing is in its place, also where no onecard is.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return partial, (sys.audit, "onecard: a hook of several ranks, which does nothing here")


class _Pickler(pickle.Pickler):
    def reducer_override(self, x: Any) -> Any:
        if not isinstance(x, nn.Module):
            return NotImplemented
        hooks = {name: value for name, value in vars(x).items() if "_hooks" in name and isinstance(value, OrderedDict)}
        ours = {i for of_kind in hooks.values() for i, hook in of_kind.items() if isinstance(hook, LeftBehind)}
        reduced = x.__reduce_ex__(2)  # torch's protocol, and its marks of a hook have the hook's number
        if not ours or not isinstance(reduced, tuple) or len(reduced) < 3 or not isinstance(reduced[2], dict):
            return NotImplemented
        kept = {
            name: OrderedDict((i, h) for i, h in of_kind.items() if i not in ours) for name, of_kind in hooks.items()
        }
        return (*reduced[:2], {name: kept.get(name, value) for name, value in reduced[2].items()}, *reduced[3:])


def module_pickler() -> Any:
    """Python's ``pickle`` for ``torch.save``, by which a module is as it would be on one card."""
    return SimpleNamespace(**{**vars(pickle), "Pickler": _Pickler})


# Which hooks are given keywords. In its place: none, so that nothing is taken off it.
_given_keywords: dict[int, bool] = getattr(modules, "_global_forward_hooks_with_kwargs", {})


def after_all_modules(hook: Callable[..., None]) -> Callable[[], None]:
    """Call a hook behind the forward of each module, with its keywords; what is returned takes it off.

    torch's own handle leaves a mark behind, for which ``torch.compile(module)`` warns of a hook that is not there.
    """
    handle = register_module_forward_hook(hook, with_kwargs=True, always_call=True)

    def remove() -> None:
        handle.remove()
        _given_keywords.pop(handle.id, None)

    return remove


def keywords_of(module: nn.Module) -> dict[str, Any] | None:
    """What a module that is about to run is called with by name, in its place: torch gives it to no hook of all modules.

    For the hook itself, or what it calls; None where torch's call of hooks looks otherwise.
    """
    frame: FrameType | None = sys._getframe(1)
    for _ in range(6):  # the hook, and few callers of it
        if frame is not None and frame.f_code.co_qualname.startswith("Module._call_impl"):
            local = frame.f_locals
            return local["kwargs"] if local.get("self") is module and isinstance(local.get("kwargs"), dict) else None
        frame = frame and frame.f_back
    return None


@contextmanager
def without_cached_weights() -> Iterator[None]:
    """Inside, ``parametrize.cached()`` keeps nothing, and gives nothing that it has."""
    names = ("_cache_enabled", "_cache")
    before = [getattr(parametrize, name) for name in names]
    parametrize._cache_enabled, parametrize._cache = 0, {}
    try:
        yield
    finally:
        for name, value in zip(names, before, strict=True):
            setattr(parametrize, name, value)


@contextmanager
def without_products(module: nn.Module) -> Iterator[None]:
    """Inside, no module has what ``nn.utils.prune``, ``nn.utils.weight_norm`` and ``nn.utils.spectral_norm`` make of parameters
    ahead of each forward: the graph of it holds them, or it has their memory.
    """
    hooks = [
        (m, h, name)
        for m in module.modules()
        for h in m._forward_pre_hooks.values()
        if isinstance(h, (BasePruningMethod, WeightNorm, SpectralNorm))
        and isinstance(vars(m).get(name := h._tensor_name if isinstance(h, BasePruningMethod) else h.name), Tensor)
    ]
    made = [vars(m).pop(name).requires_grad for m, _, name in hooks]
    try:
        yield
    finally:
        for (m, hook, name), graph in zip(hooks, made, strict=True):
            if not isinstance(hook, SpectralNorm):
                hook(m, None)
            elif graph:  # as it was, without a power iteration more
                setattr(m, name, hook.compute_weight(m, do_power_iteration=False))
            else:
                setattr(m, name, getattr(m, f"{name}_orig").detach())
