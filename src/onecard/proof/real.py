"""Messages of a rank in a process of its own, as values: what it hands to a process group, and what has come when it is read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from onecard.comm.base import own, record
from onecard.comm.joined.hub import Arrived, Told
from onecard.comm.world import world
from onecard.proof.interpreted import NodeWatch
from onecard.proof.makers import Makers, Source, storage_of
from onecard.proof.watch import tensors
from onecard.rules.call import schema_of

_CALLS = {
    "allreduce": ("all_reduce", 0, 0), "allreduce_coalesced": ("all_reduce", 0, 0), "reduce": ("reduce", 0, 0),
    "broadcast": ("broadcast", 0, 0), "send": ("send", 0, 0), "recv": ("recv", 0, 0), "recv_anysource": ("recv", 0, 0),
    "recv_any_source": ("recv", 0, 0), "allgather": ("all_gather", 1, 0), "allgather_base": ("all_gather", 1, 0),
    "all_gather_single": ("all_gather", 1, 0), "allgather_into_tensor_coalesced": ("all_gather", 1, 0),
    "allgather_coalesced": ("all_gather", 1, 0), "gather": ("gather", 1, 0), "scatter": ("scatter", 1, 0),
    "reduce_scatter": ("reduce_scatter", 1, 0), "reduce_scatter_base": ("reduce_scatter", 1, 0),
    "reduce_scatter_single": ("reduce_scatter", 1, 0), "reduce_scatter_tensor_coalesced": ("reduce_scatter", 1, 0),
    "alltoall": ("all_to_all", 1, 0), "alltoall_base": ("all_to_all", 1, 0), "all_to_all_single": ("all_to_all", 1, 0),
    "all_to_all_pieces": ("all_to_all", 1, 0),
}  # fmt: skip
"""Calls of process groups by torch's names: what it is, which argument is sent, which one is filled."""
_FUNCTIONAL = {
    "all_reduce": "all_reduce", "all_reduce_coalesced": "all_reduce", "broadcast": "broadcast",
    "all_gather_into_tensor": "all_gather", "all_gather_into_tensor_out": "all_gather",
    "all_gather_into_tensor_coalesced": "all_gather", "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter", "all_to_all_single": "all_to_all",
}  # fmt: skip
"""Functional ones, which send their first argument and whose result comes."""


class RealWatch(NodeWatch):
    """Looks on while one rank runs in a process of its own, whose process groups are real.

    What comes is there when the program has waited for it. So it is looked at as it is read, or at the end.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._awaited: list[tuple[list[Tensor], Arrived]] = []
        self._numbers: Counter[tuple[int, ...]] = Counter()
        self._within = False
        self._made = _Read(self)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace in ("c10d", "_c10d_functional"):
            return self._sent(func, args, args, kwargs, func.namespace != "c10d")
        if self._awaited and not schema_of(func).views:
            self.arrive(tensors((*args, *kwargs.values())))
        return super().__torch_dispatch__(func, types, args, kwargs)

    def by_python(self, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A call of a group in Python, which torch's dispatcher does not see."""
        return self._sent(call, args[1:], args, kwargs, False)

    def _sent(self, call: Any, what: Any, args: Any, kwargs: dict[str, Any], functional: bool) -> Any:
        name = (call._schema.name.rpartition("::")[2] if hasattr(call, "_schema") else call.__name__).strip("_")
        kind, mine, other = (_FUNCTIONAL.get(name, ""), 0, 0) if functional else _CALLS.get(name, ("", 0, 0))
        if self._within or not kind:
            return call(*args, **kwargs)
        given = tensors(what[mine : mine + 1])
        self.arrive(given)
        self._within = True
        try:
            arrived = self.told(
                self._told_of(
                    kind, own.ranks_of(args) or tuple(range(world.get_world_size())), given, (*what, *kwargs.values())
                ),
                given,
            )
            with self.paused():
                result = call(*args, **kwargs)
                for x in (
                    tensors((result,)) if functional else ()
                ):  # torch waits as they are used, which is out of sight
                    own.functional("wait_tensor", x)
        finally:
            self._within = False
        if arrived is not None and kind != "send":
            self._awaited.append((tensors((result,) if functional else what[other : other + 1]), arrived))
        return result

    def _told_of(self, kind: str, ranks: tuple[int, ...], given: Sequence[Tensor], what: Sequence[Any]) -> Told:
        me, first, op = world.get_rank(), given[0] if given else torch.empty(0, device="cpu"), ""
        if kind in ("send", "recv"):  # the other rank, if it is said, and the tag
            *whom, number = [x for x in what if type(x) is int]
            ends = me, ranks[whom[0]] if whom else me
            ranks = ends if kind == "send" else ends[::-1]
        else:
            number = self._numbers[ranks]
            self._numbers[ranks] += 1
        if "reduce" in kind:
            said = [getattr(x, "reduceOp", x) for x in what if isinstance(x, str) or hasattr(x, "reduceOp")]
            op = next((str(getattr(x, "op", x)).rpartition(".")[2].lower() for x in said), "")
        operator, operand, _ = record.serving.here
        return Told(kind, ranks, op, operator, operand, record.user_line(), tuple(first.shape), first.dtype, number)

    def arrive(self, read: Sequence[Tensor] | None = None) -> None:
        """Look at what has come in the memory of tensors that are about to be read; None: at all of it."""
        if not self._awaited:
            return
        memory = None if read is None else {*map(storage_of, read)}
        every, self._awaited = self._awaited, []
        now = [memory is None or not memory.isdisjoint(map(storage_of, into)) for into, _ in every]
        self._awaited = [one for one, read_now in zip(every, now, strict=True) if not read_now]
        for (into, arrived), read_now in zip(every, now, strict=True):
            if read_now:
                arrived(into)

    def end(self) -> None:
        """The program has ended."""
        self.arrive()
        super().end()


class _Read(Makers):
    """Who asks what has made a tensor reads it."""

    def __init__(self, watch: RealWatch) -> None:
        super().__init__()
        self._watch = watch

    def of(self, x: Tensor) -> Source | None:
        """What has made a tensor."""
        self._watch.arrive([x])
        return super().of(x)
