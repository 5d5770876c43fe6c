"""This machine as a plan's ranks will find it."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch

from onecard.machine.cost import Machine
from onecard.testing import run_ranks

WITHIN = 300.0
"""Seconds for the measurement."""


def measured_for(ranks: int) -> Callable[[], Machine]:
    """What measures this machine: on CPUs with as many ranks at work as there will be, or as there are cores.

    They share caches, memory and now and then a core, and their messages are measured, too. Of one alone divided tensors, with
    which each rank reads whole activations, are found too fast.
    """
    together = min(ranks, os.cpu_count() or 1)
    if together < 2 or torch.cuda.is_available():
        return Machine.measure
    return lambda: run_ranks(Machine.measure, together, timeout=WITHIN)[0]
