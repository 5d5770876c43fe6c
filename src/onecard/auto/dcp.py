"""``torch.distributed.checkpoint`` of a program that sees one card: whole tensors, written and read by each rank for itself.

Torch would have the ranks share the writing, and what others than rank 0 write is gone when the program ends.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial, wraps
from typing import Any

from onecard._torch.imported import when_imported
from onecard._torch.names import tree_map
from onecard.auto import taken
from onecard.tensor import DistTensor, unshard

_PACKAGE = "torch.distributed.checkpoint"


def one_card(stack: ExitStack) -> None:
    """Until the stack closes, if the program imports it."""
    when_imported(stack, f"{_PACKAGE}.state_dict_saver", partial(_saver, stack))
    when_imported(stack, f"{_PACKAGE}.state_dict_loader", partial(_loader, stack))


def _saver(stack: ExitStack, module: Any) -> None:
    def ahead(given: dict[str, Any]) -> None:
        state = given["state_dict"]
        given["state_dict"] = {k: v.state_dict() if isinstance(v, module.Stateful) else v for k, v in state.items()}
        _of_whole(given)

    save = _with(module._save_state_dict, _of_whole)
    later = _with(module.async_save, ahead)  # a thread writes: what is divided is made whole before
    package = [] if _PACKAGE not in sys.modules else [(sys.modules[_PACKAGE], "async_save", later)]
    taken.put(stack, [(module, "_save_state_dict", save), (module, "async_save", later), *package])


def _loader(stack: ExitStack, module: Any) -> None:
    taken.put(stack, [(module, "_load_state_dict", _with(module._load_state_dict, _alone))])


def _with(real: Callable[..., Any], change: Callable[[dict[str, Any]], None]) -> Callable[..., Any]:
    """A function whose arguments are changed before it is called."""
    signature = inspect.signature(real)

    @wraps(real)
    def called(*args: Any, **given: Any) -> Any:
        bound = signature.bind(*args, **given)
        change(bound.arguments)
        return real(*bound.args, **bound.kwargs)

    return called


def _alone(given: dict[str, Any]) -> None:
    given["no_dist"] = True


def _of_whole(given: dict[str, Any]) -> None:
    given["state_dict"] = tree_map(lambda x: unshard(x) if isinstance(x, DistTensor) else x, given["state_dict"])
    _alone(given)


__all__ = ["one_card"]
