"""The flight board: what is written is read from outside, and the description names who is missing."""

import threading
import time
from dataclasses import replace

import pytest

from onecard.comm.base import flight
from onecard.comm.base.flight import Board, FlightEntry, describe, out_of_step, overtaken, rank_text, read


@pytest.fixture
def path(tmp_path):
    return tmp_path / "board"


@pytest.fixture
def board(path):
    board = Board.create(path)
    yield board
    board.close()


def test_nobody_watches_by_default():
    assert flight.board.here is None


def test_read_shows_the_last_collective(board, path):
    assert read(path) == FlightEntry()
    before = time.monotonic()
    board.enter("all_reduce", (0, 1, 2), 4096)
    entry = read(path)
    assert before <= entry.time <= time.monotonic()
    assert entry == FlightEntry(1, 1, "all_reduce", (0, 1, 2), 4096, True, entry.time)
    board.leave()
    left = read(path)
    assert left == FlightEntry(1, 1, "all_reduce", (0, 1, 2), 4096, False, left.time) and left.time >= entry.time


def test_sequence_numbers_count_each_group_apart(board, path):
    for ranks in ((0, 1), [0, 2], (0, 1)):
        board.enter("all_gather", ranks, 1)
        board.leave()
    entry = read(path)
    assert (entry.seq, entry.group_seq, entry.ranks) == (3, 2, (0, 1))
    assert board.counts == {((0, 1), 0): 2, ((0, 2), 0): 1}


def test_groups_of_the_same_ranks_are_counted_apart(board, path):
    """Ranks may take them up in different orders, and none of them is then missing or out of step."""
    for name in ("one", "other", "other"):
        board.enter("all_reduce", (0, 1), 8, name)
    last = read(path)
    assert (last.seq, last.group_seq) == (3, 2) and len(board.counts) == 2
    board.enter("broadcast", (0, 1), 8, "one")
    here = read(path)
    assert here.group_seq == 2 and here.group != last.group
    assert overtaken(here, {1: {last.key: 9}}) == [1] and overtaken(here, {1: {here.key: 2}}) == []
    assert out_of_step({0: last, 1: here}) == [] != out_of_step({0: last, 1: replace(last, name="broadcast")})
    assert "missing: rank 1, which waits in broadcast #2" in describe({0: last, 1: here})


def test_long_names_and_large_groups_are_cut_not_refused(board, path):
    board.enter("x" * 100, tuple(range(20_000)), 2**40)
    entry = read(path)
    assert entry.name == "x" * 48 and entry.nbytes == 2**40
    assert entry.ranks == tuple(range(len(entry.ranks))) and len(entry.ranks) > 16_000


def test_a_closed_board_stays_readable_and_create_empties_it(path):
    board = Board.create(path)
    board.enter("barrier", (0,), 0)
    board.close()
    assert read(path).name == "barrier"
    Board.create(path).close()
    assert read(path) == FlightEntry()


def test_other_files_are_refused(path):
    path.write_bytes(b"something else")
    with pytest.raises(ValueError, match="not a flight board"):
        read(path)
    with pytest.raises(OSError):
        read(path / "missing")


def test_reading_never_sees_half_an_entry(board, path):
    stop = threading.Event()
    groups = {"narrow": (7, 8), "wide": tuple(range(100)), "other": tuple(range(3, 50))}

    def write():
        while not stop.is_set():
            for name, ranks in groups.items():
                board.enter(name, ranks, len(ranks))
                board.leave()

    writer = threading.Thread(target=write)
    writer.start()
    try:
        entries = [read(path) for _ in range(100)]
    finally:
        stop.set()
        writer.join()
    seen = [entry for entry in entries if entry.seq]
    assert seen and all(entry.ranks == groups[entry.name] and entry.nbytes == len(entry.ranks) for entry in seen)


def test_it_costs_nearly_nothing(board):
    ranks = (0, 1, 2, 3)
    start = time.perf_counter()
    for _ in range(10_000):
        board.enter("all_reduce", ranks, 64)
        board.leave()
    assert (time.perf_counter() - start) / 10_000 < 50e-6  # measured 0.6 us; an all-reduce takes 75 us at least


def waits(name, seq, ranks, nbytes=64, at=0.0):
    return FlightEntry(seq, seq, name, ranks, nbytes, True, at)


def left(name, seq, ranks, at=0.0):
    return FlightEntry(seq, seq, name, ranks, 64, False, at)


ALL = (0, 1, 2, 3)


@pytest.mark.parametrize(
    ("boards", "now", "text"),
    [
        ({}, None, "no rank waits in a collective"),
        ({0: left("all_reduce", 1, ALL), 1: FlightEntry()}, 5.0, "no rank waits in a collective"),
        (
            {
                0: waits("all_reduce", 7, ALL, at=2.0),
                1: waits("all_reduce", 7, ALL, at=3.0),
                2: FlightEntry(),
                3: FlightEntry(),
            },
            5.0,
            "ranks 0, 1 wait in all_reduce #7 of ranks 0-3 (64 bytes, for 3.0 s)\n"
            "  missing: rank 2, which has entered no collective yet\n"
            "  missing: rank 3, which has entered no collective yet",
        ),
        (
            {0: waits("all_reduce", 7, (0, 1)), 1: left("broadcast", 6, (0, 1), at=4.0)},
            5.5,
            "rank 0 waits in all_reduce #7 of ranks 0, 1 (64 bytes, for 5.5 s)\n"
            "  missing: rank 1, which is in no collective; it last left broadcast #6 of ranks 0, 1, 1.5 s ago",
        ),
        (
            {0: waits("all_reduce", 2, (0, 1)), 1: waits("all_gather", 2, (0, 1))},
            None,
            "rank 0 waits in all_reduce #2 of ranks 0, 1 (64 bytes)\n"
            "  missing: rank 1, which waits in all_gather #2 of ranks 0, 1 instead\n"
            "rank 1 waits in all_gather #2 of ranks 0, 1 (64 bytes)\n"
            "  missing: rank 0, which waits in all_reduce #2 of ranks 0, 1 instead",
        ),
        (
            {0: waits("all_reduce", 1, (0, 8))},
            None,
            "rank 0 waits in all_reduce #1 of ranks 0, 8 (64 bytes)\n"
            "  missing: rank 8, which is not watched from here (another host, or it never started)",
        ),
        (
            {0: waits("all_reduce", 1, (0, 1), 64), 1: waits("all_reduce", 1, (0, 1), 32)},
            None,
            "ranks 0, 1 wait in all_reduce #1 of ranks 0, 1 (sizes differ: 64 bytes on rank 0, 32 bytes on rank 1)",
        ),
    ],
)
def test_describe(boards, now, text):
    assert describe(boards, now) == text


def test_a_rank_that_has_ended_is_overtaken_only_if_it_missed_the_collective():
    entry = waits("all_reduce", 3, (0, 1, 2))
    assert overtaken(entry, {1: {entry.key: 3}}) == []
    assert overtaken(entry, {1: {entry.key: 2}, 2: {}}) == [1, 2]
    assert overtaken(entry, {5: {}}) == []
    assert overtaken(left("all_reduce", 3, (0, 1, 2)), {1: {}}) == []


def test_rank_text():
    assert rank_text((0, 1, 2, 5, 7, 8)) == "ranks 0-2, 5, 7, 8"
