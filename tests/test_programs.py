"""What a call becomes: values that are made once. A program does not change when it runs."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields

import pytest
import torch

import onecard as oc
from onecard.tensor.aliasing import strides
from onecard.tensor.dispatch.entry import program_for, programs
from onecard.tensor.dispatch.program import FirstRun, Program, Rewritten, in_order

aten = torch.ops.aten


def known(func: object) -> list[object]:
    """The programs that are kept of an operator."""
    return [program for key, program in programs.here.items() if key[0] is func]


def test_a_program_is_made_once_and_is_kept_after_its_first_run():
    with oc.pretend(world_size=2, rank=0):
        x = oc.shard_tensor(torch.ones(4, 3), oc.ProcessMesh([0, 1], ["x"]), [oc.Shard(0)])
        program = program_for(aten.exp.default, (x,), {})
        assert type(program) is Program and program.simple
        assert [type(p) for p in known(aten.exp.default)] == [FirstRun]
        before = [getattr(program, f.name) for f in fields(program)]
        torch.exp(x)
        assert known(aten.exp.default) == [program]  # the same value, not one like it
        torch.exp(x)
        assert all(a is getattr(program, f.name) for a, f in zip(before, fields(program), strict=True))
        with pytest.raises(FrozenInstanceError):
            program.simple = False  # type: ignore[misc]


def test_a_call_that_runs_as_other_operators_is_another_value():
    with oc.pretend(world_size=2, rank=0):
        x = oc.shard_tensor(torch.ones(4, 3), oc.ProcessMesh([0, 1], ["x"]), [oc.Shard(0)])
        out = oc.shard_tensor(torch.ones(4, 3), oc.ProcessMesh([0, 1], ["x"]), [oc.Shard(0)])
        torch.exp(x, out=out)
        assert [type(p) for p in known(aten.exp.out)] == [Rewritten]


def test_a_result_whose_memory_is_ordered_otherwise_is_put_in_order():
    with oc.pretend(world_size=2, rank=0):
        x = oc.shard_tensor(torch.ones(4, 3), oc.ProcessMesh([0, 1], ["x"]), [oc.Shard(0)])
        program = program_for(aten.exp.default, (x,), {})
        y = torch.exp(x)
        assert in_order(program, y) is program
        y._local = y._local.t().contiguous().t()  # as a kernel might make it
        assert not strides.placed(y._local, y._spec)
        other = in_order(program, y)
        assert strides.placed(y._local, y._spec) and other is not program
        assert strides.placed(other((x,), {})._local, y._spec)
