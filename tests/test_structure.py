"""The house: imports go down only, one caller of collectives, files stay small."""

import ast
import importlib
import pkgutil
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "onecard"
# Low to high (docs/design/architecture.md). A module may import from its own layer and from lower ones.
LAYERS = [
    "errors", "_torch", "_torch_groups", "_torch_scaling", "elsewhere", "mesh", "parts", "boxes", "reductions", "layout", "cost",
    "recorded", "random", "rules", "resharding",
    "transfer", "comm",
    "tensor", "as_json", "parallel", "modules", "checkpoint", "graph", "pipeline", "fleet", "plan",
    "message_report", "operator_report", "testing", "spawning", "launch", "cli", "__main__",
]  # fmt: skip
MAX_LINES = 380
FILES = sorted(PACKAGE.rglob("*.py"))


def layer_of(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def imports_of(source: str):
    """(module, line) of every import in a source text."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


def upward_imports(layer: str, source: str) -> list[str]:
    found = []
    for module, line in imports_of(source):
        parts = module.split(".")
        known = parts[0] == "onecard" and len(parts) > 1 and parts[1] in LAYERS
        if known and LAYERS.index(parts[1]) > LAYERS.index(layer):
            found.append(f"line {line}: {module}")
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_go_down_only(path):
    layer = layer_of(path)
    if layer != "__init__":
        assert layer in LAYERS, f"{layer} has no place in the order of layers"
        assert upward_imports(layer, path.read_text()) == []


def test_an_upward_import_is_seen():
    assert upward_imports("layout", "from onecard.tensor import spec") == ["line 1: onecard.tensor.spec"]
    assert upward_imports("tensor", "from onecard.layout import Layout") == []


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_files_stay_small(path):
    assert len(path.read_text().splitlines()) <= MAX_LINES, "split it, or find the idea that makes it shorter"


def test_only_comm_calls_collectives():
    """The pure layers never import torch.distributed's communication."""
    allowed = {"_torch", "_torch_groups", "comm", "testing", "launch"}
    for path in FILES:
        if layer_of(path) not in allowed:
            used = [m for m, _ in imports_of(path.read_text()) if m.startswith("torch.distributed")]
            assert all(m.startswith("torch.distributed.tensor.") for m in used), f"{path}: {used}"


def test_schedules_stand_alone():
    """Making, proving and drawing schedules needs no tensor, mesh or process; a runtime beside them may need all of that."""
    pure = {
        "action", "check", "csv_file", "draw", "greedy", "memory", "messages", "modes", "report", "schedule", "schedule_auto",
        "schedule_v", "timing",
    }  # fmt: skip
    assert pure <= {path.stem for path in (PACKAGE / "pipeline").glob("*.py")}
    for name in pure:
        used = [m for m, _ in imports_of((PACKAGE / "pipeline" / f"{name}.py").read_text())]
        outside = [m for m in used if m.split(".")[0] in ("onecard", "torch")]
        allowed = ("onecard.errors.", *(f"onecard.pipeline.{other}." for other in pure))
        assert [m for m in outside if not m.startswith(allowed)] == [], name


def hidden_modules(package: str) -> list[str]:
    """Modules whose name, in their package, means something else: ``import package.name`` does not give the module."""
    found = []
    for info in pkgutil.walk_packages(importlib.import_module(package).__path__, f"{package}."):
        parent, _, name = info.name.rpartition(".")
        if name != "__main__":
            module = importlib.import_module(info.name)
            found += [info.name] * (getattr(importlib.import_module(parent), name) is not module)
    return found


def test_no_name_means_a_module_and_something_else():
    assert hidden_modules("onecard") == []
    assert hidden_modules("unittest") == ["unittest.main"]  # there it is a class as well: the check can fail
