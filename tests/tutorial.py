"""The tutorial as a stranger goes through it: its files are saved, its commands are run, in an empty folder, in order.

Only the standard library is used: `tests/wheel.py` runs it with an environment that has nothing but the wheel.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import threading
import time
from collections.abc import Mapping
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "tutorial.md"
_FENCE = re.compile(r"^```(?P<info>[^\n`]*)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)
_BY_HAND = {"python3", "source", "pip"}  # the environment, which is there already
_NUMBER = re.compile(r"\d+\.\d+")


def walk(folder: Path, environment: Mapping[str, str], wait: float = 300.0) -> list[str]:
    """Goes through the page; returns a line for each command, with its seconds. Raises where one says something else."""
    said, poem = [], ""
    for section in re.split(r"^## ", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
        blocks = list(_FENCE.finditer(section))
        for block, after in zip(blocks, [*blocks[1:], None], strict=False):
            language, *words = block["info"].split()
            options = dict(word.partition("=")[::2] for word in words)
            if "file" in options:
                (folder / options["file"]).write_text(block["body"], encoding="utf-8")
                assert after is not None and after["info"] == "text"
                poem = after["body"]
            for line in block["body"].splitlines() if language == "bash" else ():
                command = shlex.split(line, comments=True)
                if command and command[0] not in _BY_HAND:
                    stops = "Ctrl-C" in section[: block.start()] and command[:2] == ["onecard", "run"]
                    said.append(_run(command, folder, environment, wait, poem, stops))
    return said


def _run(command: list[str], folder: Path, environment: Mapping[str, str], wait: float, poem: str, stops: bool) -> str:
    begin, lines = time.monotonic(), []
    with subprocess.Popen(
        command,
        cwd=folder,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout is not None
        guard = threading.Timer(wait, process.kill)
        guard.start()
        for line in process.stdout:
            lines.append(line)
            if stops and line.startswith("epoch"):
                process.send_signal(signal.SIGINT)  # as Ctrl-C does
                stops = False
        status = process.wait()
        guard.cancel()
    text, stopped = "".join(lines), "epoch" in "".join(lines) and poem.splitlines()[-1] not in "".join(lines)
    assert status == 0 or stopped, f"{shlex.join(command)} ended with {status}:\n{text}"
    if command[-1].endswith(".py") and not stopped:
        assert alike(text, poem), f"{shlex.join(command)} said\n{text}\nand the page\n{poem}"
    return f"{time.monotonic() - begin:5.1f} s  {shlex.join(command)}{'  (stopped)' if stopped else ''}"


def alike(text: str, poem: str) -> bool:
    """Whether what was printed is the end of the page's text, numbers to two in the last place; a resumed run says less."""
    mine, wanted = ([line for line in t.splitlines() if line.strip()] for t in (text, poem))
    begin = next((i for i, line in enumerate(mine) if line.startswith("epoch")), None)
    if begin is None:
        return False
    mine = [line for line in mine[begin:] if not line.startswith("onecard run --auto")]
    if len(mine) > len(wanted):
        return False
    for got, want in zip(mine, wanted[-len(mine) :], strict=True):
        numbers = zip(_NUMBER.findall(got), _NUMBER.findall(want), strict=False)
        if _NUMBER.sub("#", got) != _NUMBER.sub("#", want) or any(
            abs(float(a) - float(b)) > 2.1e-3 for a, b in numbers
        ):
            return False
    return True
