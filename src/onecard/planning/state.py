"""Bytes of parameters, gradients and optimizer states under a plan, and what is sent for them along dp. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from onecard.machine.cost import DIVIDED, Machine, read
from onecard.planning.job import PieceCost
from onecard.planning.lines import AxisLine
from onecard.planning.plan import Plan
from onecard.tensor.buckets import BUCKET_BYTES, LARGE


def size(dtype: str) -> int:
    """Bytes of an element.

    Example:
        >>> size("bfloat16"), size("float32")
        (2, 4)
    """
    return int(getattr(torch, dtype).itemsize)


def _buckets(nbytes: int) -> int:
    return max(1, -(-nbytes // BUCKET_BYTES))


@dataclass(frozen=True, slots=True)
class TrainingState:
    """What dp divides of the training state, and what it costs.

    Attributes:
        shards: ranks that divide it; line: those; copies: ranks that have the same part of it. Of experts fewer ranks have
            copies, by ep (``expert_shards``, ``expert_line``); where elements are counted, ``experts`` are so many of them.
    """

    plan: Plan
    machine: Machine

    @property
    def shards(self) -> int:
        """Ranks that divide optimizer states (and more): all that have the same parameters, but for replicas."""
        return self.plan.dp * self.plan.cp // self.plan.replicas

    @property
    def line(self) -> AxisLine:
        """Ranks over which gradients are summed: along dp, and along cp, whose parts of a sequence share parameters."""
        return AxisLine("dp", self.machine, self.shards, self.plan.tp, self.plan.per_host)

    @property
    def expert_shards(self) -> int:
        """Ranks that divide what is kept for experts: those that have the same ones."""
        return max(1, self.shards // self.plan.ep)

    @property
    def expert_line(self) -> AxisLine:
        """Those."""
        stride = self.plan.tp * self.plan.ep
        return AxisLine("dp", self.machine, self.expert_shards, stride, self.plan.per_host)

    @property
    def copies(self) -> AxisLine:
        """Ranks that have the same part."""
        return AxisLine("dp", self.machine, self.plan.replicas, self.plan.tp * self.shards, self.plan.per_host)

    def axis(self, name: str) -> AxisLine:
        """The ranks along tp or cp."""
        stride = 1 if name == "tp" else self.plan.tp
        return AxisLine(name, self.machine, getattr(self.plan, name), stride, self.plan.per_host)

    def _part(self, count: int, stage: int, experts: int) -> int:
        if self.plan.zero < stage:
            return count
        return -(-(count - experts) // self.shards) + -(-experts // self.expert_shards)

    def parameters(self, elements: int, experts: int = 0) -> int:
        """Bytes that a rank keeps of parameters."""
        return self._part(elements, 3, experts) * size(self.plan.parameters)

    def gradients(self, elements: int, experts: int = 0) -> int:
        """Bytes that a rank keeps of gradients."""
        return self._part(elements, 2, experts) * size(self.plan.gradients)

    def states(self, elements: int, experts: int = 0) -> int:
        """Bytes that a rank keeps for the optimizer: two moments, and parameters in float32."""
        own = 2 * size(self.plan.states) + (4 if self.plan.master else 0)
        return 0 if self.plan.offload else self._part(elements, 1, experts) * own

    def updated(self, elements: int, experts: int = 0) -> int:
        """How many elements of so many a rank updates."""
        return self._part(elements, 1, experts)

    def gathered(self, piece: PieceCost) -> int:
        """Bytes of parameters that are there only while a piece runs (ZeRO-3)."""
        if self.plan.zero < 3 or self.shards == 1:
            return 0
        # With overlap the next piece is on its way, too.
        whole = piece.parameters * size(self.plan.compute)
        return whole * (2 if self.plan.overlap else 1) + self.arriving(piece)

    def arriving(self, piece: PieceCost) -> int:
        """Bytes beside a piece's gathered parameters: large ones arrive in their place, small ones in a bucket of parts."""
        bucket = min(BUCKET_BYTES, self._small([piece], size(self.plan.compute)))
        return bucket + bucket // self.shards

    def sent_on(self, nbytes: int) -> int:
        """What of a stage's result a rank sends to the next stage: a part, if tp's ranks share it (``plan.partial_sends``)."""
        parts = self.plan.partial_sends and not self.plan.sequence_parallel
        return -(-nbytes // self.plan.tp) if parts else nbytes

    # -- messages --------------------------------------------------------------------------------------------------------

    def gradient_messages(self, elements: int, experts: int = 0) -> Iterator[tuple[str, AxisLine, int]]:
        """What sums so many gradients: (collective, ranks, bytes given)."""
        kind = "all_reduce" if self.plan.zero == 0 else "reduce_scatter"
        for count, line in self._kinds(elements, experts):
            given = count * size(self.plan.gradients)
            yield kind, line, given
            yield "all_reduce", self.copies, given // (line.count if self.plan.zero else 1)

    def _kinds(self, elements: int, experts: int) -> Iterator[tuple[int, AxisLine]]:
        """How many elements are divided over which ranks."""
        yield elements - experts, self.line
        if experts:
            yield experts, self.expert_line

    def gather_messages(self, piece: PieceCost, updated: bool) -> Iterator[tuple[str, AxisLine, int]]:
        """What brings parameters together: for a piece that runs (ZeRO-3), or updated, for the next step (ZeRO-1 and 2)."""
        dtype = self.plan.parameters if updated else self.plan.compute
        for count, line in self._kinds(piece.parameters, piece.experts):
            yield "all_gather", line, -(-count // line.count) * size(dtype)

    def sum_seconds(self, pieces: Sequence[PieceCost]) -> float:
        """Seconds in which the gradients of pieces are summed together, in buckets that are filled, and emptied."""
        messages = self.gradient_messages(sum(p.parameters for p in pieces), sum(p.experts for p in pieces))
        took = sum(line.seconds(kind, given, _buckets(given)) for kind, line, given in messages)
        return took + (2 * self._packed(pieces, size(self.plan.gradients)) if took else 0.0)

    def _small(self, pieces: Sequence[PieceCost], element: int) -> int:
        """Bytes of what is smaller than a bucket; on a CPU, than what is worth a message of its own."""
        most = LARGE if self.machine.curves else BUCKET_BYTES
        return sum(n * element for piece in pieces for n in piece.tensors if n * element < most)

    def _packed(self, pieces: Sequence[PieceCost], element: int) -> float:
        """Seconds in which what is smaller than a bucket is copied into a bucket, or out of it."""
        small = self._small(pieces, element)
        return max(_buckets(small) * self.machine.launch, self.machine.copy(2 * small)) if small else 0.0

    def bucket(self, pieces: Sequence[PieceCost]) -> int:
        """Bytes of the bucket that sums gradients of pieces."""
        if self.shards * self.plan.replicas == 1:
            return 0
        return min(BUCKET_BYTES, self._small(pieces, size(self.plan.gradients)))

    def gather_seconds(self, pieces: Sequence[PieceCost]) -> float:
        """Seconds in which the updated parameters of pieces come together (ZeRO-1 and 2)."""
        took = self._packed(pieces, size(self.plan.parameters))
        for count, line in self._kinds(sum(p.parameters for p in pieces), sum(p.experts for p in pieces)):
            given = -(-count // line.count) * size(self.plan.parameters)
            took += line.seconds("all_gather", given, _buckets(given))
        return took

    def unpacked(self, piece: PieceCost) -> float:
        """Seconds in which a piece's gathered parameters are copied to where they are used (ZeRO-3), on the computing stream."""
        element = size(self.plan.compute)
        return sum(max(self.machine.launch, self.machine.copy(2 * n * element)) for n in piece.tensors)

    # -- the optimizer ---------------------------------------------------------------------------------------------------

    def update(self, piece: PieceCost) -> float:
        """Seconds of Adam's update, and of what Python does for parameters that are divided, where that was measured.

        With the states in the host's memory it runs there: gradients are copied to it, and parameters back.
        """
        each = self._touched()
        share, of_experts = (self.shards, self.expert_shards) if self.plan.zero else (1, 1)
        host = 0.0
        if share > 1 and DIVIDED in self.machine.curves:
            host = len(piece.tensors) * read(self.machine.curves[DIVIDED], 1)
        on_host = self.plan.offload and self.machine.to_host > 0
        if "adamw" in self.machine.curves and not on_host:
            curve = self.machine.curves["adamw"]
            more = sum(read(curve, n * each / of_experts) - read(curve, n * each / share) for n in piece.expert_tensors)
            return host + sum(read(curve, n * each / share) for n in piece.tensors) + more
        mine = (piece.parameters - piece.experts) / share + piece.experts / of_experts
        if on_host:
            copied = size(self.plan.gradients) + size(self.plan.parameters)
            return host + mine * (copied / self.machine.to_host + each / self.machine.host_memory)
        return host + self.machine.copy(mine * each)

    def _touched(self) -> int:
        """Bytes that an update reads and writes for an element: its gradient, the parameter, two moments.

        With a float32 copy of the parameters as in Megatron-LM and Apex: the gradient becomes float32 first, is looked at and
        scaled back (unless both are bfloat16 or float32), its norm is taken and clipped; at the end the copy is rounded.
        """
        own, moment, gradient = size(self.plan.parameters), size(self.plan.states), size(self.plan.gradients)
        if not self.plan.master:
            return gradient + 2 * (own + 2 * moment)
        to_wide = gradient + 4 if gradient < 4 else 0
        back = 8 if self.plan.parameters == "float16" else 0
        return to_wide + back + (4 + 8) + (4 + 2 * (4 + 2 * moment)) + (4 + own)

    def accumulate(self, piece: PieceCost) -> float:
        """Seconds in which a microbatch's gradients are added to those before: one is read, the sum is read and written."""
        if self.plan.microbatches == 1:
            return 0.0
        return self.machine.copy(piece.parameters * (size(self.plan.compute) + 2 * size(self.plan.gradients)))
