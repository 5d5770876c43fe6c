"""The launchers of several machines among themselves: whether all are there and alike, whether each lives, whose fault it was.

Each says now and then, in the store of machine 0, that it is there. Ranks notice a machine that is gone by connections that
close, or not at all where the cable is cut; and they cannot say whether a rank, its launcher or the whole machine has gone.
"""

from __future__ import annotations

import json
import platform
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import DistError, TCPStore

from onecard._version import __version__
from onecard.comm.world import interface
from onecard.launch._wrong import LaunchError

VERSION = __version__
BEAT = 0.5  # seconds between two signs of life
SOON = 5.0  # seconds after which who waits says for whom
HEARD = 3.0  # seconds for which machine 0 stays where the machines do not fit, so that all hear it
LOST = 30.0  # seconds without a sign of life
AFTER_FAILURE = 10.0  # seconds in which ranks here notice by themselves that those of another machine have failed
_LAST_WORD = 3.0  # seconds in which a machine that has failed, and lives, says so
_ANSWER = timedelta(seconds=5)
_FAILED = "failed: "


class MachineLost(LaunchError):
    """Another machine has gone while the job ran."""


class Machines:
    """The machines of a job, to one of them.

    Attributes:
        me, count: this machine's number, and how many there are.
        where: the address and the port at which they meet.
    """

    def __init__(self, me: int, count: int, host: str, port: int, patience: float, say: Callable[[str], None]) -> None:
        self.me, self.count, self.where, self._patience, self._say = me, count, (host, port), patience, say
        self._host, self._port = host, port
        self.names: dict[int, str] = {me: socket.gethostname()}
        self._heard: dict[int, float] = {}
        self._words: dict[int, str] = {}
        self._ended: dict[int, float] = {}
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._store: TCPStore | None = None  # a connection of the thread's own
        self._mine = ""
        self._ranks: dict[int, int] = {}

    # -- the beginning -----------------------------------------------------------------------------------------------------

    def reach(self) -> None:
        """Wait until machine 0 listens. Raises LaunchError."""
        until, told = time.monotonic() + self._patience, time.monotonic() + SOON
        while True:
            try:
                socket.create_connection(self.where, timeout=min(2.0, self._patience)).close()
                return
            except socket.gaierror as fault:
                raise LaunchError(
                    f"--master names {self._host!r}, which {socket.gethostname()} does not know ({fault.strerror}): write "
                    f"machine 0's address, --master ADDRESS:{self._port}, or add the name to /etc/hosts here"
                ) from fault
            except OSError as fault:
                why = fault.strerror or str(fault)
            now = time.monotonic()
            if now >= until:
                raise LaunchError(f"{self._unanswered(why)} for {self._patience:g} s (--wait). {self._check()}")
            if now >= told:
                self._say(f"{self._unanswered(why)} yet; waiting up to {self._patience:g} s (--wait). {self._check()}")
                told = until
            time.sleep(0.2)

    def _unanswered(self, why: str) -> str:
        return f"machine {self.me} ({socket.gethostname()}): machine 0 has not answered at {self._host}:{self._port} ({why})"

    def _check(self) -> str:
        return (
            "Is the job started there with --node_rank 0 and this port, and does no firewall stand between? Here: "
            f"{interface.words()}"
        )

    def meet(self, store: Any, nproc: int) -> None:
        """Wait until all machines are there, and see that they fit. Raises LaunchError, on all of them."""
        mine = {
            "onecard": VERSION, "torch": torch.__version__, "python": platform.python_version(), "name": socket.gethostname(),
            "ranks": nproc, "machines": self.count,
        }  # fmt: skip
        if self.me:
            store.set(f"machine/{self.me}", json.dumps(mine))
            if self._wait_for(store, ["machines"], self._patience + SOON):
                raise LaunchError(
                    f"machine 0 at {self._host}:{self._port} did not say that all are there; see its output"
                )
        else:
            others = [f"machine/{number}" for number in range(1, self.count)]
            missing = self._wait_for(store, others, self._patience)
            store.set("machines", self._judged(store, mine, missing))
        judged = json.loads(store.get("machines"))
        if self.me:
            store.set(f"machine/{self.me}/heard", "1")
        elif judged["error"]:  # the store goes with this machine: the others hear why first
            there = [other for other in others if other not in missing]
            self._wait_for(store, [f"{other}/heard" for other in there], HEARD)
        if judged["error"]:
            raise LaunchError(judged["error"])
        self.names |= {int(number): name for number, name in judged["names"].items()}
        self._ranks = {int(number): ranks for number, ranks in judged["ranks"].items()}

    def _wait_for(self, store: Any, keys: list[str], patience: float) -> list[str]:
        """What has not come in time, of which one hears soon."""
        until, told = time.monotonic() + patience, time.monotonic() + SOON
        missing = keys
        while missing := [key for key in missing if not store.check([key])]:
            now = time.monotonic()
            if now >= until:
                break
            if now >= told and not self.me:
                self._say(f"waiting up to {patience:g} s (--wait) for {_numbers(missing)}: {self._start_line()}")
                told = until
            time.sleep(0.05)
        return missing

    def _start_line(self) -> str:
        return (
            f"start the same command there, with --node_rank NUMBER and --master {self._host}:{self._port}, an address that "
            f"they reach. Here: {interface.words()}"
        )

    def _judged(self, store: Any, mine: dict[str, Any], missing: list[str]) -> str:
        said = {0: mine}
        for number in range(1, self.count):
            if f"machine/{number}" not in missing:
                said[number] = json.loads(store.get(f"machine/{number}"))
        error = (
            f"{_numbers(missing)} did not come within {self._patience:g} s (--wait): {self._start_line()}"
            if missing
            else ""
        )
        for what, name in (
            ("onecard", "versions of onecard"),
            ("torch", "versions of torch"),
            ("machines", "--nnodes"),
        ):
            if not error and len({str(each[what]) for each in said.values()}) > 1:
                each = ", ".join(f"{each[what]} on machine {n} ({each['name']})" for n, each in said.items())
                error = f"the machines have different {name}: {each}. Install, or write, the same everywhere"
        names, ranks = ({n: each[what] for n, each in said.items()} for what in ("name", "ranks"))
        return json.dumps({"error": error, "names": names, "ranks": ranks})

    @property
    def here(self) -> str:
        """This machine, in words."""
        return self._whose(self.me)

    def places(self) -> str:
        """Which ranks are on which machine, in words, for errors that speak of ranks."""
        found, first = [], 0
        for number, ranks in sorted(self._ranks.items()):
            last = first + ranks - 1
            found.append(f"{first}{f' to {last}' if ranks > 1 else ''} on {self._whose(number)}")
            first = last + 1
        return f"Ranks {', '.join(found)}" if found else ""

    # -- while it runs -----------------------------------------------------------------------------------------------------

    def watch(self) -> None:
        """Begin to give signs of life, and to listen for the others'."""
        now = time.monotonic()
        self._heard = {number: now for number in self._others()}
        if self._thread is None:
            self._thread = threading.Thread(target=self._beat, name="onecard-machines", daemon=True)
            self._thread.start()

    def _others(self) -> list[int]:
        """Whom this one listens for: machine 0 for all, the others for machine 0."""
        return [0] if self.me else list(range(1, self.count))

    def _beat(self) -> None:
        last: dict[int, bytes] = {}
        number = 0
        while True:
            over, number = self._over.is_set(), number + 1
            with suppress(RuntimeError, DistError, OSError):
                self._exchange(number, last)
            if over:
                return
            self._over.wait(BEAT)

    def _exchange(self, number: int, last: dict[int, bytes]) -> None:
        self._store = self._store or TCPStore(
            self._host, self._port, is_master=False, wait_for_workers=False, timeout=_ANSWER
        )
        self._store.set(f"beat/{self.me}", f"{number} {self._mine}")
        for other in self._others():
            if self._store.check([f"beat/{other}"]) and (said := self._store.get(f"beat/{other}")) != last.get(other):
                last[other], self._heard[other] = said, time.monotonic()
                words = said.decode().partition(" ")[2]
                if words and not self._words.get(other):
                    self._words[other], self._ended[other] = words, time.monotonic()

    def look(self, lost: float = LOST) -> None:
        """Raises MachineLost if another machine has given no sign for some seconds, or has failed and the ranks here run on."""
        now = time.monotonic()
        for number, heard in self._heard.items():
            words = self._words.get(number, "")
            if now - heard > lost and not words:
                raise MachineLost(f"{self._whose(number)} has given no sign for {now - heard:.0f} s (--lost). {_GONE}")
            if words.startswith(_FAILED) and now - self._ended[number] > AFTER_FAILURE:
                raise MachineLost(f"{self._whose(number)} says: {words.removeprefix(_FAILED)}")

    # -- the end -------------------------------------------------------------------------------------------------------------

    def end(self, words: str = "", own: bool = True) -> None:
        """Say how it ended here. ``words``: "" for well; ``own``: whether the fault is one of this machine."""
        self._mine = f"{_FAILED if own else 'lost others: '}{words}" if words else "done"
        self._over.set()
        if self._thread is not None:
            self._thread.join(_ANSWER.total_seconds())
            if words and not self.me:
                time.sleep(3 * BEAT)  # the store goes with this process: the others read it first

    def blame(self) -> str:
        """Whose fault it is that ranks here lost others, if it is not theirs; "" if that is not known."""
        began = time.monotonic()
        while True:
            for number, words in self._words.items():
                if words.startswith(_FAILED):
                    return f"{self._whose(number)} says: {words.removeprefix(_FAILED)}"
            # The last sign of one that is dead may be read only now: silence counts from there, not from the failure.
            now, heard = time.monotonic(), dict(self._heard)
            if all(now - at >= _LAST_WORD or at - began >= _LAST_WORD for at in heard.values()):
                break
            time.sleep(0.05)
        silent = [number for number, at in heard.items() if now - at >= _LAST_WORD and not self._words.get(number)]
        if silent:
            return "\n".join(f"{self._whose(n)} has given no sign for {now - heard[n]:.0f} s. {_GONE}" for n in silent)
        return ""

    def _whose(self, number: int) -> str:
        return f"machine {number} ({self.names.get(number, '?')})"


_GONE = "Its launcher was killed, the machine is down, or the network between is cut; its own output, or the kernel's, says why"


def _numbers(keys: list[str]) -> str:
    numbers = [key.partition("/")[2] for key in keys]
    return f"machine {numbers[0]}" if len(numbers) == 1 else f"machines {', '.join(numbers)}"
