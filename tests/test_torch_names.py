"""What onecard takes from torch without torch's promise: all of it stands in one file, and this torch has it."""

import ast
import inspect
import textwrap
from functools import cache, reduce
from importlib import import_module
from pathlib import Path

import pytest
import torch
from launching import launch_here, write
from torch import nn

from onecard.testing import run_ranks

PACKAGE = Path(__file__).parents[1] / "src" / "onecard"
THE_FILES = [
    PACKAGE / "_torch" / f"{name}.py"
    for name in (
        "names",
        "groups",
        "scaling",
        "patches",
        "threads",
        "fakes",
        "leaves",
        "nests",
        "graphs",
        "modes",
        "hooks",
        "uncompiled",
    )
]
FILES = sorted(path for path in PACKAGE.rglob("*.py") if path not in THE_FILES)
OPERATORS = ("ops.aten.", "ops._c10d_functional.")  # of which there are as many as rules know


def private(name: str) -> bool:
    """Also what has no underscore itself, but stands in a place that has one."""
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def names_of_torch(source: str) -> list[str]:
    """The private names that a file takes from torch's modules."""
    nodes, roots, found = list(ast.walk(ast.parse(source))), {}, []
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            for alias in node.names:
                roots[alias.asname or alias.name] = f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] == "torch":
                    roots[alias.asname or "torch"] = alias.name if alias.asname else "torch"
                    found += [alias.name] * private(alias.name)
    found += [name for name in roots.values() if private(name)]
    for node in nodes:
        if isinstance(node, ast.Attribute) and set(text := ast.unparse(node)).isdisjoint("([{"):
            root, _, rest = text.partition(".")
            whole = f"{roots.get(root, '')}.{rest}"
            if root in roots and private(rest) and not f"{whole}.".startswith(tuple(f"torch.{o}" for o in OPERATORS)):
                found.append(whole)
    return [name for name in found if name not in listed()["ATTRIBUTES"]]


@cache
def listed() -> dict[str, dict[str, str]]:
    """ATTRIBUTES and MADE of the file, without an import of the package."""
    found = {}
    for node in ast.parse(THE_FILES[0].read_text()).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") in ("ATTRIBUTES", "MADE"):
            found[node.targets[0].id] = ast.literal_eval(node.value)
    return found


def needed() -> list[str]:
    """The names that the file imports or reads at once: where one is missing, onecard has to be changed."""
    tree, found = ast.parse(THE_FILES[0].read_text()), []
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module.startswith("torch"):
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    found += [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    return sorted({name for name in found if name.startswith("torch.") and private(name)} | set(listed()["ATTRIBUTES"]))


def with_substitute() -> list[str]:
    """The names for which the file has something in their place."""
    calls = [n for n in ast.walk(ast.parse(THE_FILES[0].read_text())) if isinstance(n, ast.Call)]
    paths = [ast.unparse(call.args[0]) for call in calls if getattr(call.func, "id", "") == "_take"]
    return [eval(path, {"_C10D": "torch.distributed.distributed_c10d"}).replace(":", ".") for path in paths]


def is_there(name: str) -> bool:
    parts = name.split(".")
    for at in range(len(parts), 0, -1):
        try:
            module = import_module(".".join(parts[:at]))
        except ImportError:
            continue
        try:
            reduce(getattr, parts[at:], module)
        except AttributeError:
            return False
        return True
    return False


@pytest.mark.proof
def test_no_other_file_takes_a_private_name():
    assert len(FILES) > 100
    taken = {str(path.relative_to(PACKAGE)): names_of_torch(path.read_text()) for path in FILES}
    assert {file: names for file, names in taken.items() if names} == {}


def test_such_names_are_seen():
    for source, name in {
        "import torch._dynamo": "torch._dynamo",
        "from torch.utils._pytree import tree_map": "torch.utils._pytree.tree_map",
        "import torch.testing._internal.common as c": "torch.testing._internal.common",
        "import torch\ntorch._C.f()": "torch._C.f",
        "import torch.distributed as dist\ndist.Backend._plugins": "torch.distributed.Backend._plugins",
        "from torch import Tensor\nTensor._make_dtensor": "torch.Tensor._make_dtensor",
        "import torch\ntorch._foreach_add": "torch._foreach_add",
    }.items():
        assert name in names_of_torch(source), source
    assert names_of_torch("import torch\ntorch.ops.aten._to_copy(torch.ones(1)).__class__") == []


@pytest.mark.proof
def test_attributes_that_are_not_ours_are_listed():
    """Private attributes of any object, which no class, function or assignment of ours makes."""
    used, ours = {}, {"_current_frames", "_exit", "_getframe", "_replace", "_torch"}  # os, sys, namedtuple
    for path in (*FILES, *THE_FILES):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                ours.add(node.name)
            elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
                ours.add(node.id if isinstance(node, ast.Name) else node.attr)
            elif (
                isinstance(node, ast.Attribute) and private(node.attr) and not operator(node) and path not in THE_FILES
            ):
                used[node.attr] = path.name
    lists = {name.rpartition(".")[2] for name in listed()["ATTRIBUTES"]} | set(listed()["MADE"])
    assert {name: where for name, where in used.items() if name not in ours | lists} == {}
    assert {name for name in lists if name not in used and name not in ours} == set(), "listed, but not used"


def operator(node: ast.Attribute) -> bool:
    return ast.unparse(node.value) in ("aten", "torch.ops.aten", "torch.ops")


def test_this_torch_has_the_names():
    """Of a new version of torch: these have to be looked at, those with a substitute included."""
    missing = [name for name in (*needed(), *with_substitute()) if not is_there(name)]
    assert len(needed()) > 20 and len(with_substitute()) > 12
    assert not missing, (
        f"torch {torch.__version__} does not have {missing}: src/onecard/_torch/names.py says what they are for"
    )


WITHOUT = """
    import importlib, sys
    import torch

    def absent(name, package=None, real=importlib.import_module):
        if sys._getframe(1).f_code.co_name == "_take":
            raise ImportError(name)
        return real(name, package)

    importlib.import_module = absent
    import onecard as oc
    from onecard._torch import names

    mesh = oc.ProcessMesh([0, 1], ["dp"])
    oc.manual_seed(0)
    model, x, y = made()
    torch.nn.functional.dropout(oc.shard_tensor(x, mesh, [oc.Shard(0)]))
    losses = train(oc.shard_layer(model, mesh), *(oc.shard_tensor(t, mesh, [oc.Shard(0)]) for t in (x, y)))
    print("losses", *(f"{loss:.5f}" for loss in losses), "without", len(names.missing))
"""


def made():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.LayerNorm(8), nn.Linear(8, 3))
    return model, torch.randn(8, 6), torch.randn(8, 3)


def train(model, x, y):
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=0.05), []
    for _ in range(3):
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.proof
@pytest.mark.share(1)
@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_what_takes_the_place_of_a_missing_name_works(tmp_path, monkeypatch, backend):
    """Ranks train, where no name that has a substitute is there; the reference is plain torch."""
    monkeypatch.setenv("ONECARD_BACKEND", backend)
    monkeypatch.setenv("ONECARD_CHECK", "1")
    functions = "\n".join(inspect.getsource(function) for function in (made, train))
    program = write(tmp_path, "import torch\nfrom torch import nn\n" + functions + textwrap.dedent(WITHOUT))
    [(status, output)] = run_ranks(launch_here, 1, tmp_path, ["--nproc_per_node", "2", program])
    losses = " ".join(f"{loss:.5f}" for loss in train(*made()))
    assert status == 0 and f"losses {losses} without {len(with_substitute()) - 2}\n" in output, output
