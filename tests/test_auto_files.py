"""Files of a program for one card on several ranks: each rank sees what one card would, and only rank 0 changes the disk."""

from __future__ import annotations

import bz2
import io
import os
import random
import shutil
import sys
import tarfile
import textwrap
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from amounts import amount
from launching import python
from torch import nn

from onecard.auto import calls, rank
from onecard.auto.calls import over
from onecard.auto.files import Noted, Overlay
from onecard.planning.plan import Plan

NAMES = ["a", "b", "d", "d/x", "d/y", "e/z", "new"]


def _text(path: Path, mode: str, text: str) -> None:
    with open(path, mode) as file:
        file.write(text)


def _entry(entry: Any) -> tuple[Any, ...]:
    size = entry.stat(follow_symlinks=False).st_size if entry.is_file(follow_symlinks=False) else None
    return entry.name, entry.is_dir(), entry.is_dir(follow_symlinks=False), entry.is_symlink(), size


def _tar(path: Path, member: Path) -> list[str]:
    with tarfile.open(path, "a" if path.exists() else "w") as file:
        file.add(member, member.name, recursive=False, filter=lambda info: info.replace(mtime=0, deep=False))
    with tarfile.open(path) as file:
        return file.getnames()


def _bz2(path: Path, text: str) -> str:
    with bz2.open(path, "at") as file:
        file.write(text)
    with bz2.open(path, "rt") as file:
        return file.read()


def _raw(path: Path, text: str) -> tuple[Any, ...]:
    with io.FileIO(path, "ab") as file, open(path, "rb") as other:
        file.write(text.encode())
        return os.path.getsize(path), isinstance(other.raw, io.FileIO), isinstance(file, io.FileIO)


def _update(path: Path) -> str:
    with open(path, "r+") as file:
        text = file.read()
        file.write("!")
    return text


def _inside(folder: Path, text: str) -> Any:
    """Relative paths, from a folder that may be this rank's alone."""
    above = os.getcwd()
    os.chdir(folder)
    try:
        made = Path("inner")
        made.write_text(text)
        there = (Path.cwd() == folder, os.path.abspath("inner") == str(folder / "inner"), sorted(os.listdir()))
        return (
            there,
            (folder / "inner").read_text(),
            sorted(p.name for p in Path("..").glob("*")),
            Path("../a").exists(),
        )
    finally:
        os.chdir(above)


OPERATIONS: dict[str, Callable[[Path, Path, str], Any]] = {
    "write": lambda a, b, t: _text(a, "w", t),
    "append": lambda a, b, t: _text(a, "a", t),
    "make": lambda a, b, t: _text(a, "x", t),
    "update": lambda a, b, t: _update(a),
    "read": lambda a, b, t: a.read_text(),
    "pathlib": lambda a, b, t: (a.write_text(t), a.read_bytes()),
    "exists": lambda a, b, t: (a.exists(), os.path.isdir(a), os.path.isfile(b), os.access(a, os.R_OK)),
    "size": lambda a, b, t: os.path.getsize(a) if a.is_file() else None,
    "remove": lambda a, b, t: os.remove(a),
    "unlink": lambda a, b, t: a.unlink(missing_ok=True),
    "mkdir": lambda a, b, t: os.mkdir(a),
    "makedirs": lambda a, b, t: os.makedirs(a, exist_ok=True),
    "rmdir": lambda a, b, t: os.rmdir(a),
    "rmtree": lambda a, b, t: shutil.rmtree(a),
    "rename": lambda a, b, t: os.rename(a, b),
    "replace": lambda a, b, t: os.replace(a, b),
    "copy": lambda a, b, t: str(shutil.copyfile(a, b))[-1:],
    "list": lambda a, b, t: sorted(os.listdir(a)),
    "scan": lambda a, b, t: sorted(map(_entry, os.scandir(a.parent))),
    "copy tree": lambda a, b, t: len(os.listdir(shutil.copytree(a, b, symlinks=True, dirs_exist_ok=True))),
    "tar": lambda a, b, t: _tar(a, b),
    "bz2": lambda a, b, t: _bz2(a, t),
    "raw": lambda a, b, t: _raw(a, t),
    "walk": lambda a, b, t: sorted((Path(f).name, sorted(d), sorted(n)) for f, d, n in os.walk(a.parent)),
    "glob": lambda a, b, t: sorted(p.name for p in a.parent.glob("*")),
    "copy all": lambda a, b, t: str(shutil.copy2(a, b))[-1:],
    "mode": lambda a, b, t: (os.chmod(a, 0o640), oct(os.stat(a).st_mode)),
    "attributes": lambda a, b, t: os.listxattr(a),
    "enter": lambda a, b, t: _inside(a, t),
    "low": lambda a, b, t: os.close(os.open(a, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)),
}


def _begun(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "a").write_text("old a")
    (folder / "d").mkdir()
    (folder / "d" / "x").write_text("old x")
    return folder


def _program(seed: int, folder: Path) -> list[str]:
    """What each of a drawn list of operations gives."""
    draw, said = random.Random(seed), []
    for i in range(25):
        name = draw.choice([*OPERATIONS])
        a, b = (folder / draw.choice(NAMES) for _ in range(2))
        try:
            found = repr(OPERATIONS[name](a, b, f"text {i} "))
        except (OSError, EOFError, UnicodeError, tarfile.TarError, shutil.Error) as error:
            found = type(error).__name__
        said.append(f"{name} {a.relative_to(folder)} {b.relative_to(folder)}: {found}")
    return said


def _disk(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else b"" for p in sorted(folder.rglob("*"))}


@pytest.mark.share(6)
@pytest.mark.parametrize("seed", range(amount(15, 600)))
def test_an_overlay_is_the_disk(tmp_path, seed):
    real, other = _begun(tmp_path / "real" / "w"), _begun(tmp_path / "other" / "w")
    before = _disk(other)
    wanted = _program(seed, real)
    with ExitStack() as stack:
        over(Overlay(tmp_path / "mine"), stack)
        found = _program(seed, other)
    assert found == wanted
    assert _disk(other) == before


def test_every_call_with_a_path_is_sent_to_the_overlay(tmp_path):
    """By the lists of calls that Python keeps itself, so that a new one is not forgotten."""
    names = {
        call.__name__ for listed in (os.supports_dir_fd, os.supports_fd, os.supports_follow_symlinks) for call in listed
    }
    names |= {"getcwd", "getcwdb", "lchown", "rmdir", "setxattr", "getxattr", "listxattr", "removexattr"}
    before = {name: getattr(os, name) for name in names - {"execve"}}  # of a command, which is the disk's
    with ExitStack() as stack:
        over(Overlay(tmp_path / "mine"), stack)
        assert [name for name, call in before.items() if getattr(os, name) is call] == []


def test_what_rank_0_has_written_since_is_not_there(tmp_path):
    old = tmp_path / "old"
    old.write_text("before")
    overlay = Overlay(tmp_path / "mine", since=old.stat().st_ctime + 5)
    late = tmp_path / "late"
    late.write_text("rank 0")
    os.utime(late)
    overlay.since = late.stat().st_ctime - 1e-6
    old_seen = Overlay(tmp_path / "mine", since=late.stat().st_ctime + 1)
    with ExitStack() as stack:
        over(overlay, stack)
        assert not late.exists() and "late" not in os.listdir(tmp_path)
        late.write_text("mine")
        assert late.read_text() == "mine"
    assert late.read_text() == "rank 0"
    with ExitStack() as stack:
        over(old_seen, stack)
        assert old.read_text() == "before"


def test_rank_0_writes_and_notes(tmp_path):
    noted = Noted()
    with ExitStack() as stack:
        over(noted, stack)
        (tmp_path / "log").write_text("x")
        os.mkdir(tmp_path / "folder")
        os.replace(tmp_path / "log", tmp_path / "final")
        os.remove(tmp_path / "final")
    assert [*noted.written] == [str(tmp_path / "log"), str(tmp_path / "final")]
    assert not (tmp_path / "log").exists() and (tmp_path / "folder").is_dir()


def test_workers_of_a_loader_and_temporary_files(tmp_path):
    """Sockets between processes lie in temporary folders: those are each rank's own already."""
    script = tmp_path / "loads.py"
    script.write_text(
        textwrap.dedent("""
        import sys, tempfile, os
        from contextlib import ExitStack
        import torch
        from onecard.auto.calls import over
        from onecard.auto.files import Overlay
        def main():
            with ExitStack() as stack:
                over(Overlay(sys.argv[1]), stack)
                with tempfile.TemporaryDirectory() as folder:
                    with open(os.path.join(folder, "x"), "w") as file:
                        file.write("here")
                    assert os.listdir(folder) == ["x"]
                assert not os.path.exists(folder)
                loader = torch.utils.data.DataLoader(torch.arange(8.0), batch_size=4, num_workers=1)
                print(sum(x.sum().item() for x in loader))
            assert not os.path.exists(folder)

        if __name__ == "__main__":  # workers begin anew from Python 3.14 on
            main()
        """)
    )
    done = python(tmp_path, script, tmp_path / "mine")
    assert done.stdout == "28.0\n", done.stderr


def test_what_is_said_at_the_end_of_a_program_that_failed(tmp_path, monkeypatch, capsys):
    """The launcher's own note is no file of the program, and that nothing has trained is not the news."""
    notes, theirs = tmp_path / "notes", tmp_path / "best.pt"
    notes.mkdir()
    launcher = ModuleType("_onecard_launcher")
    launcher.__dict__["board"] = str(notes / "rank0.board")
    monkeypatch.setitem(sys.modules, launcher.__name__, launcher)
    monkeypatch.setattr("onecard.comm.world.world.get_world_size", lambda: 2)
    monkeypatch.setattr(rank, "Applied", lambda plan: None)  # there is one rank here
    overlay, watch = Noted(), rank.ProgramWatch(rank.Job(Plan(dp=2), {"weight": [2, 2]}))
    overlay.written = {str(notes / "rank0.json"): None, str(theirs): None}
    theirs.touch()
    rank._tell(overlay, watch)
    assert "no module has trained" in capsys.readouterr().err
    watch.roots.append(nn.Linear(3, 2))
    rank._tell(overlay, watch)
    assert "the plan was not used: weight is [2, 3] in Linear, and [2, 2] in the plan" in capsys.readouterr().err
    watch.roots.clear()
    (notes / "rank0.json").touch()
    rank._tell(overlay, watch)
    said = capsys.readouterr().err
    assert "has trained" not in said and "best.pt" in said and "rank0.json" not in said


def test_a_look_at_what_nobody_has_changed_costs_no_walk_of_the_stack(tmp_path, monkeypatch):
    """An import asks for thousands of paths, from frames that lie deep."""
    (tmp_path / "made").mkdir()
    with ExitStack() as stack:
        over(Overlay(tmp_path / "own"), stack)
        with monkeypatch.context() as patched:
            patched.setattr(calls, "_is_checkpoints", lambda: pytest.fail("asked who looks"))
            assert os.path.realpath(__file__) == str(Path(__file__).resolve()) and os.stat(__file__).st_size
        (tmp_path / "made" / "file").write_text("mine")
        assert os.stat(tmp_path / "made" / "file").st_size == 4
    assert not (tmp_path / "made" / "file").exists()
