"""Metrics of whole batches: Accuracy, and what an Engine asks of any other metric."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from onecard._torch.names import tree_map
from onecard.errors import EngineError, OnecardError
from onecard.tensor import DistTensor, unshard
from onecard.tensor.metrics import keep_apart


class Accuracy:
    """The share of labels that are among the k largest outputs, counted over whole batches, however these are divided.

    Args:
        topk: one value for each k.
        name: of the values: ``name_top1``; for topk=(1,) ``name`` itself.
        ignore_index: labels that do not count, as in ``nn.CrossEntropyLoss``.

    ``compute(outputs, labels)`` counts in the step, ``update(counts)`` adds up, ``accumulate()`` is the value since ``reset()``.
    Outputs are (batch, classes), (batch, ..., classes) or (batch, classes, ...); labels indices, with or without a last dim of
    1, or as long as the outputs (one-hot).

    Source: ``paddle.metric.Accuracy``.

    Example:
        >>> accuracy = Accuracy(topk=(1, 2))
        >>> outputs = torch.tensor([[0.1, 0.7, 0.2], [0.5, 0.1, 0.4], [0.2, 0.3, 0.5]])
        >>> accuracy.update(accuracy.compute(outputs, torch.tensor([1, 2, 0])))
        [0.333..., 0.666...]
        >>> accuracy.name()
        ['acc_top1', 'acc_top2']
    """

    def __init__(self, topk: int | Sequence[int] = (1,), name: str = "acc", ignore_index: int = -100) -> None:
        self.topk = (topk,) if isinstance(topk, int) else tuple(topk)
        if not self.topk or not all(type(k) is int and k >= 1 for k in self.topk):
            raise EngineError(f"Accuracy: topk={topk!r}: want whole numbers, 1 or more, such as (1, 5)")
        self.ignore_index = ignore_index
        self._names = [name] if self.topk == (1,) else [f"{name}_top{k}" for k in self.topk]
        self.reset()

    def name(self) -> list[str]:
        """The names of its values."""
        return self._names

    def reset(self) -> None:
        """Forget what was counted."""
        self.batches = 0
        self.count, self.hits = 0, [0] * len(self.topk)

    def compute(self, outputs: Tensor, labels: Tensor, *more: Any) -> Tensor:
        """Of each row how many labels count, and how many are among the k largest outputs: int32 (batch, 1 + len(topk)).

        Raises:
            EngineError: the model returns, or the loss takes, more than one value; or fewer classes than the largest k.
        """
        if more:
            raise EngineError(
                f"Accuracy.compute is given {2 + len(more)} values, all that the model returns and the loss takes: say which are "
                "counted, in a class of yours: class MyAccuracy(onecard.Accuracy), with def compute(self, scores, aux, labels): "
                "return super().compute(scores, labels)"
            )
        outputs, labels = _classes_last(outputs.detach(), labels.detach())
        if outputs.shape[-1] < max(self.topk):
            raise EngineError(
                f"Accuracy: topk={self.topk} of {outputs.shape[-1]} classes: take topk=(1,)"
                + (", or torchmetrics' BinaryAccuracy for one output" if outputs.shape[-1] == 1 else "")
            )
        valid = labels != self.ignore_index
        found = outputs.topk(max(self.topk), dim=-1).indices == labels.unsqueeze(-1)
        counted = [valid, *(found[..., :k].any(-1) & valid for k in self.topk)]
        return torch.stack([each.reshape(each.shape[0], -1).sum(1, dtype=torch.int32) for each in counted], 1)

    def update(self, counts: Any) -> Any:
        """Add what ``compute`` has counted of a batch; returns the value so far."""
        whole = unshard(counts) if isinstance(counts, DistTensor) else torch.as_tensor(counts)
        total = whole.reshape(-1, 1 + len(self.topk)).sum(0).tolist()
        self.count += total[0]
        self.hits = [before + now for before, now in zip(self.hits, total[1:], strict=True)]
        return self.accumulate()

    def accumulate(self) -> Any:
        """The value since ``reset()``: a number for each k, one number for one; of no label 0."""
        values = [hits / self.count if self.count else 0.0 for hits in self.hits]
        return values[0] if len(values) == 1 else values

    def state_dict(self) -> dict[str, Any]:
        """What is counted so far."""
        return {"count": self.count, "hits": list(self.hits)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Count on from there."""
        self.count, self.hits = state["count"], list(state["hits"])


def _classes_last(outputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs (batch, ..., classes) and indices (batch, ...)."""
    if labels.shape == outputs.shape and outputs.dim() > 1:
        return outputs, labels.argmax(-1)
    if labels.dim() == outputs.dim() and labels.shape[-1] == 1:
        labels = labels.squeeze(-1)
    if labels.dtype.is_floating_point:
        labels = labels.long()
    if outputs.dim() > 2 and labels.shape == outputs.shape[:1] + outputs.shape[2:]:
        return outputs.movedim(1, -1), labels
    if outputs.dim() < 2 or labels.shape != outputs.shape[:-1]:
        raise EngineError(
            f"Accuracy: outputs {list(outputs.shape)} and labels {list(labels.shape)}: want (batch, classes) and (batch), "
            "(batch, ..., classes) or (batch, classes, ...) and (batch, ...)"
        )
    return outputs, labels


class EngineMetric:
    """A metric as an Engine uses it: what it wants of the step, and its values by name.

    ``in_step``: counted in the step itself (``compute(outputs, labels)``, ``update``, ``accumulate``: Paddle's form); else the
    step's outputs and labels are given to ``update(outputs, labels)``, and ``compute()`` is the value: torchmetrics' form.
    """

    def __init__(self, metric: Any) -> None:
        self.metric = metric
        self.label = type(metric).__name__
        self.in_step = hasattr(metric, "accumulate")
        self.mode, self.batches = "", 0  # of the pass that it counts in, and so far: for errors
        wanted = ("compute", "update", "reset")
        if isinstance(metric, type) or not all(callable(getattr(metric, name, None)) for name in wanted):
            raise EngineError(
                f"Engine: metrics: {metric!r} is no metric: want onecard.Accuracy(), a metric of torchmetrics, or an object with "
                "compute, update, accumulate, reset and name. The value of a function is that of one batch, and a mean of these "
                "is none of a pass: count in update, divide in accumulate"
            )
        for each in metric.modules() if isinstance(metric, torch.nn.Module) else (metric,):
            if hasattr(each, "sync_on_compute"):  # torchmetrics: each rank has the states of the whole batch already
                keep_apart(each)

    def counted(self, outputs: Any, labels: Sequence[Any]) -> Any:
        """What ``compute`` gives in the step, as a tuple of tensors."""
        found = self._asked("compute", outputs, labels)
        return tuple(found) if isinstance(found, list | tuple) else (found,)

    def update(self, counted: Any, outputs: Any, labels: Sequence[Any]) -> None:
        """Add a batch: what was counted in the step, or whole outputs and labels."""
        if self.in_step:
            self._call("update", *tree_map(_whole, counted))
            self.batches += 1
            return
        first = next((x for x in (outputs, *labels) if isinstance(x, Tensor)), None)
        if isinstance(self.metric, torch.nn.Module) and first is not None:
            self.metric.to(first.device)
        self._asked("update", outputs, labels)
        self.batches += 1

    def reset(self) -> None:
        """Forget what was counted."""
        self.batches = 0
        self._call("reset")

    def values(self) -> dict[str, float]:
        """By name, what was counted since ``reset``."""
        found = self._call("accumulate" if self.in_step else "compute")
        if isinstance(found, Mapping):
            return {str(name): _number(value) for name, value in found.items()}
        named = self.metric.name() if self.in_step and callable(getattr(self.metric, "name", None)) else self.label
        if isinstance(named, str):
            return {named: _number(found)}
        listed = found if isinstance(found, list | tuple) else [found]
        return {name: _number(value) for name, value in zip(named, listed, strict=True)}

    def _asked(self, method: str, outputs: Any, labels: Sequence[Any]) -> Any:
        return self._call(method, *spread(prediction(outputs)), *labels)

    def _call(self, method: str, *args: Any) -> Any:
        try:
            return getattr(self.metric, method)(*args)
        except OnecardError:
            raise
        except Exception as fault:
            shapes = ", ".join(str(list(x.shape)) if isinstance(x, Tensor) else type(x).__name__ for x in args)
            batch = self.batches + (method != "accumulate" and bool(args))
            where = f" in batch {batch} of {self.mode!r}" if self.mode and batch else ""
            raise EngineError(
                f"Engine: metrics: {self.label}.{method}({shapes}) fails{where}: {type(fault).__name__}: {fault}. It is given "
                "the model's outputs and the labels of the whole batch; Engine(metrics=None) runs without it"
            ) from fault


def prediction(outputs: Any) -> Any:
    """What of a model's outputs a metric looks at: ``logits`` of a library's output, else all."""
    if isinstance(outputs, Tensor) or type(outputs) in (tuple, list):
        return outputs
    for name in ("logits", "prediction_logits", "last_hidden_state"):
        found = outputs.get(name) if isinstance(outputs, Mapping) else getattr(outputs, name, None)
        if isinstance(found, Tensor):
            return found
    return outputs


def spread(outputs: Any) -> tuple[Any, ...]:
    """Several outputs are several arguments."""
    return tuple(outputs) if type(outputs) in (tuple, list) else (outputs,)


def held(metrics: Any) -> tuple[EngineMetric, ...]:
    """The metrics that an Engine is given: none, one, or several."""
    listed = [] if metrics is None else [*metrics] if type(metrics) in (list, tuple) else [metrics]
    return tuple(EngineMetric(each) for each in listed)


def _whole(value: Any) -> Any:
    return unshard(value) if isinstance(value, DistTensor) else value


def _number(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.item() if value.numel() == 1 else value.tolist()
    return value.item() if hasattr(value, "item") else value
