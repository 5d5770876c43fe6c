"""SIGKILL at each operation on a file that a save makes: of each rank, over an older checkpoint. All of them: some minutes.

    PYTHONPATH=src:tests python tests/kill_points.py            every point
    PYTHONPATH=src:tests python tests/kill_points.py --every 9  each ninth

The ranks are forked, for a fork costs 20 ms. After each kill a checkpoint must load that is all old or all new, the next save
must work, and nothing may be left over.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import onecard as oc
from onecard.checkpoint.format import files
from onecard.checkpoint.reader.loading import open_any
from onecard.comm.world import world as the_world
from onecard.testing import run_ranks

KINDS = ("over", "step", "async")
OLD, NEW, NEXT = 1.0, 2.0, 3.0
SHAPE = (9, 5)


@dataclass
class Tally:
    """What a sweep saw."""

    points: int = 0
    old: int = 0
    new: int = 0
    operations: Counter[str] = field(default_factory=Counter)

    def add(self, other: Tally) -> None:
        self.points += other.points
        self.old += other.old
        self.new += other.new
        self.operations += other.operations


def state(value: float, size: int) -> dict[str, Any]:
    mesh = oc.ProcessMesh(range(size), ["x"])
    cut = oc.shard_tensor(torch.full(SHAPE, value), mesh, [oc.Shard(0)])
    return {"cut": cut, "plain": torch.full((3,), value), "step": int(value)}


def save(kind: str, place: Path, value: float, size: int) -> None:
    if kind == "step":
        oc.checkpoint.save(state(value, size), place, step=int(value), keep=1)
    else:
        oc.save_state_dict(state(value, size), place, wait=kind != "async").wait()


def rank_of(act: Callable[[], None], rank: int, size: int, store: Path, patience: float) -> int:
    """Fork a rank that joins a group and acts."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size)}
        the_world.TIMEOUT = timedelta(seconds=30)
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
        the_world.TIMEOUT = timedelta(seconds=patience)
        act()
        code = 0
    except BaseException as error:
        (store.parent / f"error{rank}").write_text(f"{type(error).__name__}: {error}")
    finally:
        os._exit(code)


def crew(
    act: Callable[[int], None], size: int, patience: float, dies: int | None = None, others_too: bool = False
) -> list[int]:
    """Run ranks to their end; how each ended. ``dies``: a rank that is expected to; ``others_too``: kill the others after it."""
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "store"
        pids = [rank_of(lambda r=r: act(r), r, size, store, patience) for r in range(size)]
        ends: dict[int, int] = {}
        if dies is not None and others_too:
            ends[dies] = os.waitpid(pids[dies], 0)[1]
            for pid in pids:
                os.kill(pid, signal.SIGKILL) if pid != pids[dies] else None
        for rank, pid in enumerate(pids):
            if rank not in ends:
                ends[rank] = os.waitpid(pid, 0)[1]
        return [ends[rank] for rank in range(size)]


def points_of(kind: str, size: int, template: Path) -> list[list[str]]:
    """The operations of each rank in a save that nobody disturbs."""
    place = template.parent / "count"
    shutil.copytree(template, place)

    def act(rank: int) -> None:
        seen: list[str] = []
        files.watchers.append(lambda operation, path: seen.append(operation))
        save(kind, place, NEW, size)
        (template.parent / f"seen{rank}").write_text(" ".join(seen))

    assert crew(act, size, 60) == [0] * size
    shutil.rmtree(place)
    return [(template.parent / f"seen{rank}").read_text().split() for rank in range(size)]


def kill_at(kind: str, size: int, victim: int, k: int, template: Path, others_too: bool, tally: Tally) -> None:
    place = template.parent / "place"
    shutil.copytree(template, place)

    def act(rank: int) -> None:
        left = [k]

        def watch(operation: str, path: str) -> None:
            left[0] -= 1
            if rank == victim and left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)

        files.watchers.append(watch)
        save(kind, place, NEW, size)

    where = f"{kind}, rank {victim} of {size} at operation {k}"
    # The others are killed with it, as a launcher does, or live on, hear that it did not come, and clean up.
    for patience in (60.0,) if others_too else (0.6, 5.0, 40.0):  # on a busy host one may come late, and nobody dies
        ends = crew(act, size, patience, victim, others_too)
        if ends[victim] == signal.SIGKILL:
            break
        shutil.rmtree(place)
        shutil.copytree(template, place)
    assert ends[victim] == signal.SIGKILL, (where, ends)
    value = whole_value(oc.checkpoint.load(place), where)
    assert value in (OLD, NEW), (where, value)
    tally.points += 1
    tally.old += value == OLD
    tally.new += value == NEW
    if k % 4 == 0:  # the next save: by as many ranks, or by one
        assert crew(lambda rank: save(kind, place, NEXT, size), size, 60) == [0] * size, where
    else:
        save(kind, place, NEXT, 1)
    assert whole_value(oc.checkpoint.load(place), where) == NEXT
    assert oc.checkpoint.verify(place) == [], where
    found = [path.name for path in place.iterdir()]
    if kind == "step":
        assert found == ["step-00000003"], (where, found)
    index = open_any(place)
    left = {path.name for path in index.folder.iterdir()} - set(index.files) - {"index.json"}
    assert not left, (where, left)
    shutil.rmtree(place)


def whole_value(loaded: dict[str, Any], where: str) -> float:
    values = {*loaded["cut"].flatten().tolist(), *loaded["plain"].tolist(), float(loaded["step"])}
    assert len(values) == 1 and loaded["cut"].shape == SHAPE, f"{where}: mixed: {values}"
    return values.pop()


def sweep(every: int = 1, first: int = 0, kinds: tuple[str, ...] = KINDS, sizes: tuple[int, ...] = (2, 4)) -> Tally:
    """Each ``every``-th point; runs in a process of its own."""
    if dist.is_initialized():  # in a rank of the harness
        dist.destroy_process_group()
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1"}
    os.environ.pop("LOCAL_WORLD_SIZE", None)
    tally, number = Tally(), first
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    for kind in kinds:
        for size in sizes:
            with tempfile.TemporaryDirectory(dir=memory) as folder:
                template = Path(folder) / "template"
                assert crew(lambda rank, k=kind, p=template, s=size: save(k, p, OLD, s), size, 60) == [0] * size
                operations = points_of(kind, size, template)
                for victim in range(size):
                    for k, operation in enumerate(operations[victim]):
                        number += 1
                        if number % every == 0:
                            tally.operations[operation] += 1
                            kill_at(kind, size, victim, k, template, others_too=number // every % 3 != 0, tally=tally)
    return tally


def main() -> None:
    every = int(sys.argv[sys.argv.index("--every") + 1]) if "--every" in sys.argv else 1
    total, start = Tally(), time.perf_counter()
    for kind in KINDS:
        for size in (2, 4):
            [tally] = run_ranks(sweep, 1, every, 0, (kind,), (size,), timeout=1800)
            print(f"{kind:6} {size} ranks: {tally.points:4} points, {tally.old} old, {tally.new} new", flush=True)
            total.add(tally)
    print(f"{total.points} points: {total.old} old, {total.new} new, none mixed; {dict(total.operations)}; "
          f"{time.perf_counter() - start:.0f} s")  # fmt: skip


if __name__ == "__main__":
    main()
