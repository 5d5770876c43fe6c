"""Traits of operators: those that passes had tables of, and those that torch tells."""

from __future__ import annotations

from typing import Any

import torch

from onecard.rules.traits import STATED, Traits, traits_of

aten = torch.ops.aten
RESHAPES = "resize_ set_ squeeze_ unsqueeze_ t_ transpose_ as_strided_ swapdims_ swapaxes_"


def overloads(name: str) -> list[Any]:
    base, _, one = name.partition(".")
    packet = getattr(aten, base)
    return [getattr(packet, overload) for overload in packet.overloads() if one in ("", overload)]


def test_every_stated_trait_is_one_of_an_operator() -> None:
    for trait, names in STATED.items():
        for name in names.split():
            found = overloads(name)
            assert found and all(getattr(traits_of(f), trait) for f in found), (trait, name)


def test_what_torch_tells() -> None:
    for name in RESHAPES.split():
        assert all(traits_of(f).reshapes for f in overloads(name)), name
    assert not traits_of(aten.detach_.default).reshapes
    relu = traits_of(aten.relu.default)
    assert relu.pointwise and relu.cheap and relu.fresh and not relu.product
    assert traits_of(aten.t.default).views and not traits_of(aten.t.default).may_view
    assert traits_of(aten.add_.Tensor).written == ("self",)
    assert traits_of(aten.native_batch_norm.default).written == ("running_mean", "running_var")
    assert traits_of(aten.bernoulli.default).effects
    assert not traits_of(aten.view.dtype).same_if_alike  # other bits under the same shape
    assert traits_of(aten.sin_.default) == Traits(
        written=("self",), written_at=(("self", 0),), pointwise=True, cheap=True, fresh=True
    )
