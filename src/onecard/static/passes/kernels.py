"""Which kernel is fastest for a product: measured once for each shape, and remembered in a file of the user's cache.

The file belongs to a model of CPU and a version of torch. Ranks of one host read and write it one after the other, so that all
take the same kernel: other kernels have other last bits, and copies that should be equal would not be.
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from onecard._torch import names as _torch
from onecard._torch.names import OpOverload
from onecard.static.passes.fixed import contiguous

aten = torch.ops.aten
Operand = tuple[tuple[int, ...], tuple[int, ...]]  # shape and strides
LEAST, MOST, LONGEST = 5, 40, 0.3
"""How often the kernels are tried in turn: at least, at most, and the seconds after which they are not tried again."""
GAIN = 0.95
"""Another kernel than torch's must take less than this part of its time."""
CLOSE = 1e-6
"""What another kernel's numbers may be off: the norm of the difference, of the norm."""


def folder() -> Path:
    """Where the file is: ``ONECARD_CACHE``, else ``onecard`` in the user's cache folder (XDG_CACHE_HOME, ~/.cache)."""
    if given := os.environ.get("ONECARD_CACHE"):
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "onecard"


def file() -> Path:
    """The file of this CPU and this torch."""
    words = re.sub(r"[^A-Za-z0-9.]+", "-", f"{_cpu()} torch {torch.__version__}").strip("-")
    return folder() / f"kernels {words}.json"


def _cpu() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
        return next(line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def kind(node: fx.Node) -> str | None:
    """ "mm", "addmm" or "linear" of a node that other kernels could compute; None of any other."""
    if _torch.onednn_linear is None or not isinstance(node.target, OpOverload) or node.kwargs:
        return None
    name = {aten.mm.default: "mm", aten.addmm.default: "addmm", aten.linear.default: "linear"}.get(node.target)
    given: list[Any] = [n.meta.get("tensor") for n in node.args if isinstance(n, fx.Node)]
    if name is None or len(given) != len([a for a in node.args if a is not None]) or None in given:
        return None
    if any(dtype is not torch.float32 or device.type != "cpu" or 0 in shape for shape, _, dtype, device in given):
        return None
    if name == "addmm" and len(given[0][0]) != 1:
        return None
    return name if contiguous(*node.meta["tensor"][:2]) else None


def operands(node: fx.Node) -> list[Operand]:
    """Shape and strides of each operand of a product."""
    return [n.meta["tensor"][:2] for n in node.args if isinstance(n, fx.Node)]


def product(name: str, given: list[Tensor]) -> Callable[[], Tensor]:
    """A product by torch's kernel."""
    return {"mm": lambda: torch.mm(*given), "addmm": lambda: torch.addmm(*given),
            "linear": lambda: torch.nn.functional.linear(*given)}[name]  # fmt: skip


def by_onednn(name: str, given: list[Any], turn: Callable[[Any], Any]) -> tuple[Any, Any, Any]:
    """Input, weight and bias with which oneDNN's ``linear`` gives the same product. ``turn`` transposes."""
    if name == "linear":
        return given[0], given[1], given[2] if len(given) > 2 else None
    if name == "mm":
        return given[0], turn(given[1]), None
    return given[1], turn(given[2]), given[0]


def measured(name: str, shapes: list[Operand]) -> dict[str, float]:
    """Microseconds of each kernel that gives the numbers."""
    draws = torch.Generator(device="cpu").manual_seed(0)  # the program's own random numbers stay what they are
    given = [_random(shape, stride, draws) for shape, stride in shapes]
    plain = product(name, given)
    x, weight, bias = by_onednn(name, given, torch.t)

    def other() -> Tensor:
        return _torch.onednn_linear(x, weight, bias, "none", [], "")

    with torch.no_grad():
        expected, found = plain(), other()
        runs = {"torch": plain}
        if (expected - found).norm() <= CLOSE * expected.norm() and found.stride() == expected.stride():
            runs["onednn"] = other
        return _best(runs)


def _random(shape: tuple[int, ...], stride: tuple[int, ...], draws: torch.Generator) -> Tensor:
    size = 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
    return torch.randn(size, generator=draws, device="cpu").as_strided(shape, stride)


def _best(runs: dict[str, Callable[[], Tensor]]) -> dict[str, float]:
    """The least microseconds of each, run in turn, so that what else the machine does hits all alike."""
    best, begin = dict.fromkeys(runs, float("inf")), time.perf_counter()
    for i in range(MOST):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            best[name] = min(best[name], time.perf_counter() - start)
        if i + 1 >= LEAST and time.perf_counter() - begin > LONGEST:
            break
    return {name: round(seconds * 1e6, 2) for name, seconds in best.items()}


def choice(times: dict[str, float]) -> str:
    """The kernel to take.

    Example:
        >>> choice({"torch": 10.0, "onednn": 9.8}), choice({"torch": 10.0, "onednn": 5.0}), choice({"torch": 1.0})
        ('torch', 'onednn', 'torch')
    """
    best = min(times, key=lambda name: times[name])
    return best if times[best] < GAIN * times["torch"] else "torch"


def key(name: str, shapes: list[Operand]) -> str:
    """What a product is called in the file: kind, operands, threads."""
    words = [
        f"{'x'.join(map(str, shape))}{'' if contiguous(shape, stride) else f' by {stride}'}" for shape, stride in shapes
    ]
    return f"{name} {', '.join(words)}; {torch.get_num_threads()} threads"


def times_of(products: list[tuple[str, list[Operand]]]) -> list[dict[str, float]]:
    """For each product the microseconds of its kernels: from the file, or measured now and written there."""
    wanted = {key(*p): p for p in products}
    known = _read()
    if not wanted.keys() <= known.keys():
        with _locked():
            known = _read()  # another rank may have measured meanwhile
            missing = [k for k in wanted if k not in known]
            known |= {k: measured(*wanted[k]) for k in missing}
            if missing:
                _write(known)
    return [known[key(*p)] for p in products]


def _read() -> dict[str, dict[str, float]]:
    """What the file knows; nothing, if it is not there or cannot be read."""
    try:
        found = json.loads(file().read_text())
    except (OSError, ValueError):
        return {}
    fine = isinstance(found, dict) and all(isinstance(v, dict) and "torch" in v for v in found.values())
    return found if fine else {}


def _write(known: dict[str, dict[str, float]]) -> None:
    target = file()
    part = target.with_suffix(f".{os.getpid()}.part")
    part.write_text(json.dumps(known, indent=1, sort_keys=True))
    part.replace(target)


@contextmanager
def _locked() -> Iterator[None]:
    """One process at a time."""
    folder().mkdir(parents=True, exist_ok=True)
    with open(folder() / "kernels.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
