"""Recurrent layers and CTC loss on a batch that is cut: torch's kernels on each rank's part, numbers of one card."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import onecard as oc
from onecard.testing import assert_close, multirank

TIME, BATCH, WIDTH = 6, 5, 4
LAYERS = {
    "lstm": lambda: nn.LSTM(WIDTH, 3, num_layers=2, bidirectional=True),
    "batch first": lambda: nn.LSTM(WIDTH, 3, batch_first=True),
    "projected": lambda: nn.LSTM(WIDTH, 5, proj_size=2),
    "gru": lambda: nn.GRU(WIDTH, 3, num_layers=2, bias=False),
    "tanh": lambda: nn.RNN(WIDTH, 3),
    "relu": lambda: nn.RNN(WIDTH, 3, nonlinearity="relu", bidirectional=True),
}


def run(layer, x, state=None):
    """The outputs, and the gradients of input and parameters."""
    output, last = layer(x, state)
    results = [output, *(last if isinstance(last, tuple) else [last])]
    sum((r.sin() * (i + 1)).sum() for i, r in enumerate(results)).backward()
    return [*results, x.grad, *(p.grad for p in layer.parameters())]


def compare(name, x, placement, mesh):
    torch.manual_seed(1)
    layer = LAYERS[name]()
    expected = [t.detach().clone() for t in run(layer, x.clone().requires_grad_())]
    layer.zero_grad()
    cut = oc.shard_tensor(x, mesh, [placement]).requires_grad_()
    found = run(layer, cut)
    for ours, theirs in zip(found, expected, strict=True):
        assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    return found


@pytest.mark.proof
@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@multirank(3)
def test_a_cut_batch():
    mesh = oc.ProcessMesh([0, 1, 2], ["dp"])
    for name in LAYERS:
        batch = 0 if name == "batch first" else 1
        x = torch.randn(TIME, BATCH, WIDTH, generator=torch.Generator().manual_seed(2)).transpose(0, 1 - batch)
        assert compare(name, x, oc.Shard(batch), mesh)[0].placements == (oc.Shard(batch),), name
        with oc.explain() as report:
            LAYERS[name]()(oc.shard_tensor(x, mesh, [oc.Shard(batch)]))
        assert not sum(m.step.bytes for m in report.messages), f"{name}: {report}"
        for placement in (oc.Replicate(), oc.Shard(2), oc.Partial()):
            compare(name, x, placement, mesh)
        # Cut by its steps, as the rows of a time-major model are: its batch is, from the first layer on.
        outputs = compare(name, x, oc.Shard(1 - batch), mesh)[0]
        assert outputs.placements == (oc.Shard(batch),), name


@multirank(3)
def test_a_batch_too_small_to_share_is_kept_whole():
    mesh = oc.ProcessMesh([0, 1, 2], ["dp"])
    x = torch.randn(TIME, 2, WIDTH, generator=torch.Generator().manual_seed(2))
    assert compare("lstm", x, oc.Shard(1), mesh)[0].placements == (oc.Replicate(),)


@multirank(2)
def test_dropout_between_layers_and_cut_weights():
    mesh = oc.ProcessMesh([0, 1], ["dp"])
    x = torch.randn(TIME, 4, WIDTH, generator=torch.Generator().manual_seed(2))
    layer = nn.GRU(WIDTH, 4, num_layers=3, dropout=0.5)
    oc.manual_seed(5)
    with oc.one_card_random():
        expected = layer(x)[0]
    for weight in ("", "weight_hh_l1"):
        if weight:
            setattr(layer, weight, oc.shard_tensor(getattr(layer, weight), mesh, [oc.Shard(0)]))
        oc.manual_seed(5)
        assert_close(layer(oc.shard_tensor(x, mesh, [oc.Shard(1)]))[0], expected, rtol=1e-5)
    layer(x)[0].sum().backward()
    assert layer.weight_hh_l1.grad.placements == (oc.Shard(0),)


@pytest.mark.proof
@multirank(2)
def test_packed_sequences_train_as_on_one_card():
    """Forward and backward, with dropout between layers; lengths plain and distributed."""
    mesh = oc.ProcessMesh([0, 1], ["dp"])
    for kind in (nn.LSTM, nn.GRU):
        torch.manual_seed(1)
        layer = kind(WIDTH, 3, num_layers=2, bidirectional=True, batch_first=True, dropout=0.4)
        x, lengths = torch.randn(BATCH, TIME, WIDTH), torch.tensor([2, 6, 1, 4, 4])
        results = []
        for place in (None, oc.Replicate(), oc.Shard(0), oc.Shard(1), oc.Shard(2), oc.Partial()):
            layer.zero_grad()
            data = (x.clone() if place is None else oc.shard_tensor(x, mesh, [place])).requires_grad_()
            sizes = oc.shard_tensor(lengths, mesh, [place]) if place == oc.Shard(0) else lengths
            oc.manual_seed(5)
            with oc.one_card_random():
                packed = nn.utils.rnn.pack_padded_sequence(data, sizes, batch_first=True, enforce_sorted=False)
                output, last = layer(packed)
            padded, ends = nn.utils.rnn.pad_packed_sequence(output, batch_first=True)
            (padded.sin().sum() + sum(s.cos().sum() for s in last)).backward()
            results.append([padded, ends, data.grad, *(p.grad for p in layer.parameters())])
        for found in results[1:]:
            for ours, theirs in zip(found, results[0], strict=True):
                assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@multirank(2)
def test_ctc_loss():
    """Of a cut batch nothing but the loss is sent. Sequence 1 has no path: its loss is infinite, or zero if asked for."""
    mesh = oc.ProcessMesh([0, 1], ["dp"])
    generator = torch.Generator().manual_seed(2)
    x, targets = torch.randn(TIME, BATCH, 5, generator=generator), torch.randint(1, 5, (BATCH, 4), generator=generator)
    lengths, wanted = torch.tensor([6, 2, 6, 5, 4]), torch.tensor([3, 4, 0, 2, 1])
    dense = torch.cat([t[:n] for t, n in zip(targets, wanted, strict=True)])
    for reduction in ("none", "mean", "sum"):
        for as_given in (lambda t: t, lambda t: t.tolist(), lambda t: oc.shard_tensor(t, mesh, [oc.Shard(0)])):
            results = []
            for place in (None, oc.Shard(1), oc.Shard(2), oc.Replicate()):
                data = (x.clone() if place is None else oc.shard_tensor(x, mesh, [place])).requires_grad_()
                sizes = [as_given(t) if place else t for t in (lengths, wanted)]
                labels = oc.shard_tensor(targets, mesh, [oc.Shard(0)]) if place == oc.Shard(1) else targets
                losses = []
                with oc.explain() as report:
                    for aim in (labels, dense):
                        for options in ({}, {"zero_infinity": True}):
                            call = {"reduction": reduction, **options}
                            losses.append(nn.functional.ctc_loss(data.log_softmax(2), aim, *sizes, **call))
                            if place == oc.Shard(1) and aim is labels:
                                assert all(m.step.bytes <= 40 for m in report.messages), str(report)
                losses[1].sum().backward()
                results.append([*losses, data.grad])
            for found in results[1:]:
                for ours, theirs in zip(found, results[0], strict=True):
                    assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
