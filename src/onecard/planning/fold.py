"""Blocks of a model that are alike, folded: of a long run of them three stay, which tell what all of them take."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.nn.utils import parametrize

KEPT = 3
"""Of a run: its first block, one between two others, its last."""
_PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True, slots=True)
class Folded:
    """A list of blocks of a model, of which some were taken out.

    Attributes:
        path: of the list in the model.
        alike: for each block that is left, for how many it stands; ``kept``: which one it was.
    """

    path: str
    alike: tuple[int, ...]
    kept: tuple[int, ...] = field(default=(), repr=False)

    @property
    def names(self) -> list[str]:
        """The paths of the blocks that are left."""
        return [f"{self.path}.{i}" for i in range(len(self.alike))]

    def before(self, name: str) -> str:
        """The name in the whole model of what has this one now."""
        head, _, rest = name.removeprefix(f"{self.path}.").partition(".")
        if not name.startswith(f"{self.path}.") or not head.isdecimal() or int(head) >= len(self.kept):
            return name
        return f"{self.path}.{self.kept[int(head)]}" + (f".{rest}" if rest else "")


def fold(model: nn.Module, mark: Callable[[str], str] = str, all_stay: bool = False) -> list[Folded]:
    """Take out of each list of blocks (``nn.ModuleList``, ``nn.Sequential``) those that are like their neighbours.

    Blocks are alike if their modules, parameters, buffers and plain attributes are; a number that counts blocks may differ. Lists
    inside of blocks stay as they are.

    Args:
        mark: for the name of a parameter what else tells it from others, such as how it is to lie; ``str``: nothing does.
        all_stay: only say which blocks there are: their code asks for them by numbers.

    Example:
        >>> model = nn.ModuleDict({"blocks": nn.ModuleList(nn.Linear(4, 4) for _ in range(9)), "head": nn.Linear(4, 2)})
        >>> fold(model), len(model["blocks"])
        ([Folded(path='blocks', alike=(1, 7, 1))], 3)
    """
    found = []
    for path, blocks in list(_lists(model, "")):
        faces = [[*face(block), *_marks(block, f"{path}.{i}.", mark)] for i, block in enumerate(blocks)]
        kept, alike = (list(range(len(faces))), [1] * len(faces)) if all_stay else _kept(faces)
        if len(kept) < len(blocks):
            left = [blocks[i] for i in kept]
            for name in list(blocks._modules):
                del blocks._modules[name]
            blocks._modules.update({str(i): block for i, block in enumerate(left)})
        found.append(Folded(path, tuple(alike), tuple(kept)))
    return found


def _marks(block: nn.Module, head: str, mark: Callable[[str], str]) -> Iterator[tuple[Any, ...]]:
    if mark is not str:
        for name, _ in block.named_parameters():
            yield "", "mark", name, mark(head + name)


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """All blocks of a model's lists of blocks, in order; the model stays as it is.

    Example:
        >>> len(blocks_of(nn.ModuleDict({"blocks": nn.ModuleList(nn.Linear(4, 4) for _ in range(9))})))
        9
    """
    return [block for _, blocks in _chains(model) for block in blocks]


def block_paths(model: nn.Module) -> list[str]:
    """Their names, in the same order.

    Example:
        >>> block_paths(nn.ModuleDict({"blocks": nn.ModuleList(nn.Linear(4, 4) for _ in range(2))}))
        ['blocks.0', 'blocks.1']
        >>> block_paths(nn.Sequential(nn.Embedding(5, 4), *(nn.Linear(4, 4) for _ in range(3)), nn.LayerNorm(4)))
        ['0', '1', '2', '3', '4']
    """
    return [f"{path}.{name}".lstrip(".") for path, blocks in _chains(model) for name, _ in blocks.named_children()]


def _chains(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Its lists of blocks; the model itself, where that is a list, and most of its parameters are in blocks that are alike."""
    if isinstance(model, nn.Sequential):
        faces = [face(block) for block in model]
        pairs = {i for i in range(len(faces) - 1) if _alike(faces, i, i + 1)}
        sizes = [sum(p.numel() for p in block.parameters()) for block in model]
        if pairs and 2 * sum(n for i, n in enumerate(sizes) if {i, i - 1} & pairs) >= sum(sizes) > 0:
            yield "", model
            return
    yield from _lists(model, "")


def _lists(module: nn.Module, path: str) -> Iterator[tuple[str, Any]]:
    """The outermost lists of more than one block."""
    for name, child in module.named_children():
        inside = f"{path}.{name}" if path else name
        if isinstance(child, nn.ModuleList | nn.Sequential) and len(child) > 1 and _is_chain(child):
            yield inside, child
        else:
            yield from _lists(child, inside)


def _is_chain(blocks: Any) -> bool:
    """Whether at least two neighbours are alike, so that these are blocks and no parts of one."""
    faces = [face(block) for block in blocks]
    return any(_alike(faces, i, i + 1) for i in range(len(faces) - 1))


def _kept(faces: list[list[tuple[Any, ...]]]) -> tuple[list[int], list[int]]:
    """Which blocks stay, and for how many each stands."""
    kept, alike, i = [], [], 0
    while i < len(faces):
        end = i + 1
        while end < len(faces) and _alike(faces, i, end):
            end += 1
        if end - i > KEPT:
            kept += [i, i + 1, end - 1]
            alike += [1, end - i - 2, 1]
        else:
            kept += range(i, end)
            alike += [1] * (end - i)
        i = end
    return kept, alike


def face(block: nn.Module) -> list[tuple[Any, ...]]:
    """What tells a block from others: classes, tensors, plain attributes, in order."""
    found: list[tuple[Any, ...]] = []
    for path, module in block.named_modules():
        # One that is parametrized has a class of its own, made for it.
        found.append((path, "class", parametrize.type_before_parametrizations(module)))
        for kind, tensors in (("parameter", module._parameters), ("buffer", module._buffers)):
            for name, t in tensors.items():
                what = None if t is None else (tuple(t.shape), t.dtype, t.requires_grad, getattr(t, "placements", None))
                found.append((path, kind, name, what))
        for name, value in sorted(vars(module).items()):
            if name.startswith("_") and name != "_checkpointed":
                continue
            if isinstance(value, _PLAIN) or (isinstance(value, tuple) and all(isinstance(v, _PLAIN) for v in value)):
                found.append((path, "attribute", name, value))
    return found


def _alike(faces: list[list[tuple[Any, ...]]], i: int, k: int) -> bool:
    one, other = faces[i], faces[k]
    return len(one) == len(other) and all(a == b or _counts(a, b, k - i) for a, b in zip(one, other, strict=True))


def _counts(a: tuple[Any, ...], b: tuple[Any, ...], apart: int) -> bool:
    """Whether an attribute is the block's number."""
    same = a[:3] == b[:3] and a[1] == "attribute"
    return same and type(a[3]) is int and type(b[3]) is int and b[3] - a[3] == apart
