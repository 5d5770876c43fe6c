"""One price for one operator: what ``decide`` weighs is what a recording's price says, for every sample of the rules."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.utils.flop_counter import flop_registry

import onecard as oc
from onecard._torch.names import tree_leaves, tree_map
from onecard.machine.cost import Machine
from onecard.place.layout import Layout
from onecard.rules import registry
from onecard.rules.call import Call, dtype_of
from onecard.rules.decide import decide
from onecard.rules.samples import samples
from onecard.rules.verify.captured import Captured, capture
from onecard.rules.verify.trial import _aliases
from onecard.static.price import price
from onecard.static.step.facts import facts

aten = torch.ops.aten
MACHINE = Machine(launch=1e-9, dtypes={"float64": 1e11})
UNLIKE = {"unsafe_split.Tensor": "its results lie in its operand's memory, though its schema does not say so"}


def is_counted_otherwise(captured: Captured) -> bool:
    """The gradient of a grouped convolution's weight, which torch counts as if all channels met: too much by the groups."""
    return captured.func is aten.convolution_backward.default and captured.args[9] > 1 and captured.args[10][1]


@lru_cache(maxsize=1)
def calls() -> dict[Any, Captured]:
    """Every call of an operator with a row that the samples make."""
    found = {}
    for sample in samples():
        for call in capture(sample.program, str(sample)):
            if registry.find(call.func) is not None:
                found.setdefault(call.key, call)
    return found


def meta(value: Any) -> Any:
    if isinstance(value, Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    return torch.device("meta") if isinstance(value, torch.device) else value


def called(captured: Captured) -> Call | None:
    """The call as the dispatcher sees it; None if no rule decides it."""
    call = Call(captured.func, tree_map(meta, captured.args), tree_map(meta, captured.kwargs))
    row: Any = registry.find(captured.func)
    if call.schema.out or torch.Tag.inplace_view in captured.func.tags:
        return None
    try:
        call.results = row.results_of(call)
    except NotImplementedError:
        return None
    return call if row.form_for(call) is not None else None


def node_of(captured: Captured) -> fx.Node:
    """The same call in a recording."""
    graph = fx.Graph()

    def named(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        made = graph.placeholder("x")
        made.meta["tensor"] = facts(value)
        return made

    made = captured.func(*tree_map(lambda v: v.clone() if isinstance(v, Tensor) else v, captured.args),
                         **captured.kwargs)  # fmt: skip
    node = graph.call_function(captured.func, *tree_map(named, (captured.args, captured.kwargs)))
    writes = captured.func._schema.is_mutable
    if isinstance(made, Tensor):
        node.meta |= {"tensor": facts(made), "own": not writes and not captured.func.is_view}
    else:
        for i, x in enumerate(tree_leaves(made)):
            if isinstance(x, Tensor):
                graph.call_function(price.operator.getitem, (node, i)).meta["tensor"] = facts(x)
    return node


def decided(call: Call, machine: Machine) -> float:
    """What ``decide`` says of the call on one rank."""
    row: Any = registry.find(call.func)
    mesh = oc.ProcessMesh([0], ["x"])
    whole = [Layout.replicated(mesh, t.dim()) for t in call.operands]
    sized = ([(tuple(t.shape), t.element_size()) for t in made] for made in (call.operands, call.results))
    aliased = {r: whole[i] for r, i in _aliases(call).items()}
    bound = row.bound_for(call)
    found = decide(bound, whole, *sized, lambda *_: 0.0, aliased, machine=machine, dtype=dtype_of(call))
    assert found is not None, call.func
    return found.seconds


def both() -> Iterator[tuple[Captured, float, float]]:
    for captured in calls().values():
        call = called(captured)
        if call is not None and registry.find(captured.func).bound_for(call) is not None:  # type: ignore[union-attr]
            node = node_of(captured)
            yield captured, decided(call, MACHINE), price.operator_seconds(node, MACHINE, price.work(node))


@pytest.mark.proof
def test_decisions_and_prices_ask_the_same_work() -> None:
    wrong, count = [], 0
    for captured, one, other in both():
        count += 1
        if one != pytest.approx(other, rel=1e-9) and captured.name not in UNLIKE:
            wrong.append(f"{captured.name} {[tuple(x.shape) for x in tree_leaves(captured.args) if isinstance(x, Tensor)]}: "
                         f"decide {one:.3g}, price {other:.3g}")  # fmt: skip
    assert not wrong, f"{len(wrong)} of {count}\n" + "\n".join(wrong)
    assert count > 500


def test_multiply_adds_are_those_of_torchs_counter() -> None:
    wrong, count = [], 0
    for captured in calls().values():
        call = called(captured)
        if call is None or captured.func.overloadpacket not in flop_registry:
            continue
        count += 1
        copies = tree_map(lambda v: v.clone() if isinstance(v, Tensor) else v, (captured.args, captured.kwargs))
        result = captured.func(*copies[0], **copies[1])
        count_flops = flop_registry[captured.func.overloadpacket]
        torchs = count_flops(*copies[0], **copies[1], out_val=result) // 2
        made = price.work(node_of(captured)).macs
        if made != torchs and not (is_counted_otherwise(captured) and made < torchs):
            wrong.append(
                f"{captured.name} {[tuple(t.shape) for t in call.operands]} {captured.args[3:]}: {made}, torch {torchs}"
            )
    assert not wrong, f"{len(wrong)} of {count}\n" + "\n".join(wrong)


PLAIN, H100 = Machine(), Machine.preset("H100", peak=True)


def seconds(function: Any, *tensors: Tensor, machine: Machine = PLAIN) -> float:
    """What a recording's price says of one operator; ``decide`` says the same."""
    (captured,) = [c for c in capture(lambda: function(*tensors)) if registry.find(c.func) and not c.func.is_view]
    found = decided(called(captured), machine)  # type: ignore[arg-type]
    assert found == pytest.approx(oc.record(function)(*tensors).cost(machine).seconds)
    return found


def test_what_the_product_of_all_factors_is_not() -> None:
    """An attention's two products have no factor of their own; of a table, an embedding reads what it gives."""
    q = torch.rand(1, 8, 256, 64)
    attention = seconds(lambda q: aten._scaled_dot_product_flash_attention_for_cpu(q, q, q)[0], q)
    assert attention == pytest.approx(2 * (2 * 8 * 256 * 256 * 64) / 2e11)
    table, ids = torch.rand(5000, 64), torch.randint(5000, (8,))
    assert seconds(aten.embedding, table, ids) == pytest.approx((2 * 8 * 64 * 4 + 8 * 8) / 5e10)
    x = torch.rand(64, 64)
    assert seconds(torch.mm, x, x.clone(), machine=H100) == H100.launch  # no kernel is shorter
    big = torch.rand(512, 512)
    assert seconds(torch.mm, big, big.clone(), machine=Machine(dtypes={"float32": 1e9})) == pytest.approx(
        2 * 512**3 / 1e9
    )
