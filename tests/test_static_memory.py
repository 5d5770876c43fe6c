"""Memory of a replay: freed and written in place at the last use, constants computed once; a peak that is not above eager's."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from static_programs import gpt
from test_static_passes import graph_of, operators, recorded_step, same
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import onecard as oc
from onecard.errors import RecordingError
from onecard.static.code.compiled import below, compiled
from onecard.static.passes import PASSES, in_place, inplace, of_no_input, optimised, recomputed, taken_apart


def test_in_place_at_the_last_use() -> None:
    def step(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        a = torch.relu(x @ w)  # the product is not read again
        b = torch.tanh(a)  # a is
        c = a.t().exp()  # of a view: other strides than its own result
        d = (x + 1)[:2].neg()  # a part of a block that nobody wants
        e = x.neg()  # an input stays
        f = (x @ w).expand(2, 4, 4).add(1)  # elements that share memory
        g = x * 2
        h = g.add(g.t())  # reads what it would write
        k = (x + 2).double().add(x)
        return b, c, d, e, f, h, k, (x * 3).add_(1)

    recording, graph = graph_of(step, torch.randn(4, 4), torch.randn(4, 4))
    made = in_place(graph)
    assert same(recording, made)
    written = sorted(name for name in operators(made) if name.endswith("_"))
    assert written == ["add_", "neg_", "relu_"], written
    assert len(list(graph.nodes)) == len(list(made.nodes))


def test_a_buffer_written_while_alive_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: the pass thinks that every block of memory has had its last use."""
    recording = recorded_step(partial(gpt, None, dropout=0.0))
    assert same(recording, in_place(recording.graph))
    real = inplace.GraphMemory

    class Forgets(real):  # type: ignore[misc, valid-type]
        """Users of other names of a block are not seen."""

        def __init__(self, graph: Any, apart: bool = False) -> None:
            super().__init__(graph, apart)
            self.roots = {n: frozenset([n]) if n.op == "call_function" else r for n, r in self.roots.items()}

    monkeypatch.setattr(inplace, "memory_of", Forgets)
    monkeypatch.setattr(inplace, "_fresh", lambda root: root.op == "call_function")

    def step(x: Tensor) -> Tensor:
        y = x * 2
        return y.view(2, 2).neg() + y.view(2, 2)

    planted = oc.to_static(step, without=[*PASSES])
    for _ in range(2):
        planted(torch.ones(4))
    assert not same(planted.recordings[0], in_place(planted.recordings[0].graph))


def test_constants_are_computed_once() -> None:
    def step(x: Tensor) -> Tensor:
        y = x * torch.arange(4)
        z = torch.zeros(4)
        z += x  # written to: anew at each call
        return y + torch.ones_like(x) * 3 + z

    recording, graph = graph_of(step, torch.randn(4))
    made = of_no_input(graph)
    assert same(recording, made) and operators(made).count("full") == 1
    run = compiled(made)
    nodes = [n for n in made.nodes if n.op != "output"]
    assert len(run.__code__.co_varnames) == len(nodes) - 3  # arange, full and its product are made once; zeros anew
    with below():
        for k in (1.0, 2.0):
            x = torch.full((4,), k)
            assert torch.equal(run(x)[0], step(x))


def test_what_comes_out_is_not_kept() -> None:
    run = oc.to_static(lambda x: (torch.arange(3), torch.ones(2)[:1], x + torch.arange(3)))
    for _ in range(3):
        first, second, _ = run(torch.zeros(3))
        assert first.tolist() == [0, 1, 2] and second.tolist() == [1.0]
        first.add_(1)
        second.add_(1)


def test_composites_are_taken_apart() -> None:
    layer = nn.Linear(4, 3)
    like = oc.to_static(lambda x: layer(x).sum().backward(), without=[*PASSES])
    for _ in range(2):
        like(torch.randn(2, 5, 4))
    recording = like.recordings[0]
    made = taken_apart(recording.graph)
    assert "linear_backward" in operators(recording.graph) or operators(made) == operators(recording.graph)
    assert "linear_backward" not in operators(made) and same(recording, made)


class Widest(torch.utils._python_dispatch.TorchDispatchMode):
    """The most bytes alive at once, of tensors that were made inside."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks: dict[int, Any] = {}
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in torch.utils._pytree.tree_leaves(result):
            if isinstance(x, Tensor):
                storage = x.untyped_storage()
                self.blocks.setdefault(storage.data_ptr(), (storage.nbytes(), StorageWeakRef(storage)))
        alive = {k: v for k, v in self.blocks.items() if not v[1].expired()}
        self.blocks = alive
        self.most = max(self.most, sum(n for n, _ in alive.values()))
        return result


def peak(run: Callable[..., Any], *args: Any) -> int:
    with Widest() as widest:
        run(*args)
    return widest.most


def test_the_peak_is_not_above_eagers() -> None:
    torch.manual_seed(0)
    _, _, step, data = gpt(None, dropout=0.0)
    eager = oc.to_static(step, limit=1)
    batches = [next(data) for _ in range(4)]
    for batch in batches[:2]:
        eager(*batch)
    recording = eager.recordings[0]
    assert recording.bound is not None
    plain = peak(step, *batches[2])
    replayed = peak(recording.bound.replay, batches[3], {})
    without = peak(lambda: None)
    assert without == 0 and 0 < replayed <= plain, (replayed, plain)
    assert optimised(recording).graph is not recording.graph


def stack(depth: int = 4) -> Callable[[Tensor], Tensor]:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(depth)]
    optimizer = torch.optim.SGD(nn.ModuleList(layers).parameters(), lr=0.1)

    def step(x: Tensor) -> Tensor:
        for layer in layers:
            x = x + layer(x)
        loss = (x**2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def test_recompute_keeps_bits_and_less_memory() -> None:
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(1))
    eager, plain, again = stack(), oc.to_static(stack()), oc.to_static(stack(), also=["recompute"])
    losses = [[run(x).item() for _ in range(5)] for run in (eager, plain, again)]
    assert losses[0] == losses[1] == losses[2] and len(set(losses[0])) == 5
    most = []
    for run in (plain, again):
        bound = run.recordings[0].bound
        most.append(peak(bound.replay, (x,), {}))
    assert most[1] < 0.85 * most[0], most
    doubled = [
        sum(n.target is torch.ops.aten.gelu.default for n in run.recordings[0].nodes()) for run in (plain, again)
    ]
    assert doubled == [4, 8]


def test_recompute_leaves_what_is_written_or_drawn() -> None:
    recording = recorded_step(partial(gpt, None))
    assert same(recording, recomputed(recording.graph))

    w, held = torch.ones(3, requires_grad=True), torch.ones(3)

    def writes() -> Tensor:
        factor = held * 3  # kept for backward: what it was made of is another number by then
        y = factor * w
        held.add_(1)
        y.sum().backward()
        return y.detach()

    recorded = oc.to_static(writes, without=[*PASSES])
    for _ in range(2):
        recorded()
    graph = recorded.recordings[0].graph
    assert same(recorded.recordings[0], recomputed(graph)) and operators(recomputed(graph)).count("mul") == 3


def test_passes_to_ask_for_are_named() -> None:
    with pytest.raises(RecordingError, match="also='recomputed': the passes to ask for are recompute, fastest"):
        oc.to_static(lambda x: x, also=["recomputed"])


def test_recompute_by_a_limit_of_memory() -> None:
    """As little as the limit takes, the same bits, and the peak that was promised; a limit that cannot be kept is said."""
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(32, 32), nn.GELU(), nn.LayerNorm(32))))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first = {k: v.clone() for k, v in model.state_dict().items()}

    def step(x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    def trained(**options: Any) -> tuple[list[float], int, int]:
        model.load_state_dict(first)
        run = oc.to_static(step, **options)
        losses = [run(torch.randn(256, 32, generator=torch.Generator().manual_seed(i))).item() for i in range(4)]
        recording = run.recordings[0]
        return losses, recording.cost().peak, len(list(recording.nodes("backward")))

    losses, peak, nodes = trained()
    everything, least, most_nodes = trained(also=["recompute"])
    assert losses == everything and least < peak and most_nodes > nodes
    found = [trained(memory_limit=limit) for limit in (peak, (peak + least) // 2, least)]
    assert [found[0][1:], found[2][1] <= least] == [(peak, nodes), True]
    assert all(f[0] == losses for f in found)
    assert found[1][1] <= (peak + least) // 2 and nodes < found[1][2] < found[2][2]
    with pytest.warns(UserWarning, match="over memory_limit=1,000, with all recomputed"):
        assert trained(memory_limit=1000)[0] == losses
