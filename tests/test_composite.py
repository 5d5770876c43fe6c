"""Composite operators that DistTensors take whole (tensor/dispatch/composite.py), against plain torch."""

import warnings
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import onecard as oc
from onecard import Replicate, Shard
from onecard.errors import DispatchError
from onecard.tensor.dispatch import composite, fallback, intercept
from onecard.testing import assert_close, multirank

BATCH, TIME, WIDTH, OUT, HEADS = 2, 5, 4, 6, 4


def mesh():
    return oc.ProcessMesh([0, 1], ["x"])


def tensors():
    generator = torch.Generator().manual_seed(0)
    shapes = {"x": (BATCH, TIME, WIDTH), "w": (OUT, WIDTH), "b": (OUT,)}
    shapes |= {"q": (BATCH, HEADS, TIME, 3), "k": (1, HEADS, TIME, 3), "v": (WIDTH,)}
    return {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}


def program(x, w, b, q, k, v):
    """Every shape of product with leading dims."""
    y = F.linear(x, w, b) + F.linear(x, w)
    scores = (q @ k.mT).softmax(-1)
    rest = (x @ v).sum() + (x @ w.t()).pow(3).sum() + (w @ x.mT).pow(2).sum() + (v @ x.mT).pow(2).sum()
    return y, scores, y.pow(2).sum() + scores.pow(2).sum() + rest


@pytest.mark.proof
@multirank(2)
def test_products_and_their_first_and_second_gradients():
    def run(place):
        inputs = {name: place(name, t).requires_grad_() for name, t in tensors().items()}
        y, scores, loss = program(**inputs)
        first = torch.autograd.grad(loss, list(inputs.values()), create_graph=True)
        second = torch.autograd.grad(sum(g.pow(2).sum() for g in first), list(inputs.values()))
        return [y, scores, loss, *first, *second]

    expected = [t.detach() for t in run(lambda name, t: t.clone())]
    for cuts in ({"x": 0}, {"x": 1}, {"x": 2, "w": 1, "v": 0}, {"w": 0, "b": 0}, {"q": 1, "k": 1}, {"q": 2}, {"k": 3}):

        def place(name, t, cuts=cuts):
            return oc.shard_tensor(t, mesh(), [Shard(cuts[name]) if name in cuts else Replicate()])

        assert_close([t.detach() for t in run(place)], expected, rtol=1e-10, atol=1e-10)


@multirank(2)
def test_a_cut_sequence_and_cut_heads_send_nothing():
    t = tensors()
    x = oc.shard_tensor(t["x"], mesh(), [Shard(1)]).requires_grad_()
    w, b = (oc.shard_tensor(t[name], mesh(), [Replicate()]).requires_grad_() for name in "wb")
    q, k = (oc.shard_tensor(t[name], mesh(), [Shard(1)]).requires_grad_() for name in "qk")
    with oc.no_implicit_communication():
        y = F.linear(x, w, b)
        y.pow(2).sum().backward()
        scores = q @ k.mT
        scores.pow(2).sum().backward()
    assert y.placements == x.grad.placements == scores.placements == q.grad.placements == (Shard(1),)
    assert w.grad.placements == (oc.Partial(),)


EINSUMS = (
    ("bshd,bthd->bhst", (2, 3, 4, 5), (2, 6, 4, 5)), ("ij,jk", (4, 5), (5, 3)), ("i,i->", (5,), (5,)),
    ("aij,jk->aik", (1, 3, 4), (4, 4)), ("bi,bi->bi", (4, 1), (4, 3)), ("b...j,bj->b...", (2, 3, 4), (2, 4)),
    ("iji,i->j", (2, 3, 2), (2,)),
)  # fmt: skip


@pytest.mark.proof
@multirank(2)
def test_einsum_and_its_gradients():
    for equation, *shapes in EINSUMS:
        whole = [
            torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64) for shape in shapes
        ]
        weight = torch.randn(torch.einsum(equation, *whole).shape, dtype=torch.float64)

        def run(operands, weight, equation=equation):
            leaves = [t.requires_grad_() for t in operands]
            result = torch.einsum(equation, *leaves)
            return [result.detach(), *torch.autograd.grad((result * weight).sum(), leaves)]

        expected = run([t.clone() for t in whole], weight)
        for dims in product(*(range(len(shape)) for shape in shapes)):
            operands = [oc.shard_tensor(t, mesh(), [Shard(d)]) for t, d in zip(whole, dims, strict=True)]
            placed = oc.shard_tensor(weight, mesh(), [Replicate()])
            assert_close(run(operands, placed), expected, rtol=1e-10, atol=1e-10)


@multirank(2)
def test_heads_of_an_einsum_stay_cut():
    q, k = (oc.shard_tensor(torch.randn(2, 3, 4, 5), mesh(), [Shard(2)]) for _ in range(2))
    x, w = oc.shard_tensor(torch.randn(2, 3, 4), mesh(), [Shard(1)]), torch.randn(4, 5, 6)
    with oc.no_implicit_communication():
        assert torch.einsum("bshd,bthd->bhst", q, k).placements == (Shard(1),)
        assert torch.tensordot(x, w, 1).placements == (Shard(1),)
    assert_close(torch.tensordot(x, w, ([2], [0])), torch.tensordot(x.full_tensor(), w, ([2], [0])))


@multirank(2)
def test_autocast_and_checkpointing_see_one_operator():
    t = {name: value.float() for name, value in tensors().items()}
    x, w = oc.shard_tensor(t["x"], mesh(), [Shard(1)]), oc.shard_tensor(t["w"], mesh(), [Replicate()])
    with torch.autocast("cpu"):
        made = [F.linear(x, w), x @ x.mT, torch.einsum("bij,kj->bik", x, w)]
        expected = [F.linear(t["x"], t["w"]), t["x"] @ t["x"].mT, torch.einsum("bij,kj->bik", t["x"], t["w"])]
    assert [m.dtype for m in made] == [torch.bfloat16] * 3
    assert_close(made, expected)
    x.requires_grad_()
    torch.utils.checkpoint.checkpoint(F.linear, x, w, use_reentrant=False).sum().backward()
    assert_close(x.grad, t["w"].sum(0).expand(BATCH, TIME, WIDTH))


# ---- out=


def test_every_composite_with_out_has_a_functional_form():
    found = list(composite._composites_with_out())
    assert len(found) > 100 and torch.ops.aten.linalg_matrix_rank.out in found
    none = [op for op in found if fallback._functional(op) is None]
    assert not none, none


@multirank(2)
def test_out_is_written():
    """torch writes the rank to out's own memory, which a wrapper does not have."""
    whole = torch.diag(torch.tensor([1.0, 2.0, 0.0, 3.0]))
    x = oc.shard_tensor(whole, mesh(), [Shard(0)])
    out = oc.shard_tensor(torch.zeros((), dtype=torch.int64), mesh(), [Replicate()])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", oc.GatheredOperatorWarning)
        assert torch.linalg.matrix_rank(x, out=out) is out
    assert out.item() == 3 and out._version == 1
    plain = torch.empty(0)
    assert torch.matmul(x[None], whole, out=plain) is plain
    assert_close(plain, whole[None] @ whole)
    with pytest.raises(RuntimeError, match="don't support automatic differentiation"):
        torch.matmul(x[None].requires_grad_(), whole, out=torch.empty(0))


# ---- numbers that torch reads above dispatch


@multirank(2)
def test_numbers_that_are_read_while_an_operator_is_taken_apart():
    x = oc.shard_tensor(tensors()["x"], mesh(), [Shard(0)])
    at = oc.shard_tensor(torch.tensor([1, 3]), mesh(), [Shard(0)])
    assert_close(torch.tensor_split(x, at, 1), tensors()["x"].tensor_split((1, 3), 1))
    lengths, labels = torch.tensor([5, 4]), torch.tensor([[1, 2], [3, 1]])
    logits = tensors()["x"].transpose(0, 1).log_softmax(-1)
    expected = F.ctc_loss(logits, labels, lengths, torch.tensor([2, 1]))
    operands = [oc.shard_tensor(t, mesh(), [Shard(0)]) for t in (labels, lengths, torch.tensor([2, 1]))]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", oc.GatheredOperatorWarning)
        assert_close(F.ctc_loss(oc.shard_tensor(logits, mesh(), [Shard(1)]), *operands), expected)


@multirank(2)
def test_packed_sequences():
    torch.manual_seed(0)
    rnn, lengths = torch.nn.GRU(WIDTH, 3, batch_first=True).double(), torch.tensor([5, 2])

    def run(x):
        packed = pack_padded_sequence(x, lengths, batch_first=True)
        return pad_packed_sequence(rnn(packed)[0], batch_first=True)[0]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", oc.GatheredOperatorWarning)
        found = run(oc.shard_tensor(tensors()["x"], mesh(), [Shard(0)]))
    assert_close(found, run(tensors()["x"]))


@multirank(3)
def test_a_rank_that_does_not_hold_the_numbers_says_so():
    at = oc.shard_tensor(torch.tensor([1, 3]), oc.ProcessMesh([0, 1], ["x"]), [Replicate()])
    if torch.distributed.get_rank() < 2:
        assert len(torch.tensor_split(torch.ones(5), at)) == 3
    else:
        with pytest.raises(DispatchError, match=r"tensor_split.*rank 2 is not in"):
            torch.tensor_split(torch.ones(5), at)


@multirank(2)
def test_new_tensors_are_plain():
    x = oc.shard_tensor(torch.ones(4, 2, dtype=torch.float64), mesh(), [Shard(0)])
    assert x.new_tensor([1.0]).dtype is torch.float64 and type(x.new_tensor(1)) is torch.Tensor
    assert x.new(2, 3).shape == (2, 3)


def test_plain_tensors_do_not_come_here():
    whole = torch.ones(2)
    keys = [torch._C._dispatch_keys(t) for t in (whole, oc.shard_tensor(whole, oc.ProcessMesh([0], ["x"]), [Shard(0)]))]
    assert [k.has(intercept.KEY) for k in keys] == [False, True]


# ---- losses, and what they make


@pytest.mark.proof
@multirank(2)
def test_a_smoothed_loss_with_weights_of_classes_sends_only_its_sums():
    """torch selects the labels that count: a size that depends on data, for which everything would be gathered."""
    generator = torch.Generator().manual_seed(0)
    for shape in ((4, 4, 6), (3, 4, 6), (4, 3, 6)):
        x = torch.randn(shape, generator=generator)
        y, weight = torch.randint(6, shape[:2], generator=generator), torch.rand(6, generator=generator)
        y[0, 0] = -100
        for cut, reduction, dims in product((0, 1), ("mean", "sum"), (1, 2)):

            def loss(logits, labels, weight=weight, reduction=reduction, dims=dims):
                both = (logits.flatten(0, 1), labels.flatten()) if dims == 1 else (logits.transpose(1, 2), labels)
                return F.cross_entropy(*both, weight, label_smoothing=0.1, reduction=reduction)

            ours, theirs = oc.shard_tensor(x, mesh(), [Shard(cut)]).requires_grad_(), x.clone().requires_grad_()
            with oc.explain() as report:
                found = loss(ours, oc.shard_tensor(y, mesh(), [Shard(cut)]))
                found.backward()
            loss(theirs, y).backward()
            assert_close([found.detach(), ours.grad], [loss(x, y), theirs.grad])
            assert {m.step.kind for m in report.messages} <= {"all_reduce", "slice"}, str(report)


@multirank(2)
def test_a_sparse_gradient_is_refused_before_anything_is_said_of_rules():
    x = oc.shard_tensor(torch.arange(8), mesh(), [Shard(0)])
    bag = oc.shard_layer(torch.nn.EmbeddingBag(8, 4, sparse=True, mode="sum"), mesh())
    for layer, given in ((oc.shard_layer(torch.nn.Embedding(8, 4, sparse=True), mesh()), x), (bag, x.view(4, 2))):
        with pytest.raises(
            DispatchError, match=r"nn.Embedding\(..., sparse=False\)"
        ):  # and no warning, which would be raised
            layer(given).sum().backward()


# ---- operators that write to views


@multirank(2)
def test_circular_padding_of_a_cut_dim():
    whole = tensors()["x"]
    for pad in ((2, 1), (-1, 2), (0, -2), (4, 4)):
        x = oc.shard_tensor(whole, mesh(), [Shard(2)]).requires_grad_()
        twin = whole.clone().requires_grad_()
        made, expected = (F.pad(t, pad, mode="circular") for t in (x, twin))
        made.pow(2).sum().backward()
        expected.pow(2).sum().backward()
        assert_close([made.detach(), x.grad], [expected.detach(), twin.grad])
    with pytest.raises(RuntimeError, match=r"[Pp]adding"):
        F.pad(x, (5, 5), mode="circular")


@multirank(2)
def test_attention_with_dropout_over_another_sequence():
    """As many rows come out as there are queries, not keys."""
    generator = torch.Generator().manual_seed(0)
    whole = [torch.randn(shape, generator=generator) for shape in ((2, 4, 3, 8), (2, 4, 6, 8), (2, 4, 6, 5))]

    def run(operands):
        torch.manual_seed(3)
        leaves = [t.requires_grad_() for t in operands]
        made = F.scaled_dot_product_attention(*leaves, dropout_p=0.5)
        return [made.detach(), *torch.autograd.grad(made.pow(2).sum(), leaves)]

    with oc.one_card_random():
        expected = run([t.clone() for t in whole])
    for dim in range(3):
        found = run([oc.shard_tensor(t, mesh(), [Shard(dim)]) for t in whole])
        assert found[0].shape == (2, 4, 3, 5)
        assert_close(found, expected, rtol=1e-4, atol=1e-5)


@multirank(2)
def test_gradients_that_torch_leaves_undefined():
    """Of no reflectors torch's formula gives no gradient at all: what laid the operand out must not make one up."""
    mesh = oc.ProcessMesh([0, 1], ["x"])
    local = torch.ones(2, 4, requires_grad=True)
    for x in (
        oc.from_local(local, mesh, [oc.Shard(0)]),
        oc.reshard(oc.from_local(local, mesh, [oc.Shard(0)]), mesh, [oc.Replicate()]),
    ):
        torch.linalg.householder_product(x, torch.empty(0)).sum().backward()
    assert local.grad is None


PADS = {"circular": [(0, 2), (2, 0), (1, 3), (-1, 2), (0, 0)], "reflect": [(0, 2), (2, 1)], "replicate": [(0, 2), (3, 0)],
        "constant": [(0, 2), (-1, 0)]}  # fmt: skip


@pytest.mark.proof
@multirank(2)
def test_padding_with_and_without_a_batch():
    """Under every layout; of one, two and three dims, zero on a side."""
    torch.manual_seed(0)
    for spatial, (mode, pads) in product((1, 2, 3), PADS.items()):
        for shape in ((2, 4, 5, 4)[: 1 + spatial], (3, 2, 4, 5, 4)[: 2 + spatial]):
            whole = torch.randn(shape)
            for pad in pads:
                given = [*pad, 1, 0, 0, 1][: 2 * spatial]
                expected = F.pad(whole, given, mode=mode)
                for place in (Replicate(), *map(Shard, range(len(shape)))):
                    x = oc.shard_tensor(whole, mesh(), [place])
                    assert_close(F.pad(x, given, mode=mode).full_tensor(), expected)


@multirank(2)
def test_convolutions_of_every_padding_mode():
    for spatial, kind in enumerate((torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d), 1):
        for mode in ("zeros", "reflect", "replicate", "circular"):
            torch.manual_seed(0)
            plain = kind(2, 3, 2, padding=1, padding_mode=mode, dtype=torch.float64)
            twin = kind(2, 3, 2, padding=1, padding_mode=mode, dtype=torch.float64)
            twin.load_state_dict(plain.state_dict())
            oc.shard_layer(twin, mesh())
            for shape in ((2, 4, 5, 4)[: 1 + spatial], (4, 2, 4, 5, 4)[: 2 + spatial]):
                x = torch.randn(shape, dtype=torch.float64)
                for place in (Replicate(), Shard(0), Shard(len(shape) - 1)):
                    assert_close(twin(oc.shard_tensor(x, mesh(), [place])).full_tensor(), plain(x))


def test_the_gradient_of_a_mean_is_never_whole():
    """torch divides the expanded gradient: as large as the whole tensor, on every rank."""
    for mean in (lambda x: x.mean(), lambda x: x.mean((0, 1)), lambda x: x.mean(0, keepdim=True).mean()):
        with oc.pretend(4, 1):
            x = torch.nn.Parameter(oc.shard_tensor(torch.ones(8, 6), oc.ProcessMesh(range(4), ["x"]), [oc.Shard(0)]))

            def step(x=x, mean=mean):
                x.grad = None
                mean(x.square()).backward()

            nodes = [n for n in oc.record(step)().graph.nodes if "tensor" in n.meta]
        whole = [n.target for n in nodes if tuple(n.meta["tensor"][0]) == (8, 6)]
        assert whole and {str(target) for target in whole} == {"aten.expand.default"}, whole  # no memory of its own
    low = torch.ones(4, dtype=torch.bfloat16).mul_(0.3)
    mesh = oc.ProcessMesh([0], ["x"])
    for x in (low, torch.randn(0), torch.randn(5, 3)):
        ours = oc.shard_tensor(x, mesh, [oc.Shard(0)]).requires_grad_()
        theirs = x.clone().requires_grad_()
        for a, b in ((ours.mean(), theirs.mean()), (ours.mean(-1), theirs.mean(-1))):
            assert torch.equal(a.full_tensor(), b) or (b.isnan().all() and a.full_tensor().isnan().all())
