"""Between steps of fleet programs: what is frozen, written, masked, marked or exchanged by one name is so by every other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fleet_programs import begin, close, seeded
from torch import Tensor, nn
from torch.nn.utils import prune

from onecard import fleet
from onecard.fleet import meta_parallel as mp
from onecard.fleet.utils import sequence_parallel_utils as sp
from onecard.testing import run_ranks


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.c(self.b(self.a(x).tanh()).tanh())
        return y


def by_parts(net: Any, x: Tensor) -> Tensor:
    """As encoders and decoders are called, or halves of a model by a method of its own."""
    y: Tensor = net.c(net.b(net.a(x).tanh()).tanh())
    return y


def frozen_by_layer(net: Any, optimizer: Any, step: int) -> None:
    net.b.requires_grad_(step % 2 == 0)


def frozen_all_but_one(net: Any, optimizer: Any, step: int) -> None:
    net.requires_grad_(False)
    net.c.requires_grad_(True)


def written(net: Any, optimizer: Any, step: int) -> None:
    """By ``parameters()``, having been read by name."""
    net.b.weight.sum().item()
    with torch.no_grad():
        for p in net.parameters():
            p.mul_(0.8)


def written_to_data(net: Any, optimizer: Any, step: int) -> None:
    net.b.weight.sum().item()
    for p in net.parameters():
        p.data.mul_(0.8)


def as_a_vector(net: Any, optimizer: Any, step: int) -> None:
    net.b.weight.sum().item()
    made = nn.utils.parameters_to_vector(net.parameters()) * 0.8
    nn.utils.vector_to_parameters(made, net.parameters())


def loaded(net: Any, optimizer: Any, step: int) -> None:
    net.b.weight.sum().item()
    net.load_state_dict({name: x * 0.8 for name, x in net.state_dict().items()})


def a_new_head(net: Any, optimizer: Any, step: int) -> None:
    net.c = seeded(nn.Linear, 6, 2, seed=step)
    optimizer.add_param_group({"params": [*net.c.parameters()]})


HABITS = (frozen_by_layer, frozen_all_but_one, written, written_to_data, as_a_vector, loaded)
CALLS: dict[str, Callable[[Any, Any, Tensor], Tensor]] = {
    "model": lambda model, net, x: model(x),
    "inner": lambda model, net, x: net(x),
    "parts": lambda model, net, x: by_parts(net, x),
}


def norms(model: Any, net: Any, optimizer: Any, call: Any, habit: Any, part: Any) -> list[float]:
    draws, seen = torch.Generator().manual_seed(1), []
    for step in range(4):
        if step in (2, 3):
            habit(net, optimizer, step)
        call(model, net, part(torch.randn(8, 4, generator=draws))).square().mean().backward()
        seen.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
    return seen


def between(level: str, wrapped: bool) -> None:
    hcg, wrong = begin(dp=2), []
    rank = hcg.data().index
    for habit in HABITS if level else (*HABITS, a_new_head):
        for way, call in CALLS.items():
            one = seeded(Net)
            wanted = norms(one, one, torch.optim.AdamW(one.parameters(), 0.05), call, habit, lambda x: x)
            net = seeded(Net)
            model: Any = fleet.distributed_model(net) if wrapped else net
            optimizer: Any = torch.optim.AdamW(model.parameters(), 0.05)
            if level:
                model, optimizer, _ = fleet.group_sharded_parallel(model, optimizer, level)
            found = norms(model, net, optimizer, call, habit, lambda x: x.chunk(2)[rank])
            if any(abs(a - b) > 1e-4 * abs(b) for a, b in zip(found, wanted, strict=True)):
                wrong.append((habit.__name__, way, found, wanted))
    assert not wrong, wrong


@pytest.mark.share(2)
@pytest.mark.parametrize(
    ("level", "wrapped"), [("", True), ("os", False), ("os_g", True), ("p_g_os", False), ("p_g_os", True)]
)
def test_between_steps_as_on_one_card(level: str, wrapped: bool) -> None:
    run_ranks(between, 2, level, wrapped)


def with_more(model: Any, part: Any) -> list[float]:
    """A layer, a parameter and a buffer that come to what ``distributed_model`` returned, and go."""
    optimizer, draws, seen = torch.optim.SGD(model.parameters(), 0.1), torch.Generator().manual_seed(1), list[float]()
    for step in range(7):
        if step == 2:
            model.extra = seeded(nn.Linear, 2, 2)
            model.gain = nn.Parameter(torch.ones(2))
            model.register_buffer("shift", torch.full((2,), 0.5))
            optimizer.add_param_group({"params": [*model.extra.parameters(), model.gain]})
        if step == 5:
            del model.extra
        out = model(part(torch.randn(8, 4, generator=draws)))
        out = model.extra(out) if hasattr(model, "extra") else out
        out = out * model.gain + model.shift if step >= 2 else out
        out.square().mean().backward()
        seen.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
    assert {"gain", "shift"} <= {*model.state_dict()} and "extra.weight" not in model.state_dict()
    return seen


def on_the_wrapper() -> None:
    hcg = begin(dp=2)
    found = with_more(fleet.distributed_model(seeded(Net)), lambda x: x.chunk(2)[hcg.data().index])
    assert found == pytest.approx(with_more(seeded(Net), lambda x: x), rel=1e-4)


def test_what_is_set_on_the_wrapper_is_the_models() -> None:
    run_ranks(on_the_wrapper, 2)


def masked(out: int) -> None:
    begin(mp=2)
    one, draws = seeded(nn.Linear, 4, out), torch.Generator().manual_seed(2)
    mask, x = torch.randint(0, 2, (out, 4), generator=draws).float(), torch.randn(3, 4, generator=draws)
    layer = mp.ColumnParallelLinear(4, out, has_bias=True, gather_output=True)
    with torch.no_grad():
        layer.weight.copy_(fleet.held(layer.weight).take(one.weight))
        layer.bias.copy_(fleet.held(layer.bias).take(one.bias))
    prune.custom_from_mask(layer, "weight", fleet.held(layer.weight).take(mask))
    prune.custom_from_mask(one, "weight", mask)
    model = fleet.distributed_model(layer)
    close(model(x), one(x), "masked")
    assert fleet.held(layer.weight_mask).shape == (out, 4)


@pytest.mark.parametrize("out", [8, 7])
def test_a_mask_of_a_part_is_a_part(out: int) -> None:
    run_ranks(masked, 2, out)


class Sequence(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = sp.ColumnSequenceParallelLinear(6, 8, has_bias=True)
        self.down = sp.RowSequenceParallelLinear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        return sp.gather(self.down(self.up(sp.scatter(x)).tanh()))


def marked(which: str) -> None:
    """As code ported from Megatron does: the bias of its row layer is marked."""
    begin(mp=2)
    one = seeded(lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6)))
    net = seeded(Sequence)
    for p in [net.down.bias] if which == "bias" else net.parameters():
        sp.mark_as_sequence_parallel_parameter(p)
    model = fleet.distributed_model(net)
    x = torch.randn(4, 3, 6, generator=torch.Generator().manual_seed(1))
    for each in (model, one):
        each(x).square().mean().backward()
    for mine, whole in zip(net.parameters(), one.parameters(), strict=True):
        close(mine.grad, fleet.held(mine).take(whole.grad), which)
    with pytest.raises(fleet.FleetError, match="each rank's gradient is its part's already"):
        fleet.sum_over(net.up.weight, fleet.get_hybrid_communicate_group().group("mp"))


@pytest.mark.parametrize("which", ["bias", "all"])
def test_marks_on_layers_that_sum_themselves_change_nothing(which: str) -> None:
    run_ranks(marked, 2, which)


def twice() -> None:
    begin(mp=2)
    for layer, width in ((mp.ColumnParallelLinear(4, 6, gather_output=True), 4), (mp.RowParallelLinear(4, 6), 4)):
        x = torch.randn(3, width, requires_grad=True)
        (grad,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
        with pytest.raises(fleet.FleetError, match=f"a {type(layer).__name__} is differentiated twice"):
            grad.square().sum().backward()


def test_second_derivatives_of_cut_layers_are_told() -> None:
    run_ranks(twice, 2)


class Counted(nn.Linear):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


def idle() -> list[tuple[int, int]]:
    """Of each expert of this rank: how often it was called, and its hooks; all tokens are expert 0's."""
    begin(dp=2, ep=2)
    experts = [Counted(4, 4) for _ in range(4)]
    layer: Any = mp.MoELayer(d_model=4, experts=experts, gate={"type": "naive", "top_k": 1}, num_experts=4)
    with torch.no_grad():
        for p in layer.gate.parameters():
            p.zero_()
        layer.gate.gate.bias[0] = 9.0
    hooked: dict[int, int] = {}
    mine = [each for each in layer.modules() if isinstance(each, Counted)]
    for i, each in enumerate(mine):
        each.register_forward_hook(lambda *_, i=i: hooked.update({i: hooked.get(i, 0) + 1}))
    for _ in range(2):
        layer(torch.ones(3, 4)).sum().backward()
    return [(each.calls, hooked.get(i, 0)) for i, each in enumerate(mine)]


def test_an_expert_without_tokens_is_not_called() -> None:
    first, second = run_ranks(idle, 2)
    assert [calls > 0 for calls, _ in first] == [hooks > 0 for _, hooks in first] == [True, False]
    assert second == [(0, 0), (0, 0)]
