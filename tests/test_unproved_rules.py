"""Rules without proof: refused where they are stated, or named at the first call that shows that they are wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import onecard as oc
from onecard.errors import RuleError
from onecard.rules import Form
from onecard.rules.register import unproved
from onecard.rules.registry import rows
from onecard.rules.stated import check_row
from onecard.rules.table import softmax
from onecard.tensor.dispatch import first_calls
from onecard.tensor.dispatch.entry import programs
from onecard.testing import assert_close, multirank

MESH = oc.ProcessMesh([0, 1], ["x"])
SQUARE = oc.ProcessMesh([[0, 1], [2, 3]], ["x", "y"])


def operator(name: str, run: Any, schema: str) -> Any:
    """A custom operator of this file, without backward."""
    made = torch.library.custom_op(f"unproved::{name}", run, mutates_args=(), schema=schema)
    made.register_fake(lambda *args: torch.empty_like(run(*args)))
    return made


centre = operator("centre", lambda x: x - x.mean(0), "(Tensor x) -> Tensor")
scale = operator("scale", lambda x, s: x * s[:, None], "(Tensor x, Tensor s) -> Tensor")
noisy = operator("noisy", lambda x: x + torch.randn_like(x), "(Tensor x) -> Tensor")


@torch.library.custom_op("unproved::shift_", mutates_args=("x",))
def shift_(x: torch.Tensor) -> None:
    x -= x.amax(0)


@pytest.fixture(autouse=True)
def own_rows() -> Any:
    """Rows and what is known of them are as before when a test is over (in a rank as here)."""
    yield
    forget()


BEFORE = dict(rows)


def forget() -> None:
    rows.clear()
    rows.update(BEFORE)
    unproved.clear()
    programs.here.forget()


# What cannot be right, and what the error says of it.
REFUSED = {
    "a result's factor that no operand has": (
        ("aten::mm", "m k, k n -> m q"),
        {},
        r"'mm'.*factor 'q' of result 0.*'?\"?m _",
    ),
    "the same, merged": (("aten::mm", "m k, k n -> (m q) n"), {}, "factor 'q' of result 0"),
    "the same, of a custom operator": ((centre, "a b -> a c"), {}, "unproved::centre.*factor 'c'"),
    "too few operands": (("aten::mm", "m k -> m k"), {}, "states 1 operand.*has 2 tensor"),
    "too many operands": ((centre, "a b, a -> a b"), {}, "states 2 operand.*has 1 tensor"),
    "too many results": ((centre, "a b -> a b, a"), {}, "states 2 result.*has 1 tensor"),
    "no result": ((centre, "a b ->"), {}, "states 0 result"),
    "a whole factor that is none": ((centre, "a b -> a b"), {"whole": "n"}, "whole='n' names 'n'.*factors are a, b"),
    "nonempty likewise": ((centre, "a b -> a b"), {"nonempty": "a k"}, "nonempty='a k' names 'k'"),
    "even likewise": ((centre, "a b -> a b"), {"even": "c"}, "even='c' names 'c'"),
    "linear in no operand": ((scale, "n d, n -> n d"), {"linear": "x * y"}, "linear= names 'y'.*operands are s, x"),
    "unread likewise": ((centre, "n d -> n d"), {"unread": "self"}, "unread= names 'self'"),
    "no reduction": ((centre, "n d -> d"), {"reduce": "mean"}, "reduce='mean' is no reduction"),
    "too many reductions": ((centre, "n d -> d"), {"reduce": ("sum", "max")}, r"for 2 result\(s\)"),
    "a hook that is none": ((centre, "n d -> n d"), {"local": "shift"}, "local='shift' is no function"),
    "a hint on no operand": ((centre, "n d -> n d"), {"hint": ("weight", "n")}, "hint= names 'weight'"),
}


@pytest.mark.parametrize("fault", REFUSED)
def test_what_cannot_be_is_refused_at_registration(fault):
    stated, traits, words = REFUSED[fault]
    before = dict(rows)
    with pytest.raises(RuleError, match=f"(?s){words}"):
        oc.register_rule(*stated, replace=True, **traits)
    assert rows == before


def test_a_function_is_held_to_the_same():
    oc.register_rule("aten::mm", replace=True)(lambda call: "m k, k n -> m q")
    x = oc.shard_tensor(torch.ones(3, 4), oc.ProcessMesh([0], ["x"]), [oc.Replicate()])
    with pytest.raises(RuleError, match=r"row 'mm'.*factor 'q'"):
        torch.mm(x, torch.ones(4, 2))
    oc.register_rule("aten::mm", replace=True)(lambda call: 3)
    with pytest.raises(RuleError, match=r"row 'mm'.*returned 3; want"):
        torch.mm(x, torch.ones(4, 2))


def test_every_row_of_the_table_passes():
    for name, row in BEFORE.items():
        check_row(name, row)


def call_centre(x: Any) -> Any:
    return centre(x)


X, S = torch.arange(15.0).view(5, 3), torch.tensor([1.0, -2.0, 3.0, 0.5, 2.0])
SHARD, SUM = oc.Shard(0), oc.Partial()


def put(x: torch.Tensor, placement: Any) -> Any:
    """On the mesh; a pending tensor of summands that are neither the whole nor nothing."""
    if placement is not SUM:
        return oc.shard_tensor(x, MESH, [placement])
    return oc.from_local(x * (1.7, -0.7)[oc.get_rank()], MESH, [SUM])


def tanh_backward(x: Any) -> Any:
    return torch.ops.aten.tanh_backward(torch.ones(5, 3), x)


# operator, rule, traits, the call, its operands, their placement, whether the rule is right
BELIEVED: dict[str, tuple[Any, ...]] = {
    "a mean over a cut dim": (centre, "n d -> n d", {}, centre, (X,), SHARD, False),
    "the mean, whole": (centre, "n d -> n d", {"whole": "n"}, centre, (X,), SHARD, True),
    "linear that is none": ("aten::relu", "... -> ...", {"linear": "self"}, torch.relu, (X - 7,), SUM, False),
    "affine as linear": ("aten::cos", "... -> ...", {"linear": "self"}, torch.cos, (X,), SUM, False),
    "a move that is none": ("aten::exp", "... -> ...", {"moves": True}, torch.exp, (X / 9,), SUM, False),
    "two factors changed about": ("aten::t", "a b -> a b", {}, torch.t, (torch.randn(4, 4),), SHARD, False),
    "a maximum taken for a sum": ("aten::amax", "a b -> b", {}, lambda x: x.amax(0), (X,), SHARD, False),
    "a sum taken for a maximum": ("aten::sum", "a b -> b", {"reduce": "max"}, lambda x: x.sum(0), (X,), SHARD, False),
    "a product's factor lost": ("aten::mm", "m _, k n -> m n", {}, torch.mm, (X[1:2], torch.randn(3, 4)), SHARD, False),
    "mm": ("aten::mm", "m k, k n -> m n", {"linear": "self * mat2"}, torch.mm, (X, torch.randn(3, 4)), SHARD, True),
    "mm of a sum": ("aten::mm", "m k, k n -> m n", {"linear": "self * mat2"}, torch.mm, (X, torch.randn(3, 4)), SUM, True),
    "flip": ("aten::flip", "a b -> a b", {}, lambda x: x.flip(0), (X,), SHARD, False),
    "cumsum": ("aten::cumsum", "a b -> a b", {"linear": "self"}, lambda x: x.cumsum(0), (X,), SHARD, False),
    "cumsum over the other dim": ("aten::cumsum", "a b -> a b", {}, lambda x: x.cumsum(1), (X,), SHARD, True),
    "softmax": ("aten::_softmax", "a b -> a b", {}, lambda x: x.softmax(0), (X,), SHARD, False),
    "argmax": ("aten::argmax", "a b -> b", {"reduce": "max"}, lambda x: x.argmax(0), (X,), SHARD, False),
    "unread, but read": (scale, "n d, n -> n d", {"unread": "s"}, lambda x: scale(x, S.double()), (X,), SHARD, False),
    "scale": (scale, "n d, n -> n d", {"linear": "x * s"}, scale, (X, S), SHARD, True),
    "scale of a sum": (scale, "n d, n -> n d", {"linear": "x * s"}, scale, (X, S), SUM, True),  # one of the two is reduced
    "instead": (centre, "n d -> n d", {"whole": "n", "instead": lambda x: x - x.sum(0)}, centre, (X,), SHARD, False),
    "in place": ("aten::tanh", "... -> ...", {"linear": "self"}, lambda x: x.mul(1).tanh_(), (X / 9,), SUM, False),
    "out=": ("aten::tanh", "... -> ...", {"linear": "self"}, lambda x: torch.tanh(x, out=x.mul(1)), (X / 9,), SUM, False),
    "foreach": ("aten::exp", "... -> ...", {"linear": "self"}, lambda x: torch._foreach_exp([x])[0], (X / 9,), SUM, False),
    "backward": ("aten::tanh_backward", "..., ... -> ...", {"linear": "output"}, tanh_backward, (X / 9,), SUM, False),
}  # fmt: skip


@multirank(2)
def test_first_calls_show_wrong_rules_and_leave_right_ones():
    off = []
    for fault, (op, rule, traits, call, operands, placement, right) in BELIEVED.items():
        oc.register_rule(op, rule, replace=True, **traits)
        laid = [put(x.double(), placement) for x in operands]
        name, words = next(iter(unproved)), ""
        try:
            assert_close(call(*laid), call(*(x.double() for x in operands)), rtol=1e-9)
        except RuleError as error:
            words = str(error)
        named = f"for {name!r} is wrong" in words and "float64" in words and "[x=" in words and "verify=[" in words
        named = named and ("cuts" in words or "keeps" in words or fault == "instead")
        if bool(words) is right or (words and not named):
            off.append(f"{fault}: {words or 'taken'}")
        forget()
    assert not off, "\n".join(off)


@multirank(2)
def test_a_wrong_in_place_operator_is_named():
    shift_.register_fake(lambda x: None)
    oc.register_rule(shift_, "n d ->")
    x = oc.shard_tensor(torch.randn(5, 3), MESH, [oc.Shard(0)])
    with pytest.raises(RuleError, match=r"'unproved::shift_' is wrong: what it writes to differs.*by up to"):
        shift_(x)
    forget()


@pytest.mark.proof
@multirank(4)
def test_two_axes_and_a_training_step():
    oc.register_rule("aten::mm", "m k, k n -> m n", linear="self * mat2", replace=True)
    oc.register_rule("aten::tanh", "... -> ...", replace=True)
    torch.manual_seed(0)
    layer, x = nn.Linear(6, 5), torch.randn(7, 6)
    expected = torch.tanh(layer(x)).square().mean()
    expected.backward()
    gradient = layer.weight.grad.clone()
    layer.zero_grad()
    laid = oc.shard_layer(layer, SQUARE)
    loss = torch.tanh(laid(oc.shard_tensor(x, SQUARE, [oc.Shard(0), oc.Shard(1)]))).square().mean()
    loss.backward()
    assert_close(loss, expected)
    assert_close(laid.weight.grad, gradient)
    oc.register_rule("aten::exp", "... -> ...", linear="self", replace=True)
    with pytest.raises(RuleError, match=r"'exp' is wrong: result 0 differs"):
        torch.exp(oc.shard_tensor(x, SQUARE, [oc.Partial(), oc.Shard(1)]))
    forget()


@multirank(2)
def test_only_the_first_calls_are_compared_and_the_pending_stay_pending():
    oc.register_rule("aten::neg", "... -> ...", linear="self", replace=True)
    x = oc.shard_tensor(torch.randn(5, 3), MESH, [oc.Partial()])
    counts = []
    for _ in range(6):
        with oc.explain() as report:
            y = torch.neg(x)
        counts.append(len(report.messages))
    assert [bool(n) for n in counts] == [True, True, False, True, False, False], counts
    assert x.placements == y.placements == (oc.Partial(),)
    with oc.no_implicit_communication():  # what the comparison sends is asked for, by leaving out verify=
        torch.neg(oc.shard_tensor(torch.randn(4, 3), MESH, [oc.Partial()]))
    forget()


@multirank(2)
def test_a_first_call_of_zeros_proves_nothing_so_later_ones_are_compared():
    oc.register_rule("aten::relu", "... -> ...", linear="self", replace=True)
    torch.relu(oc.shard_tensor(torch.zeros(5, 3), MESH, [oc.Partial()]))
    with pytest.raises(RuleError, match=r"'relu' is wrong"):
        torch.relu(put(X - 7, SUM))
    with pytest.raises(RuleError, match=r"'relu' is wrong"):
        torch.relu(put(X - 7, SUM))
    forget()


@multirank(2)
def test_a_random_operator_is_said_to_be_unproved():
    first_calls._random.here.clear()
    oc.register_rule(noisy, "... -> ...")
    x = oc.shard_tensor(torch.zeros(5, 3), MESH, [oc.Shard(0)])
    torch.manual_seed(oc.get_rank())  # so that the two runs differ
    with pytest.warns(UserWarning, match=r"unproved.noisy.default draws random numbers.*nobody has proved it"):
        noisy(x)
    state = torch.get_rng_state()
    noisy(x)
    torch.set_rng_state(state)
    forget()


@multirank(2)
def test_low_precision_rounds_and_is_no_fault():
    oc.register_rule("aten::mm", "m k, k n -> m n", linear="self * mat2", replace=True)
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        a, b = torch.randn(9, 300).to(dtype), torch.randn(300, 7).to(dtype)
        torch.mm(oc.shard_tensor(a, MESH, [oc.Shard(1)]), oc.shard_tensor(b, MESH, [oc.Shard(0)]))
    forget()


def test_a_rule_returned_as_a_form_is_checked_too():
    oc.register_rule(centre)(lambda call: Form("a b -> c b"))
    with pytest.raises(RuleError, match=r"factor 'c' of result 0"):
        centre(oc.shard_tensor(X, oc.ProcessMesh([0], ["x"]), [oc.Replicate()]))


@pytest.mark.parametrize("log", [False, True])
def test_a_softmax_that_takes_half_and_gives_float(log):
    """What autocast asks of a GPU's kernel; the CPU's refuses it, so that no operator of this machine can be the reference."""
    x = torch.randn(3, 5, generator=torch.Generator().manual_seed(0)).half()
    body, whole = (softmax._log_softmax, torch.log_softmax) if log else (softmax._softmax, torch.softmax)
    for wide in (True, False):
        found = body(x, 1, wide)
        assert found.dtype == (torch.float32 if wide else torch.float16)
        torch.testing.assert_close(found, whole(x.float(), 1).to(found.dtype))
