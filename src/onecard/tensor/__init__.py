"""DistTensor and how operators run on it: rule -> decide -> reshard -> local operator -> wrap."""

from onecard.tensor import special as _special  # noqa: F401 - fills the table of operators that need no rule
from onecard.tensor.convert import from_dtensor, from_local, reshard, shard_tensor, to_dtensor, unshard
from onecard.tensor.dist_tensor import DistTensor
from onecard.tensor.fallback import GatheredOperatorWarning

__all__ = [
    "DistTensor", "GatheredOperatorWarning", "from_dtensor", "from_local", "reshard", "shard_tensor", "to_dtensor", "unshard",
]  # fmt: skip
