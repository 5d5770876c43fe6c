"""A recording as a picture (SVG): forward, backward and optimizer side by side, folded by modules, messages in colour."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

from onecard.errors import RecordingError
from onecard.static.price.price import cost
from onecard.static.show.folded import Block, SentAlong, as_text, folded, words
from onecard.static.step.step import RecordedStep

# Told apart by people with any of the common kinds of colour blindness: Okabe and Ito (2008).
COLOURS = {
    "all_reduce": "#e69f00",
    "all_gather": "#56b4e9",
    "reduce_scatter": "#009e73",
    "all_to_all": "#cc79a7",
    "broadcast": "#f0e442",
}
PANELS = {"forward": "#f3f7fb", "backward": "#fbf6f0", "optimizer": "#f4f8f3"}
WIDTH, GAP, PAD, LINE = 330, 26, 14, 15
LETTER = 6.1
"""Width of a letter of 11 px in the widest common font, so that text fits its box in any."""
GIVEN = 6
"""Parameters of a block that are listed."""


def draw(recording: RecordedStep, path: Any, depth: int | None) -> str:
    """See ``Recording.draw``."""
    if path is None:
        return "\n".join(as_text(recording, depth))
    kind = Path(path).suffix
    if kind not in (".svg", ".txt"):
        raise RecordingError(f"draw: want a path that ends in .svg or .txt, not {path!r}: recording.draw('step.svg')")
    text = svg(recording, depth) if kind == ".svg" else "\n".join(as_text(recording, depth)) + "\n"
    Path(path).write_text(text, encoding="utf-8")
    return text


def svg(recording: RecordedStep, depth: int | None = None) -> str:
    """The text of the picture."""
    columns = folded(recording, depth)
    heights = {phase: 34 + sum(_height(b) for b in blocks) + PAD for phase, blocks in columns.items()}
    kinds = {sent.kind for blocks in columns.values() for b in blocks for sent in b.sent}
    top = 78 if kinds else 52
    height = top + max(heights.values(), default=0) + PAD
    width = PAD + (WIDTH + 2 * PAD + GAP) * max(1, len(columns)) - GAP + PAD
    parts = [*_head(recording, kinds)]
    for i, (phase, blocks) in enumerate(columns.items()):
        x = PAD + i * (WIDTH + 2 * PAD + GAP)
        parts.append(_rect(x, top, WIDTH + 2 * PAD, heights[phase], PANELS[phase], "#d5dae0", 8))
        parts.append(_text(x + PAD, top + 21, phase, 13, bold=True))
        parts += _column(blocks, x + PAD, top + 34)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height:.0f}" viewBox="0 0 {width} {height:.0f}" '
        f'role="img" font-family="Helvetica, Arial, DejaVu Sans, sans-serif" font-size="11">\n'
        f"<title>{escape(f'A step as a graph: {recording.name}, {_said(recording)}')}</title>\n"
        + _rect(0, 0, width, height, "#ffffff", "none", 0)
        + "\n"
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def _said(recording: RecordedStep) -> str:
    nodes = [*recording.nodes()]
    price = cost(recording)
    sent = "; ".join(f"{_bytes(n)} sent along {axis!r}" for axis, n in price.sent.items()) or "no message"
    return f"on this rank: {len(nodes)} nodes, {_count(price.flops)}FLOP, {sent}, peak memory {_bytes(price.peak)}"


def _head(recording: RecordedStep, kinds: set[str]) -> Iterator[str]:
    yield _text(PAD, 24, recording.name, 15, bold=True)
    yield _text(PAD, 42, _said(recording), 11, "#555555")
    x = PAD
    for kind, colour in COLOURS.items():
        if kind in kinds:
            yield _rect(x, 54, 16, 12, colour, "#333333", 3)
            yield _text(x + 22, 64, kind, 11)
            x += 22 + int(LETTER * len(kind)) + 22
    if kinds:
        yield _text(x, 64, "messages, with their axis, how many, and the bytes that this rank sends", 11, "#555555")


def _height(block: Block) -> float:
    return _box(block) + len(block.sent) * 24 + _room(block)


def _room(block: Block) -> int:
    """Between a block and the next one: for the arrow and its two lines."""
    return 16 if block.out is None else 44 if block.out[1] else 30


def _box(block: Block) -> float:
    given = min(len(block.given), GIVEN) + (len(block.given) > GIVEN)
    return 26 + LINE * (1 + given) + 4


def _column(blocks: list[Block], x: float, y: float) -> Iterator[str]:
    for i, block in enumerate(blocks):
        for sent in (s for s in block.sent if s.first):
            yield from _pill(sent, block.times, x, y)
            y += 24
        yield from _block(block, x, y)
        y += _box(block)
        for sent in (s for s in block.sent if not s.first):
            yield from _pill(sent, block.times, x, y + 5)
            y += 24
        if i + 1 < len(blocks):
            yield from _edge(block, x, y)
        y += _room(block)


def _block(block: Block, x: float, y: float) -> Iterator[str]:
    high = _box(block)
    if block.times > 1:  # a pile
        yield _rect(x + 5, y + 5, WIDTH - 5, high - 3, "#ffffff", "#8a949e", 5)
    wide = WIDTH - (5 if block.times > 1 else 0)
    yield _rect(x, y, wide, high, "#ffffff", "#4a5560", 5)
    times = f"× {block.times}" if block.times > 1 else ""
    yield _text(x + 9, y + 18, _cut(block.module or "(in the function itself)", 46 - len(times)), 12, bold=True)
    if times:
        yield _text(x + wide - 9, y + 18, times, 12, bold=True, anchor="end")
    y += 18 + LINE
    yield _text(x + 9, y, words(block.operators(), 52), 11, "#333333")
    for name, shape, layout in block.given[:GIVEN]:
        y += LINE
        yield _text(x + 9, y, _cut(f"{name} {shape}", 26), 10.5, "#1b5e8a")
        yield _text(x + wide - 9, y, _cut(short(layout), 30), 10.5, "#1b5e8a", anchor="end")
    if len(block.given) > GIVEN:
        yield _text(x + 9, y + LINE, f"and {len(block.given) - GIVEN} more tensors", 10.5, "#1b5e8a")


def _pill(sent: SentAlong, times: int, x: float, y: float) -> Iterator[str]:
    colour = COLOURS.get(sent.kind, "#bbbbbb")
    yield _rect(x + 14, y, WIDTH - 33, 18, colour, "#333333", 9)
    many = sent.count * times
    said = f"{sent.kind} along {sent.axis!r}{f' × {many}' if many > 1 else ''}"
    yield _text(x + 26, y + 13, said, 11, bold=True)
    yield _text(x + WIDTH - 31, y + 13, _bytes(sent.nbytes * times), 11, anchor="end")


def _edge(block: Block, x: float, y: float) -> Iterator[str]:
    middle, end = x + 26, y + _room(block) - 3
    yield f'<path d="M {middle} {y + 1} V {end - 5}" stroke="#4a5560" fill="none"/>'
    yield f'<path d="M {middle - 4} {end - 6} h 8 l -4 6 z" fill="#4a5560"/>'
    if block.out:
        shape, layout = block.out
        yield _text(x + 38, y + 18, _cut(shape, 46), 10.5, "#555555")
        if layout:
            yield _text(x + 38, y + 32, _cut(short(layout), 46), 10.5, "#555555")


def short(layout: str) -> str:
    """A layout in fewer letters: R for Replicate, S for Shard, P for Partial."""
    return layout.replace("Replicate", "R").replace("Shard", "S").replace("Partial", "P")


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def _bytes(n: float) -> str:
    """
    Example:
        >>> _bytes(512), _bytes(4096), _bytes(3 * 10**9)
        ('512 B', '4.1 kB', '3 GB')
    """
    return f"{_count(n)}B"


def _count(n: float) -> str:
    for size, unit in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if n >= size:
            return f"{n / size:.3g}".rstrip(".") + f" {unit}" if n / size < 1000 else f"{n / size:.0f} {unit}"
    return f"{n:.0f} "


def _rect(x: float, y: float, w: float, h: float, fill: str, stroke: str, radius: float) -> str:
    return f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="{radius:g}" fill="{fill}" stroke="{stroke}"/>'


def _text(
    x: float, y: float, words: str, size: float, colour: str = "#111111", bold: bool = False, anchor: str = "start"
) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x:g}" y="{y:g}" font-size="{size:g}" fill="{colour}" text-anchor="{anchor}"{weight}>{escape(words)}</text>'
