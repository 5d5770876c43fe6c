"""PipelineLayer: a list of layers of which each rank builds its own. Paddle's names."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from onecard._torch.names import tree_map
from onecard.comm.base.state import arrives
from onecard.comm.issue import plain
from onecard.comm.issue.ranks import Ranks, of_ranks
from onecard.comm.world import world
from onecard.errors import FleetError
from onecard.fleet.grid import random_turns, topology
from onecard.fleet.grid.state_notes import note
from onecard.fleet.grid.topology import HybridCommunicateGroup, get_hybrid_communicate_group
from onecard.fleet.layers import segments, tied_layers
from onecard.fleet.layers.layer_desc import LayerDesc, SharedLayerDesc
from onecard.fleet.layers.parameters import sum_over
from onecard.fleet.layers.recomputing import recompute
from onecard.pipeline import Schedule
from onecard.pipeline.schedule import modes


class PipelineLayer(nn.Module):
    """A model as a list of layers, cut into stages. Each rank builds its own layers only, with the values of one card.

    Ranks must be seeded alike; random states pass from stage to stage while the layers are made, so that what is drawn is
    what one card draws, here and after it. Parameters have the names of ``nn.Sequential`` of the whole list: "3.weight".

    Args:
        layers: ``LayerDesc``, ``SharedLayerDesc``, modules, functions; each is given what the one before returns.
        num_stages: ``pp_degree``, if given.
        topology: the grid; that of ``fleet.init`` if left out.
        loss_fn: (what the last layer returns, labels) -> the loss of a microbatch, one number: a mean, over whatever the labels
            say (ignored labels, masks, weights of classes), or a sum.
        seg_method: "uniform"; "layer:Name": equally many layers whose class has that name; "parameters"; "time": by the
            measured time of each layer, with ``example_input``, a microbatch; or bounds, as [0, 3, 6].
        recompute_interval: so many layers at a time keep their input alone, and run again in backward; 0: none.
        num_virtual_pipeline_stages: stages for each rank, for the schedules that have several.
        loss_weight: labels of a microbatch -> what its loss is a mean over, where that cannot be seen.

    Raises:
        FleetError: fewer layers than stages, a stage without parameters, a method that there is not.

    Source: ``paddle.distributed.fleet.meta_parallel.PipelineLayer``.
    """

    def __init__(
        self,
        layers: Sequence[Any],
        num_stages: int | None = None,
        topology: Any = None,
        loss_fn: Callable[[Any, Any], Tensor] | None = None,
        seg_method: Any = "uniform",
        recompute_interval: int = 0,
        recompute_ctx: Any = None,
        num_virtual_pipeline_stages: int | None = None,
        example_input: Any = None,
        loss_weight: Callable[[Any], Any] | None = None,
    ) -> None:
        super().__init__()
        hcg = topology if isinstance(topology, HybridCommunicateGroup) else get_hybrid_communicate_group()
        _check(hcg, num_stages, recompute_ctx, recompute_interval)
        self.group: Ranks = hcg.group("pp")
        self.loss_fn, self.loss_weight, self.recompute_interval = _called(loss_fn), loss_weight, recompute_interval
        self.plan = _planned(self.group.size, num_virtual_pipeline_stages)
        self.stage_to_rank = self.plan(_microbatches()).stage_to_rank
        self.descs = list(layers)
        self.bounds = self._cut(seg_method, example_input)
        self._functions: dict[int, Callable[[Any], Any]] = {}
        self._shared: dict[str, nn.Module] = {}
        self._build()
        self._check_parameters()
        self._tie()

    # -- which layers ------------------------------------------------------------------------------------------------

    @property
    def num_stages(self) -> int:
        """How many stages there are, on all ranks."""
        return len(self.stage_to_rank)

    @property
    def stages(self) -> list[int]:
        """Those of this rank."""
        return sorted(stage for stage, rank in self.stage_to_rank.items() if rank == self.group.index)

    def layers_of(self, stage: int) -> range:
        """The layers of a stage, by their place in the list."""
        return range(self.bounds[stage], self.bounds[stage + 1])

    def _cut(self, method: Any, example: Any) -> list[int]:
        def seconds() -> list[float]:
            if example is None:
                raise FleetError('seg_method="time" measures each layer: give example_input=, a microbatch')
            whole = of_ranks(name="world")
            here = segments.measure(self._makers(), example) if whole.index == 0 else [0.0] * len(self.descs)
            said = torch.tensor(here, dtype=torch.float64, device="cpu")
            return plain.broadcast(said, whole, 0, call="times of layers").tolist()  # one word for all

        names = [_name(desc) for desc in self.descs]
        return segments.bounds_of(method, names, self.num_stages, lambda: segments.count(self._makers(True)), seconds)

    def _makers(self, shared_once: bool = False) -> list[Callable[[], Any]]:
        """For each layer a function that makes it; of shared ones the first alone counts."""
        seen: set[str] = set()
        made: list[Callable[[], Any]] = []
        for desc in self.descs:
            again = isinstance(desc, SharedLayerDesc) and desc.key in seen
            if isinstance(desc, SharedLayerDesc):
                seen.add(desc.key)
            if again and shared_once:
                made.append(nn.Identity)
            elif isinstance(desc, SharedLayerDesc) and not shared_once:
                made.append(partial(_bound, desc))
            else:
                made.append(desc.build_layer if isinstance(desc, LayerDesc) else partial(_itself, desc))
        return made

    # -- building ----------------------------------------------------------------------------------------------------

    def _build(self) -> None:
        """Build this rank's layers; the random state comes from who has the layers before, and goes to who has those after."""
        runs = [
            (owner, list(stages)) for owner, stages in groupby(range(self.num_stages), self.stage_to_rank.__getitem__)
        ]
        for number, (owner, stages) in enumerate(runs):
            if owner != self.group.index:
                continue
            if number:
                random_turns.take(self.group, runs[number - 1][0], number)
            for index in (i for stage in stages for i in self.layers_of(stage)):
                self._add(index, self.descs[index])
            after = [runs[number + 1][0]] if number + 1 < len(runs) else range(self.group.size)
            for place in after:
                random_turns.give(self.group, place, number + 1)
        if runs[-1][0] != self.group.index:
            random_turns.take(self.group, runs[-1][0], len(runs))

    def _add(self, index: int, desc: Any) -> None:
        made: Any
        if isinstance(desc, SharedLayerDesc):
            if desc.key not in self._shared:
                first = next(
                    i for i, d in enumerate(self.descs) if isinstance(d, SharedLayerDesc) and d.key == desc.key
                )
                with random_turns.not_drawn(first != index):
                    self._shared[desc.key] = desc.build_layer()
            made = self._shared[desc.key]
            run = made if desc.forward_func is None else partial(desc.forward_func, made)
        else:
            made = run = desc.build_layer() if isinstance(desc, LayerDesc) else desc
        if not callable(run):
            raise FleetError(f"layer {index} is {desc!r}; want a LayerDesc, a module or a function of one value")
        if isinstance(made, nn.Module):
            self.add_module(str(index), made)
        self._functions[index] = run

    def _tie(self) -> None:
        """Copies of shared layers get the values of the first, and sum their gradients."""
        owners: dict[str, list[int]] = {}
        for stage in range(self.num_stages):
            for index in self.layers_of(stage):
                desc = self.descs[index]
                if isinstance(desc, SharedLayerDesc):
                    owners.setdefault(desc.key, []).append(self.stage_to_rank[stage])
        for key, places in sorted(owners.items()):
            ranks = [self.group.ranks[place] for place in sorted(set(places))]
            if len(ranks) == 1 or world.get_rank() not in ranks:
                continue
            group = of_ranks(ranks, f"shared {key}")
            first = ranks.index(self.group.ranks[places[0]])
            with torch.no_grad():
                for tensor in [*self._shared[key].parameters(), *self._shared[key].buffers()]:
                    plain.broadcast(tensor.detach(), group, first, call="SharedLayerDesc")
            for p in self._shared[key].parameters():
                sum_over(p, group)
        owners_of = [self.stage_to_rank[stage] for stage in range(self.num_stages) for _ in self.layers_of(stage)]
        self._first_names = tied_layers.tie(self.descs, owners_of, self.group)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """As torch's. A copy of a parameter that layers of other ranks have, too, has the name that it has on one card."""
        for name, p in super().named_parameters("", recurse, remove_duplicate):
            named = self.first_name(name) if remove_duplicate else name
            yield f"{prefix}.{named}" if prefix else named, p

    def first_name(self, name: str) -> str:
        """What one card calls a parameter that has this name here."""
        index, _, rest = name.partition(".")
        if index.isdigit() and isinstance(self.descs[int(index)], SharedLayerDesc):
            index = str(self._alike(self.descs[int(index)], int(index))[0])
        return self._first_names.get(name, f"{index}.{rest}" if rest else name)

    def _check_parameters(self) -> None:
        """Every rank learns of a stage without parameters, or of a shared one that is not there: all end with the same words."""
        mine = [0.0] * (self.num_stages + 1)
        for stage in self.stages:
            made = [self._modules.get(str(i)) for i in self.layers_of(stage)]
            mine[stage] = float(sum(p.numel() for m in made if m is not None for p in m.parameters()))
        mine[-1] = float(any(_fault(self._shared[d.key], d) for d in self._shared_descs() if d.key in self._shared))
        said = torch.tensor(mine, dtype=torch.float64, device="cpu")
        *counts, faults = plain.all_reduce(said, self.group, call="PipelineLayer").tolist()
        self.parameter_counts = [int(n) for n in counts]
        if not arrives():
            return
        if faults:
            with torch.device("meta"):
                raise FleetError(next(filter(None, (_fault(d.build_layer(), d) for d in self._shared_descs()))))
        if 0 in self.parameter_counts:
            empty = self.parameter_counts.index(0)
            names = ", ".join(f"{i}: {_name(self.descs[i])}" for i in self.layers_of(empty))
            raise FleetError(
                f"stage {empty} of {self.num_stages} has no parameters; its layers are {names}. Cut elsewhere: "
                f'seg_method="parameters", or bounds other than {self.bounds}'
            )

    def fault_anywhere(self, fault: Callable[[str, nn.Module], str]) -> str:
        """The words of a function (path, module) on a layer with a fault, whichever rank has it: the same on all of them."""
        made = {i: m for stage in self.stages for i in self.layers_of(stage) if (m := self._modules.get(str(i)))}
        found = [i for i, m in made.items() if fault(str(i), m)]
        said = torch.tensor(float(found[0] if found else len(self.descs)), device="cpu")
        first = int(plain.all_reduce(said, self.group, "min", call="PipelineLayer").item())
        first = first if arrives() else int(said)
        if first == len(self.descs):
            return ""
        with torch.device("meta"), random_turns.not_drawn(True):
            desc = self.descs[first]
            return fault(str(first), desc.build_layer() if isinstance(desc, LayerDesc) else desc)

    def _shared_descs(self) -> list[SharedLayerDesc]:
        return [desc for desc in self.descs if isinstance(desc, SharedLayerDesc)]

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.group.size > 1:
            note(destination).stages.append((prefix, [self._alike(desc, i) for i, desc in enumerate(self.descs)]))

    def _alike(self, desc: Any, index: int) -> list[int]:
        """The layers that are one with a layer."""
        if not isinstance(desc, SharedLayerDesc):
            return [index]
        return [i for i, other in enumerate(self.descs) if isinstance(other, SharedLayerDesc) and other.key == desc.key]

    # -- running -----------------------------------------------------------------------------------------------------

    def run_stage(self, stage: int, value: Any) -> Any:
        """The layers of a stage, which must be this rank's, one after the other."""
        run = [self._functions[i] for i in self.layers_of(stage)]
        step = self.recompute_interval
        if not step or not torch.is_grad_enabled():
            return _through(run, value)
        for at in range(0, len(run), step):
            value = recompute(_through, run[at : at + step], value)
        return value

    def given(self, stage: int, value: Any) -> Any:
        """What a stage is given for an input of the first one, in shape: of the meta device. Where nothing arrives."""
        value = tree_map(lambda x: torch.empty_like(x, device="meta") if isinstance(x, Tensor) else x, value)
        for makes in self._makers()[: self.layers_of(stage).start]:
            with torch.device("meta"), random_turns.not_drawn(True):
                run = makes()
            value = (copy.deepcopy(run).to("meta") if isinstance(run, nn.Module) else run)(value)
        return value

    def forward(self, value: Any) -> Any:
        """All layers, where this rank has all of them.

        Raises:
            FleetError: other ranks have some: ``fleet.distributed_model(model)(x)``.
        """
        if self.group.size > 1:
            raise FleetError(
                f"this rank has the layers of stage(s) {self.stages} of {self.num_stages} only: call what "
                "fleet.distributed_model(model) returns"
            )
        for stage in range(self.num_stages):
            value = self.run_stage(stage, value)
        return value

    def schedule(self, microbatches: int) -> Schedule:
        """That of the strategy, for so many microbatches."""
        return self.plan(microbatches)


def _through(run: Sequence[Callable[[Any], Any]], value: Any) -> Any:
    for function in run:
        value = function(value)
    return value


def _name(desc: Any) -> str:
    kind = desc.layer_func if isinstance(desc, LayerDesc) else type(desc) if isinstance(desc, nn.Module) else desc
    return str(getattr(kind, "__name__", kind))


def _itself(desc: Any) -> Any:
    return desc


def _bound(desc: SharedLayerDesc) -> Any:
    made = desc.build_layer()
    return made if desc.forward_func is None else partial(desc.forward_func, made)


def _called(loss_fn: Any) -> Any:
    """A loss given as its class is made, as Paddle's users do."""
    made = loss_fn() if isinstance(loss_fn, type) and issubclass(loss_fn, nn.Module) else loss_fn
    if isinstance(made, nn.Module) and getattr(made, "reduction", "") == "none":
        raise FleetError("loss_fn has reduction='none'; want 'mean' or 'sum', one number for a microbatch")
    return made


def _planned(ranks: int, chunks: int | None) -> Callable[[int], Schedule]:
    try:
        return modes.plan(topology.strategy().pipeline_configs["schedule_mode"], ranks, chunks)
    except modes.ModeError as fault:
        raise FleetError(f"pipeline_configs: {fault}") from None


def _microbatches() -> int:
    return int(topology.strategy().pipeline_configs["accumulate_steps"])


def _check(hcg: HybridCommunicateGroup, num_stages: int | None, recompute_ctx: Any, interval: int) -> None:
    degree = hcg.degrees["pp"]
    if num_stages not in (None, degree) and not world.alone.here:
        raise FleetError(
            f"PipelineLayer(num_stages={num_stages}), but pp_degree is {degree}: they are one. Leave num_stages out, or "
            f'strategy.hybrid_configs = {{"pp_degree": {num_stages}}}; more stages for each rank: num_virtual_pipeline_stages'
        )
    if recompute_ctx is not None:
        raise FleetError(
            "PipelineLayer(recompute_ctx=) is not there: recompute_interval=1 drops each layer's activations"
        )
    if not isinstance(interval, int) or interval < 0:
        raise FleetError(f"recompute_interval is {interval!r}; want how many layers run again together, 0 for none")


def _fault(module: nn.Module, desc: SharedLayerDesc) -> str:
    """What is wrong with a shared layer. The attribute may be a property, or that of a module in it."""
    with suppress(AttributeError):
        if isinstance(attrgetter(desc.shared_weight_attr)(module), Tensor):
            return ""
    names = [name for name, _ in module.named_parameters()]
    better = f": shared_weight_attr={names[0]!r}" if names else ", and so there is nothing to share"
    return (
        f"SharedLayerDesc({desc.key!r}): {desc.layer_func.__name__} has no parameter {desc.shared_weight_attr!r}; it has "
        f"{names}{better}"
    )
