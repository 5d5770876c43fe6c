"""What several test files need of their process."""

import gc
import importlib
import signal
from collections.abc import Iterator

import amounts
import comparing
import cpu
import pytest
from hypothesis import settings

from onecard.static.guards import frozen
from onecard.testing import _run, multirank, preload, run_ranks

# A time-out ends what hangs, and nothing else: on a machine with much to do a second's work takes a minute.
for starts in (run_ranks, multirank):
    starts.__kwdefaults__["timeout"] = 240.0
_run.GRACE = 1.0  # in which others may have their say after a rank has failed

# Hypothesis draws the same examples at each run, but in a proof.
settings.register_profile("onecard", derandomize=not amounts.PROOF, database=None, deadline=None)
settings.load_profile("onecard")

# What takes seconds to import, and the tests whose ranks need it.
SLOW_IMPORTS = {
    "test_operator_sweep": {"test_operator_sweep.py"},  # torch's database of operators
    "transformers.modeling_utils": {
        "test_experts_checkpoint.py",
        "test_experts_habits.py",
        "test_experts_models.py",
        "test_models.py",
        "test_static_models.py",
    },
}


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(cpu, "cpu")


def pytest_report_header() -> str:
    if not amounts.PROOF:
        tests = "all tests, a share" if amounts.ALL else "a share of tests,"
        return f"amounts: {tests} of programs and cells, with fixed seeds; `make proof` has all, the deselected too"
    return f"amounts: all, for src {amounts.tree()}; ONECARD_SEEDS={amounts.base()} has these seeds again"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves what is marked ``proof`` to a proof; and of the cells of a test that is marked ``share(n)`` all but n."""
    if amounts.ALL:
        return
    tables: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("share"):
            tables.setdefault(item.nodeid.partition("[")[0], []).append(item)
    left = {item for item in items if item.get_closest_marker("proof")}
    for cells in tables.values():
        left |= {*cells} - {*amounts.share(cells, cells[0].get_closest_marker("share").args[0])}
    if left:
        config.hook.pytest_deselected(items=[*left])
        items[:] = [item for item in items if item not in left]


def pytest_collection_finish(session: pytest.Session) -> None:
    chosen = {item.path.name for item in session.items}
    preload(*[module for module, files in SLOW_IMPORTS.items() if files & chosen])
    importlib.import_module("torch._dynamo")  # the first step of an optimizer would


@pytest.fixture(scope="module", autouse=True)
def what_is_there_stays() -> None:
    """Modules and tests are a million objects; each collection, and each recording, would look at all of them again."""
    gc.collect()
    gc.freeze()
    frozen.settle()  # recordings need not look through it


@pytest.fixture(autouse=True)
def what_is_left_goes(what_is_there_stays: None) -> None:
    """What the test before has left in cycles: Python itself would wait for a hundred thousand objects more."""
    gc.collect()


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
