"""Ranks that call different collectives over Gloo, which ends the process that is sent too much, or waits for ever."""

from __future__ import annotations

import ctypes
import re
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import onecard as oc
from onecard import fleet
from onecard.comm.agree import ended
from onecard.errors import CommunicationError
from onecard.testing import RankError, _run, run_ranks

BOTH = (r"ranks are out of step\n"
        r"  rank 0: message (\d+), all_reduce\(sum\), for 'other' \[\d+, 40\] of add_, at .*test_mistakes_gloo.py:\d+\n"
        r"  rank 1: message \1, all_reduce\(sum\), for 'x' \[\] of full_tensor, at .*test_mistakes_gloo.py:\d+\n")  # fmt: skip


def skips_a_step(folder: Path, how: str) -> None:
    """Rank 1 goes without one step: its next message is the loss's, rank 0's a gradient's."""
    rank, shape = oc.get_rank(), (3, 40)
    if how == "other collectives":  # of which neither sends what the other waits for
        dist.destroy_process_group()
        dist.init_process_group("gloo", f"file://{folder}/again", timedelta(seconds=4), 2, rank)
    torch.manual_seed(0)
    mesh = oc.ProcessMesh([0, 1], ["dp"])
    model = oc.shard_layer(nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 7)), mesh)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    if how == "other collectives":
        optimizer = oc.shard_optimizer(optimizer, oc.ShardingStage1("dp", mesh))
    try:
        for step in range(3):
            loss = model(oc.shard_tensor(torch.ones(shape), mesh, [oc.Shard(0)])).square().mean()
            loss.backward()
            if rank == 0 or step != 1:
                optimizer.step()
            optimizer.zero_grad()
            if step == 1:
                oc.unshard(loss.detach())
    except CommunicationError as fault:
        (folder / f"said{rank}").write_text("\n".join([str(fault), *getattr(fault, "__notes__", ())]))
        raise


def test_a_rank_that_is_sent_too_much_ends_with_an_error_and_the_others_name_both_calls(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_run, "GRACE", 60.0)  # both have their say
    with pytest.raises(RankError) as caught:
        run_ranks(skips_a_step, 2, tmp_path, "other sizes", backend="gloo")
    assert caught.value.exitcode == 1, "no signal"
    printed = capfd.readouterr().out
    assert "rank 1 was sent more than it waits for" in printed and "for 'x' [] of full_tensor, at" in printed
    assert "terminate called" not in printed
    assert re.search(BOTH, (tmp_path / "said0").read_text())


def test_a_wait_that_ends_by_its_time_out_names_both_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_run, "GRACE", 60.0)
    with pytest.raises(RankError):
        run_ranks(skips_a_step, 2, tmp_path, "other collectives", backend="gloo")
    for rank in range(2):
        said = (tmp_path / f"said{rank}").read_text()
        assert "ranks are out of step\n  rank 0: message" in said and "all_to_all" in said and "full_tensor" in said


def faulty_fleet(folder: Path) -> None:
    """The same by fleet's data parallelism: told by what is compared at the next forwards, or as above."""
    fleet.init(is_collective=True)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 7))
    model = fleet.distributed_model(net)
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), 0.1))
    for step in range(3):
        model(torch.ones(3, 40) * (1 + oc.get_rank())).square().mean().backward()
        if oc.get_rank() == 0 or step != 1:
            optimizer.step()
        optimizer.zero_grad()


def test_a_step_skipped_under_fleet_is_told(tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"CommunicationError: |was sent more than it waits for") as caught:
        run_ranks(faulty_fleet, 2, tmp_path, backend="gloo")
    assert caught.value.exitcode in (None, 1), "no signal"


def another_fault() -> int:
    """What is no fault of Gloo's ends the process as ever: by a signal."""
    ended.watch()
    ctypes.CDLL("libstdc++.so.6")._ZSt9terminatev()
    return 0


def test_faults_of_others_are_left_alone() -> None:
    with pytest.raises(RankError, match="SIGABRT"):
        run_ranks(another_fault, 1)
