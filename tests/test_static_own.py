"""What a step does beside computing: collectives of torch's functional kind, files, lists that grow, counts that modules keep."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from comparing import compared, never
from torch import Tensor, nn

import onecard as oc
from onecard.testing import run_ranks

gathered = getattr(functional, "all_gather_single", functional.all_gather_tensor)
scattered = getattr(functional, "reduce_scatter_single", functional.reduce_scatter_tensor)


def beside(x: Tensor) -> Tensor:
    """What is under way while the step computes."""
    y = functional.all_reduce(x * 2, "sum", dist.group.WORLD)
    return (x + 1).exp() * y


STEPS: dict[str, Callable[[Tensor], Any]] = {
    "all_reduce": lambda x: functional.all_reduce(x * 2, "sum", dist.group.WORLD) * 1,
    "all_gather": lambda x: gathered(x * 2, 0, dist.group.WORLD) * 1,
    "reduce_scatter": lambda x: scattered(x * 2, "sum", 0, dist.group.WORLD) * 1,
    "all_to_all": lambda x: functional.all_to_all_single(x * 2, None, None, dist.group.WORLD) * 1,
    "broadcast": lambda x: functional.broadcast(x * 2, 0, dist.group.WORLD) * 1,
    "beside": beside,
}


def replayed() -> dict[str, str]:
    """What became of each step, at calls of which all but the first are replays."""
    said = {}
    for name, step in STEPS.items():
        run = oc.to_static(step)
        with compared(never):
            for i in range(6):
                x = torch.arange(4.0) * (1 + dist.get_rank()) + i
                found, expected = torch.as_tensor(run(x)) * 1, torch.as_tensor(step(x)) * 1
                if not torch.equal(found, expected):
                    said[name] = f"call {i}: {found.tolist()} in place of {expected.tolist()}"
        if len(run.recordings) != 1:
            said[name] = f"{len(run.recordings)} recordings"
    return said


def compared_all() -> int:
    """The same, each call held against its recording."""
    for step in STEPS.values():
        run = oc.to_static(step)
        for i in range(6):
            run(torch.arange(4.0) + i)
    return len(STEPS)


@pytest.mark.share(1)
@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_functional_collectives_are_replayed(backend: str) -> None:
    """Over Gloo the wait was lost, and the replay read what had not come; over shm they were refused for another reason."""
    assert run_ranks(replayed, 2, backend=backend) == [{}, {}]
    assert run_ranks(compared_all, 2, backend=backend) == [len(STEPS)] * 2


def told(step: Callable[[Tensor], Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        run = oc.to_static(step)
        for _ in range(2):
            run(torch.ones(3))
    assert len(run.recordings) == 1
    return [str(w.message) for w in heard]


class Held:
    log: list[Any] = []  # noqa: RUF012


def test_a_list_that_grows_in_place_is_told() -> None:
    held = Held()

    def by_operator(x: Tensor) -> Tensor:
        held.log += [x.detach()]
        return x * 2

    def by_method(x: Tensor) -> Tensor:
        held.log.__iadd__([1.0])
        return x * 2

    for step in (by_operator, by_method):
        (said,) = told(step)
        assert "adds to held.log at" in said and "which a replay does not repeat" in said, said


def test_files_that_a_step_writes_are_told(tmp_path: Path) -> None:
    path = tmp_path / "log"

    def opened(x: Tensor) -> Tensor:
        with open(path, "a") as file:
            file.write("1")
        return x * 2

    def at_once(x: Tensor) -> Tensor:
        path.write_text("1")
        return x * 2

    def given(x: Tensor) -> Tensor:
        with open(path, "wb") as file:
            pickle.dump([1], file)
        return x * 2

    def saved(x: Tensor) -> Tensor:
        torch.save({"a": 1}, str(path))
        return x * 2

    for step, what in ((opened, "file"), (at_once, "path"), (given, "file"), (saved, "a file, by torch.save")):
        (said,) = told(step)
        assert f"the step writes to {what} at {__file__}:" in said and "which a replay does not repeat" in said, said

    def read(x: Tensor) -> Tensor:
        return x * len(path.read_bytes())

    def printed(x: Tensor) -> Tensor:
        print("a step")
        return x * 2

    assert told(read) == told(printed) == []


def test_a_norm_over_all_batches_keeps_one_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    """``momentum=None``: each of torch's norms asks its count in another way. The one of all ranks asks for a GPU first."""
    monkeypatch.setattr(torch._C, "_get_privateuse1_backend_name", lambda: "cpu")
    for kind in (nn.BatchNorm1d, nn.SyncBatchNorm):
        found = []
        for static in (False, True):
            norm = kind(3, momentum=None)
            run: Any = oc.to_static(lambda x, norm=norm: norm(x).detach()) if static else norm
            batches = [torch.randn(6, 3, generator=torch.Generator().manual_seed(i)) for i in range(7)]
            found.append([*(run(x).tolist() for x in batches), *(b.tolist() for b in norm.buffers())])
            assert not static or len(run.recordings) == 1, kind
            assert norm.momentum is None
        assert found[0] == found[1], kind


def _waited_for() -> list[float]:
    """Gradients averaged by hand, all at once, in microbatches: each call is written down before it is sent."""
    oc.barrier()
    torch.manual_seed(0)
    layer = nn.Linear(4, 3)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = layer(x).square().mean()
        loss.backward()
        works = [dist.all_reduce(p.grad, async_op=True) for p in layer.parameters()]
        assert all(work.wait() is not False and work.is_completed() for work in works)
        with torch.no_grad():
            for p in layer.parameters():
                p -= 0.1 * p.grad / 2  # type: ignore[operator]
                p.grad = None
        return loss.detach()

    run = oc.to_static(step, k_steps=2)
    draws = torch.Generator().manual_seed(oc.get_rank())
    return [float(run(torch.randn(4, 4, generator=draws))) for _ in range(3)] + layer.weight.flatten().tolist()


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_a_message_that_is_waited_for_later_in_microbatches(backend: str) -> None:
    one, other = run_ranks(_waited_for, 2, backend=backend)
    assert one[3:] == other[3:]
    torch.manual_seed(0)
    layer = nn.Linear(4, 3)
    draws = [torch.Generator().manual_seed(rank) for rank in range(2)]
    for i in range(3):
        losses = [layer(torch.randn(4, 4, generator=each)).square().mean() for each in draws]
        assert losses[0].item() == pytest.approx(one[i], rel=1e-5)
        sum(losses).backward()  # type: ignore[union-attr]
        with torch.no_grad():
            for p in layer.parameters():
                p -= 0.1 * p.grad / 2  # type: ignore[operator]
                p.grad = None
    assert layer.weight.flatten().tolist() == pytest.approx(one[3:], rel=1e-5)
