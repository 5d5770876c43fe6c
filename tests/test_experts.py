"""Expert parallelism by marks: programs for one card whose experts are cut along an axis, beside the same on one card."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from experts_programs import LAYERS
from torch import Tensor, nn

import onecard as oc
from onecard.rules.table import grouped
from onecard.testing import run_ranks

EXPERTS, TOP, WIDTH, INNER, TOKENS = 8, 2, 16, 12, 24
R, S = oc.Replicate(), oc.Shard
Mesh = tuple[tuple[int, ...], list[str]]

# The mesh; how tokens lie; how the stacks (experts, 2 inner, width) and (experts, width, inner) lie.
LAYOUTS: dict[str, tuple[tuple[int, ...], list[str], list[Any], list[Any], list[Any]]] = {
    "ep=2": ((2,), ["ep"], [S(0)], [S(0)], [S(0)]),
    "ep=2, tokens whole": ((2,), ["ep"], [R], [S(0)], [S(0)]),
    "dp=2": ((2,), ["dp"], [S(0)], [R], [R]),
    "ep=4": ((4,), ["ep"], [S(0)], [S(0)], [S(0)]),
    "ep in dp": ((2, 2), ["dp", "ep"], [S(0), S(0)], [R, S(0)], [R, S(0)]),
    "ep beside dp": ((2, 2), ["dp", "ep"], [S(0), R], [R, S(0)], [R, S(0)]),
    "ep beside tp": ((2, 2), ["ep", "tp"], [S(0), R], [S(0), S(1)], [S(0), S(2)]),
}
TWO = [name for name, layout in LAYOUTS.items() if math.prod(layout[0]) == 2]
FOUR = [name for name in LAYOUTS if name not in TWO]


def values(seed: int, tokens: int = TOKENS, experts: int = EXPERTS) -> list[Tensor]:
    source = torch.Generator().manual_seed(seed)
    shapes = (tokens, WIDTH), (experts, WIDTH), (experts, 2 * INNER, WIDTH), (experts, WIDTH, INNER)
    return [torch.randn(shape, generator=source) * 0.4 for shape in shapes]


def marked(name: str, given: list[Tensor]) -> list[Any]:
    shape, axes, tokens, up, down = LAYOUTS[name]
    mesh = oc.ProcessMesh(torch.arange(math.prod(shape)).view(shape), axes)
    router = [R] * len(shape)
    layouts = (tokens, router, up, down)
    return [oc.shard_tensor(x, mesh, p).requires_grad_() for x, p in zip(given, layouts, strict=True)]


def errors(layer: Any, name: str, given: list[Tensor], top: int = TOP) -> list[float]:
    """The largest relative errors of the result and of each gradient."""
    plain = [x.clone().requires_grad_() for x in given]
    wanted = layer(*plain, top)
    wanted.square().sum().backward()
    mine = marked(name, given)
    made = layer(*mine, top)
    made.square().sum().backward()
    pairs = [(made, wanted), *((a.grad, b.grad) for a, b in zip(mine, plain, strict=True))]
    return [
        float((oc.unshard(a.detach()) - b.detach()).abs().max() / (b.detach().abs().max() + 1e-6)) for a, b in pairs
    ]


def all_layers(names: list[str]) -> dict[str, list[float]]:
    # How often each number comes, and where, no rule can divide: integers, one for each token and expert.
    warnings.simplefilter("ignore", oc.GatheredOperatorWarning)
    return {f"{layer}, {name}": errors(LAYERS[layer], name, values(1)) for layer in LAYERS for name in names}


@pytest.mark.proof
@pytest.mark.share(1)
@pytest.mark.parametrize("names", [TWO, FOUR], ids=["2 ranks", "4 ranks"])
def test_programs_of_all_styles_are_those_of_one_card(names):
    for found in run_ranks(all_layers, math.prod(LAYOUTS[names[0]][0]), names):
        assert {case: e for case, e in found.items() if not max(e) <= 1e-5} == {}


# ---- Bytes


def sent(layer: str, name: str, tokens: int) -> tuple[list[int], list[int]]:
    """Bytes of rows sent forward and backward by this rank with a router that loads all ranks alike; and all other bytes."""
    warnings.simplefilter("ignore", oc.GatheredOperatorWarning)
    given = values(2, tokens)
    x, router = given[0], given[1]
    x[:, :EXPERTS] = torch.eye(EXPERTS).repeat(tokens // EXPERTS, 1) * 9
    x[:, :EXPERTS] += torch.eye(EXPERTS).roll(EXPERTS // 2, 0).repeat(tokens // EXPERTS, 1) * 8
    router.zero_()[:, :EXPERTS] = torch.eye(EXPERTS)
    mine = [nn.Parameter(x.detach()) for x in marked(name, given)]
    with oc.explain() as report:
        made = LAYERS[layer](*mine, TOP)
        report.next_step()
        made.square().sum().backward()
    rows = [sum(m.step.bytes for m in step if m.shape[-1:] == (WIDTH,)) for step in report.steps]
    return rows, [sum(m.step.bytes for m in step) - n for step, n in zip(report.steps, rows, strict=True)]


def all_sent(names: list[str]) -> dict[tuple[str, str], tuple[list[int], list[int]]]:
    cells = [(layer, name) for layer in ("grouped", "grouped_added", "loop") for name in names]
    return {cell: sent(*cell, 64) for cell in cells}


@pytest.mark.share(1)
@pytest.mark.parametrize("names", [["ep=2"], ["ep=4", "ep in dp"]], ids=["2 ranks", "4 ranks"])
def test_rows_are_sent_once_to_their_experts_and_once_back(names):
    ranks = math.prod(LAYOUTS[names[0]][0])
    numbers = TOP * (64 // ranks) * (8 + 8) * (ranks - 1)  # which tokens and experts, and their weights
    for found in run_ranks(all_sent, ranks, names):
        for (layer, name), (rows, rest) in found.items():
            line = LAYOUTS[name][0][-1]
            bound = 2 * (64 // ranks) * TOP * WIDTH * 4 * (line - 1) // line
            assert rows == [bound, bound], (layer, name)
            assert max(rest) <= 2 * numbers, (layer, name)


# ---- Uneven and empty


def one_sided(name: str, experts: int, tokens: int, favourites: list[int]) -> list[float]:
    """All tokens go to a few experts."""
    given = values(3, tokens, experts)
    given[0][:, 0] = 5.0
    given[1][:, 0] = torch.tensor([4.0 * (e in favourites) for e in range(experts)])
    return errors(LAYERS["grouped"], name, given)


UNEVEN = [
    (8, 24, [0, 1]), (8, 24, [7, 6]), (5, 24, [4, 0]), (3, 24, [1, 2]), (2, 24, [0, 1]), (8, 5, [0, 7]), (8, 1, [3, 4]),
]  # fmt: skip


def all_uneven(names: list[str]) -> dict[str, list[float]]:
    return {f"{name}, {case}": one_sided(name, *case) for name in names for case in UNEVEN}


@pytest.mark.proof
@pytest.mark.share(1)
@pytest.mark.parametrize("names", [TWO, FOUR], ids=["2 ranks", "4 ranks"])
def test_few_tokens_few_experts_and_all_tokens_to_one(names):
    for found in run_ranks(all_uneven, math.prod(LAYOUTS[names[0]][0]), names):
        assert {case: e for case, e in found.items() if not max(e) <= 1e-5} == {}


def losses_of_chosen_rows() -> list[str]:
    """What divides by the number of all rows, forward and backward: means and losses of rows that were chosen."""
    mesh, wrong = oc.ProcessMesh(range(oc.get_world_size()), ["dp"]), []
    labels = torch.arange(7) % 4
    losses = {
        "mean": lambda x, y: (x - y).mean(),
        "mean of a dim": lambda x, y: (x * y).mean(0).square().sum(),
        "mse": torch.nn.functional.mse_loss,
        "huber": torch.nn.functional.huber_loss,
        "smooth l1": torch.nn.functional.smooth_l1_loss,
        "bce": lambda x, y: torch.nn.functional.binary_cross_entropy_with_logits(x, y.sigmoid()),
        "bce of chances": lambda x, y: torch.nn.functional.binary_cross_entropy(x.sigmoid(), y.sigmoid()),
        "cross entropy": lambda x, y: torch.nn.functional.cross_entropy(x, labels[: len(x)], ignore_index=1) + y.sum(),
        "kl": lambda x, y: torch.nn.functional.kl_div(x.log_softmax(1), y.softmax(1), reduction="batchmean"),
        "var": lambda x, y: x.var(0).sum() + y.std(),
        "norm": lambda x, y: x.norm() + (x - y).norm(dim=1).amax(),
        "layer norm": lambda x, y: (torch.nn.functional.layer_norm(x, (4,), torch.ones(4, dtype=x.dtype)) * y).sum(),
        "batch norm": lambda x, y: (torch.nn.functional.batch_norm(x, None, None, training=True) * y).sum(),
        "group norm": lambda x, y: (torch.nn.functional.group_norm(x, 2) * y).sum(),
        "margin": lambda x, y: torch.nn.functional.multi_margin_loss(x, labels[: len(x)]) + y.mean(),
        "soft margin": lambda x, y: torch.nn.functional.soft_margin_loss(x, y.detach().sign()),
        "cumsum": lambda x, y: (x.cumsum(0) * y).sum(),
        "sort": lambda x, y: (x.sort(0).values * y).sum(),
        "gelu": lambda x, y: (torch.nn.functional.gelu(x) * y[:, :1]).mean(),
        "parts": lambda x, y: (x.chunk(2, 1)[1] * y.narrow(1, 0, 2)).mean(),
        "in place": lambda x, y: x.mul(2).add_(y).mean(),
    }
    for rows in ([0, 1, 2, 3, 4, 5, 6], [6, 0, 3], [1, 1, 1, 1], [5, 4]):
        for name, loss in losses.items():
            found = []
            for marked in (False, True):
                torch.manual_seed(0)
                x, y = torch.randn(7, 4, dtype=torch.float64), torch.randn(7, 4, dtype=torch.float64)
                if marked:
                    x, y = (oc.shard_tensor(t, mesh, [oc.Shard(0)]) for t in (x, y))
                given = [x.requires_grad_(), y.requires_grad_()]
                value = loss(x[torch.tensor(rows)], y.index_select(0, torch.tensor(rows)))
                grads = torch.autograd.grad(value, given, allow_unused=True)
                with torch.no_grad():
                    looked = loss(x[torch.tensor(rows)], y.index_select(0, torch.tensor(rows)))
                all_of_it = (value, looked, *grads)
                found.append([oc.unshard(t) if isinstance(t, oc.DistTensor) else t for t in all_of_it])
            for one, other in zip(*found, strict=True):
                if (one is None) != (other is None) or (one is not None and not torch.allclose(one, other, rtol=1e-9)):
                    wrong.append(f"{name} of rows {rows}")
                    break
    return wrong


@pytest.mark.proof
@pytest.mark.share(1)
@pytest.mark.parametrize("ranks", [2, 3])
def test_losses_of_chosen_rows_divide_by_all_of_them(ranks):
    for wrong in run_ranks(losses_of_chosen_rows, ranks):
        assert wrong == []


# ---- One expert of a stack is a view


def views() -> list[str]:
    """What differs from one card after experts are written to one by one, looked at, and trained."""
    mesh, found = oc.ProcessMesh(range(oc.get_world_size()), ["ep"]), []
    whole = values(4)[2]
    for marked_ in (False, True):
        stack = nn.Parameter(oc.shard_tensor(whole.clone(), mesh, [S(0)]) if marked_ else whole.clone())
        with torch.no_grad():
            stack[0].mul_(2)
            stack[-1].t().add_(1)
            stack[3].copy_(stack[5])
            stack[2][1, 4:].zero_()
        stack[4].data.fill_(0.5)
        kept = stack[6]
        loss = (stack[1] @ torch.ones(WIDTH, 2)).square().sum() + kept.norm() + stack[7].mean() * stack[0].sum()
        loss.backward()
        with torch.no_grad():
            stack.sub_(stack.grad)
        found.append([oc.unshard(x.detach()) if marked_ else x.detach() for x in (stack, stack.grad, loss, kept)])
    names = ("stack", "gradient", "loss", "expert that was kept")
    return [n for n, a, b in zip(names, *found, strict=True) if not torch.allclose(a, b, rtol=1e-5, atol=1e-6)]


@pytest.mark.share(1)
@pytest.mark.parametrize("ranks", [2, 3])
def test_one_expert_is_a_view_of_the_stack(ranks):
    for wrong in run_ranks(views, ranks):
        assert wrong == []


# ---- Rows beside another axis


def rows_of_turned_features() -> list[str]:
    """Chosen rows whose features are cut, but not in one stretch: what is computed of them, written to them, and no rows."""
    mesh, wrong = oc.ProcessMesh([[0, 1], [2, 3]], ["dp", "ep"]), []
    torch.manual_seed(0)
    y, b = torch.randn(8, 4), torch.randn(4)
    turns = {
        "turned": lambda t: t.view(-1, 2, 2).transpose(1, 2).reshape(-1, 4),
        "as they are": lambda t: t * 1,
        "none": lambda t: t[:, :0],
    }
    programs = {
        "chosen": lambda v, b: v * 1,
        "added up": lambda v, b: torch.zeros(8, v.shape[1]).index_add(0, torch.tensor([0, 0, 1, 5]), v),
        "written to": lambda v, b: v.mul_(b[: v.shape[1]]),
    }
    for name, turn in turns.items():
        for what, made in programs.items():
            for lie in ([S(0), S(0)], [R, R]):
                found = []
                for marked_ in (False, True):
                    x, c = (
                        (y.clone(), b)
                        if not marked_
                        else (oc.shard_tensor(y.clone(), mesh, [S(0), S(1)]), oc.shard_tensor(b, mesh, lie))
                    )
                    x.requires_grad_()
                    rows = made(turn(x)[torch.tensor([4, 3, 6, 5])], c)
                    rows.square().sum().backward()
                    found.append([oc.unshard(t.detach()) if marked_ else t.detach() for t in (rows, x.grad)])
                if not all(torch.allclose(one, other) for one, other in zip(*found, strict=True)):
                    wrong.append(f"{name}, {what}, {lie}")
    return wrong


def test_rows_keep_which_features_a_rank_has():
    for wrong in run_ranks(rows_of_turned_features, 4):
        assert wrong == []


def _lies_for_the_kernel() -> list[bool]:
    """Whether each operand of a sum in groups lies by rows in memory."""
    kernel, found = grouped.grouped_sums.__globals__["aten"], []

    class Aten:
        def _grouped_mm(self, x: Tensor, y: Tensor, offs: Tensor) -> Tensor:
            if x.dim() == y.dim() == 2:
                found.extend((x.stride(0) == 1, y.stride(1) == 1))
            return kernel._grouped_mm(x, y, offs)

    grouped.aten = Aten()  # type: ignore[assignment]
    mesh = oc.ProcessMesh([0], ["ep"])
    ends = torch.tensor([3, 8, 24], dtype=torch.int32)
    given = [torch.randn(24, 16), torch.randn(3, 16, 16), torch.randn(3, 16, 16)]
    plain = [x.clone().requires_grad_() for x in given]
    places = [[R], [S(0)], [S(0)]]
    mine = [oc.shard_tensor(x, mesh, p).requires_grad_() for x, p in zip(given, places, strict=True)]
    for x, first, second in (plain, mine):
        F.grouped_mm(F.grouped_mm(x, first, offs=ends), second, offs=ends).square().sum().backward()
    for a, b in zip(mine, plain, strict=True):
        torch.testing.assert_close(oc.unshard(a.grad), b.grad)
    by_columns = torch.randn(16, 24), torch.randn(16, 24).T
    assert torch.equal(grouped.grouped_sums(*by_columns, ends), kernel._grouped_mm(*by_columns, ends))
    return found


def test_sums_in_groups_lie_as_a_gpus_kernel_wants_them():
    """By columns it ends in an assertion on the device, where a group does not begin at a multiple of 16 bytes."""
    (found,) = run_ranks(_lies_for_the_kernel, 1)
    assert len(found) == 6 and all(found)
