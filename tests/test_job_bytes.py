"""The bytes that a job's price tells are those that the real program sends: the jobs of benchmarks/jobs.py, on their ranks."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import onecard as oc

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
from jobs import JOBS, _sent, priced, program

BIG = [job for job in JOBS if job.name in ("tp=2", "dp=2 x tp=2", "tp=2 x pp=2")]
"""Those of which a bigger network leaves more sums to the optimizer, or hands on gradients that the stage before would sum."""


@pytest.mark.share(1)
@pytest.mark.parametrize(
    ("job", "small"), [(job, True) for job in JOBS] + [(job, False) for job in BIG], ids=lambda x: getattr(x, "name", x)
)
def test_the_bytes_of_a_price_are_those_of_the_program(job, small):
    plan = job.as_plan
    found = priced(job, oc.Machine(), small)
    for place in range(plan.pp):
        with oc.pretend(plan.world, rank=place * plan.world // plan.pp, fake=True):
            step, batch, _ = program(job, small)
            sent = _sent(step, batch)
        assert found.ranks[place].sent == sent
