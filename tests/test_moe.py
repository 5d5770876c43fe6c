"""Mixtures of experts of the manual level: equal to one card, whatever lies where; what goes wrong is seen."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from amounts import share
from fleet_programs import begin, close
from moe_programs import Mixture, differences, missing, train
from torch import Tensor, nn

import onecard as oc
from onecard import fleet
from onecard.comm.issue.blocks import turned as turned_blocks
from onecard.comm.issue.ranks import of_ranks
from onecard.fleet.experts import batch as batches
from onecard.fleet.experts import layer as layers
from onecard.fleet.gradients import holders
from onecard.testing import run_ranks
from onecard.train import norms

mp = fleet.meta_parallel
TOPK = {
    "type": "topk",
    "top_k": 2,
    "balance_loss": 0.1,
    "z_loss": 0.01,
    "capacity": 0.9,
    "jitter": 0.1,
    "loss_weight": 0.5,
}
DEEPSEEK = {
    "type": "topk", "top_k": 2, "score": "sigmoid", "bias_rate": 0.05, "groups": 2, "top_groups": 1, "scale": 2.5,
    "capacity": 0.8, "drop_policy": "probability",
}  # fmt: skip
GATES: list[dict[str, Any]] = [{"type": "naive"}, {"type": "switch"}, {"type": "gshard"}, TOPK, DEEPSEEK]
EP2, EP4 = {"dp": 2, "ep": 2}, {"dp": 4, "ep": 4}
LAYOUTS = [EP2, EP4, {"dp": 4, "ep": 2}, {"dp": 2, "mp": 2, "ep": 2}]

CASES = [
    *[Mixture(degrees, gate, steps=5) for gate in GATES for degrees in LAYOUTS],
    *[Mixture({"mp": 2}, TOPK, kind, sequence=True) for kind in ("modules", "parallel", "stacked", "stacked parallel")],
    *[Mixture({"dp": 2, "mp": 2, "ep": 2}, {"type": "topk", "balance_loss": 0.1}, kind, sequence=True, shared=True)
      for kind in ("modules", "parallel", "stacked", "stacked parallel")],
    *[Mixture({"dp": 2, "mp": 2, "ep": 2}, TOPK, kind, padded=True) for kind in ("parallel", "stacked parallel")],
    *[Mixture(EP2, {"type": "gshard"}, shared=True, overlap=True, recompute=r, micro=2) for r in ("", "experts", "layer")],
    Mixture(EP2, DEEPSEEK, experts=6, micro=2, optimizer="momentum", padded=True),
    Mixture({"sep": 2, "ep": 2}, {"type": "topk", "balance_loss": 0.1}),
    Mixture({"dp": 3, "ep": 3}, {"type": "topk", "balance_loss": 0.1}, "stacked", experts=7, batch=6),
    *[Mixture(degrees, TOPK, kind, zero=zero) for zero in ("os", "os_g", "p_g_os") for kind in ("modules", "stacked")
      for degrees in (EP2, {"dp": 4, "ep": 2})],
    *[Mixture({"dp": 2, "mp": 2, "ep": 2}, TOPK, kind, zero="os_g") for kind in ("modules", "parallel", "stacked parallel")],
    *[Mixture(degrees, TOPK, kind, zero=zero, micro=2) for degrees, kind, zero in (
        (EP2, "modules", "os"), ({"dp": 4, "ep": 2}, "stacked", "os_g"), (EP4, "stacked", "p_g_os"))],
    Mixture({"dp": 2}, {"type": "topk", "top_k": 1, "jitter": 0.1}, experts=6, zero="os", batch=2, time=3, steps=8),
    Mixture({"dp": 2, "sharding": 2, "ep": 2}, TOPK, zero="sharding"),
    Mixture({"sharding": 4, "ep": 2}, TOPK, "stacked", zero="sharding"),
]  # fmt: skip


@cache
def _one_card(what: Mixture) -> dict[str, Any]:
    return run_ranks(train, 1, what)[0]


def one_card(what: Mixture) -> dict[str, Any]:
    alone = replace(what, degrees=_Frozen(), gate=_Frozen(what.gate), zero="", overlap=False)
    return _one_card(alone)


class _Frozen(dict):  # type: ignore[type-arg]
    def __hash__(self) -> int:  # type: ignore[override]
        return hash(tuple(sorted(self.items())))


def wrong(what: Mixture, program: Callable[..., Any] = train, *more: Any) -> list[str]:
    """How a layout differs from one card."""
    single, ranks = one_card(what), run_ranks(program, what.ranks, what, *more)
    return [d for each in ranks for d in differences(each, single, 1e-5)] + missing(ranks, single)


@pytest.mark.share(1)
@pytest.mark.parametrize("what", share(CASES, 3), ids=str)
def test_a_mixture_is_one_cards(what: Mixture) -> None:
    assert wrong(what) == []


# Planted faults: what is compared above would see them.


def _everybodys(ctx: Any, *grads: Tensor) -> Any:
    return grads[0] * ctx.given[0].size, None, None


def _whole_alone(shard: Any, grad: Tensor, lines: Any) -> Any:
    return iter([grad] if oc.get_rank() == 0 else [])


PLANTS: dict[str, tuple[Any, str, Any, Mixture]] = {
    "the auxiliary gradient is doubled along mp": (
        batches._WholeSum, "backward", staticmethod(_everybodys), Mixture({"mp": 2}, TOPK, sequence=True),
    ),
    "padding is counted": (
        batches.Batch, "of_valid", lambda self, x: x, Mixture(EP2, TOPK, padded=True),
    ),
    "padding counts as tokens": (
        batches.Batch, "count", lambda self, x: torch.tensor(x.shape[0]), Mixture(EP2, TOPK, padded=True),
    ),
    "experts are averaged over the wrong ranks": (
        holders, "averaged_over", holders.data_of, Mixture({"dp": 4, "ep": 2}, TOPK, "stacked"),
    ),
    "an expert's gradient is the sum of losses": (holders, "share", lambda p: 1, Mixture(EP2, TOPK)),
    "a rank balances its own tokens": (batches.Batch, "sum", lambda self, x: x, Mixture(EP2, TOPK)),
    "a rank has its own capacity": (
        batches.Batch, "table", lambda self, mine: mine[None].expand(2, -1), Mixture(EP2, TOPK),
    ),
    "norms miss the experts of other ranks": (
        norms, "counted", _whole_alone, Mixture(EP2, TOPK, optimizer="momentum"),
    ),
    "every rank draws its own noise": (
        batches.Batch, "uniform", lambda self, x, width: torch.rand(x.shape[0], width), Mixture(EP2, {"type": "switch"}),
    ),
}  # fmt: skip


def planted(what: Mixture, name: str) -> dict[str, Any]:
    place, attribute, fault, _ = PLANTS[name]
    right = place.__dict__[attribute]
    setattr(place, attribute, fault)
    try:
        return train(what)
    finally:
        setattr(place, attribute, right)


@pytest.mark.share(1)
@pytest.mark.parametrize("name", share(PLANTS, 2))
def test_a_planted_fault_is_seen(name: str) -> None:
    assert wrong(PLANTS[name][3], planted, name)


# A world of one against plain formulas


def plainly(x: Tensor, experts: Any, weights: Tensor, chosen: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for t in range(x.shape[0]):
        for weight, e in zip(weights[t], chosen[t].tolist(), strict=True):
            if e >= 0:
                out[t] = out[t] + weight * experts[e](x[t])
    return out


def test_a_layer_is_the_weighted_sum_of_its_experts() -> None:
    begin()
    torch.manual_seed(0)
    experts = [nn.Linear(4, 4) for _ in range(5)]
    layer = mp.MoELayer(4, experts, {"type": "topk", "top_k": 2, "balance_loss": 0.3, "z_loss": 0.2})
    x = torch.randn(7, 4)
    scores = x @ layer.gate.gate.weight.T
    p = scores.softmax(-1)
    weights, chosen = p.topk(2)
    close(layer(x), plainly(x, experts, weights / weights.sum(-1, keepdim=True), chosen))
    fraction = torch.zeros(5).scatter_add(0, chosen.flatten(), torch.ones(14)) / 14
    expected = 0.3 * 5 * (fraction * p.mean(0)).sum() + 0.2 * scores.logsumexp(-1).square().mean()
    close(layer.gate.get_loss(), expected)
    assert layer.gate.get_loss() is None
    naive = mp.MoELayer(4, experts, {"type": "naive", "top_k": 3})
    raw, chosen = naive.gate.gate(x).topk(3)
    close(naive(x), plainly(x, experts, raw, chosen))
    switch = mp.MoELayer(4, experts, {"type": "switch", "capacity": (0.3, 0.3)}).eval()
    p = switch.gate.gate(x).softmax(-1)
    weight, chosen = p.max(-1)
    room, kept = [3] * 5, []
    for e in chosen.tolist():
        room[e] -= 1
        kept.append(e if room[e] >= 0 else -1)
    close(switch(x), plainly(x, experts, weight[:, None], torch.tensor(kept)[:, None]))
    fraction = torch.stack([(torch.tensor(kept) == e).sum() for e in range(5)]) / sum(e >= 0 for e in kept)
    close(switch.gate.get_loss(), (fraction * p.sum(0) / sum(e >= 0 for e in kept)).sum() * 5)


def test_stacked_experts_are_modules() -> None:
    stack = mp.GroupedExperts(3, 4, 8)
    x, counts = torch.randn(6, 4, requires_grad=True), [2, 0, 4]
    parts = [F.silu(r @ stack.w_gate[e]) * (r @ stack.w_up[e]) @ stack.w_down[e] for e, r in enumerate(x.split(counts))]
    close(stack(x, counts), torch.cat(parts))
    grads = torch.autograd.grad(stack(x, counts).square().sum(), [x, *stack.parameters()])
    expected = torch.autograd.grad(torch.cat(parts).square().sum(), [x, *stack.parameters()])
    for mine, theirs in zip(grads, expected, strict=True):
        close(mine, theirs)


# Bad input, and what is hardly any


class Chosen(nn.Module):
    """A router that does as it is told."""

    def __init__(self, experts: Tensor) -> None:
        super().__init__()
        self.weight, self.experts = nn.Parameter(torch.ones(1)), experts

    def forward(self, x: Tensor) -> Any:
        chosen = self.experts[: x.shape[0]]
        return self.weight * torch.ones(chosen.shape), chosen


def told(experts: list[list[int]], tokens: int) -> list[Tensor]:
    hcg = begin(dp=2, ep=2)
    torch.manual_seed(0)
    gate = Chosen(torch.tensor(experts))
    layer = mp.MoELayer(4, [fleet.LayerDesc(nn.Linear, 4, 4) for _ in range(4)], gate)
    model = fleet.distributed_model(layer)
    x = torch.ones(tokens, 4)  # needs no gradient
    y = model(x)
    y.sum().backward()
    fleet.sync(model.parameters())
    assert hcg.get_expert_parallel_world_size() == 2 and hcg.get_moe_sharding_parallel_world_size() == 1
    return [y.detach(), gate.weight.grad]


@pytest.mark.share(1)
@pytest.mark.parametrize("experts", [[[0], [0], [0]], [[3], [3], [3]], [[-1], [-1], [-1]], [[0], [3], [-1]]], ids=str)
def test_some_experts_or_ranks_get_no_tokens(experts: list[list[int]]) -> None:
    for y, grad in run_ranks(told, 2, experts, 3):
        assert y.shape == (3, 4) and grad is not None
        assert bool(((y == 0).all(1) == (torch.tensor(experts)[:, 0] == -1)).all())


def test_a_rank_without_tokens() -> None:
    for y, _ in run_ranks(told, 2, [[0], [1]], 0):
        assert y.shape == (0, 4)


def bad_router() -> str:
    with pytest.raises(
        fleet.FleetError, match=r"not there, for 2 choices \(rank: choices, \{0: 1, 1: 1\}\): experts are"
    ):
        told([[0], [4]], 2)
    return "seen"


def test_a_router_that_names_an_expert_that_is_not_there_is_told_on_all_ranks() -> None:
    assert run_ranks(bad_router, 2) == ["seen", "seen"]


def mistakes() -> None:
    hcg = begin(dp=2, ep=2)
    with pytest.raises(fleet.FleetError, match="capacity is 0; an expert that takes 0 times the tokens takes none"):
        mp.TopKGate(4, 4, capacity=0)
    with pytest.raises(fleet.FleetError, match="topk is 5, of 4 experts"):
        mp.NaiveGate(4, 4, topk=5)
    with pytest.raises(fleet.FleetError, match="3 experts in 2 groups"):
        mp.TopKGate(4, 3, groups=2)
    with pytest.raises(fleet.FleetError, match="chooses among 8 experts, and there are 4"):
        mp.MoELayer(4, [nn.Linear(4, 4)] * 2, mp.NaiveGate(4, 8))
    with pytest.raises(fleet.FleetError, match="gate type 'hash'"):
        mp.MoELayer(4, [nn.Linear(4, 4)] * 2, {"type": "hash"})
    with pytest.raises(fleet.FleetError, match=r"1 experts for 2 ranks"):
        mp.GroupedExperts(1, 4, 4, moe_group=hcg.get_expert_parallel_group())
    with pytest.raises(fleet.FleetError, match=r"local_count has 2 numbers and global_count 3"):
        fleet.global_scatter(torch.ones(2, 2), torch.tensor([1, 1]), torch.tensor([1, 1, 1]))
    with pytest.raises(fleet.FleetError, match=r"ep_degree 3 does not fit the 2 ranks .* ep_degree of \[1, 2\]"):
        begin(dp=2, ep=3)


def test_mistakes_are_told() -> None:
    run_ranks(mistakes, 2)


def groups_that_do_not_fit() -> None:
    hcg = begin(mp=2)
    along, everyone = hcg.get_model_parallel_group(), of_ranks([0, 1])
    with pytest.raises(fleet.FleetError, match=r"ranks \[0, 1\] along mp have different experts already"):
        mp.GroupedExperts(4, 8, 16, moe_group=everyone, mp_group=along)
    with pytest.raises(fleet.FleetError, match=r"cut along ranks \[0, 1\] .* and the layer has no mp_group"):
        mp.MoELayer(8, mp.GroupedExperts(4, 8, 16, mp_group=along), {"type": "topk"})
    with pytest.raises(
        fleet.FleetError, match=r"moe_group has ranks \[0, 1\], and the experts are those of ranks \[\d\]"
    ):
        mp.MoELayer(8, mp.GroupedExperts(4, 8, 16), {"type": "topk"}, moe_group=everyone, mp_group=along)
    with pytest.raises(fleet.FleetError, match=r"ranks \[0, 1\] along mp have the same tokens"):
        mp.MoELayer(8, [nn.Linear(8, 8)] * 2, {"type": "topk"}, moe_group=everyone)


def test_groups_of_a_layer_and_its_experts_fit_or_are_refused() -> None:
    run_ranks(groups_that_do_not_fit, 2)


def joined(alone: bool) -> Tensor:
    """A stack of experts that is divided among ranks along mp too, each of which sends a part of the tokens."""
    along = everyone = None
    if not alone:
        along, everyone = begin(mp=2).get_model_parallel_group(), of_ranks([0, 1])
    torch.manual_seed(0)
    stack = mp.GroupedExperts(4, 8, 16, moe_group=everyone)
    layer = mp.MoELayer(8, stack, {"type": "topk", "top_k": 2}, moe_group=everyone, mp_group=along)
    for p in layer.gate.parameters():
        torch.nn.init.normal_(p, generator=torch.Generator().manual_seed(1))
    return layer(torch.linspace(-1, 1, 48).view(6, 8)).detach()


def test_a_stack_over_ranks_along_mp() -> None:
    wanted = joined(True)
    for found in run_ranks(joined, 2, False):
        close(found, wanted, "outputs")


def crowded() -> list[str]:
    begin(dp=2, ep=2)
    layers.LEAST, layers.LOUD = 0, 1.5
    layer = mp.MoELayer(4, [nn.Linear(4, 4) for _ in range(4)], Chosen(torch.zeros(9, 1, dtype=torch.int64)))
    with warnings.catch_warnings(record=True) as told_of:
        warnings.simplefilter("always")
        layer(torch.ones(9, 4))
    return [str(each.message) for each in told_of]


def test_all_tokens_for_one_expert_are_told_of_before_their_memory_is_taken() -> None:
    first, second = run_ranks(crowded, 2)
    assert "18 rows" in first[0] and "experts of rank 0, whose share is 9" in first[0] and second == []


# Paddle's calls, messages, statistics


def there_and_back() -> None:
    me = oc.get_rank()
    local = torch.tensor([[2, 1, 1, 2], [1, 0, 3, 1]][me])
    come = torch.tensor([[2, 1, 1, 0], [1, 2, 3, 1]][me])
    x = (torch.arange(int(local.sum())) + 10 * me).double()[:, None].requires_grad_()
    there = fleet.global_scatter(x, local, come)
    assert there[:, 0].tolist() == [[0, 1, 10, 2], [3, 11, 12, 13, 4, 5, 14]][me]
    back = fleet.global_gather(there * 2, local, come)
    close(back, 2 * x)
    (back * x.detach()).sum().backward()
    close(x.grad, 2 * x.detach())


@pytest.mark.parametrize("blocks", [[[2, 2, 2], [2, 2, 2]], [[0, 0], [0, 0]], [[1, 3], [2, 0]], [[4, 4]], [[3], [3]]])
def test_blocks_that_are_alike_change_their_order_as_others_do(blocks: list[list[int]]) -> None:
    names = [(i, j) for i, row in enumerate(blocks) for j, count in enumerate(row) for _ in range(count)]
    rows = torch.tensor(names, dtype=torch.float32).reshape(-1, 2).requires_grad_()
    turned = turned_blocks(rows, blocks)
    assert turned.tolist() == sorted(turned.tolist(), key=lambda name: (name[1], name[0])), (
        "by their second number first"
    )
    turned.sum().backward()
    assert bool((rows.grad == 1).all())


def test_rows_go_to_the_ranks_of_their_experts_and_back() -> None:
    run_ranks(there_and_back, 2)


def sent() -> list[tuple[str, int]]:
    begin(dp=2, ep=2)
    torch.manual_seed(0)
    chosen = torch.tensor([[0, 2], [1, 3]] * 8)
    layer = mp.MoELayer(4, [nn.Linear(4, 4) for _ in range(2)], Chosen(chosen))
    with oc.explain() as report:
        layer(torch.ones(16, 4, requires_grad=True)).sum().backward()
    return [(m.operator, m.step.bytes) for m in report.messages]


def test_only_tokens_travel() -> None:
    for messages in run_ranks(sent, 2):
        rows = [size for op, size in messages if op in ("tokens to experts", "tokens from experts")]
        assert rows == [16 * 2 * 4 * 4 // 2] * 4, "tokens x k x width x (n - 1) / n, there, back, and in backward"


def memory(degrees: dict[str, int]) -> list[int]:
    begin(**degrees)
    layer = mp.MoELayer(8, mp.GroupedExperts(8, 8, 16), {"type": "topk"})
    model = fleet.distributed_model(layer)
    optimizer = fleet.distributed_optimizer(torch.optim.AdamW(model.parameters()))
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
    experts = [*layer.experts.parameters()]
    states = [s for p in experts for s in optimizer.state[p].values() if s.dim()]
    return [sum(x.nbytes for x in each) for each in (experts, [p.grad for p in experts], states)]


@pytest.mark.proof
def test_experts_take_memory_by_ep() -> None:
    whole = run_ranks(memory, 1, {})[0]
    for n in (2, 4):
        for each in run_ranks(memory, n, {"dp": n, "ep": n}):
            assert each == [size // n for size in whole]


def shown() -> tuple[str, ...]:
    begin(dp=2, ep=2)
    gate = Chosen(torch.tensor([[0, -1], [0, 3], [1, -1]]))
    layer = mp.MoELayer(4, [nn.Linear(4, 4) for _ in range(2)], gate)
    layer(torch.ones(3, 4))
    table = fleet.balance(nn.Sequential(layer))
    return tuple(next(column.cells) for column in table.columns)


def test_the_balance_is_a_table() -> None:
    assert run_ranks(shown, 2) == [("0", "12", "33.3%", "2.00", "1", "4 2 0 2")] * 2


class Normed(nn.Sequential):
    """An expert that takes no empty batch."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 8), nn.BatchNorm1d(8))


def all_to_one_rank(how: str) -> list[Any]:
    """What a mixture gives whose tokens all go to the last expert; and whether its router gets gradients."""
    begin(dp=2, ep=2)
    width = 6 if how == "narrower" else 8
    torch.manual_seed(0)
    experts: Any = [Normed() if how == "normed" else nn.Linear(8, width) for _ in range(4)]
    torch.manual_seed(1)
    made = mp.GroupedExperts(4, 8, 16) if how == "stacked" else experts
    gate = {"type": "topk", "top_k": 1, "linear_bias": True, "normalize": False}
    moe = mp.MoELayer(8, made, gate, num_experts=None if how == "stacked" else 4)
    with torch.no_grad():
        moe.gate.gate.bias.copy_(torch.tensor([0.0, 0.0, 0.0, 100.0]))
    model = fleet.distributed_model(moe)
    x = torch.randn(4, 3, 8, generator=torch.Generator().manual_seed(2)).chunk(2)[oc.get_rank()]
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=how != "narrower"):
        y = model(x)
    y.float().square().mean().backward()
    grads = [p.grad is not None for p in moe.gate.parameters()]
    return [y.dtype, list(y.shape), bool(y.isfinite().all()), all(grads)]


@pytest.mark.share(3)
@pytest.mark.parametrize("how", ["listed", "stacked", "narrower", "normed"])
def test_all_tokens_go_to_one_rank(how: str) -> None:
    """Whose experts have no token knows of what dtype and width the others' results are."""
    one, other = run_ranks(all_to_one_rank, 2, how)
    assert one == other and one[1] == [2, 3, 6 if how == "narrower" else 8] and one[2:] == [True, True]


def all_on_one_rank() -> Tensor:
    """A mixture of which only the first rank has experts: outputs, beside those of one card."""
    begin(dp=2, ep=2)
    torch.manual_seed(0)
    experts = [nn.Linear(8, 8) for _ in range(2)]
    gate = {"type": "topk", "top_k": 1}
    torch.manual_seed(1)
    alone = mp.MoELayer(8, experts, gate, moe_group=of_ranks([oc.get_rank()]))
    torch.manual_seed(1)
    moe = mp.MoELayer(8, experts if oc.get_rank() == 0 else [], gate)
    x = torch.randn(4, 3, 8, generator=torch.Generator().manual_seed(2)).chunk(2)[oc.get_rank()]
    y = moe(x)
    y.square().mean().backward()
    return (y - alone(x)).abs().max()


def test_a_rank_without_an_expert() -> None:
    for apart in run_ranks(all_on_one_rank, 2):
        assert apart < 1e-6


def other_models_later() -> None:
    """Ranks have trained other numbers of experts under ZeRO; models that come after them are compared with their own."""
    begin(dp=2, ep=2)
    torch.manual_seed(0)
    experts = [nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)) for _ in range(3)]
    moe: Any = fleet.distributed_model(mp.MoELayer(8, experts, {"type": "topk", "top_k": 2}, num_experts=3))
    moe, optimizer, _ = fleet.group_sharded_parallel(moe, torch.optim.SGD(moe.parameters(), lr=0.1), "os_g")
    x = torch.randn(8, 8).chunk(2)[oc.get_rank()]
    for _ in range(2):
        moe(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    for _ in range(4):
        probe = fleet.distributed_model(nn.Linear(8, 8))
        steps = torch.optim.SGD(probe.parameters(), lr=0.1)
        for _ in range(2):
            probe(moe(x).detach()).square().mean().backward()
            steps.step()
            steps.zero_grad()


def test_models_after_uneven_experts() -> None:
    run_ranks(other_models_later, 2)
