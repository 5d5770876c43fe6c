"""Values that come from stage to stage of a plain model: each call runs where its operands are, or the latest of them is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from onecard._torch.modes import put_below
from onecard.comm.base.state import Kept
from onecard.comm.issue import groups
from onecard.comm.issue.transfer import sends_under_way
from onecard.pipeline.run import no_graph
from onecard.place.layout import Layout
from onecard.place.mesh import ProcessMesh
from onecard.place.parts import Axes, is_merged, merge
from onecard.tensor import DistTensor
from onecard.tensor.convert import told
from onecard.tensor.dist_tensor import as_one_card
from onecard.tensor.moves import to_mesh

_READS = frozenset(("__array__", "numpy", "tolist"))
"""What gives Python values. Single ones are sent where they are asked for (``groups.stages``), also by torch itself."""
_SHOWS = frozenset(("__format__", "__repr__", "__str__"))
_BY_VALUES = frozenset((
    "argwhere", "bincount", "masked_select", "nonzero", "unique", "unique_consecutive", "_unique2",
))  # fmt: skip
"""Whose shape follows from values, which other stages do not have."""
_KEEPS_STATE = frozenset(("batch_norm", "instance_norm"))
"""They write to a buffer that they are given: they run where it is."""
_WRITES = frozenset((
    "__iadd__", "__iand__", "__idiv__", "__ifloordiv__", "__ilshift__", "__imod__", "__imul__", "__ior__", "__ipow__",
    "__irshift__", "__isub__", "__itruediv__", "__ixor__", "__set__", "__setitem__",
))  # fmt: skip
_GRADIENTS = ("backward", "grad")
"""They take tensors for what they are."""
_LISTS = ("_foreach_", "_fused_", "_amp_")
"""Operators on lists of parameters, which run each where it is."""


def on_mesh(x: Any, mesh: ProcessMesh) -> Any:
    """A tensor on another mesh with axes of the same names: along others it is whole. Pending sums are done first."""
    if not isinstance(x, DistTensor) or x.process_mesh is mesh:
        return x
    axis, names = {name: i for i, name in enumerate(mesh.dim_names)}, x.process_mesh.dim_names

    def there(axes: Axes) -> Axes:
        return tuple(axis[names[i]] for i in axes if names[i] in axis)

    dims = (
        merge(((n, there(a)) for n, a in dim), mesh) if is_merged(dim) else there(dim) for dim in x._spec.layout.dims
    )
    return told(x, to_mesh(x, Layout.make(mesh, tuple(dims))))


class BetweenStages(TorchFunctionMode):
    """Brings the operands of each call of torch to one mesh, differentiably.

    Within the model a call runs at the latest stage that an operand is on: so values go forward alone, and what is made of the
    batch alone is made on every stage, without a message. Around it a value that all ranks have stays on all. What a call writes
    to decides where it is on one card's memory. Values that Python reads come to every rank.

    Args:
        whole: all ranks; ``stages``: those of each stage, first one first.
    """

    def __init__(self, whole: ProcessMesh, stages: list[ProcessMesh]) -> None:
        super().__init__()
        self.whole, self.stages = whole, {mesh: i for i, mesh in enumerate(stages)}
        self.way = 0  # a digest of the functions that were called within the model
        self._inside = 0  # forwards under way, of which one may call another
        self._brought: Any = WeakIdKeyDictionary()

    @contextmanager
    def in_backward(self) -> Iterator[None]:
        """While torch's engine runs, which torch's functions call without the modes that saw them."""
        with self.within(), self:
            yield

    @contextmanager
    def within(self, microbatch: int = 0) -> Iterator[None]:
        """Within the model. Its messages are under way while the program goes on (``sends_under_way``)."""
        self._inside += 1
        try:
            with sends_under_way(microbatch):
                yield
        finally:
            self._inside -= 1
            if not self._inside:
                self._brought.clear()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "").partition(".")[0]  # of torch.ops.aten.add.Tensor, too
        if name == "__get__":
            return func(*args, **kwargs)
        if self._inside:
            numbers = tuple(x for x in (*args, *kwargs.values()) if type(x) in (int, bool, str))
            self.way = hash((self.way, name, numbers))
        found = [x for x in _tensors((*args, *kwargs.values())) if self._knows(x)]
        if not found:
            return func(*args, **kwargs)
        if name.startswith(_LISTS):
            return func(*self._each(args), **kwargs)
        if name in _GRADIENTS:
            return func(*args, **kwargs)
        mesh = self._where(name, args, kwargs, found)
        if all(x.process_mesh is mesh for x in found):
            return func(*args, **kwargs)
        return func(*self._at(mesh, args), **self._at(mesh, kwargs))

    def _knows(self, x: DistTensor) -> bool:
        return x.process_mesh is self.whole or x.process_mesh in self.stages

    def _where(self, name: str, args: Any, kwargs: Any, found: list[DistTensor]) -> ProcessMesh:
        """The mesh on which a call runs."""
        written = next((x for x in _written(name, args, kwargs) if isinstance(x, Tensor)), None)
        if written is not None:  # a plain one is on every rank
            return written.process_mesh if isinstance(written, DistTensor) else self.whole
        if name in _READS or (name in _SHOWS and as_one_card.here) or _shape_by_values(name, args):
            return self.whole
        meshes = {x.process_mesh for x in found}
        if self.whole in meshes and not self._inside:
            return self.whole
        return max(meshes, key=lambda mesh: self.stages.get(mesh, -1))

    def _at(self, mesh: ProcessMesh, values: Any) -> Any:
        """Arguments of a call, those on other meshes brought here."""
        if isinstance(values, DistTensor):
            return self._bring(values, mesh) if self._knows(values) and values.process_mesh is not mesh else values
        if isinstance(values, dict):
            return {key: self._at(mesh, x) for key, x in values.items()}
        if type(values) in (list, tuple):
            return type(values)(self._at(mesh, x) for x in values)
        return values

    def _each(self, args: Any) -> list[Any]:
        """Arguments of an operator on lists: each element of the first list decides where those beside it come to."""
        first: Any = next((x for x in args if type(x) in (list, tuple)), [])
        places = [x.process_mesh if isinstance(x, DistTensor) else self.whole for x in first]

        def brought(given: Any) -> Any:
            if isinstance(given, DistTensor):  # one for all of them
                return given.full_tensor() if self._knows(given) else given
            if given is first or type(given) not in (list, tuple) or len(given) != len(places):
                return given
            return [self._at(mesh, x) for x, mesh in zip(given, places, strict=True)]

        return [brought(x) for x in args]

    def _bring(self, x: DistTensor, mesh: ProcessMesh) -> Tensor:
        if not self._inside:
            return on_mesh(x, mesh)
        key = mesh, torch.is_grad_enabled(), x.requires_grad, -1 if x.is_inference() else x._version
        known = self._brought.setdefault(x, {})
        if key not in known:
            known[key] = on_mesh(x, mesh)
        return known[key]


def _tensors(values: Any) -> Iterator[DistTensor]:
    """The distributed tensors among the arguments of a call, and in lists of them."""
    for x in values:
        if isinstance(x, DistTensor):
            yield x
        elif type(x) in (list, tuple):
            yield from _tensors(x)


def _written(name: str, args: Any, kwargs: Any) -> Iterator[Any]:
    """What a call writes to, by its name and its arguments."""
    out = kwargs.get("out")
    yield from out if isinstance(out, list | tuple) else [out]
    in_place = name in _WRITES or (name.endswith("_") and not name.endswith("__")) or kwargs.get("inplace") is True
    if in_place and args:
        yield args[0]
    if name in _KEEPS_STATE:
        yield from (*args[1:3], kwargs.get("running_mean"))


def _shape_by_values(name: str, args: Any) -> bool:
    counted = name == "repeat_interleave" and len(args) > 1 and isinstance(args[1], Tensor)
    if name in _BY_VALUES or counted or (name == "where" and len(args) == 1):
        return True
    index = args[1] if name == "__getitem__" and len(args) > 1 else ()
    masks = index if isinstance(index, tuple) else (index,)
    return any(isinstance(x, Tensor) and x.dtype in (torch.bool, torch.uint8) for x in masks)


between: Kept[dict[Any, BetweenStages]] = Kept(dict)
"""The one of each mesh that has stages."""


def begun(whole: ProcessMesh, stages: list[ProcessMesh]) -> BetweenStages:
    """The one of a mesh, which sees the calls of this thread from now on."""
    if whole not in between.here:
        groups.stages.here.update(stages)
        between.here[whole] = made = BetweenStages(whole, stages)
        no_graph.around.here = made.in_backward
    put_below(between.here[whole])
    return between.here[whole]
