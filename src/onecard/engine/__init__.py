"""The static level's front door: ``Strategy`` says how a step is to run, ``Engine`` records it so and replays it."""

from onecard.engine.dist_model import DistModel, to_static
from onecard.engine.engine import Engine
from onecard.engine.metrics import Accuracy
from onecard.engine.specs import InputSpec
from onecard.engine.strategy import Strategy

__all__ = ["Accuracy", "DistModel", "Engine", "InputSpec", "Strategy", "to_static"]
