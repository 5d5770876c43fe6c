"""Linear layers cut by columns and by rows (Shoeybi et al., 2019). Each is a plain torch module with a plain local weight."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from onecard import recorded
from onecard._torch import names as _torch
from onecard.comm.issue import plain, started
from onecard.comm.issue.ranks import Ranks
from onecard.errors import FleetError
from onecard.fleet.grid.topology import get_hybrid_communicate_group
from onecard.fleet.layers import initial
from onecard.fleet.layers.mappings import gather_from, scatter_to
from onecard.fleet.layers.once import differentiated_once
from onecard.fleet.layers.parameters import Parallel, part_sizes
from onecard.train.shard import Run, Shard

Function = torch.autograd.Function


def runs_of(sizes: Sequence[Sequence[int]], place: int) -> tuple[Run, ...]:
    """A rank's runs of a dim that consists of several parts (q, k, v), each cut into the sizes of one list.

    Example:
        >>> runs_of([[2, 2], [3, 5]], 1)
        (Run(start=2, length=2, owned=True), Run(start=7, length=5, owned=True))
    """
    runs, begin = [], 0
    for each in sizes:
        runs.append(Run(begin + sum(each[:place]), each[place]))
        begin += sum(each)
    return tuple(runs)


class ColumnParallelLinear(Parallel):
    """A linear layer whose outputs are divided: y = x W^T + b, with the rows of W (out, in) cut.

    Args:
        in_features, out_features: of the whole layer. Outputs that do not divide: the last rank takes the rest.
        weight_attr: a ``fleet.ParamAttr`` or an initializer; the weights of ``nn.Linear`` if left out.
        has_bias: whether there is one; it is cut, too.
        gather_output: give the whole y on every rank, instead of this rank's part.
        mp_group: the ranks that share the layer; those along mp if left out.
        unit: outputs are cut in whole multiples of it, such as the size of a head.
        bias_attr: as ``weight_attr``.

    The gradient of x is summed over the ranks while the weight's is computed.

    Source: ``paddle.distributed.fleet.meta_parallel.ColumnParallelLinear``.
    """

    seq_dim: int | None = None
    weight: Tensor
    bias: Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        weight_attr: Any = None,
        has_bias: bool | None = None,
        gather_output: bool = True,
        fuse_matmul_bias: bool = False,
        mp_group: Ranks | None = None,
        name: str | None = None,
        *,
        unit: int = 1,
        bias_attr: Any = None,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features, self.gather_output, self.name = (
            in_features,
            out_features,
            gather_output,
            name,
        )
        self.group = mp_group or get_hybrid_communicate_group().group("mp")
        self.cuts = self._cuts(unit)
        self._make(weight_attr, bool(has_bias), bias_attr, device, dtype)

    def _cuts(self, unit: int) -> list[list[int]]:
        return [part_sizes(self.out_features, self.group.size, unit)]

    def _runs(self) -> tuple[Run, ...]:
        return runs_of(self.cuts, self.group.index)

    def _make(self, weight_attr: Any, has_bias: bool, bias_attr: Any, device: Any, dtype: Any) -> None:
        runs = self._runs()
        copies = self._copies()
        weight = Shard((self.out_features, self.in_features), 0, runs, self.group, copies=copies)
        attr = initial.attr_of(weight_attr, "weight_attr")
        default = initial.KaimingUniform(math.sqrt(5))
        self.register_part("weight", initial.make(weight, attr, default, device, dtype), weight)
        self.register_part("bias", None)
        if has_bias and bias_attr is not False:
            bias = Shard((self.out_features,), 0, runs, self.group, copies=copies)
            bound = 1 / math.sqrt(self.in_features)
            attr = initial.attr_of(bias_attr, "bias_attr")
            made = initial.make(bias, attr, initial.Uniform(-bound, bound), device, dtype)
            self.register_part("bias", made, bias)

    def _copies(self) -> tuple[tuple[int, int], ...]:
        return ()

    def forward(self, x: Tensor) -> Tensor:
        """(..., in_features) -> (..., this rank's outputs), or the whole ones."""
        _check_width(x, self.in_features, self, "in_features")
        if self.group.size == 1:
            y = F.linear(x, self.weight, self.bias)
        else:
            y = _Column.apply(*_cast(x, self.weight, self.bias), self.group, self.seq_dim, _name(self))
        if not self.gather_output or self.group.size == 1:
            return y
        if len(self.cuts) > 1:
            raise FleetError(f"{_name(self)}: parts of several projections are not joined; use gather_output=False")
        return gather_from(y, self.group, -1, self.cuts[0])

    def extra_repr(self) -> str:
        """For ``print``."""
        return f"in_features={self.in_features}, out_features={self.out_features}, ranks={list(self.group.ranks)}"


class MergedColumnParallelLinear(ColumnParallelLinear):
    """Several column-parallel layers of one input as one product: gate and up, or q, k and v.

    Args:
        out_features: those of each layer. The whole weight has their rows one after the other; this rank's result has
            its part of each, one after the other: ``layer.split(y)``.
        unit: in multiples of which each is cut; one number, or one for each.
    """

    def __init__(self, in_features: int, out_features: Sequence[int], *args: Any, **options: Any) -> None:
        self._outs = list(out_features)
        options.setdefault("gather_output", False)
        super().__init__(in_features, sum(out_features), *args, **options)

    def __setattr__(self, name: str, value: Any) -> None:
        # Sizes are plain values, wanted before nn.Module is ready.
        object.__setattr__(self, name, value) if name == "_outs" else super().__setattr__(name, value)

    def _cuts(self, unit: Any) -> list[list[int]]:
        units = [unit] * len(self._outs) if isinstance(unit, int) else unit
        return [part_sizes(n, self.group.size, u) for n, u in zip(self._outs, units, strict=True)]

    def split(self, y: Tensor) -> tuple[Tensor, ...]:
        """The result taken apart, as views: this rank's part of each layer's."""
        return y.split([run.length for run in self._runs()], -1)


class RowParallelLinear(Parallel):
    """A linear layer whose inputs are divided: the ranks' products are summed, and every rank has the whole y.

    Args:
        in_features, out_features: of the whole layer.
        input_is_parallel: x is this rank's part already; otherwise it is the whole, and cut here.
        unit: inputs are cut in whole multiples of it, as the layer before cut its outputs.
        others: as of ``ColumnParallelLinear``; the bias is whole, and added once.

    Source: ``paddle.distributed.fleet.meta_parallel.RowParallelLinear``.
    """

    seq_dim: int | None = None
    weight: Tensor
    bias: Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        weight_attr: Any = None,
        has_bias: bool = True,
        input_is_parallel: bool = False,
        fuse_matmul_bias: bool = False,
        mp_group: Ranks | None = None,
        name: str | None = None,
        *,
        unit: int = 1,
        bias_attr: Any = None,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features, self.input_is_parallel, self.name = (
            in_features,
            out_features,
            input_is_parallel,
            name,
        )
        self.group = mp_group or get_hybrid_communicate_group().group("mp")
        self.cuts = part_sizes(in_features, self.group.size, unit)
        weight = Shard((out_features, in_features), 1, runs_of([self.cuts], self.group.index), self.group)
        attr = initial.attr_of(weight_attr, "weight_attr")
        default = initial.KaimingUniform(math.sqrt(5))
        self.register_part("weight", initial.make(weight, attr, default, device, dtype), weight)
        self.register_part("bias", None)
        if has_bias and bias_attr is not False:
            bound = 1 / math.sqrt(in_features)
            attr = initial.attr_of(bias_attr, "bias_attr")
            bias = Shard((out_features,))
            made = initial.make(bias, attr, initial.Uniform(-bound, bound), device, dtype)
            self.register_part("bias", made, bias)

    def forward(self, x: Tensor) -> Tensor:
        """(..., this rank's inputs) -> (..., out_features)."""
        if self.group.size == 1:
            return F.linear(x, self.weight, self.bias)
        if not self.input_is_parallel:
            _check_width(x, self.in_features, self, "in_features")
            x = scatter_to(x, self.group, -1, self.cuts)
        _check_width(x, self.cuts[self.group.index], self, "its part of in_features (input_is_parallel=True)")
        return _Row.apply(*_cast(x, self.weight, self.bias), self.group, self.seq_dim, _name(self))

    def extra_repr(self) -> str:
        """For ``print``."""
        return f"in_features={self.in_features}, out_features={self.out_features}, ranks={list(self.group.ranks)}"


class _Column(Function):
    """x W^T + b. Backward: the gradient of x is under way over the ranks while that of W is computed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Any, group: Ranks, seq_dim: Any, name: str) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.given = (group, seq_dim, f"{name} backward", bias is not None)
        whole = x if seq_dim is None else plain.all_gather(x, group, seq_dim, call=name)
        return F.linear(whole, weight, bias)

    @staticmethod
    @differentiated_once("a ColumnParallelLinear")
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        group, seq_dim, name, has_bias = ctx.given
        grad, later = grads[0], overlaps(x)
        need_x, need_w = ctx.needs_input_grad[:2]
        joining = None
        if seq_dim is not None and need_w:
            joining = started.all_gather(x, group, seq_dim, call=name, later=later)
        summing = None
        if need_x:
            grad_x = grad.matmul(weight)
            if seq_dim is None:
                summing = started.all_reduce(grad_x, group, inplace=True, call=name, later=later)
            else:
                summing = started.reduce_scatter(grad_x, group, seq_dim, call=name, later=later)
        whole = joining.wait() if joining is not None else x
        grad_w, grad_b = _of_weights(grad, whole, need_w, has_bias and ctx.needs_input_grad[2])
        found = summing.wait() if summing is not None else None
        if found is not None and seq_dim is None:
            recorded.alike(found, group.ranks)
        return found, grad_w, grad_b, None, None, None


class _Row(Function):
    """The sum over the ranks of x W^T, and b once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Any, group: Ranks, seq_dim: Any, name: str) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.given = (group, seq_dim, f"{name} backward", bias is not None)
        # The bias is a summand of one rank: added in its product, it costs no pass of its own.
        y = F.linear(x, weight, bias if group.index == 0 else None)
        if seq_dim is None:
            # Not in place where a policy of recompute may have kept y: it would be summed again.
            y = plain.all_reduce(y, group, inplace=not _torch.keeps_results(), call=name)
            recorded.alike(y, group.ranks)
            return y
        return plain.reduce_scatter(y, group, seq_dim, call=name)

    @staticmethod
    @differentiated_once("a RowParallelLinear")
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        group, seq_dim, name, has_bias = ctx.given
        grad = grads[0] if seq_dim is None else plain.all_gather(grads[0], group, seq_dim, call=name)
        grad_x = grad.matmul(weight) if ctx.needs_input_grad[0] else None
        grad_w, grad_b = _of_weights(grad, x, ctx.needs_input_grad[1], has_bias and ctx.needs_input_grad[2])
        return grad_x, grad_w, grad_b, None, None, None


def _of_weights(grad: Tensor, x: Tensor, need_w: bool, need_b: bool) -> tuple[Tensor | None, Tensor | None]:
    n = math.prod(grad.shape[:-1])  # not -1: a rank may have no columns at all
    rows = grad.reshape(n, grad.shape[-1])
    weight = rows.t().mm(x.reshape(n, x.shape[-1])) if need_w else None
    return weight, rows.sum(0) if need_b else None


def overlaps(x: Tensor) -> bool:
    """Whether a message is left under way beside a computation: where it does not take the same processor."""
    return x.is_cuda


def _cast(x: Tensor, *others: Any) -> tuple[Any, ...]:
    """Under autocast in its dtype, as ``F.linear``."""
    kind = x.device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return x, *others
    dtype = torch.get_autocast_dtype(kind)
    return tuple(each if each is None else each.to(dtype) for each in (x, *others))


def _check_width(x: Tensor, wanted: int, layer: Any, what: str) -> None:
    if x.shape[-1] != wanted:
        raise FleetError(
            f"{_name(layer)} got x {list(x.shape)}; its last dim must be {what}, {wanted}, on place {layer.group.index} of "
            f"ranks {list(layer.group.ranks)}"
        )


def _name(layer: Any) -> str:
    return layer.name or type(layer).__name__
