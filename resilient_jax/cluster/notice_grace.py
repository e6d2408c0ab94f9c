"""How long after a notice a host has, until its scheduler kills it. Pure.

Slurm sends SIGTERM at the time limit, at `scancel` and at a preemption, and SIGKILL `KillWait` (30 s) or `GraceTime`
later; Kubernetes after `terminationGracePeriodSeconds`. Other signals are those that a user asks for before the limit
(`sbatch --signal=USR1@300`): then the time until the limit is left as well (Slurm's `SLURM_JOB_END_TIME`).
"""

import dataclasses
import signal
from typing import Final

DEFAULT_GRACE_S: Final = 25.0
"""Schedulers kill 30 s after their notice; leaving later than this saves nothing."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NoticeGrace:
    """What is known of the time that a notice leaves.

    Attributes:
        seconds: from SIGTERM until the host must have left.
        end_wall_s: when the scheduler ends the job, in seconds since 1970; None: not known.
    """

    seconds: float = DEFAULT_GRACE_S
    end_wall_s: float | None = None

    def find_s(self, notice: signal.Signals, now_wall_s: float) -> float:
        """Return how many seconds a notice leaves.

        >>> NoticeGrace(seconds=25.0, end_wall_s=1_300.0).find_s(signal.SIGUSR1, 1_000.0)
        300.0
        """
        if notice is signal.SIGTERM or self.end_wall_s is None:
            return self.seconds
        return max(self.seconds, self.end_wall_s - now_wall_s)


DEFAULT_GRACE: Final = NoticeGrace()
"""Where nothing is said."""
