"""Hooks of parameters while microbatches run: called once, on the gradient of the step; what was there before stays."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from onecard.pipeline.run.waiting_hooks import hooks_wait


def hooked() -> tuple[nn.Parameter, list[Any]]:
    p, told = nn.Parameter(torch.ones(2)), list[Any]()
    p.grad = torch.full((2,), 3.0)

    def tenfold(g: Tensor) -> Tensor:
        told.append(g.tolist())
        return g * 10

    p.register_hook(tenfold)
    p.register_post_accumulate_grad_hook(lambda p: told.append(p.grad.tolist()))
    return p, told


def test_a_hook_is_told_of_the_step_and_what_was_there_stays() -> None:
    p, told = hooked()
    with hooks_wait([p]):
        for _ in range(4):
            (p * 2).sum().backward()
        assert not told
    assert told == [[8.0, 8.0], [83.0, 83.0]] and p.grad is not None and p.grad.tolist() == [83.0, 83.0]


def test_after_an_error_hooks_and_gradient_are_what_they_were() -> None:
    p, told = hooked()
    with pytest.raises(KeyError), hooks_wait([p]):
        (p * 2).sum().backward()
        raise KeyError
    assert p.grad is not None and p.grad.tolist() == [3.0, 3.0]
    (p * 2).sum().backward()
    assert told == [[2.0, 2.0], [23.0, 23.0]]


def test_a_parameter_that_the_step_does_not_use_keeps_its_gradient() -> None:
    p, told = hooked()
    with hooks_wait([p]):
        pass
    assert not told and p.grad is not None and p.grad.tolist() == [3.0, 3.0]
