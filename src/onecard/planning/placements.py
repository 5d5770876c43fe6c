"""Placements as text, as a plan and its file have them: "tp: Shard(0), dp: Replicate"; and what they mean for a module."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Sequence

from torch import nn
from torch.distributed.tensor import Placement, Replicate, Shard

from onecard.errors import PlanError
from onecard.place.mesh import ProcessMesh
from onecard.tensor import DistTensor
from onecard.tensor.convert import shard_tensor

DATA = ("dp", "data", "batch", "replicate", "fsdp", "sharding")
"""Names of mesh axes that divide the batch."""
_ONE = re.compile(r"\s*(\w+)\s*:\s*(?:(Shard)\s*\(\s*(?:dim\s*=\s*)?(\d+)\s*\)|(Replicate)(?:\s*\(\s*\))?)\s*")


def read(text: str) -> dict[str, Placement]:
    """Placements by the name of their mesh axis.

    Raises:
        PlanError: the text is none.

    Example:
        >>> read("tp: Shard(0), dp: Replicate")
        {'tp': Shard(dim=0), 'dp': Replicate()}
    """
    found: dict[str, Placement] = {}
    at = 0
    while at < len(text):
        match = _ONE.match(text, at)
        if match is None or (match.end() < len(text) and text[match.end()] != ",") or match[1] in found:
            raise PlanError(
                f"placements {text!r}: want axes with what lies along them, as in 'tp: Shard(0), dp: Replicate'"
            )
        found[match[1]] = Shard(int(match[3])) if match[2] else Replicate()
        at = match.end() + 1
    return found


def placements_of(text: str, axes: Sequence[str]) -> list[Placement]:
    """One for each mesh axis; Replicate for those that are not named.

    Raises:
        PlanError: the text is none, or names an axis that is not there.
    """
    found = read(text)
    if strange := sorted(set(found) - set(axes)):
        raise PlanError(f"placements {text!r}: there is no axis {strange[0]!r}; there are {', '.join(axes)}")
    return [found.get(axis, Replicate()) for axis in axes]


def where(patterns: Sequence[tuple[str, str]], name: str) -> str:
    """What the first pattern that fits says of a parameter; "" if none does."""
    return next((text for pattern, text in patterns if fnmatch.fnmatchcase(name, pattern)), "")


def placed(patterns: Sequence[tuple[str, str]], name: str, axes: Sequence[str]) -> list[Placement]:
    """How a parameter lies on a mesh with these axes, by the first pattern that fits; other axes of the pattern do not count."""
    named = ", ".join(part for part in where(patterns, name).split(",") if part.split(":")[0].strip() in axes)
    return placements_of(named, axes)


def place_by_name(
    patterns: Sequence[tuple[str, str]], whole: Callable[[str], str], name: str, layer: nn.Module, mesh: ProcessMesh
) -> None:
    """Lay a layer's parameters out by their names, for ``shard_layer``.

    Args:
        patterns: of a plan; of a parameter with several names the first one counts.
        whole: the name that the patterns mean, by the parameter's own.
    """
    for short, parameter in list(layer.named_parameters(recurse=False)):
        if isinstance(parameter, DistTensor):  # under another name
            continue
        found = placed(patterns, whole(f"{name}.{short}" if name else short), mesh.dim_names)
        setattr(layer, short, shard_tensor(parameter, mesh, found))
