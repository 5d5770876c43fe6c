"""Programs of an Engine: recordings of its steps on this rank and on one card, and what is held before the first."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from onecard.comm.world import world
from onecard.comm.world.pretend import pretend
from onecard.engine import step as steps
from onecard.engine.options import pipeline_degree, scaler_of, skips_on_device, static_options
from onecard.engine.placing import MeshPlace
from onecard.engine.specs import Feed
from onecard.engine.strategy import Strategy
from onecard.errors import CommunicationError, EngineError
from onecard.place.mesh import ProcessMesh
from onecard.static.api import to_static as recorded
from onecard.static.recording import Recording
from onecard.tensor import DistTensor, shard_tensor
from onecard.tensor.spec import Spec
from onecard.train.lazy import refuse_lazy

ROWS = 8
"""Of a batch of which nobody has said how long it is, on each rank."""


@dataclass(frozen=True)
class Laid:
    """What stands for a tensor in a copy without memory: what it was."""

    shape: torch.Size
    dtype: torch.dtype
    trained: bool
    parameter: bool
    spec: Spec | None

    def made(self, serial: bool) -> Any:
        """A tensor like it, in a world without data."""
        x: Any = torch.empty(self.shape, dtype=self.dtype, device="cpu")
        if self.spec is not None and not serial:
            x = shard_tensor(x, self.spec.layout.mesh, self.spec.layout.placements)
        return nn.Parameter(x, requires_grad=self.trained) if self.parameter else x


@dataclass(frozen=True)
class Skeleton:
    """An engine's model, loss and optimizers as they were before they were laid out, without their values."""

    parts: Any = None
    stands: Sequence[Any] = ()
    fault: str = ""

    def made(self, serial: bool) -> Any:
        """The parts anew, in a world without data."""
        if self.fault:
            raise EngineError(
                f"Engine: a program before the first steps is recorded on a copy of the model, which cannot be made: {self.fault}"
                ". After two steps main_program is what runs"
            )
        return copy.deepcopy(self.parts, {id(stand): stand.laid.made(serial) for stand in self.stands})


class _Stand(nn.Parameter):
    """A parameter without memory, which knows what it stands for."""

    laid: Laid

    def __new__(cls, laid: Laid) -> _Stand:
        made = super().__new__(cls, torch.empty(0, device="meta"), False)
        made.laid = laid
        return made


def mesh_of(model: nn.Module) -> ProcessMesh | None:
    """The mesh of a model with marks."""
    return next((p.mesh for p in model.parameters() if isinstance(p, DistTensor)), None)


def skeleton(parts: steps.EngineParts) -> Skeleton:
    """A copy of a step's parts without memory."""
    stands = {}
    refuse_lazy(parts.model, "Engine", EngineError)
    for x in _tensors(parts):
        spec = x._spec if isinstance(x, DistTensor) else None
        stands[id(x)] = _Stand(Laid(x.shape, x.dtype, x.requires_grad, isinstance(x, nn.Parameter), spec))
    try:
        made = copy.deepcopy((parts.model, parts.loss, tuple(parts.optimizers)), dict(stands))
        return Skeleton(made, tuple(stands.values()))
    except (
        Exception
    ) as fault:  # a model may refuse to be copied in any way; then there is no program before the first steps
        return Skeleton(fault=f"{type(fault).__name__}: {fault}")


def _tensors(parts: steps.EngineParts) -> list[Tensor]:
    found: list[Tensor] = []
    for module in parts.modules:
        found += [*module.parameters(), *module.buffers()]
    for optimizer in parts.optimizers:
        found += [p for group in optimizer.param_groups for p in group["params"]]
        found += [v for state in optimizer.state.values() for v in state.values() if isinstance(v, Tensor)]
    return found


def main_program(engine: Any, mode: str, batch_size: int | None = None) -> Recording:
    """This rank's recording of a mode's step: what runs, or, before it does, what would."""
    made = [recording for static in engine._steps.get(mode, {}).values() for recording in static.recordings]
    if made and batch_size is None:
        return made[0]
    return _traced(engine, mode, False, batch_size)


def serial_program(engine: Any, mode: str, batch_size: int | None = None) -> Recording:
    """The recording of the same step on one card."""
    return _traced(engine, mode, True, batch_size)


def _traced(engine: Any, mode: str, serial: bool, batch_size: int | None) -> Recording:
    """A step recorded in a pretended world without data, on a copy of the engine's parts."""
    try:
        return _recorded(engine, mode, serial, batch_size)
    except CommunicationError as fault:
        if not serial:
            raise
        raise EngineError(
            "Engine.serial_main_program: the model's forward, or its loss, names a mesh, which one card has not: the serial "
            "program is that of the model without these marks"
        ) from fault


def _recorded(engine: Any, mode: str, serial: bool, batch_size: int | None) -> Recording:
    place = engine.place()
    like, strategy = engine.seen.get(mode) or next(iter(engine.seen.values()), None), _strategy(engine.strategy, serial)
    ranks, rank = (1, 0) if serial else (world.get_world_size(), world.get_rank())
    with pretend(world_size=ranks, rank=rank, fake=True):
        model, loss, optimizers = engine._skeleton.made(serial)
        parts = steps.EngineParts(model, loss, optimizers, engine.metrics, engine.clip_grad_norm, None, engine._around)
        place = engine.arranged(parts, strategy)
        parts.scaler = scaler_of(strategy, torch.device("cpu"))
        parts.plain = place.plain and pipeline_degree(strategy, ranks, None) == 1 and not serial
        for optimizer in optimizers if parts.scaler is not None else ():
            skips_on_device(optimizer)
        feed = _feed(engine, like, place, batch_size).mapped(place.lay_out)
        given = (feed.args, feed.kwargs, feed.labels)
        static = recorded(steps.STEPS[mode](parts), **static_options(strategy, mode, ranks, place.mesh))
        with steps.in_mode(parts.modules, mode):
            static(*given)
            return static.recording_of(*given)


def _strategy(strategy: Strategy, serial: bool) -> Strategy:
    made = strategy.copy()
    if serial:
        made.sharding.enable = made.pipeline.enable = made.gradient_merge.enable = False
        made.amp.level = "O1"
    return made


def _feed(engine: Any, like: Any, place: MeshPlace, batch_size: int | None) -> Feed:
    """A batch without values: as one that was seen, or as the specs say."""
    if like is not None:
        rows = like.rows
        return like.mapped(lambda x, _: x.made(rows, batch_size or rows) if isinstance(x, Shape) else x)
    split = engine._split
    if split.inputs is None:
        raise EngineError(
            "Engine: nothing says what a batch is yet: prepare(inputs_spec=InputSpec([32, 256], 'float32'), labels_spec=...), or "
            "run a step first"
        )
    rows = batch_size or ROWS * max(1, place.mesh.size)
    named = all(spec.name for spec in split.inputs)
    inputs = [spec.empty(rows) for spec in split.inputs]
    labels = tuple(spec.empty(rows) for spec in split.labels or ())
    if named and len(inputs) > 1 and not engine.has_loss:
        return Feed((), {str(spec.name): x for spec, x in zip(split.inputs, inputs, strict=True)}, labels)
    return Feed(tuple(inputs), {}, labels)


@dataclass(frozen=True)
class Shape:
    """What of a batch's tensor is remembered."""

    shape: torch.Size
    dtype: torch.dtype

    def made(self, rows: int, wanted: int) -> Tensor:
        """A tensor like it, with another number of rows."""
        sizes = [wanted if i == 0 and n == rows else n for i, n in enumerate(self.shape)]
        return torch.zeros(sizes, dtype=self.dtype, device="cpu")

    @staticmethod
    def of(feed: Feed) -> Feed:
        """A batch without its values."""
        return feed.mapped(lambda x, _: Shape(x.shape, x.dtype) if isinstance(x, Tensor) else x)

    def dim(self) -> int:
        """As a tensor's."""
        return len(self.shape)


@dataclass(frozen=True)
class Startup:
    """What is held before the first step: of each parameter and buffer its name, whole shape, dtype, layout, bytes here."""

    name: str
    entries: tuple[tuple[str, str, str, int], ...]

    @property
    def bytes(self) -> int:
        """Of all of them, on this rank."""
        return sum(size for *_, size in self.entries)

    def __str__(self) -> str:
        wide = [max((len(str(entry[i])) for entry in self.entries), default=0) for i in range(3)]
        lines = [f"{self.name}: {len(self.entries)} tensors, {self.bytes:,} bytes here"]
        for *words, size in self.entries:
            said = "  ".join(word.ljust(width) for word, width in zip(words, wide, strict=True))
            lines.append(f"  {said}  {size:,}")
        return "\n".join(lines)

    def draw(self, path: Any = None) -> str:
        """As text, also written to a file."""
        if path is not None:
            Path(path).write_text(str(self) + "\n", encoding="utf-8")
        return str(self)


def startup(engine: Any, serial: bool) -> Startup:
    """What this rank, or one card, holds of the model."""
    engine.place()
    entries = []
    for prefix, module in (("", engine.model), ("loss.", engine.loss)):
        for name, x in [*_named(module)]:
            held = x._local if isinstance(x, DistTensor) and not serial else x
            layout = str(x._spec.layout) if isinstance(x, DistTensor) and not serial else "whole"
            size = held.numel() * x.element_size()
            entries.append((f"{prefix}{name}", f"{list(x.shape)} {str(x.dtype).removeprefix('torch.')}", layout, size))
    return Startup(f"{type(engine.model).__name__} on {'one card' if serial else 'this rank'}", tuple(entries))


def _named(module: Any) -> list[tuple[str, Tensor]]:
    return [*module.named_parameters(), *module.named_buffers()] if isinstance(module, nn.Module) else []
