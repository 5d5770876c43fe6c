"""Whether a plan and a model go together: what cannot be, what costs, and what has no effect, each with what works. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["mistake", "cost", "idle"]
SIZES = ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "sequence", "experts", "parameters")


@dataclass(frozen=True, slots=True)
class Finding:
    """Something about a plan.

    Attributes:
        kind: "mistake": the job does not start, or is not what is meant; "cost": it runs, and takes more than it has to;
            "idle": a setting that changes nothing.
        about: the field.
        what: in words.
        change: what works, or what would do without the cost.
        where: file and line, where one says it.
    """

    kind: Kind
    about: str
    what: str
    change: str = ""
    where: str = ""

    def __str__(self) -> str:
        return f"{self.what}; {self.change}" if self.change else self.what


def sizes_of(model: Any) -> dict[str, int]:
    """The sizes of a ``Transformer`` that matter here."""
    sizes = {
        name: getattr(model, name)
        for name in ("layers", "hidden", "heads", "vocab", "sequence", "experts", "parameters")
    }
    return sizes | {"kv_heads": model.key_heads, "ffn": model.expert_ffn or model.inner}


def findings(plan: Any, sizes: Mapping[str, int]) -> tuple[Finding, ...]:
    """What is to be said of a plan with a model; sizes that are not given are not asked about."""
    looks = (_tensor, _sequence, _blocks, _pipeline, _states, _without_effect)
    return tuple(finding for look in looks for finding in look(plan, sizes))


def _tensor(plan: Any, sizes: Mapping[str, int]) -> Iterator[Finding]:
    names = {"heads": "query heads", "kv_heads": "key heads", "ffn": "hidden units of the MLP", "hidden": "features"}
    for name, words in names.items():
        size = sizes.get(name, 0)
        if size % plan.tp:
            works = _up_to(_divisors(math.gcd(*(sizes[n] for n in names if sizes.get(n)))), plan.tp)
            yield Finding("mistake", "tp", f"tp={plan.tp} does not divide {size} {words}", f"tp={works} does")
            break
    vocab = sizes.get("vocab", 0)
    if vocab % plan.tp:
        padded = _padded(vocab, 128 * plan.tp)
        yield Finding("mistake", "vocab", f"tp={plan.tp} does not divide {vocab:,} rows of the vocabulary",
                      f"vocab={padded} ({padded - vocab} rows of padding) does")  # fmt: skip
    if plan.per_host and plan.tp > plan.per_host:
        yield Finding("cost", "tp", f"tp={plan.tp} is more than the {plan.per_host} ranks of a host: sums of each block go "
                      "between hosts", f"tp={plan.per_host} and a larger pp stay on a host")  # fmt: skip


def _sequence(plan: Any, sizes: Mapping[str, int]) -> Iterator[Finding]:
    length = sizes.get("sequence", 0)
    if plan.cp > 1 and length % (2 * plan.cp):
        yield Finding("mistake", "cp", f"a sequence of {length} tokens has no {2 * plan.cp} equal parts: each of the {plan.cp} "
                      "ranks along cp has one from its begin and one from its end",
                      f"sequence={_padded(length, 2 * plan.cp)}")  # fmt: skip
    elif plan.sequence_parallel and length % (plan.cp * plan.tp):
        yield Finding("mistake", "sequence_parallel", f"sequence parallel: {length} tokens are no multiple of "
                      f"cp x tp = {plan.cp * plan.tp}", f"sequence={_padded(length, plan.cp * plan.tp)}")  # fmt: skip


def _blocks(plan: Any, sizes: Mapping[str, int]) -> Iterator[Finding]:
    layers, parts = sizes.get("layers", 0), plan.pp * plan.virtual
    if not layers:
        return
    if plan.stages and sum(plan.stages) != layers:
        yield Finding("mistake", "stages", f"stages have {sum(plan.stages)} blocks together, the model has {layers}",
                      "leave stages empty, or count again")  # fmt: skip
        return
    if layers < parts and not plan.stages:
        yield Finding("mistake", "pp", f"{layers} blocks cannot fill {_product(plan)} stages", f"pp={min(layers, plan.pp)}, "
                      "virtual=1 do")  # fmt: skip
        return
    largest = max(plan.stages) if plan.stages else -(-layers // parts)
    if not plan.stages and layers % parts:
        fewer = parts * largest - layers
        works = ", ".join(map(str, [n for n in _divisors(layers) if n <= 2 * parts][-3:]))
        yield Finding("cost", "pp", f"{_product(plan)} stages do not divide {layers} blocks: {parts - fewer} have {largest}, "
                      f"{fewer} have {largest - 1}, and all wait for the largest ({largest * parts / layers - 1:.0%} more)",
                      f"{works} stages have equal ones")  # fmt: skip
    if plan.recompute_blocks > largest * plan.virtual:
        yield Finding("mistake", "recompute_blocks", f"recompute_blocks={plan.recompute_blocks}, but a rank has at most "
                      f"{largest * plan.virtual} blocks", "0 is all of them")  # fmt: skip


def _pipeline(plan: Any, sizes: Mapping[str, int]) -> Iterator[Finding]:
    if 1 < plan.pp > plan.microbatches:
        share = (plan.pp - 1) / (plan.virtual * plan.microbatches + plan.pp - 1)
        yield Finding("cost", "microbatches", f"{_count(plan.microbatches, 'microbatch')} for {plan.pp} ranks of a pipeline: "
                      f"under 1F1B they wait {share:.0%} of a step", f"microbatches={4 * plan.pp} or more")  # fmt: skip
    if plan.pp > 1 and plan.zero == 3 and plan.dp > plan.replicas:
        size = sizes.get("parameters", 0) * _BYTES.get(plan.compute, 2) // (plan.pp * plan.tp)
        much = f" ({2 * plan.microbatches * size / 2**30:,.0f} GiB a rank and step)" if size else ""
        yield Finding("cost", "zero", f"ZeRO 3 in a pipeline gathers the parameters for every microbatch, {plan.microbatches} "
                      f"times forward and backward{much}", "zero=1, or zero=2, gathers once a step")  # fmt: skip


def _states(plan: Any, sizes: Mapping[str, int]) -> Iterator[Finding]:
    experts = sizes.get("experts", 0)
    if experts and experts < plan.ep:
        yield Finding(
            "mistake", "ep", f"ep={plan.ep} is more than the {experts} experts", f"ep={experts} has one on each rank"
        )
    elif experts % plan.ep:
        yield Finding("cost", "ep", f"ep={plan.ep} does not divide {experts} experts: all wait for the last rank, which has more",
                      f"ep={_up_to(_divisors(experts), plan.ep)} does")  # fmt: skip
    if "float16" in (plan.compute, plan.parameters) and not plan.master and plan.parameters == "float16":
        yield Finding(
            "mistake", "master", "parameters in float16 without a copy in float32 lose small updates", "master=True"
        )


def _without_effect(plan: Any, sizes: Mapping[str, int]) -> Iterator[Finding]:
    if plan.sequence_parallel and plan.tp == 1:
        yield Finding("idle", "sequence_parallel", "sequence parallel divides along tp, but tp=1", "leave it out")
    if plan.ep > 1 and not sizes.get("experts", 1):
        yield Finding("idle", "ep", f"ep={plan.ep} divides experts, of which the model has none", "ep=1")
    if plan.zero and plan.dp == plan.replicas:
        yield Finding("idle", "zero", f"ZeRO {plan.zero} divides over dp / replicas = 1 rank", "a larger dp, or zero=0")


def _up_to(works: list[int], wanted: int) -> int:
    return max(n for n in works if n <= wanted)


def _divisors(number: int) -> list[int]:
    small = [n for n in range(1, min(math.isqrt(number), 10**5) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def _padded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _product(plan: Any) -> str:
    return f"{plan.pp} x {plan.virtual}" if plan.virtual > 1 else str(plan.pp)


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}" + ("" if number == 1 else "es" if what.endswith("ch") else "s")


_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}
