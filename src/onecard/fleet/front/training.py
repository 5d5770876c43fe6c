"""distributed_model and distributed_optimizer: a local model and a torch optimizer made parts of a fleet program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from onecard._torch import patches
from onecard._torch.uncompiled import untraced
from onecard.comm.base.warned import warn
from onecard.errors import FleetError
from onecard.fleet.front.pipeline_parallel import PipelineParallel
from onecard.fleet.front.wrapped import DistributedModel
from onecard.fleet.gradients import hooks
from onecard.fleet.gradients import sums as gradients
from onecard.fleet.gradients.merging import merge
from onecard.fleet.grid import topology
from onecard.fleet.grid.strategy import DistributedStrategy
from onecard.fleet.grid.topology import degrees_of, get_hybrid_communicate_group
from onecard.fleet.layers.parameters import Parallel
from onecard.fleet.layers.pipeline_layer import PipelineLayer
from onecard.fleet.layers.recomputing import recompute_modules
from onecard.fleet.zero import carried, whole
from onecard.fleet.zero.sharded_model import before_step
from onecard.fleet.zero.sharded_optimizer import ShardedOptimizer
from onecard.fleet.zero.written import refuse_bounded
from onecard.tensor import DistTensor
from onecard.train import rates, unreduced
from onecard.train.lazy import refuse_lazy
from onecard.train.shard import held


def install() -> None:
    """Have every torch optimizer sum the gradients of fleet's parameters before it reads them."""
    hooks.install()
    carried.install()
    untraced()
    steps = "torch.optim.optimizer._global_optimizer_{}_hooks"
    patches.hook(f"fleet: {steps.format('pre')}", register_optimizer_step_pre_hook, _before_step)
    patches.hook(steps.format("post"), register_optimizer_step_post_hook, _after_step)


def _before_step(optimizer: Any, args: Any, kwargs: Any) -> Any:
    before_step(optimizer)
    mine = gradients.of_optimizer(optimizer)
    hooks.take_in(mine)
    if not gradients.of_fleet(mine):
        return None
    rates.compare(optimizer, _stage_mates)
    given = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if given is None:
        _sum(mine)
        whole.begin(optimizer)
        return None

    def closure() -> Any:
        """An optimizer that compares losses (LBFGS) must see one card's, or ranks decide otherwise than each other."""
        whole.end(optimizer)  # the program sees parts
        loss = gradients.mean_loss(given(), mine)
        hooks.sync([p for p in mine if not isinstance(p, DistTensor)])
        whole.begin(optimizer)
        return loss

    return args[:1], {**kwargs, "closure": closure}


def _stage_mates() -> list[int]:
    """Ranks whose optimizers have the same groups: those of other stages have other layers."""
    hcg = get_hybrid_communicate_group()
    return hcg.ranks_along(tuple(axis for axis in hcg.degrees if axis != "pp"))


def _sum(mine: list[Any]) -> None:
    # Of distributed parameters those that have summands beyond the ranks over which ZeRO averages.
    hooks.sync([p for p in mine if not isinstance(p, DistTensor) or held(p).sums], step=True)


def _after_step(optimizer: Any, *_: Any) -> None:
    whole.end(optimizer)
    unreduced.stepped(gradients.of_optimizer(optimizer))


def distributed_model(model: nn.Module, grad_accum_dtype: torch.dtype | None = None) -> DistributedModel:
    """Make a model with local parameters a part of the fleet program.

    Parameters become equal where they are copies: each takes the value of the first rank that holds it. Gradients are
    averaged over the ranks along dp and sep, when an optimizer reads them. A ``PipelineLayer`` becomes a ``PipelineParallel``.

    Args:
        grad_accum_dtype: in which the gradients of microbatches add up and are summed over ranks, ``torch.float32`` for 16-bit
            parameters; rounded once, when they are read. The parameters' own if left out.

    Raises:
        FleetError: a model without stages under ``pp_degree``, or one that holds DistTensors, or lazy layers without parameters.

    Source: ``paddle.distributed.fleet.distributed_model``.
    """
    hcg, strategy = get_hybrid_communicate_group(), topology.strategy()
    _check_stages(model, hcg, strategy)
    strange = [name for name, p in model.named_parameters() if isinstance(p, DistTensor)]
    if strange:
        raise FleetError(
            f"fleet.distributed_model: {strange[0]} is no plain local parameter, as this level has. A model with placements is "
            "a part of any program as it is: oc.shard_layer, oc.shard_optimizer"
        )
    refuse_lazy(model, "fleet.distributed_model", FleetError)
    _check_norms(model)
    refuse_bounded(model, hcg.data(), "fleet.distributed_model")
    if strategy.recompute:
        recompute_modules(model, strategy.recompute_configs["checkpoints"], strategy.recompute_configs["policy"])
    if isinstance(model, PipelineLayer):
        return PipelineParallel(model, hcg.data(), strategy, grad_accum_dtype)
    return DistributedModel(model, hcg.data(), strategy, grad_accum_dtype)


def _check_stages(model: nn.Module, hcg: topology.HybridCommunicateGroup, strategy: DistributedStrategy) -> None:
    if hcg.degrees["pp"] > 1 and not isinstance(model, PipelineLayer):
        raise FleetError(
            f"pp_degree is {hcg.degrees['pp']}, but {type(model).__name__} has no stages: fleet.PipelineLayer([fleet.LayerDesc("
            "nn.Linear, 4, 4), ...], loss_fn=...) is cut into them. Stages by hand: oc.differentiable.send and recv between "
            "hcg.get_pipe_parallel_group(), with tags for microbatches, and no distributed_model"
        )
    if strategy.recompute and isinstance(model, PipelineLayer):
        raise FleetError("strategy.recompute names modules, of which a rank of a pipeline has some: PipelineLayer(..., "
                         "recompute_interval=1) computes each layer again")  # fmt: skip


def _check_norms(model: nn.Module) -> None:
    """Parameters of plain modules between sequence-parallel layers see a part of the sequence; one forgets to mark them."""
    parallel = any(getattr(m, "seq_dim", None) is not None for m in model.modules())
    parallel = parallel and get_hybrid_communicate_group().degrees["mp"] > 1
    plain_ones = {
        name: p
        for path, m in model.named_modules()
        if not isinstance(m, Parallel)
        for name, p in m.named_parameters(path, recurse=False)
    }
    if parallel and plain_ones and not any(held(p).sums for p in plain_ones.values()):
        warn(
            f"sequence-parallel layers, but no parameter is marked: should {next(iter(plain_ones))} see a part of the sequence "
            "on each rank, its gradient will lack the others' part: fleet.mark_as_sequence_parallel_parameter(parameter)",
        )


def distributed_optimizer(
    optimizer: torch.optim.Optimizer,
    strategy: DistributedStrategy | None = None,
    grad_clip: Callable[[Any], Any] | None = None,
) -> Any:
    """Make a torch optimizer a part of the fleet program; returns the same optimizer.

    Under ``sharding_degree`` each rank along that axis keeps and updates a part of its states (ZeRO stage 1; all stages:
    ``fleet.group_sharded_parallel``). It has Paddle's ``clear_grad()`` and ``minimize(loss)`` as well, clips by ``grad_clip``
    before each step, and under the strategy's ``gradient_merge`` steps at every ``k_steps``-th call only.

    Raises:
        FleetError: the strategy does not fit the one that ``fleet.init`` was given.

    Source: ``paddle.distributed.fleet.distributed_optimizer``.
    """
    if strategy is not None:
        _adopt(strategy)
    used = topology.strategy()
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise FleetError(f"fleet.distributed_optimizer takes a torch optimizer, not {type(optimizer).__name__}")
    more: Any = optimizer
    if grad_clip is not None:
        clip = grad_clip
        optimizer.register_step_pre_hook(lambda opt, *_: (clip(gradients.of_optimizer(opt)), None)[1])
    hcg = get_hybrid_communicate_group()
    if hcg.degrees["sharding"] > 1:
        ShardedOptimizer(optimizer, hcg.group("sharding"), clips=grad_clip is not None)
    if used.gradient_merge:
        merge(more, used.gradient_merge_configs["k_steps"], used.gradient_merge_configs["avg"])
    more.clear_grad = lambda *_, **__: more.zero_grad()

    def minimize(loss: Tensor, *_: Any, **__: Any) -> None:
        loss.backward()
        more.step()
        more.zero_grad()

    more.minimize = minimize
    return optimizer


def _adopt(strategy: DistributedStrategy) -> None:
    """A strategy given as late as here: Paddle allows it where nothing was said before."""

    now = get_hybrid_communicate_group()
    wanted = degrees_of(strategy)
    if wanted != now.degrees:
        only_data = all(n == 1 for axis, n in now.degrees.items() if axis != "dp")
        if not only_data:
            raise FleetError(
                f"fleet.distributed_optimizer(strategy=): its degrees {wanted} are not those of fleet.init, {now.degrees}"
            )
        topology.begin(strategy)
