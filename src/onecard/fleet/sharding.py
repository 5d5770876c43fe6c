"""group_sharded_parallel: ZeRO for a local model, on the machinery of the marks.

The model computes with plain parameters. The optimizer is given distributed ones over the same memory, whose gradients are the
ranks' own, still to be averaged; what ``onecard.ShardingStage1`` and its kin do with such parameters is all that is done here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from onecard.checkpoint import save_state_dict
from onecard.comm import plain
from onecard.comm.ranks import Ranks, of_ranks
from onecard.fleet import gradients, topology
from onecard.fleet.parameters import held
from onecard.fleet.pipeline_layer import PipelineLayer
from onecard.fleet.pipeline_parallel import PipelineParallel
from onecard.fleet.scaling import distributed_scaler
from onecard.fleet.strategy import FleetError
from onecard.fleet.twins import added, pair
from onecard.layout import Layout
from onecard.parallel.blocks import Blocks, Piece, Policy
from onecard.parallel.optimizer import keep_laid_out
from onecard.parallel.reducer import hook
from onecard.parallel.resume import is_like
from onecard.parallel.zero import ShardedUpdate, ShardingStage1, ShardingStage2, ShardingStage3, overlaps
from onecard.tensor import DistTensor
from onecard.tensor.dist_tensor import wrap
from onecard.tensor.spec import Spec

LEVELS: dict[str, type[ShardingStage1]] = {"os": ShardingStage1, "os_g": ShardingStage2, "p_g_os": ShardingStage3}
AXIS = "sharding"


class GroupShardedModel(nn.Module):
    """What ``group_sharded_parallel`` returns: the model, with distributed parameters to those who ask for them.

    ``parameters()`` gives what the optimizer updates: ``torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)`` clips by
    the norm of the whole gradient. ``module`` is the model itself.
    """

    def __init__(self, module: nn.Module, twins: dict[nn.Parameter, Any], level: str) -> None:
        super().__init__()
        self.module, self.level = module, level
        self._twins = twins
        self._trained = {p: p.requires_grad for p in twins}
        module.register_forward_pre_hook(lambda *_: self._agree(), prepend=True)

    def _agree(self) -> None:
        """Parameters that were frozen or unfrozen, here or in the model itself, are so in both."""
        for p, twin in self._twins.items():
            if p.requires_grad != twin.requires_grad:
                trained = not self._trained[p]
                p.requires_grad_(trained)
                twin.requires_grad_(trained)
            self._trained[p] = p.requires_grad

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """That of the model."""
        return self.module(*args, **kwargs)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Any]]:
        """Of the model, each as the distributed tensor that the optimizer updates."""
        for name, p in self.module.named_parameters(prefix, recurse, remove_duplicate):
            yield name, self._twins.get(p, p)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Of the model; at level "p_g_os" its parameters are distributed tensors, for ``oc.save_state_dict``."""
        found = self.module.state_dict(*args, **kwargs)
        if self.level == "p_g_os":
            names = dict(self.module.named_parameters(remove_duplicate=False))
            for name, p in names.items():
                if name in found and p in self._twins:
                    found[name] = self._twins[p].detach()
        return found

    @torch.no_grad()
    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """Into the model: whole tensors, or distributed ones."""
        given = dict(state_dict)
        for name, p in self.module.named_parameters(remove_duplicate=False) if self.level == "p_g_os" else ():
            value = given.pop(name, None)
            if value is not None and p in self._twins:
                self._twins[p].copy_(value)
                given[name] = p.detach()  # which this rank holds nothing of
        return self.module.load_state_dict(given, strict, assign)

    def clear_gradients(self) -> None:
        """``zero_grad()``."""
        self.zero_grad()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Nothing: microbatches add up to the same gradient, and level "os" sends it once in any case."""
        yield

    def __deepcopy__(self, memo: Any) -> Any:
        raise FleetError(
            "a copy of what group_sharded_parallel returned would have gradients that no optimizer sees. For an average of the "
            "weights: average = {n: p.detach().clone() for n, p in model.named_parameters()}, average[n].lerp_(p, 0.01); for a "
            "second model: make it, and load_state_dict(model.state_dict())"
        )

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)


def group_sharded_parallel(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    level: str,
    scaler: torch.amp.GradScaler | None = None,
    group: Ranks | None = None,
    offload: bool = False,
    sync_buffers: bool = False,
    buffer_max_size: int = 2**23,
    segment_size: int = 2**20,
    sync_comm: bool = False,
    overlap: bool | None = None,
    reshard_after_forward: Policy = True,
    master_weights: bool = False,
    reduce_dtype: torch.dtype | None = None,
) -> tuple[GroupShardedModel, torch.optim.Optimizer, torch.amp.GradScaler | None]:
    """Divide a local model's optimizer states, gradients and parameters over the ranks that see other data (ZeRO).

    Gradients are averaged over the group, so that a loss that is a mean over this rank's samples is trained as the mean over all.

    Args:
        model: of plain parameters, first values those of the group's first rank.
        optimizer: any of torch's over the model's parameters; states that it has are cut too.
        level: "os" (states), "os_g" (gradients too), "p_g_os" (parameters too: gathered block by block).
        scaler: returned, made to skip a step on all ranks together.
        group: the ranks that see other data and hold copies of one model; if left out, those of ``fleet.init``'s grid.
        sync_buffers: give the buffers the first rank's values now.
        buffer_max_size, segment_size: of Paddle, which this does not need: buckets are of 25 MiB.
        sync_comm: nothing is under way while something else runs: ``overlap=False``.
        offload, overlap, reshard_after_forward, master_weights, reduce_dtype: as of ``oc.ShardingStage3``.

    Returns:
        The model, wrapped; the optimizer; the scaler.

    Raises:
        FleetError: a level that there is not, an optimizer of other parameters.

    Source: ``paddle.distributed.sharding.group_sharded_parallel``.

    Example:
        >>> net = nn.Linear(4, 2)
        >>> net, optimizer, _ = group_sharded_parallel(net, torch.optim.AdamW(net.parameters()), "os_g")
        >>> net(torch.ones(3, 4)).sum().backward()
        >>> optimizer.step()
    """
    group = topology.data_ranks() if group is None else group
    _check(model, optimizer, level, group)
    mesh = Ranks.mesh(group) if group.name == AXIS else of_ranks(group.ranks, AXIS).mesh()
    named = dict(model.named_parameters())
    for p in [*model.parameters(), *(model.buffers() if sync_buffers else ())]:
        plain.broadcast(p.detach(), group, 0, call="group_sharded_parallel")
    twins = {p: _twin(p, mesh) for p in named.values()}
    for p, state in [*optimizer.state.items()]:
        for key, value in state.items():
            if is_like(p, key, value):  # as the parameters: those of the first rank
                plain.broadcast(value, group, 0, call="group_sharded_parallel")
    _exchange(optimizer, twins)
    optimizer.register_step_pre_hook(lambda opt, *_: _exchange(opt, twins))  # a group that was added
    running = False if sync_comm else overlap
    stage: Any = LEVELS[level](AXIS, mesh, running, master_weights, reduce_dtype, offload)
    pieces = {p: (t, t._spec, stage.cut(t)) for p, t in twins.items()} if level == "p_g_os" else {}
    update = ShardedUpdate(optimizer, stage, _no_gradient)
    if level == "p_g_os":
        cuts = {p: Piece(cut, spec, p) for p, (t, spec, cut) in pieces.items() if cut is not None}
        ahead = overlaps(running, [*twins.values()])
        Blocks(model, cuts, reshard_after_forward, ahead)
    whole = topology.begun() and group.ranks == topology.data_ranks().ranks  # else the norm is that over the group
    for p, t in twins.items():
        hook(p, None, _handing_on(t, update))
        pair(t, p, update.reducer, _no_gradient)
        if whole:
            gradients.share_data(t, group)
    keep_laid_out(optimizer, update.lay_out)
    return GroupShardedModel(model, twins, level), optimizer, None if scaler is None else distributed_scaler(scaler)


def _check(model: nn.Module, optimizer: Any, level: str, group: Ranks) -> None:
    call = "group_sharded_parallel"
    if level not in LEVELS:
        raise FleetError(f"{call}: level is {level!r}; there are {', '.join(map(repr, LEVELS))}")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise FleetError(f"{call} takes a torch optimizer, not {type(optimizer).__name__}")
    if not group.is_member():
        raise FleetError(f"{call}: this rank is not in {group!r}; call it on its members only")
    _check_grid(model, level, group)
    known = {id(p) for p in model.parameters()}
    for p in model.parameters():
        if type(p) is not nn.Parameter:
            raise FleetError(
                f"{call}: the model holds a {type(p).__name__}; with placements: oc.shard_optimizer(opt, stage)"
            )
        if held(p).copies:
            raise FleetError(
                f"{call}: a parameter of shape {list(p.shape)} has rows that several ranks hold (key and value heads fewer than "
                "ranks), whose sums do not fit the parts that ZeRO makes. By marks they do: oc.shard_optimizer(opt, "
                "oc.ShardingStage1('dp', mesh))"
            )
    if any(id(p) not in known for each in optimizer.param_groups for p in each["params"]):
        raise FleetError(f"{call}: the optimizer holds parameters that are not the model's")


def _check_grid(model: nn.Module, level: str, group: Ranks) -> None:
    """Beside stages and tensor parallel layers the group is that of the copies, and no other."""
    call = "group_sharded_parallel"
    data = topology.data_ranks()
    beside = any(held(p).group is not None or held(p).sums or gradients.in_stages(p) for p in model.parameters())
    if isinstance(model, PipelineLayer):
        raise FleetError(
            f"{call}: a PipelineLayer is a pipeline's after fleet.distributed_model(model): give what that returns"
        )
    if isinstance(model, PipelineParallel) and level == "p_g_os":
        raise FleetError(
            f"{call}: level 'p_g_os' would gather a stage's parameters again for the forward and the backward of every "
            "microbatch: 'os_g' divides states and gradients. By marks oc.ShardingStage3 goes with pipeline.step_by_marks"
        )
    if beside and group.ranks != data.ranks:
        raise FleetError(
            f"{call}: ranks {list(group.ranks)} do not hold copies of the same parameters: beside mp_degree and pp_degree "
            f"those are {list(data.ranks)}: group=hcg.data(), or leave it out"
        )


def _twin(p: nn.Parameter, mesh: Any) -> Any:
    """A distributed parameter over the memory of a plain one: equal on all ranks of the group."""
    spec = Spec.make(Layout.replicated(mesh, p.dim()), p.shape, tuple(p.stride()), p.dtype, p.device)
    return nn.Parameter(wrap(p.detach(), spec), p.requires_grad)


def _exchange(optimizer: torch.optim.Optimizer, twins: dict[Any, Any]) -> None:
    """The optimizer's plain parameters, and their states, become the distributed ones'."""
    for each in optimizer.param_groups:
        each["params"] = [twins.get(p, p) for p in each["params"]]
    for p in [p for p in optimizer.state if p in twins]:
        optimizer.state[twins[p]] = optimizer.state.pop(p)


def _handing_on(twin: Any, update: ShardedUpdate) -> Callable[[Any], None]:
    """The gradient of a plain parameter becomes the distributed one's: a summand of an average."""

    def run(p: Any) -> None:
        grad, p.grad = p.grad, None
        added(twin)
        update.reducer.before(twin)
        if twin.grad is None:
            twin.grad = _summand(twin, grad)
        else:
            twin.grad._local.add_(grad)
        update.reducer.after(twin)

    return run


def _summand(twin: Any, grad: Tensor) -> DistTensor:
    layout = Layout.make(twin.mesh, ((),) * twin.dim(), ((0, "avg"),))
    return wrap(grad, Spec.make(layout, twin.shape, tuple(grad.stride()), grad.dtype, grad.device))


def _no_gradient(twin: Any) -> DistTensor:
    return _summand(twin, torch.zeros(twin.shape, dtype=twin.dtype, device=twin._spec.device))


def save_group_sharded_model(
    model: GroupShardedModel, output: str | Path, optimizer: torch.optim.Optimizer | None = None
) -> None:
    """Save the model, and the optimizer, of ``group_sharded_parallel`` under a folder. Every rank calls it.

    It is a checkpoint (``oc.save_state_dict``): any number of ranks and any level loads it, with ``oc.load_state_dict``, the
    model's under "model" and the optimizer's by the names of the parameters under "optimizer".

    Raises:
        FleetError: a model that is not of ``group_sharded_parallel``.

    Source: ``paddle.distributed.sharding.save_group_sharded_model``.
    """
    if not isinstance(model, GroupShardedModel):
        raise FleetError(
            f"save_group_sharded_model takes what group_sharded_parallel returned, not {type(model).__name__}: "
            "oc.save_state_dict(model.state_dict(), path)"
        )
    state: dict[str, Any] = {"model": model.state_dict()}
    if optimizer is not None:
        state["optimizer"] = optimizer_state(model, optimizer)
    save_state_dict(state, output)


def optimizer_state(model: GroupShardedModel, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The optimizer's states by the names of the parameters."""
    names = {id(p): name for name, p in model.named_parameters()}
    return {names[id(p)]: dict(state) for p, state in optimizer.state.items() if isinstance(p, DistTensor | Tensor)}
