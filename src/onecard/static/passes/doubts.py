"""Gradient merge: what makes a merged step another one than that of the whole batch, in words."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import fx

from onecard._torch.names import OpOverload
from onecard.comm.base.state import faked
from onecard.static.passes import row_draws
from onecard.static.passes.count_chain import NLL
from onecard.static.passes.counted import Count, CountFinder, not_ignored
from onecard.static.passes.dependence import Doubt, Verdict
from onecard.static.passes.kept_once import JOINED
from onecard.static.passes.once import Once, phase_of, words
from onecard.static.passes.row_linear import is_linear, makes_alike
from onecard.static.passes.whole_counts import DIVISIONS, MEAN, is_number, is_whole, scales
from onecard.static.price.price import call_of

aten = torch.ops.aten


def doubts(
    graph: fx.Graph, k: int, leaves: Sequence[Any], once: Once, seen: Verdict | None = None
) -> tuple[list[Doubt], tuple[Count, ...]]:
    """What to tell the user, from the graph of one microbatch and the arguments of the whole step; and what to look at later.

    ``seen``: what a run has shown; without it a loop over microbatches is meant, and may keep what is a microbatch's.

    A loss that is divided by a count of its microbatch is a mean of means, unless the counts are equal. Those that are not the
    whole batch's (``whole_counts``) are computed from the batch that is recorded, on this rank, and from later ones, as labels
    are not ignored in each. One that depends on parameters is taken to differ.
    """
    said, counts = list[Doubt](), list[Count]()
    for words_of, count in _divided(graph, once, k):
        if faked.here:  # the step with data tells it
            continue
        if count is None or count.differs(leaves):
            said.append(Doubt(words_of, True))
        else:
            counts.append(replace(count, said=words_of))
    said += [
        Doubt(
            f"{words(n)} writes into the program ahead of the backward pass, the same for each microbatch, {k} times a call, "
            "where one card does so once: put it at the beginning of the step, or behind the optimizer's step",
            False,
        )
        for n in once.repeated()
    ]
    said += [
        Doubt(
            f"{words(n)} writes into the program what each microbatch has its own of, {k} times a call, where one card writes "
            "what the batch gives, once: return it, and keep it behind the call (a sum over rows may be added: += x.sum())",
            False,
        )
        for n in once.kept()
        if not (seen is None or "batch_norm" in str(n.target) or n.meta["line"] in (*seen.normalized, *seen.summed))
    ]
    said += [
        Doubt(
            f"{words(node)} reads what {words(n)} adds to behind it, so that all microbatches but the first have rows of others "
            "in it: read it ahead of the call, and give it as a tensor without dims",
            True,
        )
        for node, n in [at for at in once.read_ahead() if seen is not None and at[1].meta["line"] in seen.summed][:1]
    ]
    said += [
        Doubt(
            f"{words(n)}, in a hook, writes into the program what each microbatch has its own of, {k} times a call: read p.grad "
            "behind backward() instead, where it is the batch's",
            False,
        )
        for n in once.hooked()
        if seen is not None
    ]
    if seen is not None and (others := row_draws.left_out([*graph.nodes], once.keys, once.tail)):
        said.append(
            Doubt(
                f"{words(others[0])} draws keys, beside what torch draws itself or what is drawn behind the optimizer's step: "
                f"the random numbers of the step are drawn for one of {k} microbatches after the other, and are not the batch's",
                False,
            )
        )
    said += [
        Doubt(
            f"{words(n)}, in a hook or a Function, is not linear in the gradient, and what it is given there is a microbatch's: "
            "change p.grad behind backward() instead, where it is the batch's",
            True,
        )
        for n in _bent(graph, once)
    ]
    return list(dict.fromkeys(said)), tuple(counts)


def _of_division(where: str, why: str) -> str:
    return (
        f"{where} scales by {why}, of which each microbatch has its own: gradients and loss are means of the microbatches' "
        "means, not the mean over the batch. Pass the batch's own count as a tensor without dims (it is not cut), divide a sum "
        "by it, and give avg=False"
    )


def _divided(graph: fx.Graph, once: Once, k: int) -> Iterator[tuple[str, Count | None]]:
    """Divisions by what each microbatch has, in words, and by what; None: by more than the batch gives."""
    counts, matters = CountFinder(graph, once, k), _given_on(graph, once)
    for node in graph.nodes:
        if phase_of(node) != "forward" or node in once.tail or node not in once.own or node not in matters:
            continue
        if node.target in NLL and node.args[3] == MEAN:
            labels, weights, ignored = node.args[1], node.args[2], node.args[4]
            if weights is not None:
                yield _of_division(words(node), "the weights of its labels"), None
            else:
                count = counts.of(labels, node, partial(not_ignored, ignored=ignored))
                yield _of_division(words(node), "how many of its labels are not ignored"), count
        elif not any(map(is_whole, node.args)):
            numbers = [n for n in (node.args[i] for i in scales(node)) if is_number(n) and once.has_own(n, node)]
            for by in numbers:
                if node.target in (*DIVISIONS, aten.where.self) or counts.counts(
                    by, node
                ):  # a product of losses is no count
                    yield _of_division(words(node), "a value"), counts.of(by, node)


def _given_on(graph: fx.Graph, once: Once) -> set[fx.Node]:
    """What gradients, results, and means and sums over rows are made of; what a step keeps beside these is told by itself."""
    made: Any = next(iter(reversed(graph.nodes))).args[0]
    found = {n for n in made if isinstance(n, fx.Node) and not once.made_of_batch(n)}
    places = {root for n in found for root in once.memory.roots[n]}
    roots, writes = once.memory.roots, once.memory.writes
    for node in reversed(graph.nodes):
        if node.op == "output":
            continue
        ends = phase_of(node) == "backward" or JOINED in node.meta
        if ends or node in found or not places.isdisjoint(writes.get(node, ())):
            found.update([node, *node.all_input_nodes])
            places.update(root for n in node.all_input_nodes for root in roots[n])
    return found


def _bent(graph: fx.Graph, once: Once) -> Iterator[fx.Node]:
    """What Python makes of a microbatch's gradients, not autograd itself, and is not known to be linear."""
    passes, now = dict[fx.Node, int](), 0  # gradients, and memory that has some, by the backward pass that they are of
    memory = once.memory

    def pass_of(node: fx.Node) -> int:
        return max((passes.get(n, 0) for n in (node, *memory.roots[node])), default=0)

    for node in graph.nodes:
        if node.target in _BEGINS and node.users and all(phase_of(user) == "backward" for user in node.users):
            passes[node] = now = now + 1
        latest = max(map(pass_of, node.all_input_nodes), default=0)
        if phase_of(node) != "backward" or node in once.tail or not latest:
            continue
        bends = (
            latest == now
            and node.meta.get("hooked")
            and _bends(node, {n for n in node.all_input_nodes if pass_of(n) == now})
        )
        passes.update(dict.fromkeys(memory.writes.get(node, ()), latest))
        if bends:
            yield node
        else:
            passes[node] = max(pass_of(node), latest)  # those of an earlier pass are values to a later one


def _bends(node: fx.Node, gradients: Collection[fx.Node]) -> bool:
    """Whether an operator is not known to be linear in gradients."""
    if not isinstance(node.target, OpOverload):  # a message, or another function of ours
        return False
    call, operands = call_of(node)
    given = {i for i, n in enumerate(operands) if n in gradients}
    return not makes_alike(call.schema) and not is_linear(call, given)


_BEGINS = (aten.ones_like.default, aten.full.default, aten.full_like.default)
