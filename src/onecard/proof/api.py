"""prove: a program on all ranks against the same program on one card, in one process."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext, suppress
from typing import Any

import torch
from torch import Tensor

from onecard import recorded
from onecard.comm.agree import sparse_check
from onecard.comm.base.state import unrecorded
from onecard.comm.joined.hub import Arrived, Told
from onecard.comm.joined.worlds import together
from onecard.comm.world.world import alone
from onecard.errors import ProofError
from onecard.proof.partners import partners
from onecard.proof.report import Proof, first_divergence
from onecard.proof.results import compare, frozen
from onecard.proof.script import instead
from onecard.proof.watch import Enough, Watch, Watched, hooks
from onecard.proof.wide import Wide, copied, float64

EXACT = 1e-7
"""How far values may be apart in float64, relatively to the largest number of a tensor."""
OWN = 2e-4
"""The same in float32, where a program cannot run in float64."""

Program = Callable[..., Any]


def prove(
    program: Program,
    *args: Any,
    world: int = 2,
    against: Program | None = None,
    steps: int = 0,
    rounding: bool = True,
) -> Proof:
    """Run a program on all ranks of a world, in this process, and hold every value against one card's.

    Each rank runs ``program(*args)``, as its process would: ``onecard.get_rank()``, process groups of torch.distributed,
    marks, ``onecard.fleet``, pipelines, ``DTensor`` and functional collectives work. Messages carry values; nothing is sent.
    Both run in float64, where rounding cannot be taken for a fault, and once more in their own precision, to tell how much
    rounding there is.

    Args:
        program: makes its model and trains; may return numbers and tensors, such as its losses.
        args: each rank gets a copy.
        world: how many ranks.
        against: what one card runs; by default the same program in a world of one, whose meshes have one rank.
        steps: of the first optimizer, after which each run ends; 0: it runs to its end.
        rounding: whether to run in the program's own precision, too.

    Returns:
        The proof: true if parameters, gradients, buffers and what is returned are one card's. Else it names the first value
        that is not: its operator, line, module, layout, ranks, the messages before it, and what would explain it.

    Raises:
        ProofError: the program fails on a rank, or on one card.

    Source: the sparse check and ``onecard.rules.verify``, for a whole program; TTrace (Megatron's bugs found by comparing
    values with a reference).

    Example:
        >>> import torch, onecard as oc
        >>> def program():
        ...     torch.manual_seed(0)
        ...     mesh = oc.ProcessMesh(range(oc.get_world_size()), ["tp"])
        ...     model = torch.nn.Linear(4, 8, bias=False)
        ...     model.weight = oc.shard_tensor(model.weight, mesh, [oc.Shard(0)])
        ...     loss = model(torch.randn(2, 4)).square().mean()
        ...     loss.backward()
        ...     return loss
        >>> bool(prove(program, world=4))
        True
    """
    if not isinstance(world, int) or world < 1:
        raise ProofError(f"prove(..., world={world!r}): want the number of ranks: world=8")
    began = time.perf_counter()
    exact, why = True, ""
    try:
        one, ranks = _both(program, against, args, world, steps, in_float64=True)
    except ProofError as fault:
        own = _both(program, against, args, world, steps, in_float64=False)  # its own faults are raised here
        exact, why = False, f"not in float64: {str(fault.__cause__ or fault).splitlines()[0]}"
        one, ranks = own
    bound = EXACT if exact else OWN
    results, unpaired = compare(ranks, one, bound)
    wrong = tuple(result for result in results if result.off > bound)
    found = partners(ranks, one, bound)
    first = first_divergence(found, ranks, wrong) if wrong else None
    apart = None
    if exact and rounding and not wrong:
        apart = _rounding(program, against, args, world, steps)
    return Proof(
        world, not wrong, exact, len(found.nodes), found.share, tuple(results), wrong, first, apart, tuple(unpaired),
        time.perf_counter() - began, why,
    )  # fmt: skip


def _both(
    program: Program, against: Program | None, args: Any, world: int, steps: int, in_float64: bool, keep: bool = True
) -> tuple[Watched, list[Watched]]:
    with ExitStack() as stack:
        stack.enter_context(float64() if in_float64 else nullcontext())
        stack.enter_context(hooks())
        (one,) = watched(against or program, args, 1, steps, in_float64, keep, read_alone=against is None)
        return one, watched(program, args, world, steps, in_float64, keep)


def _rounding(program: Program, against: Program | None, args: Any, world: int, steps: int) -> tuple[float, str] | None:
    try:
        one, ranks = _both(program, against, args, world, steps, in_float64=False, keep=False)
    except ProofError:
        return None
    results, _ = compare(ranks, one, OWN)
    most = max(results, key=lambda result: result.off, default=None)
    return None if most is None else (most.off, most.what)


def watched(
    program: Program, args: Any, world: int, steps: int, in_float64: bool, keep: bool = True, read_alone: bool = False
) -> list[Watched]:
    """Run a program on all ranks of a world, and see what each computes.

    Raises:
        ProofError: it fails on a rank.
    """
    watches = [Watch(keep, steps) for _ in range(world)]

    def call(rank: int) -> None:
        watch = watches[rank]
        recorded.watcher, alone.here, unrecorded.here, sparse_check.on.here = watch, read_alone, True, False
        given = copied(args, in_float64)
        with ExitStack() as stack:
            stack.enter_context(Wide() if in_float64 else nullcontext())
            stack.enter_context(watch)
            with suppress(Enough):
                watch.seen.returned = program(*given)
            with watch.paused():
                watch.seen.returned = frozen(watch.seen.returned, watch.value)
                watch.end()
        recorded.watcher = None

    def listener(rank: int, told: Told, given: Sequence[Tensor]) -> Arrived | None:
        return watches[rank].told(told, given)

    try:
        with torch.random.fork_rng(devices=[]), instead(program):
            together(world, call, listener, around=getattr(program, "around", lambda _: nullcontext()))
    except Exception as fault:
        where = "one card" if world == 1 and read_alone else f"{world} ranks"
        notes = "".join(f" ({note})" for note in getattr(fault, "__notes__", ()))
        raise ProofError(
            f"the program fails on {where}: {type(fault).__name__}: {fault}{notes}"
            + (". Where one card runs another program: prove(..., against=one_card_program)" if read_alone else "")
        ) from fault
    return [watch.seen for watch in watches]
