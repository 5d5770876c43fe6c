"""Training of the manual level: context parallelism, random states, recompute, gradients counted once, clipping, scaling."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from fleet_programs import begin, close, compare, part_of, seeded
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, get_total_norm
from torch.utils.checkpoint import checkpoint

import onecard as oc
from onecard import fleet
from onecard.comm.issue.ranks import of_ranks
from onecard.fleet.layers import context, sequence
from onecard.fleet.layers.transformer import ParallelTransformerLayer
from onecard.testing import run_ranks

mp = fleet.meta_parallel


def data(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# Context parallelism


def attention_in_parts() -> None:
    n = oc.get_world_size()
    hcg = begin(sep=n)
    group = hcg.get_sep_parallel_group()
    time = 4 * n
    for causal in (True, False):
        for kv_heads in (4, 2):
            whole = [data(2, h, time, 3, seed=s).requires_grad_() for s, h in ((1, 4), (2, kv_heads), (3, kv_heads))]
            expected = F.scaled_dot_product_attention(*whole, is_causal=causal, scale=0.7, enable_gqa=True)
            weights = data(2, 4, time, 3, seed=4)
            grads = torch.autograd.grad((expected * weights).sum(), whole)
            for attend in (fleet.ring_attention, fleet.ulysses_attention):
                what = f"{attend.__name__}, causal {causal}, {kv_heads} key heads"
                mine = [context.cut(x.detach(), 2, balanced=causal).requires_grad_() for x in whole]
                found = attend(*mine, causal=causal, scale=0.7)
                close(found, context.cut(expected.detach(), 2, balanced=causal), what)
                (found * context.cut(weights, 2, balanced=causal)).sum().backward()
                for x, grad in zip(mine, grads, strict=True):
                    close(x.grad, context.cut(grad, 2, balanced=causal), f"gradient, {what}")
    parts = context.cut(torch.arange(time)[None], 1)
    assert context.join(parts.double(), 1).tolist() == [list(range(time))]
    assert parts[0].tolist() == context.positions(time).tolist()
    with oc.explain() as report:
        q = data(1, 2, 4, 2)
        fleet.ring_attention(q, q, q)
    assert [m.step.kind for m in report.messages] == ["send"] * (n - 1)
    with pytest.raises(fleet.FleetError, match=f"pad it to {2 * n}"):
        context.cut(torch.zeros(1, 2 * n - 1))
    with pytest.raises(fleet.FleetError, match="use ring_attention"):
        fleet.ulysses_attention(*[data(1, n - 1, 4, 2)] * 3, group=group)


@pytest.mark.parametrize("ranks", [2, 3])
def test_attention_along_the_sequence_is_one_cards(ranks: int) -> None:
    run_ranks(attention_in_parts, ranks)


# Random states


def random_states() -> dict[str, torch.Tensor]:
    hcg = begin(mp=2)
    tracker = mp.get_rng_state_tracker()
    mp_rank = hcg.get_model_parallel_rank()
    tracker.add("global_seed", 1024)
    tracker.add("local_seed", 1025 + 11 * mp_rank)
    x = torch.ones(4, 50)
    with tracker.rng_state("global_seed"):
        first = F.dropout(x, 0.5)
    alike = fleet.dropout(x, 0.5, rng_name="global_seed")
    apart = fleet.dropout(x, 0.5, rng_name="local_seed")
    saved = tracker.state_dict()
    again = [fleet.dropout(x, 0.5, rng_name="local_seed")]
    tracker.load_state_dict(saved)
    again.append(fleet.dropout(x, 0.5, rng_name="local_seed"))
    assert torch.equal(*again) and not torch.equal(again[0], apart)
    with pytest.raises(fleet.FleetError, match="no random state 'mp_seed'; there are: global_seed, local_seed"):
        fleet.dropout(x, rng_name="mp_seed")
    with pytest.raises(fleet.FleetError, match="is that of 'global_seed' already"):
        tracker.add("other", 1024)
    with pytest.raises(fleet.FleetError, match="upscale_in_train"):
        fleet.dropout(x, mode="downscale_in_infer")
    with pytest.raises(fleet.FleetError, match="between 0 and 1"):
        fleet.dropout(x, 1.5)
    # one card's numbers, of a tensor that is cut
    oc.manual_seed(5)
    part = fleet.dropout(
        x[:, :30] if mp_rank == 0 else x[:, 30:], 0.5, cut=(1, hcg.get_model_parallel_group()), sizes=[30, 20]
    )
    oc.manual_seed(5)
    with oc.one_card_random():
        whole = F.dropout(x, 0.5)
    assert torch.equal(part, whole.split([30, 20], 1)[mp_rank])
    oc.manual_seed(5)
    with oc.one_card_random():
        mine = x[:, :30] if mp_rank == 0 else x[:, 30:]
        within = fleet.dropout(mine, 0.5, cut=(1, hcg.get_model_parallel_group()), sizes=[30, 20])
    assert torch.equal(part, within), "within one_card_random"
    fleet.model_parallel_random_seed(3)
    convenient = {f"{name} of seed": fleet.dropout(x, 0.5, rng_name=name) for name in ("global_seed", "local_seed")}
    return {"first": first, "global": alike, "local": apart} | convenient


def masks_along_the_sequence() -> None:
    assert fleet.dropout(torch.ones(2, 3), 0.5, cut=(1, of_ranks())).shape == (2, 3)  # any ranks, ahead of fleet.init
    hcg = begin(sep=2)
    group = hcg.get_sep_parallel_group()
    x = torch.ones(3, 8, 5)
    oc.manual_seed(5)
    with oc.one_card_random():
        whole = F.dropout(x, 0.5)
    for balanced in (True, False):
        oc.manual_seed(5)
        part = fleet.dropout(context.cut(x, balanced=balanced), 0.5, cut=(1, group), balanced=balanced)
        assert torch.equal(context.join(part, balanced=balanced), whole), balanced
    with pytest.raises(fleet.FleetError, match="say balanced=True"):
        fleet.dropout(context.cut(x), 0.5, cut=(1, group))


def masks_of_rows_and_steps() -> None:
    hcg = begin(sep=2, dp=2)
    dp, sep = hcg.get_data_parallel_group(), hcg.get_sep_parallel_group()
    x = torch.ones(6, 8, 5)
    oc.manual_seed(5)
    with oc.one_card_random():
        rows = F.dropout(x, 0.5).chunk(2)[dp.index]
    for balanced in (True, False):
        oc.manual_seed(5)
        part = context.cut(x.chunk(2)[dp.index], balanced=balanced)
        part = fleet.dropout(part, 0.5, cut=[(0, dp), (1, sep)], balanced=balanced)
        assert torch.equal(context.join(part, balanced=balanced), rows), balanced
    with pytest.raises(fleet.FleetError, match="of the one dim that is cut"):
        fleet.dropout(part, 0.5, cut=[(0, dp), (1, sep)], sizes=[3, 3])
    with pytest.raises(fleet.FleetError, match="dim -2 is named twice"):
        fleet.dropout(part, 0.5, cut=[(1, dp), (-2, sep)], balanced=False)


def test_a_mask_along_the_sequence_is_one_cards() -> None:
    run_ranks(masks_along_the_sequence, 2)
    run_ranks(masks_of_rows_and_steps, 4)


def check_masks(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    for name in ("first", "global", "global_seed of seed"):
        assert torch.equal(first[name], second[name]), name
    for name in ("local", "local_seed of seed"):
        same = (first[name] == second[name]).float().mean().item()
        assert 0.3 < same < 0.7, f"{name}: {same} of the mask is equal on both ranks"


def test_local_dropout_differs_and_global_dropout_does_not() -> None:
    check_masks(*run_ranks(random_states, 2))


# Recompute


def recomputed() -> None:
    begin(mp=oc.get_world_size())
    fleet.model_parallel_random_seed(7)
    states = mp.get_rng_state_tracker().state_dict()
    layer = seeded(ParallelTransformerLayer, 8, 2, attention_dropout=0.4, hidden_dropout=0.4)
    found, before = {}, [{}]
    for how in ("none", "selective", "full", "nested", "policy", "torch", "torch, reentrant"):
        mp.get_rng_state_tracker().load_state_dict(states)
        torch.manual_seed(11)
        layer.zero_grad()
        layer.recompute = how if how in ("selective", "full") else "none"
        x = data(6, 2, 8).requires_grad_()
        if how == "nested":
            layer.recompute = "selective"
            y = fleet.recompute(lambda z: fleet.recompute(layer, layer(z)), x)
        elif how.startswith("torch"):
            y = layer(checkpoint(layer, x, use_reentrant="reentrant" in how))
        elif how == "policy":
            y = fleet.recompute(
                lambda z: layer(layer(z)), x, policy=[torch.ops.aten.mm.default, torch.ops.aten.bmm.default]
            )
        else:
            y = layer(layer(x))
        y.square().sum().backward()
        found[how] = [y.detach(), x.grad, *(p.grad.clone() for p in layer.parameters())]
        end = [mp.get_rng_state_tracker().state_dict(), torch.get_rng_state()]
        if how != "none":
            for name, value in end[0].items():
                assert torch.equal(value, before[0][name]), f"{how}: the state {name} after backward"
            for a, b in zip(found[how], found["none"], strict=True):
                close(a, b, how, 1e-6)
        before = end
    with pytest.raises(fleet.FleetError, match="use_reentrant"):
        fleet.recompute(torch.sin, torch.ones(1), use_reentrant=True)


def test_what_is_computed_again_draws_the_same_numbers() -> None:
    run_ranks(recomputed, 2)


# Gradients over every mix of axes


class Mixed(nn.Module):
    """Embedding tied to the head, one transformer layer, norms: parameters of every kind there is."""

    def __init__(self, parallel: bool, sequence_parallel: bool = False) -> None:
        super().__init__()
        from test_fleet_layers import Plain

        self.sequence_parallel = sequence_parallel
        if parallel:
            self.table = mp.VocabParallelEmbedding(12, 8)
            self.layer = ParallelTransformerLayer(8, 2, sequence_parallel=sequence_parallel)
        else:
            self.table = nn.Embedding(12, 8)
            self.layer = Plain(8, 2)
        self.norm = nn.LayerNorm(8)
        self.unused = nn.Parameter(torch.ones(1))
        if sequence_parallel:
            for p in self.norm.parameters():
                fleet.mark_as_sequence_parallel_parameter(p)

    def forward(self, ids: torch.Tensor, sparing: bool = False) -> torch.Tensor:
        """(batch, time) -> logits (time, batch, this rank's classes)."""
        x = self.table(ids.t())
        if self.sequence_parallel:
            x = sequence.scatter(x)
        x = self.norm(self.layer(x))
        if not sparing:
            x = x + 0 * self.unused
        if self.sequence_parallel:
            x = sequence.all_gather(x)
        elif isinstance(self.table, mp.VocabParallelEmbedding):
            from onecard.fleet.layers.mappings import copy_to

            x = copy_to(x, self.table.group)
        return F.linear(x, self.table.weight)


IGNORED = -100


def batches(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(12, (4, 6), generator=generator)
    labels = torch.randint(12, (4, 6), generator=generator)
    labels[:3, :4] = IGNORED  # ranks have different numbers of tokens
    return ids, labels


def clipped(model: nn.Module, step: int, clip: float, first: Callable[..., torch.Tensor]) -> float:
    """One after the other: fleet's clipping, torch's, and torch's by value alone, which must sum the gradients before."""
    if step % 3 == 2:
        norm = get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        clip_grad_value_(model.parameters(), clip / 10)
        return norm.item()
    return (clip_grad_norm_ if step % 3 else first)(model.parameters(), clip).item()


def train_one_card(steps: int, microbatches: int, clip: float) -> tuple[list[float], list[float], nn.Module]:
    model = seeded(Mixed, False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    losses, norms = [], []
    for step in range(steps):
        for micro in range(microbatches):
            ids, labels = batches(10 * step + micro)
            logits = model(ids)
            loss = F.cross_entropy(logits.flatten(0, 1), labels.t().flatten(), ignore_index=IGNORED) / microbatches
            loss.backward()
            losses.append(loss.item())
        norms.append(clipped(model, step, clip, clip_grad_norm_))
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms, model


def train(degrees: dict[str, int], sequence_parallel: bool, steps: int, microbatches: int, clip: float) -> None:
    hcg = begin(**degrees)
    expected_losses, expected_norms, single = train_one_card(steps, microbatches, clip)
    model = fleet.distributed_model(seeded(Mixed, True, sequence_parallel, seed=hcg.get_data_parallel_rank()))
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9))
    loss_fn = mp.ParallelCrossEntropy(ignore_index=IGNORED, num_classes=12)
    n, me = hcg.get_data_parallel_world_size(), hcg.get_data_parallel_rank()
    losses, norms = [], []
    for step in range(steps):
        for micro in range(microbatches):
            ids, labels = (t.chunk(n)[me] for t in batches(10 * step + micro))
            with oc.explain() as report:
                per_token = loss_fn(model(ids, sparing=me == 1), labels.t())
                loss = fleet.token_mean(per_token, labels.t() != IGNORED) / microbatches
                loss.backward()
            assert not any(m.operator.startswith("gradients") for m in report.messages), "a premature sum"
            losses.append(loss.item())
        norms.append(clipped(model, step, clip, fleet.clip_grad_norm_))
        optimizer.step()
        optimizer.clear_grad()
    close(torch.tensor(losses), torch.tensor(expected_losses), f"losses of {degrees}")
    close(torch.tensor(norms), torch.tensor(expected_norms), f"norms of {degrees}")
    compare(model.module, single, gradients=False)
    assert list(dict(model.named_parameters())) == list(dict(single.named_parameters())), "names are those of one card"


@pytest.mark.share(1)
@pytest.mark.parametrize(
    ("ranks", "degrees", "sequence_parallel"),
    [
        (2, {"dp": 2}, False),
        (2, {"mp": 2}, True),
        (4, {"dp": 2, "mp": 2}, False),
        (4, {"dp": 2, "mp": 2}, True),
    ],
)
def test_training_over_a_mix_of_axes(ranks: int, degrees: dict[str, int], sequence_parallel: bool) -> None:
    run_ranks(train, ranks, degrees, sequence_parallel, 3, 2, 0.3)


# Two stages by hand that share an embedding


def two_stages() -> None:
    hcg = begin(pp=2)
    first = hcg.is_first_stage()
    pair = hcg.get_pipe_parallel_group()
    single, linear = seeded(nn.Embedding, 6, 4), nn.Linear(4, 4)
    ids = torch.arange(6)
    F.linear(linear(single(ids)), single.weight).logsumexp(-1).sum().backward()
    mine = seeded(nn.Embedding, 6, 4)
    body = nn.Linear(4, 4)
    fleet.sum_over(mine.weight, pair)
    if first:
        oc.differentiable.send(mine(ids), 1, 3, pair).backward()
    else:
        x = oc.differentiable.recv(torch.empty(6, 4), 0, 3, pair)
        F.linear(body(x), mine.weight).logsumexp(-1).sum().backward()
    parameters = [mine.weight] if first else [mine.weight, *body.parameters()]
    norm = fleet.grad_norm(parameters)
    close(mine.weight.grad, single.weight.grad, "shared embedding")
    close(
        norm,
        nn.utils.get_total_norm([p.grad for p in [single.weight, *linear.parameters()]]),
        "norm with a shared embedding",
    )
    with pytest.raises(fleet.FleetError, match="pp_degree is 2, but Linear has no stages"):
        fleet.distributed_model(body)


def test_an_embedding_that_two_stages_share() -> None:
    run_ranks(two_stages, 2)


# Context parallel training: a whole attention block over sep


def train_along_the_sequence() -> None:
    begin(sep=2)
    qkv, out = seeded(nn.Linear, 8, 24), nn.Linear(8, 5)
    mine = fleet.distributed_model(nn.ModuleList([copy.deepcopy(qkv), copy.deepcopy(out)]))
    x, labels = data(2, 8, 8), torch.arange(16).view(2, 8) % 5

    def logits(qkv, out, x, attend):
        q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in qkv(x).chunk(3, -1))
        return out(attend(q, k, v).transpose(1, 2).flatten(2))

    loss = F.cross_entropy(
        logits(qkv, out, x, lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True)).flatten(0, 1),
        labels.flatten(),
    )
    loss.backward()
    part, goal = context.cut(x), context.cut(labels)
    losses = F.cross_entropy(
        logits(*mine.module, part, fleet.ring_attention).flatten(0, 1), goal.flatten(), reduction="none"
    )
    found = fleet.token_mean(losses)
    found.backward()
    close(found.detach(), loss.detach(), "loss along the sequence")
    mine.apply_collective_grads()
    for a, b in zip(mine.module, (qkv, out), strict=True):
        compare(a, b)


def test_training_along_the_sequence() -> None:
    run_ranks(train_along_the_sequence, 2)


# Loss scaling, merging, premature sums


def scaling() -> None:
    begin(dp=1, mp=2)
    layer = seeded(mp.ColumnParallelLinear, 4, 6, gather_output=False)
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(layer.parameters(), lr=0.1))
    scaler = fleet.GradScaler("cpu", init_loss_scaling=4.0, incr_every_n_steps=2, enable=True)  # by Paddle's names
    fixed = fleet.GradScaler("cpu", 8.0, use_dynamic_loss_scaling=False)
    assert fleet.GradScaler(init_loss_scaling=2.0).is_enabled()  # for the ranks' device, also without a GPU
    assert fixed.get_scale() == 8.0 and 1.0 < fixed.get_growth_factor() < 1.0 + 1e-6
    for wrong, words in (
        ({"init_scale": 1.0, "init_loss_scaling": 2.0}, "are one argument"),
        ({"decr_every_n_nan_or_inf": 2}, "the scale falls at each infinity"),
        ({"increase": 2.0}, "it takes device, init_scale"),
    ):
        with pytest.raises(fleet.FleetError, match=words):
            fleet.GradScaler("cpu", **wrong)
    seen = []
    for step in range(3):
        loss = layer(data(3, 4)).square().sum()
        scaler.scale(loss).backward()
        if step == 1 and oc.get_rank() == 1:
            layer.weight.grad[0, 0] = float("inf")
        before = layer.weight.detach().clone()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        seen.append((torch.equal(before, layer.weight), scaler.get_scale()))
    assert seen == [(False, 4.0), (True, 2.0), (False, 2.0)], seen
    off = fleet.GradScaler("cpu", enabled=False)  # as a script has it that may or may not use half precision
    off.scale(layer(data(3, 4)).square().sum()).backward()
    off.unscale_(optimizer)
    off.step(optimizer)
    off.update()


def an_infinity() -> None:
    """Of one rank: all skip the step, with torch's scaler as with fleet's, and with fused optimizers, which do not unscale."""
    begin(dp=2)
    for make in (fleet.GradScaler, torch.amp.GradScaler):
        for fused in (False, True):
            model = fleet.distributed_model(seeded(nn.Linear, 4, 3))
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
            scaler, seen = make("cpu", init_scale=4.0), []
            for step in range(3):
                x = data(4, 4, seed=step).chunk(2)[oc.get_rank()]
                scaler.scale(model(x * (float("inf") if step == 1 and oc.get_rank() == 1 else 1.0)).sum()).backward()
                before = model.module.weight.detach().clone()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                seen.append((torch.equal(before, model.module.weight), scaler.get_scale()))
            assert seen == [(False, 4.0), (True, 2.0), (False, 2.0)], (make, fused, seen)
            assert model.module.weight.isfinite().all()


def own_changes() -> None:
    """Of gradients: after ``fleet.sync`` they are not summed once more."""
    hcg = begin(mp=2)
    norm = fleet.distributed_model(seeded(nn.LayerNorm, 4))
    for p in norm.parameters():
        fleet.mark_as_sequence_parallel_parameter(p, hcg.get_model_parallel_group())
    optimizer = torch.optim.SGD(norm.parameters(), lr=0.0)
    for changes in range(3):
        norm(data(2, 4, seed=oc.get_rank())).square().sum().backward()
        fleet.sync(norm.parameters())
        expected = [p.grad * 0.5**changes for p in norm.parameters()]
        for p in list(norm.parameters()) * changes:
            p.grad.mul_(0.5)
        optimizer.step()
        assert all(torch.equal(p.grad, e) for p, e in zip(norm.parameters(), expected, strict=True)), changes
        optimizer.zero_grad(set_to_none=changes == 1)


def merging() -> None:
    strategy = fleet.DistributedStrategy()
    strategy.gradient_merge, strategy.gradient_merge_configs = True, {"k_steps": 2}
    fleet.init(strategy=strategy)
    for clips in ("no", "clip", "scaler", "scaler and clip", "fleet scaler and clip by value"):
        merged(clips)
    for clips in (
        "clip by the optimizer",
        "clip by the optimizer, scaler",
        "clip by a hook",
        "clip, cleared by the model",
    ):
        merged(clips)

    cleared_by_the_model()


class OwnClearing(nn.Linear):
    """Counts how often it is cleared."""

    times = 0

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.times += 1
        super().zero_grad(set_to_none)


def cleared_by_the_model() -> None:
    """In the middle of a cycle only what waits stays; outside of one a module's own ``zero_grad`` is called."""
    model = fleet.distributed_model(OwnClearing(3, 2))
    optimizer = fleet.distributed_optimizer(torch.optim.SGD([model.module.weight], lr=0.1))
    model.clear_gradients()
    assert model.module.times == 1
    for to_none in (False, True):
        model(data(2, 3)).sum().backward()
        optimizer.step()
        waits, other = model.module.weight.grad.clone(), model.module.bias.grad
        model.zero_grad(to_none)
        assert torch.equal(model.module.weight.grad, waits) and (model.module.bias.grad is None) == to_none
        assert to_none or (model.module.bias.grad is other and not other.any())
        model(data(2, 3)).sum().backward()
        optimizer.step()
        model.zero_grad()
        assert model.module.weight.grad is None


def merged(clips: str) -> None:
    """Two microbatches for each step, with a schedule, clipping and a scaler that a script calls for each microbatch."""
    single, mine = (seeded(nn.Linear, 3, 2) for _ in range(2))
    model = fleet.distributed_model(mine)
    itself = fleet.ClipGradByGlobalNorm(0.05) if "by the optimizer" in clips else None
    ours = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5), grad_clip=itself)
    if "hook" in clips:
        ours.register_step_pre_hook(lambda *_: (clip_grad_norm_(model.parameters(), 0.05), None)[1])
    theirs = torch.optim.SGD(single.parameters(), lr=0.1, momentum=0.5)
    plans = [torch.optim.lr_scheduler.ExponentialLR(o, 0.7) for o in (ours, theirs)]
    kinds = (torch.amp.GradScaler, fleet.GradScaler if "fleet" in clips else torch.amp.GradScaler)
    alone, scaler = (make("cpu", init_scale=8.0, growth_interval=1, enabled="scaler" in clips) for make in kinds)
    clip = clip_grad_value_ if "value" in clips else clip_grad_norm_
    for step in range(8):
        x = data(4, 3, seed=step) * (float("inf") if step == 4 else 1.0)
        alone.scale(single(x).square().mean() / 2).backward()
        if step % 2:
            if "clip" in clips:
                alone.unscale_(theirs)
                clip(single.parameters(), 0.05)
            alone.step(theirs)
            alone.update()
            theirs.zero_grad()
            plans[1].step()
        if clips == "no":
            ours.minimize(model(x.chunk(2)[oc.get_rank()]).square().mean())
        else:
            scaler.scale(model(x.chunk(2)[oc.get_rank()]).square().mean()).backward()
            if "clip" in clips and itself is None and "hook" not in clips:
                scaler.unscale_(ours)
                clip(model.parameters(), 0.05)
            scaler.step(ours)
            scaler.update()
            (model if "model" in clips else ours).zero_grad()
        if step % 2:
            plans[0].step()
        if step == 3 and "scaler" not in clips:
            break  # an infinity is for a scaler
    compare(mine, single, gradients=False)
    assert scaler.get_scale() == alone.get_scale()


def premature() -> None:
    begin(mp=2)
    norm = nn.LayerNorm(3)
    for p in norm.parameters():
        fleet.mark_as_sequence_parallel_parameter(p)
    norm(data(2, 3)).square().sum().backward()
    fleet.sync(norm.parameters())
    summed = norm.weight.grad.clone()
    fleet.sync(norm.parameters())
    assert torch.equal(summed, norm.weight.grad), "summed twice"
    for times in (2, 3):
        norm(data(2, 3)).square().sum().backward()
        close(norm.weight.grad, times * summed, "backward onto a gradient that was summed")
    norm.zero_grad(set_to_none=False)
    norm(data(2, 3)).square().sum().backward()
    fleet.sync(norm.parameters())
    assert torch.equal(summed, norm.weight.grad)


def copies_made_equal() -> None:
    hcg = begin(dp=2, mp=2)
    torch.manual_seed(oc.get_rank())
    model = nn.ModuleList([nn.Linear(3, 3), mp.ColumnParallelLinear(3, 4)])
    fleet.distributed_model(model)
    torch.manual_seed(0)
    first = [nn.Linear(3, 3), mp.ColumnParallelLinear(3, 4)]
    assert torch.equal(model[0].weight, first[0].weight)
    if hcg.get_model_parallel_rank() == 0:
        assert torch.equal(model[1].weight, first[1].weight)


def all_of_these() -> None:
    scaling()
    merging()
    premature()
    an_infinity()
    own_changes()


def test_scaling_merging_and_premature_sums() -> None:
    run_ranks(all_of_these, 2)


def test_copies_begin_equal() -> None:
    run_ranks(copies_made_equal, 4)


def test_part_of_is_what_held_says() -> None:
    begin()
    layer = mp.ColumnParallelLinear(3, 4)
    assert torch.equal(part_of(layer.weight, layer.weight), layer.weight)


class Words(nn.Module):
    """A table whose gradients are rows, and one that rank 1 alone uses."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.other = nn.Embedding(40, 3, sparse=True), nn.Embedding(9, 3, sparse=True)

    def forward(self, ids: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
        total = self.table(ids).square().sum()
        return (total + self.other(others).sum() if len(others) else total) / len(ids)


def sparse_rows() -> None:
    begin(dp=2)
    me = oc.get_rank()
    makes = {
        "sgd": lambda p: torch.optim.SGD(p, 0.1),
        "adam": lambda p: torch.optim.SparseAdam([*p], 0.1),
        "adagrad": lambda p: torch.optim.Adagrad(p, 0.1),
    }
    for make in makes.values():
        single, mine = (seeded(Words) for _ in range(2))
        model = fleet.distributed_model(mine)
        ours, theirs = make(model.parameters()), make(single.parameters())
        for step in range(3):
            ids = torch.arange(8).mul(step + 1) % 11
            # What rank 1 alone uses is weighed as one card's: its half of the batch.
            single(ids, ids[4:] % 9).backward()
            model(ids[4 * me : 4 * me + 4], ids[4:] % 9 if me else ids[:0]).backward()
            if step == 1:
                wide = torch.cat([p.grad.to_dense().flatten() for p in single.parameters()])
                norm = wide.norm()
                close(fleet.clip_grad_norm_(model.parameters(), 0.1), norm, "norm")
                for p in single.parameters():
                    p.grad.mul_(0.1 / (norm.item() + 1e-6))
            if step == 2:
                assert mine.table.weight.grad.is_sparse
            with oc.explain() as report:
                ours.step()
            theirs.step()
            assert all(m.step.bytes < mine.table.weight.nbytes for m in report.messages)
            ours.zero_grad()
            theirs.zero_grad()
        compare(mine, single, gradients=False)
    single, mine = (seeded(Words) for _ in range(2))
    model, ours, _ = fleet.group_sharded_parallel(mine, makes["adagrad"](mine.parameters()), "os")
    theirs = makes["adagrad"](single.parameters())
    ids = torch.arange(8) % 5
    single(ids, ids[4:]).backward()
    model(ids[4 * me : 4 * me + 4], ids[4:] if me else ids[:0]).backward()
    ours.step()
    theirs.step()
    compare(mine, single, gradients=False)


def test_sparse_gradients() -> None:
    run_ranks(sparse_rows, 2)


def many_microbatches() -> dict[str, float]:
    """How far the sum of 64 microbatches' gradients in bfloat16 is from theirs in float64, with and without a wider sum."""
    me, far = oc.get_rank(), {}
    for degrees in ({"dp": 2}, {"dp": 1, "mp": 2}):
        dp = begin(**degrees).data().size == 2
        for dtype in (None, torch.float32):
            norm = seeded(nn.LayerNorm, 16).bfloat16()
            if not dp:  # it sees this rank's rows
                for p in norm.parameters():
                    fleet.mark_as_sequence_parallel_parameter(p)
            model = fleet.distributed_model(norm, grad_accum_dtype=dtype)
            exact = [torch.zeros(16, dtype=torch.float64) for _ in range(2)]
            for step in range(64):
                x, y = data(2, 8, 16, seed=2 * step + me).bfloat16()
                loss = (model(x) * (y + x)).mean()
                grads = torch.autograd.grad(loss, [*norm.parameters()], retain_graph=True)
                loss.backward()
                for total, grad in zip(exact, grads, strict=True):
                    total += grad
                if step == 40 and dtype is not None:
                    assert norm.weight.grad.dtype is torch.bfloat16, "a premature look"
            torch.optim.SGD(model.parameters(), 0.1).step()
            for total, p in zip(exact, norm.parameters(), strict=True):
                error = ((total - p.grad.double()).norm() / total.norm()).item()
                far[f"{dtype}"] = max(far.get(f"{dtype}", 0.0), error)
            assert all(p.grad.dtype is torch.bfloat16 for p in norm.parameters())
    return far


def test_gradients_add_up_in_a_wider_dtype() -> None:
    far = run_ranks(many_microbatches, 2)[0]
    assert far["torch.float32"] < 3e-3 < 8e-3 < far["None"], far


def many_for_masters() -> dict[str, float]:
    """The same of ``group_sharded_parallel``: how far the first update of the masters is from that of an exact sum."""
    begin(dp=2)
    me, far = oc.get_rank(), {}
    with pytest.raises(fleet.FleetError, match="without master_weights"):
        norm = nn.LayerNorm(16).bfloat16()
        fleet.group_sharded_parallel(norm, torch.optim.SGD(norm.parameters()), "os", grad_accum_dtype=torch.float32)
    for level in ("os", "os_g", "p_g_os"):
        for dtype in (None, torch.float32):
            norm, twin = (seeded(nn.LayerNorm, 16).bfloat16() for _ in range(2))
            made = torch.optim.SGD(norm.parameters(), 1.0, momentum=0.9)
            model, optimizer, _ = fleet.group_sharded_parallel(
                norm, made, level, master_weights=True, reduce_dtype=torch.float32, grad_accum_dtype=dtype
            )
            exact = torch.zeros(16, dtype=torch.float64)
            for step in range(64):
                x, y = data(2, 8, 16, seed=2 * step + me).bfloat16()
                (model(x) * (y + x)).mean().backward()
                exact += torch.autograd.grad((twin(x) * (y + x)).mean(), twin.weight)[0]
            optimizer.step()
            oc.all_reduce(exact)
            weight = next(p for name, p in model.named_parameters() if name == "weight")
            found = 1.0 - optimizer.state[weight]["master_weight"].full_tensor().double()
            error = ((exact / 2 - found).norm() / exact.norm()).item()
            far[f"{dtype}"] = max(far.get(f"{dtype}", 0.0), error)
            assert weight.dtype is torch.bfloat16
    return far


@pytest.mark.proof
def test_gradients_for_master_weights_add_up_in_a_wider_dtype() -> None:
    far = run_ranks(many_for_masters, 2)[0]
    assert far["torch.float32"] < 1e-5 < 3e-3 < far["None"], far


def _summed_twice() -> float:
    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = {"sep_degree": 2, "mp_degree": 2}
    fleet.init(is_collective=True, strategy=strategy)
    grid = fleet.get_hybrid_communicate_group()
    weight = nn.Parameter(torch.zeros(()))
    for axis in ("mp", "sep"):
        fleet.sum_over(weight, grid.group(axis))
    optimizer = fleet.distributed_optimizer(torch.optim.SGD([weight], lr=1.0))
    (weight * 10.0 ** oc.get_rank()).backward()
    optimizer.step()
    return weight.item()


def test_summands_along_two_axes_are_those_of_all_ranks():
    """Ranks took their groups by the numbers of their ranks: some along mp first, some along sep, and got -111, -1011, -1122."""
    assert run_ranks(_summed_twice, 4) == [-1111.0] * 4


def _expert_of_one_rank(dp: int, mp: int) -> list[list[float]]:
    """Plain experts, each reached from the tokens of one rank alone."""
    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = {"dp_degree": dp, "mp_degree": mp}
    fleet.init(is_collective=True, strategy=strategy)
    grid = fleet.get_hybrid_communicate_group()
    oc.manual_seed(0)
    moe = fleet.meta_parallel.MoELayer(
        4, [nn.Linear(4, 4) for _ in range(4)], {"type": "naive", "top_k": 1}, num_experts=4,
        mp_group=grid.get_model_parallel_group(),
    )  # fmt: skip
    with torch.no_grad():
        moe.gate.gate.weight.copy_(torch.eye(4))
        moe.gate.gate.bias.zero_()
    model = fleet.distributed_model(nn.Sequential(moe))
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    x = torch.eye(4)[torch.tensor([0, 0, 1, 1, 2, 2, 3, 3])]  # token i goes to this expert
    out = model(x.chunk(dp)[grid.get_data_parallel_rank()])
    out.square().sum(1).mean().backward()
    optimizer.step()
    return [p.detach().flatten().tolist() for p in model.parameters()]


def test_an_expert_that_one_rank_of_a_grid_reaches():
    """Which experts have a gradient was agreed on along dp first on some ranks, along mp first on others: messages differed."""
    expected = run_ranks(_expert_of_one_rank, 1, 1, 1)[0]
    for found in run_ranks(_expert_of_one_rank, 4, 2, 2):
        for ours, theirs in zip(found, expected, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-7)
