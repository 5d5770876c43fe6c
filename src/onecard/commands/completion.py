"""`onecard completion`: what a shell needs to complete the words of all commands."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass
from importlib import import_module
from io import StringIO
from typing import Annotated, Any, Literal, Union

import tyro

from onecard.commands.front import parsed
from onecard.commands.listed import COMMANDS


@dataclass(frozen=True)
class Asked:
    """Print a script with which your shell completes the commands, their options and files.

    Usage, once: onecard completion bash > ~/.local/share/bash-completion/completions/onecard; for zsh into a folder of
    $fpath: onecard completion zsh > ~/.zfunc/_onecard. Then open a new shell.
    """

    shell: tyro.conf.Positional[Literal["bash", "zsh"]]
    """whose Tab key it is for"""


def main(argv: Sequence[str]) -> int:
    """Prints the script and returns the exit status."""
    shell = parsed(Asked, argv, "completion").shell
    written = StringIO()
    with redirect_stdout(written), suppress(SystemExit):
        tyro.cli(everything(), args=["--tyro-print-completion", shell], prog="onecard", use_underscores=True)
    # Where no word of ours fits, names of files do: scripts, plans, checkpoints.
    print(written.getvalue().replace("complete -F _tyro", "complete -o bashdefault -o default -F _tyro"))
    return 0


def everything() -> Any:
    """All commands with their options, as tyro takes them."""
    each = [
        Annotated[options_of(name), tyro.conf.subcommand(name, description=about)] for name, about in COMMANDS.items()
    ]
    return Union[tuple(each)]  # noqa: UP007


def options_of(name: str) -> Any:
    """The dataclass of a command's options."""
    module = import_module(f"onecard.commands.{name}")
    return module.options() if hasattr(module, "options") else module.Asked
