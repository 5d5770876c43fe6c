"""What a step over microbatches keeps of them in tensors of its own: a mean loss, an accuracy, averages of such. One card's.

See ``onecard.static.passes.kept_once``.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fuzz import kept
from torch import Tensor, nn

import onecard as oc
from onecard.errors import RecordingError
from onecard.testing import run_ranks

ROWS, CLASSES, CALLS = 8, 4, 4
Keeps = Callable[[Tensor, Tensor, Tensor, Tensor], Any]


def total(s: Tensor, loss: Tensor, o: Tensor, y: Tensor) -> None:
    s.add_(loss)


def average(s: Tensor, loss: Tensor, o: Tensor, y: Tensor) -> None:
    s.mul_(0.9).add_(loss, alpha=0.1)


def perplexity(s: Tensor, loss: Tensor, o: Tensor, y: Tensor) -> None:
    s.lerp_(loss.exp(), 0.3)


def best(s: Tensor, loss: Tensor, o: Tensor, y: Tensor) -> None:
    s.copy_(torch.minimum(s, loss - 5))


def accuracy(s: Tensor, loss: Tensor, o: Tensor, y: Tensor) -> None:
    s.mul_(0.5).add_((o.argmax(1) == y).sum() / len(y))


def f1(s: Tensor, loss: Tensor, o: Tensor, y: Tensor) -> None:
    hit, said, true = ((o.argmax(1) == 1) & (y == 1)).sum(), (o.argmax(1) == 1).sum(), (y == 1).sum()
    s.add_(2 * hit / (said + true + 1e-6))


def masked(s: Tensor, loss: Tensor, o: Tensor, y: Tensor) -> None:
    s.add_(((o.argmax(1) == y) & (y != 0)).sum() / (y != 0).sum())


def seen(s: Tensor, loss: Tensor, o: Tensor, y: Tensor) -> None:
    s.add_(loss * len(y))


def steps(s: Tensor, loss: Tensor, o: Tensor, y: Tensor) -> None:
    s.add_(1)


def summed(s: Tensor, loss: Tensor, o: Tensor, y: Tensor) -> None:
    both = torch.zeros(())
    both += loss
    both += o.mean()
    s.add_(both)


def mixed(s: Tensor, loss: Tensor, o: Tensor, y: Tensor) -> None:
    s.add_(loss)
    half = s / 2
    s.copy_(half + (y == 1).sum())


def whole(s: Tensor, loss: Tensor, o: Tensor, y: Tensor) -> None:
    s.add_((loss * 10).long())


def counted(s: Tensor, loss: Tensor, o: Tensor, y: Tensor) -> None:
    s.add_(F.one_hot(y, CLASSES).sum(0)[2])


def scattered(s: Tensor, loss: Tensor, o: Tensor, y: Tensor) -> None:
    s.add_(torch.zeros(CLASSES).scatter_add(0, y, torch.ones(len(y)))[1])


def indexed(s: Tensor, loss: Tensor, o: Tensor, y: Tensor) -> None:
    s.add_(torch.zeros_like(s.view(1)).index_add(0, y * 0, o[:, 0])[0])


def of_labels(s: Tensor, loss: Tensor, o: Tensor, y: Tensor) -> None:
    share = (y == 1).float().mean()
    s.add_(share - share**2).sub_((y.float().square().mean() - y.float().mean() ** 2).sqrt())


COUNTS: tuple[Keeps, ...] = counted, scattered, indexed
ALL: tuple[Keeps, ...] = (
    *COUNTS,
    of_labels,
    total,
    average,
    perplexity,
    best,
    accuracy,
    f1,
    masked,
    seen,
    steps,
    summed,
    mixed,
    whole,
)
PLACES = ("ahead of backward", "behind backward", "behind the step")


class Program:
    """A step that keeps a number at a place, and returns its loss, and the number if it is asked to."""

    def __init__(self, keeps: Keeps, place: str, returns: bool = False, reads: bool = False) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, CLASSES))
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1, momentum=0.9)
        self.number = torch.zeros(())
        self.keeps, self.place, self.returns, self.reads = keeps, place, returns, reads

    def step(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        o = self.model(x)
        if self.reads:
            o = o * (1 + 0.1 * self.number)
        loss = F.cross_entropy(o, y, ignore_index=0)
        self._keep(PLACES[0], loss, o, y)
        loss.backward()
        self._keep(PLACES[1], loss, o, y)
        self.optimizer.step()
        self._keep(PLACES[2], loss, o, y)
        self.optimizer.zero_grad()
        return (loss.detach(), self.number.clone()) if self.returns else (loss.detach(),)

    def _keep(self, place: str, loss: Tensor, o: Tensor, y: Tensor) -> None:
        if place == self.place:
            with torch.no_grad():
                self.keeps(self.number, loss.detach(), o.detach(), y)

    def run(self, cut: Callable[[Any], Any]) -> list[float]:
        call, data, found = cut(self.step), torch.Generator().manual_seed(3), list[float]()
        for _ in range(CALLS):
            x, y = torch.randn(ROWS, 6, generator=data), torch.randint(0, CLASSES, (ROWS,), generator=data)
            y[:: ROWS // 4] = 1
            found += [float(r) for r in call(x, y)]
            found += [] if self.returns else [float(self.number)]
        return found


def cut_in(k: int) -> Callable[[Any], Any]:
    return lambda step: oc.to_static(step, k_steps=k)


def alone(step: Any) -> Any:
    return step


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("keeps", ALL, ids=lambda f: f.__name__)
def test_a_number_is_one_cards(keeps: Keeps, place: str) -> None:
    k, returns = (4, False) if place == PLACES[1] else (8, True) if place == PLACES[0] else (2, True)
    wanted = Program(keeps, place, returns).run(alone)
    assert Program(keeps, place, returns).run(cut_in(k)) == pytest.approx(wanted, rel=1e-5, abs=1e-6)


def test_a_forward_that_reads_it_has_what_was_there_before_the_call() -> None:
    for keeps in (total, f1, steps):
        wanted = Program(keeps, PLACES[0], reads=True).run(alone)
        assert Program(keeps, PLACES[0], reads=True).run(cut_in(4)) == pytest.approx(wanted, rel=1e-5, abs=1e-6)


def spread(s: Tensor, loss: Tensor, o: Tensor, y: Tensor) -> None:
    s.add_(o.std())


def read_later(s: Tensor, loss: Tensor, o: Tensor, y: Tensor) -> None:
    s.add_(loss)
    o.mul_(s).sum().item  # noqa: B018  a microbatch's rows, by what was added for it


def test_what_the_batch_does_not_give_is_told_or_refused() -> None:
    """And with avg=True, which means a loop, a number is kept once for each microbatch, as the loop does."""
    with pytest.warns(UserWarning, match="writes into the program what each microbatch has its own of"):
        Program(spread, PLACES[0]).run(cut_in(4))
    with pytest.raises(RecordingError, match=r"add_ at .* takes what std at .*: each microbatch has its own of that"):
        Program(spread, PLACES[2]).run(cut_in(4))
    with pytest.warns(UserWarning, match="writes into the program what each microbatch has its own of"):
        Program(read_later, PLACES[0]).run(cut_in(4))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        looped = Program(total, PLACES[0]).run(lambda step: oc.to_static(step, k_steps=4, avg=True))
    one = Program(total, PLACES[0]).run(alone)
    assert looped[-1] > 2 * one[-1]


def onto_ones(s: Tensor, loss: Tensor, o: Tensor, y: Tensor) -> None:
    s.add_(torch.ones(CLASSES).index_add(0, y, o[:, 0])[1])


def into_the_state(s: Tensor, loss: Tensor, o: Tensor, y: Tensor) -> None:
    s.view(1).index_add_(0, y * 0, o[:, 0])


def test_what_is_added_to_more_than_zeros_is_no_sum_over_rows() -> None:
    """Each microbatch would add the ones again."""
    with pytest.warns(UserWarning, match="writes into the program what each microbatch has its own of"):
        Program(onto_ones, PLACES[0]).run(cut_in(4))
    with pytest.raises(RecordingError, match="takes what select at"):
        Program(onto_ones, PLACES[2]).run(cut_in(4))
    said = r"makes of zeros: total\.add_\(torch\.zeros_like\(total\)\.index_add\(\.\.\.\)\)"
    with pytest.raises(RecordingError, match=said):
        Program(into_the_state, PLACES[2]).run(cut_in(4))


def test_what_is_rounded_is_rounded_once() -> None:
    def step(x: Tensor) -> tuple[Tensor, Tensor]:
        weight.square().sum().backward()
        return (x.mean() * 10).int(), (x.sum(0) * 10).long()

    weight, x = torch.ones(2, requires_grad=True), torch.arange(24.0).view(8, 3) / 7
    optimizer = torch.optim.SGD([weight], 0.1)

    def trained(x: Tensor) -> tuple[Tensor, Tensor]:
        optimizer.zero_grad()
        made = step(x)
        optimizer.step()
        return made

    call = oc.to_static(trained, k_steps=4)
    for found in (call(x), call(x)):
        assert all(map(torch.equal, found, trained(x)))


def test_a_row_that_is_squeezed_away_is_refused() -> None:
    def squeezed(s: Tensor, loss: Tensor, o: Tensor, y: Tensor) -> None:
        s.add_(o.squeeze().mean(0).sum())

    with pytest.raises(RecordingError, match="has other dims for a microbatch, and is a sum over something else there"):
        Program(squeezed, PLACES[0]).run(cut_in(8))
    Program(squeezed, PLACES[0]).run(cut_in(4))


def test_a_hook_that_keeps_a_gradient_is_told() -> None:
    program = Program(steps, PLACES[0])
    kept = torch.zeros_like(program.model[0].weight)
    program.model[0].weight.register_hook(lambda grad: (kept.add_(grad), None)[1])
    with pytest.warns(
        UserWarning, match=r"add_ at .*, in a hook, writes into the program what each microbatch has its own of"
    ):
        program.run(cut_in(4))


def test_random_numbers_of_a_step() -> None:
    """``python -m fuzz.kept`` has more of them."""
    found = [kept.judged(seed) for seed in range(400, 416)]
    assert "wrong" not in found and found.count("equal") >= 5, found
    found = [kept.judged(seed, marks=True) for seed in range(400, 408)]
    assert "wrong" not in found and found.count("equal") >= 2, found
    with pytest.MonkeyPatch.context() as patch:  # a mean for a sum
        patch.setattr("onecard.static.passes.merge._Merge._of_batch", _first_ones)
        found = [kept.judged(seed) for seed in range(400, 408)]
    assert "wrong" in found, found


def _first_ones(self: Any, node: Any) -> Any:
    return self.each[0][node]


def welford(s: Tensor, loss: Tensor, o: Tensor, y: Tensor) -> None:
    """A mean over calls, by a counter that is one of the program's, too."""
    s.add_((loss - s) / 3)


def kept_on_ranks(names: list[str]) -> list[list[float]]:
    cut = lambda step: oc.to_static(step, plan=oc.Plan(dp=2, microbatches=2))  # noqa: E731
    by_name = {f.__name__: f for f in (*ALL, welford)}
    return [Program(by_name[name], place, returns=True).run(cut) for name in names for place in PLACES]


def test_ranks_of_a_plan_keep_one_cards() -> None:
    """A loss that waits for the other ranks' is kept ahead of its backward pass, and so is what is made of it there."""
    names = ["total", "perplexity", "welford", "masked"]
    by_name = {f.__name__: f for f in (*ALL, welford)}
    wanted = [Program(by_name[name], place, returns=True).run(alone) for name in names for place in PLACES]
    for found in run_ranks(kept_on_ranks, 2, names):
        assert all(a == pytest.approx(b, rel=1e-5, abs=1e-6) for a, b in zip(found, wanted, strict=True))
    assert "wrong" not in (found := kept.of_ranks([*range(700, 706)], 2)) and "equal" in found, found


def kept_in_stages(names: list[str]) -> list[list[float]]:
    cut = lambda step: oc.to_static(step, plan=oc.Plan(pp=2, microbatches=4))  # noqa: E731
    by_name = {f.__name__: f for f in ALL}
    return [Program(by_name[name], place, returns=True).run(cut) for name in names for place in PLACES[::2]]


def test_stages_keep_one_cards() -> None:
    names = ["average", "f1", "summed"]
    by_name = {f.__name__: f for f in ALL}
    wanted = [Program(by_name[name], place, returns=True).run(alone) for name in names for place in PLACES[::2]]
    for found in run_ranks(kept_in_stages, 2, names):
        assert all(a == pytest.approx(b, rel=1e-5, abs=1e-6) for a, b in zip(found, wanted, strict=True))
