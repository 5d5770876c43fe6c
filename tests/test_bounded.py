"""What a long run with many shapes keeps: caches of a bounded size, and interned values for as long as somebody has them."""

from __future__ import annotations

import copy
import gc
import importlib
import pickle
import pkgutil
import weakref
from typing import Any

import pytest
import torch

import onecard as oc
from onecard.moves import resharding
from onecard.place import layout as layouts
from onecard.place.layout import Layout
from onecard.tensor import spec as specs
from onecard.tensor.dispatch.entry import programs
from onecard.tensor.dispatch.recent import Recent

# Caches without a bound, whose keys are finite in number.
FINITE = {
    "onecard.checkpoint.format.crc._libdeflate": "one",
    "onecard.rules.call.schema_of": "operators",
    "onecard.rules.traits.traits_of": "operators",
    "onecard.comm.shm.reduction.fold": "reductions and dtypes",
    "onecard.static.passes.inplace._form_of": "operators",
    "onecard.rules.verify.report.calls_of_samples": "one",
    "onecard.testing._run._context": "one",
}


def caches() -> dict[str, Any]:
    found = {}
    for info in pkgutil.walk_packages(oc.__path__, "onecard."):
        if not info.name.endswith("__main__"):
            for name, value in vars(importlib.import_module(info.name)).items():
                if hasattr(value, "cache_info") and value.__module__ == info.name:
                    found[f"{info.name}.{name}"] = value
    return found


def test_every_cache_is_bounded() -> None:
    found = caches()
    assert {name for name, value in found.items() if value.cache_parameters()["maxsize"] is None} == set(FINITE)
    assert found["onecard.moves.resharding.plan"].cache_parameters()["maxsize"] == resharding.LIMIT


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> Recent:
    """A world of three ranks whose programs are few."""
    monkeypatch.setattr(programs, "make", lambda: Recent(limit=16))
    with oc.pretend(3, 1):
        yield programs.here


def program(n: int) -> torch.Tensor:
    x = oc.shard_tensor(torch.ones(n, 4), oc.ProcessMesh([0, 1, 2], ["x"]), [oc.Shard(0)])
    return ((x * 2).exp() - x).sum(0)


def test_many_shapes_leave_few_entries(few: Recent) -> None:
    for n in range(1, 200):
        program(n)
        if n == 100:
            gc.collect()
            half = len(specs._interned.here), len(layouts._interned)
        assert len(few) <= 16 and len(few.older) <= 16
    gc.collect()
    # What the programs of the last shapes hold, and the bounded caches; nothing of the shapes before them.
    assert len(specs._interned.here) <= half[0] + 5 and len(layouts._interned) <= half[1] + 5
    assert half[0] < 16 * 2 * 4


def test_a_program_that_is_used_stays(few: Recent) -> None:
    x = oc.shard_tensor(torch.ones(5), oc.ProcessMesh([0, 1, 2], ["x"]), [oc.Shard(0)])
    x.exp()
    kept = next(iter(few.values()))
    for n in range(1, 100):
        program(n)
        x.exp()
        assert sum(found is kept for found in (*few.values(), *few.older.values())) == 1


def test_interned_at_different_times_is_one_as_long_as_somebody_has_it(few: Recent) -> None:
    mesh = oc.ProcessMesh([0, 1, 2], ["x"])
    x = oc.shard_tensor(torch.ones(7, 3), mesh, [oc.Shard(1)])
    layout, spec = x.layout, x._spec
    assert not hasattr(spec, "__dict__") and not hasattr(layout, "__dict__")
    for n in range(1, 80):
        program(n)
    gc.collect()
    again = oc.shard_tensor(torch.ones(7, 3), mesh, [oc.Shard(1)])
    assert again._spec is spec and again.layout is layout
    assert pickle.loads(pickle.dumps(layout)) is layout is copy.deepcopy(layout)
    assert (x + again)._spec is spec  # decided anew
    nobody_has = weakref.ref(Layout.of(mesh, 9, [oc.Shard(8)]))
    gc.collect()
    assert nobody_has() is None


def test_recent_forgets_what_was_not_used() -> None:
    recent = Recent(limit=3)
    for key in range(5):
        recent.keep(key, str(key))
    assert (recent.get(0), recent.recall(0), recent.get(0)) == (None, "0", "0")
    for key in range(10, 13):
        recent.keep(key, str(key))
    assert recent.recall(1) is None and recent.recall(0) == "0"
    recent.forget()
    assert recent.get(0) is None and recent.recall(0) is None
