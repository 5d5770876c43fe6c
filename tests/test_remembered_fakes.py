"""The mode without data that remembers its calls: what it gives is what torch's own mode gives, each time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from onecard._torch import fakes, names


class Log(TorchDispatchMode):
    """Of each call its results: form, place in memory, and which operand's memory it is."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = [x for x in names.tree_leaves((args, kwargs or {})) if isinstance(x, Tensor)]
        blocks = [x.untyped_storage()._cdata for x in given]
        for x in names.tree_leaves(result):
            block = x.untyped_storage()._cdata if isinstance(x, Tensor) else None
            same = [i for i, a in enumerate(given) if a is x]
            shares = [i for i, b in enumerate(blocks) if b == block]
            self.seen.append((func, type(result) in (list, tuple), facts(x), same, shares))
        return result


def facts(x: Any) -> Any:
    if not isinstance(x, Tensor):
        return x if isinstance(x, int | float | torch.device | None) else type(x)
    form = (tuple(x.shape), x.stride(), x.storage_offset(), x.untyped_storage().nbytes(), x.dtype, x.device)
    return (*form, x.is_inference(), x.requires_grad, x.is_neg(), x.is_conj())


def views() -> None:
    x = torch.empty(4, 6)
    for y in (x, x.t(), x[1:], x[:, ::2], x.expand(2, 4, 6)):
        z = y[1:]  # the same form at other places
        _ = z.contiguous(), z.reshape(-1), z.permute(*reversed(range(z.dim()))), z.to(torch.float64), z.detach().clone()
    square = torch.empty(6, 6)  # one shape, other strides, another place
    for y in (square, square.t(), square[:5], square[1:], square.t()[1:], square[:5, :5], square[1:, 1:]):
        _ = y.t(), y * 2, y.contiguous(), y[0], torch.empty_like(y)
    a, b = x.split([1, 3])
    _ = a + b[:1], torch.unbind(x), x.chunk(3, 1), x.movedim(0, 1), x.unsqueeze(1).squeeze(), x.narrow(0, 2, 1)


def in_place() -> None:
    x, y = torch.ones(3, 4), torch.zeros(4, dtype=torch.int64)
    x.add_(1).mul_(x)[1].copy_(y)
    torch._foreach_add_([x, x], 1.0)
    x.t_()
    x.resize_(2, 2)
    _ = x * 2, x + y[:2], x.is_contiguous(), torch.add(x, 1, out=torch.empty(0))


def made() -> None:
    _ = torch.empty(2), torch.zeros(2, 3, dtype=torch.int32), torch.arange(4), torch.rand(3)
    _ = [torch.full((2,), value) for value in (1, True, 1.0, 0, False, -0.0)]
    _ = [torch.empty(2).to(dtype) for dtype in (torch.float64, torch.float16)], torch.empty(2).clone(memory_format=None)
    _ = [torch.empty(2, 2).sum(0, dtype=dtype) for dtype in (None, torch.float64)]
    torch.set_default_dtype(torch.float64)
    try:
        _ = torch.empty(2), torch.arange(4) / 3, torch.full((2,), 1.5)
    finally:
        torch.set_default_dtype(torch.float32)
    with torch.inference_mode():
        _ = torch.empty(2) + 1
    _ = torch.empty(2) + 1
    z = torch.empty(2, dtype=torch.complex64)
    _ = (
        z.conj().imag,
        z.imag,
        z.imag.contiguous(),
        z.conj().imag.contiguous(),
        torch.view_as_real(z),
        torch.tensor([1.0, 2.0]) * 2,
        torch.ones(2, device="meta")[:1],
    )


def training() -> None:
    torch.manual_seed(0)
    layer = torch.nn.Sequential(
        torch.nn.Embedding(8, 6), torch.nn.LayerNorm(6), torch.nn.Linear(6, 8), torch.nn.Dropout(0.1)
    )
    optimizer = torch.optim.AdamW(layer.parameters(), 1e-3)
    for rows in (2, 3):
        ids = torch.zeros(rows, 5, dtype=torch.int64)
        torch.nn.functional.cross_entropy(layer(ids).flatten(0, 1), ids.flatten(), reduction="sum").backward()
        torch.nn.utils.clip_grad_norm_(layer.parameters(), 1.0, foreach=False)
        optimizer.step()


def logged(mode: Any, program: Callable[[], None]) -> list[Any]:
    with mode, Log() as log:
        program()
    return log.seen


@pytest.mark.parametrize("program", [views, in_place, made, training], ids=lambda program: program.__name__)
def test_as_torchs_own_mode(program: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = logged(FakeTensorMode(), program)
    mode = fakes.remembering()
    first = logged(mode(), program)
    asked: list[Any] = []
    real = FakeTensorMode.__torch_dispatch__

    def counted(self: Any, func: Any, *args: Any, **kwargs: Any) -> Any:
        asked.append(func)
        return real(self, func, *args, **kwargs)

    monkeypatch.setattr(FakeTensorMode, "__torch_dispatch__", counted)
    again = logged(mode(), program)
    for i, (mine, torchs) in enumerate(zip(first, wanted, strict=True)):
        assert mine == torchs, (i, mine, torchs)
    assert again == wanted
    assert len(asked) < len(wanted) / 2  # most are remembered
