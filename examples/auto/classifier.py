"""A classifier for one card, with evaluation, accumulation, an average, a schedule, checkpoints and a log.

    python examples/auto/classifier.py
    onecard run --auto --nproc_per_node 2 examples/auto/classifier.py

Both print the same numbers and write the same files, once.
"""

import argparse
import csv
import json
import os

import torch
import torch.nn.functional as F
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--resume", action="store_true")
parser.add_argument("--out", default="out")
args = parser.parse_args()

torch.manual_seed(1)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, bias=False)
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Linear(4 * 36, 4)

    def forward(self, x):
        return self.head(F.relu(self.norm(self.conv(x))).flatten(1))


def evaluate(model, loader):
    model.eval()
    right = 0
    with torch.no_grad():
        for x, y in loader:
            right += (model(x).argmax(1) == y).sum().item()
    return right / len(loader.dataset)


x = torch.randn(100, 1, 8, 8)
y = x[:, 0, :2, :2].flatten(1).argmax(1)
data = torch.utils.data.TensorDataset(x, y)
train = torch.utils.data.DataLoader(data, batch_size=24, shuffle=True)
test = torch.utils.data.DataLoader(data, batch_size=40)
model = Net()
params = [p for p in model.parameters() if p.requires_grad]
average = torch.optim.swa_utils.AveragedModel(model, avg_fn=lambda a, p, n: 0.9 * a + 0.1 * p)
optimizer = torch.optim.AdamW(params, lr=1e-2)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
os.makedirs(args.out, exist_ok=True)
path, first, best = os.path.join(args.out, "last.pt"), 0, 0.0
if args.resume:
    saved = torch.load(path)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    scheduler.load_state_dict(saved["scheduler"])
    torch.set_rng_state(saved["random"])
    first, best = saved["epoch"] + 1, saved["best"]
log = open(os.path.join(args.out, "log.csv"), "a")  # noqa: SIM115 - until the script ends
rows = csv.writer(log)
for epoch in range(first, args.epochs):
    model.train()
    for i, (image, label) in enumerate(train):
        loss = F.cross_entropy(model(image), label) / 2
        loss.backward()
        if i % 2:
            norm = nn.utils.clip_grad_norm_(params, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            average.update_parameters(model)
        rows.writerow([epoch, i, f"{loss.item():.3f}"])
    accuracy = evaluate(model, test)
    best = max(best, accuracy)
    print(
        f"epoch {epoch}: loss {loss:.4f}, norm {norm.item():.4f}, accuracy {accuracy:.3f}, best {best:.3f}", flush=True
    )
    print(f"average {evaluate(average, test):.3f}", model.norm.running_var, optimizer.param_groups[0]["lr"])
    torch.save(
        {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "scheduler": scheduler.state_dict(),
            "random": torch.get_rng_state(),
            "epoch": epoch,
            "best": best,
        },
        path,
    )
    with open(os.path.join(args.out, "best.json"), "w") as file:
        json.dump({"best": best, "files": sorted(os.listdir(args.out))}, file)
