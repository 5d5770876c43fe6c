"""Run a program on one card and on its mesh, on every rank, and compare."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import onecard as oc
from fuzz.program import Program, axes_of, helpers
from onecard.comm.base import record
from onecard.comm.issue.run import run as run_steps
from onecard.moves import resharding
from onecard.place.layout import Layout

TOLERANCE = 1e-8
# What the documentation says is refused; every other error is a failure.
LIMITS = {
    "a write to overlapping or expanded memory": r"windows that overlap|expanded",
    "as_strided of a view": r"the memory around it is not on this rank",
    # One card may have saved a copy, where a cut tensor is saved itself.
    "a write to what backward needs": r"modified by an inplace operation",
}


@dataclass(frozen=True)
class Outcome:
    """How a program ended: "right", "refused", "wrong", or "void" (it does not run on one card).

    Attributes:
        why: what went wrong; ``at``: the statement's number (-1: after the last one), in which ``step``.
    """

    kind: str
    why: str = ""
    at: int = -1
    step: int = 0


class Fault(Exception):
    """A statement went wrong."""


@contextmanager
def double() -> Iterator[None]:
    """Float64 by default, and no warnings of torch's or of gathered operators."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_default_dtype(before)


def one_card(program: Program) -> tuple[Outcome, dict[tuple[int, int], dict[str, Tensor]]]:
    """Run it on one card: how it ended, and what each statement made."""
    space, made = helpers(None), {}
    with double():
        for at, step in program.run():
            try:
                execute(program, at, step, space)
                if program.look:
                    made[at, step] = kept(program.lines[at], space)
            except Exception as fault:
                return Outcome("void", _said(fault), at, step), made
        try:
            made[-1, 0] = everything(space)
        except RuntimeError as fault:  # torch forbids to look at some views
            return Outcome("void", _said(fault)), made
    return Outcome("right"), made


def on_mesh(program: Program) -> tuple[Outcome, str]:
    """Run it on its mesh and compare: how it ended on this rank, and the messages of this rank."""
    outcome, expected = one_card(program)
    if outcome.kind != "right":
        return outcome, ""
    messages: list[str] = []
    at, step = -1, 0

    def observer(m: record.Notice) -> None:
        messages.append(f"{m.step.kind} {m.operator} {m.operand} {list(m.shape)} of {m.tensors}")

    record.observers.here.append(observer)
    try:
        with double():
            space = helpers(oc.ProcessMesh(program.ranks, ["x", "y"][: axes_of(program.ranks)]))
            for at, step in program.run():
                execute(program, at, step, space)
                if program.look:
                    compare(kept(program.lines[at], space), expected[at, step])
            at, step = -1, 0
            compare(everything(space), expected[-1, 0])
    except Fault as fault:
        return Outcome("wrong", str(fault), at, step), "\n".join(messages)
    except Exception as error:
        kind = next((name for name, limit in LIMITS.items() if re.search(limit, str(error))), None)
        return Outcome("refused" if kind else "wrong", kind or _said(error), at, step), "\n".join(messages)
    finally:
        record.observers.here.remove(observer)
    return Outcome("right"), "\n".join(messages)


def execute(program: Program, at: int, step: int, space: dict[str, Any]) -> None:
    """Run one statement. Modules draw torch's numbers in the setup; what is drawn later is drawn by onecard, on both sides."""
    if at in (0, len(program.setup)):
        torch.manual_seed(program.seed + step)
    space["step"] = step
    with oc.one_card_random() if program.draws and at >= len(program.setup) else nullcontext():
        exec(program.lines[at], space)


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


_TARGET = re.compile(r"(?:if [^:]*: *|with [^:]*: *)?(\w+)\b(?: *[\[.(=+*-])")


def kept(line: str, space: dict[str, Any]) -> dict[str, Tensor]:
    """What a statement made or wrote to: the variable that it begins with; the gradients and parameters, if it trains."""
    found = {}
    match = _TARGET.match(line)
    value = space.get(match.group(1)) if match else None
    if isinstance(value, Tensor):
        found[match.group(1)] = copied(value)  # type: ignore[union-attr]
    if ".backward(" in line or "clip_grad" in line:
        found |= {f"{name}.grad": copied(p.grad) for name, p in leaves(space) if p.grad is not None}
    if "opt.step(" in line:
        found |= {name: copied(p) for name, p in leaves(space)}
    return found


def everything(space: dict[str, Any]) -> dict[str, Tensor]:
    """All variables, parameters, buffers and gradients."""
    found = {name: value for name, value in space.items() if isinstance(value, Tensor)}
    found |= {f"{name}.grad": p.grad for name, p in leaves(space) if p.grad is not None}
    found |= dict(leaves(space))
    if isinstance(space.get("model"), nn.Module):
        found |= dict(space["model"].named_buffers())
    return {name: copied(value) for name, value in found.items()}


def leaves(space: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Tensors that get gradients, with their names."""
    if isinstance(space.get("model"), nn.Module):
        yield from space["model"].named_parameters()
    for name, value in space.items():
        if isinstance(value, Tensor) and value.requires_grad and value.is_leaf:
            yield name, value


def copied(x: Tensor) -> Tensor:
    """The whole value as it is now. What is pending stays so: to look changes nothing."""
    if not isinstance(x, oc.DistTensor):
        return x.detach().clone()
    x = x.detach()  # type: ignore[assignment]
    x._refresh()
    shape, whole = tuple(x.shape), Layout.replicated(x.mesh, x.dim())
    return run_steps(resharding.plan(shape, x.element_size(), x.layout, whole), x.to_local(), shape).clone()


def compare(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Raise what differs first. All values are whole already: no message may depend on a comparison."""
    if list(found) != list(expected):
        raise Fault(f"there is {list(found)}, and on one card {list(expected)}")
    for name, right in expected.items():
        mine = found[name]
        if (mine.shape, mine.dtype) != (right.shape, right.dtype):
            raise Fault(f"{name} is {mine.dtype} {list(mine.shape)}, and on one card {right.dtype} {list(right.shape)}")
        if not right.numel():
            continue
        if not right.is_floating_point():
            if not torch.equal(mine, right):
                raise Fault(f"{name} is {mine.tolist()}, and on one card {right.tolist()}")
            continue
        finite = right.isfinite()
        scale = max(float(right[finite].abs().max()) if finite.any() else 0.0, 1.0)
        if not torch.allclose(mine, right, rtol=0.0, atol=TOLERANCE * scale, equal_nan=True):
            off = (mine - right).abs().nan_to_num(nan=float("inf")).flatten()
            i = int(off.argmax())
            one, other = mine.flatten()[i].item(), right.flatten()[i].item()
            raise Fault(
                f"{name} {list(right.shape)} differs, most at element {i}: {one:.12g}, on one card {other:.12g}"
            )
