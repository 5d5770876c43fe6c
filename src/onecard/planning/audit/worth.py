"""What an audited job takes, whether it fits, and the one change of its plan that would gain most."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from onecard.errors import OnecardError, PlanError
from onecard.machine.cost import Machine
from onecard.planning.audit.audit import Audit
from onecard.planning.audit.write import LIBRARIES, write
from onecard.planning.job import JobCost, RankCost
from onecard.planning.plan import Plan
from onecard.planning.price import price
from onecard.planning.transformer import Transformer

LIMIT = 60.0  # seconds for changes; each that cuts the model anew records blocks
LARGEST = 2 * 10**5  # stages times microbatches that a schedule is simulated for

# How a library says a field of the plan, where it has a setting of its own for it.
_SAYS: dict[str, dict[str, str]] = {
    "megatron": {
        "tp": "--tensor-model-parallel-size {}", "pp": "--pipeline-model-parallel-size {}", "microbatch": "--micro-batch-size {}",
        "virtual": "--num-virtual-stages-per-pipeline-rank {}", "zero": "--use-distributed-optimizer",
        "overlap": "--overlap-grad-reduce", "sequence_parallel": "--sequence-parallel",
        "recompute": "--recompute-granularity {}",
    },
    "deepspeed": {
        "tp": '"autotp_size": {}', "microbatch": '"train_micro_batch_size_per_gpu": {}', "zero": '"stage": {}',
        "microbatches": '"gradient_accumulation_steps": {}', "overlap": '"overlap_comm": true', "compiled": '"deepcompile": true',
    },
    "torchtitan": {
        "tp": "tensor_parallel_degree = {}", "pp": "pipeline_parallel_degree = {}", "compiled": "[compile] enable = true",
        "recompute": '[activation_checkpoint] mode = "{}"', "microbatch": "local_batch_size = {}",
    },
    "fsdp": {"tp": "parallelism_config_tp_size: {}", "recompute": "fsdp_activation_checkpointing: true"},
}  # fmt: skip
_WITHOUT = {  # what is left out, or said otherwise, for the value that is none
    ("megatron", "recompute", "none"): "without --recompute-granularity",
    ("megatron", "sequence_parallel", False): "without --sequence-parallel",
    ("megatron", "zero", 0): "without --use-distributed-optimizer",
    ("fsdp", "recompute", "none"): "fsdp_activation_checkpointing: false",
}


@dataclass(frozen=True)
class Alternative:
    """Another plan for as many ranks and sequences, and what a step of it takes.

    Attributes:
        what: in words: fields of the plan; says: the same as the library's settings, "" where it has none.
    """

    what: str
    says: str
    plan: Plan
    cost: JobCost


@dataclass(frozen=True)
class Worth:
    """What a job takes.

    Attributes:
        cost: None where it is not priced; why_not: the reason.
        best: the change that gains most; None if none gains a hundredth.
        tried: how many were priced; all_of_it: whether time was left for all.
    """

    cost: JobCost | None
    why_not: str = ""
    best: Alternative | None = None
    tried: int = 0
    all_of_it: bool = True

    def as_json(self) -> dict[str, Any]:
        """All of it, as ``json.dumps`` takes it."""
        made: dict[str, Any] = {
            "why_not": self.why_not,
            "tried": self.tried,
            "all_of_it": self.all_of_it,
        }
        if self.cost is not None:
            made["cost"] = _figures(self.cost)
        if self.best is not None:
            best = self.best
            made["best"] = {
                "what": best.what,
                "says": best.says,
                "plan": asdict(best.plan),
                "cost": _figures(best.cost),
            }
        return made

    @property
    def too_large(self) -> tuple[RankCost, ...]:
        """The kinds of ranks on which the job does not fit."""
        if self.cost is None or not self.cost.machine.capacity:
            return ()
        return tuple(rank for rank in self.cost.ranks if rank.peak > self.cost.machine.capacity)


def _figures(cost: JobCost) -> dict[str, Any]:
    ranks = [
        {
            "name": r.name,
            "ranks": r.ranks,
            "terms": dict(r.terms),
            "memory": dict(r.memory),
            "peak": r.peak,
            "sent": dict(r.sent),
        }
        for r in cost.ranks
    ]
    return {
        "machine": cost.machine.name, "capacity": cost.machine.capacity, "seconds": cost.seconds, "terms": dict(cost.terms),
        "tokens_per_second": cost.tokens_per_second, "mfu": cost.mfu, "hfu": cost.hfu, "peak": cost.peak, "fits": cost.fits,
        "ranks": ranks,
    }  # fmt: skip


def worth(
    audit: Audit,
    machine: Machine,
    search: bool = True,
    say: Callable[[str], None] = lambda text: None,
    limit: float = LIMIT,
) -> Worth:
    """Prices a job, and the plans next to its own.

    Args:
        search: whether changes are tried, too.
        say: told what is being priced.
        limit: seconds after which no further change is tried.
    """
    model = audit.transformer
    if model is None:
        return Worth(
            None, "no file says the model's sizes; name a Hugging Face config.json beside it, or --model llama3-8b"
        )
    if audit.mistakes:
        fatal = [str(found) for found in audit.plan.check(model) if found.kind == "mistake"]
        if fatal:
            return Worth(None, f"the plan cannot be priced as it is: {fatal[0]}")
    plan = audit.plan
    say(f"pricing {plan.world:,} ranks")
    cost = _priced(model, plan, machine)
    if isinstance(cost, str):
        return Worth(None, cost)
    if not search:
        return Worth(cost)
    begin, tried, best = time.monotonic(), 0, None
    every = [other for other in dict.fromkeys(neighbours(plan, model)) if _can_say(audit.library, plan, other, model)]
    for other in every:
        if time.monotonic() - begin > limit:
            break
        say(f"pricing {_words(plan, other)} ({tried + 1} of {len(every)})")
        found = _priced(model, other, machine)
        tried += 1
        if not isinstance(found, str) and _better(found, best or cost):
            best = found
    change = None
    if best is not None and (best.seconds < 0.99 * cost.seconds or not cost.fits):
        change = Alternative(_words(plan, best.plan), _settings(audit.library, plan, best.plan), best.plan, best)
    return Worth(cost, "", change, tried, tried == len(every))


def _priced(model: Transformer, plan: Plan, machine: Machine) -> JobCost | str:
    """The price, or why there is none."""
    if plan.pp * plan.virtual * plan.microbatches > LARGEST:
        return f"{plan.pp * plan.virtual} stages x {plan.microbatches:,} microbatches are more than are simulated"
    mistakes = [found for found in plan.check(model) if found.kind == "mistake"]
    if mistakes:
        return str(mistakes[0])
    try:
        return price(model, plan, machine)
    except OnecardError as error:
        return str(error).splitlines()[0]
    except Exception as error:  # files of strangers: what they ask of a price must not end in a traceback
        return f"the price failed: {type(error).__name__}: {(str(error) or '-').splitlines()[0]}; please report it"


def _better(one: JobCost, other: JobCost) -> bool:
    """What fits is better than what does not; else what takes less time, or less memory where neither fits."""
    if one.fits != other.fits:
        return one.fits
    return one.seconds < other.seconds if one.fits else one.peak < other.peak


def neighbours(plan: Plan, model: Transformer) -> Iterator[Plan]:
    """Plans for as many ranks and sequences that differ in one thing, those first whose price is soon known."""
    for change in _changes(plan):
        fields = {"stages": ()} | change if {"pp", "virtual"} & {*change} else change
        try:
            other = replace(plan, **fields)
        except PlanError:
            continue
        fits = all(found.kind != "mistake" for found in other.check(model))
        if other != plan and other.world == plan.world and other.batch == plan.batch and fits:
            yield other


def _changes(plan: Plan) -> Iterator[dict[str, Any]]:
    """Fields that change together, so that ranks and sequences stay as many."""
    one = {"VPP": "1F1B", "BFS": "F-then-B"}.get(plan.schedule, plan.schedule)
    if plan.dp > 1:
        yield from ({"zero": zero, "replicas": plan.replicas if zero else 1} for zero in (0, 1, 2, 3))
        yield {"overlap": True}
    if plan.pp > 1:
        yield from ({"virtual": virtual, "schedule": "VPP" if virtual > 1 else "1F1B"} for virtual in (1, 2, 3, 4))
        yield {"schedule": "ZBH1", "virtual": plan.virtual if plan.schedule == "VPP" else 1}
    steps = plan.microbatches
    for dp, pp in ((plan.dp * 2, plan.pp // 2), (plan.dp // 2, plan.pp * 2)):
        if pp and dp and plan.dp * plan.pp == dp * pp:
            virtual = {} if plan.virtual == 1 and pp > 1 else {"virtual": 1, "schedule": one}
            yield {"dp": dp, "pp": pp, "microbatches": steps * plan.dp // dp, "replicas": 1, "ep": 1, **virtual}
    yield {"compiled": True}
    yield from ({"recompute": again, "recompute_blocks": 0} for again in ("none", "selective", "full"))
    for dp, tp in ((plan.dp * 2, plan.tp // 2), (plan.dp // 2, plan.tp * 2)):
        if tp and dp and plan.dp * plan.tp == dp * tp:
            along = {"sequence_parallel": plan.sequence_parallel and tp > 1}
            yield {"dp": dp, "tp": tp, "microbatches": steps * plan.dp // dp, "replicas": 1, "ep": 1, **along}
    if plan.tp > 1:
        yield {"sequence_parallel": not plan.sequence_parallel}
    yield {"microbatch": plan.microbatch * 2, "microbatches": steps // 2}
    if plan.microbatch % 2 == 0:
        yield {"microbatch": plan.microbatch // 2, "microbatches": steps * 2}


def _can_say(library: str, plan: Plan, other: Plan, model: Transformer) -> bool:
    """Whether a library's file says a change; numbers of microbatches the program may say."""
    if library not in LIBRARIES:
        return True
    given = {*write(library, plan, model).cannot, "microbatch", "microbatches"}
    return {*write(library, other, model).cannot} <= given


def _words(plan: Plan, other: Plan) -> str:
    """The fields that differ, those that only follow left out where others say them."""
    names = [line.partition(":")[0] for line in plan.diff(other) if not line.startswith("so ")]
    named = [name for name in names if name not in ("replicas", "stages", "schedule")] or names
    return ", ".join(f"{name}={getattr(other, name)}" for name in named)


def _settings(library: str, plan: Plan, other: Plan) -> str:
    """The change as a library's settings."""
    said = []
    for line in plan.diff(other):
        name = line.partition(":")[0]
        value = getattr(other, name, None)
        form = _WITHOUT.get((library, name, value)) or _SAYS.get(library, {}).get(name)
        if form is not None:
            said.append(form.format(value))
    return ", ".join(said)
