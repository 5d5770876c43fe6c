"""Fourier transforms: the transformed dims are whole, all others may be cut."""

from __future__ import annotations

from onecard.rules.registry import row

row("_fft_r2c _fft_c2c _fft_c2r", "... dim:_ -> ... dim:_", linear="self", nonempty="...")
