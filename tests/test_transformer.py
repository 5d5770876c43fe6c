"""nn.TransformerEncoder and nn.MultiheadAttention in evaluation, where torch takes its fast path. Twin: plain torch."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import onecard as oc
from onecard.testing import assert_close, multirank

BATCH, TIME, WIDTH = 4, 5, 8
MESH = oc.ProcessMesh([0, 1], ["x"])
AT_THE_END = torch.arange(TIME) >= torch.tensor([4, 4, 3, 2])[:, None]
PADDINGS = (None, AT_THE_END, AT_THE_END.flip(1))  # torch makes a nested tensor of the one at the end
CAUSAL = nn.Transformer.generate_square_subsequent_mask(TIME)


def encoder(activation: str, norm_first: bool) -> nn.TransformerEncoder:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, 0.1, activation, batch_first=True, norm_first=norm_first)
    return nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(WIDTH)).eval()


def layouts(model: nn.Module, x: Tensor) -> Iterator[tuple[nn.Module, Tensor, oc.Shard | None]]:
    """A twin of the model, and the batch plain or cut along each dim."""
    for placement, weights in ((None, oc.Replicate()), (oc.Shard(0), oc.Replicate()), (oc.Shard(1), oc.Shard(0))):

        def cut(name: str, layer: nn.Module, mesh: oc.ProcessMesh, weights: oc.Replicate | oc.Shard = weights) -> None:
            if name.endswith("linear1"):
                layer.weight = oc.shard_tensor(layer.weight, mesh, [weights])

        twin = oc.shard_layer(copy.deepcopy(model), MESH, cut)
        yield twin, x if placement is None else oc.shard_tensor(x, MESH, [placement]), placement


@pytest.mark.proof
@multirank(2)
@torch.no_grad()
def test_an_encoder_with_padding_and_masks() -> None:
    # Torch's own remarks on nested tensors and on masks of two dtypes; nothing may be gathered.
    warnings.simplefilter("ignore", UserWarning)
    warnings.simplefilter("error", oc.GatheredOperatorWarning)
    x = torch.randn(BATCH, TIME, WIDTH, generator=torch.Generator().manual_seed(1))
    for plain in (encoder("relu", False), encoder("gelu", True)):
        for twin, data, placement in layouts(plain, x):
            for padding in PADDINGS:
                ours = padding
                if padding is not None and placement == oc.Shard(0):
                    ours = oc.shard_tensor(padding, MESH, [placement])
                for mask in (None, CAUSAL):
                    assert_close(twin(data, mask, ours), plain(x, mask, padding))


@multirank(2)
@torch.no_grad()
def test_attention_of_a_cut_batch_sends_nothing() -> None:
    attention = encoder("relu", False).layers[0].self_attn
    twin = oc.shard_layer(copy.deepcopy(attention), MESH)
    names = ("in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias")
    x = torch.randn(BATCH, TIME, WIDTH, generator=torch.Generator().manual_seed(1))
    calls = [((x, x, x), {}), ((x, x, x), {"need_weights": False}), ((x, x + 1, x + 2), {"need_weights": False})]
    calls.append(((x, x, x), {"average_attn_weights": False, "mask": AT_THE_END, "mask_type": 1}))
    for operands, options in calls:
        cut = {id(t): oc.shard_tensor(t, MESH, [oc.Shard(0)]) for t in operands}
        plain, ours = ([net.get_parameter(name) for name in names] for net in (attention, twin))
        expected = torch._native_multi_head_attention(*operands, WIDTH, 2, *plain, **options)
        with oc.explain() as report:
            found = torch._native_multi_head_attention(*[cut[id(t)] for t in operands], WIDTH, 2, *ours, **options)
        assert_close(found, expected)
        assert not sum(m.step.bytes for m in report.messages), str(report)
