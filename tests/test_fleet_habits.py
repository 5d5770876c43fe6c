"""What programs do with gradients between backward() and step(), by hand: under fleet they see what one card sees."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fleet_programs import begin, close, part_of
from torch import Tensor, nn

import onecard as oc
from onecard import differentiable, fleet
from onecard.errors import FleetError
from onecard.fleet.gradients import hooks
from onecard.fleet.layers import sequence
from onecard.testing import RankError, run_ranks
from onecard.train import unreduced

mp = fleet.meta_parallel
LR = 0.05
Habit = Callable[[nn.Module, torch.optim.Optimizer, Callable[[], Tensor]], Any]


class Experts(nn.Module):
    """Matrices that all rows go through, cut over the ranks that see other data: each has one, and rows come and go."""

    def __init__(self, group: Any = None) -> None:
        super().__init__()
        self.group, weight = group, torch.randn(2, 6, 6) / 6
        if group is not None:
            weight = weight[group.index :][:1].clone()
        self.weight = nn.Parameter(weight)
        if group is not None:
            fleet.mark(self.weight, group, 0)

    def forward(self, x: Tensor) -> Tensor:
        if self.group is None:
            return sum(torch.relu(x @ w) for w in self.weight)
        mine = torch.relu(differentiable.all_gather(x, group=self.group) @ self.weight[0])
        return differentiable.reduce_scatter(mine, group=self.group)


class Net(nn.Module):
    """Cut layers, experts, a norm that sees a part of the sequence, parameters that one rank does not use, and frozen ones."""

    def __init__(self, parallel: bool, sp: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.sp = sp
        self.norm = nn.LayerNorm(6)
        if parallel:
            self.up = mp.ColumnParallelLinear(6, 8, has_bias=True, gather_output=False)
            self.down = mp.RowParallelLinear(8, 6, input_is_parallel=True)
        else:
            self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)
        self.sometimes, self.frozen, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 2)
        self.frozen.requires_grad_(False)
        data = fleet.get_hybrid_communicate_group().data()
        self.experts = Experts(data if parallel and data.size > 1 else None)
        if sp:
            for p in self.norm.parameters():
                fleet.mark_as_sequence_parallel_parameter(p)

    def forward(self, x: Tensor, begin: int = 0) -> Tensor:
        """``begin``: from which row on a layer is used."""
        x = sequence.gather(self.norm(sequence.scatter(x))) if self.sp else self.norm(x)
        x = x + self.down(torch.tanh(self.up(x)))
        x = x + self.frozen(x) + self.experts(x)
        if begin < len(x):
            x = torch.cat([x[:begin], x[begin:] + self.sometimes(x[begin:])])
        return self.head(x)


def twice(net: nn.Module, opt: Any, backward: Any) -> None:
    backward()
    backward()


def assigned(net: nn.Module, opt: Any, backward: Any) -> None:
    backward()
    for p in net.parameters():
        if p.grad is not None:
            p.grad = 0.5 * p.grad.sign() + 0.1 * p.detach()
    opt.step()


def clamped(net: nn.Module, opt: Any, backward: Any) -> None:
    twice(net, opt, backward)
    for p in net.parameters():
        if p.requires_grad:
            p.grad.data.clamp_(-0.01, 0.02)
    opt.step()


def own_clipping(net: nn.Module, opt: Any, backward: Any) -> None:
    """By the norm of each gradient, and once more after another backward onto it."""
    for _ in range(2):
        backward()
        for p in [net.norm.weight, net.norm.bias, net.head.weight]:
            p.grad.mul_((0.02 / p.grad.norm()).clamp(max=1.0))
    opt.step()


def by_hand(net: nn.Module, opt: Any, backward: Any) -> None:
    twice(net, opt, backward)
    with torch.no_grad():
        for p in net.parameters():
            if p.grad is not None:
                p.add_(p.grad.sign() * p.grad.square(), alpha=-LR)


def foreach(net: nn.Module, opt: Any, backward: Any) -> None:
    backward()
    params = [p for p in net.parameters() if p.requires_grad]
    with torch.no_grad():
        torch._foreach_add_(params, torch._foreach_sign([p.grad for p in params]), alpha=-LR)


def trust_ratio(net: nn.Module, opt: Any, backward: Any) -> None:
    backward()
    for p in [net.norm.weight, net.head.weight]:
        p.grad *= p.detach().norm() / (p.grad.norm() + 0.1)
    opt.step()


def of_autograd(net: nn.Module, opt: Any, backward: Any) -> None:
    """Gradients that autograd is asked for, assigned; over old ones, too; what is not linear in them first."""
    backward()
    params = [p for p in net.parameters() if p.requires_grad]
    for _ in range(2):
        for p, g in zip(params, torch.autograd.grad(backward(run=False), params), strict=True):
            p.grad = g.clamp(-0.01, 0.005)
        opt.step()


def kept_in_place(net: nn.Module, opt: Any, backward: Any) -> None:
    """zero_grad(set_to_none=False), a premature look, torch.autograd.grad in between, and a gradient that is thrown away."""
    for step in range(3):
        opt.zero_grad(set_to_none=False)
        backward()
        if step:
            net.norm.weight.grad.abs_()
        torch.autograd.grad(backward(run=False), net.norm.weight)
        backward(often=step == 1)
        opt.step()
    backward()
    net.zero_grad()
    backward()
    opt.step()


def one_buffer(net: nn.Module, opt: Any, backward: Any) -> None:
    """Gradients in one buffer, which is read and changed, and no ``p.grad``; added to, zeroed in place, and given up."""
    params = [p for p in net.parameters() if p.requires_grad]
    flat = torch.zeros(sum(p.numel() for p in params))
    for p, part in zip(params, flat.split([p.numel() for p in params]), strict=True):
        p.grad = part.view_as(p)
    for often in (True, False, True):
        backward(often=often)
        flat.clamp_(-0.01, 0.005)
    opt.step()
    flat.zero_()
    backward()
    flat.copy_(flat.sign() * flat.square())
    opt.step()
    opt.zero_grad()
    backward()
    opt.step()


def kept_list(net: nn.Module, opt: Any, backward: Any) -> None:
    """Gradients in a list that is made once, read, changed and zeroed in place; with several backwards, too."""
    backward()
    params = [p for p in net.parameters() if p.requires_grad]
    grads = [p.grad for p in params]
    for often in (True, False, True):
        torch._foreach_clamp_max_(grads, 0.005)
        torch._foreach_clamp_min_(grads, -0.01)
        if often:
            opt.step()
            torch._foreach_zero_(grads)
        backward(often=often)
    opt.zero_grad(set_to_none=False)
    backward()
    for g in grads:
        g.copy_(g.sign() * g.square())
    opt.step()


def in_a_hook(net: nn.Module, opt: Any, backward: Any) -> None:
    """An optimizer that steps while backward runs."""

    def update(p: Tensor) -> None:
        with torch.no_grad():
            p.sub_(LR * p.grad.sign())
        p.grad = None

    hooks = [p.register_post_accumulate_grad_hook(update) for p in net.parameters() if p.requires_grad]
    backward()
    for hook in hooks:
        hook.remove()


def hooked(net: nn.Module, opt: Any, backward: Any) -> None:
    """Hooks that clip what backward adds, after and before a look."""
    backward()
    hooks = [p.register_hook(lambda g: g.clamp(-0.01, 0.005)) for p in net.parameters() if p.requires_grad]
    backward()
    assert net.norm.bias.grad is not None
    backward()
    opt.step()
    for hook in hooks:
        hook.remove()
    backward()
    opt.step()


def closure(net: nn.Module, opt: Any, backward: Any) -> list[float]:
    def run() -> Tensor:
        opt.zero_grad()
        return backward().detach()

    return [float(opt.step(run)) for _ in range(2)]


def closure_lbfgs(net: nn.Module, opt: Any, backward: Any) -> list[float]:
    return closure(net, torch.optim.LBFGS(net.parameters(), LR, 5, line_search_fn="strong_wolfe"), backward)


HABITS: list[Habit] = [
    assigned, clamped, own_clipping, by_hand, foreach, trust_ratio,
    of_autograd, kept_in_place, one_buffer, kept_list, in_a_hook, hooked,
    closure,
]  # fmt: skip


def backward_of(net: nn.Module, me: int, n: int, width: int = 6) -> Any:
    """The next microbatch; ``often``: a layer is used by all of it, and not only by its second half, which rank 0 has not."""
    calls = [0]

    def backward(run: bool = True, often: bool = True) -> Tensor:
        if run:
            calls[0] += 1
        x = torch.randn(8, width, generator=torch.Generator().manual_seed(calls[0])).chunk(n)[me]
        loss = (net(x) if often else net(x, max(0, 4 - me * len(x)))).square().mean()
        if run:
            loss.backward()
        return loss

    return backward


def seen(habit: Habit, degrees: dict[str, int], sp: bool) -> None:
    hcg = begin(**degrees)
    alone, net = Net(False), Net(True, sp)
    with torch.no_grad():
        for path, p in net.named_parameters():
            p.copy_(part_of(p, alone.get_parameter(path).detach()))
    fleet.distributed_model(net)
    said = []
    for each, me, n in ((alone, 0, 1), (net, hcg.data().index, hcg.data().size)):
        optimizer = torch.optim.SGD(each.parameters(), LR, momentum=0.5)
        said.append(habit(each, optimizer, backward_of(each, me, n)))
    what = f"{habit.__name__} of {degrees}"
    assert said[0] is None or torch.allclose(torch.tensor(said[0]), torch.tensor(said[1]), rtol=1e-5), what
    for name, p in net.named_parameters():
        close(p.detach(), part_of(p, alone.get_parameter(name).detach()), f"{what}: {name}", 2e-5)


def all_habits(degrees: dict[str, int], sp: bool = False) -> None:
    for habit in HABITS:
        seen(habit, degrees, sp)
    if "mp" not in degrees:
        seen(closure_lbfgs, degrees, sp)


def what_is_sent() -> None:
    """The gradients once a step, whatever is read or changed, and however many microbatches there are."""
    begin(dp=2)
    net = nn.Linear(64, 64, bias=False)
    model = fleet.distributed_model(net)
    optimizer = torch.optim.SGD(model.parameters(), LR)
    backward = backward_of(net, 0, 2, 64)
    for microbatches in (1, 4):
        for look in (False, True):
            with oc.explain() as report:
                for _ in range(microbatches):
                    backward()
                if look:
                    net.weight.grad.clamp_(-1, 1)
                    net.weight.grad.abs()
                optimizer.step()
                optimizer.zero_grad()
            large = [m.step.bytes for m in report.messages if m.step.bytes > 100]
            assert large == [net.weight.nbytes], (microbatches, look, large)


def asked_for() -> None:
    """``torch.autograd.grad``: all whole, in one message; what is there stays; with a graph it is refused."""
    begin(dp=2)
    torch.manual_seed(0)
    alone, rank = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)]), oc.get_rank()
    model = copy.deepcopy(alone)
    fleet.distributed_model(model)
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))

    def loss(net: Any, rows: Tensor, *used: int) -> Tensor:
        return sum(net[i](rows).square().mean() for i in used)

    loss(model, x.chunk(2)[rank], 0, 1).backward()
    before = [unreduced.read(p) for p in model.parameters()]
    kept = [None if g is None else g.clone() for g in before]
    with oc.explain() as report:
        found = torch.autograd.grad(
            loss(model, x.chunk(2)[rank], *([0, 1] if rank else [0])), [*model.parameters()], allow_unused=True
        )
    large = [m.step.bytes for m in report.messages if m.step.bytes > 100]
    assert large == [2 * 4 * (16 + 4)], large
    first = torch.autograd.grad(loss(alone, x, 0), [*alone[0].parameters()])
    second = torch.autograd.grad(loss(alone, x[4:], 1) / 2, [*alone[1].parameters()])
    for g, expected in zip(found, (*first, *second), strict=False):
        close(g, expected, "asked for")
    assert found[4] is found[5] is None
    for p, was, values in zip(model.parameters(), before, kept, strict=True):
        assert unreduced.read(p) is was and (was is None or torch.equal(was, values)), "one rank's, as it was"
    (inner,) = torch.autograd.grad(loss(model, y := x.clone().requires_grad_(), 0), y, create_graph=True)
    assert inner.requires_grad, "of what is no parameter"
    with pytest.raises(FleetError, match=r"create_graph=True\) for parameters of fleet.distributed_model"):
        torch.autograd.grad(loss(model, x, 0), [*model[0].parameters()], create_graph=True)


def experts_beside_zero() -> None:
    """ZeRO divides copies; parts of the same ranks were taken for copies, and one rank's became all ranks'."""
    begin(sharding=2)
    net = Experts(fleet.get_hybrid_communicate_group().data())
    optimizer = torch.optim.AdamW(net.parameters(), LR)
    with pytest.raises(FleetError, match=r"sharding_degree: a parameter .* part of \[2, 6, 6\] among ranks \[0, 1\]"):
        fleet.distributed_optimizer(optimizer)
    with pytest.raises(FleetError, match=r"group_sharded_parallel divides what ranks .* hold copies of"):
        fleet.group_sharded_parallel(net, torch.optim.AdamW(net.parameters(), LR), "os_g")


def hooked_before() -> None:
    """Hooks behind the accumulation that were there before ``distributed_model``: they see, and change, the whole gradient."""
    begin(dp=2)
    torch.manual_seed(0)
    alone = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    mine, seen = copy.deepcopy(alone), ([], [])
    for net, found in zip((alone, mine), seen, strict=True):
        net[0].bias.register_post_accumulate_grad_hook(lambda p, found=found: found.append(float(p.grad.sum())))
        net[2].weight.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", p.grad.clamp(-0.01, 0.01)))
    model = fleet.distributed_model(mine)
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
    for net, rows in ((alone, x), (model, x.chunk(2)[oc.get_rank()])):
        optimizer = torch.optim.SGD(net.parameters(), LR)
        for _ in range(3):
            net(rows).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert seen[1] == pytest.approx(seen[0], rel=1e-5)
    for p, expected in zip(mine.parameters(), alone.parameters(), strict=True):
        close(p.detach(), expected.detach(), "hooked before")


def inner_copies() -> None:
    """``copy.deepcopy(model.module)``, as averages begin, at each level."""
    begin(dp=2)
    for level in ("", "os", "os_g"):
        torch.manual_seed(0)
        model: Any = fleet.distributed_model(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)))
        optimizer: Any = torch.optim.SGD(model.parameters(), LR)
        if level:
            model, optimizer, _ = fleet.group_sharded_parallel(model, optimizer, level)
        average = copy.deepcopy(model.module)
        x = torch.randn(4, 4, generator=torch.Generator().manual_seed(1))
        before = average(x).detach()
        close(before, model(x).detach(), level)
        model(x).square().mean().backward()
        optimizer.step()
        assert torch.equal(average(x), before) and not torch.equal(model(x), before), level


def two_ranks() -> None:
    experts_beside_zero()
    what_is_sent()
    asked_for()
    hooked_before()
    inner_copies()
    all_habits({"dp": 2})
    all_habits({"dp": 1, "mp": 2}, True)


def test_habits_on_two_ranks() -> None:
    run_ranks(two_ranks, 2)


@pytest.mark.proof
def test_habits_on_a_grid() -> None:
    run_ranks(all_habits, 4, {"dp": 2, "mp": 2}, True)


def drifting() -> None:
    """A hand-made update with one rank's numbers: told at the next forwards, by name."""
    begin(dp=2)
    torch.manual_seed(0)
    model = fleet.distributed_model(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2)))
    torch.manual_seed(oc.get_rank())

    def step() -> None:
        model(torch.randn(8, 4)).sum().backward()
        for p in model.parameters():
            p.data.add_(torch.randn_like(p), alpha=LR)

    for _ in range(3):
        step()


def test_copies_that_drift_apart_are_named() -> None:
    words = r"the parameter 0.weight is one parameter on ranks \[0, 1\], but it differs between ranks"
    with pytest.raises(RankError, match=words):
        run_ranks(drifting, 2)


def norms() -> None:
    begin(dp=1, mp=2)
    for dtype, size in ((torch.float64, 1.0), (torch.float32, 3e19), (torch.bfloat16, 1.0)):
        for order in (1.0, 2.0, 3.0, float("inf")):
            alone, net = (layer.to(dtype) for layer in (nn.Linear(6, 8), mp.ColumnParallelLinear(6, 8, has_bias=True)))
            for p, q in zip(net.parameters(), alone.parameters(), strict=True):
                q.grad = torch.randn(q.shape, generator=torch.Generator().manual_seed(1)).to(dtype) * size
                p.grad = part_of(p, q.grad)
            wide = torch.cat([q.grad.flatten() for q in alone.parameters()]).double()
            expected = torch.linalg.vector_norm(wide, order).item()
            found = fleet.grad_norm(net.parameters(), order)
            far = 1e-14 if dtype is torch.float64 else 1e-2 if dtype is torch.bfloat16 else 1e-6
            assert abs(found.item() - expected) <= far * expected, (dtype, size, order, found.item(), expected)
            assert found.dtype is (torch.float64 if dtype is torch.float64 else torch.float32)
    with pytest.raises(fleet.FleetError, match="norm_type is 0"):
        fleet.grad_norm(net.parameters(), 0)


def test_norms_of_every_dtype_and_size() -> None:
    run_ranks(norms, 2)


def read_from_a_file() -> None:
    begin()
    mark = fleet.sum_over(nn.Parameter(torch.ones(2)), oc.new_group([0, 1]))
    file = io.BytesIO()
    torch.save(mark, file)
    file.seek(0)
    p = torch.load(file, weights_only=False)
    optimizer = torch.optim.SGD([p], lr=1.0)
    for step in range(2):
        (p * (oc.get_rank() + 1)).sum().backward()
        optimizer.step()
        assert torch.equal(p.detach(), torch.full((2,), 1.0 - 3 * (step + 1))), (step, p)
        optimizer.zero_grad()


def test_a_parameter_from_a_file_is_summed_at_every_step() -> None:
    run_ranks(read_from_a_file, 2)


def assigned_after_another_was_read() -> None:
    begin()
    p = nn.Parameter(torch.ones(2))
    state = hooks.watch(p, unreduced.Family([p]))
    assert p.grad is None  # read before backward: it says nothing of the gradient that backward makes
    (p * 2).sum().backward()
    state.is_whole()  # another one of the family was read
    p.grad = torch.ones(2)
    assert state.summand
    state.is_whole()
    p.grad = p.grad * 2
    assert not state.summand


def test_what_a_program_assigns_is_judged_by_what_it_has_read_since_backward() -> None:
    run_ranks(assigned_after_another_was_read, 1)


class Tasks(nn.Module):
    """A head for each task."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.heads = nn.Linear(4, 8), nn.ModuleList(nn.Linear(8, 1) for _ in range(2))

    def forward(self, x: torch.Tensor, task: int) -> torch.Tensor:
        return self.heads[task](torch.tanh(self.trunk(x)))


def heads_apart(hooked: bool) -> None:
    """From the second step on each rank's rows need another head."""
    begin(dp=2)
    torch.manual_seed(0)
    model = fleet.distributed_model(Tasks())
    optimizer = torch.optim.SGD(model.parameters(), LR)
    for p in model.parameters() if hooked else ():
        p.register_hook(lambda grad: grad * 0.5)
    for task in (0, oc.get_rank()):
        model(torch.randn(4, 4), task).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_a_hook_of_a_parameter_that_one_rank_alone_reaches_is_named() -> None:
    """Backward sums its gradient there and then: one head's would be added to the other's, which is as large."""
    run_ranks(heads_apart, 2, False)
    with pytest.raises(RankError, match=r"for '' \[\] of hooks of heads.0.(bias|weight), summed in backward") as caught:
        run_ranks(heads_apart, 2, True)
    assert "hooks of heads.1." in str(caught.value)


def apart_along_mp(how: str) -> None:
    """No other rank sees other data: what one rank of a layer does alone."""
    begin(mp=2)
    torch.manual_seed(0)
    column = fleet.meta_parallel.ColumnParallelLinear(4, 6, has_bias=True, gather_output=True)
    net = nn.Sequential(nn.LayerNorm(4), column)
    model = fleet.distributed_model(net)
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), LR))
    for step in range(4):
        x = torch.randn(8, 4)
        model(x + oc.get_rank() * (how == "batch")).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if how == "update" and step == 1:
            with torch.no_grad():
                net[0].bias.add_(oc.get_rank())


def test_copies_and_batches_are_compared_along_mp() -> None:
    run_ranks(apart_along_mp, 2, "")
    with pytest.raises(
        RankError, match=r"the parameter 0.bias is one parameter on ranks \[0, 1\], but it differs between ranks"
    ):
        run_ranks(apart_along_mp, 2, "update")
    with pytest.raises(
        RankError, match=r"argument 0 is one batch on ranks \[0, 1\], which divide layers, but it differs"
    ):
        run_ranks(apart_along_mp, 2, "batch")


def together_hooked(level: str, mode: Any) -> None:
    """What a hook on several gradients sees, in two steps; on one card beside it."""
    begin(dp=2)
    seen: list[list[Tensor]] = []
    for parallel in (False, True):
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
        optimizer: Any = torch.optim.SGD(model.parameters(), LR, momentum=0.9)
        if parallel and level:
            model, optimizer, _ = fleet.group_sharded_parallel(model, optimizer, level)
        elif parallel:
            model, optimizer = fleet.distributed_model(model), fleet.distributed_optimizer(optimizer)
        found: list[Tensor] = []

        def see(grads: Any, found: list[Tensor] = found) -> None:
            for grad in [grads] if isinstance(grads, Tensor) else grads:
                found.append(grad.full_tensor().clone() if isinstance(grad, oc.DistTensor) else grad.clone())

        torch.autograd.graph.register_multi_grad_hook([*model.parameters()], see, mode=mode)
        for step in range(2):
            x = torch.randn(4, 4, generator=torch.Generator().manual_seed(step))
            model(x.chunk(2)[oc.get_rank()] if parallel else x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        seen.append(found)
    assert len(seen[0]) == len(seen[1]) == (8 if mode == "all" else 2)
    for a, b in zip(*seen, strict=True):
        close(b, a, f"{level} {mode}")


@pytest.mark.parametrize("level", ["", "os", "os_g", "p_g_os"])
def test_a_hook_on_several_gradients_sees_whole_ones(level) -> None:
    for mode in ("all", "any"):
        run_ranks(together_hooked, 2, level, mode)


def in_a_list(level: str) -> None:
    """The list of gradients that a program has made once is that of its parameters, where ranks keep parts of them."""
    begin(dp=2)
    mesh, found = oc.ProcessMesh([0, 1], ["dp"]), list[Any]()
    for alone in (True, False):
        torch.manual_seed(0)
        net: Any = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
        mine: Callable[[Tensor], Any] = lambda x: x  # noqa: E731
        if alone or not level.startswith("Sharding"):
            opt: Any = torch.optim.SGD(net.parameters(), 0.2, momentum=0.9)
            if not alone:
                net, opt = fleet.group_sharded_parallel(net, opt, level)[:2]
                mine = lambda x: x.chunk(2)[oc.get_rank()]  # noqa: E731
        else:
            oc.shard_layer(net, mesh)
            opt = torch.optim.SGD(net.parameters(), 0.2, momentum=0.9)
            opt = oc.shard_optimizer(opt, getattr(oc, level)("dp", mesh))
            mine = lambda x: oc.shard_tensor(x, mesh, [oc.Shard(0)])  # noqa: E731
        grads, norms = list[Any](), list[float]()
        for step in range(5):
            for part in range(1 + step % 2):
                x = torch.randn(8, 6, generator=torch.Generator().manual_seed(10 * step + part))
                net(mine(x)).square().mean().backward()
            grads = grads or [p.grad for p in net.parameters()]
            norms.append(float(oc.unshard(torch.stack([g.norm() for g in grads]).norm())))
            for g in grads:
                g.mul_(0.1)
            opt.step()
            opt.zero_grad(set_to_none=False)
        found.append([torch.tensor(norms), *(oc.unshard(p.detach()) for p in net.parameters())])
    for theirs, ours in zip(*found, strict=True):
        close(ours, theirs, level)


@pytest.mark.parametrize("level", ["os", "os_g", "p_g_os", "ShardingStage1", "ShardingStage2", "ShardingStage3"])
def test_a_list_of_gradients_is_that_of_the_parameters(level: str) -> None:
    run_ranks(in_a_list, 2, level)


def by_layer(level: str) -> None:
    """Parameters that are reached by their layer are those that the optimizer knows, as on one card."""
    begin(dp=2)
    losses: list[list[float]] = []
    for parallel in (False, True):
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=LR)
        if parallel:
            model, optimizer, _ = fleet.group_sharded_parallel(model, optimizer, level)
        found = []
        for step in range(6):
            x = torch.randn(4, 4, generator=torch.Generator().manual_seed(step))
            loss = model(x.chunk(2)[oc.get_rank()] if parallel else x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.detach())
            head = [*model[2].parameters()]
            if step == 1:  # its moments begin anew
                assert all(p in optimizer.state for p in head)
                for p in head:
                    optimizer.state.pop(p)
            elif step == 3:  # it gets a group of its own
                chosen = {*map(id, head)}
                group = optimizer.param_groups[0]
                mine = [p for p in group["params"] if id(p) in chosen]
                group["params"] = [p for p in group["params"] if id(p) not in chosen]
                assert len(mine) == len({*mine} & {*head}) == 2
                optimizer.add_param_group({"params": mine, "lr": LR / 10})
        total = torch.stack(found)
        if parallel:
            torch.distributed.all_reduce(total)
        losses.append((total / (2 if parallel else 1)).tolist())
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


@pytest.mark.parametrize("level", ["os", "os_g", "p_g_os"])
def test_parameters_of_a_layer_are_the_optimizers(level) -> None:
    run_ranks(by_layer, 2, level)
