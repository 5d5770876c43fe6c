"""Context parallelism: attention over a sequence whose parts lie on the ranks along sep.

``ring_attention``: keys and values go round, each rank's queries meet them one part after the other (Liu et al., 2023).
``ulysses_attention``: parts of the sequence are exchanged for heads, and back (Jacobs et al., 2023). Both are one card's
attention of the whole sequence.

Under a causal mask the first ranks would have little to do, so a rank holds two pieces, the i-th from the front and the
i-th from the back: ``cut`` and ``positions`` say which.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from onecard.comm.issue import differentiable, started
from onecard.comm.issue.ranks import Ranks
from onecard.errors import FleetError
from onecard.fleet.grid.topology import get_hybrid_communicate_group
from onecard.fleet.layers.once import differentiated_once


def _sep(group: Ranks | None) -> Ranks:
    return group or get_hybrid_communicate_group().group("sep")


def positions(time: int, group: Ranks | None = None, place: int | None = None, balanced: bool = True) -> Tensor:
    """Which positions of a sequence of length ``time`` a rank holds; int64, ascending.

    Raises:
        FleetError: the length does not divide into two pieces for each rank (one, if not ``balanced``).

    Example:
        >>> from onecard.comm.issue.ranks import of_ranks
        >>> positions(4, of_ranks([0])).tolist()
        [0, 1, 2, 3]
    """
    group = _sep(group)
    n, place = group.size, group.index if place is None else place
    pieces = 2 * n if balanced else n
    if time % pieces:
        raise FleetError(
            f"a sequence of {time} does not divide into {pieces} pieces, which {n} ranks along sep need; pad it to "
            f"{-(-time // pieces) * pieces}"
        )
    length = time // pieces
    mine = torch.arange(length, device="cpu")
    if not balanced:
        return mine + place * length
    return torch.cat([mine + place * length, mine + (pieces - 1 - place) * length])


def cut(x: Tensor, dim: int = 1, group: Ranks | None = None, balanced: bool = True) -> Tensor:
    """This rank's part of a sequence that every rank has: tokens, labels, masks."""
    where = positions(x.shape[dim], _sep(group), None, balanced)
    return x.index_select(dim, where.to(x.device))


def join(x: Tensor, dim: int = 1, group: Ranks | None = None, balanced: bool = True) -> Tensor:
    """The whole sequence, in its order, on every rank; its gradient is summed and cut."""
    group = _sep(group)
    whole = differentiable.all_gather(x, dim, group)
    return whole.index_select(dim, _back(whole.shape[dim], group, balanced).to(x.device))


def _forth(time: int, group: Ranks, balanced: bool) -> Tensor:
    """The positions in the order in which the ranks hold them."""
    return torch.cat([positions(time, group, place, balanced) for place in range(group.size)])


def _back(time: int, group: Ranks, balanced: bool) -> Tensor:
    return _forth(time, group, balanced).argsort()


def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, causal: bool = True, scale: float | None = None, group: Ranks | None = None
) -> Tensor:
    """Attention of this rank's queries to the keys of all ranks.

    Args:
        q: (batch, heads, time / n, width); k, v: the same with as many heads or fewer (grouped queries). Positions are those
            of ``cut``, balanced if ``causal``.
        scale: of the scores; 1 / sqrt(width) if left out.
        group: the ranks that hold the sequence; those along sep if left out.

    Returns:
        In the shape of q. Each part of k and v travels once round the ring forward; with its gradient once more backward.

    Raises:
        FleetError: shapes that do not fit each other.
    """
    group = _sep(group)
    if k.shape != v.shape or q.shape[1] % k.shape[1] or q.shape[2] != k.shape[2] or (causal and q.shape[2] % 2):
        raise FleetError(
            f"ring_attention: q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}: want (batch, heads, time, width), k and v "
            "alike, heads of q a multiple of theirs, and an even time if causal"
        )
    return _Ring.apply(q, k, v, causal, scale or 1 / math.sqrt(q.shape[3]), group)


Block = tuple[slice, slice, bool]  # of the queries, of the keys, and whether the mask lies within them


def _block(me: int, source: int, time: int, causal: bool) -> Block:
    """What of this rank's queries sees what of the keys of another one."""
    everything, half = slice(0, time), time // 2
    if not causal:
        return everything, everything, False
    if source == me:
        return everything, everything, True
    return (everything, slice(0, half), False) if source < me else (slice(half, time), everything, False)


def _scores(q: Tensor, k: Tensor, scale: float, masked: bool) -> Tensor:
    """(b, key heads, queries of a group x time, keys)."""
    groups = q.shape[1] // k.shape[1]
    flat = q.reshape(q.shape[0], k.shape[1], groups * q.shape[2], q.shape[3])
    scores = flat.matmul(k.transpose(-1, -2)).mul_(scale)
    if masked:
        later = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).triu(1)
        scores.view(*scores.shape[:2], groups, *later.shape).masked_fill_(later, -math.inf)
    return scores


def _flat(x: Tensor, heads: int) -> Tensor:
    return x.reshape(x.shape[0], heads, -1, *x.shape[3:])


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, group: Ranks) -> Tensor:
        wide = torch.float32 if q.element_size() < 4 else q.dtype
        time, heads = q.shape[2], k.shape[1]
        out = torch.zeros(q.shape, dtype=wide, device=q.device)
        log_sum = torch.full(q.shape[:3], -math.inf, dtype=wide, device=q.device)
        for source, pair in _round(torch.stack([k, v]), group, "ring attention"):
            rows, columns, masked = _block(group.index, source, time, causal)
            keys, values = pair[0][:, :, columns].to(wide), pair[1][:, :, columns].to(wide)
            queries = q[:, :, rows].to(wide)
            scores = _scores(queries, keys, scale, masked)
            here = scores.logsumexp(-1)
            part = scores.sub_(here[..., None]).exp_().matmul(values).view(queries.shape)
            here = here.view(queries.shape[:3])
            both = torch.logaddexp(log_sum[:, :, rows], here)
            out[:, :, rows] *= (log_sum[:, :, rows] - both).exp_()[..., None]
            out[:, :, rows] += part * (here - both).exp_()[..., None]
            log_sum[:, :, rows] = both
        result = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, result, log_sum)
        ctx.given = (causal, scale, group, wide, heads)
        return result

    @staticmethod
    @differentiated_once("ring attention")
    def backward(ctx: Any, *grads: Tensor) -> Any:
        q, k, v, out, log_sum = ctx.saved_tensors
        causal, scale, group, wide, heads = ctx.given
        grad = grads[0].to(wide)
        delta = (grad * out).sum(-1)
        grad_q = torch.zeros(q.shape, dtype=wide, device=q.device)
        shape = (2, *k.shape)
        gradient = torch.zeros(
            shape, dtype=wide, device=q.device
        )  # of what is here now; goes round with it, and comes home
        for step, (source, pair) in enumerate(_round(torch.stack([k, v]), group, "ring attention backward")):
            rows, columns, masked = _block(group.index, source, q.shape[2], causal)
            keys, values = pair[0][:, :, columns].to(wide), pair[1][:, :, columns].to(wide)
            queries, upstream = q[:, :, rows].to(wide), _flat(grad[:, :, rows], heads)
            scores = _scores(queries, keys, scale, masked)
            weights = scores.sub_(_flat(log_sum[:, :, rows], heads)[..., None]).exp_()
            own = torch.zeros(pair.shape, dtype=wide, device=q.device)
            own[1][:, :, columns] = weights.transpose(-1, -2).matmul(upstream)
            slope = upstream.matmul(values.transpose(-1, -2)).sub_(_flat(delta[:, :, rows], heads)[..., None])
            slope.mul_(weights).mul_(scale)
            grad_q[:, :, rows] += slope.matmul(keys).view(queries.shape)
            own[0][:, :, columns] = slope.transpose(-1, -2).matmul(_flat(queries, heads))
            gradient = _pass_on(gradient.add_(own), group, started.tag_of("ring gradient", step))
        return grad_q.to(q.dtype), gradient[0].to(k.dtype), gradient[1].to(v.dtype), None, None, None


def _round(pair: Tensor, group: Ranks, call: str) -> Any:
    """The parts of all ranks, this one's first; the next is on its way while one is used."""
    n, me = group.size, group.index
    for step in range(n):
        coming = None
        if step < n - 1:
            tag = started.tag_of(call, step)
            coming = started.shift(pair, (me + 1) % n, (me - 1) % n, group, tag, call)
        yield (me - step) % n, pair
        if coming is not None:
            pair = coming.wait()


def _pass_on(x: Tensor, group: Ranks, tag: int) -> Tensor:
    """What the rank before has; this one's goes to the rank behind."""
    if group.size == 1:
        return x
    n, me = group.size, group.index
    return started.shift(x, (me + 1) % n, (me - 1) % n, group, tag, "ring attention backward").wait()


def ulysses_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = True,
    scale: float | None = None,
    group: Ranks | None = None,
    balanced: bool | None = None,
) -> Tensor:
    """As ``ring_attention``, by four all-to-alls: each rank gets the whole sequence of some heads.

    Args:
        balanced: whether the parts are those of ``cut(..., balanced=True)``; as ``causal`` if left out.

    Raises:
        FleetError: fewer query heads than ranks.
    """
    group = _sep(group)
    n, heads = group.size, q.shape[1]
    if heads < n:
        raise FleetError(f"ulysses_attention: {heads} heads for {n} ranks along sep; use ring_attention")
    if k.shape[1] != heads and (k.shape[1] % n or heads % n):
        k, v = (x.repeat_interleave(heads // x.shape[1], 1) for x in (k, v))
    balanced = causal if balanced is None else balanced
    back = _back(q.shape[2] * n, group, balanced).to(q.device)
    parts = [_sizes(x.shape[1], n) for x in (q, k, v)]
    whole = [
        differentiable.all_to_all(x, 2, 1, group, None, sizes).index_select(2, back)
        for x, sizes in zip((q, k, v), parts, strict=True)
    ]
    shared = whole[0].shape[1] != whole[1].shape[1]
    out = F.scaled_dot_product_attention(whole[0], whole[1], whole[2], is_causal=causal, scale=scale, enable_gqa=shared)
    forth = _forth(out.shape[2], group, balanced).to(q.device)
    return differentiable.all_to_all(out.index_select(2, forth), 1, 2, group, parts[0], None)


def _sizes(n: int, parts: int) -> list[int]:
    return [n // parts + (place < n % parts) for place in range(parts)]
