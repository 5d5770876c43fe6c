"""The process group that torch sees: c10d's calls, put in terms of the four patterns."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from onecard.comm.shm import algorithms, tensors
from onecard.comm.shm.algorithms import Numbers
from onecard.comm.shm.channel import Channel
from onecard.comm.shm.messages import Messages
from onecard.comm.shm.other_devices import OtherDevices
from onecard.comm.shm.reduction import element, fold
from onecard.comm.shm.segment import FAILED
from onecard.comm.shm.signature import Signature
from onecard.comm.shm.sparse import all_reduce_sparse
from onecard.comm.shm.work import Body, ShmWork, WorkQueue
from onecard.errors import CommunicationError

_R = dist.ReduceOp.RedOpType
_OPS = {
    _R.SUM: "sum", _R.AVG: "avg", _R.PRODUCT: "product", _R.MIN: "min", _R.MAX: "max",
    _R.BAND: "band", _R.BOR: "bor", _R.BXOR: "bxor",
}  # fmt: skip
_SUM = dist.ReduceOp(dist.ReduceOp.SUM)

alive: weakref.WeakSet[ShmGroup] = weakref.WeakSet()
"""The groups of this process, to be left when it ends."""


def _name(op: Any) -> str:
    kind = getattr(op, "op", op)
    if kind not in _OPS:
        raise CommunicationError(f"the shm backend has no reduction {kind}; it has {', '.join(_OPS.values())}")
    return _OPS[kind]


class ShmGroup(OtherDevices):
    """A process group whose ranks share memory.

    The methods are those of torch.distributed.ProcessGroup; tensors on other devices go to their own backend.
    """

    def __init__(self, store: Any, channel: Channel, timeout: timedelta) -> None:
        super().__init__(store, channel.rank, channel.size)
        self._channel = channel
        self._timeout = timeout.total_seconds()
        self._queue = WorkQueue(f"shm-{channel.rank}")
        self._messages = Messages(channel)
        self._seq = 0
        alive.add(self)

    # -- running -------------------------------------------------------------------------------------------------

    def _start(self, body: Body, filled: list[Tensor], options: Any) -> ShmWork:
        work = ShmWork(self._guarded(body), filled, self._limit(options), self._queue.finish)
        if options is not None and getattr(options, "asyncOp", True) is False:
            self._queue.run_now(work)
        else:
            self._queue.submit(work)
        return work

    def _guarded(self, body: Body) -> Body:
        channel = self._channel

        def run(deadline: float) -> None:
            channel.check()
            try:
                body(deadline)
            except CommunicationError:
                raise
            except BaseException as error:  # this rank will never come to the end: the others must not wait for it
                rank = channel.ranks[channel.rank]
                channel.leave(FAILED, f"rank {rank} was stopped by {error!r} in {channel.what()}")
                raise

        return run

    def _limit(self, options: Any) -> float:
        given = options if isinstance(options, timedelta) else getattr(options, "timeout", None)
        seconds = given.total_seconds() if given is not None else 0.0
        return seconds if seconds > 0 else self._timeout

    def _sign(self, kind: str, count: int = 0, like: Tensor | None = None, op: str = "", root: int = -1) -> Signature:
        self._seq += 1
        return Signature(self._seq, kind, count, torch.uint8 if like is None else like.dtype, op, root)

    # -- reductions ----------------------------------------------------------------------------------------------

    def allreduce(self, given: Any, opts: Any = None, timeout: Any = None) -> Any:
        """Reduces a tensor in place on every rank."""
        (tensor,) = given if isinstance(given, list | tuple) else (given,)
        if tensor.device.type != "cpu":
            return self._elsewhere(tensor).allreduce(given, opts)
        op = _name(getattr(opts, "reduceOp", opts) or _SUM)
        if tensor.layout is not torch.strided:
            return self._start(all_reduce_sparse(self, self._channel, tensor, op), [tensor], opts)
        return self._start(self._reduction([tensor], op), [tensor], opts)

    def allreduce_coalesced(self, given: Any, opts: Any = None) -> Any:
        """Reduces several tensors in place on every rank."""
        if given and given[0].device.type != "cpu":
            return self._elsewhere(given[0]).allreduce_coalesced(given, opts)
        op = _name(getattr(opts, "reduceOp", None) or _SUM)
        return self._start(self._reduction(list(given), op), list(given), opts)

    def _reduction(self, given: list[Tensor], op: str, root: int = -1) -> Body:
        channel = self._channel
        kind = "all_reduce" if root < 0 else "reduce"
        signatures = [self._sign(kind, t.numel(), t, op, root) for t in given]
        folds = [fold(t.dtype, op) for t in given]
        receive = root < 0 or root == channel.rank

        def body(deadline: float) -> None:
            for tensor, signature, combine in zip(given, signatures, folds, strict=True):
                dense = tensors.dense(tensor)
                numbers = Numbers(dense.data_ptr(), dense.numel(), element(dense.dtype), dense.element_size(), combine)
                algorithms.all_reduce(channel, signature, deadline, numbers, receive)
                if dense is not tensor and receive:
                    tensors.fill(tensor, dense)

        return body

    def reduce(self, given: Any, opts: Any = None, *rest: Any) -> Any:
        """Reduces a tensor into that of the root."""
        (tensor,) = given if isinstance(given, list | tuple) else (given,)
        if tensor.device.type != "cpu":
            return self._elsewhere(tensor).reduce(given, opts, *rest)
        if isinstance(opts, int):
            root, op = opts, _name(rest[0] if rest else _SUM)
        else:
            root, op = opts.rootRank, _name(opts.reduceOp)
        return self._start(self._reduction([tensor], op, root), [tensor], opts)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> Any:
        """Reduces a list of tensors, one for each rank; every rank gets its own."""
        output = outputs[0] if isinstance(outputs, list | tuple) else outputs
        parts = inputs[0] if inputs and isinstance(inputs[0], list | tuple) else inputs
        if output.device.type != "cpu":
            return self._elsewhere(output).reduce_scatter(outputs, inputs, opts)
        op = _name(getattr(opts, "reduceOp", opts) or _SUM)
        return self._start(self._scattered(output, list(parts), op), [output], opts)

    def _scattered(self, output: Tensor, parts: list[Tensor], op: str) -> Body:
        channel = self._channel
        if len(parts) != channel.size or parts[channel.rank].numel() != output.numel():
            raise ValueError(
                f"reduce_scatter takes one input for each of the {channel.size} ranks, and this rank's as large as its "
                f"output of {output.numel()} elements; got {[part.numel() for part in parts]}"
            )
        counts = [part.numel() for part in parts]
        signature = self._sign("reduce_scatter", sum(counts), output, op)
        combine = fold(output.dtype, op)

        def body(deadline: float) -> None:
            sources = [tensors.dense(part) for part in parts]
            dense = tensors.dense(output, read=False)
            out = Numbers(dense.data_ptr(), dense.numel(), element(dense.dtype), dense.element_size(), combine)
            algorithms.reduce_scatter(channel, signature, deadline, [s.data_ptr() for s in sources], counts, out)
            if dense is not output:
                tensors.fill(output, dense)

        return body

    def _reduce_scatter_base(self, output: Tensor, source: Tensor, opts: Any = None) -> Any:
        """Reduces one tensor of all ranks' parts; every rank gets its own."""
        if output.device.type != "cpu":
            return self._elsewhere(output)._reduce_scatter_base(output, source, opts)
        op = _name(getattr(opts, "reduceOp", None) or _SUM)
        parts = tensors.cut(source, output.numel(), self.size(), "reduce_scatter_tensor")
        return self._start(self._scattered(output, parts, op), [output], opts)

    reduce_scatter_single = _reduce_scatter_base

    def reduce_scatter_tensor_coalesced(self, outputs: list[Tensor], sources: list[Tensor], opts: Any = None) -> Any:
        """Several reduce-scatters as one."""
        if outputs and outputs[0].device.type != "cpu":
            return self._elsewhere(outputs[0]).reduce_scatter_tensor_coalesced(outputs, sources, opts)
        op = _name(getattr(opts, "reduceOp", None) or _SUM)
        bodies = [
            self._scattered(output, tensors.cut(source, output.numel(), self.size(), "reduce_scatter_tensor"), op)
            for output, source in zip(outputs, sources, strict=True)
        ]
        return self._start(_in_turn(bodies), list(outputs), opts)

    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced

    # -- copies --------------------------------------------------------------------------------------------------

    def broadcast(self, given: Any, opts: Any = None, timeout: Any = None) -> Any:
        """Fills a tensor with that of the root."""
        (tensor,) = given if isinstance(given, list | tuple) else (given,)
        if tensor.device.type != "cpu":
            return self._elsewhere(tensor).broadcast(given, opts)
        root = opts if isinstance(opts, int) else opts.rootRank
        sizes = [tensor.nbytes if rank == root else 0 for rank in range(self.size())]
        signature = self._sign("broadcast", tensor.numel(), tensor, root=root)
        sender = root == self._channel.rank
        body = self._gathering(signature, tensor if sender else None, [tensor] * self.size(), sizes)
        return self._start(body, [tensor], opts)

    def _gathering(
        self, signature: Signature, source: Tensor | None, targets: list[Tensor] | None, sizes: Sequence[int]
    ) -> Body:
        """Brings each rank's `source` to `targets[rank]`; `sizes` in bytes, 0 for those that send nothing."""
        channel = self._channel

        def body(deadline: float) -> None:
            data = None if source is None else tensors.dense(source)
            filled = None
            if targets is not None:
                filled = [
                    tensors.dense(t, read=False) if size else None for t, size in zip(targets, sizes, strict=True)
                ]
                if data is not None and source is targets[channel.rank]:
                    filled[channel.rank] = data
            algorithms.all_gather(
                channel, signature, deadline, 0 if data is None else data.data_ptr(), sizes,
                None if filled is None else [0 if f is None else f.data_ptr() for f in filled],
            )  # fmt: skip
            for tensor, dense in zip(targets or (), filled or (), strict=True):
                if dense is not None and dense is not tensor and tensor is not source:
                    tensors.fill(tensor, dense)

        return body

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> Any:
        """Every rank gets a list of all ranks' tensors, which may differ in size."""
        (source,) = inputs if isinstance(inputs, list | tuple) else (inputs,)
        targets = list(outputs[0] if isinstance(outputs[0], list | tuple) else outputs)
        if source.device.type != "cpu":
            return self._elsewhere(source).allgather(outputs, inputs, opts)
        return self._start(self._listed(targets, source), targets, opts)

    def _listed(self, targets: list[Tensor], source: Tensor) -> Body:
        rank, sizes = self._channel.rank, [t.nbytes for t in targets]
        if len(targets) != self.size() or sizes[rank] != source.nbytes:
            raise ValueError(
                f"all_gather takes one output for each of the {self.size()} ranks, and this rank's as large as its "
                f"input of {source.numel()} elements; got {[t.numel() for t in targets]}"
            )
        signature = self._sign("all_gather", sum(t.numel() for t in targets), source)
        return self._gathering(signature, source, targets, sizes)

    def _allgather_base(self, output: Tensor, source: Tensor, opts: Any = None) -> Any:
        """Every rank gets all ranks' tensors, of one size, in one tensor."""
        if source.device.type != "cpu":
            return self._elsewhere(source)._allgather_base(output, source, opts)
        return self._start(self._joined(output, source), [output], opts)

    all_gather_single = _allgather_base

    def _joined(self, output: Tensor, source: Tensor) -> Body:
        if output.is_contiguous():
            return self._listed(tensors.cut(output, source.numel(), self.size(), "all_gather_into_tensor"), source)
        dense = tensors.dense(output, read=False)
        return _in_turn([self._joined(dense, source), lambda _: tensors.fill(output, dense)])

    def allgather_into_tensor_coalesced(self, outputs: list[Tensor], sources: list[Tensor], opts: Any = None) -> Any:
        """Several all-gathers as one."""
        if sources and sources[0].device.type != "cpu":
            return self._elsewhere(sources[0]).allgather_into_tensor_coalesced(outputs, sources, opts)
        bodies = [self._joined(output, source) for output, source in zip(outputs, sources, strict=True)]
        return self._start(_in_turn(bodies), list(outputs), opts)

    all_gather_single_coalesced = allgather_into_tensor_coalesced

    def allgather_coalesced(self, outputs: list[list[Tensor]], sources: list[Tensor], opts: Any = None) -> Any:
        """Several all-gathers into lists as one; outputs[rank][i]."""
        lists = [[outputs[rank][i] for rank in range(self.size())] for i in range(len(sources))]
        bodies = [self._listed(targets, source) for targets, source in zip(lists, sources, strict=True)]
        return self._start(_in_turn(bodies), [t for targets in lists for t in targets], opts)

    def gather(self, outputs: Any, inputs: Any, opts: Any = None, *rest: Any) -> Any:
        """The root gets a list of all ranks' tensors."""
        (source,) = inputs if isinstance(inputs, list | tuple) else (inputs,)
        if source.device.type != "cpu":
            return self._elsewhere(source).gather(outputs, inputs, opts, *rest)
        root = opts if isinstance(opts, int) else opts.rootRank
        targets = None
        if root == self._channel.rank:
            targets = list(outputs[0] if isinstance(outputs[0], list | tuple) else outputs)
            if [t.nbytes for t in targets] != [source.nbytes] * self.size():
                raise ValueError(f"gather takes {self.size()} outputs as large as the input, {source.numel()} elements")
        signature = self._sign("gather", source.numel(), source, root=root)
        return self._start(self._gathering(signature, source, targets, [source.nbytes] * self.size()), [], opts)

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None, *rest: Any) -> Any:
        """Every rank gets its tensor of the root's list."""
        output = outputs[0] if isinstance(outputs, list | tuple) else outputs
        if output.device.type != "cpu":
            return self._elsewhere(output).scatter(outputs, inputs, opts, *rest)
        root = opts if isinstance(opts, int) else opts.rootRank
        parts: list[Tensor] = []
        if root == self._channel.rank:
            parts = list(inputs[0] if isinstance(inputs[0], list | tuple) else inputs)
            if [t.nbytes for t in parts] != [output.nbytes] * self.size():
                raise ValueError(
                    f"scatter takes {self.size()} inputs as large as the output, {output.numel()} elements"
                )
        signature = self._sign("scatter", output.numel(), output, root=root)
        received = [output if rank == root else None for rank in range(self.size())]
        return self._start(self._exchange(signature, parts, received), [output], opts)

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None, timeout: Any = None) -> Any:
        """Every rank gets a list of the tensors that all ranks sent it."""
        if outputs[0].device.type != "cpu":
            return self._elsewhere(outputs[0]).alltoall(outputs, inputs, opts)
        if len(outputs) != self.size() or len(inputs) != self.size():
            raise ValueError(f"all_to_all takes {self.size()} outputs and inputs, got {len(outputs)} and {len(inputs)}")
        signature = self._sign("all_to_all", -1, outputs[0])
        return self._start(self._exchange(signature, list(inputs), list(outputs)), list(outputs), opts)

    def alltoall_base(
        self, output: Tensor, source: Tensor, output_splits: Any, input_splits: Any, opts: Any = None, **_: Any
    ) -> Any:
        """Exchanges parts of one tensor, cut along its first dim; empty splits: equal parts."""
        if output.device.type != "cpu":
            return self._elsewhere(output).alltoall_base(output, source, output_splits, input_splits, opts)
        dense = tensors.dense(output, read=False)
        received = tensors.split(dense, output_splits, self.size(), "output")
        sent = tensors.split(source, input_splits, self.size(), "input")
        body = self._exchange(self._sign("all_to_all", -1, output), sent, received)
        if dense is not output:
            body = _in_turn([body, lambda _: tensors.fill(output, dense)])
        return self._start(body, [output], opts)

    all_to_all_single = alltoall_base

    def _exchange(self, signature: Signature, sent: Sequence[Tensor], received: Sequence[Tensor | None]) -> Body:
        """Sends `sent[rank]` to each rank (none at all: nothing), fills `received[rank]` from it."""
        channel, none = self._channel, [0] * self.size()

        def body(deadline: float) -> None:
            sources = [tensors.dense(t) for t in sent]
            targets = [None if t is None else tensors.dense(t, read=False) for t in received]
            algorithms.all_to_all(
                channel, signature, deadline,
                [t.data_ptr() for t in sources] or none, [t.nbytes for t in sources] or none,
                [0 if t is None else t.data_ptr() for t in targets],
                [0 if t is None else t.nbytes for t in targets],
            )  # fmt: skip
            for tensor, dense in zip(received, targets, strict=True):
                if tensor is not None and dense is not None and dense is not tensor:
                    tensors.fill(tensor, dense)

        return body

    # -- the rest ------------------------------------------------------------------------------------------------

    def barrier(self, opts: Any = None, timeout: Any = None) -> Any:
        """Waits until every rank has come."""
        device = getattr(opts, "device", None)
        if device is not None and device.type != "cpu":
            return self._elsewhere(torch.empty(0, device=device)).barrier(opts)
        return self._start(self._barrier("barrier"), [], opts if opts is not None else timeout)

    def _barrier(self, kind: str) -> Body:
        channel, signature = self._channel, self._sign(kind)
        return lambda deadline: algorithms.barrier(channel, signature, deadline)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """A barrier whose error names all ranks that did not come in time."""
        limit = self._limit(timeout)
        work = ShmWork(self._guarded(self._barrier("monitored_barrier")), [], limit, self._queue.finish)
        self._queue.run_now(work)
        work.wait()

    def send(self, given: list[Tensor], to: int, tag: int = 0) -> Any:
        """Sends a tensor to a rank of the group."""
        (tensor,) = given
        if tensor.device.type != "cpu":
            return self._elsewhere(tensor).send(given, to, tag)
        return self._messages.send(tensor, to, tag, self._timeout)

    def recv(self, given: list[Tensor], source: int, tag: int = 0) -> Any:
        """Fills a tensor with one that a rank of the group sent under the same tag."""
        (tensor,) = given
        if tensor.device.type != "cpu":
            return self._elsewhere(tensor).recv(given, source, tag)
        return self._messages.receive(tensor, source, tag, self._timeout)

    def recv_anysource(self, given: list[Tensor], tag: int = 0) -> Any:
        """Fills a tensor with one that any rank sent under this tag; the work's `source_rank` tells which."""
        return self._messages.receive(given[0], None, tag, self._timeout)

    def set_timeout(self, timeout: timedelta) -> None:
        """The time-out of calls that name none."""
        self._timeout = timeout.total_seconds()

    _set_default_timeout = set_timeout

    def shutdown(self) -> None:
        """Leaves the group: what is queued is completed, and ranks that still wait for this one are told."""
        alive.discard(self)
        if self._channel.failure is None:
            self._queue.drain()
            self._messages.drain()
        self._channel.leave()
        self._messages.stop()
        self._queue.stop()
        super().shutdown()

    def abort(self) -> None:
        """Leaves the group at once; whatever is under way fails."""
        rank = self._channel.ranks[self._channel.rank]
        self._channel.leave(FAILED, f"rank {rank} aborted the group")
        self.shutdown()


def _in_turn(bodies: list[Callable[[float], Any]]) -> Body:
    def body(deadline: float) -> None:
        for part in bodies:
            part(deadline)

    return body
