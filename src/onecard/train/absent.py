"""What only other ranks of a pipeline have: a tensor of this program without memory here, which says so to who computes with it.

Its place is kept, so that all ranks look alike: the same objects, names, shapes, optimizers. Recorded steps run their part. What
else is computed of it is as absent (``of_absent.py``); who wants a value is told who has it. Without that, torch's operators on
lists read memory that is not there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from onecard import recorded
from onecard._torch import patches
from onecard._torch.fakes import DEVICE
from onecard._torch.names import without_torch_function
from onecard.comm.agree import joint
from onecard.comm.base.record import name as call
from onecard.comm.base.record import user_line, words_of
from onecard.comm.world import world
from onecard.errors import StageError
from onecard.tensor.dist_tensor import DistTensor
from onecard.tensor.staged import note_stage, stages_of
from onecard.train.of_absent import Needed, computed, tensors

TOLD = frozenset((
    "__dir__", "__hash__", "__len__", "_backward_hooks", "_base", "_cdata", "_is_view", "_is_zerotensor",
    "_post_accumulate_grad_hooks", "_version", "data_ptr", "device", "dim", "dtype", "element_size", "get_device", "grad",
    "grad_fn", "is_complex", "is_conj", "is_contiguous", "is_cpu", "is_cuda", "is_distributed", "is_floating_point",
    "is_hpu", "is_inference", "is_ipu", "is_leaf", "is_maia", "is_meta", "is_mkldnn", "is_mps", "is_mtia", "is_neg",
    "is_nested", "is_pinned", "is_quantized", "is_same_size", "is_shared", "is_signed", "is_sparse", "is_sparse_csr",
    "is_vulkan", "is_xla", "is_xpu", "itemsize", "layout", "names", "nbytes", "ndim", "ndimension", "nelement", "numel",
    "output_nr", "register_hook", "register_post_accumulate_grad_hook", "requires_grad", "requires_grad_", "retains_grad",
    "shape", "size", "storage_offset", "stride", "untyped_storage",
))  # fmt: skip
"""What may be asked of it: all but values."""
_CONVERSIONS = frozenset(("_to_copy", "bfloat16", "cpu", "cuda", "double", "float", "half", "to", "type"))
_ALIASES = frozenset(("detach", "detach_", "data", "alias"))


class Absent(Tensor):
    """A tensor that only other ranks of a pipeline have."""

    def refused(self, name: str) -> StageError:
        """The error for who wants its values."""
        return _refusal(self, name)

    def taken_by(self, x: Tensor) -> None:
        """``x.data = self``, of a plain tensor: it is what it is given."""
        if not _like(self, x):
            raise self.refused("data")
        with torch.no_grad():
            x.copy_(self)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = name_of(func)
        if recorded.recorder is None and name not in TOLD:
            found = [x for x in tensors((args, kwargs)) if isinstance(x, Absent)]
            x = found[0]
            if name in ("__repr__", "__format__"):
                return f"{type(x).__name__}({in_words(x)})"
            if name in ("to", "cpu") and _stays(x, args[1:], kwargs):
                return x
            if name == "data" and len(args) > 1:
                if _like(args[1], x):  # its holders' affair
                    return None
                raise x.refused(name)
            if name in _ALIASES:
                return _left(_plainly(func, args, kwargs), found)
            if (name in _CONVERSIONS and isinstance(x, nn.Parameter)) or _sends(func):
                raise x.refused(name)
            try:
                return computed(func, args, kwargs, _is_absent, lambda made: _left(made, found))
            except Needed as why:
                raise _refusal(x, name, str(why)) from why.__cause__
        if name == "device" and DEVICE in vars(args[0]):
            return vars(args[0])[DEVICE]
        return _plainly(func, args, kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise _refusal(self, "pickle (torch.save)")

    def __deepcopy__(self, memo: Any) -> Any:
        if id(self) not in memo:
            made = torch.empty_strided(self.shape, self.stride(), dtype=self.dtype, device=self.device)
            made = made if made.dim() else made.zero_()  # which is looked at
            made = nn.Parameter(made, self.requires_grad) if isinstance(self, nn.Parameter) else made
            if made.dim():
                made.untyped_storage().resize_(0)
            let_go(made, stages_of(self), words_of(self))
            memo[id(self)] = made
        return memo[id(self)]


class AbsentParameter(Absent, nn.Parameter):
    """A parameter that only other ranks of a pipeline have."""


def let_go(x: Tensor, holders: tuple[int, ...], name: str) -> None:
    """A tensor of this program becomes one that only others have; it stays the object that it is.

    Args:
        holders: the stages that have it.
        name: what errors call it, if it has no name yet.
    """
    note_stage(x, False, holders)
    if not words_of(x):
        call(x, name)
    kind = {Tensor: Absent, nn.Parameter: AbsentParameter}.get(type(x))
    patches.begin()  # assignments to ``x.data`` are seen
    if kind is not None:
        x.__class__ = kind  # type: ignore[assignment]


def _left(made: Any, of: Sequence[Tensor]) -> Any:
    """What is made of absent tensors; and a tensor of the program that these are written into, whose memory is given back."""
    if type(made) in (Tensor, nn.Parameter):
        memory = made.untyped_storage()
        # One number's memory stays, as of all that is let go: a look at a step computes with counters.
        if not made.is_meta and made.dim() and memory.nbytes() and memory.resizable():
            made.untyped_storage().resize_(0)
        elif made.is_meta:
            setattr(made, DEVICE, of[0].device)
        let_go(made, _holders(of), words_of(of[0]))
    return made


def _holders(of: Sequence[Tensor]) -> tuple[int, ...]:
    """Who has all of some tensors; of a pipeline with several stages on a rank those that are needed."""
    stages = [{*stages_of(x)} for x in of if stages_of(x)]
    return tuple(sorted(set.intersection(*stages) or set.union(*stages))) if stages else ()


def _is_absent(x: Any) -> bool:
    return isinstance(x._local if isinstance(x, DistTensor) else x, Absent)


KEEPS = (
    "A model that is cut into stages keeps its dtype and device: convert it before the first call of the step (model.double() "
    "above oc.to_static(step, plan=...)); of a trained one oc.checkpoint.save({'model': model}, path), then oc.checkpoint.load "
    "into a model that was converted when it was new"
)
"""What to do instead of converting it."""


def _like(y: Any, x: Tensor) -> bool:
    return isinstance(y, Tensor) and y.shape == x.shape and y.dtype is x.dtype


def _sends(func: Any) -> bool:
    """Whether it is a message, which takes no part in what only others have."""
    return str(getattr(func, "__module__", "")).startswith("torch.distributed")


def _stays(x: Tensor, args: Any, kwargs: Any) -> bool:
    """Whether ``to`` or ``cpu`` has nothing to do: optimizers ask it of states that they load."""
    asked = [*args, *kwargs.values()]
    return (bool(asked) or x.device.type == "cpu") and all(each in (x.dtype, x.device, None, False) for each in asked)


def _plainly(func: Any, args: Any, kwargs: Any) -> Any:
    with without_torch_function():
        return func(*args, **kwargs)


def name_of(func: Any) -> str:
    """A function's name; that of a property, of its getter and setter."""
    owner = getattr(func, "__self__", None)
    if getattr(func, "__name__", "") in ("__get__", "__set__", "__delete__"):
        ours = (
            name for name in ("grad", "data") if vars(Tensor).get(name) is owner
        )  # properties that patches put there
        return next(ours, "") or str(getattr(owner, "__name__", ""))  # from 3.13 on a property has a name, its getter's
    name = str(getattr(func, "__name__", func)).removesuffix(".default")
    return "item" if name == "_local_scalar_dense" else name


def in_words(x: Tensor) -> str:
    stages = ", ".join(map(str, stages_of(x)))
    who = f"stage {stages} of the pipeline has" if stages else "other stages of the pipeline have"
    return f"{list(x.shape)} {str(x.dtype).removeprefix('torch.')}, which {who}"


def _refusal(x: Tensor, name: str, why: str = "") -> StageError:
    """The error; ranks that wait for this one in the next step are told of it."""
    said = _error(x, name, why)
    joint.refused(said)
    return StageError(said)


_MADE_BEFORE = (
    "A copy or an average of it that was made ahead of the first recorded call is whole: make it after that call. "
)


def _error(x: Tensor, name: str, why: str = "") -> str:
    here = f"its memory here, on rank {world.get_rank()}, was given back{f', and {why}' if why else ''}"
    if name in _CONVERSIONS:
        return f"{user_line()}: {name} of {words_of(x) or 'a tensor'} {in_words(x)}: {here}. {KEEPS}"
    return (
        f"{user_line()}: {name} of {words_of(x) or 'a tensor'} {in_words(x)}: {here}. "
        f"{_MADE_BEFORE if name == 'all_gather' else ''}"
        "An evaluation is a step of the same plan: evaluate = oc.to_static(evaluate, plan=plan). "
        "Computations with all parameters belong into the recorded step (clipping, averages: each rank does its own part); "
        "oc.checkpoint.save({'model': model}, path) saves all stages as one model, and oc.checkpoint.load(path) on one process "
        "gives the whole of it"
    )
