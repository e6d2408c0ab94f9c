"""Drawn changes of members: what the policy chooses, against what would have been best in hindsight.

The policy knows a job's history: measured means, and how often it failed, by host. What happens then is drawn: when the
next failure comes, how long each change takes this time, when each host that is away is back, and whether one that
joins is lost again. Some hosts flap, each has returns of its own, and some jobs are pipelines whose blocks would move.
Each option is played on the same draw by a simulation of its own, which shares no code with the policy's scores.
"""

import dataclasses
import math
import random
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

import msgspec

from resilient_jax.ids import GenerationNumber, HostName
from resilient_jax.membership.job_history import MAX_RECENT
from resilient_jax.policy.choice import choose
from resilient_jax.policy.failure_forecast import add_return, count_losses, expect_return_s
from resilient_jax.policy.prices import PRIOR_S, price_job
from resilient_jax.policy.return_groups import PATIENCE, ExpectedReturn
from resilient_jax.policy.score import PRIOR_EXPOSURE_S, PRIOR_FAILURES_PER_HOST
from resilient_jax.policy.situations import Admission, Loss
from resilient_jax.protocol.recovery_records import (
    JobHistory,
    LossCause,
    MeasuredTime,
    RecoveryAction,
    RecoveryDecision,
    TimedChange,
)
from resilient_jax.protocol.state_records import COPY_TIMEOUT_S, StageLoss

PLACES: Final = (2, 4, 8, 64, 512, 4096)
NO_CLIQUE: Final = "the coordination service of their world has ended"
RATE_SPREAD: Final = 1.2
"""Standard deviation of the logarithm: published clusters differ by a factor of ten and more."""
SCALE_SPREAD: Final = 1.0
"""The same of a job's own times of changes, over those of a small model."""
TIME_SPREAD: Final = 0.4
"""The same of one change around the job's mean."""
MAX_OBSERVED_S: Final = 48 * 3600.0
MAX_COUNT: Final = 8
RETURN_SPREAD: Final = 1.0
"""The same of the returns of one host around those of all."""
SHARES: Final = (1.0, 1.0, 1.0, 0.5)
"""Of its devices with which a host is back, each as likely."""
FLAPPING: Final = 0.2
"""Share of the hosts that are away which have failed again and again for some hours, every 20 minutes or so."""
PIPELINED: Final = 0.3
"""Share of single losses that are of a stage of a pipeline."""
WAITS: Final = (RecoveryAction.WAIT, RecoveryAction.GATHER, RecoveryAction.POSTPONE)


class DrawnFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The work of the policy's choices until the next failure.

    Attributes:
        decision_regret: mean of the share of the work of the best option in hindsight that is missed.
        policy_gain_at_once: work over that of going on, with the fastest plan, and joining at once each time; less 1.
        policy_gain_rerouting: the same over keeping a lost stage each time, as long as nobody is back in it; in changes
            of pipelines alone.
        policy_gain_waiting: the same over waiting, or gathering, whenever a host is on its way; less 1.
        waits: share of changes in which the policy waits, gathers or postpones.
        keeps: share of changes in which it keeps the stage of a lost host for it.
        changes: how many were drawn.
    """

    decision_regret: float
    policy_gain_at_once: float
    policy_gain_rerouting: float
    policy_gain_waiting: float
    waits: float
    keeps: float
    changes: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What happens after a choice.

    Attributes:
        seconds: of each change, this time.
        returns: when each host that is awaited is back, in the order in which they were expected.
        failed_s: when the next failure of another host ends it.
        left_s: how long after it has joined the host that is ready now is lost again; infinite: it is not.
        wait_s: after which a wait is given up.
        num_awaited: for how many of the hosts that were expected.
        stage: what the loss makes of a pipeline; None: it is none.
    """

    seconds: Mapping[TimedChange, float]
    returns: tuple[ExpectedReturn, ...] = ()
    failed_s: float = math.inf
    left_s: float = math.inf
    wait_s: float = 0.0
    num_awaited: int = 0
    stage: StageLoss | None = None


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
    """Return the work after a loss, if `usual` is how the hosts go on and `action` is that or another."""
    course, places = _Course(outcome.failed_s), loss.places
    join_s = outcome.seconds[TimedChange.GROW if loss.can_join_in_place else TimedChange.REFORM_COLD]
    change_s, speed = outcome.seconds[_TIMED[usual]], loss.ready / places
    waited = list(outcome.returns[: outcome.num_awaited])
    left = sorted(outcome.returns[outcome.num_awaited :])
    if action is RecoveryAction.WAIT:
        course.spend(min(max(waited).return_s, outcome.wait_s))
        left = sorted([*left, *(one for one in waited if one.return_s > outcome.wait_s)])
        waited = [one for one in waited if one.return_s <= outcome.wait_s]
    else:
        left, waited = sorted([*left, *waited]), []
    hosts = loss.ready + sum(one.share for one in waited)
    if action is RecoveryAction.WAIT:
        speed = hosts / places
        if usual is RecoveryAction.REFORM and waited:  # all wait for the programs of those that have come
            change_s = outcome.seconds[TimedChange.REFORM_COLD]
    elif outcome.stage is not None:
        return _play_lost_stage(action, loss, outcome, outcome.stage)
    course.spend(change_s)
    _take_back(course, left, hosts, speed, join_s=join_s, places=places)
    return course.work


def _play_lost_stage(action: RecoveryAction, loss: Loss, outcome: Outcome, stage: StageLoss) -> float:
    """Return the work after the loss of a stage: `num_awaited` hosts are waited for if it is kept; 0: it is copied."""
    course, places, seconds = _Course(outcome.failed_s), loss.places, outcome.seconds
    kept, cut = ((loss.ready + loss.num_lost) / places * speed for speed in (stage.kept, stage.cut))
    is_kept = action is RecoveryAction.KEEP_STAGES
    course.spend(seconds[TimedChange.KEEP_STAGES if is_kept else TimedChange.SHRINK])
    if not is_kept:
        course.spend(stage.move_s)
    elif not outcome.num_awaited:
        course.spend(min(stage.move_s, COPY_TIMEOUT_S), kept)
        course.spend(seconds[TimedChange.REDIVIDE] + max(stage.move_s - COPY_TIMEOUT_S, 0.0))
    speed = kept if is_kept and outcome.num_awaited else cut
    left = sorted(outcome.returns)
    _take_back(course, left, loss.ready, speed, join_s=seconds[TimedChange.GROW], places=places)
    return course.work


def play_admission(action: RecoveryAction, admission: Admission, outcome: Outcome) -> float:
    """Return the work after a choice about hosts that are ready to join; one of them may be lost again."""
    course, places = _Course(outcome.failed_s), admission.places
    join_s = outcome.seconds[TimedChange.GROW if admission.can_join_in_place else TimedChange.REFORM_COLD]
    few = admission.training / places
    if action is RecoveryAction.POSTPONE:
        course.spend(math.inf, few)
        return course.work
    hosts = admission.training + admission.joining
    left = sorted(outcome.returns)
    if action is RecoveryAction.GATHER:
        waited = outcome.returns[: outcome.num_awaited]
        course.spend(min(max(waited).return_s, outcome.wait_s), few)
        back = [one for one in waited if one.return_s <= course.now_s]
        hosts += sum(one.share for one in back)
        left = sorted(one for one in outcome.returns if one not in back)
    course.spend(join_s)
    leaves_s = course.now_s + outcome.left_s
    if math.isfinite(leaves_s):
        before = [one for one in left if one.return_s < leaves_s]
        _take_back(course, before, hosts, hosts / places, join_s=join_s, places=places, until_s=leaves_s)
        hosts, left = hosts + sum(one.share for one in before) - 1, left[len(before) :]
        course.spend(outcome.seconds[TimedChange.SHRINK])
    _take_back(course, left, hosts, hosts / places, join_s=join_s, places=places)
    return course.work


def _take_back(
    course: _Course,
    returns: list[ExpectedReturn],
    hosts: float,
    speed: float,
    *,
    join_s: float,
    places: float,
    until_s: float = math.inf,
) -> None:
    """Train on with `hosts`, at a speed, until a moment; hosts that come back join with a pause each."""
    for return_s, share, _ in returns:
        course.spend(return_s - course.now_s, speed)
        course.spend(join_s)
        hosts += share
        speed = min(hosts, places) / places
    course.spend(until_s - course.now_s, speed)


_TIMED: Final[Mapping[RecoveryAction, TimedChange]] = {
    RecoveryAction.SHRINK: TimedChange.SHRINK,
    RecoveryAction.REPLACE: TimedChange.GROW,
    RecoveryAction.REFORM: TimedChange.REFORM,
    RecoveryAction.RESTORE: TimedChange.RESTORE,
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Played:
    """The work of the policy's choice, of the best option, and of rules without a policy."""

    chosen: float
    best: float
    at_once: float
    rerouting: float | None
    """None: no pipeline."""
    waiting: float
    is_wait: bool
    keeps: bool


def judge_drawn_changes(count: int, seed: int = 0) -> DrawnFigures:
    """Return the figures of so many changes."""
    chance = random.Random(seed)
    played = [(_play_loss if number % 2 else _play_admission)(chance) for number in range(count)]
    chosen, at_once, waiting = (
        sum(getattr(one, name) / one.best for one in played) for name in ("chosen", "at_once", "waiting")
    )
    stages = [one for one in played if one.rerouting is not None]
    return DrawnFigures(
        decision_regret=round(1 - chosen / count, 5),
        policy_gain_at_once=round(chosen / at_once - 1, 5),
        policy_gain_rerouting=round(
            sum(one.chosen / one.best for one in stages)
            / max(sum((one.rerouting or 0.0) / one.best for one in stages), 1e-9)
            - 1,
            5,
        ),
        policy_gain_waiting=round(chosen / waiting - 1, 5),
        waits=round(sum(one.is_wait for one in played) / count, 3),
        keeps=round(sum(one.keeps for one in played) / count, 3),
        changes=count,
    )


def _play_loss(chance: random.Random) -> _Played:
    places = chance.choice(PLACES)
    lost = min(chance.choice((1, 1, 1, 2, 4)), places - 1)
    stage = None
    if lost <= 2 and places >= 4 and chance.random() < PIPELINED:
        cut = 1 - chance.uniform(1.0, 2.0) * lost / (places + lost)
        stage = StageLoss(
            hosts=tuple(_name(number) for number in range(lost)),
            kept=max(cut - abs(chance.gauss(0, 0.05 * lost)), 0.5 / lost),
            cut=cut,
            move_s=math.exp(chance.gauss(1.0, 1.5)),
        )
    job = _draw_job(chance, places, away=lost)
    awaited = sorted(job.returns)[: chance.randrange(lost + 1)]
    loss = Loss(
        places=places,
        ready=places - lost,
        num_lost=lost,
        awaited=tuple(expected for expected, _ in awaited),
        new_world_because="" if stage is not None or chance.random() < 0.5 else NO_CLIQUE,
        can_join_in_place=stage is not None or chance.random() < 0.5,
        stage=stage,
        stage_return_s=awaited[0][0].return_s if awaited and stage is not None and lost == 1 else None,
    )
    names = {_name(number) for number in range(lost - len(awaited), places)}
    choice = choose(loss, price_job(job.history, names))
    usual = RecoveryAction.SHRINK if loss.is_in_place else RecoveryAction.REFORM
    outcome = dataclasses.replace(
        job.outcome, returns=tuple(returned for _, returned in awaited), stage=stage
    )
    return _compare(
        choice,
        lambda action, one: play_loss(action, usual, loss, one),
        outcome,
        usual,
        RecoveryAction.WAIT,
        loss.awaited,
    )


def _play_admission(chance: random.Random) -> _Played:
    places = chance.choice(PLACES)
    away = min(chance.choice((1, 1, 1, 2, 4)), places - 1)
    joining = chance.randrange(1, away + 1)
    job = _draw_job(chance, places, away=away)
    # The first of the hosts that are away are ready.
    awaited = sorted(job.returns[joining:])[: chance.randrange(away - joining + 1)]
    admission = Admission(
        places=places,
        training=places - away,
        joining=joining,
        awaited=tuple(expected for expected, _ in awaited),
        new_world_because="" if chance.random() < 0.5 else NO_CLIQUE,
    )
    names = {_name(number) for number in range(joining)}
    hosts = {*names, *(_name(number) for number in range(away, places))}
    choice = choose(admission, price_job(job.history, hosts, names))
    outcome = dataclasses.replace(job.outcome, returns=tuple(returned for _, returned in awaited))
    return _compare(
        choice,
        lambda action, one: play_admission(action, admission, one),
        outcome,
        RecoveryAction.JOIN,
        RecoveryAction.GATHER,
        admission.awaited,
    )


def _compare(
    choice: RecoveryDecision,
    play: Callable[[RecoveryAction, Outcome], float],
    outcome: Outcome,
    at_once: RecoveryAction,
    waiting: RecoveryAction,
    awaited: tuple[ExpectedReturn, ...],
) -> _Played:
    """Play all options; of a wait also for other numbers of hosts than the policy's."""
    possible = {option.action for option in choice.options if not option.why_not}
    waits = {RecoveryAction.WAIT, RecoveryAction.GATHER}
    keeps = possible & {RecoveryAction.KEEP_STAGES}

    def make(number: int) -> Outcome:
        wait_s = PATIENCE * awaited[number - 1].return_s if number else 0.0
        return dataclasses.replace(outcome, num_awaited=number, wait_s=wait_s)

    works = {(action, 0): play(action, make(0)) for action in possible - waits}
    works |= {
        (action, number): play(action, make(number))
        for action in (possible & waits) | keeps
        for number in range(1, len(awaited) + 1)
    }
    chosen = works[choice.action, len(choice.awaited)]
    all_waited = works.get((waiting, len(awaited)), works[at_once, 0])
    rerouting = None
    if keeps:
        always = dataclasses.replace(outcome, num_awaited=max(len(awaited), 1))
        rerouting = max(play(RecoveryAction.KEEP_STAGES, always), 1e-9)
    # A failure that comes before anybody trains leaves no option any work.
    return _Played(
        chosen=max(chosen, 1e-9),
        best=max(*works.values(), 1e-9),
        at_once=max(works[at_once, 0], 1e-9),
        rerouting=rerouting,
        waiting=max(all_waited, 1e-9),
        is_wait=choice.action in WAITS,
        keeps=choice.action is RecoveryAction.KEEP_STAGES,
    )


class _DrawnJob(NamedTuple):
    """What a job knows, what happens to it next, and of each host that is away when it is expected, and is, back."""

    history: JobHistory
    outcome: Outcome
    returns: list[tuple[ExpectedReturn, ExpectedReturn]]


def _draw_job(chance: random.Random, places: int, *, away: int) -> _DrawnJob:
    rate = places * PRIOR_FAILURES_PER_HOST / PRIOR_EXPOSURE_S * math.exp(chance.gauss(0, RATE_SPREAD))
    observed_s = chance.uniform(0, MAX_OBSERVED_S)
    scale = math.exp(abs(chance.gauss(0, SCALE_SPREAD)))
    means = {change: prior_s * scale for change, prior_s in PRIOR_S.items()}
    history = JobHistory(step_s=1.0)
    # Losses of all hosts, in order of time: of sound ones, whichever, and of those that are away and flap.
    losses = [
        (chance.uniform(0, observed_s), chance.randrange(places))
        for _ in range(min(_draw_poisson(chance, rate * observed_s), 200))
    ]
    flapping_s = {
        host: math.exp(chance.gauss(math.log(1200.0), 1.0))
        for host in range(away)
        if chance.random() < FLAPPING
    }
    for host, mean_s in flapping_s.items():
        since_s = max(observed_s - chance.uniform(0, 4 * 3600.0), 0.0)
        count = min(_draw_poisson(chance, (observed_s - since_s) / mean_s), 20)
        losses += [(chance.uniform(since_s, observed_s), host) for _ in range(count)]
    returns_s = [means[TimedChange.RETURN] * math.exp(chance.gauss(0, RETURN_SPREAD)) for _ in range(away)]
    for at_s, host in sorted(losses):
        history = msgspec.structs.replace(history, observed_s=at_s)
        history = count_losses(history, {_name(host): LossCause.WORKER}, GenerationNumber(1))
        returned_s = _vary(chance, returns_s[host] if host < away else means[TimedChange.RETURN])
        history = add_return(history, _name(host), LossCause.WORKER, returned_s)
    history = msgspec.structs.replace(history, observed_s=observed_s)
    history = count_losses(
        history, {_name(host): LossCause.WORKER for host in range(away)}, GenerationNumber(2)
    )
    times = []
    for change, mean_s in means.items():
        if count := chance.randrange(MAX_COUNT + 1):
            seen = [_vary(chance, mean_s) for _ in range(count)]
            times.append(MeasuredTime(change, tuple(seen[-MAX_RECENT:]), count))
    history = msgspec.structs.replace(history, times=tuple(times))
    outcome = Outcome(
        seconds={change: _vary(chance, mean_s) for change, mean_s in means.items()},
        failed_s=chance.expovariate(rate),
        left_s=chance.expovariate(1 / flapping_s[0]) if 0 in flapping_s else math.inf,
    )
    returns = []
    for host in range(away):
        expected_s = expect_return_s(history, _name(host), PRIOR_S[TimedChange.RETURN])
        share = chance.choice(SHARES)
        returned_s = _vary(chance, returns_s[host])
        returns.append((ExpectedReturn(expected_s, share), ExpectedReturn(returned_s, share)))
    return _DrawnJob(history, outcome, returns)


def _name(number: int) -> HostName:
    return HostName(f"host-{number}")


def _vary(chance: random.Random, mean_s: float) -> float:
    return mean_s * math.exp(chance.gauss(-(TIME_SPREAD**2) / 2, TIME_SPREAD))


def _draw_poisson(chance: random.Random, mean: float) -> int:
    if mean > 50:
        return max(0, round(chance.gauss(mean, math.sqrt(mean))))
    left, count = chance.expovariate(1), 0
    while left < mean:
        left, count = left + chance.expovariate(1), count + 1
    return count
