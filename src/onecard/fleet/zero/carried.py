"""What a parameter is a part of belongs to its place in a module: whatever takes the place is a part of the same.

Layers declare it by name (``Parallel``). What the program has marked itself (a norm that sees a part of the sequence) is noted
on the parameter, and handed on where a module gets another one in its place: by an assignment, ``load_state_dict(assign=True)``,
``to_empty``, a conversion that overwrites or swaps, ``copy.deepcopy``.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import is_
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from onecard._torch import patches
from onecard.fleet.layers.parameters import Parallel, fit, hold
from onecard.train.shard import noted

_HELD = "_held"


def install() -> None:
    """Watch what takes a parameter's place."""
    hooks = "torch.nn.modules.module._global_parameter_registration_hooks"
    patches.hook(hooks, register_module_parameter_registration_hook, _registered)
    patches.replace("fleet: torch.nn.Module._apply", nn.Module, "_apply", _over_apply)
    patches.replace("torch.nn.Parameter.__deepcopy__", nn.Parameter, "__deepcopy__", _over_deepcopy)


def _registered(module: nn.Module, name: str, parameter: Any) -> None:
    if not isinstance(module, Parallel):  # which knows itself
        _hand_on(noted(module._parameters.get(name)), parameter, module, name)


def _hand_on(what: Any, new: Any, module: nn.Module, name: str) -> None:
    if what is not None and isinstance(new, Tensor) and noted(new) is None:
        hold(new, fit(what, new, f"{type(module).__name__}.{name}"))


def _over_apply(torchs: Any) -> Any:
    """``Module._apply`` writes to a module's dict of parameters, or exchanges what they are."""

    def _apply(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if (gathered := _gathered(self)) is not None:
            for module in self.modules():
                if (parts := _gathered(module)) is not None:
                    parts.check_kept(*args)
            self.__dict__["_parameters"] = {}
            try:
                return torchs(self, *args, **kwargs)
            finally:
                self.__dict__["_parameters"] = gathered
        before = {name: what for name, p in self._parameters.items() if (what := noted(p)) is not None}
        made = torchs(self, *args, **kwargs)
        for name, what in before.items():
            _hand_on(what, self._parameters.get(name), self, name)
        return made

    return _apply


def _gathered(module: nn.Module) -> Any:
    """The parameters of a module of level "p_g_os", which are parts between two uses; None of any other."""
    return module._parameters if hasattr(module._parameters, "check_kept") else None


def _over_deepcopy(torchs: Any) -> Any:
    def __deepcopy__(self: Any, memo: Any) -> Any:
        made = torchs(self, memo)
        what = noted(self)
        if what is not None and noted(made) is None:
            hold(made, what)
        return made

    return __deepcopy__


def declare(model: nn.Module) -> None:
    """Have modules remember what their parameters are, and tell those that have forgotten it."""
    for module in model.modules():
        known = module.__dict__.get(_HELD, {})
        if isinstance(module, Parallel):
            module.note_buffers()
        for name, p in module._parameters.items():
            if p is None:
                continue
            if noted(p) is None:
                _hand_on(known.get(name), p, module, name)
            elif name not in known:
                module.__dict__[_HELD] = known = {**known, name: noted(p)}
    for module in model.modules():
        if (say := getattr(module, "mark_parts", None)) is not None:  # a mixture, of all that its experts have by now
            say()


class Members:
    """Which parameters and modules a model has, to be asked often whether they are the same."""

    def __init__(self, model: nn.Module) -> None:
        self._dicts = [
            (each, [*each.values()]) for module in model.modules() for each in (module._parameters, module._modules)
        ]
        # Held, as what comes later may have the number of one that is gone, on one rank and not on another.
        self._held = [*model.parameters(), *model.buffers()]
        self._known = {*map(id, self._held)}

    def same(self) -> bool:
        """Whether nothing was exchanged, added or taken away."""
        return all(len(now) == len(then) and all(map(is_, now.values(), then)) for now, then in self._dicts)

    def new(self, tensors: Iterable[Any]) -> list[Any]:
        """Those that were not there."""
        return [x for x in tensors if id(x) not in self._known]
