"""Passes: each gives a graph that does the same, shown by replaying both on the same tensors; planted faults are seen."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial
from itertools import islice
from typing import Any

import pytest
import torch
from amounts import PROOF
from static_programs import gpt, mesh, mixed
from torch import Tensor, fx

import onecard as oc
from onecard.comm.issue import again
from onecard.errors import RecordingError
from onecard.static.code.compiled import below
from onecard.static.passes import PASSES, StaticOptions, chosen, dead_nodes, equal_nodes, optimised, plain_names
from onecard.static.step.order import line_up
from onecard.testing import run_ranks


def recorded_step(make: Any) -> oc.Recording:
    torch.manual_seed(3)
    _, _, step, data = make()
    run = oc.to_static(step, without=[*PASSES])
    for batch in islice(data, 2):
        run(*batch)
    return run.recordings[0]


def samples(recording: oc.Recording) -> list[Any]:
    """Inputs: the tensors that it is bound to, copied."""
    leaves = [torch.ones(1)] * len(recording.arguments)
    made = []
    for i, known in enumerate(recording.inputs):
        if known.kind == "number":
            made.append(0.9 - 0.1 * i / len(recording.inputs))
        elif known.kind == "constant":
            made.append(recording.constants[i])
        elif known.facts:
            generator = torch.Generator().manual_seed(i)
            shape, _, dtype, _ = known.facts
            x = torch.rand(shape, generator=generator) if dtype.is_floating_point else torch.ones(shape)
            made.append((x + 0.5).to(dtype))
        else:
            made.append(None)
    assert leaves is not None
    return made


def replayed(recording: oc.Recording, graph: fx.Graph) -> list[Tensor]:
    """Outputs, and the inputs after they were written to."""
    given = samples(recording)
    torch.manual_seed(5)
    with below():
        outputs = recording.with_graph(graph).run(*given)
    return [x for x in (*outputs, *given) if isinstance(x, Tensor)]


def same(recording: oc.Recording, graph: fx.Graph, expected: list[Tensor] | None = None) -> bool:
    """``expected``: what the recording's own graph gave, where it is asked more than once."""
    pairs = zip(expected or replayed(recording, recording.graph), replayed(recording, graph), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def passes_keep_bits() -> list[str]:
    both = mesh(2, 1) if oc.get_world_size() == 2 else None
    tp = oc.ProcessMesh([0, 1], ["tp"]) if both is not None else None
    said = []
    programs = partial(mixed, both), partial(mixed, both, "sgd", 2), partial(gpt, tp), partial(gpt, tp, kind="fused")
    for make in programs if PROOF else programs[both is not None :: 2]:  # the ones on one rank, the others on two
        recording = recorded_step(make)
        before, expected = len(recording.graph.nodes), replayed(recording, recording.graph)
        for name, run in PASSES.items():
            made = run(recording.graph)
            assert made is recording.graph or same(recording, made, expected), name  # some have nothing to do here
        for without in (["dead"], ["common_subexpressions"], ["noop_views"], []):
            made = optimised(recording, without).graph
            assert same(recording, made, expected), without
        after = len(made.nodes)
        assert len(recording.graph.nodes) == before > after
        said.append(f"{before} -> {after}")
    return said


@pytest.mark.proof
def test_passes_keep_every_bit() -> None:
    passes_keep_bits()
    print(run_ranks(passes_keep_bits, 2)[0])


def graph_of(fn: Callable[..., Any], *args: Any) -> tuple[oc.Recording, fx.Graph]:
    recording = oc.record(fn)(*args)
    return recording, recording.graph


def operators(graph: fx.Graph) -> list[str]:
    return [n.target._schema.name.removeprefix("aten::") for n in graph.nodes if hasattr(n.target, "_schema")]


def test_dead_nodes() -> None:
    def step(x: Tensor) -> Tensor:
        _ = (x * 3).exp()  # nobody asks
        y = x * 2
        lost = torch.zeros(3)
        lost.add_(1)
        y[0].add_(1.0)  # a write through a view that is read by another name
        return y[:1] + 1

    recording, graph = graph_of(step, torch.ones(3))
    made = dead_nodes(graph)
    assert same(recording, made) and sorted(operators(made)) == ["add", "add_", "mul", "select", "slice"]
    assert operators(graph).count("exp") == 1


def test_writes_to_what_the_program_holds_stay() -> None:
    held = torch.zeros(3)

    def step(x: Tensor) -> Tensor:
        held.view(-1)[1:].add_(x[1:])
        return x + 1

    recording, _ = graph_of(step, torch.ones(3))
    assert "add_" in operators(optimised(recording).graph) and same(recording, optimised(recording).graph)


def test_equal_nodes() -> None:
    def step(x: Tensor) -> Tensor:
        a, b = x * 2, x * 2
        c = (x + 1).mul_(a)  # written to: not the same as the next
        d = x + 1
        return a * b + c + d + torch.empty(3).fill_(1.0) + torch.empty(3).fill_(2.0)

    recording, graph = graph_of(step, torch.ones(3))
    made = equal_nodes(graph)
    assert same(recording, made)
    assert (
        operators(graph).count("mul") == 3 and operators(made).count("mul") == 2 and operators(made).count("empty") == 2
    )


def test_equal_results_that_come_out_have_their_own_memory() -> None:
    run = oc.to_static(lambda x: (x * 2, x * 2, x.new_zeros(3), x.new_zeros(3)))
    for _ in range(3):
        a, b, c, d = run(torch.ones(3))
        a.add_(1)
        c.add_(1)
        assert b.tolist() == [2.0, 2.0, 2.0] and d.tolist() == [0.0, 0.0, 0.0]


def test_second_names() -> None:
    def step(x: Tensor) -> Tensor:
        y = x.detach().view(2, 2)
        return y.t().detach() + y[0:2] + y.permute(1, 0)

    recording, graph = graph_of(step, torch.arange(4.0).reshape(2, 2))
    made = plain_names(graph)
    assert same(recording, made) and operators(made) == ["t", "add", "permute", "add"]


def equal_messages() -> list[int]:
    x = oc.shard_tensor(torch.arange(4.0), mesh(2, 1), [oc.Shard(0), oc.Replicate()])

    def step(x: Tensor) -> Tensor:
        return oc.unshard(x * 2) + oc.unshard(x * 2)

    recording = oc.record(step)(x)
    made = equal_nodes(recording.graph)
    assert same(recording, made)
    return [sum(n.target is again.message for n in graph.nodes) for graph in (recording.graph, made)]


def test_equal_messages_are_sent_once() -> None:
    assert run_ranks(equal_messages, 2) == [[2, 1]] * 2


def two_means(x: Tensor) -> Tensor:
    return oc.unshard(x.mean(0)) + oc.unshard(x.square().mean(0)) * 2


def one_mean(x: Tensor) -> Tensor:
    return oc.unshard(x.mean(0)) + oc.unshard(x.mean(0)) * 2


@pytest.mark.parametrize(("step", "count"), [(two_means, 2), (one_mean, 1)])
def test_a_rank_without_elements_sends_as_many_messages_as_the_others(step: Any, count: int) -> None:
    """Six columns on four ranks: all that the last one computes is zeros."""
    sent = []
    for rank in range(4):
        with oc.pretend(4, rank, fake=True):
            x = oc.shard_tensor(torch.ones(2, 6), oc.ProcessMesh(range(4), ["tp"]), [oc.Shard(1)])
            sent.append(line_up(optimised(oc.record(step)(x)).graph))
    assert all(messages == sent[0] for messages in sent) and [len(m) for m in sent[0].values()] == [count]


# planted faults: what the comparison by replay is there to see


def test_a_write_that_is_lost_is_seen() -> None:
    recording = recorded_step(partial(mixed, None))
    broken = optimised(recording, [*PASSES]).graph
    copy = fx.Graph()
    copy.output(copy.graph_copy(broken, {}))
    write = next(
        n for n in copy.nodes if n.op == "call_function" and "add_" in str(n.target) and n.meta["phase"] == "forward"
    )
    copy.erase_node(write)
    assert not same(recording, copy)


def test_a_baked_number_or_key_is_seen() -> None:
    recording = recorded_step(partial(mixed, None, "sgd"))
    lr = next(n for n, i in zip(recording.graph.nodes, recording.inputs, strict=False) if i.name.endswith("['lr']"))
    copy, names = fx.Graph(), dict[fx.Node, fx.Node]()
    copy.output(copy.graph_copy(recording.graph, names))
    names[lr].replace_all_uses_with(names[lr])
    for user in list(names[lr].users):
        user.args = fx.map_arg(user.args, lambda n: 0.05 if n is names[lr] else n)
    assert not same(recording, copy)


def test_a_node_before_its_data_is_seen() -> None:
    recording = recorded_step(partial(mixed, None))
    copy = fx.Graph()
    copy.output(copy.graph_copy(recording.graph, {}))
    write = next(
        n for n in copy.nodes if n.op == "call_function" and "mul_" in str(n.target) and n.meta["phase"] == "optimizer"
    )
    late = next(n for n in reversed(copy.nodes) if n.op == "call_function")
    late.append(write)
    assert not same(recording, copy)


def test_unknown_passes_are_refused() -> None:
    recording = oc.record(lambda x: x + 1)(torch.ones(2))
    with pytest.raises(RecordingError, match="no pass 'ded'; there are decompositions, fixed, noop_views"):
        optimised(recording, ["ded"])
    assert operator.add(1, 1) == 2


def test_passes_by_the_names_that_they_had() -> None:
    have = ("common_subexpressions", "noop_views", "decompositions")
    with pytest.warns(DeprecationWarning, match="write onecard.to_static"):
        had = chosen(StaticOptions(without=["equal", "names", "apart"]))
    assert [*had] == [name for name in PASSES if name not in have]
    assert StaticOptions(also=["half"]).dtype is StaticOptions(also=["bfloat16"]).dtype is torch.bfloat16
    with pytest.raises(oc.errors.RecordingError, match="there is no pass 'common'"):
        oc.to_static(lambda x: x, without=["common"])


@pytest.mark.parametrize("view", ["mT", "chunk", "detach"])
def test_a_view_of_a_detached_parameter_takes_no_gradient(view: str) -> None:
    weight, bias = torch.nn.Parameter(torch.randn(3, 4)), torch.nn.Parameter(torch.zeros(()))
    optimizer = torch.optim.SGD([bias], lr=0.1)

    def step(x: Tensor) -> tuple[Tensor, Tensor]:
        optimizer.zero_grad()
        loss = (x + bias).square().sum()
        loss.backward()
        optimizer.step()
        held = weight.detach()
        return loss.detach(), {"mT": held.mT, "chunk": held.chunk(3)[1], "detach": held}[view]

    run = oc.to_static(step)
    assert not any(run(torch.ones(2))[1].requires_grad for _ in range(7))  # from the fifth call on they are replays
    assert len(run.recordings) == 1
