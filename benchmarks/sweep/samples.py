"""What to run: operators of PyTorch's database, a few small samples of each, and placements for their tensors."""

from __future__ import annotations

import itertools
import random
import sys
import types
import unittest
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import Partial, Placement, Replicate, Shard
from torch.utils._pytree import tree_flatten, tree_unflatten

SEED = 20
SAMPLES_LOOKED_AT = 64
LARGEST = 3000  # elements of all tensors of a sample
# Their values are whatever was in memory.
VALUELESS = frozenset({"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"})

# They need not draw what plain torch draws, only the same under every layout.
RANDOM = (
    "bernoulli", "cauchy", "exponential", "geometric", "log_normal", "multinomial", "normal", "rand", "uniform",
    "nn.functional.dropout", "nn.functional.alpha_dropout", "nn.functional.feature_alpha_dropout", "nn.functional.rrelu",
    # With dropout; the database seeds these itself, so that plain torch always draws the same.
    "nn.functional.scaled_dot_product_attention", "nn.functional.multi_head_attention_forward",
)  # fmt: skip


def database() -> list[Any]:
    """PyTorch's operator database. It imports expecttest, which it needs for its own tests only."""
    try:
        import expecttest  # noqa: F401
    except ImportError:
        stand_in: Any = types.ModuleType("expecttest")
        stand_in.TestCase, stand_in.assert_expected_inline = unittest.TestCase, None
        sys.modules["expecttest"] = stand_in
    from torch.testing._internal.common_methods_invocations import op_db

    return op_db


def _unseeded(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    _unseeded_calls.append(function)
    return function(*args, **kwargs)


_unseeded_calls: list[Any] = []
SEED_OF_DATABASE = 42


@contextmanager
def unseeded() -> Iterator[list[Any]]:
    """Inside, what the database seeds itself within the call is called without; gives what was called so."""
    database()
    from torch.testing._internal import common_methods_invocations

    _unseeded_calls.clear()
    with patch.object(common_methods_invocations, "wrapper_set_seed", _unseeded):
        yield _unseeded_calls


def title(op: Any) -> str:
    """An operator's name, with its variant: ``"div.floor_rounding"``."""
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name


def operators(dtype: torch.dtype) -> list[Any]:
    """The operators that take this dtype on CPU."""
    return [op for op in database() if dtype in op.supported_dtypes("cpu")]


def seed_everything() -> None:
    """All ranks draw the same samples."""
    torch.manual_seed(SEED)
    np.random.seed(SEED)
    random.seed(SEED)


@dataclass
class Sample:
    """One call: ``run(*leaves)`` with its tensors taken out, so that each can be placed.

    Attributes:
        tensors: the strided tensors among the arguments, in order.
        run: calls the operator with others in their places.
        finish: what the database does to a result before its gradient is defined.
        grad: gradients are asked of it.
    """

    tensors: list[Tensor]
    run: Callable[[Callable[..., Any], Sequence[Any]], Any]
    finish: Callable[[Any], Any]
    grad: bool


def samples(op: Any, dtype: torch.dtype, wanted: int) -> list[Sample]:
    """A few small samples that differ in the shapes of their tensors, the largest rank first among equals."""
    seed_everything()
    grad = dtype.is_floating_point and op.supports_autograd
    found = []
    for given in itertools.islice(op.sample_inputs("cpu", dtype, requires_grad=grad), SAMPLES_LOOKED_AT):
        made = _sample(given, grad)
        if sum(t.numel() for t in made.tensors) <= LARGEST and any(t.dim() for t in made.tensors):
            found.append(made)
    return _spread(found, wanted)


def _spread(found: list[Sample], wanted: int) -> list[Sample]:
    if len(found) <= wanted:
        return found
    chosen, seen = [], set()
    for made in found:
        shapes = tuple(tuple(t.shape) for t in made.tensors)
        if shapes not in seen:
            seen.add(shapes)
            chosen.append(made)
    chosen += [made for made in found if not any(made is c for c in chosen)]
    chosen[1:] = sorted(chosen[1:], key=lambda s: 0 in [t.numel() for t in s.tensors])
    step = max(1, len(chosen) // wanted)
    return chosen[::step][:wanted]


def _sample(given: Any, grad: bool) -> Sample:
    leaves, spec = tree_flatten((given.input, given.args, given.kwargs))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.layout is torch.strided]

    def run(function: Callable[..., Any], tensors: Sequence[Any]) -> Any:
        filled = list(leaves)
        for i, tensor in zip(places, tensors, strict=True):
            filled[i] = tensor
        first, args, kwargs = tree_unflatten(filled, spec)
        return function(first, *args, **kwargs)

    return Sample([leaves[i] for i in places], run, given.output_process_fn_grad, grad)


def with_other_values(sample: Sample, dtype: torch.dtype, function: Callable[..., Any]) -> list[Tensor]:
    """Tensors of the sample's shapes with other values that one card takes too; the sample's own, where it takes none."""
    others = [_other_values(t) if t.dtype == dtype else t for t in sample.tensors]
    try:
        sample.run(function, [t.detach().clone() for t in others])
    except Exception:  # positive definite, sorted, or in some range
        return sample.tensors
    return others


def _other_values(t: Tensor) -> Tensor:
    with torch.no_grad():
        other = t * 0.98 if t.dtype.is_floating_point else t.roll(1)
        return torch.empty_like(t).copy_(other).requires_grad_(t.requires_grad)


Placing = tuple[Placement | None, ...]  # one for each tensor; None: a plain tensor


def placings(tensors: Sequence[Tensor], limit: int, partial: bool) -> list[Placing]:
    """Placements to try: all replicated, each tensor cut along each dim, all cut alike, mixed, some plain."""
    n = len(tensors)
    ranks = [t.dim() for t in tensors]
    found: dict[Placing, None] = {}

    def add(placing: Sequence[Placement | None]) -> None:
        if any(p is not None for p in placing):
            found[tuple(placing)] = None

    for dim in range(max(ranks)):
        add([Shard(dim) if dim < r else Replicate() for r in ranks])
    for i in range(n):
        for dim in (0, *range(ranks[i] - 1, 0, -1)):
            if dim < ranks[i]:
                add([Shard(dim) if j == i else Replicate() for j in range(n)])
    add([Shard(r - 1) if r else Replicate() for r in ranks])
    add([Shard(i % r) if r else Replicate() for i, r in enumerate(ranks)])
    first = next(i for i, r in enumerate(ranks) if r)
    add([Shard(0) if i == first else None for i in range(n)])
    chosen = _thin(list(found), limit)
    chosen.append((Replicate(),) * n)
    if partial and tensors[first].is_floating_point():
        chosen.append(tuple(Partial() if i == first else Replicate() for i in range(n)))
    return list(dict.fromkeys(chosen))


def _thin(found: list[Placing], limit: int) -> list[Placing]:
    return found if len(found) <= limit else [found[i * len(found) // limit] for i in range(limit)]


def variants(op: Any) -> Iterator[tuple[str, Callable[..., Any]]]:
    """The operator's own form and, where it has one, the in-place form."""
    yield "", op.op
    inplace = op.inplace_variant
    if inplace is not None:
        yield "in place", inplace
