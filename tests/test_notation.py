"""The notation: what is read, and that every fault is shown with a caret under it."""

import pytest

from onecard.errors import RuleError
from onecard.rules.notation import Signature, Term, names_of, parse, parse_linear
from onecard.rules.rule import Form, bind


def terms(*dims):
    return tuple(
        term if isinstance(term, Term) else Term(tuple((name,) if isinstance(name, str) else name for name in term))
        for term in dims
    )


@pytest.mark.parametrize(
    ("text", "operands", "results"),
    [
        ("m k, k n -> m n", ["mk", "kn"], ["mn"]),
        ("a -> ", ["a"], []),
        (" -> a", [], ["a"]),
        ("(), a -> a", ["", "a"], ["a"]),
        ("() -> ()", [""], [""]),
        ("a_1 b2 -> b2", [["a_1", "b2"]], [["b2"]]),
        ("(a b) c -> a b c", [[("a", "b"), "c"]], ["abc"]),
        ("... _ k, k -> ... _", [["...", "_", "k"], "k"], [["...", "_"]]),
        ("_ _ -> _", [["_", "_"]], [["_"]]),
        ("m*, [n] -> m", [Term((("m",),), repeated=True), Term((("n",),), last=True)], ["m"]),
        (
            "... dim:v d:_ -> ...*",
            [Term((("...",),), placed=(("dim", "v"), ("d", "_")))],
            [Term((("...",),), repeated=True)],
        ),
    ],
)
def test_reads(text, operands, results):
    assert parse(text) == Signature(terms(*operands), terms(*results))


def test_sources_of_a_result():
    first, second = parse("n c, o c -> n o @0 1, o @1").results
    assert (first.sources, second.sources) == ((0, 1), (1,))
    assert parse("n c -> c @ 0").results[0].sources == (0,)


@pytest.mark.parametrize(
    ("text", "why", "caret"),
    [
        ("m k, k n", "expected '->'", 8),
        ("a -> b -> c", "a second '->'", 7),
        ("a ? -> a", "expected a factor name", 2),
        ("a, b $c -> a", "expected a factor name", 5),
        ("a ((b) -> a", "'(' inside '('", 3),
        ("a b) -> a", "')' without '('", 3),
        ("(a b -> a", "'(' is never closed", 5),
        ("(a ...) -> a", "'...' inside '( )'", 3),
        ("(_ a) -> a", "'_' inside '( )'", 1),
        ("... a ... -> a", "'...' more than once", 6),
        ("a b a -> b", "factor 'a' more than once", 4),
        ("b b ab -> b", "factor 'b' more than once", 2),
        ("k, (a k) k -> a", "factor 'k' more than once", 9),
        ("a -> ... a", "'...' in a result but in no operand", 5),
        ("a @0 -> a", "'@' belongs to a result", 2),
        ("a, b -> a @2, b @0", "'@' names operand 2 of 2", 10),
        ("a -> a @", "'@' names no operand", 7),
        ("[m n, k -> m", "'[' is never closed", 4),
        ("m [n] -> m", "'[' where none belongs", 2),
        ("m n] -> m", "']' where none belongs", 3),
        ("[[m]] -> m", "'[' where none belongs", 1),
        ("[... m] -> m", "'...' inside '[ ]'", 1),
        ("...*, ...* -> ...", "a second '*'", 9),
        ("a, b* -> a @0", "'@' counts operands", 11),
        ("dim:v ... -> ...", "'dim:v' belongs right after '...'", 0),
        ("... k dim:v -> ...", "'dim:v' belongs right after '...'", 6),
        ("(... dim:v) -> ...", "'...' inside '( )'", 1),
        ("... dim:- -> ...", "':-' belongs to a result", 4),
        ("... dim:v dims:v -> ...", "factor 'v' more than once", 10),
        ("... dim:v, d0 -> ... d0", "names that end in a number", 11),
        ("... dim:2 -> ...", "expected a factor name", 7),
    ],
)
def test_a_fault_has_a_caret_under_it(text, why, caret):
    with pytest.raises(RuleError, match="cannot read this rule") as raised:
        parse(text)
    message, shown, mark = str(raised.value).split("\n")
    assert why in message
    assert shown == f"  {text}"
    assert mark == "  " + " " * caret + "^", f"caret at {len(mark) - 3}, want {caret}"


def test_names_of_factors():
    assert names_of("h w") == {"h", "w"}
    assert names_of("... k") == {"...", "k"}
    assert names_of("") == set()


def test_linear():
    assert parse_linear("self + mat1 * mat2") == (("self",), ("mat1", "mat2"))
    assert parse_linear("  ") == ()
    with pytest.raises(RuleError, match="'a - b' is not an operand's name"):
        parse_linear("a - b")


# ---- binding to shapes


def dims_of(bound, shapes):
    """Operands and results with the factors' names in place of their numbers."""
    return [[tuple(bound.names[f] for f in dim) for dim in dims] for dims in shapes]


def test_broadcast_dims_line_up_on_the_right():
    bound = bind(Form("..., ... -> ..."), ["a", "b"], [(4, 1, 3), (5, 1)], [(4, 5, 3)])
    assert dims_of(bound, bound.operands) == [[(".0",), (), (".2",)], [(".1",), ()]]
    assert dims_of(bound, bound.results) == [[(".0",), (".1",), (".2",)]]


def test_a_dim_of_size_one_carries_no_factor_wherever_it_stands():
    first = bind(Form("..., ... -> ..."), ["a", "b"], [(4, 1), (1, 3)], [(4, 3)])
    assert dims_of(first, first.operands) == [[(".0",), ()], [(), (".1",)]]
    assert bind(Form("a b -> b"), ["x"], [(1, 3)], [(3,)]).names == ("b",)


def test_composite_dims_are_solved():
    bound = bind(Form("(a b) -> a b"), ["x"], [(12,)], [(3, 4)])
    assert dict(zip(bound.names, bound.sizes, strict=True)) == {"a": 3, "b": 4}
    sized = bind(Form("(a b) -> (b a)", sizes={"b": 2}), ["x"], [(6,)], [(6,)])
    assert dict(zip(sized.names, sized.sizes, strict=True)) == {"b": 2, "a": 3}


def test_traits_name_factors_and_operands():
    form = Form("... k, m -> ... k", whole="k", nonempty="m", even="...", unread="weight", linear="x + weight * gone")
    bound = bind(form, ["x", "weight"], [(2, 3, 4), (5,)], [(2, 3, 4)])
    name = bound.names.index
    assert bound.free == {name(".0"), name(".1"), name("m")}
    assert bound.nonempty == {name("m")}
    assert bound.even == {name(".0"), name(".1")}
    assert bound.unread == {1}
    assert bound.terms == ((0,), (1,))


def test_an_absent_operand_falls_out_of_the_linear_expression():
    form = Form("m k, k n -> m n", linear="bias + a * b")
    assert bind(form, ["a", "b"], [(2, 3), (3, 4)], [(2, 4)]).terms == ((0, 1),)


@pytest.mark.parametrize(
    ("text", "operands", "results", "why"),
    [
        ("m k, k n -> m n", [(2, 3)], [(2, 4)], r"states 2 operand\(s\) and 1 result\(s\), the call has 1"),
        ("m k -> m", [(2, 3, 4)], [(2,)], r"a term of 2 dim\(s\) meets a tensor of shape \[2, 3, 4\]"),
        ("m k, k -> m", [(2, 3), (4,)], [(2,)], "factor 'k' is both 3 and 4"),
        ("... a b -> ...", [(3,)], [()], r"meets a tensor of shape \[3\]"),
        ("(a b) -> a b", [(12,)], [(3, 5)], r"cannot split a dim of 12 into \('a', 'b'\)"),
        ("(a b) -> (a b)", [(12,)], [(12,)], "cannot split a dim of 12"),
    ],
)
def test_a_rule_that_does_not_fit(text, operands, results, why):
    with pytest.raises(RuleError, match=why):
        bind(Form(text), [f"x{i}" for i in range(len(operands))], operands, results)
