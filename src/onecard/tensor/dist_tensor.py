"""DistTensor: a tensor that means what it means on one card, of which each rank holds a shard."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from onecard import recorded
from onecard._torch import names as _torch
from onecard.comm.agree.claims import Claim
from onecard.comm.base import record
from onecard.comm.base.state import Kept, home, machine
from onecard.comm.issue.run import run as run_steps
from onecard.errors import DispatchError
from onecard.moves import resharding
from onecard.moves.resharding import Step
from onecard.place.layout import Layout
from onecard.place.mesh import ProcessMesh
from onecard.tensor.aliasing import memory, strides
from onecard.tensor.dispatch.intercept import KEYS
from onecard.tensor.refusals import no_flat_form
from onecard.tensor.shown import shown
from onecard.tensor.spec import OWN, STALE, Spec

_make = Tensor._make_wrapper_subclass
# C code that asks a tensor for its memory, past all dispatch (``to_dlpack``), raises; it would read at address 0.
_has_no_memory = _torch.throw_on_data_ptr

as_one_card: Kept[bool] = Kept(bool)
"""Whether every rank runs one card's program as it is: then what is printed or pickled is the whole tensor."""
decomposing = 0  # how many of PyTorch's decompositions are running (see ``fallback``)


class DistTensor(Tensor):
    """One tensor on a mesh of processes. Operators, autograd, optimizers and modules use it like any tensor.

    Make one with ``shard_tensor`` or ``from_local``. ``shape`` is the whole shape; ``placements``, ``mesh`` and
    ``layout`` say where the parts are; ``to_local()`` is this rank's part, ``full_tensor()`` the whole.

    Source: ``DTensor`` of PyTorch and the distributed tensor of Paddle's auto-parallel.

    Example:
        >>> from onecard import ProcessMesh, Shard, shard_tensor
        >>> x = shard_tensor([1.0, 2.0, 3.0], ProcessMesh([0], ["x"]), [Shard(0)])
        >>> x * 2
        DistTensor([3] float32 [x=Shard(0)] on ProcessMesh([0], dim_names=['x'])
          local [3]: [2., 4., 6.])
    """

    # _local: this rank's shard, a plain tensor outside autograd. _spec: the rest. _memory: what is known of it (see
    # memory.py). _due: sums a pending gradient with others. _summed_by: what sums a parameter's; _blocks: what gathers it.
    # No __slots__: torch.utils.swap_tensors puts one in a plain parameter's place, wherever a program holds that.
    _local: Tensor
    _spec: Spec
    # Methods that convert.py defines.
    to_local: Callable[[], Tensor]
    full_tensor: Callable[[], Tensor]
    to_dtensor: Callable[[], DTensor]
    redistribute: Callable[..., DistTensor]
    wait: Callable[[], DistTensor]
    _memory: memory.Memory | None = None
    _due: Callable[[], None] | None = None
    _in_rows = False  # whether its part is rows, which settle where somebody asks for it (``tensor/rows``)
    _summed_by: Any = None
    _blocks: Any = None

    __torch_function__ = _torch.disabled_torch_function  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, local: Tensor, spec: Spec, requires_grad: bool = False) -> DistTensor:
        self = _make(
            cls,
            spec.shape,
            spec.stride,
            dtype=spec.dtype,
            device=spec.device,
            requires_grad=requires_grad,
            _extra_dispatch_keys=KEYS,
        )
        _has_no_memory(self)
        self._local, self._spec = local, spec
        return self

    @property
    def layout(self) -> Any:  # type: ignore[override]
        """How the tensor lies on its mesh: a ``Layout``.

        PyTorch's own Python code (decompositions, ``torch.masked``) expects a ``torch.layout`` under this name and gets that.
        """
        asked_by = sys._getframe(1).f_globals.get("__name__", "")
        return torch.strided if asked_by.startswith("torch.") else self._spec.layout

    @property
    def placements(self) -> tuple[Any, ...]:
        """One placement for each mesh axis."""
        return self._spec.layout.placements

    @property
    def mesh(self) -> ProcessMesh:
        """The mesh whose ranks hold the tensor."""
        return self._spec.layout.mesh

    process_mesh = mesh

    @property
    def data(self) -> Tensor:
        """The same values outside autograd; assigning replaces value and layout in place."""
        if self._blocks is not None:
            self._blocks.given(self)
        return Tensor.data.__get__(self)  # type: ignore[attr-defined]

    @data.setter
    def data(self, value: Tensor) -> None:
        spec = self._spec
        cut, plain = any(spec.layout.dims), not isinstance(value, DistTensor) and value.shape == self.shape
        if plain and spec.here and not spec.layout.pending and (as_one_card.here or not cut):
            made, whole = Spec.like(spec.layout, value, value.device), value.detach()  # each rank has it whole
            value = wrap(strides.place(made)(spec.layout.local_part(whole).clone()) if cut else whole, made)
        if not isinstance(value, DistTensor) or value.shape != self.shape or value.dtype != self.dtype:
            raise DispatchError(
                f"cannot assign {describe(value)} to the data of {spec!r}: "
                "want a DistTensor of the same shape and dtype (onecard.shard_tensor(value, mesh, placements))"
            )
        self._take(value)

    def _take(self, value: DistTensor) -> None:
        """Become an alias of another tensor: the same layout, the same memory."""
        value._refresh()
        mine = getattr(self, "_local", None)  # a row that is about to be spread has none yet
        if mine is not None and hasattr(mine, "refused"):  # what only other stages of a pipeline have stays theirs
            mine.data = value._local
            return
        self._local, self._spec, self._memory = value._local, value._spec, None
        if value._memory is not None or value._spec.layout.pending:
            memory.share(value, self)

    def _alias(self) -> DistTensor:
        """An alias of this tensor, outside autograd: the same layout, the same memory."""
        made = wrap(self._local, self._spec)
        if self._memory is not None or self._spec.layout.pending:
            memory.share(self, made)
        return made

    def _refresh(self) -> None:
        """Take a copy that stands for a view again, if what it was taken from was written to since."""
        if self._spec.alias == STALE:
            memory.refresh(self)

    def reduce_partial(self) -> DistTensor:
        """Sum what is pending, in place: the value stays, its layout loses the pending axes. Returns self.

        Operators do this by themselves the first time they need the value whole, so that no sum runs twice.
        """
        layout = self._spec.layout
        if layout.pending:
            self._become(layout.reduced(), "reduce_partial", "self", "asked for", explicit=True)
        return self

    settle = reduce_partial  # the name that it had first

    @recorded.moves
    def _become(self, target: Layout, op: str, operand: str, reason: str, explicit: bool) -> Tensor:
        """This rank's shard under another layout. A pending sum that is reduced stays reduced (see ``memory``)."""
        steps = self._steps_to(target, op, operand, reason, explicit)
        spec = self._spec
        shape = tuple(spec.shape)
        reduces = self._only_reduces(target)
        if not spec.here:
            if reduces:
                memory.adopt(self, self._local)
            return self._local
        if not reduces:
            made = run_steps(steps, self._local, shape) if steps else None
            return self._local if made is None else strides.named(strides.place(spec)(made), spec)
        memory.reduce_partial(self, lambda local, owned: run_steps(steps, local, shape, owned))
        return self._local

    def _only_reduces(self, target: Layout) -> bool:
        """Whether all that changes is that a pending value is made whole: then the tensor itself becomes whole."""
        return bool(self._spec.layout.pending) and target is self._spec.layout.reduced()

    def _steps_to(self, target: Layout, op: str, operand: str, reason: str, explicit: bool) -> tuple[Step, ...]:
        """The steps to another layout, which are about to run; who watches has been told."""
        self._refresh()
        spec = self._spec
        if spec.home is not home.here:
            spec.check_home(self._only_reduces(target))
        shape = tuple(spec.shape)
        steps = resharding.plan(shape, spec.dtype.itemsize, spec.layout, target, machine.here)
        if record.observers.here and spec.here:
            announce(steps, op, operand + record.name_of(self), shape, reason, explicit)
        if steps:  # else nothing is sent, and one rank may ask alone
            record.serving.here = (op, operand, shape)
        return steps

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        """What torch.compile asks first, and some libraries before they save. A graph would have to hold the messages; it
        cannot yet."""
        if as_one_card.here:  # who asks wants to know which tensors share memory; what is written is whole
            return ["_local"], self._spec
        raise no_flat_form(self._spec)

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], context: Any, size: Any, stride: Any) -> DistTensor:
        raise NotImplementedError("see __tensor_flatten__")

    def __deepcopy__(self, memo: dict[int, Any]) -> DistTensor:
        if id(self) in memo:
            return memo[id(self)]
        if not self.is_leaf:
            raise RuntimeError("only leaf tensors can be copied with deepcopy; use tensor.detach() first")
        self._refresh()
        copy: Any = DistTensor(self._local.clone(), self._spec.with_alias(OWN), self.requires_grad)
        if getattr(self, "_is_param", False):
            copy = torch.nn.Parameter(copy, self.requires_grad)
        memo[id(self)] = copy
        if self.grad is not None:
            copy.grad = self.grad.__deepcopy__(memo)
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        if as_one_card.here:
            whole = self._whole()
            is_parameter = getattr(self, "_is_param", False)
            return (torch.nn.Parameter(whole, self.requires_grad) if is_parameter else whole).__reduce_ex__(protocol)
        raise DispatchError(
            f"a DistTensor ({self._spec!r}) cannot be pickled (torch.save): each rank would save its shard as if it were the "
            "whole. onecard.save_state_dict(state, path) saves parts that load under any layout. For one plain file save "
            "x.full_tensor(): gather on every rank, whole = {name: onecard.unshard(x) for name, x in model.state_dict().items()},"
            " and write on one, if onecard.get_rank() == 0: torch.save(whole, path) (or save_file of safetensors)"
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        if as_one_card.here:
            return shown(self, self._whole())
        if self._local.numel() and not self._local.is_meta and not self._local.untyped_storage().nbytes():
            return f"DistTensor({self._spec!r} on {self.mesh!r}\n  on other ranks)"
        values = self._local if self._local.numel() <= 24 else self._local.flatten()[:6]
        part = "local summand" if self._spec.layout.pending else "local"
        text = repr(values.detach()).removeprefix("tensor(").removesuffix(")").split(", dtype")[0]
        if isinstance(self._memory, memory.UnderWay):  # who prints, perhaps on one rank, does not wait
            text = "under way"
        more = " ..." if self._local.numel() > 24 else ""
        grad = ", requires_grad=True" if self.requires_grad else ""
        kind = "DistParameter" if getattr(self, "_is_param", False) else "DistTensor"
        return f"{kind}({self._spec!r} on {self.mesh!r}{grad}\n  {part} {list(self._local.shape)}: {text}{more})"

    __str__ = __repr__

    def __format__(self, spec: str) -> str:
        return self.item().__format__(spec) if self.dim() == 0 else object.__format__(self, spec)

    def _whole(self) -> Tensor:
        detached: Any = self.detach()
        return detached.full_tensor()

    # Torch finds the device for this one and ``new`` (create.py) in the dispatch keys, and does not know ours (intercept.py).
    def new_tensor(self, *args: Any, **kwargs: Any) -> Tensor:
        """A plain tensor from data, of this one's dtype and device."""
        return torch.empty(0, dtype=self.dtype, device=self.device).new_tensor(*args, **kwargs)

    def untyped_storage(self) -> torch.UntypedStorage:
        """The memory of this rank's part: what tells tied weights apart, and what ``share_memory_`` shares."""
        memory.arrived(self)
        return self._local.untyped_storage()

    def data_ptr(self) -> int:
        """Where the tensor begins in memory. Who asks will read all of it from there, so this rank must have all of it."""
        if self._spec.layout.pending or self._local.shape != self.shape:
            raise DispatchError(
                f"data_ptr of {self._spec!r}: this rank's memory holds only its part. To save, gather on every rank and write "
                "on one: whole = {name: onecard.unshard(x).contiguous() for name, x in model.state_dict().items()}, "
                "model.save_pretrained(path, state_dict=whole). For a kernel of your own: x.to_local().data_ptr()"
            )
        memory.arrived(self)
        return self._local.data_ptr()

    def __copy__(self) -> DistTensor:
        """Another tensor object with the same memory, as ``copy.copy`` makes of a plain one."""
        self._refresh()
        made: Any = self._alias()
        if getattr(self, "_is_param", False):
            return torch.nn.Parameter(made, self.requires_grad)  # type: ignore[return-value]
        return made.requires_grad_(self.requires_grad)

    def __dlpack__(self, **options: Any) -> Any:
        return self._whole().__dlpack__(**options)

    def apply_(self, fn: Callable[[Any], Any]) -> Any:
        """Replace each element by what a Python function makes of it."""
        return self.copy_(self._whole().clone().apply_(fn))

    def tolist(self) -> Any:
        """The whole tensor as nested lists."""
        return self._whole().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """The whole tensor as an array (a copy on this rank)."""
        if self.requires_grad and not force:
            raise RuntimeError("Can't call numpy() on a DistTensor that requires grad. Use x.detach().numpy() instead.")
        return self._whole().numpy(force=force)

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        array = self._whole().numpy(force=True)
        return array if dtype is None else array.astype(dtype, copy=False)


def wrap(local: Tensor, spec: Spec) -> DistTensor:
    """A DistTensor outside autograd, as fast as can be."""
    self = _make(DistTensor, spec.shape, spec.stride, dtype=spec.dtype, device=spec.device, _extra_dispatch_keys=KEYS)
    _has_no_memory(self)
    self._local, self._spec = local, spec
    return self


def wrap_view(local: Tensor, spec: Spec) -> DistTensor:
    """``wrap`` for results of views: in inference mode autograd wants a view of an ordinary tensor to be ordinary."""
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False):
            return wrap(local, spec)
    return wrap(local, spec)


def copies_claim(name: str, x: DistTensor) -> Claim:
    """What the layout of a tensor promises: equal copies on the ranks of each axis that neither cuts it nor is pending."""
    spec, place = x._spec, x.mesh.coordinate()
    part = tuple(i for axis, i in enumerate(place or ()) if not _is_copied(spec.layout, axis))
    layout, shape = spec.layout.opened(spec.shape)
    local = x._local.reshape(layout.local_shape(shape)) if spec.layout.merged else x._local
    return Claim(f"{name} {spec!r}", local, "promises equal copies", COPIES, part, layout.local_offset(shape))


COPIES = (
    "Something changed a copy, or it never was one: a write on one rank to x.data or x.to_local(), a random number drawn on "
    "one rank only, or a from_local or local_map that says Replicate() of what is a summand, Partial(), or a part, Shard(d). "
    "The lines before this one have passed the check"
)


def has_copies(x: DistTensor) -> bool:
    """Whether several ranks hold the same part of a tensor."""
    return bool(copied_axes(x._spec.layout))


def copied_axes(layout: Layout) -> tuple[int, ...]:
    """The axes along which several ranks hold the same."""
    return tuple(a for a, size in enumerate(layout.mesh.shape) if size > 1 and _is_copied(layout, a))


def _is_copied(layout: Layout, axis: int) -> bool:
    return layout.dim_of(axis) is None and all(axis != pending for pending, _ in layout.pending)


def announce(
    steps: tuple[Step, ...],
    op: str,
    operand: str,
    shape: tuple[int, ...],
    reason: str,
    explicit: bool,
    tensors: int = 1,
) -> None:
    """Tell the observers of steps that are about to run."""
    line = record.user_line()
    for step in steps:
        record.tell(record.Notice(step, op, operand, shape, reason, line, explicit, tensors))


def describe(value: Any) -> str:
    """A value in a few words, for errors."""
    if isinstance(value, DistTensor):
        return repr(value._spec)
    if isinstance(value, Tensor):
        return f"a plain tensor {list(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    return repr(value)
