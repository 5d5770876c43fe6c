"""Training programs for one card with other libraries' trainers, as their users write them; none knows of ranks.

Each runs in a folder of its own and returns what it has seen: numbers, texts, lists of them.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import random
import sys
import warnings
from collections.abc import Callable
from functools import wraps
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

Program = Callable[[], dict[str, Any]]


def quiet(program: Program) -> Program:
    """A program whose libraries say nothing."""

    @wraps(program)
    def run() -> dict[str, Any]:
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        logging.disable(logging.WARNING)
        try:
            with (
                warnings.catch_warnings(),
                contextlib.redirect_stdout(io.StringIO()),
                contextlib.redirect_stderr(io.StringIO()),
            ):
                warnings.simplefilter("ignore")
                return program()
        finally:
            logging.disable(logging.NOTSET)

    return run


def total(module: nn.Module) -> float:
    """One number of all parameters."""
    return sum(p.detach().abs().sum().item() for p in module.parameters())


# -- transformers ----------------------------------------------------------------------------------------------------------


class Sentences(Dataset[dict[str, Any]]):
    """Rows of 4 to 11 tokens, and whether the first one is large."""

    def __init__(self, rows: int, seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        lengths = torch.randint(4, 12, (rows,), generator=draw).tolist()
        self.ids = [torch.randint(1, 50, (length,), generator=draw) for length in lengths]

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"input_ids": self.ids[i], "labels": int(self.ids[i][0] > 24)}


def padded(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """A batch as long as its longest row."""
    ids = nn.utils.rnn.pad_sequence([row["input_ids"] for row in rows], batch_first=True)
    return {
        "input_ids": ids, "attention_mask": (ids > 0).long(), "labels": torch.tensor([row["labels"] for row in rows]),
    }  # fmt: skip


def bert(dropout: float = 0.0) -> Any:
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout,
    )  # fmt: skip
    return BertForSequenceClassification(config)


_ENCODER = "bert.encoder.layer.*."
BERT_TP = (
    (_ENCODER + "attention.self.*", "tp: Shard(0)"),
    (_ENCODER + "attention.output.dense.weight", "tp: Shard(1)"),
    (_ENCODER + "intermediate.dense.*", "tp: Shard(0)"),
    (_ENCODER + "output.dense.weight", "tp: Shard(1)"),
)
"""Megatron's columns and rows for ``bert``."""
_ADAPTED = "base_model.model." + _ENCODER
LORA_TP = (
    (_ADAPTED + "attention.self.*.base_layer.*", "tp: Shard(0)"),
    (_ADAPTED + "attention.self.key.*", "tp: Shard(0)"),
    (_ADAPTED + "attention.self.*.lora_B.*", "tp: Shard(0)"),
    (_ADAPTED + "attention.output.dense.weight", "tp: Shard(1)"),
    (_ADAPTED + "intermediate.dense.*", "tp: Shard(0)"),
    (_ADAPTED + "output.dense.weight", "tp: Shard(1)"),
)
"""The same with adapters: B by columns, as the weight that it is added to."""


def trainer(model: Any, out: str = "out", **given: Any) -> Any:
    from transformers import EarlyStoppingCallback, PrinterCallback, Trainer, TrainingArguments

    usual: dict[str, Any] = {
        "num_train_epochs": 2, "per_device_train_batch_size": 6, "per_device_eval_batch_size": 5, "max_grad_norm": 0.5,
        "gradient_accumulation_steps": 2, "learning_rate": 5e-3, "lr_scheduler_type": "cosine", "warmup_steps": 2,
        "adam_epsilon": 1e-4, "eval_strategy": "steps", "eval_steps": 2, "save_steps": 2, "logging_steps": 1,
        "load_best_model_at_end": True, "metric_for_best_model": "eval_loss",
        "save_total_limit": 2, "report_to": "none", "use_cpu": True, "disable_tqdm": True,
    }  # fmt: skip
    made = Trainer(
        model,
        TrainingArguments(out, **{**usual, **given}),
        train_dataset=Sentences(20, 0),
        eval_dataset=Sentences(8, 1),
        data_collator=padded,
        compute_metrics=lambda p: {"accuracy": float((p.predictions.argmax(-1) == p.label_ids).mean())},
        callbacks=[EarlyStoppingCallback(3)],
    )
    made.remove_callback(PrinterCallback)
    return made


def history(made: Any) -> list[dict[str, float]]:
    """What a Trainer has logged, but for times."""
    timed = ("runtime", "per_second", "flos")
    return [{k: v for k, v in entry.items() if not any(t in k for t in timed)} for entry in made.state.log_history]


@quiet
def transformers_trainer() -> dict[str, Any]:
    """Trains, evaluates, keeps the best, saves; a second one goes on from its last checkpoint."""
    from transformers import BertForSequenceClassification

    first = trainer(bert())
    first.train()
    guessed = first.predict(Sentences(3, 2))
    first.save_model("final")
    first.model.save_pretrained("pretrained", max_shard_size="5KB")
    again = [total(BertForSequenceClassification.from_pretrained(folder)) for folder in ("final", "pretrained")]
    second = trainer(bert(), num_train_epochs=3, load_best_model_at_end=False)
    second.train(resume_from_checkpoint=True)
    return {
        "first": history(first), "best": first.state.best_model_checkpoint, "guessed": guessed.predictions.tolist(),
        "metrics": guessed.metrics["test_accuracy"], "again": again, "model": total(first.model), "second": history(second),
        "evaluated": second.evaluate()["eval_loss"],
    }  # fmt: skip


@quiet
def transformers_habits() -> dict[str, Any]:
    """Batches of like lengths, a last one that is dropped, smoothing, another schedule and optimizer, an average of losses."""
    grouped = trainer(
        bert(), "grouped", train_sampling_strategy="group_by_length", dataloader_drop_last=True, label_smoothing_factor=0.1,
        lr_scheduler_type="constant_with_warmup", gradient_accumulation_steps=1, optim="adafactor", save_strategy="no",
        load_best_model_at_end=False, eval_strategy="epoch", eval_on_start=True, gradient_checkpointing=True, num_train_epochs=1,
    )  # fmt: skip
    grouped.train()
    return {"grouped": history(grouped)}


# -- accelerate ------------------------------------------------------------------------------------------------------------


def rows(count: int = 29) -> TensorDataset:
    draw = torch.Generator().manual_seed(7)
    return TensorDataset(torch.randn(count, 6, generator=draw), torch.randint(3, (count,), generator=draw))


def net(dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 3))


NET_TP = (("*0.weight", "tp: Shard(0)"), ("*0.bias", "tp: Shard(0)"), ("*3.weight", "tp: Shard(1)"))


@quiet
def accelerate_loop() -> dict[str, Any]:
    """Accumulation, clipping, a schedule, gathered metrics; saved in the middle, and gone on from there."""
    from accelerate import Accelerator
    from accelerate.utils import ProjectConfiguration, set_seed

    def run(epochs: int, resume: bool) -> tuple[list[Any], Any]:
        accelerator = Accelerator(
            gradient_accumulation_steps=2,
            cpu=True,
            project_config=ProjectConfiguration(".", automatic_checkpoint_naming=True, iteration=9 * resume),
        )
        set_seed(0)
        model, seen = net(), list[Any]()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
        model, optimizer, schedule, train, test = accelerator.prepare(
            model, optimizer, schedule, DataLoader(rows(), 8, shuffle=True), DataLoader(rows(13), 5)
        )
        first = 0
        if resume:
            accelerator.load_state("checkpoints/checkpoint_0")
            first = 1
        for _ in range(first, epochs):
            for x, y in train:
                with accelerator.accumulate(model):
                    loss = F.cross_entropy(model(x), y)
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        seen.append(accelerator.clip_grad_norm_(model.parameters(), 0.3).item())
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()
                seen.append(accelerator.gather(loss.detach()).mean().item())
            right = []
            with torch.no_grad():
                for x, y in test:
                    guessed, wanted = accelerator.gather_for_metrics((model(x).argmax(-1), y))
                    right += (guessed == wanted).tolist()
            seen += [len(right), sum(right)]
            accelerator.save_state()
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            accelerator.save(accelerator.get_state_dict(model), "model.pt")
        accelerator.save_model(accelerator.unwrap_model(model), "model")
        accelerator.end_training()
        return seen, model

    first, model = run(2, False)
    second, other = run(2, True)
    saved = torch.load("model.pt")
    return {
        "first": first, "second": second, "model": total(model), "other": total(other),
        "saved": sum(x.abs().sum().item() for x in saved.values()), "processes": Accelerator().num_processes,
    }  # fmt: skip


# -- Lightning -------------------------------------------------------------------------------------------------------------


def lightning_module(manual: bool = False) -> Any:
    import lightning as L
    import torchmetrics

    class Module(L.LightningModule):
        def __init__(self, rate: float = 1e-2) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.net = net()
            self.accuracy = torchmetrics.classification.MulticlassAccuracy(3)
            self.confusion = torchmetrics.classification.MulticlassConfusionMatrix(3)
            self.automatic_optimization = not manual
            self.seen: list[Any] = []

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.net(x)

        def training_step(self, batch: Any, index: int) -> Any:
            x, y = batch
            loss = F.cross_entropy(self(x), y)
            self.log("train_loss", loss, on_step=True, on_epoch=True)
            self.seen.append(loss.item())
            if manual:
                optimizer = self.optimizers()
                optimizer.zero_grad()
                self.manual_backward(loss)
                self.clip_gradients(optimizer, 0.3, "norm")
                optimizer.step()
                return None
            return loss

        def validation_step(self, batch: Any, index: int) -> None:
            x, y = batch
            out = self(x)
            self.accuracy(out, y)
            self.confusion(out, y)
            self.log("val_loss", F.cross_entropy(out, y), sync_dist=True)
            self.log("val_accuracy", self.accuracy)

        def on_validation_epoch_end(self) -> None:
            self.seen += self.confusion.compute().flatten().tolist()
            self.confusion.reset()

        def predict_step(self, batch: Any, index: int) -> Any:
            return self(batch[0])

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams["rate"], eps=1e-3)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]

    torch.manual_seed(0)
    return Module()


@quiet
def lightning_trainer() -> dict[str, Any]:
    """Fits with callbacks, loggers and checkpoints of the best; validates, predicts; another one goes on from the last."""
    import lightning as L
    from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
    from lightning.pytorch.loggers import CSVLogger

    train, test = DataLoader(rows(), 8, shuffle=True), DataLoader(rows(13), 5)

    def made(epochs: int, **given: Any) -> tuple[Any, Any]:
        best = ModelCheckpoint("best", "{epoch}", monitor="val_loss", save_top_k=2, save_last=True)
        usual: dict[str, Any] = {
            "accelerator": "cpu", "devices": 1, "logger": CSVLogger("logs", version=epochs), "enable_progress_bar": False,
            "callbacks": [best, EarlyStopping("val_loss", patience=4), LearningRateMonitor()], "log_every_n_steps": 1,
            "enable_model_summary": False, "num_sanity_val_steps": 1,
        }  # fmt: skip
        return L.Trainer(max_epochs=epochs, **{**usual, **given}), best

    def metrics(trainer: Any) -> dict[str, float]:
        return {name: float(value) for name, value in trainer.callback_metrics.items()}

    module = lightning_module()
    first, best = made(2, accumulate_grad_batches=2, gradient_clip_val=0.3)
    first.fit(module, train, test)
    found = {"first": module.seen, "metrics": metrics(first), "validated": first.validate(module, test, verbose=False)}
    found["guessed"] = [x.tolist() for x in first.predict(module, test)]
    found["best"] = [best.best_model_path.rpartition("/")[2], best.best_model_score.item()]
    found["loaded"] = total(type(module).load_from_checkpoint(best.best_model_path))
    second, _ = made(3, accumulate_grad_batches=2, gradient_clip_val=0.3)
    other = lightning_module()
    second.fit(other, train, test, ckpt_path="last")
    second.save_checkpoint("final.ckpt")
    found |= {"second": other.seen, "model": total(other), "later": metrics(second)}
    by_hand = lightning_module(manual=True)
    third, _ = made(1, callbacks=[], enable_checkpointing=False, logger=False)
    third.fit(by_hand, train, test)
    return {**found, "by hand": by_hand.seen}


@quiet
def lightning_fabric() -> dict[str, Any]:
    """A loop of its own: setup, accumulation, clipping, saved and loaded."""
    from lightning.fabric import Fabric

    def run(epochs: int, resume: bool) -> dict[str, Any]:
        fabric = Fabric(accelerator="cpu", devices=1)
        fabric.launch()
        fabric.seed_everything(0)
        model, seen = net(), list[float]()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
        model, optimizer = fabric.setup(model, optimizer)
        loader = fabric.setup_dataloaders(DataLoader(rows(), 8))
        state = {"model": model, "optimizer": optimizer, "epoch": 0}
        if resume:
            fabric.load("state.ckpt", state)
        for epoch in range(state["epoch"], epochs):
            for i, (x, y) in enumerate(loader):
                with fabric.no_backward_sync(model, enabled=i % 2 == 0):
                    loss = F.cross_entropy(model(x), y)
                    fabric.backward(loss / 2)
                if i % 2:
                    seen.append(fabric.clip_gradients(model, optimizer, max_norm=0.3).item())
                    optimizer.step()
                    optimizer.zero_grad()
                seen += [loss.item(), fabric.all_reduce(loss.detach(), reduce_op="sum").item()]
            state["epoch"] = epoch + 1
            fabric.save("state.ckpt", state)
        fabric.barrier()
        gathered = fabric.all_gather(torch.ones(2)).sum().item()
        return {"seen": seen, "model": total(model), "gathered": gathered, "ranks": fabric.world_size}

    return {"first": run(2, False), "second": run(3, True)}


# -- peft, torchmetrics, dashboards ----------------------------------------------------------------------------------------


@quiet
def peft_lora() -> dict[str, Any]:
    """Adapters on frozen weights: trained, saved, loaded, merged."""
    from peft import LoraConfig, PeftModel, get_peft_model

    def adapted() -> Any:
        torch.manual_seed(1)
        return get_peft_model(bert(), LoraConfig(r=2, target_modules=["query", "value"], task_type="SEQ_CLS"))

    made = trainer(adapted(), "lora", learning_rate=5e-2, num_train_epochs=1, gradient_accumulation_steps=1)
    made.train()
    made.model.save_pretrained("adapter")
    batch = padded([Sentences(4, 3)[i] for i in range(4)])
    made.model.eval()
    with torch.no_grad():
        wanted = made.model(**batch).logits.tolist()
        again = PeftModel.from_pretrained(bert(), "adapter").eval()(**batch).logits.tolist()
        with made.model.disable_adapter():
            without = made.model(**batch).logits.tolist()
        merged = made.model.merge_and_unload()(**batch).logits.tolist()
    names = [name for name, p in adapted().named_parameters() if p.requires_grad]
    return {
        "history": history(made), "wanted": wanted, "again": again, "without": without, "merged": merged, "trained": names,
    }  # fmt: skip


@quiet
def torchmetrics_values() -> dict[str, Any]:
    """Metrics of divided batches, over several of them; states that are sums, lists and matrices."""
    from torchmetrics import MeanMetric, MeanSquaredError, MetricCollection, PearsonCorrCoef
    from torchmetrics import classification as c
    from torchmetrics.text import Perplexity

    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kinds = MetricCollection(
        [
            c.MulticlassAccuracy(3), c.MulticlassConfusionMatrix(3), c.MulticlassF1Score(3), c.MulticlassAUROC(3),
            c.MulticlassCalibrationError(3), c.MulticlassAveragePrecision(3, thresholds=5),
        ]
    )  # fmt: skip
    mean, squared, correlated, perplexity = MeanMetric(), MeanSquaredError(), PearsonCorrCoef(), Perplexity()
    seen: list[Any] = []
    for x, y in DataLoader(rows(), 8):
        out = model(x)
        loss = F.cross_entropy(out, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        guessed = out.detach().softmax(-1)
        kinds.update(guessed, y)
        mean.update(loss.detach(), weight=len(x))
        squared.update(guessed, F.one_hot(y, 3).float())
        correlated.update(guessed[:, 0], (y == 0).float())
        perplexity.update(out.detach().unsqueeze(0), y.unsqueeze(0))
        seen.append(kinds["MulticlassAccuracy"](guessed, y).item())
    seen += [value.tolist() for value in kinds.compute().values()]
    return {"seen": seen + [m.compute().item() for m in (mean, squared, correlated, perplexity)]}


@quiet
def dashboards() -> dict[str, Any]:
    """Scalars, histograms and a step's numbers, as TensorBoard has them afterwards."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with SummaryWriter("board") as board:
        for step, (x, y) in enumerate(DataLoader(rows(), 8)):
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            board.add_scalar("loss", loss, step)
            board.add_histogram("weight", model[0].weight, step)
            board.add_scalars("norms", {name: p.grad.norm() for name, p in model.named_parameters()}, step)
    found = EventAccumulator("board").Reload()
    return {
        "loss": [event.value for event in found.Scalars("loss")],
        "weights": [event.histogram_value.sum for event in found.Histograms("weight")],
    }


@quiet
def wandb_offline() -> dict[str, Any]:
    """A run that is kept on the disk."""
    import wandb

    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    with wandb.init(mode="offline", dir=".", config={"rate": 0.1}) as run:
        for x, y in DataLoader(rows(), 8):
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.log({"loss": loss, "weight": wandb.Histogram(model[0].weight.detach())})
            seen.append(loss.item())
        run.summary["last"] = loss
    return {"seen": seen}


# -- timm ------------------------------------------------------------------------------------------------------------------


def _timm() -> None:
    """Makes timm importable beside a torchvision whose operators, which nobody calls here, are built for another torch."""
    try:
        import torchvision  # noqa: F401
    except RuntimeError:
        for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
            del sys.modules[name]
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


class Pictures(Dataset[Any]):
    """Squares of noise, brighter by their class."""

    def __init__(self, count: int) -> None:
        draw = torch.Generator().manual_seed(3)
        self.labels = torch.randint(3, (count,), generator=draw).tolist()
        self.pictures = [torch.randn(3, 16, 16, generator=draw) + label for label in self.labels]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, i: int) -> Any:
        return self.pictures[i], self.labels[i]


@quiet
def timm_script() -> dict[str, Any]:
    """What timm's training script is made of: its models, mixup, losses, optimizers, schedules, clipping, averages, saver."""
    _timm()
    from timm import create_model
    from timm.data import Mixup
    from timm.loss import LabelSmoothingCrossEntropy, SoftTargetCrossEntropy
    from timm.optim import create_optimizer_v2
    from timm.scheduler import create_scheduler_v2
    from timm.utils import AverageMeter, CheckpointSaver, ModelEmaV3, accuracy, dispatch_clip_grad

    sizes = {"img_size": 16, "patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2}
    found: dict[str, Any] = {}
    for name, mixed, clipped, given in (
        ("vit_tiny_patch16_224", True, "norm", sizes), ("resnet10t", False, "agc", {}),
    ):  # fmt: skip
        torch.manual_seed(0)
        np.random.seed(0)
        model = create_model(name, num_classes=3, **given)
        optimizer = create_optimizer_v2(model, opt="adamw", lr=5e-3, weight_decay=0.05, eps=1e-3)
        ema = ModelEmaV3(model, decay=0.9)
        schedule, epochs = create_scheduler_v2(optimizer, sched="cosine", num_epochs=2, warmup_epochs=1, warmup_lr=1e-3)
        mixup = Mixup(0.8, 1.0, label_smoothing=0.1, num_classes=3) if mixed else None
        train_loss = SoftTargetCrossEntropy() if mixed else LabelSmoothingCrossEntropy(0.1)
        os.makedirs(name, exist_ok=True)
        saver = CheckpointSaver(model, optimizer, model_ema=ema, checkpoint_dir=name, recovery_dir=name, max_history=1)
        losses, seen = AverageMeter(), []
        for epoch in range(min(epochs, 2)):
            model.train()
            for step, (x, y) in enumerate(DataLoader(Pictures(24), 8)):
                if mixup is not None:
                    x, y = mixup(x, y)
                loss = train_loss(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                dispatch_clip_grad(model.parameters(), value=0.5, mode=clipped)
                optimizer.step()
                ema.update(model, step=step)
                losses.update(loss.item(), x.size(0))
                seen.append(loss.item())
            model.eval()
            with torch.no_grad():
                for x, y in DataLoader(Pictures(11), 4):
                    seen += [float(value) for value in accuracy(ema.module(x), y, topk=(1, 2))]
            schedule.step(epoch + 1, losses.avg)
            best, _ = saver.save_checkpoint(epoch, metric=seen[-1])
        again = create_model(name, num_classes=3, **given)
        again.load_state_dict(torch.load(f"{name}/model_best.pth.tar", weights_only=False)["state_dict"])
        found[name] = {
            "seen": seen,
            "average": losses.avg,
            "model": total(model),
            "ema": total(ema.module),
            "best": best,
        }
        found[name]["saved"] = total(again)
    return found
