"""Several hosts as hosts: two network namespaces with a cable, and what can go wrong between them."""

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


@pytest.mark.parametrize("etc", list(ETC_HOSTS))
def test_two_hosts_train(tmp_path, etc):
    master = f"{'10.77.0.1' if etc == 'nobody' else 'alpha'}:{PORT}"
    ends = on_two_hosts(trains, tmp_path, master, etc=etc)
    losses = [log.split() for *_, log in ends]
    assert [code for code, *_ in ends] == [0, 0] and len(losses[0]) == 3 and losses[0] == losses[1], ends


@pytest.mark.parametrize("fault", list(FAULTS))
def test_what_goes_wrong_is_said_and_ends(tmp_path, fault):
    scene, expected, within = FAULTS[fault]
    ends = on_two_hosts(scene, tmp_path, timeout=240)
    for (code, said, seconds), (status, words) in zip(ends, expected, strict=True):
        assert code == status and words in said and seconds < within, ends
