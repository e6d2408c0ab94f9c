"""Time buckets of a run with failures, from the records of its processes. Pure.

The clock runs from the commit of the last warm-up step to the last commit. An *attempt* is the training between two
changes: a generation of ours, or the processes between two restarts of the baseline. Each moment is in one bucket:
- *productive*: steps that count, at their time without failures; a step counts if it is not done again later;
- *slower*: the rest of their time: fewer hosts, saves that block, checkpoints written in the background;
- *wasted*: steps that are done again later, and the step in flight at a failure, unless its parts are kept;
- *recovery*: from the failure until the processes of the next attempt begin: detection, ending the rest, agreement;
- *reinitialisation*: from there until the first step is committed, minus one step: imports, connecting, compilation,
  restoring; and all of a planned change.
goodput = productive / all.
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence

import msgspec

from resilient_jax.errors import InternalError


class Commit(msgspec.Struct, frozen=True, kw_only=True):
    """The commit of a step by all processes of an attempt.

    A step that only the victim of a failure had committed, ahead of the survivors, was still in flight.

    Attributes:
        attempt: of the commit.
        step: counted from 0.
        at_s: when the last process committed; monotonic.
        hosts: number of hosts that trained.
    """

    attempt: int
    step: int
    at_s: float
    hosts: int


class InjectedKill(msgspec.Struct, frozen=True, kw_only=True):
    """A failure that was injected.

    Attributes:
        number: index in the schedule.
        attempt: that the failure ended.
        step: in flight.
        host: of the killed worker.
        at_s: time of the kill; monotonic.
    """

    number: int
    attempt: int
    step: int
    host: str
    at_s: float


class RunRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A line of a process's record; `kind` is "began" (an attempt), "committed" (a step) or "saved" (a checkpoint)."""

    kind: str
    attempt: int
    host: str
    at_s: float
    step: int = -1
    hosts: int = 0
    seconds: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """Commits, attempts and failures of a run.

    Attributes:
        commits: in order of time, from that of the last warm-up step.
        began_s: for each attempt, when its last process began.
        struck: failures in order of time.
    """

    commits: tuple[Commit, ...]
    began_s: Mapping[int, float]
    struck: tuple[InjectedKill, ...]

    @property
    def wall_s(self) -> float:
        """Seconds from the first commit to the last."""
        return self.commits[-1].at_s - self.commits[0].at_s

    @property
    def redone(self) -> int:
        """Number of commits of steps that had been committed before."""
        return len(self.commits) - 1 - self.progress

    @property
    def progress(self) -> int:
        """Number of distinct steps that were committed after the warm-up."""
        return len({commit.step for commit in self.commits if commit.step > self.commits[0].step})


class TimeBuckets(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of a run by bucket, as the module defines them."""

    productive: float = 0.0
    slower: float = 0.0
    wasted: float = 0.0
    recovery: float = 0.0
    reinitialisation: float = 0.0

    @property
    def wall_s(self) -> float:
        """Sum of all buckets."""
        return self.productive + self.slower + self.wasted + self.recovery + self.reinitialisation

    @property
    def goodput(self) -> float:
        """Productive share of the time."""
        return self.productive / self.wall_s


def read_timeline(
    rows: Sequence[RunRecord],
    struck: Sequence[InjectedKill],
    began_s: Mapping[int, float],
    steps: int,
    warm: int,
) -> Timeline:
    """Return the timeline of a run from the records of its processes.

    Args:
        rows: of all processes.
        struck: the failures that were injected.
        began_s: of attempts that a supervisor started; those of others are in `rows`.
        steps: of the job.
        warm: number of warm-up steps.

    Raises:
        InternalError: a step was committed by no process.
    """
    merged: dict[tuple[int, int], Commit] = {}
    committers: dict[tuple[int, int], set[str]] = {}
    began = dict(began_s)
    for row in sorted(rows, key=lambda row: row.at_s):
        if row.kind == "began":
            began[row.attempt] = row.at_s
        elif row.kind == "committed":
            key = (row.attempt, row.step)
            merged[key] = Commit(attempt=row.attempt, step=row.step, at_s=row.at_s, hosts=row.hosts)
            committers.setdefault(key, set()).add(row.host)
    victims = {(fault.attempt, fault.host) for fault in struck}
    for (attempt, step), hosts in committers.items():
        is_alone = len(hosts) == 1 and merged[attempt, step].hosts > 1
        if is_alone and (attempt, *hosts) in victims:
            del merged[attempt, step]
    found = {step for _, step in merged}
    if missing := sorted(set(range(steps)) - found):
        raise InternalError(f"found the steps {missing} committed by no process, expected all of {steps}")
    commits = sorted(merged.values(), key=lambda commit: commit.at_s)
    first = next(n for n, commit in enumerate(commits) if commit.step == warm - 1)
    return Timeline(
        commits=tuple(commits[first:]),
        began_s=began,
        struck=tuple(sorted(struck, key=lambda fault: fault.at_s)),
    )


def measure_stalls(timeline: Timeline) -> list[float]:
    """Return seconds from each failure to the end of the next attempt's first step; no healthy step is subtracted."""
    return [_next_commit(timeline, fault, -1) - fault.at_s for fault in timeline.struck]


def measure_regained(timeline: Timeline) -> list[float]:
    """Return seconds from each failure until a later attempt commits the step that the failure interrupted.

    If survivors had committed that step nevertheless, the seconds are those until the step after it.
    """
    return [_next_commit(timeline, fault, fault.step) - fault.at_s for fault in timeline.struck]


def _next_commit(timeline: Timeline, fault: InjectedKill, step: int) -> float:
    later = (c.at_s for c in timeline.commits if c.attempt > fault.attempt and c.step >= step)
    found = next(later, None)
    if found is None:
        raise InternalError(
            f"found no step after the failure in step {fault.step}, expected the run to go on"
        )
    return found


def split_time(timeline: Timeline, *, pace_s: float, keeps_partial: bool) -> TimeBuckets:
    """Return the run's buckets.

    Args:
        timeline: of the run.
        pace_s: mean time of a step without failures and checkpoints.
        keeps_partial: whether the survivors' part of the step in flight is kept.
    """
    start = timeline.commits[0].step
    final = {commit.step: index for index, commit in enumerate(timeline.commits)}
    counted_s = wasted_s = recovery_s = reinitialisation_s = 0.0
    for index, (before, after) in enumerate(itertools.pairwise(timeline.commits), start=1):
        counts = final[after.step] == index and after.step > start  # warm-up steps do not count
        gap_s = after.at_s - before.at_s
        partial_s = recovered_s = 0.0
        if after.attempt != before.attempt:
            began_s = max(before.at_s, timeline.began_s[after.attempt])
            killed_s = next(
                (f.at_s for f in timeline.struck if before.attempt <= f.attempt < after.attempt), None
            )
            if killed_s is not None:
                killed_s = max(before.at_s, killed_s)  # survivors may have committed the step nevertheless
                began_s = max(killed_s, began_s)
                partial_s, recovered_s = killed_s - before.at_s, began_s - killed_s
            own_s = min(pace_s, after.at_s - began_s)
        else:
            own_s = gap_s
        if keeps_partial and counts and after.step == before.step + 1:
            counted_s += partial_s
        else:
            wasted_s += partial_s
        counted_s += own_s if counts else 0.0
        wasted_s += 0.0 if counts else own_s
        recovery_s += recovered_s
        reinitialisation_s += gap_s - partial_s - recovered_s - own_s
    productive_s = min(counted_s, timeline.progress * pace_s)
    return TimeBuckets(
        productive=productive_s,
        slower=counted_s - productive_s,
        wasted=wasted_s,
        recovery=recovery_s,
        reinitialisation=reinitialisation_s,
    )


def pad_buckets(buckets: TimeBuckets, steps: int, *, pace_s: float, saving_s: float) -> TimeBuckets:
    """Return the buckets of the run if `steps` more steps without failures followed.

    Args:
        buckets: of the measured steps.
        steps: to add.
        pace_s: time of a step.
        saving_s: mean cost of checkpoints per step.
    """
    return msgspec.structs.replace(
        buckets,
        productive=buckets.productive + steps * pace_s,
        slower=buckets.slower + steps * saving_s,
    )


def mean_hosts(timeline: Timeline) -> float:
    """Return the time-weighted mean of the number of hosts that trained."""
    pairs = itertools.pairwise(timeline.commits)
    return sum(after.hosts * (after.at_s - before.at_s) for before, after in pairs) / timeline.wall_s


def step_times(timeline: Timeline, leave_out: Sequence[int] = ()) -> list[float]:
    """Return the seconds of each step after the first, without the steps `leave_out`."""
    return [
        after.at_s - before.at_s
        for before, after in itertools.pairwise(timeline.commits)
        if after.step not in leave_out
    ]


def saving_costs(timeline: Timeline, window: int) -> list[float]:
    """Return each checkpoint's cost in seconds: a window that begins with a checkpoint minus the window before it.

    The run must save after `window` steps, after 3 times, 5 times as many, and so on.

    >>> ends_s = [0.0, 1.0, 2.5]  # a checkpoint after the third step
    >>> commits = [Commit(attempt=1, step=1 + n, at_s=at_s, hosts=1) for n, at_s in enumerate(ends_s)]
    >>> saving_costs(Timeline(commits=tuple(commits), began_s={}, struck=()), 1)
    [0.5]
    """
    at_s = {commit.step + 1: commit.at_s for commit in timeline.commits}
    starts = range(0, max(at_s), 2 * window)
    return [
        (at_s[start + 2 * window] - at_s[start + window]) - (at_s[start + window] - at_s[start])
        for start in starts
        if start in at_s and start + 2 * window in at_s
    ]
