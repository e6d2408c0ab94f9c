"""What a launcher has seen of its job in the store, for a progress line, a table, and its own decisions."""

from resilient_jax.ids import HostName
from resilient_jax.protocol.generation import Generation, JobOutcome
from resilient_jax.protocol.host_status import HostStatus
from resilient_jax.protocol.worker_report import TrainingProgress


class JobView:
    """What a progress line or a table shows of a job; the launcher keeps it up to date.

    Attributes:
        generation: newest generation; None before the first one.
        hosts: statuses of hosts that have a lease.
        let_in: hosts that the job has ever let in.
        progress: the progress of the host that has reported the newest step.
    """

    def __init__(self) -> None:
        self.generation: Generation | None = None
        self.hosts: dict[HostName, HostStatus] = {}
        self.let_in: set[HostName] = set()
        self.progress = TrainingProgress()

    def update_host(self, status: HostStatus) -> None:
        """Take in a host's new status."""
        self.hosts[status.host] = status
        if status.program:
            self.let_in.add(status.host)
        if status.progress.step > self.progress.step:
            self.progress = status.progress

    @property
    def outcome(self) -> JobOutcome | None:
        """How the job ended; None while it runs."""
        return self.generation.outcome if self.generation is not None else None
