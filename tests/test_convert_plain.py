"""Files of torch.save that hold more than tensors: what programs put beside their weights is read, and no code is run."""

from __future__ import annotations

import argparse
import collections
import datetime
import enum
import pathlib
import pickle
import random
import types

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from onecard import checkpoint
from onecard.cli import main
from onecard.errors import CheckpointError

TIME = datetime.datetime(2026, 1, 2, 3, 4)
WRITTEN = {
    "arguments": (argparse.Namespace(lr=0.1, path=pathlib.Path("/runs/x"), n=[1]), {"lr": 0.1, "path": "/runs/x", "n": [1]}),
    "nested": ({"a": (argparse.Namespace(b=types.SimpleNamespace(c=1)), 2)}, {"a": ({"b": {"c": 1}}, 2)}),
    "array": (np.arange(3), torch.arange(3)),
    "flags": (np.array([True, False]), torch.tensor([True, False])),
    "words": (np.array(["a", "b"]), ["a", "b"]),
    "number": (np.float64(2.5), 2.5),
    "count": (np.int64(3), 3),
    "defaults": (collections.defaultdict(list, {"a": [1]}), {"a": [1]}),
    "queue": (collections.deque([1, 2], maxlen=4), [1, 2]),
    "when": (TIME, "2026-01-02 03:04:00"),
    "state of numpy": (np.random.RandomState(0).get_state(), None),
    "state of python": (random.Random(0).getstate(), None),
}  # fmt: skip


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "before zip"])
@pytest.mark.parametrize("name", WRITTEN)
def test_what_stands_beside_weights(tmp_path, name, zipped):
    given, wanted = WRITTEN[name]
    weight = torch.randn(3)
    torch.save({"model": {"weight": weight}, "more": given}, tmp_path / "a.pt", _use_new_zipfile_serialization=zipped)
    checkpoint.convert(tmp_path / "a.pt", tmp_path / "b")
    found = checkpoint.load(tmp_path / "b")
    assert torch.equal(found["model"]["weight"], weight)
    if name == "state of numpy":
        kind, words, *rest = given
        assert found["more"][0] == kind and found["more"][1].tolist() == words.tolist() and [*found["more"][2:]] == rest
    elif isinstance(wanted, torch.Tensor):
        assert torch.equal(found["more"], wanted) and found["more"].dtype == wanted.dtype
    else:
        assert found["more"] == (given if wanted is None else wanted)


def test_equal_tensors_of_a_file_stay_one(tmp_path):
    weight = torch.randn(4)
    torch.save({"a": weight, "b": weight, "c": argparse.Namespace(d=weight)}, tmp_path / "a.pt")
    checkpoint.convert(tmp_path / "a.pt", tmp_path / "b.pt", "torch")
    found = torch.load(tmp_path / "b.pt")
    assert found["a"].data_ptr() == found["b"].data_ptr() == found["c"]["d"].data_ptr()


class Colour(enum.Enum):
    RED = 1


class Runs:
    """Runs code when it is made from a pickle."""

    def __reduce__(self):
        return open, ("must_not_be", "w")


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "before zip"])
@pytest.mark.parametrize(
    ("given", "said"),
    [
        (nn.Linear(2, 2), r"an object of torch\.nn\.modules\.linear\.Linear, .* model\.state_dict\(\) for a module"),
        (Colour.RED, r"an object of \w*test_convert_plain\.Colour"),
        (Runs(), r"an object of \w*io\.open"),
    ],
    ids=["module", "enum", "code"],
)
def test_classes_are_named_and_not_made(tmp_path, monkeypatch, given, said, zipped):
    monkeypatch.chdir(tmp_path)
    torch.save({"x": given}, "a.pt", _use_new_zipfile_serialization=zipped)
    with pytest.raises(CheckpointError, match=said) as told:
        checkpoint.convert("a.pt", "b")
    assert "\x1b" not in str(told.value) and len(str(told.value)) < 400
    assert not (tmp_path / "must_not_be").exists() and not (tmp_path / "b").exists()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty"),
        (b"hello world", r"is no file of torch\.save$"),
        (b"PK\x03\x04 and no more", "cut off: the end is missing"),
        (pickle.dumps({"a": 1}), "is damaged, or no file of torch.save"),
    ],
)
def test_files_that_are_none(tmp_path, content, said):
    (tmp_path / "a.pt").write_bytes(content)
    with pytest.raises(CheckpointError, match=said):
        checkpoint.convert(tmp_path / "a.pt", tmp_path / "b")


def test_a_file_that_was_cut_off(tmp_path):
    torch.save({"a": torch.randn(1000)}, tmp_path / "a.pt")
    (tmp_path / "a.pt").write_bytes((tmp_path / "a.pt").read_bytes()[:2000])
    with pytest.raises(CheckpointError, match="the end is missing"):
        checkpoint.convert(tmp_path / "a.pt", tmp_path / "b")


def test_a_target_that_is_called_safetensors_is_one_file(tmp_path):
    state = {"w": torch.randn(3), "tied": {"a": torch.ones(2, dtype=torch.int64)}, "step": 3}
    checkpoint.save(state, tmp_path / "a")
    assert main(["convert", str(tmp_path / "a"), str(tmp_path / "new" / "b.safetensors")]) == 0
    found = load_file(tmp_path / "new" / "b.safetensors")
    assert {*found} == {"w", "tied.a"} and torch.equal(found["w"], state["w"])
    assert [f.name for f in (tmp_path / "new").iterdir()] == ["b.safetensors"]
    checkpoint.convert(tmp_path / "new" / "b.safetensors", tmp_path / "c")
    assert torch.equal(checkpoint.load(tmp_path / "c")["tied.a"], state["tied"]["a"])
