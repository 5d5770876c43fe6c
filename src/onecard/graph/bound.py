"""A recording bound to a program: a function that takes its inputs from their places, replays, and puts back what it made.

Before anything runs it is asked whether the recording fits: the same shapes and layouts, the same modules in the same mode,
the same answers to what was asked of numbers. All of that is one Python function made for this recording.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from operator import is_, itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from onecard import _torch
from onecard._torch import tree_flatten, tree_unflatten
from onecard.graph.compiled import compiled
from onecard.graph.kinds import ADVICE, changed, in_words, is_like, is_same, kind_of, kinds_of, modes
from onecard.graph.places import STILL, at, options_of, values_of
from onecard.graph.reach import HOOKS, TENSOR_HOOKS, Reached, differs, present
from onecard.graph.rechecked import NEVER, Checks
from onecard.graph.recording import MISS, Effect, Output, Recording, Where
from onecard.graph.spent import spent
from onecard.tensor.dist_tensor import DistTensor, wrap


class Bound:
    """A recording and the objects of a program that it belongs to.

    Attributes:
        seen: what the function reaches by name, if that is to be as it was, too.
        checks: when it is compared with the step itself, and what with.
    """

    def __init__(self, recording: Recording, roots: Sequence[Any], kinds: Sequence[Any], facts: Any = None) -> None:
        self.recording, self.roots, self.kinds = recording, list(roots), tuple(kinds)
        self._facts: dict[Any, Any] = {} if facts is None else facts
        self.seen: Reached | None = None
        self.checks: Checks = NEVER
        self._writer = _Writer(recording, self.roots, self._facts)
        self._writer.check(self.kinds)

    @cached_property
    def replay(self) -> Callable[[Any, Any], Any]:
        """From a call's arguments what the function returns; MISS if the recording does not fit them, or the program's state."""
        return self._writer.replay(self.seen)

    @cached_property
    def ready(self) -> Callable[[Sequence[Any]], Any]:
        """From the leaves of the arguments the graph's inputs, or MISS."""
        return self._writer.ready()

    def reading(self, seen: Reached) -> Bound:
        """The same, which fits only if what the function reaches by name is as it was."""
        self.seen, self.replay = seen, self._writer.replay(seen)
        return self

    def kinds_fit(self, leaves: Sequence[Any]) -> bool:
        """Whether the arguments are of the kinds that were recorded."""
        now = kinds_of(leaves)
        return len(now) == len(self.kinds) and all(map(is_same, now, self.kinds))

    def seen_differs(self) -> str:
        """What of that is not as it was, in words; "" if all is."""
        return self.seen.difference() if self.seen is not None else ""

    def difference(self, leaves: Sequence[Any], names: Sequence[str]) -> str:
        """Which argument does not fit, in words; "" if all do."""
        for i, (leaf, kind) in enumerate(zip(leaves, self.kinds, strict=False)):
            now = kind_of(leaf)
            if not is_same(now, kind[:-1]):
                return f"argument {names[i]!r} was {in_words(kind)} and is {in_words(now)}{ADVICE.get(now[0], '')}"
        try:
            said = self._writer.why()(leaves)
        except (KeyError, AttributeError, IndexError) as fault:
            said = f"{fault} is gone"
        return f"what differs: {said}" if isinstance(said, str) else ""

    def again(self) -> Bound | None:
        """Bound anew, to the tensors that are now in the places: states that were loaded. All else must be as it was."""
        try:
            made = Bound(self.recording, self.roots, self.kinds, self._facts)
        except (KeyError, AttributeError, IndexError):
            return None
        made.checks = self.checks
        return made if self.seen is None else made.reading(self.seen)


class _Writer:
    """The text of the functions."""

    def __init__(self, recording: Recording, roots: list[Any], facts: dict[Any, Any]) -> None:
        self.recording, self.roots, self.facts = recording, roots, facts
        self.names: dict[str, Any] = {
            "MISS": MISS,
            "run": recording.run,
            "below": _torch.below_autograd,
            "spent": spent,
            "tree_unflatten": tree_unflatten,
            "DistTensor": DistTensor,
            "wrap": wrap,
            "is_": is_,
            "is_like": is_like,
            "is_grad_enabled": torch.is_grad_enabled,
            "is_inference": torch.is_inference_mode_enabled,
            "differs": differs,
            "present": present,
            "flatten": tree_flatten,
            "modes": modes,
            "default_dtype": torch.get_default_dtype,
            "any_autocast": _torch.any_autocast,
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

    def check(self, kinds: Sequence[Any]) -> None:
        """Write down what has to be as it was, and where the inputs are."""
        self.kinds = kinds
        self._miss(f"len(leaves) != {len(kinds)}", "it is given another number of values")
        for i, kind in enumerate(kinds):
            self._argument(f"leaves[{i}]", kind)
            if kind[-1] != i and kind[0] in (DistTensor, Tensor):
                self._miss(f"leaves[{i}] is not leaves[{kind[-1]}]", "two arguments were one tensor")
        around = self.object(self._fact("modes", modes()))
        alone = (
            "default_dtype() is not {0} or any_autocast()"
            if isinstance(self.facts["modes"], torch.dtype)
            else "modes() != {0}"
        )
        self._miss(alone.format(around), "torch.autocast or torch's default dtype around the call")
        enabled = self._fact("grad", torch.is_grad_enabled())
        self._miss(f"is_grad_enabled() is not {enabled}", "torch.no_grad() around the call")
        self._miss("is_inference()", "torch.inference_mode() around the call")
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
        self.given = [self._input(i, known) for i, known in enumerate(self.recording.inputs)]
        if self.recording.questions is not None:
            ask, answers = self.object(compiled(self.recording.questions)), self.object(self.recording.answers)
            what = "a number that the step asks about (in an if, an int())"
            self._miss(f"{ask}({', '.join(self.given)}) != {answers}", what)

    def why(self) -> Any:
        """A function that says of leaves why the recording does not fit; None if it does."""
        return self._made("why", "leaves", [words for _, words in self.lines])

    def ready(self) -> Any:
        """A function from leaves to the graph's inputs, or MISS."""
        given = f"return ({''.join(g + ', ' for g in self.given)})"
        return self._made("ready", "leaves", [*(line for line, _ in self.lines), given])

    def replay(self, seen: Reached | None) -> Any:
        """The function that does it all. What a call's arguments look like, in which form, is a part of the checks."""
        tree = self.recording.call
        if tree_flatten((tuple(range(len(self.kinds))), {}))[1] == tree:  # each is a leaf: told by their types
            lines = ["if kwargs: return MISS", "leaves = args"]
        else:
            lines = ["leaves, tree = flatten((args, kwargs))", f"if tree != {self.object(tree)}: return MISS"]
        lines += self._reads(seen) if seen is not None else ()
        lines += [line for line, _ in self.lines]
        gone = "except (KeyError, AttributeError, IndexError): return MISS"  # what it is bound to is no longer there
        return self._made("replay", "args, kwargs", ["try:", *(f"    {x}" for x in lines), gone, *self._run()])

    def _reads(self, seen: Reached) -> Iterator[str]:
        """Plain values that the function reaches by name must be what they were, and other objects the same."""
        for _, holder, length in seen.lengths:
            yield f"if len({self.object(holder)}) != {length}: return MISS"
        for _, holder, key, value in seen.values:
            held, at_key, before = self.object(holder), self.object(key), self.object(value)
            now = f"{held}.cell_contents" if key is None else f"present({held}, {at_key})"
            if type(holder) in (list, dict):
                now = f"{held}[{at_key}]" if type(holder) is list else f"{held}.get({at_key})"
            yield f"if (x := {now}) is not {before} and differs(x, {before}): return MISS"

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
        if known.kind == "argument" and known.spec in (None, self.kinds[known.where[1]][1]):  # it was looked at
            return place if known.spec is None else f"{place}._local"
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

    def _run(self) -> list[str]:
        recording = self.recording
        read = {i.where for i in recording.inputs}
        lines = [
            f"{self.place(e.where)}.grad = None"  # memory that the program gives back before the forward pass
            for e in recording.effects
            if e.kind == "gradient" and ("gradient", e.where) not in read
        ]
        lines += ["with below():", f"    out = run({', '.join(self.given)})"]
        for effect in recording.effects:
            lines += self._effect(effect)
        shown = [self._result(r) for r in recording.results]
        if recording.tree.is_leaf():
            lines.append(f"return {shown[0]}")
        else:
            lines.append(f"return tree_unflatten([{', '.join(shown)}], {self.object(recording.tree)})")
        return lines

    def _output(self, output: Output) -> str:
        value = f"out[{output.position}]"
        return value if output.spec is None else f"wrap({value}, {self.object(output.spec)})"

    def _result(self, result: Any) -> str:
        if isinstance(result, Output):
            value = self._output(result)
            return f"spent({value})" if result.grad else value
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
