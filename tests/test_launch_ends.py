"""How a job ends: nothing survives it, however the launcher or a rank went; no log is lost; who was to blame is named."""

import io
import json
import os
import re
import signal
import sys
import threading
import time
from contextlib import redirect_stderr
from pathlib import Path
from types import SimpleNamespace

import pytest
from launching import alive, launch_here, launched, pids_in, start, survivors, write

from onecard.errors import CommunicationError
from onecard.launch import _explain, _machines
from onecard.launch._logs import job_folder, set_aside
from onecard.launch._memory import MemoryKills
from onecard.launch._worker import _Recorder
from onecard.testing import run_ranks
from onecard.testing._report import root_cause

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="needs the parent-death signal of Linux")


STUBBORN = """
    import os, signal, subprocess, time
    {first}
    child = subprocess.Popen(["sleep", "60"])
    for name, pid in (("rank", os.getpid()), ("child", child.pid)):
        with open("pid" + name + os.environ["RANK"], "w") as file:
            file.write(str(pid))
    time.sleep(60)
"""


@pytest.mark.proof
@pytest.mark.share(1)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_launcher_ends_everything(tmp_path, number):
    with start(tmp_path, STUBBORN.format(first=""), "--nproc_per_node", "2") as process:
        pids = pids_in(tmp_path, 4)
        assert all(map(alive, pids))
        os.killpg(process.pid, number)  # as a terminal does
        errors = process.communicate(timeout=120)[1]
    assert process.returncode == 128 + number and f"{number.name}: all ranks were ended" in errors
    assert not survivors(pids)


@pytest.mark.proof
def test_an_impatient_user_and_ranks_that_ignore_signals(tmp_path):
    source = STUBBORN.format(first="[signal.signal(n, signal.SIG_IGN) for n in (signal.SIGINT, signal.SIGTERM)]")
    with start(tmp_path, source, "--nproc_per_node", "2") as process:
        pids = pids_in(tmp_path, 4)
        for _ in range(3):
            os.killpg(process.pid, signal.SIGINT)
            time.sleep(0.3)
        process.communicate(timeout=120)
    assert process.returncode == 130 and not survivors(pids)


@pytest.mark.proof
@LINUX
def test_nothing_is_left_when_the_launcher_is_killed(tmp_path):
    """Neither the ranks, nor what they started (a shell's job has a process group of its own), nor a temporary folder."""
    (tmp_path / "tmp").mkdir()
    source = STUBBORN.format(first="subprocess.Popen(['sh', '-mc', 'echo $$ > pidshell$RANK; sleep 60 & wait'])")
    with start(tmp_path, source, "--nproc_per_node", "2", temporary=tmp_path / "tmp") as process:
        pids = pids_in(tmp_path, 6)
        pids += [int(pid) for shell in pids for pid in children(shell) if pid not in map(str, pids)]
        assert len(pids) == 8 and all(map(alive, pids)) and len(list((tmp_path / "tmp").glob("onecard-*"))) == 1
        process.kill()
        process.communicate(timeout=120)
    assert not survivors(pids)
    deadline = time.monotonic() + 60
    while list((tmp_path / "tmp").iterdir()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not list((tmp_path / "tmp").iterdir())


def children(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


FAILS = """
    import os, pathlib, signal, subprocess, sys, time
    attempt, rank = (os.environ[name] for name in ("TORCHELASTIC_RESTART_COUNT", "RANK"))
    for kept in map(int, pathlib.Path("seen").read_text().split() if attempt == "1" else []):
        stat = pathlib.Path(f"/proc/{kept}/stat")  # what the dead attempt had started
        assert not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] in "ZX"
    child = subprocess.Popen(["sleep", "60"])
    with open(f"pid{attempt}{rank}", "w") as file:
        file.write(str(child.pid))
    while len(noted := [p.read_text() for p in pathlib.Path().glob(f"pid{attempt}?") if p.read_text()]) < 2:
        time.sleep(0.01)
    if rank == "1":
        pathlib.Path("seen").write_text(" ".join(noted))
        os._exit(3)
    time.sleep(60)
"""


@pytest.mark.share(1)
@pytest.mark.parametrize("restarts", [0, 1])
def test_a_rank_that_fails_leaves_no_child_alive(tmp_path, restarts):
    """Neither its own nor another rank's, at the end and before a restart."""
    options = ["--nproc_per_node", "2", "--max_restarts", str(restarts), "--json", write(tmp_path, FAILS)]
    [(status, output)] = run_ranks(launch_here, 1, tmp_path, options)
    assert status == 3, output
    said = json.loads(output.splitlines()[-1])
    failed = said.pop("failed")
    assert 0 < said.pop("seconds") < 600
    assert said == {"status": 3, "ranks": 2, "node_rank": 0, "restarts": restarts, "logs": "logs"}
    assert (failed["rank"], failed["log"]) == (1, "logs/rank1.log") and "ended first, with exit code 3" in failed["why"]
    assert not survivors(pids_in(tmp_path, 2 + 2 * restarts))


# Logs.


@pytest.mark.proof
def test_a_second_job_in_one_folder_leaves_the_logs_of_the_first(tmp_path):
    first = """
        import pathlib, time
        print("of the first", flush=True)
        pathlib.Path("pid0").write_text("0")
        while not pathlib.Path("enough").exists():
            time.sleep(0.05)
        print("to its end")
    """
    with start(tmp_path, first) as process:
        pids_in(tmp_path, 1)
        second = write(tmp_path, "print('of the second')", "second.py")
        [(status, output)] = run_ranks(launch_here, 1, tmp_path, ["--nproc_per_node", "2", second])
        assert status == 0 and "a job that runs has its logs in logs; those of this one are in logs/2" in output
        (tmp_path / "enough").touch()
        process.communicate(timeout=120)
    logs = {str(p.relative_to(tmp_path / "logs")): p.read_text() for p in (tmp_path / "logs").rglob("*.log")}
    assert logs == {
        "rank0.log": "of the first\nto its end\n", "2/rank0.log": "of the second\n", "2/rank1.log": "of the second\n",
    }  # fmt: skip


def test_the_logs_of_an_earlier_job_are_set_aside(tmp_path):
    with job_folder(tmp_path / "logs") as folder:
        assert folder == tmp_path / "logs"
        for job in range(3):
            set_aside(sorted(folder.glob("rank*.log")))
            for rank in range(2 - job % 2):
                (folder / f"rank{rank}.log").write_text(f"{job} {rank}")
                os.utime(folder / f"rank{rank}.log", (1e9, 1e9))  # two jobs within one second
        with job_folder(tmp_path / "logs") as other, job_folder(tmp_path / "logs") as third:
            assert (other, third) == (folder / "2", folder / "3")
    with job_folder(folder, shared=True), job_folder(folder, shared=True) as again:  # two machines of one job
        assert again == folder
    kept = sorted(folder.rglob("rank*.log"))
    assert sorted(path.read_text() for path in kept) == ["0 0", "0 1", "1 0", "2 0", "2 1"]
    assert [path.parent == folder for path in kept].count(True) == 2


# Who was to blame.


@pytest.mark.parametrize(("signs", "words", "said"), [
    (1, "", "machine 1 (beta) has given no sign for 0 s. Its launcher was killed"),  # read late
    (99, "", ""),
    (2, "failed: rank 3 was killed", "machine 1 (beta) says: rank 3 was killed"),
    (2, "done", ""),
])  # fmt: skip
def test_who_is_to_blame_for_lost_connections(signs, words, said, monkeypatch):
    monkeypatch.setattr(_machines, "_LAST_WORD", 0.3)
    machines = _machines.Machines(0, 2, "alpha", 1, 1.0, print)
    machines.names[1], machines._heard[1] = "beta", time.monotonic()

    def listen() -> None:
        for _ in range(signs):
            if not ended.wait(0.05):
                machines._heard[1] = time.monotonic()
        machines._words[1] = words.replace("failed: ", _machines._FAILED)

    ended = threading.Event()
    thread = threading.Thread(target=listen)
    thread.start()
    begin = time.monotonic()
    found = machines.blame()
    ended.set()
    thread.join()
    assert found.startswith(said) and bool(found) == bool(said) and time.monotonic() - begin < 5


UNEQUAL = """
    import os, torch
    import onecard as oc
    from onecard.comm.issue import collectives, groups
    group = groups.group(oc.ProcessMesh([0, 1], ["x"]), 0)
    for size in (5, 5, 5 + int(os.environ["RANK"])):
        collectives.{call}(torch.ones(size), group{more})
"""


@pytest.mark.share(1)
@pytest.mark.parametrize(
    ("backend", "call", "more"),
    [("gloo", "all_reduce", ""), ("gloo", "all_gather", ", 0, [size] * 2"), ("shm", "all_reduce", "")],
)
def test_ranks_that_disagree_on_a_shape_are_named(tmp_path, backend, call, more):
    status, output = launched(tmp_path, UNEQUAL.format(call=call, more=more), ONECARD_BACKEND=backend)
    assert status != 0
    if backend == "gloo":
        sides = [
            rf"rank {r}: {call} #3 of ranks 0, 1, {20 + 4 * r} bytes|{20 + 4 * r} bytes on rank {r}" for r in (0, 1)
        ]
    else:
        sides = [rf"rank {r} all_reduce\(sum\) #\d of {5 + r} float32" for r in (0, 1)]
    assert all(re.search(side, output) for side in sides), output


def test_an_error_that_ends_with_a_hint_may_still_be_a_consequence(tmp_path):
    """Which of two ranks the agent notices first is chance; what an error says of itself is not its last line."""
    workplace = SimpleNamespace(note=lambda rank: tmp_path / f"rank{rank}.json")
    record = _Recorder(str(workplace.note(1)))
    error = CommunicationError("all_gather failed on rank 1: Read error [127.0.0.1]: Connection reset by peer")
    error.add_note("To see more, run it once with ONECARD_CHECK=1")
    with redirect_stderr(io.StringIO()):
        record.exception(type(error), error, None)
    failures = {1: SimpleNamespace(exitcode=1), 0: SimpleNamespace(exitcode=-6)}
    ends = _explain._ends(failures, workplace)
    assert ends[1].consequence and root_cause(ends) == 0


def test_memory_kills_are_counted(tmp_path):
    """Version 2 and version 1 of control groups, a machine's counter, and files that do not exist."""
    texts = {"v2": "low 0\noom 3\noom_kill 2\n", "v1": "under_oom 0\noom_kill 2\n", "vmstat": "pswpin 0\noom_kill 2\n"}
    files = [tmp_path / name for name in (*texts, "missing")]
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    for name, text in texts.items():
        kills = MemoryKills(files)
        assert not kills.seen()
        (tmp_path / name).write_text(text.replace("oom 3", "oom 4"))
        assert not kills.seen()
        (tmp_path / name).write_text(text.replace("oom_kill 2", "oom_kill 3"))
        assert kills.seen()
    MemoryKills().seen()  # this machine's


@pytest.mark.parametrize("seen", [True, False])
def test_a_rank_killed_for_memory_is_called_that(tmp_path, seen):
    program = """
        import os, signal
        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        import time
        time.sleep(60)
    """
    options = ["--nproc_per_node", "2", write(tmp_path, program)]
    [(status, output)] = run_ranks(launch_with_counter, 1, tmp_path, options, seen)
    says = "the kernel killed it for want of memory" if seen else "killed, perhaps by the kernel for want of memory"
    assert status == 137 and f"rank 1 was killed by SIGKILL (exit code -9): {says}" in output


def launch_with_counter(folder: Path, argv: list[str], seen: bool) -> tuple[int, str]:
    """The launcher, where the kernel's counter rises, or does not, while the job runs."""
    from onecard.launch import _memory

    _memory._counters = lambda: [folder / "counter"]
    (folder / "counter").write_text("oom_kill 0\n")
    if seen:
        program = folder / argv[-1]
        program.write_text("open('counter', 'w').write('oom_kill 1\\n')\n" + program.read_text())
    return launch_here(folder, argv)
