"""What a rank holds of a parameter: its runs of the whole, which of them it counts, and over whom gradients are summed.

Layers of the manual level have plain local parameters. Clipping, checkpoints and the sums of gradients need to know what
each is a part of; ``held(parameter)`` tells them.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from onecard.boxes import Box, cut, slices, whole
from onecard.comm.ranks import Ranks
from onecard.fleet import pending
from onecard.fleet.state_notes import note
from onecard.fleet.strategy import FleetError
from onecard.tensor import DistTensor

_NAME = "_onecard_held"


@dataclass(frozen=True, slots=True)
class Run:
    """Neighbouring rows of the whole. ``owned``: this rank counts them in norms; a copy of them elsewhere does not."""

    start: int
    length: int
    owned: bool = True


@dataclass(frozen=True, slots=True)
class Held:
    """A part of a parameter.

    Attributes:
        shape: of the whole parameter.
        dim: along which it is cut; -1: this rank has all of it.
        runs: of the whole along ``dim``, in the order in which they lie here.
        group: the ranks that hold the other runs.
        sums: groups whose ranks' gradients are summands of the gradient (sequence parallel, a shared embedding).
        copies: (start, length) of the whole along ``dim`` that lie on several ranks of ``group``, each with a summand of
            their gradient (key and value heads fewer than ranks). The same on all ranks.
    """

    shape: tuple[int, ...]
    dim: int = -1
    runs: tuple[Run, ...] = ()
    group: Ranks | None = None
    sums: tuple[Ranks, ...] = ()
    copies: tuple[tuple[int, int], ...] = ()

    def boxes(self) -> Iterator[tuple[Box, tuple[slice, ...]]]:
        """For each run: the box of the whole, and where it lies in the local tensor."""
        everything = whole(self.shape)
        if self.dim < 0:
            yield everything, slices(everything)
            return
        at = 0
        for run in self.runs:
            here = cut(everything, self.dim, at, at + run.length)
            at += run.length
            yield cut(everything, self.dim, run.start, run.start + run.length), slices(here)

    def owned(self) -> list[tuple[int, int]]:
        """(start, length) along ``dim`` in the local tensor of what this rank counts."""
        starts = [0, *accumulate(run.length for run in self.runs)]
        return [(at, run.length) for at, run in zip(starts, self.runs, strict=False) if run.owned]


def hold(parameter: Tensor, what: Held | str) -> None:
    """Note what a parameter is a part of; a name where that is not known."""
    setattr(parameter, _NAME, what)
    if not isinstance(what, str) and (what.sums or what.copies) and not isinstance(parameter, DistTensor):
        pending.watch(parameter)


def hold_alike(parameter: Tensor, other: Tensor) -> None:
    """Note that a parameter is a part of what another one is a part of, if that was marked."""
    what = marked(other)
    if what is not None:
        hold(parameter, what)


def marked(parameter: Any) -> Held | str | None:
    """What is noted of a parameter, a name where it is not known; None if nothing is noted."""
    return getattr(parameter, _NAME, None)


def held(parameter: Tensor) -> Held:
    """What a parameter is a part of; one that nobody marked is whole.

    Raises:
        FleetError: it belongs to a layer that is cut, which does not know it.
    """
    what = getattr(parameter, _NAME, None)
    if isinstance(what, str):
        raise FleetError(
            f"{what} is a parameter that this layer, which is cut, does not know: is it a part, or the same on all ranks? "
            "fleet.mark(layer.name, layer.group, dim) says that it is this rank's part; layer.register_part(name, parameter, "
            "fleet.Held(tuple(parameter.shape))) that it is whole. weight_norm and spectral_norm make such ones, of a part's norm"
        )
    return what or Held(tuple(parameter.shape))


def fit(what: Held | str, parameter: Tensor, name: str) -> Held | str:
    """What a parameter is that takes the place of another one.

    Raises:
        FleetError: it has not the shape of this rank's part.
    """
    if isinstance(what, str) or isinstance(parameter, nn.parameter.UninitializedParameter):
        return what
    if what.dim < 0:
        return replace(what, shape=tuple(parameter.shape))
    wanted = list(what.shape)
    wanted[what.dim] = sum(run.length for run in what.runs)
    if wanted != list(parameter.shape):
        raise FleetError(
            f"{name} is this rank's part {wanted} of {list(what.shape)}, and was given {list(parameter.shape)}: "
            "fleet.held(layer.weight).boxes() says which part that is; a layer of another size takes the place of the whole layer"
        )
    return what


def mark(
    parameter: Tensor, group: Ranks, dim: int, sizes: Sequence[int] | None = None, runs: Sequence[Run] | None = None
) -> Tensor:
    """Say that a parameter is this rank's part of a larger one, cut along ``dim`` among a group.

    Args:
        sizes: the lengths of all ranks' parts; all equal if left out.
        runs: or this rank's runs themselves; the whole is then as long as the largest end, which all must agree on.

    Raises:
        FleetError: sizes that are not those of the group or of this part.
    """
    if sizes is None:
        sizes = [parameter.shape[dim]] * group.size
    if len(sizes) != group.size or sizes[group.index] != parameter.shape[dim]:
        raise FleetError(
            f"sizes {list(sizes)} of parts along dim {dim} do not fit a parameter of shape {list(parameter.shape)} on place "
            f"{group.index} of {group.size}"
        )
    mine = tuple(runs) if runs is not None else (Run(sum(sizes[: group.index]), sizes[group.index]),)
    shape = list(parameter.shape)
    shape[dim] = sum(sizes)
    hold(parameter, Held(tuple(shape), dim, mine, group))
    return parameter


def sum_over(parameter: Tensor, group: Ranks) -> Tensor:
    """Say that each rank of a group has a summand of this parameter's gradient: copies used in several places.

    For an embedding that two stages share: ``fleet.sum_over(weight, oc.new_group([first, last]))`` on both.
    """
    now = held(parameter)
    if all(group.ranks != known.ranks for known in now.sums):
        hold(parameter, replace(now, sums=(*now.sums, group)))
    return parameter


def part_sizes(n: int, parts: int, unit: int = 1) -> list[int]:
    """How a dim is cut: n // parts each, in whole units, and the last rank takes the rest (seed 000's rule).

    Example:
        >>> part_sizes(8, 2), part_sizes(11, 3), part_sizes(10, 3, unit=2)
        ([4, 4], [3, 3, 5], [2, 2, 6])
    """
    if n % unit:
        raise FleetError(f"{n} does not consist of whole units of {unit}")
    each = n // unit // parts * unit
    return [each] * (parts - 1) + [n - each * (parts - 1)]


class Parallel(nn.Module):
    """A module some of whose parameters are parts: it knows by their names what they are, whichever tensors they are."""

    def register_part(self, name: str, parameter: Tensor | None, what: Held | None = None) -> None:
        """Add a parameter that is a part."""
        if parameter is not None:
            self.__dict__.setdefault("_held", {})[name] = what or Held(tuple(parameter.shape))
        self.register_parameter(name, parameter)  # type: ignore[arg-type]

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """As torch's; what takes the place of a part is that part."""
        what = self.__dict__.get("_held", {}).get(name)
        where = f"{type(self).__name__}.{name}"
        if param is not None and what is not None:
            hold(param, fit(what, param, where))
        elif param is not None and self._is_cut() and (marked(param) is None or self._gone(param)):
            hold(param, where)
        super().register_parameter(name, param)

    def _gone(self, param: nn.Parameter) -> bool:
        """Whether a part that is registered by another name has no longer its own: something is computed of it."""
        names = [n for n, what in self.__dict__.get("_held", {}).items() if what is marked(param)]
        return bool(names) and all(self._parameters.get(n) is None for n in names)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "parametrizations" and self._is_cut():
            raise FleetError(
                f"{type(self).__name__} is cut, and torch.nn.utils.parametrize (weight_norm, spectral_norm, ...) would see "
                "this rank's part of the weight. By marks it sees the whole: oc.shard_layer; or parametrize layers that are whole"
            )
        super().__setattr__(name, value)

    def _is_cut(self) -> bool:
        group = self.__dict__.get("group")
        return group is not None and group.size > 1

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        note(destination).parts.update(
            {prefix + name: held(p) for name, p in self._parameters.items() if p is not None}
        )

    def __deepcopy__(self, memo: dict[int, object]) -> Parallel:
        made = self.__class__.__new__(self.__class__)
        memo[id(self)] = made
        made.__dict__.update(copy.deepcopy(self.__dict__, memo))
        for name, what in self.__dict__.get("_held", {}).items():
            if made._parameters.get(name) is not None:
                hold(made._parameters[name], what)  # type: ignore[arg-type]
        return made


def take(whole: Tensor, what: Held) -> Tensor:
    """The runs of a whole tensor, one after the other: a copy."""
    if what.dim < 0:
        return whole.clone()
    return torch.cat([whole.narrow(what.dim, run.start, run.length) for run in what.runs], what.dim)
