"""The allocator of ranks on the CPU: one that keeps large blocks. glibc's gives them back each step.

As torch's own CPU launcher (``torch.backends.xeon.run_cpu``): TCMalloc if it is installed, else JeMalloc, by LD_PRELOAD. Where
neither is, glibc's own is told to keep what it has. Nothing is set if the user has chosen anything of the kind.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

CHOSEN = ("LD_PRELOAD", "GLIBC_TUNABLES", "MALLOC_CONF", "MALLOC_ARENA_MAX", "MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_",
          "MALLOC_TRIM_THRESHOLD_")  # fmt: skip
KEEPS = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 34)}
"""For glibc: no block is a mapping of its own, and the heap shrinks only by more than 16 GiB at once."""
JEMALLOC = "oversize_threshold:1,background_thread:true,metadata_thp:auto"
_FOLDERS = ("/usr/local/lib", "/usr/local/lib64", "/usr/lib", "/usr/lib64", "/usr/lib/x86_64-linux-gnu",
            "/usr/lib/aarch64-linux-gnu")  # fmt: skip


def allocator(environment: Mapping[str, str], folders: Iterable[str] | None = None) -> dict[str, str]:
    """What the environment of ranks on the CPU gets for their allocator.

    Args:
        environment: the user's.
        folders: where libraries are; those where torch's launcher looks if left out.

    Example:
        >>> allocator({"MALLOC_CONF": "narenas:1"})
        {}
    """
    if sys.platform != "linux" or any(name in environment for name in CHOSEN):
        return {}
    if folders is None:
        roots = [environment[name] + "/lib" for name in ("CONDA_PREFIX", "VIRTUAL_ENV") if name in environment]
        folders = [*roots, *_FOLDERS]
    places = [Path(folder) for folder in folders]
    for kind, more in (("tcmalloc", {}), ("jemalloc", {"MALLOC_CONF": JEMALLOC})):
        found = next((file for place in places for file in sorted(place.glob(f"lib{kind}.so*"))), None)
        if found is not None:
            return {"LD_PRELOAD": str(found), **more}
    return dict(KEEPS)
