"""Reading by position."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from onecard.rules.samples.data import integers, mask, real

aten = torch.ops.aten

SAMPLES = [
    lambda: real(4, 3).select(0, 1),
    lambda: real(4, 3).select(-1, -1),
    lambda: mask(4, 3).select(0, 2),
    lambda: integers(9, 5).select(0, 3),
    lambda: aten.select_copy(real(4, 3), 1, 0),
    lambda: real(4, 6)[:, 1:5],
    lambda: real(7, 3)[1:6:2],
    lambda: real(7, 3)[::3],
    lambda: real(4, 3)[:],
    lambda: real(4, 3)[-4:, :2],
    lambda: real(4, 3)[2:2],
    lambda: mask(4, 3)[1:],
    lambda: real(5, 3).narrow(0, 1, 3),
    lambda: aten.slice_copy(real(5, 3), 0, 1, 4),
    lambda: real(5, 3)[-1:],
    lambda: F.embedding(integers(6, 4, 3), real(6, 5)),
    lambda: F.embedding(integers(5, 4), real(5, 3), padding_idx=2),
    lambda: F.embedding(integers(5, 4), real(5, 3), scale_grad_by_freq=True),
    lambda: F.embedding(integers(5), real(5, 3)),
    lambda: torch.index_select(real(4, 6), 1, integers(6, 3)),
    lambda: torch.index_select(real(5, 3), 0, integers(5, 7)),
    lambda: torch.index_select(mask(5, 3), 0, integers(5, 2)),
    lambda: torch.index_select(real(5), 0, integers(5)),
    lambda: torch.index_select(real(), 0, integers(1, 1)),
    lambda: torch.gather(real(4, 6), 1, integers(6, 4, 2)),
    lambda: torch.gather(real(4, 6), -1, integers(6, 4, 1)),
    lambda: torch.gather(real(4, 6), 0, integers(4, 3, 5)),
    lambda: torch.gather(mask(4, 6), 0, integers(4, 3, 6)),
    lambda: torch.gather(real(), 0, integers(1)),
    lambda: torch.take_along_dim(real(4, 6), integers(6, 1, 3), 1),
    lambda: torch.take(real(4, 3), integers(12, 2, 3)),
    lambda: real(5, 3)[integers(5, 4)],
    lambda: real(5, 3)[integers(5, 4, low=-5)],
    lambda: real(4, 6)[torch.arange(4), integers(6, 4)],
    lambda: real(4, 6, 3)[:, integers(6, 2), :],
    lambda: real(4, 6, 3)[:, integers(6, 2, 1), integers(3, 3)],
    lambda: real(4, 6, 3)[integers(4, 2), :, integers(3, 2)],
    lambda: mask(5, 3)[integers(5, 4)],
    lambda: aten._unsafe_index(real(5, 3), [integers(5, 4)]),
    lambda: F.one_hot(integers(4, 5), 4),
    *(lambda mode=mode: F.embedding_bag(integers(5, 4, 3), real(5, 6), mode=mode) for mode in ("sum", "mean", "max")),
    lambda: F.embedding_bag(integers(5, 7), real(5, 3), torch.tensor([0, 2, 2]), include_last_offset=True, mode="mean"),
    lambda: F.embedding_bag(integers(5, 7), real(5, 3), torch.tensor([0, 4]), per_sample_weights=real(7), mode="sum"),
    lambda: torch.ops.aten._embedding_bag_backward(
        real(2, 3, grad=False),
        integers(5, 6),
        torch.tensor([0, 3]),
        torch.tensor([0, 0, 0, 1, 1, 1]),
        torch.tensor([3, 3]),
        torch.tensor([3, 3]),
        5,
        False,
        0,
        False,
        None,
    ),
]
