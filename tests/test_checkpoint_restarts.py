"""Jobs go on: killed ranks, fewer ranks, a SIGTERM; the same losses and the same samples as without."""

from __future__ import annotations

import signal
import time
from itertools import chain, islice
from pathlib import Path

import pytest
import resumed
import torch
from launching import StartedFork

import onecard as oc
from onecard.errors import LayoutError
from onecard.testing import run_ranks

STEPS = 8


def in_ranks(folder: Path, steps: int = STEPS) -> None:
    resumed.main(str(folder), str(steps), "{}")


def result(folder: Path) -> tuple[list[float], list[int]]:
    loaded = oc.checkpoint.load(folder / "result")
    return loaded["losses"], loaded["seen"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[float], list[int]]:
    """The run that nobody stops, on one card."""
    folder = tmp_path_factory.mktemp("whole")
    run_ranks(in_ranks, 1, folder)
    return result(folder)


@pytest.mark.proof
def test_killed_ranks_are_started_again(tmp_path: Path, whole: tuple[list[float], list[int]]) -> None:
    """From 3 ranks to 2, and with 2 again; no sample lost or twice."""
    kills = {0: (2, 1), 1: (5, 0)}
    [(status, output)] = run_ranks(resumed.launch, 1, tmp_path, "2:3", STEPS, kills, forked=True)
    assert status == 0, output
    assert "restart 1 of 2 with 2 ranks" in output and "restart 2 of 2 ---" in output
    losses, seen = result(tmp_path)
    assert losses == pytest.approx(whole[0], rel=1e-5) and seen == whole[1]
    assert sorted(seen[:30]) == sorted(seen[30:60]) == list(range(30))  # each pass has each sample once
    assert [p.name for p in sorted(tmp_path.glob("step-*"))] == ["step-00000007", "step-00000008"]
    assert len(resumed.gaps(tmp_path)) == 2


@pytest.mark.proof
def test_from_any_number_of_ranks_to_any(tmp_path: Path, whole: tuple[list[float], list[int]]) -> None:
    """Bit for bit where there are as many ranks."""
    for i, size in enumerate([2, 1, 3, 2]):
        run_ranks(in_ranks, size, tmp_path / "any", 2 * (i + 1))
    assert result(tmp_path / "any")[1] == whole[1]
    assert result(tmp_path / "any")[0] == pytest.approx(whole[0], rel=1e-5)
    for name, stops in (("stopped", [1, 5, STEPS]), ("not", [STEPS])):
        for steps in stops:
            run_ranks(in_ranks, 2, tmp_path / name, steps)
    assert result(tmp_path / "stopped") == result(tmp_path / "not")


STOPPED = """
    import sys, time
    from pathlib import Path
    sys.path.insert(0, {tests!r})
    import resumed
    import onecard as oc
    state = resumed.run(Path("."), 100000, {{}}, stop_at=3)
    print("ended at", state["step"], flush=True)
"""


def test_sigterm_saves_and_ends_cleanly(tmp_path: Path) -> None:
    source = STOPPED.format(tests=str(Path(__file__).parent))
    with StartedFork(tmp_path, source, "--nproc_per_node", "2") as process:
        until = time.monotonic() + 120
        while not (tmp_path / "waiting").exists():
            assert process.poll() is None and time.monotonic() < until, process.communicate()
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)  # to the launcher
        output, errors = process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGTERM and "SIGTERM" in errors, errors
    last = int(output.split("ended at ")[1])
    assert last >= 3 and oc.checkpoint.load(tmp_path)["step"] == last
    assert "Traceback" not in output + errors


@pytest.mark.parametrize("axis", [None, 0])
def test_a_position_in_a_loader(axis: int | None) -> None:
    """On one card: what is left of a pass, the next pass, and another size of batches."""
    from torch.utils.data import DataLoader

    def loader(size: int) -> oc.ShardDataloader:
        generator = torch.Generator().manual_seed(1)
        return oc.shard_dataloader(
            DataLoader(resumed.Noisy(), size, shuffle=True, generator=generator), oc.ProcessMesh([0]), axis
        )

    def read(batches: oc.ShardDataloader) -> list[list[int]]:
        return [indices.tolist() for indices, _ in batches]

    reference = loader(6)
    first, second = read(reference), read(reference)
    for number in range(1, 6):
        stopped, again, halved = loader(6), loader(6), loader(3)
        assert len(list(islice(stopped, number))) == number
        saved = stopped.state_dict()
        again.load_state_dict(saved)
        assert read(again) == first[number:] and read(again) == second
        halved.load_state_dict(saved)
        assert list(chain(*read(halved))) == list(chain(*first[number:]))
    ended = loader(6)
    read(ended)
    fresh = loader(6)
    fresh.load_state_dict(ended.state_dict())
    assert ended.state_dict()["ended"]
    with pytest.raises(LayoutError, match="batch_size=6"):
        other = loader(7)
        other.load_state_dict(saved)
