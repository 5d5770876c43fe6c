"""Which plan a plain model runs under on some ranks: the fastest of those that fit, by ``oc.price``.

The batch is divided over all ranks. What is chosen is what ZeRO divides and whether blocks are computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor, nn

from onecard.errors import PlanError
from onecard.machine.cost import Machine
from onecard.planning.fold import fold
from onecard.planning.job import JobCost, bytes_in_words, seconds_in_words
from onecard.planning.plan import Plan, Recompute
from onecard.planning.price import price

ALIKE = 0.005
"""Share of a step by which two plans are no different."""


@dataclass(frozen=True)
class Chosen:
    """Plans with their prices, the best one first.

    Attributes:
        costs: of those that fit, fastest first; then of those that do not, smallest first.
        limit: bytes of each rank; 0: not known.
    """

    costs: tuple[JobCost, ...]
    limit: int

    @property
    def plan(self) -> Plan:
        """The best one."""
        return self.costs[0].plan

    def __str__(self) -> str:
        best, ranks = self.costs[0], self.plan.world
        lines = [f"{ranks} rank{'s' * (ranks > 1)}, {_words(best.plan)}: {seconds_in_words(best.seconds)} a step on "
                 f"{best.machine.name or 'a machine by default'}, {bytes_in_words(best.peak)} on every rank"]  # fmt: skip
        for cost in self.costs[1:]:
            lines.append(f"  not {_words(cost.plan)}: {self._why(cost, best)}")
        return "\n".join(lines)

    def _why(self, cost: JobCost, best: JobCost) -> str:
        if self.limit and cost.peak > self.limit:
            return f"{bytes_in_words(cost.peak)}, {bytes_in_words(cost.peak - self.limit)} too much"
        more = cost.seconds / best.seconds - 1
        slower = f"{more:.0%} slower" if more >= 0.005 else "as fast"
        return f"{slower}, {bytes_in_words(cost.peak)}"


def choose(
    model: nn.Module,
    batch: Sequence[Tensor],
    loss: Callable[..., Tensor],
    ranks: int,
    machine: Machine,
    memory: int = 0,
) -> Chosen:
    """The plans of a plain model on some ranks, best first.

    Args:
        model: runs on one card; batch: what one step of it is given, its rows first.
        loss: (model, *batch) -> the loss.
        ranks: that divide the batch.
        machine: on what it is priced.
        memory: bytes of each rank; 0: what the machine has.

    Raises:
        PlanError: none fits; says which comes closest, and what is missing.

    Example:
        >>> import torch
        >>> model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 1))
        >>> loss = lambda model, x: model(x).square().mean()
        >>> choose(model, [torch.zeros(8, 64)], loss, 2, Machine.preset("A100")).plan.dp
        2
    """
    limit = memory or int(machine.capacity or 0)
    dtype = next((str(p.dtype).removeprefix("torch.") for p in model.parameters()), "float32")
    base = replace(
        pure(ranks), microbatch=max(1, -(-len(batch[0]) // ranks)), parameters=dtype, compute=dtype, gradients=dtype,
        states=dtype, master=False,
    )  # fmt: skip
    again: tuple[Recompute, ...] = ("none", "full") if fold(model) else ("none",)
    stages = (0, 1, 2, 3) if ranks > 1 else (0,)
    plans = [replace(base, recompute=recompute, zero=zero) for recompute in again for zero in stages]
    found = [price(model, plan, machine, batch=tuple(batch), loss=loss) for plan in plans]
    fits = [c for c in found if not limit or c.peak <= limit]
    fastest = min((c.seconds for c in fits), default=0.0)
    fits.sort(
        key=lambda c: max(0.0, c.seconds / fastest - 1 - ALIKE)
    )  # stable: of those alike the one that divides least
    others = sorted((c for c in found if limit and c.peak > limit), key=lambda c: c.peak)
    if not fits:
        least = others[0]
        raise PlanError(
            f"nothing fits into {bytes_in_words(limit)} on {ranks} rank(s): {_words(least.plan)} takes least, "
            f"{bytes_in_words(least.peak)} ({_largest(least)}). More ranks, or a smaller batch"
        )
    return Chosen((*fits, *others), limit)


def _largest(cost: JobCost) -> str:
    memory = max(cost.ranks, key=lambda rank: rank.peak).memory
    name = max(memory, key=lambda name: memory[name])
    return f"{memory[name] / max(1, sum(memory.values())):.0%} of it {name}"


def _words(plan: Plan) -> str:
    zero = f" with ZeRO-{plan.zero}" if plan.zero else ""
    return f"data parallelism{zero}{', blocks computed again' if plan.recompute == 'full' else ''}"


def pure(ranks: int) -> Plan:
    """Data parallelism over all ranks: what any program can have."""
    return Plan(dp=ranks, per_host=0, parameters="float32", compute="float32")
