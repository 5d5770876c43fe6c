"""recompute: what a function saves for backward is dropped, and computed again there, with the same random numbers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from onecard.errors import FleetError
from onecard.train.modules.second_run import modules_of, run_again_in_backward, runs_of

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


def recompute(
    function: Callable[..., Any],
    *args: Any,
    preserve_rng_state: bool = True,
    use_reentrant: bool = False,
    policy: Any = None,
    **kwargs: Any,
) -> Any:
    """``function(*args, **kwargs)``, of which backward keeps the arguments alone and runs it again.

    Its collectives run again, too, on all ranks alike. May be nested, and used inside anything else. Buffers of a module (batch
    norm's statistics) are written by the first run alone, and so is what its modules change in Python: attributes, lists, dicts,
    arrays, generators, caches in the arguments. Class attributes and global variables are changed twice.

    Args:
        preserve_rng_state: draw the same random numbers again, those of the named states (``rng_state``) too.
        policy: which operators' results are kept nevertheless: a list of operators
            (``[torch.ops.aten.mm.default]``), or a policy function of ``torch.utils.checkpoint``.
        use_reentrant: must be False; torch's older form loses gradients of what is not an argument.

    Raises:
        FleetError: the reentrant form.

    Source: ``paddle.distributed.fleet.utils.recompute``; ``torch.utils.checkpoint``.

    Example:
        >>> import torch
        >>> x = torch.ones(2, requires_grad=True)
        >>> recompute(torch.sin, x).sum().backward()
        >>> bool(torch.equal(x.grad, torch.cos(x)))
        True
    """
    if use_reentrant:
        raise FleetError(
            "recompute(use_reentrant=True) is not there: leave it out; the other form does all that this one does"
        )

    def contexts() -> Contexts:
        outer, inner = create_selective_checkpoint_contexts(policy) if policy is not None else (None, None)
        first, again = runs_of(modules_of(function, (args, kwargs)), (args, kwargs))
        return _Inside(first, outer), _Inside(again, inner)

    return checkpoint(
        function, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state, context_fn=contexts, **kwargs
    )


def recompute_sequential(ctx: dict[str, Any] | None, functions: Any, *args: Any, **kwargs: Any) -> Any:
    """Functions one after the other, in segments of which each keeps its arguments alone.

    Args:
        ctx: ``segments``, how many, 1 if left out; ``preserve_rng_state``.
        functions: an ``nn.Sequential``, or a list of functions; the first is given ``args`` and ``kwargs``.

    Source: ``paddle.incubate.distributed.fleet.recompute_sequential``.

    Example:
        >>> import torch
        >>> x = torch.ones(2, requires_grad=True)
        >>> recompute_sequential({"segments": 2}, [torch.sin, torch.exp, torch.cos], x).shape
        torch.Size([2])
    """
    known = _options("recompute_sequential", ctx, "segments", "preserve_rng_state")
    run, count = list(functions), known.pop("segments", 1)
    if type(count) is not int or count < 1:
        raise FleetError(f"recompute_sequential: segments is {count!r}; want a whole number of at least 1")
    each = max(1, len(run) // count)
    bounds = [*range(0, len(run), each)][:count]
    for begin, end in zip(bounds, [*bounds[1:], len(run)], strict=True):
        args, kwargs = (recompute(_one_by_one, run[begin:end], args, kwargs, **known),), {}
    return args[0]


def recompute_hybrid(ctx: dict[str, Any] | None, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``recompute``, under tensor parallelism: its collectives run again on all ranks alike, which needs no group.

    Args:
        ctx: Paddle's ``mp_group``, which is not needed, ``preserve_rng_state``, and ``offload`` and ``partition``, which must
            be False.

    Raises:
        FleetError: arguments are to be moved off the device, or cut over the ranks.

    Source: ``paddle.incubate.distributed.fleet.recompute_hybrid``.
    """
    known = _options("recompute_hybrid", ctx, "mp_group", "offload", "partition", "preserve_rng_state")
    if known.pop("offload", False) or known.pop("partition", False):
        raise FleetError(
            "recompute_hybrid: what it keeps is not moved off the device (offload) nor cut over the ranks (partition): leave "
            "them out. Sequence parallel layers (fleet.utils.sequence_parallel_utils) keep a part each"
        )
    kept = {name: known[name] for name in ("preserve_rng_state",) if name in known}
    return recompute(function, *args, **kept, **kwargs)


def _options(call: str, ctx: dict[str, Any] | None, *names: str) -> dict[str, Any]:
    given = dict(ctx or {})
    if strange := sorted(set(given) - set(names)):
        raise FleetError(f"{call}: ctx has no {strange[0]!r}; it may have {', '.join(names)}")
    return given


def _one_by_one(run: list[Callable[..., Any]], args: Any, kwargs: Any) -> Any:
    value = run[0](*args, **kwargs)
    for function in run[1:]:
        value = function(value)
    return value


class _Inside(AbstractContextManager[None]):
    """Several, one within another."""

    def __init__(self, *inside: AbstractContextManager[Any] | None) -> None:
        self.inside = [context for context in inside if context is not None]

    def __enter__(self) -> None:
        with ExitStack() as stack:
            for context in self.inside:
                stack.enter_context(context)
            self.stack = stack.pop_all()

    def __exit__(self, *_: object) -> None:
        self.stack.close()


def recompute_modules(model: nn.Module, names: list[str], policy: Any = None) -> None:
    """Have the forward of these submodules run again in backward; ``names`` as of ``named_modules``, or their last parts.

    Raises:
        FleetError: a name that no module has.
    """
    modules = dict(model.named_modules())
    for name in names:
        chosen = [m for path, m in modules.items() if path == name or path.rpartition(".")[2] == name]
        if not chosen:
            raise FleetError(
                f"recompute_configs['checkpoints']: there is no module {name!r}; there are {list(modules)[1:20]}"
            )
        for module in chosen:
            run_again_in_backward(module, partial(recompute, policy=policy))
