"""All that onecard takes from torch without torch's promise to keep it: each name, what it is for, and what takes its place.

The names that are imported are needed: a torch without one of them is one for which onecard has to be changed, and
``tests/test_torch_names.py`` says which are missing. Those that ``_take`` looks up have something in their place. Operators
(``torch.ops.aten``) are not listed here: the table of rules says which ones there are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache, reduce
from importlib import import_module
from typing import Any, cast
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import DispatchKey, DispatchKeySet  # in which order torch asks who runs an operator: intercept
from torch._C._distributed_c10d import AllgatherOptions, Work  # what a backend gets, and what it gives back: shm
from torch._ops import OpOverload, OpOverloadPacket  # what a rule is registered for
from torch.utils._mode_utils import no_dispatch  # outside all dispatch modes, as below autograd: fallback
from torch.utils._python_dispatch import (
    TorchDispatchMode,  # sees every operator of a block: deferred_init, coverage, one_card_random
    _get_current_dispatch_mode,  # and, for the samples of rules, only those that are left whole
    _pop_mode_temporarily,
)
from torch.utils._pytree import (  # tensors within lists, tuples, dicts
    SUPPORTED_NODES,
    register_pytree_node,
    tree_flatten,
    tree_unflatten,
    treespec_dumps,
    treespec_loads,
)

from onecard._torch.leaves import gradient as gradient
from onecard._torch.leaves import set_data as set_data
from onecard._torch.leaves import set_gradient as set_gradient
from onecard._torch.nests import tree_leaves, tree_map

__all__ = [
    "SUPPORTED_NODES", "AllgatherOptions", "DispatchKey", "DispatchKeySet", "OpOverload", "OpOverloadPacket", "TorchDispatchMode",
    "Work", "no_dispatch", "register_pytree_node", "tree_flatten", "tree_leaves", "tree_map", "tree_unflatten", "treespec_dumps",
    "treespec_loads",
]  # fmt: skip

missing: list[str] = []
"""The names that this torch does not have, so that something else takes their place."""

# Attributes of torch's objects: read where they are needed, or overridden in a class of ours.
ATTRIBUTES = {
    "torch.ops.aten.mm.default._schema": "an operator's arguments: rules/call.py",
    "torch.ops.aten.mm._qualified_op_name": "an operator's name, for an error: rules/register.py",
    "torch.Tensor._is_zerotensor": "a tangent that has no memory, which is not compared: comm/sparse_check.py",
    "torch.Tensor._base": "what a view is of: graph/recorder.py",
    "torch.Tensor._is_view": "whether a write must reach another tensor: tensor/dispatch/scalar.py, tensor/aliasing/setitem.py",
    "torch.Tensor._make_subclass": "a tensor of deferred_init: tensor/deferred/init.py",
    "torch.Tensor._make_wrapper_subclass": "a DistTensor: tensor/dist_tensor.py",
    "torch.Tensor._backward_hooks": "hooks: fleet/zero/local_parameter.py, pipeline/run/waiting_hooks.py",
    "torch.Tensor._post_accumulate_grad_hooks": "hooks: fleet/zero/local_parameter.py, pipeline/run/waiting_hooks.py",
    "torch.Tensor._nnz": "how many elements a sparse tensor has: comm/shm/sparse.py",
    "torch.Tensor._nested_tensor_size": "a batch of sequences in evaluation: modules/transformer.py",
    "torch.UntypedStorage._cdata": "which memory a tensor has: tensor/aliasing/memory.py, tensor/deferred/calls.py",
    "torch.amp.GradScaler._found_inf_per_device": "whether a gradient is infinite on any rank: fleet/scaling.py",
    "torch.nn.Module._apply": "exchanges parameters, of which is known what they are: fleet/carried.py",
    "torch.distributed.ProcessGroup._register_backend": "NCCL beside shm: comm/shm/other_devices.py",
    "torch.distributed.elastic.agent.server.local_elastic_agent.LocalElasticAgent._start_workers": "launch/_agent.py",
    "torch.distributed.elastic.agent.server.local_elastic_agent.LocalElasticAgent._monitor_workers": "launch/_agent.py",
    "torch.distributed.elastic.agent.server.local_elastic_agent.LocalElasticAgent._restart_workers": "launch/_agent.py",
    "torch.distributed.elastic.agent.server.local_elastic_agent.LocalElasticAgent._shutdown": "launch/_agent.py",
}
# The same of objects that have them only once they are made or imported: the agent's processes, a module's contents.
MADE = (
    "_pcontext", "_worker_group", "_parameters", "_buffers", "_timeout", "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks", "_save_state_dict", "_load_state_dict", "_flat_weights",
)  # fmt: skip


def _take(path: str, instead: Any) -> Any:
    """The object at a path of torch, or, where this torch has none there, what takes its place."""
    module, _, name = path.partition(":")
    try:
        return reduce(getattr, name.split("."), import_module(module))
    except (ImportError, AttributeError):
        missing.append(path)
        return instead


# -- tensors and dispatch ------------------------------------------------------------------------------------------------

# Whether a subclass gets functions before torch takes them apart; ours want none. torch documents it for subclasses.
disabled_torch_function = torch._C._disabled_torch_function_impl
# Whether autocast is on for any kind of device; torch's documented functions ask of one.
any_autocast = torch._C._is_any_autocast_enabled
default_device = torch._C._get_default_device
schemas_of = torch._C._jit_get_schemas_for_operator  # which overloads an operator has: static/file/targets.py
# A key that no tensor of torch's has marks a DistTensor.
dispatch_key = torch._C._dispatch_key_parse
# Operators that a handler calls go to another handler again, although torch has switched that off around it.
SetExcluded = torch._C._SetExcludeDispatchKeyGuard
# A deferred tensor's own operators, run without being written down.
DisableDispatch = torch._C._DisableTorchDispatch
without_torch_function = torch._C.DisableTorchFunctionSubclass
as_it_is = torch._C.DisableTorchFunction  # modes, too
whole_mode = (_get_current_dispatch_mode, _pop_mode_temporarily)

# C code that asks a tensor without memory for it raises. In its place: it reads at address 0, as of any such subclass.
throw_on_data_ptr: Callable[[Tensor], None] = _take("torch._C:_set_throw_on_mutable_data_ptr", lambda tensor: None)
# How many tensors share a memory. In its place: many, so that nothing is written in place that could be copied.
storage_users: Callable[[int], int] = _take("torch._C:_storage_Use_Count", lambda storage: 1 << 30)
# Whether a dispatch mode is on. In its place: perhaps, at 11 us for each random operator.
modes_on: Callable[[], int] = _take("torch._C:_len_torch_dispatch_stack", lambda: 1)
# Whether a tracer runs with fake tensors. In its place: no, so that a random operator under such a tracer draws a constant.
fake_mode: Callable[[], Any] = _take("torch._guards:detect_fake_mode", lambda: None)
# Whether make_fx records what runs now, and whether what is made now has no data: comm/trace.py. In their place: never, so that
# messages are lost from a graph.
_mode_of: Callable[[Any], Any] = _take("torch._C:_get_dispatch_mode", lambda key: None)
_PROXY = _take("torch._C:_TorchDispatchModeKey.PROXY", None)
_FAKE = _take("torch._C:_TorchDispatchModeKey.FAKE", None)


# Local tensors' operators without autograd, as they run below DistTensor. In its place: no gradients, at a part of a microsecond
# for each operator.
below_autograd: Callable[[], AbstractContextManager[Any]] = _take("torch._C:_AutoDispatchBelowAutograd", torch.no_grad)
# Functions of torch that a compiled recording calls in place of operators. In its place: an empty module, and the operators.
functions_of_nn: Any = _take("torch._C:_nn", None)
# oneDNN's product on plain tensors, which a recording may choose. In its place: none; torch's own is taken.
onednn_linear: Any = _take("torch:ops.mkldnn._linear_pointwise.default", None)


def inductor() -> Callable[..., Any] | None:
    """What compiles a graph for given tensors (``backend="inductor"``), imported when it is asked for; None: there is none."""
    return _take("torch._inductor:compile", None)


# The number of the run of autograd's engine that runs what runs now, -1: none does. In its place: none, so that backward
# operators are printed as forward ones.
graph_task: Callable[[], int] = _take("torch._C:_current_graph_task_id", lambda: -1)
# Autograd's number of the next call, and the call whose backward runs. In their place: none, so that a step is cut into stages by
# what its gradients are made of.
_sequence: Callable[[], int] = _take("torch.autograd:_get_sequence_nr", lambda: 0)
_current_node: Callable[[], Any] = _take("torch._C:_current_autograd_node", lambda: None)
# Dispatch modes off and on again. In their place: none, so that a step under such a mode is recorded as the mode makes it.
_pop_mode: Callable[[], Any] | None = _take("torch.utils._python_dispatch:_pop_mode", None)
_push_mode: Callable[[Any], None] | None = _take("torch.utils._python_dispatch:_push_mode", None)


# The hooks of all modules and of all optimizers. In their place: none, so that a recording does not notice one that is added.
hooks_of_all: tuple[dict[int, Any], ...] = (
    _take("torch.nn.modules.module:_global_forward_hooks", {}), _take("torch.nn.modules.module:_global_forward_pre_hooks", {}),
    _take("torch.nn.modules.module:_global_backward_hooks", {}), _take("torch.nn.modules.module:_global_backward_pre_hooks", {}),
    _take("torch.optim.optimizer:_global_optimizer_pre_hooks", {}),
    _take("torch.optim.optimizer:_global_optimizer_post_hooks", {}),
)  # fmt: skip


def in_backward() -> bool:
    """Whether autograd's engine runs what runs now."""
    return graph_task() != -1


def call_number() -> int | None:
    """Autograd's number of the call that runs now; in backward of the call whose backward it is, None where there is none."""
    if graph_task() == -1:
        return int(_sequence()) - 1
    node = _current_node()
    number = None if node is None else int(node._sequence_nr())
    return None if number is None or number >= 1 << 63 else number  # a leaf's own node has the largest there is


# What ``backward()`` and ``autograd.grad`` call. In its place: nothing is put around them.
_engine: Callable[..., Any] | None = _take("torch.autograd:_engine_run_backward", None)


def engine_by(make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> AbstractContextManager[Any]:
    """Inside, each backward pass is a call of ``make(engine)``."""
    if _engine is None:
        return nullcontext()
    return patch.object(torch.autograd, "_engine_run_backward", make(torch.autograd._engine_run_backward))


@contextmanager
def beneath(mode: TorchDispatchMode) -> Iterator[None]:
    """Inside, a mode is on that sees what all others leave."""
    others = []
    while _pop_mode is not None and _push_mode is not None and modes_on():
        others.append(_pop_mode())
    try:
        with mode:
            for other in reversed(others):
                _push_mode(other)  # type: ignore[misc]
            try:
                yield
            finally:
                for _ in others:
                    _pop_mode()  # type: ignore[misc]
    finally:
        for other in reversed(others):
            _push_mode(other)  # type: ignore[misc]


# Modes by which a policy of recompute keeps results. In their place: none, so that any mode may be one.
mode_stack: Any = _take("torch.utils._python_dispatch:_get_current_dispatch_mode_stack", None)
_keeping: tuple[Any, Any] = (
    _take("torch.utils.checkpoint:_CachingTorchDispatchMode", None),
    _take("torch.utils.checkpoint:_CachedTorchDispatchMode", None),
)


def keeps_results() -> bool:
    """Whether a policy of recompute may keep what operators give now."""
    if not modes_on():
        return False
    known = tuple(kind for kind in _keeping if kind is not None)
    return mode_stack is None or len(known) < 2 or any(isinstance(mode, known) for mode in mode_stack())


def count_writes(func: OpOverload, args: Any) -> None:
    """Count for autograd what an operator on lists has written: under a mode its kernels do not (wrong gradients of views)."""
    if _writes_lists(func) and not torch.is_inference_mode_enabled():
        torch.autograd.graph.increment_version(args[0])


@lru_cache(maxsize=4096)
def _writes_lists(func: OpOverload) -> bool:
    return func._schema.name.startswith("aten::_foreach") and any(a.alias_info for a in func._schema.arguments[:1])


def traces() -> bool:
    """Whether ``make_fx`` is recording what runs now."""
    return _mode_of(_PROXY) is not None


def fake_tensors() -> Any:
    """A mode in which all tensors that are made have no data; imported at its first use, which takes seconds."""
    mode = import_module("onecard._torch.fakes").remembering()()
    # A buffer is copied with its attributes, its mode among them: as another mode it could not be computed with any more.
    mode.__deepcopy__ = lambda memo: mode
    return mode


def no_fakes() -> AbstractContextManager[Any]:
    """Inside, tensors that are made have data."""
    return import_module("torch._subclasses.fake_tensor").unset_fake_temporarily() if fakes() else nullcontext()


def fakes() -> bool:
    """Whether tensors that are made now have no data."""
    return _mode_of(_FAKE) is not None


# All operators. In its place: those on lists of tensors and the fused ones, by their functions in the module torch.
operator_names: Callable[[], list[str]] = _take("torch._C:_dispatch_get_all_op_names", lambda: [*_list_operators()])


def _list_operators() -> Iterator[str]:
    for name in dir(torch):
        if name.startswith(("_foreach_", "_fused_")) and hasattr(torch.ops.aten, name):
            overloads = getattr(torch.ops.aten, name).overloads()
            yield from (f"aten::{name}" if o == "default" else f"aten::{name}.{o}" for o in overloads)


# Operators that torch takes apart. In its place: none, so that their out= variants are taken apart as well.
registrations: Callable[[str], list[str]] = _take(
    "torch._C:_dispatch_get_registrations_for_dispatch_key", lambda key: []
)
# torch's decompositions of operators without a row. In its place: none; they gather.
decompositions: dict[Any, Callable[..., Any]] = _take("torch._decomp:decomposition_table", {})

# -- modules, optimizers, data ---------------------------------------------------------------------------------------------

# Norms of several tensors, and the types for which torch.optim and clip_grad_norm_ use foreach operators; else one for each.
foreach_norm: Any = _take("torch:_foreach_norm", lambda parts, p: [torch.linalg.vector_norm(x, p) for x in parts])
foreach_types: dict[str, list[Any]] = {
    "torch.optim.optimizer._foreach_supported_types": _take("torch.optim.optimizer:_foreach_supported_types", []),
    "torch.utils._foreach_utils._foreach_supported_types": _take(
        "torch.utils._foreach_utils:_foreach_supported_types", []
    ),
}


def hook_first(p: Tensor, hook: Callable[[Tensor], Tensor | None]) -> None:
    """Call a hook of a leaf before those that it has: autograd goes by when each was put in, whatever the dict's order is."""
    handle = p.register_hook(hook)
    (hooks := cast(Any, p)._backward_hooks).update({key: hooks.pop(key) for key in [*hooks] if key != handle.id})


def has_hooks_beside(p: Any) -> bool:
    """Whether somebody has hooked a leaf besides one of ours."""
    return len(p._backward_hooks) > 1


def queue_callback(done: Callable[[], None]) -> None:
    """From within ``backward``: call a function when it is done."""
    torch.autograd.Variable._execution_engine.queue_callback(done)


def saved_tensor(node: Any, name: str) -> Tensor | None:
    """What a node of autograd keeps for its backward; None if nothing, or what hooks (of a checkpoint) made of it."""
    raw = getattr(node, f"_raw_saved_{name}", None)
    return None if raw is None or raw.unpack_hook is not None else getattr(node, f"_saved_{name}")


def has_factors(node: Any) -> bool:
    """Whether a node that made ``a + b @ c`` multiplied its summands."""
    return not node._saved_alpha == node._saved_beta == 1


def sparse(at: Tensor, values: Tensor, shape: Any) -> Tensor:
    """``torch.sparse_coo_tensor`` of indices that are right: torch 2.11 warns where only its argument says so."""
    with torch.sparse.check_sparse_tensor_invariants(enable=False):
        return torch.sparse_coo_tensor(at, values, shape)


def has_listeners(p: Tensor) -> bool:
    """Whether a hook is told of what backward adds to a leaf's gradient."""
    return bool(p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None))


def reads_by_index(loader: Any) -> bool:
    """Whether a loader's dataset is indexed, not iterated over."""
    return not isinstance(loader.dataset, torch.utils.data.IterableDataset)


# -- process groups ----------------------------------------------------------------------------------------------------------

_C10D = "torch.distributed.distributed_c10d"


def _store_of_all() -> dist.Store:
    if not dist.is_initialized():
        raise ValueError("there is no process group")
    return dist.group.WORLD.get_group_store()  # type: ignore[union-attr]


# The store in which the ranks met. In its place: the one under the group of all, which the group shares with its backend.
default_store: Callable[[], dist.Store] = _take(f"{_C10D}:_get_default_store", _store_of_all)
# Where a group sends Python objects from. In its place: a GPU under NCCL, else the CPU.
object_device: Callable[[Any], torch.device] = _take(
    f"{_C10D}:_get_object_coll_device",
    lambda group: torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu"),
)
# Makers of backends by name, ours among them. In its place: nobody's but ours.
backend_makers: dict[str, Any] = _take("torch.distributed:Backend._plugins", {})
# What a maker of a backend is given.
DistributedBackendOptions = _take("torch._C._distributed_c10d:_DistributedBackendOptions", None)
# A functional collective's group, and how its result is waited for. In their place: torch's own kernel, which shm has not.
resolve_group: Callable[[str], Any] | None = _take("torch._C._distributed_c10d:_resolve_process_group", None)
register_work: Callable[[Tensor, Any], None] | None = _take("torch._C._distributed_c10d:_register_work", None)
_world = _take(f"{_C10D}:_world", None)


def backend_config(group: Any, otherwise: str) -> str:
    """Which backends a group was made of, "cpu:shm,cuda:nccl"."""
    return otherwise if _world is None else _world.pg_backend_config.get(group, otherwise)


def group_named(name: str) -> AbstractContextManager[Any]:
    """Inside, a group made by its members alone gets this name; torch would count the groups that each of them has made.

    In its place: torch's name, which members that have made different numbers of groups wait for in vain.
    """
    if _take(f"{_C10D}:_hash_ranks_to_str", None) is None:
        return nullcontext()
    return patch.object(import_module(_C10D), "_hash_ranks_to_str", lambda _: name)


@contextmanager
def without_weak_weights(module: torch.nn.Module) -> Iterator[None]:
    """Inside, no recurrent layer of a module refers to its weights weakly: what is referred to so cannot be swapped."""
    layers = [m for m in module.modules() if isinstance(m, torch.nn.RNNBase)]
    for layer in layers:
        layer._flat_weight_refs = []
    try:
        yield
    finally:
        for layer in layers:
            layer._init_flat_weights()
