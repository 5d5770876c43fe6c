"""The calls of c10d that move data as it is."""

# mypy: disable-error-code="override, assignment"

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from onecard.comm.shm import algorithms, tensors
from onecard.comm.shm.base import Collectives, in_turn
from onecard.comm.shm.signature import CollectiveSignature
from onecard.comm.shm.work import Body

Spans = Sequence[Sequence[tuple[int, int]]]


def _pieces(tensor: Tensor, spans: Spans) -> list[algorithms.Pieces]:
    base, size = tensor.data_ptr(), tensor.element_size()
    return [[(base + start * size, length * size) for start, length in each if length] for each in spans]


def _check_spans(tensor: Tensor, spans: Spans, ranks: int) -> None:
    most = tensor.numel()
    if len(spans) != ranks or any(min(at, n) < 0 or at + n > most for each in spans for at, n in each):
        raise ValueError(f"all_to_all: the stretches {spans} of {ranks} ranks do not lie in {most} elements")


def root_of(options: Any) -> int:
    """The rank that has, or gets, what the others do not."""
    return options if isinstance(options, int) else options.rootRank


class Copies(Collectives):
    """broadcast, all_gather, gather, scatter, all_to_all and their variants."""

    def broadcast(self, given: Any, opts: Any = None, timeout: Any = None) -> Any:
        """Fills a tensor with that of the root."""
        (tensor,) = given if isinstance(given, list | tuple) else (given,)
        if not tensors.here(tensor):
            return self._elsewhere(tensor).broadcast(given, opts)
        return self._start(self._from(root_of(opts), tensor), [tensor], opts)

    def _from(self, root: int, tensor: Tensor) -> Body:
        sizes = [tensor.nbytes if rank == root else 0 for rank in range(self.size())]
        signature = self._sign("broadcast", tensor.numel(), tensor, root=root)
        sender = root == self._channel.rank
        return self._gathering(signature, tensor if sender else None, [tensor] * self.size(), sizes)

    def _gathering(
        self, signature: CollectiveSignature, source: Tensor | None, targets: list[Tensor] | None, sizes: Sequence[int]
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
        if not tensors.here(source, *targets):
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
        if not tensors.here(source, output):
            return self._elsewhere(source)._allgather_base(output, source, opts)
        return self._start(self._joined(output, source), [output], opts)

    all_gather_single = _allgather_base

    def _joined(self, output: Tensor, source: Tensor) -> Body:
        if output.is_contiguous():
            return self._listed(tensors.cut(output, source.numel(), self.size(), "all_gather_into_tensor"), source)
        dense = tensors.dense(output, read=False)
        return in_turn([self._joined(dense, source), lambda _: tensors.fill(output, dense)])

    def allgather_into_tensor_coalesced(self, outputs: list[Tensor], sources: list[Tensor], opts: Any = None) -> Any:
        """Several all-gathers as one."""
        if sources and not tensors.here(*sources, *outputs):
            return self._elsewhere(sources[0]).allgather_into_tensor_coalesced(outputs, sources, opts)
        bodies = [self._joined(output, source) for output, source in zip(outputs, sources, strict=True)]
        return self._start(in_turn(bodies), list(outputs), opts)

    all_gather_single_coalesced = allgather_into_tensor_coalesced

    def allgather_coalesced(self, outputs: list[list[Tensor]], sources: list[Tensor], opts: Any = None) -> Any:
        """Several all-gathers into lists as one; outputs[rank][i]."""
        lists = [[outputs[rank][i] for rank in range(self.size())] for i in range(len(sources))]
        bodies = [self._listed(targets, source) for targets, source in zip(lists, sources, strict=True)]
        return self._start(in_turn(bodies), [t for targets in lists for t in targets], opts)

    def gather(self, outputs: Any, inputs: Any, opts: Any = None, *rest: Any) -> Any:
        """The root gets a list of all ranks' tensors."""
        (source,) = inputs if isinstance(inputs, list | tuple) else (inputs,)
        if not tensors.here(source):
            return self._elsewhere(source).gather(outputs, inputs, opts, *rest)
        root = root_of(opts)
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
        if not tensors.here(output):
            return self._elsewhere(output).scatter(outputs, inputs, opts, *rest)
        root = root_of(opts)
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
        if not tensors.here(*outputs, *inputs):
            return self._elsewhere(outputs[0]).alltoall(outputs, inputs, opts)
        if len(outputs) != self.size() or len(inputs) != self.size():
            raise ValueError(f"all_to_all takes {self.size()} outputs and inputs, got {len(outputs)} and {len(inputs)}")
        signature = self._sign("all_to_all", -1, outputs[0])
        return self._start(self._exchange(signature, list(inputs), list(outputs)), list(outputs), opts)

    def alltoall_base(
        self, output: Tensor, source: Tensor, output_splits: Any, input_splits: Any, opts: Any = None, **_: Any
    ) -> Any:
        """Exchanges parts of one tensor, cut along its first dim; empty splits: equal parts."""
        if not tensors.here(output, source):
            return self._elsewhere(output).alltoall_base(output, source, output_splits, input_splits, opts)
        dense = tensors.dense(output, read=False)
        received = tensors.split(dense, output_splits, self.size(), "output")
        sent = tensors.split(source, input_splits, self.size(), "input")
        body = self._exchange(self._sign("all_to_all", -1, output), sent, received)
        if dense is not output:
            body = in_turn([body, lambda _: tensors.fill(output, dense)])
        return self._start(body, [output], opts)

    all_to_all_single = alltoall_base

    def all_to_all_pieces(self, output: Tensor, source: Tensor, come: Spans, leave: Spans, opts: Any = None) -> Any:
        """`alltoall_base` of parts that are several stretches each, of elements: what comes is put where it belongs at once.

        Args:
            output, source: contiguous.
            come, leave: for each rank where its stretches begin, and their lengths.
        """
        for tensor, spans in ((output, come), (source, leave)):
            _check_spans(tensor, spans, self.size())
        channel, signature = self._channel, self._sign("all_to_all", -1, output)

        def body(deadline: float) -> None:
            algorithms.all_to_all(channel, signature, deadline, _pieces(source, leave), _pieces(output, come))

        return self._start(body, [output], opts)

    def _exchange(
        self, signature: CollectiveSignature, sent: Sequence[Tensor], received: Sequence[Tensor | None]
    ) -> Body:
        """Sends `sent[rank]` to each rank (none at all: nothing), fills `received[rank]` from it."""
        channel, nothing = self._channel, [()] * self.size()

        def body(deadline: float) -> None:
            sources = [tensors.dense(t) for t in sent]
            targets = [None if t is None else tensors.dense(t, read=False) for t in received]
            algorithms.all_to_all(
                channel, signature, deadline,
                [[(t.data_ptr(), t.nbytes)] for t in sources] or nothing,
                [() if t is None else [(t.data_ptr(), t.nbytes)] for t in targets],
            )  # fmt: skip
            for tensor, dense in zip(received, targets, strict=True):
                if tensor is not None and dense is not None and dense is not tensor:
                    tensors.fill(tensor, dense)

        return body
