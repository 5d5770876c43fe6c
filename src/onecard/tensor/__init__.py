"""DistTensor and how operators run on it: rule -> decide -> reshard -> local operator -> wrap."""

# These fill the table of operators that are not decided by a row.
from onecard.tensor import become as _become  # noqa: F401 - what `plain.data = distributed` does
from onecard.tensor import dcp as _dcp  # noqa: F401 - what torch.distributed.checkpoint asks of a tensor
from onecard.tensor import encoded as _encoded  # noqa: F401 - what JSON encoders make of one
from onecard.tensor.aliasing import setitem as _setitem  # noqa: F401
from onecard.tensor.convert import from_dtensor, from_local, reshard, shard_tensor, to_dtensor, unshard
from onecard.tensor.deferred.init import deferred_init
from onecard.tensor.dispatch import composite as _composite  # noqa: F401
from onecard.tensor.dispatch import foreach as _foreach  # noqa: F401
from onecard.tensor.dispatch import scalar as _scalar  # noqa: F401
from onecard.tensor.dispatch.costly import CostlyExpertsWarning
from onecard.tensor.dispatch.fallback import GatheredOperatorWarning
from onecard.tensor.dist_tensor import DistTensor
from onecard.tensor.random_operators import attention as _attention  # noqa: F401
from onecard.tensor.random_operators import channels as _channels  # noqa: F401
from onecard.tensor.random_operators import draw as _draw  # noqa: F401
from onecard.tensor.random_operators import variates as _variates  # noqa: F401
from onecard.tensor.random_operators.create import rand, randint, randn, randperm
from onecard.tensor.random_operators.one_card import manual_seed, one_card_random
from onecard.tensor.rows import by_rule as _by_rule  # noqa: F401
from onecard.tensor.rows import choose as _choose  # noqa: F401
from onecard.tensor.rows import grouped as _grouped  # noqa: F401

__all__ = [
    "CostlyExpertsWarning", "DistTensor",
    "GatheredOperatorWarning", "deferred_init", "from_dtensor", "from_local", "manual_seed", "one_card_random",
    "rand", "randint", "randn", "randperm", "reshard", "shard_tensor", "to_dtensor", "unshard",
]  # fmt: skip
