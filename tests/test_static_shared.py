"""Recorded steps whose inputs have memory in common, and what between calls is changed by another name: replays are eager's."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import onecard as oc
from onecard import fleet
from onecard.errors import RecordingError
from onecard.testing import run_ranks
from onecard.train.common_memory import shared

CALLS = 9  # five are done as they are, or compared


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))


def batches() -> Iterator[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(5)
    for _ in range(CALLS):
        yield torch.randn(8, 6, generator=draw), torch.randint(4, (8,), generator=draw)


# -- one card --------------------------------------------------------------------------------------------------------------


def of_state_dict(model: nn.Sequential) -> Callable[[], Tensor]:
    kept = model.state_dict()["0.weight"]
    return lambda: kept.square().sum()


def of_data(model: nn.Sequential) -> Callable[[], Tensor]:
    kept = model[0].weight.data
    return lambda: (kept @ kept.t()).sum()


def of_a_row(model: nn.Sequential) -> Callable[[], Tensor]:
    kept = model[0].weight.detach()[1:3]
    return lambda: kept.abs().sum()


def of_a_flat_vector(model: nn.Sequential) -> Callable[[], Tensor]:
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    at = 0
    for p in model.parameters():
        p.data = flat[at : at + p.numel()].view_as(p)
        at += p.numel()
    return lambda: flat.square().sum()


def of_another_module(model: nn.Sequential) -> Callable[[], Tensor]:
    other = nn.Linear(6, 8)
    other.weight = nn.Parameter(model[0].weight.data)
    x = torch.ones(2, 6)
    return lambda: other(x).detach().square().sum()


NAMES = [of_state_dict, of_data, of_a_row, of_a_flat_vector, of_another_module]


@pytest.mark.parametrize("made", NAMES, ids=lambda f: f.__name__)
def test_another_name_of_a_weight_is_read_behind_the_update(made: Any) -> None:
    def trained(record: bool) -> list[float]:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        read = made(model)

        def step(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            before = read()
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            return before, read()

        run = oc.to_static(step) if record else step
        return [float(value) for batch in batches() for value in run(*batch)]

    assert trained(True) == pytest.approx(trained(False), rel=1e-6)


def test_who_lies_in_whose_memory() -> None:
    flat = torch.zeros(12)
    left, middle, right = flat[:6], flat[4:8], flat[6:]
    assert shared([left, flat, middle, right, torch.zeros(3)]) == {1: (0, 2, 3), 2: (0,), 3: (2,)}
    assert shared([left, right]) == {}


def test_memory_that_is_no_longer_common() -> None:
    model = net()
    held = {"kept": model[0].weight.data}

    def step(x: Tensor) -> Tensor:
        before = held["kept"].sum()
        model[0].weight.data.mul_(0.5)
        return torch.stack([before, held["kept"].sum(), model(x).sum()]).detach()

    run = oc.to_static(step)
    x = torch.ones(2, 6)
    for _ in range(6):
        before, after, _ = run(x)
        assert float(after) == pytest.approx(float(before) / 2)
    held["kept"].set_(torch.ones(8, 6))  # the same object, other memory
    for _ in range(6):
        assert [float(v) for v in run(x)[:2]] == [48.0, 48.0]


def test_a_file_holds_no_copy_of_what_has_memory_in_common(tmp_path: Any) -> None:
    model = net()
    more = functools.partial(torch.add, model[0].weight.detach()[1])

    @oc.to_static
    def step(x: Tensor) -> Tensor:
        with torch.no_grad():
            return model(x).sum() + more(1).sum()

    for _ in range(3):
        step(torch.ones(2, 6))
    with pytest.raises(RecordingError, match="memory in common"):
        step.recordings[0].save(tmp_path / "step")


def test_a_file_is_bound_to_the_same_memory_in_common(tmp_path: Any) -> None:
    model = net()
    kept = model.state_dict()["0.weight"]

    @oc.to_static
    def step(x: Tensor) -> Tensor:
        with torch.no_grad():
            before = kept.sum()
            model[0].weight.mul_(0.5)
            return torch.stack([before, kept.sum(), model(x).sum()])

    for _ in range(3):
        step(torch.ones(2, 6))
    step.recordings[0].save(tmp_path / "step")
    loaded, other = oc.load_recording(tmp_path / "step"), net()
    before, after, _ = loaded.bind(model=other, kept=other.state_dict()["0.weight"])(torch.ones(2, 6))
    assert float(after) == pytest.approx(float(before) / 2)
    with pytest.raises(RecordingError, match=r"memory of .* in common with"):
        loaded.bind(model=other, kept=torch.ones(8, 6))


def test_a_state_that_is_gone_is_told_by_its_name(tmp_path: Any) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)

    @oc.to_static
    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    for _ in range(3):
        step(torch.ones(2, 6))
    step.recordings[0].save(tmp_path / "step")
    optimizer.state[model[0].bias]["momentum_buffer"] = None
    with pytest.raises(RecordingError, match=r"momentum_buffer of model\.0\.bias: it is None"):
        oc.load_recording(tmp_path / "step").bind(model=model, optimizer=optimizer)


# -- options of a scaler ---------------------------------------------------------------------------------------------------


@contextmanager
def recorded_anew(times: int) -> Iterator[None]:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        yield
    assert sum("is recorded anew" in str(w.message) for w in told) == times, [str(w.message) for w in told]


@pytest.mark.parametrize("how", ["growth", "backoff", "load_state_dict"])
def test_options_of_a_scaler_that_change_between_calls(how: str) -> None:
    def change(scaler: torch.amp.GradScaler) -> None:
        if how == "growth":
            scaler.set_growth_interval(3)
        elif how == "backoff":
            scaler.set_backoff_factor(0.25)
        else:
            scaler.load_state_dict(scaler.state_dict() | {"growth_interval": 3})

    def scales(record: bool) -> list[float]:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), 1e-3, fused=True)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=100)

        def step(x: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            return loss.detach()

        run, found = oc.to_static(step) if record else step, []
        for i in range(15):  # compared with the step itself at call 8, and at none after it
            run(torch.full((2, 6), float("inf") if i == 13 else 0.1 * i))
            found.append(scaler.get_scale())
            if i == 8:
                change(scaler)
        return found

    with recorded_anew(1):
        found = scales(True)
    assert found == scales(False)


# -- ranks: a parameter of ZeRO has two names ------------------------------------------------------------------------------


def levelled(level: str) -> tuple[Any, Any]:
    model = net()
    optimizer: Any = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    if level == "one card":
        return model, optimizer
    fleet.init()
    model, optimizer, _ = fleet.group_sharded_parallel(model, optimizer, level)
    return model, optimizer


def mine(level: str, *values: Tensor) -> list[Tensor]:
    return [v if level == "one card" else v.chunk(oc.get_world_size())[oc.get_rank()] for v in values]


def averaged(level: str, x: Tensor) -> float:
    x = x.clone()
    if level != "one card":
        oc.all_reduce(x, oc.ReduceOp.AVG)
    return float(x)


def two_losses(level: str) -> list[float]:
    """The loss before the update and behind it, of one recorded step."""
    model, optimizer = levelled(level)

    @oc.to_static
    def step(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach(), F.cross_entropy(model(x), y).detach()

    return [averaged(level, v) for batch in batches() for v in step(*mine(level, *batch))]


def frozen_between(level: str, how: str) -> list[float]:
    """Losses of a recorded step; layers are frozen, or hooked, after call 4, and no longer after call 7."""
    model, optimizer = levelled(level)

    @oc.to_static
    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    def halve(p: Any) -> None:
        p.grad.mul_(0.5)

    found, handles = [], []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that it is recorded anew
        for i, batch in enumerate(batches()):
            found.append(averaged(level, step(*mine(level, *batch))))
            if i == 4 and how == "hook":
                handles = [p.register_post_accumulate_grad_hook(halve) for p in list(model.parameters())[:2]]
            elif i == 4 and how == "module":
                model[0].requires_grad_(False)
            elif i == 4:
                for p in list(model.parameters())[:2]:
                    p.requires_grad_(False)
            if i == 6:
                model[0].requires_grad_(True)
                for handle in handles:
                    handle.remove()
    return found


WAYS = ["module", "parameters", "hook"]


def clamped(model: Any) -> None:
    model[0].weight.clamp_(-0.2, 0.2)


def clamped_data(model: Any) -> None:
    model[0].weight.data.clamp_(-0.2, 0.2)


def a_row_is_zero(model: Any) -> None:
    model[2].weight[1] = 0.0


def read_before_and_behind(model: Any) -> None:
    total = model[0].weight.sum()
    model[0].weight.detach().mul_(1 - 0.01 * total.tanh())
    model[0].weight.add_(0.01 * model[0].weight.sum().tanh())


WRITES = [clamped, clamped_data, a_row_is_zero, read_before_and_behind]


def written_in_the_step(level: str, write: Callable[[Any], None]) -> list[float]:
    """Losses of a recorded step that ends in a write by the name that a layer has for its weight."""
    model, optimizer = levelled(level)

    @oc.to_static
    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            write(model)
        return loss.detach()

    return [averaged(level, step(*mine(level, *batch))) for batch in batches()]


def kept_by_name(how: str) -> list[tuple[float, float, str]]:
    """At p_g_os what a program keeps of a weight, before and behind an update, and what it is told."""
    model, optimizer = levelled("p_g_os")
    found = []
    for get in (lambda w: w.data, lambda w: w.detach()[1:]):
        kept = get(model[0].weight) if how == "kept" else get(model[0].weight).clone()
        before = float(kept.sum())
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            for batch in list(batches())[:2]:
                F.cross_entropy(model(mine("p_g_os", *batch)[0]), mine("p_g_os", *batch)[1]).backward()
                optimizer.step()
                optimizer.zero_grad()
        found.append((before, float(kept.sum()), "; ".join(str(w.message) for w in told)))
    return found


def test_memory_of_a_weight_that_is_given_up_stays_with_who_keeps_it() -> None:
    for before, behind, told in run_ranks(kept_by_name, 2, "kept")[0]:
        assert before == behind and "keeps weight.data or weight.detach() of a parameter [8, 6] of block '0'" in told
    for *_, told in run_ranks(kept_by_name, 2, "cloned")[0]:
        assert told == ""


def written_by_name() -> list[bool]:
    """Whether memory is laid out anew for weights that a program has written to by name, and keeps nothing of."""
    model, _ = levelled("p_g_os")
    pieces = [piece for unit in model._sharded.blocks.units for piece in unit.pieces]
    before = [piece._buffer for piece in pieces]
    for _ in range(2):
        with torch.no_grad():
            model[0].weight.mul_(0.5)
        model(torch.ones(2, 6)).sum().backward()
    return [piece.lent or piece._buffer is not was for piece, was in zip(pieces, before, strict=True)]


def test_what_is_written_by_name_lends_no_memory() -> None:
    assert not any(run_ranks(written_by_name, 2)[0])


def parted(how: str) -> list[str]:
    """What is told of weights that have memory in common where each gets its own."""
    fleet.init()
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight.data = model[0].weight.data
    model[2].weight = model[0].weight  # one object: it stays one
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        if how == "marks":
            oc.shard_layer(model, oc.ProcessMesh([0, 1], ["dp"]))
        else:
            fleet.group_sharded_parallel(model, torch.optim.SGD(model.parameters(), 0.1), how)
    return [str(w.message) for w in told]


@pytest.mark.parametrize("how", ["marks", "p_g_os", "os"])
def test_memory_in_common_that_is_parted_is_told(how: str) -> None:
    told = run_ranks(parted, 2, how)[0]
    assert len(told) == (how != "os") and all("0.weight has memory in common with 1.weight" in t for t in told), told


def at_level(level: str) -> dict[str, list[float]]:
    found = {"two losses": two_losses(level)} | {how: frozen_between(level, how) for how in WAYS}
    return found | {write.__name__: written_in_the_step(level, write) for write in WRITES}


@pytest.mark.share(1)
@pytest.mark.parametrize("level", ["p_g_os", "os", "os_g"])
def test_levels_of_zero_recorded(level: str) -> None:
    expected = at_level("one card")
    for found in run_ranks(at_level, 2, level):
        for name, losses in found.items():
            assert losses == pytest.approx(expected[name], rel=1e-5), name
