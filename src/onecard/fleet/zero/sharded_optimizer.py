"""``sharding_degree``: ZeRO stage 1 along the grid's sharding axis, for ``fleet.distributed_optimizer``.

Gradients, norms and the scaler are those of any fleet program, on plain parameters. While the optimizer steps, distributed
parameters over the same memory stand in its groups, of which each rank along the axis updates a part; so states are cut. A
gradient that nobody has asked for before is summed along the axis only then: a reduce-scatter.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from onecard.comm.issue import groups
from onecard.comm.issue.ranks import Ranks, of_ranks
from onecard.errors import FleetError
from onecard.fleet.gradients import holders, hooks, sparse_gradients
from onecard.fleet.gradients import sums as gradients
from onecard.fleet.gradients.twins import summand
from onecard.fleet.zero.local_parameter import adopted, same_memory, twin_parameter
from onecard.fleet.zero.sharded_model import AXIS
from onecard.fleet.zero.whole import divided
from onecard.tensor import DistTensor
from onecard.tensor.dist_tensor import wrap
from onecard.tensor.spec import Spec
from onecard.train import unreduced
from onecard.train.summands import anywhere
from onecard.train.zero.last_hooks import register_first_behind, register_last
from onecard.train.zero.master import exchange_all
from onecard.train.zero.optimizer import keep_laid_out
from onecard.train.zero.zero import ShardedUpdate, ShardingStage1


def _cleared(self: Any, set_to_none: bool = True) -> None:
    """``zero_grad``. What a step has left is still one rank's summand, as the step has averaged a part of it itself."""
    with hooks.given_up():
        type(self).zero_grad(self, set_to_none=set_to_none)


class ShardedOptimizer:
    """Exchanges an optimizer's parameters while it steps.

    Args:
        line: the ranks along the sharding axis.
        clips: somebody reads the whole gradients in each step, so that they are summed before.
    """

    def __init__(self, optimizer: Optimizer, line: Ranks, clips: bool) -> None:
        self._clips, self._line = clips, line
        divided[optimizer] = "sharding_degree"
        self._twins: dict[Any, Any] = {}
        self._stage = ShardingStage1(AXIS, overlap=False)
        register_last(optimizer, self._begin)
        self._show(optimizer)
        update = ShardedUpdate(optimizer, self._stage)
        keep_laid_out(optimizer, update.lay_out)
        self._hide(optimizer)
        register_first_behind(optimizer, lambda opt, *_: self._end(opt))
        optimizer.register_load_state_dict_pre_hook(lambda opt, _: self._show(opt))
        optimizer.register_load_state_dict_post_hook(self._hide)
        optimizer.zero_grad = MethodType(_cleared, optimizer)  # type: ignore[method-assign]

    def _begin(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if kwargs.get("closure") or len(args) > 1:
            raise FleetError(
                "step(closure) makes gradients while the optimizer holds this rank's parts (sharding_degree): call closure() "
                "before step()"
            )
        self._show(optimizer)
        summed = set() if self._clips else self._summed()
        for p, twin in self._twins.items():
            twin.grad = None
            grad = unreduced.read(p)  # what is still to be summed along the axis stays so
            if grad is None and p in summed:
                grad = torch.zeros_like(p)
            if grad is not None:
                grad = sparse_gradients.dense(grad)
                twin.grad = summand(twin, grad) if p in summed or not gradients.is_whole(p) else _whole(twin, grad)

    def _summed(self) -> set[Any]:
        """Parameters of which any rank along the axis has a summand: all ranks fill their messages alike.

        A branch on the data, or an expert without tokens, leaves a rank without one: its own is zero.
        """
        lines: dict[tuple[int, ...], tuple[Ranks, list[Any]]] = {}
        for p in self._twins:
            ranks = holders.divided_over(p, self._line)
            lines.setdefault(ranks.ranks, (ranks, []))[1].append(p)
        found = set()
        for _, (ranks, params) in sorted(lines.items(), key=lambda line: line[0]):
            mine = [[unreduced.read(p) is not None and not gradients.is_whole(p)] for p in params]
            said = anywhere(mine, ranks, params[0].device)
            found |= {p for p, (there,) in zip(params, said, strict=True) if there}
        return found

    def _end(self, optimizer: Optimizer) -> None:
        for twin in self._twins.values():
            twin.grad = None
        self._hide(optimizer)

    def _follow(self) -> None:
        """What a program has given a parameter (``p.data = ...``) is its twin's memory, too."""
        for p, twin in self._twins.items():
            whole = not any(twin._spec.layout.dims)  # a part is that of a step that was interrupted
            if whole and not same_memory(p, twin._local):
                what = f"a parameter {list(twin.shape)}"
                twin._local = adopted(p, twin._local, what, "fleet.distributed_optimizer(sharding_degree)")
                if not same_memory(p, twin._local):
                    p.data = twin._local

    def _show(self, optimizer: Optimizer) -> None:
        self._follow()
        for each in optimizer.param_groups:
            for p in each["params"]:
                if not isinstance(p, DistTensor) and p not in self._twins:
                    gradients.refuse_parts(p, self._line, "sharding_degree")
                    ranks = holders.divided_over(p, self._line)
                    if ranks.size == 1:  # an expert of which no rank along the axis has a copy
                        continue
                    mesh = of_ranks(ranks.ranks, AXIS).mesh()
                    groups.apart.here.add(mesh)
                    self._twins[p] = twin_parameter(p, mesh)
                    if not self._clips:
                        hooks.leave_to_optimizer(p, AXIS)
        exchange_all(optimizer, self._twins)

    def _hide(self, optimizer: Optimizer) -> None:
        exchange_all(optimizer, {twin: p for p, twin in self._twins.items()})


def _whole(twin: Any, grad: Tensor) -> DistTensor:
    """A gradient that is summed already."""
    return wrap(grad, Spec.make(twin._spec.layout, twin.shape, tuple(grad.stride()), grad.dtype, grad.device))
