"""Mixtures of experts as people write them for one card: each a function of tokens, a router and two stacks of weights."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

Layer = Callable[..., Tensor]


def routed(x: Tensor, router: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """The weights and the numbers of each token's experts."""
    weights, numbers = F.linear(x, router).softmax(-1).topk(top, -1)
    return weights / weights.sum(-1, keepdim=True), numbers


def one(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """One expert."""
    gate, value = F.linear(x, up).chunk(2, -1)
    return F.linear(F.silu(gate) * value, down)


def grouped(x: Tensor, router: Tensor, up: Tensor, down: Tensor, top: int) -> Tensor:
    """Sorted by expert, grouped products, sorted back."""
    weights, numbers = routed(x, router, top)
    chosen, order = torch.sort(numbers.reshape(-1))
    counts = torch.histc(chosen.float(), bins=len(up), min=0, max=len(up) - 1)
    ends = torch.cumsum(counts, 0, dtype=torch.int32)
    rows, scale = x[order // top], weights.reshape(-1)[order]
    gate, value = F.grouped_mm(rows, up.mT, offs=ends).chunk(2, -1)
    made = F.grouped_mm(F.silu(gate) * value, down.mT, offs=ends) * scale.unsqueeze(-1)
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order))
    return made[back].view(len(x), top, -1).sum(1)


def grouped_added(x: Tensor, router: Tensor, up: Tensor, down: Tensor, top: int) -> Tensor:
    """The same with ``argsort``, ``bincount``, ``index_select``, and ``index_add`` in place of the way back."""
    weights, numbers = routed(x, router, top)
    flat = numbers.flatten()
    order = torch.argsort(flat, stable=True)
    ends = torch.bincount(flat, minlength=len(up)).cumsum(0).to(torch.int32)
    token = order // top
    gate, value = F.grouped_mm(x.index_select(0, token), up.mT, offs=ends).chunk(2, -1)
    made = F.grouped_mm(F.silu(gate) * value, down.mT, offs=ends)
    return torch.zeros_like(x).index_add(0, token, made * weights.flatten()[order, None])


def loop(x: Tensor, router: Tensor, up: Tensor, down: Tensor, top: int) -> Tensor:
    """One expert after another, as in Mixtral's first code."""
    weights, numbers = routed(x, router, top)
    total = torch.zeros_like(x)
    for expert in range(len(up)):
        token, place = torch.where(numbers == expert)
        made = one(x[token], up[expert], down[expert])
        total.index_add_(0, token, made * weights[token, place, None])
    return total


def masked(x: Tensor, router: Tensor, up: Tensor, down: Tensor, top: int) -> Tensor:
    """Every expert for every token; the others weigh nothing."""
    weights, numbers = routed(x, router, top)
    total = torch.zeros_like(x)
    for expert in range(len(up)):
        total = total + one(x, up[expert], down[expert]) * (weights * (numbers == expert)).sum(-1, keepdim=True)
    return total


def dense(x: Tensor, router: Tensor, up: Tensor, down: Tensor, top: int) -> Tensor:
    """All experts at once, by ``bmm``."""
    weights, numbers = routed(x, router, top)
    scale = torch.zeros(len(x), len(up)).scatter_add(1, numbers, weights)
    gate, value = torch.bmm(x.expand(len(up), -1, -1), up.mT).chunk(2, -1)
    return (torch.bmm(F.silu(gate) * value, down.mT) * scale.t().unsqueeze(-1)).sum(0)


def einsum(x: Tensor, router: Tensor, up: Tensor, down: Tensor, top: int, room: int = 6) -> Tensor:
    """GShard's: places with a capacity, ``one_hot``, and ``einsum`` for dispatch and combine."""
    weights, numbers = routed(x, router, top)
    chosen = F.one_hot(numbers, len(up))
    flat = chosen.transpose(0, 1).reshape(-1, len(up))
    place = ((flat.cumsum(0) - 1) * flat).reshape(top, len(x), len(up)).transpose(0, 1)
    fits = (chosen * (place < room)).to(x.dtype)
    where = F.one_hot(place.clamp(max=room - 1), room).to(x.dtype) * fits.unsqueeze(-1)
    sent = where.sum(1)
    buffer = torch.einsum("tec,td->ecd", sent, x)
    gate, value = torch.einsum("ecd,eid->eci", buffer, up).chunk(2, -1)
    made = torch.einsum("eci,edi->ecd", F.silu(gate) * value, down)
    return torch.einsum("tkec,tk,ecd->td", where, weights, made)


def buffered(x: Tensor, router: Tensor, up: Tensor, down: Tensor, top: int, room: int = 6) -> Tensor:
    """A buffer (experts, room, width), filled by ``index_copy``, and ``bmm``; what does not fit is dropped."""
    weights, numbers = routed(x, router, top)
    flat = numbers.flatten()
    place = (F.one_hot(flat, len(up)).cumsum(0) - 1).gather(1, flat[:, None]).squeeze(1)
    slot = torch.where(place < room, flat * room + place, len(up) * room)
    rows = x.repeat_interleave(top, 0)
    buffer = torch.zeros(len(up) * room + 1, x.shape[1]).index_add(0, slot, rows)[:-1].view(len(up), room, -1)
    gate, value = torch.bmm(buffer, up.mT).chunk(2, -1)
    made = torch.bmm(F.silu(gate) * value, down.mT).view(len(up) * room, -1)
    made = torch.cat([made, made.new_zeros(1, x.shape[1])])[slot]
    return (made * weights.flatten().unsqueeze(-1)).view(len(x), top, -1).sum(1)


def scattered(x: Tensor, router: Tensor, up: Tensor, down: Tensor, top: int) -> Tensor:
    """Rows of chosen weights, ``bmm``, and ``scatter_add``."""
    weights, numbers = routed(x, router, top)
    flat, token = numbers.flatten(), torch.arange(len(x)).repeat_interleave(top)
    rows = x[token].unsqueeze(-1)
    gate, value = torch.bmm(up[flat], rows).squeeze(-1).chunk(2, -1)
    made = torch.bmm(down[flat], (F.silu(gate) * value).unsqueeze(-1)).squeeze(-1) * weights.flatten()[:, None]
    return torch.zeros_like(x).scatter_add(0, token[:, None].expand(-1, x.shape[1]), made)


LAYERS: dict[str, Layer] = {
    f.__name__: f for f in (grouped, grouped_added, loop, masked, dense, einsum, buffered, scattered)
}
