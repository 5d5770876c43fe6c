"""DistTensor: a tensor that means what it means on one card, of which each rank holds a shard."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement
from torch.utils.weak import TensorWeakRef

from onecard import reshard as planner
from onecard.comm import record
from onecard.comm.run import run as run_steps
from onecard.errors import DispatchError
from onecard.layout import Layout
from onecard.mesh import ProcessMesh
from onecard.reshard import Step
from onecard.tensor.spec import Spec

_make = Tensor._make_wrapper_subclass

decomposing = 0  # how many of PyTorch's decompositions are running (see ``fallback``)


class DistTensor(Tensor):
    """One tensor on a mesh of processes. Operators, autograd, optimizers and modules use it like any tensor.

    Make one with ``shard_tensor`` or ``from_local``. ``shape`` is the whole shape; ``placements``, ``mesh`` and
    ``layout`` say where the parts are; ``to_local()`` is this rank's part, ``full_tensor()`` the whole.
    """

    # _local: this rank's shard, a plain tensor outside autograd. _spec: the rest.
    # _views: the pending tensors that share this one's memory, itself included; unset if there are none.
    # _cut_off: set if this would be a view on one card but had to be copied, so writes cannot reach the original.
    __slots__ = ("_cut_off", "_local", "_spec", "_views")
    _local: Tensor
    _spec: Spec
    _cut_off: str
    # Methods that convert.py defines.
    to_local: Callable[[], Tensor]
    full_tensor: Callable[[], Tensor]
    to_dtensor: Callable[[], DTensor]
    redistribute: Callable[[Sequence[Placement]], DistTensor]
    _views: list[TensorWeakRef]

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, local: Tensor, spec: Spec, requires_grad: bool = False) -> DistTensor:
        self = _make(cls, spec.shape, spec.stride, dtype=spec.dtype, device=spec.device, requires_grad=requires_grad)
        self._local, self._spec = local, spec
        return self

    @property
    def layout(self) -> Any:  # type: ignore[override]
        """How the tensor lies on its mesh: a ``Layout``.

        PyTorch's own decompositions expect a ``torch.layout`` under this name; while one runs, they get that.
        """
        return torch.strided if decomposing else self._spec.layout

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
        """The same values outside autograd; assigning replaces the value and the layout in place."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        if not isinstance(value, DistTensor) or value.shape != self.shape or value.dtype != self.dtype:
            raise DispatchError(
                f"cannot assign {describe(value)} to the data of {self._spec!r}: "
                "want a DistTensor of the same shape and dtype (onecard.shard_tensor(value, mesh, placements))"
            )
        self._local, self._spec = value._local, value._spec.with_layout(value._spec.layout)

    def settle(self) -> DistTensor:
        """Sum what is pending, in place: the value stays, its layout loses the pending axes. Returns self.

        Operators do this by themselves the first time they need the value whole, so that no sum runs twice.
        """
        layout = self._spec.layout
        if layout.pending:
            self._become(layout.settled(), "settle", "self", "asked for", explicit=True, force=True)
        return self

    def _become(
        self, target: Layout, op: str, operand: str, reason: str, explicit: bool, force: bool = False
    ) -> Tensor:
        """This rank's shard under another layout.

        A pending sum that is settled stays settled, so that no sum runs twice: in place, for this tensor and for the
        views of its memory, if nobody else sees that memory.
        """
        spec = self._spec
        source = spec.layout
        steps = planner.plan(tuple(spec.shape), spec.dtype.itemsize, source, target)
        if record.observers:
            announce(steps, op, operand, tuple(spec.shape), reason, explicit)
        if not spec.here:
            return self._local
        if target is not source.settled() or target is source:
            return run_steps(steps, self._local, spec.shape)
        family = _family(self)
        if len(family) > 1:
            # All views see the same memory, which holds nothing else: reduce it where it lies.
            memory = self._local.untyped_storage()
            flat = self._local.new_empty(0).set_(memory, 0, (self._local.numel(),))  # type: ignore[call-overload]
            run_steps(steps, flat, spec.shape, owned=True)
            for member in family:
                member._spec = member._spec.with_layout(member._spec.layout.settled())
            return self._local
        local = run_steps(steps, self._local, spec.shape, owned=bool(family))
        if family or force:
            self._local, self._spec = local, spec.with_layout(target)
        return local

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["_local"], (self._spec, self.requires_grad)

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], context: Any, size: Any, stride: Any) -> DistTensor:
        return DistTensor(inner["_local"], context[0], context[1])

    def __deepcopy__(self, memo: dict[int, Any]) -> DistTensor:
        if id(self) in memo:
            return memo[id(self)]
        if not self.is_leaf:
            raise RuntimeError("only leaf tensors can be copied with deepcopy; use tensor.detach() first")
        copy: Any = DistTensor(self._local.clone(), self._spec, self.requires_grad)
        if getattr(self, "_is_param", False):
            copy = torch.nn.Parameter(copy, self.requires_grad)
        memo[id(self)] = copy
        if self.grad is not None:
            copy.grad = self.grad.__deepcopy__(memo)
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise DispatchError(
            f"a DistTensor ({self._spec!r}) cannot be pickled: each rank would save its shard as if it were the whole. "
            "Save x.full_tensor() (on every rank, then write on rank 0), for example with safetensors"
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        values = self._local if self._local.numel() <= 24 else self._local.flatten()[:6]
        text = repr(values.detach()).removeprefix("tensor(").removesuffix(")").split(", dtype")[0]
        more = " ..." if self._local.numel() > 24 else ""
        grad = ", requires_grad=True" if self.requires_grad else ""
        kind = "DistParameter" if getattr(self, "_is_param", False) else "DistTensor"
        return f"{kind}({self._spec!r} on {self.mesh!r}{grad}\n  local {list(self._local.shape)}: {text}{more})"

    __str__ = __repr__

    def __format__(self, spec: str) -> str:
        return self.item().__format__(spec) if self.dim() == 0 else object.__format__(self, spec)

    def _whole(self) -> Tensor:
        detached: Any = self.detach()
        return detached.full_tensor()

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
    self = _make(DistTensor, spec.shape, spec.stride, dtype=spec.dtype, device=spec.device)
    self._local, self._spec = local, spec
    return self


def wrap_view(local: Tensor, spec: Spec) -> DistTensor:
    """``wrap`` for results of views: in inference mode autograd wants a view of an ordinary tensor to be ordinary."""
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False):
            return wrap(local, spec)
    return wrap(local, spec)


def sole_owner(local: Tensor) -> bool:
    """Whether no other tensor shares this one's memory."""
    return _users(local) == 1


def _users(local: Tensor) -> int:
    """How many tensors share this one's memory (the storage handle made here counts as one more)."""
    storage = local.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata) - 1


def join(base: DistTensor, view: DistTensor) -> None:
    """Note that a pending view shares its base's memory, so that both can be settled at once."""
    views = getattr(base, "_views", None)
    if views is None:
        views = base._views = [TensorWeakRef(base)]
    views.append(TensorWeakRef(view))
    view._views = views


def _family(x: DistTensor) -> list[DistTensor]:
    """The tensors that together are all who see this one's memory, alike pending; empty if there are others."""
    users = _users(x._local)
    if users == 1:
        return [x]
    alive = [member for ref in getattr(x, "_views", ()) if (member := ref()) is not None]
    storage = x._local.untyped_storage()
    alike = all(m._spec.layout.pending == x._spec.layout.pending for m in alive)
    shared = [m for m in alive if m._local.untyped_storage()._cdata == storage._cdata]
    filled = storage.nbytes() == x._local.nbytes
    return shared if alike and filled and len({id(m._local) for m in shared}) == users else []


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
        record.tell(record.Message(step, op, operand, shape, reason, line, explicit, tensors))


def describe(value: Any) -> str:
    """A value in a few words, for errors."""
    if isinstance(value, DistTensor):
        return repr(value._spec)
    if isinstance(value, Tensor):
        return f"a plain tensor {list(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    return repr(value)
