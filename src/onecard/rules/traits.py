"""traits: what an operator is, whatever it is called with: a view, element by element, cheap to make again, ... Pure.

What torch tells by schema and tags is asked of torch. What it does not tell stands here, once, for all who ask.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from onecard._torch.names import OpOverload
from onecard.rules.call import schema_of

STATED = {
    # It may give its operand itself, or a view of it, although its schema does not say so.
    "may_view": """contiguous reshape to flatten resolve_conj resolve_neg expand_as view_as type_as squeeze movedim narrow
        unflatten split chunk _reshape_alias reshape_as matrix_H mT _unsafe_view unsafe_split unsafe_split_with_sizes unsafe_chunk
        einsum swapaxes swapdims moveaxis tensor_split dropout feature_dropout alpha_dropout""",
    "same": "detach alias resolve_conj resolve_neg lift_fresh",
    "same_if_alike": """view.default _unsafe_view expand permute slice narrow contiguous reshape squeeze.dim transpose.int
        as_strided flatten.using_ints""",
    "room": "empty new_empty empty_like empty_strided new_empty_strided",
    # Not new_full and its kin: with these a rank fills up what another one reads, and both do it at one time.
    "shaped": "empty_like zeros_like ones_like full_like",
    "copies": "cat reshape clone contiguous _to_copy copy_ stack flatten",
    "cheap": "native_layer_norm native_group_norm _softmax _log_softmax",
    "fresh": """mm addmm bmm baddbmm linear matmul convolution sum mean _softmax _log_softmax clone embedding native_layer_norm
        softmax cat _softmax_backward_data _log_softmax_backward_data native_layer_norm_backward nll_loss_backward gelu_backward
        threshold_backward""",
    "product": "mm addmm bmm baddbmm linear matmul convolution",
}
"""For each trait the operators: "view" (every overload) or "view.default". Composite operators have no row, and are here, too."""
_TOLD = {trait: frozenset(names.split()) for trait, names in STATED.items()}
STATISTICS = ("running_mean", "running_var")
_WRITTEN = dict.fromkeys(("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm"), STATISTICS)


@dataclass(frozen=True, slots=True)
class Traits:
    """What is known of an operator.

    Attributes:
        views: a result shares memory with an operand, as the schema says; ``may_view``: it may, though no schema says so.
        written: names of the arguments that it writes to, also those of which the schema does not say so; ``written_at``: with
            their places.
        effects: it draws random numbers, or raises by what it sees.
        reshapes: it changes the shape of a tensor in place.
        pointwise: element by element.
        same: it gives the tensor that it is given; ``same_if_alike``: if shape and strides stay.
        room: it makes memory with nothing in it; ``copies``: it computes nothing, and may make memory.
        shaped: it takes the shape alone of what it is given.
        cheap: it costs next to nothing to compute it again.
        fresh: it makes a tensor of its own for certain.
        product: it multiplies matrices.
        alone: what it makes shares no memory with anything, and it writes to nothing.

    Example:
        >>> traits_of(torch.ops.aten.relu.default).cheap, traits_of(torch.ops.aten.mm.default).cheap
        (True, False)
    """

    views: bool = False
    written: tuple[str, ...] = ()
    effects: bool = False
    reshapes: bool = False
    pointwise: bool = False
    may_view: bool = False
    same: bool = False
    same_if_alike: bool = False
    room: bool = False
    shaped: bool = False
    copies: bool = False
    cheap: bool = False
    fresh: bool = False
    product: bool = False
    alone: bool = False
    written_at: tuple[tuple[str, int], ...] = ()


NONE = Traits()


@cache
def traits_of(func: OpOverload) -> Traits:
    """The traits of an operator."""
    schema = schema_of(func)
    pointwise = torch.Tag.pointwise in func.tags
    names = {schema.name, f"{schema.name}.{schema.overload or 'default'}"}
    stated = {trait: bool(names & told) for trait, told in _TOLD.items()}
    for trait in ("cheap", "fresh"):
        stated[trait] |= pointwise
    written = _WRITTEN.get(schema.name, schema.written)
    return Traits(
        views=schema.views,
        written=written,
        written_at=tuple((name, i) for i, name in enumerate(schema.arguments) if name in written),
        alone=not (schema.views or stated["may_view"] or written or func._schema.is_mutable),
        effects=schema.effects,
        reshapes=torch.Tag.inplace_view in func.tags and schema.name != "detach_",
        pointwise=pointwise,
        **stated,
    )
