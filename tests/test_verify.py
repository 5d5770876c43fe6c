"""verify: the table is right, and wrong tables are seen to be wrong (negative controls)."""

import faulthandler
import os

import numpy as np
import pytest
import torch
import tyro
from amounts import amount, share
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Partial, Replicate, Shard

from onecard.place.layout import Layout
from onecard.rules.registry import Row, rows
from onecard.rules.rule import Form
from onecard.rules.samples import SampleProgram, elsewhere, samples
from onecard.rules.verify import Captured, capture, verify_call
from onecard.rules.verify.__main__ import VerifyOptions, main, prove_and_show
from onecard.rules.verify.guard import guarded
from onecard.rules.verify.proof import mesh_of
from onecard.rules.verify.report import calls_of_samples, verify_calls
from onecard.rules.verify.split import coordinates, mismatch, split, summands
from onecard.rules.verify.trial import Trial

aten = torch.ops.aten


@pytest.fixture(scope="module")
def calls():
    return calls_of_samples()[0]


# ---- the table


def test_no_row_is_wrong_on_two_ranks(calls):
    report = verify_calls([c for _, same in by_name(calls).items() for c in share(same, 3)], [(2,)])
    assert not report.wrong, "\n".join(map(str, report.wrong[:10]))
    assert not report.uncovered, f"rows without a sample in rules/samples: {report.uncovered}"
    assert len(report.covered) >= 150


def by_name(calls):
    """The calls of each operator."""
    found = {}
    for call in calls:
        found.setdefault(call.name, []).append(call)
    return found


def test_no_row_is_wrong_on_other_meshes(calls):
    """A part of the calls, another part on each mesh, or (`make proof`) half of them; the command proves them all."""
    for shape, part in (((3,), calls[:: amount(9, 2)]), ((2, 2), calls[1 :: amount(12, 2)])):
        report = verify_calls(part, [shape], limit=12)
        assert not report.wrong, "\n".join(map(str, report.wrong[:10]))


def test_dims_in_parts_are_tried():
    trial = Trial(Captured(aten.mm.default, (random(4, 6), random(6, 3)), {}), rows["mm"], mesh_of((2,)), 0)
    merged = {decision.operands for decision in trial.strategies() if any(x.merged for x in decision.operands)}
    assert {tuple(map(repr, operands)) for operands in merged} == {
        ("x=Shard(0, part 1 of [2, 2])", "x=Replicate"),
        ("x=Shard(1, part 1 of [2, 3])", "x=Shard(0, part 1 of [2, 3])"),
    }


def test_every_sample_runs_on_one_card():
    assert calls_of_samples()[1] == ()


def test_what_is_not_run_here_says_why():
    assert all(why for why in elsewhere().values())
    assert set(elsewhere()) <= set(rows), "a row that is gone"


# ---- negative controls: each of these tables is wrong


def random(*shape):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(len(shape)))


def scaled_on_the_first_axis_only(c):
    """Right on one axis; on two it forgets one."""
    share = c.span("b")[1] / c.size("b") if c.decision.uses[0].factor is not None else 1.0
    c.run = lambda x, *rest: x.mean(1) * share if x.numel() else x.sum(1)


def in_one_order(c):
    c.run = lambda equation, tensors: torch.einsum(equation, tensors).contiguous()


def mask_off_by_one(c):
    """The vocabulary shard begins one too late."""
    start, length = c.span("v")

    def run(weight, indices, *rest):
        mine = (indices >= start + 1) & (indices < start + 1 + length)
        found = torch.zeros((*indices.shape, weight.shape[1]), dtype=weight.dtype)
        found[mine] = weight[(indices[mine] - start).clamp(max=max(length - 1, 0))]
        return found

    c.run = run


def mask_right(c):
    start, length = c.span("v")

    def run(weight, indices, *rest):
        mine = (indices >= start) & (indices < start + length)
        found = torch.zeros((*indices.shape, weight.shape[1]), dtype=weight.dtype)
        found[mine] = weight[indices[mine] - start]
        return found

    c.run = run


def shifted_triangle(c):
    (row, rows), (column, columns) = c.span("a"), c.span("b")
    if (rows, columns) != c.call.self.shape:
        c.set("diagonal", row - column)


X34, X43 = random(3, 4), random(4, 3)
INDICES = torch.tensor([[0, 4, 2], [1, 3, 4]])
CONV = (
    random(4, 3, 5), random(4, 2, 7), random(3, 2, 3), [3], [1], [0], [1], False, [0], 1, [True, True, True],
)  # fmt: skip

# operator, arguments, wrong row, right row, mesh
CONTROLS = {
    "mm: a sum enters anywhere": (
        aten.mm.default, (X43, X34), Form("m k, k n -> m n", linear="self + mat2"),
        Form("m k, k n -> m n", linear="self * mat2"), (2,),
    ),
    "mm: transposed factors": (
        aten.mm.default, (random(4, 3), random(3, 4)), Form("m k, k n -> n m"), Form("m k, k n -> m n"), (2,),
    ),
    "mm: the inner factor gives a maximum": (
        aten.mm.default, (X43, X34), Form("m k, k n -> m n", reduce="max"), Form("m k, k n -> m n"), (2,),
    ),
    "softmax: nothing is whole": (
        aten._softmax.default, (X43, 1, False), Form("a b -> a b"), Form("a b -> a b", whole="b"), (2,),
    ),
    "softmax: the other dim is whole": (
        aten._softmax.default, (X43, 1, False), Form("a b -> a b", whole="a"), Form("a b -> a b", whole="b"), (2,),
    ),
    "sum: joined by max": (
        aten.sum.dim_IntList, (X43, [1]), Form("a b -> a", reduce="max"), Form("a b -> a"), (2,),
    ),
    "sum: of the other dim": (
        aten.sum.dim_IntList, (random(4, 4), [1]), Form("a b -> b"), Form("a b -> a"), (2,),
    ),
    "addmm: the bias is added on every rank": (
        aten.addmm.default, (random(3), X43, random(3, 3)), Form("n, m k, k n -> m n", linear="mat1 * mat2"),
        Form("n, m k, k n -> m n", linear="self + mat1 * mat2"), (2,),
    ),
    "convolution: the bias's gradient has the weight's terms": (
        aten.convolution_backward.default, CONV,
        Form("n o l, n i s, o i k -> n i s, o i k, o", whole="l s k"),
        Form("n o l, n i s, o i k -> n i s, o i k, o @0", whole="l s k"), (2,),
    ),
    "mean: not scaled": (
        aten.mean.dim, (X43, [1]), Form("a b -> a"), Form("a b -> a", whole="b"), (2,),
    ),
    "layer_norm: the normalised dim is cut": (
        aten.native_layer_norm.default, (X43, [3], None, None, 1e-5), Form("a b -> a b, a _, a _"),
        Form("a b -> a b, a _, a _", whole="b"), (2,),
    ),
    "relu: linear": (
        aten.relu.default, (X43,), Form("... -> ...", linear="self"), Form("... -> ..."), (2,),
    ),
    "relu in place: linear": (
        aten.relu_.default, (X43,), Form("... -> ...", linear="self"), Form("... -> ..."), (2,),
    ),
    "exp: only moves": (
        aten.exp.default, (X43,), Form("... -> ...", moves=True), Form("... -> ..."), (2,),
    ),
    "neg: only moves, but a maximum becomes a minimum": (
        aten.neg.default, (X43,), Form("... -> ...", moves=True), Form("... -> ...", linear="self"), (2,),
    ),
    "gather: an index may be pending": (
        aten.gather.default, (X43, 0, torch.tensor([[3, 1, 0]])), Form("a b, c b -> c b", moves=True, whole="a c"),
        Form("a b, c b -> c b", linear="self", whole="a c"), (2,),
    ),
    "add: the second operand is not read": (
        aten.add.Tensor, (X43, random(4, 3)), Form("..., ... -> ...", unread="other"), Form("..., ... -> ..."), (2,),
    ),
    "amax: a rank may be empty": (
        aten.amax.default, (random(2, 4), [0]), Form("a b -> b", reduce="max"),
        Form("a b -> b", reduce="max", nonempty="a"), (3,),
    ),
    "amax: joined by a sum": (
        aten.amax.default, (X43, [0]), Form("a b -> b"), Form("a b -> b", reduce="max"), (2,),
    ),
    "view: the inner factor is taken for the outer one": (
        aten.view.default, (random(4, 4), [2, 2, 4]), Form("(b a) c -> a b c"), Form("_ _ -> _ _ _"), (2,),
    ),
    "embedding: a vocabulary shard without a mask": (
        aten.embedding.default, (random(5, 3), INDICES), Form("v d, a b -> a b d"),
        Form("v d, a b -> a b d", whole="v"), (2,),
    ),
    "embedding: a mask off by one": (
        aten.embedding.default, (random(5, 3), INDICES),
        Row((), Form("v d, a b -> a b d"), local=mask_off_by_one),
        Row((), Form("v d, a b -> a b d"), local=mask_right), (3,),
    ),
    "mean: a hook that knows one axis only": (
        aten.mean.dim, (random(3, 4), [1]), Row((), Form("a b -> a"), local=scaled_on_the_first_axis_only),
        Form("a b -> a", whole="b"), (2, 2),
    ),
    "softmax: another function in its place": (
        aten._softmax.default, (X43, 1, False),
        Row((), Form("a b -> a b", whole="b"), instead=lambda x, dim, half: x.exp() / x.exp().sum()),
        Row((), Form("a b -> a b", whole="b"), instead=lambda x, dim, half: x.exp() / x.exp().sum(dim, True)), (2,),
    ),
    "einsum: summands in another order in memory on each rank": (
        aten.einsum.default, ("aik,aij->jk", [random(1, 3, 4), random(1, 3, 4)]), Form("a i k, a i j -> j k"),
        Row((), Form("a i k, a i j -> j k"), local=in_one_order), (2,),
    ),
    "tril: a hook that needs positions and does not say so": (
        aten.tril.default, (random(6, 4),), Row((), Form("a b -> a b"), local=shifted_triangle, positions=""),
        Row((), Form("a b -> a b"), local=shifted_triangle, positions="a b"), (2,),
    ),
    "clone: a dim that is not there": (
        aten.clone.default, (X43,), Form("a b c -> a b c"), Form("a b -> a b"), (2,),
    ),
}  # fmt: skip


def as_row(rule):
    return rule if isinstance(rule, Row) else Row((), rule)


@pytest.mark.parametrize("name", CONTROLS)
def test_a_wrong_table_is_rejected(name, monkeypatch):
    func, args, wrong, right, mesh = CONTROLS[name]
    row = func._schema.name.removeprefix("aten::").removesuffix("_")
    for name in [n for n in rows if n.partition(".")[0] == row]:
        monkeypatch.delitem(rows, name)
    monkeypatch.setitem(rows, row, as_row(wrong))
    assert verify_call(func, args, mesh_shape=mesh, missed=False).wrong
    monkeypatch.setitem(rows, row, as_row(right))
    result = verify_call(func, args, mesh_shape=mesh, missed=False)
    assert not result.wrong, result.wrong[0]
    assert result.proved


def test_the_hook_that_knows_one_axis_is_right_on_one(monkeypatch):
    """So the 2x2 mesh is what catches it."""
    row = Row((), Form("a b -> a"), local=scaled_on_the_first_axis_only)
    monkeypatch.setitem(rows, "mean.dim", row)
    assert not verify_call(aten.mean.dim, (random(3, 4), [1]), mesh_shape=(2,)).wrong


def test_a_fault_says_operator_rule_layouts_shapes_and_seed(monkeypatch):
    monkeypatch.setitem(rows, "relu", Row((), Form("... -> ...", linear="self")))
    fault = str(verify_call(aten.relu.default, (random(4, 3),), seed=5).wrong[0])
    for part in ("relu.default", "... -> ...", "x=Partial(sum) -> x=Partial(sum)", "float64[4, 3]", "seed 5", "want ["):
        assert part in fault


# ---- missed


def test_what_a_row_forbids_in_vain_is_listed(monkeypatch):
    monkeypatch.setitem(rows, "mm", Row((), Form("m k, k n -> m n", whole="m")))
    result = verify_call(aten.mm.default, (random(4, 3), random(3, 4)))
    assert result.missed["Shard(0) x Replicate"] == "Shard(0)"
    assert result.missed["Partial(sum) x Replicate"] == "Partial(sum)"
    assert "Partial(sum) x Partial(sum)" in result.refuted
    assert not result.wrong
    assert not verify_call(aten.mm.default, (random(4, 3), random(3, 4)), missed=False).missed


def test_a_layout_right_by_accident_is_not_missed_if_another_call_refutes_it(monkeypatch):
    monkeypatch.setitem(rows, "relu", Row((), Form("a b -> a b", whole="a b")))
    positive = capture(lambda: torch.relu(torch.ones(4, 3).double()), "", seed=1)
    other = capture(lambda: torch.relu(random(4, 3)))
    by_layout = {words for words in verify_calls([*positive, *other], missed=True).operators["relu"].missed}
    assert by_layout == {"Shard(0) -> Shard(0)", "Shard(1) -> Shard(1)"}


# ---- capture


def test_capture_keeps_forward_and_backward_calls_with_arguments_as_they_were():
    x = torch.ones(3, dtype=torch.float64)
    names = [call.name for call in capture(lambda: (x.clone().requires_grad_() * 2).exp())]
    assert names[:3] == ["clone.default", "mul.Tensor", "exp.default"]
    assert names.count("mul.Tensor") == 3, "two of them backward"
    (added,) = [call for call in capture(lambda: x.add_(1)) if call.name == "add_.Tensor"]
    assert added.args[0].tolist() == [1, 1, 1], "the copy was made before it was written to"


def test_new_memory_is_captured_as_zeros():
    """Else the number of strategies that are proved of copy_ depends on what the memory held before."""
    made = [torch.full((100,), float("inf")) for _ in range(20)]
    del made
    (copy,) = [
        call for call in capture(lambda: torch.empty(100).copy_(torch.ones(100))) if call.name == "copy_.default"
    ]
    assert not copy.args[0].any()


def test_equal_calls_have_equal_keys():
    def key(shape, factor):
        return capture(lambda: torch.ones(shape) * factor)[-1].key

    assert key((2, 3), 2.0) == key((2, 3), 2.0)
    assert len({key((2, 3), 2.0), key((3, 2), 2.0), key((2, 3), 3.0), key((2, 3), 2), key((2, 3), True)}) == 5


def test_capture_leaves_the_random_state_alone():
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    first = capture(lambda: torch.randn(3).exp())[-1].args[0]
    assert torch.equal(torch.rand(2), expected)
    assert torch.equal(capture(lambda: torch.randn(3).exp())[-1].args[0], first)


def test_samples_are_named_by_their_place():
    names = [str(sample) for sample in samples()]
    assert all(isinstance(sample, SampleProgram) for sample in samples())
    assert any(name.startswith("matmul.py:") for name in names)


# ---- splitting and joining


@st.composite
def tensors_and_layouts(draw):
    mesh = mesh_of(draw(st.sampled_from([(2,), (3,), (2, 2), (2, 3)])))
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=3)))
    op = draw(st.sampled_from(["sum", "avg", "max", "min", "product"]))
    options = [Replicate(), Partial(op), *map(Shard, range(len(shape)))]
    layout = Layout.of(mesh, len(shape), [draw(st.sampled_from(options)) for _ in range(mesh.ndim)])
    dtype = draw(st.sampled_from([torch.float64, torch.int64, torch.bool]))
    if dtype is not torch.float64 and op in ("avg", "min", "product"):
        dtype = torch.float64
    return torch.tensor(np.random.default_rng(0).normal(size=shape) * 5).to(dtype), layout


@settings(deadline=None)
@given(tensors_and_layouts())
def test_what_is_split_is_whole_again_and_a_changed_element_is_seen(case):
    whole, layout = case
    local = split(whole, layout, torch.Generator().manual_seed(1))
    assert mismatch(whole, layout, local) == ""
    place = next((p for p in coordinates(layout.mesh) if local[p].numel()), None)
    if place is not None and whole.dtype is not torch.bool:
        local[place] = local[place] + (-100 if ("min" in repr(layout)) else 100)
        assert "values at" in mismatch(whole, layout, local)
        assert mismatch(whole, layout, local, values=False) == ""


def test_mismatch_tells_shapes_dtypes_and_reductions_that_do_not_commute():
    whole, layout = random(4, 3), Layout.of(mesh_of((2,)), 2, [Shard(0)])
    half = {(0,): whole[:2], (1,): whole[2:]}
    assert mismatch(whole, layout, half) == ""
    assert "shape [3, 3] at (0,)" in mismatch(whole, layout, {(0,): whole[:3], (1,): whole[3:]})
    assert "dtype torch.float32 at (0,)" in mismatch(whole, layout, {p: t.float() for p, t in half.items()})
    mixed = Layout.make(mesh_of((2, 2)), ((), ()), ((0, "sum"), (1, "max")))
    assert "do not commute" in mismatch(whole, mixed, dict.fromkeys(coordinates(mixed.mesh), whole))


def test_nan_equals_nan():
    nan = torch.tensor([float("nan"), 1.0])
    layout = Layout.of(mesh_of((2,)), 1, [Replicate()])
    assert mismatch(nan, layout, {(0,): nan.clone(), (1,): nan.clone()}) == ""
    assert mismatch(nan, layout, {(0,): nan.clone(), (1,): torch.ones(2)}) != ""


@pytest.mark.parametrize("op", ["sum", "avg", "max", "min", "product"])
def test_summands_are_not_the_value_itself(op):
    whole = random(4, 3)
    parts = summands(whole, op, 3, torch.Generator().manual_seed(0))
    assert len(parts) == 3
    assert not any(torch.equal(part, whole) for part in parts)


# ---- the command


def test_the_command_line(tmp_path, capsys, monkeypatch):
    page = tmp_path / "docs" / "rules.md"
    options = tyro.cli(VerifyOptions, args=["--op", "mm", "--mesh", "2", "2x2", "--markdown", str(page), "--missed"])
    assert prove_and_show(options, print) == 0
    assert "| `mm` | `m k, k n -> m n; linear self * mat2` |" in page.read_text()
    assert "0 wrong" in capsys.readouterr().out
    monkeypatch.setitem(rows, "mm", Row((), Form("m k, k n -> m n", linear="self + mat2")))
    assert prove_and_show(options, print) == 1
    assert "wrong mm.default" in capsys.readouterr().out
    assert prove_and_show(VerifyOptions(op="no_such_operator"), print) == 2
    assert prove_and_show(VerifyOptions(family="no_such_family"), print) == 2
    assert "families:" in capsys.readouterr().out


def test_an_error_in_the_child_is_printed(capfd):
    assert guarded(lambda note: 1 // 0) == (1, "")
    assert "ZeroDivisionError" in capfd.readouterr().err


def test_a_kernel_that_ends_the_process_is_named(monkeypatch):
    def crash(options, note):
        note("relu.default of nowhere.py:1")
        os.abort()

    assert guarded(lambda note: 7) == (7, "")
    enabled = faulthandler.is_enabled()
    faulthandler.disable()  # in the child the crash is meant
    try:
        status, fault = guarded(lambda note: crash(None, note))
    finally:
        if enabled:
            faulthandler.enable()
    assert (status, fault) == (134, "SIGABRT in relu.default of nowhere.py:1")
    monkeypatch.setattr("onecard.rules.verify.__main__.prove_and_show", lambda options, note: 3)
    assert main(VerifyOptions()) == 3
