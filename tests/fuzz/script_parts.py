"""The parts of random training scripts: models, data, losses, optimizers, and habits of those who write training loops."""

from __future__ import annotations

import re

READS = re.compile(r"\.item\(\)|float\(|\.tolist\(\)|if p\.grad\.norm")
"""What a step reads on the host."""
TOLD = re.compile(
    r"which a replay does not repeat|is no part of the batch's loss|is no sum and no mean over rows|of which each microbatch has"
    "|is not linear in the gradient"
)
"""Warnings that say where numbers are not one card's."""
COUNTING = ("norm", "residual", "convolutions")
"""Models that change themselves in each forward, thus in each microbatch."""

BEGIN = """
import copy, io, math, random, tempfile
import numpy as np
import torch, torch.nn as nn, torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed({seed}); random.seed({seed}); np.random.seed({seed})
"""

# name: (its text, what it is called with)
MODELS = {
    "mlp": ("net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 8), nn.GELU(), nn.Linear(8, 3))", "rows"),
    "norm": ("net = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))", "rows"),
    "residual": (
        """
class Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm, self.fc, self.out = nn.LayerNorm(d), nn.Linear(d, 2 * d), nn.Linear(2 * d, d)
        self.gain = nn.Parameter(torch.ones(1))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
    def forward(self, x):
        self.calls += 1
        return x + self.gain * self.out(F.silu(self.fc(self.norm(x))))
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp, self.head = nn.Linear(6, 12), nn.Linear(12, 3, bias=False)
        self.blocks = nn.ModuleList(Block(12) for _ in range(2))
    def forward(self, x):
        x = self.inp(x)
        for block in self.blocks: x = block(x)
        return self.head(x)
net = Net()""",
        "rows",
    ),
    "parametrized": (
        """
from torch.nn.utils.parametrizations import weight_norm
net = nn.Sequential(weight_norm(nn.Linear(6, 16)), nn.Softplus(), nn.Linear(16, 3))""",
        "rows",
    ),
    "convolutions": (
        """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.c1, self.b1 = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.c2, self.g = nn.Conv2d(4, 6, 3, stride=2), nn.GroupNorm(2, 6)
        self.fc = nn.Linear(6, 3)
    def forward(self, x):
        x = F.relu(self.g(self.c2(F.max_pool2d(F.relu(self.b1(self.c1(x))), 2))))
        return self.fc(F.adaptive_avg_pool2d(x, 1).flatten(1))
net = Net()""",
        "images",
    ),
    "gru": (
        """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.rnn = nn.Embedding(11, 8, padding_idx=0), nn.GRU(8, 10, batch_first=True)
        self.fc = nn.Linear(10, 3)
    def forward(self, x):
        return self.fc(self.rnn(self.emb(x))[0].mean(1))
net = Net()""",
        "tokens",
    ),
    "encoder": (
        """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.emb, self.pos = nn.Embedding(11, 8), nn.Parameter(0.1 * torch.randn(5, 8))
        self.enc, self.fc = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False), nn.Linear(8, 3)
    def forward(self, x):
        return self.fc(self.enc(self.emb(x) + self.pos, src_key_padding_mask=(x == 0))[:, 0])
net = Net()""",
        "tokens",
    ),
    "tied": (
        """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.mix, self.ln = nn.Embedding(11, 8), nn.Linear(8, 8), nn.LayerNorm(8)
        self.out = nn.Linear(8, 11, bias=False)
        self.out.weight = self.emb.weight
    def forward(self, x):
        h = self.emb(x)
        return self.out(self.ln(h + torch.tanh(self.mix(h)).cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]))
net = Net()""",
        "text",
    ),
}
DATA = {
    "rows": "X, Y = torch.randn({n}, 6), torch.randint(3, ({n},))",
    "images": "X, Y = torch.randn({n}, 1, 9, 9), torch.randint(3, ({n},))",
    "tokens": "X, Y = torch.randint(1, 11, ({n}, 5)), torch.randint(3, ({n},)); X[:, 3:][torch.rand({n}, 2) < 0.3] = 0",
    "text": "X = torch.randint(11, ({n}, 7)); X, Y = X[:, :-1], X[:, 1:]",
}
LOOPS = [
    "for x, y in DataLoader(TensorDataset(X, Y), batch_size={b}):",
    "for x, y in DataLoader(TensorDataset(X, Y), batch_size={b}, shuffle=True):",
    "for x, y in DataLoader([*zip(X, Y)], {b}, True, drop_last=True, generator=torch.Generator().manual_seed(epoch)):",
    "for i in range(0, len(X), {b}):\n    x, y = X[i:i+{b}], Y[i:i+{b}]",
    "for ix in torch.randperm(len(X)).split({b}):\n    x, y = X[ix], Y[ix]",
    "for d in DataLoader([dict(x=a, y=b) for a, b in zip(X, Y)], batch_size={b}):\n    x, y = d['x'], d['y']",
    "for ix in np.array_split(np.random.permutation(len(X)), max(2, len(X) // {b})):\n    x, y = X[torch.from_numpy(ix)], Y[ix]",
]
LOSSES = [
    "F.cross_entropy(o, y)", "nn.CrossEntropyLoss(label_smoothing=0.1)(o, y)", "F.cross_entropy(o, y, reduction='sum') / 8",
    "F.cross_entropy(o, y, reduction='none').mean()", "F.cross_entropy(o, y, ignore_index=1)",
    "F.nll_loss(F.log_softmax(o, -1), y, weight=torch.tensor(W))",
    "(F.cross_entropy(o, y, reduction='none') * (y != 2)).sum() / (y != 2).sum().clamp(min=1)",
    "F.mse_loss(o.softmax(-1), F.one_hot(y, C).float())",
    "F.binary_cross_entropy_with_logits(o, F.one_hot(y, C).float(), pos_weight=torch.tensor(2.))",
    "-(F.one_hot(y, C) * o.log_softmax(1)).sum(1).mean()", "F.smooth_l1_loss(o, F.one_hot(y, C).float())",
    "F.kl_div(o.log_softmax(1), F.one_hot(y, C) * 0.8 + 0.2 / C, reduction='batchmean')", "F.multi_margin_loss(o, y)",
    "(o.logsumexp(1) - o.gather(1, y[:, None])[:, 0]).mean()", "F.mse_loss(o, F.one_hot(y, C).float()).sqrt()",
    "F.cross_entropy(o, y, reduction='none').topk(2).values.mean()", "F.huber_loss(o.exp(), y[:, None].float().expand_as(o))",
]  # fmt: skip
BESIDE = [
    "",
    "",
    "",
    " + 1e-3 * sum(p.pow(2).sum() for p in net.parameters())",
    " + 1e-2 * o.pow(2).mean()",
    " + 0.01 * o.std()",
]
OWN = """
class Own(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-3, betas=(0.9, 0.99)):
        super().__init__(params, dict(lr=lr, betas=betas))
    @torch.no_grad()
    def step(self, closure=None):
        for g in self.param_groups:
            for p in g["params"]:
                if p.grad is None: continue
                s = self.state[p]
                if not s: s["m"] = torch.zeros_like(p)
                u = s["m"].mul(g["betas"][0]).add(p.grad, alpha=1 - g["betas"][0])
                p.add_(u.mul(50).tanh(), alpha=-g["lr"])
                s["m"].mul_(g["betas"][1]).add_(p.grad, alpha=1 - g["betas"][1])
"""
OPTIMIZERS = [
    "torch.optim.SGD({p}, lr=0.05, momentum=0.9, nesterov=True)", "torch.optim.SGD({p}, lr=0.05)",
    "torch.optim.AdamW({p}, lr=0.01, eps=1e-3)", "torch.optim.Adam({p}, lr=0.01, eps=1e-3, amsgrad=True)",
    "torch.optim.RMSprop({p}, lr=0.005, eps=1e-2)", "torch.optim.Adagrad({p}, lr=0.02, eps=1e-3)",
    "torch.optim.NAdam({p}, lr=0.01, eps=1e-3)", "torch.optim.AdamW({p}, lr=0.01, eps=1e-3, foreach=False)",
    "torch.optim.Adamax({p}, lr=0.01, eps=1e-3)", "Own({p}, lr=0.003)", "torch.optim.Adadelta({p}, lr=0.5, eps=1e-3)",
    "torch.optim.SGD({p}, lr=0.05, weight_decay=0.01, foreach=True)", "torch.optim.RAdam({p}, lr=0.01, eps=1e-3)",
    "torch.optim.ASGD({p}, lr=0.05)",
]  # fmt: skip
GROUPS = [
    "net.parameters()", "[p for p in net.parameters() if p.requires_grad]",
    "[{'params': [p for p in net.parameters() if p.ndim > 1], 'weight_decay': 0.1}, "
    "{'params': [p for p in net.parameters() if p.ndim <= 1], 'weight_decay': 0.0, 'lr': 0.02}]",
]  # fmt: skip
SCHEDULES = {  # (made, after a step, after an epoch)
    "none": ("", "", ""),
    "steps": ("sch = torch.optim.lr_scheduler.StepLR(opt, 2, 0.5)", "", "sch.step()"),
    "cosine": ("sch = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 6)", "", "sch.step()"),
    "cycle": (
        "sch = torch.optim.lr_scheduler.OneCycleLR(opt, 0.05, total_steps=40, cycle_momentum=False)",
        "sch.step()",
        "",
    ),
    "lambda": ("sch = torch.optim.lr_scheduler.LambdaLR(opt, lambda s: min(1, (s + 1) / 5))", "sch.step()", ""),
    "plateau": (
        "sch = torch.optim.lr_scheduler.ReduceLROnPlateau(opt, patience=0, factor=0.5)",
        "",
        "sch.step(float(run))",
    ),
    "by hand": ("", "for g in opt.param_groups: g['lr'] = 0.02 * min(1.0, (it + 1) / 4)", ""),
}
CLIPS = [
    "", "", "gn = nn.utils.clip_grad_norm_(net.parameters(), 0.3)",
    "nn.utils.clip_grad_value_(net.parameters(), 0.05)",
    "total = torch.stack([p.grad.norm() for p in net.parameters() if p.grad is not None]).norm()\n"
    "for p in net.parameters():\n    if p.grad is not None: p.grad.mul_((0.3 / (total + 1e-6)).clamp(max=1.0))",
    "for p in net.parameters():\n    if p.grad is None: continue\n    most = 0.05 * p.detach().norm().clamp(min=1e-3)\n"
    "    if p.grad.norm() > most: p.grad.data = p.grad.data * (most / p.grad.norm())",
    "for p in net.parameters():\n    if p.grad is not None: p.grad = p.grad + 0.01 * p.grad.mul(30).tanh()",
]  # fmt: skip
AVERAGES = {  # (made, after a step)
    "none": ("", ""),
    "by hand": (
        "ema = copy.deepcopy(net).eval()\nfor p in ema.parameters(): p.requires_grad_(False)",
        "with torch.no_grad():\n    for a, b in zip(ema.parameters(), net.parameters()): a.lerp_(b, 0.1)\n"
        "    for a, b in zip(ema.buffers(), net.buffers()): a.copy_(b)",
    ),
    "torch's": (
        "ema = torch.optim.swa_utils.AveragedModel(net, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9), "
        "use_buffers=True)",
        "ema.update_parameters(net)",
    ),
    "a copy later": ("ema = None", "if globals()['ema'] is None: globals().update(ema=copy.deepcopy(net))"),
    "shadows": (
        "shadow = {k: v.detach().clone() for k, v in net.named_parameters()}",
        "for k, v in net.named_parameters(): shadow[k].mul_(0.9).add_(v.data, alpha=0.1)",
    ),
}
FLAT = """
{loop}
    {compute}
    it += 1
    gn = 0.0
    if it % ACC == 0:
        {update}
    {log}
    hist.append(float(gn))
"""
FUNCTIONS = """
@STEP
def compute(x, y):
    {compute}
    return l, o

@STEP
def update():
    gn = torch.zeros(())
    {update}
    return gn
"""
CALLED = """
{loop}
    l, o = compute(x, y)
    {shape}
    it += 1
    if it % ACC == 0:
        gn = update()
        hist.append(float(gn))
    {log}
"""
ONE_FUNCTION = """
@STEP
def train(x, y):
    gn = torch.zeros(())
    {compute}
    {update}
    return l, o, gn
"""
ONE_CALLED = """
{loop}
    l, o, gn = train(x, y)
    {shape}
    it += 1
    {after}
    hist.append(float(gn))
    seen_losses.append(l.item())
    {log}
"""
LOGS = [
    "run += l.item(); seen += 1", "run += l.item() * len(x); seen += len(x)", "run = run + l.detach(); seen += 1",
    "hits += (o.argmax(-1) == y).sum().item(); seen += y.numel(); run += float(l)",
    "hist.append(l.detach().cpu().numpy().item()); run += hist[-1]; seen += 1",
]  # fmt: skip
BEFORE = {  # how likely, and what is done before training
    "initialised": (
        0.2,
        "def init(m):\n    if isinstance(m, nn.Linear) and not torch.nn.utils.parametrize.is_parametrized(m):\n"
        "        nn.init.xavier_uniform_(m.weight)\nnet.apply(init)",
    ),
    "frozen": (0.2, "next(net.parameters()).requires_grad_(False)"),
    "forward hook": (
        0.2,
        "last = [m for m in net.modules() if isinstance(m, nn.Linear)][-1]\n"
        "last.register_forward_hook(lambda m, i, o: hist.append(o.detach().abs().mean().item()))",
    ),
    "gradient hooks": (
        0.2,
        "for p in net.parameters():\n    if p.requires_grad: p.register_hook(lambda g: g.clamp(-0.2, 0.2))",
    ),
    "hooks after gradients": (
        0.2,
        "for p in net.parameters():\n"
        "    if p.requires_grad: p.register_post_accumulate_grad_hook(lambda p: late.append(p.grad.norm().item()))",
    ),
    "halving hooks after gradients": (
        0.1,
        "def halve(p): p.grad.mul_(0.5)\n"
        "for p in net.parameters():\n    if p.requires_grad: p.register_post_accumulate_grad_hook(halve)",
    ),
    "optimizer hook": (0.1, "opt.register_step_post_hook(lambda *_: hist.append(opt.param_groups[0]['lr']))"),
}
AFTER_STEP = {
    "weights clamped": (0.1, "with torch.no_grad():\n    for p in net.parameters(): p.clamp_(-1.5, 1.5)"),
    "norm of weights": (0.1, "if it % 2: hist.append(sum(p.detach().norm() for p in net.parameters()).item())"),
    "histogram": (0.1, "hist.extend(torch.histc(net.state_dict()[first].float(), 4, -1, 1).tolist())"),
}
BETWEEN = {  # the two epochs
    "nothing": "",
    "files": "with tempfile.TemporaryDirectory() as d:\n"
    "    torch.save({'m': net.state_dict(), 'o': opt.state_dict(), 'e': epoch}, d + '/c.pt')\n    c = torch.load(d + '/c.pt')\n"
    "net.load_state_dict(c['m']); opt.load_state_dict(c['o'])",
    "memory": "keep = {k: v.clone() for k, v in net.state_dict().items()}; states = copy.deepcopy(opt.state_dict())\n"
    "with torch.no_grad():\n    for p in net.parameters(): p.add_(1.0)\nnet.load_state_dict(keep); opt.load_state_dict(states)",
    "bytes": "buf = io.BytesIO(); torch.save(net.state_dict(), buf); buf.seek(0); sd = torch.load(buf)\n"
    "print('saved', sum(v.double().sum().item() for v in sd.values())); net.load_state_dict(sd)",
    "unfrozen": "for p in net.parameters(): p.requires_grad_(True)",
    "another optimizer": "opt = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.5)",
    "head halved": "head = [m for m in net.modules() if isinstance(m, nn.Linear)][-1]\n"
    "with torch.no_grad(): head.weight.mul_(0.5)",
    "fewer data": "X, Y = X[::2], Y[::2]",
    "a group more": "extra = nn.Parameter(torch.zeros(3))\n"
    "opt.add_param_group({'params': [extra], 'lr': 0.01, 'initial_lr': 0.01})",
}
EVALUATIONS = [
    "print('eval', torch.stack(ls).mean().item(), (P == Y).float().mean().item())",
    "print('eval', np.mean([v.item() for v in ls]), P.numpy().sum())",
    "print('eval', max(ls).item(), torch.bincount(P.flatten(), minlength=C).tolist(), len(P))",
    "best = min(best, sum(ls).item()); print('eval', best)",
    "m = torch.zeros(C, C)\nfor t, p in zip(Y.flatten(), P.flatten()): m[int(t), int(p)] += 1\nprint('eval', m.diag().tolist())",
]
END = """
print("history", len(hist), sum(hist))
late.sort(); print("after gradients", len(late), sum(late))
print("weights", [p.detach().double().norm().item() for p in net.parameters()])
print("buffers", [b.double().sum().item() for b in net.buffers()])
states = [v for s in opt.state_dict()["state"].values() for v in s.values() if torch.is_tensor(v)]
print("states", len(states), sum(v.double().abs().sum().item() for v in states))
"""
OF_STEPS = ("nothing", "unfrozen", "another optimizer", "fewer data")
"""Of BETWEEN: what does not look at the parameters."""
LOSSES_SEEN = 'print("losses", len(seen_losses), seen_losses)\nprint("history", len(hist), sum(hist))\n'
OF_AVERAGE = """
print("average", sum(p.detach().double().sum().item() for p in ema.parameters()))
ema.eval()
with torch.no_grad(): print("its output", ema(X).double().mean().item())
"""
OF_SHADOWS = 'print("average", sum(v.double().sum().item() for v in shadow.values()))\n'
