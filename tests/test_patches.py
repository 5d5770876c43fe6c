"""What onecard changes in torch: what its table says, where it is needed, and nothing after ``unpatch``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import onecard as oc
from onecard._torch import patches

# Functions, methods, properties and lists of hooks in all of torch and json, before and after.
PROGRAM = """
import importlib, sys, warnings
warnings.simplefilter("ignore")
for name in sys.argv[1].split(","):
    try: importlib.import_module(name)
    except Exception: pass
import torch
from torch import nn

def state():
    found = {}
    for name, module in [*sys.modules.items()]:
        if module is None or name.split(".")[0] not in ("torch", "json"):
            continue
        for key, value in [*vars(module).items()]:
            if isinstance(value, type) and value.__module__ == name:
                found |= {f"{name}.{key}.{k}": v for k, v in vars(value).items() if callable(v) or isinstance(v, property)}
            elif callable(value) or (isinstance(value, (list, dict)) and (key.endswith("_hooks") or "foreach_supported" in key)):
                found[f"{name}.{key}"] = [*value] if isinstance(value, (list, dict)) else value
    for name in ("clip_grad_norm_", "clip_grad_value_", "get_total_norm"):
        function = getattr(torch.nn.utils, name)
        found[f"torch.nn.utils.{name}"] = [c.cell_contents for c in function.__closure__]
    return found

def same(a, b):
    return a is b or (isinstance(a, list) and isinstance(b, list) and len(a) == len(b) and all(map(same, a, b))) or type(a) is int

def changed(a, b):
    new = {k for k in b if k not in a and k.startswith(("torch.Tensor.", "torch._tensor.Tensor."))}
    return sorted(new | {k for k in a if k in b and not same(a[k], b[k])})

torch.optim.SGD([torch.ones(1, requires_grad=True)], 0.1), torch.ones(2).to(torch.float64)
first = state()
import onecard as oc
from onecard import fleet
print("import", *changed(first, state()))
oc.shard_tensor(torch.ones(2), oc.ProcessMesh([0], ["x"]), [oc.Replicate()])
second = state()
print("tensor", *changed(first, second))
import os
os.environ["ONECARD_BACKEND"] = "shm"
fleet.init(is_collective=True)
model = fleet.distributed_model(nn.Linear(2, 2))
optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), 0.1))
model(torch.ones(2, 2)).sum().backward()
torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
optimizer.step()
oc.to_static(lambda x: x * 2)(torch.ones(2))
third = state()
print("fleet", *changed(second, third))
with oc.unpatch():
    print("within", *changed(first, state()))
print("again", *changed(third, state()))
oc.unpatch()
print("after", *changed(first, state()))
print("made", len(oc.unpatch.made()))
fleet.init(is_collective=True)
print("anew", *changed(first, state()))
"""


@pytest.fixture(scope="module")
def said() -> dict[str, set[str]]:
    loaded = "import sys, onecard; print(','.join(m for m in sys.modules if m.split('.')[0] == 'torch'))"
    modules = subprocess.run([sys.executable, "-c", loaded], capture_output=True, text=True, check=True).stdout.strip()
    ran = subprocess.run([sys.executable, "-c", PROGRAM, modules], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]
    return {name: set(rest) for name, *rest in (line.split() for line in ran.stdout.splitlines() if line)}


ALIASES = {"torch.nn.modules.module.Module": "torch.nn.Module", "torch.nn.parameter.Parameter": "torch.nn.Parameter",
           "torch.amp.grad_scaler.GradScaler": "torch.amp.GradScaler", "torch._tensor.Tensor": "torch.Tensor",
           "json.encoder.JSONEncoder": "json.JSONEncoder"}  # fmt: skip
# torch's own doing: lists of foreach types under a second name.
OTHER_NAMES = {"_optim_foreach_supported_types", "_util_foreach_supported_types"}


def named(changes: set[str]) -> set[str]:
    """Addresses as the table has them."""
    found = set()
    for address in changes:
        for long, short in ALIASES.items():
            address = address.replace(long, short)
        if address.rpartition(".")[2] not in OTHER_NAMES:
            found.add(address.replace("torch.distributed.distributed_c10d.monitored", "torch.distributed.monitored")
                      .replace("torch.distributed.distributed_c10d.split", "torch.distributed.split"))  # fmt: skip
    return found


def of(when: str) -> set[str]:
    return {what.removeprefix("fleet: ") for what, patch in patches.TABLE.items() if patch.when == when}


@pytest.mark.proof
def test_importing_changes_nothing(said):
    assert named(said["import"]) == set()


def test_what_changes_is_in_the_table(said):
    assert named(said["tensor"]) == of(patches.TENSOR)
    # The recorder of flights is patched by torch 2.14 and later; a world of one has no shm group.
    assert named(said["fleet"]) == of(patches.FLEET)


def test_unpatch_leaves_torch_as_it_came(said):
    assert named(said["within"]) == named(said["after"]) == set() and said["made"] == {"0"}
    assert named(said["again"]) == set()
    assert named(said["anew"]) >= of(patches.FLEET) - {"torch.optim.optimizer._global_optimizer_pre_hooks"}


def test_a_patch_that_the_table_does_not_name_is_refused():
    with pytest.raises(KeyError, match="does not name"):
        patches.replace("torch.nn.Linear.forward", nn.Linear, "forward", lambda inner: inner)
    # Nothing is touched: a loop of wrappers stops torch's compiler.
    assert not hasattr(nn.Linear.forward, "__wrapped__")


def test_a_patch_on_top_stays(monkeypatch):
    """Another library has wrapped what we put there: undoing ours would drop theirs."""
    oc.shard_tensor(torch.ones(2), oc.ProcessMesh([0], ["x"]), [oc.Replicate()])
    with oc.unpatch() as undone:  # what other libraries, met in this process, have put on top of the others
        before = {patch.what for patch in undone.made()}
    oc.shard_tensor(torch.ones(97, 2), oc.ProcessMesh([0], ["x"]), [oc.Replicate()])
    ours = nn.Module.load_state_dict
    theirs = lambda *args, **kwargs: ours(*args, **kwargs)  # noqa: E731
    monkeypatch.setattr(nn.Module, "load_state_dict", theirs)
    with oc.unpatch() as undone:
        assert nn.Module.load_state_dict is theirs
        assert {patch.what for patch in undone.made()} == {"torch.nn.Module.load_state_dict"} | before
        oc.shard_tensor(torch.ones(97, 3), oc.ProcessMesh([0], ["x"]), [oc.Replicate()])  # makes the others anew
        assert nn.Module.load_state_dict is theirs
    assert nn.Module.load_state_dict is theirs


def test_the_page_has_the_table():
    page = (Path(__file__).parents[1] / "docs" / "design" / "patches.md").read_text()
    for what, patch in patches.TABLE.items():
        row = f"| `{what.removeprefix('fleet: ')}` | {patch.when} | {patch.purpose} | {patch.notice or 'nothing'} |"
        assert row in page
