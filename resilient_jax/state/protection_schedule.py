"""When a state that every host has all of is copied into the memory of the snapshot servers. Pure.

Rules:
- Not in the first steps of a generation: a failure must not cost more than it does without snapshots. The snapshots of
  the generation before stay until the next one is committed. But where a failure costs all workers, after the first.
- An automatic interval is the shortest in which copies take no more than `MAX_OVERHEAD` of the time, as measured with
  the first snapshots of the generation. A copy counts as if training stood still meanwhile, which is more than it
  costs: it runs beside the next step. Parity is not counted, since the servers yield to training. The difference
  between steps with and without a snapshot would say what both cost, but on a busy machine it is mostly noise.
Steps are counted alike on all hosts, so that each of them takes the same snapshots.
"""

import dataclasses
import math
from typing import Final

from resilient_jax.ids import GenerationNumber

MAX_OVERHEAD: Final = 0.02
"""Share of the time that copies may take."""
FIRST_OFFSET: Final = 2
"""Steps after the first of a generation until its first snapshot, whose memory is allocated then."""
MEASURED_INTERVAL: Final = 4
"""Steps between two of the first snapshots."""
NUM_FIRST_SNAPSHOTS: Final = 3
"""Two write into memory that nothing has touched; the third is measured."""
AGREED_OFFSET: Final = FIRST_OFFSET + NUM_FIRST_SNAPSHOTS * MEASURED_INTERVAL
"""The step after which all hosts agree on the interval."""


@dataclasses.dataclass(slots=True, kw_only=True)
class ProtectionSchedule:
    """The snapshots of one generation.

    Attributes:
        generation: the generation.
        first_step: the step of its first commit.
        every: steps between two snapshots; None while that is measured.
        first_offset: steps after the first until the first snapshot.
        is_disabled: no snapshot is taken in this generation.
        newest_step: of the newest snapshot; None before the first.
    """

    generation: GenerationNumber
    first_step: int
    every: int | None
    first_offset: int = FIRST_OFFSET
    is_disabled: bool = False
    newest_step: int | None = None
    _began_s: float = 0.0
    _ended_s: float = 0.0

    def mark(self, step: int, now_s: float) -> None:
        """Take the time of a commit."""
        if step - self.first_step == FIRST_OFFSET + MEASURED_INTERVAL:
            self._began_s = now_s
        if step - self.first_step == AGREED_OFFSET:
            self._ended_s = now_s

    def is_due(self, step: int) -> bool:
        """Return whether to take a snapshot after this step."""
        if self.is_disabled or step - self.first_step < self.first_offset:
            return False
        return self.newest_step is None or step >= self.newest_step + (self.every or MEASURED_INTERVAL)

    def is_measured(self, step: int) -> bool:
        """Return whether the hosts have to agree on the interval now."""
        return self.every is None and not self.is_disabled and step - self.first_step == AGREED_OFFSET

    @property
    def step_s(self) -> float:
        """The mean duration of the measured steps."""
        return (self._ended_s - self._began_s) / (AGREED_OFFSET - FIRST_OFFSET - MEASURED_INTERVAL)


def compute_affordable_interval_steps(copy_s: float, step_s: float) -> int:
    """Return the least number of steps between two snapshots whose copies take at most `MAX_OVERHEAD` of the time.

    Args:
        copy_s: the duration of a copy.
        step_s: the duration of a step.

    Example:
        >>> compute_affordable_interval_steps(0.05, 0.5)
        5
    """
    # copy / (steps x step) <= overhead
    return max(1, math.ceil(copy_s / (MAX_OVERHEAD * step_s) - 1e-9))
