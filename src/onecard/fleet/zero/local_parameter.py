"""A plain parameter whose gradient is a distributed one's, and the places of such parameters in their modules.

Autograd knows a ``LocalParameter`` as any leaf: what it adds up is this rank's summand, which is handed on to the twin. Everybody
else who asks for its gradient, or hooks into it, has the whole one.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from onecard._torch import names as _torch
from onecard.errors import FleetError
from onecard.fleet.gradients import sparse_gradients
from onecard.fleet.gradients.twins import LOCAL, losses_of, summand, trained
from onecard.pipeline.run.waiting_hooks import is_ours
from onecard.place.layout import Layout
from onecard.tensor import DistTensor
from onecard.tensor.dispatch.entry import divided
from onecard.tensor.dist_tensor import wrap
from onecard.tensor.spec import Spec
from onecard.tensor.watched import own_whole
from onecard.train.zero.blocks import ParameterBlocks


class PlainParameter:
    """What a plain parameter stands for.

    Attributes:
        twin: the distributed parameter.
        owner: what sums the gradients of the model.
        hooks: to be called when the twin has a gradient, each with the parameter on which it was registered.
        memory: that of both, where the parameter is whole.
    """

    def __init__(self, p: Any, twin: Any, owner: Any, whole: bool) -> None:
        self.twin, self.owner = twin, owner
        self.hooks: OrderedDict[int, tuple[Callable[[Any], Any], Any]] = OrderedDict()
        self.memory = p.detach() if whole else None

    def given(self, p: Any) -> None:
        """A program has given the parameter, or its twin, other data; of another kind (``model.half()``): at the next forward."""
        if self.memory is not None and all(alike(x, self.memory) for x in (p, self.twin)):
            mend(p, self.twin, self.owner.names[id(p)])

    def lent(self, given: Tensor) -> Tensor:
        """A program has the memory of the parameter, which may be one that is emptied again: it stays the program's."""
        if self.memory is None:
            self.owner.blocks.lend(self.twin, given)
        return given

    def accumulated(self) -> None:
        """The twin has its gradient."""
        for call, of in [*self.hooks.values()]:
            call(of)

    def later(self, call: Callable[[Any], Any], of: Any) -> RemovableHandle:
        """As ``register_post_accumulate_grad_hook``."""
        handle = RemovableHandle(self.hooks)
        self.hooks[handle.id] = call, of
        return handle

    def itself(self, p: Any) -> Tensor:
        """The parameter, as large as it is while it is needed, as a result of the node to which backward brings gradients."""
        had, shape = Tensor.data.__get__(p), self.twin.shape  # type: ignore[attr-defined]
        if had.shape == shape:
            return Tensor.view_as(p, p)
        _torch.set_data(p, had.new_empty(()).expand(shape))
        try:
            return Tensor.view_as(p, p)
        finally:
            _torch.set_data(p, had)

    def of_whole(self, call: Callable[[Any], Any]) -> Callable[[Tensor], Tensor]:
        """A hook on gradients that sees the average over the ranks."""

        def run(grad: Tensor) -> Tensor:
            given = summand(self.twin, grad)
            found = call(given)
            found = given if found is None else found
            if not isinstance(found, DistTensor):
                return found
            mine = found._local if found._spec.layout.pending == ((0, "avg"),) else own_whole(found)
            return mine * losses if (losses := losses_of(self.twin)) > 1 else mine

        run.of_user = True  # type: ignore[attr-defined]
        return run


class _Handing:
    """A plain parameter of a model of ``group_sharded_parallel``, of torch's kind or, while a world is pretended, a fake one."""

    is_local_parameter = True

    @property
    def stands_for(self) -> Any:
        """The distributed parameter that is trained."""
        return of_local(self).twin

    @property
    def later_hooks(self) -> Any:
        """Those to be called when that has a gradient."""
        return of_local(self).hooks

    @property
    def grad(self) -> Any:
        """The distributed gradient."""
        return of_local(self).twin.grad

    @grad.setter
    def grad(self, value: Any) -> None:
        twin = of_local(self).twin
        plain = value is not None and not isinstance(value, DistTensor)
        twin.grad = summand(twin, value * losses_of(twin)) if plain else value  # a program's own is a mean

    @grad.deleter
    def grad(self) -> None:
        of_local(self).twin.grad = None

    @property
    def data(self) -> Tensor:
        """The same values outside autograd; who is given them may keep them."""
        return of_local(self).lent(Tensor.data.__get__(self))  # type: ignore[attr-defined]

    @data.setter
    def data(self, value: Any) -> None:
        Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
        of_local(self).given(self)

    def detach(self) -> Tensor:
        """As of any tensor; it may be kept until the parameter's memory is given up."""
        return of_local(self).lent(Tensor.detach(self))  # type: ignore[arg-type]

    def register_hook(self, hook: Callable[[Any], Any]) -> Any:
        """As of any tensor; the hook is given the whole gradient, a distributed tensor."""
        return Tensor.register_hook(self, of_local(self).of_whole(hook))  # type: ignore[arg-type]

    def register_post_accumulate_grad_hook(self, hook: Callable[[Any], Any]) -> Any:
        """As of any parameter, when its gradient is whole."""
        return of_local(self).later(hook, self)

    def __deepcopy__(self, memo: Any) -> Any:
        if id(self) in memo:
            return memo[id(self)]
        me: Any = self
        made = memo[id(self)] = nn.Parameter(
            Tensor.detach(me).clone(memory_format=torch.preserve_format), me.requires_grad
        )
        return made


class LocalParameter(_Handing, nn.Parameter):
    """Of torch's kind."""


@lru_cache(maxsize=8192)
def _kind(of: Any) -> Any:
    return LocalParameter if of is nn.Parameter else type("LocalParameter", (_Handing, of), {})


def become_local(p: Any, twin: Any, owner: Any, whole: bool) -> None:
    """Make a plain parameter one whose gradient is its twin's. Hooks that it has see what they would see on one card."""
    local = PlainParameter(p, twin, owner, whole)
    for key, call in [*(p._backward_hooks or {}).items()]:
        if not is_ours(call):  # those watch a gradient that is the twin's from now on
            p._backward_hooks[key] = local.of_whole(call)
    earlier = p._post_accumulate_grad_hooks or OrderedDict()
    for call in earlier.values():
        if not is_ours(call):
            local.later(call, p)
    earlier.clear()
    grad = local_gradient(p) if _torch.gradient(p) is not None else None
    setattr(p, LOCAL, local)
    if grad is not None:
        twin.grad = summand(twin, grad)
    kind: Any = type(p)
    p.__class__ = _kind(kind)
    plain = weakref.ref(p)
    take = twin._take

    def taken(value: Any) -> None:
        take(value)
        local.given(plain())

    twin._take = taken
    twin.register_hook = lambda call: plain().register_hook(call)  # type: ignore[union-attr]
    twin.register_post_accumulate_grad_hook = lambda call: local.later(call, twin)
    # How torch's register_multi_grad_hook asks for the node that backward comes to: it is the plain one's.
    twin.view_as = lambda other: local.itself(plain()) if other is twin else Tensor.view_as(twin, other)


def of_local(p: Any) -> Any:
    """What a plain parameter stands for (``PlainParameter``); None of others."""
    return getattr(p, LOCAL, None) if isinstance(p, _Handing) else None


def has_users_hooks(p: Any) -> bool:
    """Whether a program has hooked a parameter that stands for a distributed one."""
    local = of_local(p)
    return local is not None and bool(
        local.hooks or any(getattr(h, "of_user", False) for h in p._backward_hooks.values())
    )


def local_gradient(p: Any) -> Tensor:
    """What backward has added up here, which is taken away."""
    grad: Any = _torch.gradient(p)
    _torch.set_gradient(p, None)
    # A loss that was joined with a distributed one: each rank's own went through the same operators, as if it were a copy.
    return sparse_gradients.dense(own_whole(grad))


def twin_parameter(p: nn.Parameter, mesh: Any) -> Any:
    """A distributed parameter over the memory of a plain one: equal on all ranks of the group."""
    divided.here.update(mesh.dim_names)  # its ranks read other data, of which no operator knows
    spec = Spec.make(Layout.replicated(mesh, p.dim()), p.shape, tuple(p.stride()), p.dtype, p.device)
    return nn.Parameter(wrap(p.detach(), spec), p.requires_grad)


def mend(p: Any, twin: Any, name: str) -> None:
    """A plain parameter and its twin have one memory again, if a program gave one of them another (``p.data = ...``).

    It is the one that was given, as on one card: what they had before may be the program's (``backup = p.data``).

    Raises:
        FleetError: of another dtype, shape or device.
    """
    local = of_local(p)
    # No operator looks: in a step that is written down without being done its result would have other memory.
    given = [x for x in (p, twin._local) if not same_memory(x, local.memory)]
    if given:
        local.memory = adopted(given[-1], local.memory, name, "group_sharded_parallel")
        _torch.set_data(p, local.memory)
        twin._local = local.memory


def adopted(value: Tensor, had: Tensor, name: str, call: str) -> Tensor:
    """What a program gave a parameter, as the memory of its twin: itself, or a copy that lies as what it ``had`` before.

    Raises:
        FleetError: of another dtype, shape or device.
    """
    if not alike(value, had):
        raise FleetError(
            f"{name} is now {str(value.dtype).removeprefix('torch.')} {list(value.shape)} on {value.device}, after "
            f"{call}, whose optimizer has states for what it was: model.to(...) before {call}"
        )
    value = value.detach()
    return value if value.stride() == had.stride() else torch.empty_like(had).copy_(value)


def alike(x: Any, memory: Tensor) -> bool:
    """Whether a tensor can be in the place of another one."""
    return (x.shape, x.dtype, x.device) == (memory.shape, memory.dtype, memory.device)


def same_memory(x: Tensor, memory: Tensor) -> bool:
    """Whether two tensors begin at one place."""
    where = [(t.untyped_storage()._cdata, t.storage_offset()) for t in (x, memory)]
    return bool(where[0] == where[1])


class FixedParameters(dict[str, Any]):
    """The parameters of a module, none of which may be exchanged for another.

    Attributes:
        plain: as the module has them, for those who want neither twins nor gathered ones.
    """

    def __init__(self, given: Any) -> None:
        super().__init__(given)
        self.plain = dict(given)

    def __getitem__(self, name: str) -> Any:
        """Who computes with it finds it frozen if the program has frozen it, by ``parameters()``."""
        p = dict.__getitem__(self, name)
        local = of_local(p)
        if local is not None and p.requires_grad != local.twin.requires_grad:
            local.owner.agree_on(p, local.twin)
        return p

    def __setitem__(self, name: str, value: Any) -> None:
        if dict.get(self, name) is not value or name not in self:
            raise FleetError(
                f"parameter {name!r} is set after group_sharded_parallel, which trains those that were there before: exchange it "
                "before, or write the values: with torch.no_grad(): p.copy_(values); load_state_dict without assign=True"
            )

    def __delitem__(self, name: str) -> None:
        raise FleetError(
            f"parameter {name!r} is removed after group_sharded_parallel, which trains it: remove it before"
        )

    def __deepcopy__(self, memo: Any) -> dict[str, Any]:
        import copy

        return {name: copy.deepcopy(self[name], memo) for name in self}

    def items(self) -> Any:
        return [(name, trained(p)) for name, p in dict.items(self)]

    def values(self) -> Any:
        return [trained(p) for p in dict.values(self)]

    @staticmethod
    def gathering(blocks: ParameterBlocks) -> Callable[[Any], FixedParameters]:
        """Of modules whose parameters have no memory but while they are needed."""
        return lambda given: _Gathered(given, blocks)


class Layers(dict[str, Any]):
    """The layers of a module, in whose places only such come as train nothing that the optimizer has no parts of."""

    def __setitem__(self, name: str, value: Any) -> None:
        new = value is not None and any(
            m._parameters and not isinstance(m._parameters, FixedParameters) for m in value.modules()
        )
        if new:
            raise FleetError(
                f"layer {name!r}, a {type(value).__name__}, is set after group_sharded_parallel, which trains what was there "
                "before: exchange it before; or begin it anew where it is: with torch.no_grad(): p.copy_(values)"
            )
        super().__setitem__(name, value)

    def __deepcopy__(self, memo: Any) -> dict[str, Any]:
        import copy

        return {name: copy.deepcopy(self[name], memo) for name in self}


class _Gathered(FixedParameters):
    """Who asks for one by name computes with it, and has it gathered; who asks for all has the twins."""

    def __init__(self, given: Any, blocks: ParameterBlocks) -> None:
        super().__init__(given)
        self._blocks = blocks

    def __getitem__(self, name: str) -> Any:
        p = super().__getitem__(name)
        self._blocks.want(p)
        return p

    def check_kept(self, convert: Callable[[Tensor], Tensor], recurse: bool = True) -> None:
        """Whether ``Module.to`` and the like leave parameters as they are.

        Raises:
            FleetError: they would get another dtype or device.
        """
        for name, p in dict.items(self):
            made = None if p is None else convert(torch.empty(0, dtype=p.dtype, device=p.device))
            if made is not None and (made.dtype, made.device) != (p.dtype, p.device):
                raise FleetError(
                    f'parameter {name!r} would become {made.dtype} on {made.device} after group_sharded_parallel("p_g_os"), '
                    f"which has divided it as {p.dtype} on {p.device}: convert the model before it"
                )

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self.plain else default

    def items(self) -> Any:
        self._blocks.told()
        return [(name, trained(p)) for name, p in dict.items(self)]

    def values(self) -> Any:
        self._blocks.told()
        return [trained(p) for p in dict.values(self)]
