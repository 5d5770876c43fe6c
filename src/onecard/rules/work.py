"""work: what an operator computes and how much memory it accesses. Pure; decisions, prices and plans ask it alike.

The rule's factors tell it, and where they do not, the row does (``Row.macs``, ``Row.picks``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from onecard.machine.cost import Machine
from onecard.rules.rule import Bound


@dataclass(frozen=True, slots=True)
class Work:
    """What one call takes of a machine.

    Attributes:
        macs: multiply-adds.
        accessed: bytes of the tensors that it reads and writes, each once.

    Example:
        >>> Work(macs=10**12, accessed=0).seconds(Machine.preset("H100"), "bfloat16") > 2e-3
        True
    """

    macs: float
    accessed: float

    def seconds(self, machine: Machine, dtype: str = "") -> float:
        """Seconds by the roofline, no less than a kernel takes; of what only names memory none."""
        if not self.macs and not self.accessed:
            return 0.0
        return max(machine.launch, machine.compute(self.accessed, self.macs, dtype))


def work_of(bound: Bound, operands: Sequence[int], results: Sequence[int], shared: int = 1) -> Work:
    """The work of a bound rule.

    Args:
        bound: the rule.
        operands, results: bytes of each; 0 of a result that lies in an operand's memory.
        shared: ranks among whom the multiply-adds are divided.

    Example:
        >>> from onecard.rules.rule import Form, bind
        >>> rule = bind(Form("m k, k n -> m n", linear="self * mat2"), ["self", "mat2"], [(4, 6), (6, 8)], [(4, 8)])
        >>> work_of(rule, [96, 192], [128])
        Work(macs=192, accessed=416)
    """
    if bound.views:
        return Work(0, 0)
    made = sum(results)
    accessed = made
    for i, count in enumerate(operands):
        if i in bound.picked:  # of what it picks from, it reads as much as it gives
            accessed += made
        elif i not in bound.unread:
            accessed += count
    return Work(bound.macs / shared if shared > 1 else bound.macs, accessed)
