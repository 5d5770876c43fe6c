"""Whether an optimizer may be given a part of a parameter: tried once, on tensors of a few numbers.

SGD, Adam and their like treat each number by itself. Others look at a whole matrix (Muon, LAMB, Adafactor, Shampoo), or at all
parameters at once (LBFGS, Prodigy). Nothing in torch says which, so they are tried: some steps on tensors, whole, cut in halves,
and each tensor alone. One of them is wide, as some factor only what has 32 or 128 columns and rows; and there are so many steps
as some begin later with it. What begins later still, or with larger matrices, is not seen.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from enum import IntEnum
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim import Optimizer

from onecard import recorded
from onecard._torch import names as _torch
from onecard._torch.names import tree_leaves
from onecard.comm.issue import trace
from onecard.train.shard import held

STEPS, LR, NEAR = 30, 0.01, 1e-3
_SIZES = (6, 4, 2, 2, 2)
_WIDE = (136, 132, 2, 2, 2)
_EACH = frozenset(
    getattr(torch.optim, name)
    for name in ["SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "Adagrad", "Adadelta", "RMSprop", "ASGD", "Rprop"]
)
"""Of torch: they treat each number by itself. Classes that are made of them are tried."""
_OWN = ("param_groups", "state", "grad_scale", "found_inf")  # of an optimizer, which a trial has of its own, or has not


class Looks(IntEnum):
    """What an optimizer must have before it: single numbers, whole parameters, or all of them. ``UNTRIED``: that is not known."""

    NUMBERS = 0
    PARAMETERS = 1
    ALL = 2
    UNTRIED = 3


def judge(optimizer: Optimizer, group: dict[str, Any], dims: set[int]) -> Looks:
    """What it looks at in tensors of so many dims, with the options of one of its groups.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(4, 4))
        >>> for made in (torch.optim.AdamW([weight]), torch.optim.Adafactor([weight]), torch.optim.LBFGS([weight])):
        ...     print(judge(made, made.param_groups[0], {2}).name)
        NUMBERS
        PARAMETERS
        UNTRIED
    """
    if type(optimizer) in _EACH:
        return Looks.NUMBERS
    device = next((p.device for p in group["params"] if not trace.faking()), torch.device("cpu"))
    shapes = [sizes[:n] for n in sorted(dims) for sizes in (_SIZES, _SIZES, _WIDE)]
    try:
        with recorded.unrecorded(), _torch.no_fakes(), torch.random.fork_rng(enabled=device.type == "cpu"):
            given = _given(shapes, device)
            whole = _run(optimizer, group, given)
            if not all(bool((x != y).any()) and bool(x.isfinite().all()) for x, y in zip(whole, given[0], strict=True)):
                return Looks.UNTRIED
            if all(
                _like(_in_halves(optimizer, group, given, dim), whole, given[0])
                for dim in range(min(2, max(dims, default=1)))
            ):
                return Looks.NUMBERS
            alone = [_run(optimizer, group, [[each[i]] for each in given])[0] for i in range(len(shapes))]
            return Looks.PARAMETERS if _like(alone, whole, given[0]) else Looks.ALL
    except Exception:  # what a stranger's optimizer may raise on tensors that it was not made for
        return Looks.UNTRIED


_known: WeakKeyDictionary[Optimizer, dict[int, Looks]] = WeakKeyDictionary()


def looks_at(optimizer: Optimizer, number: int, params: Sequence[Tensor]) -> Looks:
    """What an optimizer looks at in some parameters of one of its groups, tried once a group."""
    known = _known.setdefault(optimizer, {})
    if number not in known:
        known[number] = judge(optimizer, optimizer.param_groups[number], {max(p.dim(), 1) for p in params})
    return known[number]


def cut_in(group: dict[str, Any]) -> list[Tensor]:
    """The parameters of a group of which each rank has a part."""
    return [p for p in group["params"] if (ranks := held(p).group) is not None and ranks.size > 1]


def taken_whole(optimizer: Optimizer) -> list[Tensor]:
    """The parts of parameters that an optimizer is given whole, so that its states are whole, too."""
    groups = [cut_in(group) for group in optimizer.param_groups]
    return [
        p
        for number, cut in enumerate(groups)
        if cut and looks_at(optimizer, number, cut) is not Looks.NUMBERS
        for p in cut
    ]


def keeps_parameters(optimizer: Optimizer) -> bool:
    """Whether it holds its parameters elsewhere than in its groups, and would not see others that take their places."""
    lists = {id(group["params"]) for group in optimizer.param_groups}
    known = {id(p) for group in optimizer.param_groups for p in group["params"]}
    others = [v for k, v in vars(optimizer).items() if k not in _OWN and not callable(v) and id(v) not in lists]
    return any(id(x) in known for v in others for x in tree_leaves(v) if isinstance(x, Tensor))


def _given(shapes: list[tuple[int, ...]], device: torch.device) -> list[list[Tensor]]:
    """Values, and the gradients of some steps: rows of other sizes, so that what is shared among them shows."""
    made = torch.Generator(device="cpu").manual_seed(0)
    each = [[torch.randn(s, generator=made, device="cpu") * _slope(s) for s in shapes] for _ in range(STEPS + 1)]
    return [[x.to(device) for x in one] for one in each]


def _slope(shape: tuple[int, ...]) -> Tensor:
    return (
        (2.0 ** (torch.arange(shape[0], device="cpu") * _SIZES[0] / shape[0])).view(-1, *[1] * (len(shape) - 1))
        if shape
        else torch.ones((), device="cpu")
    )


def _in_halves(optimizer: Any, group: dict[str, Any], given: list[list[Tensor]], dim: int) -> list[Tensor]:
    """The same of two optimizers, each of which has a half of every tensor."""
    at = [min(dim, max(x.dim() - 1, 0)) for x in given[0]]
    halves = [
        [[x.chunk(2, d)[half].contiguous() if x.dim() else x for x, d in zip(each, at, strict=True)] for each in given]
        for half in range(2)
    ]
    found = [_run(optimizer, group, half) for half in halves]
    return [torch.cat(pair, d) if pair[0].dim() else pair[0] for *pair, d in zip(*found, at, strict=True)]


def _like(found: list[Tensor], whole: list[Tensor], before: list[Tensor]) -> bool:
    """Whether what was added is the same."""
    pairs = zip(found, whole, before, strict=True)
    return all(bool((a - b).abs().max() <= NEAR * (b - start).abs().max()) for a, b, start in pairs)


@torch.enable_grad()
def _run(optimizer: Any, group: dict[str, Any], given: list[list[Tensor]]) -> list[Tensor]:
    """A few steps of an optimizer like this one, of other parameters: the first values, then the gradients of each step."""
    others = {k: v for k, v in vars(optimizer).items() if k not in _OWN and "hooks" not in k and not callable(v)}
    if any(isinstance(x, Tensor) and x.numel() > 1 for x in tree_leaves([*others.values()])):
        raise ValueError("it keeps tensors elsewhere than in its groups and states")
    trial = object.__new__(type(optimizer))
    hooks: dict[str, Any] = {k: OrderedDict() for k in vars(optimizer) if "hooks" in k}
    trial.__dict__.update(copy.deepcopy(others), **hooks, state=defaultdict(dict))
    parameters = [torch.nn.Parameter(x.clone()) for x in given[0]]
    options = {k: copy.deepcopy(v) for k, v in group.items() if k != "params"}
    if isinstance(options.get("lr"), float | int | Tensor):  # it may be 0 now
        options["lr"] = torch.full((), LR, device=parameters[0].device) if isinstance(options["lr"], Tensor) else LR
    trial.param_groups = [{**options, "params": parameters}]
    for grads in given[1:]:
        for p, grad in zip(parameters, grads, strict=True):
            p.grad = grad.clone()
        type(optimizer).step(trial)
    return [p.detach() for p in parameters]
