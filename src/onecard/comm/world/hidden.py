"""A program for one card on several ranks: to it there is no process group."""

from __future__ import annotations

import sys
from typing import Any

import torch.distributed as dist

from onecard.comm.base.record import user_line
from onecard.errors import AutoError

_REFUSED = ("init_process_group", "get_rank", "get_world_size", "new_group", "barrier", "all_reduce")


def hidden() -> list[tuple[Any, str, Any]]:
    """What takes the place of torch's functions: (module, name, function), for who is neither onecard nor torch itself."""
    return [_answered("is_initialized", False), *map(_refused, _REFUSED)]


def _is_users() -> bool:
    """Whether what calls the caller is a program's, or a library's that it uses."""
    name = str(sys._getframe(2).f_globals.get("__name__", ""))
    return not name.startswith(("onecard", "torch.", "_onecard"))


def _answered(name: str, answer: Any) -> tuple[Any, str, Any]:
    real = getattr(dist, name)

    def ask(*args: Any, **given: Any) -> Any:
        return answer if _is_users() else real(*args, **given)

    return dist, name, ask


def _refused(name: str) -> tuple[Any, str, Any]:
    real = getattr(dist, name)

    def ask(*args: Any, **given: Any) -> Any:
        if not _is_users():
            return real(*args, **given)
        raise AutoError(
            f"{user_line(sys._getframe(1))}: torch.distributed.{name}: the program divides its work itself, and --auto takes "
            "a program for one card (as one_card() shows it). Start it without: onecard run --nproc_per_node N script.py"
        )

    return dist, name, ask
