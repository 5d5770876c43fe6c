"""What is called otherwise, joined, cut or turned in the checkpoint that is loaded."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import equal
from torch import nn

import onecard as oc
from onecard.checkpoint import Fuse, Rename, Split, Transpose
from onecard.errors import CheckpointError
from onecard.testing import multirank

MESH = oc.ProcessMesh([0, 1], ["x"])


def test_changes(tmp_path: Path) -> None:
    torch.manual_seed(0)
    q, k, v, up = torch.randn(4, 6), torch.randn(2, 6), torch.randn(2, 6), torch.randn(6, 8)
    old = {"a.q.weight": q, "a.k.weight": k, "a.v.weight": v, "a.up": up, "a.q.step": torch.tensor(3.0),
           "a.k.step": torch.tensor(3.0), "a.v.step": torch.tensor(3.0)}  # fmt: skip
    oc.save_state_dict(old, tmp_path / "old")
    fuse = Fuse(["*.q.*", "*.k.*", "*.v.*"], "*.qkv.*")
    new = {
        "b.qkv.weight": torch.zeros(8, 6),
        "b.up": torch.zeros(8, 6, dtype=torch.float64),
        "b.qkv.step": torch.zeros(()),
    }
    oc.load_state_dict(new, tmp_path / "old", changes=[fuse, Transpose("*.up"), Rename("a.*", "b.*")], dtype="cast")
    assert torch.equal(new["b.qkv.weight"], torch.cat([q, k, v])) and torch.equal(new["b.up"], up.T.double())
    assert new["b.qkv.step"] == 3
    oc.save_state_dict(new, tmp_path / "new")
    split = Split("*.qkv.*", ["*.q.*", "*.k.*", "*.v.*"], sizes=[4, 2, 2])
    back = {name: torch.zeros_like(x) for name, x in old.items()}
    oc.load_state_dict(back, tmp_path / "new", changes=[split, Rename("b.*", "a.*"), Transpose("a.up")], dtype="cast")
    assert equal(back, old)

    def said(*changes: Any, **how: Any) -> str:
        with pytest.raises(CheckpointError) as caught:
            oc.load_state_dict({}, tmp_path / "old", changes=changes, **how)
        return str(caught.value)

    assert "no tensor of the checkpoint is called 'a.qq.weight'; the nearest names: a.q.weight" in said(
        Rename("a.qq.weight", "x")
    )
    assert "two tensors would be called 'x'" in said(Rename("a.*", "x"))
    assert "cannot be joined along dim 1" in said(Fuse(["*.q.weight", "*.k.weight"], "*.qk", dim=1))
    assert "but no 'a.w.weight'" in said(Fuse(["*.q.weight", "*.w.weight"], "*.qw"))
    assert "has 4 indices in dim 0, not 3 + 2" in said(Split("*.q.weight", ["*.1", "*.2"], sizes=[3, 2]))
    assert "has no dim 2" in said(Transpose("a.up", (0, 2)))
    assert "more *" in said(Rename("a.up", "*.up"))


@multirank(2)
def test_changes_on_any_layout(tmp_path: Path) -> None:
    """Every change beside cuts of every dim: as the one-card program makes it."""
    torch.manual_seed(1)
    parts = [torch.randn(5, 7) for _ in range(3)]
    for number, placements in enumerate(([oc.Shard(0)], [oc.Shard(1)], [oc.Replicate()])):
        place = tmp_path / str(number)
        oc.save_state_dict({f"p{i}": oc.shard_tensor(x, MESH, placements) for i, x in enumerate(parts)}, place)
        for dim, turn, target in itertools.product(
            (0, 1), (False, True), ([oc.Shard(0)], [oc.Shard(1)], [oc.Replicate()])
        ):
            expected = torch.cat(parts, dim).T if turn else torch.cat(parts, dim)
            changes: list[Any] = [Fuse(["p0", "p1", "p2"], "w", dim), *([Transpose("w")] if turn else [])]
            into = oc.shard_tensor(torch.zeros_like(expected), MESH, target)
            oc.load_state_dict({"w": into}, place, changes=changes)
            assert equal(into, expected.contiguous()), (placements, dim, turn, target)


def test_an_optimizer_follows_its_fused_parameters(tmp_path: Path) -> None:
    apart = nn.ModuleDict({name: nn.Linear(4, 4, bias=False) for name in "qkv"})
    optimizer = torch.optim.AdamW(apart.parameters(), lr=0.3)
    for number in range(2):
        sum(
            (layer(torch.ones(4) * i).square().sum() for i, layer in enumerate(apart.values(), 1 + number)),
            torch.zeros(()),
        ).backward()
        optimizer.step()
    oc.checkpoint.save({"model": apart, "optimizer": optimizer}, tmp_path)
    joined = nn.ModuleDict({"qkv": nn.Linear(4, 12, bias=False)})
    new = torch.optim.AdamW(joined.parameters(), lr=0.1)
    changes = [Fuse(["*q.weight*", "*k.weight*", "*v.weight*"], "*qkv.weight*")]
    as_dict = torch.optim.AdamW(joined.parameters())
    state = {"optimizer": as_dict.state_dict()}
    oc.checkpoint.load(tmp_path, {"model": joined, **state}, changes=changes)
    as_dict.load_state_dict(state["optimizer"])
    oc.checkpoint.load(tmp_path, {"model": joined, "optimizer": new}, changes=changes)
    expected = torch.cat([optimizer.state[p]["exp_avg"] for p in apart.parameters()])
    for found in (new, as_dict):
        [state] = found.state.values()
        assert torch.equal(state["exp_avg"], expected) and state["step"] == 2 and found.param_groups[0]["lr"] == 0.3
