"""The experts that a rank has: modules under the numbers that they have on one card, or stacked weights with grouped products."""

from __future__ import annotations

import copy
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from onecard.comm.base.state import faked
from onecard.comm.issue.ranks import Ranks, as_ranks, of_ranks
from onecard.comm.world import world
from onecard.errors import FleetError
from onecard.fleet.gradients.holders import along
from onecard.fleet.grid import topology
from onecard.fleet.grid.state_notes import note
from onecard.fleet.layers.initial import KaimingUniform
from onecard.fleet.layers.layer_desc import LayerDesc
from onecard.fleet.layers.parameters import Parallel, hold, part_sizes
from onecard.train.shard import Run, Shard, held

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"gelu": F.gelu, "relu": F.relu, "swiglu": F.silu}


def build(makers: Sequence[Any], mine: range) -> list[nn.Module]:
    """A rank's experts out of all: the others are made, too, and given up, so that all draw what one card draws."""
    made = []
    for i, make in enumerate(makers):
        expert = make.build_layer() if isinstance(make, LayerDesc) else make
        if i in mine:
            made.append(expert)
    return made


def group_of_experts(group: Any = None) -> Ranks:
    """The ranks that have the experts: those given, or those of ``ep_degree``, or this rank alone."""
    if group is not None:
        return as_ranks(group)
    return topology.get_hybrid_communicate_group().experts() if topology.begun() else of_ranks([world.get_rank()], "ep")


def _kind(rows: Tensor) -> Any:
    device = rows.device.type
    return rows.shape[1:], rows.dtype, torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


class ExpertList(nn.Module):
    """A rank's experts as modules. Their names are those of one card: expert 4 is "4" on whatever rank it lies.

    Args:
        experts: this rank's; ``owned``: how many each rank of the group has.
    """

    def __init__(self, experts: Sequence[nn.Module], owned: Sequence[int], group: Ranks) -> None:
        super().__init__()
        self.owned, self.group = list(owned), group
        self._given: dict[Any, tuple[Any, torch.dtype]] = {}  # by kinds of rows: shape and dtype of what experts give
        begin = sum(owned[: group.index])
        for i, expert in enumerate(experts):
            self.add_module(str(begin + i), expert)

    def __len__(self) -> int:
        return len(self._modules)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._modules.values())

    def __getitem__(self, place: int) -> Any:
        return [*self._modules.values()][place]

    def forward(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """Rows in the order of experts, ``counts`` of each. An expert without rows does not run, as on one card."""
        parts = zip(self, rows.split(list(counts)), strict=True)
        made = [expert(part) for expert, part in parts if part.shape[0]]
        if not made:
            return self._of_nothing(rows)
        self._given[_kind(rows)] = made[0].shape[1:], made[0].dtype
        return torch.cat(made)

    def _of_nothing(self, rows: Tensor) -> Tensor:
        """No rows, of the width and the dtype that experts give: other ranks exchange theirs with this one.

        No expert takes part in backward for it, and none notes statistics or has its hooks called: what one gives is known of a
        call with rows, or of a copy.
        """
        if not len(self):  # a rank with no expert at all
            return rows
        shape, dtype = self._given.get(_kind(rows)) or self._try(rows)
        return rows.new_zeros((0, *shape), dtype=dtype) + (rows.sum() * 0).to(dtype)

    def _try(self, rows: Tensor) -> tuple[Any, torch.dtype]:
        """Shape and dtype of what an expert gives, by a copy of it that shares its parameters."""
        expert = self[0]
        memo: dict[int, Any] = {id(p): p for p in expert.parameters()}
        hooks = [held for m in expert.modules() for name, held in vars(m).items() if name.endswith("_hooks")]
        memo |= {id(held): OrderedDict() for held in hooks if isinstance(held, dict)}
        try:
            with torch.no_grad():
                like = copy.deepcopy(expert, memo)(rows)
        except (RuntimeError, ValueError, TypeError):
            return rows.shape[1:], rows.dtype  # it takes no empty tensor, or has no copy: as wide as its rows
        return like.shape[1:], like.dtype

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.group.size > 1:
            note(destination).stages.append((prefix, [[i] for i in range(sum(self.owned))]))


class GroupedExperts(Parallel):
    """Experts as stacked weights (experts, in, out): all of a rank's in one grouped product where the device has it.

    Args:
        num_experts: on all ranks together; the last rank has what does not divide.
        d_model, d_hidden: width of a token, and between the two products.
        activation: "swiglu" (a third weight), "gelu" or "relu".
        moe_group: the ranks that have the experts; mp_group: those along which each expert's ``d_hidden`` is cut.

    Raises:
        FleetError: fewer experts than ranks, or an activation that there is not.

    Example:
        >>> GroupedExperts(4, 8, 16)(torch.ones(5, 8), [2, 0, 3, 0]).shape
        torch.Size([5, 8])
    """

    w_gate: nn.Parameter
    w_up: nn.Parameter
    w_down: nn.Parameter

    def __init__(
        self,
        num_experts: int,
        d_model: int,
        d_hidden: int,
        activation: str = "swiglu",
        moe_group: Ranks | None = None,
        mp_group: Ranks | None = None,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        experts = group_of_experts(moe_group)
        if activation not in _ACTIVATIONS:
            raise FleetError(f"GroupedExperts: activation is {activation!r}, of {', '.join(_ACTIVATIONS)}")
        if num_experts < experts.size:
            raise FleetError(f"GroupedExperts: {num_experts} experts for {experts.size} ranks: each has one at least")
        if mp_group is not None and mp_group.size > 1 and {*mp_group.ranks} & {*experts.ranks} != {world.get_rank()}:
            raise FleetError(
                f"GroupedExperts: ranks {list(mp_group.ranks)} along mp have different experts already, by moe_group's ranks "
                f"{list(experts.ranks)}: cut along both, no rank has all of one. Leave mp_group out here "
                "(MoELayer(mp_group=) sends each rank's part of the tokens), or take moe_group without them"
            )
        self.experts_group, self.mp_group = experts, mp_group
        self.group = joint(experts, mp_group)
        self.owned, self.act = part_sizes(num_experts, experts.size), activation
        names = ["up", "down"] if activation != "swiglu" else ["gate", "up", "down"]
        for name in names:
            shape = (num_experts, d_hidden, d_model) if name == "down" else (num_experts, d_model, d_hidden)
            what = self._part(shape, 1 if name == "down" else 2)
            self.register_part(f"w_{name}", _drawn(what, device, dtype), what)

    def _part(self, shape: tuple[int, ...], dim: int) -> Shard:
        place, mp = self.experts_group.index, self.mp_group
        run = Run(sum(self.owned[:place]), self.owned[place])
        also = None
        if mp is not None and mp.size > 1:
            sizes = part_sizes(shape[dim], mp.size)
            also = (dim, sum(sizes[: mp.index]), sizes[mp.index])
        group = self.group if self.group.size > 1 else None
        return Shard(shape, 0, (run,), group, experts=self.experts_group, also=also)

    def forward(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """Rows in the order of experts -> theirs; along mp this rank's summand of them."""
        up = grouped(rows, self.w_up, counts)
        act = _ACTIVATIONS[self.act]
        up = act(grouped(rows, self.w_gate, counts)) * up if self.act == "swiglu" else act(up)
        return grouped(up, self.w_down, counts)

    def extra_repr(self) -> str:
        """Sizes of this rank's part."""
        return f"{list(self.w_up.shape)}, {self.act}, experts {self.owned}"


def joint(experts: Ranks, mp: Ranks | None) -> Ranks:
    """The ranks that hold parts of one stack: along both groups."""
    if mp is None or mp.size == 1 or {*mp.ranks} <= {*experts.ranks}:
        return experts
    if experts.size == 1:
        return mp
    return along([experts, mp])


def _drawn(what: Shard, device: Any, dtype: Any) -> nn.Parameter:
    """Each expert as an ``nn.Linear`` is, one after the other, as on one card; without memory for the whole stack."""
    run = what.runs[0]
    shape = [run.length, *what.shape[1:]]
    if what.also is not None:
        shape[what.also[0]] = what.also[2]
    made = torch.empty(shape, device=device, dtype=dtype)
    if made.is_meta or faked.here:
        return nn.Parameter(made)
    law = KaimingUniform(math.sqrt(5)).law(torch.Size(what.shape[:0:-1]))  # (out, in), as torch has it
    with torch.no_grad():
        for i in range(what.shape[0]):
            whole = torch.empty(what.shape[1:], device=device, dtype=dtype)
            getattr(whole, law[0])(*law[1:])
            if run.start <= i < run.start + run.length:
                part = whole if what.also is None else whole.narrow(what.also[0] - 1, *what.also[1:])
                made[i - run.start].copy_(part)
    return nn.Parameter(made)


def grouped(rows: Tensor, weights: Tensor, counts: Sequence[int]) -> Tensor:
    """Each expert's rows by its matrix, (rows, in) x (experts, in, out): one kernel, or a product for each expert.

    Example:
        >>> grouped(torch.ones(3, 2), torch.ones(2, 2, 5), [1, 2]).shape
        torch.Size([3, 5])
    """
    if _kernel(rows, weights):
        if not rows.numel():  # the kernel's dtype, whatever autocast would make of a product
            with torch.autocast(rows.device.type, enabled=False):
                return rows @ weights[0]
        ends = torch.tensor([*accumulate(counts)], dtype=torch.int32, device=rows.device)
        return F.grouped_mm(rows, weights, offs=ends)
    return torch.cat([part @ weight for part, weight in zip(rows.split(list(counts)), weights, strict=True)])


def _kernel(rows: Tensor, weights: Tensor) -> bool:
    """Whether the device's grouped product takes them: rows of multiples of 16 bytes, and in bfloat16 on a GPU."""
    if rows.dtype != weights.dtype or not hasattr(F, "grouped_mm"):
        return False
    if rows.is_cuda:
        good = rows.dtype is torch.bfloat16 and torch.cuda.get_device_capability(rows.device) >= (8, 0)
    else:
        good = rows.device.type == "cpu" and rows.dtype in (torch.float32, torch.bfloat16)
    return good and all(n * rows.element_size() % 16 == 0 for n in (rows.shape[1], weights.shape[2]))


def mark_experts(module: nn.Module, group: Ranks, sums: Ranks | None) -> None:
    """Note that a module's parameters and buffers are experts' of this rank; gradients are summed over ``sums``, too."""
    for each in module.modules():
        for name, p in each._parameters.items():
            if p is not None:
                what = _of_expert(p, group, sums)
                each.__dict__["_held"] = {**each.__dict__.get("_held", {}), name: what}
                hold(p, what)
        for x in each._buffers.values():
            if x is not None:
                hold(x, _of_expert(x, group, None))


def _of_expert(x: Tensor, group: Ranks, sums: Ranks | None) -> Shard:
    what = replace(held(x), experts=group)
    if sums is None or sums.size == 1 or what.is_cut_among(sums) or any(sums.ranks == s.ranks for s in what.sums):
        return what
    return replace(what, sums=(*what.sums, sums))
