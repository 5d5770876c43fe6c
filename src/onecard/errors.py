"""The errors that onecard raises for a user's mistake; each says what, where, why and the call that works."""

from __future__ import annotations

import sys
from types import FrameType


class OnecardError(Exception):
    """The base of every error that onecard raises on purpose."""


class MeshError(OnecardError, ValueError):
    """A process mesh that cannot be: ranks twice, names that do not fit, an axis that is not there."""


class LayoutError(OnecardError, ValueError):
    """Placements that do not fit a mesh or a tensor."""


class RuleError(OnecardError, ValueError):
    """A sharding rule that cannot be read, or that does not fit the tensors it is bound to."""


class DispatchError(OnecardError, RuntimeError):
    """An operator that cannot keep one-card semantics on the tensors it was given."""


class CommunicationError(OnecardError, RuntimeError):
    """A collective that cannot run: no such rank, no process group, a peer that is gone."""


class ScheduleError(OnecardError, ValueError):
    """A pipeline schedule that cannot be made, read, or run to its end."""


class StageError(OnecardError, RuntimeError):
    """A value that only other ranks of a pipeline have is asked for here."""


class CheckpointError(OnecardError, RuntimeError):
    """A checkpoint that cannot be written, is damaged, or does not fit what it is loaded into."""


class RecordingError(OnecardError, RuntimeError):
    """A step that cannot be recorded, or a recording that does not fit what it is called with."""


class CostError(OnecardError, ValueError):
    """A machine that is not known, or that cannot be."""


class FleetError(OnecardError, ValueError):
    """A strategy of the manual level that cannot be, or a call that does not fit it."""


class PlanError(OnecardError, ValueError):
    """A plan of a job, or sizes of a model, that cannot be; a file of settings that cannot be read. ``field``: which one."""

    def __init__(self, message: str, field: str = "") -> None:
        super().__init__(message)
        self.field = field


class NoBackward(PlanError):
    """A function that is to be planned as a step calls no ``backward()``."""


class NothingFits(PlanError):
    """No plan of a search fits into the memory of the ranks; says which takes least, and what is missing."""


class AutoError(OnecardError, RuntimeError):
    """A program for one card that cannot run on several ranks as it is (``onecard run --auto``); says which line stops it."""


class StrategyError(PlanError):
    """A field of a ``Strategy`` that cannot be, or fields that do not go together. ``field``: which one."""


class EngineError(OnecardError, ValueError):
    """What an ``Engine`` is given that cannot be run: a loss that is no number, a batch that does not fit, no data."""


class ImplicitCommunication(OnecardError, RuntimeError):
    """Raised inside ``no_implicit_communication()`` at the first message that the program did not ask for."""


def each_ranks_own(what: str) -> str:
    """Why a collective of torch.distributed takes no distributed tensor, and what to call instead."""
    return (
        f"{what}: a collective of torch.distributed acts on each rank's own tensor, but a distributed tensor is one tensor, "
        "which has the value that one card would have already: leave the collective out. x.full_tensor() is the whole on every "
        "rank, onecard.reshard(x, mesh, placements) moves it, and x.to_local() is this rank's shard as a plain tensor"
    ) + "".join(f". {hint}" for module, hint in _LIBRARIES.items() if _called_by(module))


_LIBRARIES = {  # that call collectives by themselves
    "torchmetrics": "torchmetrics: make the metric with sync_on_compute=False, its states are those of the whole batch",
    "torch.nn.parallel": "DistributedDataParallel: leave it out, onecard.shard_layer(model, mesh) has done what it does",
    "torch.distributed.fsdp": "FSDP: leave it out, onecard.shard_layer(model, mesh) has laid the parameters out",
    "accelerate": "accelerate: leave its prepare and gather out, values are those of the whole batch already",
}


def _called_by(module: str) -> bool:
    """Whether a function of a module, or of one below it, is on the stack."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if f"{frame.f_globals.get('__name__', '')}.".startswith(f"{module}."):
            return True
        frame = frame.f_back
    return False


class ProofError(OnecardError, RuntimeError):
    """A program that cannot be proved: it fails on a rank, or on one card."""
