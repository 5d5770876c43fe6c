"""shard_optimizer: any torch optimizer on distributed parameters; gradients summed in buckets before each step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from onecard._torch import names as _torch
from onecard._torch import patches
from onecard.errors import LayoutError
from onecard.tensor import DistTensor
from onecard.tensor.buckets import Cut, reduce_all
from onecard.tensor.spec import OWN
from onecard.train import converted as _converted  # noqa: F401 - it is installed with this
from onecard.train import rates
from onecard.train.absent import AbsentParameter
from onecard.train.layer import replaced
from onecard.train.zero import undivided
from onecard.train.zero.last_hooks import keep_last
from onecard.train.zero.reducer import Reducer, reduce_gradients
from onecard.train.zero.resume import is_like, lay_out_loaded, lay_out_states, load_state_dict, sharders
from onecard.train.zero.zero import ShardedUpdate, ShardingStage1, overlaps, params_of, with_closure


def shard_optimizer(
    optimizer: Optimizer,
    shard_fn: ShardingStage1 | Callable[[str, Any, Any], Any] | None = None,
    overlap: bool | None = None,
) -> Optimizer:
    """Make a torch optimizer ready for distributed parameters, in place.

    Its states follow their parameter's layout by themselves (they are made like it). What this adds: pending gradients
    are summed together in a few large messages before each step, and ``shard_fn`` may lay out states otherwise. States that
    are loaded take the same layouts; without ``shard_optimizer`` they do at the next step.

    Args:
        optimizer: any of ``torch.optim``, foreach and fused included.
        shard_fn: ``shard_fn(key, param, state) -> state``, called once for each state tensor of a parameter's shape
            after the first step ("exp_avg", ...), and for those that are loaded; it returns the state, resharded or not.
            Or a stage of ZeRO, ``ShardingStage1("dp")``, ``ShardingStage2("dp")``: the update runs where the state is.
        overlap: whether gradients are summed while ``backward`` runs, a bucket as soon as its last gradient is there, in the
            last ``backward`` of a step (it takes as many as the step before had). Left out: on a GPU they are. The same
            numbers, bit for bit.

    Returns:
        The optimizer.

    Raises:
        LayoutError: the optimizer was made before ``shard_layer`` and holds the parameters that this replaced; at the
            first step, if ``shard_fn`` returns something else than a tensor of the state's shape.

    Source: ``paddle.distributed.shard_optimizer``; buckets as in DistributedDataParallel.

    Example:
        >>> import torch
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> shard_optimizer(torch.optim.SGD([weight], lr=0.1)).__class__.__name__
        'SGD'
    """
    if isinstance(shard_fn, type) or not (
        shard_fn is None or isinstance(shard_fn, ShardingStage1) or callable(shard_fn)
    ):
        raise LayoutError(
            f"shard_optimizer(optimizer, {shard_fn!r}): want a stage of ZeRO, such as onecard.ShardingStage1('dp', mesh), or a "
            "function of (key, param, state)"
        )
    _check_current(optimizer)
    optimizer.register_step_pre_hook(lambda opt, *_: rates.compare(opt, lambda: _holders(opt)))
    if isinstance(shard_fn, ShardingStage1):
        stage = shard_fn if overlap is None else replace(shard_fn, overlap=overlap)
        keep_laid_out(optimizer, ShardedUpdate(optimizer, stage).lay_out)
        return optimizer
    if shard_fn is not None:
        sharder = _StateSharder(shard_fn)
        ShardedUpdate(optimizer, AsStates(optimizer, overlap))
        optimizer.register_step_post_hook(sharder)
        keep_laid_out(optimizer, sharder.lay_out)
        return optimizer
    params = [p for p in params_of(optimizer) if isinstance(p, DistTensor)]
    reducer = Reducer(params, _as_parameter, every=False, overlap=True) if overlaps(overlap, params) else None

    def sum_gradients(opt: Optimizer, args: Any, kwargs: Any) -> Any:
        def reduce() -> None:
            if reducer is not None:
                reducer.before_step()
            undivided.tell(p for p in params_of(opt) if p.grad is not None)
            due = [cut for p in params_of(opt) if isinstance(p, DistTensor) and (cut := _as_parameter(p)) is not None]
            reduce_gradients(due)
            reduce_all([p.grad for group in opt.param_groups for p in group["params"]], "gradients", explicit=False)

        def evaluate(closure: Callable[[], Any]) -> Any:
            loss = closure()
            reduce()
            return loss

        reduce()
        return with_closure(args, kwargs, evaluate)

    optimizer.register_step_pre_hook(sum_gradients)
    keep_laid_out(optimizer, None)
    return optimizer


def _holders(optimizer: Optimizer) -> list[int]:
    """Ranks that have the same parameters: of the mesh on which this one has some."""
    meshes = (p.mesh for p in params_of(optimizer) if isinstance(p, DistTensor) and p._spec.here)
    return next((mesh.process_ids for mesh in meshes), [])


def keep_laid_out(optimizer: Optimizer, lay_out: Callable[[str, Any, Any], Any] | None) -> None:
    """Have states that are loaded take the layouts that new ones have."""
    if lay_out is not None:
        sharders[optimizer] = lay_out
    optimizer.register_load_state_dict_post_hook(lambda opt: lay_out_states(opt, lay_out))
    lay_out_states(optimizer, lay_out)  # they may have been loaded before


_checked: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()  # with how many parameters had been replaced by then


def _check_current(optimizer: Optimizer, args: Any = (), kwargs: Any = None) -> None:
    """Refuse an optimizer of parameters that ``shard_layer`` has replaced; asked again only when it replaces more."""
    if _checked.get(optimizer, 0) == len(replaced):
        return
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param in replaced:
                kind = type(optimizer).__name__
                raise LayoutError(
                    f"{kind}: the optimizer holds the plain parameter {replaced[param][0]!r} {list(param.shape)}, whose place in "
                    "the model shard_layer has given to a distributed one, so it would train nothing. Make the optimizer "
                    "after shard_layer: onecard.shard_layer(model, mesh); "
                    f"optimizer = onecard.shard_optimizer(torch.optim.{kind}(model.parameters(), ...))"
                )
    _checked[optimizer] = len(replaced)


@patches.with_first_tensor
def install() -> None:
    """Optimizers and modules with distributed parameters, also of those that no ``shard_optimizer`` has seen."""
    hooks = "torch.optim.optimizer._global_optimizer_pre_hooks"
    patches.hook(hooks, register_optimizer_step_pre_hook, _check_current, lay_out_loaded, keep_last)
    patches.replace("torch.nn.Module.load_state_dict", nn.Module, "load_state_dict", lambda _: load_state_dict)
    # torch.optim and clip_grad_norm_ take the foreach path only for types that they know.
    for what, types in _torch.foreach_types.items():
        patches.add(what, types, DistTensor, AbsentParameter)


def _as_parameter(x: DistTensor) -> Cut | None:
    """How a pending gradient is cut as its parameter is: each rank needs its part of the sum only."""
    grad, layout = x.grad, x._spec.layout
    if not isinstance(grad, DistTensor) or layout.merged or x._memory is not None:
        return None
    for axis, _ in grad._spec.layout.pending:
        dim = layout.dim_of(axis)
        if dim is not None and layout.dims[dim][-1] == axis:
            return Cut(x, x._local, layout, axis, dim)
    return None


class AsStates(ShardingStage1):
    """The update runs where ``shard_fn`` has put the states of a parameter, if that is its own layout with one more cut."""

    def __init__(self, optimizer: Optimizer, overlap: bool | None) -> None:
        super().__init__(overlap=overlap)
        object.__setattr__(self, "_optimizer", optimizer)

    def cut(self, x: DistTensor) -> Cut | None:
        """As its states are cut; None if they are not, or in several ways."""
        states = self._optimizer.state.get(x, {})  # type: ignore[attr-defined]
        layouts = {v._spec.layout for k, v in states.items() if is_like(x, k, v) and isinstance(v, DistTensor)}
        if len(layouts) != 1 or x._memory is not None or x._spec.alias != OWN or not x._spec.here:
            return None
        layout, mine = layouts.pop(), x._spec.layout
        if layout.mesh is not mine.mesh or layout.merged or mine.merged or mine.pending:
            return None
        more = [d for d, axes in enumerate(layout.dims) if axes != mine.dims[d]]
        if len(more) != 1 or layout.dims[more[0]][:-1] != mine.dims[more[0]]:
            return None
        return Cut(x, x._local, layout, layout.dims[more[0]][-1], more[0])


class _StateSharder:
    """Lay out each new state once."""

    def __init__(self, shard_fn: Callable[[str, Any, Any], Any]) -> None:
        self.shard_fn = shard_fn
        self.done: set[tuple[int, str]] = set()

    def __call__(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for param, state in optimizer.state.items():
            for key, value in state.items():
                if is_like(param, key, value) and (id(param), key) not in self.done:
                    state[key] = self.lay_out(key, param, value)

    def lay_out(self, key: str, param: Any, value: Tensor) -> Tensor:
        """One state as ``shard_fn`` wants it."""
        self.done.add((id(param), key))
        laid_out = self.shard_fn(key, param, value)
        if not isinstance(laid_out, Tensor) or laid_out.shape != value.shape:
            raise LayoutError(
                f"shard_optimizer: shard_fn({key!r}, ...) returned {type(laid_out).__name__} "
                f"{list(getattr(laid_out, 'shape', []))}; it must return the state {list(value.shape)}, resharded"
            )
        return laid_out
