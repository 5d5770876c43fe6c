"""How a router balances, drawn: bars for a terminal, and areas over all steps as SVG."""

from __future__ import annotations

from torch import Tensor

COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#bbbbbb", "#222255")
WIDTH, HEIGHT, GAP = 640, 160, 30


def bars(share: Tensor, width: int = 40) -> str:
    """A line for each expert: (experts,), which sum to 1. The mark is where all would be alike."""
    alike = 1 / len(share)
    lines = []
    for i, part in enumerate(share.tolist()):
        drawn = "#" * round(part * width / alike / 2)
        drawn = f"{drawn:<{width}}"
        mark = width // 2
        lines.append(f"  expert {i}  {drawn[:mark]}|{drawn[mark:]}  {part:5.0%}")
    return "\n".join(lines)


def picture(shares: list[list[Tensor]]) -> str:
    """An SVG with a band for each layer: how wide an expert's area is at a step is its share of the tokens."""
    layers, steps = len(shares[0]), len(shares)
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{layers * (HEIGHT + GAP)}">']
    for layer in range(layers):
        top = layer * (HEIGHT + GAP) + GAP
        parts.append(f'<text x="0" y="{top - 8}" font-size="14">layer {layer}: share of each expert, by step</text>')
        ends = [[0.0, *of_step[layer].cumsum(0).tolist()] for of_step in shares]
        for expert in range(len(ends[0]) - 1):
            lower = [_point(step, steps, top, of_step[expert]) for step, of_step in enumerate(ends)]
            upper = [_point(step, steps, top, of_step[expert + 1]) for step, of_step in enumerate(ends)]
            colour = COLOURS[expert % len(COLOURS)]
            parts.append(
                f'<polygon points="{" ".join(lower + upper[::-1])}" fill="{colour}"><title>expert {expert}</title></polygon>'
            )
    return "\n".join([*parts, "</svg>"])


def _point(step: int, steps: int, top: int, share: float) -> str:
    return f"{step * WIDTH / max(steps - 1, 1):.1f},{top + share * HEIGHT:.1f}"
