"""What a forward writes to parameters: to each rank's copy what that rank's rows say, where one card sees all rows.

Under ZeRO a step gives all ranks one value again, so that nothing afterwards shows it: what is written is compared when the
forward has ended, before the memory is given up. Versions say what was written; nothing is looked at of a forward that writes
to none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from onecard import recorded
from onecard.comm.agree import sparse_check
from onecard.comm.issue.ranks import Ranks
from onecard.comm.world import world
from onecard.errors import FleetError
from onecard.fleet.layers.pipeline_layer import PipelineLayer
from onecard.train.zero.blocks import Hook
from onecard.train.zero.gathered import GatheredParameter

CURE = (
    "A forward sees this rank's rows alone, where one card sees all: what it writes to a parameter (max_norm= of an embedding, "
    "codes, running values) does not belong there. Do it behind each step, the same on all ranks; or run a plan "
    "(oc.to_static(step, plan=oc.Plan(dp=2))) or marks, which do as one card"
)


class ForwardWrites:
    """Compares, now and then, what the forward of a model writes to its parameters.

    Args:
        model: hooks are put on it.
        named: its parameters, as the forward sees them, by name.
        ranks: those that hold copies of one of them.
        whole: whether they are whole between blocks. If not, ``see_pieces`` is called while they are.
    """

    def __init__(self, model: nn.Module, named: dict[str, Any], ranks: Callable[[Any], Ranks], whole: bool) -> None:
        self._named, self._ranks, self._whole = named, ranks, whole
        self._names = {id(p): name for name, p in named.items()}
        self._number, self._due, self._was = sparse_check.serial("written"), False, dict[int, int]()
        model.register_forward_pre_hook(Hook(self._begin), prepend=True)
        model.register_forward_hook(Hook(self._end))

    def _begin(self, model: nn.Module, *_: Any) -> None:
        self._due = torch.is_grad_enabled() and model.training and sparse_check.on.here and self._site(()).tick()
        self._was = {id(p): p._version for p in self._named.values()} if self._due and self._whole else {}

    def _end(self, *_: Any) -> None:
        if self._due and self._whole:
            self._see(p for p in self._named.values() if p._version != self._was[id(p)])
        self._due = False

    def see_pieces(self, pieces: Iterable[GatheredParameter]) -> None:
        """A block has ended, whose parameters are whole still.

        Raises:
            CommunicationError: what it has written to them differs between ranks.
        """
        if self._due:
            self._see(piece.seen for piece in pieces if piece.was_written())

    def _see(self, written: Iterable[Any]) -> None:
        groups: dict[tuple[int, ...], list[Any]] = {}
        for p in written:
            groups.setdefault(self._ranks(p).ranks, []).append(p)
        for ranks, found in groups.items():
            if len(ranks) > 1:
                world.init()
                site = self._site((ranks, self._names[id(found[0])]))
                site.count = self._site(()).count
                belief = f"is written to by the model's forward, and is one parameter on ranks {list(ranks)}"
                with recorded.unrecorded():
                    sparse_check.equal(site, "forward", [
                        sparse_check.Subject(f"the parameter {self._names[id(p)]}", p, belief, CURE) for p in found
                    ])  # fmt: skip

    def _site(self, what: tuple[Any, ...]) -> sparse_check.Site:
        return sparse_check.site(
            ("written", self._number, what), lambda: "/".join(["written", str(self._number), *map(str, what)])
        )


def refuse_bounded(model: nn.Module, ranks: Ranks, call: str) -> None:
    """Whether a layer is known to write to each rank's copy what that rank's own rows say.

    Raises:
        FleetError: an embedding bounds the rows that it looks up; on all ranks of a pipeline, whichever has it.
    """
    if ranks.size > 1:
        fault = model.fault_anywhere(_bounded) if isinstance(model, PipelineLayer) else _bounded("", model)
        if fault:
            raise FleetError(f"{call}: {fault}")


def _bounded(path: str, model: nn.Module) -> str:
    for name, m in model.named_modules(prefix=path):
        if isinstance(m, nn.Embedding | nn.EmbeddingBag) and m.max_norm is not None:
            return (
                f"{name or 'the model'} is an {type(m).__name__} with max_norm={m.max_norm}: each forward bounds the "
                "rows that this rank's ids name, on this rank, where one card bounds those of the whole batch. A plan does as "
                "one card (oc.to_static(step, plan=oc.Plan(dp=2))), and so do marks. Here leave max_norm out, and bound all rows "
                f"behind each step: with torch.no_grad(): w.copy_(torch.renorm(w, {m.norm_type}, 0, {m.max_norm}))"
            )
    return ""
