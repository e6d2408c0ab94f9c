"""Errors of pipelines."""

from resilient_jax.errors import CallerError, ExitCode, OperatorError


class RouteError(CallerError):
    """A route, a team or a quota is not as a pipeline needs it."""


class HoldersLost(OperatorError):
    """No living host has the state of some blocks: restore it on a host, then reroute with that host as a holder.

    Attributes:
        blocks: numbers of the blocks, ascending.
    """

    exit_code = ExitCode.STATE_LOST

    def __init__(self, message: str, *, blocks: tuple[int, ...]) -> None:
        super().__init__(message)
        self.blocks = blocks
