"""What torch's caching allocator reserves, on paper: beside a slow and plain model of it, and beside what is alive."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

import onecard as oc
from onecard.planning.allocator import MIB, CachingAllocator
from onecard.planning.reserved import pools

SIZES = oc.Transformer(layers=6, hidden=256, heads=4, vocab=4096, sequence=512)


class _Plain:
    """The same rules over lists of (begin, bytes, key) by segment; slow, and written from torch's description of itself."""

    def __init__(self) -> None:
        self.segments: list[tuple[bool, int, list[list]]] = []

    @property
    def reserved(self) -> int:
        return sum(size for _, size, _ in self.segments)

    def make(self, key: str, nbytes: int) -> None:
        wanted = (nbytes + 511) // 512 * 512
        small = wanted <= MIB
        free = [
            (size, number, at)
            for number, (kind, _, blocks) in enumerate(self.segments)
            if kind == small
            for at, (_, size, owner) in enumerate(blocks)
            if owner is None and size >= wanted
        ]
        if not free:
            size = (
                2 * MIB if small else 20 * MIB if wanted < 10 * MIB else (wanted + 2 * MIB - 1) // (2 * MIB) * 2 * MIB
            )
            self.segments.append((small, size, [[0, size, None]]))
            free = [(size, len(self.segments) - 1, 0)]
        size, number, at = min(free)
        blocks = self.segments[number][2]
        begin = blocks[at][0]
        if size - wanted >= (512 if small else MIB + 1):
            blocks[at : at + 1] = [[begin, wanted, key], [begin + wanted, size - wanted, None]]
        else:
            blocks[at][2] = key

    def drop(self, key: str) -> None:
        for _, _, blocks in self.segments:
            for block in blocks:
                if block[2] == key:
                    block[2] = None
            at = 0
            while at + 1 < len(blocks):
                if blocks[at][2] is None and blocks[at + 1][2] is None:
                    blocks[at][1] += blocks.pop(at + 1)[1]
                else:
                    at += 1


@pytest.mark.parametrize("seed", range(20))
def test_as_a_plain_model_of_it(seed: int) -> None:
    draw = random.Random(seed)
    fast, plain = CachingAllocator(), _Plain()
    alive: list[str] = []
    for number in range(300):
        if alive and draw.random() < 0.45:
            key = alive.pop(draw.randrange(len(alive)))
            fast.drop(key)
            plain.drop(key)
        else:
            alive.append(str(number))
            nbytes = draw.choice([draw.randrange(1, 2 ** draw.randrange(1, 26)), MIB * draw.randrange(1, 30)])
            fast.make(str(number), nbytes)
            plain.make(str(number), nbytes)
        assert fast.reserved == plain.reserved, number
    for key in alive:
        fast.drop(key)
    assert fast.alive == 0 < fast.most <= fast.reserved
    before = fast.reserved
    for number in range(before // (20 * MIB)):  # what is free has come together again: whole segments
        fast.make(("again", number), 9 * MIB)
    assert fast.reserved == before


@pytest.mark.parametrize(
    "plan",
    [
        oc.Plan(),
        oc.Plan(microbatches=4),
        oc.Plan(dp=4, zero=1),
        oc.Plan(dp=4, zero=2, microbatches=2),
        oc.Plan(dp=4, zero=3, microbatches=2),
        oc.Plan(dp=4, zero=3, overlap=False),
        oc.Plan(recompute="full", microbatch=4),
        oc.Plan(tp=2, sequence_parallel=True, recompute="selective"),
        oc.Plan(pp=3, microbatches=8),
        oc.Plan(pp=3, microbatches=5, schedule="FThenB"),
        oc.Plan(pp=2, microbatches=6, schedule="ZBH1"),
        oc.Plan(pp=2, virtual=2, microbatches=6, schedule="VPP", parameters="bfloat16", gradients="float32"),
    ],
    ids=lambda plan: f"pp{plan.pp} {plan.schedule} zero{plan.zero} m{plan.microbatches} tp{plan.tp}",
)
def test_what_is_alive_in_it_is_what_the_price_says(plan: oc.Plan) -> None:
    job = oc.price(SIZES, plan, oc.Machine.preset("H100"))
    for rank in job.ranks:
        made = pools(*rank.reserving.args)  # type: ignore[union-attr]
        most = sum(pool.most for pool in made)
        assert 0.9 < most / rank.peak < 1.1, (
            rank.memory
        )  # the price adds up each piece's own peak; a step's is at one moment
        assert most <= rank.reserved < 1.45 * most
        # When a step has ended, what lasts is there, and nothing else.
        assert {key[-1] for key in made[0]._made} <= {"parameter", "master", "first", "second", "frozen"}
        assert not made[1]._made and not made[2]._made


def test_on_a_cpu_nothing_is_reserved_beyond_what_is_alive() -> None:
    job = oc.price(SIZES, oc.Plan(), oc.Machine())
    assert job.reserved == job.peak and "reserves" not in str(job)
    assert "reserves" in str(oc.price(SIZES, oc.Plan(), oc.Machine.preset("H100")))


def test_more_than_there_is_is_told() -> None:
    """What is alive fits, and the gaps do not."""
    h100 = oc.Machine.preset("H100")
    job = oc.price(SIZES, oc.Plan(), h100)
    assert job.peak < job.reserved
    tight = oc.price(SIZES, oc.Plan(), replace(h100, capacity=(job.peak + job.reserved) // 2))
    assert tight.fits and "more than there is" in str(tight)
    assert "more than there is" not in str(job)
