"""Habits (``habits_static.py``): defaults, functions, methods and classes that are exchanged between the calls of a step."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import torch
from habits_static import Box, Habit, habit, nothing
from torch import Tensor, nn


@habit
def a_list_as_a_default_argument() -> Habit:
    def step(x: Tensor, log: list[int] = []) -> Tensor:  # noqa: B006
        log.append(0)
        return x * len(log)

    return step, nothing


@habit
def an_entry_of_a_default_argument() -> Habit:
    options = {"scale": 1.0}

    def step(x: Tensor, options: dict[str, float] = options) -> Tensor:
        return x * options["scale"]

    return step, lambda i: options.update(scale=i + 0.5)


@habit
def default_arguments_replaced() -> Habit:
    def helper(x: Tensor, scale: float = 1.0) -> Tensor:
        return x * scale

    return lambda x: helper(x), lambda i: setattr(helper, "__defaults__", (i + 0.5,))


@habit
def keyword_defaults_replaced() -> Habit:
    def helper(x: Tensor, *, scale: float = 1.0) -> Tensor:
        return x * scale

    return lambda x: helper(x), lambda i: setattr(helper, "__kwdefaults__", {"scale": i + 0.5})


@habit
def code_replaced() -> Habit:
    """As editors that reload functions in place do."""

    def helper(x: Tensor) -> Tensor:
        return x * 2

    def other(x: Tensor) -> Tensor:
        return x * 3

    return lambda x: helper(x), lambda i: setattr(helper, "__code__", other.__code__) if i == 3 else None


@habit
def a_function_in_a_dict() -> Habit:
    table: dict[str, Any] = {"act": torch.sin}
    return lambda x: table["act"](x), lambda i: table.update(act=torch.cos) if i == 3 else None


@habit
def a_method_replaced() -> Habit:
    class Scaled:
        def by(self) -> float:
            return 1.0

    scaled = Scaled()
    return lambda x: x * scaled.by(), lambda i: setattr(Scaled, "by", lambda self: i + 0.5)


@habit
def a_method_of_one_object_replaced() -> Habit:
    class Scaled:
        def by(self) -> float:
            return 1.0

    scaled = Scaled()
    return lambda x: x * scaled.by(), lambda i: setattr(scaled, "by", lambda: i + 0.5)


@habit
def an_operator_of_a_class_replaced() -> Habit:
    class Scaled:
        def __rmul__(self, x: Tensor) -> Tensor:
            return x * 2

    scaled: Any = Scaled()
    return lambda x: x * scaled, lambda i: setattr(Scaled, "__rmul__", lambda self, x: x * (i + 0.5))


@habit
def a_function_of_torch_replaced() -> Habit:
    old = torch.sigmoid

    def then(i: int) -> None:
        torch.sigmoid = torch.tanh if i == 3 else old  # type: ignore[assignment]

    return lambda x: torch.sigmoid(x), then


@habit
def a_base_class_replaced() -> Habit:
    class Lower:
        def by(self) -> float:
            return 1.0

    class Upper(Lower):
        def by(self) -> float:
            return super().by() * 2

    scaled = Upper()
    return lambda x: x * scaled.by(), lambda i: setattr(Lower, "by", lambda self: i + 0.5)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self._hidden, self.table = 1.0, 1.0, [1.0, 2.0]

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale * self._hidden * self.table[0]


@habit
def forward_of_a_class_replaced() -> Habit:
    kind: Any = type("Mine", (Layer,), {"forward": Layer.forward})
    model = kind()
    return lambda x: model(x), lambda i: setattr(kind, "forward", lambda self, x: x * (i + 0.5))


@habit
def forward_of_a_class_of_torch_replaced() -> Habit:
    model, old = nn.Softplus(), nn.Softplus.forward

    def then(i: int) -> None:
        nn.Softplus.forward = (lambda self, x: x * 2) if i == 3 else old  # type: ignore[method-assign,assignment]

    return lambda x: model(x), then


@habit
def the_class_of_a_module_replaced() -> Habit:
    model = Layer()
    other = type("Other", (Layer,), {"forward": lambda self, x: x * 3})
    return lambda x: model(x), lambda i: setattr(model, "__class__", other) if i == 3 else None


@habit
def numbers_of_a_module() -> Habit:
    model = Layer()

    def then(i: int) -> None:
        model._hidden = i + 0.5
        model.table[0] = float(i)

    return lambda x: model(x), then


@habit
def a_hook_of_all_modules() -> Habit:
    model = nn.Softplus()
    held: list[Any] = []

    def then(i: int) -> None:
        if i == 3:
            held.append(nn.modules.module.register_module_forward_hook(lambda m, given, out: out * 2))
        elif i == 5:
            held.pop().remove()

    return lambda x: model(x), then


@habit
def a_partial() -> Habit:
    options = {"scale": 1.0}

    def helper(options: dict[str, float], x: Tensor) -> Tensor:
        return x * options["scale"]

    part = functools.partial(helper, options)
    return lambda x: part(x), lambda i: options.update(scale=i + 0.5)


@habit
def a_decorated_function() -> Habit:
    cfg = Box(scale=1.0)

    def decorated(f: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        @functools.wraps(f)
        def inner(x: Tensor) -> Tensor:
            return f(x) * cfg.scale

        return inner

    helper = decorated(lambda x: x * 2)
    return lambda x: helper(x), lambda i: setattr(cfg, "scale", i + 0.5)


@habit
def a_function_under_no_grad() -> Habit:
    cfg = Box(scale=1.0)

    @torch.no_grad()
    def helper(x: Tensor) -> Tensor:
        return x * cfg.scale

    return lambda x: helper(x), lambda i: setattr(cfg, "scale", i + 0.5)


@habit
def a_function_that_is_recomputed() -> Habit:
    from torch.utils.checkpoint import checkpoint

    cfg = Box(scale=1.0)
    weight = nn.Parameter(torch.ones(3))

    def block(x: Tensor) -> Tensor:
        return x * weight * cfg.scale

    def step(x: Tensor) -> Tensor:
        weight.grad = None
        checkpoint(block, x, use_reentrant=False).sum().backward()  # type: ignore[union-attr]
        return weight.grad.clone()  # type: ignore[union-attr]

    return step, lambda i: setattr(cfg, "scale", i + 0.5)


@habit
def a_function_of_autograd() -> Habit:
    cfg = Box(scale=1.0)

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad * cfg.scale

    weight = nn.Parameter(torch.ones(3))

    def step(x: Tensor) -> Tensor:
        weight.grad = None
        (Scaled.apply(weight) * x).sum().backward()  # type: ignore[no-untyped-call]
        return weight.grad.clone()  # type: ignore[union-attr]

    return step, lambda i: setattr(cfg, "scale", i + 0.5)


@habit
def a_generator_inside() -> Habit:
    cfg = Box(scales=[1.0, 2.0])

    def scales() -> Any:
        yield from cfg.scales

    def step(x: Tensor) -> Tensor:
        for s in scales():
            x = x * s
        return x

    return step, lambda i: cfg.scales.append(i + 0.5)


@habit
def a_map_and_a_lambda() -> Habit:
    cfg = Box(scale=1.0)
    return lambda x: sum(map(lambda k: x * k * cfg.scale, (1, 2))), lambda i: setattr(cfg, "scale", i + 0.5)  # type: ignore[return-value]


@habit
def a_reduction() -> Habit:
    table = [1.0, 2.0]
    return lambda x: x * functools.reduce(operator.mul, table), lambda i: table.append(i + 0.5)


@habit
def a_context_manager() -> Habit:
    class Scaling:
        def __init__(self) -> None:
            self.by = 1.0

        def __enter__(self) -> Scaling:
            return self

        def __exit__(self, *_: Any) -> None:
            pass

    scaling = Scaling()

    def step(x: Tensor) -> Tensor:
        with scaling as s:
            return x * s.by

    return step, lambda i: setattr(scaling, "by", i + 0.5)


@habit
def a_class_that_is_made_inside() -> Habit:
    cfg = Box(scale=1.0)

    def step(x: Tensor) -> Tensor:
        class Local:
            by = cfg.scale

        return x * Local.by

    return step, lambda i: setattr(cfg, "scale", i + 0.5)


@habit
def an_object_that_is_made_inside() -> Habit:
    options = {"scale": 1.0}

    class View:
        def __init__(self, held: dict[str, float]) -> None:
            self.held = held

        def by(self) -> float:
            return self.held["scale"]

    return lambda x: x * View(options).by(), lambda i: options.update(scale=i + 0.5)
