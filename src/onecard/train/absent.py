"""What only other ranks of a pipeline have: a tensor of this program without memory here, which says so to who computes with it.

Its place is kept, so that all ranks look alike: the same objects, names, shapes, optimizers. Recorded steps run their part; all
else that would read it is told who has it. Without that, torch's operators on lists read memory that is not there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from onecard import recorded
from onecard._torch.names import without_torch_function
from onecard.comm.base.record import name as call
from onecard.comm.base.record import user_line, words_of
from onecard.comm.world import world
from onecard.errors import StageError
from onecard.train.shard import note_stage, stages_of

_TOLD = frozenset((
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
_WRITES = frozenset((
    "__iadd__", "__idiv__", "__imul__", "__isub__", "__itruediv__", "__setitem__", "abs_", "add_", "addcdiv_", "addcmul_",
    "clamp_", "clamp_max_", "clamp_min_", "copy_", "div_", "fill_", "lerp_", "masked_fill_", "mul_", "nan_to_num_", "neg_",
    "pow_", "renorm_", "sqrt_", "sub_", "zero_",
))  # fmt: skip
"""What may be written into it: who has it does so, and here nobody reads it. None of these draws."""


class Absent(Tensor):
    """A tensor that only other ranks of a pipeline have."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = _name(func)
        if recorded.recorder is None and name not in _TOLD:
            x = next(x for x in _tensors((args, kwargs)) if isinstance(x, Absent))
            if name in ("__repr__", "__format__"):
                return f"{type(x).__name__}({_words(x)})"
            if name == "to" and _stays(x, args[1:], kwargs):
                return x
            if name.partition(".")[0] in _WRITES and _written_elsewhere(args, kwargs):
                return args[0]
            if name not in _ALIASES or _sets(func, x, args):
                raise StageError(_error(x, name))
            made = _plainly(func, args, kwargs)
            return _as_absent(made, x) if isinstance(made, Tensor) else made
        return _plainly(func, args, kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise StageError(_error(self, "pickle (torch.save)"))

    def __deepcopy__(self, memo: Any) -> Any:
        raise StageError(_error(self, "deepcopy"))


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
    if kind is not None:
        x.__class__ = kind  # type: ignore[assignment]


def _as_absent(made: Tensor, x: Tensor) -> Tensor:
    if type(made) in (Tensor, nn.Parameter):
        let_go(made, stages_of(x), words_of(x))
    return made


def _sets(func: Any, x: Tensor, args: Any) -> bool:
    """Whether ``x.data = y`` gives it another memory, which no step would read."""
    return getattr(func, "__name__", "") == "__set__" and len(args) > 1 and args[1] is not x


def _written_elsewhere(args: Any, kwargs: Any) -> bool:
    """Whether only an absent tensor is written to, with what its holders have as well."""
    into = args[0]
    if not isinstance(into, Absent) or (into.requires_grad and torch.is_grad_enabled()):
        return False
    others = [x for x in _tensors((args[1:], kwargs)) if isinstance(x, Absent)]
    return all(not stages_of(x) or {*stages_of(into)} <= {*stages_of(x)} for x in others)  # else its holder refuses


def _stays(x: Tensor, args: Any, kwargs: Any) -> bool:
    """Whether ``to`` has nothing to do: optimizers ask it of states that they load."""
    asked = [*args, *kwargs.values()]
    return all(each in (x.dtype, x.device, None, False) for each in asked)


def _plainly(func: Any, args: Any, kwargs: Any) -> Any:
    with without_torch_function():
        return func(*args, **kwargs)


def _tensors(x: Any) -> Any:
    if isinstance(x, Tensor):
        yield x
    elif isinstance(x, list | tuple):
        for each in x:
            yield from _tensors(each)
    elif isinstance(x, dict):
        for each in x.values():
            yield from _tensors(each)


def _name(func: Any) -> str:
    """A function's name; that of a property, of its getter and setter."""
    owner = getattr(func, "__self__", None)
    if getattr(func, "__name__", "") in ("__get__", "__set__", "__delete__"):
        ours = (
            name for name in ("grad", "data") if vars(Tensor).get(name) is owner
        )  # properties that patches put there
        return str(getattr(owner, "__name__", "")) or next(ours, "")
    return str(getattr(func, "__name__", func)).removesuffix(".default")


def _words(x: Tensor) -> str:
    stages = ", ".join(map(str, stages_of(x)))
    who = f"stage {stages} of the pipeline has" if stages else "other stages of the pipeline have"
    return f"{list(x.shape)} {str(x.dtype).removeprefix('torch.')}, which {who}"


def _error(x: Tensor, name: str) -> str:
    here = f"its memory here, on rank {world.get_rank()}, was given back"
    if name in _CONVERSIONS:
        return (
            f"{user_line()}: {name} of {words_of(x) or 'a tensor'} {_words(x)}: {here}. A model that is cut into stages keeps "
            "its dtype and device: convert it before the first call of the step (model.double() above "
            "oc.to_static(step, plan=...)); of a trained one oc.checkpoint.save(path, {'model': model}), then oc.checkpoint.load "
            "into a model that was converted when it was new"
        )
    return (
        f"{user_line()}: {name} of {words_of(x) or 'a tensor'} {_words(x)}: {here}. "
        "Computations with all parameters belong into the recorded step (clipping, averages: each rank does its own part); "
        "oc.checkpoint.save(path, {'model': model}) saves all stages as one model, and oc.checkpoint.load(path) on one process "
        "gives the whole of it"
    )
