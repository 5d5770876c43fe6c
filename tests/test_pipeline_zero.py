"""ZeRO beside pipelines, by marks and by layers: one card's losses, gradients and norms; each rank keeps a part of the states."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fleet_programs import close
from pipeline_programs import OneCard, begin, compare, gpt, token_loss, tokens
from test_pipeline_fleet import mean_loss, tensor_parallel_layers
from torch import Tensor, nn

import onecard as oc
from onecard import fleet, pipeline
from onecard.errors import ImplicitCommunication, LayoutError
from onecard.testing import run_ranks

ONE, TWO, THREE = oc.ShardingStage1, oc.ShardingStage2, oc.ShardingStage3


class Marked(nn.Module):
    """Two stages on two meshes; no meshes: one card."""

    def __init__(self, meshes: list[oc.ProcessMesh]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.meshes = meshes
        self.parts = nn.ModuleList(nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 6)) for _ in range(2))
        for part, mesh in zip(self.parts, meshes, strict=False):
            oc.shard_layer(part, mesh)

    def forward(self, x: Tensor) -> Tensor:
        for i, part in enumerate(self.parts):
            x = part(oc.reshard(x, self.meshes[i], [oc.Shard(0)]) if self.meshes else x)
        return x


def batch(step: int, size: int = 12) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(size, 6, generator=generator), torch.randn(size, 6, generator=generator)


def by_marks() -> None:
    """Also on ranks outside a stage everything says where it lies: whoever asks for it, all get it."""
    meshes = [oc.ProcessMesh([0, 1], ["dp"]), oc.ProcessMesh([2, 3], ["dp"])]
    stages: list[Any] = [None, *(kind("dp", overlap=ahead) for kind in (ONE, TWO, THREE) for ahead in (False, True))]
    stages += [TWO("dp", master_weights=True, offload=True), "blocks", "blocks ahead"]
    for number, stage in enumerate(stages):
        single, net = Marked([]), Marked(meshes)
        if isinstance(stage, str):
            stage = THREE("dp", model=net, overlap=stage == "blocks ahead")
        mine = oc.shard_optimizer(torch.optim.AdamW(net.parameters(), lr=0.05), stage)
        theirs = torch.optim.AdamW(single.parameters(), lr=0.05)
        for step in range(3):
            x, y = batch(step)
            expected = F.mse_loss(single(x), y)
            expected.backward()
            loss = pipeline.step_by_marks(net, F.mse_loss, x, y, ("1F1B", "F-then-B")[number % 2], 3)
            close(oc.unshard(loss), expected.detach(), f"{stage}: loss")
            norms = [nn.utils.clip_grad_norm_(m.parameters(), 0.1) for m in (net, single)]
            close(norms[0], norms[1], f"{stage}: norm of both stages, on all ranks")
            for p, q in zip(net.parameters(), single.parameters(), strict=True):
                close(oc.unshard(p.grad), q.grad, f"{stage}: gradient")
            for optimizer in (mine, theirs):
                optimizer.step()
                optimizer.zero_grad()
        for p, q in zip(net.parameters(), single.parameters(), strict=True):
            close(oc.unshard(p.detach()), q.detach(), f"{stage}: parameter", 1e-4)
            state = mine.state[p]["exp_avg"]
            close(oc.unshard(state), theirs.state[q]["exp_avg"], f"{stage}: state", 1e-4)
            if state.to_local().numel():  # the half, as even as can be
                assert stage is None or abs(2 * state.to_local().numel() - q.numel()) <= q.numel() // q.shape[0]


@pytest.mark.proof
def test_every_stage_of_zero_by_marks_is_one_card() -> None:
    run_ranks(by_marks, 4)


def largest_and_bad() -> None:
    meshes = [oc.ProcessMesh([i], ["pp"]) for i in range(2)]
    parts = [nn.Parameter(oc.shard_tensor(torch.zeros(3), mesh, [oc.Replicate()])) for mesh in meshes]
    plain = nn.Parameter(torch.zeros(2))
    for p, value in zip([*parts, plain], (3.0, 4.0, 12.0), strict=True):
        p.grad = torch.zeros_like(p)
        p.grad[0] = value
    close(nn.utils.clip_grad_norm_([*parts, plain], 100.0), torch.tensor(13.0), "of two meshes and a plain tensor")
    close(nn.utils.get_total_norm([p.grad for p in (*parts, plain)], float("inf")), torch.tensor(12.0), "the largest")
    with oc.explain() as messages:  # of any number of meshes
        nn.utils.clip_grad_norm_([*parts, plain], 100.0)
    assert [(m.step.kind, m.step.bytes, m.explicit) for m in messages.messages] == [("all_gather", 8, False)]
    with pytest.raises(ImplicitCommunication), oc.no_implicit_communication():  # on every rank
        nn.utils.clip_grad_norm_(parts, 1.0)
    parts[0].grad[0] = float("inf")
    assert nn.utils.get_total_norm([p.grad for p in parts]).item() == float("inf")  # and no NaN
    with pytest.raises(LayoutError, match="norm_type is 0"):
        nn.utils.get_total_norm([p.grad for p in parts], 0.0)
    parts[1].grad[0] = float("nan")
    with pytest.raises(RuntimeError, match="norm of order 2"):  # on both ranks
        nn.utils.clip_grad_norm_(parts, 1.0, error_if_nonfinite=True)


def test_norms_of_several_meshes() -> None:
    run_ranks(largest_and_bad, 2)


# By layers


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.02, eps=1e-3)  # the keys' bias has no gradient but rounding


def tied(mode: str, level: str, clip: str, **more: Any) -> None:
    """A GPT with a tied embedding, its halves of the data, some steps; compared with one card."""
    hcg = begin(mode, 2, 2, dp=2, pp=2)
    torch.manual_seed(3)
    single = OneCard(gpt(2))
    torch.manual_seed(3)
    layers = fleet.PipelineLayer(gpt(2), loss_fn=token_loss)
    pipe = fleet.distributed_model(layers)
    model, mine, _ = fleet.group_sharded_parallel(pipe, adamw(pipe.parameters()), level, **more)
    if clip == "grad_clip":
        mine = fleet.distributed_optimizer(mine, grad_clip=fleet.ClipGradByGlobalNorm(0.3))
    theirs, me = adamw(single.parameters()), hcg.get_data_parallel_rank()
    for step in range(3):
        x, y = tokens(8, step)
        expected = token_loss(single(x), y)
        expected.backward()
        norm = nn.utils.clip_grad_norm_(single.parameters(), 0.3)
        data = [x.chunk(2)[me], y.chunk(2)[me]]
        if clip == "grad_clip":
            loss = model.train_batch(data, mine)
        else:
            loss = model.forward_backward_pipeline(data)
            way: Any = nn.utils.clip_grad_norm_ if clip == "torch" else fleet.clip_grad_norm_
            close(way(model.parameters(), 0.3), norm, f"{mode}, {level}, {clip}: norm")
            if step == 2:
                model.forward_backward_pipeline(data)  # without zero_grad
                with pytest.raises(fleet.FleetError, match="summed over ranks before"):
                    mine.step()
                return
            mine.step()
            mine.zero_grad()
        mean = loss.clone()
        oc.all_reduce(mean, oc.ReduceOp.AVG, group=hcg.data())
        close(mean, expected.detach(), f"{mode}, {level}, {clip}: loss")
        theirs.step()
        theirs.zero_grad()
        compare(layers, single, f"{mode}, {level}, {clip}, step {step}")
    for p, state in mine.state.items():
        kept = state["exp_avg"].to_local().numel()
        assert kept <= p.numel() / 2 + p.numel() / p.shape[0], "a state is whole"


def scaled() -> None:
    """An infinity on one stage of one half of the data skips the step on all."""
    hcg = begin("1F1B", 2, 2, dp=2, pp=2)
    torch.manual_seed(3)
    descs = [fleet.LayerDesc(nn.Linear, 6, 8), nn.Tanh(), fleet.LayerDesc(nn.Linear, 8, 6)]
    layers = fleet.PipelineLayer(descs, loss_fn=nn.MSELoss())
    pipe = fleet.distributed_model(layers)
    torch_scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    model, mine, scaler = fleet.group_sharded_parallel(pipe, adamw(pipe.parameters()), "os_g", torch_scaler)
    torch.manual_seed(3)
    single = OneCard(descs)
    theirs = adamw(single.parameters())
    for step in range(3):
        x, y = batch(step, 8)
        mine_x, mine_y = (t.chunk(2)[hcg.get_data_parallel_rank()].clone() for t in (x, y))
        before = [p.detach().clone() for p in layers.parameters()]
        if step == 1 and hcg.get_data_parallel_rank() == 1:
            mine_y[0, 0] = float("inf")
        model.train_batch([mine_x, mine_y], mine, scaler=scaler)
        if step == 1:
            assert all(torch.equal(a, b) for a, b in zip(before, layers.parameters(), strict=True)), "stepped"
        else:
            F.mse_loss(single(x), y).backward()
            theirs.step()
            theirs.zero_grad()
        compare(layers, single, f"scaled, step {step}")
    assert scaler.get_scale() == 4.0


def beside_tensor_parallel() -> None:
    """dp x mp without stages: parts of parameters, a norm that counts each once."""
    hcg = begin("1F1B", 1, 2, dp=2, mp=2)
    torch.manual_seed(3)
    single = OneCard(tensor_parallel_layers(False))
    torch.manual_seed(3)
    layers = OneCard(tensor_parallel_layers(True))
    for level in ("os", "os_g"):
        model, mine, _ = fleet.group_sharded_parallel(
            fleet.distributed_model(layers), adamw(layers.parameters()), level, group=hcg.data()
        )
        theirs, me = adamw(single.parameters()), hcg.get_data_parallel_rank()
        for step in range(2):
            x, y = (t % 12 for t in tokens(4, step))
            F.cross_entropy(single(x).flatten(0, 1), y.flatten()).backward()
            norm = nn.utils.clip_grad_norm_(single.parameters(), 0.3)
            mean_loss(model(x.chunk(2)[me]), y.chunk(2)[me]).backward()
            close(nn.utils.clip_grad_norm_(model.parameters(), 0.3), norm, f"dp x mp, {level}: norm")
            for optimizer in (mine, theirs):
                optimizer.step()
                optimizer.zero_grad()
            compare(layers, single, f"dp x mp, {level}, step {step}")
        return  # a second level would hook the same parameters again


def refused() -> None:
    hcg = begin("1F1B", 2, 2, dp=2, pp=2)
    layers = fleet.PipelineLayer(gpt(1), loss_fn=token_loss)

    def said(model: Any, level: str = "os", **more: Any) -> str:
        with pytest.raises(fleet.FleetError) as caught:
            fleet.group_sharded_parallel(model, adamw(model.parameters()), level, **more)
        return str(caught.value)

    assert "give what that returns" in said(layers)
    pipe = fleet.distributed_model(layers)
    assert "'os_g' divides states and gradients" in said(pipe, "p_g_os")
    assert "group=hcg.data(), or leave it out" in said(pipe, group=oc.new_group([0, 1, 2, 3]))
    with pytest.raises(LayoutError, match=r"fleet\.group_sharded_parallel"):
        oc.shard_optimizer(adamw(pipe.parameters()), ONE())
    assert hcg.data().size == 2


def by_layers(programs: list[str]) -> None:
    for program in programs:
        globals()[program]()


def levels() -> None:
    for mode, level, clip, more in (
        ("1F1B", "os", "torch", {}),
        ("ZBV", "os_g", "grad_clip", {}),
        ("F-then-B", "os_g", "fleet", {"overlap": True}),
        ("1F1B", "os", "grad_clip", {"overlap": True}),
    ):
        tied(mode, level, clip, **more)


def test_every_level_of_zero_by_layers_is_one_card() -> None:
    run_ranks(by_layers, 4, ["levels", "scaled", "beside_tensor_parallel", "refused"])
