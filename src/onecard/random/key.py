"""The key of one random operator: 64 bits of torch's generator.

So all that torch has for random state works: ``torch.manual_seed``, ``get_rng_state`` and ``set_rng_state``,
``fork_rng``, the recomputation of ``torch.utils.checkpoint``, and ``generator=`` arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from onecard._torch import names as _torch
from onecard.random.philox import MASK, Word
from onecard.recorded import one_node


class Key(NamedTuple):
    """The two key words of Philox: ints, or while a graph is traced 0-dim int64 tensors, so that it draws anew."""

    low: Word
    high: Word

    def pack(self) -> Tensor:
        """As a tensor on the CPU, in the place of a kernel's own seed."""
        return _packed(self)

    @staticmethod
    def unpack(packed: Tensor) -> Key:
        """The key that was packed."""
        return _unpacked(packed)


@one_node(is_pure=True)
def _packed(key: Key) -> Tensor:
    return torch.stack(list(key)) if isinstance(key.low, Tensor) else torch.tensor(key, device="cpu")


@one_node(is_pure=True)
def _unpacked(packed: Tensor) -> Key:
    return Key(*packed.unbind()) if tracing() else Key(*packed.tolist())


def new_key(generator: Any = None) -> Key:
    """Draw the key of one operator.

    Args:
        generator: a ``torch.Generator``; None for torch's default CPU generator, whatever the device of the operator,
            so that CPU and GPU draw the same. A Key is returned as it is.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> state = torch.get_rng_state()
        >>> key = new_key()
        >>> torch.set_rng_state(state)
        >>> new_key() == key, new_key() == key
        (True, False)
    """
    return generator if isinstance(generator, Key) else _drawn(generator)


aside: Callable[[], AbstractContextManager[None]] = nullcontext
"""Inside, keys are drawn by torch's generator itself: what draws by keys would draw one for a key."""


@one_node()
def _drawn(generator: Any) -> Key:
    device = generator.device if generator is not None else "cpu"
    with nullcontext() if tracing() or not _torch.modes_on() else aside():
        bits = torch.randint(-(2**63), 2**63 - 1, (), generator=generator, device=device)
    if not tracing():
        value = int(bits)
        return Key(value & MASK, (value >> 32) & MASK)
    return Key(bits & MASK, (bits >> 32) & MASK)


def tracing() -> bool:
    """Whether operators are now recorded into a graph, in which nothing may depend on a value."""
    if torch.compiler.is_compiling():
        return True
    if not _torch.modes_on():  # fake tensors and proxies come with a mode; to ask them takes 11 us
        return False
    return get_proxy_mode() is not None or _torch.fake_mode() is not None
