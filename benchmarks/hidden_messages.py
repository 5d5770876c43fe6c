"""How much of the gradients' messages is hidden behind backward for dp=2: a part of benchmarks/static.py.

From a trace of shared memory, over which all variants send, DDP too: when bytes are moved, on whichever thread, and when this
rank's program stands still for them. DDP waits in C++: its program stands still from its last gradient to the end of
``backward``; its own clock says how long its messages take and how much of that beside its backward.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

import onecard as oc
from onecard.comm.shm.work import ShmWork, WorkQueue
from static_large import Sizes, adamw, gpt, gpt_loss, seconds, tokens, training

Span = tuple[float, float]


@dataclass
class Trace:
    """Of one step on this rank.

    Attributes:
        moved: when the bytes of messages were moved.
        still: when the program waited for messages, or moved them itself.
    """

    moved: list[Span] = field(default_factory=list)
    still: list[Span] = field(default_factory=list)

    def figures(self) -> tuple[float, float]:
        """Seconds in which messages moved, and those of them in which the program stood still."""
        return length(self.moved), length(
            [both for a in joined(self.moved) for b in joined(self.still) if (both := common(a, b))]
        )


def joined(spans: list[Span]) -> list[Span]:
    """The same time as spans that do not overlap."""
    found: list[Span] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((start, end))
    return found


def common(a: Span, b: Span) -> Span | None:
    """What two spans share."""
    start, end = max(a[0], b[0]), min(a[1], b[1])
    return (start, end) if start < end else None


def length(spans: list[Span]) -> float:
    """Seconds of spans, what they share counted once."""
    return sum(end - start for start, end in joined(spans))


@contextmanager
def traced() -> Iterator[Trace]:
    """The trace of what runs inside."""
    found, main = Trace(), threading.get_ident()

    def noted(function: Callable[..., Any], spans: list[Span], always: bool) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                if always or threading.get_ident() == main:
                    spans.append((start, time.perf_counter()))

        return run

    kept = ShmWork.run, ShmWork.wait, WorkQueue.run_now
    ShmWork.run = noted(ShmWork.run, found.moved, True)  # type: ignore[method-assign]
    ShmWork.wait = noted(ShmWork.wait, found.still, False)  # type: ignore[method-assign]
    WorkQueue.run_now = noted(WorkQueue.run_now, found.still, False)  # type: ignore[method-assign]
    try:
        yield found
    finally:
        ShmWork.run, ShmWork.wait, WorkQueue.run_now = kept  # type: ignore[method-assign]


def hidden(sizes: Sizes) -> dict[str, tuple[float, ...]]:
    """Of each variant: seconds of messages, of those that stop the program, and of a step; the messages alone take "alone"."""
    from placements import shard_batch, shard_model

    torch.set_num_threads(1)
    mesh, batch = oc.ProcessMesh([0, 1], ["dp"]), tokens(sizes)
    given = shard_batch(batch, mesh)

    def step_of(overlap: bool) -> Any:
        model = shard_model(gpt(sizes), mesh)
        return training(model, oc.shard_optimizer(adamw(model.parameters()), overlap=overlap), gpt_loss)

    steps = {
        "as it is": step_of(False),
        "as it is, overlap=True": step_of(True),
        "replayed": oc.to_static(step_of(False)),
        "replayed, messages where they were": oc.to_static(step_of(False), without=["pieces", "overlap"]),
    }
    whole = torch.zeros(sum(p.numel() for p in gpt(sizes).parameters()))
    alone = seconds({"all-reduce": lambda: dist.all_reduce(whole)}, sizes.rounds, dist.barrier)["all-reduce"]
    found = {"alone": (alone, alone, alone)}
    for name, step in steps.items():
        for _ in range(3):  # not traced: what a trace adds to a list is none of the step's, which is recorded here
            step(*given)
        found[name] = _median([_one(lambda step=step: step(*given), None) for _ in range(sizes.rounds)])
    return found | _ddp(sizes)


def _ddp(sizes: Sizes) -> dict[str, tuple[float, ...]]:
    from torch.nn.parallel import DistributedDataParallel

    half = tuple(t.chunk(2)[oc.get_rank()].contiguous() for t in tokens(sizes))
    model = DistributedDataParallel(gpt(sizes))
    model._set_ddp_runtime_logging_sample_rate(1)
    optimizer = adamw(model.parameters())
    last = [0.0]

    def ready(_: Any) -> None:
        last[0] = time.perf_counter()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(ready)
    ended = [0.0]

    def step() -> None:
        loss = gpt_loss(model, *half)
        optimizer.zero_grad()
        loss.backward()
        ended[0] = time.perf_counter()
        optimizer.step()

    times, own = [], []
    for _ in range(3 + sizes.rounds):
        times.append(_one(step, lambda: (last[0], ended[0])))
        data = model._get_ddp_logging_data()
        own.append(tuple(data.get(f"backward_{key}_time", 0) / 1e9 for key in ("comm", "compute_comm_overlap")))
    took, beside = (statistics.median(t[i] for t in own[3:]) for i in (0, 1))
    step_took = _median(times[3:])
    return {"DDP": step_took, "DDP, by its own clock": (took, took - beside, step_took[2])}


def _one(step: Callable[[], Any], still: Callable[[], Span] | None) -> tuple[float, ...]:
    dist.barrier()
    with traced() as trace:
        start = time.perf_counter()
        step()
        took = time.perf_counter() - start
    trace.still += [] if still is None else [still()]
    return *trace.figures(), took


def _median(rounds: list[tuple[float, ...]]) -> tuple[float, ...]:
    return tuple(map(statistics.median, zip(*rounds, strict=True)))
