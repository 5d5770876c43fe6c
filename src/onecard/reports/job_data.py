"""A job's price as plain data: what ``onecard simulate --json`` writes and what its page shows. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from onecard.machine.cost import Machine
from onecard.machine.events import Event, Panel
from onecard.planning.job import JobCost, RankCost
from onecard.planning.lives import NO_LIVES

VERSION = 1
MOST_EVENTS = 200_000  # that a page holds: 4 MB of it
MOST_POINTS = 60_000  # of memory over time


def job_data(job: JobCost) -> dict[str, Any]:
    """All figures of a job as JSON can hold them, under the names that ``JobCost`` has for them; but for its events.

    Example:
        >>> import onecard as oc
        >>> sizes = oc.Transformer(layers=4, hidden=64, heads=4, vocab=256, sequence=32)
        >>> data = job_data(oc.price(sizes, oc.Plan(dp=2, microbatches=2), oc.Machine.preset("A100")))
        >>> data["onecard"], data["plan"]["dp"], [rank["name"] for rank in data["ranks"]]
        ('JobCost', 2, ['pp 0'])
    """
    return {
        "onecard": "JobCost",
        "version": VERSION,
        "plan": json.loads(job.plan.to_json()),
        "machine": _machine(job.machine),
        "world": job.plan.world,
        "batch": job.plan.batch,
        "seconds": job.seconds,
        "tokens": job.tokens,
        "tokens_per_second": job.tokens_per_second,
        "model_flops": job.model_flops,
        "hardware_flops": job.hardware_flops,
        "mfu": job.mfu,
        "hfu": job.hfu,
        "peak": job.peak,
        "fits": job.fits,
        "reserved": job.reserved,
        "terms": dict(job.terms),
        "ranks": [_rank(rank) for rank in job.ranks],
        "pieces": [asdict(replace(piece, lives=NO_LIVES)) for piece in job.pieces],
    }


def _machine(machine: Machine) -> dict[str, Any]:
    names = ("name", "flops", "memory", "bandwidth", "between_hosts", "capacity", "per_host", "source")
    return {name: getattr(machine, name) for name in names}


def _rank(rank: RankCost) -> dict[str, Any]:
    found = {
        "name": rank.name,
        "ranks": rank.ranks,
        "pieces": [list(piece) for piece in rank.pieces],
        "terms": dict(rank.terms),
        "sent": dict(rank.sent),
        "memory": dict(rank.memory),
        "peak": rank.peak,
        "macs": rank.macs,
    }
    return found


def chosen(count: int, most: int) -> list[int]:
    """So many of ``count`` places, evenly spread, the first and the last among them.

    Example:
        >>> chosen(5, 9), chosen(9, 3), chosen(100, 4)
        ([0, 1, 2, 3, 4], [0, 4, 8], [0, 33, 66, 99])
    """
    if count <= most:
        return list(range(count))
    most = max(2, most)
    return sorted({i * (count - 1) // (most - 1) for i in range(most)})


def timeline(events: Sequence[Event], most: int = MOST_EVENTS) -> dict[str, Any]:
    """Events of a page: of each rank (kind, stage, microbatch, nanoseconds since the last end, nanoseconds), one after the other.

    Beyond ``most`` events, ranks are left out, and then what comes late in the step; ``left_out`` says it.
    """
    by_rank: dict[int, list[Event]] = {}
    for event in events:
        if event.seconds > 0:
            by_rank.setdefault(event.rank, []).append(event)
    kinds = list(dict.fromkeys(event.kind for event in events))
    ranks = sorted(by_rank)
    each = max((len(found) for found in by_rank.values()), default=1)
    shown = [ranks[i] for i in chosen(len(ranks), max(2, most // max(1, each)))]
    longest = max(1, most // max(1, len(shown)))
    number = {kind: i for i, kind in enumerate(kinds)}
    rows = [_row(sorted(by_rank[rank], key=lambda e: e.begin)[:longest], number) for rank in shown]
    cut = sum(max(0, len(by_rank[rank]) - longest) for rank in shown)
    left = sum(len(by_rank[rank]) for rank in ranks if rank not in set(shown)) + cut
    return {"kinds": kinds, "ranks": shown, "rows": rows, "of": len(ranks), "events": len(events), "left_out": left}


def _row(events: Sequence[Event], kinds: dict[str, int]) -> list[int]:
    found: list[int] = []
    now = 0
    for event in events:
        begin, end = round(event.begin * 1e9), round(event.end * 1e9)
        told = event.told
        found += [
            kinds[event.kind],
            told.get("stage", event.shade),
            told.get("microbatch", -1),
            begin - now,
            end - begin,
        ]
        now = end
    return found


def memory(ranks: Sequence[RankCost], most: int = MOST_POINTS) -> dict[str, Any]:
    """Bytes over time of ranks, as (nanoseconds since the last point, bytes); of many points those that matter."""
    each = max(2, most // max(1, len(ranks)))
    rows = [_curve(rank.over_time, each) for rank in ranks]
    points = sum(len(rank.over_time) for rank in ranks)
    return {"rows": rows, "points": points, "left_out": points - sum(len(row) // 2 for row in rows)}


def _curve(points: Sequence[tuple[float, int]], most: int) -> list[int]:
    """Of more points than that, the lowest and the highest of each stretch of time."""
    if len(points) > most:
        size = -(-len(points) // max(1, most // 2))
        stretches = [range(i, min(i + size, len(points))) for i in range(0, len(points), size)]
        ends = ({min(s, key=lambda i: points[i][1]), max(s, key=lambda i: points[i][1])} for s in stretches)
        points = [points[i] for found in ends for i in sorted(found)]
    found, now = [], 0
    for seconds, nbytes in points:
        at = round(seconds * 1e9)
        found += [at - now, nbytes]
        now = at
    return found


def panels(job: JobCost) -> list[Panel]:
    """A job as a trace shows it: each kind of rank as a row, memory over time beside it."""
    over_time = tuple(
        (f"memory of {rank.name}", tuple((seconds, float(nbytes)) for seconds, nbytes in rank.over_time))
        for rank in job.ranks
    )
    title = f"{job.plan.world:,} ranks on {job.machine.name or 'a machine'}: {job.plan.schedule}"
    return [Panel(title, job.events, over_time)]
