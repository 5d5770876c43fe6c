"""How torch prints a tensor: what a program for one card sees of a distributed one."""

from __future__ import annotations

from torch import Tensor, nn

WIDTH = 80
"""Of a line, unless ``torch.set_printoptions`` says otherwise, which nobody can ask."""


def shown(x: Tensor, whole: Tensor) -> str:
    """The text of a tensor on one card.

    Args:
        x: what is printed; whole: its values, plain, and outside of any graph.

    Example:
        >>> import torch
        >>> x = torch.ones(2, requires_grad=True)
        >>> shown(x * 2, torch.ones(2) * 2)
        'tensor([2., 2.], grad_fn=<MulBackward0>)'
    """
    maker = x.grad_fn
    if maker is None:
        text = repr(whole.requires_grad_(x.requires_grad))
        return f"Parameter containing:\n{text}" if isinstance(x, nn.Parameter) else text
    name = type(maker).__name__
    return _with(repr(whole)[:-1], f"grad_fn=<{maker.name().rsplit('::', 1)[-1] if name == 'CppFunction' else name}>")


def _with(text: str, more: str) -> str:
    """On the same line, if there is room for it."""
    width = len(text) - text.rfind("\n") + 1
    return f"{text}, {more})" if width + len(more) + 2 <= WIDTH else f"{text},\n       {more})"
