"""Philox4x32-10, a counter-based generator, in operations on tensors or arrays.

Source: J. Salmon, M. Moraes, R. Dror, D. Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011. It passes
TestU01's BigCrush; cuRAND, TensorFlow and torch's CUDA generator use it as well.
"""

from __future__ import annotations

from typing import Any

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)  # added to the key after each round
MASK = 0xFFFFFFFF
ROUNDS = 10

Word = Any  # an int in [0, 2**32), or an int64 tensor or NumPy array of such


def philox(counter: tuple[Word, Word, Word, Word], key: tuple[Word, Word]) -> tuple[Word, Word, Word, Word]:
    """Four random 32-bit words for each counter.

    Args:
        counter: four 32-bit words, least significant first. int64 tensors (or arrays) that broadcast; ints where all are alike.
        key: two 32-bit words, likewise.

    Returns:
        Four words: int64 tensors with values in [0, 2**32) (ints if only ints came in). int64 because the product of
        two 32-bit words must be exact, and torch has no arithmetic for unsigned types.

    Example:
        >>> [f"{word:08x}" for word in philox((0, 0, 0, 0), (0, 0))]
        ['6627e8d5', 'e169c58d', 'bc57ac4c', '9b00dbd8']
    """
    a, b, c, d = counter
    k, m = key
    for _ in range(ROUNDS):
        first, second = a * MULTIPLIERS[0], c * MULTIPLIERS[1]
        # The low halves may keep what is above 32 bits: they are only xored before the next mask.
        a, b, c, d = _mix(second, b, k), second, _mix(first, d, m), first
        k, m = (k + WEYL[0]) & MASK, (m + WEYL[1]) & MASK
    return a, b & MASK, c, d & MASK


def _mix(product: Word, other: Word, key: Word) -> Word:
    """The high half of a product, xored with a word and the round's key."""
    high = product >> 32
    if isinstance(other, int):
        other &= MASK  # tensors take no longer ints
    # In place where it can be: chunks that stay in the cache are what makes this fast.
    if getattr(high, "ndim", 0) >= getattr(other, "ndim", 0):
        high ^= other
    else:
        high = high ^ other
    high ^= key
    high &= MASK
    return high
