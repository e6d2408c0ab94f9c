"""Errors of plan requests; the caller can correct them."""

from resilient_jax.errors import CallerError


class PlanError(CallerError):
    """A plan request is invalid: a number out of range, or an axis size that the program does not allow."""


class NoFeasiblePlan(PlanError):
    """No plan fits in memory with as many replicas as requested.

    Attributes:
        min_memory_bytes: memory per device with which these devices have a plan; None if no amount suffices.
        min_devices: number of these devices that have a plan; None if none was found.
        max_replicas: the largest feasible `min_replicas`; None if fewer replicas would not help, or none were
            requested.
    """

    def __init__(
        self,
        message: str,
        *,
        min_memory_bytes: int | None,
        min_devices: int | None,
        max_replicas: int | None = None,
    ) -> None:
        super().__init__(message)
        self.min_memory_bytes = min_memory_bytes
        self.min_devices = min_devices
        self.max_replicas = max_replicas
