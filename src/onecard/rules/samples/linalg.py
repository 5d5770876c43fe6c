"""Decompositions, inverses and solvers."""

from __future__ import annotations

import torch
from torch import Tensor, linalg

from onecard.rules.samples.data import real, whole


def definite(*shape: int) -> Tensor:
    """Symmetric positive definite matrices."""
    x = real(*shape, grad=False)
    return (x @ x.mT + shape[-1] * torch.eye(shape[-1], dtype=x.dtype)).requires_grad_()


def ordinary(*shape: int) -> Tensor:
    """Matrices that are far from singular."""
    return (real(*shape, grad=False) + 3 * torch.eye(shape[-1], dtype=torch.float64)).requires_grad_()


def factored(*shape: int) -> list[Tensor]:
    return [t.detach() for t in linalg.lu_factor(ordinary(*shape))]


SAMPLES = [
    lambda: linalg.svdvals(real(4, 3, 5)),
    lambda: linalg.svd(real(4, 3, 5, grad=False)),
    lambda: linalg.svd(real(5, 3, grad=False), full_matrices=False),
    lambda: linalg.eigh(definite(4, 3, 3)),
    lambda: linalg.eigvalsh(definite(4, 3, 3)),
    lambda: linalg.eigvals(ordinary(4, 3, 3)),
    lambda: whole(torch.ops.aten.linalg_eigvals.default, ordinary(4, 3, 3).detach()),
    lambda: linalg.qr(ordinary(4, 3, 3)),
    lambda: linalg.qr(real(3, 4, 3, grad=False), mode="r"),
    lambda: torch.geqrf(real(3, 4, 3, grad=False)),
    *([lambda: torch.cholesky(definite(4, 3, 3))] if hasattr(torch.ops.aten, "cholesky") else []),  # gone in 2.15
    lambda: torch.cholesky_inverse(linalg.cholesky(definite(4, 3, 3))),
    lambda: linalg.cholesky(definite(2, 5, 3, 3)),
    lambda: linalg.matrix_exp(real(4, 3, 3)),
    lambda: linalg.inv(ordinary(4, 3, 3)),
    lambda: linalg.inv(ordinary(3, 3)),
    lambda: linalg.lu_factor(ordinary(4, 3, 3)),
    lambda: linalg.lu(ordinary(4, 3, 3)),
    lambda: linalg.ldl_factor_ex(definite(4, 3, 3).detach()),
    lambda: linalg.ldl_solve(*linalg.ldl_factor(definite(4, 3, 3).detach()), real(4, 3, 5, grad=False)),
    lambda: linalg.det(ordinary(4, 3, 3)),
    lambda: linalg.slogdet(ordinary(4, 3, 3)),
    lambda: linalg.pinv(real(4, 3, 5)),
    lambda: linalg.pinv(real(4, 3, 5), rtol=torch.full((4,), 1e-9, dtype=torch.float64)),
    lambda: torch.lu_unpack(*factored(4, 3, 3)),
    lambda: torch.lu_unpack(*factored(4, 3, 3), unpack_pivots=False),
    lambda: linalg.householder_product(real(4, 5, 3, grad=False), real(4, 3, grad=False)),
    lambda: torch.ormqr(real(4, 5, 3, grad=False), real(4, 3, grad=False), real(4, 5, 6, grad=False)),
    lambda: torch.ormqr(real(5, 3, grad=False), real(3, grad=False), real(6, 5, grad=False), left=False),
    lambda: linalg.solve(ordinary(4, 3, 3), real(4, 3, 5)),
    lambda: linalg.solve(ordinary(4, 3, 3), real(4, 3)),
    lambda: linalg.solve(ordinary(3, 3), real(3)),
    lambda: linalg.solve(ordinary(3, 3), real(4, 3, 5)),
    lambda: linalg.solve(ordinary(4, 3, 3), real(4, 5, 3), left=False),
    lambda: linalg.solve_triangular(ordinary(4, 3, 3), real(4, 3, 5), upper=True),
    lambda: linalg.solve_triangular(ordinary(3, 3), real(4, 5, 3), upper=False, left=False),
    lambda: torch.triangular_solve(real(4, 3, 5), ordinary(4, 3, 3)),
    lambda: torch.cholesky_solve(real(4, 3, 5), linalg.cholesky(definite(4, 3, 3))),
    lambda: linalg.lu_solve(*factored(4, 3, 3), real(4, 3, 5)),
    lambda: linalg.lu_solve(*factored(4, 3, 3), real(4, 5, 3), left=False),
]
