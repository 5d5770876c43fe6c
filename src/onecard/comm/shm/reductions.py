"""The calls of c10d that reduce."""

# mypy: disable-error-code="override, assignment"

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from onecard.comm.shm import algorithms, tensors
from onecard.comm.shm.algorithms import Numbers
from onecard.comm.shm.base import SUM, Collectives, in_turn, name_of
from onecard.comm.shm.reduction import element, fold
from onecard.comm.shm.sparse import all_reduce_sparse
from onecard.comm.shm.work import Body

_SMALL = 64 * 1024  # bytes below which copying a tensor costs less than a collective of its own


def _parts(given: Sequence[Tensor]) -> list[list[Tensor]]:
    """The tensors that travel together: all small ones of a dtype, and each large one alone; equal on all ranks."""
    together: dict[torch.dtype, list[Tensor]] = {}
    alone = []
    for tensor in given:
        if tensor.nbytes < _SMALL and tensor.layout is torch.strided:
            together.setdefault(tensor.dtype, []).append(tensor)
        else:
            alone.append([tensor])
    return [*together.values(), *alone]


class Reductions(Collectives):
    """all_reduce, reduce, reduce_scatter and their variants."""

    def allreduce(self, given: Any, opts: Any = None, timeout: Any = None) -> Any:
        """Reduces a tensor in place on every rank."""
        (tensor,) = given if isinstance(given, list | tuple) else (given,)
        if not tensors.here(tensor):
            return self._elsewhere(tensor).allreduce(given, opts)
        op = name_of(getattr(opts, "reduceOp", opts) or SUM)
        if tensor.layout is not torch.strided:
            return self._start(all_reduce_sparse(self, self._channel, tensor, op), [tensor], opts)
        return self._start(self._reduction([tensor], op), [tensor], opts)

    def allreduce_coalesced(self, given: Any, opts: Any = None) -> Any:
        """Reduces several tensors in place on every rank; small ones of a dtype travel as one."""
        if given and not tensors.here(*given):
            return self._elsewhere(given[0]).allreduce_coalesced(given, opts)
        op = name_of(getattr(opts, "reduceOp", None) or SUM)
        bodies = [self._reduction(part, op) if len(part) == 1 else self._packed(part, op) for part in _parts(given)]
        return self._start(in_turn(bodies), list(given), opts)

    def _packed(self, given: list[Tensor], op: str) -> Body:
        pack = torch.empty(sum(t.numel() for t in given), dtype=given[0].dtype, device="cpu")
        places = [place.view(t.shape) for place, t in zip(pack.split([t.numel() for t in given]), given, strict=True)]
        sizes = zlib.crc32(str([t.numel() for t in given]).encode())
        reduce = self._reduction([pack], op, extra=sizes)

        def body(deadline: float) -> None:
            for place, tensor in zip(places, given, strict=True):
                tensors.fill(place, tensor)
            reduce(deadline)
            for place, tensor in zip(places, given, strict=True):
                tensors.fill(tensor, place)

        return body

    def _reduction(self, given: list[Tensor], op: str, root: int = -1, extra: int = 0) -> Body:
        channel = self._channel
        kind = "all_reduce" if root < 0 else "reduce"
        signatures = [self._sign(kind, t.numel(), t, op, root)._replace(extra=extra) for t in given]
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
        if not tensors.here(tensor):
            return self._elsewhere(tensor).reduce(given, opts, *rest)
        if isinstance(opts, int):
            root, op = opts, name_of(rest[0] if rest else SUM)
        else:
            root, op = opts.rootRank, name_of(opts.reduceOp)
        return self._start(self._reduction([tensor], op, root), [tensor], opts)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> Any:
        """Reduces a list of tensors, one for each rank; every rank gets its own."""
        output = outputs[0] if isinstance(outputs, list | tuple) else outputs
        parts = inputs[0] if inputs and isinstance(inputs[0], list | tuple) else inputs
        if not tensors.here(output, *parts):
            return self._elsewhere(output).reduce_scatter(outputs, inputs, opts)
        op = name_of(getattr(opts, "reduceOp", opts) or SUM)
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
        if not tensors.here(output, source):
            return self._elsewhere(output)._reduce_scatter_base(output, source, opts)
        op = name_of(getattr(opts, "reduceOp", None) or SUM)
        parts = tensors.cut(source, output.numel(), self.size(), "reduce_scatter_tensor")
        return self._start(self._scattered(output, parts, op), [output], opts)

    reduce_scatter_single = _reduce_scatter_base

    def reduce_scatter_tensor_coalesced(self, outputs: list[Tensor], sources: list[Tensor], opts: Any = None) -> Any:
        """Several reduce-scatters as one."""
        if outputs and not tensors.here(*outputs, *sources):
            return self._elsewhere(outputs[0]).reduce_scatter_tensor_coalesced(outputs, sources, opts)
        op = name_of(getattr(opts, "reduceOp", None) or SUM)
        bodies = [
            self._scattered(output, tensors.cut(source, output.numel(), self.size(), "reduce_scatter_tensor"), op)
            for output, source in zip(outputs, sources, strict=True)
        ]
        return self._start(in_turn(bodies), list(outputs), opts)

    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced
