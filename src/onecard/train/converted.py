"""Models that cannot be converted any more (``model.double()``, ``model.to(device)``): told on all ranks, in words."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from onecard import recorded
from onecard._torch import patches
from onecard.comm.base.record import user_line, words_of
from onecard.comm.world import world
from onecard.errors import DispatchError, StageError
from onecard.tensor.dist_tensor import DistTensor
from onecard.tensor.staged import is_staged
from onecard.train.absent import KEEPS, in_words


@patches.with_first_tensor
def install() -> None:
    """Watch what is converted."""
    patches.replace("torch.nn.Module._apply", nn.Module, "_apply", _over_apply)
    if hasattr(parametrize, "_maybe_set"):
        patches.replace("torch.nn.utils.parametrize._maybe_set", parametrize, "_maybe_set", _over_set)


def _over_set(torchs: Any) -> Any:
    """A parametrization that is put on or taken off gives a parameter other values. torch exchanges two objects for that, and
    cannot once a recorded step or an optimizer knows one of them.
    """

    def _maybe_set(dest: Tensor, src: Tensor) -> None:
        if isinstance(dest, DistTensor):
            dest.data = src
        else:
            torchs(dest, src)

    return _maybe_set


def _over_apply(torchs: Any) -> Any:
    def _apply(self: nn.Module, fn: Any, *args: Any, **kwargs: Any) -> Any:
        if recorded.recorder is None:
            _check_stages(self, fn)
        try:
            return torchs(self, fn, *args, **kwargs)
        except RuntimeError as fault:
            held = next((name for name, p in self._parameters.items() if isinstance(p, DistTensor)), "")
            if not held or "swap" not in str(fault) or isinstance(fault, DispatchError):
                raise
            raise DispatchError(
                f"{user_line()}: {type(self).__name__}.{held} is a distributed tensor that an optimizer or a recorded step holds "
                "by now, and keeps its dtype and device: convert the model when it is new, before shard_optimizer, and before "
                "the first call of a step under a plan"
            ) from fault

    return _apply


def _check_stages(module: nn.Module, fn: Any) -> None:
    """Refuse what would give parameters of some stages another dtype or device: the others' have no memory here."""
    kinds: dict[Any, tuple[str, Tensor]] = {}
    for name, p in module.named_parameters():
        if is_staged(p):
            kinds.setdefault((p.dtype, p.device), (name, p))
    for (dtype, device), (name, x) in kinds.items():
        made = fn(torch.empty(0, dtype=dtype, device=device))
        if (made.dtype, made.device) != (dtype, device):
            said = f"{words_of(x) or name} {in_words(x)}; this is rank {world.get_rank()}"
            raise StageError(f"{user_line()}: {type(module).__name__} to {made.dtype}, {made.device}: {said}. {KEEPS}")
