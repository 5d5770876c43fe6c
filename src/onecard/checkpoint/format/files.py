"""All that checkpoints do to a file system, in one place: written beside, forced to the disk, renamed, removed."""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from onecard.errors import CheckpointError

Watcher = Callable[[str, str], None]
watchers: list[Watcher] = []
"""Called with the name and the file of each operation before it is done: a test that kills or fails at the k-th one."""

SYNC_EVERY = 64 << 20  # bytes after which what was written is forced to the disk, while the rest is still written


def _point(operation: str, path: object) -> None:
    for watcher in watchers:
        watcher(operation, str(path))


class OutputFile:
    """A new file, written from beginning to end. ``close`` forces it to the disk; leaving by an error removes it."""

    def __init__(self, path: Path) -> None:
        _point("open", path)
        self.path, self.size, self._synced = path, 0, 0
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        self._helper: threading.Thread | None = None

    def write(self, data: memoryview | bytes) -> None:
        """Append bytes, without copying them."""
        _point("write", self.path)
        view = memoryview(data).cast("B")
        while view.nbytes:
            try:
                done = os.write(self._descriptor, view)
            except OSError as fault:
                raise _named(fault, self.path) from fault
            self.size += done
            view = view[done:]
        if self.size - self._synced >= SYNC_EVERY and (self._helper is None or not self._helper.is_alive()):
            self._synced = self.size
            self._helper = threading.Thread(target=self._push, name="onecard-sync", daemon=True)
            self._helper.start()

    def _push(self) -> None:
        # The disk works while this process goes on with checksums and copies; the fsync at the end then has less to do,
        # and is the one whose error counts.
        with suppress(OSError):
            os.fdatasync(self._descriptor)

    def __enter__(self) -> OutputFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._helper is not None:
            self._helper.join()
        try:
            if kind is None:
                _point("fsync", self.path)
                try:
                    os.fsync(self._descriptor)
                except OSError as fault:
                    raise _named(fault, self.path) from fault
        finally:
            os.close(self._descriptor)
            if kind is not None:
                with suppress(OSError):
                    remove(self.path)


def _named(fault: OSError, path: Path) -> OSError:
    """An error of a descriptor with the file's name."""
    return OSError(fault.errno, fault.strerror, str(path))


def write_text(path: Path, text: bytes) -> None:
    """A small file at once, on the disk when this returns."""
    with OutputFile(path) as file:
        file.write(text)


def rename(source: Path, target: Path) -> None:
    """Give a file its name, in one step that either happens or does not."""
    _point("rename", target)
    os.replace(source, target)


def remove(path: Path) -> None:
    """Remove a file; it may be gone already."""
    _point("unlink", path)
    with suppress(FileNotFoundError):
        os.unlink(path)


def remove_folder(path: Path) -> None:
    """Remove an empty folder."""
    _point("rmdir", path)
    os.rmdir(path)


def make_folder(path: Path) -> None:
    """Make a folder and those above it, known to the disk."""
    if path.is_dir():
        return
    make_folder(path.parent)
    _point("mkdir", path)
    path.mkdir(exist_ok=True)
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Force the names in a folder to the disk."""
    _point("fsync", path)
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with suppress(OSError):  # a file system that has no fsync of folders
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


class InputFile:
    """A regular file of a checkpoint, opened by its name in the folder; links are not followed, unless ``links``."""

    def __init__(self, folder: Path, name: str, links: bool = False) -> None:
        self.path = folder / name
        if name in ("", ".", "..") or "/" in name or "\0" in name or os.sep in name:
            raise CheckpointError(
                f"{folder}: the name {name!r} would lead out of the folder; nothing is read from there"
            )
        try:
            follow = 0 if links else os.O_NOFOLLOW
            self.descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | follow)
        except FileNotFoundError:
            raise CheckpointError(f"{self.path} is missing") from None
        except OSError as fault:
            if self.path.is_symlink():
                raise CheckpointError(f"{self.path} is a link, and links are not followed: copy the file") from None
            raise CheckpointError(f"{self.path} cannot be read: {fault.strerror}") from fault
        status = os.fstat(self.descriptor)
        self.size = status.st_size
        if not stat.S_ISREG(status.st_mode):
            os.close(self.descriptor)
            raise CheckpointError(f"{self.path} is not a file")

    def read_into(self, buffers: Sequence[memoryview], offset: int) -> int:
        """Fill memory from a place in the file; how many bytes there were."""
        wanted, done = sum(b.nbytes for b in buffers), 0
        left = list(buffers)
        while left:
            try:
                got = os.preadv(self.descriptor, left, offset + done)
            except OSError as fault:
                raise CheckpointError(
                    f"{self.path} cannot be read at byte {offset + done}: {fault.strerror}"
                ) from fault
            if not got:
                raise CheckpointError(
                    f"{self.path} ends at byte {offset + done}, {wanted - done} bytes before what was to be read: it was cut off"
                )
            done += got
            while left and got >= left[0].nbytes:
                got -= left.pop(0).nbytes
            if left:
                left[0] = left[0][got:]
        return done

    def read(self, offset: int, size: int) -> bytes:
        """Some bytes; ``size`` must have been checked against the file's."""
        buffer = bytearray(size)
        self.read_into([memoryview(buffer)], offset)
        return bytes(buffer)

    def close(self) -> None:
        os.close(self.descriptor)

    def __enter__(self) -> InputFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
