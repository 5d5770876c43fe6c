"""What convolutions are priced at: multiply-adds forward and backward, curves by channels, the copies that their kernels make."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import onecard as oc
from onecard.static.measure import probes
from onecard.static.price import convolutions, families, price
from onecard.static.price.live import Live

# batch, channels in and out, side, kernel, stride, padding, groups, transposed
CASES = {
    "dense": (8, 32, 32, 16, 3, 1, 1, 1, False),
    "strided": (8, 32, 64, 16, 3, 2, 1, 1, False),
    "grouped": (8, 32, 32, 16, 3, 1, 1, 4, False),
    "grouped and strided": (8, 32, 32, 16, 3, 2, 1, 4, False),
    "each channel": (8, 32, 32, 16, 3, 1, 1, 32, False),
    "as a product": (8, 32, 64, 16, 1, 1, 0, 1, False),
    "a large kernel": (8, 32, 32, 16, 5, 1, 2, 1, False),
    "transposed": (8, 32, 16, 16, 4, 2, 1, 1, True),
    "images": (8, 3, 32, 16, 3, 1, 1, 1, False),
}


def recorded(case: Any, first: bool = False) -> tuple[Any, Any, tuple[Tensor, ...]]:
    """The nodes of a convolution and of its backward pass."""
    n, c, o, side, k, stride, padding, groups, transposed = case
    x = torch.randn(n, c, side, side, requires_grad=not first)
    w = torch.randn((c, o // groups, k, k) if transposed else (o, c // groups, k, k), requires_grad=True)
    call = F.conv_transpose2d if transposed else F.conv2d

    def step(x: Tensor) -> None:
        call(x, w, None, stride=stride, padding=padding, groups=groups).sum().backward()
        x.grad = w.grad = None

    found = [node for node in oc.record(step)(x).nodes() if convolutions.call_of(node) is not None]
    return found[0], found[1], (x, w)


@pytest.mark.parametrize("name", CASES)
def test_multiply_adds(name: str) -> None:
    """torch's own counter has them; its count of a grouped backward pass is that of one without groups."""
    forward, backward, (x, w) = recorded(CASES[name])
    *_, stride, padding, groups, transposed = CASES[name]
    call = F.conv_transpose2d if transposed else F.conv2d
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        call(x, w, None, stride=stride, padding=padding, groups=groups)
    once = price.work(forward).macs
    assert 2 * once == counter.get_total_flops() or groups > 1
    assert price.work(backward).macs == 2 * once
    if not transposed:
        out = forward.meta["tensor"][0]
        assert once == torch.Size(out).numel() * x.shape[1] // groups * w.shape[2] * w.shape[3]


def taken(run: Any) -> int:
    """The most bytes that a call takes at once, as torch's allocator tells them."""
    run()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as seen:
        held = run()
    events = [e for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    del held
    return most


@pytest.mark.filterwarnings("ignore:.*Profiler clears events:UserWarning")  # torch 2.11, of any profile
@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="its kernels are oneDNN's")
@pytest.mark.parametrize("name", CASES)
def test_memory_of_a_call(name: str) -> None:
    if name == "as a product" and "512" not in torch.backends.cpu.get_cpu_capability():
        pytest.skip("without AVX512 oneDNN runs it on a copy of its output, which is not priced")
    for node in recorded(CASES[name])[:2]:

        def tensor(n: Any) -> Tensor:
            shape, stride, dtype, _ = n.meta["tensor"]
            return torch.empty_strided(shape, stride, dtype=dtype).fill_(0.5)

        args = torch.fx.map_arg(node.args, tensor)
        with torch.no_grad():
            real = taken(lambda node=node, args=args: node.target(*args))
        alone = Live(one(node))
        priced = alone.peak - alone.inputs
        assert priced == pytest.approx(real, rel=0.25), (node.target, priced, real)
        kept = sum(x.nbytes for x in torch.utils._pytree.tree_leaves(node.target(*args)) if x is not None)
        if name in ("dense", "grouped", "strided", "grouped and strided") and "backward" in str(node.target):
            assert kept < 0.7 * real, "without the copies it would be priced too low"


def one(node: Any) -> torch.fx.Graph:
    """A graph of one node, whose results are all used."""
    graph = torch.fx.Graph()
    names = {}
    for n in node.all_input_nodes:
        names[n] = graph.placeholder(n.name)
        names[n].meta["tensor"] = n.meta["tensor"]
    made = graph.node_copy(node, names.__getitem__)
    results = []
    for user in node.users:
        if user.target is operator.getitem:
            got = graph.node_copy(user, lambda n: made)
            results.append(got)
    graph.output(tuple(results or [made]))
    return graph


def test_the_first_layer_has_no_gradient_of_its_images() -> None:
    forward, backward, _ = recorded(CASES["images"], first=True)
    call = convolutions.call_of(backward)
    assert call is not None and call.wanted == (False, True, False)
    assert price.work(backward).macs == price.work(forward).macs


def test_seconds_by_channels() -> None:
    """Curves of the channels around a call's own; few channels in tell more than many out."""
    curves: dict[str, Any] = {}
    for channels, speed in zip(convolutions.CHANNELS, (1e9, 1e9, 8e9, 64e9), strict=True):
        curves[f"convolution {channels}"] = ((1e4, 1e4 / speed), (1e9, 1e9 / speed))
        curves[f"convolution backward {channels}"] = ((1e4, 2e4 / speed), (1e9, 2e9 / speed))
    seconds = {}
    for name in ("dense", "each channel", "grouped", "images"):
        forward, backward, _ = recorded(CASES[name])
        for kind, node in (("forward", forward), ("backward", backward)):
            made = int(price.work(node).macs)
            seconds[name, kind] = families.seconds(node, curves, made, 0) / made  # type: ignore[operator]
    assert seconds["each channel", "forward"] == pytest.approx(1e-9)
    assert seconds["dense", "forward"] == pytest.approx(1 / (8e9 * 64e9) ** 0.5)  # 32 lies between 16 and 64
    assert seconds["dense", "backward"] == pytest.approx(2 * seconds["dense", "forward"])
    assert seconds["grouped", "forward"] > 2 * seconds["dense", "forward"]
    assert seconds["dense", "forward"] < seconds["images", "forward"] < seconds["each channel", "forward"]


def test_probes_are_of_their_size() -> None:
    for total in (2**20, 2**24, 2**27):
        for channels in convolutions.CHANNELS:
            sample = probes.convolution(channels, False, total)
            if sample is not None:
                assert 0.3 * total < sample.size <= total
                sample.run()
    assert probes.convolution(16, True, 2**24) is not None and probes.convolution(64, True, 2**12) is None
