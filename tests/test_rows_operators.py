"""Operators of all kinds on rows that were chosen of a dim that is cut, forward and backward, beside one card."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import onecard as oc
from onecard.testing import run_ranks

DRAWN = ("dropout", "rand_like", "bernoulli", "randn_like", "normal_", "uniform", "multinomial", "gumbel")
"""Those that draw: beside a mesh of one rank, which draws the same numbers."""
OPERATORS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "dropout": lambda x, y: F.dropout(x, 0.5),
    "rand_like": lambda x, y: torch.rand_like(x) + x,
    "bernoulli": lambda x, y: torch.bernoulli(x.sigmoid()) + x,
    "randn_like": lambda x, y: x + torch.randn_like(x),
    "normal_": lambda x, y: x.clone().normal_(),
    "uniform": lambda x, y: torch.empty_like(x).uniform_() + x * 0,
    "multinomial": lambda x, y: torch.multinomial(x.softmax(1), 1),
    "gumbel": lambda x, y: F.gumbel_softmax(x),
    "keepdim": lambda x, y: x - x.sum(0, keepdim=True),
    "argmax0": lambda x, y: x.argmax(0),
    "argmax1": lambda x, y: x.argmax(1),
    "argmax": lambda x, y: x.argmax(),
    "topk0": lambda x, y: x.topk(2, 0).values,
    "max0": lambda x, y: x.max(0).values,
    "max0i": lambda x, y: x.max(0).indices,
    "prod": lambda x, y: x.prod(0),
    "any": lambda x, y: (x > 0).any(0),
    "all": lambda x, y: (x > -9).all(),
    "eq": lambda x, y: (x == y).float(),
    "count_nonzero": lambda x, y: torch.count_nonzero(x > 0, 0),
    "nonzero": lambda x, y: (x > 0).nonzero(),
    "unique": lambda x, y: (x > 0).int().unique(),
    "cat0": lambda x, y: torch.cat([x, y], 0),
    "cat1": lambda x, y: torch.cat([x, y], 1),
    "stack": lambda x, y: torch.stack([x, y]),
    "stack1": lambda x, y: torch.stack([x, y], 1),
    "where": lambda x, y: torch.where(x > y, x, y),
    "expand": lambda x, y: x[:, None].expand(-1, 3, -1) * 1,
    "expand0": lambda x, y: x[None].expand(3, -1, -1) * 1,
    "repeat": lambda x, y: x.repeat(2, 1),
    "repeat_i": lambda x, y: x.repeat_interleave(2, 0),
    "flip": lambda x, y: x.flip(0),
    "roll": lambda x, y: x.roll(1, 0),
    "triu": lambda x, y: x.triu(),
    "diag": lambda x, y: x[:3, :3].diagonal() * 1,
    "xty": lambda x, y: x.t() @ y,
    "xyt": lambda x, y: x @ y.t(),
    "outer": lambda x, y: torch.outer(x[:, 0], y[:, 1]),
    "cdist": lambda x, y: torch.cdist(x, y),
    "einsum": lambda x, y: torch.einsum("nk,nk->k", x, y),
    "einsum2": lambda x, y: torch.einsum("nk,mk->nm", x, y),
    "dot": lambda x, y: x[:, 0] @ y[:, 0],
    "softmax0": lambda x, y: x.softmax(0),
    "lse0": lambda x, y: x.logsumexp(0),
    "addmm": lambda x, y: torch.addmm(y[:, :4], x, torch.ones(4, 4, dtype=x.dtype), beta=2, alpha=3),
    "baddbmm": lambda x, y: torch.bmm(x[None], y.t()[None]),
    "addmm_t": lambda x, y: torch.addmm(torch.ones(4, 4, dtype=x.dtype), x.t(), y, beta=2, alpha=3),
    "inplace add": lambda x, y: x.clone().add_(1).clamp_(-1, 1),
    "inplace self": lambda x, y: (x.add_(1), x * 2)[1],
    "masked_fill": lambda x, y: x.masked_fill(y > 0, 0.0),
    "copy_": lambda x, y: torch.zeros_like(x).copy_(y),
    "setitem": lambda x, y: _set(x.clone(), y),
    "setrow": lambda x, y: _setrow(x.clone()),
    "index_add": lambda x, y: torch.zeros(5, 4, dtype=x.dtype).index_add(0, torch.arange(len(x)) % 5, x),
    "scatter_add": lambda x, y: torch.zeros(5, 4, dtype=x.dtype).scatter_add(
        0, (torch.arange(len(x)) % 5)[:, None].expand(-1, 4), x
    ),
    "twice": lambda x, y: x[torch.tensor([1, 0, 1])],
    "col": lambda x, y: x[:, 0],
    "slice": lambda x, y: x[1:3],
    "neg": lambda x, y: x[-1],
    "bool": lambda x, y: x[y[:, 0] > 0],
    "to": lambda x, y: x.to(torch.float32).double(),
    "contig": lambda x, y: x.contiguous(),
    "view": lambda x, y: x.reshape(-1),
    "view2": lambda x, y: x.view(len(x), 2, 2).sum(1),
    "unsq": lambda x, y: x.unsqueeze(0),
    "T": lambda x, y: x.transpose(0, 1) * 1,
    "T contig": lambda x, y: x.t().contiguous(),
    "iter": lambda x, y: sum(row * (i + 1) for i, row in enumerate(x)),
    "tolist": lambda x, y: torch.tensor(x.tolist(), dtype=x.dtype),
    "numpy": lambda x, y: torch.from_numpy(x.detach().numpy().copy()),
    "item": lambda x, y: torch.tensor(float(x[0, 0])),
    "cumsum1": lambda x, y: x.cumsum(1),
    "sort1": lambda x, y: x.sort(1).values,
    "sort0": lambda x, y: x.sort(0).indices,
    "norm_": lambda x, y: F.normalize(x, dim=0),
    "norm1": lambda x, y: F.normalize(x, dim=1),
    "cos": lambda x, y: F.cosine_similarity(x, y, dim=1),
    "cos0": lambda x, y: F.cosine_similarity(x, y, dim=0),
    "pad": lambda x, y: F.pad(x, (0, 0, 1, 0)),
    "unfold": lambda x, y: x.unfold(0, 2, 1),
    "bucket": lambda x, y: torch.bucketize(x, torch.tensor([0.0, 1.0], dtype=x.dtype)),
    "histc": lambda x, y: torch.histc(x, 4, -2, 2),
    "median": lambda x, y: x.median(0).values,
    "quantile": lambda x, y: x.quantile(0.5),
    "std0": lambda x, y: x.std(0, correction=0),
    "varmean": lambda x, y: torch.var_mean(x)[0],
    "trace": lambda x, y: x[:4].trace() if len(x) > 3 else x.sum(),
    "svd": lambda x, y: torch.linalg.svdvals(x),
    "gather": lambda x, y: x.gather(1, torch.zeros(len(x), 1, dtype=torch.long)),
    "take": lambda x, y: x.take(torch.tensor([0, 3])),
    "linear": lambda x, y: F.linear(x, torch.ones(3, 4, dtype=x.dtype), torch.ones(3, dtype=x.dtype)),
    "bilinear": lambda x, y: F.bilinear(x, y, torch.ones(2, 4, 4, dtype=x.dtype)),
    "embbag": lambda x, y: F.embedding(torch.arange(len(x)) % 2, x),
    "plain+": lambda x, y: x + torch.arange(float(len(x)), dtype=x.dtype)[:, None],
    "scalar*": lambda x, y: x * 2 + 1,
    "lerp": lambda x, y: x.lerp(y, 0.3),
    "addcmul": lambda x, y: torch.addcmul(x, x, y, value=0.1),
    "lstm-ish": lambda x, y: torch.tanh(x) * torch.sigmoid(y),
    "conv": lambda x, y: F.conv1d(x[None], torch.ones(2, len(x), 2, dtype=x.dtype)),
    "conv_t": lambda x, y: F.conv1d(x[:, None], torch.ones(2, 1, 2, dtype=x.dtype)),
    "attn": lambda x, y: F.scaled_dot_product_attention(x[None], y[None], y[None]),
    "ln w": lambda x, y: F.layer_norm(x, (4,), torch.ones(4, dtype=x.dtype)),
    "rms": lambda x, y: F.rms_norm(x, (4,)),
    "bn": lambda x, y: F.batch_norm(x, torch.zeros(4, dtype=x.dtype), torch.ones(4, dtype=x.dtype), training=True),
    "ce": lambda x, y: F.cross_entropy(x, y.argmax(1).detach()),
    "nll none": lambda x, y: F.nll_loss(x.log_softmax(1), y.argmax(1), reduction="none"),
    "triplet": lambda x, y: F.triplet_margin_loss(x, y, x.flip(0)),
    "ctc": lambda x, y: x.sum(),
    "sum scalar": lambda x, y: x.sum() + y.mean(),
    "sub plain const": lambda x, y: (x.sum(0) + 5) * 2,
}


def _set(x: Tensor, y: Tensor) -> Tensor:
    x[1:3] = y[1:3]
    return x


def _setrow(x: Tensor) -> Tensor:
    x[0] = 7.0
    x[torch.tensor([1])] = 3.0
    return x


def _whole(t: Tensor | None) -> Tensor:
    if t is None:
        return torch.zeros(())
    if isinstance(t, oc.DistTensor):
        t = t.to_local() if t.mesh.size == 1 else oc.unshard(t)
    return t.detach().double()


def _tried(name: str, rows: list[int], mesh: oc.ProcessMesh | None) -> list[Tensor] | str:
    """The value and both gradients, or the kind of error that there is on one card, too."""
    torch.manual_seed(0)
    oc.manual_seed(5)
    x, y = torch.randn(7, 4, dtype=torch.float64), torch.randn(7, 4, dtype=torch.float64)
    if mesh is not None:
        x, y = (oc.shard_tensor(t, mesh, [oc.Shard(0)]) for t in (x, y))
    given = [x.requires_grad_(), y.requires_grad_()]
    try:
        value = OPERATORS[name](x[torch.tensor(rows)], y.index_select(0, torch.tensor(rows)))
    except (RuntimeError, IndexError, ValueError):
        return "refused"
    grads: tuple[Any, ...] = ()
    if value.is_floating_point() and value.requires_grad:
        weights = torch.arange(1.0, value.numel() + 1, dtype=value.dtype).view(value.shape) / value.numel()
        grads = torch.autograd.grad((value * weights).sum(), given, allow_unused=True)
    return [_whole(t) for t in (value, *grads)]


def _like(a: list[Tensor] | str, b: list[Tensor] | str) -> bool:
    if isinstance(a, str) or isinstance(b, str):
        return a == b
    pairs = zip(a, b, strict=True)  # no gradient may be zeros
    return all(
        torch.allclose(p, q, rtol=1e-8, atol=1e-10)
        if p.shape == q.shape
        else not p.any() and not q.any() and 0 in (p.dim(), q.dim())
        for p, q in pairs
    )


def wrong_operators() -> list[str]:
    warnings.simplefilter("ignore")
    mesh, alone = oc.ProcessMesh([0, 1], ["dp"]), oc.ProcessMesh([oc.get_rank()], ["one"])
    return [
        f"{name} of rows {rows}"
        for rows in ([0, 1, 2, 3, 4, 5, 6], [6, 0, 3, 3, 1])
        for name in OPERATORS
        if not _like(_tried(name, rows, alone if name in DRAWN else None), _tried(name, rows, mesh))
    ]


@pytest.mark.proof
def test_operators_on_chosen_rows_are_those_of_one_card():
    for wrong in run_ranks(wrong_operators, 2):
        assert wrong == []


WEIGHTS = (
    (oc.Shard(1), oc.Shard(0)),
    (oc.Shard(0), oc.Shard(1)),
    (oc.Shard(2), oc.Shard(0)),
    (oc.Shard(0), oc.Shard(0)),
)
TOKENS = ((oc.Shard(0), oc.Replicate()), (oc.Replicate(), oc.Shard(0)), (oc.Shard(0), oc.Shard(0)))


def columns_apart(lay: bool) -> list[list[float]]:
    """Each token by the weights that it chooses, of which an axis that divides tokens cuts a feature (as ZeRO 3 does)."""
    torch.manual_seed(0)
    w0, x0, index0 = (
        torch.randn(5, 12, 8, dtype=torch.float64),
        torch.randn(12, 8, dtype=torch.float64),
        torch.arange(12) % 5,
    )
    mesh, found = oc.ProcessMesh([[0, 1], [2, 3]], ["dp", "ep"]) if lay else None, []
    for weights in WEIGHTS:
        for tokens in TOKENS:
            w, x, index = w0.clone().requires_grad_(), x0, index0
            if mesh is not None:
                w = oc.shard_tensor(w0, mesh, weights, requires_grad=True)
                x, index = (oc.shard_tensor(t, mesh, tokens) for t in (x0, index0))
            y = torch.bmm(w[index], x[:, :, None]).squeeze(-1)
            one, other = y.chunk(2, -1)
            result = (one * other.tanh()).square().sum() + y.amax(-1).sum() + y.norm()
            result.backward()
            whole = [
                oc.unshard(t) if isinstance(t, oc.DistTensor) else t for t in (y.detach(), result.detach(), w.grad)
            ]
            found.append([float(t.sum()) for t in whole] + [float(whole[2].abs().sum()), *whole[0].shape])
    return found


def test_rows_whose_columns_are_cut_along_the_tokens_axis():
    wanted = torch.tensor(columns_apart(False))
    for found in run_ranks(columns_apart, 4, True):
        torch.testing.assert_close(torch.tensor(found), wanted, rtol=1e-5, atol=1e-6)
