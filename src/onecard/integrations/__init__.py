"""Other libraries' trainers on several ranks: they see one card, whose model lies on a mesh."""

from onecard.integrations.inputs import shard_inputs
from onecard.integrations.seen import one_card

__all__ = ["one_card", "shard_inputs"]
