"""Errors of topologies; the caller can correct them."""

from resilient_jax.errors import CallerError


class TopologyError(CallerError):
    """Values that form no topology, or a query that this topology cannot answer.

    Attributes:
        key: key of a topology file where the mistake would be; empty if in none.
    """

    def __init__(self, message: str, *, key: str = "") -> None:
        super().__init__(message)
        self.key = key


class UnknownHost(TopologyError):
    """No host of that name is in the topology; the message names the nearest ones."""
