"""Forward and backward of one microbatch, recorded without devices as a plan has it; of blocks that are alike three stay."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from onecard import fleet
from onecard._torch.names import tree_leaves, tree_map
from onecard.comm.world.pretend import pretend
from onecard.errors import PlanError
from onecard.machine.cost import Machine
from onecard.place.mesh import ProcessMesh
from onecard.planning.decoder import build
from onecard.planning.fold import Folded, face, fold
from onecard.planning.given_model import check_made, in_precision_of
from onecard.planning.job import PieceCost
from onecard.planning.pieces import Pieces
from onecard.planning.placements import hold_outputs, names_of, place_by_name, placements_of, strange
from onecard.planning.placements import where as _where
from onecard.planning.plan import Plan
from onecard.planning.transformer import Transformer
from onecard.static.call import flat
from onecard.static.call import recorded as recorded_call
from onecard.static.passes import PASSES
from onecard.static.passes.awaited import awaited
from onecard.static.passes.fused import fused
from onecard.static.passes.options import StaticOptions
from onecard.static.price.by_kernels import compute_in
from onecard.tensor.convert import shard_tensor
from onecard.train.layer import shard_layer
from onecard.train.modules.second_run import run_again_in_backward

Loss = Callable[..., Tensor]
Model = Transformer | nn.Module | Callable[[], nn.Module]
KEPT = 64  # recordings, and prices of each


@dataclass(eq=False)
class RecordedModel:
    """What was recorded of a model under a plan.

    Attributes:
        made: the recording, by pieces; None: not now.
        tokens: of a row of the batch: what a model predicts there; 1 if it is no sequence.
        folded: the blocks that were taken out.
        again: what makes the pieces, if that is quick: then they are let go once they are priced.
    """

    made: Pieces | None
    tokens: int
    folded: tuple[Folded, ...] = ()
    again: Callable[[], Pieces] | None = None
    _costs: dict[int, tuple[Machine, list[PieceCost]]] = field(default_factory=dict)

    @property
    def pieces(self) -> Pieces:
        """The recording, by pieces."""
        if self.made is None:
            assert self.again is not None
            self.made = self.again()
        return self.made

    def costs(self, machine: Machine) -> list[PieceCost]:
        """The pieces' costs on a machine; those of the last few machines are kept."""
        if id(machine) not in self._costs:
            if len(self._costs) >= KEPT:
                self._costs.pop(next(iter(self._costs)))
            self._costs[id(machine)] = machine, self.pieces.costs(machine)
            if self.again is not None:
                self.made = None
        return self._costs[id(machine)][1]


_known: dict[tuple[Any, ...], tuple[Any, RecordedModel]] = {}
"""By the model and what of a plan a recording depends on; with the model, so that it stays what it is."""


def recorded(model: Model, plan: Plan, batch: Any, loss: Loss | None) -> RecordedModel:
    """The recording of a model under a plan: made once for all plans that differ in other things.

    Raises:
        PlanError: among others, where ``loss`` takes an output and a target, as torch's do.
    """
    if isinstance(loss, nn.Module) or (getattr(loss, "__module__", None) or "").startswith("torch."):
        raise PlanError(
            f"loss={getattr(loss, '__name__', type(loss).__name__)} takes an output and a target; wanted is a function of the "
            "model and its batch: loss=lambda model, x, y: criterion(model(x), y)",
            "loss",
        )
    if isinstance(model, nn.Module):
        check_made(model)
    key = (_face(model, plan), _of_batch(batch), id(loss), part_of(plan, _is_fleets(model, plan)))
    if key not in _known:
        if len(_known) >= KEPT:
            _known.pop(next(iter(_known)))
        made = record_decoder(model, plan) if isinstance(model, Transformer) else _of_program(model, plan, batch, loss)
        _known[key] = (model, batch, loss), made
    return _known[key][1]


def _face(model: Model, plan: Plan) -> Any:
    """What tells a model from others, as it is now: a module may have been changed, a function may build another one."""
    if isinstance(model, Transformer):
        return model
    if isinstance(model, nn.Module):
        return _seen(model)
    if not callable(model):
        raise PlanError(
            f"price: the model is {model!r}; want an oc.Transformer, a module, or a function that builds one: "
            "oc.price(lambda: Net(), plan, machine, batch=(x, y))"
        )
    with pretend(1 if plan.placements else plan.tp * plan.cp, fake=True):
        if _is_fleets(model, plan):
            _begin_fleet(plan)
        return _seen(model())


def _seen(model: nn.Module) -> Any:
    """Its modules and tensors, and which parameters are one."""
    first: dict[int, str] = {}
    shared = [first.setdefault(id(p), name) for name, p in model.named_parameters(remove_duplicate=False)]
    return tuple(face(model)), tuple(shared)


def part_of(plan: Plan, fleets: bool) -> Plan:
    """The plan without what recordings do not depend on; ``fleets``: the layers themselves say how they are divided."""
    one = replace(
        plan, pp=1, schedule="1F1B", virtual=1, stages=(), microbatches=1, zero=0, replicas=1, gradients="float32",
        states="float32", master=True, offload=False, overlap=True, overlap_pp=True, partial_sends=False,
        recompute_blocks=0, per_host=8,
    )  # fmt: skip
    return replace(one, dp=plan.ep) if fleets else replace(one, ep=1)


def _is_fleets(model: Model, plan: Plan) -> bool:
    """Whether the layers themselves say how they are divided."""
    return isinstance(model, Transformer) or (not plan.placements and plan.tp * plan.cp > 1)


# -- a decoder by its sizes ------------------------------------------------------------------------------------------------


def record_decoder(sizes: Transformer, plan: Plan) -> RecordedModel:
    """A decoder's forward and backward under a plan; not kept."""
    alike = _alike(sizes)
    folded = [Folded("blocks", alike)]
    with pretend(plan.ep * plan.tp * plan.cp, fake=True):
        _begin_fleet(plan)
        model = build(replace(sizes, layers=len(alike), dense_layers=min(sizes.dense_layers, 1)), plan)
        tokens = torch.zeros(plan.microbatch, sizes.sequence // plan.cp, dtype=torch.int64, device="cpu")
        recording = _record(model, (tokens, tokens), None, plan)
        return RecordedModel(Pieces(recording, folded), sizes.sequence, tuple(folded))


def _alike(sizes: Transformer) -> tuple[int, ...]:
    """For how many each block stands that is recorded: the first one, one between two others, the last; of a mixture that begins
    with blocks without experts one of these is the first."""
    first = max(1, sizes.dense_layers)
    rest = sizes.layers - first
    return (first, rest - 1, 1) if rest > 1 else (first, *[1] * rest)


def _begin_fleet(plan: Plan) -> None:
    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = {"mp_degree": plan.tp, "sep_degree": plan.cp, "ep_degree": plan.ep}
    fleet.init(is_collective=True, strategy=strategy)


# -- a program -------------------------------------------------------------------------------------------------------------


def _of_program(given: Any, plan: Plan, batch: Any, loss: Loss | None) -> RecordedModel:
    _refuse(plan)
    if batch is None:
        raise PlanError(
            "price: a module has no sizes of its own: give an example batch, as in oc.price(model, plan, batch=(x, y))"
        )
    try:
        return _of_blocks(given, plan, batch, loss, False)
    except LookupError:  # its code asks for blocks by their numbers, so that all of them have to be there
        return _of_blocks(given, plan, batch, loss, True)


def _of_blocks(given: Any, plan: Plan, batch: Any, loss: Loss | None, all_stay: bool) -> RecordedModel:
    """``all_stay``: no block is left out."""
    fleets = _is_fleets(given, plan)
    dp = 1 if fleets else plan.dp
    parts = parts_of(batch)
    with pretend(dp * plan.tp * plan.cp, fake=True):
        if fleets:
            _begin_fleet(plan)
        model = without_data(given) if isinstance(given, nn.Module) else given()
        dtype = getattr(torch, plan.parameters)
        _convert(model, dtype)
        _check_fits(model, plan)
        folded = fold(model, partial(_where, plan.placements), all_stay)
        rows = [tree_map(partial(_rows, count=plan.microbatch * dp, dtype=dtype), part) for part in parts]
        if not fleets:
            mesh = ProcessMesh(_grid(dp, plan.tp), ["dp", "tp"])
            model = shard_layer(model, mesh, partial(place_by_name, plan.placements, _names(folded)))
            hold_outputs(plan.outputs, model, _names(folded))
            rows = [tree_map(partial(_divided, mesh=mesh), part) for part in rows]
        if not any(p.requires_grad for p in model.parameters()):
            raise PlanError(
                f"price: {type(model).__name__} has no parameter that is trained: there is no step to price"
            )
        if plan.recompute == "full":
            _again(model, folded)
        tokens = next((t.shape[1] for t in tree_leaves(parts) if isinstance(t, Tensor) and _is_text(t)), 1)
        with in_precision_of(plan):
            pieces = Pieces(_of_this_model(partial(_record, model, rows, loss, plan)), folded)
        if not pieces.owners:
            raise PlanError(_ANOTHER, "loss")
        if fleets and not pieces.messages:
            raise PlanError(
                f"tp={plan.tp}, cp={plan.cp} divide nothing of {type(model).__name__}: it has no layers of onecard.fleet. Say "
                'how its parameters lie: Plan(placements=(("*.fc1.weight", "tp: Shard(0)"), ...)), or leave tp and cp out'
            )
        return RecordedModel(pieces, tokens, tuple(folded))


def _names(folded: Sequence[Folded]) -> Callable[[str], str]:
    """A parameter's name in the whole model, by its name where blocks were left out."""

    def before(name: str) -> str:
        for blocks in folded:
            name = blocks.before(name)
        return name

    return before


def _refuse(plan: Plan) -> None:
    if plan.recompute in ("selective", "operators"):
        raise PlanError(
            f"recompute={plan.recompute!r} needs layers that know what to keep, as those of a Transformer do: 'full' or 'none'"
        )
    if plan.placements and (plan.sequence_parallel or plan.cp > 1):
        raise PlanError(
            "sequence_parallel and cp need layers that know of them, as those of a Transformer do: leave them out (of a plain "
            "model, say with outputs= how activations lie), or give oc.price a Transformer, or a function that builds fleet's "
            "layers, without placements"
        )


_ANOTHER = (
    "loss computes with tensors that are neither of the model that it is given, a copy without data, nor of the batch: call that "
    "model, and make other tensors inside of it, as in loss=lambda model, x, y: F.cross_entropy(model(x), y, torch.ones(9))"
)


def _of_this_model(make: Callable[[], Any]) -> Any:
    try:
        return make()
    except AssertionError as error:
        if "FakeTensor" not in str(error):
            raise
        raise PlanError(_ANOTHER, "loss") from error


def _record(model: nn.Module, batch: Sequence[Any], loss: Loss | None, plan: Plan) -> Any:
    def forward_and_backward(*given: Any) -> None:
        _number(loss(model, *given) if loss is not None else _called(model, given)).backward()

    leaves, names, tree = flat(forward_and_backward, batch, {})
    options = StaticOptions(without=[*PASSES], replayed=False)
    recording = recorded_call(forward_and_backward, leaves, names, tree, options)[0]
    if plan.compute.startswith("float8"):
        compute_in(recording.graph, plan.compute)
    graph = awaited(recording.graph) if plan.overlap_tp else recording.graph
    return recording.with_graph(fused(graph) if plan.compiled else graph)


def parts_of(batch: Any) -> tuple[Any, ...]:
    """What a model is called with, as a loader gives it: a tensor, several, or names with tensors."""
    parts = tuple(batch) if isinstance(batch, tuple | list) else (batch,)
    return tuple(dict(part) if isinstance(part, Mapping) else part for part in parts)


def _called(model: nn.Module, given: Sequence[Any]) -> Any:
    if len(given) == 1 and isinstance(given[0], Mapping):
        return model(**given[0])
    return model(*given)


def _number(result: Any) -> Tensor:
    found = result.get("loss") if isinstance(result, Mapping) else getattr(result, "loss", None)
    found = result if found is None else found
    if not isinstance(found, Tensor) or found.numel() != 1:
        raise PlanError(
            f"price: the model returns {type(result).__name__}, which is no loss: say how it is made, as in oc.price(model, "
            "plan, batch=(x, y), loss=lambda model, x, y: F.cross_entropy(model(x), y))"
        )
    return found


def without_data(module: nn.Module) -> nn.Module:
    """A copy of a module whose parameters, buffers and other tensors have no data; inside of ``pretend(fake=True)``."""
    memo: dict[int, Any] = {}
    kept = [tree_leaves(list(vars(m).values())) for m in module.modules()]  # parameters and buffers lie in dicts, too
    for g in (x for leaves in kept for x in leaves if isinstance(x, torch.Generator)):
        memo[id(g)] = g.clone_state()  # torch's own copies a tensor of its state, of which there is none here
    for t in (x for leaves in kept for x in leaves if isinstance(x, Tensor)):
        made: Tensor = torch.empty_strided(t.size(), t.stride(), dtype=t.dtype, device="cpu")
        memo[id(t)] = nn.Parameter(made, t.requires_grad) if isinstance(t, nn.Parameter) else made
    return copy.deepcopy(module, memo)


def _convert(model: nn.Module, dtype: torch.dtype) -> None:
    """Parameters and buffers of floating point in another dtype; those that modules share stay shared.

    Not ``Module.to``: it swaps tensors in place, which those that anything refers to weakly do not allow.
    """
    known: dict[int, Tensor] = {}
    for module in model.modules():
        both: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for tensors in both:
            for name, t in tensors.items():
                if t is None or not t.is_floating_point() or t.dtype == dtype:
                    continue
                if id(t) not in known:
                    made = torch.empty_like(t, dtype=dtype)
                    known[id(t)] = nn.Parameter(made, t.requires_grad) if isinstance(t, nn.Parameter) else made
                tensors[name] = known[id(t)]


def _rows(t: Any, count: int, dtype: torch.dtype) -> Any:
    """A tensor of the batch with so many rows; numbers with a point in the dtype of the parameters."""
    if not isinstance(t, Tensor) or not t.ndim:
        return t
    return torch.zeros((count, *t.shape[1:]), dtype=dtype if t.is_floating_point() else t.dtype, device="cpu")


def _divided(t: Any, mesh: ProcessMesh) -> Any:
    return shard_tensor(t, mesh, placements_of("dp: Shard(0)", mesh.dim_names)) if isinstance(t, Tensor) else t


def _is_text(t: Tensor) -> bool:
    return t.ndim == 2 and not t.is_floating_point()


def _grid(dp: int, tp: int) -> list[list[int]]:
    return [[d * tp + t for t in range(tp)] for d in range(dp)]


def _check_fits(model: nn.Module, plan: Plan) -> None:
    """Each pattern is of some parameter, or of some module."""
    for field_, names in names_of(model).items():
        if pattern := strange(getattr(plan, field_), names):
            near = get_close_matches(pattern.strip("*."), names, 3, 0.0)
            what = "parameter" if field_ == "placements" else "module"
            raise PlanError(f"{field_}: {pattern!r} fits no {what}; there are {', '.join(near)}, ...", field_)


def _again(model: nn.Module, folded: Sequence[Folded]) -> None:
    """Blocks whose forward runs again in backward."""
    if not folded:
        raise PlanError("recompute='full' computes blocks again, and the model has no list of blocks that are alike")
    for blocks in folded:
        for name in blocks.names:
            block = model.get_submodule(name)
            run_again_in_backward(block)


def _of_batch(batch: Any) -> Any:
    parts = parts_of(batch)
    return tuple((tuple(t.shape), t.dtype) if isinstance(t, Tensor) else id(t) for t in parts)
