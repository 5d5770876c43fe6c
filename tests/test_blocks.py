"""Rows exchanged in blocks: what comes is put where it belongs at once, as where a copy before and after does it."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from onecard.comm.issue import blocks
from onecard.comm.issue.blocks import Blocks
from onecard.comm.issue.ranks import of_ranks
from onecard.comm.shm.group import ShmGroup
from onecard.testing import run_ranks

CASES = [(2, 2, 5, 3), (3, 4, 4, 7), (2, 3, 900, 257), (3, 1, 6, 2), (2, 5, 1, 4)]
"""Ranks, blocks of each, the most rows of a block, width; 900 rows of 257 do not fit into a slot."""


def table(ranks: int, count: int, most: int) -> list[list[tuple[int, ...]]]:
    """Of each sender, for each receiver, the rows of its blocks; some have none."""
    draw = random.Random(ranks * 100 + count)
    return [
        [tuple(draw.choice((0, most, draw.randint(0, most))) for _ in range(count)) for _ in range(ranks)]
        for _ in range(ranks)
    ]


def given(ranks: int, count: int, most: int, width: int, by_rank: bool) -> tuple[Tensor, Blocks, Blocks]:
    rows, me = table(ranks, count, most), of_ranks().index
    leave = Blocks(tuple(rows[me]), by_rank)
    come = Blocks(tuple(rows[other][me] for other in range(ranks)), not by_rank)
    names = [
        (me, other, block, n) for other in range(ranks) for block in range(count) for n in range(rows[me][other][block])
    ]
    if not by_rank:
        names.sort(key=lambda name: (name[2], name[1]))
    named = torch.tensor(names, dtype=torch.float32).reshape(-1, 4)
    return named.repeat(1, width)[:, : max(width, 4)], leave, come


def both_ways(case: tuple[int, int, int, int]) -> None:
    group, me = of_ranks(), of_ranks().index
    for by_rank in (True, False):
        x, leave, come = given(*case, by_rank)
        for later in (False, True):
            got = blocks.exchange(x, group, come, leave, "rows", later).wait()
            names = got[:, :4].tolist()
            assert all(to == me for _, to, *_ in names)
            order = (lambda n: (n[2], n[0], n[3])) if by_rank else (lambda n: (n[0], n[2], n[3]))
            assert names == sorted(names, key=order), "rows lie where they belong"
            back = blocks.exchange(got, group, leave, come, "rows", later).wait()
            assert torch.equal(back, x), "the way back"
    ShmGroup.puts = False
    try:
        assert torch.equal(blocks.exchange(x, group, come, leave, "rows").wait(), got), "with copies"
    finally:
        ShmGroup.puts = True


@pytest.mark.share(1)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_rows_lie_where_they_belong(case: tuple[int, int, int, int]) -> None:
    run_ranks(both_ways, case[0], case)


def one_copy() -> int:
    """How often memory is moved for an exchange of 2 blocks each way: own rows once, others in and out."""
    from onecard.comm.shm import algorithms

    group, moved = of_ranks(), []
    x, leave, come = given(2, 2, 5, 4, True)
    move = algorithms._move
    algorithms._move = lambda to, at, size: (moved.append(size), move(to, at, size))[1]
    try:
        blocks.exchange(x, group, come, leave, "rows").wait()
    finally:
        algorithms._move = move
    own, others = leave.of_ranks()[group.index], leave.of_ranks()[1 - group.index]
    return sum(moved) // (4 * 4) - own - others - come.of_ranks()[1 - group.index]


def test_no_row_is_copied_twice() -> None:
    assert run_ranks(one_copy, 2) == [0, 0]


def wrong() -> str:
    x = torch.ones(4, 2)
    try:
        of_ranks().process_group.all_to_all_pieces(x, x, [[(0, 4)], [(6, 4)]], [[(0, 4)], [(4, 4)]])
    except ValueError as error:
        return str(error)
    return ""


def test_stretches_that_are_not_there_are_refused() -> None:
    assert all("do not lie in 8 elements" in said for said in run_ranks(wrong, 2))
