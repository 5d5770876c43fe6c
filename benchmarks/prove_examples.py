"""All examples and seeds that train, under ``onecard.prove``: the verdict, and of one card's values how many the ranks had.

    python benchmarks/prove_examples.py                       # all, in some minutes
    python benchmarks/prove_examples.py --only pipeline       # those with a word in their name

Exit status 1 if one of them is not equal, or has a share below 98 %. Widths are small, degrees and remainders are the examples'.
Left out: manual_demos_004, whose sizes are those of its world, so that one card has other ones.
"""

from __future__ import annotations

import copy
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro

import onecard as oc
from onecard.errors import ProofError
from onecard.proof.script import Script

EXAMPLES = Path(__file__).parents[1] / "examples"
LEAST = 0.98
"""The share of one card's values that is asked for."""


@dataclass(frozen=True)
class Example:
    """One program.

    Attributes:
        path: in ``examples``; flags: of its command line; small: more of them, which make it small.
        world: its ranks; plan: for a program that knows of no ranks.
        against: flags of the same program as one card runs it, or a function; none: as the ranks run it.
    """

    path: str
    flags: str = ""
    small: str = ""
    world: int = 2
    against: str | Callable[[], Any] = ""
    plan: oc.Plan | None = None

    @property
    def name(self) -> str:
        """What it is called in the table."""
        return f"{self.path} {self.flags}".strip()

    def prove(self, **given: Any) -> oc.Proof:
        """Its first two steps on all ranks and on one card."""
        with tempfile.TemporaryDirectory() as folder:

            def script(flags: str) -> Script:
                return Script(EXAMPLES / self.path, f"{flags} {self.small}".replace("FOLDER", folder).split())

            against = script(self.against) if isinstance(self.against, str) and self.against else self.against or None
            return oc.prove(
                script(self.flags), world=None if self.plan else self.world, against=against, plan=self.plan,
                steps=2, **given,
            )  # fmt: skip


_002 = "--seq-len 4 --hidden 8 --inner 16 --num-samples 8"
_003 = "--inner-size 16 --batch-num 2"
_GPT = "--steps 2 --d-model 16 --seq-len 8 --eval-batches 1 --sample-bytes 4 --out FOLDER"


def _seed(name: str, flags: str = "", small: str = _003, world: int = 2, **more: Any) -> Example:
    return Example(f"seeds/{name}.py", flags, small, world, **more)


def two_nets(program: str) -> None:
    """Seed 000 by hand gives each layer its rank's half, so that one card runs this in its place: its net twice."""
    sys.path.insert(0, str(EXAMPLES / "seeds"))
    import model_parallel_000 as seed

    rng = np.random.RandomState(1024)
    weights = seed.first_weights(rng)
    static = program == "static"
    data, fc3, rate = (seed.static_data(), 0.1, 0.1) if static else (seed.dynamic_data(rng), 0.0, 0.001)
    net = seed.SimpleNet(*weights, fc3)
    nets = [copy.deepcopy(net), net]
    with torch.no_grad():
        nets[0](torch.zeros(seed.batch_size, 2, dtype=torch.int64))
    optimizers = [torch.optim.SGD(net.parameters(), lr=rate) for net in nets]
    for _, batch in zip(range(5), data, strict=False):
        for net, optimizer in zip(nets, optimizers, strict=True):
            seed.train_batch(torch.from_numpy(batch), net, optimizer)


ALL: tuple[Example, ...] = (
    Example("gpt/train.py", "--mesh tp=2", _GPT, against="--mesh tp=1"),
    Example("gpt/train.py", "--mesh dp=2,tp=2", _GPT, 4, "--mesh dp=1,tp=1"),
    Example("auto/classifier.py", "", "--out FOLDER", plan=oc.Plan(dp=2)),
    Example("huggingface.py", against="--one-card"),
    Example("moe/train.py", "", "--steps 2 --time 8 --out FOLDER"),
    *(_seed(f"{name}_002", "", _002, 4) for name in ("data_parallel", "tensor_parallel")),
    _seed("data_parallel_002", "--shard-reading", _002, 4),
    *(_seed(f"{name}_002", "", _002, 8) for name in ("pipeline_parallel", "hybrid_parallel")),
    *(_seed(f"semi_auto_{name}_parallel_003") for name in ("data", "model", "pipeline")),
    *(_seed("semi_auto_group_sharded_003", f"--stage {stage}") for stage in (1, 2, 3)),
    *(_seed("model_parallel_000", f"--program {program}", "") for program in ("static", "dynamic")),
    *(
        _seed("manual_model_parallel_000", f"--program {program}", "", against=partial(two_nets, program))
        for program in ("static", "dynamic")
    ),
    *(_seed("manual_classifier_001", f"--how {how}", "--samples 60 --epochs 1") for how in ("gather", "alltoall")),
    _seed("manual_classifier_001", "--how never-gathered", "--samples 60 --epochs 1"),
    *(_seed(f"manual_{name}_parallel_003") for name in ("model", "data", "pipeline")),
    *(_seed("manual_group_sharded_003", f"--level {level}") for level in ("os", "os_g", "p_g_os")),
    _seed("static_data_parallel_003"),
    *(_seed("static_group_sharded_003", f"--stage {stage}") for stage in (1, 2, 3)),
    _seed("static_model_parallel_003"),
    _seed("static_pipeline_parallel_003"),
)


@dataclass(frozen=True)
class Options:
    """All examples and seeds that train, under ``onecard.prove``."""

    only: str = ""
    """those with this in their name"""
    missing: bool = False
    """list the values that no value of the ranks was equal to"""


def main(options: Options) -> int:
    """Prove them and print the table."""
    print("| program | ranks | verdict | values equal to one card's | share of one card's |\n|---|---|---|---|---|")
    failed = 0
    for example in ALL:
        if options.only not in example.name:
            continue
        try:
            proof = example.prove(rounding=False)
        except ProofError as fault:
            failed += 1
            print(f"| `{example.name}` | {example.world} | {fault} | - | - |", flush=True)
            continue
        said = ("equal" if proof else "NOT EQUAL") + ("" if proof.exact else ", in its own precision")
        failed += not proof or proof.share < LEAST
        print(f"| `{example.name}` | {proof.world} | {said} | {proof.compared} | {proof.share:.1%} |", flush=True)
        for line in proof.alone if options.missing else ():
            print(f"    {line}")
    return min(failed, 1)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    sys.exit(main(tyro.cli(Options)))
