"""Fourier transforms."""

from __future__ import annotations

import torch

from onecard.rules.samples.data import real

SAMPLES = [
    lambda: torch.fft.fft(real(4, 6, 3), dim=1),
    lambda: torch.fft.rfft(real(4, 6)),
    lambda: torch.fft.irfft(torch.complex(real(4, 5), real(4, 5))),
    lambda: torch.fft.fft2(real(4, 5, 3)),
    lambda: torch.fft.rfftn(real(4, 5, 3), dim=(0, 1)),
    lambda: torch.fft.ifft(torch.complex(real(5, 3), real(5, 3)), dim=0, norm="ortho"),
]
