"""Checkpoints of the manual level: what any degree saves, any other loads, one card and Hugging Face's files included.

The reference is the plain one-card program: its names, its whole tensors, its losses when training goes on.
"""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from amounts import PROOF
from checkpoints import equal
from pipeline_programs import OneCard
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as dcp

import onecard as oc
from onecard import fleet
from onecard.errors import CheckpointError
from onecard.fleet import meta_parallel
from onecard.fleet.layers import sequence
from onecard.testing import run_ranks

WIDTH, HEAD, HEADS, KV, HIDDEN, CLASSES, TIME = 8, 2, 4, 2, 10, 11, 6


class Block(nn.Module):
    """Grouped queries, a gated MLP of merged projections, norms; between the cut layers a part of the sequence."""

    def __init__(self, parallel: bool) -> None:
        super().__init__()
        self.parallel = parallel
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        if parallel:
            for norm in (self.norm1, self.norm2):
                for p in norm.parameters():
                    fleet.mark_as_sequence_parallel_parameter(p)
            sp: Any = sequence
            self.qkv: Any = sp.QKVSequenceParallelLinear(WIDTH, HEAD, HEADS, KV, has_bias=True, seq_dim=1)
            self.out: Any = sp.RowSequenceParallelLinear(WIDTH, WIDTH, unit=HEAD, seq_dim=1)
            self.up: Any = sp.MergedColumnSequenceParallelLinear(WIDTH, [HIDDEN, HIDDEN], has_bias=True, seq_dim=1)
            self.down: Any = sp.RowSequenceParallelLinear(HIDDEN, WIDTH, seq_dim=1)
        else:
            self.qkv, self.out = nn.Linear(WIDTH, HEAD * (HEADS + 2 * KV)), nn.Linear(WIDTH, WIDTH)
            self.up, self.down = nn.Linear(WIDTH, 2 * HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.qkv(self.norm1(x))
        if self.parallel:
            q, k, v = self.qkv.split(y)
            k, v = self.qkv.expand(k, 2), self.qkv.expand(v, 2)
        else:
            q, k, v = y.unflatten(-1, (-1, HEAD)).split([HEADS, KV, KV], -2)
            k, v = (t.repeat_interleave(HEADS // KV, 2) for t in (k, v))
        y = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        gate, up = self.up.split(self.up(self.norm2(x))) if self.parallel else self.up(self.norm2(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Table(sequence.VocabSequenceParallelEmbedding):
    def __init__(self) -> None:
        super().__init__(CLASSES, WIDTH, seq_dim=1)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(sequence.all_gather(x, 1), self.weight) if x.is_floating_point() else super().forward(x)


def table_head(layer: Any, x: Tensor) -> Tensor:
    return layer(x) if isinstance(layer, Table) else F.linear(x, layer.weight)


def descs(parallel: bool) -> list[Any]:
    table: Any = (Table,) if parallel else (functools.partial(nn.Embedding, CLASSES, WIDTH).func,)
    args = () if parallel else (CLASSES, WIDTH)
    ends = [fleet.SharedLayerDesc("table", *table, f, "weight", *args) for f in (None, table_head)]
    blocks = [fleet.LayerDesc(Block, parallel) for _ in range(3)]
    return [ends[0], *blocks, fleet.LayerDesc(Norm, parallel), ends[1]]


class Norm(nn.LayerNorm):
    def __init__(self, parallel: bool) -> None:
        super().__init__(WIDTH)
        for p in self.parameters() if parallel else ():
            fleet.mark_as_sequence_parallel_parameter(p)


def loss_of(out: Tensor, y: Tensor) -> Tensor:
    if out.shape[-1] == CLASSES and not fleet.topology.begun():
        return F.cross_entropy(out.flatten(0, 1), y.flatten())
    return meta_parallel.ParallelCrossEntropy(num_classes=CLASSES)(out, y).mean()


def groups(model: Any) -> Any:
    """Two groups of parameters, of which a stage may have none of one kind."""
    params = [*model.named_parameters()]
    return [
        {"params": [(n, p) for n, p in params if p.dim() > 1]},
        {"params": [(n, p) for n, p in params if p.dim() < 2], "weight_decay": 0.0},
    ]


def batch(step: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(step)
    return torch.randint(0, CLASSES, (4, TIME), generator=g), torch.randint(0, CLASSES, (4, TIME), generator=g)


def train(model: Any, optimizer: Any, steps: range) -> list[float]:
    losses = []
    for step in steps:
        x, y = batch(step)
        if isinstance(model, fleet.PipelineParallel) or isinstance(
            getattr(model, "module", None), fleet.PipelineParallel
        ):
            loss = model.train_batch([x, y], optimizer)
        else:
            loss = loss_of(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses.append(loss.item())
    return losses


def one_card(seed: int) -> tuple[Any, Any]:
    torch.manual_seed(seed)
    model = OneCard(descs(False))
    return model, torch.optim.AdamW(groups(model), lr=0.02, eps=1e-3)


CONFIGS: dict[str, dict[str, Any]] = {
    "mp2": {"mp": 2}, "mp3": {"mp": 3}, "pp2": {"pp": 2}, "pp3": {"pp": 3}, "pp2 twice": {"pp": 2, "chunks": 3},
    "mp2 pp2": {"mp": 2, "pp": 2}, "dp2 mp2": {"dp": 2, "mp": 2}, "mp2 sharding2": {"mp": 2, "sharding": 2},
    "mp2 os_g": {"dp": 2, "mp": 2, "level": "os_g"}, "mp2 p_g_os": {"dp": 2, "mp": 2, "level": "p_g_os"},
    "pp2 os": {"dp": 2, "pp": 2, "level": "os"},
}  # fmt: skip


def made(config: dict[str, Any], seed: int) -> tuple[Any, Any]:
    """The model and its optimizer of one of the configurations."""
    strategy = fleet.DistributedStrategy()
    axes = ("dp", "mp", "pp", "sharding")
    strategy.hybrid_configs = {f"{axis}_degree": n for axis, n in config.items() if axis in axes}
    strategy.pipeline_configs = {"accumulate_steps": 2, "micro_batch_size": 2}
    fleet.init(is_collective=True, strategy=strategy)
    torch.manual_seed(seed)
    staged = "pp" in config or "level" not in config
    chunks = config.get("chunks")
    model: Any = OneCard(descs(True))
    if staged:
        torch.manual_seed(seed)
        model = fleet.PipelineLayer(descs(True), loss_fn=loss_of, num_virtual_pipeline_stages=chunks)
        model = fleet.distributed_model(model)
    optimizer = fleet.distributed_optimizer(torch.optim.AdamW(groups(model), lr=0.02, eps=1e-3))
    if "level" in config:
        model, optimizer, _ = fleet.group_sharded_parallel(model, optimizer, config["level"])
    return model, optimizer


SAVED = [*CONFIGS] if PROOF else ["mp2", "pp2 twice", "mp2 p_g_os"]


def size_of(config: dict[str, Any]) -> int:
    return int(torch.tensor([config.get(axis, 1) for axis in ("dp", "mp", "pp", "sharding")]).prod())


def save(name: str, root: Path) -> list[float]:
    model, optimizer = made(CONFIGS[name], 0)
    losses = train(model, optimizer, range(2))
    oc.checkpoint.save({"model": model, "optimizer": optimizer, "step": 2}, root / name)
    if "level" in CONFIGS[name]:
        fleet.save_group_sharded_model(model, root / f"{name} as saved", optimizer)
    else:
        dicts = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 2}
        oc.checkpoint.save(dicts, root / f"{name} as dicts")
    return losses


def load(name: str, root: Path, sources: list[str]) -> dict[str, list[float]]:
    found = {}
    model, optimizer = made(CONFIGS[name], 1)
    for source in sources:
        oc.checkpoint.load(root / source, {"model": model, "optimizer": optimizer})
        found[source] = train(model, optimizer, range(2, 4))
    return found


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    """A checkpoint by each configuration, and the losses of one card after it."""
    root = tmp_path_factory.mktemp("fleet")
    model, optimizer = one_card(0)
    losses = train(model, optimizer, range(2))
    oc.checkpoint.save({"model": model, "optimizer": optimizer, "step": 2}, root / "one")
    for name in SAVED:
        for each in run_ranks(save, size_of(CONFIGS[name]), name, root, backend="gloo"):
            assert each == pytest.approx(losses, rel=1e-5), name
    return root, train(model, optimizer, range(2, 4))


@pytest.mark.proof
def test_what_is_saved_is_one_cards(saved: tuple[Path, list[float]]) -> None:
    """Names in their order, whole tensors, groups and states, whatever saved it."""
    root, _ = saved
    one = oc.checkpoint.load(root / "one")
    assert [len(group["params"]) for group in one["optimizer"]["param_groups"]] == [13, 26]
    for path in sorted(root.iterdir()):
        state = oc.checkpoint.load(path)
        assert oc.checkpoint.verify(path) == []
        assert list(state["model"]) == list(one["model"]), path
        assert state["optimizer"].keys() == one["optimizer"].keys()
        for mine, theirs in zip(state["optimizer"]["param_groups"], one["optimizer"]["param_groups"], strict=True):
            assert mine["params"] == theirs["params"] and mine["weight_decay"] == theirs["weight_decay"], path
        for name, theirs in one["optimizer"]["state"].items():
            mine = state["optimizer"]["state"][name]
            assert mine.keys() == theirs.keys() and mine["step"] == 2
            for key in ("exp_avg", "exp_avg_sq"):
                torch.testing.assert_close(mine[key], theirs[key], rtol=1e-5, atol=1e-7)
        for name, theirs in one["model"].items():
            torch.testing.assert_close(state["model"][name], theirs, rtol=1e-5, atol=1e-6)


def test_one_card_loads_all(saved: tuple[Path, list[float]]) -> None:
    root, after = saved
    for path in root.iterdir():
        model, optimizer = one_card(1)
        oc.checkpoint.load(path, {"model": model, "optimizer": optimizer})
        assert train(model, optimizer, range(2, 4)) == pytest.approx(after, rel=1e-5), path
    oc.checkpoint.convert(root / "mp2 p_g_os", root / "hf", "huggingface", only="model")
    plain = safetensors.torch.load_file(root / "hf" / "model.safetensors")
    model, _ = one_card(1)
    model.load_state_dict({**plain, "5.weight": plain["0.weight"]})  # the plain model of PyTorch
    assert equal(
        {n: p.detach() for n, p in model.named_parameters()}, {n: plain[n] for n, _ in model.named_parameters()}
    )


@pytest.mark.proof
@pytest.mark.parametrize("name", SAVED)
def test_any_loads_from_any(name: str, saved: tuple[Path, list[float]]) -> None:
    """Each loads its own, one card's, and a third of all others."""
    root, after = saved
    others = sorted(path.name for path in root.iterdir() if path.name not in ("hf", "one", name))
    sources = ["one", name, *others[[*CONFIGS].index(name) % 3 :: 3]]
    for found in run_ranks(load, size_of(CONFIGS[name]), name, root, sources, backend="gloo"):
        for source, losses in found.items():
            assert losses == pytest.approx(after, rel=1e-5), (name, source)


def states_of_others(root: Path) -> None:
    """Averages beside the model, files of Hugging Face, marked parameters, other optimizers; in the background, too."""
    model, optimizer = made(CONFIGS["mp2"], 0)
    train(model, optimizer, range(1))
    average = copy.deepcopy(model.module)
    train(model, optimizer, range(1, 2))
    oc.checkpoint.save({"average": average, "model": model, "optimizer": optimizer}, root / "ema", wait=False).wait()
    other, its = made(CONFIGS["mp2"], 1)
    oc.checkpoint.load(root / "ema", {"model": other, "optimizer": its})
    assert equal(dict(other.state_dict()), dict(model.state_dict()))
    copied = copy.deepcopy(other.module)
    oc.checkpoint.load(root / "ema", {"average": copied})
    assert equal(dict(copied.state_dict()), dict(average.state_dict()))
    plain = {f"{n}": x.clone() for n, x in oc.checkpoint.load(root / "ema")["average"].items() if n != "5.weight"}
    if oc.get_rank() == 0:
        safetensors.torch.save_file(plain, root / "model.safetensors")
    fleet.barrier_worker()
    oc.checkpoint.load(root / "model.safetensors", other)  # a flat file, in which tied weights stand once
    assert equal(dict(other.state_dict()), dict(average.state_dict()))

    group = fleet.get_hybrid_communicate_group().group("mp")
    layers = [fleet.meta_parallel.ColumnParallelLinear(4, 6, has_bias=True, gather_output=True) for _ in range(2)]
    wholes = [torch.optim.Adafactor(layer.parameters(), 0.01) for layer in layers]  # which has whole states of parts
    for i, (layer, whole) in enumerate(zip(layers, wholes, strict=True)):
        for step in range(1 if i else 0, 2):
            layer(torch.ones(2, 4)).square().sum().backward()
            whole.step()
            whole.zero_grad()
            if i == 0 and step == 0:
                oc.checkpoint.save({"layer": layer, "optimizer": whole}, root / "whole")
                oc.checkpoint.load(root / "whole", {"layer": layers[1], "optimizer": wholes[1]})
    assert equal(dict(layers[0].state_dict()), dict(layers[1].state_dict()))
    whole = torch.arange(12.0).view(3, 4)
    layer = nn.Linear(4, [1, 2][group.index], bias=False)
    layer.weight = nn.Parameter(whole[:1] if group.index == 0 else whole[1:])
    fleet.mark(layer.weight, group, 0, [1, 2])
    momentum = torch.optim.SGD(layer.parameters(), lr=0.0, momentum=0.9)
    (layer.weight * layer.weight.detach()).sum().backward()
    momentum.step()
    oc.checkpoint.save({"layer": layer, "optimizer": momentum}, root / "marked")
    state = oc.checkpoint.load(root / "marked")
    assert equal(state["layer"]["weight"], whole)
    assert equal(state["optimizer"]["state"]["weight"]["momentum_buffer"], whole)
    oc.save_state_dict(
        {"layer": layer, "whole": oc.checkpoint.load(root / "marked")["layer"]["weight"]}, root / "beside"
    )

    with pytest.raises(CheckpointError, match="do not save the same"):  # a dict that knows nothing of its parts
        oc.save_state_dict({n: p.detach() for n, p in model.state_dict().items()}, root / "bare")
    with torch.no_grad():
        dict(average.named_parameters())["1.norm1.weight"][0] += oc.get_rank()
    with pytest.raises(CheckpointError, match=r"1\.norm1\.weight"):
        oc.checkpoint.save({"average": average}, root / "drifted")
    with torch.no_grad():
        layer.weight += 1
    fleet.parameters.hold(layer.weight, fleet.Held((4, 4), 0, (fleet.Run(group.index, layer.weight.shape[0]),), group))
    with pytest.raises(CheckpointError, match=r"'layer\.weight' \[4, 4\]: what the ranks hold of it is not all of it"):
        oc.checkpoint.save({"layer": layer}, root / "holes")


def stages_that_do_not_fit(root: Path) -> None:
    """What no stage has a place for, or lacks, is told on all ranks; what another stage has is not."""
    model, optimizer = made(CONFIGS["pp2"], 0)
    train(model, optimizer, range(1))
    oc.checkpoint.save({"model": model, "optimizer": optimizer}, root / "six")
    strategy_layers = descs(True)
    for layers, words in (
        ([*strategy_layers[:-1], fleet.LayerDesc(Block, True), strategy_layers[-1]], r"does not have .*'model\.(5|6)"),
        (strategy_layers[:3], r"has .* without a place in the state: 'model\.(3|5)"),
    ):
        other = fleet.PipelineLayer(layers, loss_fn=loss_of)
        before = {n: p.detach().clone() for n, p in other.named_parameters()}
        with pytest.raises(CheckpointError, match=words):
            oc.checkpoint.load(root / "six", {"model": other})
        assert equal(before, {n: p.detach() for n, p in other.named_parameters()})
    with torch.no_grad():
        if oc.get_rank() == 1:
            model.get_parameter("module.5.weight")[0] += 1.0
    with pytest.raises(CheckpointError, match=r"of 'model\.0\.weight' .* hold copies of"):
        oc.checkpoint.save({"model": model}, root / "drifted")
    hand = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(CheckpointError, match="do not save the same"):  # stages by hand have names of their own
        oc.checkpoint.save({"model": {f"{oc.get_rank()}.weight": hand[0].weight}}, root / "hand")


@pytest.mark.parametrize("program", [states_of_others, stages_that_do_not_fit])
def test_beside_and_against(program: Any, tmp_path: Path) -> None:
    run_ranks(program, 2, tmp_path, backend="gloo")


def random_states(root: Path) -> None:
    """Each rank's own on as many ranks that are laid out alike; told on others, before anything is changed."""
    tracker = fleet.get_rng_state_tracker()

    def drawn() -> list[Tensor]:
        with tracker.rng_state("global_seed"):
            one = torch.rand(3)
        with tracker.rng_state("local_seed"):
            return [one, torch.rand(3), torch.rand(3)]

    made(CONFIGS["pp2"], 0)
    meta_parallel.model_parallel_random_seed(5)
    state = {"random": oc.checkpoint.RandomState(), "tracker": tracker, "step": 3}
    oc.checkpoint.save(state, root / "own")
    first = drawn()
    oc.checkpoint.load(root / "own", {**state, "step": 0})
    assert equal(drawn(), first)
    torch.manual_seed(7)
    oc.checkpoint.save({"random": oc.checkpoint.RandomState()}, root / "alike")
    whole = torch.rand(3)
    made(CONFIGS["mp2"], 0)
    torch.manual_seed(8)
    before = torch.get_rng_state()
    for name in ("random", "tracker"):
        with pytest.raises(
            CheckpointError, match=rf"{name}.* laid out as .*'pp': 2.* this job has 2, laid out as .*'mp': 2"
        ):
            oc.checkpoint.load(root / "own", {name: state[name]})
    assert equal(torch.get_rng_state(), before)
    oc.checkpoint.load(root / "alike", {"random": oc.checkpoint.RandomState()})
    assert equal(torch.rand(3), whole)


def test_random_states_of_each_rank(tmp_path: Path) -> None:
    run_ranks(random_states, 2, tmp_path, backend="gloo")
    with pytest.raises(CheckpointError, match=r"has a random state of each of 2 ranks.* this job has 1"):
        oc.checkpoint.load(tmp_path / "own", {"random": oc.checkpoint.RandomState()})
    oc.checkpoint.load(tmp_path / "alike", {"random": oc.checkpoint.RandomState()})


def _names(flat: bool, level: str) -> None:
    """A wrapped model's names are the model's, and torch's functions of states find them."""
    fleet.init(is_collective=True)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    model: Any = net
    if level:
        model, optimizer, _ = fleet.group_sharded_parallel(net, torch.optim.AdamW(net.parameters(), 0.1), level)
    else:
        model = fleet.distributed_model(net)
        optimizer = fleet.distributed_optimizer(torch.optim.AdamW(model.parameters(), 0.1))
    assert [*dict(model.named_buffers())] == [*dict(net.named_buffers())]
    options = dcp.StateDictOptions(flatten_optimizer_state_dict=flat)

    def train() -> list[float]:
        losses = []
        for i in range(2):
            loss = model(torch.randn(8, 4, generator=torch.Generator().manual_seed(i))).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    train()
    weights = {name: x.clone() for name, x in dcp.get_model_state_dict(model).items()}
    states = copy.deepcopy(dcp.get_optimizer_state_dict(model, optimizer, options=options))
    expected = train()
    dcp.set_model_state_dict(model, weights)
    dcp.set_optimizer_state_dict(model, optimizer, states, options=options)
    assert train() == expected


@pytest.mark.share(1)
@pytest.mark.parametrize(("flat", "level"), [(False, ""), (True, ""), (False, "os"), (True, "os_g"), (False, "p_g_os")])
def test_names_of_a_wrapped_model(flat: bool, level: str) -> None:
    run_ranks(_names, 2, flat, level)
