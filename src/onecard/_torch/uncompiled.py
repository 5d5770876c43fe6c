"""``torch.compile`` that compiles nothing: its modules are those of torch's, with their names in checkpoints. What was
compiled before, called as it was written. And onecard's own functions, which the compiler does not look into.
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import nn

from onecard._torch import patches
from onecard._torch.imported import when_imported


@functools.lru_cache(maxsize=1)
def _kind() -> type[nn.Module] | None:
    """torch's class of compiled modules, which computes as what it holds; None: this torch has none. Imported when needed."""
    try:
        made: Any = import_module("torch._dynamo.eval_frame").OptimizedModule
    except (ImportError, AttributeError):
        return None

    class Uncompiled(made):
        def __init__(self, module: nn.Module) -> None:
            super().__init__(module, _as_it_is)
            self._torchdynamo_orig_callable = module.forward

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return nn.Module.__call__(self, *args, **kwargs)  # torch's warns of hooks of all modules, which are ours

        def __reduce__(self) -> Any:
            return torch.compile, (self._orig_mod,)

        def _initialize(self) -> None:  # torch's looks through all of torch, in which names are exchanged here
            pass

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return self._orig_mod(*args, **kwargs)

    return Uncompiled


def _as_it_is(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


def is_wrapper(module: nn.Module) -> bool:
    """Whether a module stands for the one that it calls: its parameters have other names in it."""
    return type(module).__name__ == "Uncompiled" and isinstance(module, _kind() or ())


@functools.wraps(torch.compile)
def uncompiled(model: Any = None, *_: Any, **__: Any) -> Any:
    """In the place of ``torch.compile``."""
    if model is None:
        return uncompiled
    kind = _kind() if isinstance(model, nn.Module) else None
    return model if kind is None or is_wrapper(model) else kind(model)


@contextmanager
def eagerly() -> Iterator[None]:
    """Inside, what is compiled runs as it was written: compiled code shows nobody its operators, and the compiler would take
    those who look on for a part of the program.
    """
    if "torch._dynamo" not in sys.modules:  # nobody has compiled anything; to import it takes a second
        yield
        return
    with torch.compiler.set_stance("force_eager"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*when there are global hooks on modules", UserWarning)  # they are ours
        yield


_waiting = ExitStack()
"""Until the compiler is there."""


def untraced() -> None:
    """Have torch's compiler end its graph where onecard begins: it would trace hooks and messages as if the program had them."""
    _waiting.close()
    when_imported(_waiting, "torch._dynamo.trace_rules", _skips_us)


patches.with_first_tensor(untraced)


def _skips_us(rules: ModuleType) -> None:
    if hasattr(rules, "SKIP_DIRS") and hasattr(rules, "_recompile_re"):
        mine = [
            f"{room}/" if room.is_dir() else str(room)
            for room in sorted(Path(__file__).parents[1].iterdir())
            if room.name not in ("random", "recorded.py")  # draws are operators, and compile
        ]
        patches.hook("torch._dynamo.trace_rules.SKIP_DIRS", lambda skip: skip(), lambda: _skipped(rules, mine))


def _skipped(rules: Any, places: list[str]) -> Any:
    rules.SKIP_DIRS.extend(places)
    rules._recompile_re()

    def remove() -> None:
        for place in places:
            rules.SKIP_DIRS.remove(place)
        rules._recompile_re()

    return SimpleNamespace(remove=remove)
