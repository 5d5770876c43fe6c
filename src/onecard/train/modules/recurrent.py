"""Recurrent layers (nn.LSTM, nn.GRU, nn.RNN): torch's own kernels, each rank on its part of the batch.

The kernels run over all time steps in one call and keep what backward needs in memory of their own, so that no rule can
say how it is cut. A batch is: sequences do not meet (packed ones lie step by step, so every rank takes them all). Weights
and states are taken whole, the gradient of a weight is a pending sum over the axes that cut the batch.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Placement, Replicate, Shard

from onecard._torch import patches
from onecard._torch.names import DispatchKeySet
from onecard.place.mesh import ProcessMesh
from onecard.tensor import DistTensor
from onecard.tensor.dispatch.composite import numbers_of
from onecard.tensor.dispatch.entries import whole
from onecard.train.local_code import local_map

aten = torch.ops.aten


def _padded(op: Any) -> Callable[..., Any]:
    """Sequences of one length: the batch stays cut."""

    def kernel(
        keyset: DispatchKeySet, input: Tensor, hx: Any, params: Sequence[Tensor], has_biases: bool, num_layers: int,
        dropout: float, train: bool, bidirectional: bool, batch_first: bool,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        outputs = input.transpose(0, 1) if batch_first else input
        mesh = _mesh_of(input, hx, params)
        placements = batch_placements(mesh, outputs)

        def run(x: Tensor, states: Any, weights: list[Tensor], layers: int) -> tuple[Tensor, ...]:
            return op(x, states, weights, has_biases, layers, 0.0, train, bidirectional, False)

        outputs, *ends = _in_turn(
            run, outputs, hx, params, (num_layers, dropout, train, bidirectional), mesh, placements
        )
        return (outputs.transpose(0, 1) if batch_first else outputs, *ends)

    return kernel


def _packed(op: Any) -> Callable[..., Any]:
    """Sequences of several lengths, packed step by step: their elements lie where no cut of the batch is, so every rank
    runs on all of them."""

    def kernel(
        keyset: DispatchKeySet, data: Tensor, batch_sizes: Tensor, hx: Any, params: Sequence[Tensor], has_biases: bool,
        num_layers: int, dropout: float, train: bool, bidirectional: bool,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        sizes = numbers_of(op, batch_sizes)
        mesh = _mesh_of(data, hx, params)

        def run(x: Tensor, states: Any, weights: list[Tensor], layers: int) -> tuple[Tensor, ...]:
            return op(x, sizes, states, weights, has_biases, layers, 0.0, train, bidirectional)

        whole = (Replicate(),) * mesh.ndim
        return _in_turn(run, data, hx, params, (num_layers, dropout, train, bidirectional), mesh, whole)

    return kernel


def _mesh_of(input: Tensor, hx: Any, params: Sequence[Tensor]) -> ProcessMesh:
    states = hx if isinstance(hx, list | tuple) else [hx]
    return next(t.mesh for t in (input, *states, *params) if isinstance(t, DistTensor))


def _in_turn(
    run: Callable[..., tuple[Tensor, ...]], outputs: Tensor, hx: Any, params: Sequence[Tensor],
    options: tuple[int, float, bool, bool], mesh: ProcessMesh, placements: tuple[Placement, ...],
) -> tuple[Tensor, ...]:  # fmt: skip
    """All layers in one call of ``run(x, states, weights, layers)``, unless dropout comes between them."""
    num_layers, dropout, train, bidirectional = options
    several = isinstance(hx, list | tuple)  # an LSTM has two states
    states = list(hx) if several else [hx]
    runs = num_layers if dropout and train else 1
    last: list[tuple[Tensor, ...]] = []
    for i in range(runs):
        if i:
            outputs = torch.dropout(outputs, dropout, train)
        part = [s.chunk(runs)[i] for s in states]
        weights = params[i * len(params) // runs : (i + 1) * len(params) // runs]

        def on_parts(x: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
            state = list(rest[: len(states)]) if several else rest[0]
            with warnings.catch_warnings():
                if x.is_cuda:  # each rank's weights are tensors of their own, which cuDNN brings together in each call
                    warnings.filterwarnings("ignore", "RNN module weights are not part of single contiguous chunk")
                return run(x, state, list(rest[len(states) :]), num_layers // runs)

        outputs, *ends = _run(on_parts, outputs, part, weights, bidirectional, mesh, placements)
        last.append(tuple(ends))
    ends = [torch.cat(of_each) if runs > 1 else of_each[0] for of_each in zip(*last, strict=True)]
    return (outputs, *ends)


def batch_placements(mesh: ProcessMesh, x: Tensor) -> tuple[Placement, ...]:
    """The cuts of the batch, dim 1, that leave every rank a part; other axes have everything.

    Axes that cut time, dim 0, cut the batch instead if they can: so are the rows of a time-major model where it enters. Each
    rank sends parts of its part then, where all of it would go to all, and computes its share.
    """
    if not isinstance(x, DistTensor):
        return (Replicate(),) * mesh.ndim
    of_batch = x._spec.layout.axes(1)
    for axes in (of_batch + x._spec.layout.axes(0), of_batch):
        if _nobody_is_idle(x.shape[1], [mesh.shape[a] for a in axes]):
            return tuple(Shard(1) if a in axes else Replicate() for a in range(mesh.ndim))
    return (Replicate(),) * mesh.ndim


def _nobody_is_idle(rows: int, sizes: Sequence[int]) -> bool:
    parts = torch.Size(sizes).numel()
    return rows > 0 and (rows % parts == 0 or (len(sizes) == 1 and -(-rows // parts) * (parts - 1) < rows))


def _run(
    on_parts: Callable[..., tuple[Tensor, ...]],
    x: Tensor,
    states: Sequence[Tensor],
    params: Sequence[Tensor],
    bidirectional: bool,
    mesh: ProcessMesh,
    placements: tuple[Placement, ...],
) -> tuple[Tensor, ...]:
    count, whole = len(states), (Replicate(),) * mesh.ndim
    wide = (*x.shape[:-1], states[0].shape[-1] * (2 if bidirectional else 1))
    return local_map(
        on_parts,
        [placements] * (1 + count) + [whole] * len(params),
        [placements] * (1 + count),
        mesh,
        out_shapes=[wide, *[tuple(s.shape) for s in states]],
    )(x, *states, *params)


@patches.with_first_tensor
def install() -> None:
    """On a GPU torch lays the weights of a recurrent layer into one memory, of itself too: where other tensors lie."""
    patches.replace("torch.nn.modules.rnn.RNNBase.flatten_parameters", nn.RNNBase, "flatten_parameters", _but_for_ours)


def _but_for_ours(torchs: Callable[[nn.RNNBase], None]) -> Callable[[nn.RNNBase], None]:
    def flatten_parameters(self: nn.RNNBase) -> None:
        """As torch's; nothing where weights are parts, or memory that is given up between blocks."""
        if not any(isinstance(w, DistTensor) or getattr(w, "is_local_parameter", False) for w in self._flat_weights):
            torchs(self)

    return flatten_parameters


for _op in (aten.lstm, aten.gru, aten.rnn_tanh, aten.rnn_relu):
    whole(_op.input)(_padded(_op.input))
    whole(_op.data)(_packed(_op.data))
