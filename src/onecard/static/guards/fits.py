"""Whether a recording fits a call and the state of the program: the lines of a function that asks, made for one recording."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from operator import is_, itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from onecard._torch import names as _torch
from onecard._torch.names import tree_flatten, tree_unflatten
from onecard.static.code.compiled import compiled, step_function
from onecard.static.code.source import Code, Source
from onecard.static.code.spent import spent
from onecard.static.guards.arguments import changed, is_like, modes, one_memory
from onecard.static.guards.before import STILL, options_of, values_of
from onecard.static.guards.conditions import answered_otherwise
from onecard.static.guards.entries import same_entries, same_states
from onecard.static.guards.hooked import HOOKS, same_code, same_keys, stands_for_another
from onecard.static.guards.lookup import now_at
from onecard.static.guards.places import at, module_at, optimizer_at
from onecard.static.guards.unchanged import differs, is_still
from onecard.static.step.memory import GraphMemory
from onecard.static.step.step import BESIDE, MISS, Input, RecordedStep, Where
from onecard.tensor.dist_tensor import DistTensor, wrap
from onecard.train import unreduced
from onecard.train.common_memory import shared
from onecard.train.own_parameters import named_parameters, own_parameters

_HOOKS_OF_TENSORS = ("{}._backward_hooks", "{}._post_accumulate_grad_hooks")
_HELD = ("parameter", "buffer", "state", "tensor")


class TakenIn(KeyError):
    """A step that was recorded has had parameters taken in, of which it did not know when it began."""


class Fits(Source):
    """The lines that ask.

    Attributes:
        facts: what was so when the step was recorded, as far as a recording does not say it.
        lines: each with the line in its place that says why it does not fit.
        given: where the inputs of the graph are, after these lines.
    """

    def __init__(self, recording: RecordedStep, roots: list[Any], kinds: Sequence[Any], facts: dict[Any, Any]) -> None:
        super().__init__(
            MISS=MISS, run=step_function(recording), below=_torch.below_autograd, spent=spent, tree_unflatten=tree_unflatten,
            DistTensor=DistTensor, Tensor=Tensor, wrap=wrap, is_=is_, is_like=is_like, differs=differs, now_at=now_at,
            is_still=is_still, one_memory=one_memory, read=unreduced.read, write=unreduced.write, words_now=unreduced.words_now,
            replayed=unreduced.replayed,
            is_grad_enabled=torch.is_grad_enabled, is_inference=torch.is_inference_mode_enabled, flatten=tree_flatten,
            modes=modes, default_dtype=torch.get_default_dtype, any_autocast=_torch.any_autocast,
        )  # fmt: skip
        self.recording, self.roots, self.kinds, self.facts = recording, roots, tuple(kinds), facts
        self.lines: list[tuple[Code, Code]] = []
        self._call()
        modules = list[tuple[str, nn.Module]]()
        for root, name in zip(roots, recording.roots, strict=True):
            if isinstance(root, nn.Module):
                for path, module in root.named_modules():
                    modules.append((f"{name}.{path}" if path else name, module))
                    self._module(module, modules[-1][0])
            elif isinstance(root, Optimizer):
                self._optimizer(root, name)
        same_entries(self, modules)
        same_code(self, roots)
        self._gradients()
        self.given = [self._input(i, known) for i, known in enumerate(recording.inputs)]
        self._ties()
        if recording.conditions is not None:
            ask, answers = self.slot(compiled(recording.conditions)), self.slot(recording.answers)
            now = self.code("{}({})", ask, self.joined(", ", self.given))
            names = [known.name for known in recording.inputs]
            words = self.slot(partial(answered_otherwise, recording.conditions, names, recording.answers))
            asked = self.code("if {} != {}: return ", now, answers)
            self.lines.append((self.code("{}MISS", asked), self.code("{}{}({})", asked, words, now)))

    # -- places ------------------------------------------------------------------------------------------------------------

    def place(self, where: Where) -> Code:
        """An expression for the object at a place. What a place names is looked up as data, here and now.

        Raises:
            KeyError: there is no such place.
        """
        kind, *rest = where
        if kind == "argument":
            return self.code("leaves[{}]", self.slot(rest[0]))
        if kind == "constant":
            raise KeyError(kind)
        if kind == "gradient":
            # Who reads that of a watched one has it summed.
            words = "read({})" if rest[0] in self.watched else "{}.grad"
            return self.code(words, self.place(rest[0]))
        if kind in BESIDE:
            return self.code("{}.kept" if kind == "kept" else "{}.wide", self.slot(self.watched[rest[0]]))
        if kind == "trained":
            return self.slot(at(where, self.roots, ()))
        root = self.roots[rest[0]]
        if kind in ("parameter", "buffer"):
            module, name = module_at(root, rest[1])
            held = own_parameters(module) if kind == "parameter" else module._buffers
            return self.code("{}[{}]", self.slot(held), self.slot(name))
        if kind == "group":
            group = self.code("{}[{}]", self.slot(optimizer_at(root).param_groups[rest[1]]), self.slot(rest[2]))
            return group if rest[3] is None else self.code("{}[{}]", group, self.slot(rest[3]))
        if kind == "state":
            param = optimizer_at(root).param_groups[rest[1]]["params"][rest[2]]
            return self.code("{}[{}]", self.slot(root.state[param]), self.slot(rest[3]))
        return self.slot(at(where, self.roots, ()))

    # -- lines -------------------------------------------------------------------------------------------------------------

    def fact(self, key: Any, now: Any) -> Any:
        """What was so when the step was recorded."""
        return self.facts.setdefault(key, now)

    def miss(self, condition: Code, words: str | Callable[[], str]) -> None:
        """It does not fit where the condition holds; words for it, or what finds them."""
        said = self.code("{}" if isinstance(words, str) else "{}()", self.slot(words))
        self.lines.append((self.code("if {}: return MISS", condition), self.code("if {}: return {}", condition, said)))

    def _any(self, conditions: Sequence[Code]) -> Code:
        return self.joined(" or ", conditions)

    # -- the call ----------------------------------------------------------------------------------------------------------

    def _call(self) -> None:
        self.miss(self.code("len(leaves) != {}", self.slot(len(self.kinds))), "it is given another number of values")
        for i, kind in enumerate(self.kinds):
            leaf = self.code("leaves[{}]", self.slot(i))
            self._argument(leaf, kind)
            if kind[-1] != i and kind[0] in (DistTensor, Tensor):
                other = self.code("leaves[{}]", self.slot(kind[-1]))
                self.miss(self.code("{} is not {}", leaf, other), "two arguments were one tensor")
        self._apart()
        around = self.fact("modes", modes())
        plain = isinstance(around, torch.dtype)
        words = "default_dtype() is not {} or any_autocast()" if plain else "modes() != {}"
        self.miss(self.code(words, self.slot(around)), "torch.autocast or torch's default dtype around the call")
        enabled = self.fact("grad", torch.is_grad_enabled())
        self.miss(self.code("is_grad_enabled() is not {}", self.slot(enabled)), "torch.no_grad() around the call")
        self.miss(self.code("is_inference()"), "torch.inference_mode() around the call")

    def _apart(self) -> None:
        """An argument that the step writes to has its memory alone: passes take arguments for memory of their own each."""
        tensors = [i for i, kind in enumerate(self.kinds) if kind[0] in (DistTensor, Tensor) and kind[-1] == i]
        if len(tensors) < 2:
            return
        graph = self.recording.graph
        written = GraphMemory(graph).written
        nodes = zip(self.recording.inputs, graph.find_nodes(op="placeholder"), strict=True)
        for i in [known.where[1] for known, node in nodes if known.kind == "argument" and node in written]:
            others = (self.code("leaves[{}]", self.slot(j)) for j in tensors if j != self.kinds[i][-1])
            asked = self.code("one_memory(leaves[{}], {})", self.slot(i), self.joined(", ", others))
            self.miss(asked, "the step writes to an argument, which has memory in common with another one")

    def _argument(self, leaf: Code, kind: Any) -> None:
        if kind[0] is DistTensor:
            spec, other = self.slot(kind[1]), "{}._spec is not {} and {}._spec.with_hint(()) is not {}"
            check = [self.code("type({}) is not DistTensor", leaf), self.code(other, leaf, spec, leaf, spec)]
        elif kind[0] is Tensor:
            asked = ("{}.shape != {}", "{}.stride() != {}", "{}.dtype is not {}", "{}.device != {}")
            check = [self.code("type({}) is not Tensor", leaf)]
            check += [self.code(ask, leaf, self.slot(fact)) for ask, fact in zip(asked, kind[1:5], strict=True)]
        elif kind[0] is float:
            check = [self.code("type({}) is not float", leaf)]
        else:
            same = "{} != {}" if isinstance(kind[2], STILL) else "{} is not {}"
            check = [
                self.code("type({}) is not {}", leaf, self.slot(kind[1])),
                self.code(same, leaf, self.slot(kind[2])),
            ]
        if kind[0] in (DistTensor, Tensor):
            check.append(self.code("{}.requires_grad is not {}", leaf, self.slot(kind[-2])))
        self.miss(self._any(check), "an argument")

    # -- the program -------------------------------------------------------------------------------------------------------

    def _module(self, module: nn.Module, name: str) -> None:
        self._unchanged(module.__dict__, self.fact((name, "still"), values_of(module)), name)
        if lost := self.fact((name, "replaced"), ""):
            self.miss(self.code("True"), f"{name}.{lost} is replaced by the step; write into it: {lost}.copy_(...)")
        if module._modules:
            held = self.slot(self.fact((name, "modules"), tuple(module._modules.values())))
            self.miss(self.code("tuple({}.values()) != {}", self.slot(module._modules), held), f"the modules in {name}")
        params = self.slot(own_parameters(module))
        wants = self.fact(
            (name, "grads"), [(n, p.requires_grad) for n, p in own_parameters(module).items() if p is not None]
        )
        self._hooks(module, name)
        if wants:
            asked = "{}[{}].requires_grad is not {}"
            differ = [self.code(asked, params, self.slot(n), self.slot(flag)) for n, flag in wants]
            # Who asks for parameters is given what these stand for, and freezes that.
            trained = [(x.stands_for, flag) for n, flag in wants if stands_for_another(x := own_parameters(module)[n])]
            differ += [self.code("{}.requires_grad is not {}", self.slot(x), self.slot(flag)) for x, flag in trained]
            self.miss(self._any(differ), f"requires_grad of a parameter of {name}")

    def _hooks(self, module: nn.Module, name: str) -> None:
        """The hooks of a module and of its parameters, and a forward of its own."""
        own, space = self.fact((name, "forward"), module.__dict__.get("forward")), self.slot(module.__dict__)
        asked = self.code("{}.get({}) is not {}", space, self.slot("forward"), self.slot(own))
        self.miss(asked, f"{name}.forward")
        params, every = self.slot(own_parameters(module)), own_parameters(module)
        held = [self.code("{}[{}]", params, self.slot(n)) for n, p in every.items() if p is not None]
        standing = [p for p in every.values() if stands_for_another(p)]
        held += [self.slot(p.stands_for) for p in standing]
        hooks = [self.slot(getattr(module, kind)) for kind in HOOKS]
        hooks += [self.code(words, p) for p in held for words in _HOOKS_OF_TENSORS]
        hooks += [self.slot(p.later_hooks) for p in standing]
        keys = self.code("({},)", self.joined(", ", (self.code("*({} or ())", h) for h in hooks)))
        known = self.fact((name, "hooks"), self.value(keys))
        differ = self._any(hooks) if not known else self.code("{} != {}", keys, self.slot(known))
        self.miss(differ, f"hooks of {name}")

    def _unchanged(self, holder: dict[str, Any], still: dict[str, Any], name: str) -> None:
        """Entries of a dict must be what they were."""
        if still:
            values = tuple(still.values()) if len(still) > 1 else next(iter(still.values()))
            now = self.code("{}({})", self.slot(itemgetter(*still)), self.slot(holder))
            self.miss(self.code("{} != {}", now, self.slot(values)), partial(changed, name, still, holder))

    def _optimizer(self, optimizer: Optimizer, name: str) -> None:
        keys = [tuple(optimizer.state.get(p, ())) for group in optimizer.param_groups for p in group["params"]]
        if self.fact((name, "states"), keys) != keys:
            raise KeyError(f"a state of {name}")
        own, state, groups = map(self.slot, (optimizer, optimizer.state, optimizer.param_groups))
        loaded = self.code("{}.state is not {} or {}.param_groups is not {}", own, state, own, groups)
        self.miss(loaded, f"{name} was loaded")
        held, count = self.slot([*optimizer.state.values()]), self.slot(len(optimizer.state))
        others = self.code("len({}) != {} or not all(map(is_, {}.values(), {}))", state, count, state, held)
        self.miss(others, f"{name} has other states")
        count = self.slot(len(optimizer.param_groups))
        self.miss(self.code("len({}) != {}", groups, count), f"{name} has other groups")
        same_keys(self, (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks), name)
        same_states(self, optimizer, name)
        places = self._parameters()
        for i, group in enumerate(optimizer.param_groups):
            self._group(optimizer, i, name, [places.get(id(p)) for p in group["params"]])

    def _group(self, optimizer: Optimizer, i: int, name: str, named: list[Any]) -> None:
        group, groups = optimizer.param_groups[i], self.slot(optimizer.param_groups)
        one, params = self.slot(group), self.slot([*group["params"]])
        now = self.code("{}[{}]", one, self.slot("params"))
        here = self.code("{}[{}] is not {}", groups, self.slot(i), one)
        count = self.code("len({}) != {}", now, self.slot(len(group["params"])))
        self.miss(self.code("{} or {}", here, count), f"a group of {name}")
        still = self.fact((name, i, "options"), options_of(group))
        if named != self.fact((name, i, "params"), named):  # a module's parameter, exchanged there, not here
            raise KeyError(f"a parameter of {name}")
        self.miss(self.code("not all(map(is_, {}, {}))", now, params), f"a parameter in a group of {name}")
        self._unchanged(group, still, f"{name}.param_groups[{i}]")

    def _parameters(self) -> dict[int, tuple[int, str]]:
        """Where in the modules a parameter is, by its identity."""
        roots = [(r, root) for r, root in enumerate(self.roots) if isinstance(root, nn.Module)]
        return {id(p): (r, n) for r, root in reversed(roots) for n, p in named_parameters(root)}

    def _gradients(self) -> None:
        """Whether there are gradients before the step, where it matters: one that is dropped unread may as well not be there."""
        read = {known.where for known in self.recording.inputs}
        self._unreduced(read)
        for where, had in self.recording.gradients:
            if had and ("gradient", where) in read:
                gone = self.code("{} is None", self.place(("gradient", where)))
                self.miss(gone, "a parameter has no gradient before the step")
            elif not had and (where[0] == "argument" or not stands_for_another(at(where, self.roots, ()))):
                words = "a parameter has a gradient before the step"
                self.miss(self.code("{} is not None", self.place(("gradient", where))), words)

    def _unreduced(self, read: set[Where]) -> None:
        """What is known of gradients of which ranks have summands: which messages are due depends on it.

        Raises:
            TakenIn: they are others than when it was recorded.
        """
        known = self.recording.unreduced
        held = [where for where, _ in self.recording.gradients if where[0] != "argument"]
        found = {where: unreduced.watched(at(where, self.roots, ())) for where in held}
        self.watched = {where: state for where, state in found.items() if state is not None}
        if {where for where, *_ in known} != {*self.watched}:
            raise TakenIn("what fleet knows of a parameter's gradient")
        dropped = {where for where, had in self.recording.gradients if had and ("gradient", where) not in read}
        asked = [(where, before) for where, before, *_ in known if where not in dropped]
        if asked:
            parameters = self.slot([at(where, self.roots, ()) for where, _ in asked])
            states, words = self.slot([self.watched[where] for where, _ in asked]), self.slot([b for _, b in asked])
            differ = self.code("words_now({}, {}) != {}", parameters, states, words)
            self.miss(
                differ, "what is known of gradients before the step: read, summed, or made by an earlier backward"
            )

    def _ties(self) -> None:
        """Places that hold one tensor now must have held one when it was recorded."""
        first: dict[int, int] = {}
        held = [known for known in self.recording.inputs if known.kind in ("parameter", "buffer")]
        ties = [first.setdefault(id(at(known.where, self.roots, ())), i) for i, known in enumerate(held)]
        if (before := self.fact("ties", ties)) != ties:
            i = next(i for i, (was, now) in enumerate(zip(before, ties, strict=True)) if was != now)
            raise KeyError(f"{held[i].name} of its own: it is {held[ties[i]].name}, too")
        self._common_memory()

    def _common_memory(self) -> None:
        """Tensors that have memory in common are those that had: passes go by it."""
        inputs = self.recording.inputs
        # Not distributed ones: parts of parameters are gathered and given back, and lie elsewhere meanwhile.
        held = {i: at(x.where, self.roots, ()) for i, x in enumerate(inputs) if x.kind in _HELD and x.spec is None}
        now = shared([*held.values()])
        order = [*held]
        pairs = {frozenset((order[i], order[j])) for i, others in now.items() for j in others}
        before = {frozenset((i, j)) for i in held for j in inputs[i].shares if j in held}
        for one, other in map(sorted, pairs ^ before):
            words = "apart from" if frozenset((one, other)) in pairs else "in common with"
            raise KeyError(f"memory of {inputs[one].name} {words} that of {inputs[other].name}")
        for i, known in enumerate(inputs):
            for j in known.shares:
                if "argument" in (known.kind, inputs[j].kind):
                    asked = self.code("not one_memory({}, {})", self.given[i], self.given[j])
                    self.miss(asked, f"{known.name} had memory in common with {inputs[j].name}")

    # -- the inputs --------------------------------------------------------------------------------------------------------

    def _input(self, i: int, known: Input) -> Code:
        if known.kind == "constant":
            return self.slot(self.recording.constants[i])
        place = self.place(known.where)
        if known.kind == "generator":
            return place
        if known.kind == "argument" and self._looked_at(known):  # it was looked at
            return place if known.spec is None else self.code("{}._local", place)
        name = self.variable()
        self.lines.append((self.code("{} = {}", name, place),) * 2)
        if known.kind == "number":
            self.miss(self.code("type({}) is not float", name), f"{known.name} is no float")
            return name
        if known.spec is not None:
            self.miss(self.code("{}._spec is not {}", name, self.slot(known.spec)), f"{known.name} lies otherwise")
            if known.kind in ("parameter", "buffer"):
                self._is_the_one(name, known)
            return self.code("{}._local", name)
        if known.kind == "gradient":  # a new tensor at each step, and none while it is bound
            facts = self.joined(", ", map(self.slot, known.facts))
            differ = self.code("{} is None or not is_like({}, {})", name, name, facts)
            self.miss(differ, f"{known.name} is another tensor")
            return name
        now = at(known.where, self.roots, ())
        if not isinstance(now, Tensor):
            raise KeyError(f"tensor as {known.name}: it is {now!r}")
        if (tuple(now.shape), tuple(now.stride()), now.dtype, now.device) != known.facts:
            raise KeyError(known.name)
        self._is_the_one(name, known)
        return name

    def _looked_at(self, known: Input) -> bool:
        """Whether an argument is what the input is made of, as a look at it has shown."""
        return known.spec is None or known.spec.with_hint(()) is self.kinds[known.where[1]][1]

    def _is_the_one(self, name: Code, known: Input) -> None:
        now = at(known.where, self.roots, ())
        self.miss(self.code("{} is not {}", name, self.slot(now)), f"{known.name} is another tensor")
