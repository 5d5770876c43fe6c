"""Rows that move, index, multiply and convolve, as autograd and views use them. Twin: plain torch.

Each row by itself is proved by ``onecard.rules.verify``; here is what one call in one process cannot show.
"""

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import onecard as oc
from onecard.errors import DispatchError
from onecard.rules.call import Call
from onecard.rules.registry import find
from onecard.rules.rule import bind
from onecard.rules.table.factory import dense_stride
from onecard.rules.table.movement import _Pairing
from onecard.testing import assert_close, multirank

R, S, P = oc.Replicate, oc.Shard, oc.Partial
aten = torch.ops.aten


def mesh2():
    return oc.ProcessMesh([0, 1], ["x"])


def put(plain, placement, grad=True):
    """A distributed twin."""
    return oc.shard_tensor(plain.detach(), mesh2(), [placement], requires_grad=grad and plain.is_floating_point())


def check(program, tensors, placements):
    """The program's results and gradients on distributed tensors are those on plain ones; every operator has a row."""
    plain = [t.detach().clone().requires_grad_(t.is_floating_point()) for t in tensors]
    dist = [put(t, p) for t, p in zip(tensors, placements, strict=True)]
    expected = program(*plain)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = program(*dist)
        assert_close(result, expected)
        if expected.requires_grad:
            cotangent = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1), dtype=expected.dtype)
            expected.backward(cotangent)
            result.backward(put(cotangent, R(), grad=False))
            for a, b in zip(dist, plain, strict=True):
                if b.grad is not None:
                    assert_close(a.grad, b.grad)


def randn(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


# ---- whole models


class Block(nn.Module):
    """Embedding, grouped-query attention over a causal mask, a gated MLP and a tied head."""

    def __init__(self, vocabulary=11, width=16, heads=4, groups=2):
        super().__init__()
        self.heads, self.groups = heads, groups
        self.embedding = nn.Embedding(vocabulary, width)
        self.norm = nn.LayerNorm(width)
        self.q = nn.Linear(width, width)
        self.k = nn.Linear(width, width // heads * groups, bias=False)
        self.v = nn.Linear(width, width // heads * groups)
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, ids):
        x = self.embedding(ids)
        h = self.norm(x)
        q, k, v = (
            project(h).unflatten(-1, (count, -1)).transpose(1, 2)
            for project, count in ((self.q, self.heads), (self.k, self.groups), (self.v, self.groups))
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        x = x + self.down(F.gelu(self.up(x)))
        return x @ self.embedding.weight.t()


TENSOR_PARALLEL = {"q": S(0), "k": S(0), "v": S(0), "up": S(0), "out": S(1), "down": S(1)}
BLOCK_LAYOUTS = {
    "tensor parallel": TENSOR_PARALLEL,
    "and vocabulary cut": TENSOR_PARALLEL | {"embedding": S(0)},
    "and width cut": TENSOR_PARALLEL | {"embedding": S(1)},
    "weights cut the other way": {"q": S(1), "up": S(1), "out": S(0), "down": S(0)},
    "batch": {"ids": S(0)},
    "time": {"ids": S(1)},
    "batch, and sharded weights": {"ids": S(0)}
    | dict.fromkeys(("q", "k", "v", "out", "up", "down", "embedding"), S(0)),
}


def sharded(model, layouts):
    """A copy of the model with its parameters laid out; a bias follows its weight's rows."""
    twin = copy.deepcopy(model)
    for name, module in twin.named_modules():
        for key, parameter in list(module.named_parameters(recurse=False)):
            placement = layouts.get(name, R())
            if key == "bias" and placement != S(0):
                placement = R()
            setattr(module, key, oc.shard_tensor(parameter, mesh2(), [placement]))
    return twin


def compare(model, layouts, loss_of, *inputs):
    twin = sharded(model, layouts)
    loss = loss_of(model, *inputs)
    loss.backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dist = loss_of(twin, *(put(t, layouts.get("ids", R()), grad=False) for t in inputs))
        dist.backward()
    assert_close(dist, loss)
    for (name, a), b in zip(twin.named_parameters(), model.parameters(), strict=True):
        assert a.grad is not None, name
        assert_close(a.grad, b.grad, rtol=2e-5)


@pytest.mark.share(1)
@multirank(2)
@pytest.mark.parametrize("layouts", BLOCK_LAYOUTS)
@pytest.mark.parametrize("batch", [4, 3, 1])
def test_transformer_block(layouts, batch):
    torch.manual_seed(0)
    ids, targets = torch.randint(0, 11, (2, batch, 6))

    def loss_of(model, ids, targets):
        return F.cross_entropy(model(ids).flatten(0, 1), targets.flatten())

    compare(Block(), BLOCK_LAYOUTS[layouts], loss_of, ids, targets)


class Pictures(nn.Module):
    """Convolutions plain, by groups, transposed; pooling; a head."""

    def __init__(self):
        super().__init__()
        self.one = nn.Conv2d(3, 8, 3, padding=1)
        self.two = nn.Conv2d(8, 6, 3, stride=2)
        self.groups = nn.Conv2d(6, 6, 1, groups=6)
        self.up = nn.ConvTranspose2d(6, 4, 2, stride=2, bias=False)
        self.head = nn.Linear(16, 5)

    def forward(self, x):
        x = F.max_pool2d(self.one(x).relu(), 2)
        x = F.interpolate(self.groups(self.two(x)).relu(), scale_factor=2, mode="bilinear")
        return self.head(F.adaptive_avg_pool2d(self.up(x), 2).flatten(1))


CNN_LAYOUTS = {
    "batch": {"ids": S(0)},
    "out, then in channels": {"one": S(0), "two": S(1)},
    "in channels, groups": {"one": S(1), "two": S(0), "groups": S(0), "up": S(0), "head": S(1)},
    "transposed out channels": {"up": S(1), "head": S(0)},
    "height": {"ids": S(2)},
}


@pytest.mark.share(1)
@multirank(2)
@pytest.mark.parametrize("layouts", CNN_LAYOUTS)
@pytest.mark.parametrize("batch", [4, 3])
def test_cnn(layouts, batch):
    torch.manual_seed(0)

    def loss_of(model, x):
        return model(x).square().mean()

    compare(Pictures(), CNN_LAYOUTS[layouts], loss_of, torch.randn(batch, 3, 8, 8))


# ---- end to end, placement by placement

ANY = (R(), S(0), S(1), P())
PROGRAMS = {
    "select": lambda x: x[2] * x[-1],
    "slice": lambda x: x[1:4, ::2].exp(),
    "shifted difference": lambda x: x[1:] - x[:-1],
    "split and cat": lambda x: torch.cat(list(reversed(x.split([1, 3, 1]))), 0).tanh(),
    "chunk": lambda x: sum(c.sum(1).exp() for c in x.chunk(2, dim=1)),
    "stack and unbind": lambda x: torch.stack([row.exp() for row in x.unbind()], dim=1),
    "reshape": lambda x: x.t().reshape(3, 2, 5).exp().flatten(1),
    "expand": lambda x: (x.unsqueeze(1).expand(-1, 3, -1) * x.view(5, 1, 6)).squeeze(),
    "index": lambda x: x[torch.tensor([0, 4, 4, -1]), torch.tensor([[1], [5]])].exp(),
    "index rows": lambda x: x[torch.tensor([[3, 0], [1, 3]])].exp(),
    "gather": lambda x: x.gather(1, torch.tensor([[0, 5], [1, 1], [2, 0], [3, 3], [4, 5]])).exp(),
    "index_select": lambda x: x.index_select(0, torch.tensor([4, 0, 4])).exp(),
    "take": lambda x: x.take(torch.tensor([0, 29, 7])).exp(),
    "tril": lambda x: x.tril(1).exp().triu(-1),
    "masked_fill": lambda x: x.masked_fill(torch.eye(5, 6, dtype=torch.bool), -1e9).softmax(-1),
    "scatter": lambda x: x.scatter(0, torch.tensor([[4, 0, 1, 2, 3, 4]]), 2.0).exp(),
    "index_add": lambda x: x.index_add(0, torch.tensor([4, 0, 4]), x[:3]).exp(),
    "pad, roll, flip": lambda x: F.pad(x, (1, 2, 0, 1)).roll((1, -2), (0, 1)).flip(0).exp(),
    "diagonal": lambda x: x.diagonal(1).exp().diag_embed(),
    "sort": lambda x: x.sort(dim=0).values[0] + x.topk(2, dim=0).values[1],
    "repeat": lambda x: x.repeat(2, 1).exp().repeat_interleave(2, dim=0),
    "windows": lambda x: x.unfold(1, 3, 2).exp(),
    "einsum": lambda x: torch.einsum("ij,kj->ik", x, x).exp(),
    "linear": lambda x: F.linear(x.view(1, 5, 6), x.exp(), x[:, 0]).exp(),
    "bmm": lambda x: (x.view(5, 1, 6) @ x.view(5, 6, 1)).flatten().exp(),
}


@pytest.mark.share(1)
@multirank(2)
@pytest.mark.parametrize("name", PROGRAMS)
def test_forward_and_backward(name):
    for placement in ANY:
        check(PROGRAMS[name], [randn(5, 6)], [placement])


@multirank(3)
def test_empty_shards():
    mesh = oc.ProcessMesh([0, 1, 2], ["x"])
    plain = randn(4, 2)  # the third rank has no row, and no column
    for placement in (S(0), S(1)):
        for name in ("tril", "index rows", "select", "repeat"):
            program = {
                "tril": lambda x: x.tril(),
                "index rows": lambda x: x[torch.tensor([3, 0, 3])],
                "select": lambda x: x[3] * x[:, 1:].sum(),
                "repeat": lambda x: x.repeat(2, 1),
            }[name]
            a = plain.clone().requires_grad_()
            b = oc.shard_tensor(plain, mesh, [placement], requires_grad=True)
            program(a).square().sum().backward()
            program(b).square().sum().backward()
            assert_close(program(b), program(a))
            assert_close(b.grad, a.grad)


@multirank(4)
def test_two_axes():
    mesh = oc.ProcessMesh([[0, 1], [2, 3]], ["dp", "tp"])
    x, w, table, ids = randn(4, 6, 8), randn(10, 8), randn(10, 8), torch.arange(24).view(4, 6) % 10

    def program(x, w, table, ids):
        h = F.linear(x + F.embedding(ids, table), w).view(4, 6, 2, 5)
        return h.transpose(1, 2)[:, :, 1:4].flatten(2).exp()

    plain = [t.clone().requires_grad_(t.is_floating_point()) for t in (x, w, table, ids)]
    expected = program(*plain)
    expected.sum().backward()
    layouts = (
        ([S(0), R()], [R(), S(0)], [R(), S(0)], [S(0), R()]),
        ([R(), S(0)], [S(0), S(1)], [S(1), S(0)], [S(1), S(0)]),
    )
    for placements in layouts:
        dist = [
            oc.shard_tensor(t, mesh, p, requires_grad=t.is_floating_point())
            for t, p in zip((x, w, table, ids), placements, strict=True)
        ]
        result = program(*dist)
        assert_close(result, expected)
        result.sum().backward()
        for a, b in zip(dist[:3], plain[:3], strict=True):
            assert_close(a.grad, b.grad)


# ---- writing, and views


@multirank(2)
def test_writes_in_place():
    writes = {
        "index_put_": lambda x: x.index_put_((torch.tensor([4, 0]), torch.tensor([5, 0])), torch.tensor([7.0, 8.0])),
        "setitem": lambda x: x.__setitem__(torch.tensor([4, 1]), torch.full((6,), 3.0)),
        "scatter_add_": lambda x: x.scatter_add_(0, torch.tensor([[4, 4, 0, 1, 2, 3]] * 2), torch.ones(2, 6)),
        "index_add_": lambda x: x.index_add_(1, torch.tensor([5, 5, 0]), torch.ones(5, 3), alpha=2),
        "index_fill_": lambda x: x.index_fill_(0, torch.tensor([1, 4]), -1.0),
        "masked_fill_": lambda x: x.masked_fill_(torch.eye(5, 6, dtype=torch.bool), 0.0),
        "triu_": lambda x: x.triu_(1),
        "addmm_": lambda x: x.addmm_(torch.ones(5, 3), torch.ones(3, 6)),
        "through a view": lambda x: x.view(30, 1).squeeze(1).mul_(2.0),
        "through a transpose": lambda x: x.t().unsqueeze(0).add_(1.0),
    }
    for name, write in writes.items():
        for placement in (R(), S(0), S(1)):
            if name == "through a view" and placement != R():
                continue  # 5 rows do not divide, and columns are inner: not a view here
            plain = randn(5, 6)
            dist = put(plain, placement, grad=False)
            layout = dist.layout
            write(plain)
            write(dist)
            assert_close(dist, plain)
            assert dist.layout is layout, name


@multirank(2)
def test_views_share_memory():
    x = put(torch.zeros(4, 6), S(0), grad=False)
    for view in (x.view(2, 2, 6), x.t(), x[:, 2:4], x.unsqueeze(1).expand(4, 1, 6), x.view(24), x[:, 1]):
        assert view._local.untyped_storage()._cdata == x._local.untyped_storage()._cdata, view


@multirank(2)
def test_a_view_that_had_to_be_copied_writes_through():
    for mode in (torch.no_grad(), torch.inference_mode()):
        for take in (
            lambda x: x[1],
            lambda x: x[1:3],
            lambda x: x[1][2:],
            lambda x: x.t()[:, 0].view(2, 3),
            lambda x: x.split(2)[0],
            lambda x: x.detach()[::2],
        ):
            with mode:
                whole = randn(4, 6)
                plain, dist = whole.clone(), put(whole, S(0), grad=False)
                for x in (plain, dist):
                    take(x).add_(1.0)
                    take(x).copy_(torch.ones(6)[: take(x).shape[-1]])
                assert_close(dist, plain)
    x = put(torch.zeros(4, 6), S(0), grad=False)
    x[:, 1:3] = 5.0  # the rows that are cut are not touched
    assert_close(x.sum(), torch.tensor(40.0))


@multirank(2)
def test_shape_changes_in_place_or_is_refused():
    whole = torch.arange(24.0).view(4, 6)
    x, plain = put(whole.clone(), S(0), grad=False), whole.clone()
    for change in ("t_", "unsqueeze_", "squeeze_", "transpose_"):
        arguments = {"unsqueeze_": (0,), "transpose_": (0, 1)}.get(change, ())
        getattr(x, change)(*arguments)
        getattr(plain, change)(*arguments)
        assert x.shape == plain.shape
        assert_close(x, plain)
    with pytest.raises(DispatchError, match="resize_"):
        x.resize_(3, 3)


@multirank(2)
def test_index_out_of_range():
    table = put(randn(6, 4), S(0), grad=False)
    for lookup in (
        lambda i: F.embedding(i, table),
        lambda i: table[i],
        lambda i: table.index_select(0, i),
        lambda i: table.clone().index_fill_(0, i, 1.0),
    ):
        lookup(torch.tensor([5, 0]))
        with pytest.raises((RuntimeError, IndexError), match="out of"):
            lookup(torch.tensor([0, 6]))


@multirank(2)
def test_masks_as_indices_gather():
    x = put(torch.arange(12.0).view(4, 3), S(0), grad=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", oc.GatheredOperatorWarning)
        assert_close(x[x > 6], torch.arange(7.0, 12.0))
        assert_close(x.repeat_interleave(torch.tensor([0, 2, 1, 0]), dim=0), x.full_tensor()[[1, 1, 2]])


# ---- no ranks needed


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        ((4, 6), (24,), "f0 f1 -> (f0 f1)"),
        ((24,), (4, 6), "(f0 f1) -> f0 f1"),
        ((2, 3, 4), (6, 4), "f0 f1 f2 -> (f0 f1) f2"),
        ((6, 4), (3, 8), "(f0 f1) f2 -> f0 (f1 f2)"),
        ((1, 6), (6, 1, 1), "_ f0 -> f0 _ _"),
        ((5, 0), (0, 5), "_ _ -> _ _"),
        ((), (1, 1), "() -> _ _"),
    ],
)
def test_view_pairs_dims(old, new, text):
    assert _Pairing(old, new).form().text == text


def test_view_keeps_what_dims_that_cut_across_share():
    form = _Pairing((6, 4), (4, 6)).form()
    assert form.text == "(f0 f1) f4 -> (f0 f2) f3"
    assert form.sizes["f0"] == 2 and set(form.whole.split()) == {"f1", "f2", "f3", "f4"}


def test_dense_stride_keeps_the_order_of_dims():
    for stride in ((12, 4, 1), (1, 2, 6), (4, 8, 1)):
        assert dense_stride((2, 3, 4), torch.empty_strided((2, 3, 4), stride).stride()) == list(
            torch.empty_like(torch.empty_strided((2, 3, 4), stride)).stride()
        )


def _gpu_calls():
    q, k, v = (torch.empty(2, heads, 8, 16, dtype=torch.float16, device="meta") for heads in (4, 4, 4))
    few = torch.empty(2, 2, 8, 16, dtype=torch.float16, device="meta")
    bias = torch.empty(2, 4, 8, 8, dtype=torch.float16, device="meta")
    out, lse, _, _, _, _, seed, offset, _ = aten._scaled_dot_product_flash_attention(q, few, few, 0.0, True)
    yield aten._scaled_dot_product_flash_attention.default, (q, few, few, 0.0, True)
    saved = (out, lse, None, None, 8, 8, 0.0, True, seed, offset)
    yield aten._scaled_dot_product_flash_attention_backward.default, (out, q, few, few, *saved)
    for given in (bias, None):
        out, lse, seed, offset = aten._scaled_dot_product_efficient_attention(q, k, v, given, True)
        yield aten._scaled_dot_product_efficient_attention.default, (q, k, v, given, True)
        saved = (given, out, lse, seed, offset, 0.0, [True, True, True, given is not None])
        yield aten._scaled_dot_product_efficient_attention_backward.default, (out, q, k, v, *saved)
    out, lse, _, _, _, _, seed, offset, _ = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True)
    yield aten._scaled_dot_product_cudnn_attention.default, (q, k, v, None, True)
    saved = (out, lse, seed, offset, None, None, None, 8, 8, 0.0, False)
    yield aten._scaled_dot_product_cudnn_attention_backward.default, (out, q, k, v, *saved)
    out, lse, _, _, _, _, seed, offset, _ = aten._scaled_dot_product_fused_attention_overrideable(q, k, v, bias)
    yield aten._scaled_dot_product_fused_attention_overrideable.default, (q, k, v, bias)
    saved = (bias, [True] * 4, out, lse, None, None, 8, 8, 0.0, False, seed, offset)
    yield aten._scaled_dot_product_fused_attention_overrideable_backward.default, (out, q, k, v, *saved)


@pytest.mark.parametrize("which", range(10))
def test_gpu_attention_fits_its_meta_function(which):
    func, args = list(_gpu_calls())[which]
    call = Call(func, args, {})
    try:
        call.results = call.meta_results()
    except NotImplementedError:
        pytest.skip("this version of torch has no meta function of it")
    form = find(func).form_for(call)
    bound = bind(form, call.names, [tuple(t.shape) for t in call.operands], [tuple(t.shape) for t in call.results])
    grouped = call.key.shape[1] != call.query.shape[1]
    assert set(bound.names) == ({"b", "h", "g"} if grouped else {"b", "h"})
    assert bound.results[0][:2] == bound.operands[call.index("query")][:2]
    with_dropout = Call(func, args, {})
    with_dropout.values["dropout_p"] = 0.1
    assert find(func).form_for(with_dropout) is None
