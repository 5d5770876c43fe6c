"""Views, writes and shared memory: as on one card, or a clear error. Twin: plain torch."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import pytest
import torch
from amounts import seeds

import onecard as oc
from onecard.errors import DispatchError
from onecard.tensor.aliasing import memory
from onecard.testing import assert_close, multirank

sys.path.insert(0, str(Path(__file__).parent))
import aliasing_programs

MESH = oc.ProcessMesh([0, 1], ["x"])


def put(whole, placement):
    return oc.shard_tensor(whole, MESH, [placement])


def few_refusals(mesh, quick, proof, grad):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of gathered operators
        tried = seeds(0, quick, proof)
        refused = aliasing_programs.run_many(tried, mesh, grad)
    assert refused.total() < 0.05 * len(tried), refused
    assert all("overlap" in why or "expanded" in why for why in refused), refused


@pytest.mark.proof
@multirank(2)
def test_random_programs():
    few_refusals(MESH, 20, 1000, grad=False)


@pytest.mark.proof
@multirank(2)
def test_random_programs_with_gradients():
    few_refusals(MESH, 20, 800, grad=True)


@pytest.mark.proof
@multirank(4)
def test_random_programs_on_two_axes():
    few_refusals(oc.ProcessMesh([[0, 1], [2, 3]], ["x", "y"]), 20, 400, grad=False)


@multirank(2)
def test_a_view_of_a_copied_view_follows():
    x = put(torch.arange(20.0).view(5, 4), oc.Shard(0))
    copied = x[1:4]
    shared, again = copied.t(), copied[:2]
    x.add_(1)
    assert_close(shared, (torch.arange(20.0).view(5, 4) + 1)[1:4].t())
    again.mul_(2)
    assert_close(shared[:, :2], x.full_tensor()[1:3].t())
    del copied, again
    shared.zero_()
    assert_close(x.sum(), (torch.arange(20.0).view(5, 4) + 1)[[0, 4]].sum())


@multirank(2)
def test_foreach_and_fused_writes_are_seen():
    options = dict(weight_decay=0.0, momentum=0.0, lr=1.0, dampening=0.0, nesterov=False, maximize=False)
    for write in (
        lambda x: torch._foreach_add_([x], 1),
        lambda x: torch._foreach_copy_([x], [x + 1]),
        lambda x: torch._fused_sgd_([x], [-torch.ones(5, 4)], [], is_first_step=False, **options),
        lambda x: torch._foreach_add_([x, x[1:3]], torch.tensor(0.5)),
        lambda x: torch.add(x, 1, out=x),
        lambda x: x.copy_(x + 1),
        lambda x: torch.nn.init.uniform_(x),
    ):
        x = put(torch.arange(20.0).view(5, 4), oc.Shard(0))
        copied = x[1:4]
        write(x)
        assert_close(copied, x.full_tensor()[1:4])


@multirank(2)
def test_what_is_no_copy_pays_nothing():
    x = put(torch.zeros(4, 4), oc.Shard(0))
    assert not memory.copies
    copied = x[1:3]
    assert memory.copies
    copied.add_(1)
    del copied
    assert not memory.copies
    y = x[:, 1:3]
    y.add_(1)
    assert not memory.copies and y._memory is None


@multirank(2)
def test_autograd_counts_writes_to_copies():
    for write in (lambda x, y: x.add_(1), lambda x, y: y.add_(1), lambda x, y: torch._foreach_add_([x], 1)):
        w = put(torch.ones(5, 4), oc.Shard(0)).requires_grad_()
        x = w * 1
        y = x[1:4]
        loss = (y * y).sum()
        write(x, y)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@multirank(2)
def test_windows_and_expanded_tensors_are_refused():
    x = put(torch.arange(6.0), oc.Shard(0))
    windows = x.unfold(0, 3, 1)
    x.add_(1)
    assert_close(windows, (torch.arange(6.0) + 1).unfold(0, 3, 1))
    for write in (lambda: windows.add_(1), lambda: windows[0].add_(1), lambda: torch.add(x[:4], 1, out=windows[:, 0])):
        with pytest.raises(DispatchError, match=r"windows that overlap.*clone"):
            write()
    with pytest.raises(DispatchError, match=r"expanded.*clone"):
        x.expand(2, 6).add_(1)


@multirank(2)
def test_a_write_costs_what_it_must():
    """Of a slice, only the slice travels, and nothing for the part that is not touched."""
    x = put(torch.zeros(1000, 4), oc.Shard(0))
    with oc.explain() as report:
        x[400:402] = 1.0
    assert sum(m.step.bytes for m in report.messages) <= 2 * 4 * 8
    assert_close(x.sum(), torch.tensor(8.0))


@multirank(2)
def test_a_diagonal_is_written_through_a_view_of_all_memory():
    """fill_diagonal_() is as_strided() from the memory's first element: also of what cdist() gives for more than 25 rows."""
    whole = torch.arange(24.0).view(4, 6)
    for placement in (oc.Shard(0), oc.Shard(1), oc.Replicate()):
        for look in (lambda c: c.view(6, 4), lambda c: c.t(), lambda c: torch.cdist(c.view(8, 3), c.view(8, 3))):
            mine, alone = put(whole.clone(), placement), whole.clone()
            assert_close(look(mine).fill_diagonal_(9.0), look(alone).fill_diagonal_(9.0))
            assert_close(mine, alone)
        rows = put(torch.cat([whole] * 8), placement)
        far = torch.cdist(torch.cat([whole] * 8), torch.cat([whole] * 8))
        assert_close(torch.cdist(rows, rows).fill_diagonal_(9.0), far.fill_diagonal_(9.0))
    with pytest.raises(DispatchError, match="which is a view"):  # its offset counts from another beginning
        put(whole.clone(), oc.Replicate())[1:].as_strided((2, 2), (1, 1), 0)
