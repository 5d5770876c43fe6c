"""Static: a step recorded once, optimised, priced, replayed."""

from onecard.static.api import Static, record, to_static
from onecard.static.measure import measure as _measure  # noqa: F401 - Machine.measure
from onecard.static.price.price import Cost
from onecard.static.recording import Input, Output, Recording, load_recording

__all__ = ["Cost", "Input", "Output", "Recording", "Static", "load_recording", "record", "to_static"]
