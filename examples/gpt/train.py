"""Train a byte-level GPT written for one card: on one process, or divided over a mesh of ranks.

    python examples/gpt/train.py --mesh single
    onecard run --nproc_per_node 2 examples/gpt/train.py --mesh tp=2 --check 20
    onecard run --nproc_per_node 4 examples/gpt/train.py --mesh dp=2,tp=2
    onecard run --nproc_per_node 2 --max_restarts 3 examples/gpt/train.py --mesh tp=2 --save-every 50 --resume

The loop below is that of one card; `placements.py` is all that it takes to divide the model.
"""

from __future__ import annotations

import copy
import math
import os
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import tyro
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

import meshes
import onecard as oc
import outputs
from data import Corpus, load_corpus, sample_batch, validation_batches
from model import GPT, GPTConfig, next_byte_loss
from placements import shard_batch, shard_model

CHECK_TOLERANCE = 1e-5  # relative; float32 sums taken in another order stay well below it


@dataclass(frozen=True)
class TrainArgs:
    """Train a byte-level GPT on the source files of the Python standard library."""

    mesh: str = "single"
    """tp=2, dp=2, dp=2,tp=2 (their product is the number of ranks), or single"""
    steps: int = 700
    batch_size: int = 8
    """sequences in the whole batch, over all ranks"""
    seq_len: int = 128
    n_layer: int = 2
    n_head: int = 4
    d_model: int = 224
    lr: float = 3e-3
    """highest learning rate, reached after the first twentieth of the steps"""
    dropout: float = 0.1
    """share of activations and attention weights that are dropped in training"""
    weight_decay: float = 0.1
    clip: float = 1.0
    """largest global norm of the gradient"""
    seed: int = 0
    check: int = 0
    """run this many first steps on one card too and fail if the losses differ"""
    eval_every: int = 100
    eval_batches: int = 8
    sample_bytes: int = 256
    """length of the generated sample"""
    corpus: Path | None = None
    """folder of .py files to train on instead of the standard library"""
    device: str = "cuda" if torch.cuda.is_available() else "cpu"
    """cpu or cuda"""
    out: Path = Path("runs/gpt")
    save_every: int = 0
    """steps between two checkpoints, of which the newest two stay in `out`/checkpoints; 0: none. A SIGTERM saves, too"""
    resume: bool = False
    """go on from the newest checkpoint, if there is one, on any mesh"""

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "seq_len", "eval_every", "eval_batches"):
            if getattr(self, name) < 1:
                raise SystemExit(f"--{name.replace('_', '-')} must be at least 1, not {getattr(self, name)}")
        if self.save_every < 0:
            raise SystemExit(f"--save-every must be 0 or more, not {self.save_every}")
        if not 0 <= self.check <= self.steps:
            raise SystemExit(f"--check {self.check} must lie between 0 and --steps {self.steps}")

    @property
    def model(self) -> GPTConfig:
        return GPTConfig(
            max_seq_len=self.seq_len,
            n_layer=self.n_layer,
            n_head=self.n_head,
            d_model=self.d_model,
            dropout=self.dropout,
        )


@dataclass(frozen=True)
class StepRecord:
    """A training step, counted from 1: loss in nats per byte, learning rate, seconds since the start of the run."""

    step: int
    loss: float
    lr: float
    seconds: float
    validation_loss: float | None = None
    messages: oc.Report | None = None


def learning_rate(step: int, args: TrainArgs) -> float:
    """Linear warm-up over a twentieth of the steps, then a cosine down to a tenth; `step` counts from 0."""
    warm_up = max(1, args.steps // 20)
    if step < warm_up:
        return args.lr * (step + 1) / warm_up
    progress = (step - warm_up) / max(1, args.steps - warm_up)
    return args.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))


def make_optimizer(model: nn.Module, args: TrainArgs) -> torch.optim.Optimizer:
    """AdamW; only matrices decay."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": args.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95))


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, ...], lr: float, clip: float
) -> float:
    """One step, the same on one card and on a mesh; returns the loss before it."""
    inputs, targets = batch
    for group in optimizer.param_groups:
        group["lr"] = lr
    loss = next_byte_loss(model(inputs), targets)
    optimizer.zero_grad()
    loss.backward()
    clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    return loss.item()


@torch.no_grad()
def validate(model: nn.Module, corpus: Corpus, mesh: oc.ProcessMesh | None, args: TrainArgs) -> float:
    """Mean validation loss in nats per byte over fixed batches."""
    model.eval()
    total = 0.0
    for batch in validation_batches(corpus.validation, args.eval_batches, args.batch_size, args.seq_len):
        inputs, targets = distribute(batch, mesh, args)
        total += next_byte_loss(model(inputs), targets).item()
    model.train()
    return total / args.eval_batches


def distribute(batch: tuple[Tensor, ...], mesh: oc.ProcessMesh | None, args: TrainArgs) -> tuple[Tensor, ...]:
    """Move a whole batch to the device, and divide it if there is a mesh."""
    batch = tuple(x.to(args.device) for x in batch)
    return batch if mesh is None else shard_batch(batch, mesh)


def run_steps(
    model: nn.Module,
    corpus: Corpus,
    mesh: oc.ProcessMesh | None,
    args: TrainArgs,
    n_steps: int,
    checkpoints: Path | None = None,
) -> Iterator[StepRecord]:
    """Train to step `n_steps` without validating, yielding each step; the last one with the messages it sent.

    Dropout draws the same numbers on one card as on any mesh: distributed tensors do by themselves, plain ones are told.
    With a folder for checkpoints it begins after the newest one, if that is wanted, and saves; a SIGTERM ends it.
    """
    oc.manual_seed(args.seed)
    optimizer = make_optimizer(model, args)
    if mesh is not None:
        optimizer = oc.shard_optimizer(optimizer)
    # The batch of a step is a function of the step, so there is no position of a loader to save.
    state = {"model": model, "optimizer": optimizer, "random": oc.checkpoint.RandomState(), "step": 0}
    if checkpoints is not None and args.resume and oc.checkpoint.latest(checkpoints) is not None:
        oc.checkpoint.load(checkpoints, state)
        outputs.say(f"resumed after step {state['step']}")
    start = time.perf_counter()
    for step in range(state["step"], n_steps):
        batch = sample_batch(corpus.train, args.batch_size, args.seq_len, args.seed, step)
        lr = learning_rate(step, args)
        recorded = mesh is not None and step == n_steps - 1
        one_card = oc.one_card_random() if mesh is None else nullcontext()
        with one_card, oc.explain() if recorded else nullcontext() as report:
            loss = train_step(model, optimizer, distribute(batch, mesh, args), lr, args.clip)
        yield StepRecord(step + 1, loss, lr, time.perf_counter() - start, messages=report)
        if checkpoints is not None and args.save_every:
            stop = oc.checkpoint.preempted()
            if stop or (step + 1) % args.save_every == 0:
                state["step"] = step + 1
                oc.checkpoint.save(state, checkpoints, step=step + 1, keep=2, wait=stop)
            if stop:
                outputs.say(f"asked to end: saved after step {step + 1}; --resume goes on")
                return


def one_card_losses(model: nn.Module, corpus: Corpus, args: TrainArgs) -> list[float]:
    """Losses of the first `args.check` steps of a copy of the model in this process alone.

    Every rank runs it, so that all reach the same verdict and none waits in silence.
    """
    return [record.loss for record in run_steps(copy.deepcopy(model), corpus, None, args, args.check)]


def main(args: TrainArgs) -> int:
    """Train, check, write the results; returns the exit code."""
    mesh = meshes.make_mesh(args.mesh)
    if args.device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    corpus = load_corpus(args.corpus)
    torch.manual_seed(args.seed)
    model = GPT(args.model).to(args.device)
    n_parameters = sum(p.numel() for p in model.parameters())
    outputs.say(f"GPT of {n_parameters:,} parameters, mesh {args.mesh}, {len(corpus.train):,} bytes to train on")
    reference = one_card_losses(model, corpus, args)
    if mesh is not None:
        model = shard_model(model, mesh)

    records: list[StepRecord] = []
    with outputs.progress(args.steps) as advance:
        for record in run_steps(model, corpus, mesh, args, args.steps, args.out / "checkpoints"):
            if record.step % args.eval_every == 0 or record.step in (1, args.steps):
                record = replace(record, validation_loss=validate(model, corpus, mesh, args))
            records.append(record)
            advance(record, record.step * args.batch_size * args.seq_len)
            if record.step == args.check == len(records) and not outputs.check(reference, records, CHECK_TOLERANCE):
                return 1
    if records and records[-1].step == args.steps:
        outputs.write(model, args, records)
        outputs.summarise(args, records)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(tyro.cli(TrainArgs)))
