"""Sharding rules: a notation, a table of rows by family, and the pure function that decides from them."""

from onecard.rules import table as _table  # noqa: F401 - fills the registry
from onecard.rules.register import register_rule
from onecard.rules.registry import Row, find, row, rows
from onecard.rules.rule import Bound, Form, bind

__all__ = ["Bound", "Form", "Row", "bind", "find", "register_rule", "row", "rows"]
