"""Dropout from a named random state, or this rank's part of the mask that one card draws."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from onecard import random
from onecard.comm.issue.ranks import Ranks
from onecard.errors import FleetError
from onecard.fleet.grid import topology
from onecard.fleet.grid.rng import get_rng_state_tracker
from onecard.fleet.layers.context import positions
from onecard.tensor.random_operators.one_card import set_aside


def dropout(
    x: Tensor,
    p: float = 0.5,
    training: bool = True,
    mode: str = "upscale_in_train",
    rng_name: str | None = None,
    *,
    cut: tuple[int, Ranks] | Sequence[tuple[int, Ranks]] | None = None,
    sizes: Sequence[int] | None = None,
    balanced: bool | None = None,
) -> Tensor:
    """Dropout from a named random state, or with one card's numbers.

    Args:
        rng_name: of the tracker; torch's own state if left out.
        cut: (dim, group), of an x that is this rank's part along ``dim``: the mask is then this part of the mask that one
            card draws under ``oc.one_card_random`` for the whole, and all ranks must draw from equal states. Several, where x
            is cut in several dims: ``[(0, dp), (1, sep)]``. With sep's alone, ranks of dp draw one mask for rows of their own.
        sizes: lengths of the ranks' parts along a cut that is the only one, if not equal.
        balanced: whether the part is two pieces of the sequence, as ``context.cut`` gives them (its ``balanced``, which is True
            there if left out). It must be said along sep, where either may be meant; elsewhere parts lie in order.

    Raises:
        FleetError: another mode than "upscale_in_train", a p that is no probability; parts of which it does not know where
            they are.
    """
    if not 0 <= p <= 1:
        raise FleetError(f"dropout(p={p!r}): the share of zeros is between 0 and 1")
    if mode != "upscale_in_train":
        raise FleetError(f"dropout(mode={mode!r}): only 'upscale_in_train' is there; values are scaled by 1 / (1 - p)")
    if not training or p == 0:
        return x
    if rng_name is not None:
        with get_rng_state_tracker().rng_state(rng_name):
            return dropout(x, p, cut=cut, sizes=sizes, balanced=balanced)
    if cut is None:
        # Not F.dropout, which on the CPU keeps a mask of the size of x for backward; this one keeps a byte for each number.
        return torch.native_dropout(x, p, True)[0]
    cuts: list[Any] = [cut] if len(cut) == 2 and isinstance(cut[0], int) else [*cut]
    if sizes is not None and len(cuts) > 1:
        raise FleetError("dropout(sizes=): lengths are of the one dim that is cut; parts of several dims are equal")
    along = dict[int, tuple[int, list[range]]]()
    for dim, group in cuts:
        if dim % x.dim() in along:
            raise FleetError(
                f"dropout(cut=): dim {dim} is named twice: give one group whose ranks hold its parts in order"
            )
        two = balanced if len(cuts) == 1 or (topology.begun() and group == _along_sep()) else False
        along[dim % x.dim()] = _pieces(x.shape[dim], group, sizes, two)
    return _part_of_one_card(x, p, along)


def _pieces(length: int, group: Ranks, sizes: Sequence[int] | None, balanced: bool | None) -> tuple[int, list[range]]:
    """How long the whole is, and which of it this rank has."""
    if balanced is None and sizes is None and group.size > 1 and topology.begun() and group == _along_sep():
        raise FleetError(
            "dropout(cut=(dim, group)) along sep: say balanced=True for parts of context.cut(x), which are two pieces of the "
            "sequence, or balanced=False for those of context.cut(x, balanced=False): the masks differ"
        )
    if not balanced:
        lengths = list(sizes) if sizes is not None else [length] * group.size
        begin = sum(lengths[: group.index])
        return sum(lengths), [range(begin, begin + length)]
    if sizes is not None:
        raise FleetError("dropout(balanced=True): parts of context.cut(x) have one length: leave sizes= out")
    begins = positions(length * group.size, group)[:: max(length // 2, 1)].tolist()
    return length * group.size, [range(begin, begin + length // 2) for begin in begins]


def _along_sep() -> Ranks:
    return topology.get_hybrid_communicate_group().group("sep")


def _part_of_one_card(x: Tensor, p: float, along: dict[int, tuple[int, list[range]]]) -> Tensor:
    law, key = random.law("bernoulli_", torch.bool, 1 - p), random.new_key()
    shape = [along[dim][0] if dim in along else n for dim, n in enumerate(x.shape)]

    def drawn(mine: list[range], dims: list[int]) -> Tensor:
        if dims:
            parts = [drawn([*mine[: dims[0]], piece, *mine[dims[0] + 1 :]], dims[1:]) for piece in along[dims[0]][1]]
            return parts[0] if len(parts) == 1 else torch.cat(parts, dims[0])
        mask = torch.empty([*map(len, mine)], dtype=torch.bool, device=x.device)
        with set_aside():
            random.fill(mask, law, key, shape, [piece.start for piece in mine])
        return mask

    mask = drawn([*map(range, x.shape)], [*along])
    return _Masked.apply(x, mask, 0.0 if p == 1 else 1 / (1 - p))


class _Masked(torch.autograd.Function):
    """x * mask * scale, which keeps the mask alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mask: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(mask)
        ctx.scale = scale
        return (x * mask).mul_(scale)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return (grads[0] * ctx.saved_tensors[0]).mul(ctx.scale), None, None
