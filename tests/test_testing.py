"""The multi-rank harness: values come back, and each way to fail names its cause and leaves nothing behind."""

import gc
import io
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from dataclasses import dataclass
from multiprocessing import forkserver
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.distributed as dist

import onecard as oc
import onecard.testing
from onecard.comm.world.world import default_backend
from onecard.errors import ProofError
from onecard.testing import RankError, RankTimeout, assert_close, multirank, preload, run_ranks
from onecard.testing._job import RankReport
from onecard.testing._report import Death, root_cause
from onecard.testing._run import _context


@dataclass
class Pair:
    """A class of a test module: the ranks must be able to open it."""

    left: int
    right: torch.Tensor


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return "(zombie)" not in Path(f"/proc/{pid}/status").read_text() if os.path.exists("/proc") else True
    except (ProcessLookupError, FileNotFoundError):  # the latter: it went between the two looks
        return False


def wait_until_gone(pids: list[int], seconds: float = 60.0) -> list[int]:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and any(map(alive, pids)):
        time.sleep(0.05)
    return [pid for pid in pids if alive(pid)]


# What works.


@multirank(2)
def test_gradients_meet_in_an_all_reduce():
    x = torch.full((2,), float(dist.get_rank() + 1), requires_grad=True)
    (x * x).sum().backward()
    dist.all_reduce(x.grad)
    assert_close(x.grad, torch.full((2,), 6.0))


@multirank(2)
@pytest.mark.parametrize("size", [1, 3])
def test_parameters_and_fixtures_reach_the_ranks(size, tmp_path):
    (tmp_path / f"{dist.get_rank()}").write_text("x" * size)
    dist.barrier()
    assert [len(path.read_text()) for path in tmp_path.iterdir()] == [size, size]


class TestMethods:
    @multirank(2)
    def test_method(self):
        assert isinstance(self, TestMethods) and dist.get_world_size() == 2


@multirank(2)
def values(pair):
    names = {name: os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "CHECK")}
    assert torch.get_num_threads() == 1 and dist.get_backend() == default_backend()
    return names, Pair(dist.get_rank(), pair.right * 2)


def test_values_come_back_by_rank(monkeypatch):
    monkeypatch.setenv("CHECK", "now")
    zero, one = values(Pair(0, torch.ones(3, requires_grad=True)))
    assert zero[0] == {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "CHECK": "now"}
    assert one[0]["RANK"] == one[0]["LOCAL_RANK"] == "1"
    assert one[1].left == 1 and torch.equal(one[1].right, torch.full((3,), 2.0))


def print_rank():
    print(f"hello from {dist.get_rank()}", file=sys.stderr)


def test_output_of_ranks_is_shown(capsys):
    run_ranks(print_rank, 2)
    assert capsys.readouterr().out == "[rank 0] hello from 0\n[rank 1] hello from 1\n"


def wait_for(path):
    if dist.get_rank() == 0:
        print("early")
        deadline = time.monotonic() + 60
        while not path.exists():
            assert time.monotonic() < deadline, "nobody has seen it"
            time.sleep(0.01)


class Reader(io.StringIO):
    """Standard output that says, by a file, that a line has come through."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    def flush(self) -> None:
        if self.getvalue() == "[rank 0] early\n":
            self.path.touch()


def test_lines_of_rank_0_appear_while_it_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stdout", Reader(tmp_path / "seen"))
    run_ranks(wait_for, 2, tmp_path / "seen")


def print_half_lines():
    sys.stdout.write("first\nsecö")
    sys.stdout.flush()
    time.sleep(0.6)  # some looks of the parent
    sys.stdout.write("nd\nrest")


def test_lines_appear_whole_and_once(capsys):
    run_ranks(print_half_lines, 1)
    assert capsys.readouterr().out == "[rank 0] first\n[rank 0] secönd\n[rank 0] rest\n"


def do_nothing():
    pass


def test_later_runs_are_quick():
    run_ranks(do_nothing, 2)
    took = []
    for _ in range(5):  # other programs may hold one up
        start = time.monotonic()
        run_ranks(do_nothing, 2)
        took.append(time.monotonic() - start)
    assert min(took) < 2.0  # 0.1 s when nothing else runs; without the fork server 5 s


def order_of_imports():
    preload("first", "second")
    _context()  # which the first run asks for
    with pytest.raises(RuntimeError, match=r"ranks have been started before preload\('third',\)"):
        preload("third")
    return forkserver._forkserver._preload_modules


def test_modules_are_imported_before_what_is_there_is_set_aside():
    [modules] = run_ranks(order_of_imports, 1)
    assert modules[-3:] == ["first", "second", "onecard.testing._preload"] and "pytest" in modules


def frozen():
    return gc.get_freeze_count(), len(gc.get_objects())


def test_collections_of_a_rank_look_at_its_own_objects_only():
    """Each took 0.2 s and copied 70 MiB of pages."""
    [(before, own)] = run_ranks(frozen, 1)
    assert before > 100_000 > own


# What fails, and how it is told.


def fail_on_rank_1(where):
    where.joinpath(str(dist.get_rank())).write_text(str(os.getpid()))
    if dist.get_rank() == 1:
        raise ValueError("the root cause")
    dist.barrier()


def pids_in(folder: Path) -> list[int]:
    return [int(path.read_text()) for path in folder.iterdir()]


def test_first_failing_rank_shows_its_own_traceback(tmp_path):
    with pytest.raises(RankError) as caught:
        run_ranks(fail_on_rank_1, 3, tmp_path)
    text = str(caught.value)
    assert not isinstance(caught.value, RankTimeout)
    assert text.startswith("fail_on_rank_1: rank 1 of 3 failed first\n\nTraceback")
    assert 'raise ValueError("the root cause")' in text and "_rank.py" not in text
    assert "ranks 0, 2 still ran and were ended" in text
    assert caught.value.rank == 1
    assert len(pids_in(tmp_path)) == 3 and not wait_until_gone(pids_in(tmp_path))


def die_on_rank_1(how):
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL) if how == "kill" else os._exit(3)
    dist.all_reduce(torch.ones(1))


@pytest.mark.parametrize(("how", "code", "says"), [("kill", -9, "was killed by SIGKILL"), ("exit", 3, "exit code 3")])
def test_a_dead_rank_is_the_cause_and_not_those_that_lost_it(how, code, says):
    with pytest.raises(RankError, match=says) as caught:
        run_ranks(die_on_rank_1, 2, how)
    assert caught.value.rank == 1 and caught.value.exitcode == code


def miss_a_collective():
    dist.all_reduce(torch.ones(4))
    if dist.get_rank() == 1:
        time.sleep(60)
    dist.all_reduce(torch.ones(8))


def test_a_hang_is_cut_off_with_stacks_and_the_missing_rank():
    with pytest.raises(RankTimeout) as caught:
        run_ranks(miss_a_collective, 2, timeout=3.0)
    text = str(caught.value)
    assert "ranks 0, 1 did not finish within 3 s" in text
    assert "rank 0 waits in all_reduce #2 of ranks 0, 1 (32 bytes, for " in text
    assert "missing: rank 1, which is in no collective; it last left all_reduce #1 of ranks 0, 1" in text
    zero, one = text.split("--- stack of rank ")[1:]
    assert "all_reduce" in zero and "in miss_a_collective" in zero and "_watch" not in text
    here = Path(__file__).read_text().splitlines()
    line = 1 + next(i for i, text in enumerate(here) if "time.sleep(60)" in text)
    assert f"line {line} in miss_a_collective" in one


def return_early():
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(4))


def test_a_rank_that_has_returned_is_missed_long_before_the_time_out():
    start = time.monotonic()
    with pytest.raises(RankTimeout, match="others wait for rank 1, which has already returned"):
        run_ranks(return_early, 2)
    assert time.monotonic() - start < 60


def spin():
    while True:
        pass


def stop_itself():
    os.kill(os.getpid(), signal.SIGSTOP)


@pytest.mark.parametrize("function", [spin, stop_itself])
def test_no_rank_can_refuse_to_end(function):
    with pytest.raises(RankTimeout):
        run_ranks(function, 1, timeout=0.5)


def start_a_child(where):
    child = subprocess.Popen(["sleep", "60"])
    where.joinpath("pid").write_text(str(child.pid))
    raise ValueError("leaves a child")


def test_children_of_ranks_end_with_them(tmp_path):
    with pytest.raises(RankError, match="leaves a child"):
        run_ranks(start_a_child, 1, tmp_path)
    assert not wait_until_gone(pids_in(tmp_path))


def assert_wrong():
    total = torch.tensor([1.0, 2.0]).sum()
    assert total == 4


def test_a_bare_assert_shows_its_values():
    with pytest.raises(RankError, match=r"where total = tensor\(3\.\)"):
        run_ranks(assert_wrong, 1)


def warn():
    warnings.warn("careful", UserWarning, stacklevel=1)


def test_a_warning_in_a_rank_is_an_error():
    with pytest.raises(RankError, match="UserWarning: careful"):
        run_ranks(warn, 1)


def leave():
    sys.exit(4)


def test_sys_exit_is_a_failure():
    with pytest.raises(RankError, match="SystemExit: 4"):
        run_ranks(leave, 1)


def run_script(monkeypatch, path: Path, text: str) -> None:
    """Does what `python path` does, in this process: the fork server is warm."""
    path.write_text(textwrap.dedent(text))
    main = ModuleType("__main__")
    main.__file__ = str(path)
    monkeypatch.setitem(sys.modules, "__main__", main)  # where ranks are told to find it
    exec(compile(path.read_text(), path, "exec"), main.__dict__)


UNGUARDED = """
    import sys
    from onecard.testing import run_ranks

    if __name__ != "__main__":
        said = sys.stderr = open(f"{__file__}.said", "a")  # a rank: what it says in vain

    def work(x):
        return x

    print(run_ranks(work, 3, 1))
"""


LONG_CALL = """
    from onecard.testing import run_ranks

    def work():
        pass

    def main(function, nproc):
        run_ranks(function, nproc)

    main(work,
         2)
"""


def test_a_script_without_the_guard_is_told_so_once(tmp_path, monkeypatch):
    with pytest.raises(RankError) as caught:
        run_script(monkeypatch, tmp_path / "train.py", UNGUARDED)
    text = str(caught.value)
    assert text.startswith("train.py, line 11, starts ranks at its top level.")
    assert text.endswith('\n\n    if __name__ == "__main__":\n        print(run_ranks(work, 3, 1))')
    assert (tmp_path / "train.py.said").read_text() == ""


def test_the_call_is_shown_as_far_as_one_line_says_it(tmp_path, monkeypatch):
    with pytest.raises(RankError, match=r'"__main__":\n        main\(work, \.\.\.$'):
        run_script(monkeypatch, tmp_path / "train.py", LONG_CALL)


def test_a_script_with_the_guard_runs(tmp_path, monkeypatch, capsys):
    guarded = UNGUARDED.replace("print(run", 'if __name__ == "__main__":\n        print(run')
    run_script(monkeypatch, tmp_path / "train.py", guarded)
    assert capsys.readouterr().out == "[1, 1, 1]\n"


def test_a_script_that_ends_the_ranks_which_import_it(tmp_path, monkeypatch):
    leaving = UNGUARDED.replace("def work", "if __name__ != '__main__':\n        sys.exit(1)\n    def work")
    with pytest.raises(RankError, match="ended with exit code 1 while it imported the script"):
        run_script(monkeypatch, tmp_path / "train.py", leaving)


def return_a_lambda():
    return lambda: 0


def test_what_cannot_be_sent_is_said():
    with pytest.raises(RankError, match="the return value of return_a_lambda cannot be sent"):
        run_ranks(return_a_lambda, 1)
    with pytest.raises(TypeError, match="an argument of print_rank cannot be sent"):
        run_ranks(print_rank, 1, lambda: 0)
    with pytest.raises(ValueError, match="define it at the top level"):
        run_ranks(lambda: 0, 1)
    with pytest.raises(ValueError, match="at least one rank"):
        run_ranks(print_rank, 0)
    with pytest.raises(TypeError, match=r"write @multirank\(2\)"):
        multirank(print_rank)


def test_root_cause_is_the_first_in_time_that_is_no_consequence():
    early, late = RankReport("error", 1.0), RankReport("error", 2.0)
    lost = RankReport("error", 0.5, consequence=True)
    assert root_cause({0: late, 1: early, 2: lost}) == 1
    assert root_cause({0: Death(-9, 3.0), 2: lost}) == 0
    assert root_cause({0: lost}) == 0
    assert root_cause({0: RankReport("done", 0.0)}) is None


# A test run as a user has it: pytest's own importing, its output, Ctrl-C.

USER_TEST = """
    import os, time, pathlib, pytest, torch.distributed as dist
    from onecard.testing import multirank

    @multirank(2)
    def test_bad():
        assert dist.get_world_size() == 3

    class TestGood:
        @multirank(2)
        def test_method(self):  # the ranks get `self` by the name of this module, which is on no path
            assert type(self) is TestGood

    @multirank(2)
    def test_skipped():
        pytest.skip("as a rank asks")

    @multirank(2)
    def test_slow():
        pathlib.Path(f"pid{dist.get_rank()}").write_text(str(os.getpid()))
        time.sleep(60)
"""


# Seconds until a pytest of its own has ranks. Nothing in it waits: it takes 8 s of processor time, one thing after the
# other (torch and onecard are imported twice, by pytest and by the fork server), and so, where five programs share a
# core, 40 s. The bound is there for a hang alone.
START = 240


def start_pytest(folder: Path, *options: str) -> subprocess.Popen[str]:
    (folder / "deep").mkdir()
    (folder / "deep" / "test_user.py").write_text(textwrap.dedent(USER_TEST))
    command = [sys.executable, "-P", "-m", "pytest", "-p", "no:cacheprovider", "-q", *options, "deep/test_user.py"]
    # -P: the folder is not on the import path. A process group of its own, as a shell gives one, is what an interrupt
    # reaches as a whole.
    environment = os.environ | {"PYTHONPATH": str(Path(onecard.testing.__file__).parents[2])}
    return subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True
    )


def have_begun(folder: Path, goes_on=lambda: True) -> list[int]:
    """The processes of the slow test's two ranks, as soon as both are in it."""
    deadline = time.monotonic() + START
    while len(list(folder.glob("pid?"))) < 2:
        assert time.monotonic() < deadline and goes_on()
        time.sleep(0.05)
    time.sleep(0.2)
    pids = [int(path.read_text()) for path in folder.glob("pid?")]
    assert all(map(alive, pids))
    return pids


@pytest.mark.proof
@pytest.mark.usefixtures("interruptible")
def test_in_a_file_outside_any_package_until_an_interrupt(tmp_path):
    """The tests before the slow one have ended as they should; no rank of it survives Ctrl-C."""
    with start_pytest(tmp_path, "--import-mode=importlib") as process:
        pids = have_begun(tmp_path, lambda: process.poll() is None)
        os.killpg(process.pid, signal.SIGINT)
        output = process.communicate(timeout=START)[0]
    assert not wait_until_gone(pids)
    assert process.returncode == 2  # pytest: interrupted
    assert "1 failed, 1 passed, 1 skipped" in output
    assert "test_bad: rank 0 of 2 failed first" in output or "test_bad: rank 1 of 2 failed first" in output
    assert 1 <= output.count("assert dist.get_world_size() == 3") <= 2  # at most once for each rank that failed
    assert "process.start" not in output  # not the harness' own code


def slow(folder):
    (folder / f"pid{dist.get_rank()}").write_text(str(os.getpid()))
    time.sleep(60)


def killed_while_its_ranks_run(folder):
    threading.Thread(target=lambda: (have_begun(folder), os.kill(os.getpid(), signal.SIGKILL)), daemon=True).start()
    run_ranks(slow, 2, folder)


def test_no_rank_survives_its_killed_parent(tmp_path):
    """The parent is itself a rank here: it need not import torch first, as a script would."""
    with pytest.raises(RankError, match="SIGKILL"):
        run_ranks(killed_while_its_ranks_run, 1, tmp_path, timeout=START)
    assert not wait_until_gone([int(path.read_text()) for path in tmp_path.glob("pid?")])
    assert len(list(tmp_path.glob("pid?"))) == 2


# Comparison.


class Whole:
    def full_tensor(self):
        return torch.tensor([1.0, 2.0])


@pytest.mark.parametrize(
    ("actual", "expected", "says"),
    [
        (torch.tensor([[1.0, 2.0], [3.0, 5.0]]), torch.tensor([[1.0, 2.0], [3.0, 4.0]]), r"at \[1, 1\]: 5.0, expe"),
        (torch.ones(2), torch.ones(3), r"shape \(2,\), expected \(3,\)"),
        (torch.ones(2), torch.ones(2, dtype=torch.float64), "dtype torch.float32"),
        (torch.tensor([1.0, float("nan")]), torch.ones(2), r"at \[1\]: nan"),
        (torch.tensor([1.0, 1.0]), torch.tensor([1.0, float("inf")]), "expected inf"),
        (torch.tensor(1.00003), torch.tensor(1.0), "value is 1.00003"),
        (torch.tensor([1e-9]), torch.tensor([2e-9]), "differs"),
        (torch.tensor([1 + 1j]), torch.tensor([1 + 2j]), "largest difference 1,"),
        (torch.tensor([True]), torch.tensor([False]), "True, expected False"),
        ({"w": [torch.ones(1)]}, {"w": [torch.zeros(1)]}, r"value\['w'\]\[0\] differs"),
        ({"w": 1}, {"b": 1}, "keys"),
        ([1], [1, 2], "length 1, expected 2"),
        (None, 1.0, "None"),
        (Whole(), torch.tensor([1.0, 3.0]), r"at \[1\]"),
    ],
)
def test_assert_close_names_the_difference(actual, expected, says):
    with pytest.raises(AssertionError, match=says):
        assert_close(actual, expected)


def test_assert_close_accepts_rounding_only():
    base = torch.tensor([1000.0, 1e-4])
    assert_close(base * (1 + 5e-6), base)
    assert_close(base + torch.tensor([0.0, 4e-3]), base)  # relative to its neighbours
    assert_close(Whole(), torch.tensor([1.0, 2.0]))
    assert_close([float("nan"), {"a": None}, 3], (float("nan"), {"a": None}, 3))


# What was typed: a notebook's cells are a `__main__` without a file.

CELLS = """
    import torch
    from dataclasses import dataclass
    from torch import nn
    import onecard as oc

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.out = nn.Linear(4, 2)

        def forward(self, x):
            return scaled(self.out(x))

    @dataclass
    class Seen:
        rank: int
        loss: float

    scale = 3.0

    def scaled(x):
        return x * scale

    def train(net, *, rows):
        mesh = oc.ProcessMesh([0, 1], ["dp"])
        x = oc.shard_tensor(torch.ones(rows, 4), mesh, [oc.Shard(0)])
        return Seen(oc.get_rank(), oc.shard_layer(net, mesh)(x).sum().item())
"""


def typed(monkeypatch, last: str) -> dict:
    cell = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", cell)
    exec(textwrap.dedent(CELLS) + last, cell.__dict__)
    return cell.__dict__


def test_functions_and_classes_of_cells_reach_the_ranks(monkeypatch):
    cell = typed(monkeypatch, "net = Net()")
    seen = run_ranks(cell["train"], 2, cell["net"], rows=4)
    assert [type(one) for one in seen] == [cell["Seen"]] * 2  # the notebook's class, not a copy of it
    assert [one.rank for one in seen] == [0, 1]
    expected = cell["net"](torch.ones(4, 4)).sum().item()
    assert [one.loss for one in seen] == pytest.approx([expected] * 2, rel=1e-5)
    assert run_ranks(eval("lambda x: scaled(x) + oc.get_rank()", cell), 2, 1.0) == [3.0, 4.0]


def test_a_cell_is_told_what_it_lacks(monkeypatch):
    cell = typed(monkeypatch, "import threading\nlock = threading.Lock()\ndef held(): return lock\n")
    with pytest.raises(TypeError, match=r"held, .*or something of another cell that it uses, cannot be sent"):
        run_ranks(cell["held"], 1)
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(ValueError, match=r"%%writefile ranks.py, .*from ranks import train.*pip install cloudpickle"):
        run_ranks(cell["train"], 1)
    cell["held"].__code__ = (lambda: None).__code__
    with pytest.raises(ProofError, match=r"held was typed at a prompt, .*%%writefile ranks.py"):
        oc.prove(cell["held"], world=2, processes=True)
