"""Forwards that write to a parameter of which each rank has a copy, from this rank's own rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from amounts import patience
from torch import Tensor, nn

from onecard import fleet
from onecard.errors import CommunicationError
from onecard.testing import run_ranks

WORDS = (
    r"forward at .*: the parameter (0\.)?weight is .*one parameter on ranks .* differs between ranks \(seen at call 1\)"
)


class Bounded(nn.Module):
    """An embedding of the program's own, which bounds the rows that it looks up."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(12, 8))

    def forward(self, x: Tensor) -> Tensor:
        return F.embedding(x, self.weight, max_norm=1.0)


class Shrunk(Bounded):
    """Another that writes, the same on all ranks."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.mul_(0.9)
        return F.embedding(x, self.weight)


def _begun(**degrees: int) -> int:
    torch.manual_seed(0)
    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = {f"{axis}_degree": n for axis, n in degrees.items()}
    strategy.pipeline_configs = {"accumulate_steps": 2, "micro_batch_size": 2}
    fleet.init(is_collective=True, strategy=strategy)
    return fleet.get_hybrid_communicate_group().data().index


def _words(call: Any) -> str:
    try:
        call()
    except (CommunicationError, fleet.FleetError) as error:
        return str(error)
    return ""


def _at(level: str) -> tuple[str, str, str, str]:
    """What a forward says whose rows are those of this rank; evaluated; one of the same rows on all; one that writes alike."""
    mine = _begun(dp=2)

    def said(kind: type[nn.Module], rows: Tensor, train: bool = True) -> str:
        net = kind()
        if level:
            fleet.group_sharded_parallel(net, torch.optim.SGD(net.parameters(), 0.1), level)
        else:
            net = fleet.distributed_model(net)
        return _words(lambda: net.train(train)(rows))

    own = torch.arange(4) + 4 * mine
    return (
        said(Bounded, own),
        said(Bounded, own, train=False),
        said(Bounded, torch.arange(4)),
        said(Shrunk, own),
    )


@pytest.mark.share(2)
@pytest.mark.parametrize("level", ["", "os", "os_g", "p_g_os"])
def test_what_a_forward_writes_is_compared_before_a_step_makes_it_one(level: str) -> None:
    one, other = run_ranks(_at, 2, level, timeout=patience(60.0))
    assert one[1:] == other[1:] == ("", "", "")
    said = [words for words in (one[0], other[0]) if words]
    assert len(said) == 1, said  # the rank that came second
    assert_matches(said[0])
    if level:
        assert "written to by the model's forward" in said[0]


def assert_matches(words: str) -> None:
    with pytest.raises(AssertionError, match=WORDS):
        raise AssertionError(words)


def _in_stages(sharded: bool) -> tuple[str, str]:
    mine = _begun(dp=2, pp=2)

    def made(first: Any, *given: Any, **named: Any) -> Any:
        layers = [fleet.LayerDesc(first, *given, **named), fleet.LayerDesc(nn.Linear, 8, 12)]
        return fleet.distributed_model(fleet.PipelineLayer(layers, loss_fn=F.cross_entropy))

    refused = _words(lambda: made(nn.Embedding, 12, 8, max_norm=1.0))
    net = made(Bounded)
    if sharded:
        fleet.group_sharded_parallel(net, torch.optim.SGD(net.parameters(), 0.1), "os")
    rows = torch.arange(4) + 4 * mine
    return refused, _words(lambda: net.forward_backward_pipeline([rows, rows]))


@pytest.mark.share(1)
@pytest.mark.parametrize("sharded", [False, True])
def test_all_ranks_of_a_pipeline_hear_of_a_bounded_embedding(sharded: bool) -> None:
    found = run_ranks(_in_stages, 4, sharded, timeout=patience(60.0))
    refused, *others = {words for words, _ in found}
    assert not others and "0 is an Embedding with max_norm=1.0" in refused, found
    said = [words for _, words in found if words]
    assert len(said) == 1, said
    assert_matches(said[0])
