"""Seeding all ranks alike, and plain torch programs that draw the numbers of distributed ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from onecard._torch import fakes
from onecard._torch import names as _torch
from onecard._torch.modes import DispatchMode, is_within
from onecard.comm.agree.agree import first_to_say, when_met
from onecard.comm.base.state import Kept
from onecard.comm.world import world
from onecard.errors import DispatchError
from onecard.tensor.dispatch.entries import drawing
from onecard.tensor.dist_tensor import DistTensor

_seedings: Kept[Counter[str]] = Kept(Counter)


def manual_seed(seed: int) -> torch.Generator:
    """Seed the random numbers of this rank; every rank must call it with the same seed.

    It is ``torch.manual_seed`` plus a check that the ranks agree. All of torch's ways with random state apply to
    distributed tensors: ``torch.get_rng_state()`` and ``set_rng_state`` save and restore it.

    Raises:
        DispatchError: another rank gave another seed; where the ranks have not met yet, at the first message.

    Source: ``paddle.seed``, ``torch.manual_seed``.

    Example:
        >>> _ = manual_seed(3)
        >>> torch.initial_seed()
        3
    """
    _seedings.here["seed"] += 1
    number = _seedings.here["seed"]
    when_met(lambda: _compare(number, seed))
    return torch.manual_seed(seed)


def _compare(number: int, seed: int) -> None:
    """Whether the ranks gave the same seed in their ``number``-th seeding."""
    first = first_to_say(f"seed/{number}", str(seed))
    if first is not None and first[1] != str(seed):
        raise DispatchError(
            f"onecard.manual_seed({seed}) on rank {world.get_rank()}, but rank {first[0]} gave {first[1]}: "
            "give the same seed on every rank. What one card draws may not depend on the rank"
        )


class _Dispatch(DispatchMode):
    """Below autograd: random operators on plain tensors by onecard's handlers."""

    keeps_values = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if fakes.asks_device(func, args):
            return args[0].fake_device
        kwargs = kwargs or {}
        handler = drawing.get(func)
        if handler is None or _not_plain((*args, *kwargs.values())):
            result = func(*args, **kwargs)
            _torch.count_writes(func, args)
            return result
        return handler(func, args, kwargs)


def draws_as_one_card() -> bool:
    """Whether plain tensors draw by key and place now (``one_card_random``)."""
    return is_within(one_card_random)


@contextmanager
def set_aside() -> Iterator[None]:
    """Inside, what is drawn is not a part of ``one_card_random``: for who draws by key and place already."""
    now, without = _torch.whole_mode
    with without() if isinstance(now(), _Dispatch) else nullcontext():
        yield


def _not_plain(values: Any) -> bool:
    return any(isinstance(v, DistTensor) or (isinstance(v, torch.Tensor) and v.device.type == "meta") for v in values)


class one_card_random(TorchFunctionMode):
    """Inside, a plain torch program draws the numbers that the same program draws on distributed tensors.

    For comparisons: run the program on plain tensors in this context, and on a mesh without it, from the same seed.
    Where the distributed program draws on plain tensors as well (shuffles, masks), run both in it.

    Example:
        >>> from onecard import ProcessMesh, Replicate, shard_tensor
        >>> x = torch.ones(5)
        >>> with one_card_random():
        ...     plain = torch.manual_seed(0) and torch.nn.functional.dropout(x)
        >>> _ = torch.manual_seed(0)
        >>> twin = torch.nn.functional.dropout(shard_tensor(x, ProcessMesh([0], ["x"]), [Replicate()]))
        >>> torch.equal(plain, twin.full_tensor())
        True
    """

    def __init__(self) -> None:
        super().__init__()
        self._below: list[_Dispatch | None] = []

    def __enter__(self) -> one_card_random:
        self._below.append(
            None if is_within(one_card_random) else _Dispatch()
        )  # one within another draws its keys by keys
        super().__enter__()
        if (below := self._below[-1]) is not None:
            below.__enter__()
        return self

    def __exit__(self, *fault: Any) -> None:
        if (below := self._below.pop()) is not None:
            below.__exit__(*fault)
        super().__exit__(*fault)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.nn.functional.scaled_dot_product_attention:
            # Fused kernels draw their own numbers; of distributed operands they are handled as they are.
            plain = not any(issubclass(kind, DistTensor) for kind in types) and not isinstance(args[0], DistTensor)
            with sdpa_kernel(SDPBackend.MATH) if plain and _drops(*args, **kwargs) else nullcontext():
                return func(*args, **kwargs)
        return func(*args, **kwargs)


def _drops(query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, *_: Any, **__: Any) -> bool:
    return dropout_p > 0
