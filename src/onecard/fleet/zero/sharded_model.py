"""A local model under ``group_sharded_parallel``: plain parameters that compute, and distributed ones that are trained.

A distributed parameter, the *twin* of a plain one, has the same memory, or the part of it that this rank keeps. The model
stays the object that it was, so there is no second name for it whose gradients nobody sees:

* ``model.parameters()`` are the twins; a plain parameter, reached by name (``model.fc.weight``), has its twin's gradient;
* under "p_g_os" a plain parameter has no memory but while it is needed: who reaches it by name has it gathered;
* any optimizer that comes to hold one of either kind is made one of the twins, at its first step at the latest.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from onecard._torch import patches
from onecard._torch.dcp import show_in_state_dicts
from onecard.comm.issue import groups, plain
from onecard.comm.issue.ranks import Ranks, of_ranks
from onecard.errors import FleetError
from onecard.fleet.gradients import holders, hooks, merging
from onecard.fleet.gradients.twins import (
    add_up_in,
    added,
    lay_out_gradient,
    losses_of,
    pair,
    sum_of_losses,
    summand,
    trained,
    twin_of,
)
from onecard.fleet.grid import topology
from onecard.fleet.zero import carried
from onecard.fleet.zero.local_parameter import (
    FixedParameters,
    Layers,
    become_local,
    local_gradient,
    mend,
    of_local,
    twin_parameter,
)
from onecard.fleet.zero.written import ForwardWrites
from onecard.pipeline.run import no_graph
from onecard.tensor import DistTensor
from onecard.train.common_memory import tell_parted
from onecard.train.zero.blocks import BlockSpec, Hook, ParameterBlocks, Policy
from onecard.train.zero.gathered import GatheredParameter
from onecard.train.zero.master import exchange_all
from onecard.train.zero.optimizer import keep_laid_out
from onecard.train.zero.reducer import Reducer, hook
from onecard.train.zero.resume import is_like
from onecard.train.zero.zero import ShardedUpdate, ShardingStage1, overlaps, own_part

AXIS = "sharding"


class Sharded:
    """The twins of a model's parameters, what sums their gradients, and the optimizers that update them.

    Args:
        model: changed in place.
        stage: of ZeRO, along the group's axis.
        accum: in which dtype gradients add up.
        gathers: level "p_g_os": parameters are parts, gathered block by block.
    """

    def __init__(
        self,
        model: nn.Module,
        level: str,
        stage: ShardingStage1,
        group: Ranks,
        policy: Policy = True,
        blocks: BlockSpec = None,
        accum: torch.dtype | None = None,
    ) -> None:
        self.level, self.stage, self.group, self._how = level, stage, group, (policy, blocks, accum)
        carried.declare(model)
        named = dict(model.named_parameters())
        self.twins: dict[Any, Any] = {p: self._twin(p) for p in named.values()}
        self.names = {id(p): name for name, p in named.items()} | {id(self.twins[p]): n for n, p in named.items()}
        everything = [*self.twins.values()]
        self.overlap = overlaps(stage.overlap, everything)
        for p, twin in self.twins.items():
            add_up_in(twin, accum)
            become_local(p, twin, self, whole=level != "p_g_os")
        self.blocks: ParameterBlocks | None = None
        if level == "p_g_os":
            tell_parted(model, "group_sharded_parallel at p_g_os")
            carried.install()  # conversions of a model: also where no grid was laid
            pieces = {}
            for p, twin in self.twins.items():
                spec, cut = twin._spec, stage.cut(twin)
                if cut is not None:
                    pieces[p] = GatheredParameter(own_part(cut), spec, p)
            self.blocks = ParameterBlocks(model, pieces, policy, self.overlap, blocks)
        watch = ForwardWrites(model, named, lambda p: holders.divided_over(p, group), self.blocks is None)
        if self.blocks is not None:
            self.blocks.ends = watch.see_pieces
        every = stage.stage > 1
        self.reducer = Reducer(everything, stage.cut, every, self.overlap, self._no_gradient, stage.reduce_dtype)
        whole = topology.begun() and group.ranks == topology.data_ranks().ranks  # else the norm is that over the group
        for p, twin in self.twins.items():
            pair(twin, p, self.reducer, self._no_gradient)
            if whole:
                hooks.share_data(twin, group)
            hook(p, None, self._handing_on(p, twin))
        self._trained = {p: p.requires_grad for p in self.twins}
        places = FixedParameters.gathering(self.blocks) if self.blocks is not None else FixedParameters
        for module in model.modules():
            module.__dict__["_parameters"] = places(module._parameters)
            module.__dict__["_modules"] = Layers(module._modules)
        model.register_forward_pre_hook(Hook(lambda *_: self.agree()), prepend=True)
        if hasattr(model, "begins"):  # a pipeline's
            model.begins = self.agree  # type: ignore[assignment]
        kind = type(model)
        model.__class__ = type(
            f"GroupSharded{kind.__name__}", (GroupShardedModel, kind), {"__module__": kind.__module__}
        )
        model.__dict__["_sharded"] = self
        show_in_state_dicts(trained)

    def _twin(self, p: Any) -> Any:
        """A distributed parameter over the ranks that have copies: an expert's are fewer."""
        ranks = holders.divided_over(p, self.group)
        mesh = of_ranks(ranks.ranks, AXIS).mesh()
        groups.apart.here.add(mesh)
        twin = twin_parameter(p, mesh)
        sum_of_losses(twin, self.group.size // ranks.size)
        return twin

    def agree(self) -> None:
        """What was frozen or unfrozen, or given other memory, by one name is so by the other."""
        for p, twin in self.twins.items():
            self.agree_on(p, twin)
            if self.blocks is None:
                mend(p, twin, self.names[id(p)])

    def agree_on(self, p: Any, twin: Any) -> None:
        """Whether it is trained."""
        if p.requires_grad != twin.requires_grad:
            trained = not self._trained[p]
            p.requires_grad_(trained)
            twin.requires_grad_(trained)
        self._trained[p] = p.requires_grad

    def adopt(self, optimizer: torch.optim.Optimizer) -> None:
        """Have an optimizer update the twins, each rank its parts.

        Raises:
            FleetError: it holds other parameters, too.
        """
        known = {*map(id, self.twins), *map(id, self.twins.values())}
        if any(id(p) not in known for each in optimizer.param_groups for p in each["params"]):
            raise FleetError(
                "group_sharded_parallel: the optimizer holds parameters that are not the model's. Each model has its own: "
                "an optimizer for these, another for the others"
            )
        for p, state in [*optimizer.state.items()]:
            for key, value in state.items():
                if is_like(p, key, value) and not isinstance(value, DistTensor):  # as the parameters: the first rank's
                    plain.broadcast(value, holders.divided_over(p, self.group), 0, call="group_sharded_parallel")
        exchange_all(optimizer, self.twins)
        optimizer.register_step_pre_hook(lambda opt, *_: self._before(opt))
        update = ShardedUpdate(optimizer, self.stage, self.reducer, self._mean)
        keep_laid_out(optimizer, update.lay_out)
        optimizer.__dict__["_onecard_sharded"] = self

    def _before(self, optimizer: torch.optim.Optimizer) -> None:
        self.agree()
        exchange_all(optimizer, self.twins)  # a group that was added

    def _handing_on(self, p: Any, twin: Any) -> Callable[[Any], None]:
        """The gradient of a plain parameter becomes the distributed one's: a summand of an average."""

        def run(p: Any) -> None:
            grad = local_gradient(p)
            if isinstance(twin.grad, Tensor) and not isinstance(twin.grad, DistTensor):
                lay_out_gradient(twin)
            added(twin)
            self.reducer.before(twin)
            if twin.grad is None:
                twin.grad = summand(twin, grad)
            elif twin.grad._spec.layout.pending:
                twin.grad._local.add_(grad, alpha=1 / losses_of(twin))
            else:  # a program's own, or what it computed with the twin
                twin.grad = twin.grad + summand(twin, grad)
            self.reducer.after(twin)
            of_local(p).accumulated()

        return run

    def _no_gradient(self, twin: Any) -> DistTensor:
        return summand(twin, torch.zeros(twin.shape, dtype=twin.dtype, device=twin._spec.device))

    def _mean(self, loss: Any) -> Any:
        """A closure's loss as one card's: ranks that search by it decide alike."""
        if isinstance(loss, DistTensor) or not isinstance(loss, Tensor | float):
            return loss
        given = torch.as_tensor(loss).detach().clone()
        mean = plain.all_reduce(given, self.group, "avg", call="the closure's loss")
        return mean if isinstance(loss, Tensor) else mean.item()

    def copied(self, model: nn.Module) -> None:
        """A copy of the model, of plain parameters, becomes one of the same level, whose optimizers are its own."""
        Sharded(model, self.level, self.stage, self.group, *self._how)


class GroupShardedModel(nn.Module):
    """What a model becomes by ``group_sharded_parallel``: itself, with distributed parameters for those who ask for all.

    ``torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)`` clips by the norm of the whole gradient.
    """

    _sharded: Sharded

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Any]]:
        """Of the model, each as the distributed tensor that the optimizer updates."""
        if self._sharded.blocks is not None:
            self._sharded.blocks.told()
        for name, p in super().named_parameters(prefix, recurse, remove_duplicate):
            yield name, self._sharded.twins.get(p, p)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As the optimizer's: under gradient_merge gradients stay that wait for a k-th step."""
        merging.clear(self, super().zero_grad, set_to_none)

    def clear_gradients(self) -> None:
        """``zero_grad()``."""
        self.zero_grad()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Nothing: microbatches add up to the same gradient, and level "os" sends it once in any case."""
        yield

    def __getattr__(self, name: str) -> Any:
        """``model.module``, as of a wrapper, is the model itself."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                return self
            raise

    def __deepcopy__(self, memo: Any) -> Any:
        kind = type(self).__mro__[2]
        made: Any = object.__new__(kind)
        memo[id(self)] = made
        made.__dict__.update({k: copy.deepcopy(v, memo) for k, v in self.__dict__.items() if k != "_sharded"})
        self._sharded.copied(made)
        return made


def before_step(optimizer: Any) -> None:
    """An optimizer that nobody told of, and that holds parameters of such a model, becomes one of its twins."""
    if "_onecard_sharded" in optimizer.__dict__:
        return
    for each in optimizer.param_groups:
        for p in each["params"]:
            local = of_local(p)
            owner = local.owner if local is not None else twin_owner(p)
            if owner is not None:
                owner.adopt(optimizer)
                return


def install() -> None:
    """``backward(inputs=...)`` and ``torch.autograd.grad`` know the parameters that they are given."""
    if hasattr(torch.autograd, "_engine_run_backward"):
        patches.replace("fleet: torch.autograd._engine_run_backward", torch.autograd, "_engine_run_backward", _knowing)


def _knowing(torchs: Callable[..., Any]) -> Callable[..., Any]:
    engine = no_graph.telling(torchs)

    def run(tensors: Any, grads: Any, keep: Any, create: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        leaves = [plain_of(x) for x in inputs]
        given = tuple(x if p is None else p for x, p in zip(inputs, leaves, strict=True))
        found = engine(tensors, grads, keep, create, given, *args, **kwargs)
        if kwargs.get("accumulate_grad") or not inputs:
            return found
        found = hooks.asked(given, found)
        return tuple(grad if p is None else _asked(p, grad) for p, grad in zip(leaves, found, strict=True))

    return run


def plain_of(x: Any) -> Any:
    """The plain parameter, of itself or of its twin; None of others."""
    if of_local(x) is not None:
        return x
    known = twin_of(x)
    return None if known is None else known.plain()


def _asked(p: Any, grad: Any) -> Any:
    if grad is None:
        return None
    hooks.refuse_graph(grad, "group_sharded_parallel")
    return summand(of_local(p).twin, grad)


def twin_owner(p: Any) -> Sharded | None:
    """The model whose parameter's twin this is."""
    known = twin_of(p)
    return None if known is None else of_local(known.plain()).owner
