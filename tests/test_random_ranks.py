"""The same random numbers on one card and on real ranks: 50 operators and layouts each, meshes, checkpoint, disagreement."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from itertools import cycle, islice

import pytest
import torch
import torch.nn.functional as F
from amounts import PROOF, amount, share
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from random_operators import MAKERS, OPERATORS, TALKING, layouts, probabilities
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils.checkpoint import checkpoint

import onecard as oc
from onecard.errors import DispatchError
from onecard.testing import RankError, assert_close, multirank, run_ranks

# Gloo cannot gather complex numbers; in one process they are compared without.
ALL = {name: operator for name, operator in (OPERATORS | TALKING).items() if "complex" not in name}


ROUNDED = ("attention", "gumbel_softmax")  # products of matrices and sums, whose order a cut changes


def check(name, shape, layout, seed):
    x = probabilities(shape)
    torch.manual_seed(seed)
    with oc.one_card_random():
        expected = ALL[name](x) if name in ALL else MAKERS[name][0](shape)
    torch.manual_seed(seed)
    if name in MAKERS:
        result = MAKERS[name][1](shape, layout.mesh, layout.placements)
    else:
        twin = oc.shard_tensor(x, layout.mesh, [oc.Replicate()] * layout.mesh.ndim)
        # init.sparse_ shuffles plain tensors, which on a mesh as well are torch's own business
        with oc.one_card_random() if name == "init.sparse_" else nullcontext():
            result = ALL[name](twin.redistribute(layout.placements))
    found = oc.unshard(result)
    if name in ROUNDED:
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    else:
        assert torch.equal(found, expected), f"{name} {shape} {layout}"


def compare(ranks: int, cases: int) -> None:
    """Random cases, the same on every rank, each against plain torch under ``one_card_random``; all names in turn."""
    warnings.simplefilter("ignore", oc.GatheredOperatorWarning)  # orthogonal_: a QR decomposition has no rule
    names = cycle(sorted(ALL | MAKERS))

    @settings(max_examples=cases, deadline=None, derandomize=True, database=None, phases=[Phase.generate])
    @given(case=layouts(ranks), seed=st.integers(0, 2**32))
    def run(case, seed):
        for name in islice(names, 3):
            check(name, *case, seed)

    run()


@pytest.mark.share(1)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4] if PROOF else [2, 3])
def test_operators_on_real_ranks(ranks):
    run_ranks(compare, ranks, ranks, amount(15, 200))


@multirank(4)
def test_every_operator_after_a_change_of_mesh():
    warnings.simplefilter("ignore", oc.GatheredOperatorWarning)
    line, square = oc.ProcessMesh(range(4), ["x"]), oc.ProcessMesh([[0, 1], [2, 3]], ["x", "y"])
    for name, operator in ALL.items():
        for shape in share(([2, 3, 5, 4], [5, 7]), 1):
            x = probabilities(shape)
            oc.manual_seed(2)
            with oc.one_card_random():
                expected = [operator(x), operator(x)]
            oc.manual_seed(2)
            with oc.one_card_random() if name == "init.sparse_" else nullcontext():
                before = oc.shard_tensor(x, line, [oc.Shard(1)])
                found = [operator(before), operator(oc.reshard(before, square, [oc.Shard(1), oc.Shard(1)]))]
            for one, other in zip(found, expected, strict=True):
                if name in ROUNDED:
                    torch.testing.assert_close(oc.unshard(one), other, rtol=1e-5, atol=1e-6)
                else:
                    assert torch.equal(oc.unshard(one), other), f"{name} {shape}"


@multirank(4)
def test_a_change_of_mesh():
    """The same program on one mesh, then on another: the draws go on as if nothing had changed."""

    def program(meshes):
        oc.manual_seed(5)
        kept = []
        for mesh, placements in meshes:
            x = oc.shard_tensor(torch.ones(7, 6), mesh, placements)
            kept.append((F.dropout(x, 0.5) + torch.randn_like(x)).full_tensor())
        return torch.stack(kept)

    line, square = oc.ProcessMesh(range(4), ["x"]), oc.ProcessMesh([[0, 1], [2, 3]], ["x", "y"])
    one = program([(line, [oc.Replicate()])] * 3)
    both = program([(line, [oc.Shard(0)]), (square, [oc.Shard(0), oc.Shard(0)]), (square, [oc.Shard(1), oc.Partial()])])
    assert torch.equal(one, both)


@multirank(4)
def test_the_mask_of_attention_bit_by_bit():
    """Heads and batch cut, whole, uneven, twice; sequences cut, which are gathered; heads that share keys."""
    for ranks, shape in (([[0, 1], [2, 3]], (3, 4, 5, 5)), ([[0], [1]], (2, 3, 7, 7)), ([[2, 0, 1]], (2, 7, 3, 3))):
        mesh, (batch, heads, length, _) = oc.ProcessMesh(ranks, ["x", "y"]), shape
        zeros, identity = torch.zeros(shape), torch.eye(length).expand(batch, heads, -1, -1)
        oc.manual_seed(5)
        with oc.one_card_random():
            expected = F.scaled_dot_product_attention(zeros, zeros, identity, dropout_p=0.3)
        assert (expected == 0).any() and (expected > 0).any()
        for x, y in ((0, 1), (1, 1), (0, 0), (1, 0), (2, 1), (2, 3)):
            placements = [oc.Shard(x), oc.Shard(y)]
            q, v = (oc.shard_tensor(t.contiguous(), mesh, placements) for t in (zeros, identity))
            oc.manual_seed(5)
            found = F.scaled_dot_product_attention(q, q, v, dropout_p=0.3)
            assert torch.equal(oc.unshard(found), expected), (ranks, placements)


@multirank(3)
def test_ranks_outside_a_mesh_stay_in_step():
    mesh = oc.ProcessMesh([1, 2], ["x"])
    oc.manual_seed(0)
    x = oc.shard_tensor(torch.ones(5, 4), mesh, [oc.Shard(0)])
    F.dropout(x, 0.5).normal_()
    torch.multinomial(x, 2)
    everywhere = oc.ProcessMesh([0, 1, 2], ["x"])
    state = torch.get_rng_state().view(1, -1)
    states = oc.from_local(state, everywhere, [oc.Shard(0)]).full_tensor()
    assert (states == states[0]).all()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.dropout = nn.Linear(6, 8), nn.Linear(8, 6), nn.Dropout(0.4)

    def forward(self, x):
        return x + self.dropout(self.second(self.dropout(F.gelu(self.first(x)))))


@multirank(2)
def test_checkpoint_draws_the_same_again():
    mesh = oc.ProcessMesh([0, 1], ["tp"])

    def gradients(layer, x, how):
        oc.manual_seed(1)
        layer.zero_grad()
        if how is None:
            y = layer(layer(x))
        else:
            y = checkpoint(layer, checkpoint(layer, x, use_reentrant=how), use_reentrant=how)
        y.sum().backward()
        return [oc.unshard(p.grad).clone() for p in layer.parameters()]

    def column_and_row(name, layer, mesh):
        if name == "first":
            layer.weight = oc.shard_tensor(layer.weight, mesh, [oc.Shard(0)])
            layer.bias = oc.shard_tensor(layer.bias, mesh, [oc.Shard(0)])
        if name == "second":
            layer.weight = oc.shard_tensor(layer.weight, mesh, [oc.Shard(1)])

    torch.manual_seed(0)
    plain = Block()
    x = torch.randn(3, 6)
    with oc.one_card_random():
        expected = gradients(plain, x.clone().requires_grad_(), None)
        for how in (True, False):
            assert_close(gradients(plain, x.clone().requires_grad_(), how), expected)
    layer = oc.shard_layer(plain, mesh, column_and_row)
    for how in (None, True, False):
        twin = oc.shard_tensor(x, mesh, [oc.Replicate()], requires_grad=True)
        assert_close(gradients(layer, twin, how), expected)


class Dropper(nn.Module):
    """Random operators alone: no sums whose order a layout could change."""

    def forward(self, x):
        noise = torch.rand_like(x) + torch.poisson(torch.full_like(x, 3.0))
        return F.dropout1d(F.dropout(x, 0.3) * noise, 0.3) * torch.randn_like(x)


@pytest.mark.proof
@multirank(4)
@pytest.mark.parametrize("how", [True, False])
def test_checkpoint_draws_the_same_bits_again(how):
    mesh, layer = oc.ProcessMesh([[0, 1], [2, 3]], ["x", "y"]), Dropper()
    torch.manual_seed(0)
    x = torch.randn(5, 6, 7)

    def gradient(value, run):
        oc.manual_seed(1)
        value = value.detach().requires_grad_()
        run(value).sum().backward()
        return value.grad, torch.get_rng_state()

    with oc.one_card_random():
        expected, after = gradient(x, layer)
    for placements in ([oc.Replicate()] * 2, [oc.Shard(0), oc.Shard(1)], [oc.Shard(2), oc.Shard(2)]):
        twin = oc.shard_tensor(x, mesh, placements)
        found, state = gradient(twin, lambda value: checkpoint(layer, value, use_reentrant=how))
        assert torch.equal(oc.unshard(found), expected) and torch.equal(state, after)
        found, _ = gradient(twin, lambda value: checkpoint(layer, value, use_reentrant=how, preserve_rng_state=False))
        assert not torch.equal(oc.unshard(found), expected)  # without the state torch promises nothing, here as there


def draw_some(ranks, placements, seed, load, save):
    """Two draws on a mesh; begins with a seed or a state in a file, and may leave the state behind."""
    mesh = oc.ProcessMesh(ranks)
    if load is None:
        oc.manual_seed(seed)
    else:
        torch.set_rng_state(load_file(load)["state"])
    x = oc.shard_tensor(torch.ones(7, 6), mesh, [getattr(oc, name)(*dim) for name, *dim in placements])
    drawn = torch.stack([F.dropout(x, 0.5).full_tensor(), torch.randn_like(x).full_tensor()])
    if save is not None and oc.get_rank() == 0:
        save_file({"state": torch.get_rng_state()}, save)
    return drawn


def test_a_saved_state_goes_on_on_another_mesh(tmp_path):
    file = str(tmp_path / "state.safetensors")
    whole = run_ranks(draw_some, 1, [0], [("Replicate",)], 3, None, None)[0]
    first = run_ranks(draw_some, 3, [2, 0, 1], [("Shard", 0)], 3, None, file)[0]
    second = run_ranks(draw_some, 4, [[0, 1], [2, 3]], [("Shard", 1), ("Shard", 1)], 99, file, None)
    oc.manual_seed(3)
    with oc.one_card_random():
        x = torch.ones(7, 6)
        expected = torch.stack(
            [f() for _ in range(2) for f in (lambda: F.dropout(x, 0.5), lambda: torch.randn_like(x))]
        )
    assert torch.equal(whole, expected[:2]) and torch.equal(first, expected[:2])
    assert all(torch.equal(rank, expected[2:]) for rank in second)


@multirank(4)
def test_generators_and_forks_are_those_of_one_card():
    mesh = oc.ProcessMesh([[0, 1], [2, 3]], ["x", "y"])

    def program(x):
        oc.manual_seed(7)
        own = torch.Generator().manual_seed(5)
        drawn = [torch.empty_like(x).normal_(generator=own), torch.bernoulli(x, generator=own)]
        with torch.random.fork_rng(devices=[]):
            drawn.append(torch.rand_like(x))
        drawn += [torch.rand_like(x), torch.poisson(x, generator=own), torch.multinomial(x, 2, generator=own)]
        kept = own.get_state()
        drawn.append(torch.empty_like(x).uniform_(generator=own))
        own.set_state(kept)
        drawn.append(torch.empty_like(x).uniform_(generator=own))
        return drawn

    x = probabilities([5, 7])
    with oc.one_card_random():
        expected = program(x)
    assert torch.equal(expected[2], expected[3]) and torch.equal(expected[-2], expected[-1])
    for placements in ([oc.Replicate()] * 2, [oc.Shard(0), oc.Shard(1)], [oc.Shard(1), oc.Shard(1)]):
        for found, one in zip(program(oc.shard_tensor(x, mesh, placements)), expected, strict=True):
            assert torch.equal(oc.unshard(found), one)


def seed_by_rank() -> None:
    oc.shard_tensor(torch.ones(2), oc.ProcessMesh([0, 1], ["x"]), [oc.Shard(0)]).full_tensor()
    oc.manual_seed(int(torch.distributed.get_rank()))


def seed_by_rank_with_torch() -> None:
    x = oc.shard_tensor(torch.ones(4), oc.ProcessMesh([0, 1], ["x"]), [oc.Shard(0)])
    x.full_tensor()
    torch.manual_seed(int(torch.distributed.get_rank()))
    F.dropout(x, 0.5)


def own_generators_that_differ() -> None:
    x = oc.shard_tensor(torch.ones(4), oc.ProcessMesh([0, 1], ["x"]), [oc.Shard(0)])
    x.full_tensor()
    torch.poisson(x, generator=torch.Generator().manual_seed(int(torch.distributed.get_rank())))


def draw_out_of_step() -> None:
    x = oc.shard_tensor(torch.ones(4), oc.ProcessMesh([0, 1], ["x"]), [oc.Shard(0)])
    x.full_tensor()
    torch.manual_seed(0)
    if torch.distributed.get_rank():
        torch.rand(3)  # what one rank alone draws
    torch.rand_like(x)


@pytest.mark.parametrize(
    "program, message",
    [
        (seed_by_rank, "the same seed on every rank"),
        (seed_by_rank_with_torch, "Seed all alike"),
        (own_generators_that_differ, "Seed all alike"),
        (draw_out_of_step, "or on none"),
    ],
)
def test_ranks_that_disagree_are_told(program, message):
    with pytest.raises(RankError, match=message) as caught:
        run_ranks(program, 2)
    assert DispatchError.__name__ in str(caught.value)


@pytest.mark.share(3)
@multirank(4)
@pytest.mark.parametrize("name", ["flash", "efficient", "cudnn", "fused"])
def test_dropout_in_fused_attention(name):
    """The kernels of GPUs, whose operators are called here as torch calls them there; twin: attention written out."""
    operators = {
        "flash": torch.ops.aten._scaled_dot_product_flash_attention,
        "efficient": torch.ops.aten._scaled_dot_product_efficient_attention,
        "cudnn": torch.ops.aten._scaled_dot_product_cudnn_attention,
        "fused": torch.ops.aten._scaled_dot_product_fused_attention_overrideable,
    }
    torch.manual_seed(2)
    mesh = oc.ProcessMesh([[0, 1], [2, 3]], ["dp", "tp"])
    q, k, v = torch.randn(3, 2, 3, 5, 8)
    bias = torch.randn(3, 1, 5) if name == "efficient" else None
    grown = [x for x in (q, k, v, bias) if x is not None]
    plain = [x.clone().requires_grad_() for x in grown]
    oc.manual_seed(7)
    with oc.one_card_random():
        mask = plain[3] if bias is not None else None
        expected = F.scaled_dot_product_attention(*plain[:3], attn_mask=mask, dropout_p=0.4, is_causal=mask is None)
    (expected * expected).sum().backward()
    for placements in (
        [oc.Replicate()] * 2,
        [oc.Shard(0), oc.Shard(1)],
        [oc.Shard(1), oc.Shard(1)],
        [oc.Shard(2), oc.Shard(3)],
    ):
        twins = [oc.shard_tensor(x, mesh, placements if x.dim() == 4 else [oc.Replicate()] * 2) for x in grown]
        twins = [x.requires_grad_() for x in twins]
        oc.manual_seed(7)
        if name == "flash":
            found = operators[name](*twins[:3], 0.4, True)[0]
        elif name == "fused":
            found = operators[name](*twins[:3], None, 0.4, True)[0]
        else:
            found = operators[name](*twins[:3], twins[3] if bias is not None else None, True, 0.4, bias is None)[0]
        assert_close(found, expected.detach())
        (found * found).sum().backward()
        for twin, one in zip(twins, plain, strict=True):
            assert_close(twin.grad, one.grad)
