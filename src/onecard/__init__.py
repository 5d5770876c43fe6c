"""onecard: write for one card, train on any mesh, same numbers."""

from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

from onecard import _needed as _needed  # first: it says of an old torch what is missing

# isort: split
from onecard import _import_time

# isort: split
from torch.distributed.tensor import Partial, Replicate, Shard

from onecard import _addresses, _deprecated
from onecard import checkpoint as checkpoint
from onecard import fleet as fleet
from onecard._torch.patches import unpatch
from onecard._version import __version__ as __version__
from onecard.as_json import from_json, to_json
from onecard.checkpoint import load_state_dict, save_state_dict
from onecard.comm import from_device_mesh, get_rank, get_world_size, to_device_mesh
from onecard.comm.issue import differentiable as differentiable
from onecard.comm.world.pretend import pretend
from onecard.elsewhere import refuse as _refuse
from onecard.fleet.front.collective import (
    ReduceOp,
    all_gather,
    all_gather_object,
    all_reduce,
    alltoall,
    barrier,
    broadcast,
    gather,
    get_group,
    irecv,
    isend,
    new_group,
    recv,
    reduce,
    reduce_scatter,
    scatter,
    send,
    wait,
)
from onecard.fleet.front.exchanges import (
    P2POp,
    alltoall_single,
    batch_isend_irecv,
    broadcast_object_list,
    get_backend,
    is_initialized,
    scatter_object_list,
)
from onecard.fleet.layers.splitting import split
from onecard.fleet.layers.tokens import token_mean
from onecard.machine.cost import Link, Machine
from onecard.pipeline.cut.stages import Stages
from onecard.place.layout import Layout
from onecard.place.mesh import ProcessMesh
from onecard.reports.messages import Report, explain, no_implicit_communication
from onecard.rules import register_rule
from onecard.static import Recording, Static, load_recording, record
from onecard.tensor import (
    CostlyExpertsWarning,
    DistTensor,
    GatheredOperatorWarning,
    deferred_init,
    from_dtensor,
    from_local,
    manual_seed,
    one_card_random,
    rand,
    randint,
    randn,
    randperm,
    reshard,
    shard_tensor,
    to_dtensor,
    unshard,
)
from onecard.train import (
    DistributedBatchSampler,
    ShardDataloader,
    ShardingStage1,
    ShardingStage2,
    ShardingStage3,
    local_map,
    shard_dataloader,
    shard_layer,
    shard_op,
    shard_optimizer,
)
from onecard.train import modules as _modules  # noqa: F401 - takes over nn.LSTM and its kin, nn.CTCLoss, nn.TransformerEncoder

__all__ = [
    "Accuracy", "DistModel", "Engine", "InputSpec", "Strategy",
    "CostlyExpertsWarning", "Coverage", "DistTensor", "DistributedBatchSampler",
    "GatheredOperatorWarning", "JobCost", "Layout", "Link", "Machine",
    "Partial", "PieceCost", "Plan", "RankCost", "price", "plan", "Plans", "Choice",
    "Divergence", "ExpertBalance", "Proof", "prove",
    "ProcessMesh", "Recording", "Replicate", "Report", "Shard", "ShardDataloader", "ShardingStage1", "ShardingStage2",
    "ShardingStage3", "Static", "Transformer", "coverage", "explain", "from_device_mesh", "from_dtensor", "from_json",
    "from_local",
    "get_rank", "get_world_size", "load_recording", "load_state_dict", "local_map", "no_implicit_communication", "parallelize",
    "pretend",
    "record", "register_rule", "reshard", "save_state_dict", "shard_dataloader", "shard_layer", "shard_op", "shard_optimizer",
    "shard_tensor", "Stages", "to_device_mesh", "to_dtensor", "to_json", "to_static", "token_mean", "unpatch", "unshard",
    "ReduceOp", "all_gather", "all_gather_object", "all_reduce", "alltoall", "barrier", "broadcast", "gather", "get_group",
    "irecv", "isend", "new_group", "recv", "reduce", "reduce_scatter", "scatter", "send", "spawn", "split", "wait",
    "P2POp", "alltoall_single", "batch_isend_irecv", "broadcast_object_list", "get_backend", "is_initialized",
    "scatter_object_list", "deferred_init", "manual_seed", "one_card_random", "rand", "randint", "randn", "randperm",
]  # fmt: skip


if _TYPE_CHECKING:
    from onecard._on_demand import *  # noqa: F403


def __getattr__(name: str) -> _Any:
    if name in __all__:
        from onecard import _on_demand

        globals().update((each, getattr(_on_demand, each)) for each in _on_demand.__all__)
        return globals()[name]
    return _addresses.module_or(lambda _, name: _addresses.of_paddle(name, _refuse))(__name__, name)


def __dir__() -> list[str]:
    return [*{*globals(), *__all__}]


_deprecated.install(_deprecated.TABLE)
_import_time.over()
