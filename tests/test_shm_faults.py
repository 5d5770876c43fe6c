"""What the shared-memory backend does when something goes wrong: it never hangs, never leaks, and says who and where."""

import gc
import itertools
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
import warnings
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from amounts import patience

from onecard.comm import shm
from onecard.testing import RankError, multirank, run_ranks

pytestmark = pytest.mark.skipif(not shm.available(), reason="needs Linux")


def start(context, function, size, folder, *args):
    """Processes of a group that this test may kill, unlike those of run_ranks. Returns them and their queue."""
    queue = context.Queue()
    ranks = [
        context.Process(target=joined, args=(function, rank, size, str(folder / "store"), queue, *args), daemon=True)
        for rank in range(size)
    ]
    for process in ranks:
        process.start()
    return ranks, queue


def joined(function, rank, size, path, queue, *args):
    torch.set_num_threads(1)
    dist.init_process_group("shm", init_method=f"file://{path}", rank=rank, world_size=size)
    dist.barrier()
    try:
        function(rank, queue, *args)
    except RuntimeError as error:
        queue.put((rank, time.monotonic(), str(error)))
    queue.close()
    queue.join_thread()


def die_in(rank, queue, asynchronous):
    x = torch.ones(10)
    for _ in range(3):
        dist.all_reduce(x)
    if rank == 1:
        queue.put((rank, time.monotonic(), "dies"))
        queue.close()
        queue.join_thread()
        os.kill(os.getpid(), signal.SIGKILL)
    work = dist.all_reduce(x, async_op=asynchronous)
    if work is not None:
        work.wait()


def others_name_rank_1(ranks, queue, collective):
    """Ranks 0 and 2 of three end in good order, within 2 s of the death of rank 1, which they name with the collective."""
    news = {rank: (when, text) for rank, when, text in (queue.get(timeout=120) for _ in range(3))}
    for process in ranks:
        process.join(120)
    assert [p.exitcode for p in ranks] == [0, -signal.SIGKILL, 0]
    for rank in (0, 2):
        when, text = news[rank]
        assert when - news[1][0] < patience(2)
        assert re.search(rf"rank 1 \(process \d+\) died before or in {collective}", text), text


@pytest.mark.parametrize(("method", "asynchronous"), [("fork", False), ("fork", True), ("forkserver", True)])
def test_a_killed_rank_is_named_by_all_others_within_two_seconds(method, asynchronous, tmp_path):
    ranks, queue = start(multiprocessing.get_context(method), die_in, 3, tmp_path, asynchronous)
    others_name_rank_1(ranks, queue, r"all_reduce\(sum\) #5 of 10 float32")


def before_step(channel, number, act):
    """Has this rank act before it goes a step for the `number`th time, alone or together with all."""
    steps = itertools.count()

    def acting(step):
        return lambda *given, **named: (act() if next(steps) == number else None, step(*given, **named))[1]

    channel.cross, channel.advance = acting(channel.cross), acting(channel.advance)


def die_inside(rank, queue, kind):
    x = torch.ones(4 * 2**20)
    dist.all_reduce(x[:10])
    if rank == 1:
        queue.put((rank, time.monotonic(), "dies"))
        queue.close()
        queue.join_thread()
        before_step(dist.group.WORLD._channel, 5, lambda: os.kill(os.getpid(), signal.SIGKILL))
    if kind == "all_reduce":
        dist.all_reduce(x)
    else:
        dist.broadcast(x, 0)


@pytest.mark.parametrize("kind", ["all_reduce", "broadcast"])
def test_a_rank_killed_in_the_midst_of_a_large_collective_is_named(kind, tmp_path):
    ranks, queue = start(multiprocessing.get_context("fork"), die_inside, 3, tmp_path, kind)
    others_name_rank_1(ranks, queue, rf"{kind}.* #3 of 4194304 float32")


def segments():
    return {name for name in os.listdir("/dev/shm") if "onecard" in name or "torch" in name}


def linger(rank, queue):
    dist.all_reduce(torch.ones(1_000_000))
    dist.send(torch.ones(10), 1 - rank)
    queue.put((rank, os.getpid(), ""))
    time.sleep(60)


def test_nothing_is_left_behind_after_kill_9(tmp_path):
    before = segments()
    ranks, queue = start(multiprocessing.get_context("fork"), linger, 2, tmp_path)
    for _ in ranks:
        _, pid, _ = queue.get(timeout=120)
        maps = Path(f"/proc/{pid}/maps").read_text()
        assert "onecard-shm (deleted)" in maps  # it is there, and it has no name
    assert segments() == before
    for process in ranks:
        process.kill()
        process.join(10)
    assert segments() == before


def test_segments_are_private():
    from onecard.comm.shm.segment import Segment, SegmentLayout

    _, descriptor = Segment.create(SegmentLayout(2))
    assert os.fstat(descriptor).st_mode & 0o777 == 0o600
    os.close(descriptor)


def sleepers(rank, queue, kind):
    queue.put((rank, time.monotonic(), "ready"))
    if rank == 0:
        try:
            if kind == "recv":
                dist.recv(torch.empty(3), 1)
            else:
                dist.all_reduce(torch.ones(3))
        except KeyboardInterrupt:
            queue.put((rank, time.monotonic(), "KeyboardInterrupt"))
            return
    else:
        time.sleep(2.5)
        dist.all_reduce(torch.ones(3))  # rank 0 may have brought its part to this one
        dist.all_reduce(torch.ones(3))


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("kind", ["all_reduce", "recv"])
def test_ctrl_c_ends_a_wait_and_the_others_are_told(kind, tmp_path):
    ranks, queue = start(multiprocessing.get_context("fork"), sleepers, 2, tmp_path, kind)
    for _ in ranks:
        queue.get(timeout=120)
    time.sleep(0.5)
    now = time.monotonic()
    os.kill(ranks[0].pid, signal.SIGINT)
    rank, when, text = queue.get(timeout=120)
    assert (rank, text) == (0, "KeyboardInterrupt") and when - now < patience(1)
    rank, when, text = queue.get(timeout=120)
    assert (
        rank == 1
        and when - now < patience(4)
        and re.search(r"rank 0 (was stopped by KeyboardInterrupt|is gone|.process \d+. died)", text)
    )
    for process in ranks:
        process.join(10)
        assert process.exitcode == 0


def mismatch(kind):
    rank = dist.get_rank()
    x = torch.ones(8) if rank or kind != "size" else torch.ones(9)
    x = x.double() if kind == "dtype" and rank else x
    if kind == "operator" and rank:
        dist.broadcast(x, 0)
    elif kind == "reduction" and rank:
        dist.all_reduce(x, dist.ReduceOp.MAX)
    elif kind == "root":
        dist.broadcast(x, rank)
    elif kind == "split":
        dist.all_to_all_single(torch.empty(3 + rank), x[:4], [2, 1 + rank], [2, 2])
    elif kind == "message":
        dist.send(torch.ones(4), 1) if rank == 0 else dist.recv(torch.empty(5), 0)
    elif kind == "together":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            dist.all_reduce_coalesced([torch.ones(2 + rank), torch.ones(3 - rank)])
    else:
        dist.all_reduce(x)


@pytest.mark.share(1)
@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("operator", ["rank 0 all_reduce(sum) #1 of 8 float32", "rank 1 broadcast #1 of 8 float32 with root 0"]),
        ("size", ["rank 0 all_reduce(sum) #1 of 9 float32", "rank 1 all_reduce(sum) #1 of 8 float32"]),
        ("dtype", ["rank 0 all_reduce(sum) #1 of 8 float32", "rank 1 all_reduce(sum) #1 of 8 float64"]),
        ("reduction", ["rank 0 all_reduce(sum) #1 of 8 float32", "rank 1 all_reduce(max) #1 of 8 float32"]),
        ("together", ["rank 0 all_reduce(sum) #1 of 5 float32", "rank 1 all_reduce(sum) #1 of 5 float32"]),
        ("root", ["with root 0", "with root 1"]),
        ("split", ["rank 1 sends 8 bytes to rank 0, which expects 4, in all_to_all #1"]),
        ("message", ["rank 0 sends 4 float32 (message 1, tag 0) to rank 1, which receives 5 float32"]),
    ],
)
def test_mismatched_calls_name_both_sides(kind, said):
    with pytest.raises(RankError) as error:
        run_ranks(mismatch, 2, kind, backend="shm")
    for text in said:
        assert text in str(error.value)


@multirank(2, backend="shm")
def test_a_mismatch_changes_no_data_and_breaks_the_group():
    x = torch.arange(8.0) if dist.get_rank() else torch.arange(9.0)
    before = x.clone()
    with pytest.raises(RuntimeError, match="the ranks call different collectives"):
        dist.all_reduce(x)
    assert torch.equal(x, before)
    with pytest.raises(RuntimeError, match=r"this group of ranks .* is broken since: .*different"):
        dist.barrier()


@multirank(3, backend="shm")
def test_time_outs_are_honoured_and_name_who_is_missing():
    rank = dist.get_rank()
    pair = dist.new_group([0, 1], timeout=timedelta(seconds=0.3))
    if rank == 0:
        begin = time.monotonic()
        with pytest.raises(
            RuntimeError, match=r"timed out in all_reduce\(sum\) #1 of 2 float32 .* missing: rank 1, which has"
        ):
            dist.all_reduce(torch.ones(2), group=pair)
        assert 0.25 < time.monotonic() - begin < patience(2)
        work = dist.irecv(torch.ones(2), 1)
        with pytest.raises(RuntimeError, match="timed out"):
            work.wait(timedelta(seconds=0.2))
    dist.barrier()
    if rank < 2:
        begin = time.monotonic()
        with pytest.raises(RuntimeError, match=r"timed out in monitored_barrier .*missing: rank 2"):
            dist.monitored_barrier(timeout=timedelta(seconds=1.5))  # long enough for both to be there
        assert time.monotonic() - begin < patience(3.5)
    else:
        time.sleep(2.5)


@multirank(2, backend="shm")
def test_a_time_out_inside_a_large_collective_says_where_the_others_are():
    x, small, channel = torch.ones(4 * 2**20), torch.ones(3), dist.group.WORLD._channel
    for _ in range(5):
        dist.all_reduce(small, dist.ReduceOp.MAX)
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 1:
        before_step(channel, 6, lambda: store.get("told"))  # waits for it
    dist.group.WORLD.set_timeout(timedelta(seconds=0.5))
    said = "missing: rank 1, whose last collective was all_reduce.sum. #6 of 4194304 float32"
    with pytest.raises(RuntimeError, match=said):
        dist.all_reduce(x)
    store.set("told", "")


@multirank(3, backend="shm")
def test_a_rank_that_leaves_is_named():
    pair = dist.new_group([0, 1])
    if dist.get_rank() == 0:
        dist.destroy_process_group(pair)
    elif dist.get_rank() == 1:
        with pytest.raises(RuntimeError, match="rank 0 is gone: it left the group, or ended, before all_reduce"):
            dist.all_reduce(torch.ones(2), group=pair)
    dist.barrier()


@multirank(2, backend="shm")
def test_what_was_sent_arrives_after_the_sender_has_left():
    pair = dist.new_group([0, 1])
    if dist.get_rank() == 0:
        dist.send(torch.arange(5.0), 1, group=pair)
        dist.destroy_process_group(pair)
        dist.barrier()
    else:
        dist.barrier()
        x = torch.empty(5)
        dist.recv(x, 0, group=pair)
        assert x.tolist() == [0, 1, 2, 3, 4]
        with pytest.raises(RuntimeError, match="rank 0 is gone"):
            dist.recv(x, 0, group=pair)


@multirank(2, backend="shm")
def test_a_forked_child_neither_uses_nor_ends_its_parents_group():
    child = os.fork()
    if child == 0:
        try:
            dist.all_reduce(torch.ones(1))
        except RuntimeError as error:
            from onecard.comm.shm.backend import _leave_all

            _leave_all()  # what the end of a process does
            os._exit(0 if "is a fork of rank" in str(error) else 1)
        os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    x = torch.ones(1)
    dist.all_reduce(x)
    assert x.item() == 2


@pytest.mark.proof
def test_a_script_that_ends_by_itself_or_by_an_error_ends_quickly(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
        import os, sys, torch, onecard, torch.distributed as dist
        assert "torch._dynamo" not in sys.modules, "torch's compiler takes another second of each start"
        rank = int(os.environ["RANK"])
        dist.init_process_group("shm", init_method="file://" + os.environ["STORE"], rank=rank, world_size=2)
        work = dist.all_reduce(torch.ones(5), async_op=True)
        work.wait()
        if rank == 1:
            raise SystemExit(3)
        dist.all_reduce(torch.ones(5))
        """)
    )
    environment = os.environ | {"STORE": str(tmp_path / "store"), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    begin = [
        subprocess.Popen(
            [sys.executable, script], env=environment | {"RANK": str(r)}, stderr=subprocess.PIPE, text=True
        )
        for r in range(2)
    ]
    said = [process.communicate(timeout=120)[1] for process in begin]
    assert [process.returncode for process in begin] == [1, 3]
    assert "rank 1 is gone" in said[0] and "rank 1" not in said[1]


@multirank(2, backend="shm")
def test_groups_do_not_pile_up_memory():
    def mapped():
        gc.collect()
        return Path("/proc/self/maps").read_text().count("onecard-shm")

    before = mapped()
    for _ in range(5):
        group = dist.new_group([0, 1])
        dist.all_reduce(torch.ones(3), group=group)
        dist.barrier()
        dist.destroy_process_group(group)
        del group
    assert mapped() <= before + 1
