"""onecard.random: known answers, the same numbers under every layout (in one process), and what the laws promise."""

from __future__ import annotations

import inspect
from math import prod

import pytest
import torch
from amounts import amount
from hypothesis import given, settings
from hypothesis import strategies as st
from random_operators import (
    INITIALISERS,
    MAKERS,
    OPERATORS,
    TALKING_INITIALISERS,
    as_rank,
    coordinates,
    layouts,
    probabilities,
)
from torch.fx.experimental.proxy_tensor import make_fx

import onecard as oc
from onecard.place.layout import Layout
from onecard.random import Key, fill, law, new_key
from onecard.random.philox import philox
from onecard.tensor.dist_tensor import wrap
from onecard.tensor.spec import Spec

# kat_vectors of Random123 (Salmon et al., 2011), philox4x32 with 10 rounds: counter, key, result.
KNOWN = [
    (("00000000",) * 4, ("00000000",) * 2, ("6627e8d5", "e169c58d", "bc57ac4c", "9b00dbd8")),
    (("ffffffff",) * 4, ("ffffffff",) * 2, ("408f276d", "41c83b0e", "a20bc7c6", "6d5451fd")),
    (
        ("243f6a88", "85a308d3", "13198a2e", "03707344"),
        ("a4093822", "299f31d0"),
        ("d16cfe09", "94fdcceb", "5001e420", "24126ea1"),
    ),
]


@pytest.mark.parametrize("counter, key, result", KNOWN)
def test_known_answers(counter, key, result):
    words = [int(word, 16) for word in counter]
    k = tuple(int(word, 16) for word in key)
    expected = [int(word, 16) for word in result]
    assert list(philox(tuple(words), k)) == expected
    tensors = [torch.tensor([word, 1]) for word in words]
    assert [int(word[0]) for word in philox(tuple(tensors), k)] == expected
    assert [int(word[0]) for word in philox(tuple(tensors), tuple(map(torch.tensor, k)))] == expected
    arrays = tuple(tensor.numpy() for tensor in tensors)
    assert [int(word[0]) for word in philox(arrays, k)] == expected
    # Counters that are not all alike: some words tensors, others ints, as ``fill`` calls it.
    assert [int(word[0]) for word in philox((tensors[0], *words[1:]), k)] == expected


LAWS = [
    ("uniform_", torch.float32, ()),
    ("uniform_", torch.float64, ()),
    ("normal_", torch.float32, (1.0, 2.0)),
    ("normal_", torch.float64, ()),
    ("normal_", torch.bfloat16, ()),
    ("normal_", torch.complex64, ()),
    ("bernoulli_", torch.bool, (0.3,)),
    ("random_", torch.int64, (0, 10)),
    ("random_", torch.int64, (-(2**63),)),
    ("exponential_", torch.float32, ()),
    ("log_normal_", torch.float32, ()),
]


@pytest.mark.parametrize("chunk", [2, 16, 2**15])
@settings(max_examples=amount(20, 500), deadline=None)
@given(data=st.data())
def test_a_part_has_the_values_of_the_whole(data, chunk):
    shape, layout = data.draw(layouts())
    name, dtype, params = data.draw(st.sampled_from(LAWS))
    key = Key(data.draw(st.integers(0, 2**32 - 1)), 7)
    whole = fill(torch.empty(shape, dtype=dtype), law(name, dtype, *params), key)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("onecard.random.parts.CHUNK", {"cpu": chunk})
        for place in coordinates(layout.mesh):
            part = torch.empty(layout.local_shape(shape, place), dtype=dtype)
            fill(part, law(name, dtype, *params), key, shape, layout.local_offset(shape, place))
            assert torch.equal(part, whole[layout.local_slices(shape, place)])


def check_in_turn(name, shape, layout, seed):
    """Each rank in turn, in this process: random operators send nothing."""
    x = probabilities(shape)
    torch.manual_seed(seed)
    with oc.one_card_random():
        whole = OPERATORS[name](x)
    after = torch.get_rng_state()
    for rank in layout.mesh.process_ids:
        with as_rank(rank):
            torch.manual_seed(seed)
            spec = Spec.like(layout, x, torch.device("cpu"))
            with pytest.MonkeyPatch.context() as patch, oc.no_implicit_communication():
                patch.setenv("WORLD_SIZE", "4")
                result = OPERATORS[name](wrap(x[layout.local_slices(shape)].clone(), spec))
            assert torch.equal(result._local, whole[result.layout.local_slices(whole.shape)]), name
            assert result.dtype == whole.dtype and result.layout.dims[: len(shape)] == layout.dims
            assert torch.equal(torch.get_rng_state(), after)  # generators stay in step


@settings(max_examples=amount(40, 1500), deadline=None)
@given(case=layouts(ones=False), name=st.sampled_from(sorted(OPERATORS)), seed=st.integers(0, 2**32))
def test_every_operator_under_every_layout(case, name, seed):
    check_in_turn(name, *case, seed)


@pytest.mark.share(1)
@pytest.mark.parametrize("name", sorted(OPERATORS))
def test_each_operator_is_seen_on_its_own(name):
    """Replicated, every dim cut into even and uneven parts, two axes on two dims and, in either order, on one."""
    line, square = oc.ProcessMesh([0, 1, 2], ["x"]), oc.ProcessMesh([[0, 1], [2, 3]], ["x", "y"])
    for shape in ([5, 7], [4, 3, 5, 2]):
        ndim = len(shape)
        one = [Layout.of(line, ndim, [p]) for p in (oc.Replicate(), *map(oc.Shard, range(ndim)))]
        two = [Layout.of(square, ndim, [oc.Shard(ndim - 1), oc.Shard(0)]), Layout.of(square, ndim, [oc.Shard(1)] * 2)]
        turned = Layout.make(square, ((), (1, 0), *[()] * (ndim - 2)))
        for layout in (*one, *two, turned):
            check_in_turn(name, shape, layout, 3)


@settings(max_examples=amount(15, 400), deadline=None)
@given(case=layouts(), name=st.sampled_from(sorted(MAKERS)), seed=st.integers(0, 2**32))
def test_new_tensors_under_every_layout(case, name, seed):
    shape, layout = case
    on_one_card, on_a_mesh = MAKERS[name]
    torch.manual_seed(seed)
    with oc.one_card_random():
        whole = on_one_card(shape)
    for rank in layout.mesh.process_ids:
        with as_rank(rank), pytest.MonkeyPatch.context() as patch:
            patch.setenv("WORLD_SIZE", "4")
            torch.manual_seed(seed)
            made = on_a_mesh(shape, layout.mesh, layout.placements)
            assert torch.equal(made._local, whole[made.layout.local_slices(whole.shape)]), name
            assert made.dtype == whole.dtype


def test_all_of_torch_nn_init_is_tested():
    """A function that a new torch brings fails here until it has a case."""
    from torch.nn import init

    public = {
        n for n, f in vars(init).items() if inspect.isfunction(f) and f.__module__ == init.__name__ and n[0] != "_"
    }
    tested = INITIALISERS.keys() | TALKING_INITIALISERS.keys()
    old = {name.removesuffix("_") for name in tested}  # deprecated names of the same
    assert public - old - {"calculate_gain"} == tested
    assert all(name in vars(init) for name in tested)


def test_strided_and_long_parts():
    whole = fill(torch.empty(6, 50), law("normal_", torch.float32), Key(3, 4))
    part = fill(torch.empty(50, 6).t(), law("normal_", torch.float32), Key(3, 4))
    assert torch.equal(part, whole)
    far = (2**40, 3)  # block numbers over 32 bits, and not those of the first rows
    a = fill(torch.empty(4, 3), law("uniform_", torch.float32), Key(3, 4), far, (2**39, 0))
    b = fill(torch.empty(2, 2), law("uniform_", torch.float32), Key(3, 4), far, (2**39 + 1, 1))
    assert torch.equal(a[1:3, 1:], b)
    assert not torch.equal(a, fill(torch.empty(4, 3), law("uniform_", torch.float32), Key(3, 4)))


def moments(values):
    x = values.double()
    return x.mean().item(), x.std().item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_ranges_and_moments(dtype):
    n = 200_000

    def draw(name, *params):
        return fill(torch.empty(n, dtype=dtype), law(name, dtype, *params), Key(5, 6))

    unit = draw("uniform_")
    assert unit.min() >= 0 and unit.max() < 1
    assert moments(unit) == pytest.approx((0.5, 12**-0.5), abs=5e-3)
    shifted = draw("uniform_", -2.0, 3.0)
    assert shifted.min() >= -2 and shifted.max() < 3
    assert moments(draw("normal_", 1.0, 2.0)) == pytest.approx((1, 2), abs=0.02)
    exponential = draw("exponential_", 2.0)
    assert exponential.min() > 0 and moments(exponential) == pytest.approx((0.5, 0.5), abs=0.01)
    assert moments(draw("log_normal_", 0.0, 0.5)) == pytest.approx((1.1331, 0.6039), abs=0.02)
    geometric = draw("geometric_", 0.25)
    assert geometric.min() == 1 and moments(geometric) == pytest.approx((4, 12**0.5), abs=0.1)
    assert draw("cauchy_", 1.0, 2.0).double().quantile(torch.tensor([0.25, 0.5, 0.75]).double()) == pytest.approx(
        [-1, 1, 3], abs=0.05
    )
    assert draw("bernoulli_", 0.3).double().mean().item() == pytest.approx(0.3, abs=5e-3)
    assert draw("bernoulli_", 1.0).min() == 1 and draw("bernoulli_", 0.0).max() == 0


@pytest.mark.parametrize("low, high", [(0, 7), (-3, 2**32 - 3), (0, 3 * 2**60), (-(2**63), 2**63 - 1), (5, 6)])
def test_integers_cover_their_range(low, high):
    values = fill(torch.empty(100_000, dtype=torch.int64), law("random_", torch.int64, low, high), Key(1, 9))
    assert low <= values.min() and values.max() < high
    where = (values.double() - low) / (high - low)
    counts = torch.histc(where, 7, 0, 1) if high - low >= 7 else values.bincount()[5:].double()
    expected = 100_000 / len(counts)
    assert ((counts - expected) ** 2 / expected).sum() < 30  # chi-square of 6 degrees: 30 at p = 4e-5


def test_exact_integers():
    """The multiplication in 32-bit pieces against Python's integers."""
    from onecard.random.laws import _scaled

    words = [torch.tensor([w]) for w in (0xFFFFFFFF, 0x80000001, 0x12345678, 0xFEDCBA98)]
    for used in (2, 4):
        number = sum(int(w) << 32 * i for i, w in enumerate(words[:used]))
        for count in (1, 10, 2**31 + 5, 2**32) + ((2**32 + 1, 3 * 2**61, 2**64 - 1, 2**64) if used == 4 else ()):
            assert int(_scaled(words[:used], count)) % 2**64 == number * count >> 32 * used


def test_draws_are_replayed_by_all_that_replays_torchs_generator():
    x = oc.shard_tensor(torch.zeros(3, 5), oc.ProcessMesh([0], ["x"]), [oc.Shard(0)])

    def draw(**kwargs):
        return x.normal_(**kwargs).full_tensor().clone()

    oc.manual_seed(4)
    first = draw()
    assert not torch.equal(first, draw())
    state = torch.get_rng_state()
    second = draw()
    torch.set_rng_state(state)
    assert torch.equal(second, draw())
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        assert torch.equal(first, draw())
    generator = torch.Generator().manual_seed(4)
    before = torch.get_rng_state()
    assert torch.equal(first, draw(generator=generator))
    assert torch.equal(before, torch.get_rng_state())


def test_plain_tensors_are_left_alone():
    torch.manual_seed(0)
    before = torch.randn(9)
    torch.manual_seed(0)
    with oc.one_card_random():
        inside = torch.randn(9)
    torch.manual_seed(0)
    assert torch.equal(before, torch.randn(9)) and not torch.equal(before, inside)


def test_wrong_parameters_are_torchs_own_errors():
    x = oc.shard_tensor(torch.ones(4), oc.ProcessMesh([0], ["x"]), [oc.Shard(0)])
    for wrong, message in (
        (lambda: x.bernoulli_(1.5), "p to be in"),
        (lambda: x.normal_(0, -1), "std"),
        (lambda: x.uniform_(2, 1), "uniform_"),
        (lambda: x.random_(3, 3), "random_"),
        (lambda: x.exponential_(-1.0), "exponential_"),
        (lambda: torch.multinomial(x, 5), "multinomial"),
        (lambda: torch.multinomial(x - 1, 1), "probability"),
        (lambda: torch.multinomial(x - 2, 1, True), "element < 0"),
    ):
        with pytest.raises(RuntimeError, match=message):
            wrong()


def test_multinomial_follows_the_probabilities():
    p = torch.tensor([0.0, 1.0, 2.0, 5.0])
    with oc.one_card_random():
        torch.manual_seed(0)
        for again in (True, False):
            rows = torch.multinomial(p.expand(20_000, 4), 3, replacement=again)
            assert (rows > 0).all()
            share = rows[:, 0].bincount(minlength=4) / 20_000
            assert torch.allclose(share, p / 8, atol=0.015)
            if not again:
                assert (rows.sort(-1).values == torch.tensor([1, 2, 3])).all()


def test_permutations_are_permutations_and_all_occur():
    with oc.one_card_random():
        torch.manual_seed(0)
        assert torch.equal(torch.randperm(1000).sort().values, torch.arange(1000))
        seen = [tuple(torch.randperm(3).tolist()) for _ in range(600)]
    counts = [seen.count(order) for order in set(seen)]
    assert len(counts) == 6 and sum((c - 100) ** 2 / 100 for c in counts) < 26  # chi-square of 5 degrees, p = 1e-4


def test_tensors_and_arrays_give_the_same(monkeypatch):
    """On the CPU NumPy does what tensor operations do elsewhere and in graphs."""
    by_array = fill(torch.empty(7, 1001), law("words", torch.int64), Key(2**31, 5))
    monkeypatch.setattr("onecard.random.parts.tracing", lambda: True)
    by_tensor = fill(torch.empty(7, 1001), law("words", torch.int64), Key(2**31, 5))
    assert torch.equal(by_array, by_tensor)


def test_it_traces_into_a_graph_that_draws_anew():
    def program(x):
        return fill(torch.empty_like(x), law("normal_", torch.float32), new_key())

    torch.manual_seed(0)
    eager = [program(torch.ones(4, 6)) for _ in range(2)]
    graph = make_fx(program)(torch.ones(4, 6))
    torch.manual_seed(0)
    assert [torch.equal(graph(torch.ones(4, 6)), e) for e in eager] == [True, True]


def chi_square(values, bins):
    counts = torch.histc(values.double(), bins, 0, 1)
    expected = prod(values.shape) / bins
    return ((counts - expected) ** 2 / expected).sum().item()


def correlation(a, b):
    """In standard deviations of the correlation of independent samples."""
    a, b = a.double() - a.double().mean(), b.double() - b.double().mean()
    return ((a * b).mean() / (a.std() * b.std())).item() * len(a) ** 0.5


def test_quality_of_a_million():
    """Uniformity; correlation of neighbours, of ranks and of calls. benchmarks/random_numbers.py does 10^8."""
    n = 2**20
    torch.manual_seed(1)
    one, two = (fill(torch.empty(n), law("uniform_", torch.float32), new_key()) for _ in range(2))
    assert abs(chi_square(one, 1001) - 1000) < 4 * 2000**0.5
    for lag in (1, 2, 3, 4, 64, n // 4, n // 2):  # the last ones: what several ranks hold
        assert abs(correlation(one[:-lag], one[lag:])) < 4
    assert abs(correlation(one, two)) < 4
    near = fill(torch.empty(n), law("uniform_", torch.float32), Key(1, 0))
    nearer = fill(torch.empty(n), law("uniform_", torch.float32), Key(2, 0))
    assert abs(correlation(near, nearer)) < 4


def test_a_layout_of_parts_covers_the_whole():
    """The check of the checks: parts drawn with a wrong offset do differ."""
    mesh = oc.ProcessMesh([0, 1], ["x"])
    layout = Layout.make(mesh, ((0,), ()))
    whole = fill(torch.empty(4, 4), law("normal_", torch.float32), Key(1, 1))
    wrong = fill(torch.empty(2, 4), law("normal_", torch.float32), Key(1, 1), (4, 4), (0, 0))
    assert not torch.equal(wrong, whole[layout.local_slices((4, 4), (1,))])


def test_writes_of_foreach_operators_count_in_one_card_random():
    w = torch.full((3,), 2.0, requires_grad=True)
    with oc.one_card_random():
        x = w * 1
        other = x.view(3, 1)
        torch._foreach_mul_([x[1:]], 3)
        other.square().sum().backward()
    assert torch.equal(w.grad, torch.tensor([4.0, 36.0, 36.0]))
