"""A process group over several hosts: shared memory inside each, Gloo between them, so that each byte crosses once.

A sum is three steps. The ranks of a host add what they have, and each gets its part; the ranks in one place of all hosts add
their parts by Gloo; the ranks of a host give each other the parts. P bytes over 2 hosts take 1.0 P from each host, however many
ranks it has; a ring over all n ranks takes 2 (n - 1) / n P.

A broadcast goes to one rank of each host, and from there to the others; a sum for one rank the other way; an all-gather crosses
once for each host.

Gather, scatter, all-to-all and sends go by a group of Gloo over all ranks: each byte is for one rank, and crosses once as it is.
"""

# mypy: disable-error-code="override, assignment"

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from onecard._torch.names import AllgatherOptions
from onecard.comm.base import own
from onecard.comm.shm import tensors
from onecard.comm.shm.base import SUM, in_turn, name_of
from onecard.comm.shm.copies import root_of
from onecard.comm.shm.group import ShmGroup
from onecard.comm.shm.other_devices import OtherDevices
from onecard.comm.shm.work import Body

_ADDED = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32, torch.int64, torch.uint8})
"""What Gloo and shared memory add alike."""
_CHUNK, _CHUNKS = 1 << 20, 8
"""Bytes of a chunk of a sum, at least, and how many chunks there are at most."""
_REDUCED = {
    "sum": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "product": dist.ReduceOp.PRODUCT,
}


_JOINED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
    "product": torch.mul,
}


def grid_of(hosts: Sequence[str]) -> list[list[int]]:
    """The ranks of each host, in the order of their first ranks.

    Example:
        >>> grid_of(["a", "a", "b", "b"]), grid_of(["a", "b", "a"])
        ([[0, 1], [2, 3]], [[0, 2], [1]])
    """
    found: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        found.setdefault(host, []).append(rank)
    return list(found.values())


def fits(grid: Sequence[Sequence[int]]) -> bool:
    """Whether two levels are worth it: several hosts, each with as many ranks, and more than one.

    Example:
        >>> fits([[0, 1], [2, 3]]), fits([[0], [1]]), fits([[0, 1], [2]]), fits([[0, 1]])
        (True, False, False, False)
    """
    return len(grid) > 1 and len(grid[0]) > 1 and len({len(ranks) for ranks in grid}) == 1


def _flat(name: str) -> Callable[..., Any]:
    def call(self: HostsGroup, *args: Any, **more: Any) -> Any:
        return self._flat_call(name, *args, **more)

    call.__name__ = name
    call.__doc__ = f"Gloo's {name}, over all ranks."
    return call


@own.shown()
class HostsGroup(OtherDevices):
    """A process group of which each host has as many ranks.

    Args:
        inside: the group of this host's ranks; ``line``: Gloo's of the ranks in this one's place on each host; ``flat``: of all.
        grid: the ranks of each host.
    """

    scatters = True
    """It adds and divides in one step."""

    def __init__(
        self, store: Any, rank: int, inside: ShmGroup, line: Any, flat: Any, grid: list[list[int]], timeout: timedelta
    ) -> None:
        super().__init__(store, rank, sum(map(len, grid)))
        self._inside, self._line, self._whole, self._grid = inside, line, flat, grid
        self._timeout, self._seq = timeout.total_seconds(), 0

    # -- two levels ----------------------------------------------------------------------------------------------------

    def allreduce(self, given: Any, opts: Any = None, timeout: Any = None) -> Any:
        """Reduces a tensor in place on every rank."""
        (tensor,) = given if isinstance(given, list | tuple) else (given,)
        op = getattr(opts, "reduceOp", opts) or SUM
        if not self._takes(tensor, op):
            return self._flat_call("allreduce", [tensor], opts)
        return self._inside._start(self._sum(tensor, op), [tensor], opts)

    def allreduce_coalesced(self, given: Any, opts: Any = None) -> Any:
        """Reduces several tensors in place on every rank."""
        op = getattr(opts, "reduceOp", None) or SUM
        if not given or not all(self._takes(tensor, op) for tensor in given):
            return self._flat_call("allreduce_coalesced", given, opts)
        return self._inside._start(in_turn([self._sum(tensor, op) for tensor in given]), list(given), opts)

    def _reduce_scatter_base(self, output: Tensor, source: Tensor, opts: Any = None) -> Any:
        """Reduces one tensor of all ranks' parts; every rank gets its own."""
        if not tensors.here(output, source):
            return self._elsewhere(output)._reduce_scatter_base(output, source, opts)
        return self._inside._start(self._scattering(output, source, opts), [output], opts)

    def reduce_scatter_tensor_coalesced(self, outputs: list[Tensor], sources: list[Tensor], opts: Any = None) -> Any:
        """Several reduce-scatters as one."""
        bodies = [self._scattering(output, source, opts) for output, source in zip(outputs, sources, strict=True)]
        return self._inside._start(in_turn(bodies), list(outputs), opts)

    def _scattering(self, output: Tensor, source: Tensor, opts: Any) -> Body:
        op: Any = getattr(opts, "reduceOp", None) or SUM
        if name_of(op) != "sum" or not self._takes(output, op) or not output.is_contiguous():
            options = dist.ReduceScatterOptions()
            options.reduceOp = dist.ReduceOp(getattr(op, "op", op))
            return lambda deadline: self._await(self._whole._reduce_scatter_base(output, source, options), deadline)
        parts = tensors.cut(source, output.numel(), self.size(), "reduce_scatter_tensor")
        hosts = output.new_empty((len(self._grid), output.numel()))
        came = torch.empty_like(hosts)
        inside = [
            self._inside._scattered(into, [parts[rank] for rank in ranks], "sum")
            for into, ranks in zip(hosts, self._grid, strict=True)
        ]

        def cross(deadline: float) -> None:
            self._await(self._line.alltoall_base(came, hosts, [], [], dist.AllToAllOptions()), deadline)
            with torch.no_grad():
                output.detach().view(-1).copy_(came.sum(0, dtype=came.dtype))

        return in_turn([*inside, cross])

    reduce_scatter_single, reduce_scatter_single_coalesced = _reduce_scatter_base, reduce_scatter_tensor_coalesced

    def _allgather_base(self, output: Tensor, source: Tensor, opts: Any = None) -> Any:
        """Every rank gets all ranks' tensors, of one size, in one tensor."""
        if not tensors.here(source, output):
            return self._elsewhere(source)._allgather_base(output, source, opts)
        return self._inside._start(self._joining(output, source), [output], opts)

    def allgather_into_tensor_coalesced(self, outputs: list[Tensor], sources: list[Tensor], opts: Any = None) -> Any:
        """Several all-gathers as one."""
        bodies = [self._joining(output, source) for output, source in zip(outputs, sources, strict=True)]
        return self._inside._start(in_turn(bodies), list(outputs), opts)

    def _joining(self, output: Tensor, source: Tensor) -> Body:
        if not output.is_contiguous() or not source.numel():
            return lambda deadline: self._await(self._whole._allgather_base(output, source), deadline)
        parts = tensors.cut(output, source.numel(), self.size(), "all_gather_into_tensor")
        place = self._inside.rank()
        mine = [parts[ranks[place]] for ranks in self._grid]

        def cross(deadline: float) -> None:
            given = tensors.dense(source).detach().view(-1).clone()  # it may be its own part of the output
            self._await(self._line.allgather([mine], [given], AllgatherOptions()), deadline)

        inside = [
            self._inside._listed([parts[rank] for rank in ranks], here)
            for here, ranks in zip(mine, self._grid, strict=True)
        ]
        return in_turn([cross, *inside])

    all_gather_single, all_gather_single_coalesced = _allgather_base, allgather_into_tensor_coalesced

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> Any:
        """Every rank gets a list of all ranks' tensors."""
        (source,) = inputs if isinstance(inputs, list | tuple) else (inputs,)
        targets = list(outputs[0] if isinstance(outputs[0], list | tuple) else outputs)
        if not tensors.here(source, *targets) or {t.nbytes for t in targets} != {source.nbytes} or not source.nbytes:
            return self._flat_call("allgather", [targets], [source], opts)
        whole = source.new_empty((len(targets), source.numel()))

        def fill(_: float) -> None:
            for target, part in zip(targets, whole, strict=True):
                tensors.fill(target, part.view(target.shape))

        return self._inside._start(in_turn([self._joining(whole, source), fill]), targets, opts)

    def broadcast(self, given: Any, opts: Any = None, timeout: Any = None) -> Any:
        """Fills a tensor with that of the root."""
        (tensor,) = given if isinstance(given, list | tuple) else (given,)
        if not tensors.here(tensor) or not tensor.numel():
            return self._flat_call("broadcast", [tensor], opts)
        root = root_of(opts)
        host = next(number for number, ranks in enumerate(self._grid) if root in ranks)
        place, dense = self._grid[host].index(root), tensors.dense(tensor)
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = host, 0

        def cross(deadline: float) -> None:
            if root == self.rank() and dense is not tensor:
                tensors.fill(dense, tensor)
            if self._inside.rank() == place:
                self._await(self._line.broadcast([dense.detach().view(-1).view(torch.uint8)], options), deadline)

        steps: list[Body] = [cross, self._inside._from(place, dense)]
        if dense is not tensor:
            steps.append(lambda _: tensors.fill(tensor, dense))
        return self._inside._start(in_turn(steps), [tensor], opts)

    def reduce(self, given: Any, opts: Any = None, timeout: Any = None) -> Any:
        """Reduces a tensor into that of the root: each host to one rank, and those ranks to the root."""
        (tensor,) = given if isinstance(given, list | tuple) else (given,)
        op = getattr(opts, "reduceOp", None) or SUM
        if not self._takes(tensor, op):
            return self._flat_call("reduce", [tensor], opts)
        root, join = root_of(opts), _JOINED[name_of(op)]
        host = next(number for number, ranks in enumerate(self._grid) if root in ranks)
        place = self._grid[host].index(root)
        takes_part, is_root = self._inside.rank() == place, self.rank() == root
        dense = tensors.dense(tensor)
        mine = torch.empty_like(dense) if takes_part and not is_root else dense  # what it gave stays what it was
        options = dist.GatherOptions()
        options.rootRank = host

        def begin(_: float) -> None:
            if mine is not tensor:
                tensors.fill(mine, tensor)

        def cross(deadline: float) -> None:
            """Gloo's own reduce sends half of it twice."""
            if not takes_part:
                return
            flat = mine.detach().view(-1)
            each = list(flat.new_empty((len(self._grid), flat.numel()))) if is_root else []
            self._await(self._line.gather([each] if is_root else [], [flat], options), deadline)
            if is_root:
                flat.copy_(functools.reduce(join, each))
                if mine is not tensor:
                    tensors.fill(tensor, mine)

        inside = self._inside._reduction([mine], name_of(op), place)
        return self._inside._start(in_turn([begin, inside, cross]), [tensor], opts)

    def _takes(self, tensor: Tensor, op: Any) -> bool:
        """Whether a reduction of such a tensor goes by two levels: the same on all ranks."""
        here = tensors.here(tensor) and tensor.layout is torch.strided
        return here and tensor.dtype in _ADDED and name_of(op) in _REDUCED and tensor.numel() > 0

    def _sum(self, tensor: Tensor, op: Any) -> Body:
        """Inside, between, inside; in chunks, so that the wire is busy while the next chunk is added and the last one spread."""
        dense = tensors.dense(tensor)
        flat = dense.detach().view(-1)
        chunks = flat.tensor_split(max(1, min(_CHUNKS, flat.nbytes // _CHUNK)))
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(_REDUCED[name_of(op)])
        steps: list[Body] = []
        under_way: dict[int, Any] = {}
        spreads: list[list[Body]] = []
        for i, chunk in enumerate(chunks):
            parts = list(chunk.tensor_split(self._inside.size()))
            mine = parts[self._inside.rank()]

            def start(_: float, i: int = i, mine: Tensor = mine) -> None:
                if mine.numel():  # so on all hosts, or on none
                    under_way[i] = self._line.allreduce([mine], options)

            def end(deadline: float, i: int = i) -> None:
                if i in under_way:
                    self._await(under_way.pop(i), deadline)

            steps += [self._inside._scattered(mine, parts, name_of(op)), start, *(spreads.pop() if spreads else ())]
            spreads.append([end, self._inside._listed(parts, mine)])
        steps += spreads.pop()
        if dense is not tensor:
            steps = [lambda _: tensors.fill(dense, tensor), *steps, lambda _: tensors.fill(tensor, dense)]
        return in_turn(steps)

    def _await(self, work: Any, deadline: float) -> None:
        work.wait(timedelta(seconds=max(0.001, deadline - time.monotonic())))

    # -- over all ranks ------------------------------------------------------------------------------------------------

    def _flat_call(self, name: str, *args: Any, **more: Any) -> Any:
        first = args[0]
        while isinstance(first, list | tuple) and first:
            first = first[0]
        if isinstance(first, Tensor) and first.device.type != "cpu":
            return getattr(self._elsewhere(first), name)(*args, **more)
        return getattr(self._whole, name)(*(a for a in args if a is not None), **more)

    gather, scatter, reduce_scatter = _flat("gather"), _flat("scatter"), _flat("reduce_scatter")
    allgather_coalesced = _flat("allgather_coalesced")
    alltoall, alltoall_base = _flat("alltoall"), _flat("alltoall_base")
    all_to_all_single = _flat("alltoall_base")
    send, recv, recv_anysource = _flat("send"), _flat("recv"), _flat("recv_anysource")
    monitored_barrier = _flat("monitored_barrier")

    def barrier(self, opts: Any = None, timeout: Any = None) -> Any:
        """Waits until every rank has come."""
        return self._whole.barrier(opts if opts is not None else dist.BarrierOptions())

    def set_timeout(self, timeout: timedelta) -> None:
        """The time-out of calls that name none."""
        self._timeout = timeout.total_seconds()
        for group in (self._inside, self._line, self._whole):
            group.set_timeout(timeout)

    _set_default_timeout = set_timeout

    def shutdown(self) -> None:
        """Leaves the group."""
        for group in (self._inside, self._line, self._whole):
            group.shutdown()
        super().shutdown()

    def abort(self) -> None:
        """Leaves the group at once; whatever is under way fails."""
        for group in (self._inside, self._line, self._whole):
            group.abort()
