"""Who asks a distributed tensor for the plain ones inside it, and why it gives none."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

from onecard.errors import DispatchError

_COMPILERS = ("torch._dynamo", "torch.export", "torch._export", "torch.onnx", "torch._functorch", "torch._subclasses")
_SAVERS = ("transformers", "safetensors", "huggingface_hub", "accelerate")


def no_flat_form(spec: Any) -> Exception:
    """The error for who asks for a tensor's inner tensors: a compiler, which would need the messages too, or who saves.

    Example:
        >>> print(no_flat_form("[4] float32 [x=Shard(0)]"))
        [4] float32 [x=Shard(0)] has no plain tensors that stand for it: use x.to_local() or x.full_tensor()
    """
    asks = _asks(sys._getframe(1))
    if asks == "save":
        return DispatchError(
            f"save_pretrained (or another way to save) met {spec!r}, a distributed tensor; such files have whole ones. Gather "
            "on every rank and write on one:\n    whole = {name: onecard.unshard(x).contiguous() for name, x in "
            "model.state_dict().items()}\n"
            "    if onecard.get_rank() == 0:\n        model.save_pretrained(path, state_dict=whole)"
        )
    if asks == "compile":
        return _short(
            f"torch.compile and torch.export cannot trace distributed tensors (met {spec!r}). Leave torch.compile out and "
            "run the program as it is; or let onecard record the step: onecard.to_static(step, backend='inductor'); or compile "
            "a function of plain local tensors and call it through onecard.local_map. To "
            "export, take one card's model and load the whole weights: {name: onecard.unshard(x) for name, x in "
            "model.state_dict().items()}"
        )
    return DispatchError(f"{spec} has no plain tensors that stand for it: use x.to_local() or x.full_tensor()")


def _asks(frame: FrameType | None) -> str:
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.startswith(_COMPILERS):
            return "compile"
        if module.split(".")[0] in _SAVERS:
            return "save"
        frame = frame.f_back
    return ""


def _short(text: str) -> Exception:
    """An error that torch's tracer hands to the user as it is, without its own fifty frames (where this torch can)."""
    base = getattr(sys.modules.get("torch._dynamo.exc"), "ShortenTraceback", None)
    if base is None:
        return DispatchError(text)

    class CompileError(DispatchError, base):  # type: ignore[misc, valid-type]
        def remove_dynamo_frames(self) -> Any:
            return self.with_traceback(None)

    CompileError.__module__, CompileError.__qualname__ = DispatchError.__module__, "CompileError"
    made: Any = CompileError
    return made(text, first_useful_frame=None)
