"""Tensors that a step puts in the place of others: where it is written down without being done, nobody has their values."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor
from torch.optim import Optimizer

from onecard.static.guards.guard import Guard
from onecard.static.guards.lookup import now_at
from onecard.static.guards.seen import Seen, parts_of


def put_back(seen: Seen, optimizers: Iterable[Optimizer]) -> Guard | None:
    """Put tensors of the program back in the places where the step has left others; the first of these. States are followed.

    Only such as the step had read there: they are what its next call would go on with.
    """
    seen.look_at_left()
    followed = {id(x) for optimizer in optimizers for x in parts_of(optimizer)}
    found: Guard | None = None
    for guard in seen.guards:
        kind, holder, key, owner = guard.place
        if kind != "entry" or isinstance(owner, Tensor | Optimizer) or id(holder) in followed:
            continue
        was, now = guard.must, now_at(guard.place)
        if isinstance(was, Tensor) and isinstance(now, Tensor) and now is not was and not seen.was_there(now):
            found = found or guard
            holder[key] = was
    return found
