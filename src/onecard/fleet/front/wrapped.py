"""DistributedModel: a local model as a part of a fleet program."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from onecard import recorded
from onecard.comm.agree import sparse_check
from onecard.comm.issue.ranks import Ranks
from onecard.errors import FleetError
from onecard.fleet.gradients import hooks, merging
from onecard.fleet.gradients.copies import compare, compare_given, equalise
from onecard.fleet.grid.strategy import DistributedStrategy
from onecard.fleet.zero.carried import Members, declare
from onecard.train import unreduced


class _Around:
    """A hook on a model that is its wrapper's. Where ZeRO has made the wrapper its own, a copy of the model alone is of plain
    parameters, and has none."""

    def __init__(self, wrapper: Any, name: str) -> None:
        self.wrapper, self.name = wrapper, name

    def __call__(self, *_: Any) -> None:
        if self.wrapper is not None:
            getattr(self.wrapper, self.name)()

    def __deepcopy__(self, memo: Any) -> _Around:
        alone = id(self.wrapper) not in memo and type(self.wrapper) is not DistributedModel
        return _Around(None if alone else copy.deepcopy(self.wrapper, memo), self.name)


class DistributedModel(nn.Module):
    """What ``distributed_model`` returns: the model, with the names of its own parameters, and Paddle's methods."""

    def __init__(
        self,
        module: nn.Module,
        data: Ranks,
        strategy: DistributedStrategy,
        grad_accum_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.module, self._data, self._accum = module, data, grad_accum_dtype
        self._amp = getattr(torch, strategy.amp_configs["dtype"]) if strategy.amp else None
        self._members: Members | None = None
        self._family: unreduced.Family | None = None
        self._number, self._later, self._compared = sparse_check.serial("model"), sparse_check.serial("model"), -1
        self._given = hooks.models.here[self] = sparse_check.serial("model")
        self._adopt()
        module.register_forward_pre_hook(_Around(self, "_begin"), prepend=True)
        module.register_forward_hook(_Around(self, "_end"))

    def _begin(self, *_: Any) -> None:
        """Before a forward with gradients: parameters that have come since are those of the fleet program, too.

        Also in evaluation, in which norms are frozen and trained on: what nobody knows of would be trained apart.
        """
        if not torch.is_grad_enabled():
            return
        if self._members is None or not self._members.same():
            with recorded.unrecorded():
                self._adopt()

    def take_in(self, parameters: Iterable[Tensor]) -> None:
        """Those of the model that came since its last forward."""
        if self._members is not None and self._members.same():
            return
        if not {*map(id, parameters)}.isdisjoint(map(id, self.module.parameters())):
            with recorded.unrecorded():
                self._adopt()

    def _end(self, *_: Any) -> None:
        """After it: what the forward has written to copies of parameters is compared with what came before it."""
        if not torch.is_grad_enabled() or not self.module.training:
            return
        backwards = 0 if self._family is None else self._family.backwards
        if (
            backwards != self._compared or self._data.size == 1
        ):  # once for all microbatches of a step, where they are known
            self._compared = backwards
            self._compare()

    def _compare(self) -> None:
        """The first forward is counted apart: what steps do is compared behind 1, 2, 4, ... of them."""
        number, self._number = self._number, self._later
        with recorded.unrecorded():
            compare(number, self.module)

    def _adopt(self) -> None:
        """Say what the parameters are, and give the copies of those that are new one value."""
        parameters = [*self.module.parameters()]
        self._family = self._family or unreduced.Family()
        self._family.become(parameters)
        declare(self.module)
        for name, p in self.module.named_parameters():
            hooks.share_data(p, self._data, self._family, self._accum)
            if (state := unreduced.of(p)) is not None:
                state.name = name
        values = [*parameters, *self.module.buffers()]
        equalise(values if self._members is None else self._members.new(values))
        self._members = Members(self.module)

    def __setattr__(self, name: str, value: Any) -> None:
        # As on one card: model.head = nn.Linear(...) exchanges the model's head, model.scale = 0.5 is what its forward reads.
        # What is read of the model (__getattr__) is written there, too: all but what the wrapper has itself. A layer or a
        # parameter that is new is the model's.
        inner = self.__dict__.get("_modules", {}).get("module")
        own = name in self.__dict__ or hasattr(type(self), name) or "_compared" not in self.__dict__
        own |= name.startswith("_") and type(self) is not DistributedModel
        if inner is not None and not own and (isinstance(value, nn.Module | nn.Parameter) or hasattr(inner, name)):
            setattr(inner, name, value)
        else:
            super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        try:
            super().__delattr__(name)
        except AttributeError:
            delattr(self.module, name)

    def register_buffer(self, *args: Any, **kwargs: Any) -> None:
        """As of the model."""
        self.module.register_buffer(*args, **kwargs)

    def register_parameter(self, *args: Any, **kwargs: Any) -> None:
        """As of the model."""
        self.module.register_parameter(*args, **kwargs)

    def add_module(self, *args: Any, **kwargs: Any) -> None:
        """As of the model."""
        self.module.add_module(*args, **kwargs)

    def register_module(self, *args: Any, **kwargs: Any) -> None:
        """As of the model."""
        self.module.register_module(*args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_members": None, "_family": None}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """That of the model, under autocast if the strategy says amp."""
        context: AbstractContextManager[Any] = nullcontext()
        if self._amp is not None:
            kind = next((p.device.type for p in self.module.parameters()), "cpu")
            context = torch.autocast(kind, self._amp)
        with context:
            if self.module.training and torch.is_grad_enabled():
                with recorded.unrecorded():
                    compare_given(self._given, self.module, args, kwargs)
            return self.module(*args, **kwargs)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """As of the model."""
        return self.module.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """As of the model."""
        return self.module.named_buffers(*args, **kwargs)

    def _fqn_modifiers(self) -> dict[str, str]:
        """What ``torch.distributed.checkpoint.state_dict`` leaves out of names: each name below is one of ``module``'s."""
        return _BelowModule(module="module")

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As of the model: this rank's parts."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As of the model."""
        return self.module.load_state_dict(*args, **kwargs)

    def scale_loss(self, loss: Tensor) -> Tensor:
        """The loss: gradients are averaged when they are summed, so it need not be divided."""
        return loss

    def apply_collective_grads(self) -> None:
        """Sum the gradients now. Otherwise the optimizer has it done."""
        hooks.sync(self.module.parameters())

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Nothing: backward sends nothing for parameters, so they accumulate without a message."""
        yield

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As the optimizer's: under gradient_merge gradients stay that wait for a k-th step."""
        with hooks.given_up():
            merging.clear(self.module, self.module.zero_grad, set_to_none)

    def clear_gradients(self) -> None:
        """``zero_grad()``."""
        self.zero_grad()

    def train_batch(self, *args: Any, **kwargs: Any) -> Any:
        """Of pipelines only."""
        raise FleetError(
            "train_batch is of pipelines: fleet.distributed_model(fleet.PipelineLayer([...])). This model has no stages: "
            "forward, loss.backward() and optimizer.step(), one microbatch after the other"
        )

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)


class _BelowModule(dict[str, str]):
    def get(self, name: str, default: Any = None) -> Any:
        return "module"
