"""What a launcher has seen of its job in the store, for a progress line, a table, and its own decisions."""

from resilient_jax.ids import HostName
from resilient_jax.protocol.generation import Generation, JobOutcome
from resilient_jax.protocol.host_status import HostStatus


class JobView:
    """What a progress line or a table shows of a job; the launcher keeps it up to date.

    Attributes:
        generation: newest generation; None before the first one.
        hosts: statuses of hosts that have a lease.
        let_in: hosts that the job has ever let in.
    """

    def __init__(self) -> None:
        self.generation: Generation | None = None
        self.hosts: dict[HostName, HostStatus] = {}
        self.let_in: set[HostName] = set()
        self.step = 0
        """The newest step that any host reported."""
        self.num_steps = 0
        """How many there are in the end; 0: not known."""
        self.metrics: dict[str, float] = {}
        """The metrics of that step."""

    def update_host(self, status: HostStatus) -> None:
        """Take in a host's new status."""
        self.hosts[status.host] = status
        if status.program:
            self.let_in.add(status.host)
        if status.step > self.step:
            self.step, self.num_steps, self.metrics = status.step, status.num_steps, status.metrics

    @property
    def outcome(self) -> JobOutcome | None:
        """How the job ended; None while it runs."""
        return self.generation.outcome if self.generation is not None else None
