"""What several test files need of their process."""

import signal
from collections.abc import Iterator

import pytest


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Ctrl-C reaches the processes that the test starts, also where a script runs the tests in its background.

    A shell ignores SIGINT there (`make test &`, `nohup`), and what is ignored stays so in all children.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
