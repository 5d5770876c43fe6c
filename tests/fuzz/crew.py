"""Many programs on real ranks: portions by run_ranks, and what a rank that raises or hangs leaves of one."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from datetime import timedelta
from itertools import islice, zip_longest
from pathlib import Path
from threading import Event, Thread
from typing import Any

import torch.distributed as dist

import onecard as oc
from fuzz import plants
from fuzz.program import Program, size_of
from fuzz.twin import Outcome, on_mesh
from onecard.testing import RankError, RankTimeout, run_ranks

PATIENCE = 15.0  # seconds that a rank waits for another one's outcome
EACH = 20.0  # seconds for a program, besides
PORTION = 50

Results = Iterator[tuple[Program, Outcome]]
Told = Callable[[int], None]


class OneRankOnly(RuntimeError):
    """A rank ended a program otherwise than the others."""


def run_many(
    programs: Sequence[Program], told: Told = lambda done: None, plant: str = "", first: bool = False
) -> Results:
    """Run programs, those of as many ranks together.

    Args:
        told: how many have ended in the portion that runs.
        plant: a deliberate fault (see ``plants``).
        first: stop after the first failure.
    """
    waiting = list(programs)
    while waiting:
        nproc = size_of(waiting[0].ranks)
        portion = list(islice((p for p in waiting if size_of(p.ranks) == nproc), PORTION))
        outcomes = _run_portion(portion, nproc, told, plant)
        ended = portion[: len(outcomes)]
        waiting = [p for p in waiting if not any(p is e for e in ended)]
        for program, outcome in zip(ended, outcomes, strict=True):
            yield program, outcome
            if first and outcome.kind == "wrong":
                return


def _run_portion(portion: Sequence[Program], nproc: int, told: Told, plant: str) -> list[Outcome]:
    """Outcomes of the programs that ran: up to one that broke the ranks, if one did."""
    with tempfile.TemporaryDirectory(prefix="onecard-fuzz-") as folder:
        over = Event()
        watch = Thread(target=_watch, args=(Path(folder, "0"), told, over), daemon=True)
        watch.start()
        fault = ""
        try:
            run_ranks(work, nproc, [asdict(p) for p in portion], folder, plant, timeout=60 + EACH * len(portion))
        except (RankError, RankTimeout) as error:
            fault = str(error)
        finally:
            over.set()
            watch.join()
        outcomes = _merged(folder, nproc)
    if fault and len(outcomes) < len(portion):
        outcomes.append(Outcome("wrong", fault))
    elif fault:
        outcomes[-1] = Outcome("wrong", fault)
    return outcomes


def _merged(folder: str, nproc: int) -> list[Outcome]:
    """The outcomes that all ranks wrote."""
    files = [Path(folder, str(rank)) for rank in range(nproc)]
    lines = [f.read_text().splitlines() if f.exists() else [] for f in files]
    return [Outcome(**json.loads(said[0])) for said in zip(*lines, strict=False)]


def _watch(file: Path, told: Told, over: Event) -> None:
    while not over.wait(0.5):
        if file.exists():
            told(len(file.read_text().splitlines()))


def work(programs: list[dict[str, Any]], folder: str, plant: str) -> None:
    """One rank's part of a portion."""
    store, rank = dist.distributed_c10d._get_default_store(), oc.get_rank()
    with plants.planted(plant), open(Path(folder, str(rank)), "w", buffering=1) as file:
        for number, given in enumerate(programs):
            begin = time.monotonic()
            program = Program(**given)
            outcome, messages = on_mesh(program)
            outcome = _agreed(store, number, outcome, messages)
            if time.monotonic() - begin > EACH:
                outcome = replace(outcome, kind="wrong", why=f"took {time.monotonic() - begin:.0f} s; {outcome.why}")
            file.write(json.dumps(asdict(outcome)) + "\n")
            if outcome.kind == "wrong":
                return  # what it has left behind is not the next one's


def _agreed(store: Any, number: int, mine: Outcome, messages: str) -> Outcome:
    """The outcome, if all ranks have the same one and sent the same messages."""
    world = range(oc.get_world_size())
    store.set(f"fuzz/{number}/{oc.get_rank()}", json.dumps([*asdict(mine).values(), messages]))
    try:
        store.wait([f"fuzz/{number}/{rank}" for rank in world], timedelta(seconds=PATIENCE))
    except RuntimeError:
        raise OneRankOnly(f"only some ranks ended the program, this one so: {mine}") from None
    said = [json.loads(store.get(f"fuzz/{number}/{rank}")) for rank in world]
    wrong = next((i for i in world if said[i][0] == "wrong"), None)
    if wrong is not None:
        return replace(Outcome(*said[wrong][:-1]), why=f"rank {wrong}: {said[wrong][1]}")
    if len({one[0] for one in said}) > 1:
        return Outcome("wrong", f"ranks end otherwise: {[one[:2] for one in said]}")
    if len({one[-1] for one in said}) > 1:
        return Outcome("wrong", _first_different([one[-1].splitlines() for one in said]))
    return mine


def _first_different(messages: Sequence[Sequence[str]]) -> str:
    """Where the ranks' messages part."""
    number, those = next((n, t) for n, t in enumerate(zip_longest(*messages, fillvalue="none")) if len(set(t)) > 1)
    return f"the ranks sent different messages, first number {number}: {'; '.join(f'{r}: {m}' for r, m in enumerate(those))}"
