"""Random numbers: speed against torch's generator, statistical quality, memory of an initialisation.

    python benchmarks/random_numbers.py
    python benchmarks/random_numbers.py --draws 100000000 --memory

Speed: one thread, plain torch and onecard (a mesh of one rank) in turn in one process; medians over rounds and the median
of the rounds' ratios. Quality: onecard and torch's own generator go through the same tests. Memory: a model of 2 GiB
over four ranks, each limited to 1 GiB of memory of its own.
"""

from __future__ import annotations

import math
import resource
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
import tyro
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import onecard as oc
from onecard.random import Key, fill, law, new_key
from onecard.testing import run_ranks

MIB = 2**20
BINS = 1000


@dataclass(frozen=True)
class RandomArgs:
    """What to measure."""

    elements: int = 16 * MIB
    rounds: int = 5
    draws: int = 10**7
    """for the tests of quality"""
    memory: bool = False
    """also initialise a model of 2 GiB"""


OPERATORS: dict[str, Callable[[Tensor], object]] = {
    "dropout": lambda x: F.dropout(x, 0.1),
    "bernoulli_": lambda x: x.bernoulli_(0.9),
    "uniform_": lambda x: x.uniform_(),
    "normal_": lambda x: x.normal_(),
    "exponential_": lambda x: x.exponential_(),
    "random_": lambda x: x.random_(0, 1000),
}


def seconds(call: Callable[[Tensor], object], x: Tensor) -> float:
    start = time.process_time()
    call(x)
    return time.process_time() - start


def say(what: str) -> None:
    print(f"measuring {what}", flush=True)


def speed(args: RandomArgs) -> Table:
    """Processor time, so that other programs on the machine disturb less."""
    plain = torch.ones(args.elements)
    twin = oc.shard_tensor(plain, oc.ProcessMesh([0], ["x"]), [oc.Replicate()])
    table = Table("operator", "torch", "onecard", "ratio", title=f"{args.elements / 1e6:.1f} M float32, one thread")
    for name, call in OPERATORS.items():
        say(f"{name}, {args.elements} elements")
        seconds(call, plain), seconds(call, twin)
        pairs = [(seconds(call, plain), seconds(call, twin)) for _ in range(args.rounds)]
        torchs, ours = (statistics.median(column) for column in zip(*pairs, strict=True))
        ratio = statistics.median(b / a for a, b in pairs)
        table.add_row(name, f"{torchs * 1e3:.0f} ms", f"{ours * 1e3:.0f} ms", f"{ratio:.2f}")
    return table


SLOWER: dict[str, Callable[[Tensor], object]] = {
    "poisson, mean 30": lambda x: torch.poisson(x * 30),
    "_standard_gamma": torch._standard_gamma,
    "binomial, 100 of 0.3": lambda x: torch.binomial(x * 100, x * 0.3),
}


def other_sizes() -> Table:
    """Draws of few elements, whose fixed cost shows, and variates by rejection."""
    table = Table("operator", "elements", "torch", "onecard", title="Small draws; variates by rejection; permutations")
    mesh = oc.ProcessMesh([0], ["x"])
    for elements, repeats, calls in ((1000, 500, OPERATORS), (MIB, 1, SLOWER)):
        plain = torch.ones(elements)
        twin = oc.shard_tensor(plain, mesh, [oc.Replicate()])
        for name, call in calls.items():
            say(f"{name}, {elements} elements")
            torchs, ours = (1e6 * per_call(lambda x=x, call=call: call(x), repeats) for x in (plain, twin))
            table.add_row(name, str(elements), f"{torchs:.0f} us", f"{ours:.0f} us")
    n = 16 * MIB
    say(f"randperm of {n}")
    torchs, ours = (
        1e6 * per_call(f, 1) for f in (lambda: torch.randperm(n), lambda: oc.randperm(n, mesh, [oc.Shard(0)]))
    )
    table.add_row("randperm", str(n), f"{torchs:.0f} us", f"{ours:.0f} us")
    return table


def per_call(call: Callable[[], object], repeats: int) -> float:
    """Processor time of a call, the least of five."""
    times = []
    for _ in range(5):
        start = time.process_time()
        for _ in range(repeats):
            call()
        times.append((time.process_time() - start) / repeats)
    return min(times)


def chunks(draws: int, size: int = 10**7) -> list[int]:
    return [min(size, draws - start) for start in range(0, draws, size)]


class Moments:
    """Running sums for a correlation, in standard deviations of that of independent samples."""

    def __init__(self) -> None:
        self.n, self.sums = 0, torch.zeros(5, dtype=torch.float64)

    def add(self, a: Tensor, b: Tensor) -> None:
        a, b = a.double() - 0.5, b.double() - 0.5
        self.n += len(a)
        self.sums += torch.stack([a.sum(), b.sum(), (a * b).sum(), (a * a).sum(), (b * b).sum()])

    def score(self) -> float:
        a, b, ab, aa, bb = (self.sums / self.n).tolist()
        return (ab - a * b) / math.sqrt((aa - a * a) * (bb - b * b)) * math.sqrt(self.n)


Source = Callable[[int, int], Tensor]  # (call, elements) -> uniform numbers of one call


def philox_call(call: int, n: int) -> Tensor:
    torch.manual_seed(call)
    return fill(torch.empty(n), law("uniform_", torch.float32), new_key())


def torch_call(call: int, n: int) -> Tensor:
    return torch.rand(n, generator=torch.Generator().manual_seed(call))


def philox_near_keys(call: int, n: int) -> Tensor:
    """Keys that differ in one bit: harder than what new_key gives."""
    return fill(torch.empty(n), law("uniform_", torch.float32), Key(call, 0))


def quality(source: Source, draws: int) -> list[float]:
    """Scores that are standard normal for good numbers: uniformity, pairs of neighbours, lags, ranks, calls."""
    counts, pairs = torch.zeros(BINS, dtype=torch.float64), torch.zeros(1024, dtype=torch.float64)
    lags = {lag: Moments() for lag in (1, 2, 4)}
    ranks, calls = Moments(), Moments()
    for call, n in enumerate(chunks(draws)):
        x = source(2 * call, n)
        counts += torch.histc(x.double(), BINS, 0, 1)
        grid = (x[: n // 2 * 2].view(-1, 2) * 32).long()
        pairs += (grid[:, 0] * 32 + grid[:, 1]).bincount(minlength=1024)
        for lag, moments in lags.items():
            moments.add(x[:-lag], x[lag:])
        half = n // 2
        ranks.add(x[:half], x[half : 2 * half])
        calls.add(x, source(2 * call + 1, n))
    return [chi(counts), chi(pairs), *(m.score() for m in lags.values()), ranks.score(), calls.score()]


def chi(counts: Tensor) -> float:
    """A chi-square as a standard normal score (Wilson and Hilferty, 1931)."""
    freedom, expected = len(counts) - 1, counts.sum() / len(counts)
    value = ((counts - expected) ** 2 / expected).sum().item()
    spread = 2 / (9 * freedom)
    return ((value / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread)


def quality_table(draws: int) -> Table:
    names = ("uniform", "pairs", "lag 1", "lag 2", "lag 4", "ranks", "calls")
    table = Table("generator", *names, title=f"{draws:.0e} draws: scores in standard deviations")
    for label, source in (
        ("onecard", philox_call),
        ("onecard, keys that differ in a bit", philox_near_keys),
        ("torch", torch_call),
    ):
        say(f"the quality of {label}")
        table.add_row(label, *(f"{score:+.2f}" for score in quality(source, draws)))
    return table


def initialise(rows: int, layers: int, limit: int) -> tuple[float, float, float]:
    """(model MiB, peak MiB of this rank, seconds) with its memory limited to ``limit`` bytes."""
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    mesh = oc.ProcessMesh(range(4), ["x"])
    start = time.perf_counter()
    oc.manual_seed(0)
    with oc.deferred_init():
        model = nn.Sequential(*[nn.Linear(rows, rows, bias=False) for _ in range(layers)])
        for layer in model:
            nn.init.normal_(layer.weight, std=0.02)
    oc.shard_layer(model, mesh, shard_rows)
    size = sum(p.nbytes for p in model.parameters()) / MIB
    return size, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, time.perf_counter() - start


def shard_rows(name: str, layer: nn.Module, mesh: oc.ProcessMesh) -> None:
    if isinstance(layer, nn.Linear):
        layer.weight = oc.shard_tensor(layer.weight, mesh, [oc.Shard(0)])  # type: ignore[assignment]


def memory_table() -> Table:
    table = Table(
        "rank", "model", "peak resident", "time", title="A model of 2 GiB, 1 GiB of data a rank (RLIMIT_DATA)"
    )
    say("the memory of an initialisation")
    for rank, (size, peak, took) in enumerate(run_ranks(initialise, 4, 4096, 32, 1024 * MIB, timeout=300)):
        table.add_row(str(rank), f"{size:.0f} MiB", f"{peak:.0f} MiB", f"{took:.1f} s")
    return table


def main(args: RandomArgs) -> None:
    console = Console(width=120)
    torch.set_num_threads(1)
    console.print(speed(args))
    console.print(other_sizes())
    console.print(quality_table(args.draws))
    if args.memory:
        console.print(memory_table())


if __name__ == "__main__":
    main(tyro.cli(RandomArgs))
