"""Torch's random state as a part of a state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


class RandomState:
    """The state of torch's generators: the CPU's, from which all comes that onecard draws, and this rank's GPU's, if it has one.

    Where ranks draw differently, each has its own back, on as many ranks that are laid out alike.

    Example:
        >>> import tempfile
        >>> from onecard import checkpoint
        >>> place, _ = tempfile.mkdtemp(), torch.manual_seed(0)
        >>> _ = checkpoint.save({"random": RandomState()}, place)
        >>> first = torch.rand(2)
        >>> _ = checkpoint.load(place, {"random": RandomState()})
        >>> torch.equal(torch.rand(2), first)
        True
    """

    of_each_rank = "if they differ"

    def state_dict(self) -> dict[str, Any]:
        """The states now."""
        on_gpu = torch.cuda.is_available() and torch.cuda.is_initialized()
        return {"cpu": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state() if on_gpu else None}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Draw from these on."""
        torch.set_rng_state(state["cpu"])
        if state["cuda"] is not None and torch.cuda.is_available():
            torch.cuda.set_rng_state(state["cuda"])
