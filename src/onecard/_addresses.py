"""Addresses without their floor: ``onecard.fleet.mappings`` is ``onecard.fleet.layers.mappings``, ``onecard.resharding`` is
``onecard.moves.resharding``. Users name modules by what they are about; in which subfolder one lies is the house's matter.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from onecard import _deprecated

ROOT = Path(__file__).parent
RENAMED = _deprecated.modules()
_PADDLES = {
    "fleet.auto": "paddle.auto_parallel",
    "auto_parallel": "paddle.auto_parallel",
    "sharding": "paddle.sharding",
}
"""Addresses that Paddle's programs import, and where they lie."""

KNOWN = ("place", "machine", "moves", "reports", "launch")
"""The rooms of which modules lay in the package itself, before it had rooms: of no other is one found without its room."""


class _Same(Loader):
    """Loads an address as the module that another address has: one module, so that there is one of each of its tables."""

    def __init__(self, home: str) -> None:
        self.home = home

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        sys.modules[module.__name__] = importlib.import_module(self.home)


class _Floors(MetaPathFinder):
    """Asked when nothing lies at an address itself; of a room whose folders are another's, too, asked first."""

    def __init__(self, first: bool) -> None:
        self.first = first

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        package, _, address = name.partition(".")
        room = address.partition(".")[0]
        if package != "onecard" or (room in RENAMED or room == "paddle") != self.first:
            return None
        if address in RENAMED:
            _deprecated.tell(RENAMED[address])
        found = home_of(address)
        return None if found in (None, name) else ModuleSpec(name, _Same(str(found)), is_package=True)


def home_of(address: str) -> str | None:
    """Where the module of an address lies: the only one of its name one floor below, in a room that may have got another name.

    Example:
        >>> home_of("fleet.mappings"), home_of("graph.recorder"), home_of("layout"), home_of("fleet.nothing")
        ('onecard.fleet.layers.mappings', 'onecard.static.capture.recorder', 'onecard.place.layout', None)
        >>> home_of("utils"), home_of("scaling")
        (None, None)
    """
    room, _, rest = address.partition(".")
    place = RENAMED[room].new.partition(".")[2] if room in RENAMED else room
    full = ".".join(filter(None, (place, rest)))
    full = _PADDLES.get(full, full)
    if room == "paddle" and rest and not _is_module(ROOT.joinpath(*full.split("."))):
        return home_of(rest)  # below ``onecard.paddle`` all of onecard is found, as below ``paddle.distributed``
    *above, last = full.split(".")
    folder = ROOT.joinpath(*above)
    if not folder.is_dir():
        return None
    if _is_module(folder / last):
        return f"onecard.{full}"
    floors = [c for c in folder.iterdir() if c.is_dir() and c.name[0] != "_"] if above else [folder / k for k in KNOWN]
    homes = [] if last.startswith("_") else [floor / last for floor in floors if _is_module(floor / last)]
    return ".".join(("onecard", *homes[0].relative_to(ROOT).parts)) if len(homes) == 1 else None


def module_or(refuse: Callable[[str, str], Any]) -> Callable[[str, str], Any]:
    """What a package's ``__getattr__`` asks: the module of that name on one of its floors, or the error for a name it has not.

    Example:
        >>> import onecard
        >>> onecard.fleet.mappings.__name__
        'onecard.fleet.layers.mappings'
    """

    def look_up(package: str, name: str) -> Any:
        address = f"{package}.{name}".partition(".")[2]
        if address in RENAMED:
            _deprecated.tell(RENAMED[address])
        home = None if name.startswith("_") else home_of(address)
        return importlib.import_module(home) if home else refuse(package, name)

    return look_up


def of_house(name: str, refuse: Callable[[str], NoReturn]) -> Any:
    """What ``onecard.paddle.NAME`` is that is not its own: onecard's."""
    house = sys.modules["onecard"]
    if name in vars(house) or name in house.__all__:
        return getattr(house, name)
    home = None if name.startswith("_") else home_of(name)
    return importlib.import_module(home) if home else refuse(name)


def of_paddle(name: str, refuse: Callable[[str], NoReturn]) -> Any:
    """What ``onecard.NAME`` is that is not its own: what Paddle's programs call."""
    found = {} if name.startswith("_") else vars(importlib.import_module("onecard.paddle"))
    return found[name] if name in found.get("__all__", ()) else refuse(name)


def _is_module(path: Path) -> bool:
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


sys.meta_path[:] = [_Floors(True), *sys.meta_path, _Floors(False)]
