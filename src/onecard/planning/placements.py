"""Placements as text, as a plan and its file have them: "tp: Shard(0), dp: Replicate"; and what they mean for a module."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable, Sequence

from torch import Tensor, nn
from torch.distributed.tensor import Placement, Replicate, Shard

from onecard._torch.hooks import LeftBehind
from onecard._torch.leaves import is_transformed
from onecard.errors import PlanError
from onecard.place.mesh import ProcessMesh
from onecard.tensor import DistTensor
from onecard.tensor.convert import reshard, shard_tensor

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


def strange(patterns: Sequence[tuple[str, str]], names: Iterable[str]) -> str:
    """The first pattern that fits no name: with a mistake in it a plan would divide nothing, without a word; "" if all fit."""
    known = list(names)
    fits = (any(fnmatch.fnmatchcase(name, pattern) for name in known) for pattern, _ in patterns)
    return next((pattern for (pattern, _), found in zip(patterns, fits, strict=True) if not found), "")


def names_of(model: nn.Module) -> dict[str, list[str]]:
    """What the patterns of each field of a plan can name: parameters, and modules."""
    return {
        "placements": [name for name, _ in model.named_parameters(remove_duplicate=False)],
        "outputs": [name for name, _ in model.named_modules(remove_duplicate=False) if name],
    }


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


class _Output(LeftBehind):
    """How the output of a module lies, behind each of its forwards.

    Only where it can be: an output that is one tensor on a mesh, whose dim the axis divides evenly. Any other stays as it is.
    """

    def __init__(self, text: str) -> None:
        self._wanted = read(text)

    def __call__(self, module: nn.Module, args: object, result: object) -> Tensor | None:
        if not isinstance(result, DistTensor) or is_transformed(result):
            return None
        mesh, placements = result.process_mesh, list(result.placements)
        for axis, wanted in self._wanted.items():
            if axis not in mesh.dim_names:
                continue
            at = mesh.axis(axis)
            if isinstance(wanted, Shard) and (
                wanted.dim >= result.ndim or not result.shape[wanted.dim] or result.shape[wanted.dim] % mesh.shape[at]
            ):
                continue
            placements[at] = wanted
        return None if placements == list(result.placements) else reshard(result, mesh, placements)


def hold_outputs(patterns: Sequence[tuple[str, str]], model: nn.Module, whole: Callable[[str], str] = str) -> None:
    """From now on the outputs of a model's modules lie as a plan's ``outputs`` say. Of a module with several names one counts.

    Args:
        whole: the name that the patterns mean, by the module's own.
    """
    for name, module in model.named_modules():
        if text := where(patterns, whole(name)):
            module.register_forward_hook(_Output(text))
