"""DistModel: the same step in the form of Paddle 3, made by ``to_static`` of a layer."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from onecard.engine.engine import Engine
from onecard.engine.planned import planned
from onecard.errors import EngineError
from onecard.planning.plan import Plan
from onecard.static import api
from onecard.static.recording import Recording

WORDS = {"train": "train()", "eval": "eval()", "predict": "predict()"}


class DistModel:
    """A layer, its loss and its optimizer as one recorded step; made by ``to_static(layer, loader, loss, optimizer)``.

    Called with a batch, inputs and labels one after the other, it does a step of training, of evaluation or of prediction, as it
    was told last, and returns the loss (of the whole batch, on every rank) or the outputs (whole).

    Source: ``paddle.distributed.DistModel``.
    """

    def __init__(self, layer: nn.Module, loader: Any, loss: Any, optimizer: Any, strategy: Any, metrics: Any) -> None:
        self._engine = Engine(layer, loss, optimizer, metrics, strategy)
        self._engine.place()
        self.network, self.loader = layer, loader

    def train(self) -> None:
        """Calls do steps of training from now on."""
        if self._engine.loss is None:
            raise self._missing("train", "a loss")
        self._engine.to_mode("train")

    def eval(self) -> None:
        """Calls compute the loss from now on."""
        if self._engine.loss is None:
            raise self._missing("eval", "a loss")
        self._engine.to_mode("eval")

    def predict(self) -> None:
        """Calls compute the outputs from now on."""
        self._engine.to_mode("predict")

    def _missing(self, mode: str, what: str) -> EngineError:
        return EngineError(
            f"DistModel.{mode}() takes {what}: to_static(layer, loader, nn.CrossEntropyLoss(), optimizer)"
        )

    def __call__(self, *args: Any) -> Any:
        """A batch: inputs and labels, one after the other; or all of it as a tuple, list or dict."""
        batch = args[0] if len(args) == 1 and isinstance(args[0], list | tuple | Mapping) else args
        found = self._engine.run(batch)
        return found["outputs" if self._engine.mode == "predict" else "loss"]

    def state_dict(self, mode: str = "all") -> dict[str, Any]:
        """By names: of the layer ("param"), the optimizer ("opt"), or both ("all").

        ``oc.save_state_dict(dist_model.state_dict(), path)`` saves it; any layout loads it.
        """
        if mode not in ("all", "param", "opt"):
            raise EngineError(f"DistModel.state_dict(mode={mode!r}): want 'all', 'param' or 'opt'")
        found: dict[str, Any] = {} if mode == "opt" else dict(self.network.state_dict())
        if mode != "param" and self._engine.optimizer is not None:
            names = {id(p): name for name, p in self.network.named_parameters()}
            for optimizer in self._engine._optimizers:
                for parameter, state in optimizer.state.items():
                    found |= {f"{names.get(id(parameter), '?')}.{key}": value for key, value in state.items()}
        return found

    def set_state_dict(self, state: Mapping[str, Any]) -> None:
        """Fill the layer and the optimizer with what ``state_dict`` gave."""
        mine = self.network.state_dict()
        self.network.load_state_dict({name: state[name] for name in mine if name in state}, strict=False)
        of_optimizer = {name.rpartition(".")[::2]: value for name, value in state.items() if name not in mine}
        names = dict(self.network.named_parameters())
        for optimizer in self._engine._optimizers:
            owned = {id(p) for group in optimizer.param_groups for p in group["params"]}
            for (name, key), value in of_optimizer.items():
                if name in names and id(names[name]) in owned:
                    optimizer.state[names[name]][key] = value

    def dist_main_program(self, mode: str | None = None) -> Recording:
        """This rank's recording of a mode's step."""
        from onecard.engine import programs

        return programs.main_program(self._engine, mode or self._engine.mode)

    def serial_main_program(self, mode: str | None = None) -> Recording:
        """The recording of the same step on one card."""
        from onecard.engine import programs

        return programs.serial_program(self._engine, mode or self._engine.mode)

    def __repr__(self) -> str:
        return f"DistModel({type(self.network).__name__}, {WORDS[self._engine.mode]})"


def to_static(
    fn: Callable[..., Any] | None = None,
    loader: Any = None,
    loss: Callable[..., Any] | None = None,
    optimizer: Any = None,
    strategy: Any = None,
    *,
    metrics: Any = None,
    plan: Plan | str | Path | None = None,
    **options: Any,
) -> Any:
    """A function or module that records its first steps and replays them; with a loss or an optimizer, a ``DistModel``.

    Args:
        fn: a function of a whole step, or a module that is replayed without gradients: see ``onecard.static.api.to_static`` for
            the options. Or the layer of a ``DistModel``. None: a decorator with these options.
        loader: what batches are read from, as in Paddle; the batches themselves are given to each call.
        loss, optimizer, strategy, metrics: of a ``DistModel``, as an ``Engine`` takes them.
        plan: how a step runs on many ranks: an ``oc.Plan``, the path of one's file, or "auto": the best one, in one microbatch,
            on this machine. Its model and optimizers lie so from the first call on; each rank is given the whole batch.

    Source: ``paddle.jit.to_static``; ``paddle.distributed.to_static``.

    Example:
        >>> import torch
        >>> layer = nn.Linear(2, 2)
        >>> dist_model = to_static(layer, None, nn.CrossEntropyLoss(), torch.optim.SGD(layer.parameters(), lr=0.1))
        >>> dist_model.train()
        >>> losses = [dist_model(torch.eye(2), torch.tensor([0, 1])) for _ in range(3)]
        >>> bool(losses[2] < losses[0])
        True
        >>> to_static(lambda x: x * 2)(torch.ones(1))
        tensor([2.])
        >>> @to_static(limit=4)
        ... def twice(x):
        ...     return x * 2
    """
    if fn is None:
        given = dict(loader=loader, loss=loss, optimizer=optimizer, strategy=strategy, metrics=metrics, plan=plan)
        return functools.partial(to_static, **given, **options)
    if plan is not None:
        if any(given is not None for given in (loader, loss, optimizer, strategy, metrics)):
            raise EngineError(
                "to_static(step, plan=): a step has its loss and its optimizer inside: leave all others out"
            )
        return planned(fn, plan, options)
    if loss is None and optimizer is None and strategy is None and metrics is None:
        if type(loader) is int:
            options = {"limit": loader, **options}
        elif loader is not None and not isinstance(fn, nn.Module):
            raise EngineError(
                "to_static(step, loader): a function of a whole step is given its batch; leave the loader out"
            )
        if loader is None or type(loader) is int:
            return api.to_static(fn, **options)
    if not isinstance(fn, nn.Module):
        raise EngineError(
            f"to_static: a loss, an optimizer or a strategy goes with a layer (an nn.Module), not with {type(fn).__name__}: a "
            "function of a whole step has them inside"
        )
    if options:
        raise EngineError(f"to_static of a layer with a loss: {min(options)!r} is a field of the strategy there")
    return DistModel(fn, loader, loss, optimizer, strategy, metrics)
