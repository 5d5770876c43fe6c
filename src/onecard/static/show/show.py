"""A recording as text: what goes in, each operator with its result, layout and line, messages marked, what comes out."""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import fx

from onecard.comm.issue import again
from onecard.static.price import on_rows
from onecard.static.price.messages import axis_of, is_message, own_call, sent_by
from onecard.static.price.price import called
from onecard.static.step import row_calls
from onecard.static.step.step import RecordedStep

PHASES = ("forward", "backward", "optimizer")


def text(recording: RecordedStep) -> str:
    """All of a recording, one line for each node.

    Example:
        >>> import onecard, torch
        >>> print(text(onecard.record(lambda x: x * 2.0)(torch.ones(3)))[:58])
        recording of <lambda>: 1 operators (forward 1), no message
    """
    return "\n".join([head(recording), *_inputs(recording), *_nodes(recording), *_outputs(recording)])


def head(recording: RecordedStep) -> str:
    """One line."""
    counts = Counter(n.meta.get("phase") for n in recording.nodes() if n.target is not operator.getitem)
    phases = ", ".join(f"{phase} {counts[phase]}" for phase in PHASES if counts[phase])
    sent: Counter[str] = Counter()
    messages = [n for n in recording.nodes() if is_message(n)]
    for n in messages:
        sent[axis_of(n)] += nbytes(n.args[1]) if n.target is again.message else sent_by(n)
    by_axis = ", ".join(f"{count:,} bytes along {axis!r}" for axis, count in sent.items())
    said = f"{len(messages)} messages ({by_axis})" if messages else "no message"
    beside = sum(bool(own_call(n)) for n in recording.nodes())
    said += f", {beside} of your own" if beside else ""
    return f"recording of {recording.name}: {sum(counts.values())} operators ({phases}), {said}"


def nbytes(node: Any) -> int:
    """Bytes of a node's result on this rank; 0 of what is no tensor."""
    facts = node.meta.get("tensor") if isinstance(node, fx.Node) else None
    return math.prod(facts[0]) * facts[2].itemsize if facts else 0


def kind(facts: Any) -> str:
    """A tensor in words."""
    return f"{list(facts[0])} {str(facts[2]).removeprefix('torch.')}" if facts else "number"


def _inputs(recording: RecordedStep) -> Iterator[str]:
    yield "inputs"
    nodes = [n for n in recording.graph.nodes if n.op == "placeholder"]
    for node, known in zip(nodes, recording.inputs, strict=True):
        what = kind(known.facts) if known.facts else known.kind
        where = f" [{known.spec.layout}]" if known.spec is not None else ""
        yield f"  {node.name:<12} {known.kind:<10} {known.name:<40} {what}{where}"


def _nodes(recording: RecordedStep) -> Iterator[str]:
    phase, module = "", ""
    for node in recording.nodes():
        here = node.meta.get("phase", "")
        if here != phase:
            yield here
            phase, module = here, ""
        if node.meta.get("module", "") != module:
            module = node.meta.get("module", "")
            yield f"  in {module or 'the function'}"
        yield _line(node)


def _line(node: fx.Node) -> str:
    args: Any = node.args
    facts, spec = node.meta.get("tensor"), node.meta.get("spec")
    if node.target is again.message:
        into, given, _, rest, line = args
        what = f"  >>>  {called(node)}({_value(given)}{f' -> {_value(into)}' if into is not given else ''}; "
        what += f"{', '.join(map(str, rest))}) along {str(line)!r}, {nbytes(given):,} bytes"
    else:
        shown = args[1] if row_calls.is_on_rows(node) else args
        given = ", ".join([*map(_value, shown), *(f"{k}={_value(v)}" for k, v in node.kwargs.items())])
        what = f"    {node.name} = {called(node)}({given})"
        if (first := row_calls.first_half(node)) is not None:
            what += f", which {first.name} has sent"
    if facts:
        what += f"  {kind(facts)}"
    if spec is not None:
        what += f" [{spec.layout}]"
    what += "".join(f", sends {step.bytes:,} bytes along {on_rows.axis_of(step)!r}" for step in on_rows.steps_of(node))
    at = node.meta.get("line") or "?"
    return f"{what}  # {Path(at).name}"


def _value(value: Any) -> str:
    if isinstance(value, fx.Node):
        return value.name
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return f"[{', '.join(map(_value, value))}]"
    return str(value).removeprefix("torch.")


def _outputs(recording: RecordedStep) -> Iterator[str]:
    nodes: Any = next(iter(reversed(recording.graph.nodes))).args[0]
    yield "outputs"
    for i, result in enumerate(recording.results):
        yield f"  result {i}: {nodes[result.position].name if hasattr(result, 'position') else result}"
    for effect in recording.effects:
        made = "None" if effect.output is None else nodes[effect.output.position].name
        yield f"  {effect.kind} of {recording.name_of(effect.where)}: {made}"
