"""What a parameter is stays known whatever tensor takes its place; where it cannot be known, an error names it."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fleet_programs import begin, close, part_of
from test_fleet_habits import LR, Net, backward_of
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, parametrizations, spectral_norm, weight_norm

import onecard as oc
from onecard import fleet
from onecard.fleet.zero.carried import install
from onecard.testing import run_ranks

mp = fleet.meta_parallel


class Blocks(nn.Module):
    """Blocks that are copies of one."""

    def __init__(self, parallel: bool, sp: bool = False) -> None:
        super().__init__()
        block = Net(parallel, sp)
        block.head = nn.Linear(6, 6)
        self.blocks = nn.Sequential(*(copy.deepcopy(block) for _ in range(2)))

    def forward(self, x: Any, *_: Any) -> Any:
        return self.blocks(x)


def untouched(net: nn.Module) -> nn.Module:
    return net


def assigned(net: nn.Module) -> nn.Module:
    net.load_state_dict({k: v.clone() for k, v in net.state_dict().items()}, assign=True)
    return net


def on_meta(net: nn.Module) -> nn.Module:
    state = net.state_dict()
    net.to(device="meta")
    net.to_empty(device="cpu")
    net.load_state_dict(state)
    return net


def by_hand(net: nn.Module) -> nn.Module:
    for module in net.modules():
        for name, p in [*module._parameters.items()]:
            if p is not None:
                setattr(module, name, nn.Parameter(p.detach().clone(), p.requires_grad))
    return net


def in_the_dict(net: nn.Module) -> nn.Module:
    for module in net.modules():
        for name, p in [*module._parameters.items()]:
            if p is not None:
                module._parameters[name] = nn.Parameter(p.detach().clone(), p.requires_grad)
    return net


def overwritten(net: nn.Module) -> nn.Module:
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        return net.double().float()
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)


def copied(net: nn.Module) -> nn.Module:
    return copy.deepcopy(net)


def saved(net: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


CHANGES: list[Callable[[nn.Module], nn.Module]] = [assigned, on_meta, by_hand, overwritten, copied, saved]


def trained(alone: nn.Module, net: Any, hcg: Any, what: str) -> None:
    found = []
    for each, me, n in ((alone, 0, 1), (net, hcg.data().index, hcg.data().size)):
        optimizer = torch.optim.SGD(each.parameters(), LR, momentum=0.5)
        backward = backward_of(each, me, n)
        norms = []
        for _ in range(2):
            backward()
            norms.append(clip_grad_norm_(each.parameters(), 0.05).item())
            optimizer.step()
            optimizer.zero_grad()
        found.append(norms)
    close(torch.tensor(found[1]), torch.tensor(found[0]), f"{what}: norms", 2e-5)
    for (name, p), q in zip(net.named_parameters(), alone.parameters(), strict=True):
        close(p.detach(), part_of(p, q.detach()), f"{what}: {name}", 2e-5)


def pair(kind: Any = Net) -> tuple[nn.Module, nn.Module]:
    alone, net = kind(False), kind(True, True)
    with torch.no_grad():
        for path, p in net.named_parameters():
            p.copy_(part_of(p, alone.get_parameter(path).detach()))
    return alone, net


def all_changes(which: slice) -> None:
    """Before and after distributed_model."""
    hcg = begin(dp=2, mp=2)
    for change in CHANGES[which]:
        alone, net = pair()
        trained(alone, fleet.distributed_model(change(net)), hcg, f"{change.__name__}, then distributed_model")
        alone, net = pair()
        trained(alone, change(fleet.distributed_model(net)), hcg, f"distributed_model, then {change.__name__}")
    alone, net = pair()
    trained(alone, in_the_dict(fleet.distributed_model(net)), hcg, "past the module's own assignment")
    alone, net = pair(Blocks)
    trained(alone, fleet.distributed_model(net), hcg, "copies of a block")


@pytest.mark.proof
@pytest.mark.parametrize("which", [slice(0, 4), slice(4, 9)])
def test_a_parameter_that_was_exchanged_is_what_it_was(which: slice) -> None:
    run_ranks(all_changes, 4, which)


def replaced_heads() -> None:
    """A head that takes another's place, cut or not, differs between ranks at first."""
    hcg = begin(dp=2, mp=2)
    for cut in (False, True):
        alone, net = pair()
        model: Any = fleet.distributed_model(net)
        backward_of(model, hcg.data().index, 2)()
        torch.manual_seed(7 if cut else torch.distributed.get_rank() + 7)
        model.head = mp.ColumnParallelLinear(6, 2, gather_output=True, has_bias=True) if cut else nn.Linear(6, 2)
        torch.manual_seed(7)
        alone.head = nn.Linear(6, 2)
        if cut:
            with torch.no_grad():
                for name in ("weight", "bias"):
                    mine = getattr(model.head, name)
                    mine.copy_(part_of(mine, getattr(alone.head, name).detach()))
        model.zero_grad()
        model(torch.randn(4, 6))
        trained(alone, model, hcg, f"a new head, cut {cut}")


def test_a_head_that_comes_later() -> None:
    run_ranks(replaced_heads, 4)


def unknown() -> None:
    begin(mp=2)
    for change in (weight_norm, spectral_norm):
        layer = mp.ColumnParallelLinear(4, 6, gather_output=False)
        change(layer)
        with pytest.raises(
            fleet.FleetError, match=r"ColumnParallelLinear.weight_(g|orig) is a parameter that this layer"
        ):
            fleet.distributed_model(layer)
        layer(torch.ones(2, 4)).sum().backward()
        with pytest.raises(fleet.FleetError, match="is a parameter that this layer, which is cut, does not know"):
            torch.optim.SGD(layer.parameters(), 0.1).step()
    for change in (parametrizations.weight_norm, parametrizations.spectral_norm, parametrizations.orthogonal):
        layer = mp.RowParallelLinear(4, 4, input_is_parallel=True)
        with pytest.raises(fleet.FleetError, match="RowParallelLinear is cut, and "):
            change(layer)
    layer = mp.ColumnParallelLinear(4, 6, gather_output=False)
    with pytest.raises(
        fleet.FleetError, match=r"weight is this rank's part \[3, 4\] of \[6, 4\], and was given \[6, 4\]"
    ):
        layer.weight = nn.Parameter(torch.zeros(6, 4))
    layer.gain = nn.Parameter(torch.ones(3))
    fleet.mark(layer.gain, layer.group, 0)
    assert fleet.held(copy.deepcopy(layer).gain).shape == (6,)


def test_what_cannot_be_known_is_named() -> None:
    run_ranks(unknown, 2)


def test_installed_once() -> None:
    install()
    before = nn.Module._apply
    install()
    assert nn.Module._apply is before


def replaced_in_a_recording() -> None:
    """A parameter that takes another's place between calls of a recorded step, and is in no optimizer."""
    begin(dp=2)
    found = []
    for alone in (True, False):
        torch.manual_seed(0)
        net: Any = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
        model = net if alone else fleet.distributed_model(net)
        opt = torch.optim.SGD(model.parameters(), 0.1)

        def step(x: Tensor, model: Any = model, opt: Any = opt) -> Tensor:
            opt.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            opt.step()
            return loss.detach()

        run = step if alone else oc.to_static(step)
        for call in range(10):
            if call == 5:
                net[0].bias = nn.Parameter(torch.zeros(5))
            x = torch.randn(8, 4, generator=torch.Generator().manual_seed(call))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that it is recorded anew
                run(x if alone else x.chunk(2)[oc.get_rank()])
        found.append([net[0].bias.grad, *(p.detach() for p in net.parameters())])
    for theirs, ours in zip(*found, strict=True):
        close(ours, theirs, "a parameter that was replaced")


def test_a_parameter_that_is_replaced_between_recorded_calls() -> None:
    run_ranks(replaced_in_a_recording, 2)
