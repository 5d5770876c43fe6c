"""Random programs of chosen rows and of experts in loops, against the same program on one card: ``x[index]``, ``weights[e]``.

PYTHONPATH=tests python -m fuzz.rows 0 300 2        # seeds, ranks
PYTHONPATH=tests python -m fuzz.rows 0 300 4 grid   # a mesh of two axes
PYTHONPATH=tests python -m fuzz.rows 0 300 2 recorded [grid]   # each as a recorded step, replayed with other values
"""

from __future__ import annotations

import random
import sys
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import onecard as oc
from fuzz.plants import planted
from onecard.errors import RecordingError
from onecard.testing import run_ranks

D, EXPERTS = 4, 3
R, S = oc.Replicate(), oc.Shard
CALLS, REFUSED = 6, "not recorded: "
NAMES = ("x", "y", "w", "b", "stack", "rows")
"""Tokens twice, a matrix, a vector, a matrix and a vector for each expert."""

# What a statement makes of rows ``a``, with as many rows. ``c`` has as many; ``i`` numbers a's rows for as many, ``p`` exchanges
# them, ``m`` is a mask of them, ``e`` an expert, ``k`` the result's name.
SAME = (
    "{a}[{i}]", "{a}.index_select(0, {i})", "torch.gather({a}, 0, {i}[:, None].expand(-1, D))", "{a}[{p}]",
    "torch.tanh({a}[{p}])[{p}.argsort()]", "torch.tanh({a})", "F.gelu({a})", "{a} * 2 - 1", "F.layer_norm({a}, (D,))",
    "{a}.square().mean(-1, keepdim=True) + {a}", "F.linear({a}, w, b)", "{a}.view(-1, 2, 2).transpose(1, 2).reshape(-1, D)",
    "{a}[:, [2, 0, 1, 3]]", "{a}.flip(0)", "{a} + {c}", "{a} * {c}", "{a} - {a}.mean()", "{a}.cumsum(0) / 3",
    "torch.where({a} > 0, {a}, b)", "{a}[{a}.detach()[:, 1].sort(descending=True).indices]", "{a}.softmax(1)", "{a}.softmax(0)",
    "{a} * ({a} > 0).sum(0)", "{a}.detach() * b", "{a}.masked_fill({m}[:, None], 0.3)", "{a} + {a}[0]",
    "({a} @ {c}.t()).softmax(-1) @ {c}", "{a}.index_put(({i},), b * 1.0, accumulate=True)",
    "torch.zeros_like({a}).index_add(0, {i}, {a})",
    "torch.zeros_like({a}).scatter_add(0, {i}[:, None].expand(-1, D), {a})",
    "{a}.clone(); {k}[{p}[:2]] = 0.5", "{a}.clone(); {k}[{m}] *= b", "{a}.clone(); {k}[{m}] -= b", "{a}[{i}]; {k}.add_(1)",
    "{a}[{i}]; {k}.mul_(b)", "{a}[{i}] * 1; {k}[:, 1] = 0.0",
    # One expert of a stack, and all of them.
    "{a} @ stack[{e}]", "{a} * stack[{e}].sum(0)", "F.linear({a}, stack[{e}], rows[{e}])", "{a} + rows[{e}]",
    "torch.addmm(rows[{e}], {a}, stack[{e}])", "{a} @ stack[{e}].t() * rows[{e}].exp()", "{a} * stack[{e}].norm()",
    "{a} + torch.stack([rows[0], rows[{e}]]).mean(0)", "{a} @ torch.cat([stack[0], stack[{e}]], 1)[:, :D]", "{a} + rows[{e}, 0]",
    "{a}[:, :2] @ stack[{e}][:2]", "{a} + stack[{e}].max(0).values", "F.layer_norm({a}, (D,), rows[{e}], rows[0])",
    "{a} @ (stack[{e}] + stack[0])", "{a} @ (stack[{e}] * rows[{e}])", 'torch.einsum("nd,df->nf", {a}, stack[{e}])',
    "{a} + stack[{e}].diagonal()", "torch.bmm({a}[None].expand(EXPERTS, -1, -1), stack).sum(0)",
    "sum({a} @ each for each in stack)",
    'torch.einsum("nd,edf->nf", {a}, stack)', "{a} @ stack.mean(0)",
)  # fmt: skip
LOOPS = (
    "{k} = {k}.index_add(0, i, ({a}[i] @ stack[e] + rows[e]) * {a}[i])", "{k}.index_add_(0, i, torch.tanh({a}[i] @ stack[e]))",
    "{k}[i] = {a}[i] @ stack[e] + rows[e]", "{k}[i] += F.linear({a}[i], stack[e], rows[e])",
    "{k} = {k} + ({o} == e)[:, None] * ({a} @ stack[e])",
)  # fmt: skip
LOSSES = (
    "{a}.sum()", "{a}.square().sum()", "({a} * 2).tanh().sum()", "F.mse_loss({a}, {a}.detach() * 0.5)", "{a}.square().mean()",
)  # fmt: skip


@dataclass(eq=False)
class Program:
    """A program under way: how many rows each name has, and its statements."""

    dice: random.Random
    names: dict[str, int]
    lines: list[str] = field(default_factory=list)

    def _words(self, name: str) -> dict[str, Any]:
        dice, count = self.dice, self.names[name]
        return {
            "a": name, "k": f"v{len(self.lines)}", "e": dice.randrange(-EXPERTS, EXPERTS),
            "c": dice.choice([other for other, n in self.names.items() if n == count]),
            "i": f"torch.tensor({[dice.randrange(count) for _ in range(count)]})",
            "p": f"torch.tensor({dice.sample(range(count), count)})",
            "m": f"torch.tensor({[dice.random() < 0.6 for _ in range(count)]})",
            "o": f"torch.tensor({[dice.randrange(EXPERTS) for _ in range(count)]})",
        }  # fmt: skip

    def add(self) -> None:
        """One statement more."""
        dice = self.dice
        name = dice.choice([*self.names])
        words, count = self._words(name), self.names[name]
        way = dice.random()
        if way < 0.6:
            line = "{k} = " + dice.choice(SAME)
        elif way < 0.75:
            turn = dice.choice(LOOPS)
            line = f"{{k}} = torch.zeros({count}, D)\nfor e in range(EXPERTS):\n    i = ({{o}} == e).nonzero()[:, 0]\n    {turn}"
        else:
            line, count = self._others(count)
        self.names[words["k"]] = count
        self.lines.append(line.format(**words))

    def _others(self, count: int) -> tuple[str, int]:
        """What has another number of rows."""
        dice = self.dice
        chosen = [dice.randrange(count) for _ in range(dice.randint(1, count + 2))]
        mask = [i == 0 or dice.random() < 0.6 for i in range(count)]
        into = [dice.randrange(5) for _ in range(count)]
        return dice.choice([
            (f"{{k}} = {{a}}[torch.tensor({chosen})]", len(chosen)), (f"{{k}} = {{a}}[torch.tensor({mask})]", sum(mask)),
            (f"{{k}} = F.embedding(torch.tensor({chosen}), {{a}})", len(chosen)),
            (f"{{k}} = torch.zeros(5, D).index_add(0, torch.tensor({into}), {{a}})", 5),
            ("{k} = {a}.repeat_interleave(2, 0)", 2 * count), ("{k} = torch.cat([{a}, x], 0)", count + self.names["x"]),
            ("{k} = {a}.t() @ {c}", D), ("{k} = {a}[{a}.detach().sum(1).argsort()[:1]]", 1),
            (f"{{k}} = {{a}}.split([1, {count - 1}])[0] * 2", 1), ("{k} = {a}.topk(1, 0).values", 1),
        ])  # fmt: skip


def program(seed: int) -> tuple[int, str]:
    """How many tokens there are, and what is computed of them."""
    dice = random.Random(seed)
    count = dice.choice((5, 6, 7, 8))
    made = Program(dice, {"x": count, "y": count})
    for _ in range(dice.randint(4, 10)):
        made.add()
    results = dice.sample([*made.names][2:], 3)
    lines = [*made.lines, "loss = " + " + ".join(dice.choice(LOSSES).format(a=name) for name in results)]
    return count, "\n".join(lines)


def values(seed: int, count: int) -> list[Tensor]:
    """What the names stand for, in float64."""
    source = torch.Generator().manual_seed(seed)
    shapes = (count, D), (count, D), (D, D), (D,), (EXPERTS, D, D), (EXPERTS, D)
    return [torch.randn(shape, generator=source, dtype=torch.float64) / 2 for shape in shapes]


def layouts(seed: int, grid: bool) -> list[list[Any]]:
    """How they lie: tokens and stacks mostly cut by their first dim."""
    dice, found = random.Random(seed + 7), []
    for place, name in enumerate(NAMES):
        inner = S(1) if name not in ("b",) else S(0)
        if grid:
            found.append([dice.choice((S(0), S(0), R)), dice.choice((inner, R, S(0)))])
        else:
            first = place not in (2, 3) and dice.random() < 0.85
            found.append([S(0) if first else dice.choice((inner, R))])
    return found


def ran(source: str, given: Sequence[Tensor]) -> list[Tensor | None]:
    """The loss and the gradients of a program."""
    names: dict[str, Any] = dict(zip(NAMES, given, strict=True), torch=torch, F=F, D=D, EXPERTS=EXPERTS)
    exec(source, names)
    names["loss"].backward()
    return [names["loss"].detach(), *(x.grad for x in given)]


def wrong(seeds: Sequence[int], grid: bool, fault: str = "") -> list[tuple[int, str]]:
    """On a rank: programs with another loss or gradient than on one card, and those that stop there alone."""
    torch.set_default_dtype(torch.float64)
    warnings.simplefilter("ignore")
    size = oc.get_world_size()
    ranks = torch.arange(size)
    mesh = oc.ProcessMesh(ranks.view(2, -1) if grid else ranks, ["dp", "ep"][: 1 + grid])
    found = []
    for seed in seeds:
        count, source = program(seed)
        plain = [torch.nn.Parameter(x) for x in values(seed, count)]
        expected = ran(source, plain)
        lie = layouts(seed, grid)
        parts = [
            torch.nn.Parameter(oc.shard_tensor(x.detach().clone(), mesh, p)) for x, p in zip(plain, lie, strict=True)
        ]
        with planted(fault):
            try:
                made = ran(source, parts)
            except Exception as why:
                found.append((seed, f"{type(why).__name__}: {str(why)[:300]}"))
                continue
        far = [name for name, a, b in zip(("loss", *NAMES), made, expected, strict=True) if not _same(a, b)]
        if far:
            found.append((seed, f"other than on one card: {', '.join(far)}"))
    torch.set_default_dtype(torch.float32)
    return found


def step_of(source: str) -> Any:
    """The same as a function of what the names stand for."""
    lines = "\n".join(f"    {line}" for line in source.split("\n"))
    made: dict[str, Any] = {"torch": torch, "F": F, "D": D, "EXPERTS": EXPERTS}
    exec(f"def step({', '.join(NAMES)}):\n{lines}\n    loss.backward()\n    return loss.detach()", made)
    return made["step"]


def replayed_wrong(seeds: Sequence[int], grid: bool, fault: str = "") -> list[tuple[int, str]]:
    """On a rank: the same of programs that are recorded at their second call; what a recording refuses is right, and counted."""
    torch.set_default_dtype(torch.float64)
    ranks = torch.arange(oc.get_world_size())
    mesh = oc.ProcessMesh(ranks.view(2, -1) if grid else ranks, ["dp", "ep"][: 1 + grid])
    found = []
    for seed in seeds:
        count, source = program(seed)
        lie = layouts(seed, grid)
        with planted(fault):
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    warnings.filterwarnings("error", ".*(was|compared|as it is).*")
                    how = _replays(seed, count, source, mesh, lie)
            except RecordingError as why:
                how = f"{REFUSED}{str(why)[:200]}"
            except Exception as why:
                how = f"{type(why).__name__}: {str(why)[:300]}"
        if how:
            found.append((seed, how))
    torch.set_default_dtype(torch.float32)
    return found


def _replays(seed: int, count: int, source: str, mesh: Any, lie: Sequence[Any]) -> str:
    """What is wrong at which call."""
    step = step_of(source)
    parts = [torch.nn.Parameter(oc.shard_tensor(x, mesh, p)) for x, p in zip(values(seed, count), lie, strict=True)]
    recorded = oc.to_static(step)
    for call in range(CALLS):
        new = values(seed + 1000 * call, count)
        with torch.no_grad():
            for x, value, p in zip(parts, new, lie, strict=True):
                x.copy_(oc.shard_tensor(value, mesh, p))
                x.grad = None
        plain = [torch.nn.Parameter(x) for x in new]
        expected, made = step(*plain), recorded(*parts)
        pairs = [(made, expected), *((a.grad, b.grad) for a, b in zip(parts, plain, strict=True))]
        far = [name for name, (a, b) in zip(("loss", *NAMES), pairs, strict=True) if not _same(a, b)]
        if far:
            return f"call {call + 1}: other than on one card: {', '.join(far)}"
    return ""


def _same(mine: Any, expected: Tensor | None) -> bool:
    if mine is None or expected is None:
        return mine is expected
    return torch.allclose(oc.unshard(mine.detach()), expected, rtol=1e-9, atol=1e-9, equal_nan=True)


def run(
    seeds: Sequence[int], ranks: int, grid: bool = False, fault: str = "", recorded: bool = False
) -> dict[int, str]:
    """The programs of these seeds that are wrong on some rank, and how."""
    task = replayed_wrong if recorded else wrong
    return {seed: how for rank in run_ranks(task, ranks, [*seeds], grid, fault, timeout=580) for seed, how in rank}


if __name__ == "__main__":
    first, last, count = (int(word) for word in sys.argv[1:4])
    bad: dict[int, str] = {}
    for begin in range(first, last, 20):
        bad |= run(range(begin, min(last, begin + 20)), count, "grid" in sys.argv, recorded="recorded" in sys.argv)
    refused = {seed for seed, how in bad.items() if how.startswith(REFUSED)}
    print(f"{len(refused)} are not recorded: {Counter(bad.pop(seed)[:90] for seed in refused)}")
    for seed, how in bad.items():
        print(f"seed {seed}: {how}\n{program(seed)[1]}\n")
    print(f"{last - first} programs on {count} ranks, {len(bad)} wrong")
    sys.exit(bool(bad))
