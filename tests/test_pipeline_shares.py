"""What microbatches' losses weigh in that of the batch, by what the loss divides by: one card's loss, or words before it runs."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fleet_programs import close
from pipeline_programs import OneCard, begin, compare
from torch import Tensor, nn

import onecard as oc
from onecard import fleet, pipeline
from onecard.errors import CommunicationError, ScheduleError
from onecard.pipeline.run.shares import Shares
from onecard.testing import run_ranks

CLASSES = 7
WEIGHT = torch.linspace(0.2, 2, CLASSES)
Loss = Callable[[Any, Any], Any]


def ce(out: Tensor, y: Tensor, **more: Any) -> Tensor:
    return F.cross_entropy(out.flatten(0, 1), y.flatten(), **more)


def counted(y: Tensor) -> Tensor:
    return (y != -100).float()


def by_hand(out: Tensor, y: Tensor) -> Tensor:
    return (F.cross_entropy(out.transpose(1, 2), y, reduction="none") * counted(y)).sum() / counted(y).sum()


def spread(out: Tensor, y: Tensor) -> Tensor:
    """The divisor is hidden in a tensor of weights."""
    return (ce(out, y, reduction="none") * (counted(y) / counted(y).sum()).flatten()).sum()


def chosen(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out[y != -100], y[y != -100])


def by_length(out: Tensor, y: Tensor) -> Tensor:
    each = ce(out, y, reduction="none")[y.flatten() != -100]
    return each.sum() / len(each)


def by_sequence(out: Tensor, y: Tensor) -> Tensor:
    each = F.cross_entropy(out.transpose(1, 2), y, reduction="none") * counted(y)
    return (each.sum(1) / counted(y).sum(1).clamp(min=1)).mean()


def at_least_one(out: Tensor, y: Tensor) -> Tensor:
    return ce(out, y, reduction="sum") / counted(y).sum().clamp(min=1)


def in_chunks(out: Tensor, y: Tensor) -> Tensor:
    chunks = zip(out.flatten(0, 1).split(3), y.flatten().split(3), strict=True)
    return torch.stack([F.cross_entropy(a, b, reduction="sum") for a, b in chunks]).sum() / counted(y).sum()


def by_row(out: Tensor, y: Tensor) -> Tensor:
    return torch.stack([F.cross_entropy(a, b, reduction="sum") for a, b in zip(out, y, strict=True)]).mean()


MEANS: dict[str, Loss] = {
    "in chunks": in_chunks,
    "row by row": by_row,
    "ignored labels": ce,
    "2d": lambda out, y: F.cross_entropy(out.transpose(1, 2), y),
    "the next token's": lambda out, y: ce(out[:, :-1].reshape(-1, 1, CLASSES), y[:, 1:]),
    "weights of classes": lambda out, y: ce(out, y, weight=WEIGHT),
    "smoothed": lambda out, y: ce(out, y, label_smoothing=0.1),
    "smoothed, with weights": lambda out, y: ce(out, y, label_smoothing=0.1, weight=WEIGHT),
    "negative log likelihood": lambda out, y: F.nll_loss(out.log_softmax(-1).flatten(0, 1), y.flatten()),
    "a mask by hand": by_hand,
    "weights that add up to one": spread,
    "rows that are chosen": chosen,
    "rows that are chosen, with weights": lambda out, y: F.cross_entropy(out[y != -100], y[y != -100], weight=WEIGHT),
    "losses that are chosen": lambda out, y: ce(out, y, reduction="none")[y.flatten() != -100].mean(),
    "masked_select": lambda out, y: ce(out, y, reduction="none").masked_select(y.flatten() != -100).mean(),
    "places that are chosen": lambda out, y: ce(out, y, reduction="none")[(y.flatten() != -100).nonzero()].mean(),
    "a length of what is chosen": by_length,
    "by sequence": by_sequence,
    "at least one": at_least_one,
    "a product": lambda out, y: ce(out, y, reduction="sum") * counted(y).sum().reciprocal(),
    "twice": lambda out, y: ce(out, y, reduction="sum") / counted(y).sum() / 2,
    "in float32": lambda out, y: ce(out.float(), y),
    "a sum": lambda out, y: ce(out, y, reduction="sum"),
    "a sum over samples": lambda out, y: ce(out, y, reduction="sum") / len(y),
    "a mean": lambda out, y: out.square().mean(),
    "a module": nn.CrossEntropyLoss(),
}


def batch(ignored: bool = True) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    out, y = torch.randn(8, 4, CLASSES, generator=generator), torch.randint(CLASSES, (8, 4), generator=generator)
    if ignored:
        y[torch.rand(8, 4, generator=generator) < 0.4] = -100
        y[2:4] = -100  # a microbatch that has none
    return out, y


def weights(loss: Loss, out: Tensor, y: Tensor, known: Shares | None = None) -> list[Any]:
    return (known or Shares(loss)).of(out[:2], 0, y.split(2), y, [2] * 4)


@pytest.mark.parametrize("name", MEANS)
def test_the_loss_of_the_batch_follows_from_those_of_its_parts(name: str) -> None:
    given = MEANS[name]
    loss: Loss = (lambda out, y: ce(out, y)) if name == "a module" else given
    shares = Shares(given if name != "a module" else lambda out, y: given(out.flatten(0, 1), y.flatten()))
    for ignored in (False, True, False):  # what was found out on labels that tell nothing holds for others
        out, y = batch(ignored)
        parts = zip(weights(loss, out, y, shares), out.split(2), y.split(2), strict=True)
        made = sum(w * loss(a, b) for w, a, b in parts if w)
        close(torch.as_tensor(made), loss(out, y), name)


def _over_cut_logits() -> list[tuple[float, float]]:
    begin(dp=1, mp=2)
    out, y = batch()
    found, part = [], out.split([3, 4], -1)[oc.get_rank()]
    for smoothing in (0.0, 0.1):
        layer = fleet.meta_parallel.ParallelCrossEntropy(num_classes=CLASSES, label_smoothing=smoothing)
        for reduced in (lambda e, k: e.mean(), lambda e, k: e.sum(), lambda e, k: (e * k).sum() / k.sum()):
            loss = lambda out, y: reduced(layer(out, y).view(y.shape), counted(y))  # noqa: B023, E731
            parts = zip(weights(loss, part, y), part.split(2), y.split(2), strict=True)
            made = sum(w * loss(a, b) for w, a, b in parts if w)
            each = F.cross_entropy(out.transpose(1, 2), y, reduction="none", label_smoothing=smoothing)
            found.append((float(made), float(reduced(each, counted(y)))))
    return found


def test_losses_over_cut_logits() -> None:
    for found in run_ranks(_over_cut_logits, 2):
        assert len(found) == 6 and all(a == pytest.approx(b, rel=1e-5) for a, b in found)


def _recorded_by_marks(more: dict[str, Any]) -> list[float]:
    first, last = oc.ProcessMesh([0], ["pp"]), oc.ProcessMesh([1], ["pp"])
    torch.manual_seed(0)
    a, b = nn.Linear(4, 8), nn.Linear(8, CLASSES)
    oc.shard_layer(a, first), oc.shard_layer(b, last)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = a, b

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.a(oc.reshard(x, first, [oc.Replicate()])).tanh()
            return self.b(oc.reshard(hidden, last, [oc.Replicate()]))

    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = pipeline.step_by_marks(
            model, lambda o, y: F.cross_entropy(o, y, **more), x, y, schedule="1F1B", microbatches=4
        )
        optimizer.step()
        optimizer.zero_grad()
        return loss

    call = oc.to_static(step)
    return [float(oc.unshard(call(*_rows(i)))) for i in range(3)]


def _rows(number: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(number)
    x, y = torch.randn(8, 4, generator=draw), torch.randint(CLASSES, (8,), generator=draw)
    y[torch.arange(8) % 3 == number] = -100
    return x, y


def test_weights_of_classes_in_a_recorded_step_by_marks() -> None:
    more = {"weight": WEIGHT, "label_smoothing": 0.1}
    torch.manual_seed(0)
    one = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, CLASSES))
    optimizer, wanted = torch.optim.SGD(one.parameters(), 0.1), []
    for i in range(3):
        loss = F.cross_entropy(one(_rows(i)[0]), _rows(i)[1], **more)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        wanted.append(float(loss.detach()))
    for found in run_ranks(_recorded_by_marks, 2, more):
        assert found == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_large_vocabularies_in_their_own_precision(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    y = torch.randint(30_000, (8, 4), generator=generator)
    y[torch.rand(8, 4, generator=generator) < 0.4] = -100
    counts = (y != -100).sum(1).view(4, 2).sum(1)
    out = torch.zeros(8, 4, 30_000, dtype=dtype)
    found = weights(lambda out, y: ce(out.float(), y), out, y)
    assert found == pytest.approx((counts / counts.sum()).tolist())
    with pytest.raises(ScheduleError, match="it takes a root"):
        weights(roots, out, y)


def roots(out: Tensor, y: Tensor) -> Tensor:
    return out.square().mean().sqrt()


def rows_compared(out: Tensor, y: Tensor) -> Tensor:
    z = F.normalize(out.flatten(1), dim=1)
    return (z @ z.T).logsumexp(1).mean()


def by_the_largest(out: Tensor, y: Tensor) -> Tensor:
    w = WEIGHT.to(out.dtype)[y.clamp(min=0)]
    return (F.cross_entropy(out.transpose(1, 2), y, reduction="none") * w / w.max()).mean()


def scaled_to_one(out: Tensor, y: Tensor) -> Tensor:
    t = y[:, 0].abs().to(out.dtype)
    return F.mse_loss(out[:, 0].mean(-1), (t - t.min()) * (t.max() - t.min() + 1e-6).reciprocal())


class Counting:
    calls = 0

    def __call__(self, out: Tensor, y: Tensor) -> Tensor:
        self.calls += 1
        return ce(out, y) * (1 + 0.1 * self.calls)


def trimmed(out: Tensor, y: Tensor) -> Tensor:
    longest = int((y != -100).sum(1).max())
    return ce(out[:, :longest].reshape(-1, 1, CLASSES), y[:, :longest])


OTHERS: dict[str, tuple[Loss, str]] = {
    "by the largest": (by_the_largest, "a largest number or a variance of all"),
    "scaled to one": (scaled_to_one, "a largest number or a variance of all"),
    "a variance": (lambda out, y: out.square().mean() + out.var(0).mean(), "a largest number or a variance of all"),
    "a counter": (Counting(), "another number when it is called again"),
    "trimmed": (trimmed, "labels that are cut by a number that was read from them"),
    "read": (lambda out, y: ce(out, y, reduction="sum") / int((y != -100).sum()), "read from the labels in Python"),
    "two means": (lambda out, y: ce(out, y) + out.square().mean(), "but by several"),
    "a root": (roots, "it takes a root"),
    "rows compared": (rows_compared, "compares rows"),
    "of the output": (lambda out, y: out.sum() / out.abs().sum(), "computed from what the model returns"),
    "labels of its own": (lambda out, y: ce(out, torch.zeros_like(out[..., 0]).long()), "not those that it is given"),
    "so many rows": (lambda out, y: F.cross_entropy(out.view(8, CLASSES), y.view(8)), "cannot be called with"),
    "chosen by the output": (lambda out, y: out[out > 0.4].mean(), "decided by what the model returns"),
    "the largest": (lambda out, y: ce(out, y, reduction="none").topk(3).values.mean(), r"topk\(\) takes from all"),
    "a tuple": (lambda out, y: (ce(out, y), 1), r"your_loss\(out, labels\)\[0\]"),
    "at most": (lambda out, y: ce(out, y).clamp(max=9.0), "clamp at .* is not linear in what all rows give together"),
    "at least": (lambda out, y: F.relu(ce(out, y) - 1.9), "relu at .* is not linear"),
    "a distance of means": (lambda out, y: ce(out, y) + out.mean().abs(), "abs at .* is not linear"),
    "a branch of means": (lambda out, y: (z := ce(out, y)) * torch.where(z > 9.0, 0.1, 1.0), "gt at .* is not linear"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_cannot_be_seen_is_refused_with_what_to_give(name: str) -> None:
    loss, words = OTHERS[name]
    with pytest.raises(ScheduleError, match=words) as caught:
        lost(Shares(loss), *batch())
    assert "loss_weight=" in str(caught.value) or name == "a tuple"


def test_weights_in_a_column_of_the_labels() -> None:
    """In float32, where the loss is looked at in float64."""
    made = torch.Generator().manual_seed(0)
    out, y = torch.randn(8, 2, generator=made), torch.rand(8, 3, generator=made) + 0.1

    def loss(out: Tensor, y: Tensor) -> Tensor:
        return (y[:, 2] * (out - y[:, :2]).square().mean(1)).sum() / y[:, 2].sum()

    close(lost(Shares(loss), out, y), loss(out, y), "a column")


def test_a_bend_that_no_value_shows_is_told_and_a_guard_is_none() -> None:
    with pytest.warns(UserWarning, match=r"goes by values: relu at .* is not linear"):
        assert weights(lambda out, y: F.relu(ce(out, y) + 0.1), *batch(ignored=False)) == [0.25] * 4
    guarded: list[Loss] = [
        lambda out, y: torch.where(torch.isfinite(z := ce(out, y)), z, torch.zeros_like(z)),
        lambda out, y: (z := ce(out, y)).masked_fill(z.isnan(), 0.0),
        lambda out, y: torch.where(
            (n := counted(y).sum()) > 0, ce(out, y, reduction="sum") / n.clamp(min=1), out.sum() * 0
        ),
    ]
    for loss in guarded:
        close(lost(Shares(loss), *batch()), ce(*batch()), "a guard")


def test_two_means_that_agree_by_chance_are_told_when_they_do_not() -> None:
    shares = Shares(OTHERS["two means"][0])
    assert weights(shares.loss_fn, *batch(ignored=False), shares) == [0.25] * 4
    with pytest.raises(ScheduleError, match="but by several"):
        weights(shares.loss_fn, *batch(), shares)


def test_labels_that_differ_by_little_are_told_apart() -> None:
    out, y = torch.randn(8, 32, CLASSES), torch.zeros(8, 32, dtype=torch.long)
    count = lambda y: counted(y).sum()  # noqa: E731
    loss: Loss = lambda out, y: ce(out, y, reduction="sum") / count(y) * count(y) / len(y)  # noqa: E731
    shares = Shares(loss)
    assert weights(loss, out, y, shares) == [0.25] * 4
    y[0, :2] = -100
    assert weights(loss, out, y, shares) == [0.25] * 4  # not the first divisor's


def test_a_first_row_without_loss_shows_nothing() -> None:
    out, y = batch()
    y[0] = -100
    with pytest.raises(ScheduleError, match="compares rows"):
        weights(lambda out, y: ce(out, y, reduction="none").sort(descending=True).values[:3].mean(), out, y)
    assert weights(MEANS["a sum"], out, y) == [1.0] * 4
    heaviest: Loss = lambda out, y: ce(out, y, weight=WEIGHT * (WEIGHT.topk(3).values[-1] <= WEIGHT))  # noqa: E731
    assert len(weights(heaviest, out, y)) == 4  # topk of what is no row


def test_labels_that_do_not_lie_in_one_piece() -> None:
    """As those of a language model: ``ids[:, 1:]``."""
    out, y = batch()
    wide = torch.full((8, 5), -100)
    wide[:, 1:] = y
    for loss in (ce, lambda out, y: ce(out, y.contiguous())):
        assert weights(loss, out, wide[:, 1:]) == weights(loss, out, y)


def test_finding_out_leaves_nothing_behind() -> None:
    """Random numbers, buffers; and it is done once."""

    class Noted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls, self.rate = 0, 0.0
            self.register_buffer("mean", torch.zeros(()))

        def forward(self, out: Tensor, y: Tensor) -> Tensor:
            self.calls += 1
            self.mean.lerp_(out.mean().to(self.mean.dtype), 0.5)
            return ce(F.dropout(out, self.rate), y)

    for rate in (0.0, 0.5):
        noted = Noted()
        noted.rate, shares, before = rate, Shares(noted), torch.get_rng_state()
        assert weights(noted, *batch(ignored=False), shares) == [0.25] * 4
        if rate:  # of what is drawn nothing can be seen, and for these labels it matters
            with pytest.raises(ScheduleError, match="it draws random numbers"):
                weights(noted, *batch(), shares)
        else:
            found = [weights(noted, *batch(), shares) for _ in range(3)]
            assert found[0] == found[2] != [0.25] * 4
        assert noted.calls == 0
        assert torch.equal(before, torch.get_rng_state()) and noted.mean == 0


LOG: list[float] = []


def test_what_a_loss_writes_down_is_of_its_own_calls() -> None:
    """Lists, dicts and objects that it reaches by its file, its closure and its object have no number of a look at it."""
    mine, kept = list[float](), {"calls": 0, "sum": 0.0}

    def loss(out: Tensor, y: Tensor) -> Tensor:
        found = ce(out, y)
        mine.append(float(found))
        LOG.append(float(found))
        kept["calls"] += 1
        return found

    shares = Shares(loss)
    for step in range(1, 6):
        lost(shares, *batch(ignored=False))
        assert len(mine) == len(LOG) == kept["calls"] == 4 * step, step
    assert mine == LOG


def lost(shares: Shares, out: Tensor, y: Tensor) -> Tensor:
    """The loss of the batch, put together as a pipeline does."""
    parts, found, weights = y.split(2), list[Any](), None
    for i, part in enumerate(out.split(2)):
        loss, weights = shares.lose(part, i, parts, y, [2] * 4, weights)
        found.append(loss)
    return torch.stack([loss * w for loss, w in zip(found, weights or [], strict=True) if loss is not None]).sum()


class Changing:
    """A loss that divides by something else from some step on."""

    def __init__(self, *kinds: Loss) -> None:
        self.kinds, self.now = kinds, 0

    def __call__(self, out: Tensor, y: Tensor) -> Tensor:
        return self.kinds[self.now](out, y)


@pytest.mark.parametrize("names", [
    ("a mean", "ignored labels"), ("ignored labels", "a sum"), ("ignored labels", "weights of classes"),
    ("smoothed", "a mask by hand"), ("a mean", "a sum", "ignored labels", "a mean"),
])  # fmt: skip
def test_a_loss_that_changes_is_seen_again(names: tuple[str, ...]) -> None:
    loss = Changing(*(MEANS[name] for name in names))
    shares = Shares(loss)
    for step in range(2 * len(names)):
        loss.now = step // 2
        close(lost(shares, *batch()), loss(*batch()), (names, step))


def with_clamp(out: Tensor, y: Tensor) -> Tensor:
    return ce(out, y, reduction="sum") / (y != -100).sum().clamp(min=1)


def chosen_with_clamp(out: Tensor, y: Tensor) -> Tensor:
    flat, seen = out.flatten(0, 1), y.flatten() != -100
    return F.cross_entropy(flat[seen], y.flatten()[seen], reduction="sum") / seen.sum().clamp(min=1)


def guarded(out: Tensor, y: Tensor) -> Tensor:
    loss = ce(out, y)
    if not torch.isfinite(loss):
        raise FloatingPointError("no loss")
    return loss


def labels_of(*rows: int) -> Tensor:
    return torch.tensor(rows).view(-1, 1)


@pytest.mark.parametrize("loss", [with_clamp, chosen_with_clamp, guarded, at_least_one])
def test_right_losses_of_labels_that_tell_little(loss: Loss) -> None:
    """First and last rows alike, ignored rows, microbatches and batches: nothing of it is refused."""
    out = torch.randn(8, 1, CLASSES, generator=torch.Generator().manual_seed(0))
    shares, nothing = Shares(loss), labels_of(*[-100] * 8)
    batches = [labels_of(1, 2, 3, -100, 2, 1, 1, 0), labels_of(-100, 1, 2, 3, 4, 5, 6, -100)]
    if loss is not guarded:  # which no batch passes of which a microbatch is ignored
        batches = [nothing, *batches, labels_of(-100, -100, 2, 3, 4, -100, 6, -100), nothing]
    for y in batches:
        close(lost(shares, out, y), loss(out, y), str(y.flatten().tolist()))
        close(lost(Shares(loss), out, y), loss(out, y), f"anew: {y.flatten().tolist()}")


def test_weights_in_the_labels_own_precision() -> None:
    made = torch.Generator().manual_seed(3)
    for rows in (8, 256):
        for _ in range(8):
            out, w = torch.randn(rows, 4, generator=made), torch.randn(rows, generator=made).abs()
            loss: Loss = lambda out, w: (out.square().mean(1) * w).sum() / w.sum()  # noqa: E731
            shares, weights, found = Shares(loss), None, list[Any]()
            for i, part in enumerate(out.chunk(4)):
                one, weights = shares.lose(part, i, w.chunk(4), w, [rows // 4] * 4, weights)
                found.append(one)
            assert weights is not None
            total = torch.stack([loss * w for loss, w in zip(found, weights, strict=True)]).sum()
            close(total, loss(out, w), f"{rows} rows")


def test_numbers_that_come_up_later_are_compared_then() -> None:
    """Nothing of two means is seen while one of them is of nothing: of the first labels that it has, in whichever step."""

    def detected(out: Tensor, y: Tensor) -> Tensor:
        found = (y == 3).to(out.dtype)
        return out.square().mean() + (out.mean(-1) * found).sum() / found.sum().clamp(min=1)

    out, y = batch(ignored=False)
    y[y == 3] = 0
    shares = Shares(detected)
    for _ in range(20):
        close(lost(shares, out, y), detected(out, y), "nothing found")
    y[1, 0] = y[4, 1] = y[5, 0] = 3
    with pytest.raises(ScheduleError, match="but by several"):
        lost(shares, out, y)


def test_labels_that_tell_more_than_two_rows_are_compared_whole() -> None:
    flagged: Loss = lambda out, y: out.square().mean() * (1.0 + (y == 3).any())  # noqa: E731
    out, y = batch(ignored=False)
    y[y == 3] = 0
    shares = Shares(flagged)
    close(lost(shares, out, y), flagged(out, y), "nothing to see")
    y[4, 1] = 3  # neither the first nor the last row
    for one in (shares, Shares(flagged)):  # in the second step, and in the first one
        with pytest.raises(ScheduleError, match="compares rows"):
            lost(one, out, y)


def test_settings_of_a_module_that_change_are_seen_again() -> None:
    loss = nn.CrossEntropyLoss()
    shares = Shares(lambda out, y: loss(out.flatten(0, 1), y.flatten().clamp(min=0)))
    changes: list[dict[str, Any]] = [
        {}, {"reduction": "sum"}, {"reduction": "mean", "ignore_index": 0}, {"weight": WEIGHT}, {"weight": WEIGHT.flip(0)},
    ]  # fmt: skip
    for change in changes:
        for name, value in change.items():
            setattr(loss, name, value)
        close(lost(shares, *batch()), shares.loss_fn(*batch()), change)


def test_a_branch_on_a_microbatchs_values_is_told() -> None:
    def clipped(out: Tensor, y: Tensor) -> Tensor:
        found = ce(out, y.clamp(min=0))
        return found if found.item() < 2.2 else found * 0

    out, y = batch(ignored=False)
    assert len({ce(a, b).item() < 2.2 for a, b in zip(out.split(2), y.split(2), strict=True)}) == 2
    shares = Shares(clipped)
    lost(shares, out, y)
    with pytest.warns(UserWarning, match="other operators for microbatch . than for the first one"):
        lost(shares, out, y)


def test_numbers_that_earlier_stages_hand_on_are_means_over_rows() -> None:
    """Those of an auxiliary loss; what is the same for all microbatches (a scale that is learned) fits every weight."""
    out, y = batch()
    both: Loss = lambda out, y: ce(out[0], y) + 0.3 * out[1]  # noqa: E731
    mean: Loss = lambda out, y: out[0].square().mean() + 0.3 * out[1]  # noqa: E731
    scaled: Loss = lambda out, y: ce(out[0] * out[1], y)  # noqa: E731
    numbers = out.square().mean((1, 2)).view(4, 2).mean(1)

    def made(loss: Loss, of_each: Tensor) -> Tensor:
        shares, parts, found, weights = Shares(loss), y.split(2), list[Tensor](), None
        for i, part in enumerate(out.split(2)):
            each, weights = shares.lose((part, of_each[i]), i, parts, y, [2] * 4, weights)
            found.append(torch.zeros(()) if each is None else each * weights[i])
        return torch.stack(found).sum()

    table = torch.ones(3, CLASSES)  # of as many rows as no microbatch has, beside a number
    tabled: Loss = lambda out, y: ce((out[0] * out[1].mean()) * out[2], y)  # noqa: E731
    shares, parts, weights = Shares(tabled), y.split(2), None
    for i, part in enumerate(out.split(2)):
        _, weights = shares.lose((part, table, torch.tensor(1.5)), i, parts, y, [2] * 4, weights)
    close(made(mean, numbers), mean((out, numbers.mean()), y), "one divisor")
    close(made(scaled, torch.full((4,), 1.5)), scaled((out, torch.tensor(1.5)), y), "a scale")
    with pytest.raises(ScheduleError, match=r"an auxiliary loss.*no weight fits both"):
        made(both, numbers)


# On ranks


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(CLASSES, 8)

    def forward(self, ids: Tensor) -> Tensor:
        return self.table(ids)


def descs() -> list[Any]:
    return [
        fleet.LayerDesc(Tokens),
        fleet.LayerDesc(nn.Linear, 8, 8),
        nn.Tanh(),
        fleet.LayerDesc(nn.Linear, 8, CLASSES),
    ]


def by_layers(names: list[str]) -> None:
    for name in names:
        begin("1F1B", 4, 2, pp=2)
        torch.manual_seed(0)
        single = OneCard(descs())
        torch.manual_seed(0)
        mine = fleet.PipelineLayer(descs(), loss_fn=MEANS[name])
        model = fleet.distributed_model(mine)
        for ignored in (False, True):
            y = batch(ignored)[1]
            x = torch.arange(32).view(8, 4) % CLASSES
            loss = model.forward_backward_pipeline([x, y])
            expected = MEANS[name](single(x), y)
            expected.backward()
            close(loss, expected.detach(), name)
            compare(mine, single, f"{name}, ignored: {ignored}", gradients=True)
            close(model.eval_batch([x, y]), expected.detach(), f"{name}, in evaluation")


class Marked(nn.Module):
    """Two stages by marks; no meshes: one card."""

    def __init__(self, meshes: list[oc.ProcessMesh]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.meshes, self.first, self.second = meshes, Tokens(), nn.Linear(8, CLASSES)
        for part, mesh in zip((self.first, self.second), meshes, strict=False):
            oc.shard_layer(part, mesh)

    def forward(self, ids: Tensor) -> Tensor:
        return self.second(self._on(self.first(self._on(ids, 0)).tanh(), 1))

    def _on(self, x: Tensor, stage: int) -> Tensor:
        return oc.reshard(x, self.meshes[stage], [oc.Shard(0)]) if self.meshes else x


def by_marks(names: list[str], size: int) -> None:
    meshes = [oc.ProcessMesh(range(size * i, size * (i + 1)), ["dp"]) for i in range(2)]
    for name in names:
        loss_fn, net, single, twin = MEANS[name], Marked(meshes), Marked([]), Marked(meshes)

        def step(x: Tensor, y: Tensor, twin: nn.Module = twin, loss_fn: Loss = loss_fn) -> Tensor:
            twin.zero_grad()
            return pipeline.step_by_marks(twin, loss_fn, x, y)

        static = oc.to_static(step)
        for ignored in (False, True, True):
            y = batch(ignored)[1]
            x = torch.arange(32).view(8, 4) % CLASSES
            net.zero_grad()
            single.zero_grad()
            loss = pipeline.step_by_marks(net, lambda out, y, loss_fn=loss_fn: loss_fn(out, y), x, y)
            expected = loss_fn(single(x), y)
            expected.backward()
            close(oc.unshard(loss), expected.detach(), name)
            chooses = name in (
                "rows that are chosen",
                "masked_select",
            )  # shapes by values are recorded for no other batch
            if not chooses:
                close(oc.unshard(static(x, y)), expected.detach(), f"{name}, recorded")
            for p, q, r in zip(net.parameters(), twin.parameters(), single.parameters(), strict=True):
                close(oc.unshard(p.grad), r.grad, f"{name}, ignored: {ignored}")
                if not chooses:
                    close(oc.unshard(q.grad), r.grad, f"{name}, recorded, ignored: {ignored}")
    with pytest.raises(ScheduleError, match="but by several"):
        pipeline.step_by_marks(net, OTHERS["two means"][0], x, y)


class Faulty:
    """A loss that ends in the third microbatch of the first step."""

    calls = 0

    def __call__(self, out: Tensor, y: Tensor) -> Tensor:
        Faulty.calls += out.shape[0] == 2 and out.requires_grad
        if Faulty.calls == 3:
            raise ValueError("the third one")
        return out.square().mean()


def after_a_fault() -> None:
    """A step that ends in the middle leaves messages about, of which none is another pipeline's."""
    ids, y = torch.arange(32).view(8, 4) % CLASSES, batch(ignored=False)[1]
    for loss_fn in (roots, Faulty(), MEANS["a mean"]):
        begin("1F1B", 4, 2, pp=2)
        torch.manual_seed(0)
        single = OneCard(descs())
        torch.manual_seed(0)
        mine = fleet.PipelineLayer(descs(), loss_fn=loss_fn)
        model = fleet.distributed_model(mine)
        if loss_fn is not MEANS["a mean"]:
            with pytest.raises((ScheduleError, CommunicationError, ValueError), match=r"takes a root|the third one"):
                model.forward_backward_pipeline([ids, y])
        else:
            for step in range(2):
                x = (ids + step) % CLASSES
                expected = MEANS["a mean"](single(x), y)
                expected.backward()
                close(model.forward_backward_pipeline([x, y]), expected.detach(), f"step {step}")
                compare(mine, single, f"step {step}", gradients=True)


def test_what_a_step_leaves_that_ends_in_the_middle_is_not_the_next_pipelines() -> None:
    begun = time.monotonic()
    run_ranks(after_a_fault, 2)
    assert time.monotonic() - begun < 60.0  # nobody waits for a time-out


def test_pipelines_of_layers() -> None:
    run_ranks(
        by_layers, 2, ["ignored labels", "a mask by hand", "losses that are chosen", "smoothed, with weights", "a sum"]
    )


@pytest.mark.share(1)
@pytest.mark.parametrize("size", [1, 2])
def test_stages_by_marks(size: int) -> None:
    names = ["ignored labels", "rows that are chosen", "2d", "masked_select", "a sum"]
    run_ranks(by_marks, 2 * size, names[: 7 - 2 * size], size)
