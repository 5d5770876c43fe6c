"""Programs for one card, as their writers wrote them: none knows of ranks."""

from __future__ import annotations

from pathlib import Path

CLASSIFIER = (Path(__file__).parents[1] / "examples" / "auto" / "classifier.py").read_text()
"""In the style of PyTorch's examples: evaluation, accumulation, an average, a schedule, checkpoints, a log."""

LANGUAGE = """
import math, sys
import torch, torch.nn as nn, torch.nn.functional as F

text = "the quick brown fox jumps over the lazy dog. " * 20
chars = sorted(set(text))
data = torch.tensor([chars.index(c) for c in text])
torch.manual_seed(1337)
dropout = 0.1 if "--dropout" in sys.argv else 0.0


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.a, self.b = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        q, k, v = self.qkv(self.a(x)).view(*x.shape[:2], 3, 2, -1).unbind(2)
        y = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(x.shape))
        return x + F.dropout(self.down(F.gelu(self.up(self.b(x)))), dropout, self.training)


class GPT(nn.Module):
    def __init__(self, vocab, width=16, length=12):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.head = nn.Linear(width, vocab, bias=False)
        self.wte.weight = self.head.weight

    def forward(self, idx, targets=None):
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1], device=idx.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        loss = None if targets is None else F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))
        return logits, loss


def batch():
    at = torch.randint(len(data) - 12, (8,))
    return torch.stack([data[i : i + 12] for i in at]), torch.stack([data[i + 1 : i + 13] for i in at])


model = GPT(len(chars))
decay = [p for p in model.parameters() if p.dim() >= 2]
rest = [p for p in model.parameters() if p.dim() < 2]
optimizer = torch.optim.AdamW([{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}], lr=1e-3)
best = math.inf
for step in range(8):
    for group in optimizer.param_groups:
        group["lr"] = 1e-2 * min(1.0, (step + 1) / 4)
    for _ in range(2):
        _, loss = model(*batch())
        (loss / 2).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if loss.item() < best:
        best = loss.item()
        torch.save({"model": model.state_dict(), "step": step}, "ckpt.pt")
    print(f"step {step}: {loss.item():.4f}")
model.eval()
idx = torch.zeros(1, 1, dtype=torch.long)
with torch.no_grad():
    for _ in range(8):
        logits, _ = model(idx[:, -12:])
        idx = torch.cat([idx, logits[:, -1].argmax(-1, keepdim=True)], 1)
print("".join(chars[i] for i in idx[0].tolist()))
"""
"""In the style of nanoGPT: tied embeddings, groups, a rate by hand, accumulation, the best checkpoint, a sample."""

_BACKWARD = "model(torch.ones(4, 2)).sum().backward()\n"
REFUSED = {
    "a process group": (
        "import torch.distributed as dist\ndist.init_process_group('gloo')\n",
        r"program\.py:2.*init_process_group.*divides its work itself",
    ),
    "a rank": (
        "import torch\nprint(torch.distributed.get_rank())\n",
        r"program\.py:2.*get_rank.*divides its work itself",
    ),
    "ranks of its own": (
        "import torch\ntorch.multiprocessing.spawn(print, nprocs=2)\n",
        r"program\.py:2.*multiprocessing\.spawn",
    ),
    "marks of its own": (
        "import torch, onecard as oc\nmodel = torch.nn.Linear(2, 2)\n"
        f"oc.shard_layer(model, oc.ProcessMesh([0], ['dp']))\n{_BACKWARD}",
        r"program\.py:4: the parameters of Linear lie on a mesh already.*Start it without",
    ),
    "the time": (
        "import time, torch\nmodel = torch.nn.Linear(2, 2)\n"
        f"torch.nn.init.constant_(model.bias, time.perf_counter() % 1 * 1000)\n{_BACKWARD}",
        r"program\.py:4: bias is another one on rank",
    ),
    "the system's numbers": (
        "import os, torch\ntorch.manual_seed(int.from_bytes(os.urandom(4), 'big'))\n"
        f"model = torch.nn.Linear(2, 2)\n{_BACKWARD}",
        r"program\.py:4: (weight|bias) is another one on rank",
    ),
    "another model": (
        "import torch\nmodel = torch.nn.Linear(3, 2)\nopt = torch.optim.SGD(model.parameters(), 0.1)\n"
        "model(torch.ones(4, 3)).sum().backward()\nopt.step()\n",
        r"program\.py:5: the plan was made for another program: weight",
    ),
    "another model that trains by hand": (
        "import torch\nmodel = torch.nn.Linear(3, 2)\nfor _ in range(2):\n"
        "    model(torch.ones(4, 3)).sum().backward()\n"
        "    with torch.no_grad():\n        [p.sub_(p.grad) for p in model.parameters()]\n",
        r"program\.py:4: the plan was made for another program: weight",
    ),
}
"""Programs that cannot be kept, and what is said."""
