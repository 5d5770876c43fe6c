"""`onecard doctor`: what it says of machines that lack something, in words and by its exit status; on this one, as it is."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from onecard import _needed
from onecard.cli import main
from onecard.commands import doctor
from onecard.doctor import facts as looked
from onecard.doctor import network
from onecard.doctor.facts import Facts, look
from onecard.doctor.judge import STATES, judge

ROOT = Path(__file__).parents[1]
LAN = network.Network("node1", ("10.0.0.1",), {"lo": "127.0.0.1", "eth0": "10.0.0.1"})
GOOD = Facts(
    "0.1.0", "3.12.1", "2.13.0", "CPU", (), 0, "", True, (2**34, 2**34), 8, 8, 0.0, 2**36, 0, (65536, 65536),
    {"LD_PRELOAD": "/usr/lib/libtcmalloc.so.4"}, {}, {"matplotlib": "3.9"}, LAN,
)  # fmt: skip
RANKS = {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "node1", "MASTER_PORT": "29500"}


def on(**changes):
    """The findings of a machine that is good but for these facts, by subject."""
    return {finding.subject: finding for finding in judge(replace(GOOD, **changes))}


def net(**changes):
    return replace(LAN, **changes)


def test_nothing_is_found_where_nothing_is():
    assert {finding.state for finding in judge(GOOD)} == {"fine"}
    assert all(not finding.repair for finding in judge(GOOD))


GPU = {"gpus": ("H100", "H100"), "devices": 2, "built": "CUDA 12.8", "nccl": "2.27"}
TABLE = {
    "torch too old": ({"torch": "2.9.1"}, "torch", "broken", "needs torch 2.11 or newer; here is torch 2.9.1", "pip install"),
    "no /dev/shm": ({"dev_shm": None}, "/dev/shm", "broken", "loaders with num_workers > 0 fail", "num_workers=0"),
    "64 MB /dev/shm": ({"dev_shm": (2**26, 2**26)}, "/dev/shm", "risk", "workers die of a bus error", "--shm-size"),
    "full /dev/shm": ({"dev_shm": (2**34, 2**20)}, "/dev/shm", "risk", "1.00 MiB free", "--shm-size"),
    "one core": ({"cores": 1}, "cores", "slow", "1 of 8: CPU ranks take turns on it", "taskset"),
    "half a core": ({"quota": 0.5}, "cores", "slow", "gives 0.5 at a time", "--cpus"),
    "a quota": ({"quota": 2.0}, "cores", "slow", "threads beyond that are held up", "OMP_NUM_THREADS=2"),
    "threads": ({"environment": {"OMP_NUM_THREADS": "16"}}, "threads", "slow", "OMP_NUM_THREADS=16, for 8 cores", "unset"),
    "no memfd": ({"shared": False}, "messages", "slow", "ranks of this host use Gloo", "Linux"),
    "a chosen backend": ({"environment": {"ONECARD_BACKEND": "gloo"}}, "messages", "slow", "ONECARD_BACKEND=gloo", "unset"),
    "torch for the CPU": ({"devices": 4}, "GPUs", "slow", "torch is built for the CPU", "build of torch for CUDA"),
    "hidden GPUs": (
        {"devices": 4, "built": "CUDA 12.8", "environment": {"CUDA_VISIBLE_DEVICES": ""}}, "GPUs", "slow", "hides them", "unset",
    ),
    "an old driver": ({"devices": 4, "built": "CUDA 13.0"}, "GPUs", "broken", "sees none", "update the driver"),
    "no NCCL": ({**GPU, "nccl": ""}, "NCCL", "broken", "GPUs cannot send", "with NCCL"),
    "glibc": ({"allocator": {"MALLOC_MMAP_MAX_": "0"}}, "allocator", "slow", "back to the kernel each step", "tcmalloc"),
    "few files": ({"files": (256, 4096)}, "open files", "risk", "256 open files", "ulimit -n 4096"),
    "no more files": ({"files": (256, 256)}, "open files", "risk", "256 open files", "LimitNOFILE"),
    "Debian's name": ({"network": net(own=("127.0.1.1",))}, "Gloo", "risk", "resolves to 127.0.1.1, the loopback", "=eth0"),
    "no name": ({"network": net(own=())}, "Gloo", "risk", "node1, does not resolve", "/etc/hosts"),
    "no interface": ({"environment": {"GLOO_SOCKET_IFNAME": "ib0"}}, "Gloo", "broken", "no interface is ib0", "=eth0"),
    "half a launcher": ({"environment": {"RANK": "1"}}, "launcher", "broken", "RANK set, but not WORLD_SIZE", "onecard run"),
    "an unknown master": ({"environment": RANKS}, "MASTER_ADDR", "broken", "node1 does not resolve", "rank 0's host"),
    "another's master": (
        {"environment": RANKS, "network": net(master=("10.0.0.9",))}, "MASTER_ADDR", "broken", "no interface here has",
        "MASTER_ADDR=10.0.0.1",
    ),
    "a master on the loopback": (
        {"environment": RANKS, "network": net(master=("127.0.0.1",))}, "MASTER_ADDR", "broken", "would wait for itself", "rank 0",
    ),
    "a wrong port": (
        {"environment": RANKS | {"MASTER_PORT": "x"}, "network": net(master=("10.0.0.1",))}, "MASTER_PORT", "broken",
        "'x' is no port", "29500",
    ),
    "nobody there": (
        {"environment": RANKS | {"RANK": "2"}, "network": net(master=("10.0.0.9",), answers=False)}, "MASTER_ADDR", "risk",
        "nobody listens at node1:29500", "start rank 0",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TABLE)
def test_what_is_said(name):
    changes, subject, state, text, repair = TABLE[name]
    found = on(**changes)
    assert found[subject].state == state
    assert text in found[subject].text
    assert repair in found[subject].repair
    others = [f for f in found.values() if f.state != "fine" and f.subject != subject]
    assert others == []  # one fault, one line


def test_an_address_is_said_once():
    ranks = RANKS | {"MASTER_ADDR": "10.0.0.9"}
    assert on(environment=ranks, network=net(master=("10.0.0.9",)))["MASTER_ADDR"].text.count("10.0.0.9") == 1


def test_gpus_that_are_there():
    found = on(**GPU)
    assert found["GPUs"].text == "2 x H100" and found["NCCL"].text == "2.27" and found["allocator"].state == "fine"
    assert on(environment=RANKS, network=net(master=("10.0.0.1",)))["MASTER_ADDR"].state == "fine"


def test_the_exit_status_and_json(monkeypatch, capsys):
    for facts, status in ((GOOD, 0), (replace(GOOD, cores=1), 0), (replace(GOOD, dev_shm=None), 1)):
        monkeypatch.setattr(doctor, "look", lambda facts=facts: facts)
        assert main(["doctor"]) == status
        text = capsys.readouterr().out
        assert ("num_workers=0" in text) == (status == 1)
        assert main(["doctor", "--json"]) == status
        found = json.loads(capsys.readouterr().out)
        assert found["facts"]["cores"] == facts.cores
        assert {finding["state"] for finding in found["findings"]} <= {*STATES}


def test_this_machine_as_it_is():
    facts = look({})
    assert facts.cores >= 1 and facts.memory > 2**28 and facts.files[0] > 0
    assert facts.network.interfaces["lo"] == "127.0.0.1"
    assert network.look({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "RANK": "1"}).answers is False
    assert network.look({"MASTER_ADDR": "no such host"}).master == ()


# -- machines that are so, as far as a namespace can make them ----------------------------------------------------------------

ENTER = ["unshare", "--mount", "sh", "-c"]
namespaces = pytest.mark.skipif(
    not shutil.which("unshare") or subprocess.run([*ENTER, "true"], capture_output=True, check=False).returncode != 0,
    reason="this user cannot make a mount namespace",
)


def doctored(prepare, **environment):
    """The findings of a process of its own, behind a command that changes its machine; its status too."""
    command = f"{prepare} && exec {sys.executable} -m onecard doctor --json"
    kept = {name: value for name, value in os.environ.items() if name not in (*RANKS, "GLOO_SOCKET_IFNAME")}
    done = subprocess.run(
        [*ENTER, command], capture_output=True, text=True, timeout=120, env=kept | environment, check=False
    )
    assert done.stdout, done.stderr[-2000:]
    return {finding["subject"]: finding for finding in json.loads(done.stdout)["findings"]}, done.returncode


@pytest.mark.proof
@namespaces
def test_without_dev_shm_on_one_core():
    found, status = doctored("mount -t tmpfs -o ro tmpfs /dev/shm && taskset -p 1 $$ > /dev/null")
    assert (found["/dev/shm"]["state"], status) == ("broken", 1)
    assert found["cores"]["state"] == "slow"


@pytest.mark.proof
@namespaces
def test_64_megabytes_and_a_wrong_master():
    ranks = RANKS | {"MASTER_ADDR": "192.0.2.7"}  # an address for documents, which nobody has
    found, status = doctored("mount -t tmpfs -o size=64m tmpfs /dev/shm", **ranks)
    assert (found["/dev/shm"]["state"], found["MASTER_ADDR"]["state"], status) == ("risk", "broken", 1)
    assert found["/dev/shm"]["text"].startswith("64.00 MiB")


def test_an_old_torch_is_said_before_anything_fails(tmp_path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("__version__ = '2.9.1'\n")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); sys.path.insert(1, {str(ROOT / 'src')!r}); import onecard._needed"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode != 0
    assert "onecard needs torch 2.11 or newer; here is torch 2.9.1" in done.stderr
    paths = os.pathsep.join([str(tmp_path), str(ROOT / "src")])
    done = subprocess.run(
        [sys.executable, "-m", "onecard", "doctor"], capture_output=True, text=True, timeout=60, check=False,
        env=os.environ | {"PYTHONPATH": paths},
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.strip() == _needed.complaint("2.9.1")
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert f"torch>={'.'.join(map(str, _needed.OLDEST))}" in wanted


def test_the_table_of_the_page_is_true():
    page = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
    rows = [
        line.strip("| ").split(" | ") for line in page.split("|---|---|---|\n", 1)[1].split("\n\n", 1)[0].splitlines()
    ]
    assert {row[0] for row in rows} >= {
        "no /dev/shm",
        "64 MB /dev/shm",
        "one core",
        "another's master",
        "torch too old",
    }
    for name, text, state in rows:
        changes, subject, *_ = TABLE[name]
        found = on(**changes)[subject]
        assert (text, state) == (f"{found.text}. Repair: {found.repair}", found.state)


@pytest.mark.parametrize(
    "files, cores",
    [
        ({"cpu.max": "150000 100000\n"}, 1.5),
        ({"cpu.max": "max 100000\n"}, 0.0),
        ({"cpu/cpu.cfs_quota_us": "50000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 0.5),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 0.0),
        ({}, 0.0),
    ],
)
def test_cores_that_the_control_group_gives(files, cores, tmp_path, monkeypatch):
    """Both versions of control groups, with a quota and without."""
    monkeypatch.setattr(looked, "Path", lambda name: tmp_path / name.removeprefix("/sys/fs/cgroup").lstrip("/"))
    (tmp_path / "cpu").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert looked._quota() == cores
