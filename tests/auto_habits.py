"""Habits of one-card programs, each a short one; none knows of ranks."""

from __future__ import annotations

BEGIN = """
import copy
import numpy as np
import torch, torch.nn as nn, torch.nn.functional as F
torch.manual_seed(0)
"""
NET = """
net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
X, Y = torch.randn(48, 6), torch.randint(3, (48,))
"""
HABITS: dict[str, str] = {
    "gan": BEGIN
    + """
G = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
D = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1))
og = torch.optim.Adam(G.parameters(), 1e-2, eps=1e-3)
od = torch.optim.Adam(D.parameters(), 1e-2, eps=1e-3)
for i in range(4):
    real = torch.randn(8, 2)
    z = torch.randn(8, 4)
    fake = G(z)
    ld = F.binary_cross_entropy_with_logits(D(real), torch.ones(8, 1)) + F.binary_cross_entropy_with_logits(
        D(fake.detach()), torch.zeros(8, 1)
    )
    od.zero_grad()
    ld.backward()
    od.step()
    lg = F.binary_cross_entropy_with_logits(D(fake), torch.ones(8, 1))
    og.zero_grad()
    lg.backward()
    og.step()
    print(f"{ld.item():.4f} {lg.item():.4f}")
""",
    "states of a time-major network": BEGIN
    + """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.layer, self.head = nn.Embedding(9, 4), nn.LSTM(4, 6, num_layers=2), nn.Linear(6, 9)

    def forward(self, x, states):
        x, states = self.layer(self.words(x), states)
        return self.head(x), states

net, text = Net(), torch.randint(9, (26, 4))
opt = torch.optim.SGD(net.parameters(), 0.5)
states = (torch.zeros(2, 4, 6), torch.zeros(2, 4, 6))
for i in range(0, 25, 5):
    states = tuple(s.detach() for s in states)
    out, states = net(text[i : i + 5], states)
    l = F.cross_entropy(out.view(-1, 9), text[i + 1 : i + 6].reshape(-1))
    opt.zero_grad()
    l.backward()
    opt.step()
    print(f"{l.item():.4f}")
""",
    "lbfgs": BEGIN
    + NET
    + """
opt = torch.optim.LBFGS(net.parameters(), lr=0.5, max_iter=4)
for i in range(2):

    def closure():
        opt.zero_grad()
        l = F.cross_entropy(net(X), Y)
        l.backward()
        return l

    print(f"{opt.step(closure).item():.4f}")
""",
    "ema deepcopy": BEGIN
    + NET
    + """
opt = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
ema = None
for i in range(4):
    l = F.cross_entropy(net(X), Y)
    opt.zero_grad()
    l.backward()
    opt.step()
    if ema is None:
        ema = copy.deepcopy(net)
    with torch.no_grad():
        for a, b in zip(ema.parameters(), net.parameters()):
            a.mul_(0.9).add_(b, alpha=0.1)
    print(f"{l.item():.4f} {F.cross_entropy(ema(X), Y).item():.4f}")
best = {k: v.clone() for k, v in net.state_dict().items()}
net.load_state_dict(best)
print(f"{sum(v.sum() for v in best.values()).item():.4f}")
""",
    "ema before": BEGIN
    + NET
    + """
opt = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
ema = copy.deepcopy(net).eval()
shadow = {k: v.detach().clone() for k, v in net.named_parameters()}
for i in range(4):
    l = F.cross_entropy(net(X), Y)
    opt.zero_grad()
    l.backward()
    opt.step()
    with torch.no_grad():
        for a, b in zip(ema.parameters(), net.parameters()):
            a.mul_(0.9).add_(b, alpha=0.1)
        for k, v in net.named_parameters():
            shadow[k].lerp_(v.data, 0.1)
    print(
        f"{l.item():.4f} {F.cross_entropy(ema(X), Y).item():.4f} {sum(v.norm() for v in shadow.values()).item():.4f}"
    )
""",
    "optimizer later": BEGIN
    + NET
    + """
l = F.cross_entropy(net(X), Y)
l.backward()
opt = torch.optim.AdamW(net.parameters(), 1e-2, eps=1e-3)
opt.step()
opt.zero_grad()
for i in range(3):
    l = F.cross_entropy(net(X), Y)
    l.backward()
    opt.step()
    opt.zero_grad()
    print(f"{l.item():.4f}")
""",
    "manual": BEGIN
    + NET
    + """
for i in range(4):
    l = F.cross_entropy(net(X), Y)
    g = torch.autograd.grad(l, list(net.parameters()))
    with torch.no_grad():
        for p, q in zip(net.parameters(), g):
            p -= 0.1 * q
    print(f"{l.item():.4f} {sum(q.abs().sum() for q in g).item():.4f}")
""",
    "frozen two groups": BEGIN
    + NET
    + """
net[0].bias.requires_grad_(False)
opt = torch.optim.SGD([{"params": [net[0].weight], "lr": 0.1}, {"params": net[2].parameters(), "lr": 0.01}], lr=0.1)
for i in range(4):
    l = F.cross_entropy(net(X[: 5 + i]), Y[: 5 + i])
    opt.zero_grad()
    l.backward()
    for p in net.parameters():
        if p.grad is not None:
            p.grad.data.clamp_(-0.05, 0.05)
    opt.step()
    print(f"{l.item():.4f} {[float(p.grad.sum()) > 0 if p.grad is not None else None for p in net.parameters()]}")
    opt.param_groups[0]["lr"] *= 0.5
""",
    "penalty": BEGIN
    + NET
    + """
opt = torch.optim.Adam(net.parameters(), 1e-2, eps=1e-3)
for i in range(3):
    x = X.clone().requires_grad_(True)
    out = net(x)
    l = F.cross_entropy(out, Y)
    (g,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    l = l + g.square().mean()
    opt.zero_grad()
    l.backward()
    opt.step()
    print(f"{l.item():.4f}")
""",
    "numpy metrics": BEGIN
    + NET
    + """
opt = torch.optim.Adam(net.parameters(), 1e-2, eps=1e-3)
hist = []
for i in range(3):
    out = net(X)
    l = F.cross_entropy(out, Y)
    opt.zero_grad()
    l.backward()
    opt.step()
    hist.append(l.detach().cpu().numpy())
    pred = out.detach().softmax(-1).numpy().argmax(1)
    print(
        f"{np.mean(hist):.4f} {(pred == Y.numpy()).mean():.3f} {len(out)} {out.shape} {type(out.tolist()).__name__}"
    )
    conf = torch.zeros(3, 3)
    for t, p in zip(Y.tolist(), out.argmax(1).tolist()):
        conf[t, p] += 1
    print(conf.diag().sum().item(), torch.stack([l.detach() for _ in range(2)]).mean().item() > 0)
""",
    "workers": BEGIN
    + NET
    + """
dl = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, Y), batch_size=7, shuffle=True, num_workers=2)
opt = torch.optim.SGD(net.parameters(), 0.1)
for x, y in dl:
    l = F.cross_entropy(net(x), y)
    opt.zero_grad()
    l.backward()
    opt.step()
    print(f"{l.item():.4f}")
""",
    "scaler amp": BEGIN
    + NET
    + """
opt = torch.optim.SGD(net.parameters(), 0.1)
sc = torch.amp.GradScaler("cpu", init_scale=64.0)
for i in range(3):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        l = F.cross_entropy(net(X).float(), Y)
    opt.zero_grad()
    sc.scale(l).backward()
    sc.unscale_(opt)
    n = nn.utils.clip_grad_norm_(net.parameters(), 0.5)
    sc.step(opt)
    sc.update()
    print(f"{l.item():.3f} {n.item():.2f}")
""",
    "rnn": BEGIN
    + """
class M(nn.Module):
    def __init__(s):
        super().__init__()
        s.e = nn.Embedding(11, 8)
        s.r = nn.GRU(8, 12, batch_first=True)
        s.o = nn.Linear(12, 11)

    def forward(s, x, h=None):
        y, h = s.r(s.e(x), h)
        return s.o(y), h


m = M()
opt = torch.optim.Adam(m.parameters(), 1e-2, eps=1e-3)
h = None
T = torch.randint(11, (6, 41))
for i in range(4):
    x, y = T[:, i * 10 : i * 10 + 10], T[:, i * 10 + 1 : i * 10 + 11]
    out, h = m(x, h)
    h = h.detach()
    l = F.cross_entropy(out.flatten(0, 1), y.flatten())
    opt.zero_grad()
    l.backward()
    opt.step()
    print(f"{l.item():.4f}")
""",
    "a weight that is made anew": BEGIN
    + """
norm = nn.utils.parametrizations.weight_norm
net = nn.Sequential(norm(nn.Linear(6, 16)), nn.Tanh(), nn.Linear(16, 3))
X, Y = torch.randn(48, 6), torch.randint(3, (48,))
opt = torch.optim.Adam(net.parameters(), 1e-2, eps=1e-3)
for i in range(3):
    l = F.cross_entropy(net(X), Y)
    opt.zero_grad()
    l.backward()
    opt.step()
    print(f"{l.item():.4f} {net[0].weight.norm().item():.4f}")
""",
    "a weight that a hook makes anew": BEGIN
    + """
norm = nn.utils.weight_norm  # makes it at once, by a graph that holds what it is made of
net = nn.Sequential(norm(nn.Linear(6, 16)), nn.Tanh(), nn.utils.spectral_norm(nn.Linear(16, 3)))
X, Y = torch.randn(48, 6), torch.randint(3, (48,))
opt = torch.optim.Adam(net.parameters(), 1e-2, eps=1e-3)
for i in range(3):
    l = F.cross_entropy(net(X), Y)
    opt.zero_grad()
    l.backward()
    opt.step()
    print(f"{l.item():.4f} {net[0].weight.norm().item():.4f} {sorted(net.state_dict())}")
""",
    "a tensor kept on the module": BEGIN
    + """
class V(nn.Module):
    def __init__(self):
        super().__init__()
        self.e, self.d = nn.Linear(6, 8), nn.Linear(4, 6)

    def forward(self, x):
        mu, lv = self.e(x).chunk(2, 1)
        return self.d(mu + self.noise * (0.5 * lv).exp()), mu, lv

v = V()
opt = torch.optim.Adam(v.parameters(), 1e-2, eps=1e-3)
for i in range(3):
    x, v.noise = torch.randn(9, 6), torch.randn(9, 4)
    r, mu, lv = v(x)
    l = F.mse_loss(r, x) - 0.5 * torch.mean(1 + lv - mu.pow(2) - lv.exp())
    opt.zero_grad()
    l.backward()
    opt.step()
    print(f"{l.item():.3f}")
""",
    "parameters made by the first call": BEGIN
    + """
for ahead in (True, False):
    net = nn.Sequential(nn.LazyLinear(16), nn.LazyBatchNorm1d(), nn.Tanh(), nn.LazyLinear(3))
    opt = None if ahead else torch.optim.Adam(net.parameters(), 1e-2, eps=1e-3)
    X, Y = torch.randn(48, 6), torch.randint(3, (48,))
    if ahead:
        net(X[:4])
        opt = torch.optim.Adam(net.parameters(), 1e-2, eps=1e-3)
    for i in range(4):
        l = F.cross_entropy(net(X), Y)
        opt.zero_grad()
        l.backward()
        opt.step()
        print(f"{l.item():.4f} {net[0].weight.norm().item():.4f} {net[1].running_var.norm().item():.4f}")
""",
}
