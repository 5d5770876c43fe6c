"""What ``import onecard`` loads, and what only the first use of a name."""

import subprocess
import sys

PROGRAM = """
import gc, sys
before = gc.get_threshold()
import onecard
late = ("planning", "proof", "engine", "auto", "launch._agent")
print(gc.get_threshold() == before, [name for name in late if f"onecard.{name}" in sys.modules])
print(sorted({*onecard.__all__} - {*dir(onecard)}), [name for name in onecard.__all__ if not hasattr(onecard, name)])
print(onecard.Plan is vars(onecard)["Plan"], onecard.plan is onecard.planning.search.api.plan)
from onecard.launch import LaunchError, main
"""


def test_jobs_plans_and_the_engine_are_loaded_when_they_are_asked_for():
    said = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=False)
    assert said.stdout.splitlines() == ["True []", "[] []", "True True"], said.stderr
