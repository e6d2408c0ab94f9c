"""Where the time of a run with failures went, from what its processes wrote. Pure.

The clock runs from the commit of the last warm step to the last commit. An *attempt* trains between two changes:
a generation of ours, the processes between two restarts of the baseline. Each moment falls into one bucket:
- *productive*: steps that count, as long as they take without failures; a step counts when it is not done again;
- *slower*: what they took beyond that: fewer hosts, saves that block, checkpoints written beside them;
- *wasted*: steps that were done again, and the step in flight at a failure, where its parts are not kept;
- *recovery*: from the failure until the next attempt's processes begin: noticing, ending what is left, agreeing;
- *reinitialisation*: from there until its first step is committed, less one step: imports, connecting, compilation,
  restoring; and all of a planned change.
goodput = productive / all.
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence

import msgspec

from resilient_jax.errors import InternalError


class Commit(msgspec.Struct, frozen=True, kw_only=True):
    """A step that an attempt's processes have committed, when the last of them did.

    What a failure's victim had committed alone, ahead of hosts that lived on, was still in flight.

    Attributes:
        attempt: that it was in.
        step: counted from 0.
        at_s: monotonic.
        hosts: that trained.
    """

    attempt: int
    step: int
    at_s: float
    hosts: int


class InjectedKill(msgspec.Struct, frozen=True, kw_only=True):
    """A failure that came.

    Attributes:
        number: in the schedule.
        attempt: that it ended.
        step: in flight.
        host: that was hit.
        at_s: monotonic.
    """

    number: int
    attempt: int
    step: int
    host: str
    at_s: float


class RunRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A line that a process of a run wrote: `began` an attempt, `committed` a step, `saved` a checkpoint."""

    kind: str
    attempt: int
    host: str
    at_s: float
    step: int = -1
    hosts: int = 0
    seconds: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """A run.

    Attributes:
        commits: in order of time, from the last warm step on.
        began_s: of each attempt, when the last of its processes did.
        struck: failures in order of time.
    """

    commits: tuple[Commit, ...]
    began_s: Mapping[int, float]
    struck: tuple[InjectedKill, ...]

    @property
    def wall_s(self) -> float:
        """From the first commit that counts to the last."""
        return self.commits[-1].at_s - self.commits[0].at_s

    @property
    def redone(self) -> int:
        """Commits that were no progress: of steps that had been committed before."""
        return len(self.commits) - 1 - self.progress

    @property
    def progress(self) -> int:
        """Steps that were committed after the warm ones, each once."""
        return len({commit.step for commit in self.commits if commit.step > self.commits[0].step})


class TimeBuckets(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of a run, by what they went into; see above."""

    productive: float = 0.0
    slower: float = 0.0
    wasted: float = 0.0
    recovery: float = 0.0
    reinitialisation: float = 0.0

    @property
    def wall_s(self) -> float:
        """All of them."""
        return self.productive + self.slower + self.wasted + self.recovery + self.reinitialisation

    @property
    def goodput(self) -> float:
        """The productive share."""
        return self.productive / self.wall_s


def read_timeline(
    rows: Sequence[RunRecord],
    struck: Sequence[InjectedKill],
    began_s: Mapping[int, float],
    steps: int,
    warm: int,
) -> Timeline:
    """Puts together what the processes wrote.

    Args:
        rows: of all processes.
        struck: the failures that came.
        began_s: of attempts, where a supervisor knows it; else it is in the rows.
        steps: that the run was asked for.
        warm: steps at its begin that do not count.

    Raises:
        InternalError: no process committed a step.
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
    """Seconds from each failure to the end of the next attempt's first step; a healthy step is not subtracted."""
    return [_next_commit(timeline, fault, -1) - fault.at_s for fault in timeline.struck]


def measure_regained(timeline: Timeline) -> list[float]:
    """Seconds from each failure until the attempts after it have come to the end of the step that it was in.

    If survivors had committed that step nevertheless, until the end of the one after it.
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
    """The run's buckets.

    Args:
        timeline: the run.
        pace_s: of a step without failures, checkpoints or anything else; the mean.
        keeps_partial: whether what survivors have computed of the step in flight is used.
    """
    start = timeline.commits[0].step
    final = {commit.step: index for index, commit in enumerate(timeline.commits)}
    counted_s = wasted_s = recovery_s = reinitialisation_s = 0.0
    for index, (before, after) in enumerate(itertools.pairwise(timeline.commits), start=1):
        counts = final[after.step] == index and after.step > start  # warm steps have counted before
        gap_s = after.at_s - before.at_s
        partial_s = recovered_s = 0.0
        if after.attempt != before.attempt:
            began_s = max(before.at_s, timeline.began_s[after.attempt])
            killed_s = next(
                (f.at_s for f in timeline.struck if before.attempt <= f.attempt < after.attempt), None
            )
            if killed_s is not None:
                killed_s = max(before.at_s, killed_s)  # the others may have committed the step nevertheless
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
    """The same for a run that goes on for `steps` without failures.

    Args:
        buckets: of what was measured.
        steps: to add.
        pace_s: of a step.
        saving_s: that checkpoints cost each of them, on average.
    """
    return msgspec.structs.replace(
        buckets,
        productive=buckets.productive + steps * pace_s,
        slower=buckets.slower + steps * saving_s,
    )


def mean_hosts(timeline: Timeline) -> float:
    """Hosts that trained, on average over the time."""
    pairs = itertools.pairwise(timeline.commits)
    return sum(after.hosts * (after.at_s - before.at_s) for before, after in pairs) / timeline.wall_s


def step_times(timeline: Timeline, leave_out: Sequence[int] = ()) -> list[float]:
    """Seconds of each step after the first, without the steps `leave_out`."""
    return [
        after.at_s - before.at_s
        for before, after in itertools.pairwise(timeline.commits)
        if after.step not in leave_out
    ]


def saving_costs(timeline: Timeline, window: int) -> list[float]:
    """What each checkpoint cost in seconds: a window of so many steps with one at its begin, less the one before it.

    A run for this saves after `window` steps, after 3 times, 5 times as many, and so on.

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
