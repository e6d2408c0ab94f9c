"""Decides when a worker's task takes too long. Pure: the guard thread gives it the activity, the time and excuses.

The deadline of a task is `HANG_FACTOR` times the longest of its last silences in this very job, and never less than a
floor: a short one for what a step always does (input, computing, sums), of which samples soon exist; a long one for
everything that may rarely happen and then take long (code of the user's, checkpoints, restoring), and for a task of
which there are no samples yet, since its first run may trace and load programs.

How long a sum takes is the median: some of its silences are waits for hosts that evaluate, or come back.

A wait in a sum is reported at the short floor already: it says that this host waits for others, of which one may be
overdue. That the sum itself hangs is decided by the deadline only.

Time that is excused is no silence: while the process compiles, while a debugger holds it, and while the guard thread
itself was not running, because the process was stopped or starved.
"""

import dataclasses
import statistics
from typing import Final

from resilient_jax.protocol.worker_tasks import OverdueTask, WorkerTask
from resilient_jax.telemetry.worker_activity import Activity

HANG_FACTOR: Final = 10.0
"""Times the longest silence of late. Unicron takes 3 times the mean for a hang; a false kill costs more than to wait a
little longer, and the times of a step vary."""
MIN_SAMPLES: Final = 3
"""Silences from which the next may be predicted."""
REGULAR_TASKS: Final = frozenset({WorkerTask.INPUT, WorkerTask.COMPUTE, WorkerTask.SUM, WorkerTask.COMMIT})
"""What every step does."""
BOUNDED_TASKS: Final = frozenset({WorkerTask.PAUSED, WorkerTask.STORAGE})
"""Waits for another process of this host, which ends them itself."""
FORMING_SHARE: Final = 0.8
"""Of `forming_timeout_s`, after which the leader leaves a host out: by then it is to know where the host is."""
UNWINDING_TIMEOUT_S: Final = 1.0
"""How long a main thread may take to leave a generation that has ended before its place is reported."""
MAX_LOOK_INTERVAL_S: Final = 1.0
"""Longer between two looks, and the guard thread itself was not running."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HangLimits:
    """The floors of deadlines, in seconds.

    Attributes:
        regular_s: deadline floor of a task of every step.
        other_s: deadline floor of all other tasks, and of tasks without samples.
        forming_timeout_s: time after which the leader leaves out a host that has not joined.
        stall_dump_s: time after which a process whose guard thread cannot run prints its stacks.
    """

    regular_s: float
    other_s: float
    forming_timeout_s: float
    stall_dump_s: float = 30.0


def find_deadline_s(activity: Activity, limits: HangLimits) -> float:
    """Return how long the present silence may last, in seconds; infinite for what is bounded elsewhere."""
    if activity.task in BOUNDED_TASKS:
        return float("inf")
    if activity.task is WorkerTask.FORMING:
        return FORMING_SHARE * limits.forming_timeout_s
    is_regular = activity.task in REGULAR_TASKS and len(activity.silences_s) >= MIN_SAMPLES
    floor_s = limits.regular_s if is_regular else max(limits.regular_s, limits.other_s)
    silences_s = activity.silences_s or (0.0,)
    is_wait = activity.task is WorkerTask.SUM
    return max(floor_s, HANG_FACTOR * (statistics.median(silences_s) if is_wait else max(silences_s)))


class HangDetector:
    """Follows one process: which of its silences are too long, and how often that was reported."""

    def __init__(self, limits: HangLimits, now_s: float) -> None:
        self._limits = limits
        self._looked_s = now_s
        self._since_s = now_s
        """When the silence began that is looked at."""
        self._counted_from_s = now_s
        """The same, later by what is excused."""
        self._reported_s = 0.0
        """The silence at its last report; 0: not reported."""

    def look(
        self, activity: Activity, now_s: float, *, is_excused: bool, interrupted_s: float | None
    ) -> tuple[float, float] | None:
        """Return the silence and its deadline, in seconds, if it is to be reported now; else None.

        Args:
            now_s: monotonic seconds.
            is_excused: whether the process compiles, or is in a debugger.
            interrupted_s: time since the main thread was told to leave its generation; None: it was not told.
        """
        if activity.since_s != self._since_s:
            self._since_s = self._counted_from_s = activity.since_s
            self._reported_s = 0.0
        gap_s, self._looked_s = now_s - self._looked_s, now_s
        if is_excused:
            self._counted_from_s = now_s
        elif gap_s > MAX_LOOK_INTERVAL_S:
            self._counted_from_s = min(now_s, self._counted_from_s + gap_s)
        silent_s = now_s - self._counted_from_s
        deadline_s = find_deadline_s(activity, self._limits)
        if interrupted_s is not None:
            silent_s, deadline_s = min(silent_s, interrupted_s), min(deadline_s, UNWINDING_TIMEOUT_S)
        due_s = max(deadline_s, 2 * self._reported_s)
        if activity.task is WorkerTask.SUM and self._reported_s <= deadline_s:
            due_s = deadline_s if self._reported_s else min(self._limits.regular_s, deadline_s)
        if silent_s <= due_s:
            return None
        self._reported_s = silent_s
        return silent_s, deadline_s

    def find_silence_s(self, now_s: float) -> float:
        """Return how long the present silence has lasted, in seconds, without what was excused."""
        return now_s - self._counted_from_s

    def excuse(self, now_s: float) -> None:
        """Count the present silence from now on, as if it had not been reported."""
        self._counted_from_s, self._reported_s = now_s, 0.0

    @property
    def is_reported(self) -> bool:
        """Whether the present silence was reported as too long."""
        return self._reported_s > 0.0


def make_overdue_task(activity: Activity, place: str, silence: tuple[float, float]) -> OverdueTask:
    """Return the report of a silence; `silence` is what `HangDetector.look` returned."""
    silent_s, deadline_s = silence
    return OverdueTask(
        task=activity.task, step=activity.step, place=place, silent_s=silent_s, deadline_s=deadline_s
    )
