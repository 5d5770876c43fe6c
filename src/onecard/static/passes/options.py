"""StaticOptions: what ``to_static`` was asked for, in one value; each part is told in ``to_static``'s words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from onecard import _deprecated
from onecard.errors import RecordingError
from onecard.static.capture import autocast
from onecard.static.code.segments import check_backend
from onecard.static.passes.microbatches import Microbatches, asked

ROWS = "rows"
"""Left out as a pass is: then all rows go to all ranks, and a recording holds nothing but operators of torch and messages."""


@dataclass(frozen=True, slots=True)
class StaticOptions:
    """What a step is recorded and rewritten with. ``replayed``: False for a recording that is only looked at.

    Raises:
        RecordingError: no such backend, or no number of microbatches. Names of passes are looked at by ``passes.chosen``.
    """

    limit: int = 8
    without: Sequence[str] = ()
    ask: bool = False
    kernels: str = "eager"
    also: Sequence[str] = ()
    memory_limit: int | None = None
    backend: str = "eager"
    k_steps: int = 1
    avg: bool | None = None
    stages: Microbatches | None = None
    replayed: bool = True

    def __post_init__(self) -> None:
        check_backend(self.backend)
        asked(self.k_steps, self.avg)
        if isinstance(self.stages, Microbatches) and self.avg is not None and self.stages.avg is (not self.avg):
            raise RecordingError(f"avg={self.avg} beside stages=, which say avg={self.stages.avg}: say it once")

    @property
    def dtype(self) -> torch.dtype | None:
        """What autocast computes in; None: it is off."""
        return autocast.dtype_of(self.also)

    @property
    def rows(self) -> bool:
        """Whether rows may go where data says, as they do outside of a recording: calls on them are nodes of their own.

        Microbatches and stages are made of what is of one size at each call.
        """
        return self.replayed and self.microbatches is None and ROWS not in self.without

    @property
    def microbatches(self) -> Microbatches | None:
        """What the batch is cut into; None: it is not."""
        if self.stages is None:
            return asked(self.k_steps, self.avg)
        return self.stages if self.avg is None else replace(self.stages, avg=self.avg)

    @property
    def passes(self) -> tuple[str, ...]:
        """Those of ``also`` that are passes, by their present names."""
        more = () if self.memory_limit is None else ("recompute",)
        named = [name for name in self.also if name not in autocast.DTYPES]
        return tuple(dict.fromkeys([*named, *more]))

    @property
    def left_out(self) -> tuple[str, ...]:
        """The passes that do not run, by their present names."""
        # Another backend reuses memory itself, and takes what does not write only.
        more = () if self.backend == "eager" else ("inplace",)
        return (*(_deprecated.value("onecard.to_static", "without", name) for name in self.without), *more)
