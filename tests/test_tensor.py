"""DistTensors behave as tensors do: autograd, hooks, checkpoint, copies, modules, state dicts. Twin: plain torch."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import onecard as oc
from onecard.errors import DispatchError
from onecard.testing import assert_close, multirank


def mesh2():
    return oc.ProcessMesh([0, 1], ["x"])


def pair(shape=(4, 6), placement=None, seed=0):
    """A plain leaf and its distributed twin."""
    plain = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).requires_grad_()
    twin = oc.shard_tensor(plain.detach(), mesh2(), [placement or oc.Shard(0)], requires_grad=True)
    return plain, twin


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x * x

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * 3 * x * x


@multirank(2)
def test_autograd():
    for placement in (oc.Replicate(), oc.Shard(0), oc.Shard(1)):
        plain, twin = pair(placement=placement)
        seen = []
        twin.register_hook(lambda g, seen=seen: seen.append(g.shape))
        for x in (plain, twin):
            (Cube.apply(x).tanh() * 2).sum().backward()
            (x.exp() / 3).sum().backward()  # accumulates
        assert seen == [(4, 6), (4, 6)]
        assert_close(twin.grad, plain.grad)
        (gradient,) = torch.autograd.grad((twin * twin).sum(), twin)
        assert_close(gradient, 2 * plain.detach())
        with torch.no_grad():
            assert not (twin * 2).requires_grad
        with torch.inference_mode():
            assert_close((twin @ twin.t()).relu(), (plain @ plain.t()).relu())
        assert twin.detach().requires_grad is False and twin.is_leaf


@multirank(2)
def test_second_derivatives():
    plain, twin = pair()
    results = []
    for x in (plain, twin):
        (first,) = torch.autograd.grad((x**3).sum(), x, create_graph=True)
        (first * first).sum().backward()
        results.append(x.grad)
    assert_close(results[1], results[0])


@multirank(2)
def test_replicated_leaf_gradient_is_summed_once():
    """D5: the gradient of a replicated value arrives pending and is summed when it is needed whole, once."""
    weight, twin = pair((6, 3), oc.Replicate(), seed=1)
    data = torch.randn(4, 6, generator=torch.Generator().manual_seed(2))
    batch = oc.shard_tensor(data, mesh2(), [oc.Shard(0)])
    for _ in range(2):  # accumulates without a message
        (data @ weight).sum().backward()
        with oc.explain() as report:
            (batch @ twin).sum().backward()
        assert report.bytes == 0
    assert twin.grad.placements == (oc.Partial(),)
    with oc.explain() as report, torch.no_grad():
        twin.sub_(twin.grad, alpha=0.1)
        twin.grad.abs().sum()
    assert [m.step.kind for m in report.messages if m.step.bytes] == ["all_reduce"]
    assert twin.grad.placements == (oc.Replicate(),)
    assert_close(twin.grad, weight.grad)
    assert_close(twin.detach(), weight.detach() - 0.1 * weight.grad)


def sums(report):
    return [m.operator for m in report.messages if m.step.bytes]


@multirank(2)
def test_views_of_a_pending_sum_are_settled_with_it():
    """Two users of two views of one pending sum cost one message, and writes through views still arrive."""
    x = oc.from_local(torch.ones(2, 3), mesh2(), [oc.Partial()]).clone()
    flat, turned = x.view(6), x.t()
    with oc.explain() as report:
        assert_close(torch.relu(turned), torch.full((3, 2), 2.0))
        assert_close(torch.relu(flat), torch.full((6,), 2.0))
        assert_close(torch.relu(x), torch.full((2, 3), 2.0))
    assert sums(report) == ["relu"]
    flat[0] = 9
    assert x[0, 0].item() == 9 and turned[0, 0].item() == 9


@multirank(2)
def test_what_a_rank_holds_on_to_changes_no_layout():
    """One rank keeps local tensors and views for itself: all ranks still agree on which messages are due."""
    x = oc.from_local(torch.ones(2, 3), mesh2(), [oc.Partial()]).clone()
    view = x.t()
    kept = [x.to_local(), x.view(6)] if oc.get_rank() == 0 else []
    for _ in range(2):
        assert_close(torch.relu(view), torch.full((3, 2), 2.0))
    assert x.placements == view.placements == (oc.Replicate(),)
    view[0, 0] = 9
    assert_close(x, torch.tensor([[9.0, 2, 2], [2, 2, 2]]))
    if kept:
        assert_close(kept[0], torch.ones(2, 3))
        assert kept[1].to_local()[0] == 9


@multirank(2)
def test_parts_of_a_pending_sum():
    x = oc.from_local(torch.ones(4, 3), mesh2(), [oc.Partial()]).clone()
    row = x[1]
    assert_close(torch.relu(row), torch.full((3,), 2.0))
    assert_close(x, torch.full((4, 3), 2.0))
    row.add_(1)
    assert_close(x, torch.tensor([2.0, 3, 2, 2]).unsqueeze(1).expand(4, 3))
    y = oc.from_local(torch.ones(4, 3), mesh2(), [oc.Partial()]).clone()
    left, right = y.chunk(2)
    left.add_(1)
    assert_close(torch.cat([left, right]), torch.tensor([3.0, 3, 2, 2]).unsqueeze(1).expand(4, 3))
    assert_close(y, torch.tensor([3.0, 3, 2, 2]).unsqueeze(1).expand(4, 3))


@multirank(2)
def test_a_pending_sum_times_itself():
    x = oc.from_local(torch.full((2, 2), 3.0), mesh2(), [oc.Partial()]).clone()
    y = x.view(4)
    assert_close(x * x, torch.full((2, 2), 36.0))
    z = oc.from_local(torch.full((2, 2), 3.0), mesh2(), [oc.Partial()]).clone()
    assert_close(z * z.view(4).view(2, 2), torch.full((2, 2), 36.0))
    assert_close(y, torch.full((4,), 6.0))
    w = oc.from_local(torch.full((2, 2), 3.0), mesh2(), [oc.Partial()]).clone()
    assert_close(w @ w.t(), torch.full((2, 2), 72.0))
    assert_close(torch._foreach_mul([w, z], [w, z])[1], torch.full((2, 2), 36.0))


@multirank(2)
def test_checkpoint_recomputes():
    plain, twin = pair()
    weight, twin_weight = pair((6, 6), oc.Shard(1), seed=1)
    for x, w in ((plain, weight), (twin, twin_weight)):
        for reentrant in (False, True):
            checkpoint(lambda a, b: torch.relu(a @ b).tanh(), x, w, use_reentrant=reentrant).sum().backward()
    assert_close(twin.grad, plain.grad)
    assert_close(twin_weight.grad, weight.grad)


@multirank(2)
def test_in_place_operators_keep_the_layout():
    plain, twin = pair()
    plain, twin = plain.detach().clone(), twin.detach().clone()
    for x in (plain, twin):
        x.add_(1).mul_(2).clamp_(min=0)
        x += torch.ones(6)
        x[:, 1:3].zero_()
    assert twin.placements == (oc.Shard(0),)
    assert_close(twin, plain)
    pending = oc.from_local(torch.ones(3), mesh2(), [oc.Partial()]).clone()
    pending.mul_(3)
    assert pending.placements == (oc.Partial(),)
    pending.add_(1)
    assert_close(pending, torch.full((3,), 7.0))


@multirank(2)
def test_overwriting_a_pending_sum():
    for fill in (lambda x: x.fill_(5), lambda x: x.copy_(torch.full((4, 3), 5.0)), lambda x: x[:].fill_(5)):
        x = oc.from_local(torch.ones(4, 3), mesh2(), [oc.Partial()]).clone()
        fill(x)
        assert_close(x, torch.full((4, 3), 5.0))
    x = oc.from_local(torch.ones(4, 3), mesh2(), [oc.Partial()]).clone()
    x[1].fill_(7)
    x[2].add_(1)
    assert_close(x, torch.tensor([[2.0], [7.0], [3.0], [2.0]]).expand(4, 3))
    x.zero_()
    assert_close(x, torch.zeros(4, 3))


@multirank(2)
def test_a_view_that_had_to_be_copied_writes_through():
    plain, twin = pair()
    plain, twin = plain.detach(), twin.detach()
    for x in (plain, twin):
        x[1:3].zero_()
    assert twin.placements == (oc.Shard(0),)
    assert_close(twin, plain)


@multirank(2)
def test_two_meshes_and_pickles_are_refused():
    _, twin = pair()
    other = oc.shard_tensor(torch.ones(4, 6), oc.ProcessMesh([1, 0], ["y"]), [oc.Replicate()])
    with pytest.raises(DispatchError, match="two meshes"):
        twin + other
    with pytest.raises(DispatchError, match="full_tensor"):
        pickle.dumps(twin.detach())


@multirank(2)
def test_values_and_texts():
    plain, twin = pair()
    assert twin.sum().item() == pytest.approx(plain.sum().item(), rel=1e-5)
    assert f"{twin.sum():.3f}" == f"{plain.sum().item():.3f}"
    assert torch.tensor(twin.tolist()).equal(plain.detach())
    assert (twin.detach().numpy() == plain.detach().numpy()).all()
    assert bool((twin == plain).all()) and torch.equal(twin, twin) and not torch.equal(twin, twin + 1)
    text = repr(twin)
    assert "[4, 6] float32 [x=Shard(0)]" in text and "local [2, 6]" in text and "requires_grad=True" in text
    assert len(list(twin)) == 4 and len(twin) == 4


@multirank(2)
def test_modules():
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))

    def shard(name, module, mesh):
        if name == "0":
            module.weight = oc.shard_tensor(module.weight, mesh, [oc.Shard(0)])

    twin = oc.shard_layer(copy.deepcopy(plain), mesh2(), shard)
    assert isinstance(twin[0].weight, nn.Parameter) and twin[0].weight.placements == (oc.Shard(0),)
    again = copy.deepcopy(twin)
    assert_close(again[0].weight, plain[0].weight)
    data = torch.randn(3, 6)
    assert_close(again(data), plain(data))
    state = twin.state_dict()
    assert_close(state["0.weight"], plain.state_dict()["0.weight"])
    with torch.no_grad():
        again[0].weight.zero_()
    again.load_state_dict(state)
    assert_close(again[0].weight, plain[0].weight)
    assert again[0].weight.placements == (oc.Shard(0),)
    again.load_state_dict(plain.state_dict())
    assert_close(again(data), plain(data))
    double = again.to(torch.float64)
    assert double[0].weight.dtype is torch.float64 and double[0].weight.placements == (oc.Shard(0),)
    assert_close(double(data.double()), copy.deepcopy(plain).double()(data.double()))
    twin.requires_grad_(False)
    assert not any(p.requires_grad for p in twin.parameters())
    weight = twin[0].weight
    weight.data = weight.data * 2
    assert_close(weight, plain[0].weight * 2)


@multirank(3)
def test_ranks_outside_the_mesh_run_the_same_program():
    mesh = oc.ProcessMesh([0, 1], ["x"])
    x = oc.shard_tensor(torch.ones(4, 2), mesh, [oc.Shard(0)], requires_grad=True)
    y = torch.relu(x @ oc.shard_tensor(torch.ones(2, 3), mesh, [oc.Replicate()])).sum()
    y.backward()
    assert y.shape == () and x.grad.shape == (4, 2)
    if torch.distributed.get_rank() == 2:
        assert x.to_local().numel() == 0
        with pytest.raises(DispatchError, match="not in"):
            y.item()
    else:
        assert y.item() == 24
    assert_close(x.grad, torch.full((4, 2), 3.0))  # full_tensor() reaches every rank of the world


@multirank(2)
def test_kernels_get_memory_as_dense_as_it_says():
    """native_group_norm reads a bias as if it were dense; a rank that adds nothing to a sum must not hold one zero, expanded."""
    mesh = oc.ProcessMesh([0, 1], ["x"])
    weight, bias, x = torch.randn(3, 8192, generator=torch.Generator().manual_seed(0))
    pending = oc.shard_tensor(weight, mesh, [oc.Partial()])
    y = torch.nn.functional.group_norm(x[None, :, None], 2, pending, bias)
    assert y.placements == (oc.Partial(),)
    assert_close(y, torch.nn.functional.group_norm(x[None, :, None], 2, weight, bias), rtol=1e-5, atol=1e-5)


def test_a_dtype_by_name_is_refused_with_the_one_that_works():
    with pytest.raises(TypeError, match=r"shard_tensor: dtype is 'float32'; want .* dtype=torch.float32"):
        oc.shard_tensor([1.0], oc.ProcessMesh([0], ["x"]), [oc.Shard(0)], dtype="float32")


@multirank(2)
def test_what_is_printed_of_a_pending_sum_is_called_a_summand():
    x = oc.shard_tensor(torch.ones(4), mesh2(), [oc.Shard(0)]).sum()
    assert "[x=Partial(sum)]" in repr(x) and "local summand []: 2.)" in repr(x)
    assert "local []: 4.)" in repr(x.reduce_partial())
