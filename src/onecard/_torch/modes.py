"""A dispatch mode of ours, which torch calls as it is; and one for functions, which stays."""

from __future__ import annotations

from torch import overrides
from torch.overrides import TorchFunctionMode
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode

from onecard._torch import names


class DispatchMode(TorchDispatchMode):
    """Sees every operator of a block.

    Torch puts a wrapper around each call of a mode, for its compiler: it imports that, a second of a first step, and takes as
    long as a look at the operator.
    """

    keeps_values = False
    """Whether tensors have under it the values that they have without it."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def values_are_there() -> bool:
    """Whether no mode is on but such as leave tensors the values that they have without it."""
    stack = names.mode_stack
    return not names.modes_on() or (stack is not None and all(getattr(mode, "keeps_values", False) for mode in stack()))


def is_within(kind: type[TorchFunctionMode]) -> bool:
    """Whether a mode of a kind sees this thread's calls of functions."""
    return any(isinstance(mode, kind) for mode in overrides._get_current_function_mode_stack())


def put_below(mode: TorchFunctionMode) -> None:
    """Have a mode see this thread's calls from now on, unless it does, also where it is put within somebody's ``with``.

    A mode's end takes off the top of torch's stack, whatever it is; so this one goes below all others but the default device's,
    which has to be the lowest.
    """
    stack = overrides._get_current_function_mode_stack()
    if mode in stack:
        return
    for _ in stack:
        overrides._pop_mode()
    lowest = [other for other in stack if isinstance(other, DeviceContext)]
    for each in (*lowest, mode, *(other for other in stack if other not in lowest)):
        overrides._push_mode(each)
