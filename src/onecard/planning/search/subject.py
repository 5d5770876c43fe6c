"""What a plan is searched for: a decoder by its sizes, or a module. What of a plan it may have, and what its pieces take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Self, cast

from torch import Tensor, nn
from torch.distributed.tensor import Shard

from onecard._torch.names import tree_leaves
from onecard.comm.world.pretend import pretend
from onecard.errors import PlanError
from onecard.machine.cost import Machine
from onecard.planning.fold import fold
from onecard.planning.job import PieceCost
from onecard.planning.pieces import Pieces
from onecard.planning.placements import DATA
from onecard.planning.plan import Plan, Recompute
from onecard.planning.record import Loss, RecordedModel, part_of, parts_of, record_decoder, recorded, without_data
from onecard.planning.search.placing import placements_for
from onecard.planning.search.rows import FROM, of_ranks_of_experts, of_rows
from onecard.planning.transformer import Transformer
from onecard.static.step.step import RecordedStep
from onecard.tensor import DistTensor

Placements = tuple[tuple[str, str], ...]
Key = tuple[Any, ...]


@dataclass(eq=False, kw_only=True)
class PlanSubject:
    """Something to be planned.

    Attributes:
        rows: of the batch of a step, on all ranks together; layers: blocks between which a pipeline can be cut.
        base: a plan of one rank with the precision that the job has.
        recompute: what may be computed again.
        pinned: placements that the user gave; () to have them found, but for ``marks``: those of distributed parameters.
        outputs: those that the user gave; None to have them found.
    """

    rows: int
    layers: int
    base: Plan
    recompute: tuple[Recompute, ...]
    pinned: Placements = ()
    marks: Placements = ()
    outputs: Placements | None = None
    known: dict[Key, RecordedModel] = field(default_factory=dict)

    def with_precision(self, given: dict[str, Any]) -> Self:
        """The same with other fields of what a search does not vary: dtypes, overlap, where states lie."""
        found = _precision(given)
        return replace(self, base=replace(self.base, **found), known={}) if found else self

    def sequence(self) -> int:
        """Tokens of a row; 0 if the model is not known to have any."""
        return 0

    def experts(self) -> int:
        """Of a mixture; 0 if there are none, or nothing is known of them."""
        return 0

    def elements(self, plan: Plan) -> tuple[int, int]:
        """How many parameters the fullest rank has at least, and how many of them are experts'; 0 if nothing is known of them."""
        return 0, 0

    def microbatches(self, dp: int, pp: int) -> list[int]:
        """Rows of a rank's microbatch: all its rows, half of them, ..., one, the largest first; none if dp does not divide them.

        Odd numbers are divided by the smallest number that does: 30, 15, 5, 1.
        """
        if self.rows % dp:
            return []
        found = [self.rows // dp]
        while found[-1] > 1:
            found.append(found[-1] // next(n for n in range(2, found[-1] + 1) if found[-1] % n == 0))
        return found

    def can(self, plan: Plan) -> str:
        """Why a plan cannot be; "" if it can."""
        raise NotImplementedError

    def tensor_degrees(self, most: int) -> list[int]:
        """The degrees of tensor parallelism that may be worth a look."""
        raise NotImplementedError

    def placed(self, plan: Plan, machine: Machine) -> list[Plan]:
        """The plan with the placements that a plain model needs for its degree of tensor parallelism."""
        return [plan]

    def with_rows(self, plan: Plan, machine: Machine) -> Plan:
        """A plan that got another number of rows: what lay over them may not be divided now."""
        return plan

    def key(self, plan: Plan) -> Key:
        """Plans of one key are of one recording."""
        raise NotImplementedError

    def _recorded(self, plan: Plan) -> RecordedModel:
        raise NotImplementedError

    def is_cheap(self, plan: Plan, seen: set[Key]) -> bool:
        """Whether nothing has to be recorded for a plan, if these are."""
        return self.key(plan) in seen

    def pieces(self, plan: Plan, machine: Machine) -> tuple[list[PieceCost], int]:
        """What its pieces take for a microbatch under a plan, and the tokens of a row."""
        key = self.key(plan)
        if key not in self.known:
            self.known[key] = self._recorded(plan)
        found = self.known[key]
        return found.costs(machine), found.tokens


@dataclass(eq=False, kw_only=True)
class OfSizes(PlanSubject):
    """A decoder by its sizes."""

    sizes: Transformer

    def sequence(self) -> int:
        return self.sizes.sequence

    def experts(self) -> int:
        return self.sizes.experts

    def elements(self, plan: Plan) -> tuple[int, int]:
        """The mean over the pipeline's ranks: the fullest one has no less."""
        of_experts = self.sizes.expert_parameters
        experts = of_experts // (plan.pp * plan.tp * plan.ep)
        return (self.sizes.parameters - of_experts) // (plan.pp * plan.tp) + experts, experts

    def microbatches(self, dp: int, pp: int) -> list[int]:
        """Of at most ``FULL`` tokens each."""
        sizes = super().microbatches(dp, pp)
        return [n for n in sizes if n * self.sizes.sequence <= FULL] or sizes[-1:]

    def can(self, plan: Plan) -> str:
        return next((str(f) for f in plan.check(self.sizes) if f.kind == "mistake"), "")

    def tensor_degrees(self, most: int) -> list[int]:
        return [n for n in range(1, most + 1) if not self.can(replace(self.base, tp=n))]

    def key(self, plan: Plan) -> Key:
        return (part_of(plan, True),)

    def _recorded(self, plan: Plan) -> RecordedModel:
        """Of more than four rows not recorded, but made of the recordings of two and of four."""
        if plan.microbatch > max(FROM):
            few = [self._whole(replace(plan, microbatch=n)) for n in FROM]
            found = _on_line(few, lambda two, four: of_rows(two, four, plan.microbatch))
            if found is not None:
                return found
        return self._whole(plan)

    def is_cheap(self, plan: Plan, seen: set[Key]) -> bool:
        few = (self.key(replace(plan, microbatch=n)) in seen for n in FROM)
        return super().is_cheap(plan, seen) or (plan.microbatch > max(FROM) and all(few))

    def _whole(self, plan: Plan) -> RecordedModel:
        key = self.key(plan)
        if key not in self.known:
            self.known[key] = self._of_other_ranks(plan) or record_decoder(self.sizes, plan)
        return self.known[key]

    def _of_other_ranks(self, plan: Plan) -> RecordedModel | None:
        """Where ep divides experts, but not down to one on each rank: made of the recordings of two smaller ep."""
        experts = self.sizes.experts
        among = [n for n in range(2, experts) if experts % n == 0]
        if plan.ep not in among[2:]:
            return None
        numbers = among[0], among[1]
        few = [self._whole(replace(plan, dp=n, ep=n)) for n in numbers]
        return _on_line(few, lambda one, two: of_ranks_of_experts(one, two, numbers, plan.ep))


def _on_line(
    few: list[RecordedModel], line: Callable[[RecordedStep, RecordedStep], RecordedStep | None]
) -> RecordedModel | None:
    """What lies on the line through two recordings. It is made in less time than one of them, and so it is not kept."""

    def pieces() -> Pieces | None:
        made = line(few[0].pieces.recording, few[1].pieces.recording)
        return None if made is None else Pieces(made, few[0].folded)

    found = pieces()
    return None if found is None else RecordedModel(found, few[0].tokens, few[0].folded, cast(Any, pieces))


@dataclass(eq=False, kw_only=True)
class OfModule(PlanSubject):
    """A module of plain torch, or a function that builds one."""

    model: nn.Module | Callable[[], nn.Module]
    batch: tuple[Any, ...]
    loss: Loss | None
    names: dict[tuple[int, bool], list[tuple[Placements, Placements]]] = field(default_factory=dict)

    def microbatches(self, dp: int, pp: int) -> list[int]:
        """Without a pipeline the rows need not be divided evenly."""
        sizes = super().microbatches(dp, pp)
        return sizes if sizes or pp > 1 or dp > self.rows else [-(-self.rows // dp)]

    def can(self, plan: Plan) -> str:
        if plan.tp == 1 and self.marks:
            return "marks of the model divide it along tp"
        if plan.cp > 1 or plan.sequence_parallel:
            return "cp and sequence_parallel need layers that know of them"
        if plan.recompute not in self.recompute:
            return f"recompute={plan.recompute!r}: {' or '.join(self.recompute)}"
        if plan.pp * plan.virtual > max(1, self.layers):
            alike = f"{self.layers} blocks (modules that are alike, one behind the other)"
            return f"{alike} cannot fill {plan.pp} x {plan.virtual} stages"
        return ""

    def tensor_degrees(self, most: int) -> list[int]:
        return list(range(1, most + 1))

    def placed(self, plan: Plan, machine: Machine) -> list[Plan]:
        if plan.tp == 1 or plan.placements:
            return [replace(plan, outputs=self.outputs or ())]
        names = self._names(plan, machine)
        if self.outputs is not None:
            names = [(found, self.outputs) for found in dict.fromkeys(found for found, _ in names)]
        return [replace(plan, placements=found, outputs=outputs) for found, outputs in names]

    def _names(self, plan: Plan, machine: Machine) -> list[tuple[Placements, Placements]]:
        """Found once for all numbers of rows that tp divides, and for all others."""
        key = plan.tp, plan.microbatch % plan.tp == 0
        if key not in self.names:
            one = replace(self.base, microbatch=plan.microbatch)
            known = recorded(self.model, one, self.batch, self.loss)
            found = placements_for(known.pieces, known.folded, self._module(), plan.tp, machine, plan, dict(self.marks))
            self.names[key] = found
        return self.names[key]

    def with_rows(self, plan: Plan, machine: Machine) -> Plan:
        if plan.tp == 1 or not plan.outputs or self.outputs is not None:
            return plan
        names = self._names(plan, machine)
        mine = [outputs for found, outputs in names if found == plan.placements] or [outputs for _, outputs in names]
        return replace(plan, outputs=plan.outputs if plan.outputs in mine or not mine else mine[0])

    def _module(self) -> nn.Module:
        return self.model if isinstance(self.model, nn.Module) else self.model()

    def key(self, plan: Plan) -> Key:
        return (part_of(plan, False),)

    def _recorded(self, plan: Plan) -> RecordedModel:
        return recorded(self.model, plan, self.batch, self.loss)


def subject_of(model: Any, batch: Any, loss: Any, fixed: dict[str, Any]) -> PlanSubject:
    """What is given, as a subject.

    Raises:
        PlanError: it is nothing that can be planned, or its batch is missing.
    """
    if isinstance(model, Transformer):
        if type(batch) is not int or batch < 1:
            raise PlanError(
                f"plan: a Transformer needs the rows (sequences) of a step, on all ranks together: batch=1024, not {batch!r}",
                "batch",
            )
        again: tuple[Recompute, ...] = ("none", "selective", "full")
        return OfSizes(rows=batch, layers=model.layers, base=Plan(**_precision(fixed)), recompute=again, sizes=model,
                       known=_known(model))  # fmt: skip
    if not isinstance(model, nn.Module) and not callable(model):
        raise PlanError(
            f"plan: the model is {model!r}; want an oc.Transformer, a module, a function that builds one, or (model, loss, "
            "optimizer, batch)"
        )
    parts = parts_of(batch)
    first = next((t for t in tree_leaves(parts) if isinstance(t, Tensor) and t.ndim), None)
    if first is None:
        raise PlanError("plan: a module needs an example of the batch of a whole step: batch=(x, y)", "batch")
    made = model if isinstance(model, nn.Module) else _built(model)
    dtype = next((str(p.dtype).removeprefix("torch.") for p in made.parameters()), "float32")
    kept: dict[str, Any] = {"parameters": dtype, "compute": dtype, "gradients": dtype, "states": dtype, "master": False}
    base = Plan(**(kept | {"per_host": 0} | _precision(fixed)))
    layers, folds = _blocks(made)
    return OfModule(
        rows=len(first), layers=layers, base=base, recompute=("none", "full") if folds else ("none",),
        pinned=tuple(fixed.get("placements", ())), outputs=fixed.get("outputs"), marks=_marks(made), model=model, batch=parts,
        loss=as_function(loss),
    )  # fmt: skip


def _built(make: Callable[..., Any]) -> nn.Module:
    try:
        made = make()
    except TypeError as why:
        made = why
    if not isinstance(made, nn.Module):
        raise PlanError(
            f"plan: {getattr(make, '__name__', make)} is no function that builds a module ({made}); of a training step give the "
            "function of its batch, oc.plan(step, batch=(x, y), world=8), or (model, loss, optimizer, batch)"
        )
    return made


def _marks(model: nn.Module) -> Placements:
    """How distributed parameters are divided, but for axes of the batch: such marks are pins."""
    found = []
    for name, p in model.named_parameters():
        if isinstance(p, DistTensor):
            axes = zip(p.process_mesh.dim_names, p.placements, strict=True)
            cut = [where.dim for axis, where in axes if isinstance(where, Shard) and axis not in DATA]
            found += [(name, f"tp: Shard({dim})") for dim in cut[:1]]
    return tuple(found)


def as_function(loss: Any) -> Loss | None:
    """A criterion of the model's output and the batch's last tensor as a function of (model, *batch)."""
    if isinstance(loss, nn.Module) or getattr(loss, "__module__", "") in ("torch.nn.functional", "torch._C._nn"):
        return lambda model, *given: loss(model(*given[:-1]), given[-1])
    return loss


KEPT = 4
"""Decoders of which the recordings are kept, for the next question about them."""
_decoders: dict[Transformer, dict[Key, RecordedModel]] = {}


def _known(sizes: Transformer) -> dict[Key, RecordedModel]:
    known = _decoders.pop(sizes, {})
    while len(_decoders) >= KEPT:
        _decoders.pop(next(iter(_decoders)))
    _decoders[sizes] = known
    return known


FULL = 32768
"""Tokens with which the operators of a decoder's block are as fast as they get."""

_PRECISION = (
    "parameters", "gradients", "states", "compute", "master", "offload", "compiled", "overlap", "overlap_tp", "overlap_pp",
    "partial_sends", "per_host",
)  # fmt: skip


def _precision(fixed: dict[str, Any]) -> dict[str, Any]:
    return {name: fixed[name] for name in _PRECISION if name in fixed}


def _blocks(model: nn.Module) -> tuple[int, bool]:
    """How many blocks a model has in its lists, and whether it has any."""
    with pretend(1, fake=True):
        folded = fold(without_data(model))
    return sum(sum(f.alike) for f in folded), bool(folded)
