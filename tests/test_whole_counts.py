"""What a batch counts (labels, tokens, weights) under microbatches: a loss is scaled by the batch's own count, as on one card."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from amounts import amount, cells
from fuzz import counts, micro
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, one_hot, pad, smooth_l1_loss

import onecard as oc
from onecard.errors import RecordingError
from onecard.static.passes import microbatches
from onecard.static.run.rechecked import Recounted
from onecard.testing import run_ranks

ROWS, CLASSES, CALLS = 16, 5, 4
PAD = 4


def each(o: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return cross_entropy(o, y, reduction="none"), (y != PAD).float()


def masked(o: Tensor, y: Tensor) -> Tensor:
    loss, keep = each(o, y)
    return (loss * keep).sum() / keep.sum().clamp(min=1)


def by_reciprocal(o: Tensor, y: Tensor) -> Tensor:
    loss, keep = each(o, y)
    return loss.mul(keep).mean() * (len(y) / (keep.sum() + 1e-6))


def by_mean(o: Tensor, y: Tensor) -> Tensor:
    loss, keep = each(o, y)
    return (loss * keep).mean() / keep.mean()


def by_root(o: Tensor, y: Tensor) -> Tensor:
    loss, keep = each(o, y)
    return (loss * keep).sum() / keep.sum().sqrt()


def by_table(o: Tensor, y: Tensor) -> Tensor:
    weight = torch.linspace(0.5, 2, CLASSES)[y]
    return (cross_entropy(o, y, reduction="none") * weight).sum() / weight.sum()


def normalized(o: Tensor, y: Tensor) -> Tensor:
    """Weights are divided by their sum ahead of their product with the rows."""
    weight = torch.linspace(0.5, 2, CLASSES)[y]
    return (cross_entropy(o, y, reduction="none") * (weight / weight.sum())).sum() + o.square().mean()


def boxes(o: Tensor, y: Tensor) -> Tensor:
    """As detectors do: classes of all, boxes of those that are matched."""
    found = y < 2
    near = smooth_l1_loss(o, one_hot(y, CLASSES).float(), reduction="none").sum(1)
    return cross_entropy(o, y) + (near * found).sum() / found.sum().clamp(min=1)


def twice(o: Tensor, y: Tensor) -> Tensor:
    """Two counts, each of its own labels; one of them written in place."""
    count = (y != PAD).sum()
    loss = cross_entropy(o, y, ignore_index=PAD, reduction="sum")
    loss /= count
    return loss + 0.1 * cross_entropy(o, y, ignore_index=0)


def shifted(o: Tensor, y: Tensor) -> Tensor:
    """As language models shift their labels: padded at the end of a row, which is then cut off at its beginning."""
    labels = pad(torch.stack([y, (y + 1) % CLASSES, y], 1), (0, 1), value=PAD)[:, 1:].contiguous()
    return cross_entropy(o[:, None].expand(-1, 3, -1).reshape(-1, CLASSES), labels.view(-1), ignore_index=PAD)


def of_each_row(o: Tensor, y: Tensor) -> Tensor:
    """Counts of each row, bent in each row, and then added."""
    wanted = one_hot(y, CLASSES).cumsum(1).roll(1, 1).sum(1).clamp(max=3)
    return (cross_entropy(o, y, reduction="none") * wanted).sum() / wanted.sum()


def hidden(o: Tensor, y: Tensor) -> Tensor:
    """As masked autoencoders do: which columns of a row count is in an order of its own."""
    hides = torch.ones(len(y), CLASSES)
    hides[:, :3] = 0
    mask = hides.gather(1, torch.argsort(one_hot(y, CLASSES), 1)) * (y != PAD)[:, None]
    return (o.square() * mask).sum() / mask.sum()


def over_a_tensor(o: Tensor, y: Tensor) -> Tensor:
    """The length of the batch, brought into the step as a tensor."""
    return cross_entropy(o, y, reduction="sum") / torch.tensor(len(y))


def summed_in_a_loop(o: Tensor, y: Tensor) -> Tensor:
    count = 0
    for label in range(PAD):
        count += (y == label).sum()  # type: ignore[assignment]
    return cross_entropy(o, y, reduction="sum", ignore_index=PAD) / count


def of_the_others(o: Tensor, y: Tensor) -> Tensor:
    """As ``LabelSmoother`` of transformers does: all, but for what is ignored; beside a number that does not grow."""
    ignored = (y == PAD)[:, None]
    logs = -o.log_softmax(-1)
    nll = logs.gather(1, y[:, None]).masked_fill(ignored, 0.0)
    smooth = logs.sum(-1, keepdim=True).masked_fill(ignored, 0.0)
    count = 1 + (ignored.numel() - ignored.long().sum())
    return 0.9 * nll.sum() / count + 0.1 * (smooth.sum() / (count * CLASSES))


def guarded(o: Tensor, y: Tensor) -> Tensor:
    """Nothing where nothing counts: more than one microbatch has, and less than some batches."""
    loss, keep = each(o, y)
    many, several = keep.sum() > 13, keep.sum() > 2
    mean = (loss * keep).sum() / keep.sum()
    return torch.where(many, mean, torch.zeros_like(mean)) + mean * several + torch.where(several, 0.0, mean)


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "of the others": of_the_others,
    "guarded": guarded,
    "ignored": lambda o, y: cross_entropy(o, y, ignore_index=PAD),
    "weights": lambda o, y: cross_entropy(o, y, weight=torch.arange(1.0, CLASSES + 1), ignore_index=PAD),
    "smoothed": lambda o, y: cross_entropy(o, y, ignore_index=PAD, label_smoothing=0.1),
    "masked": masked,
    "reciprocal": by_reciprocal,
    "mean": by_mean,
    "root": by_root,
    "table": by_table,
    "normalized": normalized,
    "boxes": boxes,
    "twice": twice,
    "shifted": shifted,
    "of each row": of_each_row,
    "hidden": hidden,
    "over a tensor": over_a_tensor,
    "summed in a loop": summed_in_a_loop,
    "columns": lambda o, y: cross_entropy(torch.stack([o, 2 * o], 2), torch.stack([y, y], 1), ignore_index=PAD),
    "columns smoothed": lambda o, y: cross_entropy(
        torch.stack([o, o.tanh()], 2), torch.stack([y, y], 1), ignore_index=PAD, label_smoothing=0.1
    ),
    "images": lambda o, y: cross_entropy(o[:, :, None, None], y[:, None, None], ignore_index=PAD),
    "share": lambda o, y: cross_entropy(o, y % CLASSES) * ((y != PAD).sum() / len(y)),
}


def batches() -> list[tuple[Tensor, Tensor]]:
    """Of which a microbatch counts nothing, or all microbatches count as much, or each another number."""
    generator = torch.Generator().manual_seed(3)
    made = []
    for i in range(CALLS):
        y = torch.randint(0, CLASSES, (ROWS,), generator=generator)
        if i == 0:
            y = torch.arange(ROWS) % 4
        elif i == 1:
            y[: ROWS // 4] = PAD
        made.append((torch.randn(ROWS, 6, generator=generator), y))
    return made


def steps(loss: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Any]:
    """Gives back the loss, a share of a count, a count that is no sum, and two by the number of rows."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, CLASSES))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.02)

    def step(x: Tensor, y: Tensor) -> Any:
        out = net(x)
        found = loss(out, y)
        found.backward()
        optimizer.step()
        optimizer.zero_grad()
        keep = y != PAD
        right = ((out.argmax(1) == y) & keep).sum() / keep.sum().clamp(min=1)
        ones = (y == 1).sum()
        return found.detach(), right, keep.sum().clamp(min=10), keep.sum() / len(y), ones / keep.sum() * len(y)

    return step


def run(step: Callable[[Tensor, Tensor], Any]) -> list[list[float]]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", r".*rank\(s\) .* have no parameter", UserWarning)
        return [[float(v) for v in step(x, y)] for x, y in batches()]


ONE_CARD = {name: run(steps(loss)) for name, loss in LOSSES.items()}


def far(found: list[list[float]], name: str) -> float:
    return max(
        abs(a - b) / max(abs(b), 1)
        for xs, ys in zip(found, ONE_CARD[name], strict=True)
        for a, b in zip(xs, ys, strict=True)
    )


@pytest.mark.share(12)
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("k", [4, ROWS])
def test_a_loss_is_scaled_by_what_the_batch_counts(name: str, k: int) -> None:
    assert far(run(oc.to_static(steps(LOSSES[name]), k_steps=k)), name) < 1e-5


def test_a_mean_of_means_is_another_number() -> None:
    """What the test above would see, were each microbatch divided by its own count."""
    step = steps(masked)
    means = torch.tensor(
        [[float(step(x, y)[0]) for x, y in zip(x.chunk(4), y.chunk(4), strict=True)] for x, y in batches()]
    )
    assert (means[0].mean() - ONE_CARD["masked"][0][0]).abs() > 1e-4


def test_equal_counts_say_nothing_of_what_is_bent(monkeypatch) -> None:
    """Where counts cannot be followed to the batch: of equal ones a multiple may be divided by, not what is asked of them."""
    monkeypatch.setattr(microbatches, "with_whole_counts", lambda graph, *_: graph)

    def losses(bent: Callable[[Tensor], Tensor], k: int | None) -> Tensor:
        return counts.trains(lambda o, x, y: cross_entropy(o, y, reduction="sum") * bent((y >= 0).sum()), k)[0]

    torch.testing.assert_close(losses(torch.reciprocal, 4), losses(torch.reciprocal, None), rtol=1e-5, atol=0.0)
    for bent in (lambda n: n > 13, torch.rsqrt, lambda n: 1 / (n + 1)):
        with pytest.raises(RecordingError, match="scales by a value"):
            losses(bent, 4)


@pytest.mark.parametrize("seed", [1, 6, 13, 22])
def test_random_losses_are_right_told_or_refused(seed: int) -> None:
    assert counts.judged(seed, 4) in ("right", "told", "refused")


def planned(plan: oc.Plan, names: list[str]) -> dict[str, list[list[float]]]:
    return {name: run(oc.to_static(steps(LOSSES[name]), plan=plan)) for name in names}


PLANS = {
    "dp": oc.Plan(dp=2, microbatches=2),
    "pp": oc.Plan(pp=2, microbatches=4),
    "zbv": oc.Plan(pp=2, microbatches=4, schedule="ZBV", virtual=2),
}


@pytest.mark.proof
@pytest.mark.share(2)
@pytest.mark.parametrize("how", PLANS)
def test_on_ranks(how: str) -> None:
    names = [name for name, plan in cells([*LOSSES], [*PLANS], 3) if plan == how]
    names = [*dict.fromkeys([*names, "share"])]  # ranks' shares of it are added up between the count and its division
    for found in run_ranks(planned, 2, PLANS[how], names):
        assert {name: d for name, values in found.items() if (d := far(values, name)) >= 1e-5} == {}


def _with_cut_classes(k: int) -> tuple[list[float], list[float]]:
    """Losses of one card, and of two ranks that each have some of the classes, and so count some of the labels.

    Each row has two labels, laid out as language models do.
    """
    mesh, found = oc.ProcessMesh([0, 1], ["tp"]), []
    for alone in (True, False):
        torch.manual_seed(0)
        net = nn.Linear(6, CLASSES)
        if not alone:
            for name, p in [*net.named_parameters()]:
                setattr(net, name, nn.Parameter(oc.shard_tensor(p.detach(), mesh, [oc.Shard(0)])))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.5)

        def step(x: Tensor, y: Tensor, net: Any = net, optimizer: Any = optimizer) -> Tensor:
            out, labels = net(x[:, None].expand(-1, 2, -1)), torch.stack([y, (y + 1) % CLASSES], 1)
            loss = cross_entropy(out.flatten(0, 1), labels.flatten(), ignore_index=PAD)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        run: Any = step if alone else oc.to_static(step, k_steps=k)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found.append([float(run(x, y)) for x, y in batches()[:3]])
    return found[0], found[1]


@pytest.mark.parametrize("k", [2, ROWS])
def test_labels_of_classes_that_are_cut(k: int) -> None:
    for alone, found in run_ranks(_with_cut_classes, 2, k):
        assert found == pytest.approx(alone, rel=1e-5)


def first_row(o: Tensor, y: Tensor) -> Tensor:
    made = torch.zeros_like(y)
    made[0] = 1
    return cross_entropy(o, y, reduction="sum") / (made.sum() + 1)


def test_a_divisor_that_differs_much_later_is_told_at_once() -> None:
    net = nn.Linear(6, CLASSES)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = cross_entropy(net(x), y, reduction="sum") / torch.histc(y.float(), 5, 0, 4)[4]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    run, x, y = oc.to_static(step, k_steps=2), torch.randn(8, 6), torch.full((8,), 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(40):
            run(x, y)
    y[:4] = 2
    with pytest.warns(UserWarning, match="scales by a value, of which each microbatch has its own"):
        run(x, y)


class OnGpu(Tensor):
    """A value that a host would wait for."""

    device = torch.device("cuda")  # type: ignore[assignment]


def test_what_a_gpu_has_found_is_read_later() -> None:
    """Nobody waits for it at each call, and what was found in between is told."""
    differs, told = torch.zeros((), dtype=torch.bool), list[int]()
    count = SimpleNamespace(said="differs", differing=lambda _: differs.clone().as_subclass(OnGpu))
    recording, recounted = SimpleNamespace(counts=(count,)), Recounted()
    for call in range(1, 70):
        differs.fill_(call == 35)  # behind the look of call 32
        if recounted.told(recording, ()):
            told.append(call)
    assert told == [64] and not recording.counts


def _mean_of_tokens(o: Tensor, y: Tensor, per_token: Callable[..., Tensor]) -> Tensor:
    keep = (y != -100).to(o.dtype)
    return (per_token(o, y.clamp(min=0)) * keep).sum() / keep.sum()


OF_SEQUENCES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "flat": lambda o, y: cross_entropy(o.flatten(0, 1), y.flatten()),
    "reshaped": lambda o, y: cross_entropy(o.reshape(-1, 12), y.reshape(-1), label_smoothing=0.1),
    "transposed": lambda o, y: cross_entropy(o.transpose(1, 2), y),
    "shifted": lambda o, y: cross_entropy(o[:, :-1].transpose(1, 2), y[:, 1:]),
    "by hand": lambda o, y: _mean_of_tokens(
        o, y, lambda o, y: cross_entropy(o.transpose(1, 2), y, reduction="none", ignore_index=-1)
    ),
    "gathered": lambda o, y: _mean_of_tokens(o, y, lambda o, y: -o.log_softmax(-1).gather(-1, y[..., None])[..., 0]),
    "weighted": lambda o, y: cross_entropy(o.transpose(1, 2), y, weight=torch.linspace(1, 2, 12, dtype=o.dtype)),
}


def _over_sequences(ways: dict[str, list[Any]], names: list[str]) -> dict[tuple[str, str], list[float]]:
    """Losses of a model whose sequences are divided, on some axes; the labels that are ignored, of the last tokens alone."""
    found = {}
    for way, placements in ways.items():
        mesh = oc.ProcessMesh([0, 1], ["tp"])
        for name in names:
            torch.manual_seed(0)
            model: Any = nn.Sequential(nn.Embedding(12, 16), nn.Linear(16, 12)).double()
            if oc.get_world_size() > 1:
                oc.shard_layer(model, mesh)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

            def step(x: Tensor, y: Tensor) -> Tensor:
                h = model[0](x)  # noqa: B023
                if oc.get_world_size() > 1:
                    h = oc.reshard(h, mesh, placements)  # noqa: B023
                loss = OF_SEQUENCES[name](model[1](h), y)  # noqa: B023
                optimizer.zero_grad()  # noqa: B023
                loss.backward()
                optimizer.step()  # noqa: B023
                return loss.detach()

            run = oc.to_static(step, k_steps=2) if oc.get_world_size() > 1 else step
            made = torch.Generator().manual_seed(1)
            losses = []
            for k in range(4):
                x = torch.randint(12, (8, 6), generator=made)
                y = x.roll(-1, 1)
                y[: 1 + k, 3:] = -100
                losses.append(float(run(x, y)))
            found[way, name] = losses
    return found


WAYS: dict[str, list[Any]] = {"sequences": [oc.Shard(1)], "features": [oc.Shard(2)]}


def test_labels_of_sequences_that_are_cut() -> None:
    wanted = _over_sequences({"": [None]}, [*OF_SEQUENCES])
    for found in run_ranks(_over_sequences, 2, WAYS, [*OF_SEQUENCES]):
        for (way, name), losses in found.items():
            assert losses == pytest.approx(wanted["", name], rel=1e-9), (way, name)


def test_a_count_of_some_rows_is_refused() -> None:
    """Or right, where torch writes the row by a number (2.15): then both looks know the count, and it is the same in both."""
    step, alone = oc.to_static(steps(first_row), k_steps=2), steps(first_row)
    for x, y in batches()[:3]:
        try:
            found = step(x, y)
        except RecordingError as refused:
            assert "scales by a value, of which each microbatch has its own" in str(refused)
            return
        torch.testing.assert_close(found, alone(x, y), rtol=1e-5, atol=1e-6)


def _of_rows(
    write: Callable[[Tensor], Any], value: float = 1.0, columns: int = 0
) -> Callable[[Tensor, Tensor], Tensor]:
    """A loss whose rows are weighed by memory into parts of which the step writes."""

    def loss(o: Tensor, y: Tensor) -> Tensor:
        made = torch.full((len(y), columns) if columns else (len(y),), value)
        write(made)
        each = cross_entropy(o, y, reduction="none")
        return ((each[:, None] if columns else each) * made).sum() / len(y)

    return loss


def _of_their_count(write: Callable[[Tensor], Any]) -> Callable[[Tensor, Tensor], Tensor]:
    def loss(o: Tensor, y: Tensor) -> Tensor:
        made = torch.ones_like(y)
        write(made)
        return cross_entropy(o, y, reduction="sum") / made.sum()

    return loss


REFUSED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "a row": _of_rows(lambda m: m[0].fill_(3)),  # as torch 2.15 writes m[0] = 3
    "some rows": _of_rows(lambda m: m[:2].mul_(3.0)),
    "each second": _of_rows(lambda m: torch.zero_(m[::2])),
    "through a view of another form": _of_rows(lambda m: m.view(-1, 2)[0].fill_(0.0)),
    "of a table": _of_rows(lambda m: m.t().narrow(1, 0, 2).fill_(0.5), columns=3),
    "through two views": _of_rows(lambda m: m.select(1, 0).narrow(0, 1, 1).zero_(), columns=3),
    "their count": _of_their_count(lambda m: m[1:3].zero_()),
    "their count but one": _of_their_count(lambda m: m[:1].zero_()),
}
RIGHT: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "a column": _of_rows(lambda m: m[:, 0].fill_(3.0), columns=4),
    "a row of the transpose": _of_rows(lambda m: m.t()[0].fill_(3.0), columns=4),
    "all of it, by a view": _of_rows(lambda m: m.view(2, -1).fill_(3.0)),
    "a column, twice": _of_rows(lambda m: (m[:, 1].zero_(), m[:, 1:3].add_(2.0)), columns=4),
    "a count of them all": _of_their_count(lambda m: m.view(-1, 1).mul_(2)),
}


@pytest.mark.share(8)
@pytest.mark.parametrize("name", [*REFUSED, *RIGHT])
def test_memory_that_is_written_in_part(name: str) -> None:
    """Who writes into some rows of what was the same for all has told them apart."""
    wanted, found = steps((REFUSED | RIGHT)[name]), oc.to_static(steps((REFUSED | RIGHT)[name]), k_steps=2)
    if name in REFUSED:
        with pytest.raises(RecordingError, match=r"own for each row|length of a microbatch"):
            for x, y in batches()[:2]:
                found(x, y)
        return
    for x, y in batches()[:3]:
        assert float(found(x, y)[0]) == pytest.approx(float(wanted(x, y)[0]), rel=1e-5)


def _activations(write: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """A loss of what the model gives, into which the step writes."""

    def loss(o: Tensor, y: Tensor) -> Tensor:
        made = o * 1
        return write(made).square().mean() + cross_entropy(o, y)

    return loss


def _ahead_of_a_write(m: Tensor) -> Tensor:
    row = m[0]
    m.mul_(2.0)
    return row


REFUSED_ROWS: dict[str, Callable[[Tensor], Tensor]] = {
    "a row": lambda m: (m[1].fill_(0.3), m)[1],
    "a row, in a column": lambda m: (m[:, 2][0].zero_(), m)[1],
    "a diagonal": lambda m: (m.diagonal().fill_(0.2), m)[1],
    "rows by number": lambda m: m.index_fill(0, torch.tensor([0, 1]), 0.1),
    "rows by number, in place": lambda m: m.index_fill_(0, torch.tensor([0, 1]), 0.1),
    "a row of another": lambda m: (m[0].copy_(m[1].detach()), m)[1],
    "a row, written to as a part of all": _ahead_of_a_write,
    "a triangle": lambda m: m.tril(),
    "a place in each column": lambda m: m.scatter(0, torch.zeros(1, m.shape[1], dtype=torch.int64), 0.5),
}
RIGHT_ROWS: dict[str, Callable[[Tensor], Tensor]] = {
    "a column": lambda m: (m[:, 1].fill_(0.3), m)[1],
    "a column of another": lambda m: (m[:, 1].copy_(m[:, 0].detach()), m)[1],
    "two columns, one after the other": lambda m: (m[:, 0].zero_(), m[:, 2:].mul_(0.5))[1].sum(1),
    "a place in each row": lambda m: m.scatter(1, m.argmax(1, keepdim=True), 0.5),
    "all of it": lambda m: (m.view(-1).mul_(0.5), m)[1],
    "what is large": lambda m: m.masked_fill(m > 0.3, 0.1),
}


@pytest.mark.share(8)
@pytest.mark.parametrize("name", [*REFUSED_ROWS, *RIGHT_ROWS])
def test_activations_that_are_written_in_part(name: str) -> None:
    """Rows that are written to, or chosen, by their number in the batch: a microbatch has other rows there."""
    loss = _activations((REFUSED_ROWS | RIGHT_ROWS)[name])
    wanted, found = steps(loss), oc.to_static(steps(loss), k_steps=2)
    if name in REFUSED_ROWS:
        with pytest.raises(RecordingError, match=r"takes rows of the batch together|goes by where rows stand"):
            for x, y in batches()[:2]:
                found(x, y)
        return
    for x, y in batches()[:3]:
        assert float(found(x, y)[0]) == pytest.approx(float(wanted(x, y)[0]), rel=1e-5)


OF_THE_LENGTH: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "an activation is written to": lambda o, y, k: (torch.ones(len(y)), o.add_(0.5))[0].sum(),
    "a number, and a write": lambda o, y, k: (torch.tensor(float(len(y))), o.relu_())[0],
    "times the program's": lambda o, y, k: k * torch.ones(len(y)).sum(),
    "times its view": lambda o, y, k: (k.view(1) * len(y)).sum(),
    "expanded": lambda o, y, k: k.expand(len(y)).sum(),
    "beside the program's": lambda o, y, k: torch.stack([torch.tensor(float(len(y))), k])[0],
    "chosen": lambda o, y, k: torch.where(k > 0, torch.tensor(float(len(y))), k),
    "into a copy": lambda o, y, k: k.clone().mul_(len(y)),
    "into memory that was empty": lambda o, y, k: torch.empty(len(y)).fill_(1.0).sum(),
    "one of several": lambda o, y, k: next(iter(torch.tensor([float(len(y)), 2.0]))),
    "of a shape": lambda o, y, k: torch.tensor(list(o.shape)).float().unbind()[0],
    "a part": lambda o, y, k: torch.tensor([2.0, float(len(y))]).tensor_split(2)[1].sum(),
    "the largest": lambda o, y, k: torch.stack([torch.tensor(float(len(y))), k]).max(0).values,
    "added to the program's": lambda o, y, k: k + len(y),
}


@pytest.mark.parametrize("name", OF_THE_LENGTH)
def test_a_divisor_made_of_the_length(name: str) -> None:
    """With the program's own tensor, or with a write between it and its use: it follows the rows, or is refused."""
    own = torch.tensor(2.0)

    def loss(o: Tensor, x: Tensor, y: Tensor) -> Tensor:
        each = cross_entropy(o, y, reduction="none")
        return each.sum() / OF_THE_LENGTH[name](o, y, own)

    if name == "added to the program's":
        with pytest.raises(RecordingError, match="takes the length of a microbatch"):
            counts.trains(loss, 2)
        return
    torch.testing.assert_close(counts.trains(loss, 2)[0], counts.trains(loss, None)[0], rtol=1e-5, atol=0.0)
    assert own == 2.0  # a look computes in memory of its own


@pytest.mark.share(1)
@pytest.mark.parametrize("seed", [12, 26, 115, 124, 170, *range(300, amount(303, 800))])
def test_random_statements(seed: int) -> None:
    assert micro.judged(micro.drawn(seed), 4)[0] in ("right", "told", "refused", "void")


def _added(y: Tensor, made: Tensor) -> Tensor:
    return made.add_((y != PAD).sum())


def _entry(y: Tensor, made: Tensor) -> Tensor:
    several = torch.zeros(2)
    several[1] = (y != PAD).sum()
    return several[1]


def _out(y: Tensor, made: Tensor) -> Tensor:
    torch.sum((y != PAD).float(), dim=0, out=made)
    return made


WRITTEN = {"added": _added, "an entry": _entry, "out=": _out}


@pytest.mark.parametrize("name", WRITTEN)
def test_a_count_that_is_written_into_memory_is_refused(name: str) -> None:
    def loss(o: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(o, y, reduction="sum", ignore_index=PAD) / WRITTEN[name](y, torch.zeros(()))

    step = oc.to_static(steps(loss), k_steps=2)
    with pytest.raises(RecordingError, match="scales by a value, of which each microbatch has its own"):
        for x, y in batches()[:2]:
            step(x, y)


def by_place(o: Tensor, y: Tensor) -> Tensor:
    """Of each row its number, of which each microbatch has its own."""
    return cross_entropy(o, y, reduction="sum") / ((y != PAD) * torch.arange(len(y))).sum()


def test_values_that_rows_have_by_their_numbers_are_no_count() -> None:
    step = oc.to_static(steps(by_place), k_steps=2, avg=True)
    with pytest.warns(UserWarning, match="scales by a value, of which each microbatch has its own"):
        for x, y in batches()[:2]:
            step(x, y)


RETURNED: dict[str, Callable[[Tensor, Tensor, int], Any]] = {
    "its length": lambda a, b, n: n,
    "times its length": lambda a, b, n: a.sum() / b.sum() * n,
    "length first": lambda a, b, n: n * a.sum() / b.sum(),
    "by a mean": lambda a, b, n: a.sum() / (b.sum() / n),
    "over its length": lambda a, b, n: a.sum() / b.sum() / n,
    "its square": lambda a, b, n: a.sum() / b.sum() * n**2,
    "a number that is as long as a microbatch": lambda a, b, n: a.sum() * 4 / b.sum(),
    "as a tensor": lambda a, b, n: a.sum() / b.sum() * torch.tensor(float(n)),
    "filled": lambda a, b, n: torch.full((), n) * a.sum() / b.sum(),
    "in each row": lambda a, b, n: (a * n).sum() / b.sum(),
    "bent before": lambda a, b, n: (a.sum() / b.sum()).sqrt() * n,
    "several means": lambda a, b, n: torch.stack([a.float().mean(), b.double().mean().float()]),
    "several sums": lambda a, b, n: torch.cat([a.sum()[None], (b > 0).sum()[None]]),
    "sums of each column": lambda a, b, n: torch.stack([a, b], 1).sum(0),
    "a product over rows": lambda a, b, n: torch.stack([a, b]).float() @ torch.stack([a, b], 1).float() / n,
    "as many means as a microbatch has rows": lambda a, b, n: torch.stack([a, b, a & b, a | b], 1).float().mean(0),
    "a sum and a mean": lambda a, b, n: a.sum() / n + b.sum(),
    "a constant": lambda a, b, n: torch.tensor([3.0, 4.0]),
}
TOLD: dict[str, Callable[[Tensor, Tensor, int], Any]] = {
    "plus its length": lambda a, b, n: a.sum() / b.sum() + n,
    "one more": lambda a, b, n: a.sum() / b.sum() * n + 1,
    "bounded": lambda a, b, n: a.sum().clamp(max=n // 2),
    "rounded": lambda a, b, n: torch.div(a.sum() * 3, n, rounding_mode="floor"),
    "its length alone": lambda a, b, n: torch.tensor(float(n)),
    "its length beside a number": lambda a, b, n: torch.tensor([n, 5]),
    "numbers of rows": lambda a, b, n: torch.arange(n),
    "as long as it is": lambda a, b, n: torch.ones(n, 3),
}


def returning(what: Callable[[Tensor, Tensor, int], Any]) -> Callable[[Tensor, Tensor], Any]:
    torch.manual_seed(0)
    net = nn.Linear(6, CLASSES)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def step(x: Tensor, y: Tensor) -> Any:
        cross_entropy(net(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        return what(y == 1, y != PAD, len(y))

    return step


@pytest.mark.parametrize("name", RETURNED)
def test_what_is_returned_alone_is_of_the_whole_batch(name: str) -> None:
    step, one = oc.to_static(returning(RETURNED[name]), k_steps=4), returning(RETURNED[name])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for x, y in batches():
            torch.testing.assert_close(torch.as_tensor(step(x, y)), torch.as_tensor(one(x, y)))


@pytest.mark.parametrize("name", TOLD)
def test_what_is_not_linear_in_the_length_is_told(name: str) -> None:
    step = oc.to_static(returning(TOLD[name]), k_steps=4)
    with pytest.warns(UserWarning, match="result 0 is no sum and no mean over rows"):
        for x, y in batches()[:2]:
            step(x, y)


def test_a_look_at_the_whole_batch_counts_nothing() -> None:
    """The step is looked at twice, for the number that it returns, and its own count goes on by one.

    As it reads the count, no recording fits: it runs as it is, and returns what one card does.
    """
    done = {"steps": 0}

    def once(a: Tensor, b: Tensor, n: int) -> int:
        done["steps"] += 1
        return n

    step = oc.to_static(returning(once), k_steps=4)
    step(*batches()[0])
    with pytest.warns(UserWarning, match="was 1 and is 2 .* runs as it is, on the whole batch"):
        found = step(*batches()[1])
    assert (found, done) == (len(batches()[1][1]), {"steps": 2})
