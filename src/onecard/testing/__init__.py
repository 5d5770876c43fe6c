"""Multi-rank tests: real processes, a real process group, and failures that name their cause.

    from onecard.testing import multirank

    @multirank(4)
    def test_sum():
        x = torch.full((2,), float(dist.get_rank()))
        dist.all_reduce(x)
        assert_close(x, torch.full((2,), 6.0))

The first failing rank shows its own traceback and ends the test on all ranks; a hang is cut off by a time-out that
shows where each rank is and which rank is missing from which collective.
"""

from onecard.testing._close import assert_close
from onecard.testing._multirank import multirank
from onecard.testing._proves import proves
from onecard.testing._report import RankError, RankTimeout
from onecard.testing._run import preload, run_ranks

__all__ = ["RankError", "RankTimeout", "assert_close", "multirank", "preload", "proves", "run_ranks"]
