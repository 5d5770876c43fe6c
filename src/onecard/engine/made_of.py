"""What an Engine is made of: checked when it is given, and when it is set again later."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from onecard.engine import programs
from onecard.engine import step as steps
from onecard.engine.metrics import held
from onecard.errors import EngineError

LAID_OUT = ("model", "optimizer", "strategy")
"""What says where parameters and states lie, which happens once."""
RECORDED = ("loss", "metrics", "clip_grad_norm")
"""What steps are recorded with."""


def set_again(engine: Any, name: str, value: Any) -> Any:
    """What is kept where a program sets an attribute of a made Engine: the next step is done with it.

    Recorded steps hold what they were made of: those of another loss are of no use any more.

    Raises:
        EngineError: what is laid out once; a loss or a number that cannot be one.
    """
    before = getattr(engine, name, None)
    if name in LAID_OUT and value is not before:
        raise EngineError(
            f"Engine.{name} = ...: the model and its optimizers are laid out once, as the strategy says: make another one, "
            "Engine(engine.model, engine.loss, optimizer, strategy=...)"
        )
    if name not in RECORDED or value is before:
        return value
    if name == "metrics":
        value = held(value)
    elif name == "clip_grad_norm":
        check_clip(value)
    else:
        check_loss(value)
        _check_same_kind(before, value)
        if engine._skeleton is not None:
            engine._skeleton = programs.Skeleton(fault="its loss was set later")
    engine._steps.clear()
    return value


def _check_same_kind(before: Any, loss: Any) -> None:
    """A batch is taken apart as it was, and nothing is left to be laid out."""
    if (before is None) != (loss is None):
        raise EngineError(
            "Engine.loss = ...: whether a batch has labels is said once: make another one, Engine(engine.model, loss, ...)"
        )
    if isinstance(loss, nn.Module) and any(True for _ in loss.parameters()):
        raise EngineError(
            f"Engine.loss = {type(loss).__name__}(): it has parameters, which are laid out with the model's: make another one, "
            "Engine(engine.model, loss, optimizer)"
        )


def checked(model: Any, loss: Any, optimizer: Any, clip: Any, each: str) -> tuple[Optimizer, ...]:
    """The optimizers; EngineError for a part that cannot be one."""
    if not isinstance(model, nn.Module):
        raise EngineError(f"Engine: model: want an nn.Module, not {type(model).__name__}")
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise EngineError("Engine: model is a DistributedDataParallel: give the module that it wraps, model.module")
    check_loss(loss)
    listed = () if optimizer is None else tuple(optimizer) if isinstance(optimizer, list | tuple) else (optimizer,)
    for one in listed:
        if not isinstance(one, Optimizer):
            kind = one.__name__ if isinstance(one, type) else type(one).__name__
            raise EngineError(f"Engine: optimizer: want a torch.optim.Optimizer, or several, not {kind}")
        if steps.takes_closure(one):
            raise EngineError(
                f"Engine: {type(one).__name__}.step computes the loss several times, which a recorded step cannot: write its "
                "loop by hand, or take another optimizer"
            )
    check_clip(clip)
    if each not in ("step", "epoch"):
        raise EngineError(f"Engine: scheduler_each={each!r}: want 'step' or 'epoch'")
    return listed


def check_loss(loss: Any) -> None:
    """EngineError for what cannot be a loss."""
    if loss is not None and (isinstance(loss, type | Tensor) or not callable(loss)):
        hint = f"an object of it: {loss.__name__}()" if isinstance(loss, type) else f"not {type(loss).__name__}"
        raise EngineError(f"Engine: loss: want a function or module of outputs and labels, {hint}")


def check_clip(clip: Any) -> None:
    """EngineError for what gradients cannot be clipped to."""
    if clip is not None and (type(clip) not in (int, float) or not clip > 0):
        raise EngineError(f"Engine: clip_grad_norm={clip!r}: want a number above 0, or None")
