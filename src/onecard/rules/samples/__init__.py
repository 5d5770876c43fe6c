"""Small programs that make every operator of the table run: what ``onecard.rules.verify`` proves the rows with.

One file for each family, named like the family's file in ``rules/table/``. Every module of this package that defines
``SAMPLES`` is read; there is no list to add a new file to. A file looks like this::

    import torch.nn.functional as F
    from onecard.rules.samples.data import integers, mask, positive, real

    SAMPLES = [
        lambda: F.cross_entropy(real(6, 5), integers(5, 6)),        # backward is run by itself
        lambda: real(4, 6, grad=False).add_(real(6, grad=False)),   # in place: grad=False
        lambda: torch.ops.aten.native_dropout(real(4, 6), 0.0, True),
    ]
    ELSEWHERE = {"_scaled_dot_product_flash_attention": "CUDA only"}  # rows that no CPU program reaches, and why

A sample takes no arguments and returns what its program computes (a tensor, or any nest of lists, tuples and dicts).
Results that require gradients are driven backward with random cotangents, so the backward operators are captured too;
``torch.random`` is seeded before each sample. ``verify`` records every ATen call below autograd that has a row (calls
with the same shapes, dtypes and static arguments only once) and proves each one.

How to choose sizes: small and uneven (3, 4, 5, 6), so that on two and on three ranks some dims divide, some do not and
some shards are empty (a dim of 1 or 2); at least one call with broadcasting or a dim of size 1; every branch of the
row's function; float64 unless a kernel wants another dtype. Keep tensors under about 500 elements.

A row's sample must not depend on chance: dropout with p=0 and the like.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from pkgutil import iter_modules
from typing import Any


@dataclass(frozen=True)
class SampleProgram:
    """One program: the family's file, the line in it, and the callable."""

    family: str
    line: int
    program: Callable[[], Any]

    def __str__(self) -> str:
        return f"{self.family}.py:{self.line}"


@lru_cache(maxsize=1)
def samples() -> tuple[SampleProgram, ...]:
    """Every sample, by family."""
    return tuple(
        SampleProgram(family, program.__code__.co_firstlineno, program)
        for family, module in _families()
        for program in getattr(module, "SAMPLES", ())
    )


def elsewhere() -> dict[str, str]:
    """Rows that no program on a CPU reaches, with the reason."""
    return {name: why for _, module in _families() for name, why in getattr(module, "ELSEWHERE", {}).items()}


@lru_cache(maxsize=1)
def _families() -> tuple[tuple[str, Any], ...]:
    names = sorted(module.name for module in iter_modules(__path__))
    return tuple((name, import_module(f"{__name__}.{name}")) for name in names)
