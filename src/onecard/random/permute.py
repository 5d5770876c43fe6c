"""Random permutations, of which any part can be made alone."""

from __future__ import annotations

import torch
from torch import Tensor

from onecard.errors import DispatchError
from onecard.random.key import Key, tracing
from onecard.random.laws import law
from onecard.random.parts import CHUNK, CHUNK_ELSEWHERE, fill
from onecard.random.philox import philox
from onecard.recorded import one_node

SORTED = 2**15  # up to here a permutation is the order of random words, of which a rank can well make all
ROUNDS = 24
MULTIPLIER = 0xD2B74407B1CE6E93 - 2**64  # as int64, whose products wrap around alike


@one_node(is_pure=True)
def permutation(
    n: int, key: Key, start: int = 0, length: int | None = None, device: torch.device | str = "cpu"
) -> Tensor:
    """A part of a random permutation of 0 ... n - 1.

    Up to ``SORTED`` elements it is the order of random 64-bit words, so that all permutations are alike likely. Longer
    ones are a bijection of the index, evaluated where it is wanted: time and memory are those of the part.

    Args:
        n: of the whole.
        key: of this draw.
        start, length: the part; all that follows ``start`` if ``length`` is left out.

    Returns:
        ``length`` int64 values.

    Source: R. Mitchell, D. Stokes, E. Frank, G. Holmes, "Bandwidth-optimal random shuffling for GPUs", ACM TOPC 2022
    (VariablePhilox; thrust::shuffle uses it).

    Example:
        >>> whole = permutation(100_000, Key(1, 2))
        >>> torch.equal(permutation(100_000, Key(1, 2), 70_000, 3), whole[70_000:70_003])
        True
    """
    stop = n if length is None else start + length
    if n <= SORTED:
        words = torch.empty(n, dtype=torch.int64, device=device)
        return fill(words, law("random_", torch.int64, -(2**63)), key).argsort(stable=True)[start:stop]
    if tracing():
        raise DispatchError(
            f"randperm({n}) while a graph is traced: how often an index is enciphered depends on its value. Draw it outside "
            f"the graph, or up to {SORTED} elements"
        )
    bijection = _Bijection(n, key)
    out = torch.arange(start, stop, device=device)
    for piece in out.split(CHUNK.get(out.device.type, CHUNK_ELSEWHERE)):
        bijection.walk(piece)
    return out


class _Bijection:
    """A Feistel network over the numbers of an even or odd count of bits, with multiplications as round functions."""

    def __init__(self, n: int, key: Key) -> None:
        bits = (n - 1).bit_length()
        self.n, self.left, self.right = n, bits // 2, bits - bits // 2
        # The last counter word keeps these apart from what ``fill`` draws.
        self.keys = [int(word) for i in range(ROUNDS // 4) for word in philox((i, 0, 0, 1), (key.low, key.high))]

    def walk(self, x: Tensor) -> None:
        """Encipher in place, again and again until a number below n comes out (less than twice on average)."""
        x.copy_(self._cipher(x))
        over = (x >= self.n).nonzero().flatten()
        while len(over):
            again = self._cipher(x[over])
            x[over] = again
            over = over[again >= self.n]

    def _cipher(self, x: Tensor) -> Tensor:
        left, right = x >> self.right, x & (1 << self.right) - 1
        low_bits, high_bits, shift = (1 << self.right) - 1, (1 << self.left) - 1, self.right - self.left
        for key in self.keys:
            product = left * MULTIPLIER
            left = (product >> 32).bitwise_xor_(right).bitwise_xor_(key).bitwise_and_(high_bits)
            product = product.bitwise_left_shift_(shift) if shift else product
            right = product.bitwise_or_(right.bitwise_right_shift_(self.left)).bitwise_and_(low_bits)
        return left.bitwise_left_shift_(self.right).bitwise_or_(right)
