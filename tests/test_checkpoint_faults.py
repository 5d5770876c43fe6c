"""Whatever is wrong with a checkpoint or a save is said, the same on every rank, and the group goes on."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import random
import resource
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import onecard as oc
from onecard.checkpoint.format import files
from onecard.checkpoint.format.index import NAME
from onecard.checkpoint.writer import claim
from onecard.comm.world import world
from onecard.errors import CheckpointError
from onecard.testing import multirank, run_ranks

MESH = oc.ProcessMesh([0, 1], ["x"])
ROWS = 300_000  # a piece has more than one block


def state(value: float = 0.0, rows: int = ROWS) -> dict[str, Any]:
    whole = torch.arange(2.0 * rows).view(rows, 2) + value
    return {"w": oc.shard_tensor(whole, MESH, [oc.Shard(0)]), "b": torch.full((7,), value), "step": int(value)}


def said(act: Callable[[], Any]) -> str:
    """The error of a call: the same on both ranks, which go on afterwards."""
    text = "no error"
    try:
        act()
    except CheckpointError as error:
        text = str(error)
    words: list[Any] = [None, None]
    dist.all_gather_object(words, text)  # the group is usable
    assert words[0] == words[1], words
    return text


def shared(tmp_path: Path) -> Path:
    return Path(str(tmp_path))


def restore(saved: Path, place: Path) -> None:
    dist.barrier()
    if oc.get_rank() == 0:
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(saved, place)
    dist.barrier()


def on_first(act: Callable[[], Any]) -> None:
    if oc.get_rank() == 0:
        act()
    dist.barrier()


def flip(path: Path, at: int, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << bit
    path.write_bytes(data)


@multirank(2)
def test_flipped_bits_are_found(tmp_path: Path) -> None:
    """One bit, anywhere in any file: header, data, index."""
    saved, place = tmp_path / "saved", tmp_path / "place"
    oc.save_state_dict(state(1.0, 3000), saved)
    rng = random.Random(1)
    names = sorted(p.name for p in saved.iterdir())
    assert len(names) == 3
    for number in range(60):
        restore(saved, place)
        victim = place / names[number % 3]
        at, bit = rng.randrange((saved / victim.name).stat().st_size), rng.randrange(8)
        on_first(lambda v=victim, a=at, b=bit: flip(v, a, b))
        into = state(0.0, 3000)
        text = said(lambda into=into: oc.load_state_dict(into, place))
        assert victim.name in text and ("damaged" in text or "version" in text or "not the index" in text), (
            victim,
            at,
            bit,
            text,
        )
        if victim.name != NAME:
            assert oc.checkpoint.verify(place), (victim, at, bit)
    restore(saved, place)
    assert said(lambda: oc.load_state_dict(into, place)) == "no error" and into["step"] == 1


def edit(path: Path, old: str, new: str, resign: bool) -> None:
    """Change the index; ``resign``: as somebody does who knows the format."""
    import hashlib

    text = path.read_text()
    head, _, content = text.partition('"content": ')
    content = content.removesuffix("}\n")
    assert old in content, old
    content = content.replace(old, new, 1)
    if resign:
        digest = hashlib.sha256(content.encode()).hexdigest()
        head = '{"onecard_checkpoint": 1, "sha256": "' + digest + '", '
    path.write_text(f'{head}"content": {content}}}\n')


@multirank(2)
def test_faults_of_what_is_loaded(tmp_path: Path) -> None:
    saved, place = tmp_path / "saved", tmp_path / "place"
    oc.save_state_dict(state(1.0), saved)
    index, names = saved / NAME, sorted(p.name for p in saved.iterdir() if p.name != NAME)
    first, second = names
    size = (saved / second).stat().st_size
    outside = tmp_path / "outside.safetensors"
    on_first(lambda: shutil.copy(saved / first, outside))
    name = first.split("-")[0]
    faults: list[tuple[str, Callable[[], Any], list[str]]] = [
        ("cut off", lambda: os.truncate(place / second, size - 5), [second, f"{size - 5:,}", f"{size:,}", "cut off"]),
        ("longer", lambda: os.truncate(place / second, size + 5), [second, "not the one that was written"]),
        ("missing", lambda: (place / second).unlink(), [second, "missing"]),
        ("empty", lambda: os.truncate(place / first, 0), [first, "cut off"]),
        ("no index", lambda: (place / NAME).unlink(), ["no index.json", "there is no checkpoint"]),
        ("index cut off", lambda: os.truncate(place / NAME, 400), [NAME, "cut off"]),
        ("index edited", lambda: edit(place / NAME, '"step":1', '"step":2', False), [NAME, "edited", "SHA-256"]),
        ("version", lambda: (place / NAME).write_text(index.read_text().replace('checkpoint": 1', 'checkpoint": 9')),
         ["version 9", "version 1", "newer"]),
        ("dots", lambda: edit(place / NAME, f'"name":"{first}"', '"name":"../outside.safetensors"', True), ["out of the folder"]),
        ("absolute", lambda: edit(place / NAME, f'"name":"{first}"', f'"name":"{outside}"', True), ["out of the folder"]),
        ("link", lambda: ((place / first).unlink(), (place / first).symlink_to(outside)), [first, "link", "copy the file"]),
        ("index is a link", lambda: ((place / NAME).unlink(), (place / NAME).symlink_to(index)), [NAME, "link"]),
        ("pipe", lambda: ((place / first).unlink(), os.mkfifo(place / first)), [first, "not a file"]),
        ("folder", lambda: ((place / first).unlink(), (place / first).mkdir()), [first, "not a file"]),
        ("huge shape", lambda: edit(place / NAME, f'"shape":[{ROWS},2]', '"shape":[4611686018427387903,2]', True),
         ["'w'", "not all of it"]),
        ("huge piece", lambda: edit(place / NAME, f"[[0,{ROWS // 2}],[0,2]]", f"[[0,{ROWS}],[0,2]]", True),
         ["'w'", "does not have"]),
        ("overlap", lambda: edit(place / NAME, f"[[{ROWS // 2},{ROWS}],[0,2]]", f"[[0,{ROWS // 2}],[0,2]]", True),
         ["'w'", "each element once"]),
        ("offset", lambda: edit(place / NAME, '"offset":', '"offset":99999999', True), ["do not lie within", first]),
        ("negative", lambda: edit(place / NAME, '"offset":', '"offset":-', True), ["no checkpoint has"]),
        ("bool", lambda: edit(place / NAME, '"bytes":28', '"bytes":true', True), ["no checkpoint has"]),
        ("deep", lambda: edit(place / NAME, '"state":', '"deep":' + "[" * 10**5 + "]" * 10**5 + ',"state":', True),
         ["no checkpoint has"]),
        ("no such dtype", lambda: edit(place / NAME, '"dtype":"float32"', '"dtype":"load"', True), ["no checkpoint has"]),
    ]  # fmt: skip
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for what, spoil, words in faults:
        restore(saved, place)
        on_first(spoil)
        into = state(0.0)
        text = said(lambda into=into: oc.load_state_dict(into, place))
        assert all(word in text for word in [str(place), *words]), (what, text)
        assert torch.equal(into["w"].to_local(), state(0.0)["w"].to_local()) or what in (
            "cut off",
            "longer",
            "missing",
            "empty",
            "link",
            "pipe",
            "folder",
        ), what
        assert oc.checkpoint.verify(place) != [], what
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000, "a fault made it allocate"
    assert name == "00001"


@multirank(2)
def test_what_does_not_fit(tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    oc.save_state_dict({"layer": {"weight": torch.ones(3, 2), "bias": torch.ones(3)}, "n": 1}, saved)

    def load(weight: Any, name: str = "weight", **how: Any) -> str:
        return said(lambda: oc.load_state_dict({"layer": {name: weight, "bias": torch.ones(3)}}, saved, **how))

    text = load(torch.ones(3, 3))
    assert "'layer.weight'" in text and "[3, 2]" in text and "[3, 3]" in text and "every rank" in text
    text = load(torch.ones(3, 2, dtype=torch.float64))
    assert "float32" in text and "float64" in text and "dtype='cast'" in text
    assert load(torch.ones(3, 2, dtype=torch.float64), dtype="cast") == "no error"
    text = load(torch.ones(3, 2), "wieght")
    assert "'layer.wieght'" in text and "nearest names: layer.weight" in text and "Rename" in text
    assert "'layer.weight'" in text and "without a place" in text
    assert load(torch.ones(3, 2), "wieght", missing="keep", unexpected="ignore") == "no error"
    assert "meta" in load(torch.ones(3, 2, device="meta"))
    assert "want 'error' or 'keep'" in load(torch.ones(3, 2), missing="yes")
    only_one = torch.ones(3, 3 if oc.get_rank() == 1 else 2)
    assert "rank 1: 'layer.weight'" in load(only_one)
    assert "there is no checkpoint" in said(lambda: oc.checkpoint.load(tmp_path))
    assert "does not exist" in said(lambda: oc.checkpoint.load(tmp_path / "nowhere"))
    elsewhere = saved if oc.get_rank() == 0 else tmp_path / "other"
    oc.save_state_dict({"x": torch.ones(1)}, tmp_path / "other")
    assert "rank 0 reads" in said(lambda: oc.checkpoint.load(elsewhere))


@multirank(2)
def test_faults_of_a_save(tmp_path: Path) -> None:
    """The older checkpoint stays, nothing is left over, both ranks hear the same, and the next save works."""
    place, rank = tmp_path / "place", oc.get_rank()
    oc.save_state_dict(state(1.0), place)
    before = sorted(p.name for p in place.iterdir())

    def after_it(text: str, *words: str) -> None:
        assert all(word in text for word in [f"{place} was not saved", *words]), text
        dist.barrier()
        assert sorted(p.name for p in place.iterdir()) == before
        into = state(0.0)
        oc.load_state_dict(into, place)
        assert into["step"] == 1 and torch.equal(into["w"].to_local(), state(1.0)["w"].to_local())

    class Broken:
        def state_dict(self) -> Any:
            if rank == 1:
                raise ValueError("no state today")
            return {}

        def load_state_dict(self, state: Any) -> None: ...

    after_it(
        said(lambda: oc.save_state_dict(state(2.0) | {"broken": Broken()}, place)), "rank 1: ValueError: no state today"
    )
    after_it(
        said(lambda: oc.save_state_dict(state(2.0) | {"f": len}, place)),
        "every rank",
        "'f'",
        "builtin_function_or_method",
    )
    other = torch.ones(2 + rank)
    after_it(
        said(lambda: oc.save_state_dict(state(2.0) | {"o": other}, place)),
        "'o'",
        "[2]",
        "[3]",
        "on rank 1",
        "from_local",
    )
    after_it(said(lambda: oc.save_state_dict(state(2.0) | {f"o{rank}": torch.ones(1)}, place)), "'o0'", "not there")
    after_it(said(lambda: oc.save_state_dict(state(2.0) | {"o": torch.full((3,), rank)}, place)), "'o'", "of values")
    after_it(said(lambda: oc.save_state_dict(state(2.0) | {"n": rank}, place)), "'n' is 0 on rank 0, 1 on rank 1")

    def fails(number: int, at: str, who: int) -> Callable[[str, str], None]:
        def watch(operation: str, path: str) -> None:
            if operation == at and rank == who:
                raise OSError(number, os.strerror(number), path)

        return watch

    for at, who, number in (
        ("write", 0, errno.ENOSPC),
        ("write", 1, errno.EIO),
        ("fsync", 1, errno.EIO),
        ("rename", 0, errno.EROFS),
    ):
        for wait in (True, False):
            files.watchers.append(fails(number, at, who))
            text = said(lambda wait=wait: oc.save_state_dict(state(2.0), place, wait=wait).wait())
            files.watchers.clear()
            after_it(text, os.strerror(number), str(place), f"rank {who}" if at != "rename" else NAME)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)  # a disk that is full, for one rank
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000 if rank == 1 else limits[0], limits[1]))
    text = said(lambda: oc.save_state_dict(state(2.0), place))
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    after_it(text, "rank 1", "File too large", "00001-of-00002.safetensors")
    files.watchers.append(fails(errno.EIO, "write", 1))  # in the background, and nobody waits: the next save says so
    oc.save_state_dict(state(2.0), place, wait=False)
    text = said(lambda: oc.save_state_dict(state(2.0), place))
    files.watchers.clear()
    after_it(text, "rank 1", os.strerror(errno.EIO))
    assert said(lambda: oc.save_state_dict(state(3.0), place)) == "no error"
    assert oc.checkpoint.load(place)["step"] == 3 and len(list(place.iterdir())) == len(before)


@multirank(1)
def test_folders_that_may_not_be_written(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(CheckpointError, match=f"was not saved. {blocked}"):
        oc.save_state_dict({"x": torch.ones(1)}, blocked / "place")
    place = Path(tempfile.mkdtemp())
    oc.save_state_dict({"x": torch.ones(1)}, place)
    place.chmod(0o555)
    for folder in (place, place / "below"):
        if os.geteuid() == 0:  # who may do all
            os.seteuid(65534)
        with pytest.raises(CheckpointError, match=f"was not saved. {place}.*Permission denied"):
            oc.save_state_dict({"x": torch.zeros(1)}, folder)
        if os.getuid() == 0:
            os.seteuid(0)
    assert oc.checkpoint.load(place)["x"].item() == 1
    shutil.rmtree(place)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MB, for who may mount one."""
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(place)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("mounting takes rights that this user does not have")
    yield place
    subprocess.run(["umount", str(place)], check=True)


@multirank(2)
def test_a_full_disk(small_disk: Path) -> None:
    place = small_disk / "place"
    oc.save_state_dict(state(1.0, 3000), place)
    free = shutil.disk_usage(small_disk).free
    for wait in (True, False):
        text = said(lambda wait=wait: oc.save_state_dict(state(2.0), place, wait=wait).wait())
        assert "No space left on device" in text and "00002-0000" in text, text
        dist.barrier()
        assert len(list(place.iterdir())) == 3 and shutil.disk_usage(small_disk).free == free
    into = state(0.0, 3000)
    oc.load_state_dict(into, place)
    assert into["step"] == 1 and torch.equal(into["w"].to_local(), state(1.0, 3000)["w"].to_local())
    assert said(lambda: oc.save_state_dict(state(3.0, 3000), place)) == "no error"


@multirank(2)
def test_a_rank_that_does_not_come(tmp_path: Path) -> None:
    from datetime import timedelta

    world.TIMEOUT = timedelta(seconds=0.5)
    if oc.get_rank() == 0:
        with pytest.raises(CheckpointError, match=r"rank\(s\) \[1\] did not come within 0.5 s.*branch on the rank"):
            oc.save_state_dict(state(), tmp_path / "place")
        assert not (tmp_path / "place").exists()
        (tmp_path / "told").touch()
    while not (tmp_path / "told").exists():  # not in a message: there it would be told at once that it cannot come
        time.sleep(0.02)
    dist.barrier()
    world.TIMEOUT = timedelta(seconds=60)
    if oc.get_rank() == 1:  # it comes late: it hears the same
        with pytest.raises(CheckpointError, match="did not come"):
            oc.save_state_dict(state(), tmp_path / "place")
    dist.barrier()
    assert said(lambda: oc.save_state_dict(state(), tmp_path / "place")) == "no error"


@multirank(2)
def test_a_save_on_one_rank_alone_is_told_at_once(tmp_path: Path) -> None:
    x, place = oc.from_local(torch.ones(3), MESH, [oc.Partial()]), tmp_path / "place"
    if oc.get_rank() == 0:
        words = (
            r"at .*test_checkpoint_faults.*rank\(s\) \[1\] do not come: rank 1 waits in all_reduce .*out of 'if onecard"
        )
        with pytest.raises(CheckpointError, match=words):
            oc.checkpoint.save({"x": 1}, place)
        with pytest.MonkeyPatch.context() as m:
            m.setattr("onecard.comm.world.gone.ended", lambda ranks: [*ranks])
            with pytest.raises(CheckpointError, match=r"rank\(s\) \[1\] do not come: rank 1 has ended.*on the rank$"):
                oc.checkpoint.save({"x": 1}, place)
    assert oc.unshard(x).tolist() == [2.0] * 3
    for how in ("waits in", "has ended") if oc.get_rank() == 1 else ():  # which hears what was said of it
        with pytest.raises(CheckpointError, match=how):
            oc.checkpoint.save({"x": 1}, place)
    with pytest.MonkeyPatch.context() as m:
        m.setattr("onecard.comm.agree.meeting._PATIENCE", 0.5)
        if oc.get_rank() == 1:
            time.sleep(2.5)
            oc.checkpoint.save({"x": 2}, place)
        else:
            with pytest.warns(
                UserWarning, match=r"rank\(s\) \[1\] have not come for \d s, and are waited for.*on the rank"
            ):
                oc.checkpoint.save({"x": 2}, place)
    assert oc.checkpoint.load(place) == {"x": 2}


def test_two_jobs_in_one_folder(tmp_path: Path) -> None:
    held = claim.take(tmp_path)  # of a save that goes on
    with pytest.raises(
        CheckpointError, match=rf"another job saves there \(process {os.getpid()} of.*folder of its own"
    ):
        oc.save_state_dict({"x": torch.zeros(1)}, tmp_path)
    os.close(held)
    oc.save_state_dict({"x": torch.zeros(1)}, tmp_path)
    assert oc.checkpoint.load(tmp_path)["x"].item() == 0


def saves_and_lives_on(path: str, ready: str, end: str) -> None:
    for step in (1, 2):  # its own claim is not in its way
        oc.checkpoint.save({"x": torch.ones(1)}, path, step=step)
    dist.barrier()
    Path(ready).touch()
    while not Path(end).exists():
        time.sleep(0.02)


def comes_second(path: str, ready: str, end: str) -> None:
    deadline = time.monotonic() + 60
    while not Path(ready).exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    for what in (lambda: oc.checkpoint.save({"x": torch.zeros(1)}, path, step=3), lambda: oc.save_state_dict({}, path)):
        with pytest.raises(
            CheckpointError, match=r"another job saves there \(process \d+ of this host\), and has not ended"
        ):
            what()
    assert [found.step for found in oc.checkpoint.list(path)] == [1, 2]
    assert oc.checkpoint.load(oc.checkpoint.latest(path))["x"].item() == 1  # to read is everybody's
    dist.barrier()
    Path(end).touch()


def test_a_jobs_folder_is_its_own_until_it_ends(tmp_path: Path) -> None:
    given = [str(tmp_path / name) for name in ("run", "ready", "end")]
    with ThreadPoolExecutor() as pool:
        first = pool.submit(run_ranks, saves_and_lives_on, 2, *given)
        try:
            run_ranks(comes_second, 2, *given)
        finally:
            Path(given[2]).touch()
        first.result()
    oc.checkpoint.save({"x": torch.zeros(1)}, given[0], step=3)  # it has ended
    assert [found.step for found in oc.checkpoint.list(given[0])] == [1, 2, 3]


def test_interrupted_steps_are_skipped_and_cleaned_up(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        oc.checkpoint.save({"x": torch.full((4,), float(step))}, tmp_path, step=step)
    four, three = tmp_path / "step-00000004", tmp_path / "step-00000003"
    (four / NAME).unlink()
    flip(three / NAME, 300, 2)
    with pytest.warns(oc.checkpoint.CheckpointWarning) as heard:
        found = oc.checkpoint.latest(tmp_path)
    assert found == tmp_path / "step-00000002"
    assert ["interrupted" in str(heard[0].message), "SHA-256" in str(heard[1].message)] == [True, True]
    assert [bool(f.problem) for f in oc.checkpoint.list(tmp_path)] == [False, False, True, True]
    assert oc.checkpoint.load(tmp_path)["x"][0] == 2
    oc.checkpoint.save({"x": torch.full((4,), 5.0)}, tmp_path, step=5, keep=2)
    # What was interrupted is gone, the oldest good one too; the damaged one counts for nothing, and stays to be looked at.
    assert [f.step for f in oc.checkpoint.list(tmp_path)] == [2, 3, 5]
    assert json.loads((tmp_path / "step-00000005" / NAME).read_text())["content"]["step"] == 5


def test_a_folder_made_anew_is_claimed_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world, "is_job", lambda: True)
    place = tmp_path / "steps"
    for _ in range(2):
        place.mkdir()
        assert claim.take(place) == -1
        other = os.open(place, os.O_RDONLY)
        with pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(other)
        place.rmdir()
    claim.give_up(place)
