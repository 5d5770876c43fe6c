"""What a recording takes for granted of the program that it is bound to, as data: so that a file carries its guards.

Within a process objects are compared (``fits.py``); here they are names, so that another process can be asked.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from onecard.static.guards.before import SETTLED, numbers_of, options_of, values_of
from onecard.static.guards.entries import absent_of
from onecard.static.guards.hooked import HOOKS, TENSOR_HOOKS
from onecard.train.own_parameters import own_parameters

Beliefs = tuple[tuple[str, Any], ...]


def believed(roots: Sequence[tuple[str, Any]], before: dict[Any, Any] | None = None) -> Beliefs:
    """What of modules and optimizers a step depends on, each with words for it.

    Args:
        roots: with their names.
        before: what they held before the step, as far as it may have changed that (``still_before``).

    Example:
        >>> dict(believed([("model", nn.Dropout(0.1))]))["model.p"]
        0.1
    """
    found: dict[str, Any] = {}
    names: dict[int, str] = {}
    for name, root in roots:
        if isinstance(root, nn.Module):
            for path, module in root.named_modules():
                found |= _of_module(f"{name}.{path}" if path else name, module, before or {})
            found |= _ties(name, root, names)
    for name, root in roots:
        if isinstance(root, Optimizer):
            found |= _of_optimizer(name, root, names, before or {})
    return tuple(found.items())


def told(value: Any) -> Any:
    """A value as words, numbers, and lists of them. Functions and classes are their names."""
    if isinstance(value, tuple | list):
        return [*map(told, value)]
    if value is None or type(value) in (bool, int, float, str):
        return value
    return _called(value) if isinstance(value, SETTLED) and not isinstance(value, torch.device) else str(value)


def difference(was: Beliefs, now: Beliefs) -> str:
    """The first that is not as it was, in words; "" if all is.

    Example:
        >>> difference((("model.p", 0.1),), (("model.p", 0.5),))
        'model.p was 0.1 and is 0.5'
    """
    here, there = dict(now), dict(was)
    for words, value in now:
        if words not in there:
            return f"{words} is {value!r}, which was not there"
        if (said := _compared(there[words], value)) is not None:
            return words + said
    return next((f"{words} was {value!r} and is not there" for words, value in was if words not in here), "")


def _compared(was: Any, now: Any) -> str | None:
    """Of two lists the first entry that differs."""
    if isinstance(was, list) and isinstance(now, list) and len(was) == len(now) > 1:
        found = ((i, _compared(a, b)) for i, (a, b) in enumerate(zip(was, now, strict=True)))
        return next((f"[{i}]{said}" for i, said in found if said is not None), None)
    return None if was == now and type(was) is type(now) else f" was {was!r} and is {now!r}"


def _called(value: Any) -> str:
    """A function or class by its name; another object by its class."""
    name = getattr(value, "__qualname__", None)
    kind = value if isinstance(name, str) else type(value)
    module = getattr(kind, "__module__", None)
    return f"{module}.{kind.__qualname__}" if module else str(kind.__qualname__)


def _of_module(name: str, module: nn.Module, before: dict[Any, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {
        f"the class of {name}": _called(type(module)),
        f"the modules in {name}": [*module._modules],
        f"what is None in {name}": absent_of(module),
    }
    found |= {f"{name}.{k}": told(v) for k, v in before.get((name, "still"), values_of(module)).items()}
    params = {n: p for n, p in own_parameters(module).items() if p is not None}
    found[f"requires_grad of the parameters of {name}"] = [[n, p.requires_grad] for n, p in params.items()]
    hooks: list[Any] = [getattr(module, kind) for kind in HOOKS]
    hooks += [getattr(p, kind) for p in params.values() for kind in TENSOR_HOOKS]
    found[f"hooks of {name}"] = [_called(hook) for held in hooks for hook in (held or {}).values()]
    own = module.__dict__.get("forward")
    return found | {f"{name}.forward": None if own is None else _called(own)}


def _ties(name: str, root: nn.Module, names: dict[int, str]) -> dict[str, Any]:
    """Parameters and buffers that are one tensor; all are added to ``names``."""
    found = {}
    named = (*root.named_parameters(remove_duplicate=False), *root.named_buffers(remove_duplicate=False))
    for path, x in named:
        first = names.setdefault(id(x), f"{name}.{path}")
        if first != f"{name}.{path}":
            found[f"the tensor {name}.{path}"] = first
    return found


def _of_optimizer(name: str, optimizer: Optimizer, names: dict[int, str], before: dict[Any, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {
        f"the class of {name}": _called(type(optimizer)),
        f"groups of {name}": len(optimizer.param_groups),
    }
    for i, group in enumerate(optimizer.param_groups):
        here = f"{name}.param_groups[{i}]"
        found |= {f"{here}[{k!r}]": v for k, v in before.get((name, i, "options"), options_of(group)).items()}
        found[f"numbers of {here}"] = sorted(numbers_of(group))
        found[f"parameters of {here}"] = [names.get(id(p)) for p in group["params"]]
        found[f"states of {here}"] = [[*_states(optimizer, p)] for p in group["params"]]
    return found


def _states(optimizer: Optimizer, p: Any) -> Iterator[str]:
    yield from sorted(map(str, optimizer.state.get(p, ())))
