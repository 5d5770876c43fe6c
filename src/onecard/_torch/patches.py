"""Every patch of torch, of json and wandb: what is put in place of what, what a program notices, when and how
it is made and undone.

Nothing else in onecard changes torch for longer than a call. A patch is made when something first needs it, acts on onecard's
tensors, parameters and optimizers only, and is undone by ``onecard.unpatch()``. ``TABLE`` names all of them: making one that it
does not name is an error, and a test compares torch before and after with it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

TENSOR, SHM, FLEET = "the first distributed tensor", "the first shm group", "fleet.init"
SHARDED = "fleet.group_sharded_parallel"
NAMED = "the first named random state (`get_rng_state_tracker().add`)"
ABSENT = "the first recorded step in stages"
WANDB = "the first distributed tensor, where wandb is imported"
COMPILER = "the first distributed tensor or fleet.init, where torch's compiler is imported"


@dataclass(frozen=True, slots=True)
class Patch:
    """One patch.

    Attributes:
        what: its address in torch.
        when: what makes it.
        notice: what a program notices that has none of onecard's tensors or parameters; "" if nothing.
        purpose: what it is for.
    """

    what: str
    when: str
    purpose: str
    notice: str = ""


_COPY = "a call is one of Python's, too"
_LOOK = "a look at each parameter in each step"

TABLE: dict[str, Patch] = {
    patch.what: patch
    for patch in (
        Patch("torch.optim.optimizer._foreach_supported_types", TENSOR, "optimizers take their list operators for DistTensor"),
        Patch("torch.utils._foreach_utils._foreach_supported_types", TENSOR, "clipping takes its list operators for DistTensor"),
        Patch("torch.nn.Module.load_state_dict", TENSOR, "what is loaded takes the layout of what it is loaded into"),
        Patch(
            "torch.optim.optimizer._global_optimizer_pre_hooks", TENSOR,
            "an optimizer of parameters that shard_layer has replaced is refused; states that were loaded are laid out",
            "two calls per optimizer step, which compare one attribute each",
        ),
        Patch(
            "torch.Tensor.data", TENSOR, "a plain tensor may be assigned a distributed one", "an assignment is a Python call"
        ),
        Patch(
            "torch.nn.Module._apply", TENSOR,
            "conversions that cannot be (`model.double()` of stages) are refused on all ranks",
        ),
        Patch(
            "torch.nn.utils.parametrize._maybe_set", TENSOR,
            "a parametrization of a distributed parameter is put on and taken off while recorded steps know it",
        ),
        Patch("torch.nn.modules.rnn.RNNBase.flatten_parameters", TENSOR, "weights whose memory is ours stay there, on GPUs"),
        Patch("json.JSONEncoder.default", TENSOR, "encoders that know plain tensors (wandb's) are given a whole one"),
        Patch("wandb.util.json_friendly", WANDB, "`config` has the values of a distributed tensor, as of a plain one"),
        Patch("torch._dynamo.trace_rules.SKIP_DIRS", COMPILER, "the compiler does not trace onecard's own functions"),
        Patch("torch.nn.utils.get_total_norm", TENSOR, "gradients that lie on several meshes have one norm"),
        Patch(
            "torch.autograd._engine_run_backward", TENSOR,
            "a loss that a pipeline has trained says that it has no graph; blocks that run again take values of other stages; "
            "a plain gradient of a distributed value lies as that does",
        ),
        Patch("torch.distributed.monitored_barrier", SHM, "shm has one, too"),
        Patch("torch.distributed.split_group", SHM, "shm has one, too"),
        Patch("torch.distributed.distributed_c10d._maybe_attach_flight_recorder", SHM, "it asks groups for what only C++ has"),
        Patch("torch.Tensor.grad", FLEET, "who reads a gradient has it summed first", "a read is a Python call"),
        Patch("fleet: torch.nn.Module._apply", FLEET, "a parameter that is converted stays a part of the same whole"),
        Patch("torch.nn.Parameter.__deepcopy__", FLEET, "a copied parameter stays a part of the same whole"),
        Patch(
            "torch.nn.modules.module._global_parameter_registration_hooks", FLEET, "what takes its place is a part, too"
        ),
        Patch("fleet: torch.optim.optimizer._global_optimizer_pre_hooks", FLEET, "gradients are summed first", _LOOK),
        Patch("torch.optim.optimizer._global_optimizer_post_hooks", FLEET, "the end of a step", _LOOK),
        Patch("torch.nn.utils.clip_grad_norm_", FLEET, "norms are of all ranks' parts"),
        Patch(
            "fleet: torch.nn.utils.get_total_norm", FLEET,
            "the same, of gradients that were read of parameters, and of parameters that are cut",
        ),
        Patch("torch.nn.utils.clip_grad_value_", FLEET, "gradients are summed before they are clipped"),
        Patch(
            "fleet: torch.autograd._engine_run_backward", FLEET,
            "`backward(inputs=)` knows the parameters of ZeRO; `autograd.grad` gives sums over ranks; a pipeline's loss, too",
        ),
        Patch(
            "torch.distributed.checkpoint.state_dict._iterate_valid_model_state", SHARDED,
            "states of an optimizer find the parameters that it holds",
        ),
        Patch(
            "torch.utils.checkpoint._checkpoint_without_reentrant_generator", NAMED,
            "what runs again in backward draws from named random states what it drew first",
        ),
        Patch("torch.utils.checkpoint.CheckpointFunction.forward", NAMED, "the same, with `use_reentrant=True`"),
        Patch("torch.tensor", ABSENT, "a copy of a parameter that another stage has is as absent as that is", _COPY),
        Patch("torch.as_tensor", ABSENT, "the same", _COPY),
        Patch("torch.asarray", ABSENT, "the same", _COPY),
        Patch("torch.Tensor.new_tensor", ABSENT, "the same", _COPY),
        Patch("torch.amp.GradScaler.unscale_", FLEET, "an infinity on one rank skips the step on all"),
        Patch("torch.amp.GradScaler.step", FLEET, "the same"),
        Patch("torch.amp.GradScaler.update", FLEET, "the same"),
    )
}  # fmt: skip
"""By address."""


@dataclass(slots=True)
class _Made:
    do: Callable[[], Any]
    undo: Callable[[], Any]
    stays: Callable[[], bool]  # somebody has put a patch on top, which goes on calling this one


_made: dict[str, _Made] = {}
_first: list[Callable[[], None]] = []  # what the first distributed tensor makes
begun = False


def _check(what: str) -> None:
    if what not in TABLE:
        raise KeyError(f"{what}: a patch that onecard._torch.patches.TABLE does not name")


def _make(what: str, do: Callable[[], Any], undo: Callable[[], Any], stays: Callable[[], bool] = lambda: False) -> None:
    _check(what)
    if what not in _made:
        do()
        _made[what] = _Made(do, undo, stays)


def replace(what: str, holder: Any, name: str, make: Callable[[Any], Any], *, beside: Iterable[Any] = ()) -> None:
    """Put ``make(torch's)`` in the place of ``holder.name``, once.

    Args:
        what: its name in ``TABLE``.
        holder: module or class.
        name: of its attribute.
        make: what is given what was there.
        beside: other modules that have it by the same name.
    """
    _check(what)
    if what in _made:
        return
    before = vars(holder).get(name)
    torchs = getattr(holder, name)
    ours = make(torchs)
    # One that wraps itself is a loop to whoever unwraps it.
    if ours is not torchs and callable(ours) and callable(torchs):
        ours = functools.wraps(torchs)(ours)

    def do() -> None:
        for each in (holder, *beside):
            setattr(each, name, ours)

    def undo() -> None:
        for each in (holder, *beside):
            if before is None:
                delattr(each, name)
            else:
                setattr(each, name, before)

    _make(what, do, undo, lambda: vars(holder).get(name) is not ours)


def within(what: str, function: Callable[..., Any], make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Put ``make(inner)`` in the place of what a decorated function calls: seen by who imported the function before, too.

    ``torch.nn.utils.clip_grad_norm_`` and its like are decorated by ``_no_grad``, which calls its ``func``. In a torch where they
    are not, nothing is changed.
    """
    free = function.__code__.co_freevars
    if "func" in free and what not in _made:
        cell = function.__closure__[free.index("func")]  # type: ignore[index]
        torchs = cell.cell_contents
        ours = make(torchs)
        _make(what, lambda: setattr(cell, "cell_contents", ours), lambda: setattr(cell, "cell_contents", torchs))


def hook(what: str, register: Callable[..., Any], *hooks: Callable[..., Any]) -> None:
    """Register global hooks, once: ``register(hook)`` gives a handle with ``remove()``."""
    handles: list[Any] = []

    def undo() -> None:
        while handles:
            handles.pop().remove()

    _make(what, lambda: handles.extend(map(register, hooks)), undo)


def add(what: str, entries: list[Any], *more: Any) -> None:
    """Append to a list of torch's, once."""

    def undo() -> None:
        for each in more:
            entries.remove(each)

    _make(what, lambda: entries.extend(more), undo)


def with_first_tensor(install: Callable[[], None]) -> None:
    """Have ``install`` called when the first distributed tensor is made."""
    _first.append(install)


def begin() -> None:
    """A distributed tensor is made."""
    global begun
    if not begun:
        begun = True
        for install in _first:
            install()


def made() -> list[Patch]:
    """The patches that can be undone now, in the order in which they were made.

    Example:
        >>> import torch, onecard
        >>> _ = onecard.shard_tensor(torch.ones(2), onecard.ProcessMesh([0], ["x"]), [onecard.Replicate()])
        >>> "torch.nn.Module.load_state_dict" in [patch.what for patch in onecard.unpatch.made()]
        True
    """
    return [TABLE[what] for what in _made]


class unpatch:
    """Leave torch as it came: undo every patch.

    Called, it lasts until onecard needs a patch again: the next distributed tensor of a new kind, the next ``fleet.init``. As a
    context (``with onecard.unpatch(): ...``) it ends with the block. Distributed tensors and fleet's parameters that are used
    meanwhile lose what ``TABLE`` says. What somebody has patched on top of a patch stays as it is.

    Example:
        >>> import torch, onecard
        >>> _ = onecard.shard_tensor(torch.ones(2), onecard.ProcessMesh([0], ["x"]), [onecard.Replicate()])
        >>> with onecard.unpatch():
        ...     hasattr(torch.nn.Module.load_state_dict, "__wrapped__")
        False
    """

    made = staticmethod(made)

    def __init__(self) -> None:
        global begun
        undone: dict[str, _Made] = {}
        self._begun, begun = begun, False
        for what, patch in reversed([*_made.items()]):
            if not patch.stays():  # asked now: what lay on it may have been ours
                patch.undo()
                undone[what] = _made.pop(what)
        self._undone = dict(reversed(undone.items()))

    def __enter__(self) -> unpatch:
        return self

    def __exit__(self, *_: Any) -> None:
        global begun
        begun = self._begun or begun
        for what, patch in self._undone.items():
            _make(what, patch.do, patch.undo, patch.stays)
