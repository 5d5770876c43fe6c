"""Convolutions of one, two and three spatial dims, transposed ones and groups included; spatial dims are whole.

Channels of a convolution with groups are ``(g c)``: the groups may be cut, or with one group the channels themselves.
"""

from __future__ import annotations

from math import prod

from onecard.rules.call import Call
from onecard.rules.local import Local
from onecard.rules.registry import row
from onecard.rules.rule import Form


def _terms(call: Call) -> tuple[dict[str, str], dict[str, int]]:
    """The terms of input, weight, bias and result, and the sizes of the factors."""
    weight, spatial = call.weight.shape, " _" * (call.weight.dim() - 2)
    per_group = {"g": call.groups, "c": weight[1], "o": weight[0] // call.groups}
    if call.transposed:
        per_group |= {"c": weight[0] // call.groups, "o": weight[1]}
    ins, outs = ("c", "o") if call.groups == 1 else ("(g c)", "(g o)")
    terms = {
        "input": f"n {ins}{spatial}",
        "weight": (f"{ins} o" if call.transposed else f"{outs} c") + spatial,
        "bias": outs,
        "result": f"n {outs}{spatial}",
    }
    return terms, per_group if call.groups > 1 else {}


def _groups_local(c: Local) -> None:
    if c.cut("g"):
        c.set("groups", c.length("g"))


def _macs(call: Call) -> int:
    """Each element of the result, or of what is convolved transposed, meets a weight of its group; so do its gradients."""
    back = "grad_output" in call.names
    y = call.grad_output if back else call.results[0]
    once = prod((call.input if call.transposed else y).shape) * prod(call.weight.shape[1:])
    return once * sum(call.output_mask[:2]) if back else once


@row("convolution", local=_groups_local, positions="", macs=_macs)
def _convolution(call: Call) -> Form | None:
    if call.input.dim() != call.weight.dim():
        return None
    terms, sizes = _terms(call)
    text = f"{', '.join(terms[name] for name in call.names)} -> {terms['result']}"
    return Form(text, linear="input * weight + bias", sizes=sizes, nonempty="n g c o")


def _backward_local(c: Local) -> None:
    _groups_local(c)
    if c.call.output_mask[2]:
        c.set("bias_sizes", list(c.result_shape(len(c.call.results) - 1)))


@row("convolution_backward", local=_backward_local, positions="", macs=_macs)
def _convolution_backward(call: Call) -> Form | None:
    if call.input.dim() != call.weight.dim():
        return None
    terms, sizes = _terms(call)
    # The bias' gradient is that of the result summed up; the others depend on one of input and weight each.
    asked = [terms["input"] + " @0 2", terms["weight"] + " @0 1", terms["bias"] + " @0"]
    results = [term for term, wanted in zip(asked, call.output_mask, strict=True) if wanted]
    text = f"{terms['result']}, {terms['input']}, {terms['weight']} -> {', '.join(results)}"
    return Form(text, linear="grad_output * input * weight", sizes=sizes, nonempty="n g c o")
