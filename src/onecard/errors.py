"""The errors that onecard raises for a user's mistake; each says what, where, why and the call that works."""

from __future__ import annotations


class OnecardError(Exception):
    """The base of every error that onecard raises on purpose."""


class MeshError(OnecardError, ValueError):
    """A process mesh that cannot be: ranks twice, names that do not fit, an axis that is not there."""


class LayoutError(OnecardError, ValueError):
    """Placements that do not fit a mesh or a tensor."""


class RuleError(OnecardError, ValueError):
    """A sharding rule that cannot be read, or that does not fit the tensors it is bound to."""


class DispatchError(OnecardError, RuntimeError):
    """An operator that cannot keep one-card semantics on the tensors it was given."""


class CommunicationError(OnecardError, RuntimeError):
    """A collective that cannot run: no such rank, no process group, a peer that is gone."""


class ImplicitCommunication(OnecardError, RuntimeError):
    """Raised inside ``no_implicit_communication()`` at the first message that the program did not ask for."""
