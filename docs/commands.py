"""Writes commands.md: the help of every command, as the commands print it. Run it after a change of options: python docs/commands.py"""

from __future__ import annotations

import io
import os
from contextlib import redirect_stdout, suppress
from pathlib import Path
from unittest.mock import patch

import tyro

from onecard.cli import help_text
from onecard.commands.completion import options_of
from onecard.commands.listed import GROUPS

PAGE = Path(__file__).with_name("commands.md")
HEAD = """# Commands

One program, `onecard`, with a command for each task.

- The exit status is 0 if all is well, 1 if the answer is no (`prove`: not equal; `plan`: nothing fits; `explain --forbid`: a message that nobody asked for; `audit`: mistakes; `doctor`: something is broken), 2 if there is no answer. `run` ends with the
  status of the first rank that failed.
- Answers go to standard output, all else to standard error. `--json` prints the answer for programs, in place of the table; of `run` it is the last line, behind what the script prints. `completion` has none: its answer is a script.
- Behind `--` are the script's own arguments; `run` takes them behind the script. A script that fails shows its own traceback.
- What cannot be is one line, `onecard COMMAND: what, and what to write`. A wrong option is answered with the nearest right one.
- The Tab key: `onecard completion bash > ~/.local/share/bash-completion/completions/onecard`, once. For zsh: `onecard completion zsh`.

## What is wrong with this machine

`onecard doctor` looks where ranks will run: in the container, under the scheduler, on each host. Each line says what is so; where something is slow, a risk or broken, the next line is the repair. It changes and measures nothing.

| on a machine with | it says | state |
|---|---|---|
{doctor}

"""


def page(doctor: str) -> str:
    """The whole page; ``doctor``: the rows of its table, which tests/test_doctor.py holds true."""
    parts = [HEAD.format(doctor=doctor), "## onecard\n\n", block(help_text())]
    for title, group in GROUPS.items():
        for name in group:
            parts += [f"## onecard {name}\n\n", f"*{title}*\n\n", block(help_of(name))]
    return "".join(parts)


def block(text: str) -> str:
    """A block of text as it is printed."""
    lines = "\n".join(line.rstrip() for line in text.strip().splitlines())
    return f"```text\n{lines}\n```\n\n"


def help_of(name: str) -> str:
    """What ``onecard NAME --help`` prints on a terminal of 100 columns."""
    written = io.StringIO()
    with patch.dict(os.environ, {"COLUMNS": "100"}), redirect_stdout(written), suppress(SystemExit):
        tyro.cli(options_of(name), args=["--help"], prog=f"onecard {name}", use_underscores=True)
    return written.getvalue()


def doctor_rows() -> str:
    """The table of doctor as it stands in the page."""
    text = PAGE.read_text(encoding="utf-8")
    return text.split("|---|---|---|\n", 1)[1].split("\n\n", 1)[0]


if __name__ == "__main__":
    PAGE.write_text(page(doctor_rows()).rstrip() + "\n", encoding="utf-8")
