"""First calls by a rule that nobody has proved: run on gathered operands as well, and compared."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from onecard._torch.names import tree_map
from onecard.comm.base import record
from onecard.comm.base.state import Kept, machine
from onecard.comm.base.warned import warn
from onecard.comm.issue.run import run as run_steps
from onecard.comm.world import pretend
from onecard.errors import OnecardError, RuleError
from onecard.moves import resharding
from onecard.place.layout import Layout
from onecard.rules.call import schema_of, tensors_in, written
from onecard.rules.register import unproved
from onecard.rules.registry import row_name
from onecard.tensor.dispatch.program import Program, Rewritten, in_order
from onecard.tensor.dist_tensor import DistTensor, announce

COMPARED = (1, 2, 4)  # which calls of a program: the first one's operands may be zeros
# By dtype, relative to the largest number among operands and results; a wrong rule is off by far more.
_ROUNDING = {torch.float32: 1e-3, torch.complex64: 1e-3, torch.float16: 3e-2, torch.bfloat16: 1e-1}

_random: Kept[set[Any]] = Kept(set)  # operators of which was said that they cannot be compared


def believed(func: Any) -> bool:
    """Whether an operator runs by a row that was registered without samples."""
    return bool(unproved) and row_name(func) in unproved


class FirstCalls:
    """A program of a row without proof: its first calls are compared, then it is as any other.

    Every rank decides alike which calls are compared, and sends the same messages.
    """

    simple = False

    def __init__(self, program: Program | Rewritten) -> None:
        self.program, self.calls = program, 0

    def __call__(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        self.calls += 1
        operands = [v for v in _tensors((args, kwargs)) if isinstance(v, DistTensor)]
        if self.calls not in COMPARED or not _comparable(self.program.func, operands):
            return self._call(args, kwargs)
        func = self.program.func
        described = ", ".join(repr(x._spec) for x in operands)
        given = _whole((args, kwargs), schema_of(func).name)
        right, after = _run(func, given)
        result, made, why = self._run(args, kwargs)
        why = _agreed(operands[0], why)
        if not why:
            found = [_gathered(t, schema_of(func).name, "a result") for t in made]
            why = _difference([*right, *after], found, len(right), list(_tensors(given)))
        if why and not _same_again(func, given, [*right, *after]):
            _say_random(func)
        elif why:
            self.calls = 0  # the next one is compared again
            raise RuleError(_words(self.program, described, why))
        return result

    def _call(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        result = self.program(args, kwargs)
        if self.calls == 1 and isinstance(self.program, Program):
            self.program = in_order(self.program, result)
        return result

    def _run(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, list[Tensor], str]:
        """What the program returns; the tensors that it makes and writes to; why this rank's part of one cannot be right."""
        try:
            result = self._call(args, kwargs)
        except OnecardError:
            raise
        except Exception as fault:  # on whole tensors there was none, so it is the rule's, or its hook's
            return None, [], f"on a part the operator raises {type(fault).__name__}: {fault}"
        made = [*tensors_in(result), *(x for _, x in written(self.program.func, args, kwargs))]
        for x in made:
            expected = x._spec.layout.local_shape(x._spec.shape) if isinstance(x, DistTensor) else tuple(x.shape)
            if isinstance(x, DistTensor) and tuple(x._local.shape) != expected:
                return (
                    result,
                    made,
                    f"a part has shape {list(x._local.shape)}, and as {x._spec!r} it would be {list(expected)}",
                )
        return result, made, ""


def _agreed(operand: DistTensor, why: str) -> str:
    """What some rank has against its part, on every rank: else the others would wait for it."""
    mesh = operand.mesh
    everywhere = Layout.make(mesh, (), tuple((axis, "sum") for axis in range(mesh.ndim)))
    steps = resharding.plan((), 8, everywhere, Layout.replicated(mesh, 0), machine.here)
    record.serving.here = ("first call", "its faults", ())
    faults = run_steps(steps, torch.tensor(float(bool(why)), device=operand._spec.device), ())
    return why or ("a part does not fit on another rank" if faults.item() else "")


def _comparable(func: Any, operands: Sequence[DistTensor]) -> bool:
    """Whether values mean anything here, and are what the operator makes of its operands alone."""
    if pretend.pretending() or any(x._local.is_meta or not x._spec.here for x in operands):
        return False
    if torch.Tag.nondeterministic_seeded in func.tags:
        _say_random(func)
        return False
    return True


def _say_random(func: Any) -> None:
    if func not in _random.here:
        _random.here.add(func)
        warn(
            f"{func} draws random numbers, so that its rule, registered without verify=, cannot be compared with the operator "
            "on whole tensors: nobody has proved it",
        )


def _words(program: Program | Rewritten, described: str, why: str) -> str:
    name = row_name(program.func)
    strategy = f" (it {program.reason})" if program.reason else ""
    return (
        f"{schema_of(program.func).name} at {record.user_line()}: the rule that was registered for {name!r} is wrong: {why}\n"
        f"  operands {described}{strategy}\n"
        "The rule was not proved. Correct it, and let it be proved on small tensors where it is stated: "
        f"onecard.register_rule({name!r}, ..., verify=[a sample call])"
    )


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors(item)


def _whole(given: Any, name: str) -> Any:
    """The arguments with whole tensors of their own in them, one for each tensor, as one card would have them."""
    made: dict[int, Tensor] = {}

    def take(value: Any) -> Any:
        if isinstance(value, Tensor) and id(value) not in made:
            made[id(value)] = _gathered(value, name, "an operand").clone()
        return made[id(value)] if isinstance(value, Tensor) else value

    return tree_map(take, given)


def _gathered(x: Tensor, name: str, what: str) -> Tensor:
    """The whole of a tensor; ``x`` stays as it is, also where it is pending."""
    if not isinstance(x, DistTensor):
        return x
    spec = x._spec
    shape, target = tuple(spec.shape), Layout.replicated(spec.layout.mesh, len(spec.shape))
    steps = resharding.plan(shape, spec.dtype.itemsize, spec.layout, target, machine.here)
    if record.observers.here:
        announce(
            steps, name, what, shape, "the rule was registered without verify=: its first calls are compared", True
        )
    record.serving.here = (name, what, shape)
    return run_steps(steps, x._local, shape)


def _run(func: Any, given: Any) -> tuple[list[Tensor], list[Tensor]]:
    """The operator on whole tensors: its results, and what it wrote to. Random numbers stay where they were."""
    args, kwargs = tree_map(lambda v: v.clone() if isinstance(v, Tensor) else v, given)
    devices = {t.device for t in _tensors(given) if t.device.type == "cuda"}
    with torch.random.fork_rng(devices=[d.index for d in devices]):
        result = func(*args, **kwargs)
    return [t.clone() for t in tensors_in(result)], [x for _, x in written(func, args, kwargs)]


def _same_again(func: Any, given: Any, before: Sequence[Tensor]) -> bool:
    """Whether the operator makes the same again, with other random numbers."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(torch.initial_seed() + 1)
        results, after = _run(func, given)
    return all(map(torch.equal, before, (*results, *after)))


def _difference(right: Sequence[Tensor], found: Sequence[Tensor], results: int, operands: Sequence[Tensor]) -> str:
    """What differs, in words; "" if nothing does."""
    if len(right) != len(found):
        return f"it gives {len(found)} tensor(s), and the operator on whole tensors {len(right)}"
    for i, (a, b) in enumerate(zip(right, found, strict=True)):
        what = f"result {i}" if i < results else "what it writes to"
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            is_, want = (f"{list(t.shape)} {str(t.dtype).removeprefix('torch.')}" for t in (b, a))
            return f"{what} is {is_}, and from whole tensors {want}"
        off = _distance(a, b, operands)
        if off:
            return f"{what} differs from that of whole tensors by up to {off:.3g}"
    return ""


def _distance(a: Tensor, b: Tensor, operands: Sequence[Tensor]) -> float:
    """How far two tensors are apart, 0.0 if no farther than rounding takes them."""
    if not a.is_floating_point() and not a.is_complex():
        return 0.0 if torch.equal(a, b) else float((a.double() - b.double()).abs().max())
    kinds = [t for t in (a, *operands) if t.is_floating_point() or t.is_complex()]
    rounding = max(_ROUNDING.get(t.dtype, 1e-7) for t in kinds)
    scale = max(_largest(t) for t in kinds)
    if torch.allclose(a, b, rtol=rounding, atol=rounding * scale, equal_nan=True):
        return 0.0
    return float((a - b).abs().nan_to_num(nan=float("inf")).max())


def _largest(x: Tensor) -> float:
    size = x.abs()
    size = size[size.isfinite()]
    return float(size.max()) if size.numel() else 0.0
