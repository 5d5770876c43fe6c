"""A recording as a thing: called, printed, saved and loaded without pickle."""

from __future__ import annotations

import json
import pickle
import tempfile
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from amounts import share
from safetensors import safe_open
from safetensors.torch import save_file
from static_programs import gpt, held, mesh, mixed
from torch import nn

import onecard as oc
from onecard.errors import RecordingError
from onecard.static.file import saved
from onecard.testing import run_ranks


def steps_after(make: Any, folder: str, loaded: bool) -> tuple[list[Any], list[Any], str]:
    """Two steps as they are, one recorded; then three by the recording, or by one that went through a file."""
    torch.manual_seed(3)
    model, optimizer, step, data = make()
    run = oc.to_static(step)
    batches = [*islice(data, 6)]
    for batch in batches[:3]:
        run(*batch)
    recording = run.recordings[0]
    if loaded:
        path = Path(folder) / f"{oc.get_rank()}.safetensors"
        recording.save(path)
        recording = oc.load_recording(path).bind(model=model, optimizer=optimizer, where=None)
        call = recording
    else:
        call = step
    optimizer.param_groups[0]["lr"] = 0.01
    results = [held(call(*batch)) for batch in batches[3:]]
    return results, [held(x) for x in (*model.parameters(), *model.buffers())], str(recording)


def same_through_a_file(folder: str, several: bool) -> str:
    both = mesh(2, 1) if several else None
    programs = [partial(mixed, both, "adamw", 2), partial(gpt, both)]
    for make in share(programs[:: -1 if several else 1], 1):
        expected, found = (steps_after(make, folder, loaded) for loaded in (False, True))
        for a, b in zip(expected[:2], found[:2], strict=True):
            assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    return found[2]


def test_saved_loaded_bound_and_replayed() -> None:
    with tempfile.TemporaryDirectory() as folder:
        same_through_a_file(folder, several=False)


@pytest.mark.proof
def test_saved_on_two_ranks() -> None:
    with tempfile.TemporaryDirectory() as folder:
        text = run_ranks(same_through_a_file, 2, folder, True)[0]
    assert "along 'dp'" in text and "[dp=" in text
    for words in (
        "forward\n",
        "backward\n",
        "optimizer\n",
        "in blocks.0.mlp.fc",
        "model.py:",
        "optimizer.param_groups[0]['lr']",
    ):
        assert words in text, (words, text[:3000])


def test_a_recording_says_what_does_not_fit() -> None:
    model = nn.Linear(3, 2)
    with torch.no_grad():
        recording = oc.record(model)(torch.ones(3))
        assert torch.equal(recording(torch.ones(3)), model(torch.ones(3)))
        with pytest.raises(RecordingError, match=r"argument 'input' was a tensor \[3\] float32 and is a tensor \[4\]"):
            recording(torch.ones(4))
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "step.safetensors"
            recording.save(path)
            loaded = oc.load_recording(path)
            with pytest.raises(RecordingError, match=r"bind it first: recording.bind\(model=model\)"):
                loaded(torch.ones(3))
            with pytest.raises(RecordingError, match="is not given model"):
                loaded.bind(net=model)
            with pytest.raises(RecordingError, match=r"the class of model was .*Linear.* and is .*ReLU"):
                loaded.bind(model=nn.ReLU())
            other = nn.Linear(3, 2)
            assert torch.equal(loaded.bind(model=other)(torch.ones(3)), other(torch.ones(3)))


def changed(path: Path, change: Any) -> None:
    """Write a file again with another graph, and the checksum that belongs to it."""
    with safe_open(str(path), "pt") as file:
        head = json.loads(file.metadata()["recording"])
        tensors = {k: file.get_tensor(k) for k in file.keys()}  # noqa: SIM118
    change(head)
    saved.write(path, json.dumps(head), tensors)


def test_a_file_holds_no_pickle_and_no_other_function() -> None:
    recording = oc.record(lambda x: x + 1)(torch.ones(3))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "step.safetensors"
        recording.save(path)
        with pytest.raises(pickle.UnpicklingError):
            pickle.loads(path.read_bytes())
        for target, error in (
            ("op aten.from_file.default", "it takes a text, filename"),
            ("op aten.add.__class__", "has no operator"),
            ("op aten.add.Tensor.__call__", "no name of an operator"),
            ("op aten.__class__.default", "no operator on tensors"),
            ("op import_module.__call__.__call__", r"trust=\[\"import_module\"\]"),
            ("op profiler._record_function_enter.default", "is not loaded"),
            ("call os:system", "no function 'os:system'"),
            ("own eval", "no function 'eval'"),
            ("__builtins__ eval", "no kind of function"),
        ):

            def calls(head: Any, target: str = target) -> None:
                head["graph"][1][2] = target

            changed(path, calls)
            with pytest.raises(RecordingError, match=error):
                oc.load_recording(path)
        save_file({"x": torch.zeros(1)}, str(path))
        with pytest.raises(RecordingError, match="is no recording"):
            oc.load_recording(path)


def nameless_saved() -> str:
    mesh = oc.ProcessMesh([0, 1], ["tp"])
    parts = [oc.shard_tensor(torch.ones(4, 4), mesh, [oc.Shard(0)]) for _ in range(2)]
    step = oc.to_static(lambda: sum(x.sum() for x in parts[1:]))
    step(), step()
    with pytest.raises(RecordingError) as said:
        step.recordings[0].save("unwritten")
    return str(said.value)


def test_a_distributed_tensor_without_a_name_is_not_saved():
    for said in run_ranks(nameless_saved, 2):
        assert "to which no name of the program leads" in said and "tp=Shard(0)" in said
