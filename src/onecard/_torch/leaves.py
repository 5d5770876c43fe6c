"""What torch keeps of a leaf beside its numbers, past the properties that patches put in torch's place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

_grad: Any = torch._C.TensorBase.grad
_data: Any = vars(torch._C.TensorBase)["data"]
set_data: Callable[[Any, Tensor], None] = _data.__set__  # whatever ``Tensor.data`` is (tensor/become.py)
_function_modes: Callable[[], int] = getattr(torch._C, "_len_torch_function_stack", lambda: 1)


def gradient(x: Any) -> Any:
    """A gradient as it is there, whatever ``Tensor.grad`` is (fleet/gradients/hooks.py), for which a mode of functions asks."""
    if _function_modes():
        with torch._C.DisableTorchFunction():
            return _grad.__get__(x)
    return _grad.__get__(x)


def set_gradient(x: Any, value: Tensor | None) -> None:
    """Put one there."""
    if _function_modes():
        with torch._C.DisableTorchFunction():
            _grad.__set__(x, value)
    else:
        _grad.__set__(x, value)


def is_transformed(x: Tensor) -> bool:
    """Whether a tensor is what ``torch.func.grad``, ``vmap`` give to the function, in place of the program's; or a dual one."""
    return torch._C._functorch.is_functorch_wrapped_tensor(x) or has_tangent(x)


def is_batched(x: Tensor) -> bool:
    """Whether a tensor stands for several at once, by ``vmap`` or by ``is_grads_batched``."""
    return is_transformed(x) or "Batched" in str(torch._C._dispatch_keys(x))


def forward_mode() -> bool:
    """Whether forward-mode differentiation may be under way."""
    return forward_ad._current_level >= 0


def has_tangent(x: Tensor) -> bool:
    """Whether it takes part in forward-mode differentiation, and not as a constant."""
    return forward_mode() and forward_ad.unpack_dual(x).tangent is not None


def hook_first_behind(p: Any, hook: Callable[[Any], None], stay: type | tuple[()] = ()) -> None:
    """Call a hook behind a leaf's accumulation ahead of those that it has there, but for hooks of a kind that ``stay``.

    Autograd goes by the dict itself, past the order of an OrderedDict.
    """
    theirs = [(n, call) for n, call in (p._post_accumulate_grad_hooks or {}).items() if not isinstance(call, stay)]
    for known, _ in theirs:
        del p._post_accumulate_grad_hooks[known]
    Tensor.register_post_accumulate_grad_hook(p, hook)  # not what a subclass makes of it for users
    p._post_accumulate_grad_hooks.update(theirs)


def used_before(x: Tensor, refuse: Callable[[Any], None]) -> None:
    """A backward pass to a leaf by a graph that is there already ends in ``refuse``, once another object is in its place."""
    uses: Any = x  # a name that torch's own types leave out
    if x.is_leaf and x.requires_grad and uses._use_count() == 2:
        node = torch.autograd.graph.get_gradient_edge(x).node
        if uses._use_count() == 2:  # it was there, and is not made by the question
            node.register_prehook(refuse)


def outside_transforms() -> Any:
    """Within ``torch.func.grad``, ``vmap``: what is done here is none of theirs."""
    return torch._C._DisableFuncTorch()
