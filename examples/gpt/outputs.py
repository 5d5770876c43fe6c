"""What a training run shows and writes, all of it by rank 0: progress, check, curves, weights, sample, summary."""

from __future__ import annotations

import csv
import resource
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import onecard as oc
from meshes import rank_and_world_size
from model import GPT, GPTConfig, generate

if TYPE_CHECKING:
    from train import StepRecord, TrainArgs

PROMPT = "def "
console = Console()


def is_first_rank() -> bool:
    return rank_and_world_size()[0] == 0


def say(message: object) -> None:
    """Print on rank 0."""
    if is_first_rank():
        console.print(message, highlight=False)


def memory_mb() -> tuple[float, float]:
    """Resident memory of this process in MB, (now, at its peak)."""
    unit = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6
    statm = Path("/proc/self/statm")
    now = int(statm.read_text().split()[1]) * resource.getpagesize() / 1e6 if statm.exists() else peak
    return now, peak


@contextmanager
def progress(n_steps: int) -> Iterator[Callable[[StepRecord, int], None]]:
    """A progress bar; the function it gives takes the step done and the number of tokens so far."""
    text = TextColumn("loss {task.fields[loss]}  {task.fields[rate]:,.0f} tokens/s  {task.fields[memory]:,.0f} MB")
    columns = (BarColumn(), MofNCompleteColumn(), text, TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not is_first_rank()) as bar:
        task = bar.add_task("train", total=n_steps, loss="-", rate=0.0, memory=memory_mb()[0])

        def advance(record: StepRecord, n_tokens: int) -> None:
            rate = n_tokens / record.seconds
            bar.update(task, completed=record.step, loss=f"{record.loss:.3f}", rate=rate, memory=memory_mb()[0])
            if record.validation_loss is not None:
                say(
                    f"step {record.step:5d}  loss {record.loss:.4f}  validation {record.validation_loss:.4f}  "
                    f"{rate:,.0f} tokens/s  {record.seconds:.0f} s"
                )

        yield advance


def relative_difference(a: float, b: float) -> float:
    return abs(a - b) / abs(a)


def check(reference: Sequence[float], records: Sequence[StepRecord], tolerance: float) -> bool:
    """Show one-card losses beside those of the run; whether all agree to `tolerance`, relative (NaN never does)."""
    table = Table("step", "one card", "this run", "relative difference", title="The same steps on one card")
    differences = [relative_difference(one, record.loss) for one, record in zip(reference, records, strict=True)]
    for one, record, difference in zip(reference, records, differences, strict=True):
        agrees = difference <= tolerance
        style = None if agrees else "bold red"
        table.add_row(str(record.step), f"{one:.7f}", f"{record.loss:.7f}", f"{difference:.1e}", style=style)
    say(table)
    wrong = [record.step for record, d in zip(records, differences, strict=True) if not d <= tolerance]
    if wrong:
        say(
            f"[bold red]check failed[/]: the losses of {len(wrong)} of {len(records)} steps, first of step {wrong[0]}, "
            f"differ by more than {tolerance:g} relative"
        )
    else:
        say(f"check passed: {len(records)} losses agree to {max(differences):.1e} relative (allowed: {tolerance:g})")
    return not wrong


def write(model: nn.Module, args: TrainArgs, records: Sequence[StepRecord]) -> None:
    """Write curves, weights and sample to `args.out`. All ranks call it: whole weights take all of them."""
    weights = {name: whole(p.detach()) for name, p in model.state_dict().items()}
    if not is_first_rank():
        return
    args.out.mkdir(parents=True, exist_ok=True)
    save_file(weights, args.out / "model.safetensors")
    write_csv(args.out / "losses.csv", records)
    write_png(args.out / "losses.png", records)
    sample = sample_text(args.out / "model.safetensors", args.model, args.sample_bytes, args.seed)
    (args.out / "sample.txt").write_text(sample, encoding="utf-8")


def whole(x: Tensor) -> Tensor:
    """The whole value of a distributed or plain tensor, on the CPU."""
    full = x.full_tensor() if isinstance(x, oc.DistTensor) else x
    return full.cpu().contiguous()


def write_csv(path: Path, records: Sequence[StepRecord]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow(["step", "loss", "validation_loss", "lr", "seconds"])
        for r in records:
            validation = "" if r.validation_loss is None else r.validation_loss
            rows.writerow([r.step, r.loss, validation, r.lr, round(r.seconds, 3)])


def write_png(path: Path, records: Sequence[StepRecord]) -> None:
    """Draw both curves, if matplotlib is installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        say(f"{path} not drawn: it takes matplotlib (pip install matplotlib)")
        return
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot(xlabel="step", ylabel="loss (nats per byte)")
    axes.plot([r.step for r in records], [r.loss for r in records], linewidth=0.7, label="training")
    validated = [(r.step, r.validation_loss) for r in records if r.validation_loss is not None]
    axes.plot(*zip(*validated, strict=True), marker="o", label="validation")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)


def sample_text(weights: Path, config: GPTConfig, n_bytes: int, seed: int) -> str:
    """Text by a plain one-card model that reads the weights just written."""
    model = GPT(config)
    model.load_state_dict(load_file(weights))
    prompt = torch.tensor([list(PROMPT.encode())])
    ids = generate(model, prompt, n_bytes, temperature=0.8, generator=torch.Generator().manual_seed(seed))
    return bytes(ids[0].tolist()).decode("utf-8", errors="replace")


def summarise(args: TrainArgs, records: Sequence[StepRecord]) -> None:
    """Print the closing summary."""
    if not is_first_rank():
        return
    validated = [r.validation_loss for r in records if r.validation_loss is not None]
    tokens = len(records) * args.batch_size * args.seq_len
    table = Table(show_header=False, title="Summary")
    table.add_row("training loss", f"{records[0].loss:.4f} -> {records[-1].loss:.4f} nats per byte")
    table.add_row("validation loss", f"{validated[0]:.4f} -> {validated[-1]:.4f} nats per byte")
    table.add_row("time", f"{records[-1].seconds:.0f} s, {tokens / records[-1].seconds:,.0f} tokens/s")
    table.add_row("peak memory of rank 0", f"{memory_mb()[1]:,.0f} MB")
    for path in sorted(args.out.glob("*.*")):
        table.add_row(path.stem, str(path))
    say(table)
    if records[-1].messages is not None:
        say(message_totals(records[-1].messages))


def message_totals(report: oc.Report) -> Table:
    """The messages of one training step, summed by collective and axis. Cutting a tensor at hand sends nothing."""
    totals: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0, 0, 0.0])
    for message in report.messages:
        step = message.step
        if step.kind not in ("slice", "fill"):
            total = totals[step.kind, step.source.mesh.dim_names[step.axis]]
            total[0] += 1
            total[1] += step.bytes
            total[2] += step.seconds
    table = Table("collective", "axis", "messages", "kB", "estimated ms", title="Messages of one training step, rank 0")
    for (kind, axis), (count, n_bytes, seconds) in sorted(totals.items()):
        table.add_row(kind, axis, str(count), f"{n_bytes / 1e3:,.1f}", f"{seconds * 1e3:.2f}")
    return table
