"""Draw a program: each statement is tried on plain tensors as it is drawn, so that what torch refuses never gets in."""

from __future__ import annotations

import random
import warnings
from typing import Any

import torch
from torch import Tensor

from fuzz import layers, losses, statements, training
from fuzz.program import MESHES, Program, axes_of, helpers
from fuzz.twin import double, one_card

LARGEST = 1e4  # what grows beyond it is not drawn


class Draw:
    """A program as it grows.

    Attributes:
        r: its random numbers; ``space``: its variables on one card, as they are in the first step.
        setup, body: statements; ``cuts``: those that lay parameters out, which run last in the setup.
        floats: names of floating-point variables; ``writes``: statements that write in place.
    """

    def __init__(self, seed: int, attempt: int, ranks: tuple[Any, ...]) -> None:
        self.r = random.Random(f"{seed}/{attempt}")
        self.ranks = ranks
        self.space = helpers(None)
        self.setup: list[str] = []
        self.cuts: list[str] = []
        self.body: list[str] = []
        self.floats: list[str] = []
        self.count = 0

    def new(self, prefix: str = "v") -> str:
        """A name that is not taken."""
        self.count += 1
        return f"{prefix}{self.count}"

    def seed(self) -> int:
        """A seed for the program's data, far from any other: equal numbers make ties, which rounding decides."""
        return 10 * self.r.randrange(10**6)

    def placements(self, ndim: int, pending: bool = True) -> str:
        """One placement for each axis of the mesh, as text."""
        found = []
        for _ in range(axes_of(self.ranks)):
            draw = self.r.random()
            if ndim and draw < 0.55:
                found.append(f"Shard({self.r.randrange(ndim)})")
            else:
                found.append("Partial()" if pending and draw > 0.88 else "Replicate()")
        return ", ".join(found)

    def prepare(self, line: str) -> bool:
        """Add a statement to the setup; whether torch takes it."""
        return self._add(line, self.setup)

    def say(self, line: str) -> bool:
        """Add a statement to the body; whether torch takes it."""
        return self._add(line, self.body)

    def make(self, expression: str) -> str | None:
        """Add ``name = expression``; the name, if torch takes it and the value is of use."""
        name = self.new()
        if not self._add(f"{name} = {expression}", self.body):
            return None
        value = self.space[name]
        if not isinstance(value, Tensor) or not _useful(value):
            self.body.pop()
            del self.space[name]
            return None
        if value.is_floating_point():
            self.floats.append(name)
        return name

    def _add(self, line: str, to: list[str]) -> bool:
        try:
            with double(), torch.random.fork_rng(devices=[]), warnings.catch_warnings():
                exec(line, self.space)
        except Exception:  # whatever torch has against it
            return False
        to.append(line)
        return True

    def pick(self, *dims: int) -> str | None:
        """A floating-point variable, of so many dims if any are given; rather a late one."""
        fit = [n for n in self.floats if not dims or self.space[n].dim() in dims]
        if not fit:
            return None
        return self.r.choice(fit[-4:] if self.r.random() < 0.7 else fit)

    def shape(self, name: str) -> list[int]:
        """The shape of a variable."""
        return list(self.space[name].shape)

    def like(self, name: str) -> str | None:
        """A variable that broadcasts with another one, or a number."""
        shape = self.space[name].shape
        fit = [n for n in self.floats if _broadcasts(self.space[n].shape, shape)]
        return self.r.choice(fit) if fit else None

    def program(self, seed: int) -> Program:
        """What was drawn."""
        setup = [*self.setup, *self.cuts]
        return Program(seed, self.ranks, tuple(setup), tuple(self.body), self.r.randint(2, 3), self.r.random() < 0.6)


def _broadcasts(a: torch.Size, b: torch.Size) -> bool:
    try:
        return torch.broadcast_shapes(a, b) == b
    except RuntimeError:
        return False


def _useful(value: Tensor) -> bool:
    if value.numel() > 2000 or value.dim() > 5 or value.is_complex():
        return False
    return not value.is_floating_point() or bool((value.detach().abs() < LARGEST).all())


def draw(seed: int, ranks: tuple[Any, ...] | None = None) -> Program:
    """The program of a seed; ``ranks``: on this mesh rather than on the seed's."""
    ranks = ranks or MESHES[seed % len(MESHES)]
    for attempt in range(50):
        program = _settled(_drawn(seed, attempt, ranks))
        if program is not None:
            return program
    raise RuntimeError(f"seed {seed} gives no program that runs on one card")


def _drawn(seed: int, attempt: int, ranks: tuple[Any, ...]) -> Program:
    d = Draw(seed, attempt, ranks)
    d.prepare("model = nn.ModuleDict()")
    for _ in range(d.r.randint(1, 3)):
        statements.data(d)
    for _ in range(d.r.randint(0, 2)):
        training.parameter(d)
    for _ in range(d.r.randint(4, 12)):
        chance = d.r.random()
        if chance < 0.3:
            layers.layer(d)
        elif chance < 0.42:
            statements.write(d)
        else:
            statements.step(d)
    names = [name for _ in range(d.r.randint(1, 2)) if (name := losses.loss(d))]
    training.train(d, names)
    return d.program(seed)


def _settled(program: Program) -> Program | None:
    """The program without the writes that autograd does not forgive; None if it does not run on one card even so."""
    for _ in range(8):
        outcome, _ = one_card(program)
        if outcome.kind == "right":
            return program
        writes = [i for i, line in enumerate(program.lines) if statements.WRITES.search(line)]
        if not writes:
            return None
        program = program.without(writes[-1:])
    return None
