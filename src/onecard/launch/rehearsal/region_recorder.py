"""Who writes down the part of a program between two steps: every local operator, and every message with its price."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx

from onecard._torch import names as _torch
from onecard._torch.names import TorchDispatchMode, tree_leaves
from onecard.comm.base.record import Notice
from onecard.comm.issue import again
from onecard.comm.world import world
from onecard.launch.rehearsal.values import holds_others
from onecard.place.mesh import ProcessMesh
from onecard.static.capture.recorder import Recorder
from onecard.static.price.messages import axis_of, sent_by
from onecard.static.step.phases import Phases
from onecard.tensor.deferred.calls import storage_of

_OWN = {
    "allreduce_": "all_reduce", "allgather_": "all_gather_into_tensor", "_allgather_base_": "all_gather_into_tensor",
    "reduce_scatter_": "reduce_scatter_tensor", "_reduce_scatter_base_": "reduce_scatter_tensor", "broadcast_": "broadcast",
    "alltoall_base_": "all_to_all_single",
}  # fmt: skip
_FUNCTIONAL = {
    "all_reduce": 2, "all_reduce_": 2, "all_gather_into_tensor": 2, "reduce_scatter_tensor": 3, "all_to_all_single": 3,
    "broadcast": 2,
}  # fmt: skip
"""torch's functional collectives, and which argument is the group's name."""


class _Anything:
    """Stands for what was there before: what was not made in the region was."""

    def had(self, x: Any) -> bool:
        return True

    def asked(self, x: Any) -> None:
        pass


class _AnyDraw:
    """Stands for the watch over random numbers: nothing is replayed."""

    def check(self) -> None:
        pass

    def note(self) -> None:
        pass


class _Below(TorchDispatchMode):
    """Sees operators below autograd, and below all tensors that are made of others."""

    def __init__(self, recorder: RegionRecorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(map(holds_others, types)):
            return NotImplemented
        if not self.recorder.listens:
            return func(*args, **(kwargs or {}))
        return self.recorder.operator(func, args, kwargs or {})


class RegionRecorder(Recorder):
    """Writes down what runs; nothing is replayed, so that nothing is refused for it. A program's own messages are priced.

    Attributes:
        unpriced: names of messages that no price knows.
        asked: for names of nodes what needs the message, where onecard sends it.
    """

    def __init__(self, phases: Phases) -> None:
        self.asked: dict[str, Notice] = {}
        self._told: list[Notice] = []
        self._filled: dict[int, fx.Node] = {}
        self._named: dict[int, set[int]] = {}
        super().__init__(_Anything(), phases)
        self.random: Any = _AnyDraw()
        self.below: Any = _Below(self)
        self.calls = 1
        self.unpriced: set[str] = set()
        self._lines: dict[tuple[int, ...], again.Line] = {}
        self._started: dict[int, tuple[Any, fx.Node]] = {}

    def tell(self, message: Notice) -> None:
        """An observer: what is about to be sent, if anything, and what for."""
        if message.step.bytes:
            self._told.append(message)

    def message(self, what: Any, into: Tensor, given: Tensor) -> None:
        """Write it down with what it is for: messages are sent in the order in which they were told."""
        super().message(what, into, given)
        node = next(iter(reversed(self.graph.nodes)))
        for i, told in enumerate(self._told):
            axis = told.step.source.mesh.dim_names[told.step.axis]
            if what.operation.startswith(told.step.kind) and (axis, told.step.bytes) == (axis_of(node), sent_by(node)):
                self.asked[node.name] = told
                del self._told[: i + 1]
                return

    def needs_values(self) -> None:
        """What is divided by values is divided by those of this rehearsal."""

    def _read(self, func: Any, args: Any, kwargs: Any) -> Any:
        return func(*args, **kwargs)

    def operator(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Waits for a message first, where an operator takes what it brings."""
        if self._started and func.namespace != "c10d":
            for x in tree_leaves((args, kwargs)):
                if isinstance(x, Tensor) and id(x) in self._started:
                    self._wait(x)
        if func.namespace == "_c10d_functional":
            return self._functional(func, args, kwargs)
        if torch.Tag.dynamic_output_shape in func.tags:  # on data, or it would have been refused
            result = func(*args, **kwargs)
            self._add(func, args, kwargs, result, [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)])
            return result
        return super().operator(func, args, kwargs)

    def _count(self, func: Any, args: Any) -> None:
        pass

    # -- memory that is given up and taken again -------------------------------------------------------------------------

    def filled(self, x: Tensor) -> None:
        """A tensor's memory, which had been given up, is there again: it lives until its last use."""
        if self.listens:
            memory = storage_of(x)
            for key in self._named.pop(memory, ()):
                self._nodes.pop(key, None)
            node = self._put(torch.ops.aten.empty.memory_format, ([x.numel()],), {})
            node.meta["own"], node.meta["data"] = True, True
            self._filled[memory] = node
            self._name(x, node)

    def node_of(self, x: Tensor) -> fx.Node:
        """Also of other names of such memory."""
        found = self._nodes.get(id(x))
        if self._filled and (found is None or found[0]() is not x) and x.layout is torch.strided:
            base = self._filled.get(storage_of(x))
            if base is not None:
                node = self._put(torch.ops.aten.alias.default, (base,), {})
                node.meta["own"], node.meta["data"] = False, True
                self._name(x, node)
                return node
        return super().node_of(x)

    def _name(self, x: Tensor, node: fx.Node) -> None:
        super()._name(x, node)
        if x.layout is torch.strided:
            self._named.setdefault(storage_of(x), set()).add(id(x))

    # -- messages of the program's own -----------------------------------------------------------------------------------

    def own(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A collective of torch.distributed."""
        name = func._schema.name.rpartition("::")[2] if hasattr(func, "_schema") else ""
        if name not in _OWN:
            if name not in ("barrier", "monitored_barrier_"):
                self.unpriced.add(name or getattr(func, "__name__", str(func)))
            return super().own(func, args, kwargs)
        named = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
        kind, ranks = _OWN[name], _ranks(named["process_group"])
        into, given = _operands(name, named)
        with self.paused():
            result = func(*args, **kwargs)
        later = bool(named.get("async_op", named.get("asyncOp", False)))
        self._message(kind, into, given, _rest(kind, len(ranks), given, into), ranks, later)
        return result

    def _message(self, kind: str, into: Tensor, given: Tensor, rest: Any, ranks: tuple[int, ...], later: bool) -> None:
        if len(ranks) < 2:
            return
        node = self._add(again.message, (into, given, kind, rest, self._line(ranks)), {}, None, [into, given])
        if later:
            node.kwargs = {"later": True}
            self._started[id(into)] = into, node

    def _wait(self, x: Tensor) -> None:
        _, node = self._started.pop(id(x))
        self._put(again.wait, (node, *node.args[:2]), {})

    def _functional(self, func: Any, args: Any, kwargs: Any) -> Any:
        name = func._schema.name.rpartition("::")[2]
        if name == "wait_tensor":
            return args[0]
        result = func(*args, **kwargs)
        if name in _FUNCTIONAL and isinstance(args[0], Tensor):
            group = args[_FUNCTIONAL[name]]
            ranks = _ranks_named(group)
            self._add(func, args, kwargs, result, [args[0]])
            self._message(
                name.rstrip("_"), result, args[0], _rest(name.rstrip("_"), len(ranks), args[0], result), ranks, True
            )
        else:
            self.unpriced.add(name)
            self._add(func, args, kwargs, result, [x for x in tree_leaves(args) if isinstance(x, Tensor)])
        return result

    def _line(self, ranks: tuple[int, ...]) -> again.Line:
        """Ranks as a mesh: of all of them it is called dp, as programs that make no other groups use it."""
        if ranks not in self._lines:
            whole = len(ranks) == world.get_world_size()
            self._lines[ranks] = again.Line(ProcessMesh(ranks, ["dp" if whole else f"ranks {_short(ranks)}"]), 0)
        return self._lines[ranks]

    def alive(self) -> Iterator[tuple[Tensor, fx.Node]]:
        """What was made in the region and is still there."""
        for reference, node in self._nodes.values():
            x = reference()
            if x is not None and node.op != "placeholder":
                yield x, node


def _short(ranks: tuple[int, ...]) -> str:
    """Some ranks in words.

    Example:
        >>> _short((0, 8, 16)), _short((3, 4)), _short((0, 1, 3))
        ('0 to 16 by 8', '3 to 4', '0, 1, 3')
    """
    steps = {b - a for a, b in pairwise(ranks)}
    if len(steps) == 1 and len(ranks) > 1:
        (each,) = steps
        return f"{ranks[0]} to {ranks[-1]}" + (f" by {each}" if each != 1 else "")
    return ", ".join(map(str, ranks))


def _ranks_named(name: str) -> tuple[int, ...]:
    return _ranks(_torch.resolve_group(name)) if _torch.resolve_group is not None else ()


def _ranks(group: Any) -> tuple[int, ...]:
    found = dist.ProcessGroup.unbox(group) if isinstance(group, torch.ScriptObject) else group
    return tuple(dist.get_process_group_ranks(found))


def _operands(name: str, named: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """What is filled and what is given, of calls that take lists a part of each kind: sizes are what counts."""
    into = next((named[n] for n in ("output_tensor", "output_tensors", "output") if n in named), None)
    given = next((named[n] for n in ("input_tensor", "input_tensors", "input", "tensors") if n in named), None)
    first = [x for x in tree_leaves(given) if isinstance(x, Tensor)]
    whole = [x for x in tree_leaves(into) if isinstance(x, Tensor)] or first
    if name == "reduce_scatter_":  # each rank gives a list, of which it gets its part: as one tensor
        return whole[0], torch.cat([x.flatten() for x in first])
    return whole[0], first[0]


def _rest(kind: str, size: int, given: Tensor, into: Tensor) -> tuple[Any, ...]:
    each = [len(given) // size] * size if given.ndim else [1]
    return {
        "all_reduce": ("sum",), "all_gather_into_tensor": (size,), "reduce_scatter_tensor": ("sum", size),
        "broadcast": (0,), "all_to_all_single": (each, each),
    }[kind]  # fmt: skip
