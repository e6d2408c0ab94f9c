"""What can be wrong with a wish for a plan; always the caller's move."""

from resilient_jax.errors import CallerError


class PlanError(CallerError):
    """No plan can be as asked for: a number out of range, an axis that the program does not allow."""


class NoFeasiblePlan(PlanError):
    """No plan has the memory, or as many replicas as were asked for.

    Attributes:
        min_memory_bytes: of a device, with which these devices would do; None: with none.
        min_devices: so many of these devices would do; None: not found.
        max_replicas: that could be asked for; None: asking for fewer would not do, or nothing was asked.
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
