"""Drawn changes of members: what the policy chooses, against what would have been best in hindsight.

The policy knows a job's history: measured means, and how often it failed. What happens then is drawn: when the next
failure comes, how long each change takes this time, and when the hosts that are away are back. Each option is played on
the same draw by a simulation of its own, which shares no code with the policy's scores.
"""

import dataclasses
import math
import random
from collections.abc import Mapping
from typing import Final

import msgspec

from resilient_jax.ids import HostName
from resilient_jax.membership.recovery_policy import (
    PATIENCE,
    PRIOR_S,
    Admission,
    Choice,
    Loss,
    choose_admission,
    choose_after_loss,
    price_job,
)
from resilient_jax.planning.recovery_score import estimate_failure_rate
from resilient_jax.protocol.recovery_records import (
    HostFailures,
    JobHistory,
    MeasuredTime,
    RecoveryAction,
    TimedChange,
)

PLACES: Final = (2, 4, 8, 64, 512, 4096)
RATE_SPREAD: Final = 1.2
"""Standard deviation of the logarithm: published clusters differ by a factor of ten and more."""
SCALE_SPREAD: Final = 1.0
"""The same of a job's own times of changes, over those of a small model."""
TIME_SPREAD: Final = 0.4
"""The same of one change around the job's mean."""
MAX_OBSERVED_S: Final = 48 * 3600.0
MAX_COUNT: Final = 8
WAITS: Final = (RecoveryAction.WAIT, RecoveryAction.GATHER, RecoveryAction.POSTPONE)


class DrawnFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The work of the policy's choices until the next failure.

    Attributes:
        decision_regret: mean of the share of the work of the best option in hindsight that is missed.
        policy_gain_at_once: work over that of going on, and joining, at once each time; less 1.
        policy_gain_waiting: the same over waiting, or gathering, whenever a host is on its way; less 1.
        waits: share of changes in which the policy waits, gathers or postpones.
        changes: how many were drawn.
    """

    decision_regret: float
    policy_gain_at_once: float
    policy_gain_waiting: float
    waits: float
    changes: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What happens after a choice.

    Attributes:
        seconds: of each change, this time.
        returned_s: when all hosts that are awaited are back.
        failed_s: when the next failure ends it.
        wait_s: after which a wait is given up.
    """

    seconds: Mapping[TimedChange, float]
    returned_s: float
    failed_s: float
    wait_s: float


class _Course:
    """Work as time passes, until the next failure: host-seconds over the places of the job."""

    def __init__(self, failed_s: float) -> None:
        self._left_s = failed_s
        self.now_s = 0.0
        self.work = 0.0

    def spend(self, seconds: float, speed: float = 0.0) -> None:
        seconds = max(min(seconds, self._left_s), 0.0)
        self._left_s -= seconds
        self.now_s += seconds
        self.work += speed * seconds


def play_loss(action: RecoveryAction, usual: RecoveryAction, loss: Loss, outcome: Outcome) -> float:
    """Return the work after a loss, if `usual` is how the hosts go on and `action` is that or `WAIT`."""
    course = _Course(outcome.failed_s)
    change_s = outcome.seconds[_TIMED[usual]]
    join_s = outcome.seconds[TimedChange.GROW if loss.can_join_in_place else TimedChange.REFORM]
    few, all_ = loss.ready / loss.places, min(loss.ready + loss.awaited, loss.places) / loss.places
    are_back = False
    if action is RecoveryAction.WAIT:
        are_back = outcome.returned_s <= outcome.wait_s
        course.spend(min(outcome.returned_s, outcome.wait_s))
    course.spend(change_s)
    if not are_back and loss.awaited:
        course.spend(outcome.returned_s - course.now_s, few)
        course.spend(join_s)
    course.spend(math.inf, all_ if are_back or loss.awaited else few)
    return course.work


def play_admission(action: RecoveryAction, admission: Admission, outcome: Outcome) -> float:
    """Return the work after a choice about hosts that are ready to join."""
    course, places = _Course(outcome.failed_s), admission.places
    join_s = outcome.seconds[TimedChange.GROW if admission.can_join_in_place else TimedChange.REFORM]
    few = admission.training / places
    ready = min(admission.training + admission.joining, places) / places
    all_ = min(admission.training + admission.joining + admission.awaited, places) / places
    if action is RecoveryAction.POSTPONE:
        course.spend(math.inf, few)
        return course.work
    if action is RecoveryAction.GATHER:
        course.spend(min(outcome.returned_s, outcome.wait_s), few)
        if outcome.returned_s <= outcome.wait_s:
            course.spend(join_s)
            course.spend(math.inf, all_)
            return course.work
    course.spend(join_s)
    if admission.awaited:
        course.spend(outcome.returned_s - course.now_s, ready)
        course.spend(join_s)
    course.spend(math.inf, all_)
    return course.work


_TIMED: Final[Mapping[RecoveryAction, TimedChange]] = {
    RecoveryAction.SHRINK: TimedChange.SHRINK,
    RecoveryAction.REPLACE: TimedChange.GROW,
    RecoveryAction.REFORM: TimedChange.REFORM,
    RecoveryAction.RESTORE: TimedChange.RESTORE,
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Played:
    """The work of the policy's choice, of the best option, and of two rules without a policy."""

    chosen: float
    best: float
    at_once: float
    waiting: float
    is_wait: bool


def judge_drawn_changes(count: int, seed: int = 0) -> DrawnFigures:
    """Return the figures of so many changes."""
    chance = random.Random(seed)
    played = [(_play_loss if number % 2 else _play_admission)(chance) for number in range(count)]
    chosen, at_once, waiting = (
        sum(getattr(one, name) / one.best for one in played) for name in ("chosen", "at_once", "waiting")
    )
    return DrawnFigures(
        decision_regret=round(1 - chosen / count, 5),
        policy_gain_at_once=round(chosen / at_once - 1, 5),
        policy_gain_waiting=round(chosen / waiting - 1, 5),
        waits=round(sum(one.is_wait for one in played) / count, 3),
        changes=count,
    )


def _play_loss(chance: random.Random) -> _Played:
    places = chance.choice(PLACES)
    lost = min(chance.choice((1, 1, 1, 2, 4)), places - 1)
    loss = Loss(
        places=places,
        ready=places - lost,
        awaited=chance.randrange(lost + 1),
        is_in_place=chance.random() < 0.5,
        can_join_in_place=chance.random() < 0.5,
    )
    history, outcome = _draw_job(chance, places)
    choice = choose_after_loss(loss, price_job(history, places))
    usual = RecoveryAction.SHRINK if loss.is_in_place else RecoveryAction.REFORM
    outcome = dataclasses.replace(outcome, wait_s=_find_patience_s(history))
    works = {
        option.action: play_loss(option.action, usual, loss, outcome)
        for option in choice.options
        if not option.why_not
    }
    return _compare(choice, works, usual, RecoveryAction.WAIT)


def _play_admission(chance: random.Random) -> _Played:
    places = chance.choice(PLACES)
    away = min(chance.choice((1, 1, 1, 2, 4)), places - 1)
    joining = chance.randrange(1, away + 1)
    admission = Admission(
        places=places,
        training=places - away,
        joining=joining,
        awaited=chance.randrange(away - joining + 1),
        can_join_in_place=chance.random() < 0.5,
    )
    history, outcome = _draw_job(chance, places)
    names = frozenset(f"host-{number}" for number in range(joining))
    choice = choose_admission(admission, price_job(history, places, names))
    outcome = dataclasses.replace(outcome, wait_s=_find_patience_s(history))
    works = {
        option.action: play_admission(option.action, admission, outcome)
        for option in choice.options
        if not option.why_not
    }
    return _compare(choice, works, RecoveryAction.JOIN, RecoveryAction.GATHER)


def _compare(
    choice: Choice,
    works: Mapping[RecoveryAction, float],
    at_once: RecoveryAction,
    waiting: RecoveryAction,
) -> _Played:
    # A failure that comes before anybody trains leaves no option any work.
    best = max(*works.values(), 1e-9)
    return _Played(
        chosen=max(works[choice.action], 1e-9),
        best=best,
        at_once=max(works[at_once], 1e-9),
        waiting=max(works.get(waiting, works[at_once]), 1e-9),
        is_wait=choice.action in WAITS,
    )


def _draw_job(chance: random.Random, places: int) -> tuple[JobHistory, Outcome]:
    """Return what a job knows, and what happens to it next."""
    rate = estimate_failure_rate(places, 0, 0.0) * math.exp(chance.gauss(0, RATE_SPREAD))
    observed_s = chance.uniform(0, MAX_OBSERVED_S)
    failures = _draw_poisson(chance, rate * observed_s)
    scale = math.exp(abs(chance.gauss(0, SCALE_SPREAD)))
    means = {change: prior_s * scale for change, prior_s in PRIOR_S.items()}
    times = []
    for change, mean_s in means.items():
        if count := chance.randrange(MAX_COUNT + 1):
            seen = [_vary(chance, mean_s) for _ in range(count)]
            times.append(MeasuredTime(change, math.fsum(seen) / count, count))
    history = JobHistory(
        observed_s=observed_s,
        failures=failures,
        host_failures=tuple(
            HostFailures(HostName(f"host-{chance.randrange(places)}"), 1) for _ in range(min(failures, 64))
        ),
        step_s=1.0,
        times=tuple(times),
    )
    outcome = Outcome(
        seconds={change: _vary(chance, mean_s) for change, mean_s in means.items()},
        returned_s=_vary(chance, means[TimedChange.RETURN]),
        failed_s=chance.expovariate(rate),
        wait_s=0.0,
    )
    return history, outcome


def _find_patience_s(history: JobHistory) -> float:
    """Return how long the policy has hosts waited for at most, by what the job has measured."""
    measured = {time.change: time.mean_s for time in history.times}
    return PATIENCE * measured.get(TimedChange.RETURN, PRIOR_S[TimedChange.RETURN])


def _vary(chance: random.Random, mean_s: float) -> float:
    return mean_s * math.exp(chance.gauss(-(TIME_SPREAD**2) / 2, TIME_SPREAD))


def _draw_poisson(chance: random.Random, mean: float) -> int:
    if mean > 50:
        return max(0, round(chance.gauss(mean, math.sqrt(mean))))
    left, count = chance.expovariate(1), 0
    while left < mean:
        left, count = left + chance.expovariate(1), count + 1
    return count
