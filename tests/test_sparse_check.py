"""The sparse check itself: when it compares, what it tells apart, and what it must not take for a mistake."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import pytest
import silent_programs
import torch
import torch.distributed as dist
from launching import launched
from silent_programs import run
from torch import nn
from torch.utils.data import DataLoader

import onecard as oc
from onecard.comm.agree import agree, prints
from onecard.comm.agree.prints import fingerprint
from onecard.comm.agree.sparse_check import SLOTS, Site, _telling
from onecard.comm.world import world
from onecard.errors import CommunicationError
from onecard.testing import RankError, multirank, run_ranks


def bits(x: torch.Tensor) -> str:
    return fingerprint(x).split("\x1f")[0]


def test_calls_are_compared_ever_more_seldom_but_never_by_more_than_one_in_five_hundred():
    site = Site("x")
    due = [call for call in range(1, 20_001) if site.tick()]
    assert due[:7] == [1, 2, 4, 8, 16, 24, 32]
    gaps = [b - a for a, b in itertools.pairwise(due[4:])]
    assert min(gaps) == 8 and all(gap <= max(8, call / 500) for gap, call in zip(gaps, due[4:], strict=False))
    assert len(due) < 20_000 / 8


class Ranks:
    """Several ranks that share a store, played one after the other in one process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, size: int = 2) -> None:
        self.store, self.now = dist.HashStore(), 0
        self.sites = [Site("x") for _ in range(size)]
        self.heard: list[tuple[int, int, str]] = []
        monkeypatch.setattr(world, "get_rank", lambda: self.now)
        monkeypatch.setattr(agree, "when_met", lambda compare: compare())
        monkeypatch.setattr(agree, "exchange", lambda key, old, word: self.store.compare_set(key, old, word).decode())

    def call(self, rank: int, word: str) -> None:
        self.now = rank
        if self.sites[rank].tick():
            self.sites[rank].ask(word, lambda first, said: self.heard.append((rank, first, said)))


def test_the_store_holds_a_few_words_of_each_subject_however_long_a_run_is(monkeypatch):
    ranks = Ranks(monkeypatch)
    for call in range(2000):
        ranks.call(call % 2, f"{call}a")
        ranks.call(1 - call % 2, f"{call}b")
    asked = ranks.sites[0].asked
    assert asked > 100 and len(ranks.heard) == asked
    assert all(said.endswith("a") for _, _, said in ranks.heard)
    assert ranks.store.num_keys() == SLOTS


def test_a_rank_far_behind_compares_nothing_with_what_took_its_words_place(monkeypatch):
    ranks = Ranks(monkeypatch)
    for call in range(200):
        ranks.call(0, f"{call}")
    behind = []
    for call in range(200):
        ranks.call(1, f"{call}")
        behind += [(call, int(said)) for _, _, said in ranks.heard[len(behind) :]]
    assert len(behind) <= SLOTS and all(mine == theirs for mine, theirs in behind)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.int16, torch.int64, torch.bool]
)
@pytest.mark.parametrize("size", [1, 5, 511, 4099, 70_001])
@pytest.mark.parametrize("bits", [bits, lambda x: prints._on_device(x).split("\x1f")[0]], ids=["here", "on a GPU"])
def test_a_changed_element_anywhere_changes_the_digest(dtype, size, bits):
    x = (torch.randn(size) * 100).to(dtype)
    for place in {0, size // 2, size - 1, size // 3}:
        y = x.clone()
        y[place] = ~y[place] if dtype is torch.bool else y[place] + 1 if y[place] == 0 else 0
        assert bits(x) == bits(x.clone()) != bits(y), place


def test_what_is_out_of_range_is_compared_too():
    lowest = torch.full((9,), torch.finfo(torch.float32).min)
    assert bits(lowest) == bits(lowest.clone()) != bits(-lowest)
    assert bits(torch.tensor([float("nan"), float("inf")])) != bits(torch.tensor([float("inf"), float("nan")]))


def test_rows_that_change_places_change_the_digest():
    x = torch.randn(64, 1024)
    assert bits(x) != bits(x[torch.randperm(64)]) and bits(x) != bits(x.flip(0))


def test_the_digest_is_of_values_not_of_memory():
    x = torch.randn(33, 65)
    assert bits(x) == bits(x.t().contiguous().t()) == bits(torch.cat([x, x], 1)[:, :65])
    assert bits(torch.ones(()).expand(7)) == bits(torch.ones(7))
    assert bits(torch.randn(4, dtype=torch.complex64).conj()) and bits(torch.empty(0))


# -- no mistake, no alarm ----------------------------------------------------------------------------------------------


@multirank(2)
def test_one_rank_may_evaluate_on_its_own():
    loop = silent_programs.Loop()
    for number, (x, y) in zip(range(20), silent_programs.batches(), strict=False):
        loop.step(x, y)
        if oc.get_rank() == 0 and number % 3 == 1:
            with torch.no_grad():
                loop.net(torch.randn(5, 6))


@multirank(2)
def test_one_rank_may_look_at_what_needs_no_message():
    loop = silent_programs.Loop()
    for x, y in (batch for _, batch in zip(range(12), silent_programs.batches(), strict=False)):
        loop.step(x, y)
        if oc.get_rank() == 0:
            [p.detach().norm() for p in loop.net.parameters()]
            copy = loop.net[0].weight.detach().clone()
            copy.mul_(2)


@multirank(4)
def test_each_line_of_ranks_has_copies_of_its_own():
    mesh = oc.ProcessMesh([[0, 1], [2, 3]], ["dp", "tp"])
    torch.manual_seed(0)
    w = oc.shard_tensor(nn.Parameter(torch.randn(6, 4)), mesh, [oc.Replicate(), oc.Shard(0)])
    optimizer = torch.optim.AdamW([w], foreach=True)
    for _ in range(10):
        x = torch.randn(8, 4)
        nn.functional.linear(oc.shard_tensor(x, mesh, [oc.Shard(0), oc.Replicate()]), w).square().sum().backward()
        optimizer.step()
        part = w.to_local().detach()
        again = oc.from_local(part, mesh, [oc.Replicate(), oc.Shard(0)])
        assert torch.equal(again.to_local(), part)


@multirank(4)
def test_meshes_of_the_same_ranks_are_told_apart():
    """Each has its own first call; the words of one must not be taken for the other's."""
    for mesh in (oc.ProcessMesh([0, 1, 2, 3], ["x"]), oc.ProcessMesh([[0, 1], [2, 3]], ["x", "y"])):
        x = oc.shard_tensor(torch.ones(4, 4), mesh, [oc.Replicate()] * mesh.ndim)
        x * torch.full((4,), float(mesh.ndim))
        oc.from_local(torch.full((3,), float(mesh.ndim)), mesh, [oc.Replicate()] * mesh.ndim)


@multirank(2)
@pytest.mark.parametrize("asked", ["full_tensor", "redistribute"])
def test_what_one_rank_asks_for_without_a_message_is_no_part_of_the_next_one(asked):
    """Batches are given on by a message that is for no operator."""
    mesh = oc.ProcessMesh([0, 1], ["tp"])
    net = silent_programs.model(mesh, cut=False)
    loader = oc.shard_dataloader(DataLoader(silent_programs.samples(), batch_size=4), mesh)
    for number, (x, _) in enumerate(loader):
        net(x)
        if oc.get_rank() == 0 and number < 3:
            net[0].weight.full_tensor() if asked == "full_tensor" else net[0].weight.redistribute([oc.Shard(0)])


@multirank(2)
def test_a_view_of_a_parameter_is_written_to_without_autograd():
    mesh = oc.ProcessMesh([0, 1], ["x"])
    w = nn.Parameter(oc.shard_tensor(torch.ones(3), mesh, [oc.Shard(0)]))
    view = w.unflatten(-1, (1, -1))
    with torch.no_grad():
        view[0:] += 1
    assert w.detach().tolist() == [2, 2, 2]


@multirank(3)
def test_ranks_outside_a_mesh_meet_the_others():
    mesh = oc.ProcessMesh([0, 2], ["x"])
    w = oc.shard_tensor(torch.ones(4, 4), mesh, [oc.Replicate()])
    for _ in range(10):
        w @ torch.ones(4)


# -- what else it says -------------------------------------------------------------------------------------------------


def drift() -> None:
    mesh = oc.ProcessMesh([0, 1], ["x"])
    torch.manual_seed(0)
    x = torch.randn(100)
    oc.from_local(x * (1 + 1e-6 * oc.get_rank()), mesh, [oc.Replicate()])


def test_what_may_be_rounding_is_a_warning():
    with pytest.raises(RankError, match=r"UserWarning(.|\n)*this may be rounding"):
        run_ranks(drift, 2)


@pytest.mark.share(1)
@pytest.mark.parametrize("optimizer", ["sgd", "foreach", "fused", "shard_optimizer"])
def test_copies_of_parameters_are_compared_under_every_kind_of_optimizer(optimizer):
    with pytest.raises(RankError, match=r"the parameter \(parameter 0\.weight\)"):
        run_ranks(run, 2, "edited_parameter", 20, optimizer=optimizer)


PROGRAM = """
import torch, sys, onecard as oc
mesh = oc.ProcessMesh([0, 1], ["x"])
layer = oc.shard_layer(torch.nn.Linear(4, 4), mesh)
for step in range(12):
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step + oc.get_rank()))  # each rank its own data
    layer({x}).sum().backward()
print("trained")
"""


@pytest.mark.share(1)
@pytest.mark.parametrize("x", ["x", "oc.shard_tensor(x, mesh, [oc.Shard(0)])"])
def test_a_program_that_sends_nothing_is_looked_at_too(x, tmp_path: Path):
    """Ranks that never need each other have not met when the first difference comes up."""
    status, output = launched(tmp_path, PROGRAM.replace("{x}", x))
    assert status != 0 and "differs between ranks" in output, output


@pytest.mark.proof
def test_ranks_of_a_test_read_the_switch_as_well(monkeypatch):
    monkeypatch.setenv("ONECARD_CHECK", "0")
    assert run_ranks(run, 2, "skipped", 12) == [12, 12]
    assert run_ranks(run, 2, "edited_summand", 12, backend="gloo") == [12, 12]
    monkeypatch.setenv("ONECARD_CHECK", "1")
    with pytest.raises(RankError, match="differs between ranks, first at"):
        run_ranks(run, 2, "skipped", 12)


def test_it_can_be_switched_off(tmp_path: Path):
    status, output = launched(tmp_path, PROGRAM.replace("{x}", "x"), ONECARD_CHECK="0")
    assert status == 0 and "trained" in output, output


def told(mistake: str, folder: Path) -> None:
    """Note what this rank is told in the end. Who finds the mistake is gone at once."""
    with pytest.raises(CommunicationError) as raised:
        run(mistake, 30)
    text = "\n".join([str(raised.value), *getattr(raised.value, "__notes__", [])])
    (folder / f"rank{dist.get_rank()}").write_text(text)
    if "has stopped" not in text:
        os._exit(1)


def test_the_others_are_told_why_a_rank_stopped(tmp_path: Path):
    with pytest.raises(RankError, match="exit code 1"):
        run_ranks(told, 2, "edited_summand", tmp_path, backend="gloo")
    texts = [path.read_text() for path in tmp_path.iterdir()]
    assert sum("has stopped: ranks are out of step" in text for text in texts) == 1, texts


def test_which_equal_parts_can_hardly_be_meant():
    """Token ids and floats; not constants, few classes, masks, or positions."""
    ids = torch.randint(50_000, (4, 16), generator=torch.Generator().manual_seed(0))
    assert _telling(ids) and _telling(torch.randn(8))
    for silent in (torch.ones(8), torch.zeros(64).long(), ids % 5, ids > 9, torch.arange(64), torch.arange(64).expand(4, 64),
                   ids[:1].expand(4, 16), ids[0, :6]):  # fmt: skip
        assert not _telling(silent)


def _some_send_between() -> None:
    """Two of four ranks exchange something between two calls, as a line of experts does that has rows."""
    mesh = oc.ProcessMesh([[0, 1], [2, 3]], ["dp", "ep"])
    first = oc.new_group([0, 1])
    x = oc.shard_tensor(torch.ones(8, 4), mesh, [oc.Shard(0), oc.Shard(0)])
    for call in range(40):
        x * torch.full((4,), float(call))
        if oc.get_rank() < 2 and call % 3:
            oc.all_reduce(torch.ones(1), group=first)
        x * torch.full((4,), -float(call))


def test_ranks_that_send_more_than_others_are_compared_call_by_call() -> None:
    run_ranks(_some_send_between, 4)
