"""What was alive before a step, without keeping any of it alive: tensors, optimizers' numbers, what modules are."""

from __future__ import annotations

import gc
import types
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.utils.weak import TensorWeakRef

from onecard._torch import names as _torch
from onecard._torch.scaling import begun
from onecard.comm.world.world import device
from onecard.static.guards import frozen
from onecard.static.step.facts import takes_gradients
from onecard.tensor.dist_tensor import DistTensor
from onecard.tensor.spec import Spec
from onecard.train import unreduced


class Before:
    """All tensors that are alive before a step, without keeping any of them alive.

    Attributes:
        alive: by identity.
        gradients: for each leaf, its gradient's identity or 0; ``owners``: the other way; ``begun``: those that are leaves
            with gradients since the step only. ``unreduced``: what was known of those of which ranks have summands.
        holders: by the identity of a local part, the identities of the distributed tensors that had it, parameters first.
        locals: of each distributed tensor, its local part's identity and its spec.
        groups: the numbers of all optimizers; ``states``: for each of them, the states of each parameter, by name
            with their values, if they are no tensors; ``kept``: with their identities.
        still: of each module, and of each optimizer's groups, what a recording takes for granted; ``buffers``: of each module,
            the identities of its buffers by name.
        scalers: those that scale, with their tensors.
        others: what is alive of the types that ``also`` wants, until somebody takes it: one look at all objects serves both.
    """

    def __init__(self, also: frozen.Kinds | None = None) -> None:
        self.alive: dict[int, TensorWeakRef] = {}
        self.gradients: dict[int, int] = {}
        self.owners: dict[int, int] = {}
        self.begun: set[int] = set()
        self.unreduced: dict[int, dict[str, Any]] = {}
        self.holders: dict[int, list[int]] = {}
        self.locals: dict[int, tuple[int, Spec]] = {}
        self.groups: list[tuple[Optimizer, list[dict[str, Any]]]] = []
        self.states: dict[int, dict[int, dict[Any, Any]]] = {}
        self.kept: dict[int, dict[int, dict[Any, int]]] = {}
        self.still: dict[int, Any] = {}
        self.scalers: list[tuple[GradScaler, list[Tensor]]] = []
        self.buffers: dict[int, dict[str, int]] = {}
        found: list[Tensor] = []
        ours, self.others = alive(_HELD, also or _NONE)
        for x in ours:
            if isinstance(x, Tensor):
                found.append(x)
            elif isinstance(x, Optimizer):
                self.groups.append((x, [numbers_of(group) for group in x.param_groups]))
                self.still[id(x)] = [options_of(group) for group in x.param_groups]
                states = [(p, held) for p, held in x.state.items() if isinstance(held, dict)]
                self.states[id(x)] = {id(p): plain_states(held) for p, held in states}
                self.kept[id(x)] = {id(p): {k: id(v) for k, v in held.items()} for p, held in states}
            elif isinstance(x, GradScaler):
                self.scalers.append((x, begun(x, device())))
                found += self.scalers[-1][1]
            else:
                self.still[id(x)] = values_of(x)
                self.buffers[id(x)] = {name: id(buffer) for name, buffer in x._buffers.items()}
        for x in found:
            self.alive[id(x)] = TensorWeakRef(x)
            if takes_gradients(x):
                self._leaf(x)
            self._hold(x)

    def scalers_of(self, values: Iterable[Any]) -> list[GradScaler]:
        """Those that have some of these tensors."""
        known = set(map(id, values))
        return [scaler for scaler, own in self.scalers if not known.isdisjoint(map(id, own))]

    def _leaf(self, x: Tensor) -> None:
        grad = _torch.gradient(x)
        self.gradients[id(x)] = 0 if grad is None else id(grad)
        if grad is not None:  # made for Python only now, if it is a plain one
            self.owners[id(grad)] = id(x)
            self.alive[id(grad)] = TensorWeakRef(grad)
            self._hold(grad)
        if (state := unreduced.watched(x)) is not None:
            self._beside(id(x), state, state.words(grad is not None))

    def _beside(self, key: int, state: Any, words: Any) -> None:
        """What is known of a gradient of which ranks have summands."""
        known = self.unreduced[key] = {"words": words, "backwards": state.family.backwards}
        for kind in ("kept", "wide"):
            x = getattr(state, kind)
            known[kind] = 0 if x is None else id(x)
            if x is not None:
                self.alive[id(x)] = TensorWeakRef(x)

    def beside_now(self, key: int, leaf: Any) -> Iterator[tuple[str, Any]]:
        """What stands beside the gradient of a leaf by now and did not before; None: nothing does any more."""
        for kind in ("kept", "wide") if key in self.unreduced else ():
            x = getattr(unreduced.of(leaf), kind)
            if not self.still_is(x, self.unreduced[key][kind] or id(None)):
                yield kind, x

    def unreduced_now(self, key: int) -> Iterator[tuple[Any, Any, bool]]:
        """What was known of the gradient of a leaf, what is, and whether a backward has reached its model; nothing of others."""
        if (was := self.unreduced.get(key)) is not None:
            leaf: Any = self.alive[key]()
            state: Any = unreduced.of(leaf)
            now = state.words(unreduced.read(leaf) is not None)
            yield was["words"], now, state.family.backwards != was["backwards"]

    def _hold(self, x: Tensor) -> None:
        if isinstance(x, DistTensor) and hasattr(x, "_local"):
            known = self.holders.setdefault(id(x._local), [])
            known.insert(0 if isinstance(x, nn.Parameter) else len(known), id(x))
            self.locals[id(x)] = (id(x._local), x._spec)

    def had(self, x: Tensor) -> bool:
        """Whether a tensor was there."""
        found = self.alive.get(id(x))
        return found is not None and found() is x

    def begins(self, x: Any) -> None:
        """A tensor that was there may take gradients by now, which it did not: its own is one that the step leaves."""
        if isinstance(x, Tensor) and self.had(x) and takes_gradients(x) and id(x) not in self.gradients:
            self.gradients[id(x)] = 0
            self.begun.add(id(x))

    def asked(self, x: Tensor) -> None:
        """The step looks at the gradient of a tensor that is frozen now: it may have one at another call."""
        if x.is_leaf and id(x) not in self.gradients:
            self._leaf(x)

    def gradients_now(self) -> list[Tensor | None]:
        """What leaves that were there have as gradients by now, without being seen to look: who reads one has it summed."""
        return [_torch.gradient(x) for key in self.gradients if (x := self.alive[key]()) is not None]

    def still_is(self, x: Any, was: int) -> bool:
        """Whether this is what had that identity before, which something new may have by now."""
        return id(x) == was and (x is None or self.had(x))

    def moved(self) -> Iterator[DistTensor]:
        """Distributed tensors that have another local part, or lie otherwise, than before."""
        for key, (local, spec) in self.locals.items():
            x: Any = self.alive[key]()
            if x is not None and (
                not self.still_is(x._local, local) or x._spec.with_hint(()) is not spec.with_hint(())
            ):
                yield x


def alive(*wanted: frozen.Kinds) -> list[list[Any]]:
    """For each question, a function of a module, what is alive of the types that it wants.

    There are hundreds of thousands of objects: it is one look, and each type is asked once.
    """
    listed = gc.get_objects()
    kinds = {*map(type, listed)}
    asked = [wants(kinds) for wants in wanted]
    there = frozen.of_types(listed, set().union(*asked))
    seen = {*map(id, there)}  # what is thawed is listed again
    hidden = [[x for x in more if id(x) not in seen] for more in frozen.those(listed, wanted)]
    return [frozen.of_types(there, found) + more for found, more in zip(asked, hidden, strict=True)]


_HELD = frozen.kinds_of(Tensor, Optimizer, nn.Module, GradScaler)
_NONE = frozen.kinds_of()


def plain_states(held: dict[Any, Any]) -> dict[Any, Any]:
    """An optimizer's states of one parameter: names, and values of those that are numbers of Python."""
    return {k: v if isinstance(v, bool | int | float | str) else None for k, v in held.items()}


def numbers_of(group: dict[str, Any]) -> dict[str, Any]:
    """The numbers of an optimizer's group of parameters: floats, and tuples of them."""

    def counts(value: Any) -> bool:
        return isinstance(value, float) or (
            isinstance(value, tuple | list) and all(isinstance(v, float) for v in value)
        )

    return {k: v for k, v in group.items() if k != "params" and counts(v)}


STILL = (bool, int, float, str, type(None))
"""Of values of these types a recording takes what they were: they are compared before each replay."""


def options_of(group: dict[str, Any]) -> dict[str, Any]:
    """What else an optimizer's group holds besides parameters and numbers that may change."""
    numbers = numbers_of(group)
    return {k: v for k, v in group.items() if k not in numbers and isinstance(v, STILL)}


SETTLED = (
    torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size,
    types.FunctionType, types.BuiltinFunctionType, type,
)  # fmt: skip
"""So of values of these types that torch's own modules hold, and of tuples: strides of a convolution, an activation."""


def values_of(module: nn.Module) -> dict[str, Any]:
    """The plain values that a module holds itself."""
    kinds = (*STILL, *SETTLED) if type(module).__module__.startswith("torch.") else STILL
    return {k: v for k, v in vars(module).items() if not k.startswith("_") and _is_plain(v, kinds)}


def _is_plain(value: Any, kinds: tuple[type, ...]) -> bool:
    if type(value) is tuple:
        return all(_is_plain(v, kinds) for v in value)
    return isinstance(value, kinds)


def still_before(before: Before, roots: Sequence[tuple[str, Any]]) -> dict[Any, Any]:
    """Of each module and each optimizer's group: what it held before the step, which may have counted there."""
    facts: dict[Any, Any] = {}
    for name, root in roots:
        if isinstance(root, nn.Module):
            for path, module in root.named_modules():
                had = before.buffers.get(id(module), {})
                if lost := [n for n, x in module._buffers.items() if n in had and not before.still_is(x, had[n])]:
                    facts[f"{name}.{path}" if path else name, "replaced"] = lost[0]
                if id(module) in before.still:
                    facts[f"{name}.{path}" if path else name, "still"] = before.still[id(module)]
        elif isinstance(root, Optimizer):
            facts |= {(name, i, "options"): held for i, held in enumerate(before.still.get(id(root), ()))}
    return facts


def changed_itself(before: Before, roots: Sequence[tuple[str, Any]]) -> bool:
    """Whether a module's plain values are others than before the step."""
    modules = [module for _, root in roots if isinstance(root, nn.Module) for module in root.modules()]
    stills = [(vars(module), before.still.get(id(module), {})) for module in modules]
    return any(name not in now or now[name] != value for now, still in stills for name, value in still.items())
