"""A dispatch mode of ours: torch calls it as it is."""

from __future__ import annotations

from torch.utils._python_dispatch import TorchDispatchMode


class DispatchMode(TorchDispatchMode):
    """Sees every operator of a block.

    Torch puts a wrapper around each call of a mode, for its compiler: it imports that, a second of a first step, and takes as
    long as a look at the operator.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False
