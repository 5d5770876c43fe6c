"""Options that commands share: a flag for each field of a plan and for each size of a model, a machine, files to write."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import tyro

from onecard.commands.front import Flag, check_output
from onecard.errors import PlanError
from onecard.planning import json_text
from onecard.planning.known_models import known_model
from onecard.planning.plan import Plan
from onecard.planning.transformer import Transformer

FLAGS = [name for name in (field.name for field in fields(Plan)) if name != "placements"]
SIZES = {
    "layers": "blocks",
    "hidden": "features",
    "heads": "query heads",
    "vocab": "rows of the embedding",
    "sequence": "tokens of a sequence",
    "kv_heads": "key heads; 0: as many as queries",
    "head_dim": "features of a head; 0: hidden / heads",
    "ffn": "hidden units of the MLP; 0: 4 hidden",
    "gated": "three matrices in the MLP (SwiGLU)",
    "tied": "the head is the embedding's matrix",
    "norm": "",
    "positions": "",
    "bias": "of linear layers",
    "dropout": "",
    "attention": "one kernel, or scores in memory",
}
Pairs = Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME=VALUE"), tyro.conf.UseAppendAction]
NEEDED = ("layers", "hidden", "heads", "vocab", "sequence")


@dataclass(frozen=True)
class Outputs:
    """What comes out."""

    json: Flag = False
    """all figures as JSON, in place of the table"""
    html: Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")] = None
    """one page for a browser, which needs no network"""
    trace: Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")] = None
    """the step for ui.perfetto.dev"""

    def check(self) -> None:
        """
        Raises:
            PlanError: a file cannot be written there.
        """
        check_output("html", self.html)
        check_output("trace", self.trace)


def flags_of(kind: type, title: str, names: Sequence[str], means: Mapping[str, str], given: Mapping[str, Any]) -> Any:
    """A dataclass with some fields of another one, as options: what is given are their defaults.

    Example:
        >>> flags_of(Plan, "Plan.", ["dp", "tp"], {"dp": "ranks"}, {"dp": 4})()
        Flags(dp=4, tp=1)
    """
    hints = get_type_hints(kind)
    defaults = {field.name: field.default for field in fields(kind)} | dict(given)
    made = []
    for name in names:
        default = 0 if defaults[name] is dataclasses.MISSING else defaults[name]
        annotated: Any = Annotated[hints[name], tyro.conf.arg(help=means.get(name, ""))]
        made.append((name, annotated, dataclasses.field(default=default)))
    flags = dataclasses.make_dataclass("Flags", made, frozen=True)
    flags.__doc__ = title
    return flags


def said(argv: Sequence[str], name: str) -> str | None:
    """The value of an option before all options are read; None where it is not there.

    Example:
        >>> said(["--dp", "2", "--plan=p.json"], "plan"), said(["--dp", "2"], "plan")
        ('p.json', None)
    """
    for i, word in enumerate(argv):
        if word == f"--{name}" and i + 1 < len(argv):
            return argv[i + 1]
        if word.startswith(f"--{name}="):
            return word.partition("=")[2]
    return None


def plan_file(path: str | Path) -> Plan:
    """A plan's file: of ``Plan.save``, or of ``onecard plan`` for a script, which has the program's parameters beside it."""
    found = json_text.located(json_text.text_of(Path(path)), str(path)).value
    if isinstance(found, dict) and found.keys() >= {"plan", "program"}:
        return Plan.from_json(found["plan"])
    return Plan.load(path)


def plan_fields(path: str | None) -> dict[str, Any]:
    """What a plan's file says; nothing without one."""
    if path is None:
        return {}
    plan = plan_file(path)
    return {field.name: getattr(plan, field.name) for field in fields(Plan)}


def plan_of(
    flags: Any, known: Mapping[str, Any], argv: Sequence[str], world: int | None = None, batch: int | None = None
) -> Plan:
    """The plan that flags say, over a file's; ``world`` and ``batch``, where they are given, say dp and microbatches.

    Raises:
        PlanError: they say others than the flags of ``argv`` do.
    """
    found = dict(known) | {name: getattr(flags, name) for name in FLAGS}
    if found["parameters"] in ("float32", "float64"):
        found["master"] = False
    if world is not None:
        found["dp"] = _divided("world", world, "tp x cp x pp", found["tp"] * found["cp"] * found["pp"])
        _check_said(argv, "dp", flags, found, f"--world {world}")
    if batch is not None:
        found["microbatches"] = _divided("batch", batch, "dp x microbatch", found["dp"] * found["microbatch"])
        _check_said(argv, "microbatches", flags, found, f"--batch {batch}")
    return Plan(**found)


def _divided(name: str, whole: int, by: str, part: int) -> int:
    if whole < 1 or part < 1 or whole % part:
        most = max(1, whole // max(1, part)) * max(1, part)
        raise PlanError(f"--{name} {whole} is no multiple of {by} = {part}; {most} is")
    return whole // part


def _check_said(argv: Sequence[str], name: str, flags: Any, found: Mapping[str, Any], by: str) -> None:
    if said(argv, name) is not None and getattr(flags, name) != found[name]:
        raise PlanError(f"--{name} {getattr(flags, name)}, but {by} makes it {found[name]}: leave one of both out")


def model_fields(text: str | None, sequence: int) -> dict[str, Any]:
    """Sizes that ``--model`` says: a Hugging Face config.json, what ``Transformer.to_json`` wrote, or a known name."""
    if text is None:
        return {}
    path = Path(text)
    if path.suffix != ".json" and not path.exists():
        sizes = known_model(text)
        if sequence and sizes.positions == "learned" and sequence > sizes.sequence:
            raise PlanError(f"--sequence {sequence}: {text} has learned positions, for {sizes.sequence} tokens")
    else:
        path = path / "config.json" if path.is_dir() else path
        found = json_text.located(json_text.text_of(path), str(path))
        ours = isinstance(found.value, dict) and "onecard" in found.value
        sizes = Transformer.from_json(path) if ours else Transformer.from_config(found.value, sequence, str(path))
    return {field.name: getattr(sizes, field.name) for field in fields(Transformer)}


def model_of(flags: Any, known: Mapping[str, Any]) -> Transformer:
    """The sizes that flags say, over the model's."""
    found = dict(known) | {name: getattr(flags, name) for name in SIZES}
    missing = [f"--{name}" for name in NEEDED if not found[name]]
    if missing and not known:
        raise PlanError(
            f"of which model? {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not there. Give --model "
            "config.json, --model llama3-70b, or all of --layers --hidden --heads --vocab --sequence"
        )
    return Transformer(**found)


def whole_number(argv: Sequence[str], name: str) -> int:
    """The value of an option that is a whole number, before all options are read; 0 where it is not there or none."""
    text = said(argv, name) or ""
    return int(text) if re.fullmatch(r"\d+", text) else 0


def pairs(option: str, given: Sequence[str]) -> dict[str, str]:
    """What an option that may be given several times says, by name."""
    made = {}
    for text in given:
        name, sign, value = text.partition("=")
        if not sign or not name:
            raise PlanError(f"--{option} {text!r}: want NAME=VALUE, such as --{option} {_EXAMPLES[option]}")
        made[name] = value
    return made


def check_fixed(fixed: Mapping[str, Any]) -> None:
    """What no plan may have, before a script is run for one.

    Raises:
        PlanError: a value is of the wrong kind, or none of those that there are.
    """
    for name, value in fixed.items():
        if name not in (*FLAGS, "placements"):  # a field of the model
            raise PlanError(f"--fixed {name}={value}: that is the model's; a plan has {', '.join(FLAGS)}")
        try:
            Plan(**{name: value})
        except PlanError as why:
            begin = f"Plan: {name}="  # one that begins otherwise is of two fields, of which one is not known yet
            if str(why).startswith(begin):
                raise PlanError(f"--fixed {name}={str(why).removeprefix(begin)}") from None


_EXAMPLES = {"set": "microbatch=4", "define": "NNODES=16", "fixed": "tp=2", "rename": "model.*=*"}


def typed(name: str, value: str, option: str = "set") -> Any:
    """A value of the command line as the field wants it; what is wrong with it the field says itself."""
    kinds = get_type_hints(Transformer) | get_type_hints(Plan)
    if name not in kinds:
        near = get_close_matches(name, kinds, 1)
        meant = f"did you mean {near[0]}={value}? All" if near else "all"
        raise PlanError(f"--{option} {name}={value}: there is no field {name!r}; {meant}: {', '.join(sorted(kinds))}")
    kind = kinds[name]
    if kind is int and value.lstrip("-").isdecimal() and len(value) < 20:
        return int(value)
    if kind is bool and value.lower() in ("true", "false", "yes", "no"):
        return value.lower() in ("true", "yes")
    if kind is float:
        try:
            return float(value)
        except ValueError:
            return value
    if name == "stages":
        return tuple(int(n) for n in value.split(",") if n.strip().isdecimal() and len(n) < 9)
    return value
