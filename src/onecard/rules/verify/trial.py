"""Trial: one call with its rule and its one-card result, run shard by shard."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from onecard.errors import RuleError
from onecard.place.layout import Layout
from onecard.place.mesh import ProcessMesh
from onecard.rules.call import Call, tensors_in
from onecard.rules.decide import Decision, strategies
from onecard.rules.local import Local
from onecard.rules.refine import apart
from onecard.rules.registry import Row
from onecard.rules.rule import Bound, Form
from onecard.rules.verify.captured import Captured, copied
from onecard.rules.verify.split import Coordinate, coordinates, mismatch, noise, split, tolerance

# Results whose values mean nothing.
VALUELESS = frozenset({"empty_like", "new_empty", "empty_strided", "new_empty_strided"})


class Unfit(Exception):
    """The row has no rule for the call (``why`` is ""), or one that does not fit."""

    def __init__(self, rule: str, why: str) -> None:
        super().__init__(why)
        self.rule, self.why = rule, why


class Trial:
    """One call with its rule, its one-card result, and what is needed to run it on shards.

    Raises:
        Unfit: the row has no rule for this call, or one that does not fit it.
    """

    def __init__(self, captured: Captured, row: Row, mesh: ProcessMesh, seed: int) -> None:
        self.captured, self.row, self.mesh, self.seed = captured, row, mesh, seed
        self.call, self.rule, self.bound = _bind(captured, row)
        self.whole = copied(captured.args), copied(captured.kwargs)
        self.operands = [_at(path, *self.whole) for path in self.call.paths]
        after = copied(captured.args), copied(captured.kwargs)
        self.results = [t.clone() for t in tensors_in(captured.func(*after[0], **after[1]))]
        self._check_meta()
        then = [_at(path, *after) for path in self.call.paths]
        self.written = [
            i for i, t in enumerate(then) if self.call.names[i] in self.call.schema.written or self._changed(i, t)
        ]
        self.after = {i: then[i].clone() for i in self.written}
        self.aliases = _aliases(self.call)
        self.finite = all(t.isfinite().all() for t in self.operands if t.is_floating_point())
        self.tolerance = max(map(tolerance, (*self.operands, *self.results)), default=0.0)
        self.values = self.call.schema.name not in VALUELESS

    def _check_meta(self) -> None:
        """Dispatch knows results by their meta tensors; some operators' meta functions are wrong."""
        for n, (meta, real) in enumerate(zip(self.call.results, self.results, strict=True)):
            if (meta.shape, meta.dtype) != (real.shape, real.dtype):
                said, is_ = f"{meta.dtype} {list(meta.shape)}", f"{real.dtype} {list(real.shape)}"
                raise Unfit(self.rule, f"result {n} is {is_}, but its meta function says {said}")

    def _changed(self, i: int, after: Tensor) -> bool:
        """Whether an operand was written to, whatever the schema says (native_batch_norm's running_mean)."""
        before = self.operands[i]
        if after.shape != before.shape or torch.equal(after, before):
            return after.shape != before.shape
        return not torch.equal(after.isnan(), before.isnan()) or not torch.equal(
            after.nan_to_num(), before.nan_to_num()
        )

    def strategies(self) -> Iterator[Decision]:
        """What the rule allows here. A result that is an operand keeps that operand's layout."""
        for decision in (*strategies(self.bound, self.mesh), *self._of_parts()):
            kept = all(decision.results[r] is decision.operands[i] for r, i in self.aliases.items())
            if kept and self._can_be_split(decision):
                yield decision

    def _of_parts(self) -> Iterator[Decision]:
        """What it allows for merged operands: every factor with divisors as a product of two."""
        fixed = self.bound.pieces | (frozenset(range(len(self.bound.sizes))) - self.bound.free)
        parts = {f: halves for f, n in enumerate(self.bound.sizes) if f not in fixed and (halves := _product(n))}
        for decision in strategies(apart(self.bound, parts), self.mesh) if parts else ():
            if any(layout.merged for layout in (*decision.operands, *decision.results)):
                yield decision

    def _can_be_split(self, decision: Decision) -> bool:
        """Whether there are local tensors that, pending as the decision says, stand for the operands."""
        pending = [i for i, layout in enumerate(decision.operands) if layout.pending]
        ops = {op for i in pending for _, op in decision.operands[i].pending}
        # A mask has no summands; a rule that lets a number and a mask be pending together is put to the test.
        if any(use.op and all(self.operands[i].dtype is torch.bool for i in use.carriers) for use in decision.uses):
            return False
        if ops & {"max", "min"} and any(self.operands[i].is_complex() for i in pending):
            return False
        if "product" in ops and not all(self.operands[i].is_floating_point() for i in pending):
            return False
        # A sum over one axis of a max over another has no one value; infinity times a sum is not the sum of products.
        return len(ops) < 2 and (self.finite or not pending)

    def fault(self, decision: Decision) -> str:
        """Why a strategy is wrong; "" if it is right."""
        try:
            results, after = self.run(decision, self.row)
        except Exception as error:  # whatever a kernel or a hook raises on a shard is a fault of the row
            return f"{type(error).__name__} in a local run: {str(error).splitlines()[0] if str(error) else ''}"
        for n, (whole, layout) in enumerate(zip(self.results, decision.results, strict=True)):
            why = mismatch(whole, layout, results[n], self.values, self.tolerance)
            if not why and layout.pending:
                why = _strides_differ(results[n])
            if why:
                return f"result {n} as {layout}: {why}"
        for i in self.written:
            why = mismatch(self.after[i], decision.operands[i], after[i], self.values, self.tolerance)
            if why:
                return f"{self.call.names[i]} after the call: {why}"
        return ""

    def run(
        self, decision: Decision, row: Row | None, meta: bool = False
    ) -> tuple[list[dict[Coordinate, Tensor]], dict[int, dict[Coordinate, Tensor]]]:
        """Run the call at every coordinate.

        Returns:
            The results, and the written operands after the call: the local tensor at every coordinate.
        """
        # Not the seed of the samples: the summands of a tensor must not be that tensor.
        generator = torch.Generator(device="cpu").manual_seed(self.seed + 7919)
        shards = [split(t, lay, generator) for t, lay in zip(self.read(generator), decision.operands, strict=True)]
        results: list[dict[Coordinate, Tensor]] = [{} for _ in self.results]
        after: dict[int, dict[Coordinate, Tensor]] = {i: {} for i in self.written}
        for place in coordinates(self.mesh):
            locals_ = [shard[place].to("meta") if meta else shard[place] for shard in shards]
            made = list(tensors_in(self._run_one(decision, row, place, locals_)))
            if len(made) != len(results):
                raise RuntimeError(f"{len(made)} local result(s), {len(results)} on one card")
            for n, tensor in enumerate(made):
                results[n][place] = tensor
            for i in self.written:
                after[i][place] = locals_[i]
        return results, after

    def read(self, generator: torch.Generator) -> list[Tensor]:
        """The operands; those that the rule says are not read hold other numbers."""
        return [noise(t, generator) if i in self.bound.unread else t for i, t in enumerate(self.operands)]

    def _run_one(self, decision: Decision, row: Row | None, place: Coordinate, locals_: list[Tensor]) -> Any:
        args, kwargs = list(self.whole[0]), dict(self.whole[1])
        args = [list(a) if isinstance(a, list | tuple) else a for a in args]
        kwargs = {k: list(v) if isinstance(v, list | tuple) else v for k, v in kwargs.items()}
        for (where, index), tensor in zip(self.call.paths, locals_, strict=True):
            holder: Any = args if isinstance(where, int) else kwargs
            if index >= 0:
                holder[where][index] = tensor
            else:
                holder[where] = tensor
        run = self.captured.func
        if row is not None and row.local is not None:
            local = Local(self.call, decision.bound, decision, place)
            row.local(local)
            order = self.call.schema.arguments
            for name, value in local.replace.items():
                if order.index(name) < len(args):
                    args[order.index(name)] = value
                else:
                    kwargs[name] = value
            run = local.run or run
        return run(*args, **kwargs)


def _product(size: int) -> tuple[int, ...]:
    """Two factors of a size, the outer one as small as can be; () of a prime."""
    return next(((n, size // n) for n in range(2, size) if size % n == 0), ())


def _strides_differ(local: dict[Coordinate, Tensor]) -> str:
    """Summands are added up memory by memory where views share it, so it must be in one order on all ranks."""
    orders: dict[tuple[int, ...], tuple[Coordinate, list[int]]] = {}
    for place, tensor in local.items():
        order = [step for n, step in zip(tensor.shape, tensor.stride(), strict=True) if n > 1]
        other, expected = orders.setdefault(tuple(tensor.shape), (place, order))
        if tensor.numel() and order != expected:
            return f"strides {order} at {place}, but {expected} at {other}"
    return ""


def one_axis_layouts(mesh: ProcessMesh, ndim: int) -> Iterator[Layout]:
    """Replicated, and the first axis on each dim."""
    yield Layout.replicated(mesh, ndim)
    for dim in range(ndim):
        yield Layout.make(mesh, tuple((0,) if d == dim else () for d in range(ndim)))


def described(form: Form) -> str:
    """A rule with its traits, on one line.

    Example:
        >>> described(Form("a b -> a", reduce="max", nonempty="b"))
        'a b -> a; reduce max; nonempty b'
    """
    words = [form.text]
    if form.reduce != "sum":
        reduce = (form.reduce,) if isinstance(form.reduce, str) else form.reduce
        words.append(f"reduce {', '.join(op or 'none' for op in reduce)}")
    for name in ("whole", "linear", "keeps", "nonempty", "even", "unread"):
        if getattr(form, name):
            words.append(f"{name} {getattr(form, name)}")
    return "; ".join([*words, "moves"] if form.moves else words)


def _bind(captured: Captured, row: Row) -> tuple[Call, str, Bound]:
    metas, keywords = [_meta(a) for a in captured.args], {k: _meta(v) for k, v in captured.kwargs.items()}
    call = Call(captured.func, metas, keywords)
    if call.schema.out or torch.Tag.inplace_view in captured.func.tags:
        raise Unfit("", "")  # not decided by a rule: an out= form is run as the functional form and a copy
    try:
        call.results = row.results_of(call)
    except NotImplementedError as fault:
        why = str(fault).partition(". ")[0]
        raise Unfit("", f"no result shapes without data, so the row is never used: {why}") from None
    form = row.form_for(call)
    if form is None:
        raise Unfit("", "")
    try:
        bound = row.bound(form, call)
    except RuleError as fault:
        raise Unfit(described(form), str(fault)) from None
    return call, described(form), bound


def _aliases(call: Call) -> dict[int, int]:
    """Result number -> the operand that it is, for operators that write to their arguments."""
    names = {}
    for argument in call.func._schema.arguments:
        if argument.alias_info is not None and argument.alias_info.is_write:
            names[frozenset(argument.alias_info.before_set)] = argument.name
    found = {}
    for r, result in enumerate(call.func._schema.returns):
        info = result.alias_info
        name = names.get(frozenset(info.before_set)) if info is not None and info.is_write else None
        if name is not None and call.index(name) >= 0:
            found[r] = call.index(name)
    return found


def _meta(value: Any) -> Any:
    if isinstance(value, Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    if isinstance(value, list | tuple):
        return type(value)(_meta(item) for item in value)
    return torch.device("meta") if isinstance(value, torch.device) else value


def _at(path: tuple[int | str, int], args: Any, kwargs: Any) -> Any:
    place, index = path
    value = args[place] if isinstance(place, int) else kwargs[place]
    return value if index < 0 else value[index]
