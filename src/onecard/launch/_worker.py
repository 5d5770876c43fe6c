"""The first code that a rank runs: connects its output, ties its life to the launcher's, then becomes the script.

Run by path, as `python _worker.py script|module NAME ARGUMENTS...`, and not as part of the package: importing the
package would import torch before the script has had its say (environment, start method, ...). What the launcher has
to say comes in the environment, and is taken out of it.
"""

import sys

if __name__ == "__main__" and not sys.flags.safe_path:
    del sys.path[0]  # this folder: it must not hide modules of the same name

import json
import os
import signal
import time
import traceback
from contextlib import suppress
from types import ModuleType, TracebackType

PR_SET_PDEATHSIG = 1
_disk = (open,)  # what a program opens under `--auto` may lie elsewhere, also by names of this module


def main() -> None:
    """Runs the script or module named on the command line as `__main__`."""
    kind, name = sys.argv[1:3]
    _die_with(int(os.environ.pop("ONECARD_LAUNCHER_PID")))
    _redirect(os.environ.pop("ONECARD_OUTPUT"), os.environ.pop("ONECARD_ERRORS"))
    record = _Recorder(os.environ.pop("ONECARD_ERROR_FILE"))
    _hand_over(os.environ.pop("ONECARD_BOARD"))
    sys.excepthook = record.exception
    sys.argv[:] = [name, *sys.argv[3:]]
    explained = os.environ.pop("ONECARD_EXPLAIN", "") and os.environ["RANK"] == "0"
    try:
        if job := os.environ.pop("ONECARD_AUTO", ""):  # a program for one card: what it is to see is made ahead of it
            from onecard.auto.rank import begin

            begin(job)
        if explained:
            from onecard.reports import told

            told.begin()
        if kind == "module":
            import runpy

            sys.path.insert(0, os.getcwd())
            runpy.run_module(name, run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, os.path.dirname(os.path.realpath(name)))
            _run_script(name)
    except SystemExit as request:
        if request.code not in (None, 0):
            record.write("", request.code if isinstance(request.code, int) else 1)
        raise


def _die_with(launcher: int) -> None:
    """Ends this process when the launcher is gone, even by SIGKILL, which leaves it no time to end its ranks."""
    if sys.platform != "linux":
        return
    import ctypes

    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher:  # it went before the call
        os._exit(1)


def _hand_over(board: str) -> None:
    """Leaves the path of this rank's flight board where ``comm.world`` finds it, and no program that the rank starts."""
    launcher = ModuleType("_onecard_launcher")
    launcher.__dict__["board"] = board
    sys.modules[launcher.__name__] = launcher


def _redirect(output: str, errors: str) -> None:
    # O_NOCTTY: a pseudo-terminal must not become the one that signals this session.
    into = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOCTTY
    opened = [os.open(os.devnull, os.O_RDONLY), *(os.open(path, into) for path in (output, errors))]
    for target, source in enumerate(opened):
        if source != target:
            os.dup2(source, target)
            os.close(source)
    # Python chose its buffering and encoding for what it was started with.
    is_terminal = os.isatty(1) or os.isatty(2)
    sys.stdout = open(1, "w", buffering=1, closefd=False, errors="replace")  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False, errors="replace")  # noqa: SIM115
    if is_terminal:
        os.environ.setdefault("TERM", "xterm-256color")


def _run_script(path: str) -> None:
    """Does what `python path` does: a fresh `__main__`, so that pickles and multiprocessing find its contents."""
    main_module = ModuleType("__main__")
    main_module.__file__ = path
    main_module.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = main_module
    with open(path, "rb") as file:
        code = compile(file.read(), path, "exec")
    exec(code, main_module.__dict__)


class _Recorder:
    """Notes when and how this rank failed: which rank was first decides what the launcher shows."""

    def __init__(self, path: str) -> None:
        self._path = path

    def exception(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        text = "".join(traceback.format_exception(kind, error, _own_frames(trace, error)))
        message = ""
        with suppress(Exception):  # an error of the user's own may not know how to say itself
            message = str(error)
        self.write(text, message=message)
        sys.stderr.write(text)

    def write(self, text: str, code: int = 1, message: str = "") -> None:
        """``message``: the error's own words, without the notes that a traceback ends with."""
        note = {"time": time.monotonic(), "text": text, "message": message, "code": code & 0xFF or 1}
        with _disk[0](self._path, "w") as file:
            json.dump(note, file)


def _own_frames(trace: TracebackType | None, error: BaseException) -> TracebackType | None:
    """Leaves out the frames of this file and of runpy, which no user needs to see."""
    inner = trace
    while inner is not None and inner.tb_frame.f_code.co_filename in (__file__, "<frozen runpy>"):
        inner = inner.tb_next
    is_ours = inner is None and not isinstance(error, SyntaxError)
    return trace if is_ours else inner


if __name__ == "__main__":
    main()
