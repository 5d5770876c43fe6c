"""Programs for one card whose plan is found: what a rehearsal must not stumble over, and what torch.compile gives."""

from __future__ import annotations

import copy
import io
import os
import pickle
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from amounts import PROOF
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import onecard as oc
from onecard._torch.uncompiled import is_wrapper, uncompiled
from onecard.auto.entrance import Entrance
from onecard.auto.rank import Job, begin
from onecard.commands.find import searched
from onecard.errors import DispatchError
from onecard.testing import run_ranks

BEGIN = "import os, torch, torch.nn as nn, torch.nn.functional as F\nnet = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3))\n"
ADAM = "opt = torch.optim.Adam(net.parameters())\n"
PROGRAMS = {
    "by hand": """
for i in range(100):
    assert i < 3  # what is looked for is known by then
    net.zero_grad()
    F.cross_entropy(net(torch.randn(8, 4)), torch.randint(3, (8,))).backward()
    for p in net.parameters():
        p.data.add_(p.grad, alpha=-0.1)
""",
    "two steps by hand, the last ones": """
for _ in range(2):
    net.zero_grad()
    F.cross_entropy(net(torch.randn(8, 4)), torch.randint(3, (8,))).backward()
""",
    "a scaler": ADAM
    + """
scaler = torch.amp.GradScaler("cpu")
for i in range(3):
    opt.zero_grad()
    scaler.scale(F.cross_entropy(net(torch.randn(8, 4)), torch.randint(3, (8,)))).backward()
    scaler.step(opt)
    scaler.update()
""",
    "a distribution": ADAM
    + """
for _ in range(3):
    opt.zero_grad()
    found = torch.distributions.Categorical(logits=net(torch.randn(8, 4)))
    (-found.log_prob(found.sample())).mean().backward()
    opt.step()
""",
    "masks of more than one dim": ADAM
    + """
for _ in range(3):
    opt.zero_grad()
    x, y = torch.randn(8, 5, 4), torch.randint(4, (8, 5)) - 1
    out, mask = net(x), y != -1
    F.cross_entropy(out.flatten(0, 1), y.flatten(), ignore_index=-1).backward()
    opt.step()
    right = (out.argmax(-1)[mask] == y[mask]).sum() + out.argmax(-1).masked_select(mask).sum()
    y[mask] = out.argmax(-1)[mask]
""",
    "rows of a whole batch, chosen by a mask": ADAM
    + """
for _ in range(3):
    opt.zero_grad()
    z = net(torch.randn(8, 4))
    alike = (z @ z.T)[~torch.eye(8, dtype=torch.bool)].view(8, 7)
    F.cross_entropy(alike, torch.zeros(8, dtype=torch.long)).backward()
    opt.step()
""",
    "rows that are cut out of all data within the step": ADAM
    + """
data, labels = torch.randn(30, 4), torch.randint(3, (30,))
for i in range(3):
    opt.zero_grad()
    F.cross_entropy(net(data[i * 8 : i * 8 + 8]), labels[i * 8 : i * 8 + 8]).backward()
    opt.step()
""",
    "hooks that read values": ADAM
    + """
read = []
net[0].register_forward_hook(lambda m, given, out: read.append(out.mean().item()))
net[0].register_full_backward_hook(lambda m, into, out: read.append(out[0].abs().mean().item()))
for _ in range(3):
    opt.zero_grad()
    net(torch.randn(8, 4, requires_grad=True)).square().mean().backward()
    opt.step()
""",
    "an optimizer for each parameter, which steps in backward": """
for p in net.parameters():
    def stepped(p, opt=torch.optim.Adam([p])):
        opt.step()
        opt.zero_grad()
    p.register_post_accumulate_grad_hook(stepped)
for _ in range(4):
    F.cross_entropy(net(torch.randn(8, 4)), torch.randint(3, (8,))).backward()
""",
    "a shape that is changed in place, as that of an LSTM's result": ADAM
    + """
for _ in range(3):
    opt.zero_grad()
    out = net(torch.randn(8, 5, 4)).transpose(0, 1).contiguous()
    out.transpose_(0, 1)
    torch.bmm(out.transpose(1, 2), out).square().mean().backward()
    opt.step()
""",
    "experts in float32, by products in groups": ADAM
    + """
class Experts(nn.Sequential):
    def forward(self, x):
        stacked = torch.stack([self[0].weight.T] * 2)  # (expert, in, out)
        made = F.grouped_mm(x, stacked, offs=torch.tensor([3, 8], dtype=torch.int32))
        return self[1](made + self[0].bias)
net.__class__ = Experts
for _ in range(3):
    opt.zero_grad()
    F.cross_entropy(net(torch.randn(8, 4)), torch.randint(3, (8,))).backward()
    opt.step()
""",
    "nobody's launcher": ADAM
    + """
assert int(os.environ.get("RANK", -1)) == -1 and "WORLD_SIZE" not in os.environ
net = torch.compile(net)
for _ in range(3):
    opt.zero_grad()
    net(torch.randn(8, 4)).sum().backward()
    opt.step()
assert [*net.state_dict()][0] == "_orig_mod.0.weight"
""",
}


@pytest.mark.share(12)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_plan_is_found(tmp_path: Path, name: str) -> None:
    (script := tmp_path / "program.py").write_text(BEGIN + PROGRAMS[name])
    before = dict(os.environ)
    found, names = searched(script, [], 2, oc.Machine.preset("A100"), 0.0)
    assert found.best.world == 2 and [*names] == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert dict(os.environ) == before
    unpriced = re.search(r"makes of the model's results: \S*program\.py:\d+: ", str(found))  # with the program's line
    assert bool(unpriced) == ("makes of" in str(found)) == ("chosen by a mask" in name) and "at ?" not in str(found)


def _compiled() -> list[Any]:
    begin(Job(oc.Plan(per_host=0), {"0.weight": [8, 4], "0.bias": [8]}).to_json())
    torch.manual_seed(0)
    net = torch.compile(nn.Sequential(nn.Linear(4, 8)), mode="max-autotune")
    square = torch.compile(dynamic=True)(torch.square)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for _ in range(2):
        square(net(torch.ones(4, 4))).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.save(net.state_dict(), file := io.BytesIO())
    file.seek(0)
    copied = pickle.loads(pickle.dumps(copy.deepcopy(net.eval())))
    kind = type(copied).__mro__[1].__name__
    return [
        list(torch.load(file)),
        list(copied.state_dict()),
        kind,
        copied.training,
        net(torch.ones(1, 4)).sum().item(),
    ]


def test_a_compiled_module_has_torchs_names():
    """Checkpoints are those of one card: ``_orig_mod.`` is in front of each name."""
    torch.manual_seed(0)
    net = nn.Linear(4, 8)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for _ in range(2):
        net(torch.ones(4, 4)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    names = ["_orig_mod.0.weight", "_orig_mod.0.bias"]
    for *said, value in run_ranks(_compiled, 1):
        assert said == [names, names, "OptimizedModule", False]
        assert value == pytest.approx(net(torch.ones(1, 4)).sum().item(), rel=1e-5)


def _whole_module(zero: int) -> tuple[bytes, bytes, float]:
    begin(Job(oc.Plan(dp=2, zero=zero, per_host=0)).to_json())
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for _ in range(2):
        net(torch.ones(4, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.save(net, file := io.BytesIO())
    return file.getvalue(), pickle.dumps(copy.deepcopy(net)), net(torch.ones(3, 4)).sum().item()


@pytest.mark.share(2)
@pytest.mark.parametrize("zero", [0, 3])
def test_a_whole_module_is_one_cards(zero):
    """It runs where there is one process, and no onecard: what divides batches or gathers parameters stays behind."""
    for saved, pickled, value in run_ranks(_whole_module, 2, zero):
        assert not re.search(rb"onecard\.[a-z]", saved + pickled)
        assert (
            b"partial" in pickled and b"partial" not in saved
        )  # torch.save leaves the hooks out, so that others may load it
        for net in (torch.load(io.BytesIO(saved), weights_only=False), pickle.loads(pickled)):
            assert net(torch.ones(3, 4)).sum().item() == pytest.approx(value, rel=1e-5)
            net(torch.ones(3, 4)).sum().backward()
            assert type(net[0].weight) is nn.Parameter and type(net[0].weight.grad) is torch.Tensor


def _with_torchs_checkpoints(folder: Path, plan: dict[str, Any] | None) -> list[float]:
    """Losses; saved after two steps, in the background after four, both loaded again."""
    os.chdir(folder)
    if plan is not None:
        begin(Job(oc.Plan(per_host=0, **plan)).to_json())
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = torch.optim.AdamW(net.parameters(), 0.1, eps=1e-3)
    losses = []

    def train() -> None:
        for _ in range(2):
            loss = net(torch.randn(6, 4)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())

    def state() -> dict[str, Any]:
        model, states = get_state_dict(net, optimizer)
        return {"model": model, "optimizer": states, "step": len(losses)}

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # without a process group, torch says
        train()
        dcp.save(state(), checkpoint_id="now")
        train()
        dcp.async_save(state(), checkpoint_id="later").result()
        for name in ("now", "later"):
            train()
            dcp.load(read := state(), checkpoint_id=name)
            set_state_dict(net, optimizer, model_state_dict=read["model"], optim_state_dict=read["optimizer"])
            losses.append(read["step"])
        train()
    return losses


@pytest.mark.parametrize("zero", [0, *([3] if PROOF else [])])
def test_checkpoints_of_torch_are_one_cards(tmp_path, zero):
    """Each rank reads what it wrote; on the disk is all of it, whole, for one process."""
    for name in ("one", "several"):
        (tmp_path / name).mkdir()
    (wanted,) = run_ranks(_with_torchs_checkpoints, 1, tmp_path / "one", None)
    for found in run_ranks(_with_torchs_checkpoints, 2, tmp_path / "several", {"dp": 2, "zero": zero}):
        assert found == pytest.approx(wanted, rel=1e-4)
    written = [
        sorted(str(p.relative_to(tmp_path / n)) for p in (tmp_path / n).rglob("*.*")) for n in ("one", "several")
    ]
    assert written[0] == written[1]
    for folder in ("now", "later"):
        read = {"model": {"0.weight": torch.zeros(8, 4)}}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.load(read, checkpoint_id=tmp_path / "several" / folder)
        assert read["model"]["0.weight"].abs().min() > 0


def test_what_compiles_nothing_keeps_what_it_is_given():
    net = nn.Linear(2, 2)
    wrapped = uncompiled(net)
    assert is_wrapper(wrapped) and not is_wrapper(net) and uncompiled(wrapped) is wrapped
    assert uncompiled(len) is len and uncompiled(fullgraph=True)(len) is len
    assert torch.equal(wrapped(torch.ones(1, 2)), net(torch.ones(1, 2)))


def test_rows_enter_beside_states_that_lie_on_the_mesh():
    """A recurrent model is given what it has returned."""
    mesh = oc.ProcessMesh([0], ["dp"])
    states = oc.shard_tensor(torch.ones(1, 4, 2), mesh, [oc.Shard(1)])
    rows, kept = Entrance(mesh, ("dp",)).handed_in((torch.ones(3, 4, 2), states), {}).found[0]
    assert isinstance(rows, oc.DistTensor) and rows.placements == (oc.Shard(0),) and kept is states


def test_a_sparse_operand_enters_as_it_is():
    """Who takes it says what it cannot, at the model's own line."""
    mesh = oc.ProcessMesh([0], ["dp"])
    graph, rows = Entrance(mesh, ("dp",)).handed_in((torch.eye(4).to_sparse(), torch.ones(4, 2)), {}).found[0]
    assert graph.layout is torch.sparse_coo and isinstance(rows, oc.DistTensor)
    with pytest.raises(DispatchError, match="to_dense"):
        graph @ rows


class Remembers(nn.Module):
    """Writes into what it is given, as a cache of keys and values is."""

    def forward(self, x, cache, memo, table):
        cache[0].append(x * 2)
        cache[1][0] = cache[1][0] + x
        memo["seen"] = x + 1
        table[:, :1] += x
        return x


@pytest.mark.parametrize("grad", [True, False])
def test_what_a_forward_writes_into_what_it_is_given_is_the_programs(grad):
    model, x = Remembers(), torch.ones(3, 1)
    Entrance(oc.ProcessMesh([0], ["dp"]), ("dp",)).before(model)
    cache, memo, table = [[], [torch.ones(3, 1)]], {"x": x}, torch.zeros(3, 2)
    with torch.set_grad_enabled(grad):
        for _ in range(2):
            model(x, cache, memo, table)
    assert len(cache[0]) == 2 and oc.unshard(cache[1][0]).tolist() == [[3.0]] * 3
    assert memo["x"] is x and oc.unshard(memo["seen"]).tolist() == [[2.0]] * 3
    assert table.tolist() == [[2.0, 0.0]] * 3 and type(table) is torch.Tensor
