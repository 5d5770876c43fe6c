"""What `make test` leaves to `make proof`: shares of lists, of tables, and of the cells of a test."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import amounts
import covering
import pytest
from conftest import pytest_collection_modifyitems


class Cell:
    def __init__(self, nodeid: str, **marks: int) -> None:
        self.nodeid = nodeid
        self.get_closest_marker = {mark: SimpleNamespace(args=[value]) for mark, value in marks.items()}.get


def chosen() -> tuple[list[str], list[str]]:
    """Of a file with all kinds: what runs, and what is said to be left out."""
    items: Any = [Cell("f.py::a"), Cell("f.py::long", proof=0), *(Cell(f"f.py::table[{i}]", share=2) for i in range(5))]
    items += [Cell(f"g.py::table[{i}]", share=9) for i in range(2)]
    told: list[Any] = []
    config: Any = SimpleNamespace(hook=SimpleNamespace(pytest_deselected=lambda items: told.extend(items)))
    pytest_collection_modifyitems(config, items)
    return [item.nodeid for item in items], sorted(item.nodeid for item in told)


def test_a_share_of_the_cells_and_nothing_that_is_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(amounts, "ALL", False)
    ran, left = chosen()
    assert ran == ["f.py::a", "f.py::table[0]", "f.py::table[4]", "g.py::table[0]", "g.py::table[1]"]
    assert left == ["f.py::long", "f.py::table[1]", "f.py::table[2]", "f.py::table[3]"]


def test_a_proof_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(amounts, "ALL", True)
    ran, left = chosen()
    assert len(ran) == 9 and not left


def test_shares_go_from_the_first_to_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(amounts, "PROOF", False)
    assert amounts.share(range(10), 4) == [0, 3, 6, 9] and amounts.share("ab", 5) == ["a", "b"]
    table = amounts.cells(range(4), range(3), every=3)
    assert {r for r, _ in table} == {*range(4)} and {c for _, c in table} == {*range(3)} and len(table) == 4


class Reached(covering.Tests):
    """Tests by hand: seconds and blocks of each cell."""

    def __init__(self, **cells: list[tuple[float, int]]) -> None:
        listed = {name: [f"{name}[{i}]" for i in range(len(rows))] for name, rows in cells.items()}
        self.cells = listed
        self.seconds = {f"{name}[{i}]": row[0] for name, rows in cells.items() for i, row in enumerate(rows)}
        self.bits = {f"{name}[{i}]": row[1] for name, rows in cells.items() for i, row in enumerate(rows)}


def test_what_is_kept_reaches_most_in_the_fewest_seconds():
    many = (1 << 40) - 1
    tests = Reached(
        cheap=[(0.1, 0b1)],
        dear=[(9.0, many)],
        twice=[(20.0, many)],  # what a cheaper one reaches
        table=[(1.0, 1 << 50), (1.0, 1 << 50), (1.0, 15 << 50)],  # the first and the last
        slow=[(4.0, 1 << 60)],  # one block in four seconds
        planted=[(1.5, 0b1)],
    )
    found, covered = covering.chosen(tests, 14.0)
    assert found == {"cheap": 1, "dear": 1, "twice": 0, "table": 2, "slow": 0, "planted": 1}
    assert covered == many | 15 << 50
    assert covering.chosen(tests, 18.0)[0]["slow"] == 1  # where there is time
