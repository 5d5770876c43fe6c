"""Claims: tensors of which ranks believe that they hold equal copies, and the words for the first place where they do not."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

BLOCKS = 1024  # a tensor is searched by the digests of at most so many blocks
SHOWN = 4  # values


@dataclass(frozen=True, slots=True)
class Claim:
    """A tensor that should be the same on some ranks.

    Attributes:
        name: which it is, with shape, dtype and layout: the same words on every rank.
        tensor: what this rank holds.
        belief: why it should be the same.
        cure: what to do if it is not.
        part: which part of a whole this is: only ranks with the same part should hold the same.
        offset: index of the part's first element in the whole.
    """

    name: str
    tensor: Tensor
    belief: str
    cure: str
    part: tuple[int, ...] = ()
    offset: tuple[int, ...] = ()


def digest(x: Tensor) -> str:
    """A hash of the bytes of the elements.

    Example:
        >>> digest(torch.ones(3)) == digest(torch.ones(4)[:3]), digest(torch.ones(3)) == digest(torch.zeros(3))
        (True, False)
    """
    data = x.detach().cpu().contiguous().reshape(-1).resolve_conj().resolve_neg()
    data = data.as_strided(data.shape, (1,))  # a single element may have any stride, and torch 2.15 minds
    return hashlib.blake2b(data.view(torch.uint8).numpy().data, digest_size=8).hexdigest()


def blocks(x: Tensor) -> list[str]:
    """The digests of a tensor's blocks, in order."""
    return [digest(block) for block in x.detach().reshape(-1).split(_block(x))]


def values(x: Tensor, block: int) -> list[str]:
    """The elements of one block, written so that different ones read differently."""
    return [repr(v) for v in x.detach().reshape(-1).split(_block(x))[block].tolist()]


def place(claim: Claim, block: int, element: int) -> list[int]:
    """The index in the whole tensor of an element of a block.

    Example:
        >>> place(Claim("", torch.zeros(2, 3), "", "", offset=(4, 0)), 0, 5)
        [5, 2]
    """
    x = claim.tensor
    index = torch.unravel_index(torch.tensor(block * _block(x) + element, device="cpu"), x.shape) if x.dim() else ()
    return [int(i) + start for i, start in zip(index, claim.offset or (0,) * x.dim(), strict=True)]


def around(found: list[str], element: int, exact: bool, begins: bool = True, ends: bool = True) -> str:
    """A few values about one; ``begins``, ``ends``: nothing comes before the block, or after it.

    Example:
        >>> around(["1.25", "0.1", "3.0", "4.0", "5.0", "6.0"], 4, exact=False)
        '[..., 5, 6]'
    """
    start = element - element % SHOWN
    shown = found[start : start + SHOWN]
    before = "" if begins and not start else "..., "
    after = "" if ends and start + SHOWN >= len(found) else ", ..."
    return f"[{before}{', '.join(v if exact else rounded(v) for v in shown)}{after}]"


def rounded(value: str) -> str:
    """A number in four digits."""
    return f"{float(value):.4g}" if "." in value and "j" not in value else value


def first(x: Tensor) -> str:
    """The first values of a tensor."""
    return around([repr(v) for v in x.detach().flatten()[: SHOWN + 1].tolist()], 0, exact=False)


def _block(x: Tensor) -> int:
    return max(SHOWN * 64, -(-x.numel() // (BLOCKS * SHOWN)) * SHOWN)
