"""Audit: what a file says of a job, as a model and a plan, and what is to be said of it. Pure data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from onecard.errors import PlanError
from onecard.planning.audit.settings import Ignored, Settings, Understood
from onecard.planning.fit import Finding
from onecard.planning.plan import Plan
from onecard.planning.transformer import Transformer


@dataclass(frozen=True)
class Given:
    """What is said beside the files.

    Attributes:
        world: how many ranks there are; per_host: on one host.
        sequence: tokens of a sequence, where the files say none.
        define: shell variables.
        change: fields of the plan or the model by their names, which count more than the files.
        model: its sizes, where no file says them.
    """

    world: int | None = None
    per_host: int | None = None
    sequence: int | None = None
    define: Mapping[str, str] = field(default_factory=dict)
    change: Mapping[str, Any] = field(default_factory=dict)
    model: Transformer | None = None

    def degree(self, name: str, said: int) -> int:
        """A degree of the plan: what the command line says of it, else what the file says."""
        value = self.change.get(name, said)
        return value if type(value) is int and value > 0 else said


@dataclass(frozen=True)
class Audit:
    """What files say of a job.

    Attributes:
        library: whose files they are: "megatron", "deepspeed", "torchtitan", "fsdp" or "onecard".
        files: which ones.
        transformer: the model's sizes; None where no file says them.
        plan: how the job runs.
        understood: each setting with its meaning; those with no place are assumed.
        ignored: settings that change nothing here, or are not known.
        findings: mistakes, costs, settings without effect, each with the change that works.
    """

    library: str
    files: tuple[str, ...]
    transformer: Transformer | None
    plan: Plan
    understood: tuple[Understood, ...]
    ignored: tuple[Ignored, ...]
    findings: tuple[Finding, ...]

    @property
    def mistakes(self) -> tuple[Finding, ...]:
        """The findings that keep the job from running as it is meant."""
        return tuple(found for found in self.findings if found.kind == "mistake")


def audited(
    library: str,
    settings: Settings,
    model: Mapping[str, Any] | None,
    plan: Mapping[str, Any],
    found: list[Finding],
    given: Given,
) -> Audit:
    """The audit of what a reader has understood.

    Args:
        model: arguments of ``Transformer``; None where no file says them.
        plan: arguments of ``Plan``.
        found: what the reader itself found.
    """
    change = {name: value for name, value in given.change.items()}
    names = {f.name for f in fields(Transformer)}
    plan_change = {name: value for name, value in change.items() if name not in names}
    model_change = {name: value for name, value in change.items() if name in names}
    made = _plan(settings, {**plan, **plan_change})
    sizes = None if model is None else _model(settings, {**model, **model_change})
    said = [*found, *(_placed(settings, finding) for finding in made.check(sizes))]
    for name, value in change.items():
        settings.assumed(name, value, "said on the command line")
    return Audit(library, (settings.file,), sizes, made, tuple(settings.understood), settings.left(), tuple(said))


_MEANS = {"zero": "ZeRO", "sequence_parallel": "sequence parallel"}


def _placed(settings: Settings, finding: Finding) -> Finding:
    """A finding about a field, with the place of the setting that says the field."""
    begins = _MEANS.get(finding.about, f"{finding.about}=")
    places = [said.where for said in settings.understood if said.where and said.means.startswith(begins)]
    return replace(finding, where=places[0]) if places and not finding.where else finding


def _plan(settings: Settings, arguments: Mapping[str, Any]) -> Plan:
    try:
        return Plan(**arguments)
    except PlanError as error:
        raise PlanError(f"{settings.file}: {error}", error.field) from None


def _model(settings: Settings, arguments: Mapping[str, Any]) -> Transformer:
    try:
        return Transformer(**arguments)
    except PlanError as error:
        raise PlanError(f"{settings.file}: {error}", error.field) from None


def share(world: int | None, inner: Mapping[str, int], found: list[Finding], how: str) -> int:
    """How many ranks of data parallelism there are: those of the world by the degrees within; a mistake where it does not divide.

    Args:
        inner: the other degrees, by name.
        how: how a larger world is said.
    """
    ranks = 1
    for degree in inner.values():
        ranks *= degree
    if world is None or (world % ranks == 0 and world >= ranks):
        return max(1, (world or ranks) // ranks)
    product = " x ".join(f"{name}={degree}" for name, degree in inner.items() if degree > 1)
    works = -(-world // ranks) * ranks
    found.append(
        Finding("mistake", "world", f"{world} ranks cannot be divided by {product} = {ranks}", how.format(works))
    )
    return works // ranks


def microbatches(batch: int, dp: int, microbatch: int, found: list[Finding], where: str = "") -> int:
    """How many there are in a step; a mistake where the batch is no multiple of what all ranks take at once."""
    once = dp * microbatch
    if batch % once == 0:
        return batch // once
    near = sorted({max(1, batch // once) * once, -(-batch // once) * once})
    words = f"a batch of {batch:,} sequences is no multiple of dp x microbatch = {dp} x {microbatch} = {once}"
    found.append(Finding("mistake", "microbatches", words, f"{' or '.join(f'{n:,}' for n in near)} is", where))
    return max(1, batch // once)
