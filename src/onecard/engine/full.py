"""auto_mode="full": the plan that is found for a batch, as marks of the model and fields of the strategy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.utils.data import DataLoader, default_collate

from onecard._torch.names import tree_map
from onecard.auto.first_batch import as_it_was, first_batch
from onecard.comm.world import world
from onecard.engine.metrics import spread
from onecard.engine.options import PIPELINE
from onecard.engine.placing import lay_out
from onecard.engine.specs import Feed
from onecard.engine.step import own_loss
from onecard.engine.strategy import Strategy
from onecard.engine.with_plan import config_of
from onecard.errors import EngineError
from onecard.place.mesh import ProcessMesh
from onecard.planning.machine_file import this_machine
from onecard.planning.placements import hold_outputs, placed
from onecard.planning.search.api import plan
from onecard.planning.search.plans import Plans
from onecard.tensor import DistTensor

ALWAYS = {"cp": 1, "replicas": 1, "stages": (), "recompute_blocks": 0}
"""What no field of a strategy says."""
IN_ONE = {"pp": 1, "microbatches": 1}
"""A batch in microbatches is one card's step if the loss is a mean and no layer looks at statistics of the batch: that is the
user's to say, by ``pipeline`` or ``gradient_merge``."""


OWN_DTYPES: dict[str, Any] = dict.fromkeys(("parameters", "compute", "gradients", "states"), "float32")
"""Dtypes are the program's own, as for ``parallelize``: a plan that computes in another would train another program."""


def is_wanted(engine: Any) -> bool:
    """Whether a plan is still to be found: marks of the model say already how it lies, and one rank has nothing to divide."""
    strategy, ranks = engine.strategy, world.get_world_size()
    marked = any(isinstance(p, DistTensor) for p in engine.model.parameters())
    return strategy.auto_mode == "full" and ranks > 1 and engine.plans is None and not marked


def found_for(engine: Any, feed: Feed) -> Plans:
    """The plans for a batch, best first. What the strategy enables is pinned: ZeRO's stage, pipeline, recomputation.

    Raises:
        EngineError: the loss has parameters, which the price of a model does not know.
    """
    if isinstance(engine.loss, nn.Module) and any(True for _ in engine.loss.parameters()):
        raise EngineError(
            f"Engine(auto_mode='full'): {type(engine.loss).__name__} has parameters, and a plan is found for those of the model "
            "alone: make the loss a part of the model, which returns it, or say auto_mode='semi'"
        )
    fixed = {**ALWAYS, **_pinned(engine.strategy)}
    given, ranks = (feed.args, feed.kwargs, feed.labels), world.get_world_size()
    return plan(
        engine.model,
        world=ranks,
        machine=this_machine().recorded(),
        batch=given,
        loss=_loss_of(engine.loss),
        fixed=fixed,
    )


def _pinned(strategy: Strategy) -> dict[str, Any]:
    """The fields of a plan that a strategy says."""
    pipe, merge, zero = strategy.pipeline, strategy.gradient_merge, strategy.sharding
    fixed: dict[str, Any] = dict(IN_ONE)
    if pipe.enable:
        fixed = {"schedule": pipe.schedule_mode, "virtual": pipe.vpp_degree, "microbatches": pipe.accumulate_steps}
        fixed |= {"pp": pipe.degree} if pipe.degree > 1 else {}
    elif merge.enable:
        fixed["microbatches"] = merge.k_steps
    if zero.enable:
        fixed["zero"] = zero.stage
    if strategy.recompute.enable:
        fixed["recompute"] = "full" if strategy.recompute.checkpoints else "none"
    return fixed


def _loss_of(loss: Any) -> Any:
    def computed(model: Any, args: Any, kwargs: Any, labels: Any) -> Tensor:
        outputs = model(*args, **kwargs)
        return own_loss(outputs) if loss is None else loss(*spread(outputs), *labels)

    return computed


def apply(engine: Any, found: Plans, optimizers: Any) -> None:
    """Mark the model as the best plan has it, and say the rest in the strategy."""
    best = found.best
    config = config_of(replace(best, **OWN_DTYPES))
    strategy = engine.strategy.copy()
    if best.tp > 1:
        sizes = [(PIPELINE[0], best.pp), ("dp", best.dp), ("tp", best.tp)]
        sizes = [(name, size) for name, size in sizes if size > 1]
        mesh = ProcessMesh(np.arange(best.world).reshape([size for _, size in sizes]), [name for name, _ in sizes])
        where = lambda name: placed(best.placements, name, mesh.dim_names)  # noqa: E731
        lay_out(engine.model, mesh, optimizers, where, zero=best.zero if best.dp > 1 else 0)
        hold_outputs(best.outputs, engine.model)
    # Microbatches of a pipeline that was asked for are its own.
    merge = () if strategy.pipeline.enable else ("gradient_merge",)
    for section in ("sharding", "pipeline", "recompute", *merge):
        if not getattr(strategy, section).enable and config[section]["enable"]:
            getattr(strategy, section).update(config[section])
    if strategy.pipeline.enable and strategy.pipeline.degree == -1:
        strategy.pipeline.degree = best.pp
    object.__setattr__(engine, "strategy", strategy.owned_by("an Engine"))  # a user would change it too late


def example(data: Any, batch_size: int, collate: Any) -> Any:
    """A batch of what an Engine is given, for its shapes; the random numbers are as if nobody had looked.

    Raises:
        EngineError: it can be read only once.
    """
    loader = getattr(getattr(data, "loader", None), "loader", data)
    if not isinstance(loader, DataLoader) and hasattr(loader, "__getitem__") and hasattr(loader, "__len__"):
        with as_it_was(loader):
            sample = (collate or default_collate)([loader[0]])
        return tree_map(lambda x: x.expand(batch_size, *x.shape[1:]) if isinstance(x, Tensor) and x.ndim else x, sample)
    return first_batch(
        loader,
        lambda: EngineError(
            f"Engine(auto_mode='full'): a plan is found for a batch, and {type(data).__name__} can be read only once: give "
            "prepare(inputs_spec, labels_spec) the shapes of a whole batch, or fit a dataset"
        ),
    )


def unknown() -> EngineError:
    """Nothing says what a batch is."""
    return EngineError(
        "Engine(auto_mode='full'): a plan is found for a batch: call fit or dataloader, or prepare(inputs_spec, labels_spec) "
        "with the sizes of a whole batch"
    )


def of_specs(inputs: Any, labels: Any) -> Any:
    """A batch of specs; None if a number of rows is open."""
    specs = [*(inputs or ()), *(labels or ())]
    if not specs or any(not spec.shape or spec.shape[0] is None for spec in specs):
        return None
    return tuple(spec.empty(0) for spec in specs)
