"""Families of operators that take alike long at a size: how a measured machine (``measure.py``) tells any operator's time."""

from __future__ import annotations

from collections.abc import Mapping
from math import log, prod
from typing import Any

from torch import fx

from onecard._torch.names import OpOverload
from onecard.machine.cost import Curve, read
from onecard.static.price import convolutions
from onecard.static.price.live import is_name, size_of
from onecard.static.step.nodes import kernel

_MEMBERS = {
    "softmax": "_softmax _safe_softmax logsumexp",
    "softmax backward": "_softmax_backward_data",
    "log softmax": "_log_softmax",
    "log softmax backward": "_log_softmax_backward_data",
    "copy": "clone copy_ cat stack _to_copy",
    "norm": "native_layer_norm native_batch_norm native_group_norm _fused_rms_norm _native_batch_norm_legit",
    "norm backward": "native_layer_norm_backward native_batch_norm_backward native_group_norm_backward",
    "gelu": "gelu silu tanh sigmoid exp log sin cos erf mish softplus pow",
    "gelu backward": "gelu_backward silu_backward tanh_backward",
    "sum": "sum mean amax amin all any norm linalg_vector_norm _foreach_norm argmax topk var var_mean",
    "fill": "zeros ones full new_full new_zeros zeros_like ones_like full_like fill_ zero_ arange nll_loss_backward",
    "adamw": "_fused_adamw_ _fused_adam_ _fused_sgd_",
    "embedding": "embedding gather index index_select nll_loss_forward",
    "embedding backward": "embedding_dense_backward scatter_ scatter_add index_put_ scatter",
}
FAMILY = {name: family for family, names in _MEMBERS.items() for name in names.split()}
"""Of operators by their names; others are "pointwise", or "in place" where they write to what is there."""

_PRODUCTS = dict.fromkeys(("mm", "bmm", "mv", "matmul", "_grouped_mm", "_scaled_mm", "_int_mm"), 0)
_PRODUCTS |= dict.fromkeys(("addmm", "addmm_", "baddbmm", "baddbmm_", "addmv", "_addmm_activation"), 1)
"""Products of two operands, and the number of the first of them."""

THIN = ("rows", "inner", "columns")
"""Which of a product's three sizes is the smallest: of the first factor's rows, what is summed over, the second's columns."""
SIZES = (1, 4, 16, 64, 256)
WIDTHS = (16, 64)
"""Of an attention's heads."""


def sent(kind: str, count: int) -> str:
    """The name of the curve for messages of a kind along lines of so many ranks."""
    return f"{kind} {count}"


def seconds(node: fx.Node, curves: Mapping[str, Curve], products: int, touched: int) -> float | None:
    """Seconds of a node by what was measured; None if nothing fits."""
    exact = curves.get(f"={signature(node)}")
    if exact is not None:
        return exact[0][1]
    if node.target is kernel:
        return read(curves["pointwise"], touched) if "pointwise" in curves else None
    if not isinstance(node.target, OpOverload):  # numbers
        return read(curves["number"], 1) if "number" in curves else None
    if is_name(node):
        return read(curves["name"], 1) if "name" in curves else None
    if products:
        return _product(node, curves, products)
    curve = curves.get(family(node))
    if curve is None:
        return None
    each = _of_each(node)
    return sum(read(curve, size) for size in each) if each else read(curve, touched)


def family(node: fx.Node) -> str:
    """The family of an operator that makes no product."""
    target: Any = node.target
    name = target._schema.name.removeprefix("aten::")
    found = FAMILY.get(name)
    if node.kwargs.get("approximate") == "tanh":
        return f"{found} tanh"
    if found == "sum" and _keeps_columns(node):
        return "sum of rows"
    if found is None and name.startswith("_foreach_"):
        return "for each"
    if found is None or (found == "copy" and all(map(_is_dense, node.all_input_nodes))):
        return "in place" if target._schema.is_mutable else "pointwise"
    return found


def _keeps_columns(node: fx.Node) -> bool:
    """Whether what is summed over are not the neighbours in memory."""
    if len(node.args) < 2 or not isinstance(node.args[0], fx.Node) or not isinstance(node.args[1], list | tuple):
        return False
    ndim, dims = len(_shape(node.args[0])), node.args[1]
    return bool(dims) and all(int(d) % ndim != ndim - 1 for d in dims)  # type: ignore[arg-type]


def _is_dense(node: fx.Node) -> bool:
    """Whether a tensor's elements lie in memory in their order."""
    if "tensor" not in node.meta:
        return True
    shape, stride, _, _ = node.meta["tensor"]
    return all(n == 1 or s == prod(shape[i + 1 :]) for i, (n, s) in enumerate(zip(shape, stride, strict=True)))


def _of_each(node: fx.Node) -> list[int]:
    """Of an operator that takes lists of tensors, bytes that it touches for each place of them; none of others."""
    lists: list[Any] = [
        a for a in node.args if isinstance(a, list | tuple) and len(a) > 1 and isinstance(a[0], fx.Node)
    ]
    name = node.target._schema.name  # type: ignore[union-attr]
    if not lists or ("_foreach_" not in name and "_fused_" not in name):
        return []
    if "_foreach_" in name:  # the first is written, too
        lists.append(lists[0])
    return [sum(size_of(a[k]) for a in lists if k < len(a)) for k in range(len(lists[0]))]


def _product(node: fx.Node, curves: Mapping[str, Curve], products: int) -> float | None:
    """Seconds of a product: by the curves of the two measured thin sizes around its own."""
    name = node.target._schema.name  # type: ignore[union-attr]
    if "attention" in name:
        back = "backward" in name
        *heads, _, width = _shape([a for a in node.args if isinstance(a, fx.Node)][int(back)])
        kind = "attention backward" if back else "attention"
        known = {n: curves[f"{kind} {n}"] for n in WIDTHS if f"{kind} {n}" in curves}
        each = _between(known, width, products // max(1, prod(heads)))
        return None if each is None else prod(heads) * each
    if (call := convolutions.call_of(node)) is not None:
        kind = "convolution backward" if call.wanted else "convolution"
        known = {n: curves[f"{kind} {n}"] for n in convolutions.CHANNELS if f"{kind} {n}" in curves}
        return _between(known, convolutions.channels(call), products)
    parts = sizes(node)
    if not parts:
        return None
    found = [_one(curves, *sizes) for sizes in parts]
    return None if None in found else sum(found)  # type: ignore[arg-type]


def _one(curves: Mapping[str, Curve], rows: int, inner: int, columns: int, batch: int) -> float | None:
    sizes = (rows, inner, columns)
    thin = min(sizes)
    kind = THIN[sizes.index(thin)]
    found = _between({n: curves[f"{kind} {n}"] for n in SIZES if f"{kind} {n}" in curves}, thin, prod(sizes))
    return None if found is None else batch * found


def _between(known: Mapping[int, Curve], at: int, total: int) -> float | None:
    """Seconds by the two curves, of those measured at some sizes, around a size."""
    if not known:
        return None
    low = max((n for n in known if n <= at), default=min(known))
    high = min((n for n in known if n >= at), default=max(known))
    one, other = _within(known[low], total), _within(known[high], total)
    part = 0.0 if low == high else log(at / low) / log(high / low)
    return float(one ** (1 - part) * other**part)


def _within(curve: Curve, total: int) -> float:
    """Seconds on a curve; below its first size in proportion, as its first product has all of its sizes alike."""
    return curve[0][1] * total / curve[0][0] if total < curve[0][0] else read(curve, total)


def sizes(node: fx.Node) -> list[tuple[int, int, int, int]]:
    """Rows, inner, columns and batch of each product of two matrices that an operator makes; none if it is something else."""
    name = node.target._schema.name.removeprefix("aten::")  # type: ignore[union-attr]
    if name == "linear":
        x, w = _shape(node.args[0]), _shape(node.args[1])
        return [(prod(x[:-1]), x[-1], w[0], 1)]
    if name == "linear_backward":
        x, _, w = (_shape(a) for a in node.args[:3])
        rows, wanted = prod(x[:-1]), node.args[3]
        made = [(rows, w[0], w[1], 1)] if wanted[0] else []  # type: ignore[index]
        return made + ([(w[0], rows, w[1], 1)] if wanted[1] else [])  # type: ignore[index]
    if name not in _PRODUCTS:
        return []
    first = _PRODUCTS[name]
    given = [_shape(a) for a in node.args[first : first + 2] if isinstance(a, fx.Node)]
    if len(given) < 2 or len(given[0]) < 2:
        return []
    a, b = given
    columns = b[-1] if len(b) > 1 else 1
    return [(a[-2], a[-1], columns, prod(a[:-2]))]


def signature(node: fx.Node) -> str:
    """What an operator's time depends on: its name, its operands' shapes, strides and dtypes, its other arguments."""

    def words(value: Any) -> Any:
        if isinstance(value, fx.Node):
            facts = value.meta.get("tensor")
            return f"{list(facts[0])}{list(facts[1])}{str(facts[2])[6:]}" if facts else "number"
        if isinstance(value, list | tuple):
            return [words(v) for v in value]
        return "number" if isinstance(value, float) else str(value)

    name = node.target if isinstance(node.target, OpOverload) else node.target.__name__  # type: ignore[union-attr]
    return f"{name}({', '.join(map(str, [*map(words, node.args), *map(words, node.kwargs.values())]))})"


def dtype_of(node: fx.Node) -> str:
    """The dtype in which an operator computes: of its first tensor, if nobody has said otherwise."""
    if "computes" in node.meta:
        return str(node.meta["computes"])
    facts = next((n.meta["tensor"] for n in (*node.all_input_nodes, node) if "tensor" in n.meta), None)
    return "" if facts is None else str(facts[2]).removeprefix("torch.")


def _shape(node: Any) -> tuple[int, ...]:
    return node.meta["tensor"][0]
