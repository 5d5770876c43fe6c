"""estimate: the work of one call of an operator, which its row tells, or torch's own counter where it has none. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from torch.utils.flop_counter import flop_registry

from onecard.rules.call import Call
from onecard.rules.registry import find
from onecard.rules.work import Work, work_of


def work_of_call(call: Call, operands: Sequence[int], results: Sequence[int]) -> Work:
    """The work of a call whose results are known; ``operands``, ``results``: bytes of each, as in ``work_of``."""
    row = find(call.func)
    form = row.form_for(call) if row is not None else None
    if row is None or form is None:
        macs = row.macs(call) if row is not None and row.macs is not None else counted(call)
        return Work(macs, sum(operands) + sum(results))
    if row.macs is None and not row.picks and "*" not in form.linear and not form.unread:  # no need to bind it
        return Work(0, sum(operands) + sum(results))
    bound = row.bound_for(call)
    return Work(counted(call), sum(operands) + sum(results)) if bound is None else work_of(bound, operands, results)


def counted(call: Call) -> int:
    """Multiply-adds by torch's own counter of floating-point operations, which counts two for each; 0 where it has no formula."""
    count = flop_registry.get(call.func.overloadpacket)
    if count is None or not call.results:
        return 0
    args, kwargs = call.given
    made = call.results[0] if len(call.results) == 1 else tuple(call.results)
    return int(count(*args, **kwargs, out_val=made)) // 2
