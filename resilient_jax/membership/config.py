"""The timeouts and limits of the membership machine."""

import dataclasses
from typing import Final

from resilient_jax.membership.state_loss import StateLossPolicy

ALL_LATE_FACTOR: Final = 4
"""Where no member stops, restarting all from a snapshot waits so many times longer than leaving out some."""
LAST_COPY_FACTOR: Final = 2
"""How many times longer it is where the others have the last copy of the state."""
OLDER_STATE_FACTOR: Final = 12
"""How many times longer it is where the newest state is theirs alone and a snapshot has an older one: steps since then
are done again, but a program that hangs would hold up the job for minutes."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MembershipConfig:
    """The timeouts and limits of the machine. Times in seconds."""

    num_hosts: int
    min_hosts: int = 1
    start_timeout_s: float = 300.0
    regroup_grace_s: float = 5.0
    """How long to wait for the other hosts when all come back at once with their state (the store was away)."""
    state_loss_grace_s: float = 0.0
    """How long to wait, if more than `regroup_grace_s`, for missing hosts without which the state is lost: a host
    without a network cannot be distinguished from a dead one."""
    quiesce_timeout_s: float = 5.0
    last_copy_grace_s: float = 5.0
    """How long members with the last copy of the state wait for hosts whose worker is starting. To import libraries and
    to load programs takes some seconds, less if no other host trains meanwhile; it saves a re-form, too."""
    snapshot_grace_s: float = 0.5
    """How long members wait for a snapshot that all of them have copied, until servers have exchanged its parity,
    counted from the disruption. Without it they would do a step again."""
    compile_timeout_s: float = 600.0
    """A worker that compiles cannot be interrupted; the machine waits this long for it instead."""
    forming_timeout_s: float = 60.0
    max_collective_retries: int = 3
    max_error_restarts: int = 1
    """How often the worker of a host is started again at one step, after errors of its script."""
    reach_timeout_s: float = 5.0
    """How long, after a failure that no death explains, members wait for each other's reports of whom they reach: an
    agent gives up a host that does not answer after 3 s."""
    checkpoint_poll_timeout_s: float = 30.0
    """How long after the loss of a state the leader waits for the hosts' polls for checkpoints."""
    notice_s: float = 25.0
    """So long after its notice a host leaves at the latest."""
    progress_interval_s: float = 10.0
    """Greatest age of the record of progress that is left if all hosts die at once."""
    state_loss_policy: StateLossPolicy = StateLossPolicy.CHECKPOINT
    spare_seats: int = 0
    """Of each new world."""
    act_on_slow_hosts: bool = True
    """Whether slow hosts are replaced or taken out, and layers are divided by speed (rule 12 of `rules`)."""
    replaces_workers: bool = False
    """Whether collectives cannot be aborted (rule 8 of `rules`)."""

    def list_limits_s(self) -> list[float]:
        """Return all times since the last decision, ascending, after which a rule may decide something else."""
        limits = {
            self.start_timeout_s,
            self.regroup_grace_s,
            self.state_loss_grace_s,
            self.quiesce_timeout_s,
            self.quiesce_timeout_s * LAST_COPY_FACTOR,
            self.quiesce_timeout_s * ALL_LATE_FACTOR,
            self.quiesce_timeout_s * OLDER_STATE_FACTOR,
            self.last_copy_grace_s,
            self.snapshot_grace_s,
            self.compile_timeout_s,
            self.forming_timeout_s,
            self.reach_timeout_s,
            self.checkpoint_poll_timeout_s,
        }
        return sorted(limits)
