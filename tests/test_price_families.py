"""How a measured machine tells an operator's time: its family, the size it is looked up by, lists, heads, lines of ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

import onecard as oc
from onecard.static.measure import measure, measure_messages, probes, together
from onecard.static.price import families, price
from onecard.testing import run_ranks

FAMILIES: dict[str, tuple[str, str, Callable[[Tensor], Any]]] = {
    "sum of all": ("sum", "sum", lambda x: x.sum()),
    "sum of neighbours": ("sum", "sum", lambda x: x.sum(1)),
    "sum of rows": ("sum", "sum of rows", lambda x: x.sum(0)),
    "from the last": ("sum", "sum of rows", lambda x: x.sum(-2)),
    "dense": ("clone", "pointwise", lambda x: x.clone()),
    "turned": ("clone", "copy", lambda x: x.t().contiguous()),
    "joined": ("cat", "copy", lambda x: torch.cat([x.t(), x.t()])),
    "joined rows": ("cat", "pointwise", lambda x: torch.cat([x, x])),
    "tanh": ("gelu", "gelu tanh", lambda x: F.gelu(x, approximate="tanh")),
    "erf": ("gelu", "gelu", F.gelu),
    "log": ("_log_softmax", "log softmax", lambda x: x.log_softmax(-1)),
    "written": ("add_", "in place", lambda x: (x + 1).add_(x)),
    "list": ("_foreach_add_", "for each", lambda x: torch._foreach_add_([x + 1, x * 2], 1.0)),
}


def nodes_of(function: Callable[..., Any], *given: Tensor) -> list[fx.Node]:
    def run(*given: Tensor) -> Any:
        with torch.no_grad():
            out = function(*given)
        return out if isinstance(out, Tensor) else given[0].sum()

    return [n for n in oc.record(run)(*given).nodes() if hasattr(n.target, "_schema")]


@pytest.mark.parametrize("name", FAMILIES)
def test_families(name: str) -> None:
    operator, family, function = FAMILIES[name]
    found = [
        families.family(n) for n in nodes_of(function, torch.rand(4, 8)) if n.target._schema.name == f"aten::{operator}"
    ]
    assert found == [family]
    assert family in probes.FAMILIES, "nobody measures it"


def test_every_family_is_measured() -> None:
    assert {*families.FAMILY.values(), "pointwise", "in place", "for each"} <= {*probes.FAMILIES}


def line(size: float) -> Any:
    """A curve with a floor of 100 bytes: what is small does not cost in proportion."""
    return ((100.0, 1.0), (size, size / 100))


def seconds(node: fx.Node, curves: dict[str, Any], products: int = 0, touched: int = 0) -> float:
    found = families.seconds(node, curves, products, touched)
    assert found is not None
    return found


def test_of_a_list_each_tensor_takes_its_own_time() -> None:
    lists = [torch.rand(2), torch.rand(1000)]

    def function(*lists: Tensor) -> Any:
        return torch._foreach_add_([t + 1 for t in lists], [t + 2 for t in lists])

    (node,) = (n for n in nodes_of(function, *lists) if "_foreach" in str(n.target))
    assert seconds(node, {"for each": line(1e6)}, touched=1002 * 12) == pytest.approx(1.0 + 12000 / 100)


def test_heads_take_their_time_one_after_the_other() -> None:
    found = {}
    for heads in (2, 6):
        q = torch.rand(3, heads, 16, 64)
        made = nodes_of(lambda q: F.scaled_dot_product_attention(q, q, q, is_causal=True), q)
        (node,) = (n for n in made if "attention" in str(n.target))
        curves = {f"attention {width}": line(1e6) for width in families.WIDTHS}
        found[heads] = seconds(node, curves, int(price.work(node).macs))
    assert found[2] == pytest.approx(3 * 2 * 2 * 16 * 16 * 64 / 100) and found[6] == pytest.approx(3 * found[2])


def test_a_message_is_read_from_the_curve_of_its_line() -> None:
    with oc.pretend(8, 1, fake=True):
        mesh = oc.ProcessMesh([[0, 1, 2, 3], [4, 5, 6, 7]], ["dp", "tp"])
        x = oc.shard_tensor(torch.ones(8, 8), mesh, [oc.Shard(0), oc.Shard(1)])
        recording = oc.record(lambda x: oc.unshard(x.sum()) + 1)(x)
    curves = {"all_reduce": ((1.0, 16.0),), "all_reduce 2": ((1e3, 4.0),), "all_reduce 4": ((1e3, 1.0),)}
    both = recording.cost(oc.Machine(curves=curves)).seconds_by("axis")
    assert (both["dp"], both["tp"]) == (4.0, 1.0)
    two = {k: v for k, v in curves.items() if k != "all_reduce 4"}
    assert recording.cost(oc.Machine(curves=two)).seconds_by("axis")["tp"] >= 16.0


# -- measured --------------------------------------------------------------------------------------------------------------


def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few sizes and rounds."""
    for name, value in (("LONG", 1e-4), ("ROUNDS", 2), ("ELEMENTS", (2**8, 2**14)), ("PRODUCTS", (2**12, 2**18))):
        monkeypatch.setattr(measure, name, value)
    monkeypatch.setattr(measure, "SQUARE", 64)
    for name, value in (("SENT", (2**6, 2**14)), ("BESIDE", 2**16), ("AGAIN", 1)):
        monkeypatch.setattr(measure_messages, name, value)
    monkeypatch.setattr(together, "LONG", 0.0)


def measured() -> tuple[Any, set[str]]:
    with pytest.MonkeyPatch.context() as patch:
        few(patch)
        machine = oc.Machine.measure()
    assert 0 <= machine.beside <= 1 < machine.uneven < 100 and all(
        t > 0 for curve in machine.curves.values() for _, t in curve
    )
    return oc.to_json(machine), {*machine.curves}


@pytest.mark.proof
def test_all_ranks_measure_the_same_machine() -> None:
    ranks = run_ranks(measured, 4)
    assert all(rank == ranks[0] for rank in ranks)
    kinds = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single")
    assert {families.sent(kind, n) for kind in kinds for n in (2, 4)} | {*kinds} <= ranks[0][1]


def test_ranks_that_share_a_core_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four ranks on two cores: a call takes twice its own time, however long this rank was kept waiting meanwhile."""
    import time

    monkeypatch.setattr(together, "together", lambda: True)
    monkeypatch.setattr(together.os, "sched_getaffinity", lambda _: {0, 1}, raising=False)
    for ranks, crowd, now in ((4, 2.0, time.process_time), (2, 1.0, time.perf_counter), (1, 1.0, time.perf_counter)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
        torch.set_num_threads(1)
        assert together.clock() == (crowd, now)


def test_how_unevenly_ranks_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turns of this rank last 1 s; the others are there after 1.5 s. Short turns tell how long it takes to meet, so not this."""
    monkeypatch.setattr(together, "together", lambda: True)
    monkeypatch.setattr(together, "mean", lambda mine: mine)
    now, work = [0.0], [1.0, 1.0]

    def meet() -> None:
        now[0] += 0.5

    def compute() -> None:
        now[0] += work[0] / 4

    monkeypatch.setattr(together, "meet", meet)
    monkeypatch.setattr(together.time, "perf_counter", lambda: now[0])
    turns = together.Turns(together.RankClock(1.0, lambda: now[0]))
    assert turns.run([compute, compute]) == [0.25, 0.25] and turns.uneven() == 1.5
    work[0] = together.LONG / 2
    turns.run([compute])
    assert turns.uneven() == 1.5


def test_typical_seconds() -> None:
    """Of two speeds their mean, also where one of them is the median; what is rare does not count."""
    assert together.typical([1.0] * 6 + [2.0] * 4) == 1.375  # without the least and the most
    assert together.typical([1.0] * 9 + [500.0]) == 1.0 and together.typical([3.0]) == 3.0
