"""The random operators that the tests of onecard.random go through, and layouts at random. No tests in here."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st

import onecard as oc
from onecard import mesh as mesh_module
from onecard.layout import Layout
from onecard.tensor.dispatch import programs

Operator = Callable[[Any], Any]

# Each takes a tensor of probabilities with at least one dim and returns a tensor.
OPERATORS: dict[str, Operator] = {
    "dropout": lambda x: F.dropout(x, 0.3),
    "dropout in place": lambda x: F.dropout(x.clone(), 0.6, inplace=True),
    "native_dropout": lambda x: torch.native_dropout(x, 0.3, True)[0],
    "native_dropout mask": lambda x: torch.native_dropout(x, 0.3, True)[1],
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.3, training=True),
    "rand_like": torch.rand_like,
    "rand_like float64": lambda x: torch.rand_like(x, dtype=torch.float64),
    "randn_like": torch.randn_like,
    "randn_like bfloat16": lambda x: torch.randn_like(x, dtype=torch.bfloat16),
    "randn_like float64": lambda x: torch.randn_like(x, dtype=torch.float64),
    "randint_like": lambda x: torch.randint_like(x, -5, 17, dtype=torch.int64),
    "randint_like wide": lambda x: torch.randint_like(x, 2**62, dtype=torch.int64),
    "bernoulli": torch.bernoulli,
    "bernoulli p": lambda x: torch.bernoulli(x, 0.4),
    "bernoulli_": lambda x: torch.empty_like(x).bernoulli_(0.7),
    "bernoulli_ tensor": lambda x: torch.empty_like(x).bernoulli_(x),
    "uniform_": lambda x: torch.empty_like(x).uniform_(-3, 2),
    "normal_": lambda x: torch.empty_like(x).normal_(1, 2),
    "normal_ complex": lambda x: torch.empty_like(x, dtype=torch.complex64).normal_(),
    "exponential_": lambda x: torch.empty_like(x).exponential_(0.5),
    "log_normal_": lambda x: torch.empty_like(x).log_normal_(0.0, 0.5),
    "cauchy_": lambda x: torch.empty_like(x).cauchy_(),
    "geometric_": lambda x: torch.empty_like(x).geometric_(0.2),
    "random_": lambda x: torch.empty_like(x, dtype=torch.int64).random_(),
    "random_ range": lambda x: torch.empty_like(x).random_(-2, 9),
    "normal tensors": lambda x: torch.normal(x, x),
    "normal tensor": lambda x: torch.normal(0.0, x),
    "rrelu": lambda x: F.rrelu(x - 0.5, training=True),
    "init uniform_": lambda x: torch.nn.init.uniform_(torch.empty_like(x), 2, 3),
}


def of_matrix(operator: Operator) -> Operator:
    """The same, as an operator that needs two dims."""
    return lambda x: operator(torch.empty_like(x)) if x.dim() == 2 and x.numel() else x


INITIALISERS = {
    name: of_matrix(getattr(torch.nn.init, name))
    for name in ("xavier_uniform_", "xavier_normal_", "kaiming_uniform_", "kaiming_normal_")
}
OPERATORS |= INITIALISERS

# These send messages: they ask for a value, need rows whole, or have no rule.
TALKING: dict[str, Operator] = {
    "trunc_normal_": lambda x: torch.nn.init.trunc_normal_(torch.empty_like(x)),
    "multinomial": lambda x: torch.multinomial(x, 1) if x.dim() < 3 and x.numel() else x,
    "multinomial without": lambda x: torch.multinomial(x, min(2, x.shape[-1])) if x.dim() < 3 and x.numel() else x,
    "multinomial with": lambda x: torch.multinomial(x, 5, replacement=True) if x.dim() < 3 and x.numel() else x,
    "feature_dropout": lambda x: F.dropout2d(x, 0.3) if x.dim() == 4 else x,
    "feature_alpha_dropout": lambda x: F.feature_alpha_dropout(x, 0.3, training=True) if x.dim() > 1 else x,
    "gumbel_softmax": lambda x: F.gumbel_softmax(x),
    "orthogonal_": of_matrix(torch.nn.init.orthogonal_),
    "attention": lambda x: (
        F.scaled_dot_product_attention(x, x, x, dropout_p=0.4, is_causal=True) if x.dim() == 4 and x.numel() else x
    ),
}

MESHES = [
    ([0], ["x"]),
    ([0, 1], ["x"]),
    ([2, 0, 1], ["x"]),
    ([0, 1, 2, 3], ["x"]),
    ([[0, 1], [2, 3]], ["x", "y"]),
    ([[3, 1], [0, 2]], ["x", "y"]),
    ([[0], [1]], ["x", "y"]),
]


@st.composite
def layouts(draw: Any, ranks: int | None = None, ones: bool = True) -> tuple[list[int], Layout]:
    """A whole shape and a layout of it on a mesh (of as many ranks, if given): several axes on a dim, any order.

    Rules do not cut dims of size one, so what arrives cut there may need a message: ``ones`` says whether there are any.
    """
    sizes = st.integers(0, 9).filter(lambda size: ones or size != 1)
    shape = draw(st.lists(sizes, min_size=1, max_size=4))
    meshes = [oc.ProcessMesh(*mesh) for mesh in MESHES]
    mesh = draw(st.sampled_from([m for m in meshes if ranks in (None, m.size)]))
    dims: list[list[int]] = [[] for _ in shape]
    for axis in draw(st.permutations(range(mesh.ndim))):
        where = draw(st.integers(-1, len(shape) - 1))
        if where >= 0:
            dims[where].append(axis)
    return shape, Layout.make(mesh, tuple(map(tuple, dims)))


def probabilities(shape: list[int]) -> torch.Tensor:
    """Values in (0, 1) that differ from place to place."""
    count = torch.Size(shape).numel()
    return ((torch.arange(count) * 0.37 + 0.21) % 1).reshape(shape)


@contextmanager
def as_rank(rank: int) -> Any:
    """Be some rank of a world, for what needs no message."""
    before = mesh_module.rank_source
    mesh_module.rank_source = lambda: rank
    programs.clear()  # decided for another rank
    try:
        yield
    finally:
        mesh_module.rank_source = before
        programs.clear()


def coordinates(mesh: oc.ProcessMesh) -> list[tuple[int, ...]]:
    return list(product(*map(range, mesh.shape)))
