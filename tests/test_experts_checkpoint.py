"""Checkpoints of mixtures by marks: folders that transformers saved, other numbers of ranks, lists of experts and stacks."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from amounts import share
from test_experts_models import MODELS, S, batch_of, cut_experts, model_of, step
from torch import Tensor, nn

import onecard as oc
from onecard.checkpoint import Stack, Unstack
from onecard.errors import CheckpointError
from onecard.testing import run_ranks

pytest.importorskip("transformers", reason="pip install onecard[test]")


def other(name: str) -> nn.Module:
    """The same architecture with other numbers."""
    model = model_of(name)
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(float("nan"))
    return model


def marked(model: nn.Module, ranks: int) -> nn.Module:
    oc.shard_layer(model, oc.ProcessMesh(range(ranks), ["ep"]), cut_experts)
    return model


def loaded(names: list[str], folder: str, ranks: int) -> dict[str, list[str]]:
    """What of a folder is otherwise than transformers itself loads it."""
    wrong = {}
    for name in names:
        place = Path(folder) / name
        wanted = type(model := other(name)).from_pretrained(place).state_dict()  # type: ignore[attr-defined]
        mine = marked(model, ranks) if ranks > 1 else model
        oc.checkpoint.load(place, mine)
        made = {n: oc.unshard(x) if isinstance(x, oc.DistTensor) else x for n, x in mine.state_dict().items()}
        wrong[name] = [n for n in wanted.keys() | made.keys() if not torch.equal(wanted[n], made[n])]
    return wrong


@pytest.mark.share(1)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_folder_of_transformers_is_loaded_as_transformers_loads_it(ranks, tmp_path):
    names = share(MODELS, 3 if ranks == 1 else 2)
    for name in names:
        model_of(name).save_pretrained(tmp_path / name)  # type: ignore[attr-defined]
    found = run_ranks(loaded, ranks, names, str(tmp_path), ranks) if ranks > 1 else [loaded(names, str(tmp_path), 1)]
    for wrong in found:
        assert wrong == {name: [] for name in names}


def test_a_folder_that_does_not_fit_is_told(tmp_path):
    from safetensors.torch import load_file, save_file

    model_of("Mixtral").save_pretrained(tmp_path / "saved")  # type: ignore[attr-defined]
    tensors = load_file(tmp_path / "saved" / "model.safetensors")

    def said(change: Any) -> str:
        held = dict(tensors)
        change(held)
        save_file(held, tmp_path / "model.safetensors")
        with pytest.raises(CheckpointError) as caught:
            oc.checkpoint.load(tmp_path, other("Mixtral"))
        return str(caught.value)

    start = "model.layers.0.block_sparse_moe"
    assert "w1.weight and the like' float32 [3, 44, 32] and" in said(lambda t: t.pop(f"{start}.experts.3.w1.weight"))
    assert "experts.down_proj' is [3, 32, 44]" in said(lambda t: t.pop(f"{start}.experts.3.w2.weight"))
    assert "does not have a tensor: 'model.layers.0.mlp.gate.weight'" in said(lambda t: t.pop(f"{start}.gate.weight"))
    assert "'model.layers.0.more'" in said(lambda t: t.update({"model.layers.0.more": torch.ones(2)}))


def test_what_is_saved_here_is_loaded_by_transformers(tmp_path):
    model = model_of("Mixtral")
    oc.checkpoint.save(model, tmp_path / "ours")
    oc.checkpoint.convert(tmp_path / "ours", tmp_path / "theirs", "huggingface")
    model.config.save_pretrained(tmp_path / "theirs")
    made = type(model).from_pretrained(tmp_path / "theirs").state_dict()
    assert all(torch.equal(made[n], x) for n, x in model.state_dict().items())


# ---- Another number of ranks


def trained(folder: str, ranks: int, first: int, last: int) -> dict[str, Tensor]:
    """Steps of a marked mixture, from where a checkpoint ends; its parameters."""
    model = marked(model_of("Qwen2-MoE"), ranks) if ranks > 1 else model_of("Qwen2-MoE")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-5)
    if first:
        oc.checkpoint.load(folder, {"model": model, "optimizer": optimizer})
    mesh = oc.ProcessMesh(range(ranks), ["ep"])
    for number in range(first, last):
        batch = batch_of(number)
        step(model, optimizer, {n: oc.shard_tensor(x, mesh, [S(0)]) for n, x in batch.items()} if ranks > 1 else batch)
    if ranks > 1 and not first:
        oc.checkpoint.save({"model": model, "optimizer": optimizer}, folder)
    return {n: oc.unshard(p.detach()).clone() if ranks > 1 else p.detach() for n, p in model.named_parameters()}


@pytest.mark.proof
def test_four_ranks_save_and_two_go_on(tmp_path):
    wanted = trained("", 1, 0, 4)
    run_ranks(trained, 4, str(tmp_path / "saved"), 4, 0, 2)
    for made in run_ranks(trained, 2, str(tmp_path / "saved"), 2, 2, 4):
        for name, value in wanted.items():
            torch.testing.assert_close(made[name], value, rtol=1e-5, atol=1e-6)


# ---- Lists of experts and stacks

EXPERTS = 5


class Listed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.ModuleDict({"up": nn.Linear(4, 6)}) for _ in range(EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([e["up"](x) for e in self.experts])  # type: ignore[index]


class Stacked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        experts = nn.Module()
        experts.up = nn.ParameterDict({"weight": torch.zeros(EXPERTS, 6, 4), "bias": torch.zeros(EXPERTS, 6)})
        self.experts = experts

    def forward(self, x: Tensor) -> Tensor:
        up: Any = self.experts.up
        return torch.einsum("ni,eoi->eno", x, up["weight"]) + up["bias"][:, None]


def steps(model: nn.Module, optimizer: Any, count: int) -> None:
    for number in range(count):
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(number))
        F.relu(model(x)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


APART = [f"*experts.{e}.up.*" for e in range(EXPERTS)]


@pytest.mark.parametrize("idle", [0, 3])
def test_counts_of_steps_that_differ_are_told(tmp_path, idle):
    """An expert without tokens has no gradient, so that its optimizer counts fewer steps; a stack has one count."""
    model = Listed()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    steps(model, optimizer, 1)
    for e in (e for e in range(EXPERTS) if e != idle):
        model.experts[e]["up"].weight.grad = torch.ones(6, 4)
    optimizer.step()
    oc.checkpoint.save({"model": model, "optimizer": optimizer}, tmp_path / "list")
    stacked = Stacked()
    state = {"model": stacked, "optimizer": torch.optim.AdamW(stacked.parameters(), lr=0.1)}
    counts = (1.0, 2.0) if not idle else (2.0, 1.0)
    said = rf"taken from the first: 'optimizer\S*up.weight\S*step' is {counts[0]}, and '\S*step' was {counts[1]}$"
    with pytest.warns(oc.checkpoint.CheckpointWarning, match=said):
        oc.checkpoint.load(tmp_path / "list", state, changes=[Stack(APART, "*experts.up.*")])


def from_a_list(folder: str) -> list[Tensor]:
    """A stack, cut along ep, that goes on where a list of experts ended; and saves itself."""
    mesh, model = oc.ProcessMesh([0, 1], ["ep"]), Stacked()
    up: Any = model.experts.up
    for name, weight in list(up.items()):
        up[name] = oc.shard_tensor(weight, mesh, [S(0)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    state = {"model": model, "optimizer": optimizer}
    oc.checkpoint.load(f"{folder}/list", state, changes=[Stack(APART, "*experts.up.*")])
    steps(model, optimizer, 2)
    oc.checkpoint.save(state, f"{folder}/stack")
    return [oc.unshard(up[name].detach()) for name in ("weight", "bias")]


def test_a_list_of_experts_becomes_a_stack_and_a_list_again(tmp_path):
    torch.manual_seed(0)
    model = Listed()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    steps(model, optimizer, 2)
    oc.checkpoint.save({"model": model, "optimizer": optimizer}, tmp_path / "list")
    steps(model, optimizer, 2)
    wanted = [torch.stack([getattr(e["up"], n).detach() for e in model.experts]) for n in ("weight", "bias")]  # type: ignore[index]
    for made in run_ranks(from_a_list, 2, str(tmp_path)):
        torch.testing.assert_close(made, wanted, rtol=1e-5, atol=1e-6)
    again = Listed()
    second = torch.optim.AdamW(again.parameters(), lr=0.1)
    unstack = Unstack("*experts.up.*", APART)
    oc.checkpoint.load(tmp_path / "stack", {"model": again, "optimizer": second}, changes=[unstack])
    steps(model, optimizer, 1)
    steps(again, second, 1)
    for a, b in zip(again.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    shutil.rmtree(tmp_path / "list")


def test_stacks_that_cannot_be_are_told(tmp_path):
    oc.checkpoint.save({"a.0": torch.ones(2), "a.1": torch.ones(3), "b": torch.ones(2, 3)}, tmp_path / "old")

    def said(*changes: Any) -> str:
        with pytest.raises(CheckpointError) as caught:
            oc.checkpoint.load(tmp_path / "old", {}, changes=changes)
        return str(caught.value)

    assert "cannot be stacked" in said(Stack(["a.0", "a.1"], "a"))
    assert "but no 'a.2'" in said(Stack(["a.0", "a.2"], "a"))
    assert "has 2 indices in dim 0; want 3 targets" in said(Unstack("b", ["b.0", "b.1", "b.2"]))
    assert "has no dim 2" in said(Unstack("b", ["b.0"], dim=2))


def test_stacks_along_every_dim(tmp_path):
    """A new dim anywhere, a dim taken away, beside turns and cuts: as torch makes it of whole tensors."""
    from onecard.checkpoint import Transpose

    parts = [torch.randn(3, 4) for _ in range(2)]
    oc.checkpoint.save({f"p.{i}": x for i, x in enumerate(parts)}, tmp_path / "old")
    for dim in (0, 1, 2, -1):
        made = {"p": torch.zeros_like(torch.stack(parts, dim))}
        oc.checkpoint.load(tmp_path / "old", made, changes=[Stack(["p.0", "p.1"], "p", dim)])
        assert torch.equal(made["p"], torch.stack(parts, dim))
        wanted = torch.stack(parts, dim).transpose(0, 2)
        made = {"p": torch.zeros_like(wanted)}
        oc.checkpoint.load(tmp_path / "old", made, changes=[Stack(["p.0", "p.1"], "p", dim), Transpose("p", (0, 2))])
        assert torch.equal(made["p"], wanted)
        for out in (0, 1, 2):
            alone = wanted.unbind(out)
            back = {f"q.{i}": torch.zeros_like(x) for i, x in enumerate(alone)}
            changes = [Stack(["p.0", "p.1"], "p", dim), Transpose("p", (0, 2)), Unstack("p", [*back], out)]
            oc.checkpoint.load(tmp_path / "old", back, changes=changes)
            assert all(torch.equal(back[f"q.{i}"], x) for i, x in enumerate(alone)), (dim, out)
