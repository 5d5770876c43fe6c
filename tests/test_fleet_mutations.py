"""The silent bugs of this kind of code, planted one at a time: the programs of the other tests must catch each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import test_fleet_habits as habits
import test_fleet_layers as layers
import test_fleet_training as training
import test_fleet_whole as wholes
from torch import Tensor

from onecard import fleet
from onecard.fleet.gradients import hooks, merging
from onecard.fleet.gradients import sums as gradients
from onecard.fleet.grid import rng
from onecard.fleet.layers import context, linear, mappings, vocabulary
from onecard.fleet.zero import whole
from onecard.testing import RankError, run_ranks
from onecard.train import norms

Plant = tuple[Any, str, Any]


def fed_gathered_logits() -> Plant:
    """ParallelCrossEntropy of logits that were gathered: each rank takes them for its part of more classes."""
    forward = vocabulary.ParallelCrossEntropy.forward

    def wrong(self: Any, logits: Tensor, label: Tensor) -> Tensor:
        self.num_classes = None  # with it, they are refused before anything is computed
        return forward(self, mappings.gather_from(logits, self.group, -1), label)

    return vocabulary.ParallelCrossEntropy, "forward", wrong


def sums_twice() -> Plant:
    """The gradient of a replicated parameter under sequence parallelism is summed twice."""
    reduce = gradients._reduce

    def wrong(grads: list[Any], group: Any, op: str, *call: str) -> None:
        reduce(grads, group, op, *call)
        if op == "sum":
            reduce(grads, group, op, *call)

    return gradients, "_reduce", wrong


def counts_replicas() -> Plant:
    """The norm counts a parameter once for each rank that has it."""
    return norms, "counted", lambda shard, grad, lines: iter([grad])


def local_mean(losses: Tensor, valid: Tensor, group: Any = None) -> Tensor:
    """The mean over this rank's tokens, which are not as many as the others'."""
    return (losses * valid).sum() / valid.sum()


def equal_seeds() -> Plant:
    """The local random state begins from the same seed on every rank."""
    add = rng.RNGStatesTracker.add

    def wrong(self: Any, name: str, seed: int) -> None:
        add(self, name, 1025 if name == "local_seed" else seed)

    return rng.RNGStatesTracker, "add", wrong


def in_place_under_a_policy() -> Plant:
    """A result that a policy of recompute has kept is summed where it lies, and again when it is used."""
    return linear._torch, "keeps_results", lambda: False


def averages_what_is_cut() -> Plant:
    """Data parallelism averages parameters as if each rank held a copy, over the ranks that hold parts."""
    return fleet.HybridCommunicateGroup, "data", lambda self: self.group("mp")


def no_sum_of_shared_heads() -> Plant:
    """Key heads that several ranks hold keep the gradient of this rank's queries alone."""
    return gradients, "_sum_copies", lambda p: None


def unbalanced_mask() -> Plant:
    """Ring attention takes a rank's two pieces of the sequence for neighbours."""
    right = context._block
    return (
        context,
        "_block",
        lambda me, source, time, causal: (
            (slice(0, time), slice(0, time), False) if causal and source < me else right(me, source, time, causal)
        ),
    )


def no_sum_of_x() -> Plant:
    """A column-parallel layer leaves the gradient of its input as this rank's summand."""
    return linear.started, "all_reduce", lambda x, *args, **kwargs: linear.started.Handle.complete(x)


def nobody_sums() -> Plant:
    """A gradient that the program reads is what this rank's backward has left."""
    return hooks, "look", lambda p, state: None


def all_add_up() -> Plant:
    """Backward adds to what was summed over a group, and both are summed."""
    return gradients, "adds_up", lambda p: True


def parts_for_all() -> Plant:
    """Optimizers that look at whole matrices get parts."""
    return whole, "_looked_at", lambda *_: []


def nobody_waits() -> Plant:
    """Scalers and clipping do their work at each call, though the optimizer steps at some."""
    return merging, "waits", lambda optimizer: False


MIX: tuple[Any, ...] = ({"dp": 2, "mp": 2}, True, 2, 1, 0.3)
PLANTS: dict[str, tuple[Callable[[], Plant], int, Callable[..., Any], tuple[Any, ...]]] = {
    "vocabulary-parallel loss fed gathered logits": (
        fed_gathered_logits,
        2,
        training.train,
        ({"mp": 2}, True, 2, 1, 0.3),
    ),
    "doubled gradient of a replicated parameter": (sums_twice, 2, training.train, ({"mp": 2}, True, 2, 1, 0.3)),
    "missing sum for a shared embedding": (
        lambda: (fleet, "sum_over", lambda parameter, group: parameter),
        2,
        training.two_stages,
        (),
    ),
    "clip norm that counts replicas twice": (counts_replicas, 4, training.train, MIX),
    "mean over a local token count": (
        lambda: (fleet, "token_mean", local_mean),
        2,
        training.train,
        ({"dp": 2}, False, 2, 1, 9.0),
    ),
    "sum in place under a policy": (in_place_under_a_policy, 2, training.recomputed, ()),
    "an average over ranks that hold parts": (averages_what_is_cut, 2, training.train, ({"mp": 2}, False, 2, 1, 9.0)),
    "no sum for shared key heads": (no_sum_of_shared_heads, 2, layers.layers, ((8,),)),
    "a mask of the wrong piece": (unbalanced_mask, 2, training.attention_in_parts, ()),
    "a look at one rank's gradient": (nobody_sums, 2, habits.seen, (habits.assigned, {"dp": 2}, False)),
    "a sum of what was summed": (all_add_up, 2, habits.seen, (habits.own_clipping, {"dp": 1, "mp": 2}, True)),
    "parts for Muon": (parts_for_all, 2, wholes.trained, ("Muon",)),
    "a scaler that does not wait": (nobody_waits, 2, training.merging, ()),
    "no sum for the gradient of x": (no_sum_of_x, 2, layers.layers, ((8,),)),
}


def with_plant(name: str) -> None:
    make, _, program, arguments = PLANTS[name]
    owner, attribute, wrong = make()
    with patch.object(owner, attribute, wrong):
        program(*arguments)


@pytest.mark.share(1)
@pytest.mark.parametrize("name", PLANTS)
def test_a_planted_bug_is_caught(name: str) -> None:
    with pytest.raises(RankError, match="AssertionError"):
        run_ranks(with_plant, PLANTS[name][1], name)


def masks_of_equal_seeds() -> dict[str, Tensor]:
    owner, attribute, wrong = equal_seeds()
    with patch.object(owner, attribute, wrong):
        return training.random_states()


def test_equal_seeds_of_local_dropout_are_caught() -> None:
    with pytest.raises(AssertionError, match="of the mask is equal on both ranks"):
        training.check_masks(*run_ranks(masks_of_equal_seeds, 2))
