"""Random numbers that a step keeps of its batch, cut in microbatches: counts, averages, what is made of them. One card's numbers?

``python -m fuzz.kept --seed 17 --count 1 --show``: one again, with its text. ``--dp 2``: on ranks, with a plan;
``--marks``: with marks (on ranks, too).
"""

from __future__ import annotations

import gc
import random
import sys
import warnings
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
import tyro
from torch import Tensor, nn

import onecard as oc
from onecard._torch.names import tree_leaves
from onecard.errors import OnecardError
from onecard.testing import run_ranks

ROWS, CLASSES, CALLS = 8, 4, 4
OF_BATCH = (
    "l.detach()", "(o.argmax(1) == y).sum()", "(y != 0).sum()", "len(y)", "o.detach().mean()", "e.detach().sum()", "hits.mean()",
    "(e.detach() * (y != 0)).sum() / (y != 0).sum()", "hits.sum() / len(y)", "o.detach().square().sum(1).mean()", "1.0",
    "x.sum()", "x.mean()", "x.square().mean(0).sum()", "(y == 1).float().mean()", "(x * x.mean(0)).mean()",
    "o.detach().max()", "o.detach().std()", "(hits * (y == 1)).sum()", "e.detach().sum() / e.numel()",
)  # fmt: skip
STATES = ("s", "u", "v")
MADE = (
    "{a} + {b}", "{a} * {b}", "{a} / (1 + abs({b}))", "(0.1 * {t}).exp()", "{t}.abs().sqrt()", "torch.where({t} > {b}, {t}, {a})",
    "torch.minimum({t}, {s})", "{a} * 0.5", "{t}.clone()", "torch.stack([{t}, {s}]).sum()", "{t} - {a}", "({t} > {b}).float()",
    "{t} - {t} ** 2", "{a} - {a} * {b}", "{t} + {t}.exp()", "{t}.square() - {t}",
)  # fmt: skip
KEPT = (
    "{s}.add_({a})", "{s}.mul_(0.9).add_({a}, alpha=0.1)", "{s}.copy_({t})", "{s}.lerp_({t}, 0.3)", "{s}.div_(1 + abs({a}))",
    "{s} += {a}", "{s}.add_(1)", "{s}.mul_(0.5)", "{s}.sub_({s})", "{s}.fill_({t})",
)  # fmt: skip
TEMPORARY = ("n = torch.zeros(())", "n += {a}", "n = {a} + torch.zeros(())", "n.mul_(0.5)")
LOSSES = (
    "e.mean()", "e.mean()", "e.sum() / len(y)", "e.sum()", "(e * (y != 0)).sum() / (y != 0).sum()", "e.mean(0)",
    "e.sum() / e.numel()",
)  # fmt: skip
OUTPUTS = (  # of the model, with the losses of its rows and what it says of each
    (CLASSES, "cross_entropy(o, y, reduction='none')", "(o.argmax(1) == y).float()"),
    (CLASSES, "cross_entropy(o, y, reduction='none')", "(o.argmax(1) == y).float()"),
    (1, "(o - x[:, :1]).pow(2).squeeze(1)", "(o[:, 0] > 0).float()"),
    (1, "(o[:, 0] - y) ** 2", "(o > 0).float().flatten()"),
    (2, "((o - x[:, :2]) * (o - x[:, 1:3])).sum(1)", "(o.argmax(1) == y).float()"),
)
RESULTS = ("{}", "{}", "{}", "Result(({}))", "Result([{}])", "dict(enumerate(({})))")
READS = ("", "", "", "o = o * (1 + 0.01 * u)", "o = o + 0.01 * v")


def text_of(seed: int) -> str:
    """The program of a number: what stands between forward and backward, behind backward, and behind the optimizer's step."""
    draw = random.Random(seed)
    names: list[str] = []

    def value(tensor: bool = False) -> str:
        pool = [*OF_BATCH, *OF_BATCH, *STATES, *names, *names]
        if tensor:
            pool = [x for x in pool if x not in ("len(y)", "1.0")]
        return draw.choice(pool)

    def filled(form: str) -> str:
        return form.format(a=f"({value()})", b=f"({value()})", t=f"({value(True)})", s=draw.choice(STATES))

    def statement() -> str:
        kind = draw.random()
        if kind < 0.35:
            made = filled(draw.choice(MADE))
            names.append(f"w{len(names)}")
            return f"{names[-1]} = {made}"
        if kind < 0.45:
            return filled(draw.choice(TEMPORARY)) if "n" in names else _begin(names)
        return filled(draw.choice(KEPT))

    blocks = [[statement() for _ in range(draw.choice((0, 1, 2, 4)))] for _ in range(3)]
    first = [draw.choice(("u.add_(1)", "v.mul_(0.9)"))] if draw.random() < 0.2 else []
    shown = [value(True) for _ in range(draw.choice((0, 0, 1, 2)))]
    lines = [
        "def step(x, y):",
        *indented(first, 1),
        "    o = model(x)",
        *indented([r for r in [draw.choice(READS)] if r], 1),
    ]
    _, each, hits = OUTPUTS[seed % len(OUTPUTS)]
    lines += [f"    e = {each}", f"    hits = {hits}"]
    lines += [f"    l = {draw.choice(LOSSES)}"]
    for block, after in zip(blocks, ("l.backward()", "optimizer.step()", "optimizer.zero_grad()"), strict=True):
        lines += ["    with torch.no_grad():", *indented([*block, "pass"], 2), f"    {after}"]
    result = f"l.detach(), {''.join(f'torch.as_tensor({x}).clone(), ' for x in shown)}len(y),"
    return "\n".join([*lines, f"    return {draw.choice(RESULTS).format(result)}"])


def _begin(names: list[str]) -> str:
    names.append("n")
    return "n = torch.zeros(())"


def indented(lines: list[str], depth: int) -> list[str]:
    return ["    " * depth + line for line in lines]


@dataclass
class Result:
    """What a step gives back in an object."""

    found: Any


def run(text: str, k: int, seed: int, dp: int = 1, marks: bool = False) -> list[Tensor]:
    """What a program gives and leaves, call by call. ``dp``: over how many ranks the batch of a plan is cut."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, OUTPUTS[seed % len(OUTPUTS)][0]))
    mesh = oc.ProcessMesh(range(dp), ["dp"])
    if marks:
        oc.shard_layer(model, mesh)
    space: dict[str, Any] = dict(
        torch=torch, model=model, optimizer=torch.optim.SGD(model.parameters(), 0.05), cross_entropy=nn.functional.cross_entropy,
        s=torch.zeros(()), u=torch.ones(()), v=torch.full((), 0.5), Result=Result,
    )  # fmt: skip
    if marks:
        space.update({name: oc.shard_tensor(space[name], mesh, [oc.Replicate()]) for name in STATES})
    exec(compile(text, f"/kept/{seed}.py", "exec"), space)  # a name of its own, so that its lines are told apart
    options: dict[str, Any] = {"plan": oc.Plan(dp=dp, microbatches=k)} if dp > 1 and not marks else {"k_steps": k}
    step = oc.to_static(space["step"], **options) if k else space["step"]
    data, found = torch.Generator().manual_seed(seed), list[Tensor]()
    for _ in range(CALLS):
        x, y = torch.randn(ROWS, 5, generator=data), torch.randint(0, CLASSES, (ROWS,), generator=data)
        y[:: ROWS // 4] = 1
        if marks:
            x, y = (oc.shard_tensor(t, mesh, [oc.Shard(0)]) for t in (x, y))
        kept = [*_leaves(step(x, y)), *(space[name] for name in STATES), *model.parameters()]
        found += [torch.as_tensor(oc.unshard(r)).detach().clone().double() for r in kept]
    return found


def _leaves(given: Any) -> list[Any]:
    return tree_leaves(given.found if isinstance(given, Result) else given)


def judged(seed: int, dp: int = 1, marks: bool = False) -> str:
    """``equal``, ``refused``, ``told``, or ``wrong`` of a program; ``broken``, if one card cannot do it."""
    text, k = text_of(seed), (2, 4, 8 // dp)[seed % 3]
    try:
        wanted = run(text, 0, seed)
    except (RuntimeError, TypeError, AttributeError, UnboundLocalError):
        return "broken"
    if not all(x.isfinite().all() and x.abs().max() < 1e4 for x in wanted):
        return "broken"
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            found = run(text, k, seed, dp, marks)
        except OnecardError as refusal:
            return f"refused: {_short(refusal)}"
        except (RuntimeError, TypeError) as fault:
            if not marks:
                raise
            return f"broken by marks: {_short(fault)}"
    equal = all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(wanted, found, strict=True))
    if told:
        return f"told, {'equal' if equal else 'other'}: {_short(told[0].message)}"
    return "equal" if equal else "wrong"


def _short(said: Any) -> str:
    return " ".join(str(said).split())[:110]


def all_judged(seeds: list[int], dp: int = 1, marks: bool = False) -> list[str]:
    """The verdicts of several programs."""
    found = []
    for seed in seeds:
        found.append(judged(seed, dp, marks))
        if seed % 8 == 0:
            gc.collect()  # recordings are circles, and each new one looks at all objects that there are
    return found


def of_ranks(seeds: list[int], dp: int, marks: bool = False) -> list[str]:
    """The same on ranks, each of which has to say the same."""
    found = run_ranks(all_judged, dp, seeds, dp, marks, timeout=60 + 5 * len(seeds))
    return [one if len({*said}) == 1 else "wrong" for one, *said in zip(found[0], *found, strict=True)]


def main(seed: int = 0, count: int = 100, show: bool = False, dp: int = 1, marks: bool = False) -> None:
    """Run programs, and tell how many came out how."""
    torch.set_num_threads(1)
    found, words = Counter[str](), Counter[str]()
    seeds = [*range(seed, seed + count)]
    for one, what in zip(seeds, of_ranks(seeds, dp, marks) if dp > 1 else all_judged(seeds, marks=marks), strict=True):
        found[what.split(":")[0]] += 1
        words[what] += ":" in what
        if show or what == "wrong":
            print(f"--- {one}: {what}\n{text_of(one)}" if show or what == "wrong" else "")
    print(dict(found))
    if show or count > 1:
        for said, n in words.most_common(12):
            print(f"{n:4} {said}") if n else None
    sys.exit(found["wrong"] > 0)


if __name__ == "__main__":
    tyro.cli(main)
