"""The messages of a recording: which nodes send, along what, how much, and how long that takes on a machine."""

from __future__ import annotations

from collections import Counter
from inspect import unwrap
from math import prod
from typing import Any

from torch import fx

from onecard.comm.base import own
from onecard.comm.issue import again, staged, started, transfer
from onecard.comm.issue.message import name_of
from onecard.comm.world import world
from onecard.machine.cost import Machine, sent
from onecard.static.price import families, on_rows
from onecard.static.price.live import size_of
from onecard.static.step.row_calls import CALLS, START, first_half
from onecard.static.step.step import RecordedStep

OWN = "your own "
BETWEEN_MESHES = "between meshes"
"""What stands for the mesh axis of a transfer, as in ``explain``; links are told by it, too."""
_TRANSFER: Any = unwrap(transfer.run_transfer)
_SEND: Any = unwrap(started._send)
_RECEIVE: Any = unwrap(started._receive)
_SENDS = (_SEND, staged.send, staged.send_packed)
_RECEIVES = (_RECEIVE, staged.post)
_MESSAGES = {id(call) for call in (again.message, _TRANSFER, *_SENDS, *_RECEIVES)}
"""By identity: an operator of torch's is hashed and compared in Python, and this is asked of each node again and again."""


def is_message(node: fx.Node) -> bool:
    """Whether a node sends or receives."""
    return id(node.target) in _MESSAGES or (id(node.target) in CALLS and bool(on_rows.steps_of(node)))


def own_call(node: fx.Node) -> str:
    """The call of ``torch.distributed`` that a node repeats, where the program sends the message itself; "" of others."""
    if node.target is own.send_own:
        return str(node.args[1].key[0]).partition(".")[0].strip("_")  # type: ignore[union-attr]
    return str(node.args[0]) if node.target is own.functional else ""


def is_wait(node: fx.Node) -> bool:
    """Whether a node waits for a message that was started before."""
    return node.op == "call_function" and (node.target in (again.wait, staged.wait) or waits_for(node) is not None)


def waits_for(node: fx.Node) -> fx.Node | None:
    """The message that a node waits for; None: it waits for none."""
    if node.target in (again.wait, staged.wait):
        return node.args[0]  # type: ignore[return-value]
    return first_half(node)


def is_started(node: fx.Node) -> bool:
    """Whether a rank goes on while a message is under way, until something here waits for it."""
    return bool(node.kwargs.get("later")) or node.target in (staged.post, START)


def is_left(node: fx.Node) -> bool:
    """Whether a rank goes on while a message is under way, and nobody here waits for it: it only sends."""
    if node.target is _TRANSFER:
        plan, _, _, onward = _transfer_of(node)
        return bool(onward) and not any(p.receiver == rank_of(node) != p.sender for p in plan.pieces)
    return node.target in _SENDS


def kind_of(node: fx.Node) -> str:
    """What a message is: torch's name of the collective, "transfer", "send" or "recv"."""
    names = {_TRANSFER: "transfer", **dict.fromkeys(_SENDS, "send"), **dict.fromkeys(_RECEIVES, "recv")}
    if steps := on_rows.steps_of(node):
        return steps[0].kind
    return names.get(node.target) or str(node.args[2])


def axis_of(node: fx.Node) -> str:
    """The mesh axis of a message, or the name of its group; "" of what is none."""
    if not is_message(node):
        return ""
    if node.target is _TRANSFER:
        return BETWEEN_MESHES
    steps = on_rows.steps_of(node)
    return on_rows.axis_of(steps[0]) if steps else str(node.args[4])


def rank_of(node: fx.Node) -> int:
    """The rank that recorded a node."""
    return int(node.meta.get("rank", world.get_rank()))


def sent_along(recording: RecordedStep) -> dict[str, int]:
    """Bytes that this rank sends, by mesh axis."""
    found: Counter[str] = Counter()
    for node in filter(is_message, recording.nodes()):
        if steps := on_rows.steps_of(node):
            for step in steps:
                found[on_rows.axis_of(step)] += step.bytes
        else:
            found[axis_of(node)] += sent_by(node)
    return dict(found)


def sent_by(node: fx.Node) -> int:
    """Bytes that a message sends from this rank, as ``explain`` counts them."""
    if node.target is _TRANSFER:
        return int(_transfer_of(node)[0].sent_by(rank_of(node)))
    if node.target in (*_SENDS, *_RECEIVES):
        return _bytes(node.args[0]) if node.target in _SENDS else 0
    if steps := on_rows.steps_of(node):
        return sum(step.bytes for step in steps)
    _, given, kind, rest, line = node.args
    count = line.mesh.shape[line.axis]  # type: ignore[union-attr]
    size = size_of(given)  # type: ignore[arg-type]
    if "rounded" in node.meta:  # to a smaller dtype, before it is sent
        size = size // given.meta["tensor"][2].itemsize * node.meta["rounded"]  # type: ignore[union-attr]
    if kind == "all_to_all_single":  # each rank its part, which is not of one length
        element = size // max(1, sum(rest[1]))  # type: ignore[arg-type, index]
        return size - element * max(rest[1], default=0)  # type: ignore[index, arg-type]
    return sent(name_of(str(kind)), size, count)


def far_by(node: fx.Node, machine: Machine) -> int:
    """Those bytes that leave the host, as far as the machine says which ranks share one."""
    if not machine.per_host:
        return 0
    if node.target is _TRANSFER:
        return int(_transfer_of(node)[0].far_by(rank_of(node), machine))
    if node.target in (*_SENDS, *_RECEIVES):
        given: Any = node.args
        return sent_by(node) if machine.is_far(rank_of(node), given[3][given[1]]) else 0
    if steps := on_rows.steps_of(node):
        return sum(machine.far(step.bytes, step.target.mesh, step.axis, step.kind) for step in steps)
    _, _, kind, _, line = node.args
    return machine.far(sent_by(node), line.mesh, line.axis, name_of(str(kind)))  # type: ignore[union-attr]


def seconds_of(node: fx.Node, machine: Machine) -> float:
    """Seconds of a message: latency and bandwidth of what it goes over, or what was measured."""
    if node.target is _TRANSFER:
        return float(_transfer_of(node)[0].seconds_of(rank_of(node), machine, machine.links.get(BETWEEN_MESHES)))
    if node.target in (*_SENDS, *_RECEIVES):
        given: Any = node.args
        x, peer, _, ranks, name, *_ = given
        count, link = _bytes(x), machine.links.get(str(name))
        far = count if machine.is_far(rank_of(node), ranks[peer]) else 0
        return machine.message(count, far, link)
    if steps := on_rows.steps_of(node):
        links = [machine.link(step.target.mesh, step.axis) for step in steps]
        return sum(machine.message(s.bytes, link=link, kind=s.kind) for s, link in zip(steps, links, strict=True))
    _, _, kind, _, line = node.args
    name = families.sent(str(kind), line.mesh.shape[line.axis])  # type: ignore[union-attr]
    link = machine.link(line.mesh, line.axis, name_of(str(kind)))  # type: ignore[union-attr]
    kind = name if name in machine.curves else str(kind)
    return machine.message(sent_by(node), link=link, kind=kind)


def _transfer_of(node: fx.Node) -> tuple[Any, Any, Any, Any]:
    """Plan, local part, whether it is answered, whether the rank goes on."""
    plan, local, *rest = node.args
    given = dict(zip(("answered", "goes_on"), rest, strict=False)) | node.kwargs
    return plan, local, given.get("answered", False), given.get("goes_on", False)


def _bytes(x: Any) -> int:
    """Of a message that is packed: what is expanded travels with all its elements; of several tensors in one, all."""
    if isinstance(x, list | tuple):
        return sum(map(_bytes, x))
    shape, _, dtype, _ = x.meta["tensor"]
    return int(prod(shape) * dtype.itemsize)
