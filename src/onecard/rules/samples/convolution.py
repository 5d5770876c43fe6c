"""Convolutions."""

from __future__ import annotations

import torch.nn.functional as F

from onecard.rules.samples.data import real

SAMPLES = [
    lambda: F.conv1d(real(3, 4, 7), real(5, 4, 3), real(5), padding=1),
    lambda: F.conv2d(real(4, 3, 5, 4), real(6, 3, 3, 2), real(6), stride=2, padding=1),
    lambda: F.conv2d(real(2, 4, 5, 5), real(3, 4, 2, 2), dilation=2),
    lambda: F.conv2d(real(2, 4, 4, 4, grad=False), real(3, 4, 2, 2), real(3)),
    lambda: F.conv2d(real(4, 5, 5), real(3, 4, 2, 2), real(3)),
    lambda: F.conv2d(real(2, 4, 4, 4), real(2, 4, 3, 3), padding="same"),
    lambda: F.conv3d(real(2, 3, 4, 3, 3), real(4, 3, 2, 2, 2), real(4)),
    lambda: F.conv2d(real(2, 4, 4, 4), real(6, 2, 3, 3), real(6), padding=1, groups=2),
    lambda: F.conv2d(real(2, 4, 4, 4), real(4, 1, 3, 3), real(4), groups=4),
    lambda: F.conv1d(real(2, 3, 6), real(6, 1, 2), groups=3),
    lambda: F.conv_transpose1d(real(3, 4, 5), real(4, 3, 3), real(3), stride=2),
    lambda: F.conv_transpose2d(real(2, 4, 3, 3), real(4, 5, 2, 2), real(5), stride=2, output_padding=1),
    lambda: F.conv_transpose2d(real(2, 4, 3, 3), real(4, 3, 2, 2), real(6), groups=2),
    lambda: F.conv_transpose3d(real(2, 2, 3, 2, 2), real(2, 3, 2, 2, 2)),
]
