"""When a host's agent starts a process beside its worker: a standby, or another zygote. Pure.

Rules:
- It takes processor time and memory, so none starts before the world has trained for `SETTLING_S`: at a commit
  that long after the first commit of the generation, and so never while the job recovers.
- One that was killed (by the kernel, which needs its memory, or by a person) is started again after
  `RETRY_S`, doubled each time.
- One that failed by itself would fail again: none is started any more.
"""

import dataclasses

from resilient_jax.ids import GenerationNumber

SETTLING_S = 3.0
"""A world that has trained for so long has loaded its programs, and its hosts that return have come back."""
RETRY_S = 10.0
MAX_RETRY_S = 600.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StandbySchedule:
    """What decides whether a standby, or a zygote, may start.

    Attributes:
        generation: generation in which this host's worker trains; None: the worker has committed nothing yet.
        trains_since_s: monotonic time of the first commit in that generation.
        num_killed: standbys that were killed since the last promotion.
        not_before_s: monotonic time before which no standby is started again.
        has_failed: whether a standby failed by itself.
    """

    generation: GenerationNumber | None = None
    trains_since_s: float = 0.0
    num_killed: int = 0
    not_before_s: float = 0.0
    has_failed: bool = False

    def commit(self, generation: GenerationNumber, now_s: float) -> "StandbySchedule":
        """Return the schedule after a commit of this host's worker."""
        if generation == self.generation:
            return self
        return dataclasses.replace(self, generation=generation, trains_since_s=now_s)

    def replace_worker(self, *, is_promoted: bool) -> "StandbySchedule":
        """Return the schedule after a start of a worker; `is_promoted`: a standby has become this worker, or a
        zygote has forked it."""
        num_killed = 0 if is_promoted else self.num_killed
        return dataclasses.replace(self, generation=None, num_killed=num_killed)

    def lose_standby(self, now_s: float, *, is_killed: bool) -> "StandbySchedule":
        """Return the schedule after a standby's end that was not ordered."""
        if not is_killed:
            return dataclasses.replace(self, has_failed=True)
        delay_s = min(RETRY_S * 2**self.num_killed, MAX_RETRY_S)
        return dataclasses.replace(self, num_killed=self.num_killed + 1, not_before_s=now_s + delay_s)

    def is_due(self, now_s: float) -> bool:
        """Return whether a standby may start now, if there is none."""
        return (
            not self.has_failed
            and self.generation is not None
            and now_s - self.trains_since_s >= SETTLING_S
            and now_s >= self.not_before_s
        )
