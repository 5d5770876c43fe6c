"""nn.MultiheadAttention and nn.Transformer in training. Twin: plain torch."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from amounts import share
from torch import Tensor, nn

import onecard as oc
from onecard.rules.table import attention
from onecard.testing import assert_close, multirank

BATCH, TIME, OTHER, WIDTH, HEADS = 4, 5, 3, 8, 2
MESH = oc.ProcessMesh([0, 1], ["x"])
CAUSAL = nn.Transformer.generate_square_subsequent_mask(TIME)
PADDING = torch.arange(TIME) >= torch.tensor([5, 4, 3, 2])[:, None]


def normal(*size: int, seed: int = 1) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def cases() -> Iterator[tuple[dict[str, Any], list[Tensor], dict[str, Any]]]:
    """How the layer is made, its operands (self-attention if there is one), and how it is called."""
    x, memory, narrow = normal(BATCH, TIME, WIDTH), normal(BATCH, OTHER, WIDTH), normal(BATCH, OTHER, 6)
    for weights, average in ((False, True), (True, True), (True, False)):
        call = {"need_weights": weights, "average_attn_weights": average}
        yield {}, [x], call
        yield {"dropout": 0.5}, [x], call
        yield {"bias": False}, [x, memory, memory], call
        yield {"add_bias_kv": True, "add_zero_attn": True}, [x, memory, memory], call
        yield {"kdim": 6, "vdim": 6}, [x, narrow, narrow], call
        yield {}, [x], call | {"attn_mask": CAUSAL, "is_causal": True}
        yield {}, [x], call | {"attn_mask": CAUSAL == 0, "key_padding_mask": ~PADDING & False}
        yield {}, [x], call | {"attn_mask": normal(BATCH * HEADS, TIME, TIME)}
        yield {}, [x], call | {"key_padding_mask": PADDING}
        yield (
            {},
            [x],
            call | {"attn_mask": CAUSAL, "key_padding_mask": torch.zeros(PADDING.shape).masked_fill(PADDING, -1)},
        )


def run(layer: nn.Module, operands: list[Tensor], call: dict[str, Any]) -> list[Tensor]:
    torch.manual_seed(3)
    given = operands * 3 if len(operands) == 1 else operands
    output, weights = layer(*given, **call)
    (output * output).sum().backward()
    grads = [p.grad for p in layer.parameters()]
    return [output, *([] if weights is None else [weights]), *grads]


@pytest.mark.proof
@multirank(2)
def test_every_way_to_call_it() -> None:
    for (made, operands, call), first in share(itertools.product(cases(), (True, False)), 15):
        torch.manual_seed(0)
        plain = nn.MultiheadAttention(WIDTH, HEADS, batch_first=first, **made)
        given = [x if first else x.transpose(0, 1).contiguous() for x in operands]
        with oc.one_card_random():
            want = run(copy.deepcopy(plain), given, call)
        for placement, where in (
            (oc.Shard(0 if first else 1), None),
            (oc.Replicate(), oc.Shard(0)),
            (None, oc.Shard(0)),
        ):

            def cut(name: str, layer: nn.Module, mesh: oc.ProcessMesh, where: oc.Shard | None = where) -> None:
                if where is not None and name == "out_proj":
                    layer.weight = oc.shard_tensor(layer.weight, mesh, [where])

            twin = oc.shard_layer(copy.deepcopy(plain), MESH, cut)
            data = given if placement is None else [oc.shard_tensor(x, MESH, [placement]) for x in given]
            data = data if len(operands) < 3 else [data[0], data[1], data[1]]
            with oc.explain() as report:
                found = run(twin, data, call)
            if where is None:
                assert not any(m.step.bytes for m in report.messages), f"{made} {call}\n{report}"
            assert_close(found, want)


@pytest.mark.proof
@multirank(2)
def test_a_transformer_with_a_cut_batch_sends_nothing_but_gradients() -> None:
    torch.manual_seed(0)
    plain = nn.Transformer(WIDTH, HEADS, 1, 1, 16, dropout=0.1, batch_first=True)
    twin = oc.shard_layer(copy.deepcopy(plain), MESH)
    source, target = normal(BATCH, OTHER, WIDTH), normal(BATCH, TIME, WIDTH)
    losses = []
    for model, place in ((plain, lambda x: x), (twin, lambda x: oc.shard_tensor(x, MESH, [oc.Shard(0)]))):
        optimizer = oc.shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        torch.manual_seed(1)
        with oc.one_card_random(), oc.explain() as report:
            for _ in range(3):
                loss = model(place(source), place(target), tgt_mask=CAUSAL, tgt_is_causal=True).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
        gathers = [m for m in report.messages if m.step.bytes and m.step.kind != "all_reduce"]
        assert not gathers, str(report)
    assert_close(torch.tensor(losses[3:]), torch.tensor(losses[:3]))


@multirank(2)
def test_shapes_that_torch_refuses_are_refused() -> None:
    """Sums and products would broadcast them."""
    layer = oc.shard_layer(nn.MultiheadAttention(WIDTH, HEADS, batch_first=True), MESH)
    x = oc.shard_tensor(normal(BATCH, TIME, WIDTH), MESH, [oc.Shard(0)])
    one = oc.shard_tensor(normal(1, OTHER, WIDTH), MESH, [oc.Replicate()])
    for operands, masks in (
        ((x, x, x), {"attn_mask": torch.zeros(1, TIME)}),
        ((x, x, x), {"key_padding_mask": torch.zeros(1, TIME)}),
        ((x, one, one), {}),
    ):
        with pytest.raises((RuntimeError, AssertionError, ValueError)):
            layer(*operands, need_weights=True, **masks)


@multirank(2)
def test_it_stays_what_it_was() -> None:
    layer = oc.shard_layer(nn.MultiheadAttention(WIDTH, HEADS), MESH)
    again = copy.deepcopy(layer)
    assert isinstance(again, nn.MultiheadAttention) and list(again.state_dict()) == list(layer.state_dict())
    assert repr(layer) == repr(nn.MultiheadAttention(WIDTH, HEADS))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_a_mask_begin_where_gpu_kernels_read(dtype: torch.dtype) -> None:
    """Parts of a mask are dense; torch pads the whole one so that its rows begin at 16 bytes."""
    bias = torch.randn(2, 1, 6, 6, dtype=dtype)
    made = attention._rows_aligned(bias)
    assert torch.equal(made, bias) and all(s * dtype.itemsize % 16 == 0 for s in made.stride()[:-1])
    assert made.stride(-1) == 1
    for fine in (torch.randn(2, 1, 6, 8), torch.randn(1, 1, 1, 5), torch.randn(1, 1, 1, 16).expand(2, 3, 6, 16), 0.5):
        assert attention._rows_aligned(fine) is fine
