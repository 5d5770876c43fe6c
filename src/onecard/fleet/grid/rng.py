"""Random states by name: dropout that differs on each rank (local), and dropout that is the same on all (global)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.utils.checkpoint as checkpoint
from torch import Tensor

from onecard._torch import patches
from onecard.comm.base.state import Kept
from onecard.errors import FleetError
from onecard.fleet.grid.topology import get_hybrid_communicate_group

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
        _draw_again_in_backward()
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
        for frame in _frames.here:
            frame.draws(self, name)
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
        self.put(states)

    def put(self, states: dict[str, State]) -> None:
        """Go on from these states; others stay."""
        for name, each in states.items():
            known = self.states.get(name)
            if known is None or len(known) != len(each):
                _draw_again_in_backward()
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


_frames: Kept[list[_Frame]] = Kept(list)
"""Of the functions that run now and will run again in backward, the innermost last."""


class _Frame:
    """What a function that runs again in backward has drawn from: named states, as they were before."""

    def __init__(self) -> None:
        self.before: list[tuple[RNGStatesTracker, str, State]] = []

    def draws(self, tracker: RNGStatesTracker, name: str) -> None:
        """It is about to draw from a state."""
        if not any(known is tracker and its == name for known, its, _ in self.before):
            self.before.append((tracker, name, [state.clone() for state in tracker.states[name]]))

    @contextmanager
    def first(self, inner: AbstractContextManager[Any]) -> Iterator[None]:
        """Around its first run, within ``inner``."""
        _frames.here.append(self)
        try:
            with inner:
                yield
        finally:
            _frames.here.remove(self)

    @contextmanager
    def again(self, inner: AbstractContextManager[Any]) -> Iterator[None]:
        """Around a further one, which draws the same numbers; ``torch.utils.checkpoint`` does so with the default generators."""
        now = [(tracker, {name: [s.clone() for s in tracker.states[name]]}) for tracker, name, _ in self.before]
        for tracker, name, states in self.before:
            tracker.put({name: states})
        try:
            with inner:
                yield
        finally:
            for tracker, states_now in now:
                tracker.put(states_now)


class _Again:
    """A function that runs in forward, and again in backward."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.frame, self.runs = function, _Frame(), 0

    def __call__(self, *args: Any) -> Any:
        self.runs += 1
        with (self.frame.first if self.runs == 1 else self.frame.again)(nullcontext()):
            return self.function(*args)


class _Anew(AbstractContextManager[None]):
    """A context that is entered once for each backward pass."""

    def __init__(self, make: Callable[[], AbstractContextManager[None]]) -> None:
        self.make, self.made = make, list[AbstractContextManager[None]]()

    def __enter__(self) -> None:
        self.made.append(self.make())
        self.made[-1].__enter__()

    def __exit__(self, *fault: Any) -> bool | None:
        return self.made.pop().__exit__(*fault)


def _draw_again_in_backward() -> None:
    """Have ``torch.utils.checkpoint`` know of named states, however a program has imported it."""

    def generator(torchs: Callable[..., Any]) -> Callable[..., Any]:
        def ours(
            fn: Any, preserve: bool = True, context_fn: Any = checkpoint.noop_context_fn, *args: Any, **kwargs: Any
        ) -> Any:
            def contexts() -> tuple[Any, Any]:
                frame, (first, second) = _Frame(), context_fn()
                return frame.first(first), _Anew(lambda: frame.again(second))

            as_it_is = not preserve or torch.compiler.is_compiling()
            return torchs(fn, preserve, context_fn if as_it_is else contexts, *args, **kwargs)

        return ours

    def forward(torchs: Callable[..., Any]) -> Callable[..., Any]:
        return lambda ctx, fn, preserve, *args: torchs(ctx, _Again(fn) if preserve else fn, preserve, *args)

    of, name = "torch.utils.checkpoint.", "_checkpoint_without_reentrant_generator"
    patches.replace(f"{of}{name}", checkpoint, name, generator)
    patches.replace(f"{of}CheckpointFunction.forward", checkpoint.CheckpointFunction, "forward", forward)


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
