"""Programs that tests/test_static.py trains twice: as they are, and recorded. Those of examples/ and the seeds are among them."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from comparing import compared, each, never
from torch import Tensor, nn

import onecard as oc

EXAMPLES = Path(__file__).parents[1] / "examples"
for folder in ("seeds", "gpt"):
    if str(EXAMPLES / folder) not in sys.path:
        sys.path.insert(0, str(EXAMPLES / folder))
STEPS = 8  # the first is eager, the second recorded; rates, counts of optimizers and random numbers differ in each
R, S = oc.Replicate(), oc.Shard
Program = tuple[nn.Module, torch.optim.Optimizer, Callable[..., Any], Iterator[tuple[Tensor, ...]]]


def mesh(*sizes: int) -> oc.ProcessMesh:
    ranks = torch.arange(torch.Size(sizes).numel()).reshape(sizes)
    return oc.ProcessMesh(ranks.tolist(), ["dp", "tp"][-len(sizes) :] if len(sizes) < 2 else ["dp", "tp"])


def optimizer_of(model: nn.Module, kind: str = "adamw", lr: float = 3e-3) -> torch.optim.Optimizer:
    made = {
        "adamw": lambda p: torch.optim.AdamW(p, lr=lr, betas=(0.9, 0.95)),
        "fused": lambda p: torch.optim.AdamW(p, lr=lr, fused=True),
        "foreach": lambda p: torch.optim.AdamW(p, lr=lr, foreach=True),
        "sgd": lambda p: torch.optim.SGD(p, lr=lr, momentum=0.9, weight_decay=1e-2),
        "radam": lambda p: torch.optim.RAdam(p, lr=lr),
        "nadam": lambda p: torch.optim.NAdam(p, lr=lr),
        "rmsprop": lambda p: torch.optim.RMSprop(p, lr=lr, momentum=0.5),
        "adagrad": lambda p: torch.optim.Adagrad(p, lr=lr, lr_decay=0.1),
        "adamax": lambda p: torch.optim.Adamax(p, lr=lr),
        "asgd": lambda p: torch.optim.ASGD(p, lr=lr),
    }[kind](list(model.parameters()))
    return oc.shard_optimizer(made) if any(isinstance(p, oc.DistTensor) for p in model.parameters()) else made


def gpt(
    where: oc.ProcessMesh | None, sequence_parallel: bool = False, dropout: float = 0.1, kind: str = "adamw"
) -> Program:
    """examples/gpt: its model, its placements, its loss."""
    model_file, placements = importlib.import_module("model"), importlib.import_module("placements")
    config = model_file.GPTConfig(vocab_size=32, max_seq_len=8, n_layer=2, n_head=4, d_model=16, dropout=dropout)
    model = model_file.GPT(config)
    if where is not None:
        placements.shard_model(model, where)
    if sequence_parallel:
        for block in model.blocks:
            for norm in (block.attention_norm, block.mlp_norm):
                norm.register_forward_pre_hook(lambda _, args: (oc.reshard(args[0], where, [S(1)]), *args[1:]))
    optimizer = optimizer_of(model, kind)

    def step(inputs: Tensor, targets: Tensor, clip: float) -> Tensor:
        loss = model_file.next_byte_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        return loss

    def data() -> Iterator[tuple[Any, ...]]:
        generator = torch.Generator().manual_seed(1)
        while True:
            tokens = torch.randint(0, 32, (4, 9), generator=generator)
            batch = (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
            yield (*(batch if where is None else placements.shard_batch(batch, where)), 1.0)

    return model, optimizer, step, data()


def seed_000() -> Program:
    """Seed 000's net on its mesh, with the step of the example."""
    program = importlib.import_module("model_parallel_000")
    rng = program.np.random.RandomState(1024)
    model = program.SimpleMPNet(*program.first_weights(rng), 0.1)
    optimizer = optimizer_of(model)

    def step(batch: Tensor) -> Tensor:
        return program.train_batch(batch, model, optimizer)

    return model, optimizer, step, ((torch.from_numpy(x),) for x in program.static_data())


def seed_002(name: str) -> Program:
    program, single = importlib.import_module(name), importlib.import_module("single_card_002")
    model = program.MlpModel(16, 32)
    optimizer = optimizer_of(model)
    loader = single.make_dataloader(4, 16, 4 * STEPS)
    if name == "data_parallel_002":
        loader = oc.shard_dataloader(loader, program.mesh, "x")

    def step(x: Tensor) -> Tensor:
        loss = torch.mean(model(x))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return oc.unshard(loss.detach())

    return model, optimizer, step, ((x,) for x in loader)


def seed_003(name: str) -> Program:
    program, single = importlib.import_module(name), importlib.import_module("single_card_003")
    torch.manual_seed(0)
    model = program.SimpleNet(single.input_size, 16, single.class_dim)
    optimizer, loss_of = optimizer_of(model), nn.CrossEntropyLoss()

    def step(image: Tensor, label: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        out = model(image)
        loss = loss_of(out, label)
        accuracies = [single.accuracy(input=out, label=label, k=k) for k in (1, 5)]
        loss.backward()
        optimizer.step()
        model.zero_grad()
        return oc.unshard(loss.detach()), *map(oc.unshard, accuracies)

    def data() -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(1)
        while True:
            x = torch.rand(4, single.input_size, generator=generator)
            yield x, torch.randint(0, single.class_dim, (4,), generator=generator)

    return model, optimizer, step, data()


class Mixed(nn.Module):
    """Batch norm with its buffers, dropout, a tied weight, and a buffer that the model writes to itself."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.norm = nn.Linear(8, 16), nn.BatchNorm1d(16)
        self.drop, self.out = nn.Dropout(0.3), nn.Linear(16, 8, bias=False)
        self.out.weight = nn.Parameter(torch.randn(8, 16))
        self.again = nn.Linear(16, 8, bias=False)
        self.again.weight = self.out.weight
        self.register_buffer("seen", torch.zeros(16))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.drop(torch.relu(self.norm(self.into(x))))
        self.seen.mul_(0.9).add_(hidden.detach().mean(0), alpha=0.1)
        y = self.out(hidden)
        y[:, 1:3] *= 2.0  # a write through a view
        return y + self.again(hidden)


def mixed(where: oc.ProcessMesh | None, kind: str = "adamw", parts: int = 1) -> Program:
    """Gradients accumulated over ``parts`` microbatches, clipped."""
    model = Mixed()
    if where is not None:
        model = oc.shard_layer(model, where)
    optimizer = optimizer_of(model, kind, 0.05)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        total = torch.zeros(())
        for part, target in zip(x.chunk(parts), y.chunk(parts), strict=True):
            loss = ((model(part) - target) ** 2).mean() / parts
            loss.backward()
            total = total + loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return total

    def data() -> Iterator[tuple[Tensor, ...]]:
        generator = torch.Generator().manual_seed(1)
        while True:
            batch = (torch.randn(8, 8, generator=generator), torch.randn(8, 8, generator=generator))
            yield (
                batch
                if where is None
                else tuple(oc.shard_tensor(t, where, [S(0)] + [R] * (where.ndim - 1)) for t in batch)
            )

    return model, optimizer, step, data()


def trained(
    make: Callable[[], Program], static: bool, steps: int = STEPS, due: Callable[[int], int] = never
) -> tuple[list[Any], list[Tensor], Any]:
    """Results of all steps, what this rank holds afterwards, and the step."""
    torch.manual_seed(3)
    model, optimizer, step, data = make()
    run = oc.to_static(step) if static else step
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    results = []
    for _, batch in zip(range(steps), data, strict=False):
        with compared(due):
            results.append([held(x) for x in torch.utils._pytree.tree_leaves(run(*batch))])
        schedule.step()
    states = [x for p in optimizer.state.values() for x in p.values() if isinstance(x, Tensor)]
    return results, [held(x) for x in (*model.parameters(), *model.buffers(), *states)], run


def held(x: Tensor) -> Tensor:
    """This rank's part."""
    return x.detach().to_local().clone() if isinstance(x, oc.DistTensor) else x.detach().clone()


def assert_replays(make: Callable[[], Program], recordings: int = 1) -> Any:
    """Bit for bit the same as without a recording, and replayed."""
    expected, states, _ = trained(make, static=False)
    results, found, run = trained(make, static=True)
    assert len(expected) == STEPS and len({str(r) for r in expected}) > STEPS // 2, (
        "a run that stands still compares nothing"
    )
    assert all(torch.equal(a, b) for x, y in zip(results, expected, strict=True) for a, b in zip(x, y, strict=True)), (
        results[:4],
        expected[:4],
    )
    assert all(torch.equal(a, b) for a, b in zip(found, states, strict=True))
    trained(make, static=True, steps=4, due=each)  # nothing is found (a warning) where nothing has changed
    assert len(run.recordings) == recordings, run
    return run
