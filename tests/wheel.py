"""Builds wheel and sdist, and tries the wheel as somebody else has it: in an empty environment, far from this folder.

    make wheel                          # this Python, torch as the Makefile says
    make wheel PYTHON=python3.13

What is tried: the sdist builds the same wheel, and installs by itself; `pip install` needs torch alone to be there; the wheel
imports, has its version and its data, and sees what recorded steps look up; the tutorial is walked; mypy and pyright accept a
typed program of a user, and see a wrong one.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
import venv
import zipfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import tutorial

ROOT = Path(__file__).parents[1]
TYPED = """
import torch
from torch import nn

import onecard as oc
from onecard.testing import multirank

mesh: oc.ProcessMesh = oc.ProcessMesh([0], dim_names=["x"])
weight: oc.DistTensor = oc.shard_tensor(torch.ones(4, 2), mesh, [oc.Shard(0)])
whole: torch.Tensor = oc.unshard(oc.reshard(weight, mesh, [oc.Replicate()]))
model: nn.Module = oc.shard_layer(nn.Linear(2, 2), mesh)
layout: oc.Layout = weight.layout
shape: tuple[int, ...] = layout.local_shape((4, 2), (0,))


@multirank(2)
def test_it() -> None:
    assert oc.get_world_size() == 2
"""
WRONG = "import onecard as oc\n\noc.ProcessMesh([0], dim_names=3)\noc.get_rank().upper()\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", default="2.13.0")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="where wheel and sdist go")
    parser.add_argument("--no-types", action="store_true", help="without mypy and pyright")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="onecard-wheel-") as name:
        folder = Path(name)
        wheel = built(folder, args.out)
        python = empty(folder / "empty", [f"torch=={args.torch}"])
        step("install", python, "-m", "pip", "install", "--quiet", str(wheel))
        step("pip check", python, "-m", "pip", "check")
        imported(python, folder, wheel)
        (source,) = args.out.glob("*.tar.gz")
        again = empty(folder / "of_source", [])
        step("install of the sdist", again, "-m", "pip", "install", "--quiet", "--no-deps", source)
        step(
            "its commands are there",
            again,
            "-c",
            "import importlib.metadata as m; m.entry_points(name='onecard')['onecard']",
        )
        walked(python, folder / "walk")
        if not args.no_types:
            typed(python, folder / "types")
    print(f"{wheel.name} works on Python {sys.version.split()[0]} with torch {args.torch}")


def step(what: str, *command: str | Path, cwd: Path | None = None, fails: bool = False) -> str:
    """One command, with its time; what it prints."""
    begin = time.monotonic()
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL_ENV"))}
    done = subprocess.run([*map(str, command)], cwd=cwd, env=clean, capture_output=True, text=True)
    if (done.returncode != 0) is not fails:
        sys.exit(f"{what}: status {done.returncode}\n{done.stdout}{done.stderr}")
    print(f"{time.monotonic() - begin:6.1f} s  {what}", flush=True)
    return done.stdout


def empty(folder: Path, packages: list[str]) -> Path:
    """The Python of a new environment with these packages and nothing else."""
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    if packages:
        step(f"an empty environment with {', '.join(packages)}", python, "-m", "pip", "install", "--quiet", *packages)
    return python


def built(folder: Path, out: Path) -> Path:
    """The wheel, which is built out of the sdist, so that the sdist is whole."""
    python = empty(folder / "build", ["build"])
    step("sdist, and the wheel out of it", python, "-m", "build", "--outdir", out, ROOT)
    (wheel,) = out.glob("*.whl")
    with zipfile.ZipFile(wheel) as files:
        names = {*files.namelist()}
        (metadata,) = (files.read(n).decode() for n in names if n.endswith("METADATA"))
    theirs = {
        str(p.relative_to(ROOT / "src"))
        for p in (ROOT / "src").rglob("*")
        if p.is_file() and "__pycache__" not in p.parts
    }
    assert theirs <= names, f"the wheel lacks {sorted(theirs - names)}"
    assert "onecard/py.typed" in names and not any(n.startswith(("tests", "docs")) for n in names)
    needs = [
        line.split(": ")[1]
        for line in metadata.splitlines()
        if line.startswith("Requires-Dist") and "extra" not in line
    ]
    assert len(needs) == 5, needs
    return wheel


def imported(python: Path, folder: Path, wheel: Path) -> None:
    said = step("import", python, "-c", "import onecard as oc; print(oc.__version__, oc.__file__)", cwd=folder)
    version, where = said.split()
    assert wheel.name.split("-")[1] == version and str(folder / "empty") in where, said
    assert step("onecard --version", python.parent / "onecard", "--version").split()[1] == version
    step(
        "data files",
        python,
        "-c",
        "import onecard as oc; oc.Machine.preset('A100'); oc.Machine.preset('H100')",
        cwd=folder,
    )
    told = "from onecard.static.guards import self_test; self_test.check()"  # its own test runs on one Python alone
    step("this Python tells what recorded steps look up", python, "-c", told, cwd=folder)


def walked(python: Path, folder: Path) -> None:
    folder.mkdir()
    begin = time.monotonic()
    clean = {"PATH": f"{python.parent}:{os.environ['PATH']}", "PYTHONPATH": ""}
    for line in tutorial.walk(folder, clean):
        print("   ", line)
    print(f"{time.monotonic() - begin:6.1f} s  the tutorial", flush=True)


def typed(python: Path, folder: Path) -> None:
    """mypy and pyright from an environment of their own, so that the one that they look at stays empty."""
    folder.mkdir()
    tools = empty(folder / "tools", ["mypy", "pyright[nodejs]"])
    for name, text in (("right.py", TYPED), ("wrong.py", WRONG)):
        (folder / name).write_text(text, encoding="utf-8")
        fails = name == "wrong.py"
        mypy = [tools, "-m", "mypy", "--strict", "--python-executable", python, name]
        pyright = [tools, "-m", "pyright", "--pythonpath", python, name]
        for command in (mypy, pyright):
            said = step(f"{command[2]} {name}", *command, cwd=folder, fails=fails)
            assert not fails or ("dim_names" in said and "upper" in said), said


if __name__ == "__main__":
    main()
