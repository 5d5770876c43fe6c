"""A recording bound to a program: a function that takes its inputs from their places, replays, and puts back what it made.

Before anything runs it is asked whether the recording fits: the same shapes and layouts, the same modules in the same mode,
the same answers to what was asked of numbers. All of that is one Python function made for this recording.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import is_, itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_unflatten

from onecard import _torch
from onecard.errors import RecordingError
from onecard.graph.places import at, numbers_of
from onecard.graph.questions import asked
from onecard.graph.recording import Effect, Output, Recording, Where
from onecard.tensor.dist_tensor import DistTensor, wrap

_STILL = (bool, int, float, str, type(None))


class Bound:
    """A recording and the objects of a program that it belongs to.

    Attributes:
        ready: from the arguments, the graph's inputs; None where the recording does not fit.
        go: from the arguments and those inputs, what the function returns.
    """

    def __init__(self, recording: Recording, roots: Sequence[Any], leaves: Sequence[Any], kinds: Sequence[Any]) -> None:
        self.recording, self.roots, self.kinds = recording, list(roots), tuple(kinds)
        writer = _Writer(recording, self.roots)
        self.ready: Callable[[Sequence[Any]], tuple[Any, ...] | None] = writer.ready(self.kinds, leaves)
        self.go: Callable[[Sequence[Any], tuple[Any, ...]], Any] = writer.go(leaves)

    def fits(self, leaves: Sequence[Any]) -> tuple[Any, ...] | None:
        """The graph's inputs, if the recording fits what is given and the state of the program."""
        try:
            return self.ready(leaves)
        except (KeyError, AttributeError, IndexError):  # something that it is bound to is no longer there
            return None

    def kinds_fit(self, leaves: Sequence[Any]) -> bool:
        """Whether the arguments are of the kinds that were recorded."""
        return kinds_of(leaves) == self.kinds

    def difference(self, leaves: Sequence[Any], names: Sequence[str]) -> str:
        """Which argument does not fit, in words; "" if all do."""
        for i, (leaf, kind) in enumerate(zip(leaves, self.kinds, strict=False)):
            now = _kind_of(leaf)
            if now != kind:
                return f"argument {names[i]!r} was {_words(kind)} and is {_words(now)}{_ADVICE.get(now[0], '')}"
        return (
            ""
            if len(leaves) == len(self.kinds)
            else f"it was given {len(self.kinds)} values, and is given {len(leaves)}"
        )

    def again(self, leaves: Sequence[Any]) -> Bound | None:
        """Bound anew, to what is now in the places: states that were loaded, modules that were exchanged."""
        try:
            return Bound(self.recording, self.roots, leaves, self.kinds)
        except (KeyError, AttributeError, IndexError):
            return None


_ADVICE = {
    None: "; what changes from step to step should be a float or a tensor",
    Tensor: "; give batches of one shape (drop_last=True, or pad the last)",
    DistTensor: "; give batches of one shape and layout (drop_last=True, or pad the last)",
}


def kinds_of(leaves: Sequence[Any]) -> tuple[Any, ...]:
    """What of the arguments a recording depends on; taken before the step, which may note things on them."""
    return tuple(map(_kind_of, leaves))


def _words(kind: Any) -> str:
    if kind[0] is DistTensor:
        return repr(kind[1])
    if kind[0] is Tensor:
        return f"a tensor {list(kind[1])} {str(kind[3]).removeprefix('torch.')}"
    return "a float" if kind[0] is float else repr(kind[2])


def _kind_of(x: Any) -> Any:
    """What of an argument a recording depends on."""
    if isinstance(x, DistTensor):
        return (DistTensor, x._spec, x.requires_grad)
    if isinstance(x, Tensor):
        return (Tensor, x.shape, x.stride(), x.dtype, x.device, x.requires_grad)
    return (float,) if type(x) is float else (None, type(x), x)


class _Writer:
    """The text of the two functions."""

    def __init__(self, recording: Recording, roots: list[Any]) -> None:
        self.recording, self.roots = recording, roots
        self.names: dict[str, Any] = {
            "MISS": None,
            "DistTensor": DistTensor,
            "wrap": wrap,
            "all": all,
            "map": map,
            "is_": is_,
        }
        self._known: dict[int, str] = {}

    def object(self, value: Any) -> str:
        if id(value) not in self._known:
            self._known[id(value)] = name = f"o{len(self._known)}"
            self.names[name] = value
        return self._known[id(value)]

    def place(self, where: Where) -> str:
        """An expression for the object at a place."""
        kind, *rest = where
        if kind == "argument":
            return f"leaves[{rest[0]}]"
        if kind == "constant":
            raise KeyError(kind)
        if kind == "gradient":
            return f"{self.place(rest[0])}.grad"
        root = self.roots[rest[0]]
        if kind in ("parameter", "buffer"):
            path, _, name = rest[1].rpartition(".")
            module = root.get_submodule(path)
            return f"{self.object(module._parameters if kind == 'parameter' else module._buffers)}[{name!r}]"
        if kind == "group":
            group = f"{self.object(root.param_groups[rest[1]])}[{rest[2]!r}]"
            return group if rest[3] is None else f"{group}[{rest[3]}]"
        if kind == "state":
            return f"{self.object(root.state[root.param_groups[rest[1]]['params'][rest[2]]])}[{rest[3]!r}]"
        return self.object(at(where, self.roots, ()))

    # -- whether it fits ---------------------------------------------------------------------------------------------------

    def ready(self, kinds: Sequence[Any], leaves: Sequence[Any]) -> Any:
        lines = [f"if len(leaves) != {len(kinds)}: return MISS"]
        for i, kind in enumerate(kinds):
            lines += self._argument(f"leaves[{i}]", kind)
        flags = {"torch.is_grad_enabled()": torch.is_grad_enabled(), "torch.is_inference_mode_enabled()": False}
        self.names["torch"] = torch
        lines += [f"if {call} is not {value}: return MISS" for call, value in flags.items()]
        for root in self.roots:
            if isinstance(root, nn.Module):
                lines += [line for module in root.modules() for line in self._module(module)]
            elif isinstance(root, Optimizer):
                lines += self._optimizer(root)
        lines += self._gradients()
        given = []
        for i, known in enumerate(self.recording.inputs):
            fetched, expression = self._input(i, known)
            lines += fetched
            given.append(expression)
        questions = asked(self.recording.graph, self.recording.conditions)
        if questions is not None:
            lines.append(
                f"if {self.object(questions[0])}({', '.join(given)}) != {self.object(questions[1])}: return MISS"
            )
        lines.append(f"return ({''.join(g + ', ' for g in given)})")
        return self._made("ready", "leaves", lines)

    def _made(self, name: str, arguments: str, lines: Sequence[str]) -> Any:
        text = f"def {name}({arguments}):\n" + "\n".join(f"    {line}" for line in lines)
        exec(compile(text, "<recording>", "exec"), self.names)
        return self.names[name]

    def _argument(self, leaf: str, kind: Any) -> list[str]:
        if kind[0] is DistTensor:
            check = f"type({leaf}) is not DistTensor or {leaf}._spec is not {self.object(kind[1])}"
            return [f"if {check} or {leaf}.requires_grad is not {kind[2]}: return MISS"]
        if kind[0] is Tensor:
            self.names["Tensor"] = Tensor
            shape, stride, dtype, device = map(self.object, kind[1:5])
            check = f"type({leaf}) is not Tensor or {leaf}.shape != {shape} or {leaf}.stride() != {stride}"
            check += f" or {leaf}.dtype is not {dtype} or {leaf}.device != {device}"
            return [f"if {check} or {leaf}.requires_grad is not {kind[5]}: return MISS"]
        if kind[0] is float:
            return [f"if type({leaf}) is not float: return MISS"]
        value = self.object(kind[2])
        same = f"{leaf} != {value}" if isinstance(kind[2], _STILL) else f"{leaf} is not {value}"
        return [f"if type({leaf}) is not {self.object(kind[1])} or {same}: return MISS"]

    def _module(self, module: nn.Module) -> list[str]:
        still = {k: v for k, v in module.__dict__.items() if isinstance(v, _STILL) and not k.startswith("_")}
        lines = [self._unchanged(module.__dict__, still)]
        if module._modules:
            held = self.object(tuple(module._modules.values()))
            lines.append(f"if tuple({self.object(module._modules)}.values()) != {held}: return MISS")
        params = [p for p in module._parameters.values() if p is not None]
        wants = [f"{self.object(module._parameters)}[{n!r}].requires_grad is not {p.requires_grad}"
                 for n, p in module._parameters.items() if p is not None]  # fmt: skip
        return [*lines, f"if {' or '.join(wants)}: return MISS"] if params else lines

    def _unchanged(self, holder: dict[str, Any], still: dict[str, Any]) -> str:
        """Entries of a dict must be what they are."""
        if not still:
            return "pass"
        values = tuple(still.values()) if len(still) > 1 else next(iter(still.values()))
        return f"if {self.object(itemgetter(*still))}({self.object(holder)}) != {self.object(values)}: return MISS"

    def _optimizer(self, optimizer: Optimizer) -> list[str]:
        own, state, groups = map(self.object, (optimizer, optimizer.state, optimizer.param_groups))
        held = self.object([*optimizer.state.values()])
        lines = [
            f"if {own}.state is not {state} or {own}.param_groups is not {groups}: return MISS",
            f"if len({state}) != {len(optimizer.state)} or not all(map(is_, {state}.values(), {held})): return MISS",
            f"if len({groups}) != {len(optimizer.param_groups)}: return MISS",
        ]
        for i, group in enumerate(optimizer.param_groups):
            numbers = numbers_of(group)
            lines.append(f"if {groups}[{i}] is not {self.object(group)}: return MISS")
            still = {k: v for k, v in group.items() if k not in numbers and isinstance(v, _STILL)}
            lines.append(self._unchanged(group, still))
            lines.append(f"if len({self.object(group)}['params']) != {len(group['params'])}: return MISS")
        return lines

    def _gradients(self) -> list[str]:
        lines = []
        for where, had in self.recording.gradients:
            lines.append(f"if {self.place(where)}.grad is {'' if had else 'not '}None: return MISS")
        return lines

    def _input(self, i: int, known: Any) -> tuple[list[str], str]:
        if known.kind == "constant":
            return [], self.object(self.recording.constants[i])
        place, name = self.place(known.where), f"i{i}"
        if known.kind == "number":
            return [f"{name} = {place}", f"if type({name}) is not float: return MISS"], name
        if known.kind == "generator":
            return [], place
        if known.spec is not None:
            spec = self.object(known.spec)
            return [f"{name} = {place}", f"if {name}._spec is not {spec}: return MISS"], f"{name}._local"
        if known.kind == "argument":
            return [], place
        now = at(known.where, self.roots, ())
        if (tuple(now.shape), tuple(now.stride()), now.dtype, now.device) != known.facts:
            raise KeyError(known.name)
        return [f"{name} = {place}", f"if {name} is not {self.object(now)}: return MISS"], name

    # -- the replay --------------------------------------------------------------------------------------------------------

    def go(self, leaves: Sequence[Any]) -> Any:
        recording = self.recording
        self.names.update(below=_torch.below_autograd, run=recording.run, _spent=_spent)
        read = {i.where for i in recording.inputs}
        lines = [
            f"{self.place(e.where)}.grad = None"  # memory that the program gives back before the forward pass
            for e in recording.effects
            if e.kind == "gradient" and ("gradient", e.where) not in read
        ]
        lines += ["with below():", "    out = run(*inputs)", "del inputs"]
        for effect in recording.effects:
            lines += self._effect(effect)
        shown = [self._result(r) for r in recording.results]
        if recording.tree.is_leaf():
            lines.append(f"return {shown[0]}")
        else:
            self.names.update(tree_unflatten=tree_unflatten, tree=recording.tree)
            lines.append(f"return tree_unflatten([{', '.join(shown)}], tree)")
        return self._made("go", "leaves, inputs", lines)

    def _output(self, output: Output) -> str:
        value = f"out[{output.position}]"
        return value if output.spec is None else f"wrap({value}, {self.object(output.spec)})"

    def _result(self, result: Any) -> str:
        if isinstance(result, Output):
            value = self._output(result)
            return f"_spent({value})" if result.grad else value
        if isinstance(result, tuple) and result[:1] == ("place",):
            return self.place(result[1])
        return self.object(result)

    def _effect(self, effect: Effect) -> list[str]:
        if effect.kind == "gradient":
            return [f"{self.place(effect.where)}.grad = {self._output(effect.output) if effect.output else None}"]
        assert effect.output is not None
        if effect.kind == "place":
            x, value = self.place(effect.where), f"out[{effect.output.position}]"
            return [f"t = {x}", f"t._local = {value}; t._spec = {self.object(effect.output.spec)}; t._memory = None"]
        if effect.kind == "state":
            _, r, g, i, key = effect.where
            state, param = self.roots[r].state, self.roots[r].param_groups[g]["params"][i]
            return [f"{self.object(state)}[{self.object(param)}][{key!r}] = {self._output(effect.output)}"]
        return [f"{self.place(effect.where)} = {self._output(effect.output)}"]


class _Spent(torch.autograd.Function):
    """A result whose backward pass the recording contains."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, x: Any) -> Any:
        return x

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        raise RecordingError(
            "backward through the result of a recording: its own backward pass ran inside, or was never recorded. Call "
            "backward() inside the recorded step, and return what you only look at as loss.detach()"
        )


_ANCHOR = torch.zeros((), requires_grad=True)


def _spent(x: Tensor) -> Any:
    """A result as the program has it: with a graph of autograd behind it, which cannot be used again."""
    return _Spent.apply(_ANCHOR, x) if torch.is_grad_enabled() else x
