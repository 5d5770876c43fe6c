"""A state that is not built as the saved one: what fits is loaded, what does not is told, and nothing is left out in silence."""

from __future__ import annotations

import random
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoints import equal
from torch import Tensor, nn

import onecard as oc
from onecard.errors import CheckpointError

SEEDS = [*range(7200, 7500), 20178]


def chunks(count: int, fill: float | None = None) -> list[nn.Module]:
    made = [nn.Linear(2, 2) for _ in range(count)]
    for chunk in made if fill is not None else ():
        for p in chunk.parameters():
            nn.init.constant_(p, fill)
    return made


@pytest.mark.parametrize("kind", [list, tuple, nn.ModuleList])
@pytest.mark.parametrize(("saved", "wanted"), [(2, 4), (3, 2)])
def test_lists_of_another_length(kind: Any, saved: int, wanted: int, tmp_path: Path) -> None:
    """As ``nn.ModuleList.load_state_dict``: an error that names what is missing, or too much; by request what both have."""
    before = kind(chunks(saved))
    oc.checkpoint.save({"model": before, "step": 5}, tmp_path)
    into = {"model": kind(chunks(wanted, 7.0)), "step": 0}
    words = (
        "does not have 4 tensors: 'model.2" if wanted > saved else "2 tensors without a place in the state: 'model.2"
    )
    with pytest.raises(CheckpointError, match=words):
        oc.checkpoint.load(tmp_path, into)
    assert into["step"] == 0 and all((p == 7).all() for m in into["model"] for p in m.parameters())
    oc.checkpoint.load(tmp_path, into, missing="keep", unexpected="ignore")
    for i, chunk in enumerate(into["model"]):
        assert torch.equal(chunk.weight, before[i].weight) if i < saved else (chunk.weight == 7).all()


def test_lists_of_optimizers_and_of_values(tmp_path: Path) -> None:
    models = [*chunks(3)]
    optimizers = [torch.optim.Adam(m.parameters()) for m in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    state = {"models": models, "optimizers": optimizers, "log": [1, 2.5, "three", {"loss": 4}], "best": [torch.ones(2)]}
    oc.checkpoint.save(state, tmp_path)
    with pytest.raises(CheckpointError, match=r"without a place in the state: 'optimizers\.2"):
        oc.checkpoint.load(tmp_path, {"models": models, "optimizers": optimizers[:2], "log": []})
    with pytest.raises(CheckpointError, match=r"does not have a tensor: 'best\.1'"):
        oc.checkpoint.load(tmp_path, {"best": [torch.zeros(2), torch.zeros(2)]})
    for log in ([], [0], [0] * 9):  # values are what the checkpoint has
        assert oc.checkpoint.load(tmp_path, {"log": log})["log"] == [1, 2.5, "three", {"loss": 4}]


def test_what_a_flat_dict_leaves(tmp_path: Path) -> None:
    """``load_state_dict`` of torch, strict: what a file has beyond a dict of tensors is told; whole parts of a state are not."""
    saved = {"a": torch.ones(2), "b": torch.ones(2), "step": 3, "more": {"c": torch.ones(1), "d": 4}}
    oc.save_state_dict(saved, tmp_path)
    with pytest.raises(CheckpointError, match="a tensor and a value without a place in the state: 'b', 'step'"):
        oc.load_state_dict({"a": torch.zeros(2)}, tmp_path)
    oc.load_state_dict({"a": torch.zeros(2), "b": torch.zeros(2), "step": 0}, tmp_path)
    oc.load_state_dict({"a": torch.zeros(2)}, tmp_path, unexpected="ignore")
    with pytest.raises(CheckpointError, match=r"a value without a place in the state: 'more\.d'"):
        oc.load_state_dict({"more": {"c": torch.zeros(1)}}, tmp_path)


def test_views_of_other_values_are_not_the_same(tmp_path: Path) -> None:
    x = torch.tensor([1 + 2j, 3 - 4j])
    source = {"x": x, "y": x.conj(), "z": x.conj().imag, "w": x.imag, "again": x}
    oc.save_state_dict(source, tmp_path / "all")
    assert equal(oc.checkpoint.load(tmp_path / "all"), source)
    for number, few in enumerate(
        ({"x": x, "y": x.conj()}, {"x": x.conj(), "y": x, "z": x})
    ):  # torch saves one dtype of a memory
        torch.save(few, tmp_path / f"{number}.pt")
        oc.checkpoint.convert(tmp_path / f"{number}.pt", tmp_path / str(number))
        assert equal(oc.checkpoint.load(tmp_path / str(number)), few)


def test_negated_views_are_saved_as_they_read(tmp_path: Path) -> None:
    x = torch.arange(4.0)
    oc.save_state_dict({"negated": torch._neg_view(x), "imaginary": torch.complex(x, x).conj().imag}, tmp_path)
    for value in oc.checkpoint.load(tmp_path).values():
        assert torch.equal(value, -x)


def test_memory_that_two_names_share(tmp_path: Path) -> None:
    """Two saved values for one place in memory: torch would keep the one that comes last."""
    oc.save_state_dict(
        {"a": torch.ones(4), "b": torch.zeros(4), "same": torch.ones(4), "half": torch.ones(2)}, tmp_path
    )
    for other, name in ((lambda x: x, "b"), (lambda x: x.flip(0).T if x.dim() > 1 else x[:4], "b")):
        x = torch.full((4,), 7.0)
        with pytest.raises(
            CheckpointError, match="'a' shares memory with 'b' in the state, and their saved values differ"
        ):
            oc.load_state_dict({"a": x, name: other(x)}, tmp_path, unexpected="ignore")
        assert (x == 7).all()
    x = torch.full((4,), 7.0)
    oc.load_state_dict({"a": x, "same": x, "half": x[2:]}, tmp_path, unexpected="ignore")
    assert (x == 1).all()
    oc.save_state_dict({"large": torch.ones(8), "within": torch.ones(2), "none": torch.zeros(2)}, tmp_path / "three")
    x = torch.full((8,), 7.0)
    with pytest.raises(CheckpointError, match=r"'(large|none)' shares memory with '.*, and their saved values differ"):
        oc.load_state_dict({"large": x, "within": x[1:3], "none": x[5:7]}, tmp_path / "three")
    tied = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    tied[1].weight = tied[0].weight
    oc.save_state_dict({"0.weight": torch.ones(2, 2)}, tmp_path / "once")  # as Hugging Face writes tied weights
    oc.checkpoint.load(tmp_path / "once", tied)
    assert (tied[1].weight == 1).all()
    lone = nn.Sequential(nn.Linear(2, 2, bias=False))
    oc.checkpoint.save(tied, tmp_path / "both")
    oc.checkpoint.load(tmp_path / "both", lone)  # a tied weight's other name has no place here, and needs none
    assert (lone[0].weight == 1).all()
    tied[1].weight = nn.Parameter(torch.zeros(2, 2))
    oc.checkpoint.save(tied, tmp_path / "apart")
    with pytest.raises(CheckpointError, match=r"without a place in the state: '1.weight'"):
        oc.checkpoint.load(tmp_path / "apart", lone)


def trained(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


def test_an_optimizer_in_a_checkpoint_of_dcp(tmp_path: Path) -> None:
    """DCP writes the counts of parameters as text. By way of us they are counts again, for torch and for DCP's own script."""
    model, optimizer = trained(0)
    state = {"model": model.state_dict(), "optim": optimizer.state_dict()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    for target in ("onecard", "torch", "dcp"):
        oc.checkpoint.convert(tmp_path / "dcp", tmp_path / f"to {target}", target)

    def check(other: nn.Module, its: torch.optim.Optimizer) -> None:
        assert equal(dict(other.state_dict()), dict(model.state_dict()))
        assert len(its.state) == 4 and equal(its.state_dict()["state"], optimizer.state_dict()["state"])

    loaded = torch.load(tmp_path / "to torch", weights_only=True)
    other, its = trained(1)
    other.load_state_dict(loaded["model"])
    its.load_state_dict(loaded["optim"])
    check(other, its)
    other, its = trained(1)
    into = {"model": other.state_dict(), "optim": its.state_dict()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(into, checkpoint_id=tmp_path / "to dcp", no_dist=True)
    other.load_state_dict(into["model"])
    its.load_state_dict(into["optim"])
    check(other, its)
    for form in ("objects", "dicts"):
        other, its = trained(1)
        into = (
            {"model": other, "optim": its}
            if form == "objects"
            else {"model": other.state_dict(), "optim": its.state_dict()}
        )
        oc.checkpoint.load(tmp_path / "to onecard", into)
        if form == "dicts":
            its.load_state_dict(into["optim"])
        check(other, its)


def test_an_optimizers_names_are_its_own(tmp_path: Path) -> None:
    """Beside an average, in a GAN, alone, as objects and as state dicts: each of these loads each other."""
    (model, optimizer), (enemy, its) = trained(0), trained(1)
    ema = torch.optim.swa_utils.AveragedModel(model)
    copy = trained(2)[0]

    def states(m: Any, o: Any) -> list[dict[str, Any]]:
        return [
            {"model": m, "optimizer": o}, {"ema": ema, "model": m, "optimizer": o}, {"model": m, "copy": copy, "optimizer": o},
            {"other": enemy, "its": its, "model": m, "optimizer": o}, {"model": m.state_dict(), "optimizer": o.state_dict()},
            {"copy": dict(copy.state_dict()), "model": m.state_dict(), "optimizer": o.state_dict()},
        ]  # fmt: skip

    for i, saved in enumerate(states(model, optimizer)):
        oc.checkpoint.save(saved, tmp_path / str(i))
        names = oc.checkpoint.load(tmp_path / str(i))["optimizer"]["state"]
        assert list(names) == ["0.weight", "0.bias", "1.weight", "1.bias"], list(names)
    for i in range(6):
        for form in range(6):
            m, o = trained(3)
            into = {k: v for k, v in states(m, o)[form].items() if k in ("model", "optimizer")}
            oc.checkpoint.load(tmp_path / str(i), into)
            if form > 3:
                o.load_state_dict(into["optimizer"])
            assert equal(o.state_dict()["state"], optimizer.state_dict()["state"]), (i, form)
    both = torch.optim.SGD([*model.parameters(), *enemy.parameters()], lr=0.1, momentum=0.9)
    sum(p.sum() for p in both.param_groups[0]["params"]).backward()
    both.step()
    oc.checkpoint.save({"g": model, "d": enemy, "both": both}, tmp_path / "both")
    assert "d.1.bias" in oc.checkpoint.load(tmp_path / "both")["both"]["state"]  # equal names in two modules
    alone = {"both": oc.checkpoint.load(tmp_path / "both")["both"]}
    oc.checkpoint.save(alone, tmp_path / "alone")
    fresh = torch.optim.SGD([*model.parameters(), *enemy.parameters()], lr=0.5, momentum=0.9)
    oc.checkpoint.load(tmp_path / "alone", {"g": model, "d": enemy, "both": fresh}, missing="keep")
    assert equal(fresh.state_dict()["state"], both.state_dict()["state"]) and fresh.param_groups[0]["lr"] == 0.1
    with pytest.raises(CheckpointError, match=r"parameter 1\.bias"):
        half = torch.optim.SGD([model[0].weight, model[0].bias, model[1].weight], lr=0.1)
        oc.checkpoint.save({"m": model, "o": torch.optim.SGD(model.parameters(), lr=0.1)}, tmp_path / "no states")
        oc.checkpoint.load(tmp_path / "no states", {"m": model, "o": half})


# -- random states -----------------------------------------------------------------------------------------------------------

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64]


def tensor(rng: random.Random, made: list[Tensor]) -> Tensor:
    kind = rng.randrange(8)
    if made and kind < 3:
        x = rng.choice(made)
        views = [x, x.T if x.dim() == 2 else x, x[..., ::2] if x.dim() else x, x.conj() if x.is_complex() else x.detach(),
                 x.imag if x.is_complex() else x, x.clone(), x.reshape(-1)]  # fmt: skip
        return rng.choice(views)
    shape = [rng.randint(0, 3) for _ in range(rng.randint(0, 2))]
    values = torch.tensor([rng.randint(0, 9) for _ in range(int(np.prod(shape)))], dtype=torch.float64).reshape(shape)
    x = values.to(rng.choice(DTYPES))
    x = x * (1 + 2j) if x.is_complex() else x
    made.append(x)
    return x


def nested(rng: random.Random, made: list[Tensor], depth: int = 0) -> Any:
    kind = rng.randrange(10)
    if depth < 3 and (kind < 4 or depth == 0):
        return {rng.choice([f"k{i}", i]): nested(rng, made, depth + 1) for i in range(rng.randint(1, 3))}
    if depth < 3 and kind < 6:
        items = [nested(rng, made, depth + 1) for _ in range(rng.randint(0, 3))]
        return items if rng.random() < 0.5 else tuple(items)
    if kind < 9:
        return tensor(rng, made)
    return rng.choice([1, -2.5, None, "text", True, float("inf"), b"\x01", torch.float16, np.arange(2)])


def blank(value: Any, rng: random.Random) -> Any:
    """A state of the same structure with memory of its own."""
    if isinstance(value, Tensor):
        x = torch.zeros_like(value.resolve_conj().resolve_neg(), memory_format=torch.contiguous_format)
        return x.T.contiguous().T if x.dim() == 2 and rng.random() < 0.3 else x
    if isinstance(value, dict):
        return {k: blank(v, rng) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(blank(v, rng) for v in value)
    return rng.choice([0, None, "old"])


def changed(value: Any, rng: random.Random, told: list[str]) -> Any:
    """A state with a change or two; ``told`` hears of those that may not pass in silence."""
    if isinstance(value, Tensor):
        pick = rng.randrange(24)
        if pick == 0:
            told.append("dtype")
            return torch.zeros_like(value, dtype=torch.float16)
        if pick == 1:
            told.append("shape")
            return value.new_zeros((*value.shape, 2))
        return value
    if isinstance(value, dict):
        made = {k: changed(v, rng, told) for k, v in value.items()}
        if rng.random() < 0.08:
            made["new"] = torch.zeros(2)
            told.append("new key")
        return made
    if isinstance(value, list | tuple):
        pick = rng.randrange(12)
        items = [changed(v, rng, told) for v in (value[:-1] if pick == 0 else value)]
        if pick == 1:
            items.append(torch.zeros(1))
            told.append("longer")
        return rng.choice([list, tuple])(items)
    return value


def flat(value: Any, path: str = "") -> dict[str, Any]:
    """Leaves by path; lists and tuples are alike."""
    if isinstance(value, dict | list | tuple) and value:
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return {k: v for key, item in items for k, v in flat(item, f"{path}/{key}").items()}
    return {path: () if isinstance(value, list | tuple) else value}


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return (
            isinstance(a, Tensor)
            and isinstance(b, Tensor)
            and equal(a.resolve_conj().resolve_neg(), b.resolve_conj().resolve_neg())
        )
    return np.array_equal(a, b) if isinstance(a, np.ndarray) else type(a) is type(b) and a == b


def differences(got: Any, saved: Any) -> list[str]:
    mine, theirs = flat(got), flat(saved)
    return [
        path
        for path in {**mine, **theirs}
        if path not in mine or path not in theirs or not same(mine[path], theirs[path])
    ]


def one(seed: int, place: Path) -> str:
    rng = random.Random(seed)
    saved = {"part": nested(rng, []), "other": nested(rng, [])}
    try:
        oc.save_state_dict(saved, place)
    except CheckpointError as fault:
        assert "would be called" in str(fault), (seed, fault)
        return "refused to save"
    assert not differences(oc.checkpoint.load(place), saved), seed
    told: list[str] = []
    into = {"part": changed(blank(saved["part"], rng), rng, told) if rng.random() < 0.8 else blank(saved["part"], rng)}
    before = {k: v.clone() if isinstance(v, Tensor) else v for k, v in flat(into).items()}
    try:
        got = oc.load_state_dict(into, place)
    except CheckpointError as fault:
        after = flat(into)
        assert all(same(after[k], v) for k, v in before.items()), (seed, "changed by a load that failed")
        assert told or differences(into["part"], saved["part"]), (seed, fault)
        assert told or flat(into["part"]).keys() != flat(saved["part"]).keys(), (seed, "refused though it fits", fault)
        return "told"
    assert not told, (seed, told, "went unsaid")
    assert not differences(got["part"], saved["part"]), (seed, differences(got["part"], saved["part"]))
    return "right"


def test_random_states(tmp_path: Path) -> None:
    found = [one(seed, tmp_path / str(seed)) for seed in SEEDS]
    assert found.count("right") > 80 and found.count("told") > 50, {word: found.count(word) for word in set(found)}


def test_an_optimizer_without_its_model_is_told_what_it_lacks(tmp_path: Path) -> None:
    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Linear(3, 3)
        return model, torch.optim.Adam(model.parameters(), 0.1)

    model, optimizer = made()
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    oc.checkpoint.save({"model": model, "optimizer": optimizer}, tmp_path / "both")
    other, its = made()
    with pytest.raises(CheckpointError, match=r'load them together, \{"model": model, "optimizer": optimizer\}'):
        oc.checkpoint.load(tmp_path / "both", {"optimizer": its})
    oc.checkpoint.load(tmp_path / "both", {"model": other, "optimizer": its})
    assert torch.equal(its.state[other.weight]["exp_avg"], optimizer.state[model.weight]["exp_avg"])


OPTIMIZERS: dict[str, Any] = {
    "SGD": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    "AdamW": lambda p: torch.optim.AdamW(p, 0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, 0.1),
}


@pytest.mark.parametrize("saved", OPTIMIZERS)
def test_states_of_another_class_are_refused(saved: str, tmp_path: Path) -> None:
    """AdamW's were taken for SGD's, with its weight decay."""
    model = torch.nn.Linear(3, 2)
    optimizer = OPTIMIZERS[saved](model.parameters())
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 0.2, 9, cycle_momentum=False
    )  # which puts options of its own into groups
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    scheduler.step()
    oc.checkpoint.save({"optimizer": optimizer}, tmp_path / "saved")
    for kind, made in OPTIMIZERS.items():
        other = made(model.parameters())
        if kind == saved:
            oc.checkpoint.load(tmp_path / "saved", {"optimizer": other})
            assert len(other.state) == 2
        else:
            with pytest.raises(CheckpointError, match=f"which {kind} has not, .* it was of another class"):
                oc.checkpoint.load(tmp_path / "saved", {"optimizer": other})
            assert not other.state
            with pytest.raises(CheckpointError, match=r"of the state dict has not, .* it was of another class"):
                oc.load_state_dict({"optimizer": other.state_dict()}, tmp_path / "saved")


def test_a_schedule_of_another_class_is_refused(tmp_path: Path) -> None:
    """Schedules take whatever they are given into their attributes: a step schedule went on with a cosine's."""
    optimizer, schedules = torch.optim.SGD([torch.zeros(2, requires_grad=True)], 0.1), torch.optim.lr_scheduler
    oc.checkpoint.save({"schedule": schedules.CosineAnnealingLR(optimizer, 50)}, tmp_path, step=1)
    with pytest.raises(
        CheckpointError, match=r"schedule has T_max, eta_min, which StepLR has not, .* it was of another class"
    ):
        oc.checkpoint.load(tmp_path, {"schedule": schedules.StepLR(optimizer, 2)})
    again = schedules.CosineAnnealingLR(optimizer, 7)
    oc.checkpoint.load(tmp_path, {"schedule": again})
    assert again.T_max == 50


ALIKE = ("Adam", "AdamW", "RAdam", "NAdam", "Adamax", "ASGD", "Rprop")
"""Optimizers that their options do not tell apart, in one direction or in both."""


@pytest.mark.parametrize("saved", ALIKE)
def test_optimizers_that_options_do_not_tell_apart_are_told_by_their_class(saved: str, tmp_path: Path) -> None:
    """An Adamax's states were taken for an Adam's, whose next step ended with KeyError: 'exp_avg_sq'."""
    model = torch.nn.Linear(3, 2)
    optimizer = getattr(torch.optim, saved)(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    oc.checkpoint.save({"optimizer": optimizer}, tmp_path)
    for kind in ALIKE:
        other = getattr(torch.optim, kind)(model.parameters())
        if {kind, saved} <= {"Adam", "AdamW"} or kind == saved:
            oc.checkpoint.load(tmp_path, {"optimizer": other})
            other.step()
        else:
            with pytest.raises(CheckpointError, match=f"of another class|has {saved}, and {kind} is to be filled"):
                oc.checkpoint.load(tmp_path, {"optimizer": other})
            assert not other.state
    assert {*oc.checkpoint.load(tmp_path)["optimizer"]} == {"state", "param_groups"}


class OwnAdam(torch.optim.Adam):
    pass


class OwnRule(torch.optim.Optimizer):
    """One option, as torch's have it, too."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            self.state[p]["m"] = torch.ones_like(p)


class OwnStep(torch.optim.lr_scheduler.StepLR):
    pass


def test_classes_of_ones_own_are_those_that_they_are_derived_from(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    made = {
        c.__name__: c
        for c in (torch.optim.Adam, torch.optim.Adamax, torch.optim.RAdam, torch.optim.SGD, OwnAdam, OwnRule)
    }
    alike = [{"Adam", "OwnAdam"}]
    for saved, make in made.items():
        optimizer = make(model.parameters())
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        oc.checkpoint.save({"optimizer": optimizer}, tmp_path / saved)
        for kind, other in made.items():
            into = other(model.parameters())
            if kind == saved or {kind, saved} in alike:
                oc.checkpoint.load(tmp_path / saved, {"optimizer": into})
                into.step()
            else:
                with pytest.raises(
                    CheckpointError,
                    match=f"of another class|has {saved.removeprefix('Own')}, and {kind} is to be filled",
                ):
                    oc.checkpoint.load(tmp_path / saved, {"optimizer": into})
    schedules, optimizer = torch.optim.lr_scheduler, torch.optim.SGD(model.parameters(), 0.1)
    oc.checkpoint.save({"schedule": schedules.ExponentialLR(optimizer, 0.9)}, tmp_path / "exponential")
    oc.checkpoint.save({"schedule": schedules.StepLR(optimizer, 5)}, tmp_path / "steps")
    own = OwnStep(optimizer, 2)
    with pytest.raises(CheckpointError, match="has ExponentialLR, and OwnStep is to be filled"):
        oc.checkpoint.load(tmp_path / "exponential", {"schedule": own})
    oc.checkpoint.load(tmp_path / "steps", {"schedule": own})
    assert own.step_size == 5


def test_schedules_that_attributes_do_not_tell_apart_are_told_by_their_class(tmp_path: Path) -> None:
    optimizer, schedules = torch.optim.SGD([torch.zeros(2, requires_grad=True)], 0.1), torch.optim.lr_scheduler
    made = {
        "ExponentialLR": lambda: schedules.ExponentialLR(optimizer, 0.9),
        "StepLR": lambda: schedules.StepLR(optimizer, 2),
        "LambdaLR": lambda: schedules.LambdaLR(optimizer, lambda step: 1.0),
        "MultiplicativeLR": lambda: schedules.MultiplicativeLR(optimizer, lambda step: 1.0),
    }
    for saved, make in made.items():
        oc.checkpoint.save({"schedule": make()}, tmp_path / saved)
        for kind, other in made.items():
            if kind == saved:
                oc.checkpoint.load(tmp_path / saved, {"schedule": other()})
                continue
            with pytest.raises(CheckpointError, match=r"was of another class|is to be filled"):
                oc.checkpoint.load(tmp_path / saved, {"schedule": other()})


def test_a_state_dict_takes_the_states_that_were_saved_and_no_others(tmp_path: Path) -> None:
    """As load_state_dict does. Where the saved optimizer had none, those of the target stayed."""
    model = torch.nn.Linear(3, 2)

    def stepped(times: int) -> Any:
        optimizer = torch.optim.Adam(model.parameters())
        for _ in range(times):
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
        return optimizer

    oc.checkpoint.save({"optimizer": stepped(0)}, tmp_path)
    for state in ({"optimizer": stepped(1).state_dict()}, {"optimizer": stepped(1)}):
        oc.checkpoint.load(tmp_path, state)
        found = state["optimizer"]
        assert not (found["state"] if isinstance(found, dict) else found.state)


def test_groups_with_the_same_options_are_one(tmp_path: Path) -> None:
    weights = [torch.zeros(2, requires_grad=True) for _ in range(3)]

    def grouped(*sizes: int, lr: float = 0.1) -> Any:
        parts = [[(f"w{i}", weights[i]) for i in range(sum(sizes[:k]), sum(sizes[: k + 1]))] for k in range(len(sizes))]
        return torch.optim.SGD([{"params": part, "lr": lr if k else 0.1} for k, part in enumerate(parts)])

    oc.checkpoint.save({"optimizer": grouped(1, 1, 1)}, tmp_path / "same")
    oc.checkpoint.save({"optimizer": grouped(1, 1, 1, lr=0.2)}, tmp_path / "other")
    target = grouped(2, 1, lr=0.7)
    oc.checkpoint.load(tmp_path / "same", {"optimizer": target})
    assert [group["lr"] for group in target.param_groups] == [0.1, 0.1]
    with pytest.raises(CheckpointError, match=r"group 0 of the optimizer .* groups \[0, 1\], whose options differ"):
        oc.checkpoint.load(tmp_path / "other", {"optimizer": grouped(2, 1)})


def test_arrays_of_no_dims_and_sizes_stay_what_they_are(tmp_path: Path) -> None:
    oc.checkpoint.save({"a": np.array(3.0), "s": torch.Size([2, 3]), "$of": 1}, tmp_path)
    found = oc.checkpoint.load(tmp_path)
    assert found["a"].shape == () and found["a"] == 3.0
    assert type(found["s"]) is torch.Size and found["s"] == (2, 3) and found["$of"] == 1


class Lookahead(torch.optim.Optimizer):
    """Its state dict is its own, with that of another optimizer in it."""

    def __init__(self, base: Any) -> None:
        self.base, self.count = base, 0
        super().__init__(base.param_groups, base.defaults)

    def step(self, closure: Any = None) -> None:
        self.base.step()
        self.count += 1

    def state_dict(self) -> Any:
        return {"base": self.base.state_dict(), "count": self.count}

    def load_state_dict(self, state: Any) -> None:
        self.base.load_state_dict(state["base"])
        self.count = state["count"]


def test_an_optimizer_with_a_state_dict_of_its_own(tmp_path: Path) -> None:
    """KeyError: 'param_groups'."""
    saved, again = (Lookahead(torch.optim.Adam(torch.nn.Linear(2, 2).parameters())) for _ in range(2))
    for p in saved.param_groups[0]["params"]:
        p.grad = torch.ones_like(p)
    saved.step()
    oc.checkpoint.save({"optimizer": saved}, tmp_path)
    oc.checkpoint.load(tmp_path, {"optimizer": again})
    assert again.count == 1
    assert all(equal(a, b) for a, b in zip(again.base.state.values(), saved.base.state.values(), strict=True))
