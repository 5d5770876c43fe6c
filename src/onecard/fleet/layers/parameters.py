"""Parameters of layers that are cut: each is noted as the part of the whole that it is (``train.shard``)."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from onecard.comm.issue.ranks import Ranks
from onecard.errors import FleetError
from onecard.fleet.gradients import hooks
from onecard.fleet.grid import state_notes
from onecard.tensor import DistTensor
from onecard.train.shard import Run, Shard, held, note, noted


def hold(parameter: Tensor, what: Shard | str) -> None:
    """Note what a parameter is a part of; a name where that is not known."""
    note(parameter, what)
    if not isinstance(what, str) and (what.sums or what.copies) and not isinstance(parameter, DistTensor):
        hooks.watch(parameter)


def fit(what: Shard | str, parameter: Tensor, name: str) -> Shard | str:
    """What a parameter is that takes the place of another one.

    Raises:
        FleetError: it has not the shape of this rank's part.
    """
    if isinstance(what, str) or isinstance(parameter, nn.parameter.UninitializedParameter):
        return what
    if what.dim < 0:
        return replace(what, shape=tuple(parameter.shape))
    wanted = [*_own_shape(what)]
    if wanted != list(parameter.shape):
        raise FleetError(
            f"{name} is this rank's part {wanted} of {list(what.shape)}, and was given {list(parameter.shape)}: "
            "fleet.held(layer.weight).boxes() says which part that is; a layer of another size takes the place of the whole layer"
        )
    return what


def _own_shape(what: Shard) -> tuple[int, ...]:
    """Of this rank's part."""
    found = list(what.shape)
    if what.also is not None:
        found[what.also[0]] = what.also[2]
    found[what.dim] = sum(run.length for run in what.runs)
    return tuple(found)


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
    hold(parameter, Shard(tuple(shape), dim, mine, group))
    return parameter


def sum_over(parameter: Tensor, group: Ranks) -> Tensor:
    """Say that each rank of a group has a summand of this parameter's gradient: copies used in several places.

    For an embedding that two stages share: ``fleet.sum_over(weight, oc.new_group([first, last]))`` on both.

    Raises:
        FleetError: ranks of the group have other parts of it.
    """
    now = held(parameter)
    if parts_among(now, group):
        raise FleetError(
            f"sum_over: a parameter {list(parameter.shape)} is this rank's part of {list(now.shape)}, of which ranks "
            f"{list(group.ranks)} have others: each rank's gradient is its part's already. Leave the mark out"
        )
    if all(group.ranks != known.ranks for known in now.sums):
        hold(parameter, replace(now, sums=(*now.sums, group)))
    return parameter


def parts_among(what: Shard, group: Ranks) -> bool:
    """Whether several ranks of a group hold other parts than each other."""
    return what.is_cut() and len({*what.group.ranks} & {*group.ranks}) > 1  # type: ignore[union-attr]


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

    def register_part(self, name: str, parameter: Tensor | None, what: Shard | None = None) -> None:
        """Add a parameter that is a part."""
        if parameter is not None:
            self.__dict__.setdefault("_held", {})[name] = what or Shard(tuple(parameter.shape))
        self.register_parameter(name, parameter)  # type: ignore[arg-type]

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """As torch's; what takes the place of a part is that part."""
        what = self.__dict__.get("_held", {}).get(name)
        where = f"{type(self).__name__}.{name}"
        if param is not None and what is not None:
            hold(param, fit(what, param, where))
        elif param is not None and self._is_cut() and (noted(param) is None or self._gone(param)):
            hold(param, where)
        super().register_parameter(name, param)

    def _gone(self, param: nn.Parameter) -> bool:
        """Whether a part that is registered by another name has no longer its own: something is computed of it."""
        names = [n for n, what in self.__dict__.get("_held", {}).items() if what is noted(param)]
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

    def settle(self) -> None:
        """This layer is given a part of the sequence, and has what its parameters' gradients lack summed in backward."""
        known = self.__dict__.setdefault("_held", {})
        for name, what in known.items():
            known[name] = replace(what, settled=True)
            if (p := self._parameters.get(name)) is not None:
                hold(p, known[name])

    def note_buffers(self) -> None:
        """A buffer of the shape of a part belongs to that part: a mask of its weight (``torch.nn.utils.prune``), its scales."""
        if not self._is_cut():
            return
        parts = [what for what in self.__dict__.get("_held", {}).values() if what.dim >= 0 and what.group is not None]
        like = {_own_shape(what): what for what in reversed(parts)}
        for x in self._buffers.values():
            if x is not None and noted(x) is None and tuple(x.shape) in like:
                note(x, like[tuple(x.shape)])

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        self.note_buffers()
        buffers = [(name, x) for name, x in self._buffers.items() if x is not None and noted(x) is not None]
        state_notes.note(destination).parts.update(
            {prefix + name: held(p) for name, p in [*self._parameters.items(), *buffers] if p is not None}
        )

    def __deepcopy__(self, memo: dict[int, object]) -> Parallel:
        made = self.__class__.__new__(self.__class__)
        memo[id(self)] = made
        made.__dict__.update(copy.deepcopy(self.__dict__, memo))
        for name, what in self.__dict__.get("_held", {}).items():
            if made._parameters.get(name) is not None:
                hold(made._parameters[name], what)  # type: ignore[arg-type]
        return made
