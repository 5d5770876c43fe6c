"""The table: operator name -> Row. Families register their rows at import; look-ups derive in-place and out= forms."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

from torch import Tensor

from onecard.errors import RuleError
from onecard.rules.call import Call, schema_of
from onecard.rules.foretell import foretell
from onecard.rules.notation import names_of
from onecard.rules.rule import Bound, Form, bind
from onecard.rules.spelling import spelled

FormOf = Callable[[Call], Form | str | None]


@dataclass(frozen=True, slots=True)
class Row:
    """What the table says of an operator.

    Attributes:
        names: the operators, "sum" (every overload) or "sum.dim_IntList".
        form: the rule, or a function from the call's static arguments and shapes to the rule (None: no rule applies).
        local: hook that adapts one rank's call (shape arguments, masks, shifts); see ``rules.local``.
        positions: the factors along which ``local`` needs to know which indices a rank has (``span``, offsets): such a factor
            is cut in one piece only (see ``Layout``). "" if it looks at shapes alone; left out, it is taken to need all.
        instead: runs the call as other operators when an operand arrives cut along a factor that must be whole.
        hint: (operand, factor). A forward operator leaves a hint on the operand which axes cut the factor; its backward operator,
            whose result alone has the factor, cuts it likewise. So the gradient of a table is cut as the table is.
        values: the numbers among the arguments matter to the rule or the hook, so decisions are cached by value.
        macs: multiply-adds of a call, where they are not those of the products that the rule's factors tell.
        picks: operands from which it picks: of them it reads as much as it gives.
        any_rows: ``local`` is about shapes and memory, so that some rows, whichever they are and whoever has the others, are
            computed right without it. Where rows lie as data says (``tensor/rows``), operators with any other hook run whole.
        results: makes the result tensors (meta) where PyTorch's meta function refuses what its kernels accept.
    """

    names: tuple[str, ...]
    form: Form | FormOf
    local: Callable[..., None] | None = None
    instead: Callable[..., Any] | None = None
    values: bool = False
    hint: tuple[str, str] | None = None
    results: Callable[[Call], list[Tensor]] | None = None
    positions: str | None = None
    macs: Callable[[Call], int] | None = None
    picks: str = ""
    any_rows: bool = False

    @property
    def pieces(self) -> str:
        """The factors that are cut in one piece only; "*": all."""
        return self.positions if self.positions is not None else "*" if self.local is not None else ""

    def form_for(self, call: Call) -> Form | None:
        """The rule for one call, spelled out."""
        found = self.form(call) if callable(self.form) else self.form
        return None if found is None else spelled(Form(found) if isinstance(found, str) else found, call)

    def bound(self, form: Form, call: Call) -> Bound:
        """The rule bound to one call.

        Raises:
            RuleError: it does not fit the shapes.
        """
        operands, results = ([tuple(t.shape) for t in tensors] for tensors in (call.operands, call.results))
        made = bind(form, call.names, operands, results, self.pieces)
        views = call.schema.views
        if self.macs is None and not self.picks and not views:
            return made
        picked = frozenset(i for i, name in enumerate(call.names) if name in names_of(self.picks))
        return replace(made, stated=None if self.macs is None else self.macs(call), picked=picked, views=views)

    def bound_for(self, call: Call) -> Bound | None:
        """The same; None if the row has no rule for the call, or the rule does not fit."""
        form = self.form_for(call)
        if form is None:
            return None
        try:
            return self.bound(form, call)
        except RuleError:
            return None

    def results_of(self, call: Call) -> list[Tensor]:
        """The result tensors of one call, without their data."""
        if self.results is not None:
            return self.results(call)
        return foretell(call) or call.meta_results()


rows: dict[str, Row] = {}
_TRAITS = {f.name for f in fields(Form)} - {"text"}


def row(names: str, text: str | None = None, **options: Any) -> Any:
    """Register a row: ``row("mm", "m k, k n -> m n", linear="self * mat2")``; without a text it decorates a function.

    Options are the traits of ``Form`` (with a text) and ``local``, ``positions``, ``instead``, ``hint``, ``values``,
    ``results``, ``macs``, ``picks``, ``any_rows`` of ``Row``.
    """
    traits = {name: options.pop(name) for name in list(options) if name in _TRAITS}

    def register(form: Form | FormOf) -> Any:
        listed = tuple(names.split())
        made = Row(listed, form, **options)
        for name in listed:
            if name in rows:
                raise ValueError(f"a second row for {name!r}")
            rows[name] = made
        return form

    return register(Form(text, **traits)) if text is not None else register


def find(func: Any) -> Row | None:
    """The row of an operator: by its overload, its name, or the name of its out-of-place form."""
    name = row_name(func)
    return None if name is None else rows[name]


def bound_of(call: Call) -> Bound | None:
    """What the rule says of one call; None if its operator has no row, the row no rule for it, or the rule does not fit."""
    known = find(call.func)
    return None if known is None else known.bound_for(call)


def row_name(func: Any) -> str | None:
    """The name under which the table has an operator's row, or None."""
    schema = schema_of(func)
    for name in dict.fromkeys((schema.name, schema.functional)):
        for listed in (f"{name}.{schema.overload}", name):
            if listed in rows:
                return listed
    return None
