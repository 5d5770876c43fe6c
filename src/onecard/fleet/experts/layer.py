"""MoELayer: tokens to the experts that a router chooses for them, wherever those lie, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from onecard._torch import names as _torch
from onecard.comm.base.state import arrives
from onecard.comm.base.warned import warn
from onecard.comm.issue import plain, trace
from onecard.comm.issue.ranks import Ranks, as_ranks
from onecard.comm.world import world
from onecard.errors import FleetError
from onecard.fleet.experts import exchange
from onecard.fleet.experts.batch import Batch
from onecard.fleet.experts.choices import Choices, to_rows, to_tokens
from onecard.fleet.experts.exchange import Departure, RowCounts
from onecard.fleet.experts.gates import BaseGate, GShardGate, NaiveGate, SwitchGate
from onecard.fleet.experts.networks import ExpertList, GroupedExperts, build, group_of_experts, mark_experts
from onecard.fleet.experts.statistics import Counts
from onecard.fleet.experts.top_k import TopKGate
from onecard.fleet.grid import topology
from onecard.fleet.layers import mappings, sequence
from onecard.fleet.layers.layer_desc import LayerDesc
from onecard.fleet.layers.parameters import part_sizes
from onecard.fleet.layers.recomputing import recompute_hybrid
from onecard.fleet.layers.sequence import mark_as_sequence_parallel_parameter
from onecard.train.balance import Balance
from onecard.train.shard import held

GATES: dict[str, Any] = {"naive": NaiveGate, "gshard": GShardGate, "switch": SwitchGate, "topk": TopKGate}
LOUD, LEAST = 4.0, 1 << 26
"""A rank that gets so many times its share of rows, of so many bytes at least, says so before it has memory for them."""


class MoELayer(nn.Module):
    """A mixture of experts: each token goes to the experts that a router chooses, and gets the weighted sum of what they return.

    What is counted (balance, capacity, losses) is counted over the tokens of all ranks that see others, so that losses,
    gradients and what is dropped are one card's.

    Args:
        d_model: width of a token.
        experts: this rank's modules, as in Paddle; or all of them: with ``num_experts``, or as ``LayerDesc``s, of which each
            rank keeps its part with the first values of one card; or ``GroupedExperts``.
        gate: {"type": "gshard" | "switch" | "naive" | "topk", "top_k": k, ...}, the rest as the router's class takes it, and
            "loss_weight"; or a router. "gshard" if left out.
        moe_group: the ranks that have the experts, among those that see other data; those of ``ep_degree`` if left out.
        mp_group: ranks that have the same tokens. Experts made of ``ColumnParallelLinear`` and its kin, and GroupedExperts with
            ``mp_group``, are cut along it; others get a part of the tokens on each.
        recompute_interval: not 0: experts keep their rows alone, and compute again in backward.
        num_experts: on all ranks together, where ``experts`` lists all of them.
        shared_experts: a module that every token goes to, added to the rest.
        sequence_parallel: each rank of ``mp_group`` has other tokens, parts of one sequence.
        overlap: rows travel while the shared experts compute, in backward, too.

    Shapes: (..., d_model) -> (..., d_model). ``forward(x, valid)``: (...) bool, False for padding, which goes nowhere.

    Raises:
        FleetError: a router of another number of experts, groups that do not fit the grid.

    Source: ``paddle.incubate.distributed.models.moe.MoELayer``; Lepikhin et al., GShard (2020).

    Example:
        >>> layer = MoELayer(4, [nn.Linear(4, 4) for _ in range(3)], {"type": "topk", "top_k": 2, "balance_loss": 0.01})
        >>> layer(torch.ones(2, 5, 4)).shape, layer.gate.get_loss().shape
        (torch.Size([2, 5, 4]), torch.Size([]))
    """

    def __init__(
        self,
        d_model: int,
        experts: Any,
        gate: Any = None,
        moe_group: Any = None,
        mp_group: Any = None,
        recompute_interval: int = 0,
        recompute_ctx: dict[str, Any] | None = None,
        *,
        num_experts: int | None = None,
        shared_experts: nn.Module | None = None,
        sequence_parallel: bool = False,
        overlap: bool = False,
    ) -> None:
        super().__init__()
        self.d_model, self.recompute_interval, self.recompute_ctx = d_model, recompute_interval, recompute_ctx
        self.group = group_of_experts(moe_group)
        self.mp_group = None if mp_group is None else as_ranks(mp_group)
        if not self.group.is_member():
            raise FleetError(f"MoELayer: this rank is not in {self.group!r}: make the layer on its members only")
        if sequence_parallel and self.mp_group is None:
            raise FleetError("MoELayer(sequence_parallel=True): mp_group says which ranks have parts of the sequence")
        self.sequence_parallel, self.overlap = sequence_parallel, overlap
        self.experts = _experts(experts, num_experts, self.group)
        self._check_groups()
        self.owned: list[int] = self.experts.owned
        self.gate = _gate(gate, d_model, sum(self.owned))
        self.shared_experts = shared_experts
        self.along_mp = self._along_mp()
        self.mark_parts()
        self.counts = Counts(sum(self.owned))

    def _check_groups(self) -> None:
        """Whether the layer sends tokens to the ranks that have the experts, and puts together what these cut."""
        stack = self.experts
        theirs = stack.experts_group if isinstance(stack, GroupedExperts) else stack.group
        if theirs.ranks != self.group.ranks:
            raise FleetError(
                f"MoELayer: moe_group has ranks {list(self.group.ranks)}, and the experts are those of ranks "
                f"{list(theirs.ranks)}: give both the same group, MoELayer(..., {type(stack).__name__}(..., moe_group=group), "
                "moe_group=group)"
            )
        cut = stack.mp_group if isinstance(stack, GroupedExperts) else None
        if cut is not None and cut.size > 1 and (self.mp_group is None or cut.ranks != self.mp_group.ranks):
            mine = "no mp_group" if self.mp_group is None else f"mp_group of ranks {list(self.mp_group.ranks)}"
            raise FleetError(
                f"MoELayer: each expert is cut along ranks {list(cut.ranks)} (GroupedExperts(mp_group=)), whose results are "
                f"summands, and the layer has {mine}: give it the same one"
            )
        along = topology.get_hybrid_communicate_group().group("mp").ranks if topology.begun() else ()
        if self.mp_group is None and len({*along} & {*self.group.ranks}) > 1:
            raise FleetError(
                f"MoELayer: ranks {list(along)} along mp have the same tokens, and moe_group's ranks {list(self.group.ranks)} "
                "have several of them, which would all send theirs: "
                "MoELayer(..., mp_group=hcg.get_model_parallel_group()), by which each sends a part"
            )

    def _mp(self) -> bool:
        return self.mp_group is not None and self.mp_group.size > 1

    def _along_mp(self) -> str:
        """What ranks along mp do with tokens: "own", each sends its own; "sliced", each a part of what all have; "copied", each
        has all of them and a part of each expert; "gathered", the same, where each had a part of the sequence; "alike" and
        "joined", the same of the two, where the experts' layers themselves sum over mp."""
        if not self._mp():
            return "own"
        inside = not isinstance(self.experts, GroupedExperts)
        if inside:
            cut = any(held(p).is_cut_among(self.mp_group) for p in self.experts.parameters())  # type: ignore[arg-type]
        else:  # whose group of experts may have the ranks along mp, too
            cut = self.experts.mp_group is not None
        if not cut:
            return "own" if self.sequence_parallel else "sliced"
        if self.sequence_parallel:
            return "joined" if inside else "gathered"
        return "alike" if inside else "copied"

    def mark_parts(self) -> None:
        """Note what parameters and buffers of experts are, those that have come since included (adapters, masks)."""
        if topology.begun():
            topology.get_hybrid_communicate_group().same_experts(self.group)  # refuses groups that do not fit
        has_all = self._mp() and {*self.mp_group.ranks} <= {*self.group.ranks}  # type: ignore[union-attr]
        apart = self._mp() and self.along_mp in ("own", "sliced") and not has_all
        mark_experts(self.experts, self.group, self.mp_group if apart else None)
        if self._mp() and self.sequence_parallel:
            for p in self.gate.parameters():
                mark_as_sequence_parallel_parameter(p, self.mp_group)

    # -- forward ---------------------------------------------------------------------------------------------------------

    def forward(self, x: Tensor, valid: Tensor | None = None) -> Tensor:
        """(..., d_model) -> the same."""
        if x.shape[-1] != self.d_model or (valid is not None and valid.shape != x.shape[:-1]):
            shape = None if valid is None else list(valid.shape)
            raise FleetError(
                f"MoELayer({self.d_model}, ...): x is {list(x.shape)}, valid {shape}; want (..., {self.d_model})"
            )
        tokens = x.reshape(-1, self.d_model)
        mask = None if valid is None else valid.reshape(-1)
        if isinstance(self.gate, BaseGate):
            self.gate.batch = self._batch(mask)
        weights, indices = self.gate(tokens)
        if not isinstance(self.gate, BaseGate) and mask is not None:
            indices = indices.masked_fill(~mask[:, None], -1)
        self._count(None, (tokens.shape[0] if mask is None else mask.sum()) * indices.shape[1])
        routed, shared = self._through(x, tokens, weights.to(x.dtype), indices)
        routed = routed.view(*x.shape[:-1], routed.shape[-1])
        return routed if shared is None else routed + shared

    def _batch(self, valid: Tensor | None) -> Batch:
        """Who has other tokens."""
        if not topology.begun():
            return Batch(self.group, self.group.size, valid)
        hcg = topology.get_hybrid_communicate_group()
        data = hcg.data()
        group = hcg.group("dp", "sharding", "sep", "mp") if self.sequence_parallel and self._mp() else data
        return Batch(group, data.size, valid)

    def _through(self, x: Tensor, tokens: Tensor, weights: Tensor, indices: Tensor) -> tuple[Tensor, Tensor | None]:
        given = tokens.shape[0]
        tokens, weights, indices = self._enter(tokens, weights, indices)
        flat = indices.reshape(-1)
        sizes = self._sizes(flat)
        order = flat.argsort(stable=True)[flat.numel() - sum(sizes.to_ranks()) :]  # those that go nowhere come first
        choices = Choices(order, tokens.shape[0], indices.shape[1])
        rows = to_rows(tokens, choices)
        shared: Tensor | None = None
        if self.overlap and self.shared_experts is not None:
            way = Departure(rows, sizes)
            shared = self.shared_experts(x)
            arrived = way.arrive()
        else:
            arrived = exchange.to_experts(rows, sizes)
            shared = None if self.shared_experts is None else self.shared_experts(x)
        back = exchange.from_experts(self._run(arrived, sizes.of_experts()), sizes)
        return self._leave(to_tokens(back, weights, choices), given), shared

    def _run(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        if not self.recompute_interval or not torch.is_grad_enabled():
            return self.experts(rows, counts)
        return recompute_hybrid(self.recompute_ctx, self.experts, rows, counts)

    def _sizes(self, flat: Tensor) -> RowCounts:
        experts = sum(self.owned)
        if flat.is_meta or trace.faking() or not arrives():
            return exchange.balanced_sizes(flat.numel(), self.owned, self.group)
        place = torch.where((flat < -1) | (flat >= experts), experts, flat) + 1
        bins = torch.zeros(experts + 2, dtype=torch.int64, device=flat.device)
        counts = bins.scatter_add_(0, place, torch.ones_like(place))[1:]
        sizes = exchange.sizes_of(counts, self.owned, self.group)
        self._count(counts[:-1], 0)
        self._tell(sizes, flat)
        return sizes

    def _tell(self, sizes: RowCounts, flat: Tensor) -> None:
        """Say before it is taken that this rank needs much more memory than its share."""
        rows, share = (
            sum(sizes.from_ranks()),
            flat.numel() * self.group.size * self.owned[self.group.index] / sum(self.owned),
        )
        size = rows * self.d_model * next(self.gate.parameters()).element_size()
        if rows > LOUD * share and size > LEAST:
            warn(
                f"MoELayer: {rows} rows, {size / 2**20:.0f} MiB for each tensor of {self.d_model} numbers a row, come to the "
                f"experts of rank {world.get_rank()}, whose share is {share:.0f}: the router is out of balance. A capacity "
                '(gate={"type": "topk", "capacity": 1.25}) bounds them; a balance loss evens them out',
            )

    def _enter(self, tokens: Tensor, weights: Tensor, indices: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What this rank sends to experts."""
        group, how = self.mp_group, self.along_mp
        if how in ("own", "alike") or group is None:
            return tokens, weights, indices
        if how in ("gathered", "joined"):
            join = sequence.all_gather if how == "gathered" else sequence.gather
            indices = plain.all_gather(indices, group, 0, call="choices of tokens")
            return join(tokens, 0, group), join(weights, 0, group), indices
        if how == "copied":
            return mappings.copy_to(tokens, group), mappings.copy_to(weights, group), indices
        sizes = part_sizes(tokens.shape[0], group.size)
        begin = sum(sizes[: group.index])
        parts = [mappings.scatter_to(each, group, 0, sizes) for each in (tokens, weights)]
        return parts[0], parts[1], indices[begin : begin + sizes[group.index]]

    def _leave(self, out: Tensor, tokens: int) -> Tensor:
        """The results of this rank's tokens. ``tokens``: how many it was given."""
        group, how = self.mp_group, self.along_mp
        if how in ("own", "alike") or group is None:
            return out
        if how in ("gathered", "joined"):
            return (sequence.reduce_scatter if how == "gathered" else sequence.scatter)(out, 0, group)
        if how == "copied":
            return mappings.reduce_from(out, group)
        return mappings.gather_from(out, group, 0, part_sizes(tokens, group.size))

    def _count(self, reached: Tensor | None, choices: Any) -> None:
        """For ``statistics``, each token on one rank along mp; not what backward computes again."""
        first = self.mp_group is None or self.mp_group.index == 0
        if not _torch.in_backward():
            self.counts.add(
                reached if first or self.along_mp not in ("gathered", "joined") else None,
                choices if first or self.along_mp != "sliced" else 0,
            )

    def statistics(self) -> Balance:
        """Tokens for each expert and the share that was dropped, over the whole batch, since it was asked before.

        Every rank that has tokens calls it.
        """
        return self.counts.take([self._batch(None).group, self.mp_group if self.along_mp == "sliced" else None])


def _experts(given: Any, total: int | None, group: Ranks) -> Any:
    if isinstance(given, GroupedExperts | ExpertList):
        return given
    listed = list(given)
    if not listed and group.size == 1:
        raise FleetError("MoELayer: experts is empty")
    if total is not None or any(isinstance(each, LayerDesc) for each in listed):
        if total is not None and total != len(listed):
            raise FleetError(f"MoELayer: num_experts is {total}, and experts lists {len(listed)}: list all of them")
        if len(listed) < group.size:
            raise FleetError(f"MoELayer: {len(listed)} experts for {group.size} ranks: each has one at least")
        owned = part_sizes(len(listed), group.size)
        begin = sum(owned[: group.index])
        return ExpertList(build(listed, range(begin, begin + owned[group.index])), owned, group)
    owned = [len(listed)] * group.size
    if group.size > 1 and arrives():
        mine = torch.tensor([len(listed)], device="cpu")
        owned = plain.all_gather(mine, group, 0, call="MoELayer").tolist()
    return ExpertList(listed, owned, group)


def _gate(given: Any, d_model: int, experts: int) -> Any:
    if isinstance(given, nn.Module):
        if getattr(given, "tot_expert", experts) != experts:
            raise FleetError(f"MoELayer: the router chooses among {given.tot_expert} experts, and there are {experts}")
        return given
    options = {"type": "gshard", **({"type": given} if isinstance(given, str) else given or {})}
    kind, weight = options.pop("type") or "naive", options.pop("loss_weight", 1.0)
    if kind not in GATES:
        raise FleetError(f"MoELayer: gate type {kind!r}; there are {', '.join(map(repr, GATES))}, or give a router")
    top_k = options.pop("top_k", 1 if kind == "switch" else 2)
    try:
        made = GATES[kind](d_model, experts, 1, top_k, **options)
    except TypeError as fault:
        raise FleetError(f"MoELayer: gate {given!r}: {fault}") from None
    made.loss_weight = weight
    return made
