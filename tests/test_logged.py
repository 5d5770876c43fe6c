"""What a program logs of a distributed loss: what it would log of a plain one. Twin: the same on one card."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import onecard as oc
from onecard.testing import multirank, run_ranks


class Encoder(json.JSONEncoder):
    """As wandb's: a plain tensor is known by the name of its type."""

    def default(self, o: Any) -> Any:
        if f"{type(o).__module__}.{type(o).__name__}" == "torch.Tensor":
            return o.item() if o.dim() == 0 else o.tolist()
        return super().default(o)


class Other(json.JSONEncoder):
    """Knows sets, and no tensors."""

    def default(self, o: Any) -> Any:
        return sorted(o) if isinstance(o, set) else super().default(o)


def by_isinstance(o: Any) -> Any:
    return o.tolist() if isinstance(o, Tensor) else str(o)


LOGS: dict[str, Callable[[Tensor], Any]] = {
    "f-string": lambda loss: f"{loss:.4f} {loss:>12.2e}",
    "format": lambda loss: format(loss, ".4f") + str(loss.item()),
    "numbers": lambda loss: [float(loss), int(loss), round(float(loss), 2), loss.item(), loss.tolist()],
    "round": lambda loss: round(loss, 2),  # torch has none
    "numpy": lambda loss: np.asarray(loss.detach()).tolist() + np.mean([loss.detach(), 1.0]).item(),
    "csv": lambda loss: f"{loss.item()},{float(loss.sqrt())}",
    "json": lambda loss: json.dumps({"loss": loss}),  # refused, with one card too
    "json to a file": lambda loss: json.dump([loss], io.StringIO()),
    "json.item": lambda loss: json.dumps({"loss": loss.item(), "all": loss.expand(2).tolist()}),
    "json default=float": lambda loss: json.dumps({"loss": loss}, default=float),
    "json default=isinstance": lambda loss: json.dumps({"loss": [loss, {1}]}, default=by_isinstance),
    "an encoder that knows": lambda loss: json.dumps({"loss": loss, "a": [loss.detach(), loss.expand(3)]}, cls=Encoder),
    "an encoder that does not": lambda loss: json.dumps({"set": {2, 1}, "loss": loss}, cls=Other),
}


def values(x: Tensor) -> dict[str, Any]:
    """What each log has; the name of an error where there is one. A new loss each, which nobody has summed yet."""
    found = {}
    for name, log in LOGS.items():
        with warnings.catch_warnings():  # torch's own, of a loss with a graph that becomes a number
            warnings.simplefilter("ignore")
            try:
                found[name] = log((x * x).sum())
            except TypeError as fault:
                found[name] = f"TypeError: {'item' in str(fault)}"
    return found


@multirank(2)
def test_logs_are_one_cards():
    plain = torch.arange(7.0).requires_grad_()
    mesh = oc.ProcessMesh([0, 1], ["dp"])
    twin = oc.shard_tensor(torch.arange(7.0), mesh, [oc.Shard(0)]).requires_grad_()
    assert str((twin * twin).sum().placements) == "(Partial(sum),)"
    found, wanted = values(twin), values(plain)
    refused = {name for name, value in wanted.items() if value == "TypeError: False"}
    assert refused == {"round", "json", "json to a file", "an encoder that does not"}
    for name in refused - {"round"}:
        assert found.pop(name) == "TypeError: True", name  # and says what works
        del wanted[name]
    assert found == wanted


def test_the_error_names_what_works_and_sends_nothing():
    x = oc.shard_tensor(torch.ones(3), oc.ProcessMesh([0], ["x"]), [oc.Shard(0)])
    with pytest.raises(
        TypeError, match=r"DistTensor is not JSON serializable, as a plain tensor is not\. Write loss\.item\(\)"
    ):
        json.dumps({"loss": x.sum()})
    with oc.unpatch(), pytest.raises(TypeError, match=r"Object of type DistTensor is not JSON serializable$"):
        json.dumps({"loss": x.sum()})
    with pytest.raises(TypeError, match=r"Object of type set is not JSON serializable$"):
        json.dumps({1})


def _board(folder: Path) -> list[float]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    mesh = oc.ProcessMesh(range(oc.get_world_size()), ["dp"])
    x = oc.shard_tensor(torch.arange(7.0), mesh, [oc.Shard(0)])
    here = folder / str(oc.get_rank())
    with SummaryWriter(here) as board:
        for step in range(3):
            board.add_scalar("loss", (x * step).sum(), step)
    return [event.value for event in EventAccumulator(str(here)).Reload().Scalars("loss")]


def test_tensorboard_has_the_scalars_of_marked_programs(tmp_path):
    if importlib.util.find_spec("tensorboard") is None:
        pytest.skip("tensorboard is not installed: pip install 'onecard[test]'")
    assert run_ranks(_board, 2, tmp_path, timeout=60.0) == [[0.0, 21.0, 42.0]] * 2


class Friendly:
    """wandb's module as it is, less all else."""

    @staticmethod
    def json_friendly(obj: Any) -> tuple[Any, bool]:
        name = f"{type(obj).__module__}.{type(obj).__name__}"
        return (obj.item() if obj.dim() == 0 else obj.tolist(), True) if name == "torch.Tensor" else (str(obj), False)


def test_a_config_has_values(monkeypatch, tmp_path):
    """By a stand-in for ``wandb.util``: imported ahead of the first tensor, behind it, and left again."""
    mesh = oc.ProcessMesh([0], ["dp"])
    for early in (True, False):
        for name in ("wandb", "wandb.util"):
            sys.modules.pop(name, None)
        here = tmp_path / str(early) / "wandb"
        here.mkdir(parents=True)
        (here / "__init__.py").write_text("from wandb import util\n")
        (here / "util.py").write_text("from test_logged import Friendly\njson_friendly = Friendly.json_friendly\n")
        monkeypatch.syspath_prepend(str(here.parent))
        with oc.unpatch():
            if early:
                import wandb.util
            size = 1013 + early  # a kind of tensor that has not been there: patches are made anew with it
            x = oc.shard_tensor(torch.arange(float(size)), mesh, [oc.Shard(0)])
            import wandb.util

            assert wandb.util.json_friendly(x) == ([*range(size)], True)
            assert wandb.util.json_friendly(x[:3].sum()) == (3.0, True)
            assert wandb.util.json_friendly(torch.ones(2)) == ([1.0, 1.0], True)
            with oc.unpatch():
                assert wandb.util.json_friendly is Friendly.json_friendly
    for name in ("wandb", "wandb.util"):
        sys.modules.pop(name, None)


def _wandb(folder: Path) -> dict[str, Any]:
    os.environ.pop("WANDB_SERVICE", None)  # of the process that started the ranks
    import wandb

    mesh = oc.ProcessMesh(range(oc.get_world_size()), ["dp"])
    x = oc.shard_tensor(torch.arange(7.0), mesh, [oc.Shard(0)])
    settings = {"mode": "offline", "dir": str(folder / str(oc.get_rank())), "settings": wandb.Settings(silent=True)}
    with wandb.init(config={"scale": x.mean(), "all": {"x": x}}, **settings) as run:
        assert run.config["scale"] == 3.0 and run.config["all"]["x"] == [*range(7)]
        for step in range(1, 3):
            run.log({"loss": (x * step).sum(), "parts": [(x * step).sum(), 1]})
        run.summary["last"] = x.mean()
        return {"loss": run.summary["loss"], "parts": [*run.summary["parts"]], "last": run.summary["last"]}


def test_wandb_has_the_scalars_of_marked_programs(tmp_path):
    if importlib.util.find_spec("wandb") is None:
        pytest.skip("wandb is not installed: pip install 'onecard[test]'")
    for rank in ("0", "1"):
        (tmp_path / rank).mkdir()
    found = run_ranks(_wandb, 2, tmp_path, timeout=120.0)
    assert found == [{"loss": 42.0, "parts": [42.0, 1], "last": 3.0}] * 2
