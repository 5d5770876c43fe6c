"""Addresses without their floor: those that users knew lead to the modules of today, and no name of theirs to a stranger."""

from __future__ import annotations

import importlib
from typing import NoReturn

import pytest

import onecard as oc
from onecard._addresses import KNOWN, ROOT, home_of, module_or

# Modules that lay in the package itself, with where they lie now. Those of another name: test_deprecated.py.
HAD = {
    "boxes": "place.boxes", "cost": "machine.cost", "layout": "place.layout", "mesh": "place.mesh", "parts": "place.parts",
    "reductions": "place.reductions",
    "resharding": "moves.resharding", "spawning": "launch.spawning", "transfer": "moves.transfer",
}  # fmt: skip


def test_modules_by_the_addresses_that_they_had() -> None:
    for had, lies in HAD.items():
        assert importlib.import_module(f"onecard.{had}") is importlib.import_module(f"onecard.{lies}"), had


def test_no_other_module_is_found_without_its_room() -> None:
    """``oc.scaling`` was a file of torch's private names, ``oc.utils`` fleet's."""
    rooms = {path.name for path in ROOT.iterdir() if path.is_dir()}
    places = {*KNOWN, "paddle"}  # whose addresses are Paddle's: ``paddle.distributed.sharding``
    for path in sorted(ROOT.rglob("*.py")):
        name = path.stem
        home = home_of(name)
        if home is not None and path.parent != ROOT and name not in rooms and not (ROOT / f"{name}.py").exists():
            assert home.split(".")[1] in places and not name.startswith("_"), home
    for name in ("utils", "scaling", "groups", "_agent", "world"):
        with pytest.raises(AttributeError):
            getattr(oc, name)
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module(f"onecard.{name}")
    assert home_of("fleet._nothing") is None


def test_a_package_gives_its_modules_by_name_and_no_private_one() -> None:
    def refuse(package: str, name: str) -> NoReturn:
        raise AttributeError(f"{package} has no {name}")

    look_up = module_or(refuse)
    assert look_up("onecard.fleet", "mappings").__name__ == "onecard.fleet.layers.mappings"
    for package, name in (
        ("onecard.fleet", "nothing"),
        ("onecard.testing", "_run"),
    ):  # there is onecard/testing/_run.py
        with pytest.raises(AttributeError, match=f"{package} has no {name}"):
            look_up(package, name)
