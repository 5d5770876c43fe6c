"""The fast part of benchmarks/operator_sweep.py: operators of PyTorch's database on 2 ranks against plain torch."""

import os
import signal
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from amounts import share
from torch import fx

BENCHMARKS = str(Path(__file__).parents[1] / "benchmarks")
if BENCHMARKS not in sys.path:  # the ranks import this file too
    sys.path.insert(0, BENCHMARKS)

import onecard as oc  # noqa: E402
import operator_sweep  # noqa: E402
from onecard.errors import DispatchError  # noqa: E402
from onecard.rules.register import unproved  # noqa: E402
from onecard.static.passes import PASSES  # noqa: E402
from onecard.testing import assert_close, multirank  # noqa: E402
from sweep import engine, report  # noqa: E402
from sweep.compare import difference  # noqa: E402
from sweep.samples import database, placings, title  # noqa: E402

# torch's DTensor gives wrong numbers for the first six in silence.
RIGHT = [
    "nn.functional.mse_loss", "nn.functional.smooth_l1_loss", "nn.functional.huber_loss",
    "nn.functional.binary_cross_entropy", "amax", "scatter_add",
    "add", "div.floor_rounding", "where", "clamp", "nn.functional.gelu", "mm", "addmm", "bmm", "nn.functional.linear",
    "nn.functional.scaled_dot_product_attention", "sum", "var", "prod", "std_mean", "logsumexp", "cumsum", "softmax",
    "nn.functional.cross_entropy", "nn.functional.layer_norm", "nn.functional.batch_norm", "cat", "split", "view",
    "squeeze", "expand", "gather", "index_select", "masked_fill", "nn.functional.embedding", "sort", "topk",
    "nn.functional.conv2d", "nn.functional.max_pool2d", "nn.functional.dropout", "fft.fft", "complex", "linalg.inv",
    "linalg.svd", "masked.softmax", "native_group_norm", "nonzero", "unique", "as_strided", "tensor_split", "matmul",
    "linalg.matrix_rank", "linalg.solve", "ormqr", "index_put", "nn.functional.pad.circular", "allclose",
    "nn.functional.embedding_bag", "nn.functional.multi_margin_loss", "diagonal_scatter",
]  # fmt: skip
RIGHT = [name for name in RIGHT if name in {title(op) for op in database()}]  # torch 2.11 lists fewer
REFUSED = ["resize_", "to_sparse"]
QUICK = engine.Options(samples=1, placings=6, partial=True)
FAULTY = engine.Options(samples=1, placings=3, seconds=4.0)


@pytest.mark.proof
def test_the_operators_are_right():
    right = [*dict.fromkeys([*share(RIGHT, len(RIGHT) // 4), "nonzero", "linalg.svd", "mm"])]
    outcomes = {o.name: o for o in operator_sweep.sweep([*right, *REFUSED], QUICK)}
    faults = report.faults("onecard", [outcomes[name] for name in right], 3)
    assert not faults, faults
    assert {outcomes[name].state for name in REFUSED} == {"refused"}
    assert not [o.name for o in outcomes.values() if o.cases < 2]
    assert outcomes["nonzero"].how == "gathered" and outcomes["linalg.svd"].how == outcomes["mm"].how == "ruled"


def in_sizes_of_six(names, options, path):
    """What a rank runs: the database's samples have dims of 6, which has divisors, instead of 5."""
    database()
    from torch.testing._internal import common_methods_invocations
    from torch.testing._internal.opinfo import core

    common_methods_invocations.S = core.S = 6
    engine.run(names, options, path)


@pytest.mark.proof
def test_operators_of_merged_dims():
    """What is cut along a dim is cut along the inner part of that dim, as after ``flatten``."""
    options = engine.Options("onecard merged", samples=1, placings=3)
    outcomes = operator_sweep.sweep(share(RIGHT[:52:2], 10), options, in_sizes_of_six)
    assert not (faults := report.faults("onecard merged", outcomes, 3)), faults
    assert not [o.name for o in outcomes if o.cases < 2]


@pytest.mark.proof
def test_operators_replayed():
    """Each case as a recorded step; the whole sweep is ``benchmarks/operator_sweep.py --libraries "onecard replayed"``."""
    names = [*share(RIGHT[6:36:4], 1), "sort", "nonzero", "nn.functional.dropout", "cov", "bernoulli"]
    outcomes = {
        o.name: o for o in operator_sweep.sweep(names, engine.Options("onecard replayed", samples=1, placings=2))
    }
    refused = {name for name, o in outcomes.items() if o.state == "refused"}
    wrong = [o for name, o in outcomes.items() if name not in refused]
    assert not (faults := report.faults("onecard replayed", wrong, 3)), faults
    assert refused == {"nonzero"}, "its shape depends on values"
    assert not [o.name for o in outcomes.values() if o.cases < 2]


@pytest.mark.proof
def test_samples_of_nothing():
    """All samples of operators that are written out here, of which some have no elements."""
    names = ["matmul", "softmax", "log_softmax", "linalg.householder_product"]
    outcomes = operator_sweep.sweep(names, engine.Options(samples=99, placings=3, partial=True))
    assert not (faults := report.faults("onecard", outcomes, 3)), faults


@pytest.mark.proof
def test_integers_and_masks():
    for dtype in ("int64", "bool"):
        names = ["add", "cat", "scatter", "sum", "index_select", "nonzero"]
        outcomes = operator_sweep.sweep(names, engine.Options(dtype=dtype, samples=1, placings=4))
        assert not report.faults("onecard", outcomes, 3)
        assert all(o.cases for o in outcomes)


def with_faults(names, options, path):
    """A rank with a wrong row, an operator that fails on one rank only, and one that dies."""

    def elementwise(call):
        dims = " ".join("abcd"[: call.self.dim()]) or "()"
        return f"{dims} -> {dims}"

    def one_sided(call):
        if dist.get_rank() == 1:
            raise DispatchError("only here")
        return elementwise(call)

    def deadly(call):
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    for name, form in (("cumsum", elementwise), ("sin", one_sided), ("tan", deadly)):
        oc.register_rule(name, replace=True)(form)
    unproved.clear()  # else the first calls are compared, and the wrong row is refused
    engine.run(names, options, path)


@pytest.mark.proof
def test_faults_are_seen():
    """The control: a wrong row, a rank that fails alone (the other waits) and one that dies; and the sweep goes on."""
    outcomes = operator_sweep.sweep(["cumsum", "sin", "tan", "exp"], FAULTY, with_faults)
    assert [o.state for o in outcomes] == ["wrong", "hung", "hung", "right"]
    assert "values differ" in report.faults("onecard", outcomes[:1], 1)


def with_faulty_replays(names, options, path):
    """A rank whose recordings lose writes in place, and give what goes into a tangent in place of the tangent."""

    def faulty(graph):
        copy, found = fx.Graph(), {}
        for node in graph.nodes:
            name = str(node.target)
            lost = name.startswith("aten.tan.") or name.split(".")[1:2] == ["sin_"]
            found[node] = found[node.args[0]] if lost else copy.node_copy(node, found.__getitem__)
        return copy

    PASSES["dead"] = faulty
    engine.run(names, options, path)


@pytest.mark.proof
def test_faults_of_replays_are_seen():
    options = engine.Options("onecard replayed", samples=1, placings=1)
    lost, bound, right = operator_sweep.sweep(["sin", "tan", "sum"], options, with_faulty_replays)
    assert [o.state for o in (lost, bound, right)] == ["wrong", "wrong", "right"]
    assert lost.counts["right"] and all("in place" in text or "out=" in text for text in lost.faults), (
        "only where it writes"
    )
    assert any("in place" not in text for text in bound.faults)


@pytest.mark.parametrize(
    ("got", "expected", "why"),
    [
        (torch.ones(2), torch.ones(2), ""),
        (torch.ones(2), torch.ones(3), "shape"),
        (torch.ones(2), torch.ones(2, dtype=torch.int64), "dtype"),
        (torch.tensor([1.0, float("nan")]), torch.tensor([1.0, 2.0]), "values differ"),
        (torch.tensor([2, 3]), torch.tensor([2, 4]), "1 of 2 values"),
        ((torch.ones(2),), [torch.ones(2)], "structure"),
        (torch.ones(2), 1.0, "expected 1.0"),
        (None, torch.ones(2), "expected a tensor"),
        ([1, 2.0], [1, 2.0], ""),
    ],
)
def test_difference(got, expected, why):
    found = difference(got, expected)
    assert (why in found) if why else found == ""


def test_placings_cover_every_dim_of_every_tensor():
    tensors = [torch.ones(3, 5), torch.ones(5)]
    found = placings(tensors, 100, partial=True)
    for i, t in enumerate(tensors):
        assert {p[i].dim for p in found if isinstance(p[i], oc.Shard)} == set(range(t.dim()))
    assert (oc.Replicate(), oc.Replicate()) in found and (oc.Partial(), oc.Replicate()) in found
    assert any(p[1] is None for p in found)


@multirank(2)
def test_a_copy_that_stands_for_a_view_is_taken_again_after_a_write():
    x = oc.shard_tensor(torch.zeros(4, 3), oc.ProcessMesh([0, 1], ["x"]), [oc.Shard(0)])
    view, cut = x.t(), x[1:3]  # the second one needs elements of both ranks
    assert_close(cut, torch.zeros(2, 3))
    x.add_(1)
    assert_close(view, torch.ones(3, 4))
    assert_close(cut + 1, torch.full((2, 3), 2.0))
    for read in (lambda: cut.full_tensor(), lambda: cut.reduce_partial().to_local()):
        x.add_(1)
        assert_close(read(), x.full_tensor()[1:3])


@multirank(2)
def test_shapes_in_place_and_empty_out():
    mesh = oc.ProcessMesh([0, 1], ["x"])
    x = oc.shard_tensor(torch.arange(6.0).view(3, 1, 2), mesh, [oc.Shard(0)])
    assert x.squeeze_(1).t_() is x and x.shape == (2, 3) and x.placements == (oc.Shard(1),)
    assert_close(x, torch.arange(6.0).view(3, 2).t())
    out = oc.shard_tensor(torch.empty(0), mesh, [oc.Replicate()])
    assert torch.add(x, 1, out=out) is out
    assert_close(out, x.full_tensor() + 1)
    with pytest.raises(DispatchError, match=r"cannot change its size in place.*reshape"):
        x.resize_(3, 3)


@multirank(2)
def test_complex_and_small_integers_travel():
    mesh = oc.ProcessMesh([0, 1], ["x"])
    for dtype in (torch.complex64, torch.int16):
        whole = torch.arange(15).view(5, 3).to(dtype) * (1 + 2j if dtype.is_complex else 1)
        for placement in (oc.Shard(0), oc.Shard(1), oc.Partial()):
            x = oc.shard_tensor(whole, mesh, [placement])
            assert_close(x, whole)
            assert_close(oc.reshard(x, mesh, [oc.Shard(1)]), whole)
    assert_close(oc.shard_tensor(whole.to(torch.complex64) * 1j, mesh, [oc.Shard(0)]).conj(), (whole * 1j).conj())
