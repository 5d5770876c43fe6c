"""Other data in a parameter's place (``p.data = ...``) under fleet's ZeRO: by all names, at once, and as on one card."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fleet_programs import begin
from torch import Tensor, nn

import onecard as oc
from onecard import fleet
from onecard.fleet import LayerDesc, PipelineLayer
from onecard.fleet.zero.carried import Members
from onecard.testing import run_ranks

LEVELS = ("sharding_degree", "os", "os_g", "p_g_os")


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def _sgd(model: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def _begun(level: str) -> tuple[Any, Any, bool]:
    """A model, its optimizer, and whether each rank reads its part of the batch."""
    model = _net()
    if not level:
        return model, _sgd(model), False
    begin(**({"sharding": oc.get_world_size()} if level == "sharding_degree" else {"dp": oc.get_world_size()}))
    if level == "sharding_degree":
        return fleet.distributed_model(model), fleet.distributed_optimizer(_sgd(model)), True
    return *fleet.group_sharded_parallel(model, _sgd(model), level)[:2], True


def _mean(x: Tensor) -> float:
    whole = x.clone()
    oc.all_reduce(whole)
    return whole.item() / oc.get_world_size()


def _named(model: Any, by_name: bool) -> dict[str, Any]:
    if not by_name:
        return dict(model.named_parameters())
    return {f"{i}.{kind}": getattr(model[i], kind) for i in (0, 2) for kind in ("weight", "bias")}


class Clamped:
    """Weights are kept in bounds, in memory of their own."""

    def __init__(self, when: str) -> None:
        self.when = when

    def __call__(self, model: Any, by_name: bool, when: str, loss: Callable[[], float]) -> list[float]:
        for p in _named(model, by_name).values() if when == self.when else ():
            p.data = p.data.clamp(-0.2, 0.2)
        return []


class Averaged:
    """The usual class of an average: in the place of the weights for an evaluation, and out again."""

    def __init__(self) -> None:
        self.shadow: dict[str, Tensor] = {}

    def __call__(self, model: Any, by_name: bool, when: str, loss: Callable[[], float]) -> list[float]:
        if when != "after":
            return []
        named = _named(model, by_name)
        for name, p in named.items():
            self.shadow[name] = (0.5 * p.data + 0.5 * self.shadow.get(name, p.data)).clone()
        kept = {}
        for name, p in named.items():
            kept[name], p.data = p.data, self.shadow[name]
        found = loss()
        for name, p in named.items():
            p.data = kept[name]
        return [found]


class Joined:
    """All weights as one vector, which is what they have afterwards."""

    def __call__(self, model: Any, by_name: bool, when: str, loss: Callable[[], float]) -> list[float]:
        if when == "after" and by_name:
            params = [*_named(model, by_name).values()]
            nn.utils.vector_to_parameters(0.9 * nn.utils.parameters_to_vector(params).detach(), params)
        return []


WAYS: dict[str, Callable[[], Any]] = {
    "before": lambda: Clamped("before"),
    "between": lambda: Clamped("between"),
    "after": lambda: Clamped("after"),
    "average": Averaged,
    "vector": Joined,
}


def _trained(level: str, way: str, by_name: bool) -> list[float]:
    model, optimizer, divided = _begun(level)
    habit, found = WAYS[way](), list[float]()
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(8, 4, generator=generator), torch.randn(8, 3, generator=generator)
    ranks = oc.get_world_size() if divided else 1
    mine = [t.chunk(ranks)[oc.get_rank() if divided else 0] for t in (x, y)]
    inner = model.module if level == "sharding_degree" else model

    def loss() -> float:
        with torch.no_grad():
            each = F.mse_loss(model(mine[0]), mine[1])
        return _mean(each) if divided else each.item()

    for _ in range(4):
        found += habit(inner, by_name, "before", loss)
        F.mse_loss(model(mine[0]), mine[1]).backward()
        found += habit(inner, by_name, "between", loss)
        optimizer.step()
        optimizer.zero_grad()
        found += habit(inner, by_name, "after", loss)
        found.append(loss())
    return found


def _as_on_one_card(level: str) -> None:
    for way in WAYS:
        for by_name in (False, True):
            found, wanted = _trained(level, way, by_name), _trained("", way, by_name)
            assert found == pytest.approx(wanted, rel=1e-5), (level, way, by_name)


@pytest.mark.share(1)
@pytest.mark.parametrize("level", LEVELS)
def test_other_data_in_a_parameters_place(level: str) -> None:
    run_ranks(_as_on_one_card, 2, level)


def _writes() -> dict[str, Callable[[Any], Any]]:
    return {
        "in place": lambda w: w.clamp_(-0.1, 0.1),
        "copied": lambda w: w.copy_(torch.full((6, 4), 0.05)),
        "data": lambda w: setattr(w, "data", w.data.clamp(-0.1, 0.1)),
        "in data": lambda w: w.data.clamp_(-0.1, 0.1),
    }


def _most(x: Any) -> float:
    whole = oc.unshard(x.detach()) if isinstance(x, oc.DistTensor) else x.detach()
    return float(whole.abs().max())


def _seen_by_all_names() -> None:
    for level in ("os", "os_g", "p_g_os"):
        for name, write in _writes().items():
            for by_name in (True, False):
                model, optimizer, _ = _begun(level)
                model(torch.ones(2, 4)).sum().backward()
                optimizer.step()
                weight = model[0].weight if by_name else next(iter(model.parameters()))
                if not by_name and name == "copied":
                    continue
                with torch.no_grad():
                    write(weight)
                names = model.state_dict()["0.weight"], next(iter(model.parameters())), model[0].weight
                assert len({round(_most(x), 6) for x in names}) == 1 and _most(names[0]) < 0.11, (level, name, by_name)


def _parts_stay() -> None:
    """What is written to parts while a whole is shown by name stays, however often the parameters are asked for."""
    model, _, _ = _begun("p_g_os")
    assert _most(model[0].weight) > 0.1
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    for _ in range(3):
        assert [_most(p) for p in model.parameters()] == [0.0] * 4
    assert model(torch.ones(2, 4)).abs().max().item() == 0.0


def test_what_is_written_by_one_name_is_read_by_others() -> None:
    run_ranks(_seen_by_all_names, 2)


def test_what_is_written_to_parts_stays() -> None:
    run_ranks(_parts_stay, 2)


def _norms() -> list[list[float]]:
    """Of the whole gradient, asked before anybody else has read it."""
    found = []
    for level in ("", *LEVELS):
        for order in (2.0, float("inf")):
            model, _, divided = _begun(level)
            x = torch.arange(32.0).reshape(8, 4).sin()
            mine = x.chunk(2)[oc.get_rank()] if divided else x
            model(mine).square().mean().backward()
            norm = nn.utils.get_total_norm([p.grad for p in model.parameters()], order)
            found.append(float(norm))
    return [found[i::2] for i in (0, 1)]


def test_norms_that_are_the_first_to_read_gradients() -> None:
    for found in run_ranks(_norms, 2):
        for one_card, *others in found:
            assert others == pytest.approx([one_card] * len(LEVELS), rel=1e-5)


def _penalized() -> None:
    """A rank's own loss with a penalty on whole weights is that rank's, whose mean is one card's."""
    for level in ("os", "os_g", "p_g_os"):
        model, _, _ = _begun(level)
        x = torch.arange(32.0).reshape(8, 4).cos().chunk(2)[oc.get_rank()]
        data = model(x).square().mean()
        loss = data + 0.1 * sum(p.square().sum() for p in model.parameters())
        wanted = data.item() + 0.1 * sum(p.square().sum().item() for p in _net().parameters())
        assert loss.item() == pytest.approx(wanted, rel=1e-5), level
        each = (model(x).square().mean(1) + 0.1 * next(iter(model.parameters())).square().sum()).sum()
        wanted = model(x).square().mean(1).sum().item() + 0.4 * _net()[0].weight.square().sum().item()
        assert each.item() == pytest.approx(wanted, rel=1e-5), level


def test_a_penalty_beside_a_ranks_own_loss() -> None:
    run_ranks(_penalized, 2)


def _frozen(model: Any) -> None:
    for name, p in model.named_parameters():
        if name.removeprefix("module.").startswith("0."):
            p.requires_grad_(False)


def _clamped(model: Any) -> None:
    for p in model.parameters():
        p.data = p.data.clamp(-0.2, 0.2)


def _of_stages(habit: Callable[[Any], None], level: str) -> list[float]:
    generator, found = torch.Generator().manual_seed(1), list[float]()
    x, y = torch.randn(8, 4, generator=generator), torch.randn(8, 3, generator=generator)
    model: Any = _net()
    if level:
        strategy = fleet.DistributedStrategy()
        strategy.hybrid_configs = {"pp_degree": 2, "dp_degree": 2}
        strategy.pipeline_configs = {"accumulate_steps": 2, "micro_batch_size": 2}
        fleet.init(is_collective=True, strategy=strategy)
        data = fleet.get_hybrid_communicate_group().get_data_parallel_rank()
        x, y = x.chunk(2)[data], y.chunk(2)[data]
        descs = [LayerDesc(nn.Linear, 4, 6), LayerDesc(nn.Tanh), LayerDesc(nn.Linear, 6, 3)]
        torch.manual_seed(0)
        model = fleet.distributed_model(PipelineLayer(descs, loss_fn=F.mse_loss, seg_method=[0, 2, 3]))
        model, optimizer, _ = fleet.group_sharded_parallel(model, torch.optim.SGD(model.parameters(), 0.1), level)
    else:
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for i in range(4):
        if i > 0 or habit is _frozen:
            habit(model)
        if level:
            found.append(_mean(model.train_batch([x, y], optimizer).detach()))
        else:
            loss = F.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
    return found


def _stages_as_on_one_card() -> None:
    for habit in (_frozen, _clamped):
        for level in ("os", "os_g"):
            assert _of_stages(habit, level) == pytest.approx(_of_stages(habit, ""), rel=1e-5), (habit.__name__, level)


@pytest.mark.share(1)
def test_in_a_pipeline_beside_dp() -> None:
    run_ranks(_stages_as_on_one_card, 4)


def test_what_has_come_since_is_known_whatever_memory_it_is_in():
    """A freed buffer's number is given to a new tensor, on one rank and not on another: ranks sent different lists."""
    model = nn.BatchNorm1d(4)
    members = Members(model)
    model.running_mean = torch.zeros(4)
    made = [torch.zeros(4) for _ in range(100)]
    assert len(members.new(made)) == len(made) and members.new(model.parameters()) == []
