"""Fourier transforms: the transformed dims are whole, all others may be cut."""

from __future__ import annotations

from onecard.rules.call import Call
from onecard.rules.registry import row
from onecard.rules.rule import Form
from onecard.rules.table._dims import names, signature, with_whole


@row("_fft_r2c _fft_c2c _fft_c2r")
def _transform(call: Call) -> Form:
    rank = call.self.dim()
    dims = with_whole(names(rank), [d % rank for d in call.values["dim"]])
    free = " ".join(d for d in dims if d != "_")
    return Form(signature([dims], [dims]), linear="self", nonempty=free)
