"""The launcher as tests call it: in a rank of the harness, or as a shell does; and which processes are left of it."""

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import torch.distributed as dist

import onecard.launch
from onecard import cli


def launch_here(folder: Path, argv: list[str], terminal: bool = False) -> tuple[int, str]:
    """Calls the launcher in this process; returns its exit status and all that it wrote."""
    os.chdir(folder)
    target = folder / f"output{dist.get_rank()}"
    reader, writer = os.openpty() if terminal else (-1, os.open(target, os.O_WRONLY | os.O_CREAT))
    os.dup2(writer, 1)
    os.dup2(writer, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    os.environ.pop("GLOO_SOCKET_IFNAME", None)
    status = cli.main(["run", *argv])
    return status, os.read(reader, 65536).decode() if terminal else target.read_text()


def launch_node(folder: Path, argv: list[str]) -> tuple[int, str]:
    """Calls the launcher as one of several machines."""
    return launch_here(folder, ["--node_rank", str(dist.get_rank()), *argv])


def write(folder: Path, source: str, name: str = "program.py") -> str:
    (folder / name).write_text(textwrap.dedent(source))
    return name


def start(folder: Path, source: str, *options: str, temporary: Path | None = None) -> subprocess.Popen[str]:
    """Starts the launcher as a shell does, in a process group of its own."""
    command = [sys.executable, "-m", "onecard.launch", *options, write(folder, source)]
    environment = os.environ | {
        "PYTHONPATH": str(Path(onecard.launch.__file__).parents[2]),
        "TMPDIR": str(temporary or folder),
    }
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=folder, env=environment, stdout=pipe, stderr=pipe, text=True, process_group=0)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return "(zombie)" not in Path(f"/proc/{pid}/status").read_text() if os.path.exists("/proc") else True


def pids_in(folder: Path, count: int) -> list[int]:
    """Waits until `count` processes have noted themselves in `folder` as files pid*."""
    deadline = time.monotonic() + 60
    while len(found := [text for path in folder.glob("pid*") if (text := path.read_text())]) < count:
        assert time.monotonic() < deadline, found
        time.sleep(0.05)
    return [int(text) for text in found]


def survivors(pids: list[int]) -> list[int]:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and any(map(alive, pids)):
        time.sleep(0.05)
    return [pid for pid in pids if alive(pid)]
