"""An Engine's state on disk."""

from __future__ import annotations

from typing import Any

from torch import nn

from onecard import checkpoint


def state_of(engine: Any, training: bool) -> dict[str, Any]:
    """The objects that a checkpoint is saved from, and loaded into."""
    engine.place()
    state: dict[str, Any] = {"model": engine.model}
    if isinstance(engine.loss, nn.Module) and engine.loss.state_dict():
        state["loss"] = engine.loss
    if not training:
        return state
    for name in ("optimizer", "scheduler", "scaler"):
        value = getattr(engine, name)
        if value is not None:
            state[name] = list(value) if isinstance(value, tuple) else value
    return state | {"random": checkpoint.RandomState()}


def save(engine: Any, path: Any, training: bool = True) -> None:
    """Save the model; with ``training`` the optimizers, the scaler, the scheduler and the random state, too. A folder.

    Any layout, and any number of ranks, loads it (``onecard.checkpoint``).
    """
    checkpoint.save(state_of(engine, training), path)


def load(engine: Any, path: Any, strict: bool = True, load_optimizer: bool = True) -> None:
    """Load what ``save`` or ``fit`` has saved, in place.

    Args:
        strict: False: what is missing stays as it is, what is unknown is left out.
        load_optimizer: also optimizers, scaler, scheduler and random state; False: the model alone.
    """
    missing, unexpected = ("error", "error") if strict else ("keep", "ignore")
    checkpoint.load(path, state_of(engine, load_optimizer), missing=missing, unexpected=unexpected)
