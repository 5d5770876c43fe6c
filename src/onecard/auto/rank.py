"""One rank of ``onecard run --auto``: the program as it is, its model laid out when it first trains."""

from __future__ import annotations

import atexit
import json
import os
import shutil
import sys
import tempfile
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import ParametrizationList
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from onecard._torch import fakes
from onecard._torch.hooks import keywords_of
from onecard._torch.leaves import is_transformed
from onecard._torch.uncompiled import is_wrapper
from onecard.auto import calls, one_card
from onecard.auto.apply import Applied
from onecard.auto.files import Noted, Overlay
from onecard.comm.agree import agree
from onecard.comm.agree.claims import digest
from onecard.comm.base.record import user_line
from onecard.comm.base.state import Kept
from onecard.comm.world import world
from onecard.errors import AutoError, PlanError
from onecard.planning.plan import Plan
from onecard.tensor import DistTensor


@dataclass(frozen=True)
class Job:
    """What the launcher has found out, as the ranks get it.

    Attributes:
        plan: how to run; program: names and shapes of the model's parameters that it was made for, none: any.
        seed: of what the program does not seed; since: when it began, in seconds since the epoch; 0: now.
    """

    plan: Plan
    program: dict[str, list[int]] = field(default_factory=dict)
    seed: int = 0
    since: float = 0.0

    def to_json(self) -> str:
        """As text, for the ranks' environment or a file."""
        return json.dumps(
            {"plan": json.loads(self.plan.to_json()), "program": self.program, "seed": self.seed, "since": self.since}
        )

    @staticmethod
    def from_json(text: str) -> Job:
        """What ``to_json`` wrote."""
        found = json.loads(text)
        return Job(Plan.from_json(found["plan"]), found["program"], found["seed"], found["since"])

    @staticmethod
    def read(path: str) -> Job:
        """A file of ``to_json``, or of a plan alone (``Plan.save``), which is for any program.

        Raises:
            PlanError: it is neither.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
        except OSError as fault:
            raise PlanError(f"--auto {path}: {fault.strerror}") from fault
        with suppress(ValueError, KeyError, TypeError):
            return Job.from_json(text)
        return Job(Plan.load(path))


def begin(text: str) -> None:
    """Make this process a rank of a program for one card; called ahead of the program, once."""
    job, stack = Job.from_json(text), ExitStack()
    one_card.enter(job.seed, stack)
    one_card.seeded(job.seed)
    overlay = files(job.since, stack)
    watch = ProgramWatch(job)
    watch.begin(stack)
    atexit.register(_tell, overlay, watch)


def files(since: float, stack: ExitStack) -> Overlay:
    """This rank's files, until the stack closes; ``since``: when the program began, 0: now."""
    if world.get_rank() == 0:
        overlay: Overlay = Noted()
    else:
        folder = tempfile.mkdtemp(prefix="onecard-files-")
        overlay = Overlay(folder, since or None)
        # A Finalize: processes that multiprocessing starts end without atexit.
        stack.callback(Finalize(None, shutil.rmtree, (folder,), {"ignore_errors": True}, exitpriority=0))
    calls.over(overlay, stack)
    return overlay


def _tell(overlay: Overlay, watch: ProgramWatch) -> None:
    overlay.flush()
    board = getattr(sys.modules.get("_onecard_launcher"), "board", "")  # beside it is the note of how this rank failed
    failed = bool(board) and os.path.exists(f"{os.path.splitext(board)[0]}.json")
    if (ended := watch.ended()) and world.get_rank() == 0 and not failed:
        print(f"onecard run --auto: {ended}", file=sys.stderr)
    notes = os.path.dirname(os.path.realpath(board)) if board else None
    theirs = [path for path in overlay.written if os.path.dirname(path) != notes and os.path.isfile(path)]
    names = [os.path.relpath(path) for path in theirs]
    if names and world.get_rank() == 0 and world.get_world_size() > 1:
        shown = ", ".join(names[:8]) + f" and {len(names) - 8} more" * (len(names) > 8)
        print(f"onecard run --auto: written once, by rank 0: {shown}", file=sys.stderr)


class ProgramWatch:
    """Sees the program's optimizers and its model, and lays them out at the first forward with gradients.

    Args:
        job: the plan; label: of what ranks compare, another one for each ``Watch`` of a process.

    Attributes:
        roots: the modules that are laid out; the first like the plan's is the plan's (a GAN's generator may run ahead of it).
    """

    def __init__(self, job: Job, label: str = "auto") -> None:
        self.job, self.label = job, label
        self.applied = Applied(job.plan)
        self._waiting: list[Optimizer] = []  # not laid out yet
        # Modules and optimizers that are laid out. Not by their numbers: a new one may have that of one that is gone.
        self._done = WeakIdKeyDictionary()
        self.roots: list[nn.Module] = []
        self._placed = self._transformed = self._has_optimizer = False

    def begin(self, stack: ExitStack) -> None:
        """Until the stack closes."""
        listen(stack)
        watching.here = self

    def made(self, optimizer: Optimizer) -> None:
        """The program has made an optimizer."""
        self._waiting.append(optimizer)
        self._has_optimizer = True

    def forward(self, module: nn.Module, args: Any) -> Any:
        """A module is about to run: the first one that trains is laid out."""
        if self.roots and not self._placed and self._trains_by_hand(module):
            raise self._of_another_program()
        if module in self._done or is_wrapper(module) or not torch.is_grad_enabled() or not module.training:
            return None
        if isinstance(module, ParametrizationList):
            return None  # a weight that is put under one is read: a part of a model, on its own
        parameters = [p for p in module.parameters() if p.requires_grad]
        if any(map(is_lazy, [*module.parameters(), *module.buffers()])):
            return None  # this call makes its parameters, on each rank alike
        if any(map(fakes.is_fake, parameters)):
            return None  # somebody looks at the model ahead
        if any(map(is_transformed, parameters)):
            self._says_transformed(module)
            return None
        if not parameters or all(isinstance(p, DistTensor) for p in parameters):
            if parameters and not self.roots:
                raise AutoError(
                    f"{user_line()}: the parameters of {type(module).__name__} lie on a mesh already: the program says itself "
                    "how it is divided, and a plan (--auto, one_card) is of a program for one card. Start it without: onecard "
                    "run --nproc_per_node N script.py"
                )
            return None
        first = not self._placed and not self._unlike(module)
        self._placed |= first
        self._same_on_all(module)
        entrance = self.applied.model(module, placed=first)
        self.roots.append(module)
        self._done.update((m, True) for m in module.modules())
        for optimizer in [*self._waiting]:
            self._lay_out(optimizer)
        named = keywords_of(module) or {}
        args, found = entrance(module, args, named)  # torch has listed this call's hooks already
        named.update(found)
        return args

    def _trains_by_hand(self, module: nn.Module) -> bool:
        """Whether a module that is laid out runs again, with gradients that no optimizer of the program takes."""
        runs_again = not self._has_optimizer and any(module is root for root in self.roots)
        return runs_again and any(p.grad is not None for p in module.parameters())

    def _says_transformed(self, module: nn.Module) -> None:
        if not self._transformed and world.get_rank() == 0:
            print(
                f"onecard run --auto: {type(module).__name__} first runs within torch.func, with other tensors in "
                "its parameters' places: it is not laid out, and each rank does all of it. One call of the model itself ahead "
                "of the loop (model(x)) lays it out",
                file=sys.stderr,
            )
        self._transformed = True

    def _unlike(self, module: nn.Module) -> str:
        """In what the plan's model is another one; "" if it is this one."""
        now = {name: list(p.shape) for name, p in module.named_parameters()}
        known = self.job.program
        wrong = [name for name in {**known, **now} if known.get(name) != now.get(name)] if known else []
        if not wrong:
            return ""
        name = wrong[0]
        return (
            f"{name} is {now.get(name, 'not there')} in {type(module).__name__}, and {known.get(name, 'not there')} in the plan "
            f"({len(wrong)} of {len(now)} parameters differ)"
        )

    def _same_on_all(self, module: nn.Module) -> None:
        """Every rank has built the same model."""
        known = {name: digest(p) for name, p in [*module.named_parameters(), *module.named_buffers()]}
        found = agree.first_to_say(f"{self.label}/{len(self.roots)}", json.dumps(known))
        if found is None:
            return
        rank, text = found
        wrong = [name for name, said in json.loads(text).items() if known.get(name) != said]
        if wrong:
            raise AutoError(
                f"{user_line()}: {wrong[0]} is another one on rank {rank} than on rank {world.get_rank()} ({len(wrong)} of "
                f"{len(known)} tensors differ), before the first step: the program reads something that differs between "
                "processes: the time, os.urandom, uuid, a file that it writes itself. Seed it: torch.manual_seed(0)"
            )

    def _lay_out(self, optimizer: Optimizer) -> None:
        """Divide its states, as soon as all of its parameters lie on the mesh."""
        params = [p for group in optimizer.param_groups for p in group["params"]]
        if optimizer in self._done or not all(isinstance(p, DistTensor) for p in params):
            return
        self._done[optimizer] = True
        self._waiting = [other for other in self._waiting if other is not optimizer]
        self.applied.optimizer(optimizer, self.roots[0] if len(self.roots) == 1 else None)

    def step(self, optimizer: Optimizer) -> None:
        """An optimizer is about to step: the plan's model has run, for what is looked at for a plan ends here."""
        if self.roots and not self._placed:
            raise self._of_another_program()
        self._lay_out(optimizer)

    def ended(self) -> str:
        """What has to be said of the plan at the program's end; "" if it was kept."""
        if not self.roots:
            return "no module has trained: every rank has done all of it"
        return "" if self._placed else f"the plan was not used: {self._unlike(self.roots[0])}"

    def _of_another_program(self) -> AutoError:
        return AutoError(
            f"{user_line()}: the plan was made for another program: {self._unlike(self.roots[0])}. Make it again: "
            "onecard run --auto --dry_run plan.json"
        )


watching: Kept[ProgramWatch | None] = Kept(lambda: None)
"""Who lays out what the program of the present world trains; None: nobody."""


def listen(stack: ExitStack) -> None:
    """Have modules and optimizers tell the ``Watch`` of their world, until the stack closes."""
    made = Optimizer.__init__

    def __init__(self: Any, *args: Any, **given: Any) -> None:
        made(self, *args, **given)
        if watching.here is not None:
            watching.here.made(self)

    def forward(module: nn.Module, args: Any) -> Any:
        return None if watching.here is None else watching.here.forward(module, args)

    def step(optimizer: Optimizer, *_: Any) -> None:
        if watching.here is not None:
            watching.here.step(optimizer)

    stack.enter_context(patch.object(Optimizer, "__init__", __init__))
    stack.callback(register_module_forward_pre_hook(forward).remove)
    stack.callback(register_optimizer_step_pre_hook(step).remove)
