"""Pictures of recordings: well formed, every box and word at its place, messages in colour, layers that are alike as one."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
import torch
from test_static_pretend import grid, pretended, recorded

import onecard as oc
from onecard.errors import RecordingError
from onecard.static.show.draw import COLOURS, LETTER
from onecard.static.show.folded import folded

SVG = "{http://www.w3.org/2000/svg}"


def boxes(text: str) -> list[tuple[float, float, float, float]]:
    """The rectangles of blocks and messages: left, top, right, bottom."""
    found = []
    for r in ElementTree.fromstring(text).iter(f"{SVG}rect"):
        x, y, w, h = (float(r.get(k, "0")) for k in ("x", "y", "width", "height"))
        if (r.get("fill") == "#ffffff" and r.get("stroke") == "#4a5560") or r.get("fill") in COLOURS.values():
            found.append((x, y, x + w, y + h))
    return found


def check(text: str) -> None:
    """No two boxes overlap, and every word is inside of the picture."""
    rects, root = boxes(text), ElementTree.fromstring(text)
    assert len(rects) > 5
    for i, a in enumerate(rects):
        for b in rects[i + 1 :]:
            assert a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1], (a, b)
    width, height = float(root.get("width", "0")), float(root.get("height", "0"))
    for word in root.iter(f"{SVG}text"):
        x, long = float(word.get("x", "0")), len(word.text or "") * LETTER * 0.9
        left = x - long if word.get("text-anchor") == "end" else x
        assert left >= 0 and left + long <= width and 0 < float(word.get("y", "0")) < height, word.text


@pytest.mark.proof
def test_a_gpt_on_many_ranks(tmp_path: Path) -> None:
    """Twelve layers are one pile; messages of both axes; the three phases; the same as text."""
    recording = pretended(16, 1, lambda: recorded(grid(2, 8), layers=12, zero=True))
    text = recording.draw(tmp_path / "step.svg")
    assert (tmp_path / "step.svg").read_text() == text
    check(text)
    sent = ("all_reduce along &#x27;tp&#x27;", "along &#x27;dp&#x27;")
    for word in ("forward", "backward", "optimizer", "× 12", "blocks.0.mlp.fc", "dp=R, tp=S(0)", *sent):
        assert word in text, word
    columns = folded(recording)
    assert all(len(blocks) <= 24 for blocks in columns.values())
    drawn = sum(s.nbytes * b.times for blocks in columns.values() for b in blocks for s in b.sent)
    assert drawn == sum(recording.cost().sent.values())  # every message is in it once
    said = recording.draw()
    assert "x 12: linear" in said and ">>> all_reduce" in said and recording.draw(tmp_path / "step.txt") == said + "\n"


def test_what_cannot_be_drawn() -> None:
    recording = oc.record(lambda x: x * 2)(torch.ones(2))
    with pytest.raises(RecordingError, match=r"draw\('step\.svg'\)"):
        recording.draw("step.png")


def test_the_graphs_of_seed_003(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command's pictures: mixed precision has its casts, sharding its messages. Those in docs are laid out as well."""
    folder = Path(__file__).parents[1]
    monkeypatch.syspath_prepend(str(folder / "examples" / "seeds"))
    import graphs_003

    texts: dict[str, Any] = {}
    for name in ("data_parallel", "sharding", "amp"):
        texts[name] = graphs_003.recorded(name, 128).draw(tmp_path / f"{name}.svg")
    static = graphs_003.programs("data_parallel", 64)
    texts |= {name: recording.draw() for name, recording in static.items()}
    assert ">>> all_reduce" in texts["static_data_parallel"] and ">>>" not in texts["static_serial"]
    for name in [*graphs_003.GRAPHS, "static_serial", *(f"static_{name}" for name in graphs_003.STATIC)]:
        check((folder / "docs" / "figures" / f"graph_003_{name}.svg").read_text())
    assert "all_gather" in texts["sharding"] and "messages, with" in texts["data_parallel"]
    assert "_to_copy" in texts["amp"] and "bfloat16" in texts["amp"] and "messages, with" not in texts["amp"]
