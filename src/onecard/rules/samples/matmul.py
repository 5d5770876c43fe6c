"""Products of matrices."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from onecard.rules.samples.data import integers, real, whole

aten = torch.ops.aten


def plain(*shapes):
    return [real(*shape, grad=False) for shape in shapes]


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
    lambda: torch.ops.aten._int_mm(integers(9, 4, 8, dtype=torch.int8), integers(9, 8, 8, dtype=torch.int8)),
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
    lambda: torch.addmv(real(1), real(3, 4), real(4)),
    lambda: torch.addr(real(4, 3), real(4), real(3)),
    lambda: torch.addr(real(3), real(4), real(3)),
    lambda: torch.dot(real(6), real(6)),
    lambda: torch.vdot(real(6), real(6)),
    lambda: torch.ops.aten._addmm_activation(*(real(*s, grad=False) for s in ((3,), (4, 6), (6, 3)))),
    lambda: F.bilinear(real(4, 3), real(4, 5), real(2, 3, 5), real(2)),
    lambda: torch.cdist(real(2, 4, 3), real(2, 5, 3), p=1.0),
    lambda: torch.cdist(real(4, 3), real(5, 3), p=2.0, compute_mode="donot_use_mm_for_euclid_dist"),
    *(lambda eq=eq, a=a, b=b: whole(aten.einsum.default, eq, plain(a, b))
      for eq, a, b in (("bshd,bthd->bhst", (2, 3, 4, 5), (2, 6, 4, 5)), ("ij,jk", (4, 5), (5, 3)), ("i,i->", (5,), (5,)),
                       ("ecd, edf -> ecf", (4, 3, 5), (4, 5, 2)), ("i,j->ji", (4,), (3,)), ("aik,aij->jk", (1, 3, 4), (1, 3, 4)),
                        ("bi,bi->bi", (4, 1), (4, 3)))),
    lambda: torch.linalg.cross(real(4, 3), real(4, 3)),
    *(lambda x=x, bias=bias: whole(aten.linear.default, *plain(x, (5, 6)), *plain(*bias))
      for x, bias in (((4, 3, 6), [(5,)]), ((4, 6), []), ((6,), []), ((1, 3, 6), []))),
    *(lambda lead=lead, mask=mask: aten.linear_backward(*plain((*lead, 6), (*lead, 5), (5, 6)), mask)
      for lead in ((4,), (4, 3), (1, 3)) for mask in ([True, True, True], [False, True, False], [True, False, False])),
    *(lambda a=a, b=b: whole(aten.matmul.default, *plain(a, b))
      for a, b in (((2, 4, 3, 5), (2, 4, 5, 6)), ((4, 1, 3, 5), (3, 5, 6)), ((4, 3, 5), (5, 6)), ((4, 3, 5), (5,)),
                   ((5,), (3, 5, 4)), ((4, 5), (5,)), ((5,), (5, 4)), ((5,), (5,)), ((4, 5), (5, 3)))),
    lambda: torch.linalg.cross(real(3, 4), real(3, 4), dim=0),
]  # fmt: skip
