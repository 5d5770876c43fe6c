"""A rule's text with the dims that a call's arguments point to, against a walk over the dims in plain Python."""

import itertools

import pytest
import torch

import onecard as oc
from onecard.errors import RuleError
from onecard.rules.call import Call
from onecard.rules.register import unproved
from onecard.rules.registry import Row, rows
from onecard.rules.rule import Form, bind
from onecard.rules.spelling import spelled
from onecard.rules.stated import check_form, check_row

aten = torch.ops.aten


def a_call(op, *args, **kwargs):
    """A call on meta tensors, with its results."""

    def meta(value):
        return torch.empty(value, device="meta") if isinstance(value, torch.Size) else value

    call = Call(op, [meta(a) for a in args], {k: meta(v) for k, v in kwargs.items()})
    call.results = call.meta_results()
    return call


def text_of(text, call, **traits):
    return spelled(Form(text, **traits), call).text


S = torch.Size


@pytest.mark.parametrize(
    ("op", "args", "text", "expected"),
    [
        (aten.addmm.default, (S([3, 5]), S([3, 4]), S([4, 5])), "[m n], m k, k n -> m n", "m n, m k, k n -> m n"),
        (aten.addmm.default, (S([5]), S([3, 4]), S([4, 5])), "[m n], m k, k n -> m n", "n, m k, k n -> m n"),
        (aten.addmm.default, (S([]), S([3, 4]), S([4, 5])), "[m n], m k, k n -> m n", "(), m k, k n -> m n"),
        (aten.add.Tensor, (S([3, 4]), S([4])), "...* -> ...*", "..., ... -> ..."),
        (aten.add.Tensor, (S([3, 4]), 2.0), "...* -> ...*", "... -> ..."),
        (aten.frexp.Tensor, (S([3]),), "...* -> ...*", "... -> ..., ..."),
        (aten.sum.dim_IntList, (S([3, 4, 5]), [1]), "... dim:r -> ... dim:-", "d0 r0 d1 -> d0 d1"),
        (aten.sum.dim_IntList, (S([3, 4, 5]), [-1, 0], True), "... dim:r -> ... dim:-", "r0 d0 r1 -> _ d0 _"),
        (aten.sum.dim_IntList, (S([3, 4]), []), "... dim:r -> ... dim:-", "r0 r1 -> ()"),
        (aten.sum.dim_IntList, (S([3, 4]), None, True), "... dim:r -> ... dim:-", "r0 r1 -> _ _"),
        (aten.sum.default, (S([3, 4]),), "... dim:r -> ... dim:-", "r0 r1 -> ()"),
        (aten.any.dims, (S([3, 4]), []), "... dim:r -> ... dim:-", "d0 d1 -> d0 d1"),
        (aten.max.dim, (S([3, 4]), 0), "... dim:r -> ... dim:- *", "r d0 -> d0, d0"),
        (aten.sum.dim_IntList, (S([]), [0]), "... dim:r -> ... dim:-", "() -> ()"),
        (aten.flip.default, (S([3, 4]), []), "... dims:_ -> ... dims:_", "d0 d1 -> d0 d1"),
        (aten.unsqueeze.default, (S([3, 4]), -1), "... -> ... dim:_", "d0 d1 -> d0 d1 _"),
        (aten.unsqueeze.default, (S([3, 4]), 0), "... -> ... dim:_", "d0 d1 -> _ d0 d1"),
        (aten.unfold.default, (S([4, 7]), -1, 3, 2), "... dimension:_ -> ... dimension:_ _", "d0 _ -> d0 _ _"),
        (aten.diagonal.default, (S([3, 4, 5]), 0, -1, 0), "... dim1:_ dim2:_ -> ... _", "_ d0 _ -> d0 _"),
        (aten.unbind.int, (S([4, 2, 3]), 1), "... dim:_ -> ...*", "d0 _ d1 -> d0 d1, d0 d1"),
        (aten.index_select.default, (S([4, 3]), 1, torch.zeros(2, dtype=torch.long, device="meta")),
         "... dim:v, [i] -> ... dim:i", "d0 v, i -> d0 i"),
        (aten.linear_backward.default, (S([2, 3, 4]), S([2, 3, 5]), S([5, 4]), [True, False, True]),
         "... k, ... n, n k -> ... k @1 2, n k @0 1, n @1", "... k, ... n, n k -> ... k @1 2, n @1"),
        (aten.native_layer_norm.default, (S([3, 4]), [4], None, S([4]), 1e-5),
         "... n, n, n -> ... n @0 2, ... _ @0, ... _ @0 1", "... n, n -> ... n @0 1, ... _ @0, ... _ @0"),
    ],
)  # fmt: skip
def test_spelled_out(op, args, text, expected):
    call = a_call(op, *args) if op is not aten.linear_backward.default else _linear_backward(args)
    assert text_of(text, call) == expected


def _linear_backward(args):
    call = Call(aten.linear_backward.default, [*(torch.empty(a, device="meta") for a in args[:3]), args[3]], {})
    call.results = [torch.empty(2, 3, 4), torch.empty(5)]
    return call


@torch.library.custom_op("spelling::joined", mutates_args=())
def joined(first: torch.Tensor | None, xs: list[torch.Tensor], last: torch.Tensor | None = None) -> torch.Tensor:
    return torch.stack(xs)


@joined.register_fake
def _(first, xs, last=None):
    return torch.stack(xs)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_repeated_term_leaves_the_others_to_their_arguments(count):
    op, xs, one = torch.ops.spelling.joined.default, [torch.empty(4, device="meta")] * count, S([4])
    for first, last in itertools.product((None, one), (None, one)):
        call = Call(op, [torch.empty(4) if first else None, xs, torch.empty(4) if last else None], {})
        call.results = [torch.empty(count, 4)]
        terms = ["a"] * bool(first) + ["b"] * count + ["c"] * bool(last)
        assert text_of("a, b*, c -> _ b", call) == f"{', '.join(terms)} -> _ b"


def test_traits_are_spelled_out_with_the_rule():
    call = a_call(aten.sum.dim_IntList, S([3, 4, 5]), [0, 2])
    form = spelled(Form("... dim:r -> ... dim:-", whole="r", nonempty="...", even="r ..."), call)
    assert (form.whole, form.nonempty) == ("r0 r1", "d0")
    assert set(form.even.split()) == {"r0", "r1", "d0"}
    scalar = spelled(Form("... dim:r -> ... dim:-", whole="r"), a_call(aten.sum.dim_IntList, S([]), [0]))
    assert scalar.whole == ""


def test_reductions_over_all_dims_and_ranks():
    """Which factors of the operand a result lacks, over every list of dims of up to four dims."""
    sizes = (3, 4, 5, 6)
    for rank in range(5):
        shape = sizes[:rank]
        for count, keep in itertools.product(range(1, rank + 1), (False, True)):
            for places in itertools.permutations(range(rank), count):
                dims = [d - rank if i % 2 else d for i, d in enumerate(places)]
                call = a_call(aten.amax.default, S(shape), dims, keep)
                form = spelled(Form("... dim:r -> ... dim:-", reduce="max"), call)
                bound = bind(form, call.names, [shape], [tuple(call.results[0].shape)])
                left = [bound.operands[0][d] for d in range(rank) if d not in places]
                assert [dim for dim in bound.results[0] if dim] == left
                assert len(bound.results[0]) == (rank if keep else rank - count)


# ---- what cannot be, and what is said of it


@torch.library.custom_op("spelling::over", mutates_args=())
def over(x: torch.Tensor, w: torch.Tensor, dim: int, dims: list[int], scale: float) -> torch.Tensor:
    return x.sum(dims, keepdim=True) + w.sum() * 0 + x * 0


@over.register_fake
def _(x, w, dim, dims, scale):
    return torch.empty_like(x)


@pytest.fixture(autouse=True)
def own_rows():
    before = dict(rows)
    yield
    rows.clear()
    rows.update(before)
    unproved.clear()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("... axis:v, w -> ... axis:v", "'axis' is no argument.*such arguments are dim, dims"),
        ("... scale:v, w -> ... scale:v", "'scale' is no argument"),
        ("... x:v, w -> ... x:v", "'x' is no argument"),
        ("... dim:v -> ...", "states 1 operand"),
        ("..., ..., ...* -> ... dim:q", "factor 'q' of result 0 is in no operand"),
        ("..., ..., ..., ...* -> ...", "states 4 operand"),
    ],
)
def test_refused_when_it_is_stated(text, words):
    with pytest.raises(RuleError, match=words):
        oc.register_rule(over, text)
    assert "spelling::over" not in rows


@pytest.mark.parametrize(
    "text", ["... dims:v, v -> ... dims:v", "... dim:v, _ -> ... dims:v", "... dims:v, _ -> ... dim:v"]
)
def test_a_list_of_dims_beside_one_dim_is_refused_by_the_call(text):
    check_form("spelling::over", Form(text), Row(("spelling::over",), Form(text)))
    call = a_call(torch.ops.spelling.over.default, S([3, 4]), S([3]), 0, [0, 1], 1.0)
    with pytest.raises(RuleError, match=r"'v' is .* a list of dims gives each a factor of its own"):
        spelled(Form(text), call)


def test_the_other_dims_broadcast_from_the_right():
    call = a_call(torch.ops.spelling.over.default, S([3, 4, 5]), S([5]), 0, [], 1.0)
    assert text_of("... dim:v, ... -> ... dim:v", call) == "v d0 d1, d1 -> v d0 d1"


def test_two_arguments_that_point_to_one_dim():
    """Legal for some operators (``transpose(0, 0)``), and no rule of the table may be taken for it by accident."""
    text = "... dim0:a dim1:b -> ... dim0:b dim1:a"
    assert text_of(text, a_call(aten.transpose.int, S([3, 4, 5]), 0, -1)) == "a d0 b -> b d0 a"
    with pytest.raises(RuleError, match=r"transpose.int: its rule says of dim0 and dim1 .* point to dim 1 alike"):
        text_of(text, a_call(aten.transpose.int, S([3, 4, 5]), 1, -2))


def test_a_wrong_rule_with_a_pointed_dim_is_not_kept():
    x, w = torch.randn(4, 3).double(), torch.randn(2).double()
    sample = [lambda: over(x, w, 0, [1], 1.0)]
    with pytest.raises(RuleError, match="the rule is wrong"):
        oc.register_rule(over, "... dims:v, _ -> ... dims:v", verify=sample)
    oc.register_rule(over, "... dims:_, _ -> ... dims:_", verify=sample)
    check_row("spelling::over", rows["spelling::over"])
