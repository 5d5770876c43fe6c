"""Resuming from plain whole states, as files hold them: the layouts, messages and numbers of a run that was never stopped."""

from __future__ import annotations

import copy
import io
import tempfile
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from twins import (
    MESH,
    OPTIMIZERS,
    STEPS,
    batch,
    compute_in_its_own_dtype,
    forms,
    loss_of,
    make_model,
    make_optimizer,
    parameters,
    train,
    twins,
)

import onecard as oc
from onecard.testing import assert_close, multirank


def whole(value: Any) -> Any:
    """A state dict as it would be saved: plain tensors."""
    if isinstance(value, Tensor):
        return oc.unshard(value.detach()).clone()
    if isinstance(value, dict):
        return type(value)((k, whole(v)) for k, v in value.items())
    return [whole(v) for v in value] if isinstance(value, list) else value


def through_a_file(state: Any, **how: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True, **how)


def held(optimizer: torch.optim.Optimizer) -> tuple[int, int]:
    """Bytes of this rank's states, and bytes of the memory behind them."""
    flat = [v for state in optimizer.state.values() for v in state.values()]
    tensors = [v for value in flat for v in (value if isinstance(value, list) else [value]) if isinstance(v, Tensor)]
    local = [v.to_local() if isinstance(v, oc.DistTensor) else v for v in tensors]
    return sum(v.nbytes for v in local), sum(v.untyped_storage().nbytes() for v in local)


def messages(model: nn.Module, lay_out: Any, optimizer: Any) -> list[tuple[str, int]]:
    with oc.explain() as report:
        train(model, lay_out, optimizer, steps=2)
    return [(m.step.kind, m.step.bytes) for m in report.messages]


def resumed(model: nn.Module, made: torch.optim.Optimizer, fresh: Any) -> torch.optim.Optimizer:
    """A new optimizer that goes on where another one stopped."""
    optimizer = fresh(model)
    optimizer.load_state_dict(through_a_file(whole(made.state_dict())))
    return optimizer


@pytest.mark.share(1)
@pytest.mark.parametrize("name", OPTIMIZERS)
@multirank(2)
def test_a_resumed_optimizer(name: str) -> None:
    if name == "Rprop":
        warnings.simplefilter("ignore", oc.GatheredOperatorWarning)
    if name == "Muon":
        compute_in_its_own_dtype()
    for kind, ready in (("dp", False), ("tp", False), ("tp", True)):
        for more in forms(name):

            def fresh(model: nn.Module, more: Any = more, ready: bool = ready) -> Any:
                optimizer = make_optimizer(name, model, more)
                return oc.shard_optimizer(optimizer) if ready else optimizer

            (plain, _), (twin, lay_out) = twins(kind)
            unresumed = fresh(twin)
            train(twin, lay_out, unresumed, steps=2)
            again = copy.deepcopy(twin)
            optimizer = resumed(again, unresumed, fresh)
            found, expected = messages(again, lay_out, optimizer), messages(twin, lay_out, unresumed)
            assert found == expected, (kind, ready, more, len(found), len(expected))
            (mine, memory), (unresumed_s, most) = held(optimizer), held(unresumed)
            assert mine == unresumed_s and memory <= most, (
                kind,
                more,
            )  # first moments may lie in a bucket of gradients
            for a, b in zip(again.parameters(), twin.parameters(), strict=True):
                assert torch.equal(oc.unshard(a), oc.unshard(b)), (kind, ready, more)
            one = make_optimizer(name, plain, more)
            train(plain, lambda data: data, one, steps=2)
            train(plain, lambda data: data, resumed(plain, one, lambda m: make_optimizer(name, m, more)), steps=2)  # noqa: B023
            assert_close(parameters(again), parameters(plain), rtol=1e-5)


@multirank(2)
def test_what_is_loaded_is_held_in_parts() -> None:
    """At once under ``shard_optimizer``, at the next step with an optimizer of torch."""
    _, (twin, lay_out) = twins("tp")
    states = {i: {"step": torch.tensor(3.0), **{k: torch.ones_like(p) for k in ("exp_avg", "exp_avg_sq")}}
              for i, p in enumerate(make_model().parameters())}  # fmt: skip
    for ready in (True, False):
        optimizer = torch.optim.Adam(twin.parameters(), lr=0.01)
        optimizer = oc.shard_optimizer(optimizer) if ready else optimizer
        optimizer.load_state_dict({"state": states, "param_groups": optimizer.state_dict()["param_groups"]})
        if not ready:
            train(twin, lay_out, optimizer, steps=1)
        for p in twin.parameters():
            moment = optimizer.state[p]["exp_avg"]
            assert moment.placements == p.placements
            assert moment.to_local().untyped_storage().nbytes() == p.to_local().nbytes
            assert type(optimizer.state[p]["step"]) is Tensor


@multirank(2)
def test_shard_fn_lays_out_what_is_loaded() -> None:
    """ZeRO-1 by hand: moments cut where the parameter is not. Loaded before or after ``shard_optimizer``, plain or not."""

    def cut(key: str, param: Any, state: Any) -> Any:
        return oc.reshard(state, MESH, [oc.Shard(0)])

    _, (twin, lay_out) = twins("dp")
    first = oc.shard_optimizer(torch.optim.Adam(twin.parameters(), lr=0.01), cut)
    train(twin, lay_out, first, steps=2)
    for state in (whole(first.state_dict()), copy.deepcopy(first.state_dict()), first.state_dict()):
        for early in (False, True):
            optimizer = torch.optim.Adam(twin.parameters(), lr=0.01)
            if early:
                optimizer.load_state_dict(state)
            optimizer = oc.shard_optimizer(optimizer, cut)
            with oc.explain() as report:
                if not early:
                    optimizer.load_state_dict(state)
            assert report.bytes == 0
            optimizer.zero_grad()
            for _ in range(2):
                for p in twin.parameters():
                    for key in ("exp_avg", "exp_avg_sq"):
                        found = optimizer.state[p][key]
                        assert found.placements == (oc.Shard(0),), (key, early)
                        assert torch.equal(oc.unshard(found), oc.unshard(first.state[p][key]))
                optimizer.step()  # no gradients: the states stay where they are


@multirank(2)
def test_states_of_scalar_parameters() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.weight = nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.arange(6.0).view(3, 2))

        def forward(self, x: Tensor) -> Tensor:
            return self.scale * (x @ self.weight)

    for kind in (torch.optim.Adam, torch.optim.NAdam, torch.optim.ASGD):
        plain = Scaled()
        twin = oc.shard_layer(copy.deepcopy(plain), MESH)
        for net in (plain, twin):
            saved: Any = None
            for step in range(3):  # a new optimizer goes on at each
                optimizer = kind(net.parameters(), lr=0.1)
                if step:
                    optimizer.load_state_dict(through_a_file(whole(saved)))
                x = torch.randn(4, 3, generator=torch.Generator().manual_seed(step))
                net(oc.shard_tensor(x, MESH, [oc.Shard(0)]) if net is twin else x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                saved = optimizer.state_dict()
        assert_close(parameters(twin), parameters(plain), rtol=1e-5)
        kinds = {k: type(v) for k, v in optimizer.state[twin.scale].items()}
        assert kinds.pop("step") is Tensor and oc.DistTensor in kinds.values()


# modules


class Net(nn.Module):
    """Weights that are cut, one that two modules share, buffers, a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm, self.head = nn.Embedding(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 6, bias=False)
        self.head.weight = self.table.weight
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, ids: Tensor) -> Tensor:
        return self.scale * self.head(self.norm(self.table(ids)))


def cut_rows(name: str, layer: nn.Module, mesh: oc.ProcessMesh) -> None:
    for key, tensor in [*layer.named_parameters(recurse=False), *layer.named_buffers(recurse=False)]:
        if tensor.dim() and not isinstance(tensor, oc.DistTensor):
            setattr(layer, key, oc.shard_tensor(tensor, mesh, [oc.Shard(0)] * mesh.ndim))


def nets() -> tuple[Net, Net]:
    torch.manual_seed(0)
    plain = Net()
    return plain, oc.shard_layer(copy.deepcopy(plain), MESH, cut_rows)


def train_net(net: nn.Module, steps: int = 2) -> list[float]:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(steps):
        ids = torch.randint(6, (8,), generator=torch.Generator().manual_seed(step))
        loss = nn.functional.cross_entropy(net(ids), ids)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def other_values() -> dict[str, Tensor]:
    torch.manual_seed(1)
    net = Net()
    train_net(net)
    return net.state_dict()


@pytest.mark.share(1)
@pytest.mark.parametrize("assign", [False, True])
@multirank(2)
def test_a_module_keeps_its_layouts(assign: bool) -> None:
    values = other_values()
    _, reference = nets()
    expected = []
    for apart in (False, True):  # assigned weights that do not share memory are no longer tied, as with torch
        plain, _ = nets()
        plain.load_state_dict(whole(values) if apart else copy.deepcopy(values), assign=assign)
        expected.append(train_net(plain))
    assert (expected[0] != expected[1]) is assign
    where = {name: t.placements for name, t in reference.state_dict().items()}
    reference.load_state_dict(values)
    with oc.explain() as unresumed:
        train_net(copy.deepcopy(reference))
    other_mesh = oc.ProcessMesh([1, 0], ["y"])
    grid = oc.ProcessMesh([[0], [1]], ["a", "b"])
    sources: list[Any] = [
        values,
        through_a_file(values),
        whole(reference.state_dict()),
        copy.deepcopy(reference.state_dict()),
    ]
    for mesh, placement in ((MESH, oc.Replicate()), (other_mesh, oc.Shard(0)), (grid, oc.Replicate())):
        sources.append(
            {
                k: oc.shard_tensor(v, mesh, [placement if v.dim() else oc.Replicate()] * mesh.ndim)
                for k, v in values.items()
            }
        )
    for i, source in enumerate(sources):
        _, twin = nets()
        assert str(twin.load_state_dict(source, assign=assign)) == "<All keys matched successfully>"
        assert {name: t.placements for name, t in twin.state_dict().items()} == where, i
        assert all(isinstance(p, nn.Parameter) and p.requires_grad and p.mesh is MESH for p in twin.parameters())
        weight = twin.table.weight
        assert weight.to_local().untyped_storage().nbytes() == weight.to_local().nbytes
        with oc.explain() as report:
            found = train_net(twin)
        assert found == pytest.approx(expected[i > 1], rel=1e-5), i
        if not assign:  # assigned ones are two parameters over one memory, as with torch
            assert [m.step.bytes for m in report.messages] == [m.step.bytes for m in unresumed.messages], i


@multirank(2)
def test_what_does_not_fit_is_left_for_torch_to_say() -> None:
    for assign in (False, True):
        plain, twin = nets()
        values = other_values() | {"norm.weight": torch.ones(5), "unknown": torch.ones(1), "scale": "nothing"}
        del values["norm.bias"]
        said = []
        for net in (plain, twin):
            with pytest.raises(RuntimeError) as caught:
                net.load_state_dict(values, assign=assign)
            said.append(str(caught.value))
        assert said[0] == said[1] and "size mismatch for norm.weight" in said[0]
        fits = {k: v for k, v in values.items() if k not in ("norm.weight", "scale")}
        for net in (plain, twin):
            result = net.load_state_dict(fits, strict=False, assign=assign)
            assert result.missing_keys == ["scale", "norm.weight", "norm.bias"] and result.unexpected_keys == [
                "unknown"
            ]
        assert twin.norm.weight.placements == twin.table.weight.placements == (oc.Shard(0),)


@multirank(2)
def test_a_mapped_file() -> None:
    with tempfile.TemporaryDirectory() as folder:
        torch.save(other_values(), f"{folder}/model.pt")
        for assign in (False, True):
            values = torch.load(f"{folder}/model.pt", mmap=True, weights_only=True)
            plain, twin = nets()
            plain.load_state_dict(values, assign=assign)
            twin.load_state_dict(torch.load(f"{folder}/model.pt", mmap=True, weights_only=True), assign=assign)
            assert twin.head.weight.placements == (oc.Shard(0),)
            assert train_net(twin) == pytest.approx(train_net(plain), rel=1e-5)


@multirank(2)
def test_a_whole_job_goes_on() -> None:
    """Model and optimizer from one file: losses of a run that was not stopped, bit for bit, and of one card that resumes too."""
    losses: dict[str, list[float]] = {}
    for which, (model, lay_out) in zip(("plain", "twin"), twins("tp"), strict=True):
        ready = oc.shard_optimizer if which == "twin" else lambda o: o
        optimizer = ready(torch.optim.AdamW(model.parameters(), lr=0.01))
        train(model, lay_out, optimizer, steps=2)
        saved = through_a_file(whole({"model": model.state_dict(), "optimizer": optimizer.state_dict()}))
        again = copy.deepcopy(make_model()) if which == "plain" else twins("tp")[1][0]
        resumed_optimizer = ready(torch.optim.AdamW(again.parameters(), lr=0.01))
        again.load_state_dict(saved["model"])
        resumed_optimizer.load_state_dict(saved["optimizer"])
        for kind, net, opt in ((which, model, optimizer), (f"{which} resumed", again, resumed_optimizer)):
            losses[kind] = []
            for step in range(STEPS):
                loss = loss_of(net, lay_out(batch(step)))
                opt.zero_grad()
                loss.backward()
                opt.step()
                losses[kind].append(loss.item())
    assert losses["twin"] == losses["twin resumed"] and losses["plain"] == losses["plain resumed"]
    assert losses["twin"] == pytest.approx(losses["plain"], rel=1e-5)


@multirank(1)
def test_one_rank_resumes_as_one_card_bit_for_bit() -> None:
    mesh = oc.ProcessMesh([0], ["x"])
    finals = []
    for divided in (False, True):
        model = oc.shard_layer(make_model(), mesh) if divided else make_model()
        saved: Any = None
        for step in range(3):
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
            if step:
                optimizer.load_state_dict(through_a_file(whole(saved)))
            train(model, lambda data: data, optimizer, steps=1)
            saved = optimizer.state_dict()
        finals.append(parameters(model))
    assert all(torch.equal(a, b) for a, b in zip(finals[0].values(), finals[1].values(), strict=True))


def test_one_card_is_left_alone() -> None:
    net = nn.Linear(2, 2)
    values = {"weight": torch.ones(2, 2), "bias": torch.zeros(2)}
    assert str(net.load_state_dict(values, assign=True)) == "<All keys matched successfully>"
    assert net.weight.data_ptr() == values["weight"].data_ptr() and type(net.weight) is nn.Parameter
