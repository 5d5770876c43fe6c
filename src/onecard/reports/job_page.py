"""A job's price as one HTML page that needs no network: timeline, memory over time, terms, tables. Its figures are JobCost's."""

from __future__ import annotations

import html
import json
from os import PathLike
from pathlib import Path
from typing import Any

from onecard._version import __version__
from onecard.pipeline.schedule.timeline_pictures import COLOURS
from onecard.planning.job import JobCost
from onecard.reports.job_data import job_data, memory, timeline
from onecard.reports.template import filled, part

# Told apart by people with any of the common kinds of colour blindness, as the schedules' pictures: Okabe and Ito (2008).
_COLOURS = COLOURS | {
    "compute": "#56b4e9",
    "messages along 'tp'": "#cc79a7",
    "messages along 'dp'": "#d55e00",
    "messages along 'pp'": "#f0e442",
    "messages along 'cp'": "#8f5fbf",
    "optimizer": "#009e73",
    "bubble": "#c3c9d0",
    "host": "#6b7580",
    "parameters": "#0072b2",
    "gradients": "#e69f00",
    "states": "#009e73",
    "activations": "#56b4e9",
    "buffers": "#cc79a7",
    "transient": "#c3c9d0",
}


def write_page(path: str | PathLike[str], job: JobCost, title: str = "") -> None:
    """Write the page of a job.

    Args:
        path: the HTML file.
        title: of the model, such as "llama3-70b".
    """
    Path(path).write_text(page(job, title), encoding="utf-8")


def page(job: JobCost, title: str = "") -> str:
    """The page of a job, as text.

    Example:
        >>> import onecard as oc
        >>> sizes = oc.Transformer(layers=4, hidden=64, heads=4, vocab=256, sequence=32)
        >>> text = page(oc.price(sizes, oc.Plan(pp=2, microbatches=2), oc.Machine.preset("A100")), "small")
        >>> "<title>small on 2 A100</title>" in text, "http://" in text, "https://" in text
        (True, False, False)
    """
    machine = job.machine.name or "devices"
    heading = f"{title or 'A step'} on {job.plan.world:,} {machine}"
    data = {
        "job": job_data(job),
        "timeline": timeline(job.events),
        "memory": memory(job.ranks),
        "words": _words(job),
        "colours": _COLOURS,
    }
    given = {
        "title": html.escape(heading),
        "version": html.escape(__version__),
        "text": html.escape(str(job)),
        "data": in_script(data),
        "style": part("job.css"),
        "script": part("job.js"),
    }
    return filled("job.html", given)


def in_script(data: Any) -> str:
    """JSON that may stand in a ``<script>``: no name or text in it ends that.

    Example:
        >>> in_script({"name": "</script><!--"})
        '{"name":"\\\\u003c/script>\\\\u003c!--"}'
    """
    return json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _words(job: JobCost) -> dict[str, Any]:
    """What the page says of the plan and the machine."""
    title, *lines = str(job.plan).splitlines()
    split = (line.strip().partition("  ") for line in lines)
    degrees = " × ".join(
        f"{axis} {getattr(job.plan, axis)}" for axis in ("pp", "dp", "cp", "tp") if getattr(job.plan, axis) > 1
    )
    sequences = job.tokens != job.plan.batch
    batch = f"{job.plan.batch:,} {'sequences' if sequences else 'rows'} a step"
    pipeline = f"{job.plan.schedule} on {job.plan.pp} stages" if job.plan.pp > 1 else "No pipeline"
    return {
        "subtitle": " · ".join(filter(None, [degrees, batch])),
        "tokens": "Tokens a second" if sequences else "Rows a second",
        "schedule": f"{pipeline}, {job.plan.microbatches} microbatches",
        "plan": {"title": title, "lines": [[name, text.strip()] for name, _, text in split]},
        "machine": {"title": f"Machine {job.machine.name or 'without a name'}", "lines": _machine(job)},
    }


def _machine(job: JobCost) -> list[list[str]]:
    machine = job.machine
    rate = machine.dtypes.get(job.plan.compute, machine.flops)
    between = f"{machine.between_hosts / 1e9:,.4g} GB/s between hosts" if machine.per_host else ""
    lines = [
        ["computes", f"{rate / 1e12:,.4g} TFLOP/s in {job.plan.compute} at its peak"],
        [
            "memory",
            f"{machine.memory / 1e9:,.4g} GB/s"
            + (f", {machine.capacity / 2**30:,.2f} GiB" if machine.capacity else ""),
        ],
        ["links", ", ".join(filter(None, [f"{machine.bandwidth / 1e9:,.4g} GB/s sent by a rank", between]))],
    ]
    return lines + ([["source", machine.source]] if machine.source else [])
