"""Layers of the manual level against the one-card layers of torch: values, gradients, first values, uneven sizes, errors."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fleet_programs import begin, close, compare, part_of, seeded
from torch import nn

import onecard as oc
from onecard import fleet
from onecard._torch.names import TorchDispatchMode
from onecard.comm.issue import plain
from onecard.errors import CommunicationError
from onecard.fleet.layers import sequence
from onecard.fleet.layers.parameters import part_sizes
from onecard.fleet.layers.transformer import ParallelTransformerLayer
from onecard.testing import run_ranks

mp = fleet.meta_parallel


def data(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def column_and_row(outs: int) -> None:
    single = [seeded(nn.Linear, 6, outs), seeded(nn.Linear, outs, 5, seed=1)]
    mine = [
        seeded(mp.ColumnParallelLinear, 6, outs, has_bias=True, gather_output=False),
        seeded(mp.RowParallelLinear, outs, 5, input_is_parallel=True, seed=1),
    ]
    x, y = data(4, 6).requires_grad_(), data(4, 6).requires_grad_()
    expected, found = single[1](F.relu(single[0](x))), mine[1](F.relu(mine[0](y)))
    close(found, expected, "column, row")
    expected.square().sum().backward()
    found.square().sum().backward()
    close(y.grad, x.grad, "gradient of x")
    for a, b in zip(mine, single, strict=True):
        compare(a, b)
        compare(copy.deepcopy(a), b, gradients=False)
    # gathered, and cut again by the layer itself
    whole = seeded(mp.ColumnParallelLinear, 6, outs, has_bias=True, gather_output=True)
    again = seeded(mp.RowParallelLinear, outs, 5, input_is_parallel=False, seed=1)
    z = data(4, 6).requires_grad_()
    found = again(F.relu(whole(z)))
    close(found, expected, "gathered")
    found.square().sum().backward()
    close(z.grad, x.grad, "gradient of x, gathered")
    compare(whole, single[0])


def vocabulary(classes: int, smoothing: float) -> None:
    single, mine = seeded(nn.Embedding, classes, 6), seeded(mp.VocabParallelEmbedding, classes, 6)
    head, parallel_head = (
        seeded(nn.Linear, 6, classes, seed=2),
        seeded(mp.ColumnParallelLinear, 6, classes, has_bias=True, gather_output=False, seed=2),
    )
    ids = torch.arange(classes).repeat(2).view(2, -1)
    labels = ids.flip(1).clone()
    labels[0, :2] = -7
    expected, found = single(ids), mine(ids)
    close(found, expected, "embedding")
    loss_fn = mp.ParallelCrossEntropy(ignore_index=-7, label_smoothing=smoothing, num_classes=classes)
    logits = parallel_head(found)
    losses = loss_fn(logits, labels[..., None])
    wanted = F.cross_entropy(
        head(expected).flatten(0, 1), labels.flatten(), ignore_index=-7, label_smoothing=smoothing, reduction="none"
    )
    close(losses.flatten(), wanted, "cross entropy")
    assert losses.shape == (*labels.shape, 1)
    (losses.flatten() * data(labels.numel(), seed=5)).sum().backward()
    (wanted * data(labels.numel(), seed=5)).sum().backward()
    compare(mine, single)
    compare(parallel_head, head)
    with pytest.raises(fleet.FleetError, match=r"go to F\.cross_entropy"):
        loss_fn(F.pad(logits, (0, 1)), labels)
    with pytest.raises(fleet.FleetError, match=rf"ids from 0 to {classes}; its {classes} rows"):
        mine(torch.tensor([0, classes]))


def merged() -> None:
    gate, up = seeded(nn.Linear, 6, 9, bias=False), nn.Linear(6, 7, bias=False)
    with torch.no_grad():
        whole = torch.cat([gate.weight, up.weight])
    mine = mp.MergedColumnParallelLinear(6, [9, 7], fleet.Assign(whole))
    x, y = data(4, 6).requires_grad_(), data(4, 6).requires_grad_()
    a, b = mine.split(mine(x))
    close(a, gate(y).split(mine.cuts[0], -1)[mine.group.index], "gate")
    close(b, up(y).split(mine.cuts[1], -1)[mine.group.index], "up")
    (a.square().sum() + b.square().sum()).backward()
    (gate(y).square().sum() + up(y).square().sum()).backward()
    close(x.grad, y.grad, "gradient of x, merged")
    close(mine.weight.grad, part_of(mine.weight, torch.cat([gate.weight.grad, up.weight.grad])), "gradient, merged")


def heads(n_heads: int, kv: int) -> None:
    """Grouped queries with fewer key heads than ranks: as one card, with the gradients of shared heads summed."""
    width, hidden = 4, 4 * n_heads
    single = seeded(nn.Linear, hidden, width * (n_heads + 2 * kv))
    out = seeded(nn.Linear, hidden, hidden, seed=3)
    mine = seeded(mp.QKVParallelLinear, hidden, width, n_heads, kv, has_bias=True)
    back = seeded(mp.RowParallelLinear, hidden, hidden, input_is_parallel=True, unit=width, seed=3)
    x, y = data(5, 2, hidden).requires_grad_(), data(5, 2, hidden).requires_grad_()

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (each.permute(1, 2, 0, 3) for each in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).permute(2, 0, 1, 3).flatten(2)

    q, k, v = single(x).unflatten(-1, (n_heads + 2 * kv, width)).split([n_heads, kv, kv], -2)
    k, v = (each.repeat_interleave(n_heads // kv, -2) for each in (k, v))
    expected = out(attend(q, k, v))
    a, b, c = mine.split(mine(y))
    found = back(attend(a, mine.expand(b, -2), mine.expand(c, -2)))
    close(found, expected, "grouped heads")
    expected.square().sum().backward()
    found.square().sum().backward()
    close(y.grad, x.grad, "gradient of x, heads")
    fleet.sync(mine.parameters())
    compare(mine, single)
    norm = fleet.grad_norm([*mine.parameters(), *back.parameters()])
    wanted = torch.nn.utils.get_total_norm([p.grad for p in [*single.parameters(), *out.parameters()]])
    close(norm, wanted, "norm with shared heads")
    norm = torch.nn.utils.get_total_norm([*mine.parameters(), *back.parameters()])
    close(norm, torch.nn.utils.get_total_norm([*single.parameters(), *out.parameters()]), "norm of the parameters")


def with_margins(classes: int) -> None:
    """Each class is a label once: the first and the last of each rank among them."""
    group = fleet.get_hybrid_communicate_group().group("mp")
    sizes = part_sizes(classes, group.size)
    start, labels = sum(sizes[: group.index]), torch.arange(classes)
    found = []
    for mine in (False, True):
        cosines = data(classes, classes, seed=7).tanh().requires_grad_()
        if mine:
            part = cosines[:, start : start + sizes[group.index]]
            loss = mp.ParallelCrossEntropy(margin=(0.9, 0.4, 0.1), scale=8.0)(part, labels)
        else:
            chosen = cosines.gather(1, labels[:, None])
            moved = (0.9 * chosen.acos() + 0.4).cos() - 0.1
            loss = F.cross_entropy(8.0 * cosines.scatter(1, labels[:, None], moved), labels, reduction="none")
        (loss * data(classes, seed=5)).sum().backward()
        found.append((loss, cosines.grad[:, start : start + sizes[group.index]]))
    close(found[1][0], found[0][0], "margin softmax")
    close(found[1][1], found[0][1], "gradient of the cosines")
    edges = torch.tensor([sum(sizes[:i]) + at for i, n in enumerate(sizes) if n for at in {0, n - 1}])
    numbers, kept = mp.class_center_sample(edges, sizes[group.index], 2, group)
    width = max(sizes)
    padded = F.pad(kept + start, (0, width - len(kept)), value=-1)
    every = group_gather(padded, group)
    assert torch.equal(every[every >= 0][numbers], edges), "class_center_sample"


def group_gather(x: torch.Tensor, group: Any) -> torch.Tensor:
    whole = torch.zeros(group.size, *x.shape, dtype=x.dtype)
    whole[group.index] = x
    return plain.all_reduce(whole, group).flatten()


def layers(sizes: tuple[int, ...]) -> None:
    begin(mp=oc.get_world_size())
    for n in sizes:
        column_and_row(n)
        vocabulary(n, 0.0)
        with_margins(n)
    vocabulary(sizes[0], 0.1)
    merged()
    heads(6, 2)
    heads(5, 1)
    heads(4, 4)


@pytest.mark.parametrize(("ranks", "sizes"), [(2, (8, 11)), (3, (11, 2))])
def test_layers_are_those_of_one_card(ranks: int, sizes: tuple[int, ...]) -> None:
    run_ranks(layers, ranks, sizes)


class Operators(TorchDispatchMode):
    """The operators that run, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_a_world_of_one_runs_the_layers_of_torch() -> None:
    layers((8,))
    ran = []
    for model in (
        nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 5)),
        nn.Sequential(mp.ColumnParallelLinear(6, 8, has_bias=True), nn.ReLU(), mp.RowParallelLinear(8, 5)),
    ):
        with Operators() as operators:
            model(data(4, 6)).square().sum().backward()
        ran.append(operators.names)
    assert ran[0] == ran[1] and len(ran[0]) > 5, "not one kernel more"


# Sequence parallelism, recompute


class Plain(nn.Module):
    """The one-card twin of ParallelTransformerLayer, with its parameters' names."""

    def __init__(self, hidden: int, n_heads: int) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.norm1, self.qkv = nn.LayerNorm(hidden), nn.Linear(hidden, 3 * hidden)
        self.proj = nn.Linear(hidden, hidden)
        self.norm2, self.fc1, self.fc2 = (
            nn.LayerNorm(hidden),
            nn.Linear(hidden, 4 * hidden),
            nn.Linear(4 * hidden, hidden),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            each.unflatten(-1, (self.n_heads, -1)).permute(1, 2, 0, 3) for each in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).permute(2, 0, 1, 3).flatten(2)
        x = x + self.proj(y)
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x)), approximate="tanh"))


def transformer_layers() -> None:
    hcg = begin(mp=oc.get_world_size())
    group = hcg.get_model_parallel_group()
    single = seeded(Plain, 12, 4)
    x = data(8, 2, 12).requires_grad_()
    expected = single(x)
    (expected * data(8, 2, 12, seed=4)).sum().backward()
    for again in ("none", "selective", "full"):
        for parallel in (False, True):
            what = f"recompute {again}, sequence parallel {parallel}"
            mine = seeded(ParallelTransformerLayer, 12, 4, sequence_parallel=parallel, recompute=again)
            y = data(8, 2, 12).requires_grad_()
            inside = sequence.scatter(y) if parallel else y
            with oc.explain() as report:
                found = mine(inside)
            found = sequence.gather(found) if parallel else found
            close(found, expected, what)
            (found * data(8, 2, 12, seed=4)).sum().backward()
            close(y.grad, x.grad, f"gradient of x, {what}")
            fleet.sync(mine.parameters())
            compare(mine, single)
            if group.size > 1:
                kinds = [m.step.kind for m in report.messages]
                assert kinds == (["all_gather", "reduce_scatter"] * 2 if parallel else ["all_reduce"] * 2)


def test_a_transformer_layer_under_every_way_to_save_memory() -> None:
    run_ranks(transformer_layers, 2)


def vocabulary_in_sequence() -> None:
    begin(mp=2)
    table, mine = seeded(nn.Embedding, 10, 6), seeded(sequence.VocabSequenceParallelEmbedding, 10, 6)
    ids = torch.arange(8).view(4, 2)
    found = sequence.GatherOp.apply(mine(ids))
    close(found, table(ids), "sequence-parallel embedding")
    x = data(4, 2, 6).requires_grad_()
    y = data(4, 2, 6).requires_grad_()
    # all-gather and its transpose: what each rank's cut layer adds is summed
    cut = sequence.AllGatherOp.apply(sequence.ScatterOp.apply(x)) * (1.0 + oc.get_rank())
    sequence.GatherOp.apply(sequence.ReduceScatterOp.apply(cut)).square().sum().backward()
    (3.0 * y).square().sum().backward()
    close(x.grad, y.grad, "gradients of the four operators")
    with pytest.raises(fleet.FleetError, match="no parameter is marked"):
        sequence.register_sequence_parallel_allreduce_hooks(sequence.ColumnSequenceParallelLinear(4, 4))
    forgotten = nn.Sequential(nn.LayerNorm(4), sequence.ColumnSequenceParallelLinear(4, 4))
    with pytest.warns(UserWarning, match=r"should 0\.weight see a part"):
        fleet.distributed_model(forgotten)
    with pytest.raises(CommunicationError, match="does not divide into 2 equal parts"):
        sequence.scatter(torch.ones(3, 1))


def test_operators_of_sequence_parallelism() -> None:
    run_ranks(vocabulary_in_sequence, 2)


# First values, errors


def test_first_values_that_are_assigned_or_drawn_in_parts() -> None:
    begin()
    weight = data(3, 4)
    layer = mp.ColumnParallelLinear(4, 3, weight_attr=fleet.ParamAttr(initializer=fleet.Assign(weight.numpy())))
    assert torch.equal(layer.weight, weight) and layer.bias is None
    with pytest.raises(fleet.FleetError, match=r"Assign\(value.T\)"):
        mp.ColumnParallelLinear(4, 3, weight_attr=fleet.Assign(weight.T))
    for initializer, theirs in (
        (fleet.XavierUniform(), nn.init.xavier_uniform_),
        (fleet.XavierNormal(), nn.init.xavier_normal_),
        (fleet.Normal(0.0, 0.02), lambda w: nn.init.normal_(w, 0.0, 0.02)),
        (fleet.Uniform(-0.1, 0.1), lambda w: nn.init.uniform_(w, -0.1, 0.1)),
        (fleet.KaimingUniform(), nn.init.kaiming_uniform_),
    ):
        made = seeded(mp.ColumnParallelLinear, 4, 3, weight_attr=initializer).weight
        assert torch.equal(made, seeded(mp.ColumnParallelLinear, 4, 3, weight_attr=theirs).weight)


def labels_that_are_no_class() -> str:
    begin(mp=2)
    with pytest.raises(fleet.FleetError) as caught:
        mp.ParallelCrossEntropy(num_classes=6)(torch.ones(2, 6).chunk(2, -1)[oc.get_rank()], torch.tensor([1, 6]))
    return str(caught.value)


def test_labels_that_are_no_class_are_told_on_all_ranks() -> None:
    for said in run_ranks(labels_that_are_no_class, 2):
        assert "labels from 1 to 6; its 6 classes" in said


def drawn_in_parts() -> torch.Tensor:
    begin(mp=2)
    with fleet.draw_parts():
        mine = seeded(mp.ColumnParallelLinear, 6, 11, has_bias=True)
    with oc.one_card_random():
        compare(mine, seeded(nn.Linear, 6, 11), gradients=False)
    return mine.weight.detach()


def test_parts_are_drawn_as_one_card_draws_them() -> None:
    parts = run_ranks(drawn_in_parts, 2)
    assert [p.shape[0] for p in parts] == [5, 6]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: mp.ColumnParallelLinear(4, 3, weight_attr=3), "weight_attr is 3; want a fleet.ParamAttr"),
        (lambda: mp.ColumnParallelLinear(4, 3, fleet.ParamAttr(learning_rate=0.1)), "parameter groups"),
        (lambda: mp.ColumnParallelLinear(4, 3)(torch.ones(2, 5)), r"must be in_features, 4"),
        (lambda: mp.QKVParallelLinear(8, 2, 4, 3), "4 query heads do not share 3 key heads"),
        (lambda: mp.ParallelCrossEntropy()(torch.ones(2, 3), torch.ones(3).long()), r"labels \[3\] do not fit"),
        (
            lambda: mp.ParallelCrossEntropy(num_classes=6)(torch.ones(4, 6), torch.tensor([1, -1, -100, 7])),
            r"labels from -1 to 7; its 6 classes are 0 to 5, and what is left out is ignore_index=-100",
        ),
        (lambda: mp.ParallelCrossEntropy(reduction="avg"), "want 'none', 'mean' or 'sum'"),
        (lambda: sequence.RowSequenceParallelLinear(4, 4, input_is_parallel=False), "input_is_parallel=True"),
        (lambda: ParallelTransformerLayer(6, 4), "heads divide hidden"),
        (lambda: fleet.part_sizes(5, 2, unit=2), "whole units of 2"),
    ],
)
def test_wrong_layers_are_told(make, message) -> None:
    begin()
    with pytest.raises(fleet.FleetError, match=message):
        make()
