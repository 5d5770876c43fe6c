"""DistributedStrategy: which degrees, in which order, and what else a fleet program asks for. Paddle's names."""

from __future__ import annotations

import difflib
from typing import Any

from onecard.errors import FleetError
from onecard.pipeline.schedule import modes

AXES = ("dp", "pp", "sharding", "sep", "mp")


_DEFAULTS: dict[str, dict[str, Any]] = {
    "hybrid_configs": {
        "dp_degree": -1,
        "mp_degree": 1,
        "pp_degree": 1,
        "sharding_degree": 1,
        "sep_degree": 1,
        "ep_degree": 1,
        "moe_sharding_degree": 1,
        "order": list(AXES),
    },
    "tensor_parallel_configs": {"tensor_parallel_degree": 1, "tensor_init_seed": -1},
    "pipeline_configs": {"accumulate_steps": 1, "micro_batch_size": 1, "schedule_mode": "1F1B"},
    "recompute_configs": {"checkpoints": [], "policy": None},
    "amp_configs": {
        "dtype": "bfloat16",
        "init_loss_scaling": 2.0**16,
        "incr_every_n_steps": 2000,
        "incr_ratio": 2.0,
        "decr_ratio": 0.5,
        "use_dynamic_loss_scaling": True,
    },
    "gradient_merge_configs": {"k_steps": 1, "avg": True},
}
_SWITCHES = ("tensor_parallel", "recompute", "amp", "gradient_merge", "pipeline")
_PLANNED = {
    "sharding": "hybrid_configs = {'sharding_degree': n}, or fleet.group_sharded_parallel(model, optimizer, level)",
    "sharding_configs": "hybrid_configs = {'sharding_degree': n}, or fleet.group_sharded_parallel(model, optimizer, level)",
    "dgc": "gradients are not compressed",
    "localsgd": "gradients are summed at every step",
    "lamb": "an optimizer of torch's",
    "lars": "an optimizer of torch's",
    "sync_batch_norm": "torch.nn.SyncBatchNorm, or oc.shard_layer, whose batch norm is that of the whole batch",
    "find_unused_parameters": "nothing: a parameter that no rank used keeps no gradient, one that some ranks used is summed",
    "fuse_all_reduce_ops": "nothing: gradients always travel in buckets of 25 MiB",
    "without_graph_optimization": "nothing: there is no graph here",
}


_KEYS = {
    "sharding_configs": "overlap and buckets need no word; stages: fleet.group_sharded_parallel(model, optimizer, level)",
    "mp_configs": "sums of tensor parallel layers need no word; sequence parallelism: fleet.utils.sequence_parallel_utils",
    "pp_configs": "strategy.pipeline_configs",
}


class DistributedStrategy:
    """What ``fleet.init`` is given. Each ``..._configs`` takes a dict, of which the rest keeps its defaults.

    Attributes:
        hybrid_configs: ``dp_degree`` (-1: what remains), ``mp_degree``, ``pp_degree``, ``sharding_degree``,
            ``sep_degree``, and ``order``, the axes from the outermost to the innermost. ``ep_degree``: so many neighbours among
            the ranks that see other data have different experts; ``moe_sharding_degree``, how often each expert is there, may
            be left out.
        tensor_parallel, tensor_parallel_configs: ``tensor_parallel_degree``, which is ``mp_degree`` too.
        pipeline_configs: ``accumulate_steps`` microbatches of ``micro_batch_size``; ``schedule_mode``: "1F1B", "F-then-B", "VPP",
            "ZBV" or another of ``pipeline.modes.MODES``, or an ``onecard.pipeline.Schedule``.
        recompute, recompute_configs: ``checkpoints``, names of modules that are run again in backward.
        amp, amp_configs: ``dtype`` of ``torch.autocast`` for the model's forward; the scaling of ``fleet.GradScaler``.
        gradient_merge, gradient_merge_configs: ``k_steps``, ``avg``.

    Raises:
        FleetError: a name, key or value that is not known; lists those that are.

    Source: ``paddle.distributed.fleet.DistributedStrategy``.

    Example:
        >>> strategy = DistributedStrategy()
        >>> strategy.hybrid_configs = {"dp_degree": 1, "mp_degree": 2}
        >>> strategy.hybrid_configs["mp_degree"], strategy.hybrid_configs["pp_degree"]
        (2, 1)
    """

    tensor_parallel: bool
    recompute: bool
    amp: bool
    gradient_merge: bool
    pipeline: bool
    hybrid_configs: dict[str, Any]
    tensor_parallel_configs: dict[str, Any]
    pipeline_configs: dict[str, Any]
    recompute_configs: dict[str, Any]
    amp_configs: dict[str, Any]
    gradient_merge_configs: dict[str, Any]

    def __init__(self) -> None:
        for name in _SWITCHES:
            object.__setattr__(self, name, False)
        for name, values in _DEFAULTS.items():
            object.__setattr__(self, name, _copied(values))

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _PLANNED:
            raise FleetError(f"DistributedStrategy.{name}: in its place: {_PLANNED[name]}")
        if name in _SWITCHES:
            if not isinstance(value, bool):
                raise FleetError(f"DistributedStrategy.{name} is True or False, not {value!r}")
            object.__setattr__(self, name, value)
        elif name in _DEFAULTS:
            object.__setattr__(self, name, _checked(name, value))
        else:
            raise FleetError(f"DistributedStrategy has no {name!r}{_near(name, [*_SWITCHES, *_DEFAULTS])}")

    def degrees(self, world: int) -> dict[str, int]:
        """The degree of each axis in a world of so many ranks, outermost first.

        Raises:
            FleetError: degrees whose product is not the world; says which would fit.

        Example:
            >>> DistributedStrategy().degrees(4)
            {'dp': 4, 'pp': 1, 'sharding': 1, 'sep': 1, 'mp': 1}
        """
        given = {axis: self.hybrid_configs[f"{axis}_degree"] for axis in AXES}
        asked = self.tensor_parallel_configs["tensor_parallel_degree"]
        if self.tensor_parallel and asked > 1:
            if given["mp"] not in (1, asked):
                raise FleetError(
                    f"tensor_parallel_degree is {asked}, but mp_degree {given['mp']}: they are one; set either"
                )
            given["mp"] = asked
        fixed = {axis: degree for axis, degree in given.items() if degree != -1}
        product = 1
        for degree in fixed.values():
            product *= degree
        if world % product or (len(fixed) == len(given) and product != world):
            rest = {axis: d for axis, d in given.items() if axis != "dp" and d > 1}
            words = " x ".join(f"{axis}_degree {degree}" for axis, degree in fixed.items() if degree > 1) or "1"
            raise FleetError(
                f"{words} = {product} ranks, but this world has {world}: "
                + (
                    f"dp_degree={world * max(1, given['dp']) // product} fits"
                    if not world % (product // max(1, given["dp"]))
                    else f"run onecard run --nproc_per_node {product} script.py, or degrees {rest} that divide {world}"
                )
            )
        found = {axis: given[axis] if given[axis] != -1 else world // product for axis in self.hybrid_configs["order"]}
        self._check_experts(found)
        return found

    def _check_experts(self, degrees: dict[str, int]) -> None:
        data = degrees["dp"] * degrees["sharding"] * degrees["sep"]
        experts, copies = self.hybrid_configs["ep_degree"], self.hybrid_configs["moe_sharding_degree"]
        if data % experts or (copies > 1 and experts * copies != data):
            fits = [n for n in range(1, data + 1) if not data % n]
            raise FleetError(
                f"ep_degree {experts}{f' x moe_sharding_degree {copies}' if copies > 1 else ''} does not fit the {data} ranks "
                f"that see other data (dp x sharding x sep), among which experts are divided: ep_degree of {fits}"
            )

    def __repr__(self) -> str:
        on = [name for name in _SWITCHES if getattr(self, name)]
        return f"DistributedStrategy(hybrid_configs={self.hybrid_configs}, on={on})"


def _copied(values: dict[str, Any]) -> dict[str, Any]:
    return {key: list(value) if isinstance(value, list) else value for key, value in values.items()}


def _near(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, 1)
    return (f"; did you mean {near[0]!r}?" if near else ";") + f" Known are: {', '.join(known)}"


def _checked(name: str, value: Any) -> dict[str, Any]:
    """A dict of the right keys, over the defaults."""
    known = _DEFAULTS[name]
    if not isinstance(value, dict):
        raise FleetError(f"DistributedStrategy.{name} is a dict of {', '.join(known)}; not {value!r}")
    for key, given in value.items():
        if key in _KEYS and name == "hybrid_configs":
            raise FleetError(f"DistributedStrategy.{name}[{key!r}]: in its place: {_KEYS[key]}")
        if key not in known:
            raise FleetError(f"DistributedStrategy.{name} has no key {key!r}{_near(key, list(known))}")
        if key.endswith(("degree", "steps", "size")) and not (
            isinstance(given, int) and (given >= 1 or (key == "dp_degree" and given == -1))
        ):
            raise FleetError(f"DistributedStrategy.{name}[{key!r}] is {given!r}; want a whole number of at least 1")
    made = _copied(known) | value
    if name == "pipeline_configs" and isinstance(made["schedule_mode"], str):
        try:
            modes.known(made["schedule_mode"])
        except modes.ModeError as fault:
            raise FleetError(f"DistributedStrategy.pipeline_configs: {fault}") from None
    if name == "hybrid_configs" and sorted(made["order"]) != sorted(AXES):
        raise FleetError(f"hybrid_configs['order'] is {made['order']}; it must name each of {list(AXES)} once")
    return made
