"""Ranks that a user, or a scheduler without a store of its own, starts one by one: RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT."""

import pytest
from launching import by_hand, started_by_hand

LATE = """
import time
import torch
from torch.utils.data import DataLoader, TensorDataset
import onecard as oc

mesh = oc.ProcessMesh([0, 1], ["dp"])
oc.manual_seed(0)
data = TensorDataset(torch.arange(32.0).view(16, 2), torch.arange(16.0))
model = oc.shard_layer(torch.nn.Linear(2, 1), mesh)
optimizer = torch.optim.SGD(model.parameters(), 0.001)
loader = oc.shard_dataloader(DataLoader(data, 4), mesh, shard_dims="dp")
for x, y in loader:
    (model(x).squeeze(-1) - y).square().mean().backward()
    optimizer.step()
if oc.get_rank() == 1:  # the slower one: rank 0, whose process had the store, has ended
    time.sleep(1)
    for _ in loader:
        oc.shard_tensor(torch.ones(3), mesh, [oc.Replicate()])
print("end")
"""


@pytest.mark.share(1)
@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_a_slower_rank_outlives_rank_0_and_its_store(tmp_path, backend):
    ends = started_by_hand(tmp_path, LATE, by_hand(2, ONECARD_BACKEND=backend))
    assert [(code, text.splitlines()[-1:]) for code, text in ends] == [(0, ["end"]), (0, ["end"])], ends
