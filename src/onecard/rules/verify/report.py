"""The table proved sample by sample, gathered by family, as terminal tables and as a page of documentation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from onecard.rules import table
from onecard.rules.call import schema_of
from onecard.rules.registry import row_name, rows
from onecard.rules.samples import elsewhere, samples
from onecard.rules.verify.captured import Captured, capture
from onecard.rules.verify.proof import CallProof, Wrong, mesh_of, prove


@dataclass(slots=True)
class Operator:
    """What is known of one operator after all its calls.

    Attributes:
        name: without the overload; ``rules``: the rule texts that its row gave.
        calls, proved: how many calls were taken apart, how many strategies gave the one-card result.
        wrong: as in ``CallProof``; ``found``, ``refuted``: its missed and refuted layouts, by rule.
    """

    name: str
    family: str
    rules: dict[str, None] = field(default_factory=dict)
    calls: int = 0
    proved: int = 0
    wrong: list[Wrong] = field(default_factory=list)
    found: dict[tuple[str, str], str] = field(default_factory=dict)
    refuted: set[tuple[str, str]] = field(default_factory=set)

    @property
    def missed(self) -> list[str]:
        """Layouts that its row forbids in vain: right in a call, and in no call of the same rule wrong."""
        kept = {key[1]: words for key, words in self.found.items() if key not in self.refuted}
        return [f"{operands} -> {results}" for operands, results in kept.items()]


@dataclass(slots=True)
class RulesReport:
    """Operators by name; ``uncovered``: rows that no sample reaches; ``ruleless``: operators met that have no row."""

    operators: dict[str, Operator] = field(default_factory=dict)
    uncovered: list[str] = field(default_factory=list)
    ruleless: list[str] = field(default_factory=list)

    @property
    def wrong(self) -> list[Wrong]:
        """Every wrong strategy."""
        return [fault for operator in self.operators.values() for fault in operator.wrong]

    @property
    def covered(self) -> list[Operator]:
        """Operators with at least one strategy proved."""
        return [operator for operator in self.operators.values() if operator.proved]


@cache
def calls_of_samples() -> tuple[tuple[Captured, ...], tuple[str, ...]]:
    """Every call that the samples make, each kind of call once; and the samples that fail on one card, with why."""
    found: dict[object, Captured] = {}
    broken = []
    for sample in samples():
        try:
            with torch.device("cpu"):  # whatever the program's default is
                for call in capture(sample.program, str(sample)):
                    found.setdefault(call.key, call)
        except Exception as error:  # one bad sample must not hide what the others prove
            broken.append(f"{sample}: {type(error).__name__}: {str(error).partition(chr(10))[0]}")
    return tuple(found.values()), tuple(broken)


def verify_calls(
    calls: Iterable[Captured],
    meshes: Sequence[Sequence[int]] = ((2,),),
    missed: bool = False,
    limit: int = 300,
    watch: Callable[[Captured], None] | None = None,
) -> RulesReport:
    """Prove the rows of all these calls; ``watch`` is told of each before."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # on tensors this small threads only wait for each other
    try:
        return _verify_calls(calls, meshes, missed, limit, watch)
    finally:
        torch.set_num_threads(threads)


def _verify_calls(
    calls: Iterable[Captured],
    meshes: Sequence[Sequence[int]],
    missed: bool,
    limit: int,
    watch: Callable[[Captured], None] | None,
) -> RulesReport:
    report = RulesReport()
    hit: set[str] = set()
    ruleless: dict[str, None] = {}
    family_of = {name: family for family, names in table.families.items() for name in names}
    for call in calls:
        row = row_name(call.func)
        if row is None:
            ruleless[call.name] = None
            continue
        name = schema_of(call.func).name
        operator = report.operators.setdefault(name, Operator(name, family_of.get(row, "own")))
        if watch is not None:
            watch(call)
        for shape in meshes:
            result = prove(call, mesh_of(shape), missed, limit=limit)
            _add(operator, result)
            if result.rule:
                hit.add(row)
    report.uncovered = sorted(name for name in set(rows) - hit - set(elsewhere()) if _exists(name))
    report.ruleless = sorted(ruleless)
    return report


def _exists(name: str) -> bool:
    """Whether this version of torch has an operator that a row is for."""
    return "::" in name or hasattr(torch.ops.aten, name.partition(".")[0])


def _add(operator: Operator, result: CallProof) -> None:
    if result.rule:
        operator.rules[result.rule] = None
        operator.calls += 1
    operator.proved += result.proved
    operator.wrong += result.wrong
    operator.found |= {(result.rule, layouts): words for layouts, words in result.missed.items()}
    operator.refuted |= {(result.rule, layouts) for layouts in result.refuted}


def show(report: RulesReport, console: Console, missed: bool = False, each: int = 3) -> None:
    """Print the report: a line for each family, then what is wrong (``each`` faults of an operator at most), and with
    ``missed`` what rows forbid in vain."""
    grid = Table(title="rules proved by brute force")
    for heading in ("family", "operators", "calls", "strategies proved", "wrong", "missed"):
        grid.add_column(heading, justify="left" if heading == "family" else "right")
    for family in dict.fromkeys(o.family for o in report.operators.values()):
        mine = [o for o in report.operators.values() if o.family == family]
        grid.add_row(family, *_totals(mine))
    grid.add_section()
    grid.add_row("all", *_totals(list(report.operators.values())), style="bold")
    if not missed:
        grid.columns.pop()
    console.print(grid)
    for operator in report.operators.values():
        for fault in operator.wrong[:each]:
            console.print(f"[red]wrong[/] {escape(str(fault))}", highlight=False)
        if len(operator.wrong) > each:
            console.print(
                f"  ... {len(operator.wrong) - each} more of {operator.name}: --op {operator.name} shows them"
            )
    for operator in report.operators.values() if missed else ():
        for line in operator.missed:
            console.print(f"[yellow]missed[/] {operator.name}  {escape(line)}", highlight=False, soft_wrap=True)
    if report.ruleless:
        console.print(f"operators without a row in the samples: {', '.join(report.ruleless)}", highlight=False)
    if report.uncovered:
        console.print(f"[red]rows without a sample:[/] {', '.join(report.uncovered)}", highlight=False)
    console.print(
        f"{len(report.covered)} operators (in-place forms counted apart, overloads together), "
        f"{sum(o.proved for o in report.operators.values())} strategies proved, {len(report.wrong)} wrong",
        highlight=False,
    )


def _totals(operators: list[Operator]) -> list[str]:
    return [
        str(total)
        for total in (
            sum(o.proved > 0 for o in operators),
            sum(o.calls for o in operators),
            sum(o.proved for o in operators),
            sum(len(o.wrong) for o in operators),
            sum(len(o.missed) for o in operators),
        )
    ]


def write_markdown(report: RulesReport, path: Path, meshes: str) -> None:
    """Write the page that lists every operator with its rules."""
    lines = [
        "# Operators with a sharding rule",
        "",
        "Generated by `python -m onecard.rules.verify --markdown docs/rules.md`; do not edit.",
        "",
        "Each row was proved in one process: for every strategy that it allows, the operands were cut (or replaced by",
        "random summands), the operator was run shard by shard, and the results were put together and compared with",
        f"the one-card result. Meshes: {meshes}. A rule may depend on the call's static arguments, so an operator can",
        "show several. In-place forms are listed apart.",
        "",
        f"**{len(report.covered)} operators, {sum(o.proved for o in report.operators.values())} strategies proved, "
        f"{len(report.wrong)} wrong.**",
        "",
    ]
    for family in sorted({o.family for o in report.operators.values()}):
        lines += [f"## {family}", "", "| operator | rule | strategies proved |", "|---|---|---:|"]
        for o in sorted((o for o in report.operators.values() if o.family == family), key=lambda o: o.name):
            lines.append(f"| `{o.name}` | {_rules(o)} | {o.proved} |")
        lines.append("")
    kept = elsewhere()
    if kept:
        lines += ["## Rows not run here", "", *(f"- `{name}`: {why}" for name, why in sorted(kept.items())), ""]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines))


def _rules(operator: Operator, most: int = 4) -> str:
    texts = sorted(operator.rules, key=len)
    more = f" and {len(texts) - most} more" if len(texts) > most else ""
    return "<br>".join(f"`{text}`" for text in texts[:most]) + more
