"""Microbatches of steps that draw for each row: a summed loss stays a sum, whichever operator draws."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import onecard as oc
from onecard.errors import RecordingError

Draw = Callable[[Tensor], Tensor]

DRAWS: dict[str, Draw] = {
    "randn_like": torch.randn_like,
    "rand_like": torch.rand_like,
    "randint_like": lambda h: torch.randint_like(h, 5),
    "normal of means": lambda h: torch.normal(h.detach(), 1.0),
    "normal of both": lambda h: torch.normal(h.detach(), h.detach().exp()),
    "in place": lambda h: torch.empty_like(h).normal_(),
    "bernoulli": lambda h: torch.bernoulli(h.detach().sigmoid()),
    "poisson": lambda h: torch.poisson(h.detach().exp()),
    "binomial": lambda h: torch.binomial(torch.full_like(h, 5.0), h.detach().sigmoid()),
    "multinomial": lambda h: torch.multinomial(h.detach().softmax(1), 1).float(),
    "gamma": lambda h: torch.distributions.Gamma(h.exp(), 1.0, validate_args=False).rsample(),
    "dirichlet": lambda h: torch.distributions.Dirichlet(h.exp(), validate_args=False).rsample(),
    "categorical": lambda h: torch.distributions.Categorical(logits=h, validate_args=False).sample().float()[:, None],
    "rrelu": lambda h: F.rrelu(h, training=True),
    "gumbel": F.gumbel_softmax,
    "dropout": F.dropout,
}


def _losses(draw: Draw, k: int, mean: bool) -> list[float]:
    torch.manual_seed(0)
    encoder, decoder = nn.Linear(8, 4), nn.Linear(4, 8)
    optimizer = torch.optim.SGD([*encoder.parameters(), *decoder.parameters()], 1e-3)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        h = encoder(x)
        # What is drawn counts nothing: microbatches draw other numbers than their batch, and the same losses are wanted.
        loss = F.mse_loss(decoder(h + 0 * draw(h)), x, reduction="mean" if mean else "sum")
        loss.backward()
        optimizer.step()
        return loss.detach()

    run = oc.to_static(step, k_steps=k) if k > 1 else step
    x = torch.rand(16, 8, generator=torch.Generator().manual_seed(1))
    return [run(x).item() for _ in range(3)]


@pytest.mark.parametrize("name", DRAWS)
def test_a_sum_stays_a_sum(name: str) -> None:
    for mean in (False, True):
        assert _losses(DRAWS[name], 4, mean) == pytest.approx(_losses(DRAWS[name], 1, mean), rel=1e-5)


def test_draws_along_rows_are_refused() -> None:
    with pytest.raises(RecordingError, match=r"_softmax at .* takes rows of the batch together"):
        _losses(lambda h: h * torch.multinomial(h.detach()[:, 0].softmax(0), 1), 4, False)
