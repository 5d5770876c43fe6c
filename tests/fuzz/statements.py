"""Statements on tensors: data, operators, views, writes in place, reads of numbers, changes of layout."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fuzz.draw import Draw

WRITES = re.compile(r"_\(|\] = |\] \+= |out=| [+*-]= ")

# {d}, {e}: dims; {n}: the size of d; {i} < {n}; {k} in 1..{n}; {y}: a tensor that broadcasts; {c}: a small number; {s}: a seed.
OPERATORS = (
    "torch.relu({x})", "torch.tanh({x})", "torch.sigmoid({x})", "F.gelu({x})", "F.silu({x})", "F.softplus({x})",
    "F.elu({x})", "F.leaky_relu({x}, 0.1)", "F.hardtanh({x})", "{x}.clamp(-1.5, 1.5)", "{x}.abs()", "{x}.square()",
    "torch.exp({x}.clamp(max=3.0))", "torch.log1p({x}.abs())", "torch.sqrt({x}.abs() + 0.5)", "{x}.sin()", "-{x}",
    "{x}.softmax({d})", "{x}.log_softmax({d})", "{x}.cumsum({d})", "{x}.logcumsumexp({d})", "{x}.tanh().cumprod({d})",
    "{x}.cummax({d}).values", "{x}.flip({d})", "{x}.roll({i}, {d})", "{x}.roll({i})", "{x}.sort({d}).values",
    "{x}.sort({d}, descending=True).values", "{x}.topk({k}, {d}).values", "{x}.kthvalue({k}, {d}).values",
    "{x}.mean({d})", "{x}.sum({d})", "{x}.sum({d}, keepdim=True)", "{x}.mean()", "{x}.sum()", "{x}.amax({d})",
    "{x}.amin({d}, keepdim=True)", "{x}.max({d}).values", "{x}.min({d}).values", "{x}.max()", "{x}.min()",
    "{x}.var({d}, correction=0)", "({x}.var({d}, correction=0) + 0.1).sqrt()", "{x}.logsumexp({d})", "{x}.median({d}).values",
    "({x}.square().sum({d}) + 0.1).sqrt()", "({x} + 3.0).norm(dim={d})", "({x} + 3.0).norm()", "{x}.tanh().prod({d})",
    "F.normalize({x}, dim={d}, eps=0.1)", "F.layer_norm({x}, {x}.shape[-1:])", "F.rms_norm({x}, {x}.shape[-1:], eps=0.1)",
    "{x}.tril({c})", "{x}.triu({c})", "torch.where({x} > 0, {x}, 0.1 * {x})", "torch.where({x} > {y}, {x}, {y})",
    "{x} + {y}", "{x} * {y}", "{x} - {y}", "{x} / ({y}.abs() + 1.0)", "torch.maximum({x}, {y})", "torch.minimum({x}, {y})",
    "torch.lerp({x}, {y}, 0.3)", "torch.addcmul({x}, {y}, {y}, value=0.2)", "torch.atan2({x}, {y}.abs() + 1.0)",
    "torch.hypot({x}, {y} + 5.0)", "{x} * {c} + 1.0", "2.0 / ({x}.square() + 1.0)", "{x}.masked_fill({x} > 0.4637, {c})",
    "torch.cat([{x}, {x} * 2], {d})", "torch.cat([{x}, {x}.flip({d})], {d})", "torch.stack([{x}, {y}.expand_as({x})], {d})",
    "F.pad({x}, (1, 2))", "F.pad({x}, (1, 0), value=0.5)", "F.pad({x}, (0, -1))", "F.glu(torch.cat([{x}, {x}], {d}), {d})",
    "{x}.index_select({d}, ints({s}, {n}, 4))", "{x}.gather({d}, {x}.argsort({d}))",
    "{x}.gather({d}, ints({s}, {n}, *{x}.shape))", "torch.zeros_like({x}).scatter_add({d}, ints({s}, {n}, *{x}.shape), {x})",
    "{x}.scatter({d}, {x}.argmax({d}, keepdim=True), 0.3)", "{x}.index_add({d}, ints({s}, {n}, {n}), {x})",
    "{x}.take_along_dim({x}.argmin({d}, keepdim=True), {d})", "{x}[{x} > 0.2171]", "{x}.masked_select({x} < 0.4191)",
    "{x}.repeat_interleave(2, {d})", "{x}.tile(2)", "torch.outer({x}.flatten()[:5], {x}.flatten()[-4:])",
    "{x} @ {x}.transpose(-1, -2)", "torch.einsum('...i,...j->...ij', {x}, {x})", "{x} @ normal({s}, {x}.shape[-1], 3)",
    "normal({s}, 4, {x}.shape[0]) @ {x}.flatten(1)", "torch.tensordot({x}, {x}, ([{d}], [{d}]))",
    "torch.bmm({x}.flatten(1)[:, None], {x}.flatten(1)[:, :, None])", "torch.cdist({x}, {x}.flip(-1) + 3.0)",
    "F.cosine_similarity({x}, {y}.expand_as({x}), {d}, eps=0.1)", "F.one_hot({x}.argmax({d}), {n}) * 1.0",
    "F.dropout({x}, 0.3)", "F.dropout({x}, 0.5, training=False)", "F.dropout1d({x}, 0.4)", "F.alpha_dropout({x}, 0.2)",
    "F.avg_pool1d({x}, 2)", "F.max_pool1d({x}, 2, ceil_mode=True)", "F.adaptive_avg_pool1d({x}, 2)",
    "F.avg_pool2d({x}, 2, 1)", "F.max_pool2d({x}, 2, 1, 1)", "F.interpolate({x}, scale_factor=2)",
    "torch.trapezoid({x}, dim={d})", "{x}.diff(dim={d})", "{x}.unique().sum() * {x}", "torch.histc({x}.detach(), 4, -2, 2)",
    "{x}.argmax({d}) * 0.1", "({x} > 0).sum({d}) * 0.1", "({x} > 0).any({d}) * 1.0", "{x}.round() + {x}",
    "{x}.nan_to_num().to(torch.float64)", "{x}.float().double()", "{x}.clone()", "{x}.detach()", "{x}.contiguous()",
    "torch.utils.checkpoint.checkpoint(lambda t: (t.tanh() * 2).sum({d}), {x}, use_reentrant=False)",
)  # fmt: skip
VIEWS = (
    "{x}[{i}]", "{x}[..., {k}:]", "{x}[{i}:]", "{x}[::2]", "{x}.narrow({d}, {i}, {n} - {i})", "{x}.select({d}, {i})",
    "{x}.transpose({d}, {e})", "{x}.movedim({d}, {e})", "{x}.flatten()", "{x}.flatten(1)", "{x}.unsqueeze({d})",
    "{x}.squeeze()", "{x}.view(-1)", "{x}.reshape(-1, {n})", "{x}.reshape({n}, -1)", "{x}.reshape(2, -1)",
    "{x}.chunk({k}, {d})[0]", "{x}.chunk(3, {d})[-1]", "{x}.split({k}, {d})[-1]", "{x}.unbind({d})[{i}]", "{x}.T",
    "{x}.expand(2, *{x}.shape)", "{x}.unfold({d}, {k}, 1)", "{x}.diagonal()", "{x}[None, ..., -1]", "{x}.unflatten({d}, (1, -1))",
    "{x}.as_strided(({n},), (1,))", "{x}.mT", "{x}.swapaxes({d}, -1)", "{x}.view_as({x})", "{x}[:, None]",
)  # fmt: skip
IN_PLACE = (
    "{x}.add_(0.5)", "{x}.mul_(0.7)", "{x}.add_({y}, alpha=0.3)", "{x}.sub_({y})", "{x}.copy_({y})", "{x}.tanh_()",
    "{x}.relu_()", "{x}.clamp_(-1, 1)", "{x}.zero_()", "{x}.fill_(0.4)", "{x}[{i}] = 0.3", "{x}[{i}:] += 0.2",
    "{x}[..., {k}:] = 0.1", "{x}.masked_fill_({x} > 0.4637, 0.2)", "{x}.lerp_({y}, 0.4)",
    "{x}.index_fill_({d}, ints({s}, {n}, 2), 0.1)",
    "{x}.index_add_({d}, ints({s}, {n}, {n}), {x}.detach().clone())", "{x}[{x} < -0.0113] = 0.2", "{x}.neg_()", "{x} += {y}",
    "{x} *= 0.9", "{x}.select({d}, {i}).mul_(0.5)", "{x}.transpose({d}, {e}).add_(0.1)",
    "{x}.detach().add_(0.1)", "{x}.scatter_({d}, ints({s}, {n}, *{x}.shape), 0.2)", "{x}.addcmul_({y}, {y}, value=0.1)",
    "{x}.flatten()[{i}::2].zero_()", "torch.mul({x}, 0.5, out={x})", "torch._foreach_mul_([{x}], 0.6)", "{x}.cumsum_({d})",
    "{x}.normal_().clamp_(-2, 2)", "{x}.diagonal().fill_(0.2)", "{x}.narrow({d}, {i}, 1).copy_({x}.narrow({d}, 0, 1).clone())",
)  # fmt: skip
NUMBERS = (
    "{x} * torch.tanh({x}.sum()).item()", "{x} if {x}.sum() > 0.0513 else -{x}", "{x} * float({x}.max() > 0.4637)",
    "{x}[: max(1, int(({x}.flatten() > 0).sum().item()) % {n})]", "{x} + {x}.detach().mean().tolist()",
    "{x} * len({x}.nonzero())",
)  # fmt: skip


def data(d: Draw) -> None:
    """A batch, which differs from step to step."""
    r = d.r
    batch = r.choice((1, 2, 3, 4, 5, 6, 7))
    shape = [batch, *(r.randint(1, 6) for _ in range(r.choice((0, 1, 1, 1, 2, 2, 2, 3))))]
    name, sizes = d.new("x"), ", ".join(map(str, shape))
    line = f"{name} = put(normal({d.seed()} + step, {sizes}), {d.placements(len(shape))})"
    if r.random() < 0.12:
        line = f"{name} = normal({d.seed()} + step, {sizes})"
    elif r.random() < 0.2:
        line += ".requires_grad_()"
    if d.say(line):
        d.floats.append(name)


def fill(d: Draw, text: str, x: str) -> str | None:
    """A statement with its blanks filled for a tensor; None if none broadcasts."""
    shape = d.shape(x)
    if not shape and any(blank in text for blank in ("{d}", "{e}", "{n}", "{i}", "{k}")):
        return None
    dim = d.r.randrange(len(shape)) if shape else 0
    n = max(shape[dim], 1) if shape else 1
    y = d.like(x) if "{y}" in text else ""
    if y is None:
        return None
    first = shape[0] if shape else 1
    i = d.r.randrange(max(1, min(n, first)))
    return text.format(
        x=x, y=y, d=d.r.choice((dim, dim - len(shape))), e=d.r.randrange(max(len(shape), 1)), n=n, i=i,
        k=d.r.randint(1, n), c=d.r.choice((-1, 0, 1, 2)), s=d.seed(),
    )  # fmt: skip


def step(d: Draw) -> None:
    """An operator, a view, a number read, or another layout."""
    for _ in range(6):
        x = d.pick()
        if x is None:
            return
        chance = d.r.random()
        if chance < 0.12:
            made = d.make(f"move({x}, {d.placements(len(d.shape(x)))})")
        else:
            table = OPERATORS if chance < 0.68 else VIEWS if chance < 0.94 else NUMBERS
            text = fill(d, d.r.choice(table), x)
            made = d.make(text) if text else None
        if made:
            return


def write(d: Draw) -> None:
    """A write in place, now and then without autograd."""
    for _ in range(6):
        x = d.pick()
        text = fill(d, d.r.choice(IN_PLACE), x) if x else None
        if text and d.say(f"with torch.no_grad(): {text}" if d.r.random() < 0.25 else text):
            return
