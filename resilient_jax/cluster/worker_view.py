"""A worker process as the pure machines of its agent see it."""

import dataclasses

from resilient_jax.ids import Incarnation
from resilient_jax.protocol.worker_report import WorkerReport


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WorkerView:
    """The host's newest worker, or its standby, as its agent sees it now."""

    incarnation: Incarnation
    report: WorkerReport
    is_unresponsive: bool = False
    is_dying: bool = False
    has_exited: bool = False

    @property
    def is_dead(self) -> bool:
        """Whether its threads have ended."""
        return self.is_dying or self.has_exited
