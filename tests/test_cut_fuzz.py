"""Random programs cut at random places, all ranks in one process; and planted faults, each of which they find."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from amounts import PROOF, amount, seeds

from onecard.pipeline.cut import places, weave

sys.path.insert(0, str(Path(__file__).parent))
from fuzz.cuts import tried


@pytest.fixture(autouse=True)
def quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # counts and norms of a microbatch are told, as they should be
        yield


def test_random_cuts_are_as_on_one_card():
    said = {seed: tried(seed) for seed in seeds(0, 4, 300)}
    assert not {seed: what for seed, what in said.items() if what.startswith("wrong")}
    assert sum(what == "right" for what in said.values()) >= amount(3, 270)


def _no_check(m: pytest.MonkeyPatch) -> None:
    m.setattr(places.NodeRanks, "check", lambda self: None)


def _first_holder_only(m: pytest.MonkeyPatch) -> None:
    old = places.NodeRanks._runs_on

    def runs_on(self: Any, node: Any, wanted: Any) -> Any:
        found = [*old(self, node, wanted)]
        return found[:1] if self._holders(node) and len(found) > 1 else found

    m.setattr(places.NodeRanks, "_runs_on", runs_on)


def _first_holder_unseen(m: pytest.MonkeyPatch) -> None:
    _first_holder_only(m)
    m.setattr(places.NodeRanks, "_check_written", lambda self, root, writers: None)


def _in_graph(change: Callable[[Any], bool]) -> Callable[[pytest.MonkeyPatch], None]:
    """A fault in the first rank's graph that has a place for it."""

    def plant(m: pytest.MonkeyPatch) -> None:
        old = weave.Weave.graph_of

        def graph_of(self: Any, rank: int) -> Any:
            graph = old(self, rank)
            done = getattr(self, "_planted", False) or any(change(node) for node in graph.nodes)
            self._planted = done
            return graph

        m.setattr(weave.Weave, "graph_of", graph_of)

    return plant


def _is(node: Any, name: str) -> bool:
    return name in str(node.target)


def _gradient_left_out(node: Any) -> bool:
    sums = _is(node, "aten.add.Tensor") and node.meta.get("part") and node.meta["phase"] == "backward"
    if not sums or not node.meta.get("microbatch") or not node.args[0].meta.get("part"):
        return False
    before = node.args[0]
    if before.meta.get("microbatch") != node.meta["microbatch"] - 1:
        return False
    node.replace_all_uses_with(before)
    return True


def _another_count(node: Any) -> bool:
    if _is(node, "aten.mul.Tensor") and isinstance(node.args[1], float) and 0 < node.args[1] <= 0.5:
        node.args = (node.args[0], node.args[1] * 0.9)
        return "microbatch" in node.meta
    return False


def _summed_twice(node: Any) -> bool:
    once = "microbatch" not in node.meta and node.meta.get("phase") == "backward"
    if once and _is(node, "aten.add.Tensor") and len(node.all_input_nodes) == 2:
        node.args = (node.args[0], node.args[0])
        return True
    return False


def _constant_elsewhere(node: Any) -> bool:
    if (_is(node, "aten.gt") or _is(node, "aten.arange")) and node.users and "part" not in node.meta:
        with node.graph.inserting_after(node):
            import torch

            nothing = node.graph.call_function(torch.zeros_like, (node,))
        node.replace_all_uses_with(nothing, delete_user_cb=lambda user: user is not nothing)
        return True
    return False


def _sent_early(node: Any) -> bool:
    """As soon as it is made, ahead of what is written to it."""
    made = node.args[0] if node.target is weave.staged.send else None
    if made is None or not any(_is(user, "aten.relu_.") for user in made.users):
        return False
    made.append(node)
    return True


def _other_message(node: Any) -> bool:
    if node.target is weave.staged.send:
        node.args = (node.args[0], node.args[1], node.args[2] ^ 1, *node.args[3:])
        return True
    return False


PLANTS = {
    "sent before its last write": (_in_graph(_sent_early), 30),
    "a chain of writes is cut": (_no_check, 20),
    "one of two copies of a weight is stepped": (_first_holder_unseen, 30),
    "a microbatch's gradient is left out": (_in_graph(_gradient_left_out), 10),
    "divided by another count": (_in_graph(_another_count), 10),
    "a shared weight's gradient of one stage twice": (_in_graph(_summed_twice), 30),
    "a constant on one stage only": (_in_graph(_constant_elsewhere), 30),
    "two messages exchanged": (_in_graph(_other_message), 10),
}
"""Each fault, and among how many programs it is found."""


def test_who_uses_what_others_write_is_refused(monkeypatch):
    _first_holder_only(monkeypatch)
    said = [tried(seed) for seed in range(4)]
    assert any("is used on places [0, 1] of the pipeline, and" in what for what in said), said
    assert not any(what.startswith("wrong") for what in said), said


@pytest.mark.proof
@pytest.mark.parametrize("name", PLANTS if PROOF else [n for n, (_, many) in PLANTS.items() if many <= 30])
def test_planted_faults_are_found(name, monkeypatch):
    plant, many = PLANTS[name]
    plant(monkeypatch)
    assert any(tried(seed).startswith("wrong") for seed in range(many)), name
