"""Statements that call a module: its making goes to the setup, its parameters are cut at random."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fuzz.draw import Draw

LARGEST = 1_000_000  # parameters: a bilinear layer of a flattened tensor would take a minute

# By the dims of the input: (how it is made, how it is called). {c}: the last size or, for images, the channels; {o}: a new size.
VECTORS = (
    ("nn.Linear({c}, {o})", "{m}({x})"),
    ("nn.Linear({c}, {o}, bias=False)", "{m}({x})"),
    ("nn.LayerNorm({c})", "{m}({x})"),
    ("nn.RMSNorm({c}, eps=0.1)", "{m}({x})"),
    ("nn.PReLU()", "{m}({x})"),
    ("nn.Dropout(0.3)", "{m}({x})"),
    ("nn.Bilinear({c}, {c}, {o})", "{m}({x}, {x})"),
    ("nn.Sequential(nn.Linear({c}, {o}), nn.Tanh(), nn.Linear({o}, {c}))", "{m}({x}) + {x}"),
    ("nn.Embedding(5, {o})", "{m}(({x} * 3).long() % 5)"),
    ("nn.Embedding(7, {o}, padding_idx=2)", "{m}(({x} * 3).long() % 7)"),
)
MATRICES = (
    ("nn.BatchNorm1d({c})", "{m}({x})"),
    ("nn.BatchNorm1d({c}, affine=False, momentum=None)", "{m}({x})"),
    ("nn.GroupNorm(1, {c})", "{m}({x})"),
    ("nn.EmbeddingBag(5, {o})", "{m}(({x} * 3).long() % 5)"),
    ("nn.RNN({c}, {o})", "{m}({x})[0]"),
    ("nn.utils.parametrizations.weight_norm(nn.Linear({c}, {o}))", "{m}({x})"),
)
SEQUENCES = (
    ("nn.Conv1d({b}, {o}, 3, padding=1)", "{m}({x})"),
    ("nn.Conv1d({b}, {b}, 2, groups={b}, padding='same')", "{m}({x})"),
    ("nn.Conv1d({b}, {o}, 2, stride=2, bias=False)", "{m}({x})"),
    ("nn.ConvTranspose1d({b}, {o}, 2, stride=2)", "{m}({x})"),
    ("nn.BatchNorm1d({b})", "{m}({x})"),
    ("nn.InstanceNorm1d({b}, affine=True)", "{m}({x})"),
    ("nn.GroupNorm(1, {b})", "{m}({x})"),
    ("nn.LSTM({c}, {o}, batch_first=True)", "{m}({x})[0]"),
    ("nn.GRU({c}, {o})", "{m}({x})[0]"),
    ("nn.GRU({c}, {o}, batch_first=True, bidirectional=True)", "{m}({x})[0]"),
    ("nn.MultiheadAttention({c}, 1, batch_first=True)", "{m}({x}, {x}, {x})[0]"),
    ("nn.MultiheadAttention({c}, 1, dropout=0.2)", "{m}({x}, {x}, {x}, need_weights=False)[0]"),
    ("nn.TransformerEncoderLayer({c}, 1, {o}, dropout=0.0, batch_first=True)", "{m}({x})"),
    ("nn.TransformerEncoderLayer({c}, 1, {o}, dropout=0.1, norm_first=True)", "{m}({x})"),
    ("nn.Identity()", "F.scaled_dot_product_attention({x}, {x}, {m}({x}), is_causal=True)"),
    ("nn.Linear({c}, {c})", "F.scaled_dot_product_attention({m}({x}), {x}, {x})"),
)
IMAGES = (
    ("nn.Conv2d({b}, {o}, 3, padding=1)", "{m}({x})"),
    ("nn.Conv2d({b}, {o}, 2, stride=2, padding_mode='replicate', padding=1)", "{m}({x})"),
    ("nn.Conv2d({b}, {b}, 1, groups={b})", "{m}({x})"),
    ("nn.ConvTranspose2d({b}, {o}, 2)", "{m}({x})"),
    ("nn.BatchNorm2d({b})", "{m}({x})"),
    ("nn.InstanceNorm2d({b})", "{m}({x})"),
    ("nn.GroupNorm({b}, {b})", "{m}({x})"),
    ("nn.Dropout2d(0.3)", "{m}({x})"),
    ("nn.AdaptiveAvgPool2d(1)", "{m}({x})"),
)


def layer(d: Draw) -> None:
    """A module on some tensor."""
    for _ in range(4):
        x = d.pick(1, 2, 3, 4)
        if x is None:
            return
        shape = d.shape(x)
        if 0 in shape:
            continue
        more = {2: MATRICES, 3: SEQUENCES, 4: IMAGES}.get(len(shape), ())
        maker, call = d.r.choice((*VECTORS[: 10 if len(shape) < 4 else 6], *more, *more))
        name, sizes = d.new("m"), {"c": shape[-1], "b": shape[min(1, len(shape) - 1)], "o": d.r.randint(1, 6)}
        if not d.prepare(f"model[{name!r}] = {maker.format(**sizes)}"):
            continue
        large = sum(p.numel() for p in d.space["model"][name].parameters()) > LARGEST
        if large or d.make(call.format(m=f"model[{name!r}]", x=x)) is None:
            d.setup.pop()
            del d.space["model"][name]
            continue
        _cut(d, name)
        return


def _cut(d: Draw, name: str) -> None:
    """Lay the module's parameters out, freeze or tie some."""
    module = d.space["model"][name]
    for key, parameter in module.named_parameters():
        if d.r.random() < 0.6:
            d.cuts.append(f'cuts["{name}.{key}"] = [{d.placements(parameter.dim(), pending=False)}]')
    own = [key for key, _ in module.named_parameters(recurse=False)]
    if own and d.r.random() < 0.1:
        d.prepare(f"model[{name!r}].{d.r.choice(own)}.requires_grad_(False)")
    if "weight" in own and "parametriz" not in repr(module) and d.r.random() < 0.2:
        own_weight = [
            (other, m) for other, m in d.space["model"].items() if "weight" in dict(m.named_parameters(recurse=False))
        ]
        alike = [
            n for n, m in own_weight if n != name and type(m) is type(module) and m.weight.shape == module.weight.shape
        ]
        if alike:
            d.prepare(f"model[{name!r}].weight = model[{d.r.choice(alike)!r}].weight")
            d.cuts = [line for line in d.cuts if not line.startswith(f'cuts["{name}.weight"]')]
