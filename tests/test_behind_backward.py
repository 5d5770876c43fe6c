"""What a step writes behind ``backward()`` runs once a call, also where it reads no gradient: updates by hand, counts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import onecard as oc
from onecard.errors import RecordingError
from onecard.testing import run_ranks

ROWS, CALLS = 8, 5


class Program:
    """A model with what its habits keep: a buffer and an average for each parameter, a count, a rate."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.buffers = [torch.zeros_like(p) for p in self.model.parameters()]
        self.count, self.rate = torch.zeros(()), torch.full((), 0.1)

    def zipped(self) -> Any:
        return zip(self.model.parameters(), self.buffers, strict=True)


def momentum(program: Program) -> None:
    for p, buffer in program.zipped():
        buffer.mul_(0.9).add_(p.grad)
        p.sub_(buffer, alpha=0.1)


def listed(program: Program) -> None:
    torch._foreach_mul_(program.buffers, 0.9)
    torch._foreach_add_(program.buffers, [p.grad for p in program.model.parameters()])
    torch._foreach_add_([*program.model.parameters()], program.buffers, alpha=-0.1)


def squares(program: Program) -> None:
    program.count.add_(1)
    for p, buffer in program.zipped():
        buffer.mul_(0.99).addcmul_(p.grad, p.grad, value=0.01)
        p.addcdiv_(p.grad, (buffer / (1 - 0.99**program.count)).sqrt_().add_(1e-3), value=-0.01)


def averaged(program: Program) -> None:
    for p, average in program.zipped():
        average.mul_(0.9).add_(p, alpha=0.1)
    program.optimizer.step()


def decayed(program: Program) -> None:
    for p in program.model.parameters():
        p.mul_(0.99)
    program.optimizer.step()


def counted(program: Program) -> None:
    program.count.add_(1)
    program.rate.mul_(0.9)
    for p in program.model.parameters():
        p.sub_(p.grad * program.rate)


HABITS: dict[str, Callable[[Program], None]] = {
    each.__name__: each for each in (momentum, listed, squares, averaged, decayed, counted)
}


def trained(name: str, **options: Any) -> tuple[list[float], list[list[float]]]:
    """Losses, and of what this process has of parameters and all that a habit keeps."""
    program = Program()

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(program.model(x), y)
        loss.backward()
        with torch.no_grad():
            HABITS[name](program)
        program.optimizer.zero_grad()
        return loss.detach()

    call: Any = oc.to_static(step, **options) if options else step
    draw = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(CALLS):
        x = torch.randn(ROWS, 6, generator=draw)
        losses.append(float(call(x, x.argmax(1) % 4)))
    kept = [*program.model.parameters(), *program.buffers, program.count, program.rate]
    if "stages" in options:  # what another stage has is not here
        kept = [program.count, program.rate]
    return losses, [x.detach().flatten().tolist() for x in kept]


@pytest.mark.parametrize("name", HABITS)
def test_once_a_call(name: str) -> None:
    losses, kept = trained(name)
    again, also = trained(name, k_steps=4)
    assert again == pytest.approx(losses, rel=1e-5)
    for a, b in zip(kept, also, strict=True):
        assert b == pytest.approx(a, rel=1e-4, abs=1e-6)


def in_stages() -> dict[str, Any]:
    return {name: trained(name, stages=oc.Stages(4, at=["2"])) for name in HABITS}


def test_once_a_call_in_stages() -> None:
    for found in run_ranks(in_stages, 2):
        for name, (losses, kept) in found.items():
            expected, every = trained(name)
            assert losses == pytest.approx(expected, rel=1e-5), name
            assert kept == [pytest.approx(x, rel=1e-5) for x in every[-2:]], name


def read_ahead(seen: Tensor, x: Tensor, loss: Tensor) -> Tensor:
    scaled = loss * (1 + seen)
    seen.add_(x.square().sum())
    return scaled


def read_twice(seen: Tensor, x: Tensor, loss: Tensor) -> Tensor:
    return read_ahead(seen, x, loss) / (2 + seen)


def not_read(seen: Tensor, x: Tensor, loss: Tensor) -> Tensor:
    seen.add_(x.square().sum())
    return loss


def summed(what: Callable[[Tensor, Tensor, Tensor], Tensor], **options: Any) -> tuple[list[float], float]:
    torch.manual_seed(0)
    model, seen = nn.Linear(6, 4), torch.zeros(())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = what(seen, x, model(x).square().mean())
        loss.backward()
        optimizer.step()
        return loss.detach()

    call: Any = oc.to_static(step, **options) if options else step
    draw = torch.Generator().manual_seed(1)
    return [float(call(torch.randn(ROWS, 6, generator=draw))) for _ in range(CALLS)], float(seen)


def test_what_microbatches_add_to_is_not_read_ahead() -> None:
    """A microbatch would read what those before it have added, where one card reads what earlier calls have."""
    with pytest.raises(RecordingError, match=r"add at .* reads what add_ at .* adds to behind it"):
        summed(read_twice, k_steps=4)
    for what in (not_read, read_ahead):
        losses, total = summed(what)
        again, also = summed(what, k_steps=4)
        assert again == pytest.approx(losses, rel=1e-5) and also == pytest.approx(total, rel=1e-5)


def test_a_count_behind_backward_leaves_the_sums_beside_it_to_the_microbatches() -> None:
    def counted(k_steps: int) -> list[float]:
        torch.manual_seed(0)
        model, calls, right = nn.Linear(6, 4), torch.zeros(()), torch.zeros(())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: Tensor, y: Tensor) -> None:
            optimizer.zero_grad()
            out = model(x)
            F.cross_entropy(out, y).backward()
            calls.add_(1)
            right.add_((out.argmax(1) == y).sum())
            optimizer.step()

        call: Any = oc.to_static(step, k_steps=k_steps) if k_steps > 1 else step
        draw = torch.Generator().manual_seed(1)
        for _ in range(CALLS):
            x = torch.randn(ROWS, 6, generator=draw)
            call(x, x.argmax(1) % 4)
        return [float(calls), float(right)]

    assert counted(4) == counted(1)


def test_what_reads_such_a_count_and_a_microbatch_is_refused() -> None:
    """It would read the count as the call before has left it; of a sum over rows the batch's is taken."""

    def shared(largest: bool, **options: Any) -> float:
        torch.manual_seed(0)
        model, calls, share = nn.Linear(6, 4), torch.zeros(()), torch.zeros(())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: Tensor) -> None:
            optimizer.zero_grad()
            out = model(x)
            out.square().mean().backward()
            calls.add_(1)
            share.add_((out.max() if largest else (out > 0).sum()) / calls)
            optimizer.step()

        call: Any = oc.to_static(step, **options) if options else step
        draw = torch.Generator().manual_seed(1)
        for _ in range(3):
            call(torch.randn(ROWS, 6, generator=draw))
        return float(share)

    assert shared(False, k_steps=4) == pytest.approx(shared(False), rel=1e-5)
    with pytest.raises(RecordingError, match=r"takes what max at .*: each microbatch has its own"):
        shared(True, k_steps=4)
