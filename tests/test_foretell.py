"""What is foretold of results is what torch's meta functions say, and its kernels make; mistakes are left to torch."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from onecard.rules.call import Call, tensors_in
from onecard.rules.foretell import _RESULTS, foretell
from onecard.rules.verify.report import calls_of_samples

aten = torch.ops.aten


def looks(tensors: Any) -> list[Any]:
    return [(tuple(t.shape), t.stride(), t.dtype) for t in tensors]


def name_of(func: Any) -> str:
    return func._schema.name.removeprefix("aten::") + (
        f".{func._overloadname}" if func._overloadname != "default" else ""
    )


def test_every_call_of_the_samples_that_is_foretold() -> None:
    seen = set()
    for captured in calls_of_samples()[0]:
        if name_of(captured.func) in _RESULTS:
            call = Call(
                captured.func, [meta(a) for a in captured.args], {k: meta(v) for k, v in captured.kwargs.items()}
            )
            found = foretell(call)
            if found is not None:
                seen.add(name_of(captured.func))
                assert looks(found) == looks(call.meta_results()), captured
    assert seen == set(_RESULTS) - UNSAMPLED


UNSAMPLED: set[str] = set()


def calls(shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, tuple[Any, ...]]:
    """A call of each operator on real tensors whose first is of this shape."""
    x = torch.rand(shape, dtype=dtype) + 0.5
    unary = ("neg", "exp", "log", "sqrt", "rsqrt", "tanh", "sigmoid", "relu", "gelu", "silu")
    found: dict[str, tuple[Any, ...]] = {name: (x,) for name in unary}
    found |= {f"{name}.Tensor": (x, x.clone()) for name in ("add", "sub", "mul", "div")}
    found |= {f"{name}_backward": (x, x.clone()) for name in ("gelu", "silu", "tanh", "sigmoid")}
    found |= {"threshold_backward": (x, x, 0), "mul.Scalar": (x, 2)}
    rows, width = prod(shape[:-1]), shape[-1] if shape else 1
    for name in ("_softmax", "_log_softmax"):
        found[name] = (x, -1, False)
        found[f"{name}_backward_data"] = (x, x.clone(), -1, dtype)
    if shape:
        weight, own = torch.ones(3, width, dtype=dtype), torch.ones(width, dtype=dtype)
        found["linear"] = (x, weight, torch.ones(3, dtype=dtype))
        stats = torch.ones(*shape[:-1], 1, dtype=dtype)
        found["native_layer_norm"] = (x, [width], own, None, 1e-5)
        found["native_layer_norm_backward"] = (x, x.clone(), [width], stats, stats, own, own, [True, False, True])
    target, one, flat = torch.zeros(rows, dtype=torch.long), torch.ones((), dtype=dtype), x.reshape(rows, width)
    found["nll_loss_forward"] = (flat, target, None, 1, -100)
    found["nll_loss_backward"] = (one, flat, target, None, 1, -100, one)
    return found


@pytest.mark.proof
@settings(deadline=None)
@given(st.lists(st.integers(0, 4), max_size=4), st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))
def test_any_shape(shape: list[int], dtype: torch.dtype) -> None:
    given_calls = calls(tuple(shape), dtype)
    assert bool(shape) <= (set(given_calls) == set(_RESULTS))
    for name, args in given_calls.items():
        func = operator(name)
        found = foretell(Call(func, [meta(a) for a in args], {}))
        narrow = dtype is torch.bfloat16 and name.startswith("native")
        assert (found is not None) == (0 not in shape and not narrow), name
        if found is not None:
            assert looks(found) == looks(Call(func, [meta(a) for a in args], {}).meta_results()), name
            assert looks(found) == looks(tensors_in(func(*args))), name


def operator(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(aten, packet), overload or "default")


def meta(a: Any) -> Any:
    return torch.empty_strided(a.shape, a.stride(), dtype=a.dtype, device="meta") if isinstance(a, Tensor) else a


def test_the_second_operand_does_not_fit() -> None:
    """Whatever operand has another shape, dtype or order in memory: torch says what the result is, or what is wrong."""
    for name, args in calls((3, 4), torch.float32).items():
        operands = [i for i, a in enumerate(args) if isinstance(a, Tensor)]
        for i in operands:
            others = [args[i].double(), args[i].unsqueeze(0), args[i].to(torch.complex64)]
            others += [args[i].new_ones([n + 1 for n in args[i].shape])] if args[i].dim() else []
            others += [args[i].mT.contiguous().mT] if args[i].dim() == 2 else []
            for other in others:
                call = Call(operator(name), [meta(other if j == i else a) for j, a in enumerate(args)], {})
                found = foretell(call)
                if found is not None:
                    assert looks(found) == looks(call.meta_results()), (name, i, other.shape)


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("_softmax", (torch.ones(2, 3), 2, False)),
        ("_log_softmax", (torch.ones(2, 3), -3, False)),
        ("native_layer_norm", (torch.ones(2, 3), [2], None, None, 1e-5)),
        ("nll_loss_forward", (torch.ones(2, 3), torch.zeros(3, dtype=torch.long), None, 1, -100)),
        ("linear", (torch.ones(2, 3), torch.ones(4, 2))),
    ],
)
def test_mistakes_are_left_to_torch(name: str, args: tuple[Any, ...]) -> None:
    assert foretell(Call(operator(name), [meta(a) for a in args], {})) is None
