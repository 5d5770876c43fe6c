"""Files of other libraries, whichever they are, as one audit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from onecard.errors import PlanError
from onecard.planning.audit.accelerate import read_accelerate
from onecard.planning.audit.audit import Audit, Given
from onecard.planning.audit.deepspeed import MARKS, read_deepspeed
from onecard.planning.audit.megatron import read_megatron
from onecard.planning.audit.settings import Understood
from onecard.planning.audit.torchtitan import read_torchtitan
from onecard.planning.hugging_face import sizes_of
from onecard.planning.json_text import Located, located, text_of
from onecard.planning.plan import Plan
from onecard.planning.transformer import Transformer

WHICH = (
    "a script or a file of arguments of Megatron-LM, a DeepSpeed JSON with a Hugging Face config.json, a torchtitan TOML, an "
    "accelerate YAML, or a plan that onecard wrote"
)


def read(files: Sequence[Path], given: Given | None = None) -> Audit:
    """What files say of a job.

    Args:
        files: those of one job: one that says how it runs, and one that says the model's sizes, where the first does not.
        given: what is said beside them.

    Raises:
        PlanError: in one line, with file and line, what cannot be read and what works.
    """
    given = given or Given()
    jobs: list[tuple[str, Path, Located | None]] = []
    models: list[tuple[Path, Located]] = []
    for path in files:
        kind, found = kind_of(path)
        if kind == "model" and found is not None:
            models.append((path, found))
        else:
            jobs.append((kind, path, found))
    if len(jobs) > 1:
        raise PlanError(f"{jobs[1][1]}: says how a job runs, and so does {jobs[0][1]}; audit them one by one")
    if len(models) > 1:
        raise PlanError(f"{models[1][0]}: says a model's sizes, and so does {models[0][0]}; name one of them")
    if not jobs:
        name = models[0][0] if models else "no file"
        raise PlanError(f"{name}: says a model's sizes, but nothing of how it is trained; name {WHICH} beside it")
    if models and given.model is not None:
        raise PlanError(f"{models[0][0]}: says a model's sizes, and so does --model; name one of them")
    model = _sizes(*models[0], given) if models else asdict(given.model) if given.model is not None else None
    audit = _job(*jobs[0], model, given)
    return replace(audit, files=(*audit.files, *(str(path) for path, _ in models)))


def kind_of(path: Path) -> tuple[str, Located | None]:
    """Which kind a file is: "megatron", "deepspeed", "torchtitan", "fsdp", "plan" or "model"; what its JSON says."""
    text = text_of(path)
    end = path.suffix.lower()
    if end == ".toml":
        return "torchtitan", None
    if end in (".yaml", ".yml"):
        return "fsdp", None
    if end != ".json" and not text.lstrip().startswith("{"):
        return "megatron", None
    found = located(text, str(path))
    data = found.value
    if isinstance(data, dict) and data.get("onecard") == "Plan":
        return "plan", found
    if isinstance(data, dict) and (
        "model_type" in data or "architectures" in data or data.get("onecard") == "Transformer"
    ):
        return "model", found
    if isinstance(data, dict) and MARKS & {*data}:
        return "deepspeed", found
    raise PlanError(f"{path}:1: is neither a configuration of DeepSpeed nor of a model; want {WHICH}")


def _sizes(path: Path, found: Located, given: Given) -> dict[str, Any]:
    if found.value.get("onecard") == "Transformer":
        return asdict(Transformer.from_json(path))
    return sizes_of(found, given.sequence or given.change.get("sequence", 0))


def _job(kind: str, path: Path, found: Located | None, model: dict[str, Any] | None, given: Given) -> Audit:
    if kind == "deepspeed" and found is not None:
        return read_deepspeed(found, model, given)
    if kind == "torchtitan":
        return read_torchtitan(path, model, given)
    if kind == "fsdp":
        return read_accelerate(path, model, given)
    if kind == "plan":
        return _ours(path, model, given)
    if model is not None:
        raise PlanError(f"{path}: Megatron's arguments say the model's sizes themselves; leave the other one out")
    return read_megatron(path, given)


def _ours(path: Path, model: dict[str, Any] | None, given: Given) -> Audit:
    """A plan that onecard wrote, with a model."""
    changes = dict(given.change)
    plan = Plan.load(path)
    names = {*Plan.__dataclass_fields__}
    plan = replace(plan, **{name: value for name, value in changes.items() if name in names})
    sizes = None
    if model is not None:
        sizes = Transformer(**{**model, **{name: value for name, value in changes.items() if name not in names}})
    said = tuple(Understood(name, str(value), "said on the command line") for name, value in changes.items())
    return Audit("onecard", (str(path),), sizes, plan, said, (), plan.check(sizes))
