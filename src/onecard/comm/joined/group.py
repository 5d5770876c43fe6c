"""The process group of ranks that share a process: c10d's calls, each as what a rank brings and how it is filled."""

# mypy: disable-error-code="override, assignment"

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from onecard._torch import names as _torch
from onecard.comm.base import own
from onecard.comm.joined.hub import Fill, Hub, Parts, hub
from onecard.comm.shm import functional, tensors
from onecard.comm.shm.base import SUM, name_of
from onecard.comm.shm.other_devices import OtherDevices, unrecorded
from onecard.comm.shm.work import ShmWork
from onecard.errors import CommunicationError

NAME = "joined"

_FOLD: dict[str, Callable[[Any, Any], Any]] = {
    "sum": torch.add, "avg": torch.add, "product": torch.mul, "min": torch.minimum, "max": torch.maximum,
    "band": operator.and_, "bor": operator.or_, "bxor": operator.xor,
}  # fmt: skip


def folded(op: str, parts: Sequence[Tensor]) -> Tensor:
    """A reduction in the order of the ranks; narrow floats in float32, rounded once.

    Example:
        >>> folded("avg", [torch.ones(1), 3 * torch.ones(1)])
        tensor([2.])
    """
    narrow = parts[0].is_floating_point() and parts[0].itemsize < 4
    total = reduce(_FOLD[op], [x.float() for x in parts] if narrow else parts)
    total = total / len(parts) if op == "avg" else total
    return total.to(parts[0].dtype)


def register() -> None:
    """Makes torch.distributed know the backend. Once is enough; later calls do nothing."""
    if NAME.upper() not in _torch.backend_makers:
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu"])
        functional.ours.append(JoinedGroup)


def _create(options: Any, _: Any = None) -> JoinedGroup:
    ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
    if hub.here is None:
        raise CommunicationError(
            'the backend "joined" is that of onecard.prove: torch.distributed cannot be made with it'
        )
    unrecorded()
    return JoinedGroup(options.store, ranks, options.group_rank, hub.here, options.timeout)


@own.shown()
class JoinedGroup(OtherDevices):
    """A process group whose ranks are threads of this process."""

    def __init__(self, store: Any, ranks: Sequence[int], rank: int, shared: Hub, timeout: Any) -> None:
        super().__init__(store, rank, len(ranks))
        self._ranks, self._hub, self._mine, self._seq = tuple(ranks), shared, rank, 0
        self._timeout = timeout.total_seconds()

    def getBackendName(self) -> str:
        """The name by which it is registered."""
        return NAME

    def _post(
        self, kind: str, agreed: Sequence[Any], given: Sequence[Tensor], into: Sequence[Tensor], fill: Fill
    ) -> ShmWork:
        self._seq += 1
        return self._hub.post(self._ranks, kind, tuple(agreed), given, into, fill)

    # -- reductions ------------------------------------------------------------------------------------------------------

    def allreduce(self, given: Any, opts: Any = None, timeout: Any = None) -> Any:
        """Reduces a tensor in place on every rank."""
        return self.allreduce_coalesced(given if isinstance(given, list | tuple) else [given], opts)

    def allreduce_coalesced(self, given: Any, opts: Any = None) -> Any:
        """Reduces several tensors in place on every rank."""
        op = name_of(getattr(opts, "reduceOp", opts) or SUM)

        def fill(parts: Parts) -> None:
            for i, x in enumerate(given):
                tensors.fill(x, folded(op, [p[i] for p in parts]).view(x.shape))

        return self._post("all_reduce", (op, *(x.numel() for x in given)), given, given, fill)

    def reduce(self, given: Any, opts: Any = None, *rest: Any) -> Any:
        """Reduces a tensor into that of the root."""
        (x,) = given if isinstance(given, list | tuple) else (given,)
        root = opts if isinstance(opts, int) else opts.rootRank
        op = name_of(rest[0] if isinstance(opts, int) and rest else getattr(opts, "reduceOp", None) or SUM)

        def fill(parts: Parts) -> None:
            if self._mine == root:
                tensors.fill(x, folded(op, [p[0] for p in parts]).view(x.shape))

        return self._post("reduce", (op, root, x.numel()), [x], [x], fill)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> Any:
        """Reduces a list of tensors, one for each rank; every rank gets its own."""
        output = outputs[0] if isinstance(outputs, list | tuple) else outputs
        parts = inputs[0] if inputs and isinstance(inputs[0], list | tuple) else inputs
        return self._scattered(output, list(parts), name_of(getattr(opts, "reduceOp", opts) or SUM))

    def _scattered(self, output: Tensor, given: list[Tensor], op: str) -> ShmWork:
        def fill(parts: Parts) -> None:
            tensors.fill(output, folded(op, [p[self._mine] for p in parts]).view(output.shape))

        return self._post("reduce_scatter", (op, *(x.numel() for x in given)), given, [output], fill)

    def _reduce_scatter_base(self, output: Tensor, source: Tensor, opts: Any = None) -> Any:
        """Reduces one tensor of all ranks' parts; every rank gets its own."""
        parts = tensors.cut(source, output.numel(), self.size(), "reduce_scatter_tensor")
        return self._scattered(output, parts, name_of(getattr(opts, "reduceOp", None) or SUM))

    reduce_scatter_single = _reduce_scatter_base

    def reduce_scatter_tensor_coalesced(self, outputs: list[Tensor], sources: list[Tensor], opts: Any = None) -> Any:
        """Several reduce-scatters as one."""
        return _last([self._reduce_scatter_base(o, s, opts) for o, s in zip(outputs, sources, strict=True)])

    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced

    # -- copies ----------------------------------------------------------------------------------------------------------

    def broadcast(self, given: Any, opts: Any = None, timeout: Any = None) -> Any:
        """Fills a tensor with that of the root."""
        (x,) = given if isinstance(given, list | tuple) else (given,)
        root = opts if isinstance(opts, int) else opts.rootRank

        def fill(parts: Parts) -> None:
            if self._mine != root:
                tensors.fill(x, parts[root][0].view(x.shape))

        return self._post("broadcast", (root, x.numel()), [x], [x], fill)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> Any:
        """Every rank gets a list of all ranks' tensors, which may differ in size."""
        (source,) = inputs if isinstance(inputs, list | tuple) else (inputs,)
        targets = list(outputs[0] if isinstance(outputs[0], list | tuple) else outputs)

        def fill(parts: Parts) -> None:
            for target, part in zip(targets, parts, strict=True):
                tensors.fill(target, part[0].view(target.shape))

        return self._post("all_gather", [x.numel() for x in targets], [source], targets, fill)

    def _allgather_base(self, output: Tensor, source: Tensor, opts: Any = None) -> Any:
        """Every rank gets all ranks' tensors, of one size, in one tensor."""
        whole = source.numel() * self.size()
        if output.numel() != whole:
            raise ValueError(
                f"all_gather_into_tensor: the output has {output.numel()} elements, the ranks' parts {whole}"
            )

        def fill(parts: Parts) -> None:
            tensors.fill(output, torch.cat([p[0].reshape(-1) for p in parts]).view(output.shape))

        return self._post("all_gather", (output.numel(),), [source], [output], fill)

    all_gather_single = _allgather_base

    def allgather_into_tensor_coalesced(self, outputs: list[Tensor], sources: list[Tensor], opts: Any = None) -> Any:
        """Several all-gathers as one."""
        return _last([self._allgather_base(o, s, opts) for o, s in zip(outputs, sources, strict=True)])

    all_gather_single_coalesced = allgather_into_tensor_coalesced

    def allgather_coalesced(self, outputs: list[list[Tensor]], sources: list[Tensor], opts: Any = None) -> Any:
        """Several all-gathers into lists as one; outputs[rank][i]."""
        lists = [[outputs[rank][i] for rank in range(self.size())] for i in range(len(sources))]
        return _last([self.allgather([targets], [source]) for targets, source in zip(lists, sources, strict=True)])

    def gather(self, outputs: Any, inputs: Any, opts: Any = None, *rest: Any) -> Any:
        """The root gets a list of all ranks' tensors."""
        (source,) = inputs if isinstance(inputs, list | tuple) else (inputs,)
        root = opts if isinstance(opts, int) else opts.rootRank
        targets = []
        if self._mine == root:
            targets = list(outputs[0] if isinstance(outputs[0], list | tuple) else outputs)

        def fill(parts: Parts) -> None:
            for target, part in zip(targets, parts, strict=False):
                tensors.fill(target, part[0].view(target.shape))

        return self._post("gather", (root, source.numel()), [source], targets, fill)

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None, *rest: Any) -> Any:
        """Every rank gets its tensor of the root's list."""
        output = outputs[0] if isinstance(outputs, list | tuple) else outputs
        root = opts if isinstance(opts, int) else opts.rootRank
        given: list[Tensor] = []
        if self._mine == root:
            given = list(inputs[0] if isinstance(inputs[0], list | tuple) else inputs)

        def fill(parts: Parts) -> None:
            tensors.fill(output, parts[root][self._mine].view(output.shape))

        return self._post("scatter", (root, output.numel()), given, [output], fill)

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None, timeout: Any = None) -> Any:
        """Every rank gets a list of the tensors that all ranks sent it."""

        def fill(parts: Parts) -> None:
            for target, part in zip(outputs, parts, strict=True):
                tensors.fill(target, part[self._mine].view(target.shape))

        return self._post("all_to_all", (), inputs, outputs, fill)

    def alltoall_base(
        self, output: Tensor, source: Tensor, output_splits: Any, input_splits: Any, opts: Any = None, **_: Any
    ) -> Any:
        """Exchanges parts of one tensor, cut along its first dim; empty splits: equal parts."""
        dense = tensors.dense(output, read=False)
        received = tensors.split(dense, output_splits, self.size(), "output")
        given = tensors.split(source, input_splits, self.size(), "input")

        def fill(parts: Parts) -> None:
            for target, part in zip(received, parts, strict=True):
                tensors.fill(target, part[self._mine].view(target.shape))
            if dense is not output:
                tensors.fill(output, dense)

        return self._post("all_to_all", (), given, [output], fill)

    all_to_all_single = alltoall_base

    # -- the rest --------------------------------------------------------------------------------------------------------

    def barrier(self, opts: Any = None, timeout: Any = None) -> Any:
        """Waits until every rank has come."""
        return self._post("barrier", (), [], [], lambda _: None)

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """The same."""
        self.barrier().wait()

    def send(self, given: list[Tensor], to: int, tag: int = 0) -> Any:
        """Sends a tensor to a rank of the group."""
        return self._hub.send(given[0], self._ranks[to], tag)

    def recv(self, given: list[Tensor], source: int, tag: int = 0) -> Any:
        """Fills a tensor with one that a rank of the group sent under the same tag."""
        return self._hub.receive(given[0], self._ranks[source], tag, self._ranks)

    def recv_anysource(self, given: list[Tensor], tag: int = 0) -> Any:
        """Fills a tensor with one that any rank sent under this tag."""
        return self._hub.receive(given[0], None, tag, self._ranks)


def _last(works: list[ShmWork]) -> ShmWork:
    """The last of several that were begun in order: done when all are."""
    for work in works[:-1]:
        work.wait()
    return works[-1]
