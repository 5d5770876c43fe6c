"""Mistakes that change numbers without an error: the sparse check, which is always on, catches each within 8 steps."""

from __future__ import annotations

import re

import pytest
from silent_programs import LATE, run

from onecard.testing import RankError, run_ranks

BACKENDS = ("shm", "gloo")
WITHIN = 8
FROM_THE_START = ("distributed_sampler", "distributed_sampler_cut", "whole_as_part", "parts_as_copies")

MISTAKES = {
    "distributed_sampler": "the plain tensor 'input'",
    "distributed_sampler_cut": "shard_tensor",
    "skipped": "the plain tensor",
    "skipped_cut": "shard_tensor",
    "skipped_of_loader": "has read",
    "edited_parameter": "the parameter (parameter 0.weight)",
    "edited_gradient": "the parameter (parameter 0.weight)",
    "edited_summand": "wrote to a pending sum",
    "whole_as_part": "give equal values",
    "parts_as_copies": "promises equal copies",
    "other_operator": "all_reduce(sum)",
}


@pytest.mark.share(1)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_caught_within_eight_steps(mistake, backend):
    with pytest.raises(RankError) as caught:
        run_ranks(run, 2, mistake, 30, backend=backend)
    assert MISTAKES[mistake] in str(caught.value)
    begun = 0 if mistake in FROM_THE_START else LATE
    (done,) = map(int, re.findall(r"after (\d+) steps", str(caught.value))[:1])
    assert done <= begun + WITHIN
