"""Who watches the messages: observers are told of each step before it runs, with the operator that needs it.

Nothing is built when nobody watches.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch
import typing_extensions
from torch import Tensor

from onecard.comm.base.state import Kept
from onecard.moves.resharding import Step

_PACKAGE, _ENGINE = Path(__file__).parents[2], Path(torch.__file__).parent
_WRAPS = (typing_extensions.__file__, warnings.__file__)  # what torch deprecates is called by these
# By both names: where an environment is reached through a link, frames have the name with the link in it.
_ENGINES = (*{str(_ENGINE), str(_ENGINE.resolve()), *_WRAPS, "<"},)
_PASSED = (*_ENGINES, str(Path(__file__).parent))
_OURS = tuple({str(_PACKAGE), str(_PACKAGE.resolve())})
_NOT_USERS = tuple({str(name) for path in (_PACKAGE, _ENGINE) for name in (path, path.resolve())} | {*_WRAPS, "<"})


@dataclass(frozen=True, slots=True)
class Notice:
    """One step that is about to run.

    Attributes:
        step: what is sent, between which layouts.
        operator: the operator (or call) that needs it; ``operand``: which of its tensors.
        shape: of the whole tensor.
        reason: why the rule needs the new layout.
        source: the user's line, "file:line".
        explicit: whether the program asked for it (``reshard``, ``full_tensor``).
        tensors: how many tensors travel in it together.
    """

    step: Step
    operator: str
    operand: str
    shape: tuple[int, ...]
    reason: str
    source: str
    explicit: bool
    tensors: int = 1


observers: Kept[list[Callable[[Notice], None]]] = Kept(list)

serving: Kept[tuple[str, str, tuple[int, ...]]] = Kept(lambda: ("", "", ()))
"""What the messages under way are for: the operator, its operand, the whole shape. Equal on all ranks that are in step."""


_is_users: dict[str, bool] = {}  # by a file's name: stacks are deep, and their files few


def _users(name: str) -> bool:
    """Whether a file is neither this package's nor PyTorch's."""
    try:
        return _is_users[name]
    except KeyError:
        known = _is_users[name] = not name.startswith(_NOT_USERS)
        return known


def user_frame(inner: FrameType | None = None) -> FrameType | None:
    """The innermost frame on the stack, or from one on, that is neither onecard's nor PyTorch's."""
    frame: FrameType | None = inner or sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if _is_users[name] if name in _is_users else _users(name):
            return frame
        frame = frame.f_back
    return None


def user_line(inner: FrameType | None = None) -> str:
    """The line at which that frame is."""
    frame = user_frame(inner or sys._getframe(1))
    return _again.here or "?" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


_again: Kept[str] = Kept(str)
"""The line of a call that is made again without the user's frames."""


@contextmanager
def on_behalf_of(line: str) -> Iterator[None]:
    """Inside, what happens below no line of the user's happens at this one; an error says so as ``made_at``."""
    before, _again.here = _again.here, line
    try:
        yield
    except Exception as fault:
        fault.made_at = getattr(fault, "made_at", line)  # type: ignore[attr-defined]
        raise
    finally:
        _again.here = before


def asked_by_user() -> bool:
    """Whether a call of torch's that sends is made by the program, or by a recording of it: not by this package's messages."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_PASSED):
        frame = frame.f_back
    return frame is not None and not frame.f_code.co_filename.startswith(str(_PACKAGE / "comm"))


def hooked(call: FrameType | None) -> bool:
    """Whether autograd's engine has left a call of torch's to Python: to a hook, or to the backward of a ``Function``.

    Not the engine's own operators, which come by way of classes of tensors and modes; nor this package's functions.
    ``call``: the frame that makes it; None, or the engine's: the hook is a function of torch's.
    """
    users = ours = False
    while call is not None and call.f_code.co_name != "_engine_run_backward":
        name, within = call.f_code.co_filename, call.f_code.co_name
        if within == "__torch_dispatch__":
            users, ours = False, True  # whoever has made the operator, of which this is a part
        elif within != "__torch_function__":
            users, ours = users or _users(name), ours or name.startswith(_OURS)
        call = call.f_back
    return users or not ours


def tell(message: Notice) -> None:
    """Show a message to every observer; one may raise to forbid it."""
    for observer in list(observers.here):
        observer(message)


def name(tensor: Tensor, words: str) -> None:
    """What to call a tensor: a parameter by its name in the module."""
    tensor._onecard_name = words  # type: ignore[attr-defined]  # not by weak reference: torch cannot swap what has one


def name_of(tensor: Tensor) -> str:
    """What a tensor was named, in words to put behind its operand's name; "" if it was not."""
    words = words_of(tensor)
    return f" ({words})" if words else ""


def words_of(tensor: Tensor) -> str:
    """What a tensor was named; "" if it was not."""
    return getattr(tensor, "_onecard_name", "")
