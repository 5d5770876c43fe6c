"""Paddle's programs under Paddle's names: ``import onecard.paddle as dist``. Twin: the plain program on one card."""

from __future__ import annotations

import copy
import importlib
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onecard as oc
import onecard.paddle as dist
from onecard import fleet
from onecard.errors import LayoutError, MeshError, PlanError
from onecard.testing import assert_close, run_ranks


class Block(nn.Module):
    """Norm, two linear layers, a residual; time first while sequence parallel cuts it: all is by token."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x)))) * scale


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 8)
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 12, bias=False)
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, self.scale)
        return self.head(self.norm(x))


COLUMNS = {
    "layers.*.up": dist.ColWiseParallel(),
    "layers.*.down": dist.RowWiseParallel(),
    "head.weight": dist.ColWiseParallel(),
}
ROUNDABOUT = {
    "embed": dist.RowWiseParallel(),
    "layers.*.up": dist.ColWiseParallel(gather_output=True),
    "layers.*.down": dist.RowWiseParallel(is_input_parallel=False),
    "head": [dist.PrepareLayerInput(lambda process_mesh: lambda layer, args: (2 * args[0],)),
             dist.PrepareLayerOutput(lambda process_mesh: lambda layer, args, out: out / 2)],
}  # fmt: skip
IN_SEQUENCE = {
    **COLUMNS, "embed": [dist.ColWiseParallel(), dist.SequenceParallelBegin()], "norm": dist.SequenceParallelEnd(),
}  # fmt: skip
OUT_OF_SEQUENCE = {
    **IN_SEQUENCE, "layers.1": dist.SequenceParallelDisable(), "layers.2": dist.SequenceParallelDisable(need_transpose=False),
}  # fmt: skip
ONE_IN_SEQUENCE = {**COLUMNS, "layers.3": dist.SequenceParallelEnable()}
MP, DP, PP, BOTH, ALL = (
    oc.ProcessMesh([0, 1], ["mp"]), oc.ProcessMesh([0, 1], ["dp"]), oc.ProcessMesh([0, 1], ["pp"]),
    oc.ProcessMesh([[0, 1], [2, 3]], ["dp", "mp"]), oc.ProcessMesh([[0, 1], [2, 3]], ["pp", "mp"]),
)  # fmt: skip
SPLIT = {"split_spec": "layers", "global_spec": "embed"}
POINTS = {"split_spec": {"layers.0": dist.SplitPoint.END}}
BEGINS = {"split_spec": {"layers.3": dist.SplitPoint.BEGINNING}}
TWO: list[tuple[oc.ProcessMesh, dict[str, Any]]] = [
    *((MP, {"mp_config": {"parallelize_plan": p}}) for p in (COLUMNS, ROUNDABOUT, IN_SEQUENCE, OUT_OF_SEQUENCE, ONE_IN_SEQUENCE)),
    *((DP, {"dp_config": {"sharding_level": level}}) for level in (0, 1, 2, "3")),
    *((PP, {"pp_config": p}) for p in (SPLIT, POINTS, BEGINS)),
]  # fmt: skip
FOUR: list[tuple[oc.ProcessMesh, dict[str, Any]]] = [
    (BOTH, {"mp_config": {"parallelize_plan": OUT_OF_SEQUENCE}, "dp_config": {"sharding_level": 1}}),
    (BOTH, {"mp_config": {"parallelize_plan": COLUMNS}, "dp_config": {"sharding_level": 3}}),
    (ALL, {"mp_config": {"parallelize_plan": COLUMNS}, "pp_config": SPLIT}),
]


def trained(model: nn.Module, optimizer: Any, batches: Any) -> list[float]:
    losses = []
    for ids, labels in batches:
        loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), labels.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append((loss.full_tensor() if isinstance(loss, oc.DistTensor) else loss).item())
    return losses


def one_cards() -> None:
    torch.manual_seed(0)
    plain = Net()
    data = [(torch.randint(12, (4, 6)), torch.randint(12, (4, 6))) for _ in range(3)]
    twin = copy.deepcopy(plain)
    expected = trained(twin, torch.optim.AdamW(twin.parameters(), 0.01), data)
    for mesh, config in TWO if oc.get_world_size() == 2 else FOUR:
        model = copy.deepcopy(plain)
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        given = model, optimizer
        dist.set_mesh(mesh)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model, optimizer = dist.parallelize(model, optimizer, config=config)
        assert (model, optimizer) == given
        ends = [mesh.get_mesh_with_dim("pp", 0), mesh.get_mesh_with_dim("pp", 1)] if "pp" in mesh.dim_names else mesh
        loader: Any = torch.utils.data.DataLoader(data, batch_size=None)
        if "dp" in mesh.dim_names:
            loader = dist.shard_dataloader(loader, ends, shard_dims="dp")
        seen = set[Any]()
        model.layers[1].norm.register_forward_pre_hook(lambda _, args, seen=seen: seen.add(args[0].placements))
        found = trained(model, optimizer, loader)
        assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-5)
        assert_close(model.state_dict(), twin.state_dict(), rtol=1e-4, atol=1e-5)
        if "pp_config" in config:
            assert {p.process_mesh for p in model.parameters()} == {*ends}
        plan = config.get("mp_config", {}).get("parallelize_plan")
        if (
            plan in (IN_SEQUENCE, OUT_OF_SEQUENCE) and mesh is MP
        ):  # time is cut, in dim 0, between the layers that the plan names, and whole in those taken out of it
            assert (seen == {(oc.Shard(0),)}) == (plan is IN_SEQUENCE), seen
        if plan is COLUMNS:
            assert {n for n, p in model.named_parameters() if any(q.is_shard() for q in p.placements)} >= {
                "head.weight", *(f"layers.{i}.{n}" for i in range(4) for n in ("up.weight", "up.bias", "down.weight")),
            }  # fmt: skip


def test_a_config_of_plans_on_two_ranks() -> None:
    run_ranks(one_cards, 2)


@pytest.mark.proof
def test_a_config_of_plans_on_four_ranks() -> None:
    run_ranks(one_cards, 4)


def test_what_a_config_cannot_be() -> None:
    """One error each, before anything has changed."""
    mesh = oc.ProcessMesh([0], ["mp"])
    dist.set_mesh(mesh)
    plan = {"layers.0.up": dist.ColWiseParallel()}
    for config, words in (
        ({"mp": {}}, r"config\['mp'\]: it may have dp_config, mp_config, pp_config"),
        ({"mp_config": {"plan": plan}}, r"\['plan'\]: it may have parallelize_plan"),
        ({"mp_config": {"parallelize_plan": {"norm": "columns"}}}, "'norm': 'columns': want a plan"),
        ({"mp_config": {"parallelize_plan": {**plan, "layers.*.up": dist.RowWiseParallel()}}}, "two plans for 'layers.0.up.w"),
        (
            {"mp_config": {"parallelize_plan": {
                "embed": dist.SequenceParallelBegin(need_transpose=False), "norm": dist.SequenceParallelEnd(),
            }}},
            r"Begin\(need_transpose=False\) and SequenceParallelEnd\(need_transpose=True\)",
        ),
        ({"pp_config": {"split_spec": "layers"}}, "has no axis 'pp'"),
        ({"dp_config": {"sharding_level": 1}}, "has no axis 'dp'"),
        ({"dp_config": {"sharding_level": 4}}, "sharding_level=4: want 0, 1, 2 or 3"),
        (None, "no config"),
    ):  # fmt: skip
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with pytest.raises(PlanError, match=words):
            dist.parallelize(model, optimizer, config=config)  # type: ignore[arg-type]
        assert not any(isinstance(p, oc.DistTensor) for p in model.parameters()), config
    for arguments, options in ((mesh,), {"config": {"mp_config": {}}}), ((mesh,), {}), ((), {"config": {}}):
        with pytest.raises(PlanError, match=r"is taken by oc\.paddle\.parallelize\(model, optimizer, mesh, config\)"):
            oc.parallelize(Net(), None, *arguments, **options)  # type: ignore[arg-type]
    stages = oc.ProcessMesh([0, 1], ["pp"])
    tied = Net()
    tied.head.weight = tied.embed.weight
    for model, split, words in (
        (Net(), "blocks", "names 0 layers"), (Net(), {"layer": dist.SplitPoint.END}, "'layer': .*want a layer's name"),
        (Net(), {"layers.0": dist.SplitPoint.END, "layers.1": dist.SplitPoint.END}, "makes 3 stages"),
        (Net(), {"head": dist.SplitPoint.END}, "nothing comes behind 'head'"), (Net(), None, "want a name"),
        (tied, "layers", "'embed.weight' and 'head.weight' are one parameter"),
    ):  # fmt: skip
        with pytest.raises(PlanError, match=words):
            dist.parallelize(model, mesh=stages, config={"pp_config": {"split_spec": split}})
    with pytest.raises(LayoutError, match=r"cuts a matrix, and 'weight' of LayerNorm is \[8\]"):
        dist.parallelize(Net(), mesh=mesh, config={"mp_config": {"parallelize_plan": {"norm": dist.RowWiseParallel()}}})
    with pytest.raises(PlanError, match="want a function of process_mesh"):
        dist.PrepareLayerInput(3)  # type: ignore[arg-type]
    with pytest.warns(UserWarning, match="Net has no layer 'lm_head'"):
        dist.parallelize(
            Net(), mesh=mesh, config={"mp_config": {"parallelize_plan": {"lm_head": dist.ColWiseParallel()}}}
        )
    with pytest.raises(LayoutError, match=r"want \(batch, time, width\).*not \[4, 8\]"):
        dist.SequenceParallelEnable().around(layer := nn.Linear(8, 8), mesh)
        layer(torch.ones(4, 8))
    with pytest.raises(MeshError, match=r"want an oc\.ProcessMesh, not list"):
        dist.set_mesh([0])  # type: ignore[arg-type]


class Masked(dist.LocalLayer):
    """That of Paddle's page: each rank's own mean of some of its rows, and their sum."""

    def forward(self, x: Tensor, times: float) -> Tensor:
        mask = torch.zeros_like(x)
        mask[slice(1, 3) if oc.get_rank() == 0 else slice(2, 5)] = 1
        return (x * mask).sum() / mask.sum() * times


def by_hand() -> None:
    env = dist.init_parallel_env()
    assert (env.rank, env.world_size, env.local_rank) == (oc.get_rank(), 2, oc.get_rank()) and dist.is_available()
    mesh, me = oc.ProcessMesh([0, 1], ["x"]), oc.get_rank()
    local = (torch.arange(5.0) + me).requires_grad_()
    x = dist.dtensor_from_local(local, mesh, [oc.Shard(0)])
    made = Masked([(mesh, [oc.Partial(dist.ReduceType.kRedSum)])])(x, times=2.0)
    assert made.full_tensor().item() == 2 * (1.5 + 4.0)
    made.backward()
    assert_close(local.grad, torch.tensor([0.0, 1, 1, 0, 0] if me == 0 else [0, 0, 2 / 3, 2 / 3, 2 / 3]))
    with pytest.raises(LayoutError, match=r"Masked: its outputs lie on .*'x'.*, and it is given"):
        Masked([(mesh, [oc.Replicate()])])(oc.from_local(local, oc.ProcessMesh([0, 1], ["y"]), [oc.Shard(0)]), 1.0)
    with pytest.raises(LayoutError, match="Masked: times holds a distributed tensor"):
        Masked([(mesh, [oc.Replicate()])])(x, times=x)
    whole = dist.dtensor_from_fn(torch.full, mesh, [oc.Shard(0)], (4, 2), 3.0)
    assert dist.dtensor_to_local(whole).shape == (2, 2) and dist.unshard_dtensor(whole).shape == (4, 2)
    assert dist.dtensor_to_local(whole, mesh, [oc.Replicate()]).shape == (4, 2)
    values = torch.ones(2) + me
    dist.stream.all_reduce(values, sync_op=True, use_calc_stream=True)
    assert values.tolist() == [3.0, 3.0]


def test_local_layers_and_the_rest_by_hand() -> None:
    run_ranks(by_hand, 2)


def copies() -> None:
    torch.manual_seed(oc.get_rank())
    model = dist.DataParallel(nn.Linear(4, 2), find_unused_parameters=True)
    torch.manual_seed(0)
    twin = nn.Linear(4, 2)
    assert_close(model.module.state_dict(), twin.state_dict())  # the first rank's
    optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (model, twin)]
    x = torch.randn(4, 4)
    for m, part, optimizer in ((model, x.chunk(2)[oc.get_rank()], optimizers[0]), (twin, x, optimizers[1])):
        m(part).square().mean().backward()
        optimizer.step()
    assert_close(model.module.state_dict(), twin.state_dict(), rtol=1e-5)
    with pytest.raises(fleet.FleetError, match=r"which ranks average is what fleet\.init says"):
        dist.DataParallel(twin, group=oc.new_group([0]))
    given = nn.Linear(4, 2), [x], torch.amp.GradScaler("cpu")
    with pytest.raises(PlanError, match="device_num=2, node_num=2, and there are 2 ranks"):
        dist.to_distributed(given[0], optimizers[1], given[1], 2, 2)
    net = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    assert dist.shard_scaler(given[2]) is given[2]
    with pytest.raises(PlanError, match="the plan is found"):
        dist.to_distributed(net, optimizer, given[1], config=3)


def test_whole_models() -> None:
    run_ranks(copies, 2)


def test_addresses_of_paddle() -> None:
    """As ``paddle.distributed`` has them; the same modules, so that there is one of each of their tables."""
    for address, there in (
        ("paddle.fleet", "fleet"), ("paddle.fleet.meta_parallel", "fleet.meta_parallel"), ("sharding", "paddle.sharding"),
        ("paddle.fleet.utils", "fleet.utils"), ("fleet.auto", "paddle.auto_parallel"), ("auto_parallel", "paddle.auto_parallel"),
        ("paddle.checkpoint", "checkpoint"),
    ):  # fmt: skip
        assert importlib.import_module(f"onecard.{address}") is importlib.import_module(f"onecard.{there}"), address
    assert fleet.auto.shard_tensor is dist.shard_tensor is oc.shard_tensor
    assert oc.dtensor_from_fn is dist.dtensor_from_fn and oc.parallelize is not dist.parallelize
    assert all(getattr(dist, name) is getattr(oc, name) for name in oc.__all__ if name not in dist.__all__)
    for name in ("rpc", "fetch", "DDP"):
        with pytest.raises(AttributeError, match=rf"onecard has no '{name}' .*In its place"):
            getattr(dist, name)
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("onecard.paddle.nothing")
