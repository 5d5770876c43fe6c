"""What calls on rows take: as many rows as this rank had when they were recorded. How many it has is data."""

from __future__ import annotations

from contextlib import suppress

import torch
from torch import fx

from onecard.errors import OnecardError
from onecard.moves.resharding import Step
from onecard.rules.call import Call, schema_of
from onecard.rules.estimate import work_of_call
from onecard.rules.registry import find
from onecard.rules.work import Work
from onecard.static.step.row_calls import START, call_on_rows, first_half, is_on_rows
from onecard.tensor.rows import one_call
from onecard.tensor.rows.one_call import RowsCall


def steps_of(node: fx.Node) -> tuple[Step, ...]:
    """What such a call sent; of one in two halves, the first."""
    return call_on_rows(node).sent if is_on_rows(node) and first_half(node) is None else ()


def axis_of(step: Step) -> str:
    """The name of the mesh axis along which it was sent."""
    return step.target.mesh.dim_names[step.axis]


def work_on_rows(node: fx.Node) -> Work:
    """What it computed, and the bytes of its tensors."""
    call = call_on_rows(node)
    if node.target is START:
        return Work(0, 0)
    if call.operator is not None and schema_of(call.operator).views:
        return Work(0, 0)
    return Work(int(_macs(call) * call.share), call.accessed)


def dtype_of(node: fx.Node) -> str:
    """The dtype of its first tensor."""
    facts = next((f for f in call_on_rows(node).whole if f is not None), None)
    return "" if facts is None else str(facts[2]).removeprefix("torch.")


def _macs(call: RowsCall) -> float:
    """Multiply-adds on all rows."""
    row = None if call.operator is None else find(call.operator)
    if row is None:
        return 0
    given = [1.0 if f is None else torch.empty_strided(f[0], f[1], dtype=f[2], device="meta") for f in call.whole]
    _, args, kwargs = one_call.together(call.arguments, given, put=lambda part, spec: part)
    with suppress(OnecardError, NotImplementedError, RuntimeError):
        made = Call(call.operator, args, kwargs)  # type: ignore[arg-type]
        made.results = row.results_of(made)
        return work_of_call(made, [0] * len(made.operands), [0] * len(made.results)).macs
    return 0
