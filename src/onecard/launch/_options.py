"""The command line of the launcher: options, then a script or `-m module`, then whatever the script takes."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import tyro

from onecard.launch import _torchrun
from onecard.launch._wrong import LaunchError

USAGE = "onecard run [options] script.py [arguments of the script]"


@dataclass(frozen=True)
class Options:
    """Run a training script on several ranks, one process each.

    Usage: onecard run [options] script.py [arguments], or with -m module in place of script.py. What follows the
    script belongs to the script, unchanged.
    """

    nproc_per_node: Annotated[int | None, tyro.conf.arg(metavar="N", help_behavior_hint="")] = None
    """Ranks to start on this machine. By default one for each GPU, or 1 if there is none. MIN:MAX starts MAX, and after a
    failure as many as did not die, MIN at least."""

    gpus: Annotated[
        str | None, tyro.conf.arg(aliases=["--devices", "--device"], metavar="0,1,...", help_behavior_hint="")
    ] = None
    """GPUs to use, one rank on each. Without any GPU the list only says how many ranks to start, on the CPU."""

    nnodes: int = 1
    """Machines that take part. Start the same command on each, with its own --node_rank."""

    node_rank: int = 0
    """The number of this machine, from 0."""

    master: Annotated[str | None, tyro.conf.arg(metavar="HOST:PORT", help_behavior_hint="")] = None
    """Where machine 0 listens for the others. On one machine: a free port of the loopback interface."""

    log_dir: Path = Path("logs")
    """Folder of the log files, one for each rank: rank0.log, rank1.log, ..."""

    max_restarts: int = 0
    """How often all ranks are started again after a failure."""

    wait: float = 900.0
    """Seconds that machines wait for one another at the start, and at a restart."""

    lost: float = 30.0
    """Seconds without a sign of another machine after which the job ends."""

    grace: float = 30.0
    """Seconds that ranks have to save and to end after a SIGTERM to the launcher."""

    json: Annotated[bool, tyro.conf.FlagCreatePairsOff, tyro.conf.arg(help_behavior_hint="")] = False
    """How the job ended as one line of JSON, the last of standard output."""

    fewest: tyro.conf.Suppress[int | None] = None
    """The MIN of --nproc_per_node MIN:MAX."""


@dataclass(frozen=True)
class Target:
    """What each rank runs: a file, or a module if `is_module`, with its arguments."""

    name: str
    is_module: bool
    arguments: tuple[str, ...]


def parse(argv: Sequence[str]) -> tuple[Options, Target]:
    """Splits and checks a command line. Raises LaunchError, or SystemExit as tyro does (help, wrong options).

    >>> options, target = parse(["--nproc_per_node=2", "-m", "this", "--nproc_per_node", "8"])
    >>> options.nproc_per_node, target.name, target.arguments
    (2, 'this', ('--nproc_per_node', '8'))
    """
    ours, rest = split(argv)
    options = read(ours)
    _check(options)
    return options, _target(rest)


def read(ours: Sequence[str]) -> Options:
    """Options as they are written, before it is asked whether they go together."""
    ours, fewest = _range(_torchrun.translated(ours))
    _check_known(ours)
    _check_numbers(ours)
    return replace(tyro.cli(Options, args=ours, prog="onecard run", use_underscores=True), fewest=fewest)


_OF_OTHERS = ("n", "np", "p", "nprocs", "nproc", "ngpus", "num_gpus", "num_processes", "ntasks", "world_size", "world")
"""How other launchers and commands call the number of ranks."""


def _is_of_plans(name: str) -> bool:
    """Whether ``oc.Plan`` has a field of that name."""
    from onecard.planning.plan import Plan  # torch is loaded for it: only where an error is worded

    return any(field.name == name for field in fields(Plan))


def _check_known(ours: Sequence[str]) -> None:
    """Whether each option is one.

    >>> _check_known(["--nproc_per_node", "2", "--log-dir", "logs"])
    >>> _check_known(["--gruce", "2"])
    Traceback (most recent call last):
    onecard.launch._wrong.LaunchError: there is no option --gruce; did you mean --grace? All of them: onecard run --help
    """
    names = [*(field.name for field in fields(Options)), "devices", "device", "help", "h"]
    for word in ours:
        name = word.partition("=")[0].lstrip("-").replace("-", "_")
        if not word.startswith("-") or name in names or name.lstrip(".").isdecimal():
            continue
        ranks = name in _OF_OTHERS or word[:2] == "-n" or name.startswith("np")
        near = get_close_matches(name, [*names, "auto", "dry_run", "explain", "machine", "memory"], 1)
        meant = "; did you mean --nproc_per_node N?" if ranks else f"; did you mean --{near[0]}?" if near else "."
        if _is_of_plans(name):
            meant = (
                f": it is a plan's. onecard plan train.py --world N --fixed {name}=VALUE -o plan.json looks for one, "
                "onecard run --auto plan.json train.py follows it."
            )
        raise LaunchError(f"there is no option {word.partition('=')[0]}{meant} All of them: onecard run --help")


def split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Divides a command line before the script, or before `-m`.

    >>> split(["--gpus", "0,1", "train.py", "--gpus", "x"])
    (['--gpus', '0,1'], ['train.py', '--gpus', 'x'])
    """
    at = 0
    while at < len(argv) and argv[at].startswith("-") and argv[at] != "-m":
        lone = "=" in argv[at] or argv[at].lstrip("-").replace("-", "_") in _torchrun.LONE
        at += 1 if lone else 2
    return list(argv[:at]), list(argv[at:])


def ranks_behind(target: Target) -> str:
    """How many ranks were asked for behind the script, where the launcher does not look; "" if they were not.

    >>> ranks_behind(Target("train.py", False, ("--lr", "1", "--nproc-per-node", "2")))
    '--nproc-per-node 2'
    """
    for i, word in enumerate(target.arguments):
        if word.partition("=")[0].replace("-", "_") == "__nproc_per_node":
            return word if "=" in word else " ".join(target.arguments[i : i + 2])
    return ""


def _range(ours: Sequence[str]) -> tuple[list[str], int | None]:
    """Options with the MAX of ``--nproc_per_node MIN:MAX`` alone, and the MIN.

    >>> _range(["--nproc_per_node", "3:4"]), _range(["--nproc-per-node=3:4", "--grace", "5"])
    ((['--nproc_per_node', '4'], 3), (['--nproc-per-node=4', '--grace', '5'], 3))
    """
    kept, fewest = list(ours), None
    for i, word in enumerate(ours):
        found = re.fullmatch(r"((?:--nproc[-_]per[-_]node=)?)(\d+):(\d+)", word)
        named = found is not None and (found[1] or (i and ours[i - 1].replace("-", "_") == "__nproc_per_node"))
        if found is not None and named:
            kept[i], fewest = found[1] + found[3], int(found[2])
    return kept, fewest


def _check_numbers(ours: Sequence[str]) -> None:
    """Options that are numbers, before tyro speaks of the types that it tried."""
    words = [part for word in ours for part in (word.split("=", 1) if word.startswith("--") else [word])]
    for option, value in pairwise(words):
        name = option.replace("-", "_").lstrip("_")
        if name in _NUMBERS and not value.lstrip("-").isdecimal():
            instead = " Without it there is one rank for each GPU, or 1." if name == "nproc_per_node" else ""
            raise LaunchError(
                f"--{name} is {value!r}; write a number: onecard run --{name} {_NUMBERS[name]} script.py.{instead}"
            )


_NUMBERS = {"nproc_per_node": 2, "nnodes": 2, "node_rank": 0, "max_restarts": 3}  # each with an example


def _target(rest: list[str]) -> Target:
    is_module = rest[:1] == ["-m"]
    rest = rest[1:] if is_module else rest
    if not rest:
        what = "-m needs the name of a module" if is_module else "there is no script to run"
        raise LaunchError(f"{what}. Usage: {USAGE}")
    name, arguments = rest[0], tuple(rest[1:])
    if is_module:
        _check_module(name)
    elif not Path(name).is_file():
        hint = f" (for a module write: onecard run -m {name})" if _module_exists(name) else ""
        kind = "is a folder, not a script" if Path(name).is_dir() else "does not exist"
        raise LaunchError(f"{name} {kind}; looked in {os.getcwd()}{hint}")
    return Target(name, is_module, arguments)


def _check_module(name: str) -> None:
    if not _module_exists(name):
        raise LaunchError(f"there is no module {name}, neither installed nor in {os.getcwd()}")


def _module_exists(name: str) -> bool:
    before = list(sys.path)
    sys.path.insert(0, os.getcwd())  # as `python -m` has it
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False
    finally:
        sys.path[:] = before


def _check(options: Options) -> None:
    if options.nproc_per_node is not None and options.nproc_per_node < 1:
        raise LaunchError(f"--nproc_per_node is {options.nproc_per_node}; at least one rank is needed")
    if options.fewest is not None and not 1 <= options.fewest <= (options.nproc_per_node or 0):
        raise LaunchError(
            f"--nproc_per_node is {options.fewest}:{options.nproc_per_node}; write MIN:MAX, with 1 <= MIN <= MAX"
        )
    if options.fewest is not None and options.nnodes > 1:
        raise LaunchError("--nproc_per_node MIN:MAX is for one machine; with --nnodes give one number")
    if options.wait <= 0 or options.lost <= 0:
        raise LaunchError(f"--wait is {options.wait:g} and --lost {options.lost:g}; both are seconds, more than 0")
    if options.grace < 0:
        raise LaunchError(f"--grace is {options.grace:g}; seconds, 0 or more")
    if options.nnodes < 1:
        raise LaunchError(f"--nnodes is {options.nnodes}; machines that take part, 1 or more")
    if not 0 <= options.node_rank < options.nnodes:
        raise LaunchError(f"--node_rank is {options.node_rank} and --nnodes {options.nnodes}; ranks go from 0 below it")
    if options.nnodes > 1 and options.master is None:
        raise LaunchError("several machines need an address to meet at: add --master HOST:PORT of machine 0")
    if options.max_restarts < 0:
        raise LaunchError(f"--max_restarts is {options.max_restarts}; 0 means none")
    gpus = gpu_list(options)
    if gpus and options.nproc_per_node not in (None, len(gpus)):
        raise LaunchError(
            f"--nproc_per_node is {options.nproc_per_node} but --gpus names {len(gpus)}, and there is one rank on each "
            "GPU: give only one of the two"
        )
    if options.master is not None:
        endpoint(options.master)


def gpu_list(options: Options) -> list[int]:
    """The numbers in `--gpus`, empty if it is not given. Raises LaunchError."""
    if options.gpus is None:
        return []
    parts = [part.strip() for part in options.gpus.split(",")]
    if not all(part.isdecimal() for part in parts) or len(set(parts)) < len(parts):
        raise LaunchError(
            f"--devices is {options.gpus!r}; write different numbers with commas between them: --devices 0,1"
        )
    return [int(part) for part in parts]


def endpoint(text: str) -> tuple[str, int]:
    """Reads HOST:PORT. Raises LaunchError.

    >>> endpoint("node0:29500"), endpoint("[::1]:29500")
    (('node0', 29500), ('::1', 29500))
    """
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise LaunchError(f"--master is {text!r}; write HOST:PORT, for example node0:29500")
    return host, int(port)
