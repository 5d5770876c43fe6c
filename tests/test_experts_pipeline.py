"""Mixtures by marks in stages on meshes of their own: experts cut along ep within a stage, all other ranks outside of it."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from amounts import share
from experts_programs import one
from fleet_programs import close
from torch import Tensor, nn

import onecard as oc
from onecard import pipeline
from onecard.errors import DispatchError
from onecard.testing import run_ranks

WIDTH, INNER, EXPERTS, CLASSES, ROWS, PARTS, STEPS = 8, 8, 4, 5, 16, 4, 3
R, S = oc.Replicate(), oc.Shard(0)


def naive(scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The best two, weighed by their softmax; no loss."""
    weights, numbers = scores.softmax(-1).topk(2, -1)
    return weights, numbers, scores.new_zeros(())


def gshard(scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Weights that sum to one, and GShard's balance: the share of each expert's first choices times its mean weight."""
    all_of = scores.softmax(-1)
    weights, numbers = all_of.topk(2, -1)
    share = F.one_hot(numbers[:, 0], EXPERTS).to(scores.dtype).mean(0)
    return weights / weights.sum(-1, keepdim=True), numbers, (share * all_of.mean(0)).sum() * EXPERTS


def top_k(scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """DeepSeek's sigmoid with a bias that chooses and does not weigh, and a z-loss."""
    weights = scores.sigmoid()
    numbers = (weights + torch.linspace(-0.1, 0.1, EXPERTS)).topk(2, -1)[1]
    weights = weights.gather(1, numbers)
    return weights / weights.sum(-1, keepdim=True), numbers, scores.logsumexp(-1).square().mean()


GATES = {f.__name__: f for f in (naive, gshard, top_k)}


def grouped(x: Tensor, weights: Tensor, numbers: Tensor, up: Tensor, down: Tensor) -> Tensor:
    flat = numbers.flatten()
    order = torch.argsort(flat, stable=True)
    ends = F.one_hot(flat, EXPERTS).sum(0).cumsum(0).to(torch.int32)
    token = order // 2
    gate, value = F.grouped_mm(x.index_select(0, token), up.mT, offs=ends).chunk(2, -1)
    made = F.grouped_mm(F.silu(gate) * value, down.mT, offs=ends)
    return torch.zeros_like(x).index_add(0, token, made * weights.flatten()[order, None])


def loop(x: Tensor, weights: Tensor, numbers: Tensor, up: Tensor, down: Tensor) -> Tensor:
    total = torch.zeros_like(x)
    for expert in range(EXPERTS):
        token, place = torch.where(numbers == expert)
        total.index_add_(0, token, one(x[token], up[expert], down[expert]) * weights[token, place, None])
    return total


def dense(x: Tensor, weights: Tensor, numbers: Tensor, up: Tensor, down: Tensor) -> Tensor:
    scale = torch.zeros(len(x), EXPERTS).scatter_add(1, numbers, weights)
    gate, value = torch.bmm(x.expand(EXPERTS, -1, -1), up.mT).chunk(2, -1)
    return (torch.bmm(F.silu(gate) * value, down.mT) * scale.t().unsqueeze(-1)).sum(0)


def scattered(x: Tensor, weights: Tensor, numbers: Tensor, up: Tensor, down: Tensor) -> Tensor:
    flat, token = numbers.flatten(), torch.arange(len(x)).repeat_interleave(2)
    gate, value = torch.bmm(up[flat], x[token].unsqueeze(-1)).squeeze(-1).chunk(2, -1)
    made = torch.bmm(down[flat], (F.silu(gate) * value).unsqueeze(-1)).squeeze(-1) * weights.flatten()[:, None]
    return torch.zeros_like(x).scatter_add(0, token[:, None].expand(-1, x.shape[1]), made)


STYLES = {f.__name__: f for f in (grouped, loop, dense, scattered)}


class Block(nn.Module):
    def __init__(self, style: str, gate: str) -> None:
        super().__init__()
        self.line, self.router = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, 2 * INNER, WIDTH) * 0.4)
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, INNER) * 0.4)
        self.style, self.gate = style, gate

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.line(x))
        weights, numbers, balance = GATES[self.gate](self.router(h))
        return h + STYLES[self.style](h, weights, numbers, self.up, self.down), balance


class Net(nn.Module):
    """Blocks on meshes; no meshes: one card. What it returns: scores, and the routers' losses of all stages together."""

    def __init__(self, meshes: Sequence[oc.ProcessMesh], style: str, gate: str) -> None:
        super().__init__()
        self.meshes = meshes
        self.blocks = nn.ModuleList(Block(style, gate) for _ in range(PARTS))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        total: Any = 0.0
        for i, block in enumerate(self.blocks):
            if self.meshes:
                mesh = self.meshes[i * len(self.meshes) // PARTS]
                x = oc.reshard(x, mesh, [S])
                total = oc.reshard(total, mesh, [R]) if isinstance(total, Tensor) else total
            x, balance = block(x)
            total = total + balance
        return self.head(x), total

    def divide(self) -> None:
        for i, block in enumerate(self.blocks):
            mesh = self.meshes[i * len(self.meshes) // PARTS]
            for name in ("up", "down"):
                setattr(block, name, nn.Parameter(oc.shard_tensor(getattr(block, name).detach(), mesh, [S])))
            oc.shard_layer(block, mesh)
        oc.shard_layer(self.head, self.meshes[-1])


def losing(out: tuple[Tensor, Tensor], y: Tensor) -> Tensor:
    return F.cross_entropy(out[0], y) + 0.1 * out[1]


def train(net: Net, mode: str, microbatches: int, steps: int = STEPS, record: bool = False) -> dict[str, Tensor]:
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.02, eps=1e-3)

    def step(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        if net.meshes:
            loss = pipeline.step_by_marks(net, losing, x, y, mode, microbatches, loss_weight=len)
        else:
            parts = zip(x.tensor_split(microbatches), y.tensor_split(microbatches), strict=True)
            loss = torch.zeros(())
            for a, b in parts:
                part = losing(net(a), b) * len(b) / len(y)
                part.backward()
                loss = loss + part.detach()
        norm = nn.utils.clip_grad_norm_(net.parameters(), 0.3)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach(), norm.detach()

    run, losses = oc.to_static(step) if record else step, []
    for i in range(steps):
        draw = torch.Generator().manual_seed(i)
        x, y = torch.randn(ROWS, WIDTH, generator=draw), torch.randint(CLASSES, (ROWS,), generator=draw)
        losses.append(torch.stack([oc.unshard(value) for value in run(x, y)]))
    return {"losses": torch.stack(losses)} | {name: oc.unshard(p.detach()) for name, p in net.named_parameters()}


def compared(style: str, gate: str, mode: str, microbatches: int, ep: int, record: bool = False) -> None:
    warnings.simplefilter("ignore", oc.GatheredOperatorWarning)
    stages = oc.get_world_size() // ep
    meshes = [oc.ProcessMesh(range(ep * i, ep * (i + 1)), ["ep"]) for i in range(stages)]
    torch.manual_seed(0)
    steps = 6 if record else STEPS  # the last two of them are replays
    wanted = train(Net([], style, gate), mode, microbatches, steps)
    torch.manual_seed(0)
    net = Net(meshes, style, gate)
    net.divide()
    for name, value in train(net, mode, microbatches, steps, record).items():
        close(value, wanted[name], name)


CASES = [
    (4, "grouped", "gshard", "1F1B", 2, 2),
    (4, "grouped", "top_k", "ZBH1", 4, 2),
    (4, "grouped", "naive", "F-then-B", 3, 2),
    (4, "dense", "gshard", "1F1B", 2, 2),
    (4, "scattered", "top_k", "1F1B", 2, 2),
]


@pytest.mark.proof
@pytest.mark.parametrize("case", share(CASES, 2), ids=str)
def test_mixtures_in_stages_by_marks_are_one_cards(case: tuple[Any, ...]) -> None:
    ranks, *given = case
    run_ranks(compared, ranks, *given)


@pytest.mark.parametrize(
    "case", share([("grouped", "naive", "1F1B"), ("grouped", "gshard", "ZBH1"), ("dense", "naive", "1F1B")], 1)
)
def test_they_are_recorded_where_rows_lie_on_another_stages_ranks(case: tuple[str, str, str]) -> None:
    run_ranks(compared, 4, *case, 2, 2, True)


def product(x: Tensor, up: Tensor, numbers: Tensor) -> Tensor:
    ends = F.one_hot(numbers, EXPERTS).sum(0).cumsum(0).to(torch.int32)
    return F.grouped_mm(x[torch.argsort(numbers, stable=True)], up, offs=ends).view(4, 2, WIDTH).sum(1).tanh()


def crossing(away: bool) -> tuple[str, list[float]]:
    """A product of rows that goes to another mesh as it is, and its gradients: of experts at home, and of others'."""
    here, there = (oc.ProcessMesh([2 * i, 2 * i + 1], ["ep"]) for i in range(2))
    torch.manual_seed(0)
    x, up = torch.randn(8, WIDTH), torch.randn(EXPERTS, WIDTH, WIDTH)
    numbers = torch.arange(EXPERTS).repeat_interleave(8 // EXPERTS)
    numbers = numbers.flip(0) if away else numbers  # those of the mesh alone know it
    plain: list[Any] = [x.clone().requires_grad_(), up.clone().requires_grad_(), numbers]
    mine: list[Any] = [oc.shard_tensor(t, here, [S]).requires_grad_(t.is_floating_point()) for t in (x, up, numbers)]
    wanted, lying = product(*plain), product(*mine)
    made: Any = oc.reshard(lying, there, [S])
    (made * made).sum().backward()
    (wanted * wanted).sum().backward()
    pairs = [(made, wanted), *((a.grad, b.grad) for a, b in zip(mine[:2], plain[:2], strict=True))]
    errors = [float((oc.unshard(a.detach()) - b.detach()).abs().max() / b.detach().abs().max()) for a, b in pairs]
    return str(lying.placements), errors


@pytest.mark.share(1)
@pytest.mark.parametrize("away", [False, True])
def test_how_rows_lie_follows_from_no_value(away: bool) -> None:
    for placements, errors in run_ranks(crossing, 4, away):
        assert placements == "(Shard(dim=0),)" and max(errors) <= 1e-5


def cut(cases: list[tuple[str, str, int]]) -> dict[tuple[str, str, int], Any]:
    """Stages cut out of a recorded step, and the same without: the largest relative differences, or what is said."""
    found: dict[tuple[str, str, int], Any] = {}
    for style, kind, ep in cases:
        nets = []
        for stages in (None, oc.Stages(2, avg=True)):
            net, mesh = laid_out(style, ep if stages is not None else 1)
            nets.append((run_cut(net, kind, mesh, stages), net))
        (one, single), (two, net) = nets
        pairs = [
            (one, two),
            *(
                (p.detach(), oc.unshard(q.detach()))
                for p, q in zip(single.parameters(), net.parameters(), strict=True)
                if is_here(q)
            ),
        ]
        found[style, kind, ep] = max(float((a - b).abs().max() / a.abs().max()) for a, b in pairs)
    return found


def laid_out(style: str, ep: int) -> tuple[Net, Any]:
    """A net, its experts cut along ep of a mesh of all ranks; of plain tensors where ep is 1."""
    torch.manual_seed(0)
    net = Net([], style, "naive")
    if ep == 1:
        return net, None
    mesh = oc.ProcessMesh(torch.arange(oc.get_world_size()).view(-1, ep), ["pp", "ep"])
    for block in net.blocks:
        for name in ("up", "down"):
            setattr(block, name, nn.Parameter(oc.shard_tensor(getattr(block, name).detach(), mesh, [R, S])))
    oc.shard_layer(net, mesh)
    return net, mesh


def is_here(parameter: Tensor) -> bool:
    """Whether a parameter is of a stage of this rank."""
    local = parameter.to_local() if isinstance(parameter, oc.DistTensor) else parameter
    return local.untyped_storage().nbytes() > 0


def run_cut(net: Net, kind: str, mesh: Any, stages: Any) -> Tensor:
    if kind == "sgd":
        optimizer: Any = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9)
    else:
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.02, eps=1e-3)

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = losing(net(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.3)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    run = step if stages is None else oc.to_static(step, stages=stages)
    losses = []
    for number in range(STEPS):
        draw = torch.Generator().manual_seed(number)
        x, y = torch.randn(ROWS, WIDTH, generator=draw), torch.randint(CLASSES, (ROWS,), generator=draw)
        if mesh is not None and stages is not None:
            x, y = (oc.shard_tensor(t, mesh, [R, S]) for t in (x, y))
        losses.append(oc.unshard(run(x, y)))
    return torch.stack(losses)


CUT = {
    2: [("dense", "sgd", 1), ("scattered", "adamw", 1), ("grouped", "adamw", 1)],
    4: [("scattered", "adamw", 2), ("grouped", "adamw", 2), ("dense", "sgd", 2)],
}


@pytest.mark.proof
@pytest.mark.parametrize("ranks", CUT)
def test_mixtures_in_stages_cut_out_of_a_recording_are_one_cards(ranks: int) -> None:
    for found in run_ranks(cut, ranks, CUT[ranks]):
        assert {case: e for case, e in found.items() if not e <= 1e-5} == {}


@pytest.mark.proof
def test_a_stage_finds_its_weights_and_states_behind_a_view_of_them() -> None:
    for found in run_ranks(cut, 2, [("dense", "sgd", 1)]):
        assert max(found.values()) <= 1e-5


@pytest.mark.proof
@pytest.mark.filterwarnings("ignore:_is_all_true")
@pytest.mark.parametrize("style", ["grouped", "scattered"])
def test_stages_are_cut_out_of_mixtures_along_ep(style: str) -> None:
    """Written down without being done: grouped products in float32, and ``scores.new_zeros(())`` of what is cut."""
    with oc.pretend(4, rank=2):
        net, mesh = laid_out(style, 2)
        assert len(run_cut(net, "adamw", mesh, oc.Stages(2, avg=True))) == STEPS


def refused() -> str:
    warnings.simplefilter("ignore", oc.GatheredOperatorWarning)
    meshes = [oc.ProcessMesh([rank], ["ep"]) for rank in range(2)]
    net = Net(meshes, "loop", "naive")
    net.divide()
    with pytest.raises(DispatchError) as caught:
        train(net, "1F1B", 2)
    return str(caught.value)


def test_a_loop_over_experts_in_stages_is_told_what_works() -> None:
    for text in run_ranks(refused, 2):
        assert "nonzero" in text and "depends on values" in text and "grouped_mm" in text
