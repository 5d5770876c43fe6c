"""Merged dims on real ranks: views that send nothing, every kind of operator on them, and the programs that make them."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import onecard as oc
from onecard import Partial, Replicate, Shard
from onecard.errors import LayoutError
from onecard.testing import assert_close, multirank

MESH = oc.ProcessMesh([0, 1], ["x"])


def normal(*size: int, seed: int = 1) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def sent(report: Any) -> int:
    return sum(m.step.bytes for m in report.messages)


def merged(whole: Tensor, grad: bool = False) -> Any:
    """Its first dim, of 12, as 3 by 4, the four cut."""
    made = oc.shard_tensor(whole.unflatten(0, (3, 4)), MESH, [Shard(1)]).flatten(0, 1)
    return made.requires_grad_() if grad else made


OTHER = normal(12, 5, seed=9)

# ---- views


def a_view(chance: random.Random, x: Tensor) -> tuple[str, Callable[[Tensor], Tensor]]:
    """A view or a reshape that fits the shape, for plain and distributed tensors alike."""
    kind = chance.choice(["permute", "flatten", "unflatten", "reshape", "unsqueeze", "transpose", "movedim"])
    rank = x.dim()
    if kind == "flatten" and rank > 1:
        start = chance.randrange(rank - 1)
        stop = chance.randrange(start + 1, rank)
        return f"flatten {start} {stop}", lambda t: t.flatten(start, stop)
    if kind == "unflatten":
        dim = chance.randrange(rank)
        size = x.shape[dim]
        outer = chance.choice([n for n in range(1, size + 1) if size % n == 0])
        return f"unflatten {dim} {outer}", lambda t: t.unflatten(dim, (outer, size // outer))
    if kind == "reshape":
        sizes = list(x.shape)
        chance.shuffle(sizes)
        return f"reshape {sizes}", lambda t: t.reshape(sizes)
    if kind == "unsqueeze" and rank < 5:
        return "unsqueeze", lambda t: t.unsqueeze(1).squeeze(1)
    order = chance.sample(range(rank), rank)
    return f"permute {order}", lambda t: t.permute(order)


@pytest.mark.proof
@multirank(4)
def test_chains_of_views_against_numpy() -> None:
    mesh = oc.ProcessMesh(np.arange(4).reshape(2, 2), ["x", "y"])
    chance, merges = random.Random(3), 0
    for number in range(60):
        shape = [chance.choice([2, 3, 4, 5, 6, 8]) for _ in range(chance.choice([2, 3]))]
        whole = torch.arange(float(np.prod(shape))).reshape(shape)
        places = [chance.choice([Replicate(), Partial(), *map(Shard, range(len(shape)))]) for _ in range(2)]
        x, words = oc.shard_tensor(whole, mesh, places), [f"{shape} {places}"]
        for _ in range(6):
            word, view = a_view(chance, whole)
            words.append(word)
            whole, x = torch.tensor(view(torch.from_numpy(whole.numpy())).numpy()), view(x)
            merges += x.layout.merged
            assert tuple(x.to_local().shape) == x.layout.local_shape(x.shape), words
            if number % 2 == 0:
                assert torch.equal(x.full_tensor(), whole), words
        assert torch.equal(x.full_tensor(), whole), words
        assert torch.equal(oc.reshard(x, mesh, places).full_tensor() if x.dim() == len(shape) else whole, whole), words
    assert merges > 40, merges


def heads_apart(x: Tensor) -> Tensor:
    """(batch, time, width) -> (batch * heads, time, width of a head)"""
    return x.unflatten(2, (2, 4)).transpose(1, 2).reshape(8, 8, 4)


def windows(x: Tensor) -> Tensor:
    """Windows of 2 by 2 of an image, as the batch."""
    return x.view(2, 2, 4, 2, 8).permute(0, 2, 1, 3, 4).reshape(-1, 4, 8)


CHAINS: dict[str, Callable[[Tensor], Tensor]] = {
    "flatten and back": lambda x: x.flatten(0, 1).unflatten(0, (4, 8)),
    "heads merged": lambda x: heads_apart(x).view(4, 2, 8, 4).transpose(1, 2).flatten(2),
    "channel shuffle": lambda x: x.reshape(4, 2, 4, 8).transpose(1, 2).flatten(1, 2).mul(2),
    "windows and back": lambda x: windows(x).view(2, 4, 2, 2, 8).permute(0, 2, 1, 3, 4).reshape(4, 8, 8),
    "patches": lambda x: windows(x).flatten(1),
    "all of it": lambda x: x.flatten().relu().view(4, 8, 8),
}


@pytest.mark.share(1)
@multirank(2)
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_names_are_not_messages(dim: int) -> None:
    whole = normal(4, 8, 8)
    for name, chain in CHAINS.items():
        leaf = whole.clone().requires_grad_()
        chain(leaf).square().sum().backward()
        x = oc.shard_tensor(whole, MESH, [Shard(dim)], requires_grad=True)
        with oc.explain() as report:
            y = chain(x)
            y.square().sum().backward()
        assert not sent(report), f"{name} cut along {dim}\n{report}"
        assert_close([y.full_tensor(), x.grad.full_tensor()], [chain(whole), leaf.grad])
        assert x.grad.layout is x.layout, name


# ---- operators


CLASSES, WEIGHTS = torch.arange(12) % 5, normal(2, 1, 3, seed=8)
OPERATORS: dict[str, Callable[[Tensor], Any]] = {
    "pointwise": lambda x: x.exp() + x * 2 - OTHER[:, :1].to(x.dtype),
    "reductions": lambda x: [x.sum(), x.sum(0), x.mean(), x.mean(1), x.amax(0), x.std(), x.var(0), x.norm(), x.prod(1)],
    "order": lambda x: [x.sort(0).values, x.argmax(0), x.max(0).indices, x.topk(3, 0).values, x.argsort(1)],
    "scans": lambda x: [x.cumsum(0), x.cumprod(1), x.logsumexp(0), x.flip(0), x.roll(1, 0), x.diff(dim=0)],
    "places": lambda x: [x[5], x[2:9], x[::3], x[:, 1], x.tril(), x.triu(1), x.diagonal(), x.T.tril()],
    "lookups": lambda x: [
        x[torch.tensor([3, 1, 11])], x.index_select(0, torch.tensor([0, 7])), x.take(torch.tensor([5, 40])),
        x.gather(0, torch.tensor([[1, 2, 3, 4, 5]])), F.embedding(torch.tensor([[2, 10], [11, 0]]), x),
    ],
    "apart": lambda x: [*x.split(5), *x.chunk(3), *x.unbind(0)[:2]],
    "together": lambda x: [torch.cat([x, x]), torch.stack([x, x], 1), x.repeat(2, 1), x.repeat_interleave(2, 0)],
    "products": lambda x: [
        x @ OTHER.T, OTHER.T @ x, x.T @ x, x @ x.T, torch.einsum("ij,kj->ik", x, x), F.linear(x, OTHER),
        torch.outer(x[:, 0], x[:, 1]), torch.bmm(x.unflatten(0, (6, 2)), x.unflatten(0, (6, 2)).mT),
    ],
    "layers": lambda x: [
        F.softmax(x, 0), F.softmax(x, 1), F.layer_norm(x, (5,)), F.batch_norm(x, None, None, training=True),
        F.conv1d(x[:, None], WEIGHTS), F.conv1d(x[None], WEIGHTS[:1].expand(12, 1, 3), groups=12), F.pad(x, (1, 1, 2, 0)),
        F.glu(x, 0), F.group_norm(x[None], 6), F.max_pool1d(x[None], 2),
    ],
    "losses": lambda x: [
        F.cross_entropy(x, CLASSES), F.cross_entropy(x, CLASSES, reduction="none", ignore_index=2),
        F.cross_entropy(x.T, torch.arange(5)), F.mse_loss(x, OTHER), F.nll_loss(x, CLASSES, reduction="sum"),
        F.huber_loss(x, x * 0), F.multi_margin_loss(x, CLASSES),
    ],
    "factories": lambda x: [torch.zeros_like(x), x.new_ones(12, 5), torch.full_like(x, 2), x.double(), x.expand(2, 12, 5)],
}  # fmt: skip


@pytest.mark.share(1)
@multirank(2)
@pytest.mark.parametrize("name", OPERATORS)
def test_operators_on_a_merged_dim(name: str) -> None:
    whole = normal(12, 5)
    leaf = whole.clone().requires_grad_()
    want, x = OPERATORS[name](leaf), merged(whole, grad=True)
    found = OPERATORS[name](x)
    want, found = (v if isinstance(v, list) else [v] for v in (want, found))
    for number, (got, expected) in enumerate(zip(found, want, strict=True)):
        assert_close([number, got.full_tensor()], [number, expected])
    wanted, made = (sum((v * v).sum() for v in values if v.requires_grad) for values in (want, found))
    if isinstance(wanted, Tensor):
        wanted.backward()
        made.backward()
        assert_close(x.grad.full_tensor(), leaf.grad)


def fill_zero(x: Tensor) -> Any:
    return x.view(3, 4, 5)[1].zero_()


WRITES: dict[str, Callable[[Tensor], Any]] = {
    "add_": lambda x: x.add_(2).mul_(OTHER),
    "copy_": lambda x: x.copy_(OTHER),
    "number at a place": lambda x: x.__setitem__(4, 7.0),
    "rows": lambda x: x.__setitem__(slice(2, 9), OTHER[:7]),
    "index": lambda x: x.index_fill_(0, torch.tensor([1, 10]), 3.0),
    "scatter": lambda x: x.scatter_(0, torch.tensor([[0, 3, 5, 11, 7]]), 9.0),
    "cumsum_": lambda x: x.cumsum_(0),
    "a view of it": lambda x: x.view(3, 4, 5)[:, 2].mul_(2),
    "a slice of it": lambda x: x[3:8].zero_(),
    "fill": fill_zero,
    "normal_": lambda x: x.normal_(),
    "tril_": lambda x: x.tril_(),
    "foreach": lambda x: torch._foreach_mul_([x, x[:, :2]], 2.0),
    "dropout": lambda x: x.copy_(F.dropout(x, 0.5)),
}


@pytest.mark.share(1)
@multirank(2)
@pytest.mark.parametrize("name", WRITES)
def test_writes_to_a_merged_dim(name: str) -> None:
    whole, x = normal(12, 5), merged(normal(12, 5))
    layout = x.layout
    torch.manual_seed(5)
    with oc.one_card_random():
        WRITES[name](whole)
    torch.manual_seed(5)
    WRITES[name](x)
    assert_close(x.full_tensor(), whole)
    assert x.layout is layout


@multirank(2)
def test_a_flattened_dim_is_a_view() -> None:
    whole = normal(3, 4, 5)
    x = oc.shard_tensor(whole, MESH, [Shard(1)])
    for t in (whole, x):
        flat = t.flatten(0, 1)
        flat.mul_(2)
        flat[5:9] += 1  # rows of several ranks: a copy that is written back
        t[:, 3] = 0
        flat.view(-1)[7] = 9.0
    assert_close(x.full_tensor(), whole)


@multirank(2)
def test_an_optimizer_of_a_merged_parameter() -> None:
    whole = normal(12, 5)
    for maker in (lambda p: torch.optim.AdamW(p, 0.1), lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, foreach=True)):
        plain, ours = nn.Parameter(whole.clone()), nn.Parameter(merged(whole))
        for parameter in (plain, ours):
            optimizer = maker([parameter])
            for _ in range(2):
                optimizer.zero_grad()
                (parameter @ normal(5, 3)).square().sum().backward()
                nn.utils.clip_grad_norm_([parameter], 1.0)
                optimizer.step()
        assert ours.layout.merged
        assert_close(ours.full_tensor(), plain)


@multirank(4)
def test_a_merged_tensor_on_other_meshes() -> None:
    whole = normal(12, 5)
    pair, other = oc.ProcessMesh([0, 1], ["x"]), oc.ProcessMesh([[2, 1], [3, 0]], ["a", "b"])
    x = oc.shard_tensor(whole.unflatten(0, (3, 4)), pair, [Shard(1)], requires_grad=True)
    for placements in ([Shard(0), Replicate()], [Shard(1), Shard(0)], [Replicate(), Replicate()]):
        y = oc.reshard(x.flatten(0, 1), other, placements)
        assert_close(y.full_tensor(), whole)
        x.grad = None
        (y * oc.shard_tensor(whole, other, [Replicate()] * 2)).sum().backward()
        assert_close(x.grad.full_tensor().flatten(0, 1), whole)
    assert_close(x.detach().flatten(0, 1).full_tensor(), whole)


@multirank(2)
def test_what_dtensor_cannot_say() -> None:
    x = merged(normal(12, 5))
    assert str(x.placements) == "(Shard(0, part 1 of [3, 4]),)"
    with pytest.raises(LayoutError, match=r"onecard.reshard\(x, x.mesh, \[Shard\(0\)\]\)"):
        x.to_dtensor()
    assert oc.reshard(x, x.mesh, [Shard(0)]).to_dtensor().full_tensor().shape == (12, 5)
    with pytest.raises(LayoutError, match="taken apart"):
        oc.reshard(x, MESH, x.placements)


# ---- programs


class Block(nn.Module):
    """A transformer block whose attention torch's users write with ``view`` and ``flatten``."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.norm1, self.norm2 = heads, nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, time, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        heads = F.scaled_dot_product_attention(q, k, v)
        x = x + self.out(heads.transpose(1, 2).reshape(batch, time, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Swin(nn.Module):
    """A block of a Swin transformer: attention in windows of the image, which is (batch, height, width, channels)."""

    def __init__(self, width: int, window: int) -> None:
        super().__init__()
        self.window, self.block = window, Block(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        n, h, w, c = x.shape
        s = self.window
        windows = x.view(n, h // s, s, w // s, s, c).permute(0, 1, 3, 2, 4, 5).reshape(-1, s * s, c)
        y = self.block(windows)
        return y.view(n, h // s, w // s, s, s, c).permute(0, 1, 3, 2, 4, 5).reshape(n, h, w, c)


class ViT(nn.Module):
    """Patches by view and permute, a block, the mean, a classifier."""

    def __init__(self, patch: int, width: int) -> None:
        super().__init__()
        self.patch, self.embed, self.block, self.head = (
            patch,
            nn.Linear(3 * patch * patch, width),
            Block(width, 2),
            nn.Linear(width, 5),
        )

    def forward(self, x: Tensor) -> Tensor:
        n, c, h, w = x.shape
        p = self.patch
        x = x.reshape(n, c, h // p, p, w // p, p).permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2)
        return self.head(self.block(self.embed(x)).mean(1))


def images() -> Iterator[tuple[nn.Module, Tensor, list[int]]]:
    torch.manual_seed(0)
    yield Swin(8, 2), normal(2, 8, 4, 8), [0, 1]
    yield ViT(4, 8), normal(2, 3, 8, 8), [0]


@multirank(2)
def test_windows_and_patches_send_only_gradients() -> None:
    for plain, x, dims in images():
        want = plain(x)
        want.square().mean().backward()
        for dim in dims:
            twin = oc.shard_layer(copy.deepcopy(plain).requires_grad_(), MESH)
            twin.zero_grad()
            with oc.explain() as report:
                found = twin(oc.shard_tensor(x, MESH, [Shard(dim)]))
                found.square().mean().backward()
            assert not sent(report), f"{type(plain).__name__} cut along {dim}\n{report}"
            assert_close(found.full_tensor(), want)
            for ours, theirs in zip(twin.parameters(), plain.parameters(), strict=True):
                assert_close(ours.grad.full_tensor(), theirs.grad)


@multirank(2)
def test_sequence_parallel_gpt_with_the_plain_loss() -> None:
    """Attention needs the keys of all times, and the mean its count: nothing else is sent."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Embedding(11, 8), Block(8, 2), nn.LayerNorm(8), nn.Linear(8, 11))
    tokens, y = torch.randint(11, (2, 4, 6), generator=torch.Generator().manual_seed(1))
    want = F.cross_entropy(plain(tokens).flatten(0, 1), y.flatten())
    want.backward()
    twin = oc.shard_layer(copy.deepcopy(plain), MESH)
    twin.zero_grad()
    x, t = (oc.shard_tensor(v, MESH, [Shard(1)]) for v in (tokens, y))
    logits = twin(x)
    with oc.explain() as report:
        loss = F.cross_entropy(logits.flatten(0, 1), t.flatten())
        (grad,) = torch.autograd.grad(loss, logits, retain_graph=True)
    assert [(m.operator, m.step.kind, m.step.bytes) for m in report.messages if m.step.bytes] == [
        ("div", "all_reduce", 4)
    ], str(report)
    assert grad.layout is logits.layout
    loss.backward()
    assert_close(loss.full_tensor(), want)
    for ours, theirs in zip(twin.parameters(), plain.parameters(), strict=True):
        assert_close(ours.grad.full_tensor(), theirs.grad)


@multirank(2)
def test_attention_of_a_cut_time_gathers_keys_and_values_only() -> None:
    whole = [normal(2, 2, 6, 4, seed=n).requires_grad_() for n in range(3)]
    want = F.scaled_dot_product_attention(*whole)
    want.square().sum().backward()
    cut = [oc.shard_tensor(x.detach(), MESH, [Shard(2)], requires_grad=True) for x in whole]
    with oc.explain() as report:
        found = F.scaled_dot_product_attention(*cut)
    assert [m.operand for m in report.messages] == ["key", "value"], str(report)
    found.square().sum().backward()
    assert_close([found, *(x.grad for x in cut)], [want, *(x.grad for x in whole)])
