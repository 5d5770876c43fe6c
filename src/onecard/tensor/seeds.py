"""A plain gradient that backward is given for a distributed value: every rank holds it whole, as on one card."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from onecard._torch.leaves import is_batched
from onecard.errors import DispatchError
from onecard.tensor.convert import shard_tensor
from onecard.tensor.dist_tensor import DistTensor


def laid_out(values: tuple[Any, ...], seeds: tuple[Any, ...]) -> tuple[Any, ...]:
    """Gradients of ``values``, each as its value lies: so that all that goes back from here is distributed."""
    return tuple(_as(x, seed) for x, seed in zip(values, seeds, strict=True))


def _as(value: Any, seed: Any) -> Any:
    if not isinstance(value, DistTensor) or not isinstance(seed, Tensor) or isinstance(seed, DistTensor):
        return seed
    if is_batched(seed):
        raise DispatchError(
            "gradients of several rows at once (is_grads_batched=True, vectorize=True) of a distributed tensor: vmap has no "
            "rules for it. Take a row at a time: [torch.autograd.grad(y, x, row, retain_graph=True) for row in rows]"
        )
    if seed.shape != value.shape:  # torch's words
        return seed
    layout = value._spec.layout.reduced()
    return shard_tensor(seed, layout.mesh, layout.placements)
