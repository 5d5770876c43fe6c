"""Products of matrices."""

from __future__ import annotations

from onecard.rules.registry import row

row("mm", "m k, k n -> m n", linear="self * mat2")
row("addmm", "m n, m k, k n -> m n", linear="self + mat1 * mat2")
row("bmm", "b m k, b k n -> b m n", linear="self * mat2")
row("t", "a b -> b a", moves=True)
