"""Views, and tensors taken apart and put together."""

from __future__ import annotations

import torch

from onecard.rules.samples.data import integers, real

aten = torch.ops.aten

SAMPLES = [
    lambda: real(4, 6).view(24),
    lambda: real(4, 3, 6).view(12, 6),
    lambda: real(12, 6).view(4, 3, 2, 3),
    lambda: real(3, 4).view(3, -1, 2),
    lambda: real(6, 4).view(4, 6),
    lambda: real(2, 4, 3).view(4, 6),
    lambda: real(1, 6).view(6, 1, 1),
    lambda: real(3, 5).view(-1),
    lambda: real(1).view(()),
    lambda: real(0, 4).view(4, 0),
    lambda: real(4, 6).view(torch.int64),
    lambda: real(4, 6).view(torch.int32),
    lambda: aten.view_copy(real(4, 6), torch.int64),
    lambda: real(4, 3, 6).transpose(1, 2).reshape(4, 18),
    lambda: aten._unsafe_view(real(4, 6), [2, 2, 6]),
    lambda: aten._reshape_alias(real(4, 6), [24], [1]),
    lambda: aten.view_copy(real(4, 6), [8, 3]),
    lambda: real(4, 6).t(),
    lambda: real(5).t(),
    lambda: real(4, 3, 5).transpose(0, -1),
    lambda: aten.transpose_copy(real(4, 3), 0, 1),
    lambda: real(4, 3, 5).permute(2, 0, -2),
    lambda: aten.permute_copy(real(4, 3), [1, 0]),
    lambda: real(4, 1, 3).expand(2, 4, 5, 3),
    lambda: real(4, 3).expand(4, 3),
    lambda: real(4, 3).expand(-1, -1),
    *[
        lambda name=name, extra=extra: getattr(aten, f"{name}_copy")(real(4, 1, 6), *extra)
        for name, extra in (("squeeze", ()), ("unsqueeze", (0,)), ("split", (3, 2)), ("unbind", (1,)))
    ],
    lambda: aten.view_as_complex_copy(
        aten.view_as_real_copy(aten.view_as_complex_copy(real(4, 3, 2, grad=False)))
    ).abs(),
    lambda: aten.expand_copy(real(1, 3), [4, 3]),
    lambda: real(4, 1, 2, 1).squeeze(),
    lambda: real(2, 1, 4).squeeze(1),
    lambda: real(2, 1, 4).squeeze(0),
    lambda: real(2, 1, 4, 1).squeeze((1, 0)),
    lambda: real(2, 1, 4, 1).squeeze(()),
    lambda: real(2, 3).unsqueeze(-1).unsqueeze(0),
    lambda: real(4, 3).split(2),
    lambda: real(4, 6).split([1, 5], dim=-1),
    lambda: real(4, 6).chunk(4, dim=1),
    lambda: aten.unsafe_split(real(4, 3), 2),
    lambda: aten.unsafe_split_with_sizes(real(4, 3), [1, 3]),
    lambda: aten.split_with_sizes_copy(real(4, 3), [1, 3]),
    lambda: real(3, 4).unbind(),
    lambda: real(4, 3).unbind(-1),
    lambda: torch.cat([real(4, 3), real(4, 2)], dim=-1),
    lambda: torch.cat([real(2, 3), real(0), real(3, 3)]),
    lambda: torch.cat([real(2, 3), integers(5, 2, 3)]),
    lambda: torch.stack([real(4, 3), real(4, 3)], dim=1),
    lambda: torch.stack([real(4), real(4)], dim=-1),
    lambda: torch.view_as_complex(real(4, 2)).abs(),
    lambda: torch.view_as_real(torch.view_as_complex(real(4, 3, 2))),
]
