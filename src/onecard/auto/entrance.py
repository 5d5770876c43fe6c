"""What a model is called with, divided by rows where it enters."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Placement, Replicate, Shard

from onecard._torch.hooks import LeftBehind
from onecard._torch.leaves import is_transformed, outside_transforms
from onecard._torch.names import tree_leaves, tree_map
from onecard.errors import DispatchError
from onecard.place.mesh import ProcessMesh
from onecard.tensor import DistTensor, shard_tensor
from onecard.tensor.convert import unshard


class Entrance(LeftBehind):
    """Divides the rows of what a model is called with over axes of a mesh; every rank has the whole batch.

    Which tensors have rows is seen by the first one: those of the same length. Others are the same on all ranks, as they are, and
    what lies on a mesh already stays there: the states that a recurrent model has returned come again. Any choice gives the same
    numbers. So what ``torch.func`` puts in a tensor's place stays as it is. What the forward writes into what it is given (a
    cache of keys and values) is written to the program's own.
    """

    def __init__(self, mesh: ProcessMesh, axes: tuple[str, ...]) -> None:
        self.mesh = mesh
        self._rows: list[Placement] = [Shard(0) if name in axes else Replicate() for name in mesh.dim_names]
        self._ranks = 1
        self._under_way: list[HandedIn | None] = []  # forwards may call each other
        for name in axes:
            self._ranks *= mesh.shape[mesh.axis(name)]

    def __deepcopy__(self, memo: Any) -> Entrance:
        return self

    def before(self, module: nn.Module) -> None:
        """From now on, ahead of each forward of a module."""
        module.register_forward_pre_hook(self, with_kwargs=True, prepend=True)
        module.register_forward_hook(Behind(self), always_call=True)

    @property
    def __name__(self) -> str:
        """What ``torch.jit.script`` asks each hook for, ahead of all else."""
        raise AttributeError(_exported("torch.jit.script"))

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        if torch.jit.is_tracing():  # it would write down this rank's numbers
            raise DispatchError(_exported("torch.jit.trace"))
        given = self.handed_in(args, kwargs)
        self._under_way.append(given)
        return (args, kwargs) if given is None else given.found

    def behind(self) -> None:
        """A forward has ended."""
        if self._under_way and (given := self._under_way.pop()) is not None:
            given.write_back()

    def handed_in(self, args: Any, kwargs: Any) -> HandedIn | None:
        """What somebody is called with, its rows divided; None: nothing is."""
        leaves = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.ndim]
        if all(isinstance(x, DistTensor) for x in leaves) or any(map(is_transformed, leaves)):
            return None
        rows = len(leaves[0])
        if rows < self._ranks:
            return None

        def laid_out(x: Any) -> Any:
            if (
                not isinstance(x, Tensor)
                or isinstance(x, DistTensor)
                or not x.ndim
                or len(x) != rows
                or x.requires_grad
            ):
                return x
            if x.layout is not torch.strided:  # the operator that takes it says what it cannot
                return x
            return shard_tensor(x, self.mesh, self._rows)

        with outside_transforms():
            return HandedIn(laid_out, args, kwargs)


def _exported(call: str) -> str:
    return (
        f"{call} of a model whose parameters lie on several ranks would keep this rank's part of it. Save its state_dict(), "
        "which is whole, and export a new model that has loaded it, in a script of its own"
    )


class Ahead(Protocol):
    """What stands ahead of a forward, and is told of its end."""

    def behind(self) -> None: ...


class Behind(LeftBehind):
    """What runs behind each forward of a module that something stands ahead of."""

    __name__ = vars(Entrance)["__name__"]

    def __init__(self, ahead: Ahead) -> None:
        self._ahead = ahead

    def __deepcopy__(self, memo: Any) -> Behind:
        return self

    def __call__(self, module: nn.Module, args: Any, result: Any) -> None:
        self._ahead.behind()


class HandedIn:
    """What a forward is given: the program's own containers, but for those in which a tensor has another in its place."""

    def __init__(self, laid_out: Callable[[Any], Any], args: Any, kwargs: Any) -> None:
        self._laid_out = laid_out
        self._tensors: list[tuple[Tensor, Tensor, tuple[int, ...]]] = []
        self._containers: list[tuple[Any, Any, Any]] = []  # the program's, its copy, and that as it was given
        self.found: tuple[Any, Any] = self._of(args), self._of(kwargs)

    def _of(self, x: Any) -> Any:
        if isinstance(x, Tensor):
            if (known := next((made for own, made, _ in self._tensors if own is x), None)) is not None:
                return known  # given twice it is one tensor
            made = self._laid_out(x)
            if made is not x:
                self._tensors.append((x, made, _version(made)))
            return made
        if type(x) not in (list, tuple, dict):
            made = tree_map(self._of, x) if tree_leaves(x) != [x] else x
            return x if _same(tree_leaves(x), tree_leaves(made)) else made
        values = [self._of(v) for v in (x.values() if type(x) is dict else x)]
        if _same([*(x.values() if type(x) is dict else x)], values):
            return x
        copy = dict(zip(x, values, strict=True)) if type(x) is dict else type(x)(values)
        if type(x) is not tuple:
            self._containers.append((x, copy, copy.copy()))
        return copy

    def write_back(self) -> None:
        """To the program's own what the forward has written to what stood in its place."""
        own = {id(made): x for x, made, _ in self._tensors}
        for x, copy, given in self._containers:
            now, before = (([*c], [*c.values()]) if type(c) is dict else ([], c) for c in (copy, given))
            if now[0] == before[0] and _same(now[1], before[1]):
                continue
            values = [own.get(id(v), v) for v in now[1]]
            x.clear()
            x.update(zip(now[0], values, strict=True)) if type(x) is dict else x.extend(values)
        with torch.no_grad():
            for x, made in self.written():
                x.copy_(unshard(made))

    def written(self) -> list[tuple[Tensor, Tensor]]:
        """Tensors that the forward has written to, with what stood in their place."""
        return [(x, made) for x, made, version in self._tensors if _version(made) != version]


def _version(x: Tensor) -> tuple[int, ...]:
    """Of a tensor, and of its memory here, to which a replay writes."""
    return tuple(-1 if t.is_inference() else t._version for t in (x, getattr(x, "_local", x)))


def _same(a: list[Any], b: list[Any]) -> bool:
    return len(a) == len(b) and all(map(operator.is_, a, b))
