"""A pretended rank: what is decided for it is never found by the real process, and the real one's is not found by it."""

from __future__ import annotations

import ast
import importlib
import os
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import onecard as oc
from onecard.comm import groups, place
from onecard.comm.pretend import pretend_world
from onecard.testing import assert_close, multirank

PACKAGE = Path(oc.__file__).parent
R, S = oc.Replicate, oc.Shard

# Tables that fill up at run time and are right for every rank: functions of their key alone, or of the program.
SAME_ON_ALL_RANKS = {
    "comm.groups.also_forget", "fleet.training._hooked",
    "comm.check._said", "comm.check._switched", "comm.clock._codes", "comm.sparse_check._told", "parallel.resume._seen",
    "tensor.first_calls._random",
    "comm.place.tables", "comm.record.observers", "comm.shm.functional._kept",
    "comm.shm.reduction.fold", "tensor.chance.handlers", "tensor.chance.factories", "tensor.chance._law",
    "tensor.dispatch.builders", "tensor.dispatch.by_value", "tensor.fallback._warned", "tensor.fallback.observers",
    "tensor.memory.copies", "tensor.strides.expanded", "tensor.strides.overlaps",
    "tensor.strides.place", "tensor.strides.own_stride",
    "tensor.recording.records", "parallel.layer.replaced", "parallel.optimizer.replaced", "parallel.optimizer._checked",
}  # fmt: skip
EMPTY = {
    "Counter",
    "WeakIdKeyDictionary",
    "WeakKeyDictionary",
    "WeakValueDictionary",
    "defaultdict",
    "dict",
    "list",
    "set",
}


def tables_of(source: str) -> list[str]:
    """Names at module level that fill up at run time: empty containers and cached functions."""
    found = []
    for node in ast.parse(source).body:
        value = getattr(node, "value", None)
        if isinstance(value, ast.Call) and getattr(value.func, "id", "") == "of_this_rank":
            value = value.args[0]
        empty = (isinstance(value, ast.Dict) and not value.keys) or (isinstance(value, ast.List) and not value.elts)
        made = isinstance(value, ast.Call) and not value.args and getattr(value.func, "id", "") in EMPTY
        if isinstance(node, ast.AnnAssign | ast.Assign) and (empty or made):
            found.append(getattr(getattr(node, "target", None) or node.targets[0], "id", ""))
        if isinstance(node, ast.FunctionDef) and any("cache" in ast.unparse(d) for d in node.decorator_list):
            found.append(node.name)
    return found


def test_every_table_is_this_ranks_or_the_same_on_all():
    """A new table must say which it is: noted by ``of_this_rank``, or listed above."""
    unsaid = []
    for path in sorted(p for layer in ("comm", "tensor", "parallel", "fleet") for p in (PACKAGE / layer).rglob("*.py")):
        name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        module = importlib.import_module(f"onecard.{name.removesuffix('.__init__')}")
        for table in tables_of(path.read_text()):
            mine = any(getattr(module, table) is t for t in place.tables)
            if mine == (f"{name}.{table}" in SAME_ON_ALL_RANKS):
                unsaid.append(f"{name}.{table}")
    assert unsaid == []
    assert tables_of("a: dict[int, int] = {}\nb = [1]\n@cache\ndef c(): ...") == ["a", "c"]


@pytest.mark.parametrize("rank", [0, 2])
def test_a_pretended_rank_leaves_nothing(rank):
    before = [table.copy() for table in place.tables]
    mesh = oc.ProcessMesh([0, 1, 2], ["x"])
    with pretend_world(3, rank):
        assert oc.shard_tensor(torch.arange(5.0), mesh, [S(0)]).exp().to_local().shape == ((2,), (2,), (1,))[rank]
        assert len(groups.group(mesh, 0).ranks) == 3
        assert any(place.tables)
    assert [table.copy() for table in place.tables] == before


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
