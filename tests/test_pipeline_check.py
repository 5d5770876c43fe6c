"""The check of schedules: what it accepts runs, what it rejects does not, and its figures are those of the papers."""

import re
import time
from collections import Counter

import pytest
from amounts import amount
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from onecard import pipeline as pl
from onecard.errors import ScheduleError
from onecard.pipeline import Action, Schedule

ANY = [
    pl.naive, pl.gpipe, pl.one_f_one_b, pl.eager_one_f_one_b, pl.zb_h1, pl.zb_h2, pl.zb_1p, pl.zb_2p,
    pl.interleaved, pl.breadth_first, pl.zb_v, pl.v_half, pl.v_min, pl.dualpipe_v,
]  # fmt: skip
CHUNKED = [pl.interleaved, pl.breadth_first, pl.zb_h1]

# Zero Bubble Pipeline Parallelism, arXiv 2401.10241: p, m, the profile in ms (F, I, W, communication), and the bubble
# rates of 1F1B, ZB-H1, ZB-H2, ZB-1p, ZB-2p; the part of an activation that stays until W is 32 / (34 + 5 a s / h).
PAPER = [
    (8, 24, (18.522, 18.086, 9.337, 0.601), (0.2431, 0.1585, 0.1083, 0.1585, 0.0433), 24 / 2304),
    (8, 32, (18.513, 18.086, 9.331, 0.626), (0.1985, 0.1242, 0.0837, 0.1242, 0.0039), 24 / 2304),
    (8, 64, (18.546, 18.097, 9.321, 0.762), (0.1240, 0.0674, 0.0444, 0.0674, 0.0026), 24 / 2304),
    (8, 24, (29.718, 29.444, 19.927, 0.527), (0.2347, 0.1323, 0.0698, 0.1323, 0.0029), 32 / 4096),
    (8, 32, (29.802, 29.428, 19.530, 0.577), (0.1898, 0.1045, 0.0559, 0.1045, 0.0022), 32 / 4096),
    (8, 64, (29.935, 29.621, 19.388, 0.535), (0.1091, 0.0554, 0.0294, 0.0554, 0.0010), 32 / 4096),
    (16, 48, (11.347, 11.248, 8.132, 0.377), (0.2552, 0.1397, 0.0672, 0.1397, 0.0066), 40 / 5120),
    (16, 64, (11.307, 11.254, 8.101, 0.379), (0.2082, 0.1088, 0.0516, 0.1088, 0.0054), 40 / 5120),
    (16, 128, (11.325, 11.308, 8.109, 0.378), (0.1251, 0.0576, 0.0266, 0.0576, 0.0028), 40 / 5120),
    (32, 96, (10.419, 10.207, 7.715, 0.408), (0.2646, 0.1421, 0.0641, 0.1421, 0.0038), 48 / 6144),
    (32, 128, (10.408, 10.204, 7.703, 0.408), (0.2168, 0.1106, 0.0490, 0.1106, 0.0029), 48 / 6144),
    (32, 256, (10.402, 10.248, 7.698, 0.460), (0.1352, 0.0594, 0.0257, 0.0594, 0.0018), 48 / 6144),
]


@pytest.mark.share(1)
@pytest.mark.parametrize(("p", "m", "profile", "rates", "heads_by_width"), PAPER, ids=lambda v: str(v)[:5])
def test_bubbles_are_those_of_the_zero_bubble_paper(p, m, profile, rates, heads_by_width):
    times = pl.Times(*profile)
    for make, rate in zip((pl.one_f_one_b, pl.zb_h1, pl.zb_h2), rates, strict=False):
        assert pl.check_schedule(make(p, m), times).bubble_rate == pytest.approx(rate, abs=5e-4)
    sizes = pl.Sizes(weight=32 / (34 + 5 * 1024 * heads_by_width))
    for make, rate, limit in [(pl.zb_1p, rates[3], p), (pl.zb_2p, rates[4], 2 * p)]:
        if make is pl.zb_2p or p < 32:  # for 32 ranks the slower half is left out: it is ZB-H1, as above
            report = pl.check_schedule(make(p, m, times, sizes), times, sizes)
            assert report.bubble_rate == pytest.approx(rate, abs=0.01)
            assert max(report.peak_memory) <= limit + 1e-6


def test_a_large_schedule_is_checked_in_well_under_a_second():
    schedule = pl.one_f_one_b(16, 512)
    before = time.process_time()
    pl.check_schedule(schedule)
    assert time.process_time() - before < 1


@st.composite
def schedules(draw, largest=5, microbatches=9):
    make = draw(st.sampled_from(ANY))
    args = [draw(st.integers(1, largest)), draw(st.integers(1, microbatches))]
    return make(*args, draw(st.integers(1, 3))) if make in CHUNKED else make(*args)


numbers = st.floats(0, 10, allow_subnormal=False)


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(st.data(), schedules())
def test_every_schedule_passes_and_is_timed_as_by_hand(data, schedule):
    stages = schedule.num_stages
    times = pl.Times(
        *(data.draw(st.lists(numbers, min_size=stages, max_size=stages)) for _ in range(3)), data.draw(numbers)
    )
    report = pl.check_schedule(schedule, times)
    starts = by_hand(schedule.compute(), times)
    for rank, action, start, _ in report.timeline.spans:
        assert start == pytest.approx(starts[rank, action])
    assert pl.simulate(schedule.compute(), times).spans == report.timeline.spans
    again = pl.with_messages(schedule, times)
    assert again.compute().ranks == schedule.compute().ranks
    pl.check_schedule(again)


def by_hand(schedule, times):
    """When each computation starts, by pushing all of them back until nothing is early any more."""
    lasts, home, last = times.durations(schedule.num_stages), schedule.stage_to_rank, schedule.num_stages - 1
    starts = {(rank, a): 0.0 for rank, row in enumerate(schedule.ranks) for a in row}
    end = {}
    moved = True
    while moved:
        moved = False
        end = {a: start + lasts[a.kind][a.stage] for (_, a), start in starts.items()}
        for rank, row in enumerate(schedule.ranks):
            for before, a in zip([None, *row], row, strict=False):
                causes = [end[before]] if before else []
                if a.kind == "F" and a.stage:
                    cause = Action("F", a.stage - 1, a.microbatch)
                elif a.kind in "BI" and a.stage < last:
                    cause = next(c for k in "BI" if (c := Action(k, a.stage + 1, a.microbatch)) in end)
                else:
                    cause = None
                if cause:
                    causes.append(end[cause] + (0 if home[cause.stage] == rank else times.communication))
                if causes and max(causes) > starts[rank, a] + 1e-12:
                    starts[rank, a], moved = max(causes), True
    return starts


# Corruptions


@settings(deadline=None, max_examples=amount(40, 1500), suppress_health_check=[HealthCheck.too_slow])
@given(st.data(), schedules(4, 5))
def test_corrupted_schedules_are_rejected_by_name_or_harmless(data, schedule):
    rows = [list(row) for row in schedule.ranks]
    pick = lambda row: data.draw(st.integers(0, len(row) - 1))  # noqa: E731
    row = data.draw(st.sampled_from(rows))
    other = data.draw(st.sampled_from(rows))
    one, how = pick(row), data.draw(st.sampled_from(["drop", "swap", "duplicate", "move", "exchange"]))
    touched = {row[one]}
    if how == "drop":
        row.pop(one)
    elif how == "duplicate":
        other.insert(data.draw(st.integers(0, len(other))), row[one])
    elif how == "move":
        other.insert(data.draw(st.integers(0, len(other))), row.pop(one))
    else:
        two = pick(other)
        touched.add(other[two])
        row[one], other[two] = other[two], row[one]
    broken = Schedule.of(rows, "broken")
    if runs(broken, schedule):
        pl.check_schedule(broken)
    else:
        with pytest.raises(ScheduleError) as caught:
            pl.check_schedule(broken)
        named = set(re.findall(r"\d+[A-Z_]+\d+", str(caught.value)))
        assert {str(action) for action in touched} & named, f"{how} {touched}: {caught.value}"


def runs(schedule, sound):
    """Whether a naive interpreter with unbuffered messages computes all that `sound` does, each once, where it does."""
    if Counter(a for row in schedule.ranks for a in row) != Counter(a for row in sound.ranks for a in row):
        return False
    if [sorted(a for a in row if a.is_compute) for row in schedule.ranks] != [
        sorted(a for a in row if a.is_compute) for row in sound.ranks
    ]:
        return False
    last, at = sound.num_stages - 1, [0] * len(sound.ranks)
    has = [set() for _ in sound.ranks]  # what a rank's memory holds: ("F" or "B", stage that made it, microbatch)

    def can_compute(rank, kind, stage, i):
        if kind == "F":
            return stage == 0 or ("F", stage - 1, i) in has[rank]
        if kind == "W":
            return ("halved", stage, i) in has[rank]
        return ("F", stage, i) in has[rank] and (stage == last or ("B", stage + 1, i) in has[rank])

    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(schedule.ranks):
            if at[rank] == len(row):
                continue
            kind, stage, i = action = row[at[rank]]
            if action.is_compute and can_compute(rank, kind, stage, i):
                has[rank] |= {("F" if kind == "F" else "B", stage, i)} if kind != "W" else set()
                has[rank] |= {("halved", stage, i)} if kind == "I" else set()
            elif kind.startswith("SEND"):
                receive = Action("RECV_" + kind[-1], stage + (1 if kind == "SEND_F" else -1), i)
                peers = [r for r, x in enumerate(schedule.ranks) if at[r] < len(x) and x[at[r]] == receive]
                if not peers or sound.stage_to_rank[receive.stage] != peers[0] or (kind[-1], stage, i) not in has[rank]:
                    continue
                has[peers[0]].add((kind[-1], stage, i))
                at[peers[0]] += 1
            else:
                continue
            at[rank] += 1
            moved = True
    return all(at[rank] == len(row) for rank, row in enumerate(schedule.ranks))


TWO = [["0F0", "0SEND_F0", "0RECV_B0", "0B0"], ["1RECV_F0", "1F0", "1B0", "1SEND_B0"]]
HALVED = [["0F0", "0SEND_F0", "0RECV_B0", "0I0", "0W0"], ["1RECV_F0", "1F0", "1I0", "1SEND_B0", "1W0"]]
FAULTS = {
    "nothing": ([[], []], "no rank does anything"),
    "no messages": ([["0F0", "0B0"], ["1F0", "1B0"]], r"no send and no receive .*with_messages\(schedule\)"),
    "twice": ([["0F0", *TWO[0]], TWO[1]], "rank 0, position 1: 0F0 again; it is already rank 0, position 0"),
    "no forward": ([TWO[0][1:], TWO[1]], "rank 0: 0F0 is missing"),
    "no backward": ([TWO[0][:3], TWO[1]], r"rank 0: 0B0 is missing \(or 0I0 and 0W0\)"),
    "no weight gradient": ([HALVED[0][:4], HALVED[1]], "rank 0: 0W0 is missing, the other half of 0I0"),
    "no input gradient": ([HALVED[0], ["1RECV_F0", "1F0", "1SEND_B0", "1W0"]], "rank 1: 1I0 is missing"),
    "whole and half": ([[*TWO[0], "0W0"], TWO[1]], "rank 0, position 4: 0W0 is computed twice: 0B0 contains it"),
    "no stage": ([["0F0", "0B0"], ["2F0", "2B0"]], "stage 1 is on no rank: 1F0 is missing"),
    "stage on two ranks": ([TWO[0][:3], [*TWO[1], "0B0"]], r"(0B0, but stage 0 is on rank 0|0F0, but stage 0 is on rank 1)"),
    "no send": ([["0F0", *TWO[0][2:]], TWO[1]], "rank 0: 0SEND_F0 is missing; 0F0 .* makes what stage 1 on rank 1 needs"),
    "no receive": ([TWO[0], TWO[1][1:]], "rank 1: 1RECV_F0 is missing"),
    "receive on the wrong rank": ([["1RECV_F0", *TWO[0]], TWO[1][1:]], "rank 0, position 0: 1RECV_F0 belongs on rank 1"),
    "message for nobody": ([TWO[0], [*TWO[1], "1SEND_F0"]], "rank 1, position 4: 1SEND_F0 moves what no other rank"),
    "message within a rank": ([["0F0", "0SEND_F0", "1RECV_F0", "1F0", "1B0", "0B0"]], "0SEND_F0 moves what no other rank"),
    "sent before it is there": ([["0SEND_F0", "0F0", *TWO[0][2:]], TWO[1]], "0SEND_F0 needs 0F0, which comes later"),
    "used before it is there": ([TWO[0], ["1F0", "1RECV_F0", *TWO[1][2:]]], "1F0 needs 1RECV_F0, which comes later"),
    "late message": (
        [["0F0", "0RECV_B0", "0B0", "0SEND_F0"], TWO[1]],
        r"the ranks wait for each other: rank 0, position 1: 0RECV_B0 waits for 1SEND_B0 \(rank 1, position 3\); "
        r"rank 1, position 0: 1RECV_F0 waits for 0SEND_F0 \(rank 0, position 3\)",
    ),
    "only with buffers": (
        [
            ["0F0", "0SEND_F0", "0F1", "0SEND_F1", "0RECV_B0", "0B0", "0RECV_B1", "0B1"],
            ["1RECV_F0", "1F0", "1B0", "1SEND_B0", "1RECV_F1", "1F1", "1B1", "1SEND_B1"],
        ],
        r"rank 0, position 3: 0SEND_F1 waits for 1RECV_F1 \(rank 1, position 4\); "
        r"rank 1, position 3: 1SEND_B0 waits for 0RECV_B0 \(rank 0, position 4\)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named(fault):
    rows, words = FAULTS[fault]
    with pytest.raises(ScheduleError, match=words):
        pl.check_schedule(Schedule.of(rows, "imported"))


def test_computations_that_wait_for_each_other_are_named():
    crossed = Schedule.of([["0F1", "0F0", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]])
    pl.check_schedule(pl.with_messages(crossed))  # slow, but it runs
    stuck = Schedule.of([["0F0", "0B0", "0F1", "0B1"], ["1F1", "1B1", "1F0", "1B0"]], "crossed")
    with pytest.raises(
        ScheduleError, match="crossed: rank 0, position 1: 0B0 waits for the gradient of microbatch 0 for stage 0"
    ):
        pl.with_messages(stuck)


# What it reports


def test_messages_are_counted_and_weighed():
    report = pl.check_schedule(pl.interleaved(4, 8, 2), sizes=pl.Sizes(message=[1, 2, 4, 8, 16, 32, 64, 0]))
    assert report.messages == 2 * 8 * 7
    assert report.message_bytes == 2 * 8 * 127
    assert report.links()[3, 0] == 8 and report.links()[0, 3] == 8 and report.links()[0, 1] == 16
    assert pl.check_schedule(pl.zb_v(4, 8)).messages == 2 * 8 * 6  # the turn of the V stays on its rank


def test_memory_of_uneven_stages_and_halved_backwards():
    sizes = pl.Sizes(activation=[10, 1], weight=[4, 1])
    assert pl.peak_memory(Schedule.of(HALVED), sizes) == [10, 1]
    row = [["0F0", "0I0", "0F1", "0W0", "0I1", "0W1"]]
    assert pl.peak_memory(Schedule.of(row), pl.Sizes(10, 4)) == [14]
    assert pl.peak_memory(Schedule.of(row), pl.Sizes(10)) == [20]
    with pytest.raises(ScheduleError, match="stage 0: weight=4 stays until W, but F keeps only activation=3"):
        pl.peak_memory(Schedule.of(row), pl.Sizes(3, 4))


def test_the_report_says_all_in_one_line():
    assert str(pl.check_schedule(pl.one_f_one_b(2, 3))) == (
        "1F1B: 2 ranks, 3 microbatches: step 12, bubble 25.00%, peak memory 2, 6 messages of 6 in all"
    )


def test_idle_time_with_and_without_a_barrier_at_the_end():
    timeline = pl.simulate(pl.zb_h2(4, 8))
    assert (timeline.step, timeline.makespan) == (24, 27)
    assert timeline.bubble_rate == 0 and timeline.idle_rate == pytest.approx(1 / 9)
    with pytest.raises(ScheduleError, match="rank 0: 0F0 ends at"):
        pl.Timeline.of([(0, "0F0", 2.0, 1.0)])
