"""``python tests/again.py``, after a run of pytest that ended with failures: they run again, one by one and beside nothing.

The exit status is 0 if each of them passes then. That is said loudly, and kept in logs/failed_beside_others.txt: a test whose
outcome hangs on what else the machine does is to be repaired.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
FAILED = ROOT / ".pytest_cache" / "v" / "cache" / "lastfailed"
AT_MOST = 8  # more are no chance


def failed() -> list[str]:
    """The tests that failed last, by pytest's own notes."""
    return sorted(json.loads(FAILED.read_text())) if FAILED.exists() else []


def main(options: list[str]) -> int:
    """Runs them; 0 if all of them pass."""
    first = failed()
    if not 0 < len(first) <= AT_MOST:
        return 1
    print(f"\nmake: {len(first)} failed beside others; now alone", flush=True)
    alone = [sys.executable, "-m", "pytest", "-n", "0", "--last-failed", "--last-failed-no-failures", "none"]
    status = subprocess.run([*alone, *options], cwd=ROOT).returncode
    still = failed()
    passed = [name for name in first if name not in still]
    if passed:
        note = "\n".join(["failed beside others, passed alone:", *(f"    {name}" for name in passed)])
        (ROOT / "logs").mkdir(exist_ok=True)
        (ROOT / "logs" / "failed_beside_others.txt").write_text(note + "\n")
        print(f"\n{'!' * 100}\n{note}\n{'!' * 100}", flush=True)
    return 1 if status or still else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
