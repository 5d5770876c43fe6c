"""A program that begins where a job was: its model and its optimizer are filled from a checkpoint as they are first used."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from onecard.checkpoint import api as checkpoint
from onecard.checkpoint.reader.loading import open_any
from onecard.errors import CheckpointError, ProofError


class Begun:
    """The checkpoint that one rank begins with.

    Args:
        folder: of ``oc.checkpoint.save``, by whatever mesh; or one of steps, of which the newest is taken.

    Raises:
        ProofError: it is no checkpoint.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._models: dict[str, nn.Module] = {}
        self._optimizers: dict[str, Optimizer] = {}
        try:
            state = open_any(self.folder).state
        except CheckpointError as fault:
            raise ProofError(f"prove(start={str(folder)!r}): {fault}") from fault
        several = isinstance(state, Mapping) and not any(map(_is_tensor, state.values()))
        self._state: dict[str, Any] = dict(state) if several else {"": state}  # else a model alone

    def model(self, module: nn.Module) -> None:
        """Fill a model, before its first call.

        Raises:
            ProofError: nothing in the checkpoint is like it.
        """
        names = {name for name, _ in (*module.named_parameters(), *module.named_buffers())}
        if not names:
            return
        known = {
            key: len(names & {*tree})
            for key, tree in self._state.items()
            if _is_model(tree) and key not in self._models
        }
        key = max(known, key=lambda key: known[key], default=None)
        if key is None:
            raise ProofError(
                f"prove(start={str(self.folder)!r}): it has no model for {type(module).__name__}: it has "
                f"{', '.join(map(repr, self._state))}: oc.checkpoint.save({{'model': model, 'optimizer': optimizer}}, folder)"
            )
        self._models[key] = module
        self._fill({key: module})

    def optimizer(self, optimizer: Optimizer) -> None:
        """Fill an optimizer, before its first step. Its states are called by the names of the models' parameters.

        Raises:
            ProofError: the checkpoint has none.
        """
        known = [key for key, tree in self._state.items() if _is_optimizer(tree) and key not in self._optimizers]
        if not known:
            raise ProofError(
                f"prove(start={str(self.folder)!r}): it has no state of {type(optimizer).__name__}, without which a step is not "
                "the job's: oc.checkpoint.save({'model': model, 'optimizer': optimizer}, folder)"
            )
        self._optimizers[known[0]] = optimizer
        self._fill({**self._models, known[0]: optimizer})
        for p, states in optimizer.state.items():
            for name, x in states.items():
                if isinstance(x, Tensor) and x.is_floating_point() and name != "step":
                    states[name] = x.to(p.dtype)

    def _fill(self, state: dict[str, Any]) -> None:
        given = state[""] if [*state] == [""] else state
        with torch.no_grad():
            checkpoint.load(self.folder, given, dtype="cast")


def _is_tensor(node: Any) -> bool:
    return isinstance(node, Mapping) and node.get("$") == "tensor"


def _is_optimizer(node: Any) -> bool:
    return isinstance(node, Mapping) and {"state", "param_groups"} <= {*node}


def _is_model(node: Any) -> bool:
    return isinstance(node, Mapping) and any(map(_is_tensor, node.values()))


def restored(folder: str | Path, roots: Sequence[Any]) -> None:
    """Fill the models and optimizers among some objects.

    Raises:
        ProofError: the checkpoint has not what one of them needs.
    """
    begun = Begun(folder)
    for root in roots:
        if isinstance(root, nn.Module):
            begun.model(root)
    for root in roots:
        if isinstance(root, Optimizer):
            begun.optimizer(root)
