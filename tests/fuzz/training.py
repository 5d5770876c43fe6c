"""Statements that train: parameters of one's own, backward, clipping, optimizers, schedules, states."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fuzz.draw import Draw

OPTIMIZERS = (
    ("SGD", "lr=0.05"),
    ("SGD", "lr=0.05, momentum=0.9, weight_decay=0.01"),
    ("SGD", "lr=0.05, momentum=0.8, nesterov=True"),
    ("Adam", "lr=0.01"),
    ("Adam", "lr=0.01, amsgrad=True, eps=1e-4"),
    ("AdamW", "lr=0.01"),
    ("AdamW", "lr=0.01, weight_decay=0.1, betas=(0.8, 0.9), maximize=True"),
    ("Adagrad", "lr=0.05, eps=1e-4"),
    ("RMSprop", "lr=0.01, eps=1e-4"),
    ("RMSprop", "lr=0.01, momentum=0.5, centered=True, eps=1e-3"),
    ("Adadelta", "lr=1.0, eps=1e-4"),
    ("Adamax", "lr=0.01, eps=1e-4"),
    ("NAdam", "lr=0.01, eps=1e-4"),
    ("RAdam", "lr=0.01, eps=1e-4"),
    ("ASGD", "lr=0.05"),
)
FUSED = ("SGD", "Adam", "AdamW", "Adagrad")
CLIPS = (
    "torch.nn.utils.clip_grad_norm_(params, 0.3)",
    "torch.nn.utils.clip_grad_norm_(params, 0.3, norm_type=1.0, foreach=False)",
    "torch.nn.utils.clip_grad_norm_(params, 0.3, norm_type=float('inf'))",
    "torch.nn.utils.clip_grad_norm_(params, 0.3, foreach=True)",
    "torch.nn.utils.clip_grad_value_(params, 0.05)",
    "torch.nn.utils.clip_grad_value_(params, 0.05, foreach=False)",
    "norm = torch.nn.utils.clip_grad_norm_(params, 0.5)",
)
SCHEDULES = (
    "StepLR(opt, 1, 0.5)", "CosineAnnealingLR(opt, 4)", "OneCycleLR(opt, 0.1, total_steps=6)",
    "LambdaLR(opt, lambda n: 1 / (n + 1))", "ExponentialLR(opt, 0.8)", "LinearLR(opt, 0.5, total_iters=3)",
)  # fmt: skip


def parameter(d: Draw) -> None:
    """A parameter that belongs to no module."""
    shape = [d.r.randint(1, 6) for _ in range(d.r.randint(1, 2))]
    name = d.new("w")
    value = f"put(normal({d.seed()}, {', '.join(map(str, shape))}), {d.placements(len(shape), pending=False)})"
    if d.prepare(f"{name} = nn.Parameter({value})"):
        d.floats.append(name)


def train(d: Draw, names: list[str]) -> None:
    """Backward from the losses, then a step of an optimizer."""
    r = d.r
    own = [name for name in d.floats if name.startswith("w")]
    d.cuts.append("lay(model, cuts)") if r.random() < 0.88 else d.cuts.clear()
    params = "".join(f", {name}" for name in own)
    d.cuts.append(f"params = [*model.parameters(){params}]")
    kind, options = r.choice(OPTIMIZERS)
    forms = ["", "", ", foreach=True", ", foreach=False", *([", fused=True"] if kind in FUSED else [])]
    made = f"torch.optim.{kind}(params, {options}{r.choice(forms)})"
    d.cuts.append(f"opt = ready({made})" if r.random() < 0.6 else f"opt = {made}")
    schedule = r.random() < 0.3
    if schedule:
        d.cuts.append(f"sched = torch.optim.lr_scheduler.{r.choice(SCHEDULES)}")
    if not names:
        names = ["(" + " + ".join(f"{name}.sum()" for name in (own or d.floats[:1])) + ")"]
    accumulate = r.choice((1, 1, 1, 2))
    total = " + ".join(names)
    if len(names) > 1 and r.random() < 0.3:
        d.body += [f"({names[0]}).backward(retain_graph=True)", f"{names[1]}.backward()"]
    else:
        d.body += [f"loss = ({total}) / {accumulate}", "loss.backward()"]
    _finish(d, accumulate, schedule)


def _finish(d: Draw, accumulate: int, schedule: bool) -> None:
    r = d.r
    if r.random() < 0.1:
        d.body.append("for p in params: p.grad = None if p.grad is None else p.grad * 0.5")
    if r.random() < 0.4:
        d.body.append(r.choice(CLIPS))
    now = "" if accumulate == 1 else "if step % 2: "
    d.body.append(f"{now}opt.step()")
    if schedule:
        d.body.append("sched.step()")
    if r.random() < 0.85:
        d.body.append(f"{now}opt.zero_grad({r.choice(('', 'set_to_none=False'))})")
    if r.random() < 0.12:
        d.body.append("opt.load_state_dict(copy.deepcopy(opt.state_dict()))")
    if r.random() < 0.08:
        d.body.append("model.load_state_dict(copy.deepcopy(model.state_dict()))")
    if r.random() < 0.08:
        d.body.append("model.eval() if step else model.train()")
