"""New tensors on a mesh, random ones (rand, randn, randint, randperm) and ``eye(out=)``. Each rank makes its part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import Placement

from onecard import random
from onecard.errors import DispatchError
from onecard.place.layout import Layout, check_placements
from onecard.place.mesh import ProcessMesh
from onecard.tensor.aliasing import memory
from onecard.tensor.deferred.replay import empty
from onecard.tensor.dispatch.entries import handler
from onecard.tensor.dist_tensor import DistTensor, describe
from onecard.tensor.random_operators.draw import key_for


def _empty(size: Sequence[int], mesh: ProcessMesh, placements: Sequence[Placement], dtype: Any) -> DistTensor:
    layout = Layout.of(mesh, len(size), check_placements(mesh, placements))
    return empty(size, layout.reduced(), dtype or torch.get_default_dtype())


def rand(
    size: Sequence[int],
    mesh: ProcessMesh,
    placements: Sequence[Placement],
    dtype: torch.dtype | None = None,
    generator: torch.Generator | None = None,
) -> DistTensor:
    """Uniform numbers of [0, 1): the same whole tensor on every mesh, under all placements, and as ``torch.rand`` under
    ``one_card_random``.

    Args:
        size: of the whole tensor.
        mesh, placements: where the parts go; what would be pending is replicated.
        dtype: floating or complex; torch's default if left out.
        generator: draws the key, on every rank alike; torch's default one if left out.

    Returns:
        A DistTensor of shape ``size``.

    Raises:
        LayoutError: placements that do not fit the mesh or the size.

    Source: ``torch.distributed.tensor.rand``.

    Example:
        >>> from onecard import ProcessMesh, Shard, one_card_random
        >>> _ = torch.manual_seed(0)
        >>> x = rand((2, 3), ProcessMesh([0], ["x"]), [Shard(0)])
        >>> with one_card_random():
        ...     torch.equal(x.full_tensor(), torch.manual_seed(0) and torch.rand(2, 3))
        True
    """
    return _empty(size, mesh, placements, dtype).uniform_(generator=generator)  # type: ignore[return-value]


def randn(
    size: Sequence[int],
    mesh: ProcessMesh,
    placements: Sequence[Placement],
    dtype: torch.dtype | None = None,
    generator: torch.Generator | None = None,
) -> DistTensor:
    """Standard normal numbers; arguments, result and errors as of ``rand``.

    Source: ``torch.distributed.tensor.randn``.

    Example:
        >>> from onecard import ProcessMesh, Replicate
        >>> randn((2, 3), ProcessMesh([0], ["x"]), [Replicate()]).shape
        torch.Size([2, 3])
    """
    return _empty(size, mesh, placements, dtype).normal_(generator=generator)  # type: ignore[return-value]


def randint(
    low: int,
    high: int,
    size: Sequence[int],
    mesh: ProcessMesh,
    placements: Sequence[Placement],
    dtype: torch.dtype = torch.int64,
    generator: torch.Generator | None = None,
) -> DistTensor:
    """Integers of [low, high); arguments, result and errors as of ``rand`` otherwise.

    Source: ``torch.randint``.

    Example:
        >>> from onecard import ProcessMesh, Shard
        >>> x = randint(3, 5, (100,), ProcessMesh([0], ["x"]), [Shard(0)])
        >>> x.min().item(), x.max().item(), x.dtype
        (3, 4, torch.int64)
    """
    return _empty(size, mesh, placements, dtype).random_(low, high, generator=generator)  # type: ignore[return-value]


def randperm(
    n: int,
    mesh: ProcessMesh,
    placements: Sequence[Placement],
    dtype: torch.dtype = torch.int64,
    generator: torch.Generator | None = None,
) -> DistTensor:
    """A random permutation of 0 ... n - 1, of shape (n,); arguments, result and errors as of ``rand`` otherwise.

    Source: ``torch.randperm``; how a rank makes its part of it: docs/design/random.md.

    Example:
        >>> from onecard import ProcessMesh, Shard
        >>> randperm(5, ProcessMesh([0], ["x"]), [Shard(0)]).sort().values.full_tensor()
        tensor([0, 1, 2, 3, 4])
    """
    made = _empty((n,), mesh, placements, dtype)
    key = key_for(torch.ops.aten.randperm.default, made, generator)
    if made._spec.here:
        layout = made._spec.layout
        (start,), (length,) = layout.local_offset((n,)), layout.local_shape((n,))
        made._local.copy_(random.permutation(n, key, start, length, made._spec.device))
    return made


@handler(torch.ops.aten.eye.out, torch.ops.aten.eye.m_out)
def _eye(func: Any, args: Any, kwargs: Any) -> Any:
    """eye(n, m, out=x), as torch.nn.init.eye_ calls it: each rank writes its part."""
    out, size = kwargs["out"], torch.Size([args[0], args[-1]])
    if out.shape != size:
        raise DispatchError(f"{func}: out= is {describe(out)}, the result is {list(size)}; make them alike")
    memory.check_writable(out, "eye")
    out.reduce_partial()
    if out._spec.layout.merged:
        return out.copy_(torch.eye(*size, device="cpu"))
    if out._spec.here:
        rows, columns = (torch.arange(s.start, s.stop, device="cpu") for s in out._spec.layout.local_slices(size))
        out._local.copy_(rows[:, None] == columns)
    memory.wrote(out)
    return out


def _new(self: DistTensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """``x.new(size)``: a DistTensor as ``new_empty(size)`` makes it, so that what fills it (torch.distributions) draws
    the numbers of one card. Other legacy forms give plain tensors."""
    if args and not kwargs and all(isinstance(a, int | torch.Size) for a in args):
        return self.new_empty(*args)
    return torch.empty(0, dtype=self.dtype, device=self.device).new(*args, **kwargs)


DistTensor.new = _new  # type: ignore[assignment, method-assign]

__all__ = ["rand", "randint", "randn", "randperm"]
