"""PipelineLayer with all that training has: clipping, scaling, AMP, recompute, other axes, losses that are no mean of samples."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fleet_programs import close
from pipeline_programs import Block, OneCard, begin, compare, gpt, token_loss, tokens
from torch import Tensor, nn

import onecard as oc
from onecard import fleet, pipeline
from onecard.testing import run_ranks

mp = fleet.meta_parallel
Desc = fleet.LayerDesc


def build(descs: list[Any], single: bool, seed: int = 3, **options: Any) -> Any:
    torch.manual_seed(seed)
    return OneCard(descs) if single else fleet.PipelineLayer(descs, **options)


def mlp(*more: Any) -> list[Any]:
    return [Desc(nn.Linear, 6, 8), nn.GELU(), Desc(nn.Linear, 8, 8), *more, Desc(nn.Linear, 8, 3)]


def data(batch: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, 6, generator=generator), torch.randint(3, (batch,), generator=generator)


# Clipping, schedulers, AdamW


def clipped() -> None:
    for mode in ("1F1B", "ZBV"):
        begin(mode, 3, 2, pp=oc.get_world_size())
        single, mine = (build(gpt(1), one, loss_fn=token_loss) for one in (True, False))
        model = fleet.distributed_model(mine)
        clip = fleet.ClipGradByGlobalNorm(0.2)
        ours = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9), grad_clip=clip)
        theirs = torch.optim.SGD(single.parameters(), lr=0.5, momentum=0.9)
        plans = [torch.optim.lr_scheduler.StepLR(o, 1, 0.5) for o in (ours, theirs)]
        for step in range(3):
            x, y = tokens(6, step)
            token_loss(single(x), y).backward()
            norm = nn.utils.clip_grad_norm_(single.parameters(), 0.2)
            if step == 2:
                model.forward_backward_pipeline([x, y])
                close(fleet.grad_norm(model.parameters()), norm, "norm over stages")
                break
            theirs.step()
            theirs.zero_grad()
            plans[1].step()
            model.train_batch([x, y], ours, plans[0])
            compare(mine, single, f"{mode}, step {step}")
            assert plans[0].get_last_lr() == plans[1].get_last_lr()


def in_one_buffer() -> None:
    """A buffer of all gradients shows what they are, behind the microbatches."""
    begin("1F1B", 3, 2, pp=2, dp=oc.get_world_size() // 2)
    single, mine = (build(gpt(1), one, loss_fn=token_loss) for one in (True, False))
    model = fleet.distributed_model(mine)
    flat = torch.zeros(sum(p.numel() for p in model.parameters()))
    for p, part in zip(model.parameters(), flat.split([p.numel() for p in model.parameters()]), strict=True):
        p.grad = part.view_as(p)
    for step in range(2):
        group = fleet.get_hybrid_communicate_group().data()
        x, y = tokens(6 * group.size, step)
        token_loss(single(x), y).backward()
        mine_of = slice(6 * group.index, 6 * group.index + 6)
        model.forward_backward_pipeline([x[mine_of], y[mine_of]])
        shown = flat.clone()
        compare(mine, single, f"a buffer, step {step}", gradients=True)
        assert torch.equal(shown, torch.cat([p.grad.flatten() for p in model.parameters()])), step


def scaled() -> None:
    """An infinity on the last stage skips the step on all."""
    begin("1F1B", 2, 2, pp=oc.get_world_size())
    single, mine = (build(mlp(), one, loss_fn=nn.CrossEntropyLoss()) for one in (True, False))
    model = fleet.distributed_model(mine)
    ours = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    theirs = torch.optim.SGD(single.parameters(), lr=0.1)
    scaler = fleet.GradScaler("cpu", init_scale=8.0, growth_interval=100)
    x, y = data(4)
    for step in range(3):
        before = [p.detach().clone() for p in mine.parameters()]
        spoilt = x * (float("inf") if step == 1 else 1.0)
        model.train_batch([spoilt, y], ours, scaler=scaler)
        if step == 1:
            assert all(torch.equal(a, b) for a, b in zip(before, mine.parameters(), strict=True)), "stepped"
        else:
            nn.functional.cross_entropy(single(x), y).backward()
            theirs.step()
            theirs.zero_grad()
        compare(mine, single, f"scaled, step {step}")
    assert scaler.get_scale() == 4.0
    with pytest.raises(fleet.FleetError, match=r"fleet.distributed_scaler\(scaler\)"):
        model.train_batch([x, y], ours, scaler=torch.amp.GradScaler("cpu"))


def low_precision() -> None:
    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = {"pp_degree": oc.get_world_size()}
    strategy.pipeline_configs = {"accumulate_steps": 2, "micro_batch_size": 2, "schedule_mode": "ZBH1"}
    strategy.amp = True
    fleet.init(strategy=strategy)
    single, mine = (build(mlp(), one, loss_fn=nn.CrossEntropyLoss()) for one in (True, False))
    model = fleet.distributed_model(mine)
    x, y = data(4)
    loss = model.forward_backward_pipeline([x, y])
    for part, labels in zip(x.chunk(2), y.chunk(2), strict=True):  # as one card does, microbatch by microbatch
        with torch.autocast("cpu", torch.bfloat16):
            (F.cross_entropy(single(part), labels) / 2).backward()
    assert loss.dtype == torch.float32
    compare(mine, single, "amp", gradients=True)


def recomputed() -> None:
    for mode in ("1F1B", "ZBV"):
        begin(mode, 2, 2, pp=oc.get_world_size())
        single, mine = (build(gpt(3), one, loss_fn=token_loss, recompute_interval=2) for one in (True, False))
        model = fleet.distributed_model(mine)
        meter, x, y = model.measure_memory(), *tokens(4)
        model.forward_backward_pipeline([x, y])
        token_loss(single(x), y).backward()
        compare_after_sync(mine, single, f"recompute, {mode}")
        plain = fleet.distributed_model(build(gpt(3), False, loss_fn=token_loss))
        other = plain.measure_memory()
        plain.forward_backward_pipeline([x, y])
        assert meter.peak < other.peak / 2, "recompute keeps as much"


def compare_after_sync(mine: Any, single: Any, what: str) -> None:
    fleet.sync(mine.parameters())
    compare(mine, single, what, gradients=True)


# What stages hand on


class Fork(nn.Module):
    """Hands on a skip connection, an integer mask, a number and None; nothing needs the last tensor's gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 8)

    def forward(self, given: tuple[Tensor, Tensor]) -> dict[str, Any]:
        x, mask = given
        y = self.linear(x)
        return {"y": F.gelu(y), "skip": (y, x), "mask": mask, "scale": 0.5, "none": None, "idle": y * 2}


class Middle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, given: dict[str, Any]) -> dict[str, Any]:
        return given | {"y": self.linear(given["y"])}


class Merge(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.other = nn.Linear(8, 3), nn.Linear(6, 3)

    def forward(self, given: dict[str, Any]) -> Tensor:
        y, x = given["skip"]
        assert given["none"] is None and given["mask"].dtype == torch.int64
        return self.linear(given["y"] + given["scale"] * y) + self.other(x) * given["mask"][:, None]


def nests() -> None:
    for mode in ("1F1B", "ZBH1", "VPP" if oc.get_world_size() == 2 else "F-then-B"):
        begin(mode, 3, 2, pp=oc.get_world_size())
        descs = [Desc(Fork), Desc(Middle), Desc(Middle), Desc(Merge)]
        single, mine = (build(descs, one, loss_fn=nn.CrossEntropyLoss()) for one in (True, False))
        model = fleet.distributed_model(mine)
        x, y = data(5)
        mask = torch.arange(5) % 2
        loss = model.forward_backward_pipeline([(x, mask), y])
        expected = F.cross_entropy(single((x, mask)), y)
        expected.backward()
        close(loss, expected.detach(), f"nests, {mode}")
        compare(mine, single, f"nests, {mode}", gradients=True)
        close(model((x, mask)), single((x, mask)).detach(), "forward of a nest")
        # A stage that is frozen later sends no gradients any more.
        if 0 in mine.stages:
            for p in mine.parameters():
                p.requires_grad_(False)
        for p in [p for i in mine.layers_of(0) for p in single[i].parameters()]:
            p.requires_grad_(False)
        mine.zero_grad()
        single.zero_grad()
        model.forward_backward_pipeline([(x, mask), y])
        F.cross_entropy(single((x, mask)), y).backward()
        for name, p in mine.named_parameters():
            twin = single.get_parameter(name)
            if twin.requires_grad and p.requires_grad:
                close(p.grad, twin.grad, f"frozen, {mode}: {name}")


# Losses


def weighted() -> None:
    """Means over tokens that count: microbatches have different numbers of them."""
    labels = torch.tensor([-100, -100, -100, 1, 2, 0, 1])
    by_class = torch.tensor([1.0, 2.0, 3.0])
    cases: list[tuple[Any, dict[str, Any]]] = [
        (nn.CrossEntropyLoss(), {}),
        (nn.CrossEntropyLoss(weight=by_class), {}),
        (nn.CrossEntropyLoss(reduction="sum"), {}),
        (lambda out, y: F.cross_entropy(out, y), {"loss_weight": lambda y: (y != -100).sum()}),
    ]
    begin("1F1B", 3, 3, pp=oc.get_world_size())
    x, _ = data(7)
    for number, (loss_fn, more) in enumerate(cases):
        single, mine = build(mlp(), True), build(mlp(), False, loss_fn=loss_fn, **more)
        model = fleet.distributed_model(mine)
        loss = model.forward_backward_pipeline([x, labels])
        expected = loss_fn(single(x), labels)
        expected.backward()
        close(loss, expected.detach(), f"loss {number}")
        compare(mine, single, f"loss {number}", gradients=True)
        close(model.eval_batch([x, labels]), expected.detach(), f"eval, loss {number}")


def norms() -> None:
    """Batch norm sees microbatches, as on one card that accumulates; each stage has its buffers."""
    begin("1F1B", 2, 3, pp=oc.get_world_size())
    single, mine = (build(mlp(Desc(nn.BatchNorm1d, 8)), one, loss_fn=nn.CrossEntropyLoss()) for one in (True, False))
    model = fleet.distributed_model(mine)
    x, y = data(6)
    model.forward_backward_pipeline([x, y])
    for part, labels in zip(x.chunk(2), y.chunk(2), strict=True):
        (F.cross_entropy(single(part), labels) / 2).backward()
    compare(mine, single, "batch norm", gradients=True)
    theirs = dict(single.named_buffers())
    for name, buffer in mine.named_buffers():
        close(buffer.float(), theirs[name].float(), name)
    before = {name: b.clone() for name, b in mine.named_buffers()}
    frozen = next((m for m in mine.modules() if isinstance(m, nn.BatchNorm1d)), nn.Identity()).eval()
    model.eval_batch([x, y])
    assert all(torch.equal(b, before[name]) for name, b in mine.named_buffers()), "evaluation moved a buffer"
    assert mine.training and not frozen.training, "eval_batch changed a module's mode"


# Cutting


def cuts() -> None:
    p = oc.get_world_size()
    begin("1F1B", 2, 2, pp=p)
    large = [Desc(nn.Linear, 6, 90), Desc(nn.Linear, 90, 6), *(Desc(nn.Linear, 6, 6) for _ in range(4))]
    assert build(large, False).bounds == [0, 3, 6]
    assert build(large, False, seg_method="parameters").bounds == [0, 1, 6]
    blocks = [Desc(nn.Linear, 8, 8), *(Desc(Block) for _ in range(4)), Desc(nn.LayerNorm, 8)]
    assert build(blocks, False, seg_method="layer:Block").bounds == [0, 3, 6]
    assert build(large, False, seg_method=[0, 2, 6]).bounds == [0, 2, 6]
    timed = build(large, False, seg_method="time", example_input=torch.ones(4, 6)).bounds
    assert timed[0] == 0 and timed[2] == 6 and 1 <= timed[1] <= 5
    assert build(large, False, num_virtual_pipeline_stages=3).bounds == [0, 1, 2, 3, 4, 5, 6]
    for seed in (3, 4):
        mine, single = build(large, False, seed, seg_method="parameters"), build(large, True, seed)
        compare(mine, single, "first values")
    kept = {name.split(".")[0] for name, _ in mine.named_parameters()}
    assert kept == ({"0"} if oc.get_rank() == 0 else {"1", "2", "3", "4", "5"})


def custom_schedules() -> None:
    """A schedule of one's own, as a value and as a function."""
    own = pipeline.zb_auto(2, 3, pipeline.Times(2, 3, 1, 0.5), limit=3)
    for mode in (own, pipeline.one_f_one_b, lambda p, m: pipeline.interleaved(p, m, 3)):
        begin(mode, 3, 2, pp=2)
        single, mine = (build(gpt(3), one, loss_fn=token_loss) for one in (True, False))
        model = fleet.distributed_model(mine)
        x, y = tokens(6)
        model.forward_backward_pipeline([x, y])
        token_loss(single(x), y).backward()
        compare_after_sync(mine, single, "own schedule")
    timeline = model.timeline()
    assert len(timeline.spans) == 2 * (3 * 3 * 2) and sorted(timeline.per_rank) == [0, 1]
    for p in range(2):
        row = [s.action for s in sorted(timeline.spans, key=lambda s: s.start) if s.rank == p]
        assert tuple(row) == model.schedule().compute().ranks[p], "it ran in another order than the schedule's"
    times = timeline.times()
    assert len(times.forward) == 6 and min(times.forward) > 0
    pipeline.draw_text(timeline)


def clipped_as_torch_does() -> None:
    """torch's own call between backward and step: its norm is of all stages, also where no weight is shared."""
    begin("1F1B", 2, 2, pp=2)
    descs = [fleet.LayerDesc(nn.Linear, 6, 9), nn.Tanh(), fleet.LayerDesc(nn.Linear, 9, 4)]
    single, mine = build(descs, True), build(descs, False, loss_fn=nn.CrossEntropyLoss())
    model = fleet.distributed_model(mine)
    x, y = torch.arange(24.0).view(4, 6).sin(), torch.arange(4)
    F.cross_entropy(single(x), y).backward()
    model.forward_backward_pipeline([x, y])
    norms = [nn.utils.clip_grad_norm_(m.parameters(), 0.1) for m in (single, model)]
    close(norms[1], norms[0], "the norm")
    compare(mine, single, "gradients", gradients=True)


def on_two_ranks() -> None:
    programs = [
        clipped,
        in_one_buffer,
        clipped_as_torch_does,
        scaled,
        low_precision,
        recomputed,
        nests,
        weighted,
        norms,
        cuts,
    ]
    for program in [*programs, custom_schedules]:
        program()


def test_pipelines_with_all_that_training_has() -> None:
    run_ranks(on_two_ranks, 2)


# Other axes


def with_data_parallel() -> None:
    for mode in ("1F1B", "ZBV"):
        hcg = begin(mode, 2, 2, dp=2, pp=2)
        single = build(gpt(2), True)
        mine = build(gpt(2), False, seed=3 + 10 * hcg.get_data_parallel_rank(), loss_fn=token_loss)
        model = fleet.distributed_model(mine)
        optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9))
        theirs = torch.optim.SGD(single.parameters(), lr=0.3, momentum=0.9)
        for step in range(2):
            x, y = tokens(8, step)
            token_loss(single(x), y).backward()
            nn.utils.clip_grad_norm_(single.parameters(), 0.1)
            theirs.step()
            theirs.zero_grad()
            me = hcg.get_data_parallel_rank()
            model.forward_backward_pipeline([x.chunk(2)[me], y.chunk(2)[me]])
            fleet.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
            compare(mine, single, f"dp x pp, {mode}, step {step}")


class Mlp(nn.Module):
    """Column, row, norm; or their one-card twins."""

    def __init__(self, parallel: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        if parallel:
            self.up = mp.ColumnParallelLinear(8, 16, has_bias=True, gather_output=False)
            self.down = mp.RowParallelLinear(16, 8, input_is_parallel=True, has_bias=True)
        else:
            self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def table(parallel: bool) -> Any:
    return fleet.SharedLayerDesc(
        "table", mp.VocabParallelEmbedding if parallel else nn.Embedding, None, "weight", 12, 8
    )


def tied_head(layer: Any, x: Tensor) -> Tensor:
    from onecard.fleet.layers.mappings import copy_to

    return F.linear(copy_to(x, layer.group) if hasattr(layer, "group") else x, layer.weight)


def tensor_parallel_layers(parallel: bool) -> list[Any]:
    first = table(parallel)
    last = copy.copy(first)
    last.forward_func = tied_head
    return [first, Desc(Mlp, parallel), Desc(Mlp, parallel), last]


def mean_loss(out: Tensor, y: Tensor) -> Tensor:
    return mp.ParallelCrossEntropy(num_classes=12)(out, y).mean()


def with_tensor_parallel() -> None:
    for mode in ("1F1B", "ZBH1", "ZBV"):
        begin(mode, 3, 2, mp=2, pp=2)
        single = build(tensor_parallel_layers(False), True)
        mine = build(tensor_parallel_layers(True), False, loss_fn=mean_loss)
        model = fleet.distributed_model(mine)
        x, y = (t % 12 for t in tokens(5))
        loss = model.forward_backward_pipeline([x, y])
        expected = F.cross_entropy(single(x).flatten(0, 1), y.flatten())
        expected.backward()
        close(loss, expected.detach(), f"tp x pp, {mode}")
        norm = nn.utils.get_total_norm([p.grad for p in single.parameters() if p.grad is not None])
        close(fleet.grad_norm(model.parameters()), norm, f"norm, tp x pp, {mode}")
        compare(mine, single, f"tp x pp, {mode}", gradients=True)


def three_shared() -> None:
    """Three ties in a circle of stages, in other orders on each: their sums must not cross."""
    begin("1F1B", 2, 2, pp=4)

    def shared(key: str) -> Any:
        return fleet.SharedLayerDesc(key, nn.Linear, None, "weight", 6, 6)

    names = ["ab", "bc", "ca", "ab"]
    single, mine = (
        build([shared(k) for pair in names for k in pair], one, loss_fn=nn.MSELoss(), seg_method=[0, 2, 4, 6, 8])
        for one in (True, False)
    )
    model = fleet.distributed_model(mine)
    x, _ = data(4)
    model.forward_backward_pipeline([x, x])
    F.mse_loss(single(x), x).backward()
    compare_after_sync(mine, single, "three ties")


def on_four_ranks() -> None:
    for program in (in_one_buffer, with_data_parallel, with_tensor_parallel, three_shared):
        program()


@pytest.mark.proof
def test_pipelines_beside_other_axes() -> None:
    run_ranks(on_four_ranks, 4)
