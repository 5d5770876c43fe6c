"""``python -m fuzz.files``: changed files of recordings. Each is refused by an error of ours, or replays and does nothing else.

Changes are of bytes, of the graph (with the checksum that belongs to it), and attacks put in each place where a text stands. What
a file does is seen by Python's audit hook: what is opened, imported, compiled, started.
"""

from __future__ import annotations

import copy
import json
import os
import random
import re
import resource
import signal
import subprocess
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import tyro
from safetensors import safe_open
from torch import Tensor, nn

import onecard as oc
from onecard.errors import OnecardError
from onecard.static.file import saved

PORTION = 500
MARK = "pwned"
MEMORY = 12 * 2**30
SECONDS = 20
WORDS = frozenset(re.findall(r"\w+", """
    def made return if is not or and for in try except with else None True del as type len all map tuple values get cell_contents
    KeyError AttributeError IndexError ValueError
    MISS run below out leaves args kwargs tree flatten tree_unflatten spent wrap t x Tensor
    DistTensor shape stride dtype device requires_grad grad state param_groups _local _spec _memory is_ is_like default_dtype
    _backward_hooks _post_accumulate_grad_hooks any_autocast modes is_grad_enabled is_inference differs present float
    with_hint v g
"""))  # fmt: skip
"""All words of the functions that a recording is made of; all else in them is a numbered slot, or a sign."""
_SLOT = re.compile(r"[gv]\d+")


def attacks(folder: str) -> list[str]:
    """Texts that would do something where a loader believed them."""
    touch = f"__import__('os').system('touch {folder}/{MARK}')"
    return [
        touch, f"x={touch}", f"a'], {touch}, x['", f'"]; {touch} #', f"x); {touch}; (", f"\n    {touch}\n", f"{{{touch}}}",
        "op import_module.__call__.__call__", "op aten.add.__class__", "op aten.__class__.__init__",
        "op aten.add.Tensor.__call__",
        "op aten.from_file.default", "op torch.ops.load_library", f"op load_library.{folder}.default", "op aten._dir.__iter__",
        "op profiler._record_function_enter.default", "op c10d.allreduce_.default", "op aten.warn.default",
        "op aten.save.default",
        "op quantized.linear.default", "op aten._print.default", "call os:system", "call subprocess:run", "own eval", "own exec",
        "python getattr", "python __import__", "call builtins:exec", "__class__", "__dict__", "__reduce__", "__globals__",
        "forward.__func__.__globals__", "weight.__class__", "_modules", "0.__class__.__init__", "../../etc/passwd",
        f"{folder}/{MARK}", "get_attr", "call_method", "call_module", "collections.defaultdict", f"{MARK}:Class", "aten", "{0}",
        "0x1p99999", "nan", "cpu:99999999", "meta", "\x00", "\ud800", "",
    ]  # fmt: skip


# -- what is changed -------------------------------------------------------------------------------------------------------


class Net(nn.Module):
    """With a buffer, dropout, and a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Dropout(0.5), nn.BatchNorm1d(4))
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x) * self.scale


def training() -> tuple[Any, dict[str, Any], tuple[Any, ...]]:
    """A whole step: its recording, what it is bound to, what it is called with."""
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def step(x: Tensor, clip: float) -> dict[str, Any]:
        optimizer.zero_grad()
        loss = model(x).square().mean() + torch.tensor([1.0, 2.0]).sum()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        return {"loss": loss.detach(), "norm": [clip]}

    return _recorded(step, {"model": model, "optimizer": optimizer}, (torch.randn(5, 3), 1.0))


def evaluation() -> tuple[Any, dict[str, Any], tuple[Any, ...]]:
    """A function of several arguments, that asks about a number."""
    weight = torch.ones(3)

    def score(x: Tensor, more: dict[str, Any], rate: float) -> Any:
        y = x @ weight
        y = y * rate if rate > 0.5 else y / 2
        return y, {"more": more["a"].clamp(min=0.25).cumsum(0, dtype=torch.float64), "text": more["word"]}

    return _recorded(score, {"weight": weight}, (torch.randn(2, 3), {"a": torch.rand(4), "word": "abc"}, 0.75))


def on_a_mesh() -> tuple[Any, dict[str, Any], tuple[Any, ...]]:
    """Distributed tensors, on a mesh of this process alone."""
    mesh = oc.ProcessMesh([0], ["dp"])
    weight = oc.shard_tensor(torch.ones(4, 3), mesh, [oc.Shard(0)]).detach().requires_grad_()

    def step(x: Any) -> Any:
        (x @ weight).square().sum().backward()
        with torch.no_grad():
            weight.sub_(0.1 * weight.grad)
        weight.grad = None

    return _recorded(step, {"weight": weight}, (oc.shard_tensor(torch.ones(2, 4), mesh, [oc.Replicate()]),))


def _recorded(step: Any, roots: dict[str, Any], given: tuple[Any, ...]) -> tuple[Any, dict[str, Any], tuple[Any, ...]]:
    step(*given)
    return oc.record(step)(*given), roots, given


BASES: tuple[Callable[[], Any], ...] = (training, evaluation, on_a_mesh)


@dataclass
class Base:
    """A file that is right, and what it is used with."""

    data: bytes
    head: dict[str, Any]
    tensors: dict[str, Tensor]
    roots: dict[str, Any]
    given: tuple[Any, ...]


def _base(make: Callable[[], Any], folder: str) -> Base:
    recording, roots, given = make()
    path = Path(folder) / "base.safetensors"
    recording.save(path)
    with safe_open(str(path), "pt") as file:
        head = json.loads(file.metadata()["recording"])
        tensors = {k: file.get_tensor(k) for k in file.keys()}  # noqa: SIM118
    return Base(path.read_bytes(), head, tensors, roots, given)


# -- changes ---------------------------------------------------------------------------------------------------------------


def changed(base: Base, seed: int, path: Path, texts: list[str]) -> str:
    """Write a changed file; says how it was changed."""
    draw = random.Random(seed)
    if seed % 5 == 0:
        data = bytearray(base.data)
        for _ in range(draw.randint(1, 4)):
            at = draw.randrange(len(data))
            draw.choice((_flip, _cut, _insert))(data, at, draw)
        path.write_bytes(data)
        return "bytes"
    head = copy.deepcopy(base.head)
    for _ in range(draw.randint(1, 3)):
        places = [*_places(head)]
        holder, key = draw.choice(places)
        attack = draw.random() < 0.4
        if attack and (found := [(h, k) for h, k in places if isinstance(h[k], str)]):
            holder, key = draw.choice(found)
        holder[key] = draw.choice(texts) if attack else _another(holder[key], head, draw)
        if not attack and draw.random() < 0.1:
            _drop(holder, key)
    try:
        text = json.dumps(head)
        saved.write(path, text, base.tensors)
    except (OnecardError, UnicodeError, ValueError, RecursionError):  # what no file can hold
        path.write_bytes(b"")
    return "graph"


def _flip(data: bytearray, at: int, draw: random.Random) -> None:
    data[at] ^= 1 << draw.randrange(8)


def _cut(data: bytearray, at: int, draw: random.Random) -> None:
    del data[at : at + draw.choice((1, 8, 10_000))]
    data += b"\0" * (not data)


def _insert(data: bytearray, at: int, draw: random.Random) -> None:
    data[at:at] = draw.randbytes(draw.choice((1, 8)))


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """All places in a JSON value: what holds them, and where."""
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield value, key
        yield from _places(value[key])


def _another(value: Any, head: Any, draw: random.Random) -> Any:
    """Another value in a place: one from elsewhere in the file, or one like it."""
    if draw.random() < 0.4:
        holder, key = draw.choice([*_places(head)])
        return copy.deepcopy(holder[key])
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return draw.choice((value + 1, -1, -value, 0, 2**31, 2**63, 10**30, True))
    if isinstance(value, str):
        return draw.choice((value + "_", value[1:], value[::-1], ""))
    if isinstance(value, list):
        return draw.choice((value[1:], value[::-1], value * 2, [], [value]))
    return draw.choice((None, 1, "x", [], {}, 1.5, {"tuple": []}, {"node": "in0"}, {"type": "int"}))


def _drop(holder: Any, key: Any) -> None:
    if isinstance(holder, dict):
        del holder[key]
    else:
        holder.pop(key)


# -- what a file does ------------------------------------------------------------------------------------------------------


class Watch:
    """Python's audit hook: what is done while a file is loaded, bound and called."""

    def __init__(self) -> None:
        self.on, self.seen = False, list[str]()
        sys.addaudithook(self.hook)

    def hook(self, event: str, args: tuple[Any, ...]) -> None:
        if self.on and (said := self._bad(event, args)):
            self.seen.append(said)

    def _bad(self, event: str, args: tuple[Any, ...]) -> str:
        if event == "compile":
            source = args[0].decode() if isinstance(args[0], bytes) else str(args[0])
            words = {w for w in re.findall(r"\w+", source) if not _SLOT.fullmatch(w) and w not in WORDS}
            unknown = words or {*re.findall(r"""['"#\\;@]""", source.replace("; t._", ""))}
            return f"compiles {sorted(unknown)}" if args[1] == "<recording>" and unknown else ""
        if event == "exec":
            return (
                ""
                if getattr(args[0], "co_filename", "").startswith(("<recording>", sys.prefix, *sys.path))
                else f"runs {args[0]}"
            )
        if event == "open":
            wrote = isinstance(args[1], str) and {*args[1]} & {*"wax+"}
            return f"opens {args}" if wrote or MARK in str(args[0]) else ""
        if event == "import":
            return f"imports {args[0]}" if MARK in str(args[0]) else ""
        bad = (
            "os.system",
            "os.exec",
            "os.posix_spawn",
            "os.fork",
            "os.remove",
            "os.rename",
            "subprocess.",
            "socket.",
            "shutil.",
        )
        more = ("ctypes.dlopen", "pickle.", "code.__new__")
        return f"{event} {args}"[:300] if event.startswith((*bad, *more)) else ""


def outcome(base: Base, path: Path, watch: Watch) -> str:
    """What becomes of a file: "refused", "replayed", or what should not be."""
    watch.seen.clear()
    signal.alarm(SECONDS)
    watch.on = True
    try:
        recording = oc.load_recording(path)
        bound = recording.bind(**base.roots)
        str(bound)
        for _ in range(2):
            bound(*base.given)
        found = "replayed"
    except OnecardError:
        found = "refused"
    except BaseException as fault:
        found = f"{type(fault).__name__}: {str(fault)[:200]} at {traceback.extract_tb(fault.__traceback__)[-1]}"
    finally:
        watch.on = False
        signal.alarm(0)
    return watch.seen[0] if watch.seen else found


def run(seed: int, count: int) -> Iterator[tuple[int, str, str]]:
    """So many files; of each its seed, how it was changed, and what became of it."""
    watch = Watch()
    with tempfile.TemporaryDirectory() as folder:
        texts, path = attacks(folder), Path(folder) / "changed.safetensors"
        bases: dict[int, Base] = {}
        for at in range(seed, seed + count):
            if (kind := at % len(BASES)) not in bases:
                torch.manual_seed(kind)
                bases[kind] = _base(BASES[kind], folder)
                path.write_bytes(bases[kind].data)
                first = outcome(bases[kind], path, watch)
                assert first == "replayed", first
            base = bases[kind]
            print(f"at {at}", file=sys.stderr, flush=True)  # the last one is at fault where a process ends
            how = changed(base, at, path, texts)
            found = outcome(base, path, watch)
            if (Path(folder) / MARK).exists():
                found = "made a file"
            if found != "refused":  # one that replays may change what it is bound to
                del bases[kind]
            yield at, how, found


# -- many ------------------------------------------------------------------------------------------------------------------


def _environment() -> dict[str, str]:
    """That of a process that imports this package, wherever it was started."""
    here = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, here))}


def many(seed: int, count: int) -> tuple[Counter[str], list[str]]:
    """Files in processes of their own: how many ended how, and those that should not have."""
    counts, wrong = Counter[str](), list[str]()
    for start in range(seed, seed + count, PORTION):
        length = min(PORTION, seed + count - start)
        command = [sys.executable, "-m", "fuzz.files", "--seed", str(start), "--count", str(length), "--here"]
        done = subprocess.run(command, capture_output=True, text=True, env=_environment())
        for line in done.stdout.splitlines():
            at, how, found = json.loads(line)
            counts[f"{how} {found}" if found in ("refused", "replayed") else "wrong"] += 1
            if found not in ("refused", "replayed"):
                wrong.append(f"seed {at} ({how}): {found}")
        if done.returncode:
            wrong.append(f"a process ended with {done.returncode}: {done.stderr.strip()[-300:]}")
    return counts, wrong


@dataclass(frozen=True)
class Options:
    """Changed files of recordings; exit status 1 if one does anything but being refused or replaying."""

    seed: int = 0
    """the first file's seed"""
    count: int = 10_000
    """how many files"""
    here: bool = False
    """in this process, one line of JSON for each"""


def main(options: Options) -> int:
    """Runs the files and prints how they ended."""
    if options.here:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        signal.signal(signal.SIGALRM, _late)
        for each in run(options.seed, options.count):
            print(json.dumps(each), flush=True)
        return 0
    counts, wrong = many(options.seed, options.count)
    print(*wrong[:20], sep="\n")
    print(dict(counts))
    return 1 if wrong else 0


def _late(*_: Any) -> None:
    raise TimeoutError(f"longer than {SECONDS} s")


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options)))
