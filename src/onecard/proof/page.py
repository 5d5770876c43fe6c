"""A proof as one HTML file that needs no network and no script, and as plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from html import escape
from math import isfinite
from os import PathLike
from pathlib import Path
from typing import Any

from onecard._version import __version__
from onecard.proof.results import Result
from onecard.proof.words import ranks_of, with_code
from onecard.reports.template import filled, part


def write(proof: Any, path: str | PathLike[str], title: str = "") -> None:
    """Write the page of a proof; ``title``: of the program."""
    Path(path).write_text(page(proof, title), encoding="utf-8")


def page(proof: Any, title: str = "") -> str:
    """The page of a proof, as text.

    Example:
        >>> from onecard.proof.report import Proof
        >>> proof = Proof(8, True, True, 412, 1.0, (Result("fc.weight", "final", 3e-16),), (), None, None, (), 1.5)
        >>> text = page(proof, "train.py")
        >>> "<title>train.py: equal on 8 ranks</title>" in text, "<script" in text, "https://" in text
        (True, False, False)
    """
    heading = f"{title or 'The program'}: {'equal' if proof else 'not equal'} on {proof.world} ranks"
    return filled("proof.html", {
        "title": escape(heading), "style": part("job.css"), "version": escape(__version__), "text": escape(proof.text()),
        "lead": "All ranks in one process, each value beside one card's" + (", in float64." if proof.exact else "."),
        "kind": "fits" if proof else "full", "verdict": escape(proof.text().partition("\n")[0]),
        "figures": "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in _figures(proof)),
        "first": _first(proof.first, proof.passes, proof.begun), "rows": "\n".join(map(_row(proof.wrong), _ordered(proof))),
    })  # fmt: skip


def _figures(proof: Any) -> list[tuple[str, str]]:
    most = max((r.off for r in proof.results), default=0.0)
    return [
        ("ranks", str(proof.world)), ("results", str(len(proof.results))), ("wrong", str(len(proof.wrong))),
        ("values", str(proof.values)), ("with a partner", f"{proof.share:.1%}" if proof.values else "-"),
        ("largest difference", f"{most:.1e}"), ("seconds", f"{proof.seconds:.1f}"),
    ]  # fmt: skip


def _first(first: Any, passes: str, begun: str) -> str:
    if first is None and not passes:
        return ""
    facts: list[tuple[str, str]] = []
    if first is not None:
        facts = [
            ("operator", first.operator), ("phase", first.phase), ("module", first.module), ("line", with_code(first.line)),
            ("inside onecard", with_code(first.inside) if first.inside else ""), ("leads to", first.leads_to),
            ("value", f"{list(first.shape)} {first.layout}"), ("wrong on", ranks_of(first.ranks)),
            ("worst element", f"{list(first.place)}: {first.value:.9g}, one card {first.right:.9g}" if first.beside[0] else ""),
            ("around it", f"ranks {first.beside[0]}, one card {first.beside[1]}" if first.beside[0] else ""),
            *(("message before it", said) for said in first.messages), ("what explains it", first.why),
            ("equal before it", f"{first.before} values"),
        ]  # fmt: skip
    facts += [("begins apart", begun), ("passes", passes)]
    shown = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in facts if value)
    head = "First value that is not one card's" if first is not None else "Passes"
    return f'<section aria-labelledby="h-first"><h2 id="h-first">{head}</h2><dl id="first" class="facts">{shown}</dl></section>'


def _ordered(proof: Any) -> list[Result]:
    return [*proof.wrong, *(result for result in proof.results if result not in proof.wrong)]


def _row(wrong: Sequence[Result]) -> Any:
    def row(result: Result) -> str:
        found = any(result is known for known in wrong)
        ranks = ranks_of(result.ranks) if result.ranks else ""
        said = (
            f'<td class="wrong">not equal{": " + escape(result.why) if result.why else ""}</td>'
            if found
            else "<td>equal</td>"
        )
        return f'<tr><th scope="row">{escape(result.what)}</th><td>{result.off:.2g}</td><td>{escape(ranks)}</td>{said}</tr>'

    return row


def data_of(proof: Any) -> dict[str, Any]:
    """A proof as data that JSON can hold: without tensors; numbers that are not finite are None."""
    first = proof.first
    return {
        "equal": proof.equal, "world": proof.world, "exact": proof.exact, "values": proof.values, "share": proof.share,
        "seconds": proof.seconds, "why": proof.why, "passes": proof.passes, "unpaired": list(proof.unpaired),
        "rounding": None if proof.rounding is None else {"off": _number(proof.rounding[0]), "what": proof.rounding[1]},
        "zero": proof.zero, "begun": proof.begun, "rounded": proof.rounded,
        "results": [
            {"what": r.what, "kind": r.kind, "off": _number(r.off), "ranks": list(r.ranks), "why": r.why, "equal": equal}
            for equal, found in ((False, proof.wrong), (True, [x for x in proof.results if x not in proof.wrong])) for r in found
        ],
        "first": None if first is None else {f.name: _plain(getattr(first, f.name)) for f in fields(first)},
    }  # fmt: skip


def _number(x: float) -> float | None:
    return x if isfinite(x) else None


def _plain(x: Any) -> Any:
    if isinstance(x, tuple):
        return [_plain(item) for item in x]
    return _number(x) if isinstance(x, float) else x
