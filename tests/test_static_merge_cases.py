"""Gradient merge, the habits around it: against the loop of microbatches on one card, and what is refused or warned of."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import onecard as oc
from onecard._torch.names import tree_leaves, tree_map
from onecard.errors import RecordingError
from onecard.testing import run_ranks

ROWS, K, CALLS = 16, 4, 4
S, R = oc.Shard, oc.Replicate


def nothing() -> None:
    pass


@dataclass
class Step:
    """A step in its parts: once, for each microbatch (given what its loss is multiplied with), once."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    each: Callable[..., Any]
    before: Callable[[], Any] = nothing
    after: Callable[[], Any] = nothing
    last: Callable[[], Any] = nothing
    avg: bool = True
    clears: bool = True
    given: Callable[[Tensor, Tensor], Any] = field(default=lambda x, y: (x, y))

    def whole(self, *batch: Any) -> Any:
        if self.clears:
            self.optimizer.zero_grad()
        self.before()
        result = self.each(1.0, *batch)
        self.after()
        self.optimizer.step()
        self.last()
        return result

    def loop(self, *batch: Any) -> list[Any]:
        if self.clears:
            self.optimizer.zero_grad()
        self.before()
        results = [
            tree_leaves(self.each(1 / K if self.avg else 1.0, *tree_map(partial(part, i), batch))) for i in range(K)
        ]
        self.after()
        self.optimizer.step()
        self.last()
        return [self.joined(parts) for parts in zip(*results, strict=True)]

    def joined(self, parts: tuple[Any, ...]) -> Any:
        if not isinstance(parts[0], Tensor):
            return parts[0]
        if parts[0].dim():
            return torch.cat(parts)
        total = sum(parts[1:], parts[0])
        return total / K if total.is_floating_point() and self.avg else total

    def held(self) -> list[Tensor]:
        states = [x for s in self.optimizer.state.values() for x in s.values() if isinstance(x, Tensor)]
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        return [
            x.detach().clone()
            for x in (*self.model.parameters(), *grads, *self.model.buffers(), *states, torch.get_rng_state())
        ]


def part(i: int, x: Any) -> Any:
    return x.chunk(K)[i] if isinstance(x, Tensor) and x.dim() else x


def network(*more: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 12), *more, nn.ReLU(), nn.Linear(12, 4))
    model.register_buffer("count", torch.zeros(()))
    model.register_buffer("average", torch.zeros(4, 12))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def backward(loss: Tensor, scale: float) -> Tensor:
    (loss if scale == 1 else loss * scale).backward()
    return loss.detach()


def plain(*more: nn.Module, **parts: Any) -> Step:
    model, optimizer = network(*more)
    return Step(model, optimizer, lambda s, x, y: backward(cross_entropy(model(x), y), s), **parts)


def nested() -> Step:
    model, optimizer = network()

    def each(s: float, batch: Any) -> Any:
        out = model(batch["inputs"][0])
        loss = backward(cross_entropy(out, batch["labels"]), s)
        return {"loss": loss, "out": out.detach(), "right": (out.argmax(1) == batch["labels"]).sum(), "none": None}

    return Step(model, optimizer, each, given=lambda x, y: ({"inputs": (x,), "labels": y},))


def a_count_ahead_of_the_batch() -> Step:
    """Once a call, not once for each microbatch; what a module counts (batch norm) is counted for each."""
    made = plain(nn.BatchNorm1d(12), nn.Dropout(0.3))
    made.before = lambda: made.model.count.add_(1)
    return made


def average(made: Step) -> None:
    with torch.no_grad():
        made.model.average.lerp_(made.model[-1].weight, 0.1)


def an_average_ahead_of_the_batch() -> Step:
    made = plain()

    def before() -> None:
        old = made.model.average * 1  # read before it is written to
        average(made)
        made.model.count.add_((made.model.average - old).sum())

    made.before = before
    return made


def an_average_after_the_step() -> Step:
    made = plain()
    made.last = partial(average, made)
    return made


def noise_on_gradients() -> Step:
    """Drawn once, after the draws of all microbatches."""
    made = plain(nn.Dropout(0.3))
    made.after = lambda: [p.grad.add_(torch.randn_like(p) * 0.01) for p in made.model.parameters()]
    return made


def cleared_by_the_program() -> Step:
    """Recorded where no gradients are, on a microbatch whose gradients may not stay."""
    return plain(clears=False)


def clipped() -> Step:
    made = plain()
    made.after = lambda: nn.utils.clip_grad_norm_(made.model.parameters(), 0.1)
    return made


def gradient_penalty() -> Step:
    model, optimizer = network()

    def each(s: float, x: Tensor, y: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        out = model(x)
        (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return backward(cross_entropy(out, y) + grad.square().mean(), s)

    return Step(model, optimizer, each)


def sums_beside_what_is_no_sum() -> Step:
    model, optimizer = network()

    def each(s: float, x: Tensor, y: Tensor) -> Tensor:
        return backward(cross_entropy(model(x), y, reduction="sum") + model[0].weight.square().sum(), s)

    return Step(model, optimizer, each, avg=False)


def divided_by_the_batchs_count() -> Step:
    """The way that the warning names: a tensor without dims is not cut."""
    model, optimizer = network()

    def each(s: float, x: Tensor, y: Tensor, count: Tensor) -> Tensor:
        return backward(cross_entropy(model(x), y, ignore_index=3, reduction="sum") / count, s)

    return Step(model, optimizer, each, avg=False, given=lambda x, y: (x, y, (y != 3).sum()))


def writes_to_the_batch() -> Step:
    model, optimizer = network()

    def each(s: float, x: Tensor, y: Tensor) -> Any:
        x.mul_(0.5)
        return backward(cross_entropy(model(x), y), s), x, x[:, :2]

    return Step(model, optimizer, each)


CASES = [
    nested,
    a_count_ahead_of_the_batch,
    an_average_ahead_of_the_batch,
    an_average_after_the_step,
    noise_on_gradients,
    cleared_by_the_program,
    clipped,
    gradient_penalty,
    sums_beside_what_is_no_sum,
    divided_by_the_batchs_count,
    writes_to_the_batch,
]


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(ROWS, 8, generator=generator), torch.randint(0, 4, (ROWS,), generator=generator))
        for _ in range(CALLS)
    ]


@pytest.mark.share(6)
@pytest.mark.parametrize("case", CASES)
def test_a_habit_is_the_loop(case: Callable[[], Step]) -> None:
    found = []
    for static in (False, True):
        made = case()
        run = oc.to_static(made.whole, k_steps=K, avg=made.avg) if static else made.loop
        torch.manual_seed(5)
        seen = []
        for i, batch in enumerate(batches()):
            if not made.clears:
                made.optimizer.zero_grad()
            call = made.whole if i == 0 and not static else run  # the first call runs as it is
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                results = call(*made.given(*batch))
            seen += [torch.as_tensor(r).clone() for r in tree_leaves(results) if r is not None] + made.held()
        found.append(seen)
        assert not static or len(run.recordings) == 1
    for a, b in zip(*found, strict=True):
        assert a.shape == b.shape and torch.equal(a, b), a - b if a.shape == b.shape else b.shape


# -- refused -------------------------------------------------------------------------------------------------------------


def refusal(step: Callable[..., Any], *batch: Any, avg: bool | None = None) -> str:
    run = oc.to_static(step, k_steps=K, avg=avg)
    run(*batch)
    with pytest.raises(RecordingError) as said:
        run(*batch)
    return str(said.value)


def test_arguments_of_other_lengths_are_refused() -> None:
    """Weights of four classes were cut in four like the batch, and each of them spread over a microbatch."""
    model, optimizer = network()

    def step(batch: dict[str, Tensor], weight: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = backward((cross_entropy(model(batch["x"]), batch["y"], reduction="none") * weight.sum()).mean(), 1.0)
        optimizer.step()
        return loss

    x, y = batches()[0]
    said = refusal(step, {"x": x, "y": y}, torch.arange(4.0))
    assert "argument 'weight' has 4 rows where 'batch[0]' has 16" in said and "should be read by the step" in said
    for more in (torch.ones(3), torch.ones(1)):  # that could not be cut anyway
        assert f"has {len(more)} rows where 'batch[0]' has 16" in refusal(step, {"x": x, "y": y}, more)


def test_a_rate_that_the_step_sets_is_refused_and_stays() -> None:
    made = plain()
    (group,) = made.optimizer.param_groups
    made.last = lambda: group.update(lr=group["lr"] * 0.5)
    assert "the step sets an optimizer's lr" in refusal(made.whole, *batches()[0])
    assert group["lr"] == 0.5e-2  # that of the first call, which ran as it is


def test_a_step_without_a_batch_is_refused() -> None:
    made, (x, y) = plain(), batches()[0]
    assert "no argument is a tensor with rows" in refusal(lambda scale: made.whole(x, y) * scale, 1.0)


def test_a_result_that_is_by_chance_as_long_as_a_microbatch_is_refused() -> None:
    """Four classes, four rows: the microbatches' tables stood one below the other, where nobody looks for sums (``avg``)."""
    made, batch = plain(), batches()[0]

    def step(x: Tensor, y: Tensor) -> Any:
        out = made.model(x).detach()
        return made.whole(x, y), out.t() @ out

    assert "result 1 of the step has 4 rows for a microbatch, and 4 for a batch of 16" in refusal(
        step, *batch, avg=True
    )


def test_a_closure_of_an_optimizer_is_refused_by_its_name() -> None:
    made, batch = plain(), batches()[0]

    def step(x: Tensor, y: Tensor) -> None:
        made.optimizer.zero_grad()
        made.optimizer.step(lambda: backward(cross_entropy(made.model(x), y), 1.0))

    assert "an optimizer calls a closure" in refusal(step, *batch)


# -- warned of -----------------------------------------------------------------------------------------------------------


def warned(loss: Callable[[nn.Module, Tensor, Tensor], Tensor], y: Tensor | None = None, *more: nn.Module) -> list[str]:
    model, optimizer = network(*more)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        result = backward(loss(model, x, y), 1.0)
        optimizer.step()
        return result

    batch = (batches()[0][0], batches()[0][1] if y is None else y)
    run = oc.to_static(step, k_steps=K)
    run(*batch)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            run(*batch)
            run(*batch)
        except RecordingError as fault:
            return [f"refused: {fault}"]
    return [f"told: {w.message}" for w in said]


def by_rows(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Rows that are scaled by what the batch counts, and then no longer multiplied alone."""
    return cross_entropy(model(x / (y != 3).sum()).exp(), y)


def by_share(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """In the graph of a microbatch its length is a number, and the batch's count over it is no share of the batch."""
    kept = y != 3
    return (cross_entropy(model(x), y, reduction="none") * kept).mean() / (kept.sum() / len(x) + 1)


def by_inverse(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return cross_entropy(model(x) * (1 / ((y != 3).sum() / len(x) + 1)), y)


def by_length(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return (model(x) / len(x)).square().sum()


def by_parameter(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    kept = (y != 3) * model[0].bias[:1].exp()
    return (cross_entropy(model(x), y, reduction="none") * kept).sum() / kept.sum()


def counted(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    out = model(x)
    model.count.add_(1)
    return cross_entropy(out, y)


def normed(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return cross_entropy(nn.functional.batch_norm(model(x), None, None, training=True), y)


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count.add_(1)
        return x


EVEN = torch.tensor([0, 1, 2, 3] * 4)  # as many in each microbatch
WARNED: dict[str, Any] = {
    "labels that are ignored": (lambda m, x, y: cross_entropy(m(x), y, ignore_index=3), None, ""),
    "weights": (lambda m, x, y: cross_entropy(m(x), y, weight=torch.arange(4.0)), None, ""),
    "rows scaled by a count": (by_rows, None, r"refused: .*relu at .* is not linear in rows that are scaled|addmm at"),
    "a count over a length, and one": (by_share, None, r"refused: .*div at .* scales by a value"),
    "a product with one over it": (by_inverse, None, r"refused: .*mul at .* scales by a value"),
    "rows scaled by their number": (by_length, None, r"refused: .*pow at .* is not linear in rows that are scaled"),
    "divided by what learns": (by_parameter, None, r"refused: .*div at .*test_static_merge_cases.py:\d+ scales by a value"),
    "a count before backward": (counted, None, r"told: .*add_ at .* writes into the program .* 4 times a call"),
    "batch norm": (normed, None, r"told: .*batch norm at .* normalizes each microbatch by its own mean"),
    "as many ignored in each": (lambda m, x, y: cross_entropy(m(x), y, ignore_index=3), EVEN, ""),
    "none ignored": (lambda m, x, y: cross_entropy(m(x), y), None, ""),
    "divided by a number": (lambda m, x, y: cross_entropy(m(x), y, reduction="sum") / len(x), None, ""),
    "rows divided": (lambda m, x, y: cross_entropy(m(x / x.norm(dim=1, keepdim=True)), y), None, ""),
}  # fmt: skip


@pytest.mark.share(1)
@pytest.mark.parametrize("name", WARNED)
def test_a_mean_of_means_is_told_or_refused(name: str) -> None:
    loss, y, words = WARNED[name]
    said = warned(loss, y)
    assert bool(said) == bool(words), said
    assert not words or re.search(words, said[0]), said


class InTime(nn.Module):
    """Rows of twelve numbers, read as three steps in time."""

    def __init__(self, recurrent: nn.RNNBase) -> None:
        super().__init__()
        self.recurrent = recurrent

    def forward(self, x: Tensor) -> Tensor:
        steps, time = x.view(-1, 3, 4), int(self.recurrent.batch_first)
        return self.recurrent(steps if time else steps.transpose(0, 1))[0].mean(time)


RECURRENT: dict[str, Callable[[], nn.RNNBase]] = {
    "in place": lambda: nn.GRU(4, 12, batch_first=True),
    "both ways": lambda: nn.LSTM(4, 6, bidirectional=True),
}


@pytest.mark.parametrize("name", RECURRENT)
def test_rows_are_followed_through_time(name: str) -> None:
    """The largest losses of a batch are others than those of its microbatches."""

    def hardest(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(m(x), y, reduction="none").topk(2).values.mean()

    assert any("topk at" in words for words in warned(hardest, None, InTime(RECURRENT[name]())))
    assert not warned(lambda m, x, y: cross_entropy(m(x), y), None, InTime(RECURRENT[name]()))


@torch.library.custom_op("test_merge_cases::turned", mutates_args=())
def turned(x: Tensor) -> Tensor:
    return x.flip(0)


turned.register_fake(torch.empty_like)
turned.register_autograd(lambda ctx, grad: grad.flip(0))


def test_an_operator_without_a_rule_is_told_of() -> None:
    (said,) = warned(lambda m, x, y: (turned(m(x)) * m(x)).square().mean())
    assert re.search("turned at .* has no rule that says whether rows stay apart", said)


def test_a_module_that_counts_calls() -> None:
    """One that reads its count cannot count once: it is told of."""
    module = Counter()
    assert not warned(lambda m, x, y: cross_entropy(m(x), y), None, module)
    assert module.count == 3
    (said,) = warned(lambda m, x, y: cross_entropy(m(x) / m[1].count, y), None, Counter())
    assert re.search(r"add_ at .* writes into the program .* 4 times a call, where one card does so once", said)


# -- on ranks --------------------------------------------------------------------------------------------------------------


def on_ranks() -> dict[str, Any]:
    said: dict[str, Any] = {}
    mesh = oc.ProcessMesh([0, 1], ["dp"])
    x, y = batches()[0]
    y[9] = 0  # else each microbatch of either rank has as many labels that are ignored
    cut = (oc.shard_tensor(x, mesh, [S(0)]), oc.shard_tensor(y, mesh, [S(0)]))
    given = {
        "cut": cut,
        "whole": (oc.shard_tensor(x, mesh, [R()]), y),
        "one of them whole": (cut[0], y),
        "one of them replicated": (cut[0], oc.shard_tensor(y, mesh, [R()])),
        "other rows": (cut[0], oc.shard_tensor(torch.cat([y, y]), mesh, [S(0)])),
    }
    for name, batch in given.items():
        model, _ = network()
        oc.shard_layer(model, mesh)
        optimizer = oc.shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))

        def step(x: Tensor, y: Tensor, model: Any = model, optimizer: Any = optimizer) -> Tensor:
            optimizer.zero_grad()
            loss = backward(cross_entropy(model(x), y[: len(x)], ignore_index=3), 1.0)
            optimizer.step()
            return loss

        run = oc.to_static(step, k_steps=K)
        run(*batch)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                run(*batch)
                said[name] = max(distance(model, rows(name, x), rows(name, y)))
            except RecordingError as fault:
                said[name] = str(fault)
        said[f"{name}, warnings"] = [str(w.message) for w in caught]
    return said


def rows(name: str, x: Tensor) -> Tensor:
    """A batch in the order in which the microbatches take it: each has rows of each rank."""
    if name == "whole":
        return x
    return x.unflatten(0, (2, K, ROWS // 2 // K)).transpose(0, 1).flatten(0, 2)


def distance(model: nn.Module, x: Tensor, y: Tensor) -> list[float]:
    one, _ = network()
    optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
    made = Step(one, optimizer, lambda s, x, y: backward(cross_entropy(one(x), y, ignore_index=3), s))
    made.whole(x, y)
    made.whole(x, y)
    return [
        (oc.unshard(a.detach()) - b).abs().max().item()
        for a, b in zip(model.parameters(), one.parameters(), strict=True)
    ]


def test_on_ranks() -> None:
    """Rows of a tensor that is cut met those of one that is not: each microbatch had labels of other rows."""
    found = run_ranks(on_ranks, 2)
    for said in found:
        assert said["cut"] < 1e-6 and said["whole"] < 1e-6, said
        assert re.search("'y' is whole on each rank, 'x' is .*Lay both out alike", said["one of them whole"])
        assert re.search("'y' is .*'x' is .*Lay both out alike", said["one of them replicated"])
        assert "argument 'y' has 32 rows where 'x' has 16" in said["other rows"]
        assert not said["cut, warnings"] and not said["whole, warnings"], said


class Counting(torch.optim.SGD):
    """Counts its steps in a group, as an int, and steps by it."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
            for p in group["params"]:
                p.data.sub_(p.grad, alpha=0.1 / group["k"])


def test_a_count_in_a_group_of_parameters_is_refused() -> None:
    """The run that is recorded is taken back, and the count with it."""
    model = torch.nn.Linear(3, 1)
    optimizer = Counting(model.parameters(), 0.1)
    optimizer.param_groups[0]["k"] = 0

    def step(x: Tensor) -> None:
        model(x).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    run = oc.to_static(step, k_steps=2)
    run(torch.ones(4, 3))
    with pytest.raises(RecordingError, match=r"Counting counts in param_groups\[...\]\['k'\]"):
        run(torch.ones(4, 3))
