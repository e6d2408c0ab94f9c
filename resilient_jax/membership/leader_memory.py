"""What a leader knows by its own clock, and does not pass on to the next leader. Pure."""

import dataclasses
from collections.abc import Mapping

from resilient_jax.ids import HostName
from resilient_jax.protocol.recovery_records import JobHistory, LossCause


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LeaderMemory:
    """Moments of a job, as monotonic times of the leader; None: it has not seen them.

    Attributes:
        observed_until_s: up to when the history of the job counts the job's time.
        decided_s: when the recorded decision was taken, or this leader's term began.
        stalled_since_s: when the members stopped training, as long as they have not finished a step since.
        gives_up_stages: whether the members, who all stayed, then stopped so that a stage is kept no longer.
        has_cold_members: whether members had loaded no programs when the generation formed.
        steady_since_s: when all members had finished their first step of this generation.
        steady_step: the newest step at that moment.
        lost_since_s: when the hosts that have not come back yet were lost, and the cause.
        noticed: the members that had got a notice to leave when they were last seen.
        num_used: how many devices the members used at their first step; without hosts whose worker used all.
        unwritten: the history with what was measured since the last write; None: nothing was measured.
    """

    observed_until_s: float | None = None
    decided_s: float = 0.0
    stalled_since_s: float | None = None
    gives_up_stages: bool = False
    has_cold_members: bool = False
    steady_since_s: float | None = None
    steady_step: int = 0
    lost_since_s: Mapping[HostName, tuple[float, LossCause]] = dataclasses.field(default_factory=dict)
    noticed: frozenset[HostName] = frozenset()
    num_used: Mapping[HostName, int] = dataclasses.field(default_factory=dict)
    unwritten: JobHistory | None = None
