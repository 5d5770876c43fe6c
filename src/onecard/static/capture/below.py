"""What is seen below autograd: every operator on plain tensors."""

from __future__ import annotations

from typing import Any

from onecard._torch import fakes
from onecard._torch.modes import DispatchMode
from onecard.comm.base import own
from onecard.static.capture.recorder import Recorder
from onecard.tensor.dist_tensor import DistTensor


class Below(DispatchMode):
    """Sees every operator below autograd; those of distributed tensors go on, to what they are made of."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if fakes.asks_device(func, args):
            return args[0].fake_device
        recorder = self.recorder
        if any(issubclass(kind, DistTensor) for kind in types):
            if recorder.listens:
                recorder.saw(func, args, kwargs or {})
            return NotImplemented
        if any(map(own.is_under_way, types)):
            return NotImplemented
        if not recorder.listens:
            return recorder.run(func, args, kwargs or {})
        return recorder.operator(func, args, kwargs or {})
