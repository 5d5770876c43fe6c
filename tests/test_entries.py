"""The table of what operators mean that have no row: one entry for an operator, and what each kind does."""

import pytest
import torch

import onecard as oc
from onecard.tensor.dispatch.entries import Direct, builders, drawing, handler, program, whole, wholes
from onecard.tensor.dispatch.entry import programs

aten = torch.ops.aten


@pytest.mark.parametrize(("kind", "op"), [
    (handler, aten.equal.default), (handler, aten._foreach_add.List), (program, aten.equal.default), (whole, aten.linear.default),
])  # fmt: skip
def test_a_second_entry_is_refused(kind, op):
    before = builders.get(op), wholes.get(op)
    with pytest.raises(ValueError, match=f"a second entry for {op}"):
        kind(op)(lambda *args, **kwargs: None)
    assert (builders.get(op), wholes.get(op)) == before


@torch.library.custom_op("entries::shift", mutates_args=())
def shift(x: torch.Tensor, by: float) -> torch.Tensor:
    return x + by


def test_a_handler_runs_each_call_and_a_program_is_decided_once():
    op, decided = torch.ops.entries.shift.default, []
    x = oc.shard_tensor(torch.ones(3), oc.ProcessMesh([0], ["x"]), [oc.Shard(0)])
    try:
        program(op)(
            lambda func, args, kwargs: decided.append(args[1]) or Direct(func, lambda _, a, kw: a[0] + 2 * a[1])
        )
        assert [op(x, by).sum().item() for by in (1.0, 2.0, 3.0)] == [9, 15, 21]
        assert decided == [1.0]
    finally:
        del builders[op]
    programs.here.forget()
    try:
        handler(op)(lambda func, args, kwargs: args[0] * args[1])
        assert [op(x, by).sum().item() for by in (1.0, 2.0)] == [3, 6]
        assert op not in drawing
    finally:
        del builders[op]
        programs.here.forget()


def test_what_draws_serves_plain_tensors_too():
    assert set(drawing) <= set(builders)
    for name in ("rand.default", "randperm.default", "normal_.default", "bernoulli_.float", "poisson.default"):
        packet, _, overload = name.partition(".")
        assert getattr(getattr(aten, packet), overload) in drawing
