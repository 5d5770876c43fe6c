"""What a field may be, and the words where it is not. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import fields
from functools import wraps
from typing import Any, TypeVar

from onecard.errors import PlanError

_OF_OTHERS = {
    "tensor_parallel": "tp", "tensor_parallel_size": "tp", "tensor_parallel_degree": "tp", "tensor_model_parallel_size": "tp",
    "mp": "tp", "mp_degree": "tp", "pipeline_parallel": "pp", "pipeline_parallel_degree": "pp", "pp_degree": "pp",
    "pipeline_model_parallel_size": "pp", "virtual_pipeline_model_parallel_size": "virtual", "data_parallel": "dp",
    "data_parallel_size": "dp", "data_parallel_shard_degree": "dp", "dp_degree": "dp", "context_parallel": "cp",
    "context_parallel_size": "cp", "context_parallel_degree": "cp", "sep_degree": "cp", "expert_parallel": "ep",
    "expert_model_parallel_size": "ep", "expert_parallel_degree": "ep", "zero_stage": "zero", "sharding": "zero",
    "sharding_stage": "zero", "micro_batch_size": "microbatch", "accumulate_steps": "microbatches", "k_steps": "microbatches",
    "gradient_accumulation_steps": "microbatches", "num_microbatches": "microbatches", "activation_checkpointing": "recompute",
    "checkpointing": "recompute", "num_layers": "layers", "num_hidden_layers": "layers", "n_layers": "layers",
    "n_layer": "layers", "hidden_size": "hidden", "d_model": "hidden", "dim": "hidden", "n_embd": "hidden",
    "num_attention_heads": "heads", "n_heads": "heads", "n_head": "heads", "num_key_value_heads": "kv_heads",
    "n_kv_heads": "kv_heads", "num_query_groups": "kv_heads", "intermediate_size": "ffn", "ffn_hidden_size": "ffn",
    "vocab_size": "vocab", "padded_vocab_size": "vocab", "seq_length": "sequence", "seq_len": "sequence",
    "sequence_length": "sequence", "max_position_embeddings": "sequence", "num_experts": "experts",
}  # fmt: skip
"""Fields as other libraries call them."""
_T = TypeVar("_T")


def near(name: str, known: Collection[str]) -> str:
    """What somebody may have meant, or all that there is.

    Example:
        >>> near("tensor_parallel", ["sequence_parallel", "tp"]), near("recomptue", ["recompute"])
        ("; did you mean 'tp'?", "; did you mean 'recompute'?")
    """
    import difflib

    same = _OF_OTHERS.get(name)
    likely = [same] if same in known else difflib.get_close_matches(name, sorted(known), 1)
    return f"; did you mean {likely[0]!r}?" if likely else f"; there are {', '.join(sorted(known))}"


def by_field(made: type[_T]) -> type[_T]:
    """A dataclass that says which field somebody may have meant, where it has none of a name."""
    begin: Any = made.__init__
    known = [field.name for field in fields(made)]  # type: ignore[arg-type]

    @wraps(begin)
    def init(self: Any, *args: Any, **given: Any) -> None:
        for name in given:
            if name not in known:
                raise PlanError(f"{made.__name__} has no field {name!r}{near(name, known)}", name)
        begin(self, *args, **given)

    made.__init__ = init  # type: ignore[method-assign]
    return made


class Fields:
    """Checks fields of one value; each error names the field, what it is, and what works."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self.kind = type(value).__name__

    def stop(self, field: str, why: str) -> PlanError:
        """The error for a field; its value is said."""
        return PlanError(f"{self.kind}: {field}={getattr(self.value, field)!r}: {why}", field)

    def whole(self, *names: str, least: int = 1) -> None:
        """Whole numbers; bool, float and text are none."""
        for name in names:
            value = getattr(self.value, name)
            if type(value) is not int:
                hint = f"; write {name}={value.strip()}" if isinstance(value, str) and value.strip().isdecimal() else ""
                raise self.stop(name, f"want a whole number, not a {spoken(value)}{hint}")
            if value < least:
                raise self.stop(name, f"want {least} or more")
            if value >= 2**40:
                raise self.stop(name, "is beyond any machine; want less than 2**40")

    def yes_or_no(self, *names: str) -> None:
        """True or False, nothing that is like one."""
        for name in names:
            if type(getattr(self.value, name)) is not bool:
                raise self.stop(name, f"want True or False, not a {spoken(getattr(self.value, name))}")

    def one_of(self, name: str, choices: Sequence[Any]) -> None:
        """One of a few values, of the same type."""
        value = getattr(self.value, name)
        if not any(type(value) is type(choice) and value == choice for choice in choices):
            raise self.stop(name, f"want one of {', '.join(map(repr, choices))}")


def spoken(value: Any) -> str:
    """What a value is, in a person's words.

    Example:
        >>> spoken("8"), spoken(8.0), spoken(None), spoken([1])
        ('string', 'number with a point', 'nothing', 'list')
    """
    names = {str: "string", float: "number with a point", int: "number", bool: "yes-or-no value", dict: "object"}
    return "nothing" if value is None else names.get(type(value), type(value).__name__)
