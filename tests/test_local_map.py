"""local_map: hand-written local code inside a program of whole tensors. Twin: the same function on one card."""

import pytest
import torch

import onecard as oc
from onecard.errors import DispatchError, LayoutError
from onecard.testing import assert_close, multirank

S, R, P = oc.Shard, oc.Replicate, oc.Partial


def mesh2():
    return oc.ProcessMesh([0, 1], ["x"])


def leaf(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def twin(whole, placement):
    return oc.shard_tensor(whole, mesh2(), [placement], requires_grad=True)


class Square(torch.autograd.Function):
    """A "kernel" with its own backward that must see plain tensors."""

    @staticmethod
    def forward(ctx, x):
        assert type(x) is torch.Tensor
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        assert type(grad) is torch.Tensor
        (x,) = ctx.saved_tensors
        return 2 * x * grad


# fn, placements of its two inputs, of its output: as (x [4, 6], w [6, 8]) -> [4, 8]
PRODUCTS = {
    "batch": ([S(0)], [R()], [S(0)]),
    "column": ([R()], [S(1)], [S(1)]),
    "row": ([S(1)], [S(0)], [P()]),
    "all": ([R()], [R()], [R()]),
}


@pytest.mark.share(1)
@multirank(2)
@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize("given", ["as wanted", "replicated", "cut otherwise"])
def test_product_and_its_gradients(name, given):
    into_x, into_w, out = PRODUCTS[name]
    x, w, cot = leaf(4, 6), leaf(6, 8, seed=1), leaf(4, 8, seed=2)
    start = {"as wanted": (into_x[0], into_w[0]), "replicated": (R(), R()), "cut otherwise": (S(1), S(1))}[given]
    dx, dw = twin(x, start[0]), twin(w, start[1])
    y = oc.local_map(lambda a, b: Square.apply(a) @ b, [into_x, into_w], out)(dx, dw)
    assert y.placements == tuple(out)
    x.requires_grad_(), w.requires_grad_()
    expected = (x * x) @ w
    assert_close(y, expected)
    expected.backward(cot)
    (y * cot).sum().backward()
    assert_close([dx.grad, dw.grad], [x.grad, w.grad])


@multirank(2)
def test_a_replicated_input_of_a_cut_output_has_a_pending_gradient():
    x, w = twin(leaf(4, 6), S(0)), twin(leaf(6, 8), R())
    seen = []
    inner = w * 1
    inner.register_hook(lambda grad: seen.append(grad.placements))
    oc.local_map(torch.matmul, [[S(0)], [R()]], [S(0)])(x, inner).sum().backward()
    assert seen == [(P(),)]


@multirank(4)
def test_two_axes():
    mesh = oc.ProcessMesh([[0, 1], [2, 3]], ["dp", "tp"])
    x, w = leaf(4, 6), leaf(6, 8, seed=1)
    dx = oc.shard_tensor(x, mesh, [S(0), R()], requires_grad=True)
    dw = oc.shard_tensor(w, mesh, [R(), S(1)], requires_grad=True)
    y = oc.local_map(torch.matmul, [[S(0), R()], [R(), S(1)]], [S(0), S(1)])(dx, dw)
    x.requires_grad_(), w.requires_grad_()
    (x @ w).square().sum().backward()
    y.square().sum().backward()
    assert_close([dx.grad, dw.grad], [x.grad, w.grad])


@multirank(2)
def test_several_outputs_and_other_arguments():
    def stats(part, power, *, scale):
        return (part**power * scale).sum(0), part * scale, power

    x = twin(leaf(4, 3), S(0))
    mapped = oc.local_map(stats, [[S(0)]], [[P()], [S(0)], None])
    total, scaled, power = mapped(x, 2, scale=3.0)
    assert power == 2 and total.placements == (P(),)
    assert_close([total, scaled], [(leaf(4, 3) ** 2 * 3).sum(0), leaf(4, 3) * 3])


@multirank(2)
def test_uneven_parts_want_the_whole_shape():
    x, whole = twin(leaf(5, 3), S(0)), leaf(5, 3)
    with pytest.raises(LayoutError, match="out_shapes"):
        oc.local_map(lambda a: a.exp(), [[S(0)]], [S(0)])(x)
    y = oc.local_map(lambda a: a.exp(), [[S(0)]], [S(0)], out_shapes=[(5, 3)])(x)
    y.sum().backward()
    assert_close([y, x.grad], [whole.exp(), whole.exp()])
    with pytest.raises(LayoutError, match="gives it"):
        oc.local_map(lambda a: a[:1], [[S(0)]], [S(0)], out_shapes=[(5, 3)])(x)


@multirank(2)
def test_layouts_are_checked():
    x = twin(leaf(4, 6), R())
    fixed = oc.local_map(lambda a: a, [[S(0)]], [S(0)], reshard=False)
    with pytest.raises(LayoutError, match=r"reshard\(x, mesh, \[Shard\(0\)\]\)"):
        fixed(x)
    assert_close(fixed(oc.reshard(x, mesh2(), [S(0)])), leaf(4, 6))
    with pytest.raises(LayoutError, match="1 entries in in_placements for 2"):
        oc.local_map(torch.add, [[S(0)]], [S(0)])(x, x)
    with pytest.raises(LayoutError, match="2 entries in out_placements for 1"):
        oc.local_map(lambda a: a, [[S(0)]], [[S(0)], [S(0)]])(x)
    with pytest.raises(DispatchError, match="plain local tensors"):
        oc.local_map(lambda a: x, [[S(0)]], [S(0)])(x)


@multirank(2)
def test_an_ambiguous_gradient_is_refused():
    w = twin(leaf(4, 6), R())
    both = oc.local_map(lambda a, b: (a * b, 0 * b.sum()), [[S(0)], [S(0)]], [[S(0)], [R()]])
    both(w, w)  # cut inputs: each rank's gradient is its own
    mixed = oc.local_map(lambda a, b: (a + b[:2], b.sum()), [[S(0)], [R()]], [[S(0)], [R()]])
    with pytest.raises(LayoutError, match="ambiguous"):
        mixed(w, w)
    with torch.no_grad():
        assert_close(mixed(w, w)[1], leaf(4, 6).sum())


@multirank(3)
def test_ranks_outside_the_mesh():
    x = oc.shard_tensor(leaf(4, 6), mesh2(), [S(0)], requires_grad=True)
    y = oc.local_map(lambda a: a * 2, [[S(0)]], [S(0)], out_shapes=[(4, 6)])(x)
    assert y.shape == (4, 6)
    y.sum().backward()
    assert_close(y, leaf(4, 6) * 2)
    assert_close(x.grad, torch.full((4, 6), 2.0, dtype=torch.float64))


def test_a_plain_call_needs_a_mesh():
    with pytest.raises(LayoutError, match="pass the mesh"):
        oc.local_map(torch.exp, [[S(0)]], [S(0)])(torch.ones(2))


@multirank(2)
def test_a_write_to_an_argument_after_the_call_is_refused_on_every_rank():
    mesh = oc.ProcessMesh([0, 1], ["x"])
    x = oc.shard_tensor(torch.randn(3, 5, 2), mesh, [oc.Shard(0)])  # 2 sequences and 1: what a kernel keeps differs
    layer = oc.shard_layer(torch.nn.LSTM(2, 4, batch_first=True), mesh)
    given = x * 1
    layer(given)[0].sum().backward()  # nothing written
    out = layer(given)[0]
    with torch.no_grad():
        given.mul_(0.5)
    with pytest.raises(
        RuntimeError, match=r"argument 0 .*modified by an inplace operation after the call.*x.clone\(\)"
    ):
        out.sum().backward()
