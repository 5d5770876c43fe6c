"""ZeRO by layouts: any optimizer, with accumulation, clipping and tensor parallelism, against one card; what is sent and kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import onecard as oc
from onecard.errors import LayoutError
from onecard.testing import assert_close, multirank, run_ranks

R, S = oc.Replicate(), oc.Shard
STEPS = 4
STAGES = {1: oc.ShardingStage1, 2: oc.ShardingStage2, 3: oc.ShardingStage3}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, 0.01, foreach=False),
    "foreach": lambda p: torch.optim.AdamW(p, 0.01, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, 0.01, fused=True),
    "adafactor": lambda p: torch.optim.Adafactor(p, 0.1),  # not element by element: rows and columns have states
}


class Net(nn.Module):
    """Uneven sizes, tied weights, a scalar, a frozen layer, and one that is used every other time."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(7, 6)
        self.wide, self.norm, self.back = nn.Linear(6, 9), nn.LayerNorm(9), nn.Linear(9, 6)
        self.frozen, self.sometimes = nn.Linear(6, 6).requires_grad_(False), nn.Linear(6, 6)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor, step: int) -> Tensor:
        h = self.embedding(x)
        h = h + self.frozen(self.back(self.norm(torch.tanh(self.wide(h)))))
        h = h + self.sometimes(h) if step % 2 else h
        return nn.functional.linear(h * self.scale, self.embedding.weight)


def batches(seed: int = 1) -> Any:
    draw = torch.Generator().manual_seed(seed)
    while True:
        yield torch.randint(7, (8,), generator=draw), torch.randint(7, (8,), generator=draw)


def distributed(tp: bool) -> tuple[Net, oc.ProcessMesh]:
    net, n = Net(), oc.get_world_size()
    if not tp:
        mesh = oc.ProcessMesh(range(n), ["dp"])
        return oc.shard_layer(net, mesh), mesh
    mesh = oc.ProcessMesh(torch.arange(n).view(-1, 2).tolist(), ["dp", "tp"])
    oc.shard_layer(net, mesh)
    net.wide.weight = oc.shard_tensor(net.wide.weight, mesh, [R, S(0)])
    net.back.weight = oc.shard_tensor(net.back.weight, mesh, [R, S(1)])
    return net, mesh


def train(net: Net, optimizer: Any, place: Callable[[Tensor], Tensor], accumulate: int, clip: bool) -> list[float]:
    losses, data = [], batches()
    for step in range(STEPS):
        for _ in range(accumulate):
            x, y = map(place, next(data))
            loss = cross_entropy(net(x, step), y) / accumulate
            loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(net.parameters(), 0.3)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def one_card(optimizer: str, accumulate: int, clip: bool) -> tuple[list[float], list[Tensor]]:
    net = Net()
    losses = train(net, OPTIMIZERS[optimizer](net.parameters()), lambda x: x, accumulate, clip)
    return losses, [p.detach() for p in net.parameters()]


def compare(stage: int, tp: bool) -> None:
    """Losses and weights; and after a step each rank holds its part of the states."""
    settings = {
        "momentum": (3, True),
        "adamw": (1, False),
        "foreach": (1, True),
        "fused": (3, False),
        "adafactor": (1, True),
    }
    for name, (accumulate, clip) in settings.items():
        if not tp or name != "adamw":
            net, mesh = distributed(tp)
            optimizer = oc.shard_optimizer(OPTIMIZERS[name](net.parameters()), STAGES[stage]("dp", mesh))
            rest = [R] * (mesh.ndim - 1)
            found = train(net, optimizer, lambda x: oc.shard_tensor(x, mesh, [S(0), *rest]), accumulate, clip)  # noqa: B023
            losses, weights = one_card(name, accumulate, clip)
            assert found == pytest.approx(losses, rel=1e-5), (name, accumulate, clip)
            for parameter, weight in zip(net.parameters(), weights, strict=True):
                assert_close(parameter.detach(), weight, rtol=1e-5, atol=1e-6)
            for parameter, state in optimizer.state.items():
                for key, value in state.items():
                    if isinstance(value, Tensor) and value.dim() and value.shape == parameter.shape:
                        assert isinstance(value.placements[0], oc.Shard), (name, key)
            whole = [p.placements[0] == R for p in net.parameters() if p.dim() and p.requires_grad]
            assert whole == [stage < 3] * len(whole)


@pytest.mark.proof
@pytest.mark.share(2)
@pytest.mark.parametrize(("ranks", "tp"), [(3, False), (4, True)])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_training_is_that_of_one_card(stage, ranks, tp):
    run_ranks(compare, ranks, stage, tp)


def sent(stage: int, accumulate: int) -> dict[str, tuple[int, int]]:
    """Messages of the second step: how many, and how many bytes this rank sends."""
    mesh = oc.ProcessMesh(range(oc.get_world_size()), ["dp"])
    torch.manual_seed(0)
    net = oc.shard_layer(nn.Sequential(nn.Linear(16, 32, bias=False), nn.Tanh(), nn.Linear(32, 16, bias=False)), mesh)
    optimizer = oc.shard_optimizer(torch.optim.AdamW(net.parameters(), fused=True), STAGES[stage]() if stage else None)
    reports = []
    for _ in range(2):
        with oc.explain() as report:
            reports.append(report)
            for _ in range(accumulate):
                x = oc.shard_tensor(torch.ones(1024, 16), mesh, [S(0)])
                net(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    counts: dict[str, tuple[int, int]] = {}
    for message in reports[-1].messages:
        if message.step.kind != "slice":
            number, size = counts.get(message.step.kind, (0, 0))
            counts[message.step.kind] = number + 1, size + message.step.bytes
    return counts


def sent_by_marks(cut: str, clip: bool) -> tuple[list[float], dict[str, int]]:
    """Losses, and bytes of a step with states or parameters cut over dp by hand."""
    mesh = oc.ProcessMesh([0, 1], ["dp"])
    torch.manual_seed(0)
    net: Any = nn.Sequential(nn.Linear(16, 32, bias=False), nn.Tanh(), nn.Linear(32, 16, bias=False))
    if cut:
        oc.shard_layer(net, mesh)
    if cut == "parameters":
        for layer in (net[0], net[2]):
            layer.weight = oc.shard_tensor(layer.weight, mesh, [S(0)])
    made = torch.optim.AdamW(net.parameters(), 0.01, eps=1e-3)
    by_hand = (lambda key, p, state: oc.reshard(state, mesh, [S(0)])) if cut == "states" else None
    optimizer = oc.shard_optimizer(made, by_hand) if cut else made
    losses, counts = [], {}
    for step in range(4):
        x = torch.randn(1024, 16, generator=torch.Generator().manual_seed(step))
        loss = net(oc.shard_tensor(x, mesh, [S(0)]) if cut else x).square().mean()
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(net.parameters(), 0.05)
        with oc.explain() as report:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
        for m in report.messages if step == 3 else ():
            if m.step.kind != "slice":
                counts[m.step.kind] = counts.get(m.step.kind, 0) + m.step.bytes
    return losses, counts


def cut_by_hand() -> None:
    part = 4 * 2 * 16 * 32 // 2
    expected = sent_by_marks("", False)[0], sent_by_marks("", True)[0]
    wanted = {"states": {"reduce_scatter": part, "all_gather": part}, "parameters": {"reduce_scatter": part}}
    for cut, sums in wanted.items():
        losses, counts = sent_by_marks(cut, False)
        assert losses == pytest.approx(expected[0], rel=1e-5) and counts == sums, (cut, counts)
        assert sent_by_marks(cut, True)[0] == pytest.approx(expected[1], rel=1e-5), cut


def test_states_and_parameters_that_are_cut_by_hand_send_no_more():
    """The update runs where the state is; a gradient is cut as its parameter is, and nothing goes all to all."""
    run_ranks(cut_by_hand, 2)


@pytest.mark.proof
def test_what_is_sent_is_what_theory_says():
    """P elements: 2P (n-1)/n for data parallelism and stages 1 and 2, 3P (n-1)/n for stage 3; in few messages."""
    part = 4 * 2 * 16 * 32 // 2  # on 2 ranks: bytes of half the parameters
    assert run_ranks(sent, 2, 0, 1)[0] == {"all_reduce": (1, 2 * part)}
    assert run_ranks(sent, 2, 1, 1)[0] == {"reduce_scatter": (1, part), "all_gather": (1, part)}
    assert run_ranks(sent, 2, 1, 4)[0] == {"reduce_scatter": (1, part), "all_gather": (1, part)}
    assert run_ranks(sent, 2, 2, 1)[0] == {"reduce_scatter": (1, part), "all_gather": (1, part)}
    assert run_ranks(sent, 2, 2, 4)[0] == {"reduce_scatter": (4, 4 * part), "all_gather": (1, part)}
    found = run_ranks(sent, 2, 3, 1)[0]
    assert found["reduce_scatter"] == (1, part) and found["all_gather"][1] <= 2 * part


@multirank(2)
def test_a_step_that_fails_leaves_right_parameters():
    mesh = oc.ProcessMesh([0, 1], ["dp"])
    weight = nn.Parameter(oc.shard_tensor(torch.arange(6.0).view(3, 2), mesh, [R]))

    class Failing(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            super().step(closure)
            raise OSError("the disk is full")

    optimizer = oc.shard_optimizer(torch.optim.SGD([weight], 1.0), oc.ShardingStage1("dp", mesh))
    for fails in (True, False, False):
        weight.grad = None
        weight.sum().backward()
        optimizer.register_step_post_hook(_fail) if fails else None
        try:
            optimizer.step()
        except OSError:
            optimizer._optimizer_step_post_hooks.popitem()
    assert weight.placements == (R,)
    assert_close(weight.detach(), torch.arange(6.0).view(3, 2) - 3)


def _fail(*_: Any) -> None:
    raise OSError("the disk is full")


@multirank(2)
def test_gradients_that_are_asked_for_leave_those_that_are_kept():
    """torch.autograd.grad between two backwards, and gradients that are set to zero instead of None."""
    mesh = oc.ProcessMesh([0, 1], ["dp"])
    net = oc.shard_layer(nn.Linear(3, 3, bias=False), mesh)
    optimizer = oc.shard_optimizer(torch.optim.SGD(net.parameters(), 1.0), oc.ShardingStage2("dp", mesh))
    x = oc.shard_tensor(torch.ones(4, 3), mesh, [S(0)])
    for _ in range(2):
        net(x).sum().backward()
        (asked,) = torch.autograd.grad(net(x).sum(), [net.weight])
        assert_close(asked.full_tensor(), torch.full((3, 3), 4.0))
        net(x).sum().backward()
        assert net.weight.grad.placements == (S(0),)
        assert_close(net.weight.grad.full_tensor(), torch.full((3, 3), 8.0))
        optimizer.zero_grad(set_to_none=False)
        assert_close(net.weight.grad.full_tensor(), torch.zeros(3, 3))


@multirank(2)
def test_loaded_states_lie_as_new_ones():
    mesh = oc.ProcessMesh([0, 1], ["dp"])
    for stage in STAGES.values():
        net, _ = distributed(False)
        first = oc.shard_optimizer(torch.optim.AdamW(net.parameters(), 0.1), stage("dp", mesh))
        place = lambda x: oc.shard_tensor(x, mesh, [S(0)])  # noqa: E731
        train(net, first, place, 1, False)
        saved = first.state_dict()
        whole = {
            k: {n: oc.unshard(v) if isinstance(v, Tensor) else v for n, v in s.items()}
            for k, s in saved["state"].items()
        }
        second = oc.shard_optimizer(torch.optim.AdamW(net.parameters(), 0.1), stage("dp", mesh))
        second.load_state_dict({**saved, "state": whole})
        for parameter, state in first.state.items():
            for key, value in state.items():
                found = second.state[parameter][key]
                assert getattr(found, "placements", None) == getattr(value, "placements", None), key
                assert_close(oc.unshard(found), oc.unshard(value))


@multirank(2)
def test_scaled_gradients_that_overflow_on_one_rank_skip_the_step_on_all():
    mesh = oc.ProcessMesh([0, 1], ["dp"])
    for stage in STAGES.values():
        net = oc.shard_layer(nn.Linear(4, 4, bias=False), mesh)
        before = net.weight.full_tensor().clone()
        optimizer = oc.shard_optimizer(torch.optim.SGD(net.parameters(), 0.1), stage("dp", mesh))
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for value in (float("inf"), 1.0):
            x = torch.ones(4, 4)
            x[3] = value  # on the second rank
            scaler.scale(net(oc.shard_tensor(x, mesh, [S(0)])).sum()).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            moved = 0.0 if value != 1 else 0.4
            assert_close(net.weight.full_tensor(), before - moved)
        assert scaler.get_scale() == 2.0


@multirank(2)
def test_one_infinite_element_in_one_ranks_part_skips_the_step_on_all():
    """The other rank's part is finite in every element: only asking all ranks tells it."""
    mesh = oc.ProcessMesh([0, 1], ["dp"])
    for stage in (None, *STAGES.values()):
        for fused in (False, True):
            weight = nn.Parameter(oc.shard_tensor(torch.ones(4), mesh, [S(0)]))
            optimizer = torch.optim.AdamW([weight], 0.1, fused=fused)
            if stage is not None:
                optimizer = oc.shard_optimizer(optimizer, stage("dp", mesh))
            scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
            for unscaled in (True, False):
                for last in (float("inf"), 1.0):
                    before = weight.full_tensor().clone()
                    scaler.scale((weight * torch.tensor([1.0, 1.0, 1.0, last])).sum()).backward()
                    if unscaled:
                        scaler.unscale_(optimizer)
                    scaler.step(optimizer)
                    scaler.update()
                    optimizer.zero_grad()
                    assert torch.equal(weight.full_tensor(), before) == (last != 1.0), (stage, fused, unscaled, last)
            assert scaler.get_scale() == 1.0


def test_words():
    mesh = oc.ProcessMesh([[0]], ["dp", "tp"])
    with pytest.raises(
        LayoutError, match=r"has 2 axes; name the one along which the data are divided, .*Stage2\('dp', mesh\)"
    ):
        oc.ShardingStage2(mesh=mesh)
    with pytest.raises(LayoutError, match="has no axis 'pp'; its axes are"):
        oc.ShardingStage1("pp", mesh)
    assert oc.ShardingStage1(oc.ProcessMesh([0], ["x"])).axis is None  # as older versions of Paddle


def recorded(stage: int) -> None:
    """A step that is recorded and replayed equals the program, bit for bit, under a schedule of the learning rate."""
    mesh, found = oc.ProcessMesh([0, 1], ["dp"]), []
    for static in (False, True):
        torch.manual_seed(0)
        net = oc.shard_layer(nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 7)), mesh)
        optimizer = oc.shard_optimizer(torch.optim.AdamW(net.parameters(), 0.05, fused=True), STAGES[stage]("dp", mesh))
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8)

        def step(x: Tensor, y: Tensor, net: nn.Module = net, optimizer: Any = optimizer) -> Tensor:
            optimizer.zero_grad()
            loss = cross_entropy(net(x), y)
            loss.backward()
            optimizer.step()
            return loss.detach()

        run: Any = oc.to_static(step) if static else step
        losses, data = [], batches()
        for _ in range(8):
            x = oc.shard_tensor(torch.nn.functional.one_hot(next(data)[0] % 6, 6).float(), mesh, [S(0)])
            losses.append(run(x, oc.shard_tensor(next(data)[1], mesh, [S(0)])).item())
            schedule.step()
        found.append((losses, [oc.unshard(p.detach()).tolist() for p in net.parameters()]))
        assert not static or len(run.recordings) == 1
    assert found[0] == found[1]


@pytest.mark.proof
def test_recorded_steps_replay_bit_for_bit():
    for stage in STAGES:
        run_ranks(recorded, 2, stage)


@multirank(4)
def test_a_dim_that_two_axes_cut_whichever_is_outside():
    mesh = oc.ProcessMesh([[0, 1], [2, 3]], ["dp", "tp"])
    torch.manual_seed(0)
    given, x = torch.randn(9, 3), torch.randn(4, 9)
    for stage in STAGES.values():
        alone, weight = nn.Parameter(given.clone()), nn.Parameter(oc.shard_tensor(given, mesh, [S(0), S(0)]))
        optimizer = oc.shard_optimizer(torch.optim.SGD([weight], 0.1), stage("dp", mesh))
        for p, step, batch in (
            (alone, torch.optim.SGD([alone], 0.1).step, x),
            (weight, optimizer.step, oc.shard_tensor(x, mesh, [S(0), S(1)])),
        ):
            (batch @ p).square().sum().backward()
            step()
        assert_close(weight.detach(), alone.detach())


@multirank(4)
def test_parameters_whose_parts_together_are_longer_on_some_ranks():
    mesh = oc.ProcessMesh(range(4), ["dp"])
    given = [torch.arange(6.0).view(2, 3), torch.arange(4.0)]  # parts of 4, 4, 1 and 1 elements
    for stage in STAGES.values():
        params = [nn.Parameter(oc.shard_tensor(x, mesh, [R])) for x in given]
        optimizer = oc.shard_optimizer(torch.optim.SGD(params, 1.0), stage("dp", mesh))
        sum((p * p.detach()).sum() for p in params).backward()
        optimizer.step()
        for p in params:
            assert_close(p.detach(), torch.zeros(p.shape))
