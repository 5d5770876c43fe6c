"""Starts a program on several ranks: `python -m onecard.launch train.py`, or `onecard run train.py`.

Built on the elastic agent of torch (the one below torchrun), with one log file for each rank, the first failing
rank's traceback last on the terminal, and no open port beyond this machine unless `--master` names one.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from onecard.launch._main import LaunchError, Options, main

__all__ = ["LaunchError", "Options", "main"]


def __getattr__(name: str) -> Any:  # not ahead of its use: torch's agent takes a third of the time that onecard takes
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from onecard.launch import _main

    return getattr(_main, name)
