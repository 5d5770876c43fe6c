"""Programs that `onecard estimate` runs unchanged, each as its author would have written it; written to files by the tests."""

PLAIN = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

device = "cuda"
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)).to(device)
data = TensorDataset(torch.randn(100, 64), torch.randint(10, (100,)))
optimizer = torch.optim.Adam(model.parameters())
loss_fn = nn.CrossEntropyLoss()
for epoch in range(3):
    for x, y in DataLoader(data, batch_size=10, shuffle=True, num_workers=2):
        x, y = x.cuda(), y.to(device)
        optimizer.zero_grad()
        loss = loss_fn(model(x), y)
        loss.backward()
        optimizer.step()
        print(f"loss {loss.item():.4f}")
"""

DDP = """
import os
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

def main():
    dist.init_process_group("nccl")
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    model = DDP(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)).to(f"cuda:{local}"), device_ids=[local])
    data = TensorDataset(torch.randn(1000, 64), torch.randint(10, (1000,)))
    sampler = DistributedSampler(data)
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cuda", enabled=False)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, y in DataLoader(data, batch_size=10, sampler=sampler, pin_memory=True):
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = nn.functional.cross_entropy(model(x.cuda(non_blocking=True)), y.cuda(non_blocking=True))
            optimizer.zero_grad(set_to_none=True)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            if not torch.isfinite(norm):
                raise RuntimeError("diverged")
            scaler.step(optimizer)
            scaler.update()
            if dist.get_rank() == 0:
                print(loss.item())
    dist.destroy_process_group()

if __name__ == "__main__":
    main()
"""

FSDP = """
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group("nccl")
mesh = init_device_mesh("cuda", (dist.get_world_size(),), mesh_dim_names=("dp",))
with torch.device("cuda"):
    model = nn.Sequential(*[nn.Sequential(nn.Linear(256, 256), nn.ReLU()) for _ in range(4)])
for block in model:
    fully_shard(block, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters())
for step in range(4):
    model(torch.randn(8, 256, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""

NUMPY = """
import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

data = np.random.randint(0, 256, 10000).astype(np.uint16)

def get_batch(rows=4, length=32):
    at = torch.randint(len(data) - length, (rows,))
    x = torch.stack([torch.from_numpy(data[i:i + length].astype(np.int64)) for i in at])
    y = torch.stack([torch.from_numpy(data[i + 1:i + 1 + length].astype(np.int64)) for i in at])
    return x.pin_memory().to("cuda", non_blocking=True), y.pin_memory().to("cuda", non_blocking=True)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.mlp, self.head = nn.Embedding(256, 64), nn.Linear(64, 64), nn.Linear(64, 256)

    def forward(self, x, y):
        logits = self.head(F.gelu(self.mlp(self.embedding(x))))
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), y.view(-1))

model = torch.compile(Net().cuda())
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
best = 1e9
for step in range(10):
    if step % 5 == 0:
        model.eval()
        with torch.no_grad():
            best = min(best, model(*get_batch())[1].item())
        model.train()
        torch.save(model.state_dict(), "/nowhere/model.pt")
    for _ in range(3):
        with torch.autocast(device_type="cuda", dtype=torch.bfloat16):
            _, loss = model(*get_batch())
        (loss / 3).backward()
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
"""

MARKS = """
import torch
import onecard as oc
from torch import nn

mesh = oc.ProcessMesh([[0, 1], [2, 3]], ["dp", "tp"])
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 32))
for layer, dim in ((model[0], 0), (model[2], 1)):
    layer.weight = oc.shard_tensor(layer.weight, mesh, [oc.Replicate(), oc.Shard(dim)])
model[0].bias = oc.shard_tensor(model[0].bias, mesh, [oc.Replicate(), oc.Shard(0)])
model[2].bias = oc.shard_tensor(model[2].bias, mesh, [oc.Replicate(), oc.Replicate()])
optimizer = oc.shard_optimizer(torch.optim.AdamW(model.parameters(), fused=True))

def step(x):
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()

if __name__ == "__main__":
    for _ in range(3):
        step(oc.shard_tensor(torch.randn(16, 64), mesh, [oc.Shard(0), oc.Replicate()]))
"""

STOPS = {
    "import torch\nmodel = torch.nn.Linear(2, 2)\nraise ValueError('no data here')\n": "stops.py:3: ValueError: no data here",
    "import torch\nmodel = torch.nn.Linear(2, 2)\n": "stops.py: ended after no optimizer step",
    "import sys\n\nsys.exit('give --data')\n": "stops.py:3: the program ended itself (give --data) after no optimizer step",
    "import torch\nx = torch.randn(4)\ny = x[x > 0]\n": "stops.py:3: values decide what aten.nonzero gives",
    "import nowhere_at_all\n": "stops.py:1: ModuleNotFoundError: No module named 'nowhere_at_all'",
    "def f(:\n": "SyntaxError",
    "import torch\np = torch.nn.Parameter(torch.ones(3))\no = torch.optim.SGD([p], 0.1)\np.sum().backward()\no.step()\n": (
        "stops.py: ended after 1 optimizer step"
    ),
}

RESUMED = """
import os

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x, y = torch.randn(29, 6), torch.randint(0, 3, (29,))
loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)
model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
start = 0
if os.path.exists("ckpt.pt"):
    ckpt = torch.load("ckpt.pt", map_location=lambda storage, _: storage)
    for name, p in model.named_parameters():
        p.data = ckpt["model"][name]
    model.load_state_dict(ckpt["model"])
    optimizer.load_state_dict(ckpt["optimizer"])
    torch.set_rng_state(ckpt["random"])
    start = ckpt["epoch"]
    whole = torch.load("whole.pt", weights_only=False)
    assert whole[0].weight.shape == model[0].weight.shape and int(whole[1].num_batches_tracked) == 4 * start
for epoch in range(start, start + 2):
    for a, b in loader:
        loss = nn.functional.cross_entropy(model(a), b)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch + 1}
    torch.save(state | {"random": torch.get_rng_state()}, "ckpt.pt")
    torch.save(model, "whole.pt")
"""
"""Goes on from its own files: states by name and by `.data`, of the optimizer and of random numbers, a pickled module."""

NORMALISED = """
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

class Pictures(Dataset):
    def __init__(self):
        self.mean, self.std = torch.tensor([0.4, 0.5, 0.6]), torch.tensor([0.2] * 3)
        self.data = torch.randint(256, (20, 3, 4, 4), dtype=torch.uint8)
    def __len__(self):
        return 20
    def __getitem__(self, i):
        if (self.std == 0).any():
            raise ValueError("no spread")
        return (self.data[i] / 255 - self.mean[:, None, None]) / self.std[:, None, None], i % 3

model = nn.Sequential(nn.Flatten(), nn.Linear(48, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x, y in DataLoader(Pictures(), batch_size=4, shuffle=True, num_workers=2):
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
"""
"""Its loader reads what the program has computed before: tensors without data, where all else has some."""
