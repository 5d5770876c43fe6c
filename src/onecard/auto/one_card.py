"""What a program for one card finds on several ranks: one card."""

from __future__ import annotations

import os
import pickle
import random
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import safetensors.torch
import torch
from torch import Tensor, nn

from onecard._torch.hooks import module_pickler
from onecard._torch.imported import when_imported
from onecard._torch.uncompiled import uncompiled
from onecard.auto import dcp, taken, tied
from onecard.comm.base.record import user_line
from onecard.comm.base.state import Kept
from onecard.comm.world import world
from onecard.comm.world.hidden import hidden
from onecard.errors import AutoError
from onecard.tensor import DistTensor, unshard
from onecard.tensor.dist_tensor import as_one_card

LAUNCHERS = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE",
    "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_USE_AGENT_STORE",
    "SLURM_NTASKS", "SLURM_NPROCS", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE", "SLURM_STEP_NUM_TASKS",
    "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE", "PMI_RANK",
    "PMI_SIZE", "PMI_LOCAL_RANK", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE",
    "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE",
)  # fmt: skip
"""Variables by which a program, or a library that it uses, would take itself for one of several."""


def enter(seed: int, stack: ExitStack) -> None:
    """The program sees one card until the stack closes.

    Args:
        seed: of the generators that the program makes and does not seed itself.
    """
    stack.callback(_put_back, {name: os.environ.get(name) for name in (*LAUNCHERS, *_OURS)})
    _own_gpu()
    world.init()
    for name in LAUNCHERS:
        os.environ.pop(name, None)
    if world.get_rank():  # a process of its own, which writes past us
        os.environ["WANDB_MODE"] = "disabled"
        when_imported(stack, "wandb", partial(_unlogged, stack))
    for name in ("lightning_utilities.core.rank_zero", "lightning.fabric.utilities.rank_zero"):
        if hasattr(
            only := getattr(sys.modules.get(name), "rank_zero_only", None), "rank"
        ):  # read from RANK at the import
            stack.enter_context(patch.object(only, "rank", 0))
    drawn.here, as_one_card.here = random.Random(seed), True
    stack.callback(setattr, as_one_card, "here", False)
    taken.put(stack, [*hidden(), *_programs(), *numbers(), *_whole()])
    dcp.one_card(stack)
    tied.one_card(stack)


_OURS = ("CUDA_VISIBLE_DEVICES", "WANDB_MODE")


def _put_back(before: dict[str, str | None]) -> None:
    for name, value in before.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value


def _unlogged(stack: ExitStack, wandb: Any) -> None:
    """Runs of Weights & Biases are rank 0's, whatever mode the program asks for."""
    real = wandb.init

    def init(*args: Any, **given: Any) -> Any:
        return real(*args, **{**given, "mode": "disabled"})

    stack.enter_context(patch.object(wandb, "init", init))


def begin(seed: int) -> None:
    """This rank's program is one card's: no variables of launchers, generators as they are seeded on all ranks."""
    for name in LAUNCHERS:
        os.environ.pop(name, None)
    seeded(seed)
    drawn.here, as_one_card.here = random.Random(seed), True


def seeded(seed: int) -> None:
    """What the program does not seed, on all ranks alike."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def _own_gpu() -> None:
    """This rank's GPU is the only one that it sees: "cuda" and "cuda:0" are it."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if (torch.version.cuda is None and torch.version.hip is None) or given == "":
        return
    if world.device().type == "cuda":
        world.gpu_for_each()
        world.own_gpu.here = True
    local, names = int(os.environ.get("LOCAL_RANK", "0")), given.split(",") if given else []
    os.environ["CUDA_VISIBLE_DEVICES"] = names[local] if local < len(names) else str(local)
    os.environ["LOCAL_RANK"] = "0"


def _programs() -> list[tuple[Any, str, Any]]:
    """What a program starts, each rank starts: a command is told once, processes of torch's are refused."""
    told: set[str] = set()
    start = subprocess.Popen.__init__

    def begin(self: Any, *args: Any, **given: Any) -> None:
        line = user_line(_outside(sys._getframe(1)))
        if line not in told and world.get_rank() == 0 and "site-packages" not in line:
            told.add(line)
            print(f"onecard run --auto: {line} starts a process: every rank starts one", file=sys.stderr)
        start(self, *args, **given)

    def spawned(*_: Any, **__: Any) -> Any:
        raise AutoError(
            f"{user_line(sys._getframe(1))}: torch.multiprocessing.spawn: the program starts ranks of its own, and --auto takes "
            "a program for one card: start it without --auto"
        )

    return [
        (subprocess.Popen, "__init__", begin), (torch.multiprocessing, "spawn", spawned), (torch, "compile", uncompiled),
        (nn.Module, "compile", lambda *_, **__: None),
    ]  # fmt: skip


def _outside(frame: Any) -> Any:
    while frame is not None and frame.f_globals.get("__name__") == "subprocess":
        frame = frame.f_back
    return frame


drawn: Kept[random.Random] = Kept(lambda: random.Random(0))
"""Seeds in place of the system's: of one world, and the same on all ranks."""


def numbers() -> list[tuple[Any, str, Any]]:
    """Generators that take their seed from the system take one that all ranks have."""
    generator, seeded = np.random.default_rng, random.seed
    numpys = np.random.seed

    def default_rng(seed: Any = None) -> Any:
        return generator(drawn.here.getrandbits(64) if seed is None else seed)

    def again(a: Any = None, *rest: Any, **given: Any) -> None:
        seeded(drawn.here.getrandbits(64) if a is None else a, *rest, **given)

    def again_in_numpy(seed: Any = None) -> None:
        numpys(drawn.here.getrandbits(32) if seed is None else seed)

    def torchs() -> int:
        torch.manual_seed(number := drawn.here.getrandbits(63))
        return number

    return [
        (np.random, "default_rng", default_rng), (random, "seed", again), (np.random, "seed", again_in_numpy),
        (torch, "seed", torchs),
    ]  # fmt: skip


def whole(x: Any) -> Any:
    """A tensor as one card has it."""
    return unshard(x) if isinstance(x, DistTensor) else x


def _whole() -> list[tuple[Any, str, Any]]:
    """Writers that read a tensor's memory are given whole ones; a module is saved as it would be on one card."""

    def saved(real: Callable[..., Any]) -> Callable[..., Any]:
        def save(tensors: dict[str, Tensor], *rest: Any, **given: Any) -> Any:
            return real({name: whole(x).contiguous() for name, x in tensors.items()}, *rest, **given)

        return save

    def pickled(real: Callable[..., Any]) -> Callable[..., Any]:
        def save(obj: Any, f: Any, pickle_module: Any = pickle, *rest: Any, **given: Any) -> Any:
            return real(obj, f, module_pickler() if pickle_module is pickle else pickle_module, *rest, **given)

        return save

    safe = safetensors.torch
    return [
        (safe, "save_file", saved(safe.save_file)), (safe, "save", saved(safe.save)), (torch, "save", pickled(torch.save)),
    ]  # fmt: skip
