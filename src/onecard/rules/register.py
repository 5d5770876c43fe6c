"""register_rule: a row for an operator of one's own, checked when it is stated and proved on samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

import torch

from onecard._torch.names import OpOverload, OpOverloadPacket
from onecard.errors import RuleError
from onecard.rules import registry
from onecard.rules.notation import parse
from onecard.rules.registry import Row, row, rows
from onecard.rules.rule import Form
from onecard.rules.stated import check_row, checked_form

Sample = Callable[[], Any]
_OPTIONS = sorted(({f.name for f in fields(Form)} | {f.name for f in fields(Row)}) - {"text", "names", "form"})

# Called when a row is added or taken away: decisions made before are void.
changed: list[Callable[[], None]] = []

# Names of rows that were registered without a sample: their first calls are compared with the operator on whole tensors.
unproved: set[str] = set()


def register_rule(
    op: Any,
    text: str | None = None,
    *,
    verify: Sequence[Sample] = (),
    mesh_shapes: Sequence[Sequence[int]] = ((2,), (3,), (2, 2)),
    replace: bool = False,
    **traits: Any,
) -> Any:
    """State how an operator may run on parts of its tensors; prove it at once if samples are given, else in its first calls.

    Without ``verify=``, the first calls under each layout also gather their operands, run the operator on whole tensors and
    compare: that costs messages and time, once for each layout, and proves no more than what those calls show.

    Args:
        op: ``"mylib::op"``, or the operator (what ``torch.library.custom_op`` returns, or ``torch.ops.mylib.op``).
        text: the rule, one term for each tensor operand and result: ``"n d, n -> n d"``. Left out: this is a decorator
            of a function from the call's static arguments to the text.
        verify: functions that call the operator on small plain tensors (float64, sizes that do not divide). Every way of
            running that the rule allows is tried on them, part by part, in this process.
        mesh_shapes: the meshes to prove it on.
        replace: take the place of a row that is there already.
        traits: ``linear=``, ``whole=``, ``reduce=``, ``local=``, ``instead=`` and the other options of a row.

    Returns:
        The operator; as a decorator the function.

    Raises:
        RuleError: no such operator, a rule that cannot be read or that does not fit the operator's schema, a factor of a
            result that no operand has, an unknown trait, a second row; or a sample on which the rule is wrong, with the
            layouts. A wrong rule is not kept. Without samples: at the first call that shows that the rule is wrong.

    Source: rules as factors after Shardy (OpenXLA) and einsum; ``register_sharding`` of PyTorch lists strategies instead.

    Example:
        >>> @torch.library.custom_op("doctest::twice", mutates_args=())
        ... def twice(x: torch.Tensor) -> torch.Tensor:
        ...     return x + x
        >>> _ = twice.register_fake(torch.empty_like)
        >>> op = register_rule(twice, "a b -> a b", linear="x", verify=[lambda: twice(torch.ones(3, 2).double())])
    """
    name = _name_of(op)
    _check(name, text, traits, replace)

    def register(form: Any) -> Any:
        before = rows.pop(name, None)
        try:
            row(name, form, **traits) if isinstance(form, str) else row(name, **traits)(checked_form(name, form))
            check_row(name, rows[name])
            _tell()
            _prove(name, verify, mesh_shapes)
            (unproved.discard if verify else unproved.add)(name)
        except BaseException:
            rows.pop(name, None)
            if before is not None:
                rows[name] = before
            _tell()
            raise
        return op if isinstance(form, str) else form

    return register if text is None else register(text)


def _tell() -> None:
    for tell in changed:
        tell()


def _name_of(op: Any) -> str:
    """The name under which the table has an operator: "mylib::op", "add", "sum.dim_IntList"."""
    if isinstance(op, str):
        namespace, _, rest = op.rpartition("::")
        base, _, overload = rest.partition(".")
        packet = getattr(getattr(torch.ops, namespace or "aten"), base, None)
        if packet is None or (overload and overload not in packet.overloads()):
            raise RuleError(
                f"register_rule: there is no operator {op!r}. Define it before, for example with "
                f"torch.library.custom_op({op!r}, mutates_args=())"
            )
        return op.removeprefix("aten::")
    if isinstance(op, OpOverload):
        name, _, overload = op._schema.name, ".", op._schema.overload_name
        return (f"{name}.{overload}" if overload else name).removeprefix("aten::")
    if isinstance(op, OpOverloadPacket):
        return op._qualified_op_name.removeprefix("aten::")
    qualified: str | None = getattr(op, "_qualname", None)
    if qualified is None:
        raise RuleError(f"register_rule: {op!r} is no operator; give its name, 'mylib::op', or torch.ops.mylib.op")
    return qualified


def _check(name: str, text: str | None, traits: dict[str, Any], replace: bool) -> None:
    unknown = sorted(set(traits) - set(_OPTIONS))
    if unknown:
        raise RuleError(
            f"register_rule({name!r}): no such trait: {', '.join(unknown)}. There are {', '.join(_OPTIONS)}"
        )
    if text is not None:
        parse(text)
    if name in rows and not replace:
        raise RuleError(f"register_rule({name!r}): it has a row already; to take its place pass replace=True")


def _prove(name: str, samples: Sequence[Sample], mesh_shapes: Sequence[Sequence[int]]) -> None:
    from onecard.rules.verify import capture, prove  # it imports the rows, which import this package
    from onecard.rules.verify.proof import mesh_of

    for number, sample in enumerate(samples):
        calls = [call for call in capture(sample) if registry.row_name(call.func) == name]
        if not calls:
            raise RuleError(f"register_rule({name!r}): sample {number} of verify= does not call the operator")
        for call in calls:
            for shape in mesh_shapes:
                wrong = prove(call, mesh_of(shape)).wrong
                if wrong:
                    raise RuleError(
                        f"register_rule({name!r}): the rule is wrong on a mesh of {'x'.join(map(str, shape))} ranks, so it "
                        f"was not kept.\n{wrong[0]}"
                    )
