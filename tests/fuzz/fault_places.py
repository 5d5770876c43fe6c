"""Places of the library that ``fuzz.faults`` makes wrong on the ranks: ZeRO, clipping, fleet's layers, schedules, random keys."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import onecard as oc
from fuzz import fault_programs as programs
from onecard.fleet.gradients import sums
from onecard.fleet.layers import linear, mappings
from onecard.pipeline.run import runtime
from onecard.tensor.random_operators import draw
from onecard.train import norms
from onecard.train.zero import reducer

Place = tuple[str, str, Callable[[], Any], int, Any, str, Callable[[Any], Any]]
"""Family, name, program, ranks, whose attribute is made wrong, and how: of the right one the wrong one."""


def _library(function: Any) -> Any:
    """A function that counts as the library's, so that lines are the program's."""
    function.__code__ = function.__code__.replace(co_filename=oc.__file__)
    return function


def _on_ranks(wrong: Callable[..., Any]) -> Callable[[Any], Any]:
    """What ``wrong`` does with the right one, where there are several ranks."""

    def made(right: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            return (partial(_library(wrong), right) if oc.get_world_size() > 1 else right)(*args, **kwargs)

        return _library(call)

    return made


def _of_parts(change: Callable[[Tensor], Tensor]) -> Callable[[Any], Any]:
    """What ranks get of a bucket of gradients is changed."""

    def wrong(right: Any, *args: Any, **kwargs: Any) -> Any:
        end = right(*args, **kwargs)
        return _library(lambda: list(map(_library(change), end())))

    return _on_ranks(wrong)


def _rank(factor: Callable[[int], float]) -> Callable[[Tensor], Tensor]:
    return lambda x: x * factor(oc.get_rank())


PARTS: dict[str, Callable[[Tensor], Tensor]] = {
    "a mean for a sum": lambda x: x / oc.get_world_size(),
    "a sum is done twice": lambda x: x * oc.get_world_size(),
    "one rank gets nothing": _rank(lambda rank: float(rank != 1)),
    "a shard is off by one": lambda x: x.reshape(-1).roll(1).view(x.shape),
}


def dropped() -> Any:
    """Dropout of a tensor that is cut, drawn by its place in the whole."""
    torch.manual_seed(0)
    mesh = oc.ProcessMesh(range(oc.get_world_size()), ["x"])
    weight = nn.Parameter(oc.shard_tensor(torch.randn(6, 8), mesh, [oc.Shard(1)]))
    x = oc.shard_tensor(torch.randn(4, 6), mesh, [oc.Replicate()])
    loss = nn.functional.dropout(torch.tanh(x @ weight), 0.4).square().sum()
    loss.backward()
    return loss.detach(), weight.grad


def _elsewhere(right: Any, out: Any, law: Any, key: Any, shape: Any = None, offset: Any = ()) -> Any:
    return right(out, law, key, shape, ())


def _lost(right: Any, value: Any, sizes: Any, *what: Any) -> Any:
    parts = right(value, sizes, *what)
    return [parts[0], *parts[:-1]]


def _own(right: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    return linear.started.Handle.complete(x)


def _every(right: Any, shard: Any, grad: Tensor, *lines: Any) -> Iterator[Tensor]:
    yield grad


def _mine(right: Any, mine: Tensor, *args: Any) -> Tensor:
    return mine


def _larger(right: Any, parameters: Any, most: float, *args: Any, **kwargs: Any) -> Any:
    return right(parameters, most * (1 + oc.get_rank()), *args, **kwargs)


def _faster(right: Any, *args: Any, **kwargs: Any) -> Any:
    return right(*args, **(kwargs | {"lr": kwargs["lr"] * (1 + oc.get_rank())}))


def _doubled(right: Any, ctx: Any, *grads: Tensor) -> Any:
    made = right(ctx, *grads)
    return tuple(2 * x if isinstance(x, Tensor) else x for x in made) if isinstance(made, tuple) else 2 * made


def places() -> Iterator[Place]:
    """All of them."""
    for stage in (1, 2):
        for name, change in PARTS.items():
            program = partial(programs.zero, stage)
            yield "ZeRO", f"ZeRO {stage}: {name}", program, 2, reducer, "start_scatter", _of_parts(change)
    faster = sys.modules["torch.optim.sgd"], "sgd", _on_ranks(_faster)
    for name, program in (("layers", programs.layers), ("data", programs.data)):
        yield "clipping", f"{name}: copies count", program, 2, norms, "counted", _on_ranks(_every)
        yield "clipping", f"{name}: of this rank alone", program, 2, norms, "_of_all_ranks", _on_ranks(_mine)
        yield "optimizer", f"{name}: another rate", program, 2, *faster
    yield "clipping", "marks: another limit", programs.marked, 4, nn.utils, "clip_grad_norm_", _on_ranks(_larger)
    yield "fleet's layers", "no sum of x's gradient", programs.layers, 2, linear.started, "all_reduce", _on_ranks(_own)
    doubled = mappings._ReduceFrom, "backward", _on_ranks(_doubled)
    yield "fleet's layers", "the gradient of a sum is doubled", programs.layers, 2, *doubled
    yield "fleet's sums", "gradients are not summed", programs.data, 2, sums, "_reduce", _on_ranks(lambda *_: None)
    for mode in ("1F1B", "FThenB"):
        program = partial(programs.stages, mode)
        yield "schedules", f"{mode}: a microbatch is lost", program, 2, runtime, "split", _on_ranks(_lost)
    yield "random keys", "parts of another place", dropped, 2, draw.random, "fill", _on_ranks(_elsewhere)
