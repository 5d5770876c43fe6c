"""Optimizers that look at whole parameters get them: while such a one steps, whole ones stand in the places of parts."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from onecard import recorded
from onecard.errors import FleetError, RecordingError
from onecard.fleet.gradients import sums as gradients
from onecard.tensor import DistTensor
from onecard.train import unreduced
from onecard.train.judged import Looks, cut_in, keeps_parameters, looks_at
from onecard.train.shard import held

divided: WeakKeyDictionary[Optimizer, str] = WeakKeyDictionary()
"""Optimizers whose step ZeRO divides, and by which call."""
_wholes: WeakKeyDictionary[Optimizer, WholeParameters] = WeakKeyDictionary()


def begin(optimizer: Optimizer) -> None:
    """Before a step, after the sums: exchange the parts of what the optimizer looks at whole.

    Raises:
        FleetError: it looks at more than one rank can be given. Says which optimizers can be.
    """
    if optimizer in _wholes:
        _wholes[optimizer].end(optimizer)  # of a step that was interrupted
    if recorded.recorder is not None and recorded.recorder.listens:
        for i, group in enumerate(optimizer.param_groups):
            if _looked_at(optimizer, i, group):
                raise RecordingError(
                    f"{type(optimizer).__name__} looks at whole parameters, which are joined from parts for its step alone: "
                    "no recording holds that. Record forward and backward, and call optimizer.step() after it"
                )
    parts = [p for i, group in enumerate(optimizer.param_groups) for p in _looked_at(optimizer, i, group)]
    if parts:
        _wholes.setdefault(optimizer, WholeParameters()).begin(optimizer, parts)


def end(optimizer: Optimizer) -> None:
    """After the step: parts again, of what was updated."""
    if optimizer in _wholes:
        _wholes[optimizer].end(optimizer)


def _looked_at(optimizer: Optimizer, number: int, group: dict[str, Any]) -> list[Tensor]:
    """The parts in a group of which the optimizer needs the whole."""
    cut = cut_in(group)
    staged = any(gradients.in_stages(p) for p in group["params"][:1])
    if not cut and not staged:
        return []
    looks = looks_at(optimizer, number, cut or group["params"])
    if looks is Looks.NUMBERS:
        return []
    _check(optimizer, looks, bool(cut), staged)
    return cut


def _check(optimizer: Optimizer, looks: Looks, cut: bool, staged: bool) -> None:
    name = f"{type(optimizer).__name__} looks at"
    advice = "AdamW, SGD and others that treat each number by itself need only parts"
    if staged and looks is not Looks.PARAMETERS:
        raise FleetError(
            f"{name} all parameters together{_perhaps(looks)}, and each stage of a pipeline (pp_degree) has some: {advice}, and "
            "those that look at one parameter at a time (Muon, LAMB, Adafactor) those of the stage"
        )
    twins = any(isinstance(p, DistTensor) for group in optimizer.param_groups for p in group["params"])
    if cut and (optimizer in divided or twins):
        raise FleetError(
            f"{name} whole parameters{_perhaps(looks)}, of which tensor parallel layers (mp_degree) have parts, and "
            f"{divided.get(optimizer, 'group_sharded_parallel')} divides the parts once more: {advice}. Without it, it is given "
            "the whole ones; by marks in any case: oc.shard_optimizer(optimizer, oc.ShardingStage1('dp', mesh))"
        )
    if cut and keeps_parameters(optimizer):
        raise FleetError(
            f"{name} whole parameters{_perhaps(looks)}, of which tensor parallel layers (mp_degree) have parts, and keeps them "
            f"in an attribute, so that whole ones cannot take their places in param_groups: {advice}"
        )


def _perhaps(looks: Looks) -> str:
    return " (or so it must be taken: it could not be tried on small tensors)" if looks is Looks.UNTRIED else ""


class WholeParameters:
    """The whole parameters of one optimizer, which have memory only while it steps."""

    def __init__(self) -> None:
        self._of: dict[Any, nn.Parameter] = {}
        self._shown: list[Any] = []

    @torch.no_grad()
    def begin(self, optimizer: Optimizer, parts: list[Tensor]) -> None:
        """Join the parts, and their gradients, and put them into the optimizer's groups."""
        call = f"whole parameters for {type(optimizer).__name__}"
        given = [p for p in parts if unreduced.read(p) is not None]
        values = join([p.detach() for p in given], given, call)
        grads = join([unreduced.read(p) for p in given], given, call)
        for p, value, grad in zip(given, values, grads, strict=True):
            mine = self._of.setdefault(p, nn.Parameter(value))
            mine.data, mine.grad = value, grad
        self._shown = given
        _exchange(optimizer, {p: self._of[p] for p in given})

    @torch.no_grad()
    def end(self, optimizer: Optimizer) -> None:
        """Each rank takes its part of what was updated."""
        shown, self._shown = self._shown, []
        for p in shown:
            mine = self._of[p]
            p.copy_(held(p).take(mine.detach()))
            mine.grad, mine.data = None, mine.data.new_empty(0)
        _exchange(optimizer, {self._of[p]: p for p in shown})


def join(tensors: list[Tensor], parts: list[Tensor], call: str) -> list[Tensor]:
    """The wholes of what each rank has parts of: of parameters, or of tensors like them."""
    made = []
    for x, p in zip(tensors, parts, strict=True):
        what = held(p)
        whole = x.new_zeros(what.shape)
        owned = [run.owned for run in what.runs]
        for (box, here), counts in zip(what.boxes(), owned, strict=True):
            if counts:
                whole[tuple(slice(*span) for span in box)] = x[here]
        made.append(whole)
    groups = {held(p).group.ranks: held(p).group for p in parts}  # type: ignore[union-attr]
    for ranks, group in sorted(groups.items()):
        mine = [x for x, p in zip(made, parts, strict=True) if held(p).group.ranks == ranks]  # type: ignore[union-attr]
        gradients._reduce(mine, group, "sum", call)  # type: ignore[arg-type]
    return made


def _exchange(optimizer: Optimizer, by: dict[Any, Any]) -> None:
    for group in optimizer.param_groups:
        group["params"][:] = [by.get(p, p) for p in group["params"]]  # in place: LBFGS knows the list
    for p in [p for p in optimizer.state if p in by]:
        optimizer.state[by[p]] = optimizer.state.pop(p)
