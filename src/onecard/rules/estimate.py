"""estimate: the work of one call of an operator, which its row tells, or torch's own counter where it has none. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

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


def _recurrent(call: Call) -> int:
    """Of a recurrent layer: each step of each sequence meets every weight, in backward twice."""
    given = [call.values[name] for name in _WEIGHTS[call.schema.functional]]
    weights = [w for each in given for w in (each if isinstance(each, list | tuple) else [each]) if w.dim() == 2]
    once = prod(call.values["input"].shape[:-1]) * sum(w.numel() for w in weights)
    return once * (2 if "backward" in call.schema.name else 1)


_WEIGHTS = {
    "mkldnn_rnn_layer": ("weight0", "weight1"), "mkldnn_rnn_layer_backward": ("weight1", "weight2"),
    "_cudnn_rnn": ("weight",), "_cudnn_rnn_backward": ("weight",),
    "miopen_rnn": ("weight",), "miopen_rnn_backward": ("weight",),
}  # fmt: skip


def counted(call: Call) -> int:
    """Multiply-adds by torch's own counter of floating-point operations, which counts two for each; of whole recurrent layers, of
    which it knows nothing, by their weights; 0 of others."""
    if call.schema.functional in _WEIGHTS:
        return _recurrent(call)
    if call.schema.name == "_euclidean_dist":  # of many points; of few "_cdist_forward", which has a row
        one, other = call.operands
        return int(prod(one.shape) * other.shape[-2])
    count = flop_registry.get(call.func.overloadpacket)
    if count is None or not call.results:
        return 0
    args, kwargs = call.given
    made = call.results[0] if len(call.results) == 1 else tuple(call.results)
    return int(count(*args, **kwargs, out_val=made)) // 2
