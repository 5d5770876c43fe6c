"""Statements that make a loss of a tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fuzz.draw import Draw

# {x}: the prediction; {t}: a target of its shape; {i}: class numbers of its shape without the class dim; {n}: classes.
ANY = (
    "F.mse_loss({x}, {t}{r})", "F.l1_loss({x}, {t}{r})", "F.smooth_l1_loss({x}, {t}{r}, beta=0.5)",
    "F.huber_loss({x}, {t}{r}, delta=0.7)", "F.binary_cross_entropy_with_logits({x}, {t}.sigmoid(){r})",
    "F.binary_cross_entropy({x}.sigmoid(), {t}.sigmoid(){r})", "F.soft_margin_loss({x}, {t}.sign(){r})",
    "F.poisson_nll_loss({x}.clamp(max=3.0), {t}.abs(){r})", "F.gaussian_nll_loss({x}, {t}, {x}.square() + 0.5{r})",
    "F.hinge_embedding_loss({x}, {t}.sign(){r})", "F.margin_ranking_loss({x}, {t}, {t}.sign(), margin=0.1{r})",
    "F.kl_div({x}.log_softmax(-1), {t}.softmax(-1), reduction='batchmean')",
    "F.kl_div({x}.log_softmax(-1), {t}.log_softmax(-1), log_target=True{r})",
    "F.binary_cross_entropy_with_logits({x}, {t}.sigmoid(), pos_weight=normal({s}, {x}.shape[-1]).abs(){r})",
    "F.mse_loss({x}, {t}, weight={t}.abs(){r})", "{x}.square().mean()", "({x} - {t}).abs().sum() / {x}.numel()",
    "{x}.logsumexp(0)",
)  # fmt: skip
CLASSES = (
    "F.cross_entropy({x}, {i}{r})", "F.cross_entropy({x}, {i}, ignore_index=1{r})",
    "F.cross_entropy({x}, {i}, weight=normal({s}, {n}).abs() + 0.1{r})",
    "F.cross_entropy({x}, {i}, label_smoothing=0.2{r})",
    "F.cross_entropy({x}, {i}, weight=normal({s}, {n}).abs() + 0.1, ignore_index=0, label_smoothing=0.1{r})",
    "F.cross_entropy({x}, {t}.softmax(1){r})", "F.nll_loss({x}.log_softmax(1), {i}{r})",
    "F.nll_loss({x}.log_softmax(1), {i}, weight=normal({s}, {n}).abs() + 0.1, ignore_index=2{r})",
)  # fmt: skip
ROWS = (
    "F.multi_margin_loss({x}, {i}{r})", "F.multilabel_soft_margin_loss({x}, {t}.gt(0).double(){r})",
    "F.multilabel_margin_loss({x}, {i}[:, None].expand({x}.shape){r})",
    "F.triplet_margin_loss({x}, {t}, {x}.flip(0) + 3.0{r})", "F.cosine_embedding_loss({x}, {t}, {t}[:, 0].sign(){r})",
    "F.cross_entropy({x} @ {x}.T, torch.arange({b}){r})",
)  # fmt: skip


def loss(d: Draw) -> str | None:
    """The name of a scalar that was made of some tensor; None if none came out."""
    for _ in range(12):
        x = d.pick()
        if x is None:
            return None
        shape = d.shape(x)
        table = ANY
        if len(shape) > 1 and d.r.random() < 0.6:
            table = (*CLASSES, *ROWS) if len(shape) == 2 else CLASSES
        if 0 in shape or not d.space[x].requires_grad:
            continue
        reduction = d.r.choice(("", "", "", ", reduction='sum'", ", reduction='none'"))
        text = d.r.choice(table)
        made = d.make(_filled(d, text, x, shape, reduction))
        if made and d.space[made].dim():
            weights = "" if d.r.random() < 0.5 else f" * put(normal({d.seed()}, {d.shape(made)[0]}), {d.placements(1)})"
            made = d.make(f"({made}{weights}).mean()") if d.space[made].dim() == 1 else d.make(f"{made}.mean()")
        if made and d.space[made].dim() == 0 and d.space[made].requires_grad:
            return made
    return None


def _filled(d: Draw, text: str, x: str, shape: list[int], reduction: str) -> str:
    sizes = "".join(f", {n}" for n in shape)
    target = f"normal({d.seed()} + step{sizes})"
    left = [shape[0], *shape[2:]] if len(shape) > 1 else []
    classes = shape[1] if len(shape) > 1 else 1
    labels = f"ints({d.seed()} + step, {classes}{''.join(f', {n}' for n in left)})"
    if d.r.random() < 0.75:
        target = f"put({target}, {d.placements(len(shape))})"
        labels = f"put({labels}, {d.placements(len(left), pending=False)})"
    batch = shape[0] if shape else 1
    return text.format(x=x, t=_once(d, text, "{t}", target), i=labels, r=reduction, n=classes, s=d.seed(), b=batch)


def _once(d: Draw, text: str, blank: str, value: str) -> str:
    """A variable for what a statement uses more than once."""
    if text.count(blank) < 2:
        return value
    name = d.new("t")
    return name if d.say(f"{name} = {value}") else value
