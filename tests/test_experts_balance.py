"""How mixtures of transformers balance: counts of the whole batch, as one card has them, whatever lies where."""

from __future__ import annotations

import copy
import math
import warnings

import pytest
import torch
from test_experts_models import LAYOUTS, WORDS, batch_of, cut_experts, model_of
from torch import nn

import onecard as oc
from onecard.testing import run_ranks


def counted(model: nn.Module, batches: list[dict]) -> list[tuple[str, list[int], int]]:
    with oc.ExpertBalance(model) as balance:
        for batch in batches:
            model(**batch).loss.backward()
    return [(name, found.tokens, found.choices) for name, found in balance.layers().items()]


def both(name: str, how: str) -> tuple[object, object]:
    warnings.simplefilter("ignore", oc.GatheredOperatorWarning)
    shape, axes, placements = LAYOUTS[how]
    mesh = oc.ProcessMesh(torch.arange(math.prod(shape)).view(shape), axes)
    plain = model_of(name)
    twin = copy.deepcopy(plain)
    oc.shard_layer(twin, mesh, cut_experts)
    batches = [batch_of(0), batch_of(1)]
    cut = [{n: oc.shard_tensor(x, mesh, placements) for n, x in batch.items()} for batch in batches]
    return counted(plain, batches), counted(twin, cut)


@pytest.mark.proof
@pytest.mark.parametrize(
    ("name", "how", "ranks"),
    [("OLMoE", "ep=2", 2), ("DeepSeek-V3", "ep in dp", 4), ("Mixtral", "ep beside tp", 4), ("Llama-4", "ep=2", 2)],
)
def test_counts_are_those_of_one_card(name: str, how: str, ranks: int) -> None:
    for plain, cut in run_ranks(both, ranks, name, how, timeout=300):
        assert plain == cut
        assert all(sum(tokens) == choices > 0 for _, tokens, choices in plain), "nothing is dropped"


def test_experts_without_numbers_are_counted_by_their_router() -> None:
    model, batch = model_of("Llama-4"), batch_of(0)
    router = next(m for n, m in model.named_modules() if n.endswith("router"))
    said: list[torch.Tensor] = []
    router.register_forward_hook(lambda _, __, made: said.append((made[0] != 0).sum(0)))
    (_, tokens, choices), *_ = counted(model, [batch])
    assert tokens == said[0].tolist() and choices == batch["input_ids"].numel() * router.top_k


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_sums_are_asked_for_once_and_what_backward_runs_again_is_not_counted() -> None:
    model = model_of("OLMoE")
    wanted = counted(copy.deepcopy(model), [batch_of(0)])
    model.gradient_checkpointing_enable()
    assert counted(model, [batch_of(0)]) == wanted
    with oc.ExpertBalance(model) as balance:
        model(input_ids=torch.randint(WORDS, (2, 3)))
    assert len(balance.layers()) == 2 and balance.layers() == {}
    model(input_ids=torch.randint(WORDS, (2, 3)))
    assert balance.layers() == {}, "it no longer watches"


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.ones(3, 4, 4))

    def forward(self, x: torch.Tensor, *, chosen: torch.Tensor) -> torch.Tensor:
        return x


def test_what_is_no_experts_number_is_dropped() -> None:
    experts = Experts()
    with oc.ExpertBalance(experts) as balance:
        experts(torch.ones(4, 4), chosen=torch.tensor([[0, -1], [3, 2], [2, 1], [-1, -1]]))
    found = balance.layers()[""]
    assert (found.tokens, found.choices, found.dropped) == ([1, 1, 2], 8, 0.5)


def test_a_model_without_experts_is_refused() -> None:
    with pytest.raises(oc.errors.OnecardError, match="no module with a stack of experts"):
        oc.ExpertBalance(nn.Linear(2, 2))
