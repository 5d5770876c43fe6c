"""Decompositions, inverses and solvers: matrices stay whole, batches of them may be cut, and right-hand sides by columns."""

from __future__ import annotations

from torch import Tensor

from onecard.rules.call import Call
from onecard.rules.registry import row
from onecard.rules.rule import Form

# Matrix to what it is made of. Results that were not asked for come as tensors of shape [0].
_OF_MATRIX = {
    "_linalg_svd": "... _ _, ... _, ... _ _",
    "_linalg_eigh": "... _, ... _ _",
    "linalg_eig": "... _, ... _ _",
    "linalg_eigvals": "... _",
    "linalg_qr": "... _ _, ... _ _",
    "cholesky cholesky_inverse linalg_matrix_exp": "... _ _",
    "linalg_cholesky_ex linalg_inv_ex": "... _ _, ...",
    "linalg_lu_factor_ex linalg_ldl_factor_ex": "... _ _, ... _, ...",
    "linalg_lu": "... _ _, ... _ _, ... _ _",
    "_linalg_det": "..., ... _ _, ... _",
    "_linalg_slogdet": "..., ..., ... _ _, ... _",
}


def _of_matrix(call: Call, results: str) -> Form:
    given = [term if tuple(t.shape) != (0,) else "_" for term, t in zip(results.split(","), call.results, strict=True)]
    return Form(f"... _ _ -> {', '.join(given)}", nonempty="...")


for _names, _results in _OF_MATRIX.items():
    row(_names)(lambda call, results=_results: _of_matrix(call, results))


def _geqrf_results(call: Call) -> list[Tensor]:
    """PyTorch has no meta function."""
    *batch, rows, columns = call.self.shape
    return [call.self.new_empty(call.self.shape), call.self.new_empty([*batch, min(rows, columns)])]


row("geqrf", "... _ _ -> ... _ _, ... _", nonempty="...", results=_geqrf_results)
row("linalg_pinv.atol_rtol_tensor", "... _ _, ...* -> ... _ _", nonempty="...")


@row("lu_unpack")
def _lu_unpack(call: Call) -> Form:
    results = ["... _ _" if tuple(t.shape) != (0,) else "_" for t in call.results]
    return Form(f"... _ _, ... _ -> {', '.join(results)}", nonempty="...")


row("linalg_householder_product", "... _ _, ... _ -> ... _ _", nonempty="...")


@row("ormqr")
def _ormqr(call: Call) -> Form:
    other = "... _ k" if call.left else "... k _"
    return Form(f"... _ _, ... _, {other} -> {other}", linear="input3", nonempty="... k")


# ---- Solvers: linear in the right-hand side, each column of which is solved for by itself


def _right_hand_side(call: Call, vector: bool = False) -> str:
    if vector:
        return "... _"
    return "... _ k" if call.values.get("left", True) else "... k _"


@row("_linalg_solve_ex")
def _solve_ex(call: Call) -> Form:
    """Only the solution depends on B. Vectors: torch takes B for them if its shape is that of A without the last dim."""
    matrix, b = call.A, call.B
    side = _right_hand_side(call, b.dim() == 1 or b.shape == matrix.shape[:-1])
    return Form(f"... _ _, {side} -> {side}, ... _ _ @0, ... _ @0, ... @0", linear="B", nonempty="... k")


@row("linalg_solve_triangular")
def _solve_triangular(call: Call) -> Form:
    side = _right_hand_side(call)
    return Form(f"... _ _, {side} -> {side}", linear="B", nonempty="... k")


row("triangular_solve", "... _ k, ... _ _ -> ... _ k, ... _ _ @1", linear="self", nonempty="... k")
row("cholesky_solve", "... _ k, ... _ _ -> ... _ k", linear="self", nonempty="... k")


@row("linalg_lu_solve linalg_ldl_solve")
def _factored_solve(call: Call) -> Form:
    side = _right_hand_side(call)
    return Form(f"... _ _, ... _, {side} -> {side}", linear="B", nonempty="... k")
