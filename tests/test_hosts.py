"""Several hosts as hosts: two network namespaces with a cable, and what can go wrong between them."""

from ast import literal_eval
from pathlib import Path

import pytest
from host_faults import FAULTS
from several_hosts import ETC_HOSTS, PORT, Host, needs_hosts, on_two_hosts

pytestmark = needs_hosts

TRAIN = """
import torch, onecard as oc
oc.manual_seed(0)
mesh = oc.ProcessMesh(range(oc.get_world_size()), ["dp"])
torch.manual_seed(0)
model = oc.shard_layer(torch.nn.Linear(8, 4), mesh)
optimizer = oc.shard_optimizer(torch.optim.AdamW(model.parameters(), 0.01))
for step in range(3):
    x = oc.shard_tensor(torch.randn(8, 8), mesh, [oc.Shard(0)])
    loss = model(x).square().mean()
    loss.backward(); optimizer.step(); optimizer.zero_grad()
    print(f"{loss.item():.6f}", flush=True)
"""


def options(host: Host, master: str, *more: str) -> list[str]:
    return [
        "--nnodes",
        "2",
        "--node_rank",
        str(host.number),
        "--master",
        master,
        "--nproc_per_node",
        "2",
        "--wait",
        "60",
        *more,
    ]


def trains(hosts: list[Host], master: str) -> list[tuple]:
    for host in hosts:
        host.launch(options(host, master), TRAIN)
    return [(*host.wait(100)[:2], host.log(2 * host.number)) for host in hosts]


@pytest.mark.share(1)
@pytest.mark.parametrize("etc", list(ETC_HOSTS))
def test_two_hosts_train(tmp_path, etc):
    master = f"{'10.77.0.1' if etc == 'nobody' else 'alpha'}:{PORT}"
    ends = on_two_hosts(trains, tmp_path, master, etc=etc)
    losses = [log.split() for *_, log in ends]
    assert [code for code, *_ in ends] == [0, 0] and len(losses[0]) == 3 and losses[0] == losses[1], ends


@pytest.mark.share(6)
@pytest.mark.parametrize("fault", list(FAULTS))
def test_what_goes_wrong_is_said_and_ends(tmp_path, fault):
    scene, expected, within = FAULTS[fault]
    ends = on_two_hosts(scene, tmp_path, timeout=240)
    for (code, said, seconds), (status, words) in zip(ends, expected, strict=True):
        assert code == status and words in said and seconds < within, ends
        if "rank " in words and " on machine " in words:
            assert "Ranks 0 to 1 on machine 0 (alpha), 2 to 3 on machine 1 (beta)" in said, said


SUMS = """
import os, torch, torch.distributed as dist, onecard as oc
from onecard.comm.issue import collectives
from onecard.comm.issue.groups import group

n, host = oc.get_world_size(), int(os.environ["GROUP_RANK"])
of = lambda rank: torch.arange(8 * n, dtype=torch.float32).add(0.1 * rank).sin()
world = group(oc.ProcessMesh(range(n), ["x"]), 0)
found = [
    collectives.all_reduce(of(oc.get_rank()), world, "sum"),
    collectives.all_reduce(of(oc.get_rank()), world, "max"),
    collectives.all_gather(of(oc.get_rank()), world, 0, [8 * n] * n),
]
torch.testing.assert_close(found[0], sum(map(of, range(n))))
torch.testing.assert_close(found[1], torch.stack([*map(of, range(n))]).amax(0))
torch.testing.assert_close(found[2], torch.cat([*map(of, range(n))]))
part = collectives.reduce_scatter(of(oc.get_rank()), world, 0, [8] * n)
torch.testing.assert_close(part, found[0].view(n, 8)[oc.get_rank()])
everywhere = [None] * n
dist.all_gather_object(everywhere, found[0].numpy().tobytes())
assert len(set(everywhere)) == 1, "other bits"
inside = group(oc.ProcessMesh([[0, 1], [2, 3]], ["host", "in"]), 1)
across = group(oc.ProcessMesh([[0, 1], [2, 3]], ["host", "in"]), 0)
print(*(type(g.process_group).__name__ for g in (world, inside)), across.process_group.name(), flush=True)
big = torch.ones(1 << 20)
def sent():
    with open("/proc/net/dev") as file:
        return next(int(line.split()[9]) for line in file if line.strip().startswith("eth7"))
dist.barrier()
before = sent()
collectives.all_reduce(big, world, "sum")
dist.barrier()
if oc.get_rank() % 2 == 0:
    print((sent() - before) / big.nbytes, flush=True)

# Along two axes, hosts outside: inside first, so that each byte crosses once. Numbers are those of one card.
mesh = oc.ProcessMesh([[0, 1], [2, 3]], ["host", "in"])
for length in (1 << 20, (1 << 20) + 1):
    x = oc.from_local(torch.full((length,), 1.0 + oc.get_rank()), mesh, [oc.Partial(), oc.Partial()])
    dist.barrier()
    before = sent()
    with oc.explain() as report:
        x = oc.reshard(x, mesh, [oc.Replicate(), oc.Replicate()])
    dist.barrier()
    crossed = sent() - before
    assert bool((x.to_local() == 10).all())
    assert 0.95 < 2 * report.between_hosts / crossed < 1.05 and "to other hosts" in str(report), (report.between_hosts, crossed)
    if oc.get_rank() % 2 == 0:
        print(crossed / (4 * length), flush=True)

torch.manual_seed(0)
model, rows = torch.nn.Linear(512, 513), torch.randn(4096, 512)
plain = torch.nn.Linear(512, 513)
plain.load_state_dict(model.state_dict())
plain(rows).square().mean().backward()
oc.shard_layer(model, mesh)
optimizer = oc.shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
rows = oc.shard_tensor(rows, mesh, [oc.Shard(0), oc.Shard(0)])
dist.barrier()
before = sent()
model(rows).square().mean().backward()
torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
dist.barrier()
crossed = sent() - before
for p, q in zip(model.parameters(), plain.parameters()):
    torch.testing.assert_close(p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad, q.grad)
if oc.get_rank() % 2 == 0:
    print(crossed / sum(4 * p.numel() for p in model.parameters()), flush=True)
"""


def sums(hosts: list[Host]) -> list[tuple]:
    for host in hosts:
        host.launch(options(host, f"10.77.0.1:{PORT}"), SUMS)
    return [(*host.wait(60)[:2], host.log(2 * host.number)) for host in hosts]


def test_a_sum_crosses_once_and_ranks_of_one_host_share_memory(tmp_path):
    for code, said, log in on_two_hosts(sums, tmp_path):
        assert code == 0 and "HostsGroup ShmGroup" in log, said
        crossed = [float(line) for line in log.split()[-4:]]
        assert all(0.95 < share < 1.15 for share in crossed), log


COPIES = """
import os, torch, torch.distributed as dist, onecard as oc
from onecard.comm.world import world
world.init()
n, me = oc.get_world_size(), oc.get_rank()
def sent():
    with open("/proc/net/dev") as file:
        return next(int(line.split()[9]) for line in file if line.strip().startswith("eth7"))
P = 1 << 20
def crossed(call, *given):
    '''The bytes that left both hosts, as shares of what one rank has.'''
    dist.barrier()
    before = sent()
    dist.barrier()  # or one begins while the other reads the counter
    call(*given)
    dist.barrier()
    each = [None] * n
    dist.all_gather_object(each, sent() - before)
    return (each[0] + each[2]) / (4 * P)

for dtype in (torch.float32, torch.int64, torch.bool, torch.complex64, torch.bfloat16):
    for root in range(n):
        for strided in (False, True):
            want = torch.arange(30).mul(root + 1).remainder(5).to(dtype).view(5, 6)
            x = want.clone() if me == root else torch.zeros(5, 6, dtype=dtype)
            x = x.t().contiguous().t() if strided and me % 2 else x
            dist.broadcast(x, root)
            assert torch.equal(x, want), (dtype, root, strided)
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX) if dtype in (torch.float32, torch.int64, torch.bfloat16) else ():
            each = [torch.arange(6).add(rank).to(dtype).view(2, 3) for rank in range(n)]
            x = each[me].t().contiguous().t() if me % 2 else each[me].clone()
            dist.reduce(x, root, op)
            want = sum(each) if op == dist.ReduceOp.SUM else each[-1]
            assert torch.equal(x, want if me == root else each[me]), (dtype, root, op)
    parts = [torch.zeros(3, 2, dtype=dtype) for _ in range(n)]
    parts[1] = torch.zeros(2, 3, dtype=dtype).t()
    dist.all_gather(parts, torch.full((3, 2), me).to(dtype))
    assert all(torch.equal(part, torch.full((3, 2), rank).to(dtype)) for rank, part in enumerate(parts))
dist.broadcast(torch.empty(0), 3)

x, parts = torch.ones(P), [torch.empty(P) for _ in range(n)]
found = {f"broadcast from {root}": crossed(dist.broadcast, x, root) for root in range(n)}
found |= {f"reduce to {root}": crossed(dist.reduce, x, root) for root in range(n)}
found["all_gather"] = crossed(dist.all_gather, parts, x)
found["gather"] = crossed(dist.gather, x, parts if me == 1 else None, 1)
found["scatter"] = crossed(dist.scatter, x, parts if me == 1 else None, 1)
found["all_to_all"] = crossed(dist.all_to_all_single, torch.empty(P), x)
if me == 0:
    print("FOUND", found, flush=True)
"""
# Shares of what a rank has that cross the cable, both ways: P to the other host; each host's two to the other one; and,
# as each byte is for one rank: two ranks' to the root, and half of each of four.
LEAST = {
    **{f"broadcast from {root}": 1.0 for root in range(4)},
    **{f"reduce to {root}": 1.0 for root in range(4)},
    "all_gather": 4.0,
    "gather": 2.0,
    "scatter": 2.0,
    "all_to_all": 2.0,
}


def copies(hosts: list[Host]) -> list[tuple]:
    for host in hosts:
        host.launch(options(host, f"10.77.0.1:{PORT}"), COPIES)
    return [(*host.wait(100)[:2], host.log(2 * host.number)) for host in hosts]


def test_what_is_for_a_host_crosses_once(tmp_path):
    (code, said, log), (other, *_) = on_two_hosts(copies, tmp_path)
    assert (code, other) == (0, 0), said
    found = literal_eval(log.partition("FOUND")[2].strip())
    assert found.keys() == LEAST.keys()
    for what, share in found.items():
        assert 0.95 < share / LEAST[what] < 1.1, (what, found)


def processes(hosts: list[Host]) -> list[int]:
    return [host.pid for host in hosts]


def test_hosts_end_with_their_scene(tmp_path):
    assert not [pid for pid in on_two_hosts(processes, tmp_path) if Path(f"/proc/{pid}").exists()]
