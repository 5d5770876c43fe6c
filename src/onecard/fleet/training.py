"""distributed_model and distributed_optimizer: a local model and a torch optimizer made parts of a fleet program."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from onecard import recorded
from onecard.comm import sparse_check
from onecard.comm.ranks import Ranks
from onecard.fleet import carried, gradients, pending, topology, whole
from onecard.fleet.carried import Places, declare
from onecard.fleet.copies import compare, equalise
from onecard.fleet.merging import merge
from onecard.fleet.parameters import Parallel, held
from onecard.fleet.pipeline_layer import PipelineLayer
from onecard.fleet.recomputing import recompute_modules
from onecard.fleet.sharded_model import before_step
from onecard.fleet.strategy import DistributedStrategy, FleetError
from onecard.fleet.topology import get_hybrid_communicate_group
from onecard.tensor import DistTensor

_hooked: list[Any] = []


def install() -> None:
    """Have every torch optimizer sum the gradients of fleet's parameters before it reads them; once a process."""
    pending.install()
    carried.install()
    if not _hooked:
        from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

        _hooked.append(register_optimizer_step_pre_hook(_before_step))
        _hooked.append(register_optimizer_step_post_hook(_after_step))


def _before_step(optimizer: Any, args: Any, kwargs: Any) -> Any:
    before_step(optimizer)
    mine = gradients.of_optimizer(optimizer)
    if not gradients.of_fleet(mine):
        return None
    given = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if given is None:
        _sum(mine)
        whole.begin(optimizer)
        return None

    def closure() -> Any:
        """An optimizer that compares losses (LBFGS) must see one card's, or ranks decide otherwise than each other."""
        whole.end(optimizer)  # the program sees parts
        loss = gradients.mean_loss(given(), mine)
        gradients.sync([p for p in mine if not isinstance(p, DistTensor)])
        whole.begin(optimizer)
        return loss

    return args[:1], {**kwargs, "closure": closure}


def _sum(mine: list[Any]) -> None:
    # Of distributed parameters those that have summands beyond the ranks over which ZeRO averages.
    gradients.sync([p for p in mine if not isinstance(p, DistTensor) or held(p).sums], step=True)


def _after_step(optimizer: Any, *_: Any) -> None:
    whole.end(optimizer)
    pending.stepped(gradients.of_optimizer(optimizer))


class DistributedModel(nn.Module):
    """What ``distributed_model`` returns: the model, with the names of its own parameters, and Paddle's methods."""

    def __init__(
        self,
        module: nn.Module,
        data: Ranks,
        strategy: DistributedStrategy,
        grad_accum_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.module, self._data, self._accum = module, data, grad_accum_dtype
        self._amp = getattr(torch, strategy.amp_configs["dtype"]) if strategy.amp else None
        self._places: Places | None = None
        self._family: pending.Family | None = None
        self._number, self._compared = sparse_check.serial(), 0
        self._adopt()
        module.register_forward_pre_hook(self._begin, prepend=True)

    def _begin(self, *_: Any) -> None:
        """Before a forward that is trained: parameters that have come since are those of the fleet program, too."""
        if not torch.is_grad_enabled() or not self.module.training:
            return
        with recorded.unrecorded():
            if self._places is None or not self._places.same():
                self._adopt()
            backwards = 0 if self._family is None else self._family.backwards
            if backwards != self._compared:  # once for all microbatches of a step
                self._compared = backwards
                compare(self._number, self.module)

    def _adopt(self) -> None:
        """Say what the parameters are, and give the copies of those that are new one value."""
        parameters = [*self.module.parameters()]
        self._family = self._family or pending.Family()
        self._family.become(parameters)
        declare(self.module)
        for p in parameters:
            gradients.share_data(p, self._data, self._family, self._accum)
        values = [*parameters, *self.module.buffers()]
        equalise(values if self._places is None else self._places.new(values))
        self._places = Places(self.module)

    def __setattr__(self, name: str, value: Any) -> None:
        # As on one card: model.head = nn.Linear(...) exchanges the model's head.
        inner = self.__dict__.get("_modules", {}).get("module")
        if isinstance(value, nn.Module | nn.Parameter) and inner is not None and hasattr(inner, name):
            setattr(inner, name, value)
        else:
            super().__setattr__(name, value)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_places": None, "_family": None}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """That of the model, under autocast if the strategy says amp."""
        context: AbstractContextManager[Any] = nullcontext()
        if self._amp is not None:
            kind = next((p.device.type for p in self.module.parameters()), "cpu")
            context = torch.autocast(kind, self._amp)
        with context:
            return self.module(*args, **kwargs)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """As of the model."""
        return self.module.named_parameters(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As of the model: this rank's parts."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As of the model."""
        return self.module.load_state_dict(*args, **kwargs)

    def scale_loss(self, loss: Tensor) -> Tensor:
        """The loss: gradients are averaged when they are summed, so it need not be divided."""
        return loss

    def apply_collective_grads(self) -> None:
        """Sum the gradients now. Otherwise the optimizer has it done."""
        gradients.sync(self.module.parameters())

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Nothing: backward sends nothing for parameters, so they accumulate without a message."""
        yield

    def clear_gradients(self) -> None:
        """``zero_grad()``."""
        self.module.zero_grad()

    def train_batch(self, *args: Any, **kwargs: Any) -> Any:
        """Of pipelines only."""
        raise FleetError(
            "train_batch is of pipelines: fleet.distributed_model(fleet.PipelineLayer([...])). This model has no stages: "
            "forward, loss.backward() and optimizer.step(), one microbatch after the other"
        )

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)


def distributed_model(model: nn.Module, grad_accum_dtype: torch.dtype | None = None) -> DistributedModel:
    """Make a model with local parameters a part of the fleet program.

    Parameters become equal where they are copies: each takes the value of the first rank that holds it. Gradients are
    averaged over the ranks along dp and sep, when an optimizer reads them. A ``PipelineLayer`` becomes a ``PipelineParallel``.

    Args:
        grad_accum_dtype: in which the gradients of microbatches add up and are summed over ranks, ``torch.float32`` for 16-bit
            parameters; rounded once, when they are read. The parameters' own if left out.

    Raises:
        FleetError: a model without stages under ``pp_degree``, or one that holds DistTensors.

    Source: ``paddle.distributed.fleet.distributed_model``.
    """
    from onecard.fleet.pipeline_parallel import PipelineParallel

    hcg, strategy = get_hybrid_communicate_group(), topology.strategy()
    _check_stages(model, hcg, strategy)
    strange = [name for name, p in model.named_parameters() if isinstance(p, DistTensor)]
    if strange:
        raise FleetError(
            f"fleet.distributed_model: {strange[0]} is no plain local parameter, as this level has. A model with placements is "
            "a part of any program as it is: oc.shard_layer, oc.shard_optimizer"
        )
    _check_norms(model)
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
        warnings.warn(
            f"sequence-parallel layers, but no parameter is marked: should {next(iter(plain_ones))} see a part of the sequence "
            "on each rank, its gradient will lack the others' part: fleet.mark_as_sequence_parallel_parameter(parameter)",
            stacklevel=3,
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
        from onecard.fleet.sharded_optimizer import ShardedOptimizer

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
    from onecard.comm import world

    now = get_hybrid_communicate_group()
    wanted = strategy.degrees(world.get_world_size())
    if wanted != now.degrees:
        only_data = all(n == 1 for axis, n in now.degrees.items() if axis != "dp")
        if not only_data:
            raise FleetError(
                f"fleet.distributed_optimizer(strategy=): its degrees {wanted} are not those of fleet.init, {now.degrees}"
            )
        topology.begin(strategy)
