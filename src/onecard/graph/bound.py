"""A recording bound to a program: a function that takes its inputs from their places, replays, and puts back what it made.

Before anything runs it is asked whether the recording fits: the same shapes and layouts, the same modules in the same mode,
the same answers to what was asked of numbers. All of that is one Python function made for this recording.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from operator import is_, itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from onecard import _torch
from onecard._torch import tree_unflatten
from onecard.errors import RecordingError
from onecard.graph.compiled import compiled
from onecard.graph.kinds import ADVICE, changed, in_words, is_like, is_same, kind_of, kinds_of, modes
from onecard.graph.places import STILL, at, options_of, values_of
from onecard.graph.reach import HOOKS, TENSOR_HOOKS
from onecard.graph.recording import Effect, Output, Recording, Where
from onecard.tensor.dist_tensor import DistTensor, wrap


class Bound:
    """A recording and the objects of a program that it belongs to.

    Attributes:
        ready: from the arguments, the graph's inputs; None where the recording does not fit.
        go: from the arguments and those inputs, what the function returns.
    """

    def __init__(
        self,
        recording: Recording,
        roots: Sequence[Any],
        leaves: Sequence[Any],
        kinds: Sequence[Any],
        facts: dict[Any, Any] | None = None,
    ) -> None:
        self.recording, self.roots, self.kinds = recording, list(roots), tuple(kinds)
        self._facts: dict[Any, Any] = {} if facts is None else facts
        writer = _Writer(recording, self.roots, self._facts)
        self.ready: Callable[[Sequence[Any]], tuple[Any, ...] | None]
        self.ready, self._why = writer.ready(self.kinds, leaves)
        self.go: Callable[[Sequence[Any], tuple[Any, ...]], Any] = writer.go(leaves)

    def fits(self, leaves: Sequence[Any]) -> tuple[Any, ...] | None:
        """The graph's inputs, if the recording fits what is given and the state of the program."""
        try:
            return self.ready(leaves)
        except (KeyError, AttributeError, IndexError):  # something that it is bound to is no longer there
            return None

    def kinds_fit(self, leaves: Sequence[Any]) -> bool:
        """Whether the arguments are of the kinds that were recorded."""
        now = kinds_of(leaves)
        return len(now) == len(self.kinds) and all(map(is_same, now, self.kinds))

    def difference(self, leaves: Sequence[Any], names: Sequence[str]) -> str:
        """Which argument does not fit, in words; "" if all do."""
        for i, (leaf, kind) in enumerate(zip(leaves, self.kinds, strict=False)):
            now = kind_of(leaf)
            if not is_same(now, kind[:-1]):
                return f"argument {names[i]!r} was {in_words(kind)} and is {in_words(now)}{ADVICE.get(now[0], '')}"
        try:
            said = self._why()(leaves)
        except (KeyError, AttributeError, IndexError) as fault:
            said = f"{fault} is gone"
        return f"what differs: {said}" if isinstance(said, str) else ""

    def again(self, leaves: Sequence[Any]) -> Bound | None:
        """Bound anew, to the tensors that are now in the places: states that were loaded. All else must be as it was."""
        try:
            return Bound(self.recording, self.roots, leaves, self.kinds, self._facts)
        except (KeyError, AttributeError, IndexError):
            return None


class _Writer:
    """The text of the two functions."""

    def __init__(self, recording: Recording, roots: list[Any], facts: dict[Any, Any]) -> None:
        self.recording, self.roots, self.facts = recording, roots, facts
        self.names: dict[str, Any] = {
            "MISS": None,
            "DistTensor": DistTensor,
            "wrap": wrap,
            "all": all,
            "map": map,
            "is_": is_,
            "is_like": is_like,
        }
        self._known: dict[int, str] = {}
        self.lines: list[tuple[str, str]] = []  # each with the line in its place that says why it does not fit

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

    def ready(self, kinds: Sequence[Any], leaves: Sequence[Any]) -> tuple[Any, Any]:
        """The function that gives the inputs or None, and one that says why not."""
        self.lines = []
        self.names["torch"] = torch
        self._miss(f"len(leaves) != {len(kinds)}", "it is given another number of values")
        for i, kind in enumerate(kinds):
            self._argument(f"leaves[{i}]", kind)
            if kind[-1] != i and kind[0] in (DistTensor, Tensor):
                self._miss(f"leaves[{i}] is not leaves[{kind[-1]}]", "two arguments were one tensor")
        self.names["modes"] = modes
        around = self.object(self._fact("modes", modes()))
        self._miss(f"modes() != {around}", "torch.autocast or torch's default dtype around the call")
        enabled = self._fact("grad", torch.is_grad_enabled())
        self._miss(f"torch.is_grad_enabled() is not {enabled}", "torch.no_grad() around the call")
        self._miss("torch.is_inference_mode_enabled()", "torch.inference_mode() around the call")
        for root, name in zip(self.roots, self.recording.roots, strict=True):
            if isinstance(root, nn.Module):
                for path, module in root.named_modules():
                    self._module(module, f"{name}.{path}" if path else name)
            elif isinstance(root, Optimizer):
                self._optimizer(root, name)
        for where, had in self.recording.gradients:
            what = (
                "a parameter has no gradient before the step" if had else "a parameter has a gradient before the step"
            )
            self._miss(f"{self.place(where)}.grad is {'' if had else 'not '}None", what)
        given = [self._input(i, known) for i, known in enumerate(self.recording.inputs)]
        if self.recording.questions is not None:
            ask, answers = self.object(compiled(self.recording.questions)), self.object(self.recording.answers)
            self._miss(
                f"{ask}({', '.join(given)}) != {answers}", "a number that the step asks about (in an if, an int())"
            )
        self.lines.append((f"return ({''.join(g + ', ' for g in given)})", "return None"))
        fits = self._made("ready", "leaves", [line for line, _ in self.lines])
        said = [words for _, words in self.lines]
        return fits, lambda: self._made("why", "leaves", said)

    def _fact(self, key: Any, now: Any) -> Any:
        """What was so when the step was recorded."""
        return self.facts.setdefault(key, now)

    def _miss(self, condition: str, words: str) -> None:
        self.lines.append((f"if {condition}: return MISS", f"if {condition}: return {words!r}"))

    def _made(self, name: str, arguments: str, lines: Sequence[str]) -> Any:
        text = f"def {name}({arguments}):\n" + "\n".join(f"    {line}" for line in lines)
        exec(compile(text, "<recording>", "exec"), self.names)
        return self.names[name]

    def _argument(self, leaf: str, kind: Any) -> None:
        self.names["Tensor"] = Tensor
        if kind[0] is DistTensor:
            check = f"type({leaf}) is not DistTensor or {leaf}._spec is not {self.object(kind[1])}"
            check += f" or {leaf}.requires_grad is not {kind[2]}"
        elif kind[0] is Tensor:
            shape, stride, dtype, device = map(self.object, kind[1:5])
            check = f"type({leaf}) is not Tensor or {leaf}.shape != {shape} or {leaf}.stride() != {stride}"
            check += (
                f" or {leaf}.dtype is not {dtype} or {leaf}.device != {device} or {leaf}.requires_grad is not {kind[5]}"
            )
        elif kind[0] is float:
            check = f"type({leaf}) is not float"
        else:
            value = self.object(kind[2])
            same = f"{leaf} != {value}" if isinstance(kind[2], STILL) else f"{leaf} is not {value}"
            check = f"type({leaf}) is not {self.object(kind[1])} or {same}"
        self._miss(check, "an argument")

    def _module(self, module: nn.Module, name: str) -> None:
        self._unchanged(module.__dict__, self._fact((name, "still"), values_of(module)), name)
        if lost := self._fact((name, "replaced"), ""):
            self._miss("True", f"{name}.{lost} is replaced by the step; write into it: {lost}.copy_(...)")
        if module._modules:
            held = self.object(self._fact((name, "modules"), tuple(module._modules.values())))
            self._miss(f"tuple({self.object(module._modules)}.values()) != {held}", f"the modules in {name}")
        params = self.object(module._parameters)
        wants = self._fact(
            (name, "grads"), [(n, p.requires_grad) for n, p in module._parameters.items() if p is not None]
        )
        self._hooks(module, name)
        if wants:
            differs = " or ".join(f"{params}[{n!r}].requires_grad is not {flag}" for n, flag in wants)
            self._miss(differs, f"requires_grad of a parameter of {name}")

    def _hooks(self, module: nn.Module, name: str) -> None:
        """The hooks of a module and of its parameters, and a forward of its own."""
        own = self._fact((name, "forward"), module.__dict__.get("forward"))
        self._miss(f"{self.object(module.__dict__)}.get('forward') is not {self.object(own)}", f"{name}.forward")
        params = self.object(module._parameters)
        held = [self.object(getattr(module, kind)) for kind in HOOKS]
        held += [
            f"{params}[{n!r}].{kind}" for n, p in module._parameters.items() if p is not None for kind in TENSOR_HOOKS
        ]
        keys = f"({', '.join(f'*({h} or ())' for h in held)},)"
        known = self._fact((name, "hooks"), eval(keys, self.names))
        self._miss(" or ".join(held) if not known else f"{keys} != {self.object(known)}", f"hooks of {name}")

    def _unchanged(self, holder: dict[str, Any], still: dict[str, Any], name: str) -> None:
        """Entries of a dict must be what they were."""
        if still:
            values = tuple(still.values()) if len(still) > 1 else next(iter(still.values()))
            differs = f"{self.object(itemgetter(*still))}({self.object(holder)}) != {self.object(values)}"
            said = self.object(partial(changed, name, still, holder))
            self.lines.append((f"if {differs}: return MISS", f"if {differs}: return {said}()"))

    def _optimizer(self, optimizer: Optimizer, name: str) -> None:
        keys = [tuple(optimizer.state.get(p, ())) for group in optimizer.param_groups for p in group["params"]]
        if self._fact((name, "states"), keys) != keys:
            raise KeyError(f"a state of {name}")
        own, state, groups = map(self.object, (optimizer, optimizer.state, optimizer.param_groups))
        held = self.object([*optimizer.state.values()])
        self._miss(f"{own}.state is not {state} or {own}.param_groups is not {groups}", f"{name} was loaded")
        count = f"len({state}) != {len(optimizer.state)}"
        self._miss(f"{count} or not all(map(is_, {state}.values(), {held}))", f"{name} has other states")
        self._miss(f"len({groups}) != {len(optimizer.param_groups)}", f"{name} has other groups")
        places = self._parameters()
        for i, group in enumerate(optimizer.param_groups):
            one = self.object(group)
            self._miss(
                f"{groups}[{i}] is not {one} or len({one}['params']) != {len(group['params'])}", f"a group of {name}"
            )
            still = self._fact((name, i, "options"), options_of(group))
            named = [places.get(id(p)) for p in group["params"]]
            if named != self._fact((name, i, "params"), named):  # a module's parameter, exchanged there, not here
                raise KeyError(f"a parameter of {name}")
            params = self.object([*group["params"]])
            self._miss(f"not all(map(is_, {one}['params'], {params}))", f"a parameter in a group of {name}")
            self._unchanged(group, still, f"{name}.param_groups[{i}]")

    def _parameters(self) -> dict[int, tuple[int, str]]:
        """Where in the modules a parameter is, by its identity."""
        roots = [(r, root) for r, root in enumerate(self.roots) if isinstance(root, nn.Module)]
        return {id(p): (r, n) for r, root in reversed(roots) for n, p in nn.Module.named_parameters(root)}

    def _input(self, i: int, known: Any) -> str:
        if known.kind == "constant":
            return self.object(self.recording.constants[i])
        place, name = self.place(known.where), f"i{i}"
        if known.kind == "generator":
            return place
        if known.kind == "argument" and known.spec is None:
            return place
        self.lines.append((f"{name} = {place}",) * 2)
        if known.kind == "number":
            self._miss(f"type({name}) is not float", f"{known.name} is no float")
            return name
        if known.spec is not None:
            self._miss(f"{name}._spec is not {self.object(known.spec)}", f"{known.name} lies otherwise")
            return f"{name}._local"
        if known.kind == "gradient":  # a new tensor at each step, and none while it is bound
            facts = ", ".join(map(self.object, known.facts))
            self._miss(f"{name} is None or not is_like({name}, {facts})", f"{known.name} is another tensor")
            return name
        now = at(known.where, self.roots, ())
        if (tuple(now.shape), tuple(now.stride()), now.dtype, now.device) != known.facts:
            raise KeyError(known.name)
        self._miss(f"{name} is not {self.object(now)}", f"{known.name} is another tensor")
        return name

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
