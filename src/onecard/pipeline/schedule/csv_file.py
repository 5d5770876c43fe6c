"""read_csv, write_csv: schedules in the files of torch.distributed.pipelining, one line for each rank. Pure but for the file."""

from __future__ import annotations

import csv
import re
from os import PathLike
from pathlib import Path

from onecard.errors import ScheduleError
from onecard.pipeline.schedule.action import Action, Schedule

# What torch adds for FSDP and data parallelism around a schedule, and where it looks after sends (2.15): no part of the order.
_NOT_OURS = re.compile(r"\d+(UNSHARD|RESHARD|(WAIT_)?REDUCE_GRAD|WAIT_SEND_[FB]\d+)")
_PAIR = re.compile(r"\(([^()]*)\)OVERLAP_F_B")


def read_csv(path: str | PathLike[str], name: str | None = None) -> Schedule:
    """The schedule in a file, with or without sends and receives.

    Empty cells (torch's idle slots) are left out, and so are UNSHARD, RESHARD and REDUCE_GRAD, which belong to FSDP and
    data parallelism, and waits for sends. A pair that torch runs overlapped becomes its forward and then its backward.

    Raises:
        ScheduleError: a cell that names no action, with its line and column.
    """
    path = Path(path)
    with path.open(newline="", encoding="utf-8") as file:
        cells = list(enumerate(csv.reader(file), 1))
    rows = [[a for i, cell in enumerate(row, 1) for a in _read(cell, path, line, i)] for line, row in cells]
    return Schedule.of(rows, name or path.stem)


def write_csv(schedule: Schedule, path: str | PathLike[str], send_waits: bool = False) -> None:
    """Write a schedule as torch writes one: read it there with ``_load_csv(path, format="compute_comms")``.

    Without sends and receives (``schedule.compute()``) it is torch's ``compute_only``. From torch 2.15 on a file with sends
    needs a wait for each: ``send_waits`` puts them at the end of each rank's line.
    """
    rows = [[str(action) for action in row] for row in schedule.ranks]
    if send_waits:
        rows = [row + [cell.replace("SEND_", "WAIT_SEND_") for cell in row if "SEND_" in cell] for row in rows]
    with Path(path).open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(rows)


def _read(cell: str, path: Path, line: int, column: int) -> list[Action]:
    text = cell.strip()
    if not text or _NOT_OURS.fullmatch(text):
        return []
    pair = _PAIR.fullmatch(text)
    try:
        return [Action.parse(part) for part in (pair[1].split(";") if pair else [text])]
    except ScheduleError as fault:
        raise ScheduleError(f"{path.name}, line {line} (rank {line - 1}), column {column}: {fault}") from None
