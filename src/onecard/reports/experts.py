"""How well the mixtures of a model balance that knows nothing of it: what its experts are given is counted as it comes."""

from __future__ import annotations

from typing import Any

import torch
from rich.table import Table
from torch import Tensor, nn

from onecard import recorded
from onecard._torch.names import in_backward
from onecard.comm.issue import trace
from onecard.errors import OnecardError
from onecard.place.parts import axes_of
from onecard.tensor.convert import unshard
from onecard.tensor.dist_tensor import DistTensor, wrap
from onecard.tensor.spec import Spec
from onecard.train.balance import Balance, table


class ExpertBalance:
    """Tokens for each expert, and the share that was dropped, while a model is watched: of the whole batch, whatever lies where.

    A mixture's experts are a module with a stack of weights, (experts, ..., ...), which is given the numbers of each token's
    experts: any tensor of integers. So are those of transformers (Mixtral, Qwen, OLMoE, DeepSeek, gpt-oss, ...), plain or cut
    by marks. A number that is no expert's is a choice that was dropped. Experts that are given no numbers (Llama-4's) are counted
    by their router: a module beside them that returns two tensors (tokens, experts), of which the first is zero where an expert
    was not chosen. What backward computes again (recompute) is not counted; a recorded step runs no hooks, so nothing of it is.

    Args:
        model: with at least one such module.

    Raises:
        OnecardError: there is none.

    Example:
        >>> class Experts(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.up = nn.Parameter(torch.ones(3, 4, 4))
        ...     def forward(self, x, chosen):
        ...         return torch.stack([x[i] @ self.up[e] for i, e in enumerate(chosen[:, 0].tolist())])
        >>> experts = Experts()
        >>> with ExpertBalance(experts) as balance:
        ...     _ = experts(torch.ones(5, 4), torch.tensor([[0], [2], [2], [2], [0]]))
        >>> balance.layers()[""].tokens
        [2, 0, 3]
    """

    def __init__(self, model: nn.Module) -> None:
        self._counts: dict[str, Tensor] = {}
        self._modules = {name: module for name, module in model.named_modules() if _stacked(module)}
        self._routers = {name: _beside(model, name) for name, module in self._modules.items()}
        self._hooks: list[Any] = []
        if not self._modules:
            raise OnecardError(
                f"ExpertBalance: {type(model).__name__} has no module with a stack of experts, a parameter (experts, ..., ...). "
                "Count by hand: torch.bincount(chosen.flatten(), minlength=experts) is of the whole batch"
            )

    def __enter__(self) -> ExpertBalance:
        for name, module in self._modules.items():
            scores: list[Tensor] = []
            for router in self._routers[name]:
                self._hooks.append(router.register_forward_hook(_reader(scores, _stacked(module))))
            count = _counter(self._counts, name, scores)
            self._hooks.append(module.register_forward_pre_hook(count, with_kwargs=True))
        return self

    def __exit__(self, *_: Any) -> None:
        while self._hooks:
            self._hooks.pop().remove()

    def layers(self) -> dict[str, Balance]:
        """What each mixture did since it was asked before, by its name in the model. Every rank calls it: counts are summed."""
        found = {}
        for name in self._modules:
            if name in self._counts:
                *tokens, choices = unshard(self._counts.pop(name)).tolist()
                found[name] = Balance(tokens, choices)
        return found

    def table(self) -> Table:
        """``layers()`` to be shown by ``rich.print``."""
        return table(self.layers())


def _stacked(module: nn.Module) -> int:
    """How many experts a module has; 0: it is none."""
    stacks = [p for p in module.parameters(recurse=False) if p.dim() == 3]
    return stacks[0].shape[0] if stacks else 0


def _beside(model: nn.Module, name: str) -> list[nn.Module]:
    """The modules that may be the router of experts of this name: the others that their mixture has."""
    mixture = model.get_submodule(name.rpartition(".")[0]) if name else None
    return [] if mixture is None else [m for m in mixture.children() if not _stacked(m)]


def _reader(scores: list[Tensor], experts: int) -> Any:
    """What a router says of its tokens, kept until their experts are asked."""

    def read(module: nn.Module, args: Any, made: Any) -> None:
        pair = isinstance(made, tuple) and len(made) == 2 and all(isinstance(x, Tensor) for x in made)
        if pair and all(x.is_floating_point() and x.dim() == 2 and x.shape[1] == experts for x in made):
            scores[:] = [made[0].detach()]

    return read


def _counter(counts: dict[str, Tensor], name: str, scores: list[Tensor]) -> Any:
    def count(module: nn.Module, args: Any, kwargs: Any) -> None:
        given = [
            x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and x.dtype in (torch.int64, torch.int32)
        ]
        by_router, scores[:] = scores[:], []
        found = [*given, *by_router][:1]
        if not found or in_backward() or recorded.recorder is not None or trace.tracing() or trace.faking():
            return
        counted = _counted(found[0].detach(), _stacked(module))
        counts[name] = counts[name] + counted if name in counts else counted

    return count


@torch.no_grad()
def _counted(chosen: Tensor, experts: int) -> Tensor:
    """(experts + 1,): how often each was chosen, and how often any; of a tensor that is cut a pending sum. Nothing is sent.

    Args:
        chosen: numbers of experts; or (tokens, experts), zero where an expert was not chosen.
    """
    local = chosen._local if isinstance(chosen, DistTensor) else chosen
    if local.is_floating_point():
        numbers = local.nonzero()[:, -1]
        if isinstance(chosen, DistTensor) and (place := chosen.mesh.coordinate()) is not None:
            numbers += chosen._spec.layout.bounds(tuple(chosen.shape), 1, place)[0]
    else:
        numbers = local.flatten().long()
    known = numbers[(numbers >= 0) & (numbers < experts)]
    total = torch.cat([torch.bincount(known, minlength=experts), known.new_tensor([numbers.numel()])])
    if not isinstance(chosen, DistTensor):
        return total
    layout = chosen._spec.layout
    cut = tuple(sorted({a for dim in layout.dims for a in axes_of(dim)}))
    lie = type(layout).make(layout.mesh, ((),), tuple((a, "sum") for a in cut))
    return wrap(total, Spec.like(lie, torch.empty_like(total, device="meta"), total.device))
