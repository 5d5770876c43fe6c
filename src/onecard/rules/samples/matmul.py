"""Products of matrices."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from onecard.rules.samples.data import integers, real

SAMPLES = [
    lambda: real(4, 6) @ real(6, 3),
    lambda: F.linear(real(4, 3, 6), real(5, 6), real(5)),
    lambda: F.linear(real(4, 6), real(5, 6), real(5)),
    lambda: torch.addmm(real(4, 3), real(4, 6), real(6, 3), beta=0.5, alpha=2.0),
    lambda: torch.addmm(real(3), real(4, 6), real(6, 3)),
    lambda: torch.addmm(real(), real(4, 6), real(6, 3)),
    lambda: torch.addmm(real(1, 3), real(4, 1), real(1, 3)),
    lambda: real(4, 3, grad=False).addmm_(real(4, 6, grad=False), real(6, 3, grad=False)),
    lambda: integers(9, 4, 6) @ integers(9, 6, 3),
    lambda: torch._int_mm(integers(9, 4, 8, dtype=torch.int8), integers(9, 8, 8, dtype=torch.int8)),
    lambda: torch.bmm(real(2, 4, 5), real(2, 5, 3)),
    lambda: real(1, 6) @ real(6, 1),
    lambda: real(3, 2, 4, 5) @ real(2, 5, 3),
    lambda: torch.einsum("bshd,bthd->bhst", real(2, 3, 4, 5), real(2, 6, 4, 5)),
    lambda: torch.baddbmm(real(2, 4, 3), real(2, 4, 5), real(2, 5, 3), beta=0.5),
    lambda: torch.baddbmm(real(4, 1), real(2, 4, 5), real(2, 5, 3)),
    lambda: torch.addbmm(real(4, 3), real(2, 4, 5), real(2, 5, 3), alpha=2.0),
    lambda: torch.mv(real(4, 6), real(6)),
    lambda: torch.addmv(real(4), real(4, 6), real(6), beta=0.5),
    lambda: torch.addmv(real(1), real(4, 6), real(6)),
    lambda: torch.addr(real(4, 3), real(4), real(3)),
    lambda: torch.addr(real(3), real(4), real(3)),
    lambda: torch.dot(real(6), real(6)),
    lambda: torch.vdot(real(6), real(6)),
    lambda: torch._addmm_activation(*(real(*s, grad=False) for s in ((3,), (4, 6), (6, 3)))),
    lambda: F.bilinear(real(4, 3), real(4, 5), real(2, 3, 5), real(2)),
    lambda: torch.cdist(real(2, 4, 3), real(2, 5, 3), p=1.0),
    lambda: torch.cdist(real(4, 3), real(5, 3), p=2.0, compute_mode="donot_use_mm_for_euclid_dist"),
    lambda: torch.linalg.cross(real(4, 3), real(4, 3)),
    lambda: torch.linalg.cross(real(3, 4), real(3, 4), dim=0),
]
