"""Recurrent layers (nn.LSTM, nn.GRU, nn.RNN): torch's own kernels, each rank on its part of the batch.

The kernels run over all time steps in one call and keep what backward needs in memory of their own, so that no rule can
say how it is cut. A batch is: sequences do not meet. Weights and states are taken whole, the gradient of a weight is a
pending sum over the axes that cut the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKeySet
from torch.distributed.tensor import Placement, Replicate, Shard

from onecard.mesh import ProcessMesh
from onecard.parallel.local_code import local_map
from onecard.tensor import DistTensor
from onecard.tensor.intercept import intercept

aten = torch.ops.aten


def _layers(op: Any) -> Callable[..., Any]:
    """The kernel of one operator: ``num_layers`` layers, in one call unless dropout comes between them."""
    several_states = op is aten.lstm.input

    def kernel(
        keyset: DispatchKeySet, input: Tensor, hx: Any, params: Sequence[Tensor], has_biases: bool, num_layers: int,
        dropout: float, train: bool, bidirectional: bool, batch_first: bool,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        states = list(hx) if several_states else [hx]
        runs = num_layers if dropout and train else 1
        outputs = input.transpose(0, 1) if batch_first else input
        mesh = next(t.mesh for t in (input, *states, *params) if isinstance(t, DistTensor))
        placements = _batch_placements(mesh, outputs)
        last: list[tuple[Tensor, ...]] = []
        for i in range(runs):
            if i:
                outputs = torch.dropout(outputs, dropout, train)
            part = [s.chunk(runs)[i] for s in states]
            weights = params[i * len(params) // runs : (i + 1) * len(params) // runs]
            options = (has_biases, num_layers // runs, 0.0, train, bidirectional, False)
            outputs, *ends = _run(op, outputs, part, weights, options, mesh, placements)
            last.append(tuple(ends))
        ends = [torch.cat(of_each) if runs > 1 else of_each[0] for of_each in zip(*last, strict=True)]
        return (outputs.transpose(0, 1) if batch_first else outputs, *ends)

    return kernel


def _batch_placements(mesh: ProcessMesh, x: Tensor) -> tuple[Placement, ...]:
    """The cuts of the batch, dim 1, that leave every rank a part; other axes have everything."""
    if not isinstance(x, DistTensor):
        return (Replicate(),) * mesh.ndim
    axes = x._spec.layout.dims[1]
    parts = torch.Size(mesh.shape[a] for a in axes).numel()
    even = x.shape[1] % parts == 0
    nobody_idle = x.shape[1] > 0 and (even or (len(axes) == 1 and -(-x.shape[1] // parts) * (parts - 1) < x.shape[1]))
    return tuple(Shard(1) if a in axes and nobody_idle else Replicate() for a in range(mesh.ndim))


def _run(
    op: Any,
    x: Tensor,
    states: Sequence[Tensor],
    params: Sequence[Tensor],
    options: tuple[Any, ...],
    mesh: ProcessMesh,
    placements: tuple[Placement, ...],
) -> tuple[Tensor, ...]:
    count, whole = len(states), (Replicate(),) * mesh.ndim

    def run(x: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        state = list(rest[:count]) if op is aten.lstm.input else rest[0]
        return op(x, state, list(rest[count:]), *options)

    wide = (*x.shape[:2], states[0].shape[-1] * (2 if options[4] else 1))
    return local_map(
        run,
        [placements] * (1 + count) + [whole] * len(params),
        [placements] * (1 + count),
        mesh,
        out_shapes=[wide, *[tuple(s.shape) for s in states]],
    )(x, *states, *params)


for _op in (aten.lstm.input, aten.gru.input, aten.rnn_tanh.input, aten.rnn_relu.input):
    intercept(_op, _layers(_op))
