"""The attempt: each start of a job's ranks by the launcher. What one attempt leaves in the rendezvous' store is no other's.

An elastic launcher that restarts the ranks (``--max_restarts``) keeps its store: addresses, seeds and orders of ranks that
are dead would be taken for those of living ones.
"""

from __future__ import annotations

import os

import torch.distributed as dist

from onecard._torch import names as _torch


def number() -> int:
    """How often the launcher has started this job's ranks again: torchrun's TORCHELASTIC_RESTART_COUNT.

    Example:
        >>> number()
        0
    """
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or "0")


def part_of(store: dist.Store) -> dist.Store:
    """The part of a store that belongs to this attempt.

    Example:
        >>> whole = dist.HashStore()
        >>> part_of(whole).set("a", "1")
        >>> whole.check(["a"]), part_of(whole).check(["a"])
        (False, True)
    """
    return dist.PrefixStore(f"onecard/attempt{number()}", store)


def store() -> dist.Store:
    """The store by which the ranks of the world met: this attempt's part. All that onecard leaves there goes through it.

    Raises:
        ValueError: there is no process group.
    """
    return part_of(_torch.default_store())
