"""What can be wrong with a topology; always the caller's move."""

from resilient_jax.errors import CallerError


class TopologyError(CallerError):
    """Values that are no topology, or a question that this topology cannot answer.

    Attributes:
        key: of a topology file, where the mistake would stand; empty if in none.
    """

    def __init__(self, message: str, *, key: str = "") -> None:
        super().__init__(message)
        self.key = key


class UnknownHost(TopologyError):
    """No host of that name is in the topology; the message names those that are nearest."""
