"""Elements put in other places."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from onecard.rules.samples.data import distinct, real

SAMPLES = [
    lambda: real(5, 6).tril(),
    lambda: real(3, 5, 4).triu(1),
    lambda: real(4, 6).tril(-1),
    lambda: real(4, 6, grad=False).triu_(-1),
    lambda: real(4, 4).trace(),
    lambda: real(4, 6).trace(),
    lambda: real(3, 4, 5).diagonal(1, 0, -1),
    lambda: real(4, 6).diagonal(-1),
    lambda: real(4, 3).diag_embed(1),
    lambda: real(4, 3).diag_embed(0, 0, 1),
    lambda: real(4).diag(),
    lambda: real(4, 3, 5).flip(0, -1),
    lambda: real(4, 3).roll(1, 0),
    lambda: real(4, 3).roll((1, 2), (0, -1)),
    lambda: real(4, 3).roll(2),
    lambda: torch.rot90(real(4, 3, 2), 1, (0, 2)),
    lambda: torch.rot90(real(4, 3), 2),
    lambda: real(4, 3).repeat(2, 1, 2),
    lambda: real(4, 3).tile(2),
    lambda: real(4, 3).repeat_interleave(2, dim=1),
    lambda: real(4, 3).repeat_interleave(torch.tensor([1, 2, 0, 2]), dim=0, output_size=5),
    lambda: real(4, 7).unfold(1, 3, 2),
    lambda: real(6, 3).unfold(0, 2, 2),
    lambda: F.pad(real(4, 3), (1, 2)),
    lambda: F.pad(real(4, 3, 5), (-1, 2, 0, 0, 1, 0), value=1.5),
    lambda: F.pad(real(4, 3, 5), (1, 2), mode="reflect"),
    lambda: F.pad(real(2, 3, 4, 5), (1, 2, 0, 1), mode="reflect"),
    lambda: F.pad(real(2, 3, 3, 4, 3), (1, 1, 0, 1, 2, 1), mode="reflect"),
    lambda: F.pad(real(4, 3, 5), (1, 2), mode="replicate"),
    lambda: F.pad(real(2, 3, 4, 5), (1, 2, 0, 1), mode="replicate"),
    lambda: F.pad(real(2, 3, 3, 4, 3), (1, 1, 0, 1, 2, 1), mode="replicate"),
    lambda: F.pad(real(4, 3, 5), (1, 2), mode="circular"),
    lambda: distinct(4, 6).topk(2),
    lambda: distinct(4, 6).topk(3, dim=0, largest=False),
    lambda: distinct(4, 6).sort(dim=0, descending=True),
    lambda: distinct(4, 6).sort(stable=True),
    lambda: distinct(4, 6).argsort(),
    lambda: torch.ops.aten.diagonal_copy(real(4, 6), 1),
    lambda: torch.ops.aten.unfold_copy(real(4, 7), 1, 3, 2),
    lambda: torch.searchsorted(real(4, 6, grad=False).sort().values, real(4, 3, grad=False)),
    lambda: torch.searchsorted(real(6, grad=False).sort().values, real(4, 3, grad=False)),
    lambda: torch.searchsorted(real(6, grad=False).sort().values, 0.5),
    lambda: torch.diagonal_scatter(real(4, 5, 3), real(3, 4)),
    lambda: torch.diagonal_scatter(real(5, 4, 3), real(5, 2), 1, 1, 2),
]
