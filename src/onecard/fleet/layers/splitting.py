"""split: one call that is a whole parallel layer. Its parameters belong to the module in whose forward it is called."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

from torch import Tensor, nn

from onecard.comm.base.state import Kept
from onecard.comm.issue.ranks import Ranks, of_ranks
from onecard.comm.world import world
from onecard.errors import FleetError
from onecard.fleet.grid.topology import get_hybrid_communicate_group
from onecard.fleet.layers import linear, vocabulary

_loose: Kept[dict[Any, nn.Module]] = Kept(dict)


def split(
    x: Tensor,
    size: tuple[int, int],
    operation: str,
    axis: int = 0,
    num_partitions: int = 1,
    gather_out: bool = True,
    weight_attr: Any = None,
    bias_attr: Any = None,
    name: str | None = None,
) -> Tensor:
    """A linear layer or an embedding that is divided over ranks, made at its first call.

    The layer becomes a submodule of the module whose ``forward`` calls ``split``, one for each call in a forward; call the
    model once before its optimizer is made. Outside a module, ``split_parameters()`` has them, and ``name`` tells them apart.

    Args:
        x: ids of an embedding, or the input of a linear layer: the whole, or for ``axis=0`` also this rank's part of it.
        size: (rows, width) of the table; (inputs, outputs) of the linear layer.
        operation: "embedding" or "linear".
        axis: 1 cuts the outputs (columns), 0 the inputs (rows) of a linear layer, or the table.
        num_partitions: over how many ranks: those along mp, or all.
        gather_out: give the whole result on every rank. An embedding always does.
        weight_attr, bias_attr: a ``fleet.ParamAttr`` or an initializer; ``bias_attr=False``: no bias. A linear weight is
            (out, in), as torch has it.

    Raises:
        FleetError: an operation, axis or number of partitions that there is not.

    Source: ``paddle.distributed.split``.
    """
    if operation not in ("linear", "embedding") or axis not in (0, 1) or (operation == "embedding" and axis):
        raise FleetError(
            f"split(operation={operation!r}, axis={axis}): want 'linear' with axis 0 (rows) or 1 (columns), or 'embedding' with 0"
        )
    group = _group(num_partitions)
    layer = _layer(name, lambda: _make(size, operation, axis, gather_out, weight_attr, bias_attr, group, name))
    if operation == "linear" and axis == 0:
        layer.input_is_parallel = x.shape[-1] != size[0] or group.size == 1  # type: ignore[assignment]
        if not gather_out and group.size > 1:
            raise FleetError(
                "split(operation='linear', axis=0): its result is a sum, whole on every rank; gather_out=True"
            )
    return layer(x)


def split_parameters() -> list[nn.Parameter]:
    """The parameters of ``split`` calls outside any module, for an optimizer."""
    return [p for layer in _loose.here.values() for p in layer.parameters()]


def _group(num_partitions: int) -> Ranks:
    mp = get_hybrid_communicate_group().group("mp")
    if num_partitions == mp.size or world.alone.here:
        return mp
    if num_partitions == world.get_world_size():
        return of_ranks(name="mp")
    raise FleetError(
        f"split(num_partitions={num_partitions}): there are {mp.size} rank(s) along mp and {world.get_world_size()} in all; set "
        "mp_degree of the strategy to it"
    )


def _make(
    size: tuple[int, int],
    operation: str,
    axis: int,
    gather_out: bool,
    weight_attr: Any,
    bias_attr: Any,
    group: Ranks,
    name: str | None,
) -> nn.Module:
    if operation == "embedding":
        return vocabulary.VocabParallelEmbedding(*size, weight_attr=weight_attr, mp_group=group, name=name)
    given: dict[str, Any] = {"weight_attr": weight_attr, "bias_attr": bias_attr, "mp_group": group, "name": name}
    if axis == 1:
        return linear.ColumnParallelLinear(*size, has_bias=bias_attr is not False, gather_output=gather_out, **given)
    return linear.RowParallelLinear(*size, has_bias=bias_attr is not False, **given)


def _layer(name: str | None, make: Any) -> nn.Module:
    """The layer of this call: made the first time, found again afterwards."""
    owner, site, calls = _caller()
    if owner is None:
        outside: Any = name or site
        if outside not in _loose.here:
            _loose.here[outside] = make()
        return _loose.here[outside]
    layers = owner.__dict__.get("_onecard_splits")
    if layers is None:
        layers = owner.__dict__["_onecard_splits"] = {}
    if name is None:
        # A line that is run several times in one forward (a loop) is several layers.
        calls[site] = calls.get(site, 0) + 1
        key: Any = (*site, calls[site])
    else:
        key = name
    if key not in layers:
        label = name.replace(".", "_") if name else f"split_{len(layers)}"
        owner.add_module(label, make())
        layers[key] = label
    return getattr(owner, layers[key])


def _caller() -> tuple[nn.Module | None, tuple[str, int, int], dict[Any, int]]:
    """The innermost module whose method is on the stack above ``split``; the place of the call; how often each place was run.

    The counts are kept in the frame of the module's method, so that each forward, also one that is computed again, begins anew.
    """
    frame: FrameType | None = sys._getframe(3)
    site = None
    while frame is not None:
        if site is None:
            site = (frame.f_code.co_filename, frame.f_lineno, frame.f_lasti)
        values = frame.f_locals
        if isinstance(values.get("self"), nn.Module):
            return values["self"], site, values.setdefault("__onecard_splits__", {})
        frame = frame.f_back
    return None, site or ("", 0, 0), {}
