"""Random states by name: dropout that differs on each rank (local), and dropout that is the same on all (global)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from onecard import random
from onecard.comm.base.state import Kept
from onecard.comm.issue.ranks import Ranks
from onecard.errors import FleetError
from onecard.fleet.grid.topology import get_hybrid_communicate_group
from onecard.tensor.random_operators.one_card import set_aside

State = list[Tensor]


def _now() -> State:
    states = [torch.get_rng_state()]
    return states + ([torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else [])


def _set(states: State) -> None:
    torch.set_rng_state(states[0])
    if len(states) > 1:
        torch.cuda.set_rng_state(states[1])


class RNGStatesTracker:
    """Random states of torch's default generators, each with a name. ``get_rng_state_tracker`` gives this process' one.

    Source: ``paddle.distributed.fleet.meta_parallel.get_rng_state_tracker``; Megatron-LM.

    Example:
        >>> tracker = RNGStatesTracker()
        >>> tracker.add("local_seed", 1)
        >>> with tracker.rng_state("local_seed"):
        ...     a = torch.rand(2)
        >>> with tracker.rng_state("local_seed"):
        ...     b = torch.rand(2)
        >>> torch.equal(torch.cat([a, b]), torch.rand(4, generator=torch.Generator().manual_seed(1)))
        True
    """

    of_each_rank = "always"  # for checkpoints: as many ranks, laid out alike, have these again

    def __init__(self) -> None:
        self.states: dict[str, State] = {}
        self.seeds: dict[str, int] = {}

    def reset(self) -> None:
        """Forget all."""
        self.states.clear()
        self.seeds.clear()

    def add(self, name: str, seed: int) -> None:
        """Begin a random state from a seed.

        Raises:
            FleetError: the name, or another name's seed, is there already.
        """
        if name in self.states:
            raise FleetError(f"the random state {name!r} is there already, from seed {self.seeds[name]}")
        if seed in self.seeds.values():
            other = next(known for known, value in self.seeds.items() if value == seed)
            raise FleetError(f"seed {seed} for {name!r} is that of {other!r} already: both would draw the same numbers")
        before = _now()
        torch.manual_seed(seed)
        self.states[name], self.seeds[name] = _now(), seed
        _set(before)

    @contextmanager
    def rng_state(self, name: str = "model_parallel_rng") -> Iterator[None]:
        """Inside, torch draws from the state of this name, which goes on from there.

        Raises:
            FleetError: there is no such state.
        """
        if name not in self.states:
            known = ", ".join(self.states) or "none"
            raise FleetError(
                f"there is no random state {name!r}; there are: {known}. get_rng_state_tracker().add({name!r}, seed)"
            )
        before, states = _now(), self.states[name]
        _set(states)
        try:
            yield
        finally:
            for state, now in zip(states, _now(), strict=True):
                state.copy_(now)  # in place: a recording of the step knows the tensor
            _set(before)

    def get_states_tracker(self) -> dict[str, State]:
        """Copies of all states. Paddle's name for ``state_dict``."""
        return {name: [state.clone() for state in states] for name, states in self.states.items()}

    def set_states_tracker(self, states: dict[str, State]) -> None:
        """Go on from these states."""
        for name in [*self.states]:
            if name not in states:
                del self.states[name]
        for name, each in states.items():
            known = self.states.get(name)
            if known is None or len(known) != len(each):
                self.states[name] = [state.clone() for state in each]
                continue
            for state, new in zip(known, each, strict=True):
                state.copy_(new)  # in place: a recording of the step knows the tensor

    def state_dict(self) -> dict[str, Tensor]:
        """What a checkpoint of this rank saves: tensors by name."""
        return {f"{name}/{i}": s.clone() for name, states in self.states.items() for i, s in enumerate(states)}

    def load_state_dict(self, saved: dict[str, Tensor]) -> None:
        """Go on from what was saved."""
        states: dict[str, State] = {}
        for key in sorted(saved):
            states.setdefault(key.rpartition("/")[0], []).append(saved[key])
        self.set_states_tracker(states)


_tracker: Kept[dict[str, RNGStatesTracker]] = Kept(dict)


def get_rng_state_tracker() -> RNGStatesTracker:
    """This process' named random states."""
    return _tracker.here.setdefault("tracker", RNGStatesTracker())


def model_parallel_random_seed(seed: int) -> None:
    """Seed torch and the states "global_seed", alike on all ranks along mp, and "local_seed", different on each.

    Ranks along dp, sep and pp draw differently from each other in both, because their data differ.
    """
    hcg = get_hybrid_communicate_group()
    place = 0
    for axis in ("dp", "sharding", "sep", "pp"):
        place = place * hcg.degrees[axis] + hcg.index(axis)
    tracker = get_rng_state_tracker()
    tracker.reset()
    begin = seed + 100_003 * place
    torch.manual_seed(begin)
    tracker.add("global_seed", begin + 1)
    tracker.add("local_seed", begin + 2 + hcg.index("mp"))


def dropout(
    x: Tensor,
    p: float = 0.5,
    training: bool = True,
    mode: str = "upscale_in_train",
    rng_name: str | None = None,
    *,
    cut: tuple[int, Ranks] | None = None,
    sizes: Sequence[int] | None = None,
) -> Tensor:
    """Dropout from a named random state, or with one card's numbers.

    Args:
        rng_name: of the tracker; torch's own state if left out.
        cut: (dim, group), of an x that is this rank's part along ``dim``: the mask is then this part of the mask that one
            card draws under ``oc.one_card_random`` for the whole, and all ranks must draw from equal states.
        sizes: lengths of the ranks' parts, if not equal.

    Raises:
        FleetError: another mode than "upscale_in_train".
    """
    if mode != "upscale_in_train":
        raise FleetError(f"dropout(mode={mode!r}): only 'upscale_in_train' is there; values are scaled by 1 / (1 - p)")
    if not training or p == 0:
        return x
    if rng_name is not None:
        with get_rng_state_tracker().rng_state(rng_name):
            return dropout(x, p, cut=cut, sizes=sizes)
    if cut is None:
        # Not F.dropout, which on the CPU keeps a mask of the size of x for backward; this one keeps a byte for each number.
        return torch.native_dropout(x, p, True)[0]
    return _part_of_one_card(x, p, *cut, sizes)


def _part_of_one_card(x: Tensor, p: float, dim: int, group: Ranks, sizes: Sequence[int] | None) -> Tensor:
    dim = dim % x.dim()
    lengths = list(sizes) if sizes is not None else [x.shape[dim]] * group.size
    shape, offset = list(x.shape), [0] * x.dim()
    shape[dim], offset[dim] = sum(lengths), sum(lengths[: group.index])
    mask = torch.empty(x.shape, dtype=torch.bool, device=x.device)
    with set_aside():
        random.fill(mask, random.law("bernoulli_", torch.bool, 1 - p), random.new_key(), shape, offset)
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
