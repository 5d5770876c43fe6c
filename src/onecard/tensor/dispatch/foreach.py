"""Operators on lists of tensors: torch's foreach and fused optimizer operators.

A foreach operator is decided element by element, by the rows of the operator that it stands for, and then run once on
the lists of local tensors. What its elements must send travels in buckets.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from onecard._torch import names as _torch
from onecard._torch.names import tree_leaves
from onecard.comm.agree import sparse_check
from onecard.comm.base import record
from onecard.comm.base.state import machine
from onecard.comm.issue import groups
from onecard.comm.issue.run import run as run_steps
from onecard.comm.world.world import get_rank
from onecard.errors import DispatchError
from onecard.moves import resharding
from onecard.place.layout import Layout
from onecard.place.mesh import ProcessMesh
from onecard.place.parts import axes_of
from onecard.rules.call import Path, schema_of, written
from onecard.rules.registry import find
from onecard.tensor import watched
from onecard.tensor.aliasing import memory
from onecard.tensor.buckets import reduce_all
from onecard.tensor.dispatch import entries, fallback
from onecard.tensor.dispatch.entries import Direct
from onecard.tensor.dispatch.entry import by_value, dispatch, program_for
from onecard.tensor.dispatch.first_calls import believed
from onecard.tensor.dispatch.program import Program, Rechecked, Rewritten
from onecard.tensor.dist_tensor import DistTensor, announce, describe, wrap
from onecard.tensor.spec import OWN

aten = torch.ops.aten


class ForeachProgram:
    """A decided foreach call: one Program for each element, run together on the lists of local tensors."""

    simple = False

    def __init__(
        self, func: Any, element: Any, elements: list[Program | None], together: bool, elsewhere: bool
    ) -> None:
        self.func, self.element, self.elements = func, element, elements
        self.name, self.writes = schema_of(func).name, bool(schema_of(func).written)
        self.moves = [(i, m) for i, p in enumerate(elements) if p is not None for m in p.moves]
        # What sends a message is the same on every rank; only the kernel that follows may depend on this rank's shard.
        self.together = together
        alike = all(p is None or not (getattr(p.call, "of", p.call) is not p.func or p.replace) for p in elements)
        self.one_kernel = alike and not elsewhere

    def __call__(self, args: Any, kwargs: Any) -> Any:
        result = self._run(args, kwargs)
        if self.writes and not torch.is_inference_mode_enabled():
            # Autograd counts the writes of other operators itself, and leaves it to the kernels of these.
            increment_version(args[0])
        return result

    def _run(self, args: Any, kwargs: Any) -> Any:
        if not self.together:
            return one_by_one(self.element)(self.func, args, kwargs)
        operands = [_item(args, i, m[0]) for i, m in self.moves]
        reduced = [(x, m[1]) for x, (_, m) in zip(operands, self.moves, strict=True) if _only_reduces(x, m[1])]
        reduce_all([x for x, _ in reduced], self.name, False)
        if any(x._spec.layout is not target for x, target in reduced):  # it was cut: somebody wants it so
            return program_for(self.func, args, kwargs)._run(args, kwargs)
        for i, p in enumerate(self.elements):
            pending = p.pending if isinstance(p, Rechecked) else ()
            if any(_item(args, i, at)._spec.layout is not layout for at, layout in pending):
                # Reducing one operand reduced another one: decide again.
                return program_for(self.func, args, kwargs)._run(args, kwargs)
        if not self.one_kernel:
            return one_by_one(self.element)(self.func, args, kwargs)
        local = [[_local(x) for x in a] if isinstance(a, list | tuple) else _for_all(a) for a in args]
        for i, (path, target, name) in self.moves:
            x = _item(args, i, path)
            if isinstance(x, DistTensor) and x._spec.layout is target:
                continue
            moved = self.elements[i].move(x, target, name)  # type: ignore[union-attr]
            holder = local[path[0]]  # type: ignore[index]
            if not isinstance(holder, list):
                # One tensor for all elements: each needs it alike, or the elements run on their own.
                local[path[0]] = moved  # type: ignore[index]
            else:
                holder[i] = moved
        results = self.func(*local, **{k: _local(v) for k, v in kwargs.items()})
        _tell_writes(self.func, args, kwargs)
        if results is None or not isinstance(results, list | tuple):
            return results
        return [
            result if p is None else wrap(result, p.specs[0]) for result, p in zip(results, self.elements, strict=True)
        ]


def one_by_one(element: Any) -> Any:
    """A handler that runs a foreach operator as so many calls of the operator on one element."""

    def run(func: Any, args: Any, kwargs: Any) -> Any:
        results = []
        for i in range(len(next(a for a in args if isinstance(a, list | tuple)))):
            element_args, element_kwargs = _element_args(element, [_pick(a, i) for a in args], kwargs)
            results.append(_one(element, element_args, element_kwargs))
        return None if schema_of(func).written else results

    return run


def _one(element: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """One of the calls, past the debug check: that has seen all of them, and whether they are taken apart may differ by rank."""
    if any(isinstance(a, DistTensor) for a in (*args, *kwargs.values())):
        return dispatch(DistTensor, element, (), args, kwargs)
    return element(*args, **kwargs)


def build_foreach(func: Any, args: Any, kwargs: Any) -> Any:
    """Decide a foreach call element by element."""
    element = _element(func)
    if element is None:
        return Direct(func, fallback.gather)
    if believed(element):
        return Direct(func, one_by_one(element))
    programs: list[Program | Rewritten | None] = []
    for i in range(len(next(a for a in args if isinstance(a, list | tuple)))):
        element_args, element_kwargs = _element_args(element, [_pick(a, i) for a in args], kwargs)
        distributed = any(isinstance(a, DistTensor) for a in (*element_args, *element_kwargs.values()))
        programs.append(program_for(element, element_args, element_kwargs) if distributed else None)
    elements = [p if isinstance(p, Program) else None for p in programs]
    rewritten = any(isinstance(p, Rewritten) for p in programs)
    elsewhere = any(_is_elsewhere([_pick(a, i) for a in args]) for i in range(len(programs)))
    one_for_all = any(isinstance(args[m[0][0]], Tensor) for p in elements if p is not None for m in p.moves)
    # Elements that share memory on one card see each other's writes, in their order.
    return ForeachProgram(func, element, elements, not (rewritten or one_for_all or _copies_among(args)), elsewhere)


def _is_elsewhere(operands: list[Any]) -> bool:
    """Whether a distributed operand has no part here, and a plain one beside it all: a plain parameter of another stage."""
    tensors = [x for x in operands if isinstance(x, Tensor)]
    return any(isinstance(x, DistTensor) and not x._spec.here for x in tensors) and any(
        not isinstance(x, DistTensor) for x in tensors
    )


def _copies_among(args: Any) -> bool:
    return any(isinstance(x, DistTensor) and x._spec.alias != OWN for x in tree_leaves(args))


def _check_writable(func: Any, args: Any) -> None:
    for _, x in written(func, args, {}):
        memory.check_writable(x, schema_of(func).name)


_RENAMED = {
    ("maximum", "Scalar"): aten.clamp_min.default,
    ("minimum", "Scalar"): aten.clamp_max.default,
    ("maximum", "ScalarList"): aten.clamp_min.default,
    ("minimum", "ScalarList"): aten.clamp_max.default,
    # maximum and minimum have no in-place forms; these do the same.
    ("maximum_", "Scalar"): aten.clamp_min_.default,
    ("minimum_", "Scalar"): aten.clamp_max_.default,
    ("maximum_", "ScalarList"): aten.clamp_min_.default,
    ("minimum_", "ScalarList"): aten.clamp_max_.default,
    ("maximum_", "List"): aten.clamp_min_.Tensor,
    ("minimum_", "List"): aten.clamp_max_.Tensor,
    ("norm", "Scalar"): aten.linalg_vector_norm.default,
    ("pow", "ScalarAndTensor"): aten.pow.Scalar,
    ("pow", "List"): aten.pow.Tensor_Tensor,
    ("pow", "Scalar"): aten.pow.Tensor_Scalar,
    ("pow", "ScalarList"): aten.pow.Tensor_Scalar,
}
_OVERLOADS = {"List": "Tensor", "Scalar": "Scalar", "ScalarList": "Scalar", "Tensor": "Tensor"}


def _element(func: Any) -> Any:
    """The operator on one element that a foreach operator stands for; None if there is none."""
    schema = schema_of(func)
    name, overload = schema.name.removeprefix("_foreach_"), schema.overload
    renamed = _RENAMED.get((name, overload))
    if renamed is not None:
        return renamed
    packet = getattr(aten, name, None)
    wanted = (_OVERLOADS.get(overload, ""), "default", "Tensor")
    overloads = packet.overloads() if packet is not None else []
    return next((getattr(packet, w) for w in wanted if w in overloads), None)


def _element_args(element: Any, given: list[Any], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Arguments of one element: what the element's operator takes by keyword only moves there."""
    schema = schema_of(element)
    extra = [n for n in schema.arguments[schema.positional :] if n not in schema.out]
    named = dict(zip(extra, given[schema.positional :], strict=False))
    return given[: schema.positional], {**named, **{k: v for k, v in kwargs.items() if k in schema.arguments}}


def _pick(value: Any, i: int) -> Any:
    return value[i] if isinstance(value, list | tuple) else value


def _item(args: Any, i: int, path: Path) -> Any:
    return _pick(args[path[0]], i)


def _local(value: Any) -> Any:
    return value._local if isinstance(value, DistTensor) else value


def _for_all(value: Any) -> Any:
    """One operand of all elements. A rank outside its mesh has nothing of it, and kernels ask for a number: any will do."""
    local = _local(value)
    outside = isinstance(value, DistTensor) and not value.dim() and local.dim()
    return local.new_zeros(()) if outside else local


def _tell_writes(func: Any, args: Any, kwargs: Any) -> None:
    """Tell the copies that stand for views of what a kernel has just written to."""
    if sparse_check.on.here:
        watched.written(schema_of(func).name, args[0], len(args) > 1 and isinstance(args[1], list | tuple))
    if memory.copies:
        for _, x in written(func, args, kwargs):
            memory.wrote(x)


def _only_reduces(x: Any, target: Layout) -> bool:
    return isinstance(x, DistTensor) and bool(x._spec.layout.pending) and x._spec.layout.reduced() is target


class FusedProgram:
    """A fused optimizer step: gradients and states come to their parameter's layout, then one local kernel.

    States that lie otherwise (``shard_fn``, a state dict of plain tensors) are brought there and written back.
    """

    simple = False

    def __init__(self, func: Any) -> None:
        self.func, self.name = func, schema_of(func).name

    def __call__(self, args: Any, kwargs: Any) -> Any:
        params = args[0]
        if len(params) > 1 and _copies_among(args):  # as for foreach operators
            _check_writable(self.func, args)
            for i in range(len(params)):
                self.func(*([*a[i : i + 1]] if isinstance(a, list | tuple) else a for a in args), **kwargs)
            return None
        lists = [a for a in args if isinstance(a, list | tuple)]
        reduce_all([x for a in lists for x in a if _reduces_to(x, params)], self.name, explicit=False)
        local: list[Any] = [[_local(p) for p in params]]
        back: list[tuple[Tensor, Tensor]] = []
        for i, a in enumerate(args[1:], 1):
            if not isinstance(a, list | tuple):
                local.append(_local(a))
                continue
            local.append([self._fit(x, p) for x, p in zip(a, params, strict=False)])
            if self._writes(i, kwargs):
                moved = zip(a, local[i], params, strict=False)
                back += [(x, _like_param(y, p)) for x, y, p in moved if y is not _local(x)]
        result = self.func(*local, **{k: _local(v) for k, v in kwargs.items()})
        _tell_writes(self.func, args, kwargs)
        for x, value in back:
            fallback.write(x, value)
        return result

    def _writes(self, position: int, kwargs: Any) -> bool:
        """Whether the kernel writes to a list; to gradients it does only where it must unscale them."""
        schema = schema_of(self.func)
        name = schema.arguments[position]
        return name in schema.written and (name != "grads" or kwargs.get("grad_scale") is not None)

    def _fit(self, x: Any, param: Any) -> Any:
        if not isinstance(x, Tensor) or x.dim() == 0 or x.shape != param.shape:
            return _local(x)
        target = param._spec.layout if isinstance(param, DistTensor) else None
        if target is None:
            return x.full_tensor() if isinstance(x, DistTensor) else x
        if isinstance(x, DistTensor):
            if x._spec.layout is target:
                return _dense(x._local, param._local)
            if x.mesh is not target.mesh:
                raise DispatchError(f"{self.name}: {describe(x)} and its parameter {describe(param)} are on two meshes")
            moved = x._become(target, self.name, "grads", "follows its parameter", explicit=False)
            return _dense(x._local if x._spec.layout is target else moved, param._local)
        return _dense(target.local_part(x), param._local)


def _dense(local: Tensor, param: Tensor) -> Tensor:
    """In memory as its parameter: the kernels count elements from the first one."""
    return local if local.stride() == param.stride() else torch.empty_like(param, dtype=local.dtype).copy_(local)


def _like_param(local: Tensor, param: Any) -> Tensor:
    """A local tensor as what it is a part of: laid out as its parameter."""
    return wrap(local, param._spec) if isinstance(param, DistTensor) and local.dim() == param.dim() else local


def _reduces_to(x: Any, params: Any) -> bool:
    if not isinstance(x, DistTensor) or not x._spec.layout.pending:
        return False
    return not any(x._spec.layout.dims) or any(x is p for p in params)


@entries.handler(aten._amp_foreach_non_finite_check_and_unscale_.default)
def _unscale(func: Any, args: Any, kwargs: Any) -> None:
    """GradScaler: unscale gradients in place; found_inf is one if any rank's part of any gradient is not finite."""
    grads, found_inf, inv_scale = args
    reduce_all(grads, "unscale", explicit=False)
    found, scale = _whole(found_inf), _whole(inv_scale)
    func([_local(g) for g in grads], found, scale)
    _tell_writes(func, args, kwargs)
    cuts: dict[ProcessMesh, set[int]] = {}
    for g in grads:
        if isinstance(g, DistTensor) and g._spec.here:
            cuts.setdefault(g.mesh, set()).update(a for dim in g._spec.layout.dims for a in axes_of(dim))
    shape = tuple(found.shape)
    parts = [(mesh, axes) for mesh, axes in sorted(cuts.items(), key=lambda pair: str(pair[0]))]
    if len(everyone := _steppers(grads)) > 1 and get_rank() in everyone:
        parts.append((ProcessMesh(everyone, ["stages"]), {0}))
    for mesh, axes in parts:
        seen = Layout.make(mesh, ((),) * len(shape), tuple((a, "max") for a in sorted(axes)))
        steps = resharding.plan(shape, found.element_size(), seen, seen.reduced(), machine.here)
        record.serving.here = ("unscale", "found_inf", shape)
        if record.observers.here:
            announce(
                steps, "unscale", "found_inf", shape, "one infinite part skips the step on all ranks", explicit=False
            )
        found.copy_(run_steps(steps, found, shape))


def _steppers(grads: Sequence[Tensor]) -> list[int]:
    """Who steps together where gradients lie on several meshes, or stages have them; else nobody."""
    meshes = {g.mesh for g in grads if isinstance(g, DistTensor)}
    if meshes & groups.stages.here:
        meshes |= groups.stages.here
    return sorted({rank for mesh in meshes for rank in mesh.process_ids}) if len(meshes) > 1 else []


def _whole(value: Tensor) -> Tensor:
    return value.reduce_partial()._local if isinstance(value, DistTensor) else value


def _register() -> None:
    for name in _torch.operator_names():
        if not name.startswith(("aten::_foreach_", "aten::_fused_ada", "aten::_fused_sgd")):
            continue
        packet, _, overload = name.removeprefix("aten::").partition(".")
        func = getattr(getattr(aten, packet), overload or "default")
        if schema_of(func).out:
            continue
        if packet.startswith("_foreach_"):
            entries.program(func)(build_foreach)
            element = _element(func)
            row = None if element is None else find(element)
            by_value[func] = row is not None and row.values  # a norm's order decides, a learning rate does not
        else:
            entries.program(func)(lambda func, args, kwargs: FusedProgram(func))


_register()
