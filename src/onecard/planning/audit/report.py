"""An audit as a page for the terminal, and as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from onecard.planning.audit.audit import Audit
from onecard.planning.audit.megatron import NO_EFFECT
from onecard.planning.audit.worth import Worth
from onecard.planning.fit import Finding

_TITLES = {"mistake": ("mistakes", "bold red"), "cost": ("costs", "bold yellow"), "idle": ("without effect", "bold")}
LIBRARIES = {
    "megatron": "Megatron-LM", "deepspeed": "DeepSpeed", "torchtitan": "torchtitan", "fsdp": "accelerate", "onecard": "onecard",
}  # fmt: skip


def page(audit: Audit, all_of_it: bool = False) -> RenderableType:
    """What was understood, what is wrong, what costs.

    Args:
        all_of_it: also each setting with its meaning, and each that was ignored.
    """
    parts: list[RenderableType] = [Text(f"{LIBRARIES[audit.library]}: {', '.join(audit.files)}", "bold"), Text("")]
    if audit.transformer is not None:
        parts += [Text(_model(audit)), Text("")]
    title, *lines = str(audit.plan).splitlines()
    parts += [Text(title), _rows([line.strip().split("  ", 1) for line in lines]), Text("")]
    for kind in ("mistake", "cost", "idle"):
        found = [finding for finding in audit.findings if finding.kind == kind]
        if found:
            parts += [Text(_TITLES[kind][0], _TITLES[kind][1]), _findings(found), Text("")]
    if not audit.findings:
        parts += [Text("no mistakes found", "bold green"), Text("")]
    assumed = [u for u in audit.understood if not u.where]
    if assumed:
        parts += [Text("assumed", "bold"), _rows([(u.name, f"{u.value}: {u.means}") for u in assumed]), Text("")]
    if all_of_it:
        said = [(_short(u.where), f"{u.name} {u.value}".rstrip(), u.means) for u in audit.understood if u.where]
        parts += [Text("understood", "bold"), _rows(said), Text("")]
        ignored = [(_short(i.where), i.name + (f" (did you mean {i.near}?)" if i.near else "")) for i in audit.ignored]
        parts += [Text("ignored", "bold"), _rows(ignored or [("nothing", "")])]
    else:
        parts += [_ignored(audit)]
    return Group(*parts)


def _model(audit: Audit) -> str:
    model = audit.transformer
    assert model is not None  # the caller has looked
    heads = f"{model.heads} heads" + (f" ({model.key_heads} key heads)" if model.key_heads != model.heads else "")
    mlp = (
        f"{model.experts} experts of {model.expert_ffn}"
        if model.experts
        else f"MLP {model.inner:,}" + " gated" * model.gated
    )
    return (
        f"Model of {_billions(model.parameters)} parameters: {model.layers} blocks, {model.hidden:,} features, {heads}, {mlp},\n"
        f"  {model.vocab:,} rows of the vocabulary{', tied' * model.tied}, sequences of {model.sequence:,} tokens"
    )


def _billions(count: int) -> str:
    """A count as people say it.

    Example:
        >>> _billions(8_030_261_248), _billions(124_439_808), _billions(7)
        ('8.03 billion', '124.4 million', '7')
    """
    if count >= 10**9:
        return f"{count / 1e9:.4g} billion"
    return f"{count / 1e6:.4g} million" if count >= 10**6 else f"{count:,}"


def _findings(found: list[Finding]) -> Table:
    table = Table.grid(padding=(0, 1))
    table.add_column(width=1)
    table.add_column(overflow="fold")
    for finding in found:
        text = Text(f"{finding.where}: " if finding.where else "", "dim")
        text.append(finding.what, "none")
        if finding.change:
            text.append("\n→ ", "none").append(finding.change, "green")
        table.add_row("", text)
    return table


def _rows(rows: list[Any]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(width=0)
    for _ in rows[0] if rows else ():
        table.add_column(overflow="fold")
    for row in rows:
        table.add_row("", *(Text(cell.strip()) for cell in row))
    return table


def _short(where: str) -> str:
    """A place without the folders of its file."""
    return where.rpartition("/")[2]


def _ignored(audit: Audit) -> RenderableType:
    """In few lines: those that may be misspelt, those that may matter, and how many have nothing to do with it."""
    parts: list[RenderableType] = []
    near = [i for i in audit.ignored if i.near]
    if near:
        parts += [
            Text("not known", "bold"),
            _rows([(_short(i.where), f"{i.name}: did you mean {i.near}?") for i in near]),
            Text(""),
        ]
    others = [i.name for i in audit.ignored if not i.near]
    plain = [name for name in others if not name.startswith(NO_EFFECT)]
    if others:
        count = f"{len(others)} settings" if len(others) > 1 else "a setting"
        count += ", not known here or without effect on time and memory"
        text = Text("ignored ", "bold")
        text.append(f"{count}: ", "none").append(", ".join([*plain, *(n for n in others if n not in plain)]), "dim")
        parts += [text]
    said = sum(1 for u in audit.understood if u.where)
    parts += [Text(f"understood {said} settings; --verbose shows each with its meaning" if said else "", "dim")]
    return Group(*parts)


def price_page(found: Worth) -> RenderableType:
    """What it takes, on which ranks it does not fit, and the change that gains most."""
    if found.cost is None:
        return Text(f"not priced: {found.why_not}", "yellow")
    parts: list[RenderableType] = [found.cost]
    capacity = found.cost.machine.capacity
    for rank in found.too_large[:3]:
        most = sorted(rank.memory.items(), key=lambda item: -item[1])[:3]
        where = f"{rank.name} ({rank.ranks:,} rank{'s' * (rank.ranks > 1)})"
        of_what = ", ".join(f"{name} {_gib(size)}" for name, size in most)
        words = f"does not fit on {where}: {_gib(rank.peak)} of {_gib(capacity)}; most of it {of_what}"
        parts += [Text(words, "bold red")]
    if len(found.too_large) > 3:
        parts += [Text(f"nor on {len(found.too_large) - 3} further places of the pipeline", "bold red")]
    return Group(*parts, *_best(found))


def _best(found: Worth) -> list[RenderableType]:
    assert found.cost is not None  # the caller has looked
    best, cost = found.best, found.cost
    tried = f"{found.tried} changes tried" + ("" if found.all_of_it else ", for more there was no time")
    if not found.tried:
        return []
    if best is None:
        rest = "none makes it fit" if not cost.fits else "none gains a hundredth"
        return [Text(f"{tried}: {rest}", "dim")]
    says = f" ({best.says})" if best.says else ""
    text = Text("the change that gains most: " if cost.fits else "the change that helps most: ", "bold")
    text.append(f"{best.what}{says}", "bold green")
    took = f"{_seconds(best.cost.seconds)} a step in place of {_seconds(cost.seconds)}"
    less = 1 - best.cost.seconds / cost.seconds
    fits = "" if cost.fits else ", and it fits" if best.cost.fits else ", but it does not fit yet"
    text.append(
        f"\n  {took} ({abs(less):.0%} {'less' if less > 0 else 'more'}), {_gib(best.cost.peak)} at its peak{fits}",
        "none",
    )
    return [text, Text(tried, "dim")]


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"


def as_json(audit: Audit) -> dict[str, Any]:
    """All of it, as ``json.dumps`` takes it."""
    return {
        "library": audit.library,
        "files": list(audit.files),
        "plan": asdict(audit.plan) | {"world": audit.plan.world, "batch": audit.plan.batch},
        "transformer": asdict(audit.transformer) | {"parameters": audit.transformer.parameters}
        if audit.transformer
        else None,
        "understood": [asdict(said) for said in audit.understood],
        "ignored": [asdict(said) for said in audit.ignored],
        "findings": [asdict(found) for found in audit.findings],
    }
