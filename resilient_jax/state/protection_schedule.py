"""When a state that every host has all of is copied into the memory of the snapshot servers. Pure.

Rules:
- After the first commit of a generation, whatever that costs, where few hosts have the state, or no recent snapshot
  does: the generation's record says so (`membership.protection`). Else some steps later: a failure must not cost more
  than it does without snapshots, and those of the generation before stay until the next one is committed.
- An automatic interval is the shortest in which copies take no more than `MAX_OVERHEAD` of the time, as measured with
  the first snapshots of the generation; or Young and Daly's for the failures that this job sees, where that is shorter:
  then more work would be repeated than copies cost. A copy counts as if training stood still meanwhile, which is more
  than it costs: it runs beside the next step. Parity is not counted, since the servers yield to training. The
  difference between steps with and without a snapshot would say what both cost, but on a busy machine it is mostly
  noise.
Steps are counted alike on all hosts, so that each of them takes the same snapshots.
"""

import dataclasses
import math
from typing import Final

from resilient_jax.ids import GenerationNumber
from resilient_jax.state.snapshot_interval import compute_interval_steps

MAX_OVERHEAD: Final = 0.02
"""Share of the time that copies may take."""
FIRST_OFFSET: Final = 2
"""Steps after the first of a generation until its first snapshot, whose memory is allocated then."""
MEASURED_INTERVAL: Final = 4
"""Steps between two of the first snapshots."""
NUM_FIRST_SNAPSHOTS: Final = 3
"""Two write into memory that nothing has touched; the third is measured."""
NUM_MEASURED_STEPS: Final = NUM_FIRST_SNAPSHOTS * MEASURED_INTERVAL
"""After so many steps from the first snapshot all hosts agree on the interval."""


@dataclasses.dataclass(slots=True, kw_only=True)
class ProtectionSchedule:
    """The snapshots of one generation.

    Attributes:
        every: steps between two snapshots; None while the interval is measured.
        first_offset: steps after the first until the first snapshot.
        is_disabled: whether no snapshot is taken in this generation.
        newest_step: step of the newest snapshot; None before the first.
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
        if step - self._first_due == MEASURED_INTERVAL:
            self._began_s = now_s
        if step - self._first_due == NUM_MEASURED_STEPS:
            self._ended_s = now_s

    def is_due(self, step: int) -> bool:
        """Return whether to take a snapshot after this step."""
        if self.is_disabled or step < self._first_due:
            return False
        return self.newest_step is None or step >= self.newest_step + (self.every or MEASURED_INTERVAL)

    def is_measured(self, step: int) -> bool:
        """Return whether the hosts have to agree on the interval now."""
        is_over = step - self._first_due == NUM_MEASURED_STEPS
        return self.every is None and not self.is_disabled and is_over

    @property
    def step_s(self) -> float:
        """The mean duration of the measured steps."""
        return (self._ended_s - self._began_s) / (NUM_MEASURED_STEPS - MEASURED_INTERVAL)

    @property
    def _first_due(self) -> int:
        return self.first_step + self.first_offset


def compute_affordable_interval_steps(
    copy_s: float, step_s: float, next_failure_s: float | None = None
) -> int:
    """Return the least number of steps between two snapshots whose copies take at most `MAX_OVERHEAD` of the time.

    Fewer, where failures are so frequent that they would cost more than the copies.

    Args:
        next_failure_s: time until the next failure is expected; None: not known.

    Example:
        >>> compute_affordable_interval_steps(0.05, 0.5)
        5
        >>> compute_affordable_interval_steps(0.05, 0.5, next_failure_s=10.0)
        2
    """
    # copy / (steps x step) <= overhead
    affordable = max(1, math.ceil(copy_s / (MAX_OVERHEAD * step_s) - 1e-9))
    if next_failure_s is None:
        return affordable
    return min(affordable, compute_interval_steps(copy_s, next_failure_s, step_s, copy_s=copy_s))
