"""Static: a step recorded once, optimised, priced, replayed."""

from onecard.graph import measure as _measure  # noqa: F401 - Machine.measure
from onecard.graph.price import Cost
from onecard.graph.recording import Input, Output, Recording
from onecard.graph.saved import load_recording
from onecard.graph.static import Static, record, to_static

__all__ = ["Cost", "Input", "Output", "Recording", "Static", "load_recording", "record", "to_static"]
