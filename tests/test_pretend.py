"""A pretended rank: what is decided for it is never found by the real process, and the real one's is not found by it."""

from __future__ import annotations

import ast
import copy
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import onecard as oc
from onecard.comm.base.state import kept
from onecard.comm.issue import groups
from onecard.errors import CommunicationError, DispatchError
from onecard.tensor.dispatch.entry import programs
from onecard.testing import assert_close, multirank

PACKAGE = Path(oc.__file__).parent
R, S = oc.Replicate, oc.Shard

# What changes at run time and is not of one world, with the reason why that is right.
OF_ALL_WORLDS = {
    "filled when modules are imported, or by who extends onecard": (
        "comm.agree.check._switched", "comm.issue.groups.also_forget",
        "comm.shm.functional._kept", "comm.shm.functional.ours",
        "tensor.dispatch.entries.builders", "tensor.dispatch.entries.drawing",
        "tensor.dispatch.entries.wholes", "tensor.rows.rows._default", "tensor.rows.rows.handlers",
    ),
    "the mechanism itself": ("comm.base.state.kept",),
    "a Kept, set for the world that is entered": ("comm.base.state.machine.here", "comm.joined.hub.hub.here"),
    "functions of their key alone, of a bounded number of entries": (
        "comm.agree.clock._codes", "comm.base.record._is_users",
        "comm.issue.plain.reduces", "comm.shm.reduction.fold", "fleet.zero.local_parameter._kind",
        "tensor.random_operators.draw._law", "tensor.dispatch.entry.by_value",
        "tensor.aliasing.strides.expanded", "tensor.aliasing.strides.overlaps",
        "tensor.aliasing.strides.own_stride", "tensor.aliasing.strides.place", "tensor.rows.owners._of_dim",
        "train.unreduced._of_nobody",
    ),
    "of objects, for as long as they live": (
        "comm.shm.group.alive", "fleet.gradients.merging._known", "fleet.gradients.scaling._resting",
        "train.judged._known", "fleet.zero.whole._wholes", "fleet.zero.whole.divided",
        "train.layer.replaced", "train.zero.optimizer._checked",
        "train.rates._known", "train.rates._words",
        "train.zero.last_hooks._behind", "train.zero.last_hooks._ours", "train.zero.resume._seen", "train.zero.resume.sharders",
        "tensor.aliasing.memory.copies", "tensor.deferred.calls.records",
    ),
    "what the environment asks of the process, or has been said to it": (
        "comm.agree.check.on", "comm.shm.backend._warned", "comm.world.world._told",
    ),
    "how deep a call is, back to zero at its end": ("tensor.dist_tensor.decomposing",),
}  # fmt: skip
EMPTY = {
    "Counter",
    "WeakIdKeyDictionary",
    "WeakKeyDictionary",
    "WeakSet",
    "WeakValueDictionary",
    "defaultdict",
    "dict",
    "list",
    "set",
}


def changing(source: str) -> list[str]:
    """Names at module level whose values change: empty containers, cached functions, what ``global`` names."""
    tree, found = ast.parse(source), []
    for node in tree.body:
        value = getattr(node, "value", None)
        empty = (isinstance(value, ast.Dict) and not value.keys) or (isinstance(value, ast.List) and not value.elts)
        called = value.func if isinstance(value, ast.Call) else None
        made = (
            called is not None
            and not value.args
            and (getattr(called, "id", "") or getattr(called, "attr", "")) in EMPTY
        )
        if isinstance(node, ast.AnnAssign | ast.Assign) and (empty or made):
            found.append(getattr(getattr(node, "target", None) or node.targets[0], "id", ""))
        if isinstance(node, ast.FunctionDef) and any("cache" in ast.unparse(d) for d in node.decorator_list):
            found.append(node.name)
    return found + [name for node in ast.walk(tree) if isinstance(node, ast.Global) for name in node.names]


def assigned_elsewhere(source: str) -> list[str]:
    """Attributes of onecard's modules that another module assigns to, "module.name"."""
    tree, modules = ast.parse(source), {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("onecard"):
            names = [alias for alias in node.names if alias.name.islower()]
            modules |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in names}
    writes = [n for n in ast.walk(tree) if isinstance(n, ast.Assign | ast.AugAssign)]
    targets = [t for n in writes for t in (n.targets if isinstance(n, ast.Assign) else [n.target])]
    return [
        f"{modules[t.value.id]}.{t.attr}".removeprefix("onecard.")
        for t in targets
        if isinstance(t, ast.Attribute) and isinstance(t.value, ast.Name) and t.value.id in modules
    ]


@pytest.mark.proof
def test_what_changes_at_run_time_is_a_worlds_or_listed():
    """A new table must say which it is: a ``Kept``, or listed above with its reason."""
    listed = {name for names in OF_ALL_WORLDS.values() for name in names}
    found = set()
    for path in sorted(p for layer in ("comm", "tensor", "train", "fleet") for p in (PACKAGE / layer).rglob("*.py")):
        name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        found |= {f"{name}.{table}" for table in changing(path.read_text())}
        found |= {n for n in assigned_elsewhere(path.read_text()) if n.startswith(("comm.", "tensor.", "train."))}
    assert found == listed
    assert changing("a: dict[int, int] = {}\nb = [1]\nd = weakref.WeakSet()\n@cache\ndef c():\n    global e") == [
        "a",
        "d",
        "c",
        "e",
    ]
    assert assigned_elsewhere("from onecard.comm.base import flight\nflight.board = 1") == ["comm.base.flight.board"]


def state() -> list[Any]:
    """All that the present world keeps: which objects, and what is in them."""
    found = [(id(item.here), item.here) for item in kept]
    return [(number, copy.copy(value) if isinstance(value, dict | list | set) else value) for number, value in found]


@pytest.mark.parametrize("rank", [0, 2])
def test_a_pretended_rank_leaves_nothing(rank):
    before = state()
    mesh = oc.ProcessMesh([0, 1, 2], ["x"])
    with oc.pretend(3, rank):
        assert oc.shard_tensor(torch.arange(5.0), mesh, [S(0)]).exp().to_local().shape == ((2,), (2,), (1,))[rank]
        assert len(groups.group(mesh, 0).ranks) == 3
        assert programs.here
    assert state() == before


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.table(x).sum(-1)


def cut_words(name: str, module: nn.Module, mesh: oc.ProcessMesh) -> None:
    if isinstance(module, nn.Embedding):
        module.weight = oc.shard_tensor(module.weight, mesh, [S(0)])


@multirank(2)
def test_coverage_before_the_ranks_have_met():
    """Rank 1 must not mask its part of the vocabulary with the bounds of rank 0, that coverage stood for."""
    rank, where = dist.get_rank(), [tempfile.mktemp()]
    dist.broadcast_object_list(where)
    dist.destroy_process_group()
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2"}
    torch.manual_seed(0)
    model, x, mesh = Words(), torch.arange(6).view(2, 3), oc.ProcessMesh([0, 1], ["x"])
    expected = model(x)
    assert not torch.distributed.is_initialized()
    for meta in (False, True):
        assert oc.coverage(model, x, mesh, cut_words, meta=meta).error == ""
    laid_out = oc.shard_layer(model, mesh, cut_words)
    assert oc.coverage(laid_out, oc.shard_tensor(x, mesh, [R()]), meta=False).error == ""  # the shards of this rank
    assert not torch.distributed.is_initialized()
    dist.init_process_group("gloo", init_method=f"file://{where[0]}", rank=rank, world_size=2)
    assert_close(laid_out(oc.shard_tensor(x, mesh, [R()])).full_tensor(), expected)


def test_worlds_within_worlds_and_entered_again():
    mesh = oc.ProcessMesh([[0, 1], [2, 3]], ["dp", "tp"])
    world = oc.pretend(4, 3)
    with world:
        x = oc.shard_tensor(torch.arange(6.0), mesh, [S(0), R()])
        assert (x * 2).to_local().tolist() == [6, 8, 10] and len(programs.here) == 1
        with oc.pretend(2, 1), pytest.raises(CommunicationError, match=r"names rank\(s\) \[2, 3\]"):
            oc.shard_tensor(torch.ones(2), mesh, [S(0), R()])
        with pytest.raises(CommunicationError, match="pretended rank 3 of 4 is entered already"), world:
            pass
        with pytest.raises(ZeroDivisionError), oc.pretend(8, 7):
            assert oc.get_rank() == 7 and not programs.here
            _ = 1 / 0
        assert (oc.get_rank(), oc.get_world_size()) == (3, 4)
    assert (oc.get_rank(), oc.get_world_size(), dist.is_initialized()) == (0, 1, False)
    with world:
        before = programs.here.copy()
        assert (x * 2).to_local().tolist() == [6, 8, 10] and programs.here == before  # what it had decided


@pytest.mark.parametrize(("size", "rank"), [(4, 4), (4, -1), (0, 0), ("4", 0), (4, 1.0), (True, 0)])
def test_ranks_that_no_world_has(size, rank):
    with pytest.raises(CommunicationError, match=r"there is no rank .*: onecard\.pretend\(world_size=\d+, rank=\d+\)"):
        oc.pretend(size, rank)


@multirank(2)
def test_a_real_tensor_is_read_by_a_pretended_rank_and_not_changed():
    """Each rank pretends another world, one of them more often; what is pending stays so."""
    me, mesh = dist.get_rank(), oc.ProcessMesh([0, 1], ["x"])
    x = oc.from_local(torch.ones(3) + me, mesh, [oc.Partial()])
    parameter = torch.nn.Parameter(oc.shard_tensor(torch.ones(4), mesh, [R()]))
    for size in (2, 5)[: me + 1]:
        with oc.pretend(size, me):
            assert (x * 2).layout.pending
            with pytest.raises(DispatchError, match=r"a real tensor with a pending value, .* x\.reduce_partial\(\)"):
                x.exp()
            inside = oc.shard_tensor(torch.ones(4), mesh, [S(0)])
            (parameter * inside).sum().backward()
            parameter.grad = None
    if me == 0:
        assert oc.coverage(torch.nn.Linear(3, 2), torch.ones(4, 3), mesh, input_placements=[[S(0)]]).error == ""
    for use in (lambda: inside * 2, lambda: inside.full_tensor(), lambda: inside * parameter):
        with pytest.raises(DispatchError, match="was made by a pretended rank, so its values mean nothing"):
            use()
    assert_close(x.exp().full_tensor(), torch.full((3,), 3.0).exp())
    (parameter * oc.shard_tensor(torch.ones(4), mesh, [S(0)])).sum().backward()
    assert_close(parameter.grad.full_tensor(), torch.ones(4))
