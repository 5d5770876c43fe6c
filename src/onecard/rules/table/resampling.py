"""Pooling, interpolation and their like: each image and channel by itself, spatial dims whole."""

from __future__ import annotations

import re
from typing import Any

from torch import Tensor

from onecard.rules.call import Call
from onecard.rules.local import Local
from onecard.rules.registry import row
from onecard.rules.rule import Form

# ---- pooling and interpolation


def _spatial(name: str) -> int:
    """Spatial dims, from the operator's name: upsample_nearest2d has two."""
    found = re.search(r"(\d)d", name)
    return int(found.group(1)) if found else 2


def _each_channel(names: str, **options: Any) -> None:
    """All operands and results agree in batch and channels; the kernels refuse empty ones."""
    for name in names.split():
        dims = "..." + " _" * _spatial(name)
        row(name, f"{dims} * -> {dims} *", nonempty="...", **options)


_each_channel("""max_pool2d_with_indices max_pool3d_with_indices adaptive_max_pool2d adaptive_max_pool3d
    max_unpool2d max_unpool3d""")  # fmt: skip

_each_channel("""max_pool2d_with_indices_backward max_pool3d_with_indices_backward
    adaptive_max_pool2d_backward adaptive_max_pool3d_backward
    fractional_max_pool2d_backward""", linear="grad_output")  # fmt: skip


def _like_input(call: Call) -> list[Tensor]:
    return [call.self.new_empty(call.self.shape)]


_each_channel("fractional_max_pool3d_backward", linear="grad_output", results=_like_input)

_each_channel("""avg_pool2d avg_pool3d _adaptive_avg_pool2d _adaptive_avg_pool3d
    upsample_nearest1d upsample_nearest2d upsample_nearest3d
    _upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d
    upsample_linear1d upsample_bilinear2d upsample_bicubic2d upsample_trilinear3d
    _upsample_bilinear2d_aa _upsample_bicubic2d_aa _upsample_lanczos2d_aa""", linear="self")  # fmt: skip


def _shape_only_local(c: Local) -> None:
    # Of the forward operator's input only the shape is read, and it must be the shard's.
    func, shape = c.call.func, c.operand_shape(1)

    def run(grad: Tensor, x: Tensor, *rest: Any) -> Any:
        return func(grad, x.new_empty(shape), *rest)

    c.run = run


_each_channel(
    "avg_pool2d_backward avg_pool3d_backward _adaptive_avg_pool2d_backward _adaptive_avg_pool3d_backward",
    linear="grad_output",
    unread="self",
    local=_shape_only_local,
    positions="",
)


def _input_size_local(c: Local) -> None:
    c.set("input_size", list(c.result_shape()))


_each_channel("""upsample_nearest1d_backward upsample_nearest2d_backward upsample_nearest3d_backward
    _upsample_nearest_exact1d_backward _upsample_nearest_exact2d_backward _upsample_nearest_exact3d_backward
    upsample_linear1d_backward upsample_bilinear2d_backward upsample_bicubic2d_backward upsample_trilinear3d_backward
    _upsample_bilinear2d_aa_backward _upsample_bicubic2d_aa_backward _upsample_lanczos2d_aa_backward""",
    linear="grad_output", local=_input_size_local, positions="")  # fmt: skip


@row("fractional_max_pool2d fractional_max_pool3d")
def _fractional(call: Call) -> Form | None:
    spatial = " _" * _spatial(call.schema.name)
    if call.self.dim() != _spatial(call.schema.name) + 2:
        return None
    return Form(f"n c{spatial}, n c _ -> n c{spatial}, n c{spatial}", nonempty="n c")


# ---- pixels to channels and back


@row("pixel_shuffle")
def _pixel_shuffle(call: Call) -> Form:
    r = call.upscale_factor
    return Form("... (c r s) h w -> ... c (h r) (w s)", whole="r s", moves=True, sizes={"r": r, "s": r})


@row("pixel_unshuffle")
def _pixel_unshuffle(call: Call) -> Form:
    r = call.downscale_factor
    text = "... c (h r) (w s) -> ... (c r s) h w"
    return Form(text, nonempty="... c h w", whole="r s", moves=True, sizes={"r": r, "s": r})


row("channel_shuffle", "n _ ... -> n _ ...", moves=True)


def _window(call: Call) -> int:
    return call.kernel_size[0] * call.kernel_size[-1]


@row("im2col")
def _im2col(call: Call) -> Form:
    n = "n " * (call.self.dim() == 4)
    return Form(f"{n}c _ _ -> {n}(c k) _", whole="k", linear="self", sizes={"k": _window(call)}, nonempty="n c")


@row("col2im")
def _col2im(call: Call) -> Form:
    n = "n " * (call.self.dim() == 3)
    return Form(f"{n}(c k) _ -> {n}c _ _", whole="k", linear="self", sizes={"k": _window(call)}, nonempty="n c")


# ---- grids


# Each point of the grid is looked up by itself, so the result's spatial dims may be cut.
for _name, _image, _out in (("grid_sampler_2d", "n c _ _", "s t"), ("grid_sampler_3d", "n c _ _ _", "s t u")):
    row(_name, f"{_image}, n {_out} _ -> n c {_out}", linear="input", nonempty=f"n c {_out}")
    row(f"{_name}_backward", f"n c {_out}, {_image}, n {_out} _ -> {_image} @0 2, n {_out} _",
        linear="grad_output * input", nonempty=f"n c {_out}")  # fmt: skip


def _affine_grid_local(c: Local) -> None:
    c.set("size", [c.result_shape()[0], *c.call.size[1:]])


@row("affine_grid_generator", local=_affine_grid_local, positions="")
def _affine_grid(call: Call) -> Form:
    return Form(f"n _ _ -> n{' _' * (call.results[0].dim() - 1)}", linear="theta")
