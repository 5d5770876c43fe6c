"""Random numbers of a batch that goes in microbatches: those that one card draws for the whole batch."""

import random
import warnings
from math import prod

import pytest
import torch
import torch.nn.functional as F
from amounts import amount, share
from fuzz import micro
from torch import nn
from torch.utils.checkpoint import checkpoint

import onecard as oc
from onecard.errors import DispatchError, PlanError
from onecard.random import Key, fill, law
from onecard.random.key import RowShare
from onecard.random.variates import variates
from onecard.static.passes import row_draws
from onecard.testing import run_ranks

NORMAL = law("normal_", torch.float32)


# -- a part of what a key gives ----------------------------------------------------------------------------------------------


def shares(seed: int):
    """A whole in which rows are taken apart, and the part of it that some rank has of one of its microbatches."""
    pick = random.Random(seed)
    before, ranks, rows, of, after = (
        pick.choice(x) for x in ([1, 1, 2, 3], [1, 2, 3], [1, 2, 3], [1, 2, 3], [1, 1, 2])
    )
    lead, rest = [pick.choice([1, 2, 3])] * pick.choice([0, 1]), [pick.choice([1, 2, 3, 5])] * pick.choice([0, 1, 2])
    number, dim = pick.randrange(of), len(lead)
    length = before * ranks * rows * after
    begin = pick.randrange(length + 1)
    end = pick.randrange(begin, length + 1)
    share = RowShare(dim, before, ranks, ranks * rows, number, of)
    return (*lead, before, ranks, of, rows, after, *rest), (*lead, length, *rest), dim, begin, end, share


@pytest.mark.parametrize("seed", range(60))
def test_a_microbatch_has_its_part_of_the_batch(seed):
    apart, shape, dim, begin, end, share = shares(seed)
    whole = fill(torch.empty(apart), NORMAL, Key(1, 2)).select(dim + 2, share.number).reshape(shape)
    offset = [begin if d == dim else 0 for d in range(len(shape))]
    part = torch.empty(shape).narrow(dim, begin, end - begin)  # with gaps, mostly
    assert torch.equal(fill(part, NORMAL, Key(1, 2, share), shape, offset), whole.narrow(dim, begin, end - begin))
    means = torch.arange(prod(apart)).view(apart) / 7
    counts = variates("poisson", [means], Key(3, 4), apart, (0,) * len(apart))
    mine = [x.select(dim + 2, share.number).reshape(shape).narrow(dim, begin, end - begin) for x in (means, counts)]
    assert torch.equal(variates("poisson", [mine[0]], Key(3, 4, share), shape, offset), mine[1])


def test_rows_of_a_dim_that_is_taken_apart():
    of = RowShare(1, 4, 1, 3, 0, 2)
    assert Key(1, 2, of).with_dims([[5], [4, 3], [6]]).share == of._replace(dim=2, before=1)
    assert Key(1, 2, of).with_dims([[5, 2], [2, 6]]).share == of._replace(dim=3, before=2)
    with pytest.raises(ValueError, match="do not lie in one of the dims"):
        Key(1, 2, of).with_dims([[5], [3, 4]])


def test_a_packed_key_keeps_its_part():
    share = RowShare(0, 1, 2, 4, 1, 3)
    assert Key.unpack(Key(5, 6, share).pack()) == Key(5, 6, share) != Key(5, 6) == Key.unpack(Key(5, 6).pack())


# -- programs ----------------------------------------------------------------------------------------------------------------


class Of(nn.Module):
    """A layer that is a function."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, h):
        return self.function(h)


class Again(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.4), nn.Linear(16, 16))

    def forward(self, h):
        return checkpoint(self.layers, h, use_reentrant=False)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.2, batch_first=True)

    def forward(self, h):
        return self.layer(h.view(-1, 4, 4)).reshape(-1, 16)


class Diffused(nn.Module):
    def __init__(self):
        super().__init__()
        self.steps = nn.Embedding(10, 16)

    def forward(self, h):
        return h + self.steps(torch.randint(0, 10, (h.shape[0],))) + torch.randn(h.shape) * 0.1


def of_tokens(h):
    return F.dropout(h.view(-1, 4, 4).reshape(-1, 4), 0.4).view(-1, 16)


def times_first(h):
    """Tokens of all rows at one time, then of all at the next."""
    return (
        F.dropout(h.view(-1, 4, 4).transpose(0, 1).reshape(-1, 4), 0.4).view(4, -1, 4).transpose(0, 1).reshape(-1, 16)
    )


def attends(h):
    """Attention without dropout draws nothing, whatever torch says of it."""
    parts = h.view(-1, 1, 4, 4)
    return h + F.scaled_dot_product_attention(parts, parts, parts, is_causal=True).reshape(-1, 16)


def dropped_path(h):
    return h + h.tanh() * (0.7 + torch.rand((h.shape[0], 1), dtype=h.dtype)).floor()


LAYERS = {
    "dropout": lambda: nn.Dropout(0.5),
    "of tokens": lambda: Of(of_tokens),
    "times first": lambda: Of(times_first),
    "columns": lambda: Of(lambda h: F.dropout(h.t(), 0.4).t()),
    "channels": lambda: Of(lambda h: F.dropout2d(h.view(-1, 4, 2, 2), 0.4).reshape(-1, 16)),
    "dropped path": lambda: Of(dropped_path),
    "noise": lambda: Of(lambda h: h + torch.randn_like(h) * h.sigmoid()),
    "gumbel": lambda: Of(lambda h: h * F.gumbel_softmax(h)),
    "bernoulli": lambda: Of(lambda h: h * torch.bernoulli(h.detach().sigmoid())),
    "diffused": Diffused,
    "negative samples": lambda: Of(
        lambda h: h + torch.multinomial(torch.ones(len(h), 8), 2).to(h.dtype).mean(1)[:, None]
    ),
    "sampled": lambda: Of(lambda h: h + torch.multinomial(h.detach().softmax(-1), 3, True).to(h.dtype)[:, :1] * 0.1),
    "one number": lambda: Of(lambda h: h * torch.rand(())),
    "a mask of columns": lambda: Of(lambda h: h * (torch.rand(16) > 0.3)[torch.randperm(16)]),
    "recomputed": Again,
    "attention": Attention,
    "attention without": lambda: Of(attends),
}


def network(names):
    """Layers that draw, each behind a layer that trains."""
    torch.manual_seed(0)
    layers = [layer for name in names for layer in (nn.Linear(16, 16), nn.Tanh(), LAYERS[name]())]
    model = nn.Sequential(nn.Linear(4, 16), *layers, nn.Linear(16, 3))
    return model, torch.optim.SGD(model.parameters(), lr=0.05)


def batches(count=3):
    made = torch.Generator().manual_seed(1)
    return [(torch.randn(8, 4, generator=made), torch.randint(0, 3, (8,), generator=made)) for _ in range(count)]


def losses(model, optimizer, prepare=lambda step: step, count=3):
    def step(x, y):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    run = prepare(step)
    oc.manual_seed(3)
    with oc.one_card_random():
        found = [run(x, y).item() for x, y in batches(count)]
        return [*found, torch.rand(()).item()]  # what is drawn behind the steps


def recorded(names, plan):
    return losses(*network(names), lambda step: oc.to_static(step, plan=oc.Plan(**plan)))


def own_loop(names, plan):
    model, optimizer = network(names)
    oc.parallelize(model, optimizer, plan=oc.Plan(**plan))
    return losses(model, optimizer)


STAGES = {"pp": 2, "microbatches": 2, "schedule": "F-then-B"}
PLANS = {
    "stages": STAGES,
    "more microbatches": STAGES | {"microbatches": 4, "schedule": "1F1B"},
    "stages beside dp": STAGES | {"dp": 2},
    "stages beside tp": STAGES | {"tp": 2},
    "accumulated": {"dp": 2, "microbatches": 2},
    "ZeRO-3": {"dp": 2, "microbatches": 2, "zero": 3},
}


@pytest.mark.share(2)
@pytest.mark.parametrize("plan", share(list(PLANS), 3))
@pytest.mark.parametrize("way", [recorded, own_loop])
def test_numbers_are_one_cards(way, plan):
    plan = PLANS[plan]
    if way is own_loop and (plan.get("pp") != 2 or plan["schedule"] != "F-then-B"):
        pytest.skip("a loop of its own goes in microbatches through stages alone")
    # Two draws of one shape with rows in other places are refused in a loop of its own.
    names = [name for name in LAYERS if way is recorded or name not in ("times first", "columns")]
    wanted = losses(*network(names))
    world = plan.get("pp", 1) * plan.get("dp", 1) * plan.get("tp", 1)
    for found in run_ranks(way, world, names, plan):
        assert found == pytest.approx(wanted, rel=1e-5)


def test_rows_that_are_folded_behind_others_and_divided():
    """A dim of times and rows, of which ranks have some rows at all times."""
    wanted = losses(*network(["times first"]))
    for found in run_ranks(own_loop, 4, ["times first"], STAGES | {"dp": 2}):
        assert found == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("name", LAYERS)
def test_numbers_of_merged_gradients(name):
    wanted = losses(*network([name]))
    assert losses(*network([name]), lambda step: oc.to_static(step, k_steps=4)) == pytest.approx(wanted, rel=1e-5)


VARIATES = {
    "gamma": lambda h: h * torch.distributions.Gamma(torch.ones(16), 2.0, validate_args=False).sample(),
    "beta": lambda h: h * torch.distributions.Beta(0.4, 0.4).sample(),
    "poisson": lambda h: h + torch.poisson(torch.ones(len(h), 16)) * 0.1,
    "dirichlet": lambda h: h * torch.distributions.Dirichlet(torch.ones(16)).sample(),
}


@pytest.mark.parametrize("name", VARIATES)
@pytest.mark.parametrize("k", [1, 2])
def test_variates_of_recorded_steps(name, k, monkeypatch):
    """Also in the replays behind those that are compared with the step."""
    monkeypatch.setitem(LAYERS, name, lambda: nn.Sequential(Of(VARIATES[name]), nn.Dropout(0.2)))
    options = {"k_steps": k} if k > 1 else {}
    wanted = losses(*network([name]), count=6)
    assert losses(*network([name]), lambda step: oc.to_static(step, **options), 6) == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("names", [[], ["dropout"]], ids=["alone", "beside dropout"])
def test_noise_of_gradients_is_drawn_once(names):
    def noisy(model, optimizer, prepare=lambda step: step):
        def step(x, y):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            for p in model.parameters():
                p.grad.add_(torch.randn_like(p.grad) * 0.1)
            optimizer.step()
            return loss.detach()

        run = prepare(step)
        torch.manual_seed(3)
        with oc.one_card_random():
            return [*(run(x, y).item() for x, y in batches()), torch.rand(()).item()]

    found = noisy(*network(names), lambda step: oc.to_static(step, k_steps=2))
    assert found == pytest.approx(noisy(*network(names)), rel=1e-5)


def test_a_number_drawn_for_rows_scales_no_loss():
    """A mean of what each row draws is another one for each microbatch."""
    text = "e = F.cross_entropy(o, y, reduction='none')\nloss = e.mean() * torch.rand(len(y), 3).mean()"
    assert micro.judged(text, 4)[0] == "refused"
    assert micro.judged(text.replace("torch.rand(len(y), 3).mean()", "torch.rand(())"), 4)[0] == "right"


@pytest.mark.share(3)
@pytest.mark.parametrize("seed", [micro.RANDOM + 141, *range(micro.RANDOM, micro.RANDOM + amount(4, 200))])
def test_random_statements_that_draw(seed):
    assert micro.judged(micro.drawn(seed), 4)[0] in ("right", "told", "refused", "void")


def test_a_loop_that_is_asked_for_draws_as_a_loop():
    """With ``avg`` a step is the loop that one would write, which draws for one microbatch after the other."""
    model, optimizer = network(["dropout"])
    oc.manual_seed(3)
    found = losses(*network(["dropout"]), lambda step: oc.to_static(step, k_steps=2, avg=True))

    def loop(x, y):
        optimizer.zero_grad()
        parts = [F.cross_entropy(model(a), b) / 2 for a, b in zip(x.chunk(2), y.chunk(2), strict=True)]
        for part in parts:
            part.backward()
        optimizer.step()
        return sum(parts)

    first = losses(*network(["dropout"]))[0]  # the first call runs as it is
    oc.manual_seed(3)
    assert found[0] == pytest.approx(first, rel=1e-5)
    assert found[1] != pytest.approx(losses(*network(["dropout"]))[1], rel=1e-3)


def test_rows_that_nobody_finds_are_told():
    """Numbers for pairs of rows: no microbatch has its part of them."""

    def pairs(h):
        return h + torch.rand(len(h), len(h)).mean() * 0

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), Of(pairs), nn.Dropout(0.5), nn.Linear(16, 3))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        losses(model, torch.optim.SGD(model.parameters(), lr=0.05), lambda step: oc.to_static(step, k_steps=2))
    assert any("nobody can tell where the batch's rows are" in str(w.message) for w in said), said


def test_what_draws_beside_keys_is_told(monkeypatch):
    """Were attention without dropout an operator that draws by torch's own generator."""
    monkeypatch.setattr(row_draws, "draws_by", lambda func, *_: torch.Tag.nondeterministic_seeded in func.tags)
    with pytest.warns(UserWarning, match="draws keys, beside what torch draws itself"):
        losses(*network(["dropout", "attention without"]), lambda step: oc.to_static(step, k_steps=2))


# -- a plain model in stages -------------------------------------------------------------------------------------------------


class Seeds(nn.Module):
    def forward(self, h):
        torch.manual_seed(5)
        return F.dropout(h, 0.5)


class Counts(nn.Module):
    """Draws once more in each later forward."""

    times = 0

    def forward(self, h):
        Counts.times += 1
        for _ in range(Counts.times):
            h = F.dropout(h, 0.1)
        return h


def in_a_loop(layer, random_of_one_card=True, backward=False):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), layer, nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    oc.parallelize(model, optimizer, plan=oc.Plan(**STAGES))
    (x, y), *_ = batches(1)
    if random_of_one_card:
        with oc.one_card_random():
            loss = F.cross_entropy(model(x), y)
            if backward:
                loss.backward()
            return loss.item()
    drawn = []
    for _ in range(2):
        drawn.append(F.cross_entropy(model(x), y).item())
    return drawn


class DrawsAnew(nn.Module):
    """Its forward is computed again in backward, with other numbers."""

    def forward(self, h):
        return checkpoint(lambda x: F.dropout(x, 0.5), h, use_reentrant=False, preserve_rng_state=False)


def refused(layer, error, words, backward=False):
    with pytest.raises(error, match=words):
        in_a_loop(layer(), backward=backward)


def test_what_cannot_be_placed_is_refused():
    run_ranks(refused, 2, Seeds, DispatchError, "seeds torch's generator")
    run_ranks(refused, 2, shuffled, PlanError, "randperm at .* draws")
    run_ranks(refused, 2, DrawsAnew, DispatchError, "draws anew in backward", True)


def shuffled():
    return Of(shuffle)


def shuffle(h):
    return h[torch.randperm(len(h))]


def plain_path(h):
    return h + h.tanh() * (0.7 + torch.rand((len(h), 1))).floor() / 0.7


def test_numbers_of_torchs_own_go_on():
    """Plain tensors draw by torch itself outside of ``one_card_random``: new ones in each step."""
    first, second = run_ranks(drawn_twice, 2)[0]
    assert first != second


def drawn_twice():
    return in_a_loop(Of(plain_path), random_of_one_card=False)
