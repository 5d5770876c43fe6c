"""Permutations and variates by rejection: what they promise, part by part; and what traces into graphs."""

from __future__ import annotations

import math
import warnings
from itertools import permutations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from random_operators import OPERATORS, as_rank, probabilities
from torch.fx.experimental.proxy_tensor import make_fx

import onecard as oc
from onecard._torch.uncompiled import untraced
from onecard.errors import DispatchError
from onecard.place.layout import Layout
from onecard.random import Key, fill, law, new_key, permutation
from onecard.random.permute import SORTED, _Bijection
from onecard.random.philox import philox
from onecard.random.variates import variates
from onecard.tensor.dist_tensor import wrap
from onecard.tensor.spec import Spec


def chi_square_score(counts, expected):
    """(chi-square - degrees) / its standard deviation, of cells that hold enough."""
    counts, expected = torch.as_tensor(counts).double(), torch.as_tensor(expected).double()
    kept = expected > 8
    degrees = int(kept.sum()) - 1
    return float((((counts - expected) ** 2 / expected)[kept].sum() - degrees) / (2 * degrees) ** 0.5)


# ---- permutations


@pytest.mark.share(1)
@pytest.mark.parametrize("n, first", [(3, 3), (4, 4), (5, 5), (6, 3)])
def test_all_permutations_of_a_few_are_alike_likely(n, first):
    """Of six elements those that come first, in their order."""
    count = dict.fromkeys(permutations(range(n), first), 0)
    draws = 20 * len(count)
    torch.manual_seed(n)
    for _ in range(draws):
        count[tuple(permutation(n, new_key())[:first].tolist())] += 1
    assert chi_square_score(list(count.values()), [draws / len(count)] * len(count)) < 4


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 3 * SORTED), st.integers(0, 2**32 - 1), st.data())
def test_a_permutation_has_every_number_once_and_parts_agree(n, seed, data):
    whole = permutation(n, Key(seed, 9))
    assert torch.equal(whole.sort().values, torch.arange(n))
    start = data.draw(st.integers(0, n))
    length = data.draw(st.integers(0, n - start))
    assert torch.equal(permutation(n, Key(seed, 9), start, length), whole[start : start + length])


@pytest.mark.parametrize("n", [2, 3, 16, 17, 31, 64, 1000, 2**15, 2**15 + 1])
def test_the_bijection_is_one_for_every_count_of_bits(n):
    x = torch.arange(n)
    _Bijection(n, Key(n, 1)).walk(x)
    assert torch.equal(x.sort().values, torch.arange(n))


@pytest.mark.share(1)
@pytest.mark.parametrize("n", [SORTED + 1, 2**17, 150_000])
def test_long_permutations_look_random(n):
    """Fixed points, positions, neighbours, order, cycles: moments of uniform permutations, over 8 of them."""
    torch.manual_seed(n)
    draws = [permutation(n, new_key()) for _ in range(8)]
    index = torch.arange(n)
    assert sum(int((p == index).sum()) for p in draws) < 8 + 5 * 8**0.5  # one each on average, as Poisson's
    for p in draws:
        assert abs(torch.corrcoef(torch.stack([p, index]).double())[0, 1]) * n**0.5 < 4.5
        assert abs(torch.corrcoef(torch.stack([p[1:], p[:-1]]).double())[0, 1]) * n**0.5 < 4.5
        ascents = int((p[1:] > p[:-1]).sum())  # mean (n - 1) / 2, variance (n + 1) / 12
        assert abs(ascents - (n - 1) / 2) < 4.5 * ((n + 1) / 12) ** 0.5
        grid = torch.bincount(index * 16 // n * 16 + p * 16 // n, minlength=256)
        assert abs(chi_square_score(grid, [n / 256] * 256)) < 5
        steps = (p[1:] - p[:-1]) % n
        assert abs(chi_square_score(torch.bincount(steps * 64 // n, minlength=64), [n / 64] * 64)) < 5
    a, b = draws[:2]
    assert abs(torch.corrcoef(torch.stack([a, b]).double())[0, 1]) * n**0.5 < 4.5


def test_differences_across_every_power_of_two_look_random():
    """What shows a Feistel network of too few rounds: four and six of them fail here, by hundreds."""
    n = 2**17
    for key in (1, 2):
        p = permutation(n, Key(key, 77))
        for bit in range(17):
            steps = (p.roll(-(2**bit)) - p) % n
            assert abs(chi_square_score(torch.bincount(steps * 64 // n, minlength=64), [n / 64] * 64)) < 5


def test_keys_that_differ_in_a_bit_give_permutations_that_have_nothing_in_common():
    n = 2**16
    a, b = permutation(n, Key(0, 0)), permutation(n, Key(1, 0))
    assert int((a == b).sum()) < 8
    assert abs(torch.corrcoef(torch.stack([a, b]).double())[0, 1]) * n**0.5 < 4


# ---- gamma, Poisson, binomial

N = 60_000


def draw(name, *params, key=5):
    return variates(name, [torch.full((N,), float(p)) for p in params], Key(key, 6), (N,), (0,))


def check_counts(x, log_probability, top):
    counts = torch.bincount(x.long(), minlength=top + 1)[: top + 1]
    assert x.min() >= 0
    assert abs(chi_square_score(counts, [N * math.exp(log_probability(k)) for k in range(top + 1)])) < 4.5


@pytest.mark.parametrize("mean", [0.3, 3.0, 9.9, 10.0, 35.0, 400.0])
def test_poisson(mean):
    check_counts(
        draw("poisson", mean), lambda k: k * math.log(mean) - mean - math.lgamma(k + 1), int(mean + 9 * mean**0.5 + 5)
    )


@pytest.mark.parametrize("n, p", [(1, 0.3), (10, 0.5), (30, 0.2), (60, 0.4), (300, 0.02), (400, 0.7), (500, 0.995)])
def test_binomial(n, p):
    def log_probability(k):
        ways = math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
        return ways + k * math.log(p) + (n - k) * math.log(1 - p)

    check_counts(draw("binomial", n, p), log_probability, n)


@pytest.mark.parametrize("shape", [0.1, 0.6, 1.0, 2.5, 40.0, 3000.0])
def test_gamma(shape):
    x = draw("gamma", shape).sort().values
    below = torch.special.gammainc(torch.tensor(shape).double(), x)
    assert (below - (torch.arange(N) + 0.5) / N).abs().max() * N**0.5 < 1.95  # Kolmogorov and Smirnov, p = 0.001


def test_edges_of_the_parameters():
    assert (
        draw("binomial", 7, 0.0).max() == 0 and draw("binomial", 7, 1.0).min() == 7 and draw("poisson", 0.0).max() == 0
    )
    assert draw("binomial", 0, 0.5).max() == 0 and draw("gamma", 0.0).max() == 0
    assert draw("gamma", math.nan).isnan().all() and draw("poisson", math.nan).isnan().all()
    x = oc.shard_tensor(torch.tensor([1.0, -1.0]), oc.ProcessMesh([0], ["x"]), [oc.Replicate()])
    with pytest.raises(RuntimeError, match="non-negative"):
        torch.poisson(x)


def test_neighbours_and_keys_are_independent():
    a, b = draw("gamma", 2.0), draw("gamma", 2.0, key=7)
    for one, other in ((a[1:], a[:-1]), (a, b), (a, draw("poisson", 50.0, key=4))):
        assert abs(torch.corrcoef(torch.stack([one, other]))[0, 1]) * N**0.5 < 4.5


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_variates_of_parts(data):
    name = data.draw(st.sampled_from(["gamma", "poisson", "binomial"]))
    shape = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=3))
    scale = data.draw(st.sampled_from([0.5, 8.0, 200.0]))
    rate = ((torch.arange(math.prod(shape)) * 0.37 + 0.21) % 1).reshape(shape)
    params = [(rate * scale).floor(), rate.flip(0)] if name == "binomial" else [rate * scale]
    whole = variates(name, params, Key(3, 4), shape, [0] * len(shape))
    begin = [data.draw(st.integers(0, n - 1)) for n in shape]
    part = tuple(slice(b, data.draw(st.integers(b + 1, n))) for b, n in zip(begin, shape, strict=True))
    assert torch.equal(variates(name, [p[part] for p in params], Key(3, 4), shape, begin), whole[part])


# ---- graphs


def dropout(x):
    mask = fill(torch.empty_like(x, dtype=torch.bool), law("bernoulli_", torch.bool, 0.7), new_key())
    return x * mask


def part_of_normal(x):
    return fill(torch.empty_like(x), law("normal_", torch.float32), new_key(), (9, 31), (2, 3))


def words(x):
    return philox((x.long(), 0, 0, 0), (3, 4))[0]


BACKENDS = {
    "make_fx": lambda program, x: make_fx(program)(x),
    "eager": lambda program, x: torch.compile(program, backend="eager", fullgraph=True),
    "aot_eager": lambda program, x: torch.compile(program, backend="aot_eager", fullgraph=True),
}


@pytest.mark.share(1)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("program", [dropout, part_of_normal, words])
def test_draws_trace_into_graphs_that_draw_anew(program, backend):
    torch._dynamo.reset()
    untraced()  # of onecard's own functions these alone are looked into
    x = torch.ones(4, 6)
    torch.manual_seed(0)
    expected = [program(x) for _ in range(3)]
    assert program is words or not torch.equal(expected[0], expected[1])
    graph = BACKENDS[backend](program, x)
    torch.manual_seed(0)
    for one in expected:
        assert torch.equal(graph(x), one)


def of_dist_tensors(operator):
    """A function of a plain tensor that computes on a DistTensor."""

    def program(x):
        twin = oc.from_local(x, oc.ProcessMesh([0], ["x"]), [oc.Shard(0)]).requires_grad_()
        (grad,) = torch.autograd.grad(operator(twin).square().sum(), twin)
        return grad.to_local()

    return program


@pytest.mark.share(1)
@pytest.mark.parametrize(
    "operator",
    [
        lambda x: F.dropout(x, 0.4),
        lambda x: F.dropout2d(x, 0.4),
        lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.4),
    ],
)
def test_forward_and_backward_of_dropout_trace(operator):
    x = torch.randn(2, 2, 4, 8)
    program = of_dist_tensors(operator)
    torch.manual_seed(0)
    expected = [program(x) for _ in range(2)]
    graph = make_fx(program)(x)
    torch.manual_seed(0)
    assert all(torch.equal(graph(x), one) for one in expected)


def test_what_cannot_be_traced_says_so():
    for program in (
        lambda x: x + permutation(SORTED + 1, new_key())[0],
        lambda x: variates("poisson", [x], new_key(), (4,), (0,)),
    ):
        with pytest.raises(DispatchError, match="outside the graph"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            make_fx(program)(torch.ones(4))


# ---- work


def counted(monkeypatch):
    """A list that gets the length of every array of counters and every run of the bijection."""
    from onecard.random import parts, permute, variates

    lengths = []

    def count(owner, name, length):
        real = getattr(owner, name)

        def spy(*args):
            lengths.append(length(*args))
            return real(*args)

        monkeypatch.setattr(owner, name, spy)

    for owner in (parts, variates):
        count(owner, "words_at", lambda counter, key: len(counter[0]))
    count(permute._Bijection, "_cipher", lambda self, x: len(x))
    return lengths


@pytest.mark.parametrize(
    "name",
    [
        "dropout",
        "dropout2d",
        "feature_alpha_dropout",
        "randn_like",
        "poisson",
        "_standard_gamma",
        "binomial",
        "normal_",
    ],
)
def test_a_rank_draws_for_its_part_only(name, monkeypatch):
    lengths = counted(monkeypatch)
    x = probabilities([64, 32, 8, 8])
    with oc.one_card_random():
        OPERATORS[name](x)
    whole = sum(lengths)
    layout = Layout.of(oc.ProcessMesh([[0, 1], [2, 3]], ["x", "y"]), 4, [oc.Shard(0), oc.Shard(1)])
    for rank in range(4):
        lengths.clear()
        with as_rank(rank):
            monkeypatch.setenv("WORLD_SIZE", "4")
            OPERATORS[name](wrap(x[layout.local_slices(x.shape)], Spec.like(layout, x, torch.device("cpu"))))
        assert 0 < sum(lengths) < whole / 4 * 1.1


def test_a_rank_shuffles_for_its_part_only(monkeypatch):
    lengths = counted(monkeypatch)
    permutation(100_000, Key(1, 2))
    whole = sum(lengths)
    lengths.clear()
    permutation(100_000, Key(1, 2), 30_000, 25_000)
    assert 0 < sum(lengths) < whole / 4 * 1.1
