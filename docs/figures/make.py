"""Draws the figures of the documentation: `python docs/figures/make.py` writes the SVG files beside this script.

What is cut, and where, is asked of `onecard.Layout`, and what runs when of `onecard.pipeline`, so that a figure cannot disagree with the library.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import onecard as oc
from onecard import pipeline

# Each figure brings its own background, because a page's theme and the reader's system may differ.
STYLE = """
  .page { fill: #fbfbfa; stroke: #d5d5d0; }
  .panel { fill: #f1f1ee; }
  .whole { fill: #c9ccd1; } .empty { fill: none; }
  .c0 { fill: #7eb0de; } .c1 { fill: #f0b26b; } .c2 { fill: #8fc79a; } .c3 { fill: #c7a3d9; }
  .cell { stroke: #43474d; stroke-width: 1; }
  .line { stroke: #43474d; stroke-width: 1.5; fill: none; }
  .send { fill: #c2453d; }
  .head { fill: #43474d; }
  text { font-family: ui-sans-serif, system-ui, Helvetica, Arial, sans-serif; font-size: 13px; fill: #1f2328; }
  .small { font-size: 11.5px; fill: #57606a; } .title { font-size: 14px; font-weight: 600; }
  .code { font-family: ui-monospace, Menlo, Consolas, monospace; font-size: 12px; }
  .on { fill: #ffffff; font-weight: 600; } .mark { fill: #16181c; }
  @media (prefers-color-scheme: dark) {
    .page { fill: #16181c; stroke: #3a3f47; }
    .panel { fill: #20242a; }
    .whole { fill: #596069; }
    .c0 { fill: #3f78b0; } .c1 { fill: #b57a2e; } .c2 { fill: #4c8f5a; } .c3 { fill: #8a60a3; }
    .cell, .line { stroke: #b9c0c9; }
    .head { fill: #b9c0c9; }
    .send { fill: #d4574e; }
    text { fill: #e6e8eb; } .small { fill: #a4acb6; } .mark { fill: #ffffff; }
  }
"""
PASSES_STYLE = """
  .c4 { fill: #f0e442; } .later { fill-opacity: 0.5; } .tiny { font-size: 10px; }
  @media (prefers-color-scheme: dark) { .c4 { fill: #a39a1c; } }
"""
CELL = 11


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "middle") -> str:
    words = words.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return f'<text x="{x:g}" y="{y:g}" class="{kind}" text-anchor="{anchor}">{words}</text>'


def box(x: float, y: float, w: float, h: float, kind: str, radius: float = 0) -> str:
    return f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="{radius:g}" class="{kind}"/>'


def arrow(x0: float, y0: float, x1: float, y1: float) -> str:
    return f'<path d="M{x0:g} {y0:g} L{x1:g} {y1:g}" class="line" marker-end="url(#head)"/>'


def tensor(x: float, y: float, layout: oc.Layout, shape: tuple[int, int], rank: int | None = None) -> list[str]:
    """A 2-d tensor at (x, y), its parts in the colours of their ranks; with a rank, only what that rank holds."""
    height, width = (size * CELL for size in shape)
    drawn = [box(x, y, width, height, "empty cell")]
    for other in layout.mesh.process_ids if rank is None else [rank]:
        place = layout.mesh.coordinate(other)
        (top, left), (rows, columns) = layout.local_offset(shape, place), layout.local_shape(shape, place)
        same = layout.is_replicated or layout.pending
        kind = "whole cell" if same else f"c{layout.mesh.process_ids.index(other)} cell"
        drawn.append(box(x + left * CELL, y + top * CELL, columns * CELL, rows * CELL, kind))
    return drawn


def svg(width: int, height: int, parts: Sequence[str], title: str, style: str = STYLE) -> str:
    head = '<marker id="head" markerWidth="8" markerHeight="8" refX="6" refY="3" orient="auto">'
    head += '<path d="M0 0 L7 3 L0 6 z" class="head"/></marker>'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img">'
        f"<title>{title}</title><style>{style}</style><defs>{head}</defs>"
        + box(0.5, 0.5, width - 1, height - 1, "page", 10)
        + "".join(parts)
        + "</svg>\n"
    )


def program() -> str:
    """A one-card program, and the same on two ranks: which part is where, and the one message."""
    mesh = oc.ProcessMesh([0, 1], ["tp"])
    whole, rows, columns = (
        oc.Layout.of(mesh, 2, [placement]) for placement in (oc.Replicate(), oc.Shard(0), oc.Shard(1))
    )
    parts = [text(165, 30, "what you write: one card", "title"), text(615, 30, "what runs: a mesh of 2 ranks", "title")]
    parts.append(box(20, 45, 290, 250, "panel", 8))
    parts.append(box(330, 45, 570, 250, "panel", 8))
    x, h, y = (4, 4), (4, 6), (4, 3)
    w1, w2 = (6, 4), (3, 6)
    # One card: two weights with their placements, the program below them.
    parts += [text(88, 68, "w1", "code"), *tensor(66, 78, rows, w1), text(88, 162, "Shard(0)", "small")]
    parts += [text(213, 68, "w2", "code"), *tensor(180, 78, columns, w2), text(213, 162, "Shard(1)", "small")]
    for i, line in enumerate(("h = torch.relu(x @ w1.T)", "y = h @ w2.T", "loss = cross_entropy(y, target)")):
        parts.append(text(50, 202 + 24 * i, line, "code", "start"))
    parts.append(text(165, 281, "x and target are not marked: whole everywhere", "small"))
    # Two ranks: each row is one rank.
    for rank, top in ((0, 62), (1, 182)):
        middle = top + 48
        parts.append(text(348, middle + 4, f"rank {rank}", "", "start"))
        at = {"x": 410, "w1": 478, "h": 552, "w2": 640, "y": 735, "sum": 842}
        pieces = (("x", whole, x), ("w1", rows, w1), ("h", columns, h), ("w2", columns, w2))
        for name, layout, shape in pieces:
            parts += tensor(at[name], middle - shape[0] * CELL / 2, layout, shape, rank)
        parts += [box(at["y"], middle - 22, y[1] * CELL, y[0] * CELL, f"c{rank} cell")]
        parts += tensor(at["sum"], middle - 22, whole, y, rank)
        names = (("x", 22), ("w1", 22), ("h", 33), ("w2", 33), ("y", 16))
        parts += [text(at[name] + half, middle + 48, name, "code") for name, half in names]
        parts.append(text(at["sum"] + 16, middle + 48, "y", "code"))
        signs = ((466, "×"), (537, "→"), (629, "×"), (720, "→"))
        parts += [text(place, middle + 5, sign) for place, sign in signs]
        parts += [arrow(770, middle, 788, middle), arrow(814, middle, 838, middle)]
    parts.append(box(790, 62, 22, 216, "send", 5))
    parts.append(
        '<text x="805" y="170" class="on" text-anchor="middle" transform="rotate(-90 805 170)">all-reduce</text>'
    )
    parts.append(text(751, 176, "partial sums", "small"))
    return svg(920, 312, parts, "A one-card program, and what runs on a mesh of two ranks with one all-reduce")


def concepts() -> str:
    """The five ideas side by side: mesh, placement, layout, rule, reshard."""
    mesh = oc.ProcessMesh([[0, 1], [2, 3]], ["dp", "tp"])
    parts = []
    names = ("1 mesh", "2 placement", "3 layout", "4 rule", "5 reshard")
    lefts = (14, 182, 350, 518, 714)
    widths = (160, 160, 160, 188, 192)
    for name, left, width in zip(names, lefts, widths, strict=True):
        parts += [box(left, 14, width, 232, "panel", 8), text(left + 12, 36, name, "title", "start")]
    # mesh: a grid of ranks with named axes
    for rank in mesh.process_ids:
        row, column = mesh.coordinate(rank)
        parts.append(box(60 + 46 * column, 78 + 46 * row, 42, 42, f"c{rank} cell", 5))
        parts.append(text(81 + 46 * column, 104 + 46 * row, str(rank), "mark"))
    parts += [text(105, 68, "tp", "code"), text(45, 126, "dp", "code")]
    parts += [text(94, 202, "4 ranks, 2 named axes", "small"), text(94, 222, "axis size 2 and 2", "small")]
    # placement: what one axis does to a tensor
    shape = (6, 4)
    two = oc.ProcessMesh([0, 1], ["x"])
    for i, (placement, label) in enumerate(((oc.Shard(0), "Shard(0)"), (oc.Shard(1), "Shard(1)"))):
        parts += tensor(206 + 70 * i, 62, oc.Layout.of(two, 2, [placement]), shape)
        parts.append(text(228 + 70 * i, 144, label, "code"))
    for i, label in enumerate(("Replicate", "Partial")):
        parts += tensor(206 + 70 * i, 156, oc.Layout.replicated(two, 2), (4, 4))
        parts.append(text(228 + 70 * i, 216, label, "code"))
    parts.append(text(298, 183, "+", "mark"))
    parts.append(text(262, 236, "what one axis does", "small"))
    # layout: all axes together
    layout = oc.Layout.of(mesh, 2, [oc.Shard(0), oc.Shard(1)])
    shape = (8, 8)
    parts += tensor(386, 70, layout, shape)
    for rank in mesh.process_ids:
        (top, left), (rows, columns) = (
            f(shape, mesh.coordinate(rank)) for f in (layout.local_offset, layout.local_shape)
        )
        parts.append(text(386 + CELL * (left + columns / 2), 75 + CELL * (top + rows / 2), str(rank), "mark"))
    parts += [text(430, 184, "dp=Shard(0)", "code"), text(430, 202, "tp=Shard(1)", "code")]
    parts.append(text(430, 222, "all axes together", "small"))
    # rule: which factors an operator shares
    one, two_ = oc.Layout.of(two, 2, [oc.Shard(1)]), oc.Layout.of(two, 2, [oc.Shard(0)])
    parts += [
        *tensor(532, 78, one, (4, 4)),
        *tensor(592, 78, two_, (4, 4)),
        *tensor(652, 78, oc.Layout.replicated(two, 2), (4, 4)),
    ]
    parts += [text(584, 105, "@"), text(644, 105, "="), text(674, 105, "+", "mark")]
    parts += [text(554, 70, "m k", "code"), text(614, 70, "k n", "code"), text(674, 70, "m n", "code")]
    parts.append(text(612, 152, "mm: m k, k n -> m n", "code"))
    parts += [
        text(612, 184, "cut m or n: the result is cut", "small"),
        text(612, 202, "cut k: the result is Partial", "small"),
    ]
    parts.append(text(612, 222, "one row for each operator", "small"))
    # reshard: from one layout to another
    parts += tensor(734, 84, oc.Layout.replicated(two, 2), (4, 4))
    parts.append(text(756, 111, "+", "mark"))
    parts += [arrow(784, 106, 836, 106), box(789, 80, 40, 18, "send", 3)]
    parts.append(text(809, 93, "sum", "on"))
    parts += tensor(842, 84, oc.Layout.replicated(two, 2), (4, 4))
    parts += [text(756, 148, "Partial", "code"), text(864, 148, "Replicate", "code")]
    parts += [text(810, 180, "steps = plan(from, to)", "code"), text(810, 202, "all_reduce on axis x", "small")]
    parts.append(text(810, 222, "with its bytes and time", "small"))
    return svg(920, 260, parts, "The five concepts: mesh, placement, layout, rule, reshard")


def pipelines() -> str:
    """Six schedules, drawn from what `simulate` says of them; a rank's chunks together are one stage of the others."""
    whole = pipeline.Times()
    panels = [
        (pipeline.gpipe(4, 8), whole),
        (pipeline.one_f_one_b(4, 8), whole),
        (pipeline.interleaved(4, 8), whole.per_chunk(2)),
        (pipeline.zb_h1(4, 8), whole),
        (pipeline.zb_v(4, 8), whole.per_chunk(2)),
        (pipeline.v_half(4, 8), whole.per_chunk(2)),
    ]
    left, unit, line, parts, top = 78, 24, 17, [], 12
    for schedule, times in panels:
        report = pipeline.check_schedule(schedule, times)
        chunks = schedule.num_stages // 4
        title = f"{schedule.name}: bubble {report.bubble_rate:.1%}, activations {max(report.peak_memory) / chunks:g}"
        parts.append(text(left, top + 15, title, "title", "start"))
        for rank in range(4):
            parts.append(text(left - 10, top + 35 + line * rank, f"rank {rank}", "small", "end"))
        for rank, (kind, stage, i), start, end in report.timeline.spans:
            x, y, width = left + unit * start, top + 23 + line * rank, unit * (end - start)
            later = " later" if chunks > 1 and stage >= 4 else ""
            parts.append(box(x, y, width, line - 2, f"{PASSES[kind]} cell{later}"))
            parts.append(text(x + width / 2, y + 11.5, str(i), "tiny mark"))
        top += 4 * line + 34
    for i, (kind, word) in enumerate(zip("FBIW", ("forward", "backward", "input gradient", "weight gradient"), strict=True)):
        parts += [box(left + 150 * i, top + 4, 22, 13, f"{PASSES[kind]} cell")]
        parts += [text(left + 30 + 150 * i, top + 15, word, "small", "start")]
    parts.append(text(left + 600, top + 15, "lighter: the rank's second chunk", "small", "start"))
    return svg(920, top + 30, parts, "Six pipeline schedules of 4 ranks and 8 microbatches, with their bubbles", STYLE + PASSES_STYLE)


def measured() -> str:
    """Two measured runs of 2 ranks, each below what its schedule says for the times that were measured."""
    runs = json.loads(Path(__file__).with_name("measured.json").read_text(encoding="utf-8"))
    schedules = {"1F1B": pipeline.one_f_one_b(2, 6), "ZBH1": pipeline.zb_h1(2, 6)}
    left, line, parts, top = 78, 17, [], 12
    unit = 800 / max(end for spans in runs.values() for *_, end in spans)
    for mode, schedule in schedules.items():
        ran = pipeline.Timeline.of([tuple(span) for span in runs[mode]])
        for timeline, word in ((pipeline.simulate(schedule, ran.times()), "as its schedule says"), (ran, "measured")):
            begin = min(span.start for span in timeline.spans)
            title = f"{schedule.name}, {word}: step {timeline.step:.3g} ms, bubble {timeline.bubble_rate:.1%}"
            parts.append(text(left, top + 15, title, "title", "start"))
            for rank in range(2):
                parts.append(text(left - 10, top + 35 + line * rank, f"rank {rank}", "small", "end"))
            for rank, (kind, _, i), start, end in timeline.spans:
                x, y, width = left + unit * (start - begin), top + 23 + line * rank, unit * (end - start)
                parts.append(box(round(x, 1), y, round(width, 1), line - 2, f"{PASSES[kind]} cell"))
                parts.append(text(round(x + width / 2, 1), y + 11.5, str(i), "tiny mark") if width > 8 else "")
            top += 2 * line + 34
    for i, (kind, word) in enumerate(zip("FBIW", ("forward", "backward", "input gradient", "weight gradient"), strict=True)):
        parts += [box(left + 150 * i, top + 4, 22, 13, f"{PASSES[kind]} cell")]
        parts += [text(left + 30 + 150 * i, top + 15, word, "small", "start")]
    return svg(920, top + 30, parts, "Two measured runs beside their schedules", STYLE + PASSES_STYLE)


PASSES = {"F": "c0", "B": "c1", "I": "c4", "W": "c2"}
FIGURES = {"program.svg": program, "concepts.svg": concepts, "pipelines.svg": pipelines, "measured.svg": measured}

if __name__ == "__main__":
    for name, draw in FIGURES.items():
        Path(__file__).with_name(name).write_text(draw(), encoding="utf-8")
