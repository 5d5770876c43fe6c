"""Keeps ``import onecard`` short: the collector does not go through all that torch has made, a third of the time."""

from onecard._garbage import seldom_collected

_collector = seldom_collected()
_collector.__enter__()


def over() -> None:
    """The import is over: the collector works as before."""
    _collector.__exit__(None, None, None)
