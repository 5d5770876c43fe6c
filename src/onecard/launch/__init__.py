"""Starts a program on several ranks: `python -m onecard.launch train.py`, or `onecard run train.py`.

Built on the elastic agent of torch (the one below torchrun), with one log file for each rank, the first failing
rank's traceback last on the terminal, and no open port beyond this machine unless `--master` names one.
"""

from onecard.launch._main import main
from onecard.launch._options import LaunchError, Options

__all__ = ["LaunchError", "Options", "main"]
