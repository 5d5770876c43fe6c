"""InputSpec, and what of a batch the model, the loss and the metrics are given."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from onecard._torch.names import tree_flatten, tree_leaves, tree_map
from onecard.errors import EngineError

LABELS = ("labels", "label")
"""Keys of a dict batch that hold labels, where no ``labels_spec`` names others."""


@dataclass(frozen=True)
class InputSpec:
    """What one entry of a batch is like.

    Args:
        shape: of the whole batch; None or -1 where a size may vary.
        dtype: of torch, or its name.
        name: the entry's key in dict batches, and its name in errors.

    Source: ``paddle.static.InputSpec``.

    Example:
        >>> InputSpec([None, 256], "float32", "img")
        InputSpec(shape=(None, 256), dtype=torch.float32, name='img')
    """

    shape: Sequence[int | None]
    dtype: Any = torch.float32
    name: str | None = None

    def __post_init__(self) -> None:
        sizes = [self.shape] if isinstance(self.shape, int) else self.shape
        if isinstance(sizes, str) or not all(s is None or (type(s) is int and s >= -1) for s in sizes):
            raise EngineError(f"InputSpec: shape={self.shape!r}: want sizes, None where one may vary: [None, 256]")
        object.__setattr__(self, "shape", tuple(None if s == -1 else s for s in sizes))
        found = getattr(torch, self.dtype, None) if isinstance(self.dtype, str) else self.dtype
        if not isinstance(found, torch.dtype):
            raise EngineError(f"InputSpec: dtype={self.dtype!r}: want one of torch's, such as 'float32' or torch.int64")
        object.__setattr__(self, "dtype", found)

    def taken(self, x: Tensor, what: str) -> Tensor:
        """A tensor that fits; dims of 1 at its end that the spec does not have are dropped.

        Raises:
            EngineError: another shape or dtype.
        """
        while x.dim() > len(self.shape) and x.shape[-1] == 1:
            x = x.squeeze(-1)
        fits = x.dim() == len(self.shape) and all(s in (None, n) for s, n in zip(self.shape, x.shape, strict=True))
        if not fits or x.dtype != self.dtype:
            raise EngineError(
                f"{what} {self.name or ''}: is {list(x.shape)} {_short(x.dtype)}, but the engine was prepared for "
                f"{['any' if s is None else s for s in self.shape]} {_short(self.dtype)}: prepare(inputs_spec, labels_spec) says "
                "what a batch is; None is a size that may vary"
            )
        return x

    def empty(self, batch: int) -> Tensor:
        """A tensor like it, with so many rows; other sizes that may vary are 1."""
        rest = [1 if s is None else s for s in self.shape[1:]]
        first = [batch if self.shape[0] is None else self.shape[0]] if self.shape else []
        return torch.zeros([*first, *rest], dtype=self.dtype, device="cpu")


Specs = tuple[InputSpec, ...] | None


def specs_of(given: Any, what: str) -> Specs:
    """One spec, or several, or none; tensors say what they are."""
    if given is None:
        return None
    listed = given if isinstance(given, list | tuple) else [given]
    made = []
    for each in listed:
        if isinstance(each, Tensor):
            each = InputSpec(each.shape, each.dtype)
        if not isinstance(each, InputSpec):
            raise EngineError(f"prepare: {what}: want InputSpec(shape, dtype, name), not {each!r}")
        made.append(each)
    return tuple(made)


@dataclass(frozen=True)
class Feed:
    """A batch taken apart: what the model is called with, and the labels."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    labels: tuple[Any, ...]

    @property
    def rows(self) -> int:
        """Samples of the batch: what most of its tensors are as long as."""
        lengths = [x.shape[0] for x in tree_leaves((self.args, self.kwargs, self.labels)) if _has_rows(x)]
        return max(lengths, key=lengths.count) if lengths else 1

    @property
    def shapes(self) -> tuple[Any, ...]:
        """What tells one kind of batch from another: shapes, dtypes, and how it is nested."""
        leaves, tree = tree_flatten((self.args, self.kwargs, self.labels))
        return str(tree), *((tuple(x.shape), x.dtype) if isinstance(x, Tensor) else type(x) for x in leaves)

    def mapped(self, fn: Callable[[Any, bool], Any]) -> Feed:
        """``fn(leaf, is_label)`` of each leaf."""
        args, kwargs = tree_map(lambda x: fn(x, False), (self.args, self.kwargs))
        return Feed(args, kwargs, tree_map(lambda x: fn(x, True), self.labels))


def _has_rows(x: Any) -> bool:
    return hasattr(x, "dim") and x.dim() > 0


class Splitter:
    """Takes batches apart.

    Args:
        forward: the model's; how many arguments it must be given tells inputs from labels where nothing else does.
        has_loss: whether a loss looks at the labels; if not, the model is given all.
    """

    def __init__(
        self, forward: Callable[..., Any], has_loss: bool, inputs: Specs = None, labels: Specs = None, split: int = 0
    ) -> None:
        self.inputs, self.labels, self.has_loss = inputs, labels, has_loss
        self.split = split or (len(inputs) if inputs is not None else 0)
        self.must = _required(forward)

    def __call__(self, batch: Any, mode: str) -> Feed:
        """The parts of a batch.

        Raises:
            EngineError: it is none, or does not fit the specs.
        """
        batch = tree_map(_as_tensor, batch)
        if isinstance(batch, Mapping):
            return self._of_mapping(batch, mode)
        if not isinstance(batch, list | tuple):
            batch = (batch,)
        if not batch:
            raise EngineError(f"run(mode={mode!r}): the batch is empty: want (inputs, labels), a dict, or a tensor")
        count = self.split or self._inputs_among(len(batch), mode)
        given, labels = batch[:count], batch[count:]
        if len(given) == 1 and isinstance(given[0], Mapping):
            return Feed((), dict(given[0]), self._fit_labels(labels))
        if len(given) == 1 and isinstance(given[0], list | tuple):
            given = given[0]
        return Feed(self._fit_inputs(given), {}, self._fit_labels(labels))

    def _inputs_among(self, count: int, mode: str) -> int:
        if count == 1 or not self.has_loss or (mode == "predict" and count <= self.must):
            return count
        return count - (len(self.labels) if self.labels else 1)

    def _of_mapping(self, batch: Mapping[str, Any], mode: str) -> Feed:
        if not self.has_loss:
            return Feed((), dict(batch), ())
        named = [spec.name for spec in self.labels or () if spec.name]
        keys = named or [key for key in LABELS if key in batch][:1]
        if missing := [key for key in keys if key not in batch and mode != "predict"]:
            raise EngineError(f"run(mode={mode!r}): the batch has no {missing[0]!r}, only {', '.join(map(str, batch))}")
        wanted = [spec.name for spec in self.inputs or () if spec.name]
        inputs = {key: value for key, value in batch.items() if key not in keys and (not wanted or key in wanted)}
        for spec in self.inputs or ():
            if spec.name in inputs:
                inputs[spec.name] = spec.taken(inputs[spec.name], "the input")
        return Feed((), inputs, self._fit_labels([batch[key] for key in keys if key in batch]))

    def _fit_inputs(self, given: Sequence[Any]) -> tuple[Any, ...]:
        if self.inputs is None:
            return tuple(given)
        if len(given) != len(self.inputs):
            raise EngineError(
                f"the batch has {len(given)} input(s), but the engine was prepared for {len(self.inputs)}: give prepare an "
                "InputSpec for each"
            )
        return tuple(
            spec.taken(x, "the input") if isinstance(x, Tensor) else x
            for spec, x in zip(self.inputs, given, strict=True)
        )

    def _fit_labels(self, given: Sequence[Any]) -> tuple[Any, ...]:
        given = tuple(x for x in given if x is not None)
        if len(given) == 1 and type(given[0]) in (list, tuple):
            given = tuple(given[0])
        if self.labels is None or len(given) != len(self.labels):
            return given
        return tuple(
            spec.taken(x, "the label") if isinstance(x, Tensor) else x
            for spec, x in zip(self.labels, given, strict=True)
        )


def _as_tensor(x: Any) -> Any:
    return torch.from_numpy(np.ascontiguousarray(x)) if isinstance(x, np.ndarray) else x


def _required(forward: Callable[..., Any]) -> int:
    """How many arguments a function must be given."""
    try:
        parameters = inspect.signature(forward).parameters.values()
    except (TypeError, ValueError):
        return 1
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(p.kind in kinds and p.default is inspect.Parameter.empty for p in parameters)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
