"""The random operators that the tests of onecard.random go through, and layouts at random. No tests in here."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st

import onecard as oc
from onecard.place.layout import Layout

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
    "dropout1d": lambda x: F.dropout1d(x, 0.3) if x.dim() in (2, 3) else x,
    "dropout2d": lambda x: F.dropout2d(x, 0.3) if x.dim() == 4 else x,
    "dropout2d in place": lambda x: F.dropout2d(x.clone(), 0.3, inplace=True) if x.dim() == 4 else x,
    "dropout3d": lambda x: F.dropout3d(x[..., None], 0.3) if x.dim() == 4 else x,
    "feature_alpha_dropout": lambda x: F.feature_alpha_dropout(x, 0.3, training=True) if x.dim() > 1 else x,
    "poisson": lambda x: torch.poisson(x * 25),
    "binomial": lambda x: torch.binomial((x * 90).floor(), x),
    "binomial broadcast": lambda x: torch.binomial((x * 90).floor(), x.flatten()[0]) if x.numel() == 1 else x,
    "_standard_gamma": lambda x: torch._standard_gamma(x * 2),
    "Gamma": lambda x: torch.distributions.Gamma(x * 2, x, validate_args=False).sample(),
    "Normal": lambda x: torch.distributions.Normal(x, x, validate_args=False).sample(),
    "Exponential": lambda x: torch.distributions.Exponential(x, validate_args=False).sample(),
}


def on_matrices(operator: Operator) -> Operator:
    """An operator that needs two dims, on what has two."""
    return lambda x: operator(x) if x.dim() == 2 and x.numel() else x


def initialise(name: str, *args: Any, **kwargs: Any) -> Operator:
    """A function of torch.nn.init on a new tensor like x."""
    return lambda x: getattr(torch.nn.init, name)(torch.empty_like(x), *args, **kwargs)


# Everything in torch.nn.init; a test compares with the module.
INITIALISERS: dict[str, Operator] = {
    "uniform_": initialise("uniform_", 2, 3),
    "normal_": initialise("normal_", 1, 2),
    "constant_": initialise("constant_", 0.3),
    "ones_": initialise("ones_"),
    "zeros_": initialise("zeros_"),
    "eye_": on_matrices(initialise("eye_")),
    "xavier_uniform_": on_matrices(initialise("xavier_uniform_")),
    "xavier_normal_": on_matrices(initialise("xavier_normal_", gain=2)),
    "kaiming_uniform_": on_matrices(initialise("kaiming_uniform_", mode="fan_out")),
    "kaiming_normal_": on_matrices(initialise("kaiming_normal_", nonlinearity="relu")),
}
TALKING_INITIALISERS: dict[str, Operator] = {
    "trunc_normal_": initialise("trunc_normal_"),
    "orthogonal_": on_matrices(initialise("orthogonal_")),
    "sparse_": on_matrices(initialise("sparse_", 0.5)),
    "dirac_": lambda x: initialise("dirac_")(x) if x.dim() in (3, 4) and x.numel() else x,
}
OPERATORS |= {f"init.{name}": operator for name, operator in INITIALISERS.items()}

# These send messages: they ask for a value, need rows whole, or have no rule.
TALKING: dict[str, Operator] = {
    "multinomial": lambda x: torch.multinomial(x, 1) if x.dim() < 3 and x.numel() else x,
    "multinomial without": lambda x: torch.multinomial(x, min(2, x.shape[-1])) if x.dim() < 3 and x.numel() else x,
    "multinomial with": lambda x: torch.multinomial(x, 5, replacement=True) if x.dim() < 3 and x.numel() else x,
    "_sample_dirichlet": lambda x: torch._sample_dirichlet(x * 3) if x.numel() else x,
    "Categorical": lambda x: torch.distributions.Categorical(x).sample() if x.dim() < 3 and x.numel() else x,
    "gumbel_softmax": lambda x: F.gumbel_softmax(x),
    "attention": lambda x: (
        F.scaled_dot_product_attention(x, x, x, dropout_p=0.4, is_causal=True) if x.dim() == 4 and x.numel() else x
    ),
    "attention's mask": lambda x: weights_of_attention(x) if x.dim() == 4 and x.numel() else x,
}
TALKING |= {f"init.{name}": operator for name, operator in TALKING_INITIALISERS.items()}


def weights_of_attention(x: Any) -> Any:
    """Dropped weights alone: with queries of zero all are alike, and values that are the identity give them back."""
    identity = torch.eye(x.shape[2]).expand(*x.shape[:2], -1, -1)
    return F.scaled_dot_product_attention(torch.zeros_like(x), torch.zeros_like(x), identity, dropout_p=0.4)


Maker = tuple[Callable[[list[int]], Any], Callable[[list[int], Any, Any], Any]]

# New tensors: on one card, and on a mesh.
MAKERS: dict[str, Maker] = {
    "rand": (torch.rand, oc.rand),
    "rand float64": (lambda s: torch.rand(s, dtype=torch.float64), lambda s, m, p: oc.rand(s, m, p, torch.float64)),
    "randn": (torch.randn, oc.randn),
    "randint": (lambda s: torch.randint(-3, 9, s), lambda s, m, p: oc.randint(-3, 9, s, m, p)),
    "randperm": (lambda s: torch.randperm(s[0]), lambda s, m, p: oc.randperm(s[0], m, flat(p))),
    "randperm long": (lambda s: torch.randperm(40_000 + s[0]), lambda s, m, p: oc.randperm(40_000 + s[0], m, flat(p))),
}


def flat(placements: Any) -> list[Any]:
    """Placements for a tensor of one dim."""
    return [oc.Shard(0) if p.is_shard() else p for p in placements]


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


def as_rank(rank: int) -> Any:
    """Be some rank of a world, for what needs no message."""
    return oc.pretend(64, rank)


def coordinates(mesh: oc.ProcessMesh) -> list[tuple[int, ...]]:
    return list(product(*map(range, mesh.shape)))
