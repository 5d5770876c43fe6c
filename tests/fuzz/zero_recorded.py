"""The programs of ``fuzz.zero`` as one recorded step, and what users change between its calls, against one card unrecorded.

PYTHONPATH=tests python -m fuzz.zero_recorded --count 200
PYTHONPATH=tests python -m fuzz.zero_recorded --seed 17 --count 1
"""

from __future__ import annotations

import random
import sys
import warnings
from typing import Any

import torch
import tyro
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import onecard as oc
from fuzz.zero import Options, Program, Run, draw, search

CALLS = 9
CHANGES = (
    "freeze", "unfreeze", "freeze by parameters", "evaluate", "evaluate with graph", "schedule", "save optimizer", "save model",
    "scale weights", "average weights", "new group", "hook", "late hook", "module hook", "no hooks", "rate", "momentum", "asked",
    "data", "detached", "drop gradients", "zero gradients",
)  # fmt: skip


class RecordedRun(Run):
    """The same model and optimizers; its step is recorded, where it is parallel."""

    def __init__(self, program: Program, parallel: bool) -> None:
        super().__init__(program, parallel)
        self.handles: list[Any] = []

    def go(self) -> None:
        """Calls of the step, and what is changed between them."""
        r = random.Random(f"recorded {self.program.seed}")
        self.between = r.choice(("", "clip", "clip", "halve", "replace", "decay"))
        self.first, self.again, self.micro = r.random() < 0.5, r.random() < 0.4, r.choice((1, 1, 2))
        step: Any = self.step
        merged = r.random() < 0.4
        if self.how:
            warnings.filterwarnings("ignore", ".*is recorded anew|.*recordings, and none fits")
            step = oc.to_static(self.step, k_steps=self._microbatches(merged))
        changes = [[r.choice(CHANGES) for _ in range(2) if r.random() < 0.2] for _ in range(CALLS)]
        for call, todo in enumerate(changes):
            x, y = self.batch(1000 * self.program.seed + call)
            for value in step(x, y):
                self.note(value)
            self.number = call
            for what in todo:
                self.do(what)

    def _microbatches(self, wanted: bool) -> int:
        """In how many a batch is cut: not where that is refused, or means something else (the statistics of batch norm)."""
        plain = self.first and self.micro == 1 and not self.again and "batch norm" not in self.program.kinds
        return 2 if wanted and plain else 1

    def step(self, x: Tensor, y: Tensor) -> list[Tensor]:
        """What is recorded."""
        if self.first:
            self.zero("none")
        found = []
        for _ in range(self.micro):
            loss = cross_entropy(self.call(x), y) / self.micro
            loss.backward()
            found.append(loss.detach())
        if self.between == "clip":
            found.append(torch.as_tensor(nn.utils.clip_grad_norm_(self.net.parameters(), 0.5)).detach())
        elif self.between:
            self.do(self.between)
        for optimizer in self.optimizers:
            optimizer.step()
        if not self.first:
            self.zero("none")
        if self.again:  # by the weights that were updated
            with torch.no_grad():
                found.append(cross_entropy(self.call(x), y))
        return found

    # -- what users do between calls -----------------------------------------------------------------------------------

    def _some(self) -> list[Any]:
        return [p for n, p in self.net.named_parameters() if n.startswith(("blocks", "scale")) and p.requires_grad]

    def hook(self) -> None:
        self.handles += [p.register_hook(lambda g: g * 0.5) for p in self._some()[:2]]

    def late_hook(self) -> None:
        def halve(p: Any) -> None:
            p.grad.mul_(0.5)

        self.handles += [p.register_post_accumulate_grad_hook(halve) for p in self._some()[:2]]

    def module_hook(self) -> None:
        self.handles.append(self.net.blocks[0].register_forward_hook(lambda module, given, out: out * 0.9))

    def no_hooks(self) -> None:
        for handle in self.handles:
            handle.remove()
        self.handles = []

    def rate(self) -> None:
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] *= 0.7

    def momentum(self) -> None:
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["weight_decay"] += 0.01

    def data(self) -> None:
        for p in self._some()[:2]:
            p.data.mul_(0.9)

    def detached(self) -> None:
        """By the layer's own name."""
        with torch.no_grad():
            self.net.blocks[0].up.weight.detach().mul_(0.9)

    def drop_gradients(self) -> None:
        for p in self._some():
            p.grad = None

    def zero_gradients(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=False)


def main(options: Options) -> int:
    """Run them and print what failed."""
    wrong = search(range(options.seed, options.seed + options.count), of=RecordedRun)
    for seed, why in wrong.items():
        print(f"seed {seed}: {why}\n{draw(seed)}\n")
    print(f"{options.count} programs from seed {options.seed} on: {len(wrong)} wrong")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options)))
