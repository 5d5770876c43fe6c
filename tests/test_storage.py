"""What torch and its friends ask of a tensor's memory: tied weights, shared memory, tangents; and whom it may not be given to."""

import copy

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn

import onecard as oc
from onecard.errors import DispatchError, OnecardError
from onecard.testing import assert_close, multirank, run_ranks


def cut(x):
    return oc.shard_tensor(x, oc.ProcessMesh([0, 1], ["x"]), [oc.Shard(0)])


def matrix(seed=0):
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(seed))


@multirank(2)
def test_memory_is_told_apart():
    x, y = cut(matrix()), cut(matrix(1))
    assert x.untyped_storage().data_ptr() != y.untyped_storage().data_ptr()  # what tied weights are found by
    assert x.is_set_to(x) and not x.is_set_to(y) and not x.is_set_to(x.view(4, 6))
    assert x.share_memory_().is_shared()
    assert_close(x, matrix(), rtol=0)


@multirank(2)
def test_memory_of_a_part_is_not_that_of_the_whole():
    """safetensors and their like read a tensor's size from where it begins: beyond a part lies somebody else's memory."""
    x = cut(matrix())
    with pytest.raises(DispatchError, match=r"holds only its part. To save, .*onecard.unshard"):
        safetensors.torch.save({"x": x})
    pending = oc.shard_tensor(matrix(), x.mesh, [oc.Partial()])
    with pytest.raises(DispatchError, match="holds only its part"):
        pending.data_ptr()
    whole = oc.shard_tensor(matrix(), x.mesh, [oc.Replicate()])
    assert whole.data_ptr() == whole.to_local().data_ptr() == copy.copy(whole).data_ptr()
    copy.copy(whole).zero_()
    assert_close(whole, torch.zeros(6, 4))
    assert isinstance(copy.copy(torch.nn.Parameter(x)), torch.nn.Parameter)
    assert_close(torch.from_dlpack(x.__dlpack__()), matrix())
    for given in (x, x.view(-1), x + 1):
        with pytest.raises(RuntimeError, match="Cannot access data pointer"):
            torch.utils.dlpack.to_dlpack(given)
    assert_close(cut(matrix()).apply_(abs), matrix().abs())


@multirank(2)
def test_plain_tensors_are_made_of_numbers():
    """``torch.tensor`` reads them with Python's dispatch switched off; one is a view to be taken again."""
    x = cut(matrix())
    late = x[1:5][0, 0]
    x.add_(1)
    assert_close(torch.tensor([x.sum(), late, 1.0]), torch.tensor([(matrix() + 1).sum(), matrix()[1, 0] + 1, 1.0]))
    assert_close(torch.tensor([[x.argmax()], [2]]), torch.tensor([[matrix().argmax()], [2]]))
    assert torch.tensor([(x > 9).any(), True]).tolist() == [False, True]


@multirank(2)
def test_forward_mode():
    def program(a):
        return (a.sin() @ a.mT).sum(0)

    ours = torch.func.jvp(program, (cut(matrix()),), (cut(matrix(1)),))
    for found, expected in zip(ours, torch.func.jvp(program, (matrix(),), (matrix(1),)), strict=True):
        assert_close(found, expected, rtol=1e-5, atol=1e-6)


COLLECTIVES = {
    "all_reduce": lambda x: dist.all_reduce(x),
    "broadcast": lambda x: dist.broadcast(x, 0),
    "all_gather": lambda x: dist.all_gather([torch.empty(6, 4) for _ in range(2)], x),
    "gathered into": lambda x: dist.all_gather_into_tensor(torch.empty(12, 4), x),
    "scattered": lambda x: dist.reduce_scatter_tensor(torch.empty(3, 4), x),
    "isend": lambda x: dist.isend(x, 1 - dist.get_rank()),
    "functional": lambda x: functional.all_reduce(x, "sum", dist.group.WORLD),
    "DistributedDataParallel": lambda x: nn.parallel.DistributedDataParallel(nn.ParameterList([nn.Parameter(x)])),
}


def collectives_by_hand():
    x = cut(matrix())
    for call in COLLECTIVES.values():
        with pytest.raises(OnecardError, match=r"one tensor, .*leave the collective out.*to_local\(\)"):
            call(x)
    assert_close(x * 2, matrix() * 2)  # the group still works
    dist.all_reduce(x.to_local())


@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_collectives_by_hand_are_refused(backend):
    run_ranks(collectives_by_hand, 2, backend=backend)


@pytest.mark.proof
@multirank(2)
def test_compile_says_that_it_cannot():
    x = cut(matrix())
    with pytest.raises(Exception, match=r"torch\.compile and torch\.export cannot trace distributed tensors"):
        torch.compile(lambda a: (a @ a.mT).sum(), backend="eager")(x)
    assert_close(x.sum(), matrix().sum(), rtol=1e-5)  # and nothing is broken by that
