"""The functions that an Engine records: one step of training, one of evaluation, one of prediction."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from onecard._torch.names import tree_map
from onecard.engine.metrics import EngineMetric, spread
from onecard.errors import EngineError
from onecard.tensor import DistTensor, one_card_random, unshard

MODES = ("train", "eval", "predict")


@dataclass
class EngineParts:
    """What a step is made of."""

    model: nn.Module
    loss: Callable[..., Any] | None
    optimizers: Sequence[Optimizer]
    metrics: Sequence[EngineMetric]
    clip: float | None = None
    scaler: Any = None
    lists: Callable[[], AbstractContextManager[Any]] | None = None
    plain: bool = False  # nothing is distributed: random numbers are drawn as if it were

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """The model, and a loss that is a module."""
        return (self.model, self.loss) if isinstance(self.loss, nn.Module) else (self.model,)

    def named(self, step: Any, mode: str) -> Callable[..., Any]:
        """A step that calls its objects as the user does, in its recording and in files."""
        step = _drawn_alike(step) if self.plain else step
        step.__name__ = f"{mode} step of {type(self.model).__name__}"
        optimizers = self.optimizers if mode == "train" else ()
        numbers = [""] if len(optimizers) == 1 else range(len(optimizers))
        named = [(f"optimizer{i}", each) for i, each in zip(numbers, optimizers, strict=True)]
        step.step_roots = [*zip(("model", "loss"), self.modules, strict=False), *named]
        return step

    @property
    def wants_outputs(self) -> bool:
        """Whether a metric looks at the whole outputs outside the step."""
        return any(not metric.in_step for metric in self.metrics)


def train_step(parts: EngineParts) -> Callable[..., Any]:
    """Forward, loss, backward, clipping, the optimizers: returns the whole batch's loss, outputs and counts for metrics."""
    optimizers, scaler, clip = list(parts.optimizers), parts.scaler, parts.clip
    modules, forward, results = parts.modules, _forward(parts), _results(parts)

    def train(args: Any, kwargs: Any, labels: Any) -> Any:
        outputs, loss = forward(args, kwargs, labels)
        if scaler is None:
            loss.backward()
        else:
            scaler.scale(loss).backward()
        if clip is not None:
            if scaler is not None:
                for optimizer in optimizers:
                    scaler.unscale_(optimizer)
            # Asked for now: groups may be added between steps.
            trained = (p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"])
            nn.utils.clip_grad_norm_(trained, clip)
        for optimizer in optimizers:
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
        if scaler is not None:
            scaler.update()
        for module in modules:
            module.zero_grad()
        for optimizer in optimizers:
            optimizer.zero_grad()
        return results(loss, outputs, labels)

    return parts.named(train, "train")


def eval_step(parts: EngineParts) -> Callable[..., Any]:
    """Forward and loss, without gradients."""
    forward, results = _forward(parts, grad=False), _results(parts)

    def evaluate(args: Any, kwargs: Any, labels: Any) -> Any:
        with torch.no_grad():
            outputs, loss = forward(args, kwargs, labels)
            return results(loss, outputs, labels)

    return parts.named(evaluate, "eval")


def predict_step(parts: EngineParts) -> Callable[..., Any]:
    """Forward, without gradients."""
    model, around = parts.model, parts.lists

    def predict(args: Any, kwargs: Any, labels: Any) -> Any:
        with torch.no_grad():
            if around is None:
                return model(*args, **kwargs)
            with around():
                return model(*args, **kwargs)

    return parts.named(predict, "predict")


STEPS = {"train": train_step, "eval": eval_step, "predict": predict_step}


def _drawn_alike(step: Callable[..., Any]) -> Callable[..., Any]:
    """A step on one rank that draws what it draws on several; also in backward, where blocks are computed again."""

    def drawing(*args: Any) -> Any:
        with one_card_random():
            return step(*args)

    return drawing


def _forward(parts: EngineParts, grad: bool = True) -> Callable[..., tuple[Any, Tensor]]:
    model, loss_of, around = parts.model, parts.loss, parts.lists

    def computed(args: Any, kwargs: Any, labels: Any) -> tuple[Any, Any]:
        outputs = model(*args, **kwargs)
        return outputs, own_loss(outputs) if loss_of is None else loss_of(*spread(outputs), *labels)

    def forward(args: Any, kwargs: Any, labels: Any) -> tuple[Any, Tensor]:
        if around is None:
            outputs, loss = computed(args, kwargs, labels)
        else:
            with around():
                outputs, loss = computed(args, kwargs, labels)
        return outputs, one_number(loss, grad)

    return forward


def own_loss(outputs: Any) -> Any:
    """The loss that a model has computed itself: ``outputs.loss``, ``outputs["loss"]``, or the first of several outputs."""
    if isinstance(outputs, Mapping):
        found = outputs.get("loss")
    elif isinstance(outputs, list | tuple):
        found = getattr(outputs, "loss", outputs[0] if outputs else None)
    else:
        found = outputs if isinstance(outputs, Tensor) else getattr(outputs, "loss", None)
    if found is None:
        raise EngineError(
            f"Engine(loss=None): the model returns {type(outputs).__name__} without a loss of its own: give Engine a loss "
            "(Engine(model, nn.CrossEntropyLoss(), optimizer)), or the model its labels"
        )
    return found


def one_number(loss: Any, grad: bool) -> Tensor:
    """A loss as a tensor without dims.

    Raises:
        EngineError: it is no tensor, has several numbers, or depends on no parameter.
    """
    if not isinstance(loss, Tensor):
        raise EngineError(
            f"Engine: the loss is a {type(loss).__name__}, not a tensor of one number; several losses are added up in one "
            "function: Engine(model, lambda out, label: first(out, label) + second(out, label), optimizer)"
        )
    if loss.numel() != 1:
        raise EngineError(
            f"Engine: the loss is a tensor of shape {list(loss.shape)}, not one number: take its mean, "
            "nn.CrossEntropyLoss(reduction='mean') or lambda out, label: loss(out, label).mean()"
        )
    if not loss.is_floating_point():
        raise EngineError(f"Engine: the loss is {str(loss.dtype).removeprefix('torch.')}, which has no gradient")
    if grad and not loss.requires_grad:
        raise EngineError(
            "Engine: the loss depends on no parameter that is trained: does the model run under torch.no_grad(), detach its "
            "outputs, or have requires_grad=False everywhere?"
        )
    return loss.reshape(())


def _results(parts: EngineParts) -> Callable[..., Any]:
    in_step = [metric for metric in parts.metrics if metric.in_step]
    kept = parts.wants_outputs

    def results(loss: Tensor, outputs: Any, labels: Any) -> Any:
        with torch.no_grad():
            counted = tuple(metric.counted(outputs, labels) for metric in in_step)
            whole = loss.detach()
            whole = unshard(whole) if isinstance(whole, DistTensor) else whole
        return whole, _detached(outputs) if kept else None, counted

    return results


def _detached(outputs: Any) -> Any:
    return tree_map(lambda x: x.detach() if isinstance(x, Tensor) else x, outputs)


def takes_closure(optimizer: Optimizer) -> bool:
    """Whether its step must be given a function that computes the loss again."""
    try:
        closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    except (TypeError, ValueError):
        return False
    return closure is not None and closure.default is inspect.Parameter.empty


def own_train(module: nn.Module) -> None:
    """Have a module with a ``train`` of its own say which of its parts stay in evaluation, as a loop's ``model.train()`` has.

    It is asked while all of them are in training: one that is not was put so by it, or by hand, and stays.
    """
    for each in module.modules():
        if type(each).train is not nn.Module.train and all(part.training for part in each.modules()):
            each.train()


@contextmanager
def in_mode(modules: Sequence[nn.Module], mode: str) -> Iterator[None]:
    """Modules as they are in training, or in evaluation for a while; each is afterwards what it was."""
    if mode == "train":
        for module in modules:
            if not module.training:
                module.train()
        yield
        return
    before = [(m, m.training) for module in modules for m in module.modules()]
    for module in modules:
        module.eval()
    try:
        yield
    finally:
        for module, training in before:
            module.training = training
