"""DistributedBatchSampler: no sample lost or doubled, equally many batches on all ranks, resumable on any number of them."""

from __future__ import annotations

import random
from itertools import islice

import numpy as np
import pytest
from torch.utils.data import DataLoader

import onecard as oc
from onecard.errors import LayoutError


def samplers(n: int, samples: int, batch: int, **options: object) -> list[oc.DistributedBatchSampler]:
    return [oc.DistributedBatchSampler(range(samples), batch, n, rank, **options) for rank in range(n)]  # type: ignore[arg-type]


def steps_of(ranks: list[oc.DistributedBatchSampler], first: int | None = None) -> list[list[int]]:
    """The samples of each step, of all ranks in their order."""
    lengths = {len(s) for s in ranks}
    passes = [list(islice(s, first)) for s in ranks]
    assert {len(batches) for batches in passes} == ({first} if first is not None else lengths) and len(lengths) == 1
    assert all(batch for batches in passes for batch in batches)
    return [[i for batch in step for i in batch] for step in zip(*passes, strict=True)]


def test_every_sample_once_and_in_one_order():
    draw = random.Random(0)
    for _ in range(300):
        n, batch = draw.randint(1, 7), draw.randint(1, 5)
        samples, shuffle = draw.randint(n, 80), draw.random() < 0.5
        epoch = draw.randint(0, 9)
        ranks = samplers(n, samples, batch, shuffle=shuffle)
        for s in ranks:
            s.set_epoch(epoch)
        found = [i for step in steps_of(ranks) for i in step]
        order = np.arange(samples)
        if shuffle:
            np.random.RandomState(epoch).shuffle(order)
        assert found == order.tolist(), (n, batch, samples)
        if samples >= n * batch:
            dropped = steps_of(samplers(n, samples, batch, drop_last=True))
            assert [len(step) for step in dropped] == [n * batch] * (samples // (n * batch))


def test_resumed_on_other_ranks_with_other_batches():
    draw = random.Random(1)
    resumed = 0
    for _ in range(300):
        n, m, batch, other = (draw.randint(1, 6) for _ in range(4))
        samples, shuffle = draw.randint(12, 80), draw.random() < 0.5
        first = samplers(n, samples, batch, shuffle=shuffle)
        used = draw.randint(0, len(first[0]))
        ahead = draw.randint(used, len(first[0]))  # what workers have read ahead
        before = steps_of(first, ahead)[:used]
        states = [s.state_dict(used) for s in first]
        assert all(state == states[0] for state in states)
        second = samplers(m, samples, other, shuffle=shuffle)
        read = sum(map(len, before))
        if 0 < samples - read < m:
            with pytest.raises(LayoutError, match=f"{samples - read} samples are left of the pass, fewer than {m}"):
                second[0].load_state_dict(states[0])
            continue
        for s in second:
            s.load_state_dict(states[0])
        rest = steps_of(second)
        whole = steps_of(samplers(n, samples, batch, shuffle=shuffle))
        found = [i for step in [*before, *rest] for i in step]
        expected = [i for step in whole for i in step]
        if read == samples:  # the next pass
            assert [i for step in rest for i in step] != expected or not shuffle
        else:
            resumed += 1
            assert found == expected
        assert sum(map(len, steps_of(second))) == samples  # and the pass after it
    assert resumed > 100


def test_passes_differ_and_set_epoch_repeats_one():
    (sampler,) = samplers(1, 30, 4, shuffle=True)
    first, second = steps_of([sampler]), steps_of([sampler])
    assert first != second
    sampler.set_epoch(0)
    assert steps_of([sampler]) == first


def test_in_a_loader():
    sampler = oc.DistributedBatchSampler(list(range(10)), 2, 2, 1)
    loader = DataLoader([float(i) for i in range(10)], batch_sampler=sampler)  # type: ignore[arg-type]
    assert [batch.tolist() for batch in loader] == [[2, 3], [6, 7], [9]] and len(loader) == 3
    assert sampler.state_dict(2)["sample"] == 8


def test_words():
    with pytest.raises(LayoutError, match="there is no rank 2 among 2"):
        oc.DistributedBatchSampler(range(9), 2, 2, 2)
    with pytest.raises(LayoutError, match="batch_size is 0; want a whole number"):
        oc.DistributedBatchSampler(range(9), 0)
    with pytest.raises(LayoutError, match="3 samples are not enough for 4 ranks: some rank would have no batch"):
        oc.DistributedBatchSampler(range(3), 1, 4, 0)
    with pytest.raises(LayoutError, match="7 samples are not enough for 2 ranks with 4 each and drop_last=True"):
        oc.DistributedBatchSampler(range(7), 4, 2, 0, drop_last=True)
    state = oc.DistributedBatchSampler(range(9), 2).state_dict()
    with pytest.raises(LayoutError, match="the state is of 9 samples, shuffle=False; here are 8"):
        oc.DistributedBatchSampler(range(8), 2).load_state_dict(state)
