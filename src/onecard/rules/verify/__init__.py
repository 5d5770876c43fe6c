"""verify: prove the rows of the table by brute force, in one process. ``python -m onecard.rules.verify``."""

from onecard.rules.verify.captured import Captured, capture
from onecard.rules.verify.proof import CallProof, Wrong, prove, verify_call

__all__ = ["Captured", "CallProof", "Wrong", "capture", "prove", "verify_call"]
