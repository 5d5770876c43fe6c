"""The page of a job: its data are JobCost's, and a browser shows them, by keyboard too."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from browser import CHROMIUM, DRIVER, Page, browser

import onecard as oc
from onecard.machine.events import Event
from onecard.reports.job_data import job_data, memory, timeline
from onecard.reports.job_page import in_script, page, write_page

SIZES = oc.Transformer(layers=12, hidden=128, heads=4, vocab=512, sequence=64)
PLAN = oc.Plan(dp=2, tp=2, pp=4, virtual=3, microbatches=8, zero=1, schedule="VPP")
needs_browser = pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="no Chromium with its driver is installed")


@pytest.fixture(scope="module")
def job() -> oc.JobCost:
    return oc.price(SIZES, PLAN, oc.Machine.preset("A100"))


@pytest.fixture(scope="module")
def tab() -> Iterator[Page]:
    with browser() as opened:
        yield opened


def data_of(text: str) -> dict:
    """The JSON of a page."""
    return json.loads(text.partition('<script type="application/json" id="job">')[2].partition("</script>")[0])


# -- its data --------------------------------------------------------------------------------------------------------------


def test_figures_are_jobcosts(job):
    data = data_of(page(job))["job"]
    assert data == json.loads(json.dumps(job_data(job)))
    assert "Tokens a second" in page(job) and "sequences a step" in page(job)
    assert (data["seconds"], data["tokens_per_second"], data["mfu"]) == (job.seconds, job.tokens_per_second, job.mfu)
    for found, rank in zip(data["ranks"], job.ranks, strict=True):
        assert (found["terms"], found["memory"], found["peak"]) == (dict(rank.terms), dict(rank.memory), rank.peak)


def test_events_come_back(job):
    found = timeline(job.events)
    assert found["left_out"] == 0
    read = []
    for rank, row in zip(found["ranks"], found["rows"], strict=True):
        now = 0
        for i in range(0, len(row), 5):
            kind, stage, microbatch, wait, long = row[i : i + 5]
            read.append((rank, found["kinds"][kind], stage, microbatch, now + wait, now + wait + long))
            now += wait + long
    wanted = [
        (e.rank, e.kind, e.told["stage"], e.told["microbatch"], round(e.begin * 1e9), round(e.end * 1e9))
        for e in job.events if e.seconds > 0
    ]  # fmt: skip
    assert sorted(read) == sorted(wanted)


def test_too_many_events_are_left_out_and_counted():
    events = [Event(rank, "", i, i + 1, kind="forward") for rank in range(20) for i in range(100)]
    found = timeline(events, 500)
    assert found["ranks"] == [0, 4, 9, 14, 19]
    assert found["left_out"] == 1500 == len(events) - sum(len(row) // 5 for row in found["rows"])
    assert timeline(events, 60)["left_out"] == 1940  # two ranks, of which 30 events each


def test_thinned_memory_keeps_the_peak(job):
    found = memory(job.ranks, 4 * len(job.ranks))
    assert found["left_out"] > 0
    for row, rank in zip(found["rows"], job.ranks, strict=True):
        assert max(row[1::2]) == max(nbytes for _, nbytes in rank.over_time) == rank.peak


def test_text_of_others_ends_no_script(job):
    evil = "</script><script>alert(1)</script>"
    text = page(replace(job, machine=replace(job.machine, name=evil, source=evil)), evil)
    assert text.count("<script") == page(job).count("<script")
    assert data_of(text)["job"]["machine"]["source"] == evil
    assert json.loads(in_script({"a": evil})) == {"a": evil}


def test_it_asks_for_nothing_else(job):
    text = page(job)
    assert not any(word in text for word in ("http://", "https://", "src=", "@import", "fetch(", "XMLHttpRequest"))


# -- in a browser ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def shown(tab, tmp_path, job) -> Page:
    write_page(tmp_path / "job.html", job, "small")
    tab.size(1100, 900)
    tab.dark(False)
    tab.open(tmp_path / "job.html")
    yield tab
    assert tab.errors() == []


def cells(tab: Page, caption: str) -> list[dict[str, str]]:
    """A table's rows: for each column the value of its cell."""
    return tab.run(
        """const table = [...document.querySelectorAll("table")].find((t) => t.caption.textContent === arguments[0]);
        const heads = [...table.tHead.rows[0].cells].map((c) => c.textContent);
        const values = (r) => [...r.cells].map((c, i) => [heads[i], c.dataset.value]);
        return [...table.tBodies[0].rows].map((r) => Object.fromEntries(values(r)));""",
        caption,
    )


@needs_browser
def test_the_page_shows_jobcosts_figures(shown, job):
    figures = shown.run("return [...document.querySelectorAll('#figures dd')].map((d) => Number(d.dataset.value))")
    assert figures == [job.seconds, job.tokens_per_second, job.mfu, job.hfu, job.peak]
    text = shown.run("return document.querySelector('#figures').innerText")
    assert f"{job.seconds * 1e3:.2f} ms" in text
    assert f"{job.tokens_per_second:,.0f}" in text
    for row, rank in zip(cells(shown, "Seconds of a step"), job.ranks, strict=True):
        assert row["rank"] == rank.name
        assert float(row["compute"]) == rank.terms["compute"]
        assert float(row["messages tp"]) == rank.terms["messages along 'tp'"]
    for row, rank in zip(cells(shown, "Memory at the peak"), job.ranks, strict=True):
        assert {name: int(row[name]) for name in rank.memory} == dict(rank.memory)
        assert int(row["peak"]) == rank.peak
    for row, rank in zip(cells(shown, "What a rank holds and sends"), job.ranks, strict=True):
        assert {axis: int(row[f"sent {axis}"]) for axis in rank.sent} == dict(rank.sent)
    for row, piece in zip(cells(shown, "Pieces of the model, for one microbatch"), job.pieces, strict=True):
        assert float(row["forward"]) == piece.forward


@needs_browser
def test_tables_sort_by_keyboard(shown, job):
    shown.run("[...document.querySelectorAll('table')][0].querySelectorAll('th button')[2].focus()")
    assert shown.run("return document.activeElement.textContent") == "compute"
    ordered = sorted(rank.terms["compute"] for rank in job.ranks)
    shown.press("Enter")
    assert [float(row["compute"]) for row in cells(shown, "Seconds of a step")] == ordered
    assert shown.run("return document.activeElement.parentNode.getAttribute('aria-sort')") == "ascending"
    shown.press("Space")
    assert [float(row["compute"]) for row in cells(shown, "Seconds of a step")] == ordered[::-1]
    sorts = shown.run(
        "return [...document.querySelectorAll('table')[0].querySelectorAll('thead th')].map((t) => t.ariaSort)"
    )
    assert sorts.count("descending") == 1
    assert sorts.count("none") == len(sorts) - 1


@needs_browser
def test_the_timeline_is_walked_by_keyboard(shown, job):
    shown.run("document.getElementById('timeline').focus()")
    shown.press("Right", "Right")
    mine = sorted((e for e in job.events if e.rank == 0 and e.seconds > 0), key=lambda e: e.begin)
    said = shown.run("return document.getElementById('timeline-said').textContent")
    assert said.startswith(
        f"pp 0: {mine[1].kind} of microbatch {mine[1].told['microbatch']}, stage {mine[1].told['stage']}"
    )
    whole = shown.run("return document.getElementById('timeline').getAttribute('aria-label')")
    shown.press("+")
    assert shown.run("return document.getElementById('timeline').getAttribute('aria-label')") != whole
    shown.press("0", "Down")
    assert shown.run("return document.getElementById('timeline').getAttribute('aria-label')") == whole
    assert shown.run("return document.getElementById('timeline-said').textContent").startswith("pp 1: ")


@needs_browser
def test_memory_says_what_is_alive(shown, job):
    last = len(job.ranks) - 1
    shown.run(
        "const r = document.getElementById('rank'); r.value = arguments[0]; r.dispatchEvent(new Event('change'))", last
    )
    parts = shown.run(
        "return Object.fromEntries([...document.querySelectorAll('#peak > div')].map((d) => "
        "[d.children[0].textContent, Number(d.children[1].dataset.value)]))"
    )
    assert parts == {name: n for name, n in job.ranks[last].memory.items() if n}
    shown.run("document.getElementById('moment').focus()")
    before = shown.run("return document.getElementById('moment').getAttribute('aria-valuetext')")
    assert f"{job.ranks[last].peak / 2**20:,.2f} MiB" in before
    shown.press("Right")
    assert shown.run("return document.getElementById('moment').getAttribute('aria-valuetext')") != before


@needs_browser
def test_all_that_takes_the_focus_has_a_name(shown):
    nameless = shown.run(
        """const isNamed = (n) => n.getAttribute("aria-label") || n.textContent.trim() || (n.labels && n.labels.length);
        const all = [...document.querySelectorAll("a, button, select, input, [tabindex='0']")];
        return all.filter((n) => n.checkVisibility() && !isNamed(n)).map((n) => n.outerHTML)"""
    )
    assert nameless == []
    seen = []
    for _ in range(12):
        shown.press("Tab")
        seen.append(shown.run("return document.activeElement.id || document.activeElement.className"))
    assert seen[:2] == ["", "theme"] or seen[:2] == ["skip", "theme"]
    assert seen.index("zoom-in") < seen.index("timeline")


@needs_browser
@pytest.mark.parametrize("dark", [False, True])
def test_text_has_contrast(shown, dark):
    shown.dark(dark)
    poor = shown.run((Path(__file__).parent / "contrast.js").read_text())
    assert poor == []


@needs_browser
def test_a_narrow_screen_shows_all_of_it(shown):
    shown.size(360, 740)
    assert shown.run("return document.documentElement.scrollWidth") <= 360


@pytest.mark.proof
@needs_browser
def test_hundreds_of_thousands_of_events(tab, job, tmp_path):
    events = tuple(
        Event(rank, "", i * 1e-8, (i + 1) * 1e-8, kind="forward", told={"stage": rank, "microbatch": i})
        for rank in range(10) for i in range(30_000)
    )  # fmt: skip
    write_page(tmp_path / "many.html", replace(job, events=events))
    assert (tmp_path / "many.html").stat().st_size < 2**23
    tab.size(1100, 900)
    tab.open(tmp_path / "many.html")
    note = tab.run("return document.getElementById('timeline-note').textContent")
    assert "120,000 of 300,000 events are left out: 6 of 10 kinds of ranks are shown" in note
    assert "Zoom in" in note
    took = tab.run(
        "const begin = performance.now(); for (const id of ['zoom-in', 'pan-right', 'pan-left', 'zoom-out']) "
        "document.getElementById(id).click(); return (performance.now() - begin) / 4"
    )
    assert took < 1000  # milliseconds, on a machine that does other things too
    assert tab.errors() == []
