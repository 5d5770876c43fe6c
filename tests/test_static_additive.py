"""Microbatches of a loss that is a mean over rows, a sum, or neither: as on one card, or told."""

from __future__ import annotations

import itertools
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from amounts import share
from torch import Tensor, nn

import onecard as oc
from onecard.errors import RecordingError
from onecard.testing import run_ranks

ROWS, CLASSES = 12, 5
Loss = Callable[[Tensor, Tensor], Tensor]


def infonce(o: Tensor, y: Tensor) -> Tensor:
    z = F.normalize(o, dim=1)
    return F.cross_entropy(z @ z.t() * 4, torch.arange(len(z)))


def pairs(o: Tensor, y: Tensor) -> Tensor:
    both = torch.cat([o, o * 0.5])
    return F.binary_cross_entropy_with_logits(both[:, 0], torch.cat([torch.ones(len(o)), torch.zeros(len(o))]))


def pairs_by_halves(o: Tensor, y: Tensor) -> Tensor:
    half = len(o) // 2
    label = torch.cat([torch.ones(half), torch.zeros(half), torch.ones(half), torch.zeros(half)])
    return F.binary_cross_entropy_with_logits(torch.cat([o, o * 0.5])[:, 0], label)


def written(o: Tensor, y: Tensor) -> Tensor:
    each = torch.zeros(len(o), 2)
    each[:, 0] = o.square().sum(1)
    each[:, 1] = o[:, 0]
    return each.mean()


def beside_a_token(o: Tensor, y: Tensor) -> Tensor:
    """As a vision transformer does with its class token, and recurrent nets with their first state."""
    token, state = o.new_zeros(1, 1, CLASSES) + torch.tensor([1.0, 2, 3, 4, 5]), torch.arange(5.0)
    x = torch.cat([token.expand(len(o), -1, -1), o[:, None]], dim=1)
    x = x * state.repeat(len(o), 1)[:, None] + torch.arange(2.0)[None, :, None].expand(len(o), 2, CLASSES).clone()
    return F.cross_entropy(x.mean(1), y)


def by_positions(o: Tensor, y: Tensor) -> Tensor:
    """As DeBERTa does: numbers of positions, expanded to all rows and heads, choose among scores."""
    scores = (o[:, None, None] * torch.arange(1.0, 7).view(2, 3, 1)).view(-1, 3, CLASSES)
    apart = (torch.arange(3)[:, None] - torch.arange(3)).abs()[None, None]
    chosen = scores.gather(-1, apart.squeeze(0).expand(len(scores), 3, 3))
    return F.cross_entropy(o + chosen.view(len(o), 2, 9)[:, 0, :CLASSES], y)


def pooled(o: Tensor, y: Tensor) -> Tensor:
    """In channels_last a pool to one element ends with ``as_strided_``, which says where that lies."""
    x = o[:, None].expand(-1, 3, -1).contiguous().transpose(1, 2)
    return F.cross_entropy(F.adaptive_avg_pool1d(x, 1).flatten(1), y)


def by_tokens(o: Tensor, y: Tensor, shift: int = 0) -> Tensor:
    """Two entries for each row, in the order of rows and in that of choices, weighed and added to the row that they are of."""
    weights, numbers = o.softmax(1).topk(2)
    rows = torch.arange(len(o))
    token, turned = ((rows + shift) % len(o) if shift else rows).repeat_interleave(2), rows.repeat(2)
    made = o[token] * weights.flatten()[:, None]
    total = torch.zeros_like(o).scatter_add(0, token[:, None].expand(-1, CLASSES), made)
    total = total.index_add(0, turned, o.index_select(0, turned) * weights.t().flatten()[:, None])
    total = total + o[rows[:, None], numbers].sum(1, keepdim=True)
    return F.cross_entropy(total, y)


def of_changed_places(o: Tensor, y: Tensor) -> Tensor:
    rows = torch.arange(len(o))
    rows[:, None].add_(1).remainder_(len(o))
    return F.cross_entropy(o[rows], y)


def by_rows_and_columns(o: Tensor, y: Tensor, shift: int = 0) -> Tensor:
    """As masks of attention are looked up: rows along one dim, columns along another."""
    rows, columns = torch.arange(len(o))[:, None, None], torch.arange(CLASSES)[None, None, :]
    return F.cross_entropy(o.softmax(1)[(rows + shift) % len(o) if shift else rows, columns].squeeze(1), y)


def bags(o: Tensor, y: Tensor, ahead: int = 0) -> Tensor:
    """As recommenders look up some entries of each row. ``ahead``: bags begin so many entries before their row."""
    table, ids = torch.linspace(-1, 1, CLASSES**2).view(CLASSES, CLASSES), torch.stack([y, (y + 1) % CLASSES], 1)
    weights, begins = o[:, :2].softmax(1), (torch.arange(len(o)) * 2 - ahead).clamp(min=0)
    weighed = F.embedding_bag(ids.flatten(), table, begins, mode="sum", per_sample_weights=weights.flatten())
    return F.cross_entropy(o + weighed + F.embedding_bag(ids, table), y)


RIGHT: dict[str, Loss] = {
    "bags": bags,
    "to their number": lambda o, y: F.cross_entropy(o[: len(o)], y[: len(y)]),
    "rows and columns": by_rows_and_columns,
    "pooled": pooled,
    "mean": nn.CrossEntropyLoss(),
    "sum": nn.CrossEntropyLoss(reduction="sum"),
    "mean by hand": lambda o, y: F.cross_entropy(o, y, reduction="sum") / len(y),
    "mean of each": lambda o, y: (F.cross_entropy(o, y, reduction="none") / y.numel()).sum(),
    "sum by a number": lambda o, y: F.cross_entropy(o, y, reduction="sum") / 12,
    "sum from a mean": lambda o, y: F.mse_loss(o, o.detach() * 0.5) * len(o),
    "batchmean": lambda o, y: F.kl_div(o.log_softmax(1), o.detach().softmax(1), reduction="batchmean"),
    "picked": lambda o, y: -o.log_softmax(1)[torch.arange(len(y)), y].mean(),
    "picked by a list": lambda o, y: -o.log_softmax(1)[range(len(y)), y].mean(),
    "gathered": lambda o, y: -o.log_softmax(1).gather(1, y[:, None]).mean(),
    "smooth": lambda o, y: F.cross_entropy(o, y, label_smoothing=0.1),
    "penalty": lambda o, y: F.cross_entropy(o, y) + 1e-2 * o.square().mean() + 0.5,
    "flattened": lambda o, y: F.mse_loss(o.view(-1, 1).expand(-1, 2).flatten(), torch.zeros(2 * o.numel())),
    "two at once": pairs,
    "in parts": written,
    "beside a token": beside_a_token,
    "by positions": by_positions,
    "by tokens": by_tokens,
    "grouped": lambda o, y: F.cross_entropy(o[y.argsort()], y.sort().values),
    "without NaN": lambda o, y: torch.nan_to_num(F.cross_entropy(o, y)),
    "weighted twice": lambda o, y: torch.stack([F.cross_entropy(o, y), 0.5 * o.square().mean()]).sum(),
    "by ones": lambda o, y: total(o, y) / (torch.ones_like(y).sum() * torch.eye(2).sum()),
    "by a tensor": lambda o, y: total(o, y) / torch.tensor(float(len(y))),
    "by a new tensor": lambda o, y: (o - 0.5).pow(2).sum() / o.new_tensor(len(o)),
    "by counted ones": lambda o, y: (o - 0.5).pow(2).sum() / torch.ones_like(y).sum(),
    "with noise": lambda o, y: F.cross_entropy(o + torch.rand(CLASSES) * 0, y) * (torch.rand(()) * 0 + 1),
    "over the classes": lambda o, y: (o.logsumexp(1) + o.amax(1) + o.std(1)).mean(),
}


def total(o: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(o, y, reduction="sum")


NEITHER: dict[str, tuple[Loss, str]] = {
    "bags of several rows": (lambda o, y: bags(o, y, ahead=1), "_embedding_bag"),
    "a bag of rows": (lambda o, y: F.embedding_bag(torch.tensor([[1, 0]]), o).square().sum(), "_embedding_bag"),
    "as many as a microbatch": (lambda o, y: F.cross_entropy(o[: ROWS // 2], y[: ROWS // 2]), "slice"),
    "their numbers": (lambda o, y: o[torch.arange(ROWS // 2)].square().mean(), "index"),
    "columns of other rows": (lambda o, y: by_rows_and_columns(o, y, 1), "index"),
    "a column for each row": (lambda o, y: o[torch.arange(len(o)), torch.arange(len(o)) % 2].square().mean(), "index"),
    "deviation": (lambda o, y: F.cross_entropy(o, y) + o.std(), "std"),
    "hardest": (lambda o, y: F.cross_entropy(o, y, reduction="none").topk(3).values.mean(), "topk"),
    "largest": (lambda o, y: F.cross_entropy(o, y, reduction="none").max(), "max"),
    "median": (lambda o, y: F.cross_entropy(o, y, reduction="none").median(), "median"),
    "contrast": (infonce, "mm"),
    "neighbours": (lambda o, y: (o[1:] - o[:-1]).square().mean(), "slice"),
    "one row": (lambda o, y: F.cross_entropy(o, y) + o[0].square().sum(), "select"),
    "some rows": (lambda o, y: F.cross_entropy(o[torch.tensor([0, 2, 2])], y[torch.tensor([0, 2, 2])]), "index"),
    "tokens of others": (lambda o, y: by_tokens(o, y, shift=1), "index"),
    "places that are changed": (of_changed_places, "index"),
    "a table of rows": (lambda o, y: F.embedding(torch.tensor([1, 0]), o).square().sum(), "embedding"),
    "pairs by halves": (pairs_by_halves, "binary_cross_entropy_with_logits"),
    "order": (lambda o, y: (o * torch.arange(len(o))[:, None]).mean(), "mul"),
    "softmax over rows": (lambda o, y: (o.softmax(0) * o).sum(), "_softmax"),
    "root": (lambda o, y: F.mse_loss(o, torch.zeros_like(o)).sqrt(), "sqrt"),
    "balance": (lambda o, y: (o.softmax(1).mean(0) * o.softmax(1).mean(0)).sum(), "mul"),
    "their numbers' sum": (lambda o, y: total(o, y) / (1 + torch.arange(len(y)).sum()), "div"),
    "a count and their numbers' sum": (lambda o, y: total(o, y) / ((y > 1).sum() + torch.arange(len(y)).sum()), "add"),
    "the root of their number": (lambda o, y: total(o, y) / len(y) ** 0.5, "div"),
    "one more than there are": (lambda o, y: total(o, y) / (len(y) + 1), "div"),
    "a power": (lambda o, y: (1 + o.square()).pow(len(y)).mean(), "pow"),
    "a weight in each class": (lambda o, y: (o * torch.full((CLASSES,), 1 / (1 + len(y)))).mean(), "mul"),
    "mean and sum": (lambda o, y: o.square().mean() + F.cross_entropy(o, y, reduction="sum"), "add"),
}


def batches() -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    for _ in range(3):
        yield torch.randn(ROWS, 6, generator=generator), torch.randint(CLASSES, (ROWS,), generator=generator)


def trained(
    loss: Loss, wrap: Callable[[Any], Any], mesh: oc.ProcessMesh | None = None, outputs: int = CLASSES
) -> tuple[list[float], list[Tensor]]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, outputs))
    if mesh is not None:
        oc.shard_layer(model, mesh)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    if mesh is not None:
        optimizer = oc.shard_optimizer(optimizer)

    def step(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        o = model(x)
        value = loss(o, y)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        return value.detach(), (o.argmax(1) == y).float().mean()

    run = wrap(step)
    laid = (lambda x: x) if mesh is None else (lambda x: oc.shard_tensor(x, mesh, [oc.Shard(0)]))
    seen = [run(laid(x), laid(y)) for x, y in batches()]
    return [float(v) for pair in seen for v in pair], [oc.unshard(p).detach().clone() for p in model.parameters()]


ONE_ROW = (
    "mean", "sum by a number", "mean by hand", "mean of each", "sum from a mean", "batchmean", "by a tensor", "by a new tensor",
    "by counted ones", "by ones",
)  # fmt: skip
CASES = [*((name, 2) for name in RIGHT), *((name, ROWS) for name in ONE_ROW)]


@pytest.mark.parametrize(("name", "k"), CASES)
def test_sums_and_means_are_one_cards(name: str, k: int) -> None:
    losses, weights = trained(RIGHT[name], lambda step: step)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = trained(RIGHT[name], lambda step: oc.to_static(step, k_steps=k))
    assert found[0] == pytest.approx(losses, rel=1e-5, abs=1e-7)
    for a, b in zip(found[1], weights, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


MARKED: dict[str, tuple[Loss, int]] = {
    **{
        name: (RIGHT[name], CLASSES)
        for name in ("mean by hand", "mean of each", "by ones", "sum from a mean", "in parts")
    },
    "one output": (lambda o, y: (o[:, 0] - y).pow(2).mean(), 1),
    "one output, summed": (lambda o, y: (o - y[:, None]).square().sum() / len(o), 1),
    "its mean over rows": (lambda o, y: ((o - 0.5) ** 2).mean(0).sum(), 1),
}


@pytest.mark.parametrize("name", MARKED)
def test_sums_and_means_with_marks(name: str) -> None:
    """A bias of one element has a gradient of one number, which is another in each call and follows no rows."""
    loss, outputs = MARKED[name]
    losses, weights = trained(loss, lambda step: step, None, outputs)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mesh = oc.ProcessMesh([0], ["dp"])
        found = trained(loss, lambda step: oc.to_static(step, k_steps=4), mesh, outputs)
    assert found[0] == pytest.approx(losses, rel=1e-5, abs=1e-7)
    for a, b in zip(found[1], weights, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@dataclass
class Report:
    loss: Tensor
    parts: Any


class Wrapped:
    def __init__(self, *parts: Any) -> None:
        self.parts = parts


@pytest.mark.parametrize("form", [Report, Wrapped, lambda *parts: Report(parts[0], Wrapped(*parts))])
def test_what_is_given_back_in_objects_is_one_cards(form: Callable[..., Any]) -> None:
    """As in a tuple: sums beside a mean loss, and numbers of Python that are the batch's."""
    weight = torch.ones(6, requires_grad=True)

    def step(x: Tensor, y: Tensor) -> Any:
        each = (x @ weight).square()
        each.mean().backward()
        weight.grad = None
        return form(
            each.detach().mean(),
            {"sum": each.detach().sum(), "rows": len(x), "each": each.detach(), "half": len(x) / 2},
        )

    run = oc.to_static(step, k_steps=3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for x, y in batches():
            found, wanted = (leaves_inside(f(x, y)) for f in (run, step))
            assert [torch.as_tensor(v).tolist() for v in found] == [
                pytest.approx(torch.as_tensor(v).tolist(), rel=1e-5) for v in wanted
            ]


def leaves_inside(x: Any) -> list[Any]:
    if isinstance(x, Report | Wrapped):
        return leaves_inside([*vars(x).values()])
    parts = x.values() if isinstance(x, dict) else x if isinstance(x, list | tuple) else None
    return [x] if parts is None else [v for part in parts for v in leaves_inside(part)]


LENGTHS = ("a power", "a weight in each class", "the root of their number", "one more than there are")


@pytest.mark.parametrize(("name", "k"), [*((name, 2) for name in NEITHER), *((name, ROWS) for name in LENGTHS)])
def test_what_is_neither_is_refused(name: str, k: int) -> None:
    loss, operator = NEITHER[name]
    with pytest.raises(
        RecordingError, match=f"the loss of a microbatch is no part of the batch's loss: {operator} at .*avg=True"
    ):
        trained(loss, lambda step: oc.to_static(step, k_steps=k))


def test_a_number_that_moves_by_itself_is_told_as_such() -> None:
    """It follows no rows: what changes it is named, and the other numbers are compared all the same."""
    weight, numbers = torch.ones(6, requires_grad=True), itertools.count(1)

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = (x @ weight).square().sum() / len(y) * (1 + 1 / next(numbers))
        loss.backward()
        weight.grad = None
        return loss.detach()

    run = oc.to_static(step, k_steps=2)
    (first, second) = itertools.islice(batches(), 2)
    run(*first)
    with pytest.warns(UserWarning, match=r"takes the next of numbers at .*: take it before the step"):
        run(*second)


def test_where_it_is_meant_nothing_is_told() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trained(NEITHER["deviation"][0], lambda step: oc.to_static(step, k_steps=2, avg=True))


def test_a_result_that_is_no_mean_is_told() -> None:
    weight = torch.ones(6, requires_grad=True)

    def step(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        each = (x @ weight).square()
        each.mean().backward()
        weight.grad = None
        return each.detach().sum(), each.detach().max(), (y > 2).sum()

    run = oc.to_static(step, k_steps=2)
    with pytest.warns(UserWarning, match="result 1 is no sum and no mean over rows: max at"):
        for x, y in batches():
            total, _, count = run(x, y)
            assert total.item() == pytest.approx((x @ weight).square().sum().item(), rel=1e-5)
            assert count.item() == (y > 2).sum().item()


@pytest.mark.parametrize("k", [2, ROWS])
def test_a_step_that_reads_values_is_averaged_and_told(k: int) -> None:
    weight = torch.ones(6, requires_grad=True)

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = (x @ weight).square().sum() / len(x)
        loss = loss * 2 if weight.sum() > 100 else loss
        loss.backward()
        weight.grad = None
        return loss.detach()

    run = oc.to_static(step, k_steps=k, ask=True)
    with pytest.warns(UserWarning, match="whether a number in it counts rows .* Say avg=True"):
        for x, y in batches():
            assert run(x, y).item() == pytest.approx((x @ weight).square().mean().item(), rel=1e-5)


def cut_in_stages() -> dict[str, Any]:
    """Each loss as the last stage of a pipeline, in the fresh ranks of a run. One falls to 1e-8, where float32 has no digits."""
    found = {}
    for name in share(("mean", "sum", "sum by a number", "mean by hand", "batchmean"), 2):
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, CLASSES)).double()
        engine = oc.Engine(
            model, RIGHT[name], torch.optim.SGD(model.parameters(), 0.05, momentum=0.9), clip_grad_norm=0.5,
            strategy=oc.Strategy({"pipeline": {"enable": True, "accumulate_steps": 2}}),
        )  # fmt: skip
        rows = [row for x, y in batches() for row in zip(x.double(), y, strict=True)]
        found[name] = [float(engine.run(batch)["loss"]) for batch in engine.dataloader(rows, batch_size=ROWS)]
    return found


@pytest.mark.proof
def test_in_a_pipeline() -> None:
    for found in run_ranks(cut_in_stages, 2, timeout=120.0):
        for name, losses in found.items():
            torch.manual_seed(3)
            model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, CLASSES)).double()
            optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
            for (x, y), value in zip(batches(), losses, strict=True):
                loss = RIGHT[name](model(x.double()), y)
                assert value == pytest.approx(loss.item(), rel=1e-5), name
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()


def _mixed() -> str:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor, y: Tensor, p: Tensor) -> Tensor:
        out = model(0.7 * x + 0.3 * x[p])
        loss = 0.7 * F.cross_entropy(out, y) + 0.3 * F.cross_entropy(out, y[p])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    run = oc.to_static(step, plan=oc.Plan(pp=2, microbatches=2))
    with pytest.raises(RecordingError) as fault:
        for _ in range(2):
            run(torch.randn(16, 4), torch.randint(0, 4, (16,)), torch.arange(15, -1, -1))
    return str(fault.value)


def test_rows_that_are_mixed_by_number_are_named():
    """Labels by numbers of rows of the batch: counting them ended with IndexError, as a microbatch has fewer rows."""
    for said in run_ranks(_mixed, 2):
        assert re.search(r"index at \S*test_static_additive.py:\d+ takes rows of the batch together", said), said


def _refused_and_caught() -> float:
    mesh = oc.ProcessMesh(range(2), ["dp"])
    x = oc.shard_tensor(torch.arange(16.0).view(16, 1).repeat(1, 4), mesh, [oc.Shard(0)])
    y = oc.shard_tensor(torch.arange(16) % 4, mesh, [oc.Shard(0)])
    model = oc.shard_layer(nn.Linear(4, 4), mesh)
    optimizer = oc.shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x)[:5], y[:5])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    run = oc.to_static(step, k_steps=2)
    run(x, y)
    with pytest.raises(RecordingError, match="takes rows of the batch together"):
        run(x, y)
    return (x * 2).sum().item() + sum(x.sum(0).full_tensor().tolist())


def test_ranks_agree_on_messages_again_where_a_refused_recording_is_caught():
    """A recording without data writes messages down that nobody sends; ranks may come to the refusal at different ones."""
    assert run_ranks(_refused_and_caught, 2) == [1440.0, 1440.0]
