"""torch's own parallel trainers run unchanged on the shared-memory backend, with Gloo's losses."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from onecard.comm import shm
from onecard.testing import assert_close, multirank, run_ranks

pytestmark = pytest.mark.skipif(not shm.available(), reason="needs Linux")


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 8))


def train(model, data, steps=5):
    torch.manual_seed(1 + data)
    x, y = torch.randn(12, 16), torch.randn(12, 8)
    optimizer, losses = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), []
    for _ in range(steps):
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def data_parallel():
    model = nn.parallel.DistributedDataParallel(make_model(), bucket_cap_mb=0.002)  # several buckets
    return train(model, dist.get_rank())


def data_parallel_in_half():
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    model = nn.parallel.DistributedDataParallel(make_model())
    model.register_comm_hook(None, fp16_compress_hook)
    return train(model, dist.get_rank())


def fully_sharded():
    from torch.distributed.fsdp import fully_shard

    model, mesh = make_model(), init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return train(model, dist.get_rank())


def hybrid_sharded():
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
    return train(fully_shard(make_model(), mesh=mesh), dist.get_rank())


def tensor_parallel():
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    plan = {"0": ColwiseParallel(), "2": RowwiseParallel(), "4": ColwiseParallel(output_layouts=Replicate())}
    model = parallelize_module(make_model(), init_device_mesh("cpu", (dist.get_world_size(),)), plan)
    return train(model, 0)


def pipelined(name):
    from torch.distributed import pipelining

    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    stages = [nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(size)]
    stage = pipelining.PipelineStage(stages[rank], rank, size, torch.device("cpu"))
    schedule = getattr(pipelining, name)(stage, n_microbatches=4, loss_fn=lambda a, b: (a - b).square().mean())
    optimizer, losses = torch.optim.SGD(stages[rank].parameters(), 0.1), []
    x, y = torch.randn(16, 16), torch.randn(16, 16)
    for _ in range(3):
        step = {"losses": []}
        if rank == 0:
            schedule.step(x)
        elif rank == size - 1:
            schedule.step(target=y, **step)
        else:
            schedule.step()
        optimizer.step()
        optimizer.zero_grad()
        losses += [loss.item() for loss in step["losses"]]
    return losses


TRAINERS = {
    "DDP": (data_parallel,),
    "DDP with a communication hook": (data_parallel_in_half,),
    "FSDP2": (fully_sharded,),
    "FSDP2 on a 2-D mesh": (hybrid_sharded,),
    "DTensor": (tensor_parallel,),
    "pipelining, 1F1B": (pipelined, "Schedule1F1B"),
    "pipelining, GPipe": (pipelined, "ScheduleGPipe"),
}


@pytest.mark.share(1)
@pytest.mark.parametrize("name", TRAINERS)
@pytest.mark.parametrize("size", [2, 4])
def test_torch_trains_with_the_losses_of_gloo(name, size):
    ours, theirs = (run_ranks(TRAINERS[name][0], size, *TRAINERS[name][1:], backend=b) for b in ("shm", "gloo"))
    assert any(theirs) and all(losses[0] != losses[-1] for losses in theirs if losses)
    # Gloo itself reduces float16 with a rounding at every step.
    assert_close(ours, theirs, rtol=1e-3 if "hook" in name else 1e-6)


def collected(x):
    ops, name = torch.ops._c10d_functional, dist.group.WORLD.group_name
    total = functional.wait_tensor(ops.all_reduce(x * 2, "sum", name))
    return functional.wait_tensor(ops.all_gather_into_tensor(total, 2, name)) + 1


@multirank(2, backend="shm")
def test_functional_collectives_run_and_are_traced():
    from torch.fx.experimental.proxy_tensor import make_fx

    rank, world = dist.get_rank(), dist.group.WORLD
    x = torch.ones(4) * rank
    assert functional.all_reduce(x, "avg", world).tolist() == [0.5] * 4
    scattered = torch.ops._c10d_functional.reduce_scatter_tensor(torch.arange(4.0), "sum", 2, world.group_name)
    assert functional.wait_tensor(scattered).tolist() == [4.0 * rank, 4.0 * rank + 2]
    assert functional.all_to_all_single(torch.arange(2) + 10 * rank, None, None, world).tolist() == [rank, rank + 10]
    assert functional.broadcast(x, 1, world).tolist() == [1.0] * 4
    assert [t[0].item() for t in functional.all_reduce_coalesced([x, x + 1], "sum", world)] == [1.0, 3.0]
    ops, both = torch.ops._c10d_functional, torch.empty(8)
    gathered = functional.wait_tensor(ops.all_gather_into_tensor_out(x + 1, 2, world.group_name, out=both))
    assert gathered is both and both.tolist() == [1.0] * 4 + [2.0] * 4
    part = torch.empty(4)
    functional.wait_tensor(ops.reduce_scatter_tensor_out(both, "sum", 2, world.group_name, out=part))
    assert part.tolist() == [2.0 + 2 * rank] * 4
    for mode in ("real", "fake"):
        graph = make_fx(collected, tracing_mode=mode)(x)
        assert "_c10d_functional.all_reduce" in graph.code
        assert torch.equal(graph(x), torch.full((8,), 3.0))


@multirank(2, backend="gloo")
def test_other_backends_keep_their_functional_collectives():
    both, name = torch.empty(4), dist.group.WORLD.group_name
    x = torch.full((2,), float(dist.get_rank()))
    functional.wait_tensor(torch.ops._c10d_functional.all_gather_into_tensor_out(x, 2, name, out=both))
    assert both.tolist() == [0.0, 0.0, 1.0, 1.0]


@multirank(2, backend="shm")
def test_the_sequence_number_counts_collectives_and_small_tensors_travel_together():
    world, options = dist.group.WORLD, dist.AllreduceCoalescedOptions()
    begin = world._get_sequence_number_for_group()
    given = [torch.full((3, n), 1.0 + n, dtype=dtype) for n in range(1, 20) for dtype in (torch.float32, torch.int64)]
    world.allreduce_coalesced(given, options).wait()
    assert world._get_sequence_number_for_group() == begin + 2  # one for each dtype, not for each tensor
    assert all(t.unique().tolist() == [2.0 + 2 * t.shape[1]] for t in given)
    sizes = (3, 5) if dist.get_rank() else (5, 3)
    with pytest.raises(RuntimeError, match=r"of 8 float32 in tensors of sizes with checksum"):
        world.allreduce_coalesced([torch.ones(n) for n in sizes], options).wait()


@multirank(2, backend="gloo")
def test_a_group_for_two_kinds_of_devices():
    both = dist.new_group([0, 1], backend="cpu:shm,cuda:nccl")
    x = torch.ones(2)
    dist.all_reduce(x, group=both)
    assert x.tolist() == [2, 2] and both.name() == "shm"
    if torch.cuda.device_count() >= 2:
        y = torch.ones(2, device=f"cuda:{dist.get_rank()}")
        dist.all_reduce(y, group=both)
        assert y.tolist() == [2, 2]


class Recorder:
    """A backend of a device that this machine lacks: it notes what it is asked for."""

    def __init__(self, rank, size):
        self.place, self.calls = (rank, size), []

    def __getattr__(self, name):
        def call(*args, **_):
            self.calls.append(name)
            done = torch.futures.Future()
            done.set_result(args[0] if args else None)
            return torch._C._distributed_c10d._create_work_from_future(done)

        return call


def ask_for_everything(group, device):
    x, y = torch.zeros(4, device=device), torch.zeros(2, device=device)
    dist.all_reduce(x, group=group)
    dist.broadcast(x, 0, group=group)
    dist.reduce(x, 0, group=group)
    dist.all_gather([torch.zeros_like(x) for _ in range(2)], x, group=group)
    dist.reduce_scatter(x, [x.clone(), x.clone()], group=group)
    dist.all_to_all_single(torch.zeros_like(x), x, group=group)
    dist.all_to_all(list(torch.zeros_like(x).chunk(2)), list(x.chunk(2)), group=group)
    root = dist.get_rank() == 0
    dist.gather(x, [torch.zeros_like(x) for _ in range(2)] if root else None, 0, group=group)
    dist.scatter(x, [x.clone(), x.clone()] if root else None, 0, group=group)
    group._allgather_base(x, y).wait()
    group._reduce_scatter_base(y, x, dist.ReduceScatterOptions()).wait()
    group.allreduce_coalesced([x, y], dist.AllreduceCoalescedOptions()).wait()
    if dist.get_rank() == 0:
        dist.send(x, 1, group=group)
    else:
        dist.recv(x, 0, group=group)


@multirank(2, backend="gloo")
@pytest.mark.parametrize("extended", [False, True])
def test_each_device_has_its_own_backend(extended):
    """What a GPU beside the CPU needs, seen with a device that every machine has: "meta"."""
    made = []

    def create(*args):
        rank, size = (args[0].group_rank, args[0].group_size) if extended else args[1:3]
        made.append(Recorder(rank, size))
        return made[-1]

    dist.Backend.register_backend(f"recorder{extended:d}", create, extended_api=extended, devices=["meta"])
    both = dist.new_group([0, 1], backend=f"cpu:shm,meta:recorder{extended:d}")
    ask_for_everything(both, "cpu")
    assert made == []  # CPU tensors never go there, and it is not made before it is needed
    count = both._get_sequence_number_for_group()
    ask_for_everything(both, "meta")
    (other,) = made
    assert other.place == (dist.get_rank(), 2) and both._get_sequence_number_for_group() == count
    assert other.calls == [
        "allreduce", "broadcast", "reduce", "allgather", "reduce_scatter", "alltoall_base", "alltoall", "gather",
        "scatter", "_allgather_base", "_reduce_scatter_base", "allreduce_coalesced", ("send", "recv")[dist.get_rank()],
    ]  # fmt: skip
    x = torch.ones(2)
    dist.all_reduce(x, group=both)
    assert x.tolist() == [2, 2]


@multirank(2, backend="shm")
def test_tensors_of_a_device_without_a_backend_are_refused():
    with pytest.raises(RuntimeError, match=r'name a backend for it, as in init_process_group\("cpu:shm,meta:nccl"\)'):
        dist.all_reduce(torch.empty(2, device="meta"))
