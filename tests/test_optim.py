"""torch.optim on distributed parameters: every optimizer, its states, and how gradients travel. Twin: plain torch."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from twins import (
    HIDDEN,
    MESH,
    OPTIMIZERS,
    assert_same_parameters,
    batch,
    compute_in_its_own_dtype,
    forms,
    loss_of,
    make_model,
    make_optimizer,
    train,
    twins,
)

import onecard as oc
from onecard.errors import LayoutError
from onecard.testing import assert_close, multirank


@pytest.mark.share(1)
@pytest.mark.parametrize("name", OPTIMIZERS)
@multirank(2)
def test_optimizer(name: str) -> None:
    if name == "Rprop":  # it writes through a boolean mask, which gathers; the numbers must be right nevertheless
        warnings.simplefilter("ignore", oc.GatheredOperatorWarning)
    for kind in ("dp", "plain dp", "tp"):
        if (name, kind) == ("Muon", "tp"):
            # It orthogonalises in bfloat16, whose rounding shows where a sum was cut. The algorithm itself must agree.
            compute_in_its_own_dtype()
        for more in forms(name):
            (plain, whole), (twin, lay_out) = twins(kind)
            train(plain, whole, make_optimizer(name, plain, more))
            train(twin, lay_out, oc.shard_optimizer(make_optimizer(name, twin, more)))
            assert_same_parameters(plain, twin)


@pytest.mark.parametrize("name", ["maximum", "minimum"])
@multirank(2)
def test_foreach_forms_of_maximum(name: str) -> None:
    """Adamax and amsgrad use them in place, which single tensors cannot; elements may be cut, whole or pending."""
    layouts = [oc.Shard(0), oc.Shard(1), oc.Replicate(), oc.Partial()]
    inputs = [torch.randn(5, 3, generator=torch.Generator().manual_seed(i)) for i in range(8)]
    ours = [oc.shard_tensor(x, MESH, [p]) for x, p in zip(inputs, layouts * 2, strict=True)]
    others: tuple[Any, ...] = (inputs[4:], 0.25, [0.5, -0.5, 0.1, 0.0])
    for other in others:
        twin_other = ours[4:] if other is others[0] else other
        for suffix in ("", "_"):
            plain, twin = [x.clone() for x in inputs[:4]], [x.clone() for x in ours[:4]]
            operator = getattr(torch, f"_foreach_{name}{suffix}")
            results, twins_of = operator(plain, other), operator(twin, twin_other)
            assert_close(twin if suffix else twins_of, plain if suffix else results)


@pytest.mark.proof
@multirank(4)
def test_both_axes() -> None:
    for more in forms("AdamW"):
        (plain, whole), (twin, lay_out) = twins("dp,tp")
        train(plain, whole, make_optimizer("AdamW", plain, more))
        train(twin, lay_out, oc.shard_optimizer(make_optimizer("AdamW", twin, more)))
        assert twin[0].weight.placements == (oc.Replicate(), oc.Shard(0))
        assert_same_parameters(plain, twin)


@multirank(2)
def test_without_shard_optimizer() -> None:
    """It only gathers messages into buckets; an optimizer that knows nothing of the mesh is right as well."""
    for kind in ("tp", "dp", "plain dp"):
        (plain, whole), (twin, lay_out) = twins(kind)
        train(plain, whole, make_optimizer("AdamW", plain, {}))
        train(twin, lay_out, make_optimizer("AdamW", twin, {}))
        assert_same_parameters(plain, twin)


@multirank(2)
def test_two_parameter_groups_and_a_frozen_parameter() -> None:
    (plain, whole), (twin, lay_out) = twins("tp")
    for model, lay in ((plain, whole), (twin, lay_out)):
        model[0].bias.requires_grad_(False)
        groups = [{"params": model[0].parameters(), "lr": 0.5}, {"params": model[2].parameters()}]
        train(model, lay, oc.shard_optimizer(torch.optim.SGD(groups, lr=0.1)))
    assert_same_parameters(plain, twin)


# accumulation and buckets


def accumulate(model: nn.Module, lay_out: Any, optimizer: torch.optim.Optimizer) -> None:
    """One step over three microbatches."""
    optimizer.zero_grad()
    for micro in range(3):
        (loss_of(model, lay_out(batch(micro))) / 3).backward()
    optimizer.step()


@pytest.mark.parametrize("kind", ["dp", "plain dp"])
@multirank(2)
def test_accumulation_sends_one_bucket_each_step(kind: str) -> None:
    (plain, whole), (twin, lay_out) = twins(kind)
    accumulate(plain, whole, make_optimizer("AdamW", plain, {}))
    optimizer = oc.shard_optimizer(make_optimizer("AdamW", twin, {}))
    with oc.explain() as report:
        accumulate(twin, lay_out, optimizer)
    sent = [m for m in report.messages if m.step.bytes]
    assert [(m.step.kind, m.operator, m.tensors) for m in sent] == [("all_reduce", "gradients", 4)]
    assert sent[0].step.bytes == 4 * sum(p.numel() for p in plain.parameters())
    assert_same_parameters(plain, twin)


@multirank(2)
def test_gradients_made_by_a_closure_travel_in_buckets_too() -> None:
    for name, given in (("SGD", "position"), ("SGD", "keyword"), ("LBFGS", "position")):
        (plain, whole), (twin, lay_out) = twins("dp")
        train(plain, whole, make_optimizer(name, plain, {}), steps=1, closures=True)
        optimizer = oc.shard_optimizer(make_optimizer(name, twin, {}))
        step = optimizer.step
        if given == "keyword":
            optimizer.step = lambda closure, step=step: step(closure=closure)  # type: ignore[method-assign]
        with oc.explain() as report:
            train(twin, lay_out, optimizer, steps=1, closures=True)
        reduced = [m for m in report.messages if m.step.kind == "all_reduce" and m.shape]  # all but scalars
        assert reduced and all((m.operator, m.tensors) == ("gradients", 4) for m in reduced)
        assert_same_parameters(plain, twin)


@multirank(2)
def test_large_gradients_fill_several_buckets() -> None:
    from onecard.tensor import buckets

    buckets.BUCKET_BYTES = 4 * (HIDDEN * 6 + HIDDEN)  # the first layer's weight has no room beside the others
    (plain, whole), (twin, lay_out) = twins("dp")
    train(plain, whole, make_optimizer("SGD", plain, {}), steps=1)
    with oc.explain() as report:
        train(twin, lay_out, oc.shard_optimizer(make_optimizer("SGD", twin, {})), steps=1)
    assert [m.tensors for m in report.messages if m.operator == "gradients"] == [3, 1]
    assert_same_parameters(plain, twin)


@multirank(2)
def test_large_gradients_travel_alone_from_where_they_lie() -> None:
    from onecard.tensor import buckets

    (plain, whole), (twin, lay_out) = twins("dp")
    sizes = [4 * p.numel() for p in plain.parameters()]
    buckets.LARGE = sorted(sizes)[2]  # of four
    train(plain, whole, make_optimizer("SGD", plain, {}), steps=1)
    seen: list[int] = []
    optimizer = make_optimizer("SGD", twin, {})
    for p in twin.parameters():
        p.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad._local.data_ptr()))
    optimizer = oc.shard_optimizer(optimizer)
    with oc.explain() as report:
        train(twin, lay_out, optimizer, steps=1)
    assert [m.tensors for m in report.messages if m.operator == "gradients"] == [1, 1, 2]
    stay = {p.grad._local.data_ptr() for p in twin.parameters()} & {*seen}  # type: ignore[union-attr]
    assert len(stay) == 2
    assert_same_parameters(plain, twin)


@pytest.mark.share(1)
@pytest.mark.parametrize("cut", ["reduce_scatter", "all_reduce"])
@multirank(4)
def test_buckets_are_described_alike_on_all_ranks_where_another_axis_cuts_unevenly(cut: str) -> None:
    mesh = oc.ProcessMesh([[0, 1], [2, 3]], ["x", "y"])
    rows, columns = oc.Shard(0), oc.Shard(0) if cut == "reduce_scatter" else oc.Replicate()
    params = [nn.Parameter(oc.shard_tensor(torch.ones(5), mesh, [rows, columns])) for _ in range(2)]
    optimizer = oc.shard_optimizer(torch.optim.Adam(params))
    x = oc.shard_tensor(torch.ones(4, 5), mesh, [oc.Shard(1), oc.Shard(0)])
    with oc.explain() as report:
        sum((x * p).sum() for p in params).backward()  # type: ignore[union-attr]
        optimizer.step()
    assert [(m.shape, m.tensors) for m in report.messages if (m.operator, m.step.kind) == ("gradients", cut)] == [
        ((10,), 2)
    ]
    for p in params:
        assert_close(p.grad.full_tensor(), torch.full((5,), 4.0))  # type: ignore[union-attr]


# states


@multirank(2)
def test_states_follow_their_parameter() -> None:
    _, (twin, lay_out) = twins("tp")
    optimizer = oc.shard_optimizer(make_optimizer("AdamW", twin, {}))
    train(twin, lay_out, optimizer)
    for p in twin.parameters():
        state = optimizer.state[p]
        assert state["exp_avg"].layout is state["exp_avg_sq"].layout is p.layout


@multirank(2)
def test_shard_fn_lays_out_states() -> None:
    """The first moments of replicated parameters are divided between the ranks, as in ZeRO stage 1."""
    seen: list[tuple[str, tuple[int, ...]]] = []

    def shard_fn(key: str, parameter: Any, state: Any) -> Any:
        seen.append((key, tuple(parameter.shape)))
        return oc.reshard(state, MESH, [oc.Shard(0)]) if key == "exp_avg" else state

    for more in forms("AdamW"):
        seen.clear()
        (plain, whole), (twin, lay_out) = twins("dp")
        train(plain, whole, make_optimizer("AdamW", plain, more))
        optimizer = oc.shard_optimizer(make_optimizer("AdamW", twin, more), shard_fn)
        train(twin, lay_out, optimizer)
        assert sorted(seen) == sorted(
            (k, tuple(p.shape)) for p in plain.parameters() for k in ("exp_avg", "exp_avg_sq")
        )
        for p in twin.parameters():
            assert optimizer.state[p]["exp_avg"].placements == (oc.Shard(0),)
            assert optimizer.state[p]["exp_avg_sq"].placements == (oc.Replicate(),)
        assert_same_parameters(plain, twin)


@multirank(2)
def test_shard_fn_must_return_the_state() -> None:
    _, (twin, lay_out) = twins("dp")
    optimizer = oc.shard_optimizer(make_optimizer("AdamW", twin, {}), lambda key, parameter, state: None)
    with pytest.raises(
        LayoutError, match=r"shard_fn\('exp_avg', ...\) returned NoneType.*must return the state \[7, 6\]"
    ):
        train(twin, lay_out, optimizer, steps=1)


@multirank(2)
def test_state_dict_goes_on_where_it_stopped() -> None:
    (plain, whole), (twin, lay_out) = twins("tp")
    train(plain, whole, make_optimizer("AdamW", plain, {}), steps=4)
    first = oc.shard_optimizer(make_optimizer("AdamW", twin, {}))
    train(twin, lay_out, first, steps=2)
    second = oc.shard_optimizer(make_optimizer("AdamW", twin, {}))
    second.load_state_dict(first.state_dict())
    for step in (2, 3):
        second.zero_grad()
        loss_of(twin, lay_out(batch(step))).backward()
        second.step()
    assert_same_parameters(plain, twin)


@multirank(2)
def test_states_of_one_card_are_taken_over() -> None:
    """A plain state dict: its states stay plain tensors, which count as replicated, and go on as they are."""
    for kind in ("tp", "dp"):
        for more in forms("AdamW"):
            (plain, whole), (twin, lay_out) = twins(kind)
            first = make_optimizer("AdamW", plain, more)
            train(plain, whole, first, steps=2)
            twin.load_state_dict(plain.state_dict())
            second = oc.shard_optimizer(make_optimizer("AdamW", twin, more))
            second.load_state_dict(copy.deepcopy(first.state_dict()))
            train(plain, whole, first, steps=2)
            train(twin, lay_out, second, steps=2)
            assert_same_parameters(plain, twin)


def test_an_optimizer_of_parameters_that_were_replaced() -> None:
    """Made before ``shard_layer`` it would train nothing, in silence."""
    model = make_model()
    early = [torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(3)]
    oc.shard_optimizer(early[1])
    loss_of(model, batch(0)).backward()
    early[2].step()  # nothing is replaced yet
    oc.shard_layer(model, oc.ProcessMesh([0], ["x"]))
    loss_of(model, batch(0)).backward()
    with pytest.raises(LayoutError, match=r"holds the plain parameter '0.weight' \[7, 6\].* after shard_layer"):
        oc.shard_optimizer(early[0])
    for optimizer in early[1:]:
        with pytest.raises(LayoutError, match="would train nothing"):
            optimizer.step()
    oc.shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1)).step()


@multirank(2)
def test_a_fused_step_on_parameters_that_lie_by_columns() -> None:
    """The kernel counts elements from the first one: states that were moved lie in memory as their parameter does."""
    torch.manual_seed(0)
    given, x = torch.randn(4, 6), torch.randn(8, 6)
    alone, twin = (nn.Parameter(w.t()) for w in (given.clone(), oc.shard_tensor(given, MESH, [oc.Replicate()])))
    assert alone.stride() == twin.stride() == (1, 6)
    optimizers = [torch.optim.Adam([p], 0.1, fused=True) for p in (alone, twin)]
    oc.shard_optimizer(optimizers[1], lambda key, parameter, state: oc.reshard(state, MESH, [oc.Shard(0)]))
    for p, optimizer in zip((alone, twin), optimizers, strict=True):
        for _ in range(3):
            (x @ p).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_close(twin.detach(), alone.detach())
