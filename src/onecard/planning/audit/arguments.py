"""Arguments of Megatron-LM, out of a shell script, a file that lists them, or its YAML, as settings."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from onecard.errors import PlanError
from onecard.planning.audit.settings import ARGUMENTS, Settings, flat, shown
from onecard.planning.audit.shell import Argument, ShellScript, script
from onecard.planning.audit.yaml_text import read_yaml
from onecard.planning.json_text import text_of

TELL = {
    "num-layers", "hidden-size", "num-attention-heads", "tensor-model-parallel-size", "pipeline-model-parallel-size",
    "micro-batch-size", "global-batch-size", "seq-length", "use-distributed-optimizer", "sequence-parallel",
}  # fmt: skip
"""Arguments by which a command is known to be Megatron's."""
_OPTION = re.compile(r"--[A-Za-z][\w.-]*")
_SAME = {"nproc-per-node": "nproc_per_node", "nnodes": "nnodes", "num-gpus": "nproc_per_node", "num-nodes": "nnodes"}


def megatron_arguments(path: Path, define: Mapping[str, str]) -> tuple[Settings, ShellScript]:
    """The arguments of the command in a file that starts Megatron; where it has several, of the last.

    Raises:
        PlanError: no such command.
    """
    made = script(path, define)
    commands = [_split(command) for command in made.commands]
    listed = [command for command in commands if command and command[0].text.startswith("--")]
    theirs = [command for command in commands if _tells(command) and command[0].text not in ("echo", "printf")]
    if listed and all(command in listed for command in theirs):
        theirs = [[argument for command in listed for argument in command]]
    if not theirs or not _tells(theirs[-1]):
        raise PlanError(f"{path}:1: starts nothing with arguments of Megatron-LM, such as --num-layers; name a script or a file"
                        " of arguments that does")  # fmt: skip
    values, lines = _named(theirs[-1])
    while "yaml-cfg" in values:
        _with_yaml(path, values, lines)
    return Settings(str(path), values, lines, ARGUMENTS), made


def _tells(command: list[Argument]) -> bool:
    return any(_name(argument.text) in TELL for argument in command)


def _name(text: str) -> str:
    return text.partition("=")[0].lstrip("-").replace("_", "-") if text.startswith("--") else ""


def _split(command: list[Argument]) -> list[Argument]:
    """Words that are commands themselves (``bash -c "..."``, a variable with all arguments) taken apart."""
    return [
        Argument(part, argument.where)
        for argument in command
        for part in (_blanks(argument.text) if "--" in argument.text else [argument.text])
    ]


def _blanks(text: str) -> list[str]:
    """Split at blanks, but not within quotes.

    Example:
        >>> _blanks("x --split '99, 1' --a=b")
        ['x', '--split', '99, 1', '--a=b']
    """
    if not re.search(r"\s", text):
        return [text]
    return [a or b or c for a, b, c in re.findall(r"'([^']*)'|\"([^\"]*)\"|((?:\0[^\0]*\0|[^\s\0])+)", text)]


def _named(command: list[Argument]) -> tuple[dict[str, Any], dict[str, str]]:
    """Values and places by name; the last of a name counts, as in argparse."""
    values: dict[str, Any] = {}
    lines: dict[str, str] = {}
    name = ""
    for argument in command:
        if _OPTION.match(argument.text):
            name, sign, value = argument.text.lstrip("-").partition("=")
            name = name.replace("_", "-")
            name = _SAME.get(name, name)
            values[name], lines[name] = value if sign else "", argument.where
        elif name and not values[name]:
            values[name], lines[name] = argument.text, argument.where
    return values, lines


def _with_yaml(path: Path, values: dict[str, Any], lines: dict[str, str]) -> None:
    """Puts what a file of ``--yaml-cfg`` says in its place; sections of it mean nothing."""
    seen: list[Path] = []
    name, where = values.pop("yaml-cfg"), lines.pop("yaml-cfg")
    while name:
        place = path.parent / name
        if "\0" in name or not place.is_file():
            raise PlanError(f"{where}: --yaml-cfg {shown(name)}: there is no such file; give its path")
        if place.resolve() in seen:
            raise PlanError(f"{where}: yaml-cfg {name} leads back to itself; take it out")
        seen.append(place.resolve())
        found = read_yaml(text_of(place), str(place))
        name = ""
        for key, value in flat(found.value).items():
            short = key.rpartition(".")[2].replace("_", "-")
            place_of = found.where(tuple(key.split(".")))
            if short == "yaml-cfg" and isinstance(value, str):
                name, where = value, place_of
            elif short not in values and value not in (None, False) and not isinstance(value, (list, dict)):
                values[short], lines[short] = ("" if value is True else str(value)), place_of
