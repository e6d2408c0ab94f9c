"""The policy of a change of members: against brute force, monotone, and without flutter."""

import dataclasses

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient_jax.ids import GenerationNumber, HostName
from resilient_jax.membership.job_history import add_time
from resilient_jax.policy.choice import HYSTERESIS, MIN_SAVED_S, choose
from resilient_jax.policy.failure_forecast import count_losses
from resilient_jax.policy.prices import PRIOR_S, Prices, price_job
from resilient_jax.policy.return_groups import ExpectedReturn
from resilient_jax.policy.score import (
    HOUR_S,
    Phase,
    score_phases,
)
from resilient_jax.policy.situations import Admission, Loss
from resilient_jax.protocol.plan_records import PlanChange
from resilient_jax.protocol.recovery_records import (
    JobHistory,
    LossCause,
    RecoveryAction,
    RecoveryDecision,
    TimedChange,
)

NUMBER = GenerationNumber(2)
TIMES = st.floats(0.05, 100.0)
HORIZONS = st.floats(1.0, 1e6)


@st.composite
def draw_prices(draw) -> Prices:
    return Prices(
        seconds={change: draw(TIMES) for change in TimedChange},
        next_failure_s=draw(HORIZONS),
        joiner_losses=draw(st.floats(0.0, 2.0)),
    )


def names(*hosts: str) -> set[HostName]:
    return {HostName(host) for host in hosts}


def name_hosts(count: int, *hosts: str) -> set[HostName]:
    """Return so many names, these among them."""
    return names(*hosts, *(f"host-{number}" for number in range(count - len(hosts))))


def lose(history: JobHistory, *hosts: str, cause: LossCause = LossCause.WORKER) -> JobHistory:
    return count_losses(history, dict.fromkeys(names(*hosts), cause), NUMBER)


SHARES = st.sampled_from((0.25, 0.5, 1.0))
"""Of a host's devices."""


WHY = "the coordination service of their world has ended"


def draw_returns(draw, most: int) -> tuple[ExpectedReturn, ...]:
    """Draw the hosts that are awaited, the soonest first."""
    returns = st.builds(ExpectedReturn, TIMES, SHARES)
    return tuple(sorted(draw(st.lists(returns, max_size=min(most, 5)))))


@st.composite
def draw_loss(draw) -> Loss:
    places = draw(st.integers(2, 64))
    ready = draw(st.integers(1, places - 1))
    return Loss(
        places=places,
        ready=ready,
        num_seated=draw(st.integers(0, ready - 1)),
        awaited=draw_returns(draw, places - ready),
        new_world_because=draw(st.sampled_from(("", WHY))),
        can_join_in_place=draw(st.booleans()),
        needs_restore=draw(st.booleans()),
        may_wait=draw(st.booleans()),
    )


PLANS = st.builds(
    lambda best, kept, prepare_s: PlanChange(
        groups=(0,), kept=kept * best, best=best, best_axes=(), prepare_s=prepare_s
    ),
    best=st.floats(0.1, 2.0),
    kept=st.floats(0.0, 1.0),
    prepare_s=st.floats(0.0, 100.0),
)
"""What the join of a host makes of planned axes."""


@st.composite
def draw_admission(draw) -> Admission:
    places = draw(st.integers(2, 4096))
    training = draw(st.integers(1, places - 1))
    joining = draw(st.integers(1, places - training))
    return Admission(
        places=places,
        training=training,
        joining=joining,
        awaited=draw_returns(draw, places - training - joining),
        new_world_because=draw(st.sampled_from(("", WHY))),
        is_last_copy=draw(st.booleans()),
        before=draw(st.sampled_from((None, RecoveryAction.POSTPONE))),
        plan=draw(st.none() | PLANS),
        has_new_axes=draw(st.booleans()),
    )


PHASES = st.lists(
    st.builds(
        Phase, pause_s=st.floats(0, 50), speed=st.floats(0, 1), training_s=st.none() | st.floats(0, 50)
    ),
    min_size=1,
    max_size=3,
).map(tuple)


@given(phases=PHASES, horizon=st.floats(1.0, 200.0))
def test_the_score_is_the_mean_speed_of_all_moments_until_the_next_failure(phases, horizon):
    moments = 4000
    ends: list[tuple[float, float]] = []
    at_s = 0.0
    for phase in phases:
        ends.append((at_s := at_s + phase.pause_s, 0.0))
        trains_s = horizon if phase.training_s is None else phase.training_s
        ends.append((at_s := at_s + trains_s, phase.speed))
    trained = 0.0
    for moment in range(moments):
        now_s = (moment + 0.5) * horizon / moments
        trained += next((speed for end_s, speed in ends if now_s < end_s), 0.0)
    assert score_phases(phases, horizon) == pytest.approx(trained / moments, abs=7 / moments)


def check_choice(choice: RecoveryDecision, horizon_s: float) -> None:
    """Check a choice against all possible options: none of them saves as much as makes another choice."""
    first, *others = choice.options
    assert choice.action is first.action
    assert not first.why_not
    for option in others:
        if option.why_not:
            continue
        # What the best option loses is at least 0: the margin is the larger, the more the chosen one loses.
        saved_s = horizon_s * (option.score - first.score)
        lost_s = horizon_s * (1.0 - first.score)
        assert saved_s <= max(HYSTERESIS * lost_s, MIN_SAVED_S) + 1e-6 * horizon_s


@given(loss=draw_loss(), prices=draw_prices())
def test_no_other_option_after_a_loss_saves_more_than_the_margin(loss, prices):
    check_choice(choose(loss, prices), prices.next_failure_s)


@given(admission=draw_admission(), prices=draw_prices())
def test_no_other_admission_saves_more_than_the_margin(admission, prices):
    check_choice(choose(admission, prices), prices.next_failure_s)


@given(loss=draw_loss(), prices=draw_prices(), faster=st.floats(0.1, 1.0))
def test_a_faster_transition_never_loses(loss, prices, faster):
    choice = choose(loss, prices)
    own = {
        RecoveryAction.SHRINK: TimedChange.SHRINK,
        RecoveryAction.REPLACE: TimedChange.GROW,
        RecoveryAction.REFORM: TimedChange.REFORM,
        RecoveryAction.RESTORE: TimedChange.RESTORE,
    }.get(choice.action, TimedChange.REFORM)
    seconds = {**prices.seconds, own: prices.seconds[own] * faster}
    again = choose(loss, dataclasses.replace(prices, seconds=seconds))
    scores = {option.action: option.score for option in again.options}
    assert scores[choice.action] >= choice.options[0].score - 1e-12


@given(admission=draw_admission(), prices=draw_prices(), longer=st.floats(1.0, 100.0))
def test_a_longer_time_to_the_next_failure_favors_a_join_over_its_postponing(admission, prices, longer):
    admission = dataclasses.replace(admission, awaited=())
    # A job whose pauses outlast the time between two failures trains in no case.
    prepare_s = admission.plan.prepare_s if admission.plan is not None else 0.0
    shortest_s = sum(prices.seconds.values()) + prepare_s
    prices = dataclasses.replace(prices, next_failure_s=shortest_s + prices.next_failure_s)
    if choose(admission, prices).action is not RecoveryAction.JOIN:
        return
    later = dataclasses.replace(prices, next_failure_s=prices.next_failure_s * longer)
    assert choose(admission, later).action is RecoveryAction.JOIN


@pytest.mark.parametrize("near", [0.7, 0.75, 0.79, 0.85, 0.95, 1.0, 1.1])
@given(places=st.integers(100, 4096), join_s=st.floats(10.0, 100.0), noise=st.floats(0.9, 1.1))
def test_a_choice_does_not_flutter_with_the_noise_of_measured_times(near, places, join_s, noise):
    admission = Admission(places=places, training=places - 1, joining=1)
    # Near the time to the next failure at which a join costs what it brings: D / places = its pause.
    seconds = {change: join_s for change in TimedChange}
    prices = Prices(seconds=seconds, next_failure_s=near * places * join_s)
    choice = choose(admission, prices)
    assert choice.action is (RecoveryAction.POSTPONE if near < 0.8 else RecoveryAction.JOIN)
    before = None if choice.action is RecoveryAction.JOIN else choice.action
    noisy = dataclasses.replace(prices, seconds={change: join_s * noise for change in TimedChange})
    again = choose(dataclasses.replace(admission, before=before), noisy)
    assert before is None or again.action is before


def test_a_returned_host_joins_a_small_job_at_once():
    admission = Admission(places=4, training=3, joining=1)
    history = lose(JobHistory(observed_s=600.0), "d")
    choice = choose(admission, price_job(history, name_hosts(4, "d"), names("d")))
    assert choice.action is RecoveryAction.JOIN
    assert "to postpone would lose" in choice.reason


def test_of_thousands_of_hosts_one_that_returns_waits_for_more_or_the_next_change():
    admission = Admission(places=4096, training=4090, joining=1, new_world_because=WHY)
    history = lose(JobHistory(observed_s=HOUR_S), "d")
    prices = price_job(history, name_hosts(4096, "d"), names("d"))
    choice = choose(admission, prices)
    assert (choice.action, choice.wait_s) == (RecoveryAction.POSTPONE, 60.0)
    # All of the job would wait 8 s for their programs.
    assert choose(dataclasses.replace(admission, joining=6), prices).action is RecoveryAction.POSTPONE
    several = dataclasses.replace(admission, training=4080, joining=16)
    assert choose(several, prices).action is RecoveryAction.JOIN


def test_a_host_that_is_lost_again_and_again_comes_back_less_and_less_often():
    """A host of 512 that dies ten seconds after each join; an hour as the leader would decide it."""
    history, joins, now_s = JobHistory(), [], 0.0
    admission = Admission(places=512, training=511, joining=1, new_world_because=WHY)
    before: RecoveryAction | None = None
    while now_s < HOUR_S:
        history = msgspec.structs.replace(history, observed_s=now_s)
        prices = price_job(history, name_hosts(512, "flapping"), names("flapping"))
        choice = choose(dataclasses.replace(admission, before=before), prices)
        before = choice.action
        if choice.action is RecoveryAction.JOIN:
            joins.append(now_s)
            history, before = lose(history, "flapping"), None
        now_s += 15.0 if choice.action is RecoveryAction.JOIN else choice.wait_s
    assert 1 <= len(joins) <= 12
    half = HOUR_S / 4
    assert sum(at_s < half for at_s in joins) >= sum(at_s >= 3 * half for at_s in joins)


def test_hosts_that_return_together_join_in_one_pause_where_a_pause_is_long():
    admission = Admission(
        places=8, training=6, joining=1, awaited=(ExpectedReturn(6.0),), new_world_because=WHY
    )
    history = add_time(JobHistory(observed_s=HOUR_S), TimedChange.REFORM_COLD, 20.0)
    choice = choose(admission, price_job(history, name_hosts(8)))
    assert (choice.action, choice.wait_s) == (RecoveryAction.GATHER, 9.0)
    slow = dataclasses.replace(admission, awaited=(ExpectedReturn(100.0),))
    assert choose(slow, price_job(history, name_hosts(8))).action is RecoveryAction.JOIN


def test_where_two_new_worlds_cost_more_than_the_wait_the_job_waits():
    loss = Loss(
        places=8, ready=7, awaited=(ExpectedReturn(6.0),), new_world_because=WHY, can_join_in_place=False
    )
    history = JobHistory(observed_s=HOUR_S)
    for change in (TimedChange.REFORM, TimedChange.REFORM_COLD):
        history = add_time(history, change, 20.0)
    choice = choose(loss, price_job(history, name_hosts(8)))
    assert (choice.action, choice.wait_s) == (RecoveryAction.WAIT, 9.0)
    in_place = dataclasses.replace(loss, new_world_because="", can_join_in_place=True)
    assert choose(in_place, price_job(history, name_hosts(8))).action is RecoveryAction.SHRINK


def test_a_join_is_not_put_off_while_the_next_loss_may_be_that_of_the_state():
    admission = Admission(places=4096, training=4095, joining=1, is_last_copy=True)
    choice = choose(admission, price_job(JobHistory(failures=100), name_hosts(4096)))
    assert choice.action is RecoveryAction.JOIN
    assert "the next loss may be that of the state" in choice.options[1].describe()


def play_wait(loss: Loss, prices: Prices, num_awaited: int) -> float:
    """Return the work until the next failure if the first hosts are waited for: moment by moment, no phases."""
    usual = max(prices.seconds[TimedChange.REFORM], 0.0)
    join_s = prices.seconds[TimedChange.GROW if loss.can_join_in_place else TimedChange.REFORM_COLD]
    moments = 20_000
    step_s = prices.next_failure_s / moments
    waits_s = loss.awaited[num_awaited - 1].return_s if num_awaited else 0.0
    busy_until_s = waits_s + (max(join_s, prices.seconds[TimedChange.REFORM_COLD]) if num_awaited else usual)
    hosts = loss.ready + sum(one.share for one in loss.awaited[:num_awaited])
    work, left = 0.0, list(loss.awaited[num_awaited:])
    for moment in range(moments):
        now_s = (moment + 0.5) * step_s
        if now_s < busy_until_s:
            continue
        if left and left[0].return_s <= now_s:
            hosts, busy_until_s = hosts + left.pop(0).share, now_s + join_s
            continue
        work += hosts / loss.places * step_s
    return work


@given(
    returns=st.lists(
        st.builds(ExpectedReturn, st.sampled_from((2.0, 5.0, 20.0, 70.0)), SHARES),
        min_size=1,
        max_size=3,
        unique_by=lambda one: one.return_s,
    ),
    reform_s=st.floats(1.0, 40.0),
    horizon_s=st.floats(300.0, 3000.0),
    places=st.integers(5, 32),
)
def test_the_hosts_that_are_waited_for_are_those_of_the_best_wait(returns, reform_s, horizon_s, places):
    """Brute force over how many of the hosts that are expected back are waited for."""
    loss = Loss(
        places=places,
        ready=places - len(returns),
        awaited=tuple(sorted(returns)),
        new_world_because=WHY,
        can_join_in_place=False,
    )
    seconds = {**PRIOR_S, TimedChange.REFORM: reform_s, TimedChange.REFORM_COLD: 1.5 * reform_s}
    prices = Prices(seconds=seconds, next_failure_s=horizon_s)
    choice = choose(loss, prices)
    works = [play_wait(loss, prices, number) for number in range(len(returns) + 1)]
    chosen = works[len(choice.awaited)]
    # What is lost by the best, and the margin of the choice.
    lost_s = horizon_s - max(works)
    assert max(works) - chosen <= max(HYSTERESIS * (horizon_s - chosen), MIN_SAVED_S) + 0.01 * horizon_s, (
        lost_s
    )


def test_a_flapping_host_is_admitted_later_than_a_sound_one_and_again_once_it_has_been_quiet():
    admission = Admission(places=2048, training=2047, joining=1, new_world_because=WHY)
    history = JobHistory(observed_s=200 * HOUR_S)
    hosts = name_hosts(2048, "flapping", "sound")
    history = lose(history, "sound")
    for _ in range(6):
        history = lose(msgspec.structs.replace(history, observed_s=history.observed_s + 600.0), "flapping")
    sound = choose(admission, price_job(history, hosts - names("flapping"), names("sound")))
    flapping = choose(admission, price_job(history, hosts - names("sound"), names("flapping")))
    assert (sound.action, flapping.action) == (RecoveryAction.JOIN, RecoveryAction.POSTPONE)
    # A leader looks again each minute: it changes its mind once.
    actions, before = [], flapping.action
    for minute in range(0, 24 * 60, 10):
        later = msgspec.structs.replace(history, observed_s=history.observed_s + 60.0 * minute)
        prices = price_job(later, hosts - names("sound"), names("flapping"))
        before = choose(dataclasses.replace(admission, before=before), prices).action
        actions.append(before)
    assert actions[0] is RecoveryAction.POSTPONE
    assert actions[-1] is RecoveryAction.JOIN
    assert actions == sorted(actions, key=lambda action: action is RecoveryAction.JOIN)


def test_a_host_that_is_preempted_all_the_time_is_admitted_later_though_it_never_fails():
    admission = Admission(places=4096, training=4095, joining=1)
    history = JobHistory(observed_s=HOUR_S)
    for _ in range(20):
        history = lose(
            msgspec.structs.replace(history, observed_s=history.observed_s + 60.0),
            "spot",
            cause=LossCause.NOTICE,
        )
    hosts = name_hosts(4096, "spot", "sound")
    spot = choose(admission, price_job(history, hosts - names("sound"), names("spot")))
    sound = choose(admission, price_job(history, hosts - names("spot"), names("sound")))
    assert (spot.action, sound.action) == (RecoveryAction.POSTPONE, RecoveryAction.JOIN)
    assert spot.next_failure_s == pytest.approx(sound.next_failure_s)
