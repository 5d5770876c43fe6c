"""coverage: which operators a model uses, how each will run under given placements, and what it sends. No devices."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import Tensor, nn

from onecard._torch.names import TorchDispatchMode, tree_leaves, tree_map
from onecard.comm import get_rank
from onecard.comm.base import record
from onecard.comm.world.pretend import pretend, rehearse
from onecard.errors import LayoutError, OnecardError
from onecard.place.mesh import ProcessMesh
from onecard.rules.call import schema_of
from onecard.tensor import DistTensor, shard_tensor
from onecard.tensor.dispatch import fallback
from onecard.tensor.dispatch.entries import builders
from onecard.tensor.dist_tensor import describe
from onecard.train import shard_layer

ORDER = ("refused", "gathered", "decomposed", "built in", "ruled")
ShardFn = Callable[[str, nn.Module, ProcessMesh], None]


@dataclass
class Covered:
    """One operator in one phase.

    Attributes:
        operator: its ATen name; ``phase``: "forward" or "backward"; ``calls``: how often.
        how: "ruled"; "built in" (random, foreach and scalar operators); "decomposed" into others with rules; "gathered"
            (every rank computes the whole); "refused".
        bytes: that rank 0 sends for it; ``seconds``: what the cost model expects for that.
        example: the operands of the call that sent most.
    """

    operator: str
    phase: str
    how: str = "ruled"
    calls: int = 0
    bytes: int = 0
    seconds: float = 0.0
    example: str = ""
    _most: int = field(default=-1, repr=False)


@dataclass
class Coverage:
    """What ``coverage`` found; ``print`` it for a table.

    Attributes:
        operators: one entry for each operator and phase, the costly ones first.
        error: what stopped the run, "" if it reached the end; operators after it are not listed.

    Example:
        >>> report = coverage(torch.relu, torch.ones(2), ProcessMesh([0, 1], ["x"]))
        >>> [(o.operator, o.how) for o in report.operators], report.by("gathered"), report.bytes
        ([('relu.default', 'ruled')], [], 0)
    """

    operators: list[Covered] = field(default_factory=list)
    error: str = ""

    def by(self, how: str) -> list[Covered]:
        """The operators that are handled in one way: ``report.by("gathered")``."""
        return [o for o in self.operators if o.how == how]

    @property
    def gathered_bytes(self) -> int:
        """Bytes that rank 0 sends because operators have no rule."""
        return sum(o.bytes for o in self.by("gathered"))

    @property
    def bytes(self) -> int:
        """Bytes that rank 0 sends for all operators."""
        return sum(o.bytes for o in self.operators)

    def table(self) -> Table:
        """One row for each operator."""
        table = Table(title="operators of the model", title_justify="left")
        for name in ("operator", "phase", "how"):
            table.add_column(name, overflow="fold")
        for name in ("calls", "bytes", "est. us"):
            table.add_column(name, justify="right")
        table.add_column("operands of the largest call", overflow="fold")
        for o in self.operators:
            costs = (str(o.calls), f"{o.bytes:,}", f"{o.seconds * 1e6:.0f}")
            table.add_row(o.operator, o.phase, o.how, *costs, escape(o.example))
        return table

    def __str__(self) -> str:
        out = io.StringIO()
        console = Console(file=out, width=160)
        console.print(self.table())
        counts = ", ".join(f"{len(self.by(how))} {how}" for how in reversed(ORDER) if self.by(how))
        console.print(f"{counts}; rank 0 sends {self.bytes:,} bytes, {self.gathered_bytes:,} of them to gather")
        if self.error:
            console.print(f"stopped: {self.error}", markup=False)
        return out.getvalue()


def coverage(
    model: Callable[..., Any],
    example_inputs: Any,
    mesh: ProcessMesh | None = None,
    shard_fn: ShardFn | None = None,
    input_placements: Sequence[Any] | None = None,
    *,
    backward: bool = True,
    meta: bool = True,
) -> Coverage:
    """How every operator of a model will run, forward and backward, before any training.

    One process stands for rank 0 of the mesh; nothing is sent. A model whose parameters are DistTensors already is run
    as it is, on the shards that this process holds: the bytes are then those of its own rank.

    Args:
        model: a module or a function. A plain module is copied (without its data) and laid out as ``shard_layer`` does.
        example_inputs: a tensor, a tuple of positional arguments, or a dict of keyword arguments.
        mesh: needed for plain models; it may name more ranks than there are processes.
        shard_fn: as in ``shard_layer``; left out, parameters are replicated.
        input_placements: one entry for each tensor of the inputs (None: replicated).
        backward: also run the backward of all outputs that require gradients.
        meta: compute shapes only. Pass False for models that read values (``.item()``, masks as indices).

    Returns:
        A Coverage. It never raises for an operator that onecard refuses: see ``error``.

    Raises:
        LayoutError: a plain model without a mesh, or placements that do not fit.

    Example:
        >>> mesh = ProcessMesh([0, 1, 2, 3], ["dp"])
        >>> from torch.distributed.tensor import Shard
        >>> report = coverage(nn.Linear(8, 4), torch.ones(16, 8), mesh, input_placements=[[Shard(0)]])
        >>> [o.operator for o in report.by("ruled") if o.phase == "forward"]
        ['linear.default']
        >>> report.gathered_bytes
        0
    """
    args, kwargs = _arguments(example_inputs)
    state = list(model.parameters()) if isinstance(model, nn.Module) else []
    known = next((t.mesh for t in (*state, *tree_leaves((args, kwargs))) if isinstance(t, DistTensor)), None)
    where = mesh or known
    if where is None:
        raise LayoutError(
            "coverage: the model and its inputs are plain, so say where they go: onecard.coverage(model, inputs, "
            "onecard.ProcessMesh([0, 1], ['dp']), input_placements=[[onecard.Shard(0)]])"
        )
    found: dict[tuple[str, str], Covered] = {}
    report = Coverage()
    rank = 0 if known is None else get_rank()
    with pretend(max(*where.process_ids, rank) + 1, rank), rehearse():
        if known is None:
            model = _laid_out(model, where, shard_fn, meta)
            args, kwargs = _place((args, kwargs), where, input_placements, meta)
        with _watching(found) as watch, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                _run(model, args, kwargs, watch, backward)
            except (OnecardError, NotImplementedError, RuntimeError) as error:
                report.error = f"{watch.last}: {' '.join(str(error).split())}"
    report.operators = sorted(found.values(), key=lambda o: (ORDER.index(o.how), -o.bytes))
    return report


def _arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (tuple(inputs), {}) if isinstance(inputs, tuple | list) else ((inputs,), {})


def _laid_out(model: Any, mesh: ProcessMesh, shard_fn: ShardFn | None, meta: bool) -> Any:
    if not isinstance(model, nn.Module):
        return model
    memo: dict[int, Any] = {}
    if meta:  # a copy without data: what deepcopy finds in the memo it does not copy
        for p in model.parameters():
            memo[id(p)] = nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad)
        for b in model.buffers():
            memo[id(b)] = torch.empty_like(b, device="meta")
    return shard_layer(copy.deepcopy(model, memo), mesh, shard_fn)


def _place(values: Any, mesh: ProcessMesh, placements: Sequence[Any] | None, meta: bool) -> Any:
    tensors = [v for v in tree_leaves(values) if isinstance(v, Tensor)]
    if placements is not None and len(placements) != len(tensors):
        raise LayoutError(
            f"coverage: {len(placements)} entries in input_placements for {len(tensors)} tensor(s) among the inputs"
        )
    wanted = iter(placements or [None] * len(tensors))

    def place(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        entry = next(wanted)
        everywhere = [torch.distributed.tensor.Replicate()] * mesh.ndim
        whole = value.detach().to("meta") if meta else value.detach()
        return shard_tensor(whole, mesh, everywhere if entry is None else entry, requires_grad=value.requires_grad)

    return tree_map(place, values)


def _run(model: Any, args: Any, kwargs: Any, watch: _Watch, backward: bool) -> None:
    with watch:
        outputs = [v for v in tree_leaves(_leaves(model(*args, **kwargs))) if isinstance(v, Tensor) and v.requires_grad]
    if backward and outputs:
        grads = [torch.ones_like(v) for v in outputs]
        watch.phase = "backward"
        with watch:
            torch.autograd.backward(outputs, grads)


def _leaves(value: Any) -> Any:
    """Outputs that are mappings of a model's own class (with ``to_tuple`` or not) opened up."""
    return dict(value) if isinstance(value, Mapping) else value


class _Watch(TorchDispatchMode):
    """Notes every operator on distributed tensors, with what is sent and how it is handled while it runs."""

    def __init__(self, found: dict[tuple[str, str], Covered]) -> None:
        super().__init__()
        self.found, self.phase, self.last = found, "forward", "the first operator"
        self.how, self.sent, self.seconds = "ruled", 0, 0.0

    def message(self, message: record.Notice) -> None:
        self.sent += message.step.bytes
        self.seconds += message.step.seconds

    def event(self, event: fallback.FallbackCall) -> None:
        if self.how != "gathered":
            self.how = event.how

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        operands = [v for v in tree_leaves((args, kwargs)) if isinstance(v, DistTensor)]
        if not operands:
            return func(*args, **kwargs)
        schema = schema_of(func)
        self.last = f"{schema.name}.{schema.overload or 'default'}"
        self.how, self.sent, self.seconds = "built in" if func in builders else "ruled", 0, 0.0
        example = ", ".join(describe(v) for v in operands[:3])
        try:
            return func(*args, **kwargs)
        except OnecardError:
            self.how = "refused"
            raise
        finally:
            self._note(example)

    def _note(self, example: str) -> None:
        entry = self.found.setdefault((self.last, self.phase), Covered(self.last, self.phase, self.how))
        entry.how = min(entry.how, self.how, key=ORDER.index)
        entry.calls += 1
        entry.bytes += self.sent
        entry.seconds += self.seconds
        if self.sent > entry._most:
            entry._most, entry.example = self.sent, example


@contextmanager
def _watching(found: dict[tuple[str, str], Covered]) -> Iterator[_Watch]:
    watch = _Watch(found)
    record.observers.here.append(watch.message)
    fallback.observers.here.append(watch.event)
    try:
        yield watch
    finally:
        record.observers.here.remove(watch.message)
        fallback.observers.here.remove(watch.event)
