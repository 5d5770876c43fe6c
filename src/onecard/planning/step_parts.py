"""What a step is made of, its model, optimizers, batch and loss: seen in one run without data, of which nothing is done."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from onecard.errors import NoBackward, PlanError
from onecard.planning.program import HeardProgram
from onecard.static.api import Static
from onecard.static.call import flat, name_of, roots_given
from onecard.static.capture.capture import Capture
from onecard.static.capture.questions import AskedOfWhole
from onecard.static.capture.unmade import left_unmade
from onecard.tensor.random_operators.one_card import one_card_random
from onecard.train.lazy import refuse_lazy


def is_step(given: Any) -> bool:
    """Whether something is a step of training: what ``to_static`` returned, or a function that takes arguments.

    Example:
        >>> is_step(lambda x, y: None), is_step(lambda: nn.Linear(2, 2)), is_step(nn.Linear), is_step(nn.Linear(2, 2))
        (True, False, False, False)
    """
    if isinstance(given, Static):
        return not isinstance(given.fn, nn.Module)
    if isinstance(given, nn.Module | type | str | tuple) or not callable(given):
        return False
    try:
        wanted = inspect.signature(given).parameters.values()
    except (TypeError, ValueError):
        return False
    return any(p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.KEYWORD_ONLY) for p in wanted)


@dataclass(frozen=True)
class StepParts:
    """A step, taken apart.

    Attributes:
        model: the module that it trains; optimizers: those that step.
        batch: what of the batch enters the model and its loss, in the order in which it does.
        loss: (model, *batch) -> the loss.
    """

    model: nn.Module
    optimizers: tuple[Optimizer, ...]
    batch: tuple[Tensor, ...]
    loss: Callable[..., Tensor]


def parts_of_step(
    step: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None = None, ask: bool = False
) -> StepParts:
    """A step, as ``to_static`` is given it, taken apart. It runs once without data: nothing is computed, changed or sent.

    Args:
        step: forward, one ``backward()`` of a loss, the optimizers; args, kwargs: what it is called with.
        ask: values that it reads are computed of the arguments, which have data.

    Raises:
        PlanError: it trains several models, calls ``backward()`` more than once, or not behind a model.
        RecordingError: it reads values; names the line.
    """
    name = name_of(step)
    fn = step.fn if isinstance(step, Static) else step
    leaves, names, tree = flat(fn, tuple(args), dict(kwargs or {}))
    for module in _reached(fn).values():
        if isinstance(module, nn.Module):
            refuse_lazy(module, f"plan: {name}", PlanError)
    with left_unmade():
        capture = Capture(leaves, names, roots_given(fn, leaves), ask, replayed=False)
        capture.recorder.answers = AskedOfWhole(leaves, alone=False) if ask else None
        return _parts(name, fn, leaves, names, tree, capture)


def _parts(name: str, fn: Any, leaves: Sequence[Any], names: Sequence[str], tree: Any, capture: Capture) -> StepParts:
    rows = next((len(x) for x in leaves if isinstance(x, Tensor) and x.ndim), 0)
    undo, program = capture.undone(sketched=True), HeardProgram(rows=rows)

    def heard(*given: Any, **named: Any) -> Any:
        with program, _Calls(program):
            return fn(*given, **named)

    try:
        with one_card_random():
            capture.run(heard, tree)
    finally:
        capture.settle()
        undo.back()
    if program.model is None or not program.backwards:
        raise NoBackward(
            f"plan: {name} is taken for a step, as it takes arguments; it calls no backward() of what a module with parameters "
            "returns. Want forward, loss.backward() and the optimizer; a function that builds a module takes no arguments. To "
            "evaluate beside a step of training: to_static(evaluate, plan=plan), called once that step was, with its plan"
        )
    if program.backwards > 1:
        raise PlanError(
            f"plan: {name} calls backward() {program.backwards} times, and a plan is for one: of several microbatches give "
            "the step of all rows, which a plan divides itself; of several losses their sum, or (model, loss, optimizer, batch)"
        )
    model, batch, loss = program.parts()
    optimizers = tuple(capture.phases.optimizers)
    _check_one_model(name, model, optimizers, dict(zip(names, leaves, strict=True)) | _reached(fn))
    return StepParts(model, optimizers, batch, loss)


def _reached(fn: Any) -> dict[str, Any]:
    """What a function names: variables around it, and attributes of the object whose method it is."""
    found = {f"self.{name}": x for name, x in vars(getattr(fn, "__self__", SimpleNamespace())).items()}
    with suppress(TypeError):  # no function of Python
        known = inspect.getclosurevars(getattr(fn, "__func__", fn))
        found |= {**known.globals, **known.nonlocals}
    return found


def _check_one_model(name: str, model: nn.Module, optimizers: Sequence[Optimizer], reached: dict[str, Any]) -> None:
    """What the optimizers train is the model's."""
    trained = [p for o in optimizers for group in o.param_groups for p in group["params"]]
    own = {*model.parameters()}
    if not (others := [p for p in trained if p not in own]):
        return
    for at, whole in reached.items():
        if isinstance(whole, nn.Module) and {*trained} <= {*whole.parameters()}:
            raise PlanError(
                f"plan: {name} calls layers of {at} one by one, and trains more than those of {type(model).__name__}: call "
                f"{at}(...), with what the step does between them as the forward of {type(whole).__name__}. As it is, without "
                f"stages and microbatches, it runs eagerly: oc.parallelize({at}, optimizer, plan=...)"
            )
    raise PlanError(
        f"plan: {name} trains {len(others)} parameter(s) that are not of {type(model).__name__}, the first of shape "
        f"{[*others[0].shape]}: a plan is for one model. Put them into one module that calls the others"
    )


class _Calls(TorchFunctionMode):
    """Tells a program of each call of torch's."""

    def __init__(self, program: HeardProgram) -> None:
        super().__init__()
        self.program = program

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.program.heard(func, args, kwargs or {}, result)
        return result
