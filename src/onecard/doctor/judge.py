"""What facts mean: fine, slow, a risk or broken, in words, with the repair. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from onecard import _needed
from onecard.doctor.facts import EXTRAS, Facts
from onecard.doctor.network import is_loopback
from onecard.launch._allocator import CHOSEN
from onecard.planning.job import bytes_in_words

STATES = ("fine", "slow", "risk", "broken")
LITTLE_SHM = 2**30
"""Bytes of /dev/shm below which batches of loaders with workers may not fit: Docker gives 64 MiB."""
FEW_FILES = 1024
"""Open files below which jobs of many ranks and loaders end."""

RENDEZVOUS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables by which ranks that a launcher has started meet."""


@dataclass(frozen=True)
class Answer:
    """One line of the answer.

    Attributes:
        subject: what it is about; state: one of ``STATES``; text: what is so, and what follows.
        repair: what to do, "" if nothing.
    """

    subject: str
    state: str
    text: str
    repair: str = ""

    def data(self) -> dict[str, str]:
        """As JSON can hold it."""
        return {"subject": self.subject, "state": self.state, "text": self.text, "repair": self.repair}


def judge(facts: Facts) -> list[Answer]:
    """All there is to say of a machine."""
    return [finding for look in _LOOKS for finding in look(facts)]


def _versions(facts: Facts) -> Iterator[Answer]:
    text = f"torch {facts.torch} for {facts.built}, onecard {facts.onecard}, Python {facts.python}"
    complaint = _needed.complaint(facts.torch)
    if complaint:
        words, _, repair = complaint.partition(" The repair: ")
        yield Answer("torch", "broken", words.removesuffix("."), repair)
    else:
        yield Answer("torch", "fine", text)


def _gpus(facts: Facts) -> Iterator[Answer]:
    if facts.gpus:
        names = ", ".join(f"{facts.gpus.count(name)} x {name}" for name in dict.fromkeys(facts.gpus))
        yield Answer("GPUs", "fine", names)
    elif facts.devices and facts.built == "CPU":
        text = f"the driver has {facts.devices}, but torch is built for the CPU: ranks run on the CPU"
        yield Answer("GPUs", "slow", text, "install the build of torch for CUDA that pytorch.org names for this driver")
    elif facts.devices and "CUDA_VISIBLE_DEVICES" in facts.environment:
        text = f"the driver has {facts.devices}; CUDA_VISIBLE_DEVICES={facts.environment['CUDA_VISIBLE_DEVICES']!r} hides them"
        yield Answer("GPUs", "slow", text, "unset CUDA_VISIBLE_DEVICES")
    elif facts.devices:
        text = f"the driver has {facts.devices}, torch ({facts.built}) sees none: the driver may be too old for it"
        yield Answer(
            "GPUs",
            "broken",
            text,
            "update the driver, or install an older build of torch: nvidia-smi names the CUDA that it can",
        )
    else:
        yield Answer("GPUs", "fine", "none: ranks run on the CPU")
    if facts.gpus and facts.nccl:
        yield Answer("NCCL", "fine", facts.nccl)
    elif facts.gpus:
        yield Answer(
            "NCCL",
            "broken",
            "this torch has none: GPUs cannot send to each other",
            "install a build of torch with NCCL",
        )


def _messages(facts: Facts) -> Iterator[Answer]:
    named = facts.environment.get("ONECARD_BACKEND")
    if named and named != "shm" and facts.shared and not facts.gpus:
        text = f"ONECARD_BACKEND={named}: ranks of this host do not share memory; small messages take several times as long"
        yield Answer("messages", "slow", text, "unset ONECARD_BACKEND")
    elif facts.shared:
        yield Answer("messages", "fine", "ranks of this host share memory")
    else:
        text = "no futexes or no memfd here: ranks of this host use Gloo; small messages take several times as long"
        yield Answer("messages", "slow", text, "Linux 3.17 or newer, on x86-64 or AArch64")


def _shared_memory(facts: Facts) -> Iterator[Answer]:
    repair = (
        "mount -t tmpfs -o size=8g tmpfs /dev/shm; in Docker --shm-size=8g, in Kubernetes an emptyDir of medium Memory"
    )
    if facts.dev_shm is None:
        text = "there is none, or none that can be written to: loaders with num_workers > 0 fail. Messages of ranks need none"
        yield Answer("/dev/shm", "broken", text, f"{repair}; or num_workers=0")
        return
    size, free = facts.dev_shm
    text = f"{bytes_in_words(size)}, {bytes_in_words(free)} free"
    if min(size, free) < LITTLE_SHM:
        text += (
            ": batches of loaders with num_workers > 0 go through it; where they do not fit, workers die of a bus error"
        )
        yield Answer("/dev/shm", "risk", text, repair)
    else:
        yield Answer("/dev/shm", "fine", text)


def _cores(facts: Facts) -> Iterator[Answer]:
    usable = min(facts.cores, facts.quota or facts.cores)
    text = f"{facts.cores} of {facts.machine_cores}" if facts.cores < facts.machine_cores else f"{facts.cores}"
    if 0 < facts.quota < facts.cores:
        text += f", of which the control group gives {facts.quota:g} at a time"
    if usable < 2:
        text += ": CPU ranks take turns on it, and each waits for the others"
        repair = "give the job more, by cpuset, affinity or quota (taskset, --cpus)" if facts.machine_cores > 1 else ""
        yield Answer("cores", "slow", text, repair)
    elif 0 < facts.quota < facts.cores:
        text += ": threads beyond that are held up"
        yield Answer(
            "cores", "slow", text, f"OMP_NUM_THREADS={max(1, int(facts.quota))} divided by the ranks, or a larger quota"
        )
    else:
        yield Answer("cores", "fine", text)
    threads = facts.environment.get("OMP_NUM_THREADS", "")
    if threads.isdecimal() and int(threads) > usable:
        text = f"OMP_NUM_THREADS={threads}, for {usable:g} cores: threads of one rank hold each other up"
        yield Answer("threads", "slow", text, "unset it: onecard run gives each rank its share of the cores")
    elif threads:
        yield Answer("threads", "fine", f"OMP_NUM_THREADS={threads}, of each rank")
    else:
        yield Answer("threads", "fine", "onecard run gives each rank its share of the cores")


def _memory(facts: Facts) -> Iterator[Answer]:
    text = bytes_in_words(facts.memory)
    if 0 < facts.memory_limit < facts.memory:
        text += f", of which the control group gives {bytes_in_words(facts.memory_limit)}"
    yield Answer("memory", "fine", text)


def _allocator(facts: Facts) -> Iterator[Answer]:
    chosen = [name for name in CHOSEN if name in facts.environment]
    preload = facts.allocator.get("LD_PRELOAD", "")
    if facts.gpus:
        yield Answer("allocator", "fine", "torch's own, on GPUs")
    elif chosen:
        yield Answer("allocator", "fine", f"as you chose by {', '.join(chosen)}")
    elif preload:
        yield Answer("allocator", "fine", f"onecard run takes {preload}")
    else:
        text = "glibc's; onecard run tells it to keep large blocks; python train.py gives them back to the kernel each step"
        yield Answer("allocator", "slow", text, "apt install libtcmalloc-minimal4: onecard run finds it")


def _files(facts: Facts) -> Iterator[Answer]:
    soft, hard = facts.files
    if 0 <= soft < FEW_FILES:
        text = f"{soft:,} open files of a process: many ranks, or loaders with many workers, need more"
        more = f"ulimit -n {hard}" if hard > soft else "raise the limit (ulimit -Hn, LimitNOFILE of the service)"
        yield Answer("open files", "risk", text, more)
    else:
        yield Answer("open files", "fine", f"{soft:,} of a process" if soft >= 0 else "no limit")


def _interfaces(facts: Facts) -> Iterator[Answer]:
    network = facts.network
    named = facts.environment.get("GLOO_SOCKET_IFNAME", "")
    others = [name for name, address in network.interfaces.items() if address and not is_loopback(address)]
    missing = [name for name in named.split(",") if name and name not in network.interfaces]
    repair = (
        f"for several hosts: GLOO_SOCKET_IFNAME={others[0] if others else 'the interface that leads to the others'}"
    )
    if missing:
        text = f"GLOO_SOCKET_IFNAME={named}: no interface is {', '.join(missing)}; there are {', '.join(network.interfaces)}"
        yield Answer("Gloo", "broken", text, f"unset it, or {repair.removeprefix('for several hosts: ')}")
    elif named:
        yield Answer("Gloo", "fine", f"takes {named}, as GLOO_SOCKET_IFNAME says")
    elif not network.own:
        text = f"this host's own name, {network.host}, does not resolve: Gloo takes the loopback, where no other host reaches it"
        yield Answer("Gloo", "risk", text, f"{repair}; or a line in /etc/hosts with this host's address and name")
    elif is_loopback(network.own[0]):
        text = (
            f"this host's own name, {network.host}, resolves to {network.own[0]}, the loopback, where no other host reaches it. "
            "One host is fine"
        )
        yield Answer("Gloo", "risk", text, f"{repair}; or this host's own address for its name in /etc/hosts")
    else:
        address = network.own[0]
        where = network.interface_of(address)
        yield Answer(
            "Gloo",
            "fine",
            f"takes {address}" + (f" ({where})" if where else "") + f", to which {network.host} resolves",
        )


def _launched(facts: Facts) -> Iterator[Answer]:
    given = facts.environment
    if not any(name in given for name in RENDEZVOUS):
        yield Answer(
            "launcher", "fine", "no variables of one here: python train.py is one rank, onecard run makes several"
        )
        return
    missing = [name for name in RENDEZVOUS if name not in given]
    if missing:
        text = f"{', '.join(n for n in RENDEZVOUS if n in given)} set, but not {', '.join(missing)}"
        yield Answer("launcher", "broken", text, "set all four, or unset them and take onecard run")
    if "MASTER_ADDR" in given:
        yield _master(facts)


def _master(facts: Facts) -> Answer:
    given, network = facts.environment, facts.network
    name, port = given["MASTER_ADDR"], given.get("MASTER_PORT", "")
    own = next((a for a in network.interfaces.values() if a and not is_loopback(a)), "127.0.0.1")
    several = given.get("WORLD_SIZE", "1") != given.get("LOCAL_WORLD_SIZE", given.get("WORLD_SIZE", "1"))
    if not network.master:
        return Answer(
            "MASTER_ADDR", "broken", f"{name} does not resolve: no rank can meet there", "the address of rank 0's host"
        )
    if port and not (port.isdecimal() and 0 < int(port) < 65536):
        return Answer("MASTER_PORT", "broken", f"{port!r} is no port", "a free one of rank 0's host, such as 29500")
    first = network.master[0]
    there = first if name == first else f"{name} is {first}"
    if given.get("RANK", "0") == "0" and not network.is_own(first):
        text = f"{there}, which no interface here has; but rank 0 is here, and listens there"
        return Answer(
            "MASTER_ADDR", "broken", text, f"MASTER_ADDR={own} on all ranks, or start rank 0 on the host that has it"
        )
    if several and is_loopback(first):
        text = f"{there}, the loopback, but ranks run on several hosts: each host would wait for itself"
        return Answer("MASTER_ADDR", "broken", text, "the address of rank 0's host, as the others reach it")
    if network.answers is False:
        text = (
            f"nobody listens at {name}:{port} ({first}) yet: rank 0 is not there, or something between blocks the port"
        )
        return Answer("MASTER_ADDR", "risk", text, "start rank 0; then from here: nc -zv " + f"{name} {port}")
    return Answer("MASTER_ADDR", "fine", there)


def _extras(facts: Facts) -> Iterator[Answer]:
    there = [f"{name} {version}" for name, version in facts.extras.items() if version]
    absent = [f"{name} ({EXTRAS[name]})" for name, version in facts.extras.items() if not version]
    text = ", ".join(there) or "none"
    yield Answer("extras", "fine", text + (f"; not installed: {', '.join(absent)}" if absent else ""))


_LOOKS: tuple[Callable[[Facts], Iterator[Answer]], ...] = (
    _versions, _gpus, _messages, _shared_memory, _cores, _memory, _allocator, _files, _interfaces, _launched, _extras,
)  # fmt: skip
