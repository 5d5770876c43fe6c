"""What decides a call is in the cache's key: calls that differ in one thing only, one after the other, in one process."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import onecard as oc
from onecard.moves import resharding
from onecard.place.layout import Layout
from onecard.testing import assert_close, multirank

ONE = oc.ProcessMesh([0], ["x"])
R, S, P = oc.Replicate(), oc.Shard, oc.Partial


def here(x: Tensor) -> Tensor:
    return oc.shard_tensor(x, ONE, [R])


WIDE = torch.arange(12.0).view(3, 4)
MASK = WIDE > 5
# Pairs of calls whose arguments are equal as Python counts (1 == True == 1.0), or but for one property.
PAIRS: dict[str, list[Callable[[Tensor], Tensor]]] = {
    "bool and int": [lambda x: x.gt(5) + 1, lambda x: x.gt(5) + True, lambda x: x.gt(5) + 1.0],
    "two bools": [lambda x: x.sum(1, keepdim=True), lambda x: x.sum(1, keepdim=False)],
    "a bool that sorts": [lambda x: x.sort(1, descending=True)[0], lambda x: x.sort(1, descending=False)[0]],
    "two bools that are always given": [torch.fft.rfft, torch.fft.fft],
    "dtype of a plain tensor": [
        lambda x, d=d: x.long() * torch.ones(3, 4, dtype=d) for d in (torch.int32, torch.float64)
    ],
    "bool and byte": [lambda x, d=d: x.gt(5) + torch.ones(3, 4).to(d) for d in (torch.bool, torch.uint8)],
    "stride of a plain tensor": [lambda x: WIDE + x[:, :1], lambda x: WIDE.t().contiguous().t() + x[:, :1]],
    "expanded plain tensor": [lambda x: torch.ones(3, 4) * x[:1], lambda x: torch.ones(1, 1).expand(3, 4) * x[:1]],
    "shape of a plain tensor": [lambda x: x[:1] + torch.ones(3, 1), lambda x: x[:1] + torch.ones(1, 1)],
    "dtype as an argument": [lambda x: x.to(torch.float64), lambda x: x.to(torch.float16)],
    "an int and a float power": [lambda x: x.long().pow(2), lambda x: x.long().pow(2.0)],
    "a float and a complex factor": [lambda x: x * 2.0, lambda x: x * 2j],
    "None and a number": [lambda x: x.clamp(5, None), lambda x: x.clamp(None, 5)],
}


@pytest.mark.parametrize("name", PAIRS)
def test_calls_that_differ_in_one_thing(name: str) -> None:
    for order in (1, -1):
        for call in PAIRS[name][::order]:
            expected, found = call(WIDE), call(here(WIDE))
            assert (found.dtype, found.shape, found.stride()) == (expected.dtype, expected.shape, expected.stride())
            assert_close(found.full_tensor(), expected)
            assert found.is_contiguous() == expected.is_contiguous()


def test_the_bytes_of_an_element_are_in_the_plans_key() -> None:
    mesh = oc.ProcessMesh([0, 1], ["x"])
    cut, whole = Layout.of(mesh, 2, [S(0)]), Layout.of(mesh, 2, [R])
    bytes_of = [resharding.plan((4, 8), size, cut, whole)[0].bytes for size in (4, 8, 2, 4)]
    assert bytes_of == [64, 128, 32, 64]
    seconds = [resharding.seconds((4096, 4096), size, cut, whole) for size in (4, 8)]
    assert seconds[1] > 1.5 * seconds[0]


def test_the_shape_is_in_the_plans_key() -> None:
    mesh = oc.ProcessMesh([0, 1], ["x"])
    cut, whole = Layout.of(mesh, 1, [S(0)]), Layout.of(mesh, 1, [R])
    assert [resharding.plan((n,), 4, cut, whole)[0].bytes for n in (2, 3, 8)] == [4, 8, 16]


def test_shapes_of_equal_shards_do_not_meet() -> None:
    """5 and 6 rows over 3 ranks are shards of 2 rows on rank 0, but not the same tensor."""
    mesh = oc.ProcessMesh([0, 1, 2], ["x"])
    with oc.pretend(3, 0):
        for n in (5, 6, 5):
            x = oc.shard_tensor(torch.ones(n, 2), mesh, [S(0)])
            assert (x.shape, x.to_local().shape, (x + x).shape) == ((n, 2), (2, 2), (n, 2))
            assert x.mean().shape == ()


@multirank(2)
def test_a_foreach_operator_that_reduces_its_own_second_operand() -> None:
    """x * x of a pending x: one of the two must be summed first, and as both are one tensor, so is the other."""
    mesh = oc.ProcessMesh([0, 1], ["x"])
    rank = torch.distributed.get_rank()
    parts = [torch.tensor([[1.0, 2.0], [3.0, 4.0]]) * (1 + r) for r in range(2)]
    total, other = parts[0] + parts[1], torch.tensor([[2.0, -1.0], [0.5, 3.0]])

    def pending() -> Tensor:
        return oc.from_local(parts[rank].clone(), mesh, [P()])

    def both(operator: Callable[..., list[Tensor]], second: Callable[[Tensor], Tensor]) -> None:
        x, y = pending(), oc.shard_tensor(other, mesh, [R])
        found = operator([x, y], [second(x), second(y)])
        for made, whole in zip(found, (total, other), strict=True):
            assert_close(made.full_tensor(), operator([whole], [second(whole)])[0])

    for operator in (torch._foreach_mul, torch._foreach_div, torch._foreach_add, torch._foreach_maximum):
        for second in (lambda t: t, lambda t: t.view(2, 2), lambda t: t.detach()):
            both(operator, second)
    x = pending()
    torch._foreach_mul_([x], [x])
    assert_close(x.full_tensor(), total * total)
    x = pending()
    assert_close(torch._foreach_addcmul([x], [x], [x])[0].full_tensor(), total + total * total)
    x = pending()
    assert_close((x * x).full_tensor(), total * total)
