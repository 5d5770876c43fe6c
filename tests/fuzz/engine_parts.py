"""The parts of random programs around an Engine: what their authors do between two steps."""

from __future__ import annotations

EDITS = {  # what is done before a step, and whether it touches values, which a rank of a pipeline may not have
    "rate": ("for g in opt.param_groups: g['lr'] *= 0.5", False),
    "decay": ("opt.param_groups[0]['weight_decay'] = 0.05", False),
    "frozen": ("params[0].requires_grad_(False)", False),
    "all trained": ("for p in params: p.requires_grad_(True)", False),
    "clipped": ("engine.clip_grad_norm = 0.2", False),
    "not clipped": ("engine.clip_grad_norm = None", False),
    "another loss": ("engine.loss = lambda o, y: 0.5 * loss(o, y) + 0.1 * o.pow(2).mean()", False),
    "the first loss": ("engine.loss = loss", False),
    "evaluated": ("print('eval', float(engine.run((x, y), mode='eval')['loss']))", False),
    "predicted": ("print('outputs', engine.run((x,), mode='predict')['outputs'].double().abs().sum().item())", False),
    "evaluation, then training": ("net.eval(); net.train()", False),
    "hook of a layer": ("held.append(last.register_forward_hook(lambda m, i, o: 0.9 * o))", False),
    "hook of gradients into a layer": (
        "held.append(last.register_full_backward_hook(lambda m, i, o: tuple(g if g is None else 0.5 * g for g in i)))",
        False,
    ),
    "hook of a gradient": ("held.append(params[-1].register_hook(lambda g: 0.3 * g))", False),
    "hook before the step": (
        "def before(*_):\n    for p in params: p.grad = None if p.grad is None else 0.5 * p.grad\n"
        "held.append(opt.register_step_pre_hook(before))",
        True,
    ),
    "hooks removed": ("while held: held.pop().remove()", False),
    "hook that clamps": ("held.append(params[-1].register_hook(lambda g: g.clamp(-0.02, 0.02)))", True),
    "halving after accumulation": (
        "def halve(p): p.grad = 0.5 * p.grad\nheld.append(params[-1].register_post_accumulate_grad_hook(halve))",
        True,
    ),
    "weights clamped": ("with torch.no_grad():\n    for p in params: p.clamp_(-0.4, 0.4)", True),
    "data scaled": ("for p in params: p.data.mul_(0.95)", True),
    "data exchanged": ("for p in params: p.data = p.data.clamp(-0.5, 0.5)", True),
    "a layer halved": ("with torch.no_grad(): last.weight.mul_(0.5)", True),
    "states forgotten": ("opt.state.clear()", True),
    "kept": ("kept = copy.deepcopy((net.state_dict(), opt.state_dict()))", True),
    "put back": ("if kept: net.load_state_dict(kept[0]); opt.load_state_dict(copy.deepcopy(kept[1]))", True),
    "averaged": ("with torch.no_grad():\n    for a, b in zip(average, params): a.lerp_(b.detach(), 0.3)", True),
    "gradients left over": ("for p in params:\n    if p.requires_grad: p.grad = torch.full_like(p, 0.01)", True),
    "a step by hand": (
        "out = net(x); by_hand = loss(out, y); by_hand.backward(); print('by hand', by_hand.item())\n"
        "nn.utils.clip_grad_norm_(params, 0.5); opt.step(); opt.zero_grad()",
        True,
    ),
    "a group more": (
        "opt.add_param_group({'params': [nn.Parameter(torch.zeros(3))], 'lr': 0.01, 'initial_lr': 0.01})",
        True,
    ),
    "norm of the weights": ("print('norm', sum(p.detach().double().norm() for p in params).item())", True),
}
BEGIN = """
def loss(o, y):
    {flat}
    return {loss}

params = [*net.parameters()]
average = [p.detach().clone() for p in params]
last = [m for m in net.modules() if isinstance(m, nn.Linear)][-1]
held, kept, it = [], None, 0
engine = ENGINE(net, loss, opt, {clip})
"""
STEP = """
x, y = X[{start}:{end}], Y[{start}:{end}]
{edit}
print('loss', float(engine.run((x, y), mode='train')['loss']))
{after}
"""
END = """
print("weights", [p.detach().double().norm().item() for p in params])
print("buffers", [b.double().sum().item() for b in net.buffers()])
states = [v for s in opt.state_dict()["state"].values() for k, v in s.items() if torch.is_tensor(v) and k != "master_weight"]
print("states", len(states), sum(v.double().abs().sum().item() for v in states))
print("average", sum(p.double().sum().item() for p in average))
"""
