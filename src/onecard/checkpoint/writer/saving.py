"""Save: all ranks meet, each writes its file, all meet again, and the first one commits.

Nothing that is on the disk is touched before the commit, which is one rename. Until then the older save of the same folder is
what is loaded; from then on the new one. What a save leaves that is interrupted belongs to no index: the next one removes it.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from onecard import recorded
from onecard._version import __version__
from onecard.checkpoint.format import files, folder, merging, tree
from onecard.checkpoint.format.index import File, FilePiece, Index, IndexEntry, to_bytes
from onecard.checkpoint.format.objects import Names, unfold
from onecard.checkpoint.format.pieces import Share, StateTensor, complete, plan, sample, sources_of
from onecard.checkpoint.writer import claim
from onecard.checkpoint.writer.progress import Progress
from onecard.checkpoint.writer.writing import Content, Staging, from_memory, write_shares
from onecard.comm.agree.meeting import Decide, meet
from onecard.comm.base.state import Kept
from onecard.comm.world import world
from onecard.errors import CheckpointError
from onecard.place.boxes import whole

_running: Kept[list[Saving]] = Kept(list)
_staging: Kept[list[Staging]] = Kept(list)
_CHANNEL = "checkpoint"


class Saving:
    """A save that may go on beside the program: made by ``save``.

    Attributes:
        path: the folder of the checkpoint.
    """

    def __init__(self, path: Path, root: Path, step: int | None, keep: int | None) -> None:
        self.path, self._root, self._step, self._keep = path, root, step, keep
        self._thread: threading.Thread | None = None
        self._error, self._claim = "", -1
        self._aliases: dict[str, str] = {}
        self._started = time.perf_counter()

    def wait(self) -> None:
        """Wait until the checkpoint is complete and on the disk.

        Raises:
            CheckpointError: it is not, and why; the same on all ranks.
        """
        if self._thread is not None:
            self._thread.join()
        if self in _running.here:
            _running.here.remove(self)
        if self._error:
            raise CheckpointError(self._error)

    def done(self) -> bool:
        """Whether there is nothing to wait for."""
        return self._thread is None or not self._thread.is_alive()

    def _begin(self, state: Any) -> tuple[Index, list[Share]]:
        """Look through the state, and make the folder ready: the first meeting."""
        index, error = Index(self.path, {}, {}, None, self._step), ""
        sources: dict[str, StateTensor] = {}
        try:
            index.state, sources = _look_through(state)
        except Exception as fault:
            error = in_words(fault)
        if world.get_rank() != 0:
            claim.give_up(self._root)
        said = _description(index.state, sources)
        digest = hashlib.sha256(json.dumps([said, str(self.path), self._step, self._keep]).encode()).hexdigest()
        answer = self._meet([digest, _own(index.state, sources)], self._prepare, error)
        if answer is None:  # the ranks do not have the same: say where
            self._meet([str(self.path), self._step, self._keep, said], _differences)
        index.generation, together = answer
        if together is not None:
            index.state, sources = together["state"], complete(sources, together["tensors"])
        shares = plan(sources, world.get_world_size())
        index.tensors = {name: IndexEntry(s.dtype, s.shape, ()) for name, s in sources.items()}
        self._aliases = {name: s.alias for name, s in sources.items() if s.alias}
        return index, shares

    def _prepare(self, words: Sequence[Any]) -> tuple[int, Any] | None:
        if len({digest for digest, _ in words}) > 1:
            return None
        own = [word for _, word in words]
        together = merging.merge(own) if all(word is not None for word in own) else None
        try:
            files.make_folder(self._root)
            self._claim = claim.take(self._root)
            return folder.prepare(self.path, self._root), together
        except OSError as fault:
            raise CheckpointError(in_words(fault)) from fault

    def _write(self, index: Index, shares: list[Share], content: Content, progress: Progress) -> None:
        """Write this rank's file and commit all of them: the second meeting."""
        me, size = world.get_rank(), world.get_world_size()
        mine = [share for share in shares if share.rank == me]
        path, error, word = self.path / folder.data_name(index.generation, me, size), "", None
        try:
            if mine:
                with progress:
                    word = write_shares(path, mine, content, progress.add)
        except Exception as fault:
            error = in_words(fault)
        try:
            self._meet(word, lambda words: self._commit(index, shares, words), error, busy=True)
        except CheckpointError:
            self._undo()
            raise
        finally:
            self._end_claim()
        progress.end(self.path, index.nbytes, time.perf_counter() - self._started)

    def _commit(self, index: Index, shares: list[Share], words: Sequence[Any]) -> None:
        size = len(words)
        names = [folder.data_name(index.generation, rank, size) for rank in range(size)]
        index.files = {n: File(w["size"], w["header"], w["crc32"]) for n, w in zip(names, words, strict=True) if w}
        pieces: dict[str, list[FilePiece]] = {name: [] for name in index.tensors}
        at = [0] * size
        for share in shares:
            word, i = words[share.rank], at[share.rank]
            piece = FilePiece(names[share.rank], share.box, word["starts"][i], share.nbytes, word["sums"][i])
            pieces[share.source.name].append(piece)
            at[share.rank] += 1
        for name, entry in index.tensors.items():
            of = self._aliases.get(name, name)
            index.tensors[name] = IndexEntry(entry.dtype, entry.shape, tuple(pieces[of]))
        index.about = {"onecard": __version__, "ranks": size}
        try:
            folder.commit(self.path, to_bytes(index))
        except OSError as fault:
            raise CheckpointError(in_words(fault)) from fault
        with suppress(OSError):  # it is saved; what cannot be removed now, the next save tries again
            folder.tidy(self.path, self._root, index, self._keep)

    def _undo(self) -> None:
        """After a failure. Rank 0 alone knows whether there was a commit: a rank that has not heard of one keeps its file."""
        if world.get_rank() == 0:
            with suppress(OSError):
                folder.clean_up(self.path, self._root)

    def _end_claim(self) -> None:
        if self._claim >= 0:
            os.close(self._claim)
            self._claim = -1

    def _meet(self, word: Any, decide: Decide, error: str = "", busy: bool = False) -> Any:
        outcome = f"{self.path} was not saved."
        found, answer = meet(_CHANNEL, f"save of {self.path}", word, decide, error, outcome, busy)
        if found:
            self._end_claim()
            raise CheckpointError(found)
        return answer


def start(state: Any, path: Path, root: Path, step: int | None, keep: int | None, wait: bool) -> Saving:
    """Save, or begin to."""
    finish()
    saving = Saving(path, root, step, keep)
    if recorded.watcher is not None:  # a proof: its next run must begin with the disk that this one found
        return saving
    index, shares = saving._begin(state)
    mine = [share for share in shares if share.rank == world.get_rank()]
    progress = Progress(f"saving {path.name}", sum(share.nbytes for share in mine), live=wait)
    if wait:
        saving._write(index, shares, from_memory(mine), progress)
        return saving
    content, error = None, ""
    try:
        _staging.here[:] = _staging.here or [Staging()]
        content = _staging.here[0].copy(mine)
    except Exception as fault:  # no memory: told at the second meeting, to which everybody comes
        error = in_words(fault)
    _running.here.append(saving)
    _at_exit()
    saving._thread = threading.Thread(
        target=_in_background, args=(saving, index, shares, content or _failed(error), progress), name="onecard-save"
    )
    saving._thread.start()
    return saving


def save_alone(
    path: Path, node: Any, sources: dict[str, StateTensor], content: Callable[[list[Share]], Content]
) -> None:
    """Save in this process, whatever the others do: the work of ``convert``, whose tensors come from files."""
    saving = Saving(path, path, None, None)
    shares = plan(sources, 1)
    entries = {name: IndexEntry(s.dtype, s.shape, ()) for name, s in sources.items()}
    index = Index(path, {}, entries, node)
    try:
        index.generation, _ = saving._prepare([("", None)]) or (0, None)
        saving._aliases = {name: s.alias for name, s in sources.items() if s.alias}
        word = write_shares(path / folder.data_name(index.generation, 0, 1), shares, content(shares), lambda n: None)
        saving._commit(index, shares, [word])
    finally:
        saving._end_claim()


def finish() -> None:
    """Wait for a save that goes on in the background.

    Raises:
        CheckpointError: it failed.
    """
    while _running.here:
        _running.here[0].wait()


def _in_background(saving: Saving, index: Index, shares: list[Share], content: Content, progress: Progress) -> None:
    try:
        saving._write(index, shares, content, progress)
    except BaseException as fault:
        saving._error = str(fault) or type(fault).__name__


def _failed(error: str) -> Content:
    def content(i: int) -> Any:
        raise CheckpointError(error)

    return content


def _at_exit() -> None:
    """A failure that nobody waited for is said when the program ends (Python joins the thread before)."""
    if not getattr(_at_exit, "noted", False):
        setattr(_at_exit, "noted", True)  # noqa: B010 - of the process, not of a rank
        atexit.register(_say_failures)


def _say_failures() -> None:
    for saving in _running.here:
        if saving._error and world.get_rank() == 0:
            print(f"onecard: {saving._error}", file=sys.stderr)


def _look_through(state: Any) -> tuple[Any, dict[str, StateTensor]]:
    tensors: dict[str, Any] = {}

    def take(name: str, x: Any) -> None:
        if name in tensors:
            raise CheckpointError(f"state: two tensors would be called {name!r}; rename a key")
        tensors[name] = x

    node = tree.encode(unfold(state, Names(state)), "", take)
    return node, sources_of(tensors)


def _description(node: Any, sources: dict[str, StateTensor]) -> list[tuple[str, str]]:
    """What all ranks must have alike, in words: each tensor, and each other value."""
    if world.get_world_size() == 1:
        return []
    said = []
    everywhere = {name for name, _ in tree.tensors(node)}
    for name, source in sources.items():
        if name in everywhere:
            values = f" of values {sample(source.values(whole(source.shape)))}" if _is_plain(source) else ""
            said.append((name, source.words() + values))
    return said + sorted((path, json.dumps(value)) for path, value in tree.values(node))


def _is_plain(source: StateTensor) -> bool:
    return source.layout is None and not source.apart


def _own(node: Any, sources: dict[str, StateTensor]) -> dict[str, Any] | None:
    """What this rank alone can say; None if all is said by what all ranks have alike."""
    words = {name: source.own_words() for name, source in sources.items() if source.apart}
    return {"state": node, "tensors": words} if words or merging.is_spread(node) else None


def _differences(words: Sequence[list[Any]]) -> None:
    """Say in what the ranks differ first."""
    first = words[0]
    for rank, word in enumerate(words):
        for what, mine, theirs in zip(("path", "step", "keep"), first, word, strict=False):
            if mine != theirs:
                raise CheckpointError(f"rank 0 saves with {what}={mine!r}, rank {rank} with {what}={theirs!r}")
        mine, theirs = dict(map(tuple, first[3])), dict(map(tuple, word[3]))
        for name in [*mine, *theirs]:
            if mine.get(name) != theirs.get(name):
                raise CheckpointError(
                    f"the ranks do not save the same: {name!r} is {_short(mine.get(name))} on rank 0, {_short(theirs.get(name))} "
                    f"on rank {rank}. A state is one, as on one card: what each rank has of its own belongs under a name of its "
                    "own on every rank, or into one distributed tensor (onecard.from_local)"
                )
    raise CheckpointError("the ranks do not save the same")


def _short(text: str | None) -> str:
    return "not there" if text is None else text if len(text) < 200 else f"{text[:200]}..."


def in_words(fault: BaseException) -> str:
    """An error in words: a file system's with the file."""
    if isinstance(fault, CheckpointError):
        return str(fault)
    if isinstance(fault, OSError) and fault.strerror:
        return f"{fault.filename}: {fault.strerror}" if fault.filename else fault.strerror
    return f"{type(fault).__name__}: {fault}"


__all__ = ["Saving", "save_alone", "finish", "start"]
