"""Schedules: what their docstrings promise of bubble and memory, and that torch's say the same where they mean the same."""

import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining import schedules as torch_schedules

from onecard import pipeline as pl
from onecard.errors import ScheduleError
from onecard.pipeline.schedule.modes import MODES, plan
from onecard.pipeline.schedule.timing import makespan

CHUNKED = [pl.interleaved, pl.breadth_first, pl.zb_h1]
V = [pl.zb_v, pl.v_half, pl.v_min, pl.dualpipe_v]
ONE = [pl.naive, pl.gpipe, pl.one_f_one_b, pl.eager_one_f_one_b, pl.zb_h2, pl.zb_1p, pl.zb_2p]
ALL = ONE + CHUNKED + V
SIZES = [(1, 1), (1, 5), (2, 1), (3, 2), (4, 11), (5, 3), (8, 24)]


def bubble(schedule, *times):
    return pl.check_schedule(schedule, pl.Times(*times)).bubble_rate


@pytest.mark.parametrize("make", ALL, ids=lambda f: f.__name__)
def test_every_schedule_is_proved(make):
    for p, m in SIZES:
        report = pl.check_schedule(make(p, m))
        assert (len(report.schedule.ranks), report.schedule.num_microbatches) == (p, m)
        assert 0 <= report.bubble_rate < 1


@pytest.mark.parametrize("make", CHUNKED, ids=lambda f: f.__name__)
def test_any_number_of_chunks(make):
    for p, m, chunks in [(2, 1, 3), (3, 2, 4), (3, 7, 3), (4, 8, 1), (4, 11, 4), (5, 9, 3)]:
        assert pl.check_schedule(make(p, m, chunks)).schedule.num_stages == p * chunks


@pytest.mark.parametrize(("p", "m"), [(1, 3), (3, 4), (4, 8), (8, 16)])
@pytest.mark.parametrize("times", [(1, 1, 1), (3, 2, 4), (1.5, 2.5, 0.5)])
def test_bubbles_of_whole_backwards_are_those_of_their_formulas(p, m, times):
    assert bubble(pl.naive(p, m), *times) == pytest.approx((p - 1) / p)
    for make in (pl.gpipe, pl.one_f_one_b, pl.eager_one_f_one_b):
        assert bubble(make(p, m), *times) == pytest.approx((p - 1) / (m + p - 1))
    for v in (2, 3):
        assert bubble(pl.breadth_first(p, m, v), *times) == pytest.approx((p - 1) / (v * m + p - 1))
        if m % p == 0:
            assert bubble(pl.interleaved(p, m, v), *times) == pytest.approx((p - 1) / (v * m + p - 1))


@pytest.mark.parametrize(("p", "m"), [(2, 4), (3, 6), (4, 9), (8, 16), (9, 18)])
def test_bubbles_of_halved_backwards_are_those_of_their_formulas(p, m):
    for f, i, w in [(1, 1, 1), (2, 2, 1), (3, 3, 2)]:
        lost = (p - 1) * (f + i - w)
        assert bubble(pl.zb_h1(p, m), f, i, w) == pytest.approx(lost / (m * (f + i + w) + lost))
    assert bubble(pl.zb_h2(p, m)) == bubble(pl.zb_v(p, m)) == bubble(pl.zb_2p(p, m)) == 0
    assert bubble(pl.dualpipe_v(p, m)) == pytest.approx((p - 1) / (6 * m + p - 1))
    assert bubble(pl.v_half(p, m)) <= (p - 1) / (2 * m + p - 1) + 1e-9
    assert bubble(pl.v_min(p, m)) <= (4 * p - 3) / (6 * m + 4 * p - 3) + 1e-9


def test_a_message_as_long_as_a_forward_costs_eager_1f1b_nothing_in_its_steady_state():
    slow = pl.Times(1, 1, 0, 1)
    gain = [pl.simulate(make(4, 40), slow).step for make in (pl.one_f_one_b, pl.eager_one_f_one_b)]
    assert gain[1] == 80 + 3 * 2 + 6  # each microbatch's work, the way down and up, and its six messages
    assert gain[0] > gain[1] * 1.5


@pytest.mark.parametrize(("p", "m"), [(1, 2), (3, 2), (4, 9), (6, 18), (8, 16), (5, 3)])
def test_memory_is_that_of_the_formulas(p, m):
    def peaks(schedule):
        return pl.peak_memory(schedule)

    assert peaks(pl.naive(p, m)) == [1] * p
    assert peaks(pl.gpipe(p, m)) == [m] * p
    assert peaks(pl.one_f_one_b(p, m)) == [min(p - r, m) for r in range(p)]
    assert peaks(pl.eager_one_f_one_b(p, m)) == [min(2 * (p - r) - 1, m) for r in range(p)]
    assert max(peaks(pl.zb_h1(p, m))) == min(p, m)
    assert max(peaks(pl.zb_h2(p, m))) == min(2 * p - 1, m)
    assert peaks(pl.breadth_first(p, m, 2)) == [2 * m] * p
    if m % p == 0:
        assert peaks(pl.interleaved(p, m, 3))[0] == min(4 * p - 1, 3 * m)
    assert max(peaks(pl.zb_v(p, m))) == min(2 * p, 2 * m)
    assert max(peaks(pl.dualpipe_v(p, m))) == min(2 * p + 1, 2 * m)
    assert max(peaks(pl.v_half(p, m))) <= p + 3
    assert max(peaks(pl.v_min(p, m))) <= 2 * p / 3 + 3
    assert max(peaks(pl.zb_1p(p, m))) <= p and max(peaks(pl.zb_2p(p, m))) <= 2 * p


def test_1f1b_holds_the_seeds_part_of_f_then_b():
    saved = 1 - max(pl.peak_memory(pl.one_f_one_b(5, 8))) / max(pl.peak_memory(pl.gpipe(5, 8)))
    assert saved == 0.375


@pytest.mark.parametrize("make", ALL, ids=lambda f: f.__name__)
def test_sizes_that_cannot_be_are_refused(make):
    for ranks, microbatches in [(0, 4), (4, 0), (-1, 2), (2, 1.5), (True, 2)]:
        with pytest.raises(ScheduleError, match=r"(ranks|microbatches)=\S+ a pipeline needs a whole number"):
            make(ranks, microbatches)


def test_other_wrong_arguments_are_refused():
    with pytest.raises(ScheduleError, match="chunks=0"):
        pl.interleaved(2, 4, 0)
    with pytest.raises(ScheduleError, match="holds no microbatch: stage 1 alone keeps 3; give at least that"):
        pl.zb_auto(2, 4, pl.Times(), 2, pl.Sizes([1, 3]))
    with pytest.raises(ScheduleError, match="forward has 3 entries, the schedule 2 stages"):
        pl.simulate(pl.gpipe(2, 2), pl.Times([1, 2, 3]))
    with pytest.raises(ScheduleError, match="not negative"):
        pl.simulate(pl.gpipe(2, 2), pl.Times(-1))


@settings(deadline=None, max_examples=25)
@given(
    p=st.integers(1, 6), m=st.integers(1, 14), limit=st.integers(1, 14), late=st.floats(0, 1),
    times=st.tuples(*[st.floats(0.1, 9)] * 3, st.floats(0, 3)),
)  # fmt: skip
def test_automatic_schedules_keep_to_their_limit(p, m, limit, late, times):
    sizes = pl.Sizes(1, late)
    schedule = pl.zb_auto(p, m, pl.Times(*times), limit, sizes)
    report = pl.check_schedule(schedule, pl.Times(*times), sizes)
    assert max(report.peak_memory) <= limit + 1e-6
    if limit >= min(p, m):
        assert report.step <= pl.simulate(pl.zb_h1(p, m), pl.Times(*times)).step * (1 + 1e-9)


# The same orders as torch's own.


class _Stage:
    """What torch's schedule classes ask of a stage when they make their order."""

    def __init__(self, index, stages, ranks, rank):
        self.stage_index, self.num_stages, self.group_size, self.group_rank = index, stages, ranks, rank
        self.group, self.is_first, self.is_last, self.has_backward = None, index == 0, index == stages - 1, True
        self.submod = self.stage_index_to_group_rank = None


def torch_schedule(name, p, m, stages_of_rank_0):
    stages = p * len(stages_of_rank_0)
    made = [_Stage(i, stages, p, 0) for i in stages_of_rank_0]
    return getattr(torch_schedules, name)(made, m, loss_fn=lambda *_: None)


def orders(pipeline_order):
    """Compute orders as text; REDUCE_GRAD is not the pipeline's, a pair is its forward and then its backward."""
    words = {rank: [str(a) for a in row if a is not None] for rank, row in pipeline_order.items()}
    flat = {r: re.sub(r"\(([^;]+);([^)]+)\)OVERLAP_F_B", r"\1 \2", " ".join(row)).split() for r, row in words.items()}
    return [[word for word in flat[rank] if "REDUCE" not in word] for rank in sorted(flat)]


def ours(schedule):
    return [[str(a) for a in row] for row in schedule.compute().ranks]


@pytest.mark.parametrize(("p", "m"), [(2, 2), (3, 5), (4, 8), (4, 13)])
def test_single_stage_schedules_are_torchs(p, m):
    def theirs(name):
        return getattr(torch_schedules, name)(_Stage(0, p, p, 0), m, loss_fn=lambda *_: None)._get_pipeline_order()

    assert orders(theirs("ScheduleGPipe")) == ours(pl.gpipe(p, m))
    mine, others = ours(pl.one_f_one_b(p, m)), orders(theirs("Schedule1F1B"))
    assert mine[:-1] == others[:-1]
    # torch 2.13 lists the last rank's forwards from 1 on, one too high; what it runs is what it should be.
    assert [re.sub(r"F\d+", "F", word) for word in mine[-1]] == [re.sub(r"F\d+", "F", word) for word in others[-1]]


@pytest.mark.parametrize(
    ("p", "m", "v"), [(2, 2, 2), (2, 4, 2), (3, 2, 2), (4, 8, 3), (4, 10, 2), (3, 9, 4), (4, 8, 1)]
)
def test_interleaved_schedules_are_torchs(p, m, v):
    theirs = torch_schedule("ScheduleInterleaved1F1B", p, m, range(0, p * v, p))
    assert orders(theirs.pipeline_order) == ours(pl.interleaved(p, m, v))
    theirs = torch_schedule("ScheduleInterleavedZeroBubble", p, m, range(0, p * v, p))
    assert orders(theirs.pipeline_order) == ours(pl.zb_h1(p, m, v))


@pytest.mark.parametrize(("p", "m"), [(2, 2), (2, 4), (3, 4), (4, 8), (4, 13), (5, 10)])
def test_v_schedules_are_torchs(p, m):
    theirs = torch_schedule("ScheduleZBVZeroBubble", p, m, (0, 2 * p - 1))
    assert orders(theirs.pipeline_order) == ours(pl.zb_v(p, m))
    if m >= 2 * p:
        theirs = torch_schedule("ScheduleDualPipeV", p, m, (0, 2 * p - 1))
        assert orders(theirs.pipeline_order) == ours(pl.dualpipe_v(p, m))


# CSV


@pytest.mark.parametrize(
    "make", [pl.one_f_one_b, pl.interleaved, pl.zb_h2, pl.zb_v, pl.dualpipe_v, pl.v_half], ids=lambda f: f.__name__
)
def test_a_schedule_goes_through_torchs_own_parser(make, tmp_path):
    schedule = make(3, 6)
    per_rank = schedule.num_stages // 3
    theirs = torch_schedule("ScheduleInterleaved1F1B", 3, 6, range(0, 3 * per_rank, 3))
    for mine, kind in [(schedule, "compute_comms"), (schedule.compute(), "compute_only")]:
        waits = kind == "compute_comms" and hasattr(torch_schedules._ComputationType, "WAIT_SEND_F")  # torch 2.15
        pl.write_csv(mine, tmp_path / "ours.csv", send_waits=waits)
        assert pl.read_csv(tmp_path / "ours.csv").ranks == mine.ranks
        theirs._load_csv(str(tmp_path / "ours.csv"), format=kind)
        theirs._dump_csv(str(tmp_path / "theirs.csv"), format=kind)
        back = pl.read_csv(tmp_path / "theirs.csv")
        assert back.ranks == mine.ranks
        pl.check_schedule(back if back.has_messages else pl.with_messages(back))
    # What torch's own lowering makes of our compute order passes as well, its FSDP actions left out.
    theirs._dump_csv(str(tmp_path / "theirs.csv"), format="compute_comms")
    assert "UNSHARD" in (tmp_path / "theirs.csv").read_text()
    lowered = pl.read_csv(tmp_path / "theirs.csv", name="torch's")
    pl.check_schedule(lowered)
    assert lowered.compute().ranks == schedule.compute().ranks and lowered.name == "torch's"


TORCHS = {
    "ScheduleInterleaved1F1B": (range(0, 8, 4), "FB"), "ScheduleLoopedBFS": (range(0, 8, 4), "FB"),
    "ScheduleInterleavedZeroBubble": (range(0, 8, 4), "FIW"), "ScheduleZBVZeroBubble": ((0, 7), "FIW"),
    "ScheduleDualPipeV": ((0, 7), "FBIW"),
}  # fmt: skip


@pytest.mark.parametrize("name", TORCHS)
def test_torchs_own_files_are_read(name, tmp_path):
    """Each schedule that torch writes to files: it passes the check, and has its kinds of actions."""
    stages, kinds = TORCHS[name]
    theirs = torch_schedule(name, 4, 8, stages)
    for kind in ("compute_comms", "compute_only"):
        theirs._dump_csv(str(tmp_path / "theirs.csv"), format=kind)
        read = pl.read_csv(tmp_path / "theirs.csv")
        report = pl.check_schedule(read if read.has_messages else pl.with_messages(read))
        assert (read.num_stages, read.num_microbatches, len(read.ranks)) == (8, 8, 4) and 0 <= report.bubble_rate < 0.5
        assert {a.kind for row in read.compute().ranks for a in row} == set(kinds)
    if name == "ScheduleDualPipeV":
        assert read.compute().ranks == pl.dualpipe_v(4, 8).compute().ranks


@pytest.mark.parametrize("cell", ["0G0", "F0", "0F", "0F0x", "-1F0", "0F0 0F1", "(0F0;1X0)OVERLAP_F_B"])
def test_a_cell_that_is_no_action_is_named(cell, tmp_path):
    (tmp_path / "bad.csv").write_text(f"0F0,0B0\n1F0,,{cell}\n")
    with pytest.raises(ScheduleError, match=r"bad.csv, line 2 \(rank 1\), column 3: .* is no action"):
        pl.read_csv(tmp_path / "bad.csv")


@pytest.mark.parametrize("mode", MODES)
def test_computations_alone_run_as_with_their_messages(mode):
    """What a price simulates: the same spans, and the same makespan without them."""
    draw = random.Random(mode)
    for ranks, count in ((2, 4), (3, 9), (4, 8)):
        whole, alone = (plan(mode, ranks, messages=messages)(count) for messages in (True, False))
        assert whole.has_messages and not alone.has_messages
        each = [[draw.random() for _ in range(whole.num_stages)] for _ in range(3)]
        times = pl.Times(*each, draw.random())
        timeline = pl.simulate(whole, times)
        assert sorted(timeline.spans) == sorted(pl.simulate(alone, times).spans)
        assert makespan(alone, times) == timeline.makespan
