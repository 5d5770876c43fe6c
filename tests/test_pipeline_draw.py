"""Timelines: as text, as pictures, as traces; of schedules and of measured runs."""

import io
import json
import re
import sys

import pytest
from rich.console import Console

from onecard import pipeline as pl
from onecard.errors import ScheduleError


def measured():
    """What a run of 1F1B on 2 ranks might have taken, by a clock that starts anywhere."""
    spans = pl.simulate(pl.one_f_one_b(2, 3), pl.Times(2, 2, 1, 0.5)).spans
    return pl.Timeline.of([(rank, str(a), 100 + 1.25 * start, 100 + 1.25 * end) for rank, a, start, end in spans])


def test_text_says_what_runs_when():
    assert str(pl.draw_text(pl.one_f_one_b(2, 3))).splitlines() == [
        "1F1B: 2 ranks, 3 microbatches, step 12, bubble 25.0%",
        "0 │F0 F1       B0─── F2 B1───    B2───",
        "1 │   F0 B0─── F1 B1─── F2 B2───",
    ]


def labels(text):
    return [re.findall(r"[FBIW]\d+[a-z]?", line) for line in str(text).splitlines()[1:]]


@pytest.mark.parametrize("times", [(1, 1, 1), (2, 1, 1, 1), (18.5, 18.1, 9.3, 0.6), (1, 2, 3, 0.25)])
@pytest.mark.parametrize("make", [pl.one_f_one_b, pl.zb_h2, pl.interleaved, pl.v_half, pl.dualpipe_v])
def test_every_action_is_legible_in_its_order(make, times):
    schedule = make(3, 11)
    drawn = labels(pl.draw_text(schedule, pl.Times(*times)))
    several = schedule.num_stages > 3
    for rank, row in enumerate(schedule.compute().ranks):
        stages = sorted({a.stage for a in row})
        assert drawn[rank] == [f"{a.kind}{a.microbatch}{'ab'[stages.index(a.stage)] if several else ''}" for a in row]


def test_text_fits_a_width_and_shows_no_half_number():
    text = str(pl.draw_text(pl.one_f_one_b(4, 12), width=80))
    assert max(len(line) for line in text.splitlines()) <= 80
    for line, row in zip(labels(text), pl.one_f_one_b(4, 12).compute().ranks, strict=True):
        assert set(line) <= {f"{a.kind}{a.microbatch}" for a in row} and len(line) > 3


def test_an_action_that_took_nearly_no_time_does_not_stretch_the_text():
    """As W where I did all: a measured run has such."""
    short = [(0, "0F0", 0, 10), (0, "0I0", 10, 25), (0, "0W0", 25, 25.001), (0, "0F1", 26, 36)]
    lines = str(pl.draw_text(pl.Timeline.of(short))).splitlines()
    assert lines[1] == "0 │F0─ I0─── WF1─"


def test_text_is_coloured_by_kind():
    console = Console(record=True, width=200, file=io.StringIO())
    console.print(pl.draw_text(pl.zb_h1(2, 2)))
    html = console.export_html()
    assert all(colour in html for colour in ("#56b4e9", "#f0e442", "#009e73"))


@pytest.mark.share(1)
@pytest.mark.parametrize("ending", ["png", "svg", "pdf"])
def test_pictures_of_a_schedule_beside_a_run(ending, tmp_path):
    path = tmp_path / f"timeline.{ending}"
    pl.draw_figure(path, pl.one_f_one_b(2, 3), measured(), times=pl.Times(2, 2, 1, 0.5), unit="ms")
    first = path.read_bytes()
    assert first.startswith({"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}[ending])
    if ending == "svg":
        words = re.findall(r"<text[^>]*>([^<]*)</text>", first.decode())
        assert "1F1B: 2 ranks, 3 microbatches, step 22 ms, bubble 31.8%" in words
        assert "measured: 2 ranks, 3 microbatches, step 27.5 ms, bubble 31.8%" in words
        assert {"time (ms)", "rank 0", "rank 1", "forward", "backward"} <= set(words)
        assert "input gradient" not in words  # the legend has what is drawn
        pl.draw_figure(path, pl.one_f_one_b(2, 3), measured(), times=pl.Times(2, 2, 1, 0.5), unit="ms")
        assert path.read_bytes() == first


def test_numbers_that_would_not_be_legible_are_left_out(tmp_path):
    def numbers(m):
        pl.draw_figure(tmp_path / "x.svg", pl.one_f_one_b(2, m))
        # Of an axis there are at most a dozen.
        return len(re.findall(r">\d+</text>", (tmp_path / "x.svg").read_text()))

    assert numbers(8) >= 2 * 2 * 8
    assert numbers(400) < 12


def test_pictures_of_what_cannot_be_drawn(tmp_path, monkeypatch):
    with pytest.raises(ScheduleError, match=r"the ending says the format: .png, .svg or .pdf"):
        pl.draw_figure(tmp_path / "x.bmp", pl.gpipe(2, 2))
    with pytest.raises(ScheduleError, match="nothing to draw"):
        pl.draw_figure(tmp_path / "x.png")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"pip install 'onecard\[plot\]'"):
        pl.draw_figure(tmp_path / "x.png", pl.gpipe(2, 2))


def test_a_trace_has_every_span_where_it_was(tmp_path):
    pl.draw_trace(
        tmp_path / "t.json", pl.one_f_one_b(2, 3), measured(), times=pl.Times(2, 2, 1, 0.5), microseconds=1000
    )
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    names = {(e["pid"], e.get("tid")): e["args"]["name"] for e in events if e["ph"] == "M"}
    assert names[0, None].startswith("1F1B: ") and names[1, None].startswith("measured: ") and names[1, 1] == "rank 1"
    simulated, run = ([e for e in events if e["ph"] == "X" and e["pid"] == pid] for pid in (0, 1))
    assert [e["args"]["action"] for e in simulated] == [e["args"]["action"] for e in run] and len(run) == 12
    assert simulated[0] == {
        "ph": "X", "name": "F 0", "cat": "forward", "pid": 0, "tid": 0, "ts": 0.0, "dur": 2000.0,
        "args": {"action": "0F0", "stage": 0, "microbatch": 0},
    }  # fmt: skip
    for mine, theirs in zip(simulated, run, strict=True):
        assert (theirs["ts"], theirs["dur"]) == pytest.approx((1.25 * mine["ts"], 1.25 * mine["dur"]))
