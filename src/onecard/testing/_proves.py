"""A test that a program computes on all ranks what it does on one card, in one process."""

from __future__ import annotations

from typing import Any

import onecard  # at its address for users: what proves is made of what is here


def proves(program: Any, *args: Any, **given: Any) -> Any:
    """Fails, with the report, unless ``onecard.prove(program, *args, **given)`` finds it equal; gives the proof.

    Raises:
        AssertionError: it is not equal: the results that differ, and the first value that does.
        ProofError: it could not be proved.

    Example:
        >>> import torch, onecard as oc
        >>> proof = proves(torch.nn.Linear(4, 2), torch.ones(4, 4), plan=oc.Plan(dp=2))
        >>> proof.world
        2
    """
    __tracebackhide__ = True  # pytest shows the test's own line
    proof = onecard.prove(program, *args, **given)
    if not proof:
        raise AssertionError(str(proof))
    return proof
