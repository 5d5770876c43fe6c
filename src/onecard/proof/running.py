"""What is proved, and how it runs: on one card, and on all ranks of a world in this process."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from importlib import import_module
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from onecard import recorded
from onecard.auto import one_card, rank, taken
from onecard.comm.agree import sparse_check
from onecard.comm.base.state import unrecorded
from onecard.comm.joined.hub import Arrived, Told
from onecard.comm.joined.worlds import together
from onecard.comm.world.hidden import hidden
from onecard.comm.world.world import alone
from onecard.errors import ProofError
from onecard.planning.plan import Plan
from onecard.proof.begun import Begun
from onecard.proof.disk import Disk, DiskTurn, disks, on
from onecard.proof.interpreted import NodeWatch
from onecard.proof.results import frozen
from onecard.proof.script import instead
from onecard.proof.seen import Watched
from onecard.proof.watch import Enough, Watch, hooks
from onecard.proof.wide import Wide, copied, float64
from onecard.static.api import Static
from onecard.static.guards import fits
from onecard.static.passes import withheld
from onecard.static.recording import Recording
from onecard.static.run import rechecked
from onecard.static.step.step import RecordedStep
from onecard.tensor import one_card_random

Program = Callable[..., Any]
ROOM = "onecard-proof-"  # a folder for what a run writes, which goes when it has ended


@dataclass(frozen=True)
class Case:
    """What is proved.

    Attributes:
        program, args: of each rank; world: how many ranks; against: what one card runs; None: the same.
        steps: of the first optimizer, after which a run ends; 0: at its own end.
        plan: by which the ranks run a program for one card; None: the program divides its work itself.
        recorded: steps of ``to_static`` are recorded and replayed on the ranks, by all passes but ``without``.
        processes: each rank is a process; so it is for recordings, which look at all tensors of theirs.
        start: the checkpoint whose state models and optimizers begin with, on one card and on all ranks; "": their own.
        nudged: makes of that beginning another one, which changes parameters a little; None: nothing does.
    """

    program: Program
    args: tuple[Any, ...]
    world: int
    against: Program | None = None
    steps: int = 0
    plan: Plan | None = None
    recorded: bool = False
    without: tuple[str, ...] = ()
    processes: bool = False
    start: str = ""
    nudged: Callable[[Begun | None], Any] | None = None

    def one(self, in_float64: bool, keep: bool = True) -> Watched:
        """What one card computes.

        Raises:
            ProofError: it fails.
        """
        with room(self, in_float64):
            return _watched(self, None, in_float64, keep)[0]

    def ranks(self, in_float64: bool, keep: bool = True) -> list[Watched]:
        """What each rank computes, all of them in this process.

        Raises:
            ProofError: one of them fails.
        """
        with room(self, in_float64):
            return _watched(self, self.world, in_float64, keep)


@contextmanager
def room(case: Case, in_float64: bool) -> Iterator[None]:
    """What is in force in a process in which a case runs. Under a plan a program finds one card: no process group, and seeds
    that are the same on all ranks."""
    with ExitStack() as stack:
        stack.enter_context(float64() if in_float64 else nullcontext())
        if case.plan is not None:
            taken.put(stack, [*hidden(), *one_card.numbers()])
            rank.listen(stack)  # ahead of those who look on: a module is laid out before
        stack.enter_context(_replays(case.recorded))
        stack.enter_context(hooks())
        yield


@contextmanager
def _replays(all_of_them: bool) -> Iterator[None]:
    """Inside, steps of ``to_static`` that are replayed count as an optimizer's do elsewhere, and are replayed node by node.

    ``all_of_them``: each is replayed. Else only those that cannot run as they are, which are cut into stages.
    """
    call, run = Static.__call__, fits.step_function

    def counted(self: Static, *args: Any, **kwargs: Any) -> Any:
        result, watch = call(self, *args, **kwargs), recorded.watcher
        if watch is not None and (all_of_them or watch.replays()):
            watch.stepped()
        return result

    def looked_at(step: RecordedStep) -> Callable[..., tuple[Any, ...]]:
        def interpreted(*given: Any) -> tuple[Any, ...]:
            watch = recorded.watcher
            if not isinstance(watch, NodeWatch) or not watch.keep:
                return run(step)(*given)
            return watch.replayed(
                step.graph, given, step.bound.roots if isinstance(step, Recording) and step.bound else ()
            )

        return interpreted

    with (
        patch.object(Static, "__call__", counted),
        patch.object(rechecked, "next_check", lambda _: 1 << 62),
        patch.object(fits, "step_function", looked_at),
    ):
        yield


def play(case: Case, program: Program, watch: Watch, on_ranks: bool, in_float64: bool) -> None:
    """Run the program of one rank to its end, or to its last step."""
    recorded.watcher, alone.here = watch, not on_ranks and case.against is None
    unrecorded.here, withheld.here = not (on_ranks and case.recorded), frozenset(case.without)
    if case.plan is not None:
        one_card.begin(0)
        rank.watching.here = rank.ProgramWatch(rank.Job(case.plan)) if on_ranks else None
    given = copied(case.args, in_float64)
    with ExitStack() as stack:
        stack.enter_context(one_card_random() if case.plan is not None else nullcontext())
        stack.enter_context(Wide() if in_float64 else nullcontext())
        stack.enter_context(watch)
        with suppress(Enough):
            watch.seen.returned = program(*given)
        with watch.paused():
            watch.seen.returned = frozen(watch.seen.returned, watch.left)
            watch.end()
    recorded.watcher = None


def watch_of(case: Case, keep: bool, kind: type[NodeWatch] = NodeWatch) -> NodeWatch:
    """Who looks on while one rank runs."""
    begun = Begun(case.start) if case.start else None
    return kind(keep, case.steps, not case.recorded, begun if case.nudged is None else case.nudged(begun))


def failed(fault: BaseException, where: str, more: str = "") -> ProofError:
    """What is said of a program that raises."""
    notes = "".join(f" ({note})" for note in getattr(fault, "__notes__", ()))
    return ProofError(f"the program fails on {where}: {type(fault).__name__}: {fault}{notes}{more}")


def _watched(case: Case, world: int | None, in_float64: bool, keep: bool) -> list[Watched]:
    """Run a case on all ranks of a world, None: on one card, and see what each computes."""
    size = world or 1
    program = case.program if world or case.against is None else case.against
    watches = [watch_of(case, keep) for _ in range(size)]
    import_module("onecard.fleet")  # its hooks are the process's: one that a rank adds is its own

    def call(number: int) -> None:
        sparse_check.on.here = False
        play(case, program, watches[number], world is not None, in_float64)

    def listener(number: int, told: Told, given: Sequence[Tensor]) -> Arrived | None:
        return watches[number].told(told, given)

    try:
        with ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng(devices=[]))
            stack.enter_context(instead(program))
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix=ROOM))
            each, shown = disks(folder, size, case.plan is not None), Disk(folder)
            stack.enter_context(on(shown))
            around = getattr(program, "around", lambda _: nullcontext())
            together(size, call, listener, around=lambda rank: DiskTurn(shown, each[rank], around(rank)))
    except Exception as fault:
        where = "one card" if world is None else f"{size} ranks"
        more = ". Where one card runs another program: prove(..., against=one_card_program)"
        raise failed(fault, where, more if world is None and case.against is None else "") from fault
    return [watch.seen for watch in watches]
