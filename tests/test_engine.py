"""Engine: every pair of what a strategy switches on, against one card; habits of programs; bad input."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from typing import Any

import amounts
import engine_programs as programs
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import onecard as oc
from onecard.errors import EngineError, RecordingError, StrategyError
from onecard.testing import run_ranks

SWITCHES: dict[str, dict[str, Any]] = {
    "dp": {},
    "tp": {},
    **{f"sharding{stage}": {"sharding": {"enable": True, "stage": stage}} for stage in (1, 2, 3)},
    "recompute": {"recompute": {"enable": True}},
    "blocks": {"recompute": {"enable": True, "checkpoints": ["repeated"]}},
    "amp": {"amp": {"enable": True}},
    "merge": {"gradient_merge": {"enable": True, "k_steps": 2}},
    "pp": {"pipeline": {"enable": True, "degree": 2, "accumulate_steps": 2}},
}
ONE_OF = [{"dp", "tp"}, {"sharding1", "sharding2", "sharding3"}, {"recompute", "blocks"}]
PAIRS = [
    pair
    for pair in itertools.combinations(SWITCHES, 2)
    if not any({*pair} <= each for each in ONE_OF)
    and pair[0] != "dp"
    and not (pair[0] == "tp" and pair[1][:8] in ("sharding", "pp"))
    and pair != ("merge", "pp")
]
"""All that two ranks can be; without dp, which all but tp and pp are, and what takes four. merge with pp is refused."""


def switched(*names: str) -> dict[str, Any]:
    return {section: values for name in names for section, values in SWITCHES[name].items()}


def cells(listed: list[tuple[str, ...]], mesh: Any = None) -> list[dict[str, Any]]:
    """Each cell in the same processes."""
    found = []
    for names in listed:
        axes = ["pp" if "pp" in names else "dp", "mp"]
        grid = oc.ProcessMesh([0, 1], ["mp"]) if mesh is None else oc.ProcessMesh(mesh, axes)
        marks = (lambda model, grid=grid: programs.tensor_parallel(model, grid)) if "tp" in names else None
        found.append(programs.engine_loop(switched(*names), marks, clip_grad_norm=0.5))
    return found


def check_cells(listed: list[tuple[str, ...]], ranks: list[list[dict[str, Any]]]) -> None:
    plain = programs.plain_loop(programs.make_net(), clip=0.5)
    half = programs.plain_loop(programs.make_net(), lambda: torch.autocast("cpu", torch.bfloat16), clip=0.5)
    assert plain[0] != pytest.approx(half[0], rel=1e-5), "autocast is seen"
    for names, *alike in zip(listed, *ranks, strict=True):
        first = alike[0]
        losses, parameters = half if "amp" in names else plain
        assert all(each["losses"] == first["losses"] and each["accuracy"] == first["accuracy"] for each in alike), names
        # Half-precision sums of half batches are rounded otherwise than those of whole ones.
        assert first["losses"] == pytest.approx(losses, rel=5e-3 if "amp" in names else 1e-5), names
        for each in alike:  # of a pipeline each rank has its own
            for name, p in each["parameters"].items():
                torch.testing.assert_close(p, parameters[name], rtol=1e-5, atol=2e-2 if "amp" in names else 2e-6)
        assert {name for each in alike for name in each["parameters"]} == {*parameters}
        assert first["recordings"] == 1, names
        whole = sum(p.numel() for p in parameters.values())
        assert (first["held"] < whole) == bool({"tp", "sharding3", "pp"} & {*names}), names


LISTED = [*((name,) for name in SWITCHES), *PAIRS]
HERE = [
    ("pp", "blocks"), ("tp", "blocks"), ("sharding2", "amp"), ("sharding3", "recompute"),
]  # fmt: skip


@pytest.mark.proof
def test_every_pair_of_switches_is_one_cards_program() -> None:
    listed = LISTED if amounts.PROOF else HERE
    check_cells(listed, run_ranks(cells, 2, listed, timeout=amounts.patience(240.0)))


@pytest.mark.proof
def test_what_takes_four_ranks() -> None:
    listed = [("pp", "dp", "sharding2")]
    if amounts.PROOF:
        listed += [
            ("tp", "sharding3", "blocks"),
            ("tp",),
            ("pp", "tp"),
            ("pp", "dp", "amp"),
            ("pp", "dp", "sharding1"),
            ("pp", "dp", "sharding3"),
        ]
        listed += [("tp", f"sharding{stage}", more) for stage in (1, 2, 3) for more in ("recompute", "amp", "merge")]
    check_cells(listed, run_ranks(cells, 4, listed, [[0, 1], [2, 3]], timeout=amounts.patience(240.0)))


def test_on_one_rank_it_is_the_plain_program_bit_for_bit() -> None:
    for config, around in (
        ({}, contextlib.nullcontext),
        (SWITCHES["amp"], lambda: torch.autocast("cpu", torch.bfloat16)),
    ):
        losses, parameters = programs.plain_loop(programs.make_net(), around, clip=0.5)
        found = programs.engine_loop(config, clip_grad_norm=0.5)
        assert found["losses"] == losses
        assert all(torch.equal(found["parameters"][name], p) for name, p in parameters.items())


def test_a_check_sees_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step without clipping, and a strategy that does nothing, are seen."""
    found = programs.engine_loop({})
    assert found["losses"] != pytest.approx(programs.plain_loop(programs.make_net(), clip=0.5)[0], rel=1e-5)


# habits

Made = tuple[Any, Any]


def linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(programs.WIDTH, programs.CLASSES)


def sgd(*modules: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for m in modules for p in m.parameters()], lr=0.1)


def samples(count: int = 13) -> list[Any]:
    """The last batch is shorter than those of 4."""
    data = programs.Samples(count)
    return [(x, int(y)) for x, y in (data[i] for i in range(count))]


class Scaled(nn.Module):
    """A loss with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, out: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(out * self.scale, label)


class Keywords(nn.Module):
    """Takes a dict, and may compute its loss itself, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = linear()

    def forward(self, x: Tensor, mask: Tensor | None = None, labels: Tensor | None = None) -> Any:
        out = self.layer(x if mask is None else x * mask)
        return out if labels is None else {"loss": F.cross_entropy(out, labels), "logits": out}


class Two(nn.Module):
    """Two inputs, two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = linear()

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return self.layer(a), self.layer(b)


def lambda_loss() -> Made:
    model = linear()
    return oc.Engine(model, lambda out, label: F.cross_entropy(out, label) * 2, sgd(model), oc.Accuracy()), samples()


def own_parameters() -> Made:
    model, loss = linear(), Scaled()
    return oc.Engine(model, loss, sgd(model, loss)), samples()


def several_optimizers() -> Made:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 6))
    optimizers = [sgd(model[0]), torch.optim.Adam(model[1].parameters(), lr=0.01)]
    return oc.Engine(model, nn.CrossEntropyLoss(), optimizers), samples()


def dict_batches() -> Made:
    model = Keywords()
    data = [{"x": x, "mask": torch.ones(1), "labels": y} for x, y in samples()]
    return oc.Engine(model, nn.CrossEntropyLoss(), sgd(model), oc.Accuracy()), data


def loss_of_the_model() -> Made:
    model = Keywords()
    return oc.Engine(model, None, sgd(model)), [{"x": x, "labels": y} for x, y in samples()]


def two_of_each() -> Made:
    model = Two()
    loss = lambda one, two, label: F.cross_entropy(one, label) + F.cross_entropy(two, label)  # noqa: E731
    return oc.Engine(model, loss, sgd(model)), [(x, -x, y) for x, y in samples()]


def no_labels() -> Made:
    model = linear()
    return oc.Engine(model, lambda out: out.square().mean(), sgd(model)), [x for x, _ in samples()]


def ignored_labels() -> Made:
    model = linear()
    data = [(x, -100 if i % 3 == 1 else y) for i, (x, y) in enumerate(samples())]
    return oc.Engine(model, nn.CrossEntropyLoss(), sgd(model), oc.Accuracy((1, 2))), data


def hooks_and_names() -> Made:
    """A hook of a gradient, and an attribute, of parameters that others take the place of."""
    model = linear()
    model.weight.register_hook(lambda grad: grad * 0.5)
    model.bias.slow = True  # type: ignore[attr-defined]
    return oc.Engine(model, nn.CrossEntropyLoss(), sgd(model)), samples()


def states_from_before() -> Made:
    """An optimizer that has stepped already, by hand."""
    model = linear()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    for x, y in programs.batches(8):
        F.cross_entropy(model(x) * 3, y.squeeze(1)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return oc.Engine(model, nn.CrossEntropyLoss(), optimizer), samples()


def merged() -> Made:
    """The last batch does not divide in microbatches."""
    model = linear()
    merge = {"gradient_merge": {"enable": True, "k_steps": 2}}
    return oc.Engine(model, nn.CrossEntropyLoss(), sgd(model), oc.Accuracy(), merge), samples()


def merged_under_zero() -> Made:
    """On one rank, too: nothing is asked where a tensor without data lies."""
    model = linear()
    config = {"gradient_merge": {"enable": True, "k_steps": 2}, "sharding": {"enable": True, "stage": 2}}
    return oc.Engine(model, nn.CrossEntropyLoss(), sgd(model), strategy=config), samples()


def scaled_half() -> Made:
    model = linear()
    config = {"amp": {"enable": True, "dtype": "float16", "init_loss_scaling": 4.0, "custom_black_list": ["linear"]}}
    return oc.Engine(model, nn.CrossEntropyLoss(), sgd(model), strategy=config), samples()


HABITS: list[Callable[[], Made]] = [
    lambda_loss, own_parameters, several_optimizers, dict_batches, loss_of_the_model, two_of_each, no_labels, ignored_labels,
    hooks_and_names, states_from_before, merged,
    merged_under_zero, scaled_half,
]  # fmt: skip


def habits() -> list[Any]:
    found = []
    for make in HABITS:
        engine, data = make()
        passes = bool(engine.metrics) or amounts.PROOF  # of which a validation tells most
        history = engine.fit(data, data if passes else None, batch_size=4, epochs=2, verbose=0)
        outputs = engine.predict(data[-2:], verbose=0)
        first = next(x for x in (outputs[-1].values() if isinstance(outputs[-1], dict) else [outputs[-1]]))
        rows = (first[0] if isinstance(first, tuple) else first).shape
        names = {name: oc.unshard(p).detach() for name, p in engine.model.named_parameters()}
        kept = [p for p in engine.model.parameters() if getattr(p, "slow", False)]
        found.append((history.losses, history.epochs, names, tuple(rows), len(kept)))
    return found


def test_habits_on_one_rank_and_on_two() -> None:
    here, ranks = habits(), run_ranks(habits, 2)
    for make, mine, *others in zip(HABITS, here, *ranks, strict=True):
        assert len({round(loss, 4) for loss in mine[0]}) > 4, make.__name__
        for losses, epochs, parameters, rows, kept in others:
            assert losses == pytest.approx(mine[0], rel=1e-5), make.__name__
            for epoch, wanted in zip(epochs, mine[1], strict=True):
                assert epoch == pytest.approx(wanted, rel=1e-5), make.__name__
            for name, p in parameters.items():
                torch.testing.assert_close(p, mine[2][name], rtol=1e-5, atol=1e-6)
            assert (rows, kept) == mine[3:], make.__name__


def test_losses_are_those_of_the_loop_that_one_would_write() -> None:
    """Of three habits, so that both sides of the comparison above are not wrong alike."""
    engine, data = hooks_and_names()
    model = linear()
    model.weight.register_hook(lambda grad: grad * 0.5)
    optimizer, losses = sgd(model), []
    for _ in range(2):
        for start in range(0, 13, 4):
            rows = data[start : start + 4]
            loss = F.cross_entropy(model(torch.stack([x for x, _ in rows])), torch.tensor([y for _, y in rows]))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    assert engine.fit(data, batch_size=4, epochs=2, verbose=0).losses == losses


# modes, programs, files


def test_modes_leave_the_model_as_it_was() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 6))
    model[1].eval()  # frozen statistics
    engine = oc.Engine(model, nn.CrossEntropyLoss(), sgd(model))
    engine.fit(samples(), samples(), batch_size=4, epochs=2, verbose=0)
    assert [m.training for m in model] == [True, False, True, True] and model[1].num_batches_tracked == 0
    engine.run(next(iter(engine.dataloader(samples(), 4, mode="eval"))))
    assert model[2].training
    model = nn.Sequential(linear(), nn.Dropout(0.5)).eval()  # as from_pretrained leaves it
    oc.Engine(model, nn.CrossEntropyLoss(), sgd(model)).fit(samples(), batch_size=4, verbose=0)
    assert model[1].training


def test_programs_before_the_first_step_are_those_that_run() -> None:
    model = linear()
    engine = oc.Engine(model, nn.CrossEntropyLoss(), sgd(model), oc.Accuracy())
    engine.prepare(oc.InputSpec([4, 8], "float32", "x"), oc.InputSpec([4], "int64", "y"), mode="train")
    before, serial, price = engine.main_program, engine.serial_main_program, engine.cost()
    assert [str(n.target) for n in before.nodes()] == [str(n.target) for n in serial.nodes()]
    for batch in itertools.islice(engine.dataloader(samples(), 4), 3):
        engine.run(batch)
    assert engine.main_program is not before and engine.main_program.bound is not None
    assert [str(n.target) for n in engine.main_program.nodes()] == [str(n.target) for n in before.nodes()]
    assert price.flops == engine.cost().flops > engine.cost("eval").flops > 0
    assert engine.cost(batch_size=8).flops == 2 * price.flops
    assert engine.startup_program.bytes == 4 * (8 * 6 + 6) and "weight" in engine.startup_program.draw()
    assert "mm" in engine.main_program.draw()


def test_save_and_load(tmp_path: Any) -> None:
    engines = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        model = nn.Linear(8, 6)
        engines.append(oc.Engine(model, nn.CrossEntropyLoss(), torch.optim.Adam(model.parameters())))
    first, second = engines
    first.fit(samples(), batch_size=4, verbose=0)
    first.save(tmp_path / "all")
    first.save(tmp_path / "model", training=False)
    second.load(tmp_path / "all")
    assert all(torch.equal(a, b) for a, b in zip(first.model.parameters(), second.model.parameters(), strict=True))
    assert second.optimizer.state[second.model.weight]["step"] == 4
    second.load(tmp_path / "model", load_optimizer=False)


def test_dist_model() -> None:
    model = linear()
    x, y = (torch.stack(list(part)) for part in zip(*[(x, torch.tensor(y)) for x, y in samples()], strict=True))
    dist_model = oc.to_static(model, None, nn.CrossEntropyLoss(), torch.optim.Adam(model.parameters()), oc.Strategy())
    assert isinstance(dist_model, oc.DistModel) and repr(dist_model) == "DistModel(Linear, train())"
    losses = [dist_model(x, y), dist_model([x, y]), dist_model(x, y)]
    assert losses[0] > losses[1] > losses[2]
    dist_model.eval()
    assert dist_model(x, y) < losses[2]
    dist_model.predict()
    assert torch.equal(dist_model(x), model(x).detach())
    assert len(dist_model.dist_main_program("train").inputs) > 4
    state = {name: value.clone() for name, value in dist_model.state_dict().items()}
    assert {"weight", "weight.exp_avg", "bias.step"} <= {*state}
    assert {*dist_model.state_dict("param")} == {"weight", "bias"}
    dist_model.train()
    dist_model(x, y)
    dist_model.set_state_dict(state)
    assert all(torch.equal(value, state[name]) for name, value in dist_model.state_dict().items())
    with pytest.raises(EngineError, match=r"DistModel\.train\(\) takes a loss"):
        oc.to_static(linear(), None, None, None, oc.Strategy()).train()
    with pytest.raises(EngineError, match="goes with a layer"):
        oc.to_static(lambda x: x, None, nn.MSELoss())


# bad input


def bad(message: str, error: type[Exception] = EngineError) -> Any:
    return pytest.raises(error, match=message)


def engine_of(loss: Any = None, **options: Any) -> oc.Engine:
    model = linear()
    return oc.Engine(model, loss or nn.CrossEntropyLoss(), sgd(model), **options)


def test_bad_input() -> None:
    with bad(r"the loss is a tensor of shape \[4\], not one number: .*reduction='mean'"):
        engine_of(nn.CrossEntropyLoss(reduction="none")).fit(samples(), batch_size=4)
    with bad("the loss is a float, not a tensor of one number"):
        engine_of(lambda out, label: 1.0).fit(samples(), batch_size=4)
    with bad("the loss depends on no parameter that is trained"):
        engine_of(lambda out, label: out.detach().sum()).fit(samples(), batch_size=4)
    with bad(r"batch_size=14: the dataset has 13 sample\(s\), fewer than a batch: write batch_size=13 or less"):
        engine_of().fit(samples(), batch_size=14)
    assert "loss" in engine_of().evaluate(samples(), batch_size=14, verbose=0)
    with bad("the dataset has no samples"):
        engine_of().evaluate([], batch_size=14)
    with bad("batch_size=0: want a whole number"):
        engine_of().dataloader(samples(), 0)
    with bad(r"run\(mode='train'\): the engine is not prepared: call engine\.prepare"):
        engine_of().run((torch.ones(4, 8), torch.zeros(4, dtype=torch.int64)))
    with bad("mode='test': want one of 'train', 'eval', 'predict'"):
        engine_of().prepare(mode="test")
    with bad("the data gave no batch to train on in pass 1: a generator gives its batches once"):
        engine_of().fit((b for b in [(torch.ones(2, 8), torch.zeros(2, dtype=torch.int64))]), epochs=2, verbose=0)
    with bad(r"fit\(epochs=0\): want a whole number, 1 or more"):
        engine_of().fit(samples(), epochs=0)
    with bad("int is no data"):
        engine_of().fit(3)
    with bad("a batch of 5 rows cannot be cut in 2 microbatches on each of 1 rank"):
        engine_of(strategy={"gradient_merge": {"enable": True, "k_steps": 2}}).fit(samples(), batch_size=5)
    engine = engine_of()
    engine.prepare(oc.InputSpec([None, 9], name="img"), mode="train")
    with bad(r"the input img: is \[2, 8\] float32, but the engine was prepared for \['any', 9\] float32"):
        engine.run((torch.ones(2, 8), torch.zeros(2, dtype=torch.int64)))
    with bad(r"the batch has no 'labels', only x"):
        model = Keywords()
        engine = oc.Engine(model, nn.CrossEntropyLoss(), sgd(model))
        engine.prepare(labels_spec=oc.InputSpec([None], "int64", "labels"))
        engine.run({"x": torch.ones(2, 8)})


def test_parts_that_cannot_be() -> None:
    model = linear()
    with bad(r"optimizer: want a torch\.optim\.Optimizer, or several, not SGD"):
        oc.Engine(model, nn.MSELoss(), torch.optim.SGD)
    with bad(r"loss: want .*, an object of it: MSELoss\(\)"):
        oc.Engine(model, nn.MSELoss, sgd(model))
    with bad(r"LBFGS\.step computes the loss several times"):
        oc.Engine(model, nn.MSELoss(), torch.optim.LBFGS(model.parameters()))
    with bad("model: want an nn.Module, not function"):
        oc.Engine(sgd, nn.MSELoss())
    with bad("is no metric: want onecard.Accuracy"):
        engine_of(metrics=lambda out, label: 0.5)
    with bad("clip_grad_norm=0: want a number above 0"):
        engine_of(clip_grad_norm=0)
    with bad("mode='train' takes an optimizer"):
        oc.Engine(model, nn.MSELoss()).fit(samples())
    with bad("the model returns Tensor without a loss|not one number"):
        oc.Engine(model, None, sgd(model)).fit([x for x, _ in samples()], batch_size=4)
    with bad("has no module 'bloks'; there are", StrategyError):
        model = programs.make_net()
        oc.Engine(model, None, sgd(model), strategy={"recompute": {"enable": True, "checkpoints": ["bloks"]}}).prepare()
    with bad("torch has no function 'sofmax'", StrategyError):
        engine_of(strategy={"amp": {"enable": True, "custom_black_list": ["sofmax"]}})
    with bad(r"pipeline\.degree=2: does not divide the 1 rank", StrategyError):
        engine_of(strategy={"pipeline": {"enable": True, "degree": 2}}).prepare()
    with bad(r"sharding\.degree=3: does not divide the 1 rank", StrategyError):
        engine_of(strategy={"sharding": {"enable": True, "degree": 3}}).prepare()
    with bad("indexing by a mask at .*test_engine", RecordingError):
        engine_of(lambda out, label: out[out > 0].sum()).fit(samples(), batch_size=4, verbose=0)


def meshes_that_do_not_fit() -> None:
    for axes, config, said in (
        (["mp"], {"enable": True}, "no axis of the model's mesh"),
        (["dp"], {"enable": True, "degree": 4}, r"sharding\.degree=4: the model's mesh .* 2 rank\(s\) along 'dp'"),
    ):
        model = linear()
        mesh = oc.ProcessMesh([0, 1], axes)
        model.weight = oc.shard_tensor(model.weight, mesh, [oc.Shard(0) if axes == ["mp"] else oc.Replicate()])  # type: ignore[assignment]
        with bad(said, StrategyError):
            oc.Engine(model, nn.MSELoss(), sgd(model), strategy={"sharding": config}).prepare()
    model = oc.shard_layer(linear(), oc.ProcessMesh([0, 1], ["dp"]))
    with bad("has been given to shard_optimizer already"):
        oc.Engine(
            model, nn.MSELoss(), oc.shard_optimizer(sgd(model)), strategy={"sharding": {"enable": True}}
        ).prepare()


def of_a_pipeline() -> None:
    model = programs.make_net()
    config = SWITCHES["pp"]
    engine = oc.Engine(model, nn.CrossEntropyLoss(), programs.adamw(model), oc.Accuracy(), config)
    engine.prepare(oc.InputSpec([None, programs.WIDTH]), oc.InputSpec([None], "int64"), mode="train")
    assert len([*engine.main_program.nodes()]) > 10
    assert len([*engine.serial_main_program.nodes()]) > 50
    with bad(
        r"batch_size=6: .*accumulate_steps=2 microbatches of micro_batch_size=4 rows on each of 1 rank\(s\) are 8"
    ):
        other = programs.make_net()
        config = {"pipeline": SWITCHES["pp"]["pipeline"] | {"micro_batch_size": 4}}
        oc.Engine(other, nn.CrossEntropyLoss(), programs.adamw(other), None, config).fit(
            samples(16), batch_size=6, verbose=0
        )
    with bad("a batch of 7 rows cannot be cut in 2 microbatches"):
        other = programs.make_net()
        other_engine = oc.Engine(other, nn.CrossEntropyLoss(), programs.adamw(other), None, config)
        other_engine.fit(samples(16), batch_size=7, verbose=0)


@pytest.mark.proof
def test_what_a_pipeline_cannot_do_yet() -> None:
    run_ranks(of_a_pipeline, 2)


def test_degrees_that_do_not_fit_a_models_mesh() -> None:
    run_ranks(meshes_that_do_not_fit, 2)


def test_a_metric_that_fails() -> None:
    class Failing(oc.Accuracy):
        def compute(self, outputs: Tensor, labels: Tensor) -> Tensor:
            raise KeyError("weight")

    with bad(r"metrics: Failing\.compute\(\[4, 6\], \[4\]\) fails.*: KeyError: 'weight'.*Engine\(metrics=None\)"):
        engine_of(metrics=Failing()).fit(samples(), batch_size=4)


# metrics


def in_their_form() -> list[Any]:
    """torchmetrics' form, without torchmetrics: whole outputs and labels, and no sum over ranks of its own."""

    class Mean(nn.Module):
        sync_on_compute = True

        def reset(self) -> None:
            self.seen: list[Tensor] = []

        def update(self, outputs: Tensor, labels: Tensor) -> None:
            assert not self.sync_on_compute and type(outputs) is type(labels) is Tensor
            self.seen.append((outputs.argmax(1) == labels).float())

        def compute(self) -> Tensor:
            return torch.cat(self.seen).mean()

    model = linear()
    engine = oc.Engine(model, nn.CrossEntropyLoss(), sgd(model), [Mean(), oc.Accuracy((1, 3))])
    history = engine.fit(samples(11), batch_size=8, epochs=2, verbose=0)
    wide = oc.Accuracy((2,), "words")
    mesh = oc.ProcessMesh(range(oc.get_world_size()), ["dp"])
    torch.manual_seed(1)
    out, label = torch.randn(5, 3, 7), torch.randint(7, (5, 3))
    label[0] = -100
    pair = [oc.shard_tensor(x, mesh, [oc.Shard(0)]) for x in (out, label)]
    values = [wide.update(wide.compute(*pair)), wide.update(wide.compute(out.movedim(-1, 1), label))]
    expected = (out.topk(2).indices == label[..., None]).any(-1)[1:].float().mean().item()
    assert values == pytest.approx([expected, expected]) and wide.name() == ["words_top2"]
    return history.epochs


def test_metrics_of_divided_batches() -> None:
    here = in_their_form()
    for epochs in run_ranks(in_their_form, 2):
        for epoch, wanted in zip(epochs, here, strict=True):
            assert epoch == pytest.approx(wanted, rel=1e-5) and epoch["Mean"] == pytest.approx(epoch["acc_top1"])


def test_accuracy_alone() -> None:
    accuracy = oc.Accuracy(topk=2)
    one_hot = F.one_hot(torch.tensor([2, 0]), 3).float()
    assert accuracy.update(accuracy.compute(torch.tensor([[0.1, 0.7, 0.2], [0.1, 0.5, 0.4]]), one_hot)) == 0.5
    accuracy.reset()
    assert accuracy.accumulate() == 0.0
    with pytest.raises(EngineError, match=r"given 3 values.*super\(\).compute"):
        accuracy.compute(torch.ones(2, 3), torch.ones(()), torch.zeros(2))
    for topk in (0, (), (1, "2")):
        with bad("Accuracy: topk="):
            oc.Accuracy(topk)  # type: ignore[arg-type]
    with bad(r"topk=\(5,\) of 3 classes: take topk=\(1,\)"):
        oc.Accuracy((5,)).compute(torch.ones(2, 3), torch.zeros(2, dtype=torch.int64))
    with bad(r"outputs \[2, 3\] and labels \[4\]"):
        oc.Accuracy().compute(torch.ones(2, 3), torch.zeros(4, dtype=torch.int64))
