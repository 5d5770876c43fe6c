"""Random training programs, recorded: a replay gives the bits of the program as it is, call by call, on one card or on ranks.

PYTHONPATH=tests python -m fuzz.recorded --seed 0 --count 300
PYTHONPATH=tests python -m fuzz.recorded --seed 0 --count 100 --ranks 2
"""

from __future__ import annotations

import random
import re
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
import tyro
from comparing import compared, each_other, never
from torch import Tensor

import onecard as oc
from fuzz.draw import draw
from fuzz.program import MESHES, Program, axes_of, helpers, ints, normal, size_of
from fuzz.twin import double, one_card
from onecard._torch.names import TorchDispatchMode
from onecard.errors import RecordingError
from onecard.static.passes import PASSES
from onecard.testing import run_ranks

CALLS = 7
PATIENCE = 15.0  # seconds that a rank waits for another one's verdict
# What a recording refuses, or repeats as it was, by what it is: a value of data that Python reads, or that a shape depends on.
READS = re.compile(
    r"\.item\(\)|tolist\(\)|nonzero|unique|masked_select|if \w+\.sum\(\)|float\(\w+\.max|\[\w+ [<>]|as_strided|histc"
)
OUTSIDE = re.compile(r"^sched\.step|load_state_dict|^model\.eval")  # what users call between steps
# Of these torch itself gives other last bits under a dispatch mode than without one, whoever's it is.
TORCHS_OWN = re.compile(r"LSTM|GRU|RNN|cross_entropy")
# These do so in backward, in some calls only: gradients of products before torch 2.12.
AT_TIMES = re.compile(r"prod\b" if torch.__version__ < "2.12" else r"$^")
INSIDE = re.compile(r"Bilinear")  # its kernel calls others, which autocast reaches as it is, but not from a recording
TRAINS = re.compile(r"backward|autograd|opt\.|\.grad\b|clip_grad")
MADE = re.compile(r"^(?:with [^:]*: *)?(\w+) = ")


@dataclass(frozen=True)
class Verdict:
    """How a program ended: "right", "wrong", "rounded" (other last bits of float64), "refused", "void" (nothing is left of it,
    or it does not run as it is).

    ``replays``: how many of its calls were replays.
    """

    kind: str
    why: str = ""
    replays: int = 0


@dataclass(frozen=True)
class Case:
    """A program as a step to record.

    Attributes:
        outside: statements that run between the steps.
        shown: the variables that the step returns; ``options``: of ``to_static``.
        written: whether the program writes to what it was given back.
        named: it reads parameters by other names of their memory, at its beginning and at its end.
        half: the step is recorded with ``also=["half"]``, in float32; as it is it runs under autocast but for what trains.
    """

    program: Program
    outside: tuple[str, ...]
    shown: tuple[str, ...]
    options: dict[str, Any]
    written: bool
    half: bool = False
    named: bool = False

    def source(self, autocast: bool = False) -> str:
        """The text of the step: its data come as arguments, in the order in which it draws them."""
        lines = [
            "def train_step(given, step):",
            "    given = iter(given)",
            "    normal = ints = lambda *_: next(given)",
        ]
        again = "[x.square().sum() for x in named]"
        lines += [f"    begin = {again}"] if self.named else []
        for trains, body in groupby(self.program.body, lambda line: not autocast or bool(TRAINS.search(line))):
            lines += [] if trains else ["    with torch.autocast('cpu', torch.bfloat16):"]
            lines += [f"    {line}" if trains else f"        {line}" for line in body]
        shown = [f"{name!r}: {name}" for name in self.shown]
        if self.named:
            shown.append(f"**{{f'named {{i}}': x for i, x in enumerate([*begin, *{again}])}}")
        return "\n".join([*lines, f"    return {{{', '.join(shown)}}}\n"])


def case(seed: int, ranks: tuple[Any, ...] | None = None) -> Case | None:
    """The case of a seed; None if nothing is left of its program."""
    r = random.Random(f"recorded {seed}")
    drawn = draw(seed, ranks)
    outside = tuple(line for line in drawn.body if OUTSIDE.search(line))
    left_out = (READS, OUTSIDE, AT_TIMES)
    body = _closed(line for line in drawn.body if not any(kind.search(line) for kind in left_out))
    program = replace(drawn, body=body)
    made = [m[1] for line in body if (m := MADE.match(line)) and m[1][0] in "vl"]
    if not made or one_card(program)[0].kind != "right":
        return None
    shown = made if r.random() < 0.3 else [made[-1], *r.sample(made, min(len(made), r.randint(0, 2)))]
    options: dict[str, Any] = {}
    if r.random() < 0.3:
        options["without"] = r.sample([*PASSES], r.randint(1, 4))
    if r.random() < 0.3:
        options["also"] = ["recompute"]
    written, more = r.random() < 0.3, random.Random(f"more of recorded {seed}")
    if more.random() < 0.25:
        options["memory_limit"] = more.choice((1, 2000, 20_000))
    half = more.random() < 0.2 and not INSIDE.search(" ".join(program.setup))
    if half:
        options["also"] = [*options.get("also", ()), "half"]
    return Case(program, outside, tuple(dict.fromkeys(shown)), options, written, half, more.random() < 0.3)


def _closed(lines: Iterable[str]) -> tuple[str, ...]:
    """The statements that still know all of their variables."""
    kept, known = list[str](), set[str]()
    for line in lines:
        m = MADE.match(line)
        used = {n for n in re.findall(r"\b[vxl]\d+\b|\bloss\b|\bnorm\b", line.split(" = ", 1)[1] if m else line)}
        if used <= known:
            kept.append(line)
            known |= {m[1]} if m else set()
    return tuple(kept)


def run(
    made: Case, mesh: oc.ProcessMesh | None, static: bool, under: bool | None = None
) -> tuple[list[dict[str, Any]], Any]:
    """What each call gave and left, and the step; ``under``: a mode that changes nothing; None: where torch's kernels ask."""
    space, program = helpers(mesh), made.program
    torch.manual_seed(program.seed)
    for line in program.setup:
        exec(line, space)
    space["named"] = [p.data for p in space["params"]]
    exec(compile(made.source(made.half and not static), f"seed {program.seed}", "exec"), space)
    step: Callable[..., Any] = space["train_step"]
    if static:
        step = oc.to_static(step, **made.options)
    found = []
    torch.manual_seed(program.seed + 1)
    other = not static and (asks_for_modes(program) if under is None else under)
    for number in range(CALLS):
        with _Mode() if other else nullcontext(), compared(never if program.seed % 2 else each_other):
            out = step(data(program, number), number % 2)
        found.append({name: snapshot(x) for name, x in out.items()} | {name: snapshot(x) for name, x in left(space)})
        if made.written:
            for x in out.values():
                if not x.requires_grad and x.is_floating_point():
                    x.mul_(0.5)
        for line in made.outside:
            exec(line, space | {"step": number % 2})
    return found, step


def asks_for_modes(program: Program) -> bool:
    """Whether torch computes something of a program otherwise under a mode than without one."""
    return bool(TORCHS_OWN.search(" ".join(program.lines)))


@contextmanager
def single() -> Iterator[None]:
    """Float32, of which autocast makes halves, and no warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class _Mode(TorchDispatchMode):
    """Changes nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def data(program: Program, number: int) -> list[Tensor]:
    """The numbers that a step draws, drawn on one card with the shapes that they have there."""
    key = (program, number, torch.get_default_dtype())
    if key not in _data:
        made: list[Tensor] = []

        def noted(draws: Callable[..., Tensor]) -> Callable[..., Tensor]:
            def drawn(seed: int, *shape: int) -> Tensor:
                made.append(draws(seed + number, *shape))
                return made[-1].clone()

            return drawn

        space = helpers(None) | {"step": number % 2, "normal": normal, "ints": ints}
        for line in program.setup:
            exec(line, space)
        space |= {"normal": noted(normal), "ints": noted(ints)}
        with torch.random.fork_rng(devices=[]):
            for line in program.body:
                exec(line, space)
        _data.clear()
        _data[key] = made
    return [x.clone() for x in _data[key]]


_data: dict[Any, list[Tensor]] = {}


def left(space: dict[str, Any]) -> Iterable[tuple[str, Tensor]]:
    """Parameters, gradients, buffers, states, and torch's generator."""
    for i, p in enumerate(space["params"]):
        yield f"parameter {i}", p
        if p.grad is not None:
            yield f"gradient {i}", p.grad
        yield from ((f"{key} of {i}", x) for key, x in space["opt"].state.get(p, {}).items() if isinstance(x, Tensor))
    yield from space["model"].named_buffers()
    yield "generator", torch.get_rng_state()


def snapshot(x: Tensor) -> tuple[Any, ...]:
    """This rank's part as it is now, and how it lies."""
    if isinstance(x, oc.DistTensor):
        return x.detach().to_local().clone(), str(x.placements), tuple(x.shape), x.requires_grad
    return x.detach().clone(), "", tuple(x.shape), x.requires_grad


def same(a: tuple[Any, ...], b: tuple[Any, ...]) -> bool:
    """Whether two are equal bit for bit; any two that are no number are equal."""
    x, y = a[0], b[0]
    if a[1:] != b[1:] or x.dtype != y.dtype or x.shape != y.shape:
        return False
    equal = (x == y) | ((x != x) & (y != y))
    return bool(equal.all())


def judge(seed: int, ranks: tuple[Any, ...] | None = None, **options: Any) -> Verdict:
    """Run the program of a seed as it is and recorded: on one card, or on a mesh of these ranks, all of which call this."""
    mesh = None if ranks is None else oc.ProcessMesh(ranks, ["x", "y"][: axes_of(ranks)])
    with double():
        made = case(seed, ranks or (0, 1))
    if made is None:
        return Verdict("void")
    made.options.update(options)
    warnings.filterwarnings("error", message=".*does not do what was recorded")  # there is nothing to find
    with single() if made.half else double():
        try:
            expected, _ = run(made, mesh, static=False)
        except Exception as fault:
            return Verdict("void", f"{type(fault).__name__}: {fault}")
        try:
            found, step = run(made, mesh, static=True)
        except RecordingError as fault:
            return Verdict("refused", str(fault))
        except Exception as fault:
            return Verdict("wrong", f"{type(fault).__name__}: {fault}")
        wrong = difference(expected, found)
        if wrong and mesh is None:  # torch gives others under any mode, here and there: one of the two it must be
            other = run(made, mesh, static=False, under=not asks_for_modes(made.program))[0]
            wrong = difference(other, found) and wrong
    if wrong and not difference(expected, found, near):
        return Verdict("rounded", wrong)
    return Verdict("wrong", wrong) if wrong else Verdict("right", "", CALLS - 1 - len(step.recordings))


def near(a: tuple[Any, ...], b: tuple[Any, ...]) -> bool:
    """Whether two differ by the rounding of float64 alone: torch's kernels of convolutions and losses ask where memory begins."""
    x, y = a[0], b[0]
    if x.dtype != torch.float64 or a[1:] != b[1:] or x.shape != y.shape:
        return same(a, b)
    return torch.allclose(
        x, y, rtol=0.0, atol=1e-14 * float(x.nan_to_num().abs().amax()) if x.numel() else 0.0, equal_nan=True
    )


def difference(
    expected: list[dict[str, Any]], found: list[dict[str, Any]], alike: Callable[[Any, Any], bool] = same
) -> str:
    """The first difference, in words; "" if there is none."""
    for number, (a, b) in enumerate(zip(expected, found, strict=True)):
        if list(a) != list(b):
            return f"call {number}: there is {set(a) ^ set(b)} in one of them only"
        if differs := [name for name in a if not alike(a[name], b[name])]:
            return f"call {number}: {', '.join(differs)}: {found_beside(a, b, differs[0])}"
    return ""


def found_beside(a: dict[str, Any], b: dict[str, Any], name: str) -> str:
    """Both values, in words."""
    return f"{b[name]} in place of {a[name]}"[:500]


def many(seeds: list[int], ranks: tuple[Any, ...] | None, **options: Any) -> list[Verdict]:
    """Judge programs, one after the other: on every rank, or in this process."""
    if ranks is not None:
        from onecard.static.passes import overlap

        overlap.LARGE = 0  # the messages of small programs are started, too
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for seed in seeds:
            found.append(judge(seed, ranks, **options))
            if ranks is not None and (said := _unlike(seed, found[-1])):
                found[-1] = Verdict("wrong", said)
                break  # what one rank has left behind is not the next one's
    return found


def _unlike(seed: int, mine: Verdict) -> str:
    """What is wrong if the ranks have not ended a program alike; "" if they have."""
    store, world = dist.distributed_c10d._get_default_store(), range(oc.get_world_size())
    store.set(f"recorded/{seed}/{oc.get_rank()}", f"{mine.kind} {mine.replays} {mine.why[:200]}")
    try:
        store.wait([f"recorded/{seed}/{rank}" for rank in world], timedelta(seconds=PATIENCE))
    except RuntimeError:
        return f"only some ranks ended the program, this one so: {mine}"
    said = [store.get(f"recorded/{seed}/{rank}").decode() for rank in world]
    return f"the ranks end otherwise: {said}" if len({one.split(" ")[0] for one in said}) > 1 else ""


@dataclass(frozen=True)
class Options:
    """Random programs recorded, against the same programs as they are; exit status 1 if any is wrong."""

    seed: int = 0
    """the first program's seed"""
    count: int = 100
    """how many programs, of the seeds from there on"""
    ranks: int = 1
    """1: on one card; 2, 3 or 4: on a mesh of so many"""


def main(options: Options) -> int:
    """Runs the programs and prints what failed; returns the exit status."""
    begin, verdicts = time.monotonic(), dict[int, Verdict]()
    for start in range(options.seed, options.seed + options.count, 20):
        seeds = [*range(start, min(start + 20, options.seed + options.count))]
        if options.ranks == 1:
            found = [many(seeds, None)]
        else:
            mesh = [m for m in MESHES if size_of(m) == options.ranks][start // 20 % 2 if options.ranks != 3 else 0]
            found = run_ranks(many, options.ranks, seeds, mesh, timeout=60.0 * len(seeds))
        for i, seed in enumerate(seeds[: min(map(len, found))]):
            verdicts[seed] = next((r[i] for r in found if r[i].kind == "wrong"), found[0][i])
            if verdicts[seed].kind == "wrong":
                print(f"seed {seed}: {verdicts[seed].why}", flush=True)
    kinds = Counter(v.kind for v in verdicts.values())
    refused = Counter(re.sub(r" at \S+", "", v.why)[:100] for v in verdicts.values() if v.kind == "refused")
    for why, n in refused.most_common(8):
        print(f"refused, {n}: {why}")
    print(dict(kinds), f"{sum(v.replays for v in verdicts.values())} replays, {time.monotonic() - begin:.0f} s")
    return int("wrong" in kinds)


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options)))
