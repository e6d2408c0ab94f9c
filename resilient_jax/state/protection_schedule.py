"""When a state that every host has all of is copied into the memory of the snapshot servers. Pure.

Rules:
- Not in the first steps of a generation: a failure must not cost more than it does without snapshots. The snapshots of
  the generation before stay until the next one is committed.
- An automatic interval is measured: a window of steps without a snapshot, then one with some. What a snapshot prolongs
  training by is the difference, also where its copy and parity only take processor time from the steps beside them.
- It is the shortest interval whose snapshots take no more than `MAX_OVERHEAD` of the time.
Steps are counted alike on all hosts, so that each of them takes the same snapshots.
"""

import dataclasses
import math
from typing import Final

from resilient_jax.ids import GenerationNumber

MAX_OVERHEAD: Final = 0.02
"""Share of the time that snapshots may cost."""
FIRST_OFFSET: Final = 2
"""Steps after the first of a generation until its first snapshot, whose memory is allocated then."""
QUIET_OFFSET: Final = 8
"""The first step of the window without snapshots: by then programs are loaded and the first snapshot is committed."""
WINDOW_STEPS: Final = 8
"""Steps of each window."""
MEASURED_INTERVAL: Final = 4
"""Steps between two snapshots in the window with snapshots, so that one has settled when the next begins."""
MEASURED_SNAPSHOTS: Final = WINDOW_STEPS // MEASURED_INTERVAL


@dataclasses.dataclass(slots=True, kw_only=True)
class ProtectionSchedule:
    """The snapshots of one generation.

    Attributes:
        generation: the generation.
        first_step: the step of its first commit.
        every: steps between two snapshots; None while that is measured.
        is_disabled: no snapshot is taken in this generation.
        newest_step: of the newest snapshot; None before the first.
    """

    generation: GenerationNumber
    first_step: int
    every: int | None
    is_disabled: bool = False
    newest_step: int | None = None
    _marks_s: dict[int, float] = dataclasses.field(default_factory=dict)

    def mark(self, step: int, now_s: float) -> None:
        """Take the time of a commit, if it begins or ends a window."""
        if (step - self.first_step - QUIET_OFFSET) in (0, WINDOW_STEPS, 2 * WINDOW_STEPS):
            self._marks_s[step - self.first_step] = now_s

    def is_due(self, step: int) -> bool:
        """Return whether to take a snapshot after this step."""
        offset = step - self.first_step
        if self.is_disabled or offset < FIRST_OFFSET:
            return False
        if self.newest_step is None:
            return True
        if self.every is not None:
            return step >= self.newest_step + self.every
        in_window = offset - QUIET_OFFSET - WINDOW_STEPS
        return 0 <= in_window < WINDOW_STEPS and in_window % MEASURED_INTERVAL == 0

    def is_measured(self, step: int) -> bool:
        """Return whether the interval can be computed from what was measured."""
        is_over = step - self.first_step >= QUIET_OFFSET + 2 * WINDOW_STEPS
        return is_over and self.every is None and not self.is_disabled

    def measure(self) -> tuple[float, float]:
        """Return by how many seconds a snapshot prolongs training, and the seconds of a step without one."""
        began_s, turned_s, ended_s = (
            self._marks_s[QUIET_OFFSET + index * WINDOW_STEPS] for index in range(3)
        )
        quiet_s, busy_s = turned_s - began_s, ended_s - turned_s
        return (busy_s - quiet_s) / MEASURED_SNAPSHOTS, quiet_s / WINDOW_STEPS


def compute_affordable_interval_steps(cost_s: float, step_s: float, *, copy_s: float) -> int:
    """Return the least number of steps between two snapshots that costs no more than `MAX_OVERHEAD`.

    Args:
        cost_s: by how much a snapshot prolongs training.
        step_s: the duration of a step without one.
        copy_s: from the start of a snapshot until the next can begin; a shorter interval would only drop snapshots.

    Example:
        >>> compute_affordable_interval_steps(0.05, 0.5, copy_s=0.1)
        5
    """
    # cost / (steps x step) <= overhead, and steps x step >= copy.
    return max(1, math.ceil(cost_s / (MAX_OVERHEAD * step_s) - 1e-9), math.ceil(copy_s / step_s))
