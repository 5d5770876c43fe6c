"""What goes around torch's engine: plain gradients are laid out, and a loss without a graph says why it has none.

Who asks for gradients of a loss that a pipeline has trained already is told so.
Each microbatch's graph is given back as soon as its backward has run, on another rank for each stage. What ``backward()`` and
``torch.autograd.grad`` say of the number that is left is torch's "does not require grad", which names no cure.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from onecard._torch import patches
from onecard.comm.base.state import Kept
from onecard.errors import StageError
from onecard.tensor import seeds

last: Kept[str] = Kept(str)
"""The call by which a pipeline trained last; "" before any has."""
around: Kept[Callable[[], AbstractContextManager[Any]]] = Kept(lambda: nullcontext)
"""What is entered while the engine runs: what runs again there, and hooks, are a part of the program."""
_NO_GRAPH = "of tensors does not require grad and does not have a grad_fn"  # torch's


def telling(engine: Callable[..., Any]) -> Callable[..., Any]:
    """The engine of ``backward()`` and ``torch.autograd.grad``, with these words for a value without a graph."""

    def run(values: Any, grads: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            with around.here():
                return engine(values, seeds.laid_out(values, grads), *args, **kwargs)
        except RuntimeError as fault:
            if last.here and _NO_GRAPH in str(fault):
                raise StageError(_words(last.here)) from fault
            raise

    return run


def _words(call: str) -> str:
    return (
        f"backward() or torch.autograd.grad of a value without a graph. {call} has run the backward of its microbatches, and "
        "their graphs are gone: the loss that it returns is a number. The gradients of the batch are in p.grad: change them "
        "there before optimizer.step() (p.grad.mul_(1.5)). What the loss has besides belongs into loss_fn. Gradients of "
        "gradients (create_graph=True) go through all layers, of which a rank has its stages: take ShardingStage3 or tensor "
        "parallelism (tp=) in place of the pipeline"
    )


patches.with_first_tensor(
    lambda: (
        patches.replace("torch.autograd._engine_run_backward", torch.autograd, "_engine_run_backward", telling)
        if hasattr(torch.autograd, "_engine_run_backward")
        else None
    )
)
