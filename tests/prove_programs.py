"""Programs that are proved on real ranks, or written with others' layers."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

import onecard as oc
from onecard.static import passes


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 4))


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(8, 6), torch.randint(4, (8,))


def trained(
    model: nn.Module, mine: Any = lambda x: x, before: Any = lambda model: None, given: Any = None
) -> list[float]:
    """Two steps; what each rank's losses are."""
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    losses = []
    torch.manual_seed(1)
    for _ in range(2):
        x, target = batch()
        loss = F.cross_entropy(model(mine(x)), mine(target))
        loss.backward()
        before(model)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def one_card() -> list[float]:
    return trained(net())


def own_rows(x: torch.Tensor) -> torch.Tensor:
    return x.chunk(dist.get_world_size())[dist.get_rank()]


def ddp() -> list[float]:
    return trained(nn.parallel.DistributedDataParallel(net()), own_rows)


def fsdp2() -> list[float]:
    from torch.distributed.fsdp import fully_shard

    model = net()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    return trained(fully_shard(model, mesh=mesh), own_rows)


def torch_tp() -> list[float]:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return trained(parallelize_module(net(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()}))


def functional() -> list[float]:
    import torch.distributed._functional_collectives as funcol

    def mean(model: nn.Module) -> None:
        for p in model.parameters():
            p.grad = funcol.all_reduce(p.grad, "avg", dist.group.WORLD)

    return trained(net(), own_rows, mean)


def dtensor() -> list[float]:
    from torch.distributed.tensor import Replicate, Shard, distribute_module, distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = distribute_module(net(), mesh)

    def loss(x: torch.Tensor) -> torch.Tensor:
        return distribute_tensor(x, mesh, [Shard(0)])

    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    losses = []
    torch.manual_seed(1)
    for _ in range(2):
        x, target = batch()
        value = (model(loss(x)).redistribute(mesh, [Replicate()]).to_local() - F.one_hot(target, 4)).square().mean()
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(value.item())
    return losses


def dtensor_one_card() -> list[float]:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    losses = []
    torch.manual_seed(1)
    for _ in range(2):
        x, target = batch()
        value = (model(x) - F.one_hot(target, 4)).square().mean()
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(value.item())
    return losses


def forgotten() -> list[float]:
    """Data parallelism whose second layer's gradients nobody sums."""

    def mean(model: nn.Module) -> None:
        for p in model[0].parameters():
            dist.all_reduce(p.grad, dist.ReduceOp.AVG)

    return trained(net(), own_rows, mean)


# -- recorded ----------------------------------------------------------------------------------------------------------------


def recorded(k_steps: int = 1) -> list[float]:
    """Marks on dp x tp with ZeRO 1, its step recorded."""
    torch.manual_seed(0)
    mesh = oc.ProcessMesh([[0, 1], [2, 3]], ["dp", "tp"])
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 4))
    for i, dim in ((0, 0), (2, 1)):
        model[i].weight = nn.Parameter(oc.shard_tensor(model[i].weight.data, mesh, [oc.Replicate(), oc.Shard(dim)]))
    oc.shard_layer(model, mesh)
    optimizer = oc.shard_optimizer(torch.optim.AdamW(model.parameters(), 1e-2), oc.ShardingStage1("dp", mesh))

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.detach()

    static = oc.to_static(step, k_steps=k_steps)
    return [static(oc.shard_tensor(torch.randn(8, 8), mesh, [oc.Shard(0), oc.Replicate()])).item() for _ in range(5)]


def broken(name: str) -> list[float]:
    """The same by a pass that multiplies by another number."""
    whole = passes.PASSES[name]

    def scaled(graph: torch.fx.Graph) -> torch.fx.Graph:
        made = torch.fx.Graph()
        made.output(made.graph_copy(whole(graph), {}))
        node = next(n for n in made.nodes if "mul" in str(n.target) and any(isinstance(x, float) for x in n.args))
        node.args = tuple(1.5 * x if isinstance(x, float) else x for x in node.args)
        return made

    passes.PASSES[name] = scaled
    try:
        return recorded()
    finally:
        passes.PASSES[name] = whole


# -- plain torch.distributed, by hand ----------------------------------------------------------------------------------------


def summed(x: torch.Tensor, twice: bool) -> torch.Tensor:
    for _ in range(1 + twice):
        dist.all_reduce(x)
    return x


def summed_functionally(x: torch.Tensor, twice: bool) -> torch.Tensor:
    import torch.distributed._functional_collectives as funcol

    for _ in range(1 + twice):
        x = funcol.all_reduce(x, "sum", dist.group.WORLD)
    return x


NAMES = (("reduce_scatter", "reduce_scatter_tensor"), ("all_gather", "all_gather_into_tensor"))


def gathered(x: torch.Tensor, wrong: bool) -> torch.Tensor:
    """Each rank's rows of the sum, then all rows; wrong: rank 1 gives what it had before the sum."""
    n, me = dist.get_world_size(), dist.get_rank()
    mine, whole = torch.empty(len(x) // n, x.shape[1]), torch.empty_like(x)
    scatter, gather = (getattr(dist, f"{name}_single", None) or getattr(dist, old) for name, old in NAMES)
    scatter(mine, x)
    work = gather(whole, x.chunk(n)[me] if wrong and me else mine, async_op=True)
    work.wait()
    return whole


def passed_on(x: torch.Tensor, wrong: bool) -> torch.Tensor:
    """Two ranks exchange their summands; wrong: rank 1 sends the memory into which it receives."""
    other = 1 - dist.get_rank()
    came = torch.zeros_like(x)
    ops = [
        dist.P2POp(dist.irecv, came, other),
        dist.P2POp(dist.isend, came.clone() if wrong and not other else x, other),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return x + came


class Copied(torch.autograd.Function):
    """Ahead of a layer whose columns are cut: backward sums what ranks give to the same input."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, summed: bool) -> torch.Tensor:
        ctx.summed = summed
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        grad = grad.clone()
        if ctx.summed and dist.get_world_size() > 1:
            dist.all_reduce(grad)
        return grad, None


class Summed(torch.autograd.Function):
    """Behind a layer whose rows are cut."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, summed: bool) -> torch.Tensor:
        x = x.clone()
        if summed and dist.get_world_size() > 1:
            dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad, None


class Cut(nn.Module):
    """Megatron's MLP by hand."""

    def __init__(self, width: int, forgets: str = "") -> None:
        super().__init__()
        n, me = dist.get_world_size(), dist.get_rank()
        up, down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.up = nn.Parameter(up.weight.detach().chunk(n)[me].clone())
        self.down = nn.Parameter(down.weight.detach().chunk(n, 1)[me].clone())
        self.bias = nn.Parameter(down.bias.detach().clone())
        self.forgets = forgets

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = Copied.apply(x, self.forgets != "backward")
        y = F.linear(F.gelu(F.linear(x, self.up)), self.down)
        return F.dropout(Summed.apply(y, self.forgets != "forward") + self.bias, 0.1)


def megatron(forgets: str = "") -> list[float]:
    """A step by hand, whose second MLP may forget a sum."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), Cut(8), nn.LayerNorm(8), Cut(8, forgets), nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x, target = batch()
    loss = F.cross_entropy(model(x), target)
    loss.backward()
    optimizer.step()
    return [loss.item()]


SUMS = {"all_reduce": summed, "functional": summed_functionally, "all_gather": gathered, "recv": passed_on}


def tensor_parallel(how: str = "all_reduce", wrong: bool = False) -> torch.Tensor:
    """A product whose inner dim is cut over the ranks, and what comes after its sum."""
    torch.manual_seed(0)
    x, w = torch.randn(4, 8), torch.randn(8, 6)
    n, me = dist.get_world_size(), dist.get_rank()
    y = SUMS[how](x.chunk(n, 1)[me] @ w.chunk(n)[me], wrong)
    return torch.tanh(y * 0.1)


def tensor_parallel_one_card(*_: object) -> torch.Tensor:
    torch.manual_seed(0)
    x, w = torch.randn(4, 8), torch.randn(8, 6)
    return torch.tanh(x @ w * 0.1)
