"""What cannot be recorded: each error names the user's line and what to write instead."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from torch import Tensor

from onecard.comm.base import record
from onecard.errors import RecordingError


class ReadsDataError(RecordingError):
    """Python reads a value of data, which another call of the step would have another of."""


_READS = "Read values outside of the recorded step: return the tensor and call .item() on what the step gives"


def shape_depends(func: Any) -> RecordingError:
    """The error for a result whose shape depends on values."""
    name = func._schema.name.removeprefix("aten::")
    if "ctc_loss" in name:
        return _ctc()
    what = "indexing by a mask" if name in ("index", "nonzero") else name
    keep = _KEEPS_SHAPE.get(name, _MASKED)
    return RecordingError(
        f"{what} at {record.user_line()}: the shape of the result depends on values, so that a recording would be right for this "
        f"step only. Keep the shape: {keep}; or do it outside of the recorded step"
    )


_MASKED = "torch.where(mask, x, 0) in place of x[mask], sums weighted by the mask in place of means of what it selects"
_KEEPS_SHAPE = {
    "nonzero": (
        f"{_MASKED}; in place of a loop over experts that takes each one's tokens (torch.where(experts == e)), the tokens sorted "
        "by experts, for one torch.nn.functional.grouped_mm (docs/howto/experts.md)"
    ),
    "bincount": "counts by torch.nn.functional.one_hot(numbers, n).sum(0) or torch.histc(numbers, n, 0, n - 1)",
}


def _ctc() -> ReadsDataError:
    return ReadsDataError(
        f"CTC loss at {record.user_line()}: torch's kernel keeps a table that is as large as lengths and labels say, so that no "
        "recording has it. Run the step as it is: oc.parallelize(model, optimizer, plan=oc.Plan(dp=oc.get_world_size())), or "
        "onecard run --auto; or take the loss and backward() outside of the recorded step"
    )


def reads_data(why: str) -> ReadsDataError:
    """The error for a value that decides what Python does."""
    if _is_read_in("onecard.train.modules.ctc"):
        return _ctc()
    if _is_read_in("torch.amp.grad_scaler"):
        return ReadsDataError(
            f"GradScaler.step at {record.user_line()} reads on the host whether a gradient is infinite, so that a recording "
            "would repeat this step's answer. Let the optimizer skip by itself: torch.optim.AdamW(..., fused=True), also Adam, "
            "SGD and Adagrad. Without stages and microbatches onecard.to_static(step, ask=True) reads it before each replay, too"
        )
    if _is_read_in("torch.distributions.distribution"):
        return ReadsDataError(
            f"torch.distributions at {record.user_line()} reads on the host whether what it is given is valid, so that a "
            "recording would repeat this step's answer. Leave it out: torch.distributions.Normal(mean, scale, "
            "validate_args=False), or Distribution.set_default_validate_args(False) for all of them. "
            "onecard.to_static(step, ask=True) asks it before each replay, too"
        )
    return ReadsDataError(
        f"a tensor that depends on data at {record.user_line()}: {why}, so that a recording would repeat what this step's value "
        f"has led to. {_READS}; in place of a branch write torch.where(condition, a, b), in place of max(x, 0.0) "
        "torch.clamp(x, min=0). What a library reads: onecard.to_static(step, ask=True) computes it before each replay"
    )


def not_of_batch(line: str, why: str) -> RecordingError:
    """The error for a value that a step in microbatches or stages asks for (``ask``), and that its batch alone does not give."""
    return RecordingError(
        f"a value is read on the host at {line} (in an if, an int(), by a library). Microbatches and stages go the way of the "
        f"whole batch, which is asked before they begin; {why}. Decide by the arguments of the step, or outside of it; or take "
        "the batch as it is (one microbatch, no pipeline)"
    )


def _is_read_in(module: str) -> bool:
    """Whether this module is what reads."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") != module:
        frame = frame.f_back
    return frame is not None


def made_outside(x: Tensor) -> RecordingError:
    """The error for a tensor that came into the step by another way than torch."""
    return RecordingError(
        f"a tensor {list(x.shape)} {str(x.dtype).removeprefix('torch.')} used at {record.user_line()} was made inside the step, "
        "but not by torch's operators (a DataLoader, NumPy, a file, gc.freeze() within it): the recording would use this step's "
        "values for ever. Make it before the step and pass it as an argument"
    )


def replaces(name: str, line: str = "") -> RecordingError:
    """The error for a tensor in whose place a step that is written down without being done puts another one."""
    place, read = (name, f"{name} at {line}") if line else ("kept[key]", name)
    return RecordingError(
        f"the step reads {read} and puts another tensor in its place, which it would go on with: a step that is cut into stages "
        "has no values while it is recorded, and a replay writes to the tensor that was there. Write into it: "
        f"{place}.copy_(new) in place of {place} = new"
    )


def left_by_a_look(x: Tensor) -> RecordingError:
    """The error for a tensor without data that the step itself has left in the program, when it was looked at before."""
    return RecordingError(
        f"a tensor {list(x.shape)} used at {record.user_line()} was put there by the step itself, in place of the one it had "
        "read: a step that is cut into stages has no values while it is looked at and recorded. Write into the tensor that is "
        "there: kept['mean'].copy_(new) in place of kept['mean'] = new. What the look has left has no values: make it anew"
    )


def lost_number() -> RecordingError:
    """The error for a number that went through C code."""
    return RecordingError(
        f"an operator at {record.user_line()} takes a number that math, NumPy or another library has computed inside the step "
        "from one that changes between steps (an argument, a learning rate), or such a number in a forward that backward runs "
        "again (checkpoint). Compute it before the step and pass the result; in a checkpointed forward pass it as a tensor"
    )


def changed_group(name: str) -> RecordingError:
    """The error for a learning rate that is set inside a step."""
    return RecordingError(
        f"the step sets an optimizer's {name} (a scheduler's step() does), which a replay would not repeat: call it outside of "
        "the recorded step, after it"
    )


def steps_in_backward(optimizer: str) -> RecordingError:
    """The error for an optimizer that a hook of a parameter calls."""
    return RecordingError(
        f"{optimizer}.step() is called within backward() (register_post_accumulate_grad_hook): its learning rate cannot be "
        "followed there. Call step() after backward(): a recording gives each gradient's memory back at its last use anyway"
    )


def counts_in_python(optimizer: str, state: str) -> RecordingError:
    """The error for a step count that is a number of Python."""
    return RecordingError(
        f"{optimizer} keeps its state {state!r} as a number of Python, and has changed it in the step: a replay would repeat "
        f"what it was. Keep it as a tensor (state[{state!r}] = torch.zeros(()); state[{state!r}] += 1), as torch's optimizers do"
    )


def counts_in_group(optimizer: str, key: str) -> RecordingError:
    """The error for a count in a group of parameters that a run changes which is taken back."""
    return RecordingError(
        f"{optimizer} counts in param_groups[...][{key!r}], an int or flag of Python, and a step of microbatches or stages "
        f"is recorded without being done: each replay would repeat what it was. Keep it as a tensor in the parameters' states "
        f"(state[{key!r}] = torch.zeros(()); state[{key!r}] += 1), as torch's optimizers do"
    )


def swapped() -> RecordingError:
    """The error for ``x.data = y``."""
    return RecordingError(
        f"x.data = y at {record.user_line()} gives a tensor other memory, which a recording does not see: write into it, "
        "with torch.no_grad(): x.copy_(y)"
    )


def argument_of_the_program(argument: str, place: str) -> RecordingError:
    """The error for an argument that the step has already, so that a replay could not tell which of the two it reads."""
    return RecordingError(
        f"argument {argument!r} is {place} of the step's own program: given something else at the next call, a replay could not "
        f"tell where the step reads the one and where the other. Leave it out of the arguments and read {place} inside the "
        "step, or pass a copy: x.detach().clone()"
    )


def check_runs_now(name: str, fn: Callable[..., Any]) -> None:
    """A function whose body runs after it has returned is refused."""
    kinds = {
        "a generator": inspect.isgeneratorfunction,
        "a coroutine": inspect.iscoroutinefunction,
        "an asynchronous generator": inspect.isasyncgenfunction,
    }
    if kind := next((kind for kind, asks in kinds.items() if asks(fn)), ""):
        raise RecordingError(
            f"{name} is {kind}: its body runs after the call, where nothing is recorded. Return a list of the results"
        )


def sends_by_itself(name: str, instead: str) -> RecordingError:
    """The error for another library's wrapper of modules."""
    return RecordingError(
        f"{name} at {record.user_line()} sends its messages from hooks that a recording does not see, so that a replay would "
        f"leave them out. Record the module that it wraps; its place takes {instead}"
    )


def not_strided(x: Tensor) -> RecordingError:
    """The error for a sparse tensor."""
    return RecordingError(
        f"a tensor of layout {x.layout} at {record.user_line()}: sparse tensors cannot be recorded. Take dense ones "
        "(nn.Embedding(sparse=False), x.to_dense()), or do it outside of the recorded step"
    )
