"""A file of a recording is data: nothing in it becomes code, whoever wrote it."""

from __future__ import annotations

import ast
import json
import tempfile
from collections import OrderedDict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from amounts import runs
from fuzz.files import many
from safetensors import safe_open
from torch import nn
from torch.utils._pytree import tree_flatten

import onecard as oc
from onecard.errors import RecordingError
from onecard.static.code.source import Source
from onecard.static.file import saved

GRAPH = Path(oc.__file__).parent / "static"


def rewritten(path: Path, change: Callable[[Any], None]) -> None:
    """A file with another graph, and the checksum that belongs to it."""
    with safe_open(str(path), "pt") as file:
        head = json.loads(file.metadata()["recording"])
        tensors = {k: file.get_tensor(k) for k in file.keys()}  # noqa: SIM118
    change(head)
    saved.write(path, json.dumps(head), tensors)


def step_and_file(folder: str) -> tuple[nn.Module, Path]:
    model = nn.Sequential(nn.Linear(3, 2), nn.ReLU())
    with torch.no_grad():
        recording = oc.record(lambda x: model(x).add(x[:, :2], alpha=2))(torch.ones(4, 3))
    path = Path(folder) / "step.safetensors"
    recording.save(path)
    return model, path


def test_names_of_a_file_do_not_become_code() -> None:
    with tempfile.TemporaryDirectory() as folder:
        mark = Path(folder) / "mark"
        code = f"__import__('pathlib').Path({str(mark)!r}).touch()"

        def keyword(head: Any) -> None:
            row = next(row for row in head["graph"] if row[2] == "op aten.add.Tensor")
            row[4] = {"dict": [[f"alpha={code}, out", 2]]}

        def place(head: Any) -> None:
            head["inputs"]["tuple"][1]["input"][2]["tuple"][2] = f"0.weight'] or {code} or x['"

        def attribute(head: Any) -> None:
            head["inputs"]["tuple"][1]["input"][2]["tuple"][2] = "forward.__globals__"

        def method(head: Any) -> None:
            row = next(row for row in head["graph"] if row[2] == "op aten.add.Tensor")
            row[0], row[2] = "call_method", "__reduce__"

        def form(head: Any) -> None:
            module = {"default_factory_module": "this", "default_factory_name": "s", "dict_context": []}
            head["tree"] = ["collections.defaultdict", {"dict": [[k, v] for k, v in module.items()]}, [None]]

        def name(head: Any) -> None:
            head["roots"] = {"tuple": [f"model', {code}, '"]}

        for change, words in (
            (keyword, "which it does not take"), (place, "has no"), (attribute, "has no"), (method, "a node that is a"),
            (form, "is not loaded unless you give the class"), (name, "is not given"),
        ):  # fmt: skip
            model, path = step_and_file(folder)
            rewritten(path, change)
            with pytest.raises(RecordingError, match=words), torch.no_grad():
                oc.load_recording(path).bind(model=model)(torch.ones(4, 3))
            assert not mark.exists(), change.__name__


def test_a_damaged_file_is_told() -> None:
    with tempfile.TemporaryDirectory() as folder:
        _, path = step_and_file(folder)
        data = path.read_bytes()
        at = data.index(b"aten.add.Tensor")
        path.write_bytes(data[:at] + b"aten.sub" + data[at + 8 :])
        with pytest.raises(RecordingError, match="its checksum is another one"):
            oc.load_recording(path)
        path.write_bytes(data[: len(data) // 2])
        with pytest.raises(RecordingError, match="is damaged, or no recording"):
            oc.load_recording(path)


def test_operators_of_the_user_are_loaded_by_leave() -> None:
    library = torch.library.Library("filetest", "DEF")
    library.define("double(Tensor x) -> Tensor")
    library.impl("double", lambda x: 2 * x, "CompositeExplicitAutograd")
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        path = Path(folder) / "step.safetensors"
        oc.record(lambda x: torch.ops.filetest.double(x))(torch.ones(2)).save(path)
        with pytest.raises(RecordingError, match=r'load_recording\(path, trust=\["filetest"\]\)'):
            oc.load_recording(path)
        loaded = oc.load_recording(path, trust=["filetest"]).bind()
        assert torch.equal(loaded(torch.ones(2)), 2 * torch.ones(2))


class Pair(NamedTuple):
    low: Any
    high: Any


def test_forms_of_results() -> None:
    def step(x: torch.Tensor) -> Any:
        return OrderedDict(a=x.max(0), b=deque([x + 1, None]), c=Pair(x.min(), [x.max(), {"d": ()}]))

    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        path, x = Path(folder) / "step.safetensors", torch.arange(4.0).view(2, 2)
        oc.record(step)(x).save(path)
        with pytest.raises(RecordingError, match=r"a .*:Pair is not loaded unless you give the class"):
            oc.load_recording(path)
        found, expected = oc.load_recording(path, trust=[Pair]).bind()(x), step(x)
        assert type(found["a"]) is torch.return_types.max and type(found["b"]) is deque and type(found["c"]) is Pair
        (leaves, form), (others, other) = tree_flatten(found), tree_flatten(expected)
        assert form == other and all(a is b is None or torch.equal(a, b) for a, b in zip(leaves, others, strict=True))


@pytest.mark.proof
def test_changed_files_are_refused_or_harmless() -> None:
    for seed, count in runs(20_000, 5, 1200):
        counts, wrong = many(seed, count)
        assert not wrong, wrong
        assert counts["graph replayed"] >= count // 60 and counts["graph refused"] > count // 3, counts
        assert not counts["bytes replayed"], counts


def test_only_one_place_makes_functions_of_text() -> None:
    """``exec``, ``eval`` and ``compile`` are called in source.py alone; its text is constants, and slots."""
    for path in sorted(GRAPH.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
            if name in ("exec", "eval", "compile", "Code", "__import__") and isinstance(node.func, ast.Name):
                assert path.name == "source.py", f"{path.name}:{node.lineno} calls {name}"
            if name == "code" and path.name != "source.py":
                made = isinstance(node.args[0], ast.Constant | ast.IfExp | ast.Name | ast.Subscript)
                assert made, f"{path.name}:{node.lineno}: its words are put together"


def test_text_that_was_given_is_no_code() -> None:
    with pytest.raises(TypeError, match="only a slot holds what was given"):
        Source.code("return {}", "print()")
    with pytest.raises(TypeError, match="only a slot"):
        Source.joined(", ", [Source.code("x"), "y"])  # type: ignore[list-item]
