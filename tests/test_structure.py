"""The house: imports go down only, one caller of collectives, files stay small."""

import ast
import functools
import importlib
import pkgutil
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "onecard"
# Low to high (docs/design/architecture.md). A module may import from its own layer and from lower ones.
LAYERS = [
    "_version", "_needed", "_deprecated", "_addresses", "_garbage", "_import_time", "errors", "elsewhere", "_torch", "recorded",
    "place", "machine", "moves", "random", "rules", "comm", "tensor", "as_json", "train", "checkpoint", "static", "pipeline",
    "fleet", "planning", "auto", "integrations", "engine", "paddle", "reports", "testing", "proof", "launch", "_on_demand",
    "doctor", "commands", "cli", "__main__",
]  # fmt: skip
MAX_LINES = 380
FILES = sorted(PACKAGE.rglob("*.py"))


def faults(look: Callable[[Path], list[str]]) -> list[str]:
    """What `look` finds in each file of the package. One test says all of it: as many tests as files say no more."""
    assert len(FILES) > 100
    return [f"{path.relative_to(PACKAGE)}: {fault}" for path in FILES for fault in look(path)]


def layer_of(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


@functools.lru_cache(len(FILES) + 8)
def imports_of(source: str) -> list[tuple[str, int]]:
    """(module, line) of every import in a source text."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found += [(f"{node.module}.{alias.name}", node.lineno) for alias in node.names]
    return found


def upward_imports(layer: str, source: str) -> list[str]:
    found = []
    for module, line in imports_of(source):
        parts = module.split(".")
        known = parts[0] == "onecard" and len(parts) > 1 and parts[1] in LAYERS
        if known and LAYERS.index(parts[1]) > LAYERS.index(layer):
            found.append(f"line {line}: {module}")
    return found


def faults_of_order(path: Path) -> list[str]:
    layer = layer_of(path)
    if layer == "__init__":
        return []
    return upward_imports(layer, path.read_text()) if layer in LAYERS else ["has no place in the order of layers"]


def test_imports_go_down_only():
    assert faults(faults_of_order) == []


def test_an_upward_import_is_seen():
    assert upward_imports("place", "from onecard.tensor import spec") == ["line 1: onecard.tensor.spec"]
    assert upward_imports("tensor", "from onecard.place.layout import Layout") == []


# Low to high: a subfolder, or a file beside them, imports from its own place and from lower ones.
FLOORS = {
    "comm": ["base", "shm", "joined", "world", "agree", "issue"],
    "rules": [
        "notation", "rule", "work", "refine", "decide", "call", "traits", "local", "foretell", "spelling", "registry", "estimate",
        "table", "samples", "verify", "stated", "register",
    ],
    "train": [
        "lazy", "balance", "rates", "shard", "judged", "of_absent", "copied", "absent", "unmade", "converted", "norms",
        "summands", "unreduced", "own_parameters", "common_memory", "data", "layer", "local_code", "zero", "modules",
    ],
    "checkpoint": ["format", "writer", "reader", "api"],
    "static": [
        "step", "code", "guards", "capture", "price", "passes", "run", "file", "show", "recording", "whole_batch", "call", "api",
        "measure",
    ],
    "pipeline": ["schedule", "run", "cut"],
    "engine": [
        "fields", "with_plan", "strategy", "refused", "specs", "metrics", "options", "lists", "again", "placing", "step", "full",
        "programs", "made_of", "loaders", "progress", "saved", "loop", "engine", "planned", "dist_model",
    ],
    "fleet": ["names", "grid", "gradients", "layers", "experts", "zero", "front", "utils", "meta_parallel"],
}  # fmt: skip


@pytest.mark.parametrize("room", FLOORS)
def test_floors_import_downwards(room):
    folder, floors = PACKAGE / room, FLOORS[room]
    assert {path.stem for path in folder.iterdir() if path.stem[0] != "_"} == {*floors}
    assert [found for floor in floors for found in upward_floors(room, floor, floors)] == []


def upward_floors(room: str, floor: str, floors: list[str]) -> list[str]:
    path = PACKAGE / room / floor
    found = []
    for file in sorted(path.rglob("*.py")) if path.is_dir() else [path.with_suffix(".py")]:
        for module, line in imports_of(file.read_text()):
            package, other, there, *_ = (*module.split("."), "", "")
            if (package, other) == ("onecard", room) and there in floors[floors.index(floor) + 1 :]:
                found.append(f"{file.relative_to(PACKAGE)} line {line}: {module}")
    return found


def test_an_upward_floor_is_seen():
    assert upward_floors("pipeline", "run", ["run", "schedule"]) != []


# A table of rules and the samples that prove it have the same names, each of a pair that belongs together.
NAMESAKES = {
    "comm": {"group"},  # a group of processes, and of joined ranks
    "commands": {"Asked"},  # what each command is asked
}
"""What two modules or two classes of a room are called alike. Nothing else is, and no more."""


def namesakes(room: str) -> set[str]:
    """Names that two modules of a room have, or two classes."""
    files = [path for path in sorted((PACKAGE / room).rglob("*.py")) if path.stem != "__init__"]
    files = [path for path in files if path.parent.name != "samples"]
    trees = [ast.parse(path.read_text()) for path in files]
    classes = [node.name for tree in trees for node in tree.body if isinstance(node, ast.ClassDef)]
    return {name for name, count in Counter([*(path.stem for path in files), *classes]).items() if count > 1}


def test_names_mean_one_thing_in_a_room():
    rooms = [path.name for path in sorted(PACKAGE.iterdir()) if path.is_dir() and path.name != "__pycache__"]
    found = {room: names for room in rooms if (names := namesakes(room))}
    assert len(rooms) > 20 and found == NAMESAKES


# Classes of several rooms that are called alike, and why.
ALIKE = {
    "Asked": "what each command is asked",
    "Found": "a step in a folder of checkpoints, which is public; values with their partners in a proof",
}


def classes_of(files: Iterable[Path]) -> list[str]:
    """The names of classes that another module may import."""
    return [
        node.name
        for path in files
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    ]


def test_a_class_has_a_name_of_its_own():
    """Two rooms that call different things alike are two meanings of a word, and a reader of an error knows neither."""
    names = classes_of(FILES)
    assert len(names) > 500 and {name for name, count in Counter(names).items() if count > 1} == {*ALIKE}


# Modules that name each other, and why. Nothing else does, also not within functions or for types only.
CIRCLES: list[set[str]] = [
    {"tensor.aliasing.memory", "tensor.dist_tensor"},  # a type only: a tensor has its memory, which knows the tensors in it
]  # fmt: skip


def names_of_modules() -> dict[str, Path]:
    names = [(".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts), path) for path in FILES]
    return {name.removesuffix(".__init__").removeprefix("onecard."): path for name, path in names}


def imported(modules: dict[str, Path]) -> dict[str, set[str]]:
    """For each module those that it imports, anywhere in it."""
    found: dict[str, set[str]] = {}
    for name, path in modules.items():
        wanted = [module.removeprefix("onecard.") for module, _ in imports_of(path.read_text())]
        found[name] = {w if w in modules else w.rpartition(".")[0] for w in wanted} & modules.keys() - {name}
    return found


def circles(edges: dict[str, set[str]]) -> list[set[str]]:
    """The sets of modules of which each leads to each other."""

    def reached(name: str) -> frozenset[str]:
        seen, left = set[str](), [name]
        while left:
            new = edges[left.pop()] - seen
            seen |= new
            left += new
        return frozenset(seen)

    ways = {name: reached(name) for name in edges}
    return [set(c) for c in {frozenset(o for o in ways[n] if n in ways[o]) for n in edges if n in ways[n]}]


def test_no_modules_import_in_circles():
    found = [circle for circle in circles(imported(names_of_modules())) if not any(circle <= c for c in CIRCLES)]
    assert found == []


def test_a_circle_is_seen():
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == [{"b", "c"}]


def lines_too_many(path: Path) -> list[str]:
    lines = len(path.read_text().splitlines())
    return [f"{lines} lines: split it, or find the idea that makes it shorter"] * (lines > MAX_LINES)


def test_files_stay_small():
    assert faults(lines_too_many) == []


MAKERS = {
    "arange", "empty", "empty_strided", "eye", "full", "linspace", "logspace", "normal", "ones", "rand", "randint", "randn",
    "randperm", "scalar_tensor", "tensor", "zeros", "Generator",
}  # fmt: skip
# Parameters of a user's module; samples of operators, which are run where the CPU is the default.
WHERE_THE_PROGRAM_IS = ("fleet/experts/top_k.py", "rules/samples/")


def homeless(source: str) -> list[str]:
    """Tensors and generators that the library makes wherever the program's default device is."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MAKERS:
            by_torch = isinstance(node.func.value, ast.Name) and node.func.value.id == "torch"
            if by_torch and not any(k.arg in ("device", None) for k in node.keywords):
                found.append(f"line {node.lineno}: {ast.unparse(node)[:60]}: say device=")
    return found


def test_what_the_library_makes_lies_where_it_says():
    """A program may have called ``torch.set_default_device("cuda")``."""

    def look(path: Path) -> list[str]:
        at = str(path.relative_to(PACKAGE))
        return [] if at.startswith(WHERE_THE_PROGRAM_IS) else homeless(path.read_text())

    assert faults(look) == []
    assert homeless("torch.zeros(3); torch.ones(3, device=x.device); x.zeros(3)") == [
        "line 1: torch.zeros(3): say device="
    ]


def test_only_comm_calls_collectives():
    """The pure layers never import torch.distributed's communication."""
    allowed = {"_torch", "comm", "testing", "launch"}
    for path in FILES:
        if layer_of(path) not in allowed:
            used = [m for m, _ in imports_of(path.read_text()) if m.startswith("torch.distributed")]
            assert all(m.startswith("torch.distributed.tensor.") for m in used), f"{path}: {used}"


def test_schedules_stand_alone():
    """Making, proving and drawing schedules needs no tensor, mesh or process; a runtime beside them may need all of that."""
    folder = PACKAGE / "pipeline" / "schedule"
    pure = {path.stem for path in folder.glob("*.py")}
    assert {"action", "check", "orders", "timing"} <= pure
    for name in pure:
        used = [m for m, _ in imports_of((folder / f"{name}.py").read_text())]
        outside = [m for m in used if m.split(".")[0] in ("onecard", "torch")]
        allowed = (
            "onecard.errors.",
            "onecard.machine.events.",
            "onecard.machine.pictures.",
            "onecard.pipeline.schedule.",
        )
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


def test_an_address_needs_no_floor():
    """What users import by what it is about is one module, wherever it lies."""
    from onecard.resharding import plan as same

    from onecard.fleet import mappings
    from onecard.fleet.layers import mappings as there
    from onecard.moves.resharding import plan

    assert mappings is there and plan is same
    with pytest.warns(DeprecationWarning, match="write onecard.static"):
        renamed = importlib.import_module("onecard.graph.passes.merge")
    assert renamed is importlib.import_module("onecard.static.passes.merge")
    with pytest.raises(ModuleNotFoundError, match=r"onecard\.fleet\.nothing"):
        importlib.import_module("onecard.fleet.nothing")
