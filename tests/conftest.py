"""What several test files need of their process."""

import gc
import signal
from collections.abc import Iterator

import comparing
import pytest

from onecard.testing import preload

# What takes seconds to import, and the tests whose ranks need it.
SLOW_IMPORTS = {
    "test_operator_sweep": {"test_operator_sweep.py"},  # torch's database of operators
    "transformers.modeling_utils": {"test_models.py", "test_static_models.py"},
}


def pytest_collection_finish(session: pytest.Session) -> None:
    chosen = {item.path.name for item in session.items}
    preload(*[module for module, files in SLOW_IMPORTS.items() if files & chosen])
    gc.freeze()  # a million objects of modules and tests, which stay, and which each collection would look at


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Ctrl-C reaches the processes that the test starts, also where a script runs the tests in its background.

    A shell ignores SIGINT there (`make test &`, `nohup`), and what is ignored stays so in all children.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def replays_only() -> Iterator[None]:
    """No call of a recording is compared with its step."""
    with comparing.compared(comparing.never):
        yield
