"""What kernels reach of a device's peaks: the laws of the model, its constants' sources, and five layers' published times."""

from __future__ import annotations

import ast
import json
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import onecard as oc
from onecard.errors import CostError, LayoutError
from onecard.machine.kernels import Kernels
from onecard.static.measure import on_gpu
from onecard.static.measure.probes import FAMILIES

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
import calibrate

A100, H100 = oc.Machine.preset("A100"), oc.Machine.preset("H100")
DEVICES = [("a100", A100), ("h100", H100)]
SIZES = (1, 7, 64, 96, 128, 1000, 2304, 4096, 9000, 51200)


def of(machine: oc.Machine) -> Kernels:
    assert machine.kernels is not None
    return machine.kernels


def product(machine: oc.Machine, *sizes: int, dtype: str = "bfloat16") -> float:
    return of(machine).product(machine.dtypes[dtype], machine.memory, *sizes, dtype=dtype)


@pytest.mark.parametrize(("name", "machine"), DEVICES)
def test_nothing_is_faster_than_the_data_sheet(name: str, machine: oc.Machine) -> None:
    kernels = of(machine)
    for rows in SIZES:
        for inner in SIZES:
            for columns in (1, 96, 3072):
                peak = max(2 * rows * inner * columns / machine.flops, 2 * rows * (inner + columns) / machine.memory)
                assert product(machine, rows, inner, columns) > peak
    for width in (16, 64, 96, 128, 512):
        for causal in (False, True):
            for backward in (False, True):
                assert kernels.attend(machine.flops, 1e12, width, 8192, causal, backward) > 2e12 / machine.flops
    for touched in (1, 10**6, 10**9):
        assert kernels.touch(machine.memory, touched, "softmax") > touched / machine.memory
    for kind in ("all_gather", "reduce_scatter", "all_to_all", "send"):
        assert kernels.line(kind, 3e11, 2.5e10, 8)[1] < 3e11 and kernels.line(kind, 3e11, 2.5e10, 16, 2)[1] < 2.5e10


@pytest.mark.parametrize(("name", "machine"), DEVICES)
def test_more_takes_longer(name: str, machine: oc.Machine) -> None:
    times = [product(machine, 256 * n, 4096, 4096) for n in (1, 2, 4, 16, 64)]
    assert times == sorted(times) and len(set(times)) > 3
    kernels = of(machine)
    assert kernels.touch(machine.memory, 10**9) > kernels.touch(machine.memory, 10**8) > kernels.touch(1e12, 1) > 0
    rates = [n / kernels.touch(machine.memory, n) for n in (10**4, 10**6, 10**8)]
    assert rates == sorted(rates)  # a large one reaches more
    assert kernels.touch(machine.memory, 0) == 0 and product(machine, 0, 8, 8) == 0
    speeds = [1 / kernels.attend(machine.flops, 1e12, 128, time) for time in (512, 2048, 16384)]
    assert speeds == sorted(speeds)


@pytest.mark.parametrize(("name", "machine"), DEVICES)
def test_waves_are_seen(name: str, machine: oc.Machine) -> None:
    """One tile beyond a full wave takes another wave; with one tile for all there is none to see."""
    kernels = replace(of(machine), tiles={"256x128": 1.0})
    tall = kernels.processors // 12

    def taken(rows: int, kernels: Kernels = kernels) -> float:
        return kernels.product(machine.flops, machine.memory, 256 * rows, 8192, 128 * 12)

    assert taken(tall + 1) / taken(tall) == pytest.approx(2, rel=0.05)
    fluid = replace(kernels, processors=1)
    assert taken(tall + 1, fluid) / taken(tall, fluid) == pytest.approx((tall + 1) / tall, rel=0.01)


def test_few_tiles_are_cut_along_the_inner_size() -> None:
    kernels = of(A100)
    whole = 2 * 256 * 128 * 65536 / (A100.flops / kernels.processors)
    assert product(A100, 256, 65536, 128) < 0.2 * whole


def test_published_best_products_and_attentions_come_out() -> None:
    """The shapes and rates that the data files name as their sources."""
    assert 2e-12 * 6912 * 16384 * 2048 / product(A100, 6912, 16384, 2048) == pytest.approx(267.9, rel=0.01)
    assert 2e-12 * 6144 * 17920 * 2816 / product(H100, 6144, 17920, 2816) == pytest.approx(792.1, rel=0.01)
    forward = {512: 309, 1024: 350, 2048: 362, 4096: 368, 16384: 370}  # FlashAttention-3's figure 5, heads of 128
    backward = {512: 214, 1024: 260, 2048: 291, 4096: 310, 16384: 322}
    for known, back in ((forward, False), (backward, True)):
        for time, rate in known.items():
            assert 2 / of(H100).attend(H100.flops, 1e12, 128, time, backward=back) == pytest.approx(rate, rel=0.06)


def test_every_constant_has_its_source() -> None:
    for name, machine in DEVICES:
        kernels = of(machine)
        told = {f.name for f in fields(Kernels)} - {"source", "made"}
        assert told == kernels.made.keys(), name
        assert machine.beside == kernels.beside and "data sheet" in machine.source
    with pytest.raises(CostError, match="there are no kernels of 'b200'"):
        Kernels.of("b200")
    assert oc.Machine.preset("A100") is A100 and oc.Machine.preset("A100", peak=True).kernels is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"flops": 0}, "Machine: flops has to be a number that is more than 0, not 0"),
        ({"bandwidth": -1.0}, "bandwidth has to be .* more than 0, not -1.0"),
        ({"memory": float("nan")}, "memory has to be .* not nan"),
        ({"dtypes": {"bfloat16": 0}}, r"dtypes\['bfloat16'\] has to be"),
        ({"capacity": -5}, "capacity has to be a number that is 0 or more, not -5"),
        ({"latency": "5us"}, "latency has to be .* not '5us'"),
    ],
)
def test_a_machine_that_cannot_be(given: dict[str, Any], message: str) -> None:
    with pytest.raises(CostError, match=message):
        oc.Machine(**given)


def test_a_machine_with_kernels_is_written_and_read() -> None:
    data = json.loads(json.dumps(oc.to_json(A100)))
    assert oc.from_json(data).kernels == A100.kernels and oc.from_json(oc.to_json(oc.Machine())).kernels is None
    for key, value in (("processors", 1.5), ("tiles", {}), ("memory", {"": "fast"}), ("start", -1)):
        with pytest.raises(LayoutError, match=rf"kernels\.{key}"):
            oc.from_json({**data, "kernels": {**data["kernels"], key: value}})
    with pytest.raises(LayoutError, match="kernels"):
        oc.from_json({**data, "kernels": {"processors": 1}})


def test_lines_over_hosts_share_adapters() -> None:
    near, one, eight = (A100.line("all_reduce", 16, hosts) for hosts in (1, 16, 2))
    assert near is not None and one is not None and eight is not None
    assert eight.bandwidth == pytest.approx(8 * one.bandwidth) and eight.bandwidth < near.bandwidth
    every = A100.line("all_to_all", 16, 2)
    assert every is not None and every.bandwidth == one.bandwidth
    mesh = oc.ProcessMesh(torch.arange(32).view(2, 16).tolist(), ["a", "b"])
    assert A100.link(mesh, 1, "all_reduce") == eight and A100.link(mesh, 0, "all_reduce") == A100.line(
        "all_reduce", 2, 2
    )


# -- operators -------------------------------------------------------------------------------------------------------------


def seconds(function: object, *tensors: torch.Tensor, machine: oc.Machine = A100) -> float:
    return oc.record(function)(*tensors).cost(machine).seconds  # type: ignore[arg-type]


def test_operators_take_what_their_kernels_take() -> None:
    with oc.pretend(1, fake=True):
        a, b = (torch.zeros(4096, 4096, dtype=torch.bfloat16) for _ in range(2))
        assert seconds(torch.mm, a, b) == product(A100, 4096, 4096, 4096)
        assert seconds(torch.relu, a) == of(A100).touch(A100.memory, 2 * a.nbytes)
        dropped = seconds(lambda x: torch.native_dropout(x, 0.5, True)[0], a)
        assert dropped == of(A100).touch(A100.memory, 2.5 * a.nbytes, "dropout")  # a mask of bytes, too
        assert seconds(lambda x: x.view(-1).new_empty(10**6), a) == 0  # makes room
        q = torch.zeros(2, 8, 2048, 128, dtype=torch.bfloat16)
        whole, causal = (
            seconds(lambda q, c=c: torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=c), q)
            for c in (False, True)
        )
        assert 0.5 < causal / whole < 0.6
        assert seconds(torch.mm, a, b, machine=oc.Machine.preset("A100", peak=True)) < seconds(torch.mm, a, b)


# -- layers ----------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def layers() -> list[oc.Recording]:
    return [calibrate.recorded(row["sequence_parallel"], row["recompute"]) for row in calibrate.LAYERS["rows"]]


def off(recordings: list[oc.Recording], machine: oc.Machine) -> float:
    return max(abs(a / b - 1) for a, b in calibrate.priced(recordings, machine))


@pytest.mark.proof
def test_five_layers_take_what_was_published(layers: list[oc.Recording]) -> None:
    assert off(layers, A100) < 0.01


@pytest.mark.proof
def test_the_fit_finds_the_constants_again(layers: list[oc.Recording]) -> None:
    constants = calibrate.fit(layers, oc.Machine.preset("A100"))
    kernels = of(A100)
    known = [kernels.memory[""], kernels.memory["dropout"], kernels.beside]
    assert constants == pytest.approx(known, rel=0.01)


def test_what_is_left_out_is_seen(layers: list[oc.Recording]) -> None:
    """The data sheet alone, memory at its peak, products without waves: each is off by more than the bound."""
    kernels = of(A100)
    assert off(layers, oc.Machine.preset("A100", peak=True)) > 0.2
    for changed in (
        replace(kernels, memory={"": 1.0}),
        replace(kernels, products={"": 1.0}),
        replace(kernels, messages={"": 1.0}),
    ):
        assert off(layers, replace(A100, kernels=changed)) > 0.03


# -- a GPU that is measured --------------------------------------------------------------------------------------------------


def test_a_measured_share_is_the_one_at_which_the_law_tells_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    known = replace(of(H100), products={"": 0.71})
    told = known.product(H100.dtypes["bfloat16"], H100.memory, 4096, 4096, 4096)
    monkeypatch.setattr(on_gpu, "seconds", lambda make, run, touched=0.0: told)
    assert on_gpu._product(H100, of(H100), 4096, "bfloat16") == pytest.approx(0.71, rel=1e-3)
    told = known.attend(H100.dtypes["bfloat16"], 2 * 16 * 8192**2 * 128.0, 128, 8192)
    share = on_gpu._attention(128, False) / H100.dtypes["bfloat16"]
    assert share == pytest.approx(of(H100).attention["128"], rel=2e-2)  # a kernel's start beside its work


def test_every_family_is_measured() -> None:
    """Each by an operator of its own; those of a CPU's curves that GPUs have no kernel for are left out."""
    kept = {*FAMILIES} - {"gelu tanh", "gelu backward tanh"}
    source = ast.parse(Path(on_gpu.__file__).read_text())
    named = {
        k.value for d in ast.walk(source) if isinstance(d, ast.Dict) for k in d.keys if isinstance(k, ast.Constant)
    }
    assert kept <= named, kept - named


def test_a_link_that_cannot_be() -> None:
    for given, message in (
        ((1e-5, 0.0), "bandwidth .* more than 0, not 0.0"),
        ((-1, 1e9), "latency .* 0 or more, not -1"),
    ):
        with pytest.raises(CostError, match=f"Link: {message}"):
            oc.Link(*given)
    assert oc.Link(0, 10).seconds(20) == 2.0
