"""recompute.checkpoints: modules whose forward is run again in backward."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence

from torch import nn

from onecard.engine.with_plan import REPEATED
from onecard.errors import StrategyError
from onecard.fleet.layers.recomputing import recompute
from onecard.train.modules.second_run import run_again_in_backward
from onecard.train.zero.block_names import LISTS, blocks_of


def recompute_in(model: nn.Module, names: Sequence[str]) -> list[str]:
    """Have the forward of modules run again in backward; their names.

    Args:
        names: paths, their last parts, patterns, names of classes; lists stand for their members; "repeated": the model's
            repeated layers.

    Raises:
        StrategyError: no module fits.
    """
    chosen: dict[str, nn.Module] = {}
    for name in names:
        found = _found(model, name)
        if not found:
            known = ", ".join([path for path, _ in model.named_modules() if path][:12])
            raise StrategyError(
                f"Strategy: recompute.checkpoints: {type(model).__name__} has no module {name!r}; there are {known}, ... Want "
                "paths, their last parts, patterns ('blocks.*') or classes",
                "recompute.checkpoints",
            )
        chosen |= found
    for module in [m for path, m in chosen.items() if not any(path.startswith(f"{other}.") for other in chosen)]:
        run_again_in_backward(module, recompute)
    return list(chosen)


def _found(model: nn.Module, name: str) -> dict[str, nn.Module]:
    modules = {path: m for path, m in model.named_modules() if path}
    fits = {
        path: m
        for path, m in modules.items()
        if fnmatch.fnmatchcase(path, name) or path.rpartition(".")[2] == name or type(m).__name__ == name
    }
    if not fits and name == REPEATED:
        return {path: m for path, m, _ in blocks_of(model, model.parameters()) if path}
    made: dict[str, nn.Module] = {}
    for path, module in fits.items():
        members = module.named_children() if isinstance(module, LISTS[:2]) else ()
        made |= {f"{path}.{key}": member for key, member in members} or {path: module}
    return made
