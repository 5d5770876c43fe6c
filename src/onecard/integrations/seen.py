"""one_card: from here on the program, and the trainers that it uses, see one card."""

from __future__ import annotations

import atexit
import json
import random
import sys
import time
from contextlib import ExitStack
from types import TracebackType
from typing import Any

import numpy as np
import torch

from onecard.auto import one_card as seen
from onecard.auto.rank import Job, ProgramWatch, files
from onecard.comm.agree import agree
from onecard.comm.base.record import user_line
from onecard.comm.base.state import Kept
from onecard.comm.world import world
from onecard.errors import AutoError
from onecard.fleet.front.collective import barrier
from onecard.planning.plan import Plan
from onecard.tensor.dist_tensor import as_one_card

_TICK = 0.02  # seconds; times of files are those of the system's last tick: whatever is made from here on is later than ``since``
_begun: Kept[int] = Kept(int)
"""How often this process has begun to see one card."""


class one_card:
    """From here on, or within a ``with``, the program sees one card: so do trainers that save, log and gather by themselves.

    transformers' ``Trainer``, accelerate, Lightning, torchmetrics find no ranks. Files are written once, by rank 0;
    what the other ranks write they read themselves. Distributed tensors print, pickle and save as whole ones. Every rank runs
    the whole program: batches are whole, and the model divides them.

    Call it ahead of what asks for ranks: ``TrainingArguments``, ``Accelerator``, ``Fabric``, ``Trainer``.

    Args:
        plan: how the first model that trains is laid out, at its first forward with gradients, with the optimizers that are made
            from here on. None: the program lays it out itself (``shard_layer``, ``parallelize``, ``shard_inputs``).

    Raises:
        AutoError: the program sees one card already, or a library has taken its rank already.
        PlanError: the plan is for other ranks, or asks for what a plain model cannot have.

    Example:
        >>> with one_card(Plan()):
        ...     model = torch.nn.Linear(4, 2)
        ...     optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        ...     model(torch.ones(8, 4)).sum().backward()
        ...     optimizer.step()
        >>> model.weight.placements
        (Replicate(),)
    """

    def __init__(self, plan: Plan | None = None) -> None:
        _check()
        _begun.here += 1
        self._stack = ExitStack()
        with ExitStack() as stack:
            watch = ProgramWatch(Job(plan), f"one_card/{_begun.here}") if plan is not None else None
            world.init()
            seed, since = _agreed()
            time.sleep(min(_TICK, max(0.0, since + _TICK - time.time())))
            seen.enter(seed, stack)
            self._files = files(since, stack)
            stack.callback(self._files.flush)
            if watch is not None:
                watch.begin(stack)
            self._stack = stack.pop_all()
        atexit.register(self._files.flush)

    def __enter__(self) -> one_card:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()
        if kind is None and world.get_world_size() > 1:  # what rank 0 has written is there for all from here on
            barrier()


def _check() -> None:
    if as_one_card.here:
        raise AutoError(
            f"{user_line(sys._getframe(2))}: one_card: the program sees one card already, by an earlier one_card() or by "
            "'onecard run --auto': leave this one out"
        )
    states: Any = sys.modules.get("accelerate.state")
    taken: dict[str, int] = getattr(states.PartialState, "_shared_state", {}) if states is not None else {}
    if taken.get("num_processes", 1) > 1:
        raise AutoError(
            f"{user_line(sys._getframe(2))}: one_card: accelerate has taken this process for rank "
            f"{taken['process_index']} of several already: call one_card() ahead of Accelerator and "
            "TrainingArguments"
        )
    if torch.cuda.is_initialized() and world.get_world_size() > 1:
        raise AutoError(
            f"{user_line(sys._getframe(2))}: one_card: the program has used its GPU already, and sees those of the other ranks: "
            "call one_card() first"
        )


def _agreed() -> tuple[int, float]:
    """A seed for what the program leaves unseeded, and when it began: of the first rank to say. So stand all generators."""
    numpys: Any = np.random.get_state()
    word: dict[str, Any] = {
        "seed": random.SystemRandom().getrandbits(32), "since": time.time(), "torch": torch.get_rng_state().tolist(),
        "python": random.getstate(), "numpy": [numpys[0], numpys[1].tolist(), *numpys[2:]],
    }  # fmt: skip
    found = agree.first_to_say(f"one_card/{_begun.here}", json.dumps(word))
    if found is not None:
        word = json.loads(found[1])
        version, numbers, gauss = word["python"]
        torch.set_rng_state(torch.tensor(word["torch"], dtype=torch.uint8, device="cpu"))
        random.setstate((version, tuple(numbers), gauss))
        np.random.set_state(tuple(word["numpy"]))
    return word["seed"], word["since"]
