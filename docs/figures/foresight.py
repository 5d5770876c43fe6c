"""The screenshots of a job's page in docs/howto/foresight.md: needs Chromium with its driver.

    python docs/figures/foresight.py
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1] / "tests"))

import onecard as oc
from browser import browser
from onecard.planning.known_models import known_model
from onecard.reports.job_page import write_page

PLAN = oc.Plan(pp=4, dp=2, tp=8, microbatches=32, zero=1, sequence_parallel=True, recompute="selective")


def main() -> None:
    job = oc.price(known_model("llama3-70b"), PLAN, oc.Machine.preset("H100"))
    with tempfile.TemporaryDirectory() as folder, browser() as page:
        path = Path(folder) / "job.html"
        write_page(path, job, "llama3-70b")
        page.size(1000, 1180)
        page.open(path)
        page.picture(HERE / "foresight.png")
        page.size(360, 780)
        page.dark(True)
        page.open(path)
        page.run("document.getElementById('h-memory').scrollIntoView()")
        page.picture(HERE / "foresight_phone.png")


if __name__ == "__main__":
    main()
