"""The table of reductions against its own words: what joins, what changes nothing, what equal values join to."""

import itertools

import pytest
import torch

from onecard.place.reductions import REDUCTION, REDUCTIONS, commute, join, power_of, reduction

NORMS = ("norm1.0", "norm2.0", "norm3.5", "norm-1.5")
DTYPES = (torch.float32, torch.float64, torch.int64, torch.int8, torch.bool)
BITWISE = ("band", "bor", "bxor")


def values(dtype, count=3):
    generator = torch.Generator().manual_seed(3)
    numbers = torch.randint(-4, 5, (count, 7), generator=generator)
    return numbers > 0 if dtype is torch.bool else numbers.to(dtype)


def cases():
    for op, dtype in itertools.product((*REDUCTIONS, *NORMS), DTYPES):
        if not (op in BITWISE and dtype.is_floating_point) and not (op in NORMS and not dtype.is_floating_point):
            yield op, dtype


@pytest.mark.parametrize(("op", "dtype"), list(cases()))
def test_what_the_table_says_is_true(op, dtype):
    found, given = reduction(op), values(dtype)
    if op in NORMS:
        given = given.abs() + 1
    joined = join(given.clone(), op)
    assert joined.dtype is dtype
    if found.identity is not None:
        nothing = torch.full((1, 7), found.identity(dtype), dtype=dtype)
        for place in range(4):
            among = torch.cat([given[:place], nothing, given[place:]])
            torch.testing.assert_close(join(among, op), joined)
    alike = join(torch.stack([given[0]] * 2), op)
    if found.idempotent:
        assert torch.equal(alike, given[0])
    elif dtype is not torch.bool:
        assert not torch.equal(alike, given[0]), "equal values join to another one, or it is idempotent"
    if found.exact:
        for order in itertools.permutations(range(3)):
            assert torch.equal(join(given[list(order)], op), joined)


def test_truths_join_to_truths():
    rows = torch.tensor([[True, True, False, False], [True, False, True, False], [True, False, False, False]])
    some, every, odd = [True, True, True, False], [True, False, False, False], [True, True, True, False]
    expected = {
        "sum": some,
        "max": some,
        "bor": some,
        "avg": every,
        "product": every,
        "min": every,
        "band": every,
        "bxor": odd,
    }
    for op, truths in expected.items():
        assert join(rows, op).tolist() == truths, op


def test_names():
    assert all(REDUCTION.fullmatch(op) for op in (*REDUCTIONS, *NORMS))
    assert not REDUCTION.fullmatch("mean")
    assert power_of("norm-1.5") == -1.5
    with pytest.raises(ValueError):
        reduction("norm")
    assert commute(["sum", "avg"]) and not commute(["sum", "max"])
