"""A training program that saves each step and is killed now and then; a program of its own for the launcher.

PYTHONPATH=src:tests python tests/resumed.py   kills ranks ten times, on 2 and 4 ranks and from 4 to 3: some minutes
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import onecard as oc

SAMPLES, BATCH = 30, 12  # passes of 12, 12 and 6


class Noisy(Dataset[tuple[Tensor, Tensor]]):
    """Samples that draw random numbers as they are read."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.tensor(index), torch.linspace(0, index / SAMPLES, 6) + torch.rand(()) * 0


def run(folder: Path, steps: int, kills: dict[int, tuple[int, int]], stop_at: int = 0) -> dict[str, Any]:
    """Train to so many steps from the newest checkpoint; ``kills``: by attempt, the step after which a rank kills itself."""
    folder.mkdir(exist_ok=True)
    attempt, mesh = (
        int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0),
        oc.ProcessMesh(range(oc.get_world_size()), ["dp"]),
    )
    oc.manual_seed(3 + 100 * attempt)  # what is not restored would be seen
    torch.manual_seed(5)
    net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 1))
    net = oc.shard_layer(net, mesh)
    optimizer = oc.shard_optimizer(
        torch.optim.AdamW(net.parameters(), lr=0.02), lambda key, p, s: oc.reshard(s, mesh, [oc.Shard(0)])
    )
    generator = torch.Generator().manual_seed(7 + attempt)
    loader = oc.shard_dataloader(DataLoader(Noisy(), BATCH, shuffle=True, generator=generator), mesh, "dp")
    oc.manual_seed(11 + attempt if attempt else 11)
    state = {
        "net": net, "optimizer": optimizer, "loader": loader, "random": oc.checkpoint.RandomState(),
        "schedule": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9), "step": 0, "losses": [], "seen": [],
    }  # fmt: skip
    if oc.checkpoint.latest(folder) is not None:
        oc.checkpoint.load(folder, state)
    while state["step"] < steps:
        for indices, rows in loader:
            with oc.one_card_random() if oc.get_world_size() == 1 else open(os.devnull):
                loss = (net(rows).squeeze(-1) - indices / SAMPLES).square().mean()
                optimizer.zero_grad()
                loss.backward()
            optimizer.step()
            state["schedule"].step()
            state["step"] += 1
            state["losses"].append(loss.item())
            state["seen"] += indices.tolist()
            note(folder, "step")
            oc.checkpoint.save(
                state, folder, step=state["step"], keep=2, wait=state["step"] % 2 == 0 or state["step"] == steps
            )
            step, victim = kills.get(attempt, (0, 0))
            if step == state["step"] and oc.get_rank() == victim % oc.get_world_size():
                note(folder, "kill")
                os.kill(os.getpid(), signal.SIGKILL)
            if oc.checkpoint.preempted():
                return state
            if stop_at == state["step"]:
                (folder / "waiting").touch()
                time.sleep(0.3)
            if state["step"] == steps:
                break
    return state


def note(folder: Path, what: str) -> None:
    if what == "kill" or oc.get_rank() == 0:
        with open(folder / "times", "a") as file:
            file.write(f"{what} {time.time()}\n")


def gaps(folder: Path) -> list[float]:
    """Seconds from each kill to the next step."""
    lines = [line.split() for line in (folder / "times").read_text().splitlines()]
    found = []
    for i, (what, at) in enumerate(lines):
        if what == "kill":
            found += [
                min(float(t) - float(at) for w, t in lines[i + 1 :] if w == "step" and float(t) > float(at) + 0.3)
            ]
    return found


def main(folder: str, steps: str, kills: str) -> None:
    place = Path(folder)
    planned = {int(k): tuple(v) for k, v in json.loads(kills).items()}
    state = run(place, int(steps), planned)  # type: ignore[arg-type]
    oc.checkpoint.save({"ended": True, "losses": state["losses"], "seen": state["seen"]}, place / "result")


def launch(
    folder: Path, ranks: str, steps: int, kills: dict[int, tuple[int, int]], forked: bool = False
) -> tuple[int, str]:
    """The program under the launcher."""
    from launching import launch_forked, launch_here

    options = ["--nproc_per_node", ranks, "--max_restarts", str(len(kills)), __file__]
    argv = [*options, str(folder), str(steps), json.dumps(kills)]
    return launch_forked(folder, argv, {}) if forked else launch_here(folder, argv)


def many() -> None:
    from onecard.testing import run_ranks

    rng, steps, kills = random.Random(0), 40, 10
    for ranks in ("2", "3:4", "4"):
        results = []
        for killed in (False, True):
            at = sorted(rng.sample(range(2, steps - 1), kills)) if killed else []
            plan = {i: (step, rng.randrange(4)) for i, step in enumerate(at)}
            with tempfile.TemporaryDirectory() as folder:
                [(status, output)] = run_ranks(launch, 1, Path(folder), ranks, steps, plan, timeout=3000)
                assert status == 0, output
                results.append(oc.checkpoint.load(Path(folder) / "result"))
                waits = gaps(Path(folder)) if killed else []
        pairs = list(zip(*(r["losses"] for r in results), strict=True))
        worst = max(abs(a - b) / abs(a) for a, b in pairs)
        print(f"{ranks} ranks, {kills} kills at {at}: {len(pairs)} losses, largest relative difference {worst:.1e}, "
              f"samples {'the same' if results[0]['seen'] == results[1]['seen'] else 'DIFFERENT'}; from kill to step "
              f"{min(waits):.1f} to {max(waits):.1f} s", flush=True)  # fmt: skip


if __name__ == "__main__":
    main(*sys.argv[1:]) if len(sys.argv) > 1 else many()
