"""Gradient merge (``to_static(k_steps=)``): a step over microbatches is the one-card program that accumulates them."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import islice
from typing import Any

import pytest
import torch
from amounts import amount, share
from static_programs import gpt, mesh
from torch import Tensor, nn

import onecard as oc
from onecard import fleet
from onecard.comm.issue import again, staged
from onecard.errors import RecordingError
from onecard.testing import run_ranks

R, S = oc.Replicate(), oc.Shard
ROWS, CALLS, LAST = 12, 4, "4"


def network(norm: type[nn.Module] = nn.LayerNorm, drop: float = 0.0) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), norm(16), nn.ReLU(), nn.Dropout(drop), nn.Linear(16, 4))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer, reduction: str = "mean") -> Callable[..., Any]:
    """A step of the whole batch, with clipping and results of each kind."""

    def step(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        optimizer.zero_grad()
        out = model(x)
        loss = nn.functional.cross_entropy(out, y, reduction=reduction)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        return loss.detach(), out.detach(), norm, (out.argmax(1) == y).sum()  # y is read after the optimizer's step

    return step


def loop_of(model: nn.Module, optimizer: torch.optim.Optimizer, k: int, reduction: str = "mean") -> Callable[..., Any]:
    """The same, as one writes it for one card: ``k`` backward passes, one step."""

    def step(x: Tensor, y: Tensor) -> tuple[Any, ...]:
        optimizer.zero_grad()
        total, outs, right = torch.zeros(()), list[Tensor](), torch.zeros((), dtype=torch.int64)
        for part, labels in zip(x.chunk(k), y.chunk(k), strict=True):
            out = model(part)
            loss = nn.functional.cross_entropy(out, labels, reduction=reduction) / (k if reduction == "mean" else 1)
            loss.backward()
            total, right = total + loss.detach(), right + (out.argmax(1) == labels).sum()
            outs.append(out.detach())
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        return total, torch.cat(outs), norm, right

    return step


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(ROWS, 8, generator=generator), torch.randint(0, 4, (ROWS,), generator=generator))
        for _ in range(CALLS)
    ]


def held(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """All that the program has: parameters, gradients, buffers, states, the generator."""
    states = [x for s in optimizer.state.values() for x in s.values() if isinstance(x, Tensor)]
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    found = [*model.parameters(), *grads, *model.buffers(), *states, torch.get_rng_state()]
    return [x.detach().clone() for x in found]


CASES: dict[str, dict[str, Any]] = {
    "two": {"k": 2},
    "four, momentum": {"k": 4, "optimizer": momentum},
    "dropout": {"k": 4, "drop": 0.3},
    "batch norm": {"k": 2, "norm": nn.BatchNorm1d},  # statistics are those of each microbatch, as in the loop
    "sums": {"k": 4, "reduction": "sum"},
    "recompute": {"k": 4, "drop": 0.3, "also": ["recompute"]},
    "no pass": {"k": 2, "without": [*oc.static.passes.PASSES]},
    "three": {"k": 3, "close": 1e-6},  # thirds are rounded in another place
    "one row each": {"k": ROWS, "close": 1e-6},
}


@pytest.mark.share(1)
@pytest.mark.parametrize("name", CASES)
def test_merged_is_the_loop(name: str) -> None:
    """Bit for bit where halves and quarters are exact: results, gradients, buffers, states, random state."""
    case = {"norm": nn.LayerNorm, "drop": 0.0, "optimizer": adamw, "reduction": "mean", "close": 0.0, **CASES[name]}
    options = {key: case[key] for key in ("also", "without") if key in case}
    found = []
    for static in (False, True):
        model = network(case["norm"], case["drop"])
        optimizer = case["optimizer"](model)
        whole = step_of(model, optimizer, case["reduction"])
        loop = loop_of(model, optimizer, case["k"], case["reduction"])
        if static:
            loop = oc.to_static(whole, k_steps=case["k"], avg=case["reduction"] == "mean", **options)
        torch.manual_seed(5)
        seen = []
        for i, batch in enumerate(batches()):
            results = (whole if i == 0 and not static else loop)(*batch)  # the first call runs as it is
            seen += [torch.as_tensor(r).clone() for r in results] + held(model, optimizer)
        found.append(seen)
        if static:
            (recording,) = loop.recordings
            assert [known.facts[0][0] for known in recording.inputs if known.kind == "argument"] == [ROWS, ROWS]
    for a, b in zip(*found, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        torch.testing.assert_close(b, a, rtol=0, atol=case["close"])


def scaled(dtype: torch.dtype, k: int, static: bool) -> list[Tensor]:
    """Mixed precision with a scaler, whose scale becomes too large; as a loop, which halves the loss itself, or merged."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)

    def finish() -> None:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()

    def whole(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        finish()
        return loss.detach()

    def loop(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        total = torch.zeros(())
        for part, labels in zip(x.chunk(k), y.chunk(k), strict=True):
            with torch.autocast("cpu", dtype):
                loss = nn.functional.cross_entropy(model(part), labels) / k
            scaler.scale(loss).backward()
            total += loss.detach()
        finish()
        return total

    def first(x: Tensor, y: Tensor) -> Tensor:
        nonlocal k
        parts, k = k, 1
        loss = loop(x, y)
        k = parts
        return loss

    kind = "half" if dtype is torch.bfloat16 else "float16"
    run = oc.to_static(whole, k_steps=k, also=[kind]) if static else loop
    seen = []
    for i, batch in enumerate(batches() * 3):
        seen.append((first if i == 0 and not static else run)(*batch).clone())
        if i == 0:
            scaler.update(2.0**18 * k)
        seen += [scaler._scale.clone(), *held(model, optimizer)]
    return seen


@pytest.mark.share(1)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_merged_in_half_with_a_scaler(dtype: torch.dtype) -> None:
    """Scale, check and step once: steps that an infinity skips, scales that are halved, as in the loop."""
    expected, found = scaled(dtype, 2, False), scaled(dtype, 2, True)
    scales = {x.item() for x in expected if x.dim() == 0 and x.item() > 1e3}
    assert len(scales) > 1 or dtype is torch.bfloat16, "a step was skipped, and one was not"
    for a, b in zip(expected, found, strict=True):
        torch.testing.assert_close(b, a, rtol=0, atol=0, equal_nan=True)


def scaled_in_stages(parts: int = 1, frozen: str = "") -> tuple[list[float], list[Any]]:
    """Losses, and the scale after each step, which all ranks have; and what is sent, but for microbatches."""
    model = network(drop=0.0)
    for name, p in model.named_parameters():
        p.requires_grad_(not frozen or not name.startswith(frozen))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20)

    def step(x: Tensor, y: Tensor) -> Tensor:
        losses = []
        for part, labels in [(x, y)] if parts == 1 else zip(x.chunk(parts), y.chunk(parts), strict=True):
            with torch.autocast("cpu", torch.float16):
                losses.append(nn.functional.cross_entropy(model(part), labels) / parts)
            scaler.scale(losses[-1]).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return sum(losses).detach()

    options: Any = {"stages": oc.Stages(2)} if frozen else {"plan": oc.Plan(pp=2, microbatches=2)}
    run = step if parts > 1 else oc.to_static(step, **options)
    torch.manual_seed(4)
    found = [x for batch in batches() * 3 for x in (run(*batch).item(), scaler.get_scale())]
    nodes = run.recordings[0].graph.nodes if parts == 1 and frozen else ()
    sends = [n.args[0] for n in nodes if n.target in (staged.send, staged.send_packed)]
    given = [tuple(x.meta["tensor"][0]) for xs in sends for x in (xs if isinstance(xs, list) else [xs])]
    return found, [shape for shape in given if shape[:1] != (ROWS // 2,)]


def trained_in_part() -> Any:
    """Both stages train; and the first one alone, whose gradients are looked at where they are."""
    return scaled_in_stages(), scaled_in_stages(frozen=LAST)


@pytest.mark.share(2)
def test_a_scale_that_is_too_large_in_stages() -> None:
    wanted = scaled_in_stages(2)[0], scaled_in_stages(2, LAST)[0]
    assert wanted[0][1] < 2.0**20, "the first step is skipped"
    assert len({*wanted[0][1::2]}) > 2 and wanted[0][-1] == wanted[0][-3], "others are, and not all"
    for rank, found in enumerate(run_ranks(trained_in_part, 2)):
        for (mine, _), expected in zip(found, wanted, strict=True):
            assert mine == pytest.approx(expected, rel=1e-5)
        assert rank or not any(found[1][1]), "no gradient: whether one is infinite, and the loss"


@pytest.mark.share(1)
def test_a_scaler_that_asks_the_host_is_refused_at_an_infinity_too() -> None:
    """What the refused attempt has left in the scaler is taken back: the next one does not begin behind its question."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)

    def step(x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.float16):
            loss = nn.functional.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return loss.detach()

    run, batch = oc.to_static(step, k_steps=2), batches()[0]
    run(*batch)
    for _ in range(2):
        with pytest.raises(oc.errors.RecordingError, match=r"GradScaler.step at .* reads on the host"):
            run(*batch)


def zero(stage: Any, axis: str = "dp") -> Callable[[oc.ProcessMesh], Any]:
    return lambda where: stage(where, axis) if stage is not None else None


def merged_on_ranks() -> dict[str, Any]:
    """GPT by marks (dp, tp), and a network under ZeRO 1, 2 and 3: against one card that accumulates."""
    said: dict[str, Any] = {}
    for name, where in share((("dp", mesh(2, 1)), ("tp", mesh(1, 2))), 1):
        expected, _ = gpt_trained(None)
        found, recording = gpt_trained(where)
        said[name] = max((a - b).abs().max().item() for a, b in zip(expected, found, strict=True))
        messages = [n for n in recording.nodes() if n.target is again.message and str(n.args[4]) == "dp"]
        said[f"messages along {name}"] = len(messages)
    for stage in share((oc.ShardingStage1, oc.ShardingStage2, oc.ShardingStage3), 2):
        said[stage.__name__] = zero_trained(stage)
    return said


def gpt_trained(where: oc.ProcessMesh | None) -> tuple[list[Tensor], Any]:
    torch.manual_seed(3)
    model, _, step, data = gpt(where, dropout=0.0)
    run = oc.to_static(step, k_steps=2) if where is not None else step
    losses = [oc.unshard(run(*batch).detach()) for batch in islice(data, CALLS)]
    whole = [oc.unshard(p.detach()) for p in model.parameters()]
    return [*losses, *whole], run.recordings[0] if where is not None else None


def zero_trained(stage: Any) -> float:
    """The largest distance of results (also those as long as the batch, row by row) and parameters."""
    found = []
    for distributed in (False, True):
        model = network(drop=0.0)
        if distributed:
            where = oc.ProcessMesh([0, 1], ["dp"])
            oc.shard_layer(model, where)
            optimizer = oc.shard_optimizer(adamw(model), stage("dp", where))
            run = oc.to_static(step_of(model, optimizer), k_steps=2)
        else:
            optimizer = adamw(model)
            run = loop_of(model, optimizer, 2)
        seen = []
        for batch in batches():
            if distributed:
                batch = tuple(oc.shard_tensor(t, where, [S(0)]) for t in batch)
            seen += [oc.unshard(r.detach()) for r in run(*batch)]
        found.append([*seen, *(oc.unshard(p.detach()) for p in model.parameters())])
    return max((a - b).abs().max().float().item() for a, b in zip(*found, strict=True))


@pytest.mark.proof
def test_merged_on_ranks() -> None:
    said = run_ranks(merged_on_ranks, 2)
    for one in said:
        distances = {k: v for k, v in one.items() if isinstance(v, float)}
        assert len(distances) == amount(3, 5) and all(d < 2e-6 for d in distances.values()), one
        assert one["messages along dp"] <= 3, (
            "gradients, the loss and the norm travel once, not once for each microbatch"
        )


def test_memory_is_that_of_a_microbatch() -> None:
    peaks = []
    for k in (1, 4):
        torch.manual_seed(0)
        model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(16, 16), nn.GELU())), nn.Linear(16, 4))
        run = oc.to_static(step_of(model, momentum(model)), k_steps=k)
        for _ in range(3):
            run(torch.randn(512, 16), torch.randint(0, 4, (512,)))
        price = run.recordings[0].cost()
        peaks.append(price.peak - price.inputs)
    assert peaks[1] < 0.4 * peaks[0], peaks


def refused(step: Callable[..., Any], *batch: Any, **options: Any) -> str:
    run = oc.to_static(step, k_steps=2, **options)
    run(*batch)
    with pytest.raises(RecordingError) as said:
        run(*batch)
    return str(said.value)


@pytest.mark.filterwarnings("ignore:.*batch norm at .* normalizes each microbatch")
def test_what_cannot_be_merged_is_refused_and_nothing_is_lost() -> None:
    model, other = network(nn.BatchNorm1d, 0.5), nn.Linear(4, 1)
    optimizer, second = adamw(model), momentum(other)
    x, y = batches()[0]
    whole = step_of(model, optimizer)

    def weighted(x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y, reduction="sum")
        loss.backward()
        for p in model.parameters():
            p.grad /= 1 + y.max()
        optimizer.step()

    def adds(x: Tensor, y: Tensor) -> None:
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    def twice(x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        second.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        other(model(x)).square().mean().backward()
        second.step()

    def keeps(x: Tensor, y: Tensor) -> Tensor:
        whole(x, y)
        return model(x).mean(0)  # of the new weights

    def shows(x: Tensor, y: Tensor) -> Tensor:
        hidden = torch.rand(3)
        whole(x, y)
        return hidden.detach() * 2

    cases = {
        weighted: "runs once, behind the backward passes of all microbatches, and takes what max at",
        adds: "adds to model.4.bias.grad, which was there before it",
        twice: "comes after an optimizer's step, whose result it needs",
        keeps: "runs once, behind the backward passes of all microbatches, and takes what",
        shows: "the step returns what .* and each microbatch has its own",
    }
    for step, words in cases.items():
        run = oc.to_static(step, k_steps=2)
        torch.manual_seed(7)
        run(x, y)
        before = held(model, optimizer) + held(other, second)
        with pytest.raises(RecordingError) as said:
            run(x, y)
        assert re.search(words, str(said.value)) and str(said.value).startswith("k_steps"), (step, said.value)
        after = held(model, optimizer) + held(other, second)
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True)), step

    assert "argument 'x' has 11 rows, which cannot be cut in 2" in refused(whole, x[:11], y[:11])
    assert "argument 'x' takes gradients" in refused(whole, x.clone().requires_grad_(), y)
    with pytest.raises(RecordingError, match="k_steps=0: how many microbatches"):
        oc.to_static(whole, k_steps=0)
    inference = oc.to_static(model, k_steps=2)
    with torch.no_grad():
        inference(x)
        with pytest.raises(RecordingError, match="no backward"):
            inference(x)


def fleet_counts() -> str:
    strategy = fleet.DistributedStrategy()
    strategy.gradient_merge, strategy.gradient_merge_configs = True, {"k_steps": 2}
    fleet.init(is_collective=True, strategy=strategy)
    model = network()
    optimizer = fleet.distributed_optimizer(momentum(model))
    run = oc.to_static(step_of(fleet.distributed_model(model), optimizer))
    x, y = batches()[0]
    run(x, y)
    with pytest.raises(RecordingError) as said:
        run(x, y)
    return str(said.value)


def test_fleets_merge_that_counts_calls_is_refused() -> None:
    """It was recorded at a call that steps or at one that does not, and did that for ever."""
    assert "to_static(step, k_steps=2, avg=True)" in run_ranks(fleet_counts, 1)[0]


def masked(k_steps: int, rows: int, columns: int) -> list[float]:
    """As masks of padding are read: ``mask[rows, columns]``, by numbers that are made in the step."""
    torch.manual_seed(0)
    table, head = nn.Embedding(11, 6), nn.Linear(6, 11)
    optimizer = torch.optim.SGD([*table.parameters(), *head.parameters()], lr=0.1)

    def step(x: Tensor, mask: Tensor, y: Tensor) -> Tensor:
        at, of = torch.arange(x.shape[0])[:, None, None], torch.arange(x.shape[1]) + 0
        seen = mask[at, of[None, None]].float()
        h = table(x)
        h = seen @ h / (seen.sum(-1, keepdim=True) + 1.0) + h
        loss = nn.functional.cross_entropy(head(h).flatten(0, 1), y.flatten(), ignore_index=-100)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    static = oc.to_static(step, k_steps=k_steps) if k_steps > 1 else step
    losses = []
    for i in range(4):
        draws = torch.Generator().manual_seed(i)
        x = torch.randint(11, (rows, columns), generator=draws)
        mask = torch.rand(rows, columns, generator=draws) > 0.3
        losses.append(static(x, mask, x.masked_fill(~mask, -100)).item())
    return losses


@pytest.mark.parametrize(("rows", "columns"), [(8, 8), (8, 4), (4, 8), (6, 5)])
def test_as_many_columns_as_rows_are_told_apart_from_them(rows: int, columns: int) -> None:
    assert masked(2, rows, columns) == pytest.approx(masked(1, rows, columns), rel=1e-5)
