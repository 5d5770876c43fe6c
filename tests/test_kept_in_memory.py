"""Values that a step writes into memory (results, meters, statistics), in microbatches and in stages: one card's, or told."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import onecard as oc
from onecard.errors import RecordingError
from onecard.testing import run_ranks

CALLS = 4


class Meter:
    """What a program keeps of its steps."""

    def __init__(self) -> None:
        self.total, self.hits, self.last = torch.zeros(()), torch.zeros((), dtype=torch.long), torch.zeros(())


After = Callable[[Meter, Tensor, Tensor, Tensor], Any]
"""From the meter, outputs, labels and the loss: what the step returns."""


def total(meter: Meter, o: Tensor, y: Tensor, loss: Tensor) -> Tensor:
    made = torch.zeros(())
    made += loss
    return made


def correct(meter: Meter, o: Tensor, y: Tensor, loss: Tensor) -> Tensor:
    made = torch.tensor(0)
    made += (o.argmax(1) == y).sum()
    return made


def copied(meter: Meter, o: Tensor, y: Tensor, loss: Tensor) -> Tensor:
    made = torch.empty(())
    made.copy_(loss)
    return made


def entry(meter: Meter, o: Tensor, y: Tensor, loss: Tensor) -> Tensor:
    made = torch.zeros(2)
    made[1] = loss
    return made[1]


def of_entries(meter: Meter, o: Tensor, y: Tensor, loss: Tensor) -> Tensor:
    made = torch.zeros(3)
    made[0], made[2] = loss, (o.argmax(1) == y).float().mean()
    return made.mean()


def into(meter: Meter, o: Tensor, y: Tensor, loss: Tensor) -> Tensor:
    return torch.add(loss, 0.0, out=torch.zeros(()))


def rows(meter: Meter, o: Tensor, y: Tensor, loss: Tensor) -> Tensor:
    made = torch.zeros(len(o), 3)
    made[:] = o.detach()
    return made


def all_entries(meter: Meter, o: Tensor, y: Tensor, loss: Tensor) -> Tensor:
    made = torch.zeros(2)
    made[0], made[1] = loss, (o.argmax(1) == y).float().mean()
    return made


def one_largest(meter: Meter, o: Tensor, y: Tensor, loss: Tensor) -> Tensor:
    made = torch.zeros(2)
    made[0], made[1] = loss, o.detach().max()
    return made


def hits(meter: Meter, o: Tensor, y: Tensor, loss: Tensor) -> Tensor:
    meter.hits += (o.argmax(1) == y).sum()
    return loss


def by_rows(meter: Meter, o: Tensor, y: Tensor, loss: Tensor) -> Tensor:
    meter.total += loss * len(o)
    return loss


def losses(meter: Meter, o: Tensor, y: Tensor, loss: Tensor) -> Tensor:
    meter.total += loss
    return loss


def mean(meter: Meter, o: Tensor, y: Tensor, loss: Tensor) -> Tensor:
    meter.total.lerp_(o.detach().mean(), 0.1)
    return loss


def largest(meter: Meter, o: Tensor, y: Tensor, loss: Tensor) -> Tensor:
    meter.total += o.detach().max()
    return loss


def kept(meter: Meter, o: Tensor, y: Tensor, loss: Tensor) -> Tensor:
    meter.last = loss
    return loss


RIGHT = {f.__name__: f for f in (total, correct, copied, entry, of_entries, all_entries, into, rows)}
ADDED = {f.__name__: f for f in (hits, by_rows, losses, mean)}
TOLD: dict[str, tuple[After, str]] = {
    "largest": (largest, "add_ at .* writes into the program what each microbatch has its own of, 4 times a call"),
    "kept": (kept, "the step sets meter.last at .*, in Python, which a replay does not repeat"),
}


def trained(after: After, ahead: str = "", **options: Any) -> tuple[list[Any], Meter, list[str]]:
    """What the step gives, the meter, and what was told. ``ahead``: memory for the result is made before the model runs, and
    what is given back is an entry of it, all of it, or another name of it.
    """
    torch.manual_seed(0)
    model, meter = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)), Meter()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(x: Tensor, y: Tensor) -> Any:
        made = torch.zeros(2 if ahead == "entry" else ())
        name = made[...]
        o = model(x)
        loss = F.cross_entropy(o, y)
        given = after(meter, o, y, loss.detach())
        if ahead == "entry":
            made[1] = given
            given = made[1]
        elif ahead:
            made += given
            given = made if ahead == "all" else name
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return given

    run = oc.to_static(step, **options) if options else step
    generator = torch.Generator().manual_seed(1)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = [
            run(torch.randn(8, 4, generator=generator), torch.randint(0, 3, (8,), generator=generator)).tolist()
            for _ in range(CALLS)
        ]
    return found, meter, [str(w.message) for w in said]


@pytest.mark.share(1)
@pytest.mark.parametrize("name", RIGHT)
def test_results_in_microbatches(name: str) -> None:
    wanted, _, _ = trained(RIGHT[name])
    found, _, told = trained(RIGHT[name], k_steps=4)
    torch.testing.assert_close(torch.tensor(found), torch.tensor(wanted))
    assert told == []


@pytest.mark.parametrize("name", ADDED)
def test_sums_that_the_program_keeps(name: str) -> None:
    """Sums and means over rows are the batch's, and nothing is told."""
    (_, wanted, _), (_, found, told) = trained(ADDED[name]), trained(ADDED[name], k_steps=4)
    torch.testing.assert_close((found.total, found.hits), (wanted.total, wanted.hits))
    assert told == []


@pytest.mark.parametrize("name", TOLD)
def test_what_the_program_keeps_of_a_microbatch_is_told(name: str) -> None:
    after, words = TOLD[name]
    _, _, told = trained(after, k_steps=4)
    assert len(told) == 1
    with pytest.warns(UserWarning, match=words):
        warnings.warn(told[0], stacklevel=1)


def test_a_vector_of_a_microbatchs_values_is_refused() -> None:
    with pytest.raises(RecordingError, match="it is no part of the batch, and each microbatch has its own"):
        trained(one_largest, k_steps=4)


def _in_stages() -> tuple[dict[str, list[Any]], list[str], str]:
    stages = oc.Stages(4, at=["2"])
    found = {name: trained(RIGHT[name], stages=stages)[0] for name in RIGHT}
    refused = []
    for ahead in ("entry", "name"):
        with pytest.raises(RecordingError) as why:
            trained(entry, ahead, stages=stages)
        refused.append(str(why.value))
    found["ahead"] = trained(entry, "all", stages=stages)[0]
    return found, refused, " ".join(trained(kept, stages=stages)[2])


@pytest.mark.proof
def test_in_stages() -> None:
    """Who writes sends it, to all ranks; what one stage makes and another one writes to in part is refused."""
    wanted = {name: trained(RIGHT[name])[0] for name in RIGHT} | {"ahead": trained(entry, "all")[0]}
    for found, refused, told in run_ranks(_in_stages, 2, timeout=100.0):
        for name, values in wanted.items():
            torch.testing.assert_close(torch.tensor(found[name]), torch.tensor(values))
        assert all("a cut goes through what is written in place: zeros at" in words for words in refused)
        assert "the step sets meter.last at" in told
