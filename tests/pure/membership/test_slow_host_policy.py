"""The choice about a slow host is the best one, and noise moves nothing: beyond the scenarios in `slowness.txt`."""

import dataclasses
import itertools
import random

import msgspec

from resilient_jax.ids import GenerationNumber, HostName
from resilient_jax.policy.choice import HYSTERESIS, MIN_SAVED_S, choose
from resilient_jax.policy.prices import PRIOR_S, Prices
from resilient_jax.policy.situations import SlowTraining
from resilient_jax.policy.slow_host_options import MIN_SPEED_GAIN, count_standby_devices
from resilient_jax.protocol.generation import GenerationPhase
from resilient_jax.protocol.record_parts import change_fields
from resilient_jax.protocol.recovery_records import RecoveryAction, TimedChange
from resilient_jax.protocol.slow_hosts import Slowdown, SlowHost, SlownessRecord
from tests.support.membership_job import Job, stop_at_boundary, training

HOUR_S = 3600.0


C = HostName("c")


def tell(job: Job, *hosts: str, kind: str = "compute", since: int = 40, **speeds) -> None:
    """Have the first worker report that hosts are slow, and what that costs; the first of them is the slowest."""
    found = tuple(
        SlowHost(host=HostName(name), kind=kind, factor=3.0, since_step=since + 5 * place)
        for place, name in enumerate(hosts)
    )
    slowest = HostName(hosts[0]) if hosts else HostName("")
    number = job.generation.number
    slowdown = Slowdown(generation=number, host=slowest, **speeds) if speeds else None
    job.report("a", slow_hosts=found, slowdown=slowdown)


def with_spare(**config) -> Job:
    """Return a job of three that trains, beside a spare which is ready in a seat."""
    job = training("a", "b", "c", spare_seats=4, **config)
    job.spare("d")
    return job


def go_on(job: Job, step: int) -> None:
    """Have a planned change carried out, and all members train in its generation."""
    stop_at_boundary(job, step)
    if job.phase is GenerationPhase.BOUNDARY:  # which is a re-form
        job.serve()
    job.form()
    job.train(step + 1)
    assert job.phase is GenerationPhase.ACTIVE


def test_a_host_is_compared_with_the_last_hosts_that_were_taken_out():
    job = with_spare()
    reports = tuple(
        SlowHost(host=HostName(f"h{i}"), kind="link", factor=2.0, since_step=0) for i in range(16)
    )
    slowness = SlownessRecord(taken_out_as=reports)
    generation = change_fields(job.generation, slowness=slowness)
    job.state = dataclasses.replace(job.state, generation=generation)
    tell(job, "c", kept=0.8, replaced=1.0, without=0.7)
    kept = [one.host for one in job.generation.record.slowness.taken_out_as]
    assert kept == [*(f"h{i}" for i in range(1, 16)), "c"]


def test_standby_devices_count_only_where_they_are_enough_for_all_slow_ones():
    down = Slowdown(
        generation=GenerationNumber(1),
        kept=0.5,
        host=C,
        replaced=1.0,
        devices=(3,),
        slow_devices=(2, 3),
        fewer_devices=0.6,
    )
    assert count_standby_devices(down, 1) == down
    enough = count_standby_devices(down, 2)
    assert (enough.devices, enough.fewer_devices) == ((2, 3), 1.0)
    none_slow = msgspec.structs.replace(down, devices=(), slow_devices=())
    assert count_standby_devices(none_slow, 2) == none_slow


ACTIONS = (
    RecoveryAction.KEEP,
    RecoveryAction.REPLACE,
    RecoveryAction.TAKE_OUT,
    RecoveryAction.FEWER_DEVICES,
    RecoveryAction.REDIVIDE,
)


def play(action: RecoveryAction, training: SlowTraining, prices: Prices) -> float:
    """Return how many hosts' seconds of work are done until the next failure, second by second in thousandths."""
    pauses: dict[RecoveryAction, TimedChange | None] = {
        RecoveryAction.KEEP: None,
        RecoveryAction.REPLACE: TimedChange.GROW,
        RecoveryAction.TAKE_OUT: TimedChange.SHRINK,
        RecoveryAction.FEWER_DEVICES: TimedChange.SHRINK,
        RecoveryAction.REDIVIDE: TimedChange.REDIVIDE,
    }
    down = training.slowdown
    speeds = (down.kept, down.replaced, down.without, down.fewer_devices, down.redivided)
    speed = speeds[ACTIONS.index(action)]
    change = pauses[action]
    pause_s = prices.seconds[change] if change is not None else 0.0
    trains_s = max(prices.next_failure_s - pause_s, 0.0)
    if action is not RecoveryAction.FEWER_DEVICES:
        return trains_s * speed * training.training
    # The others train until the worker is back, and then all wait until it has joined.
    meanwhile_s = min(trains_s, max(prices.seconds[TimedChange.RETURN] - pause_s, 0.0))
    rest_s = max(trains_s - meanwhile_s - prices.seconds[TimedChange.GROW], 0.0)
    return (meanwhile_s * down.without + rest_s * speed) * training.training


def list_possible(training: SlowTraining) -> list[RecoveryAction]:
    down = training.slowdown
    enough = down.kept * (1 + MIN_SPEED_GAIN)
    found = [RecoveryAction.KEEP]
    if training.has_spare and down.replaced >= enough:
        found.append(RecoveryAction.REPLACE)
    if not training.has_spare and down.without and down.without >= enough:
        found.append(RecoveryAction.TAKE_OUT)
    if down.devices and down.fewer_devices and down.fewer_devices >= enough:
        found.append(RecoveryAction.FEWER_DEVICES)
    if down.redivided and down.redivided >= enough:
        found.append(RecoveryAction.REDIVIDE)
    return found


def test_the_choice_is_the_best_of_all_possible_ones_but_for_the_hysteresis():
    chance = random.Random(4)
    chosen = set()
    for has_spare, _ in itertools.product((False, True), range(1500)):
        training = SlowTraining(
            places=4,
            training=4,
            has_spare=has_spare,
            slowdown=Slowdown(
                generation=GenerationNumber(2),
                host=C,
                kept=chance.uniform(0.2, 1.0),
                replaced=1.0,
                without=chance.choice((0.0, 0.75, chance.uniform(0.2, 0.8))),
                redivided=chance.choice((0.0, chance.uniform(0.2, 1.0))),
                devices=chance.choice(((), (1,))),
                fewer_devices=chance.choice((0.0, chance.uniform(0.2, 1.0))),
            ),
        )
        prices = Prices(
            seconds={change: chance.uniform(0.1, 20.0) for change in PRIOR_S},
            next_failure_s=chance.choice((15.0, 60.0, HOUR_S, 100 * HOUR_S)),
        )
        choice = choose(training, prices)
        assert {o.action for o in choice.options if not o.why_not} == set(list_possible(training))
        works = {action: play(action, training, prices) for action in list_possible(training)}
        best = max(works, key=lambda action: works[action])
        whole = prices.next_failure_s * training.training
        saved_s = (works[best] - works[RecoveryAction.KEEP]) / training.training
        lost_s = (whole - works[RecoveryAction.KEEP]) / training.training
        pays = saved_s > max(HYSTERESIS * lost_s, MIN_SAVED_S)
        assert choice.action is (best if pays else RecoveryAction.KEEP), choice.reason
        chosen.add(choice.action)
    assert chosen == set(ACTIONS)


def test_noise_of_what_is_reported_moves_nothing_to_and_fro():
    chance = random.Random(8)
    for usual in (0.82, 0.85, 0.88, 0.91):
        job = training("a", "b", "c", "d", spare_seats=4)
        for _ in range(50):
            even, by_speed = (share + chance.gauss(0, 0.005) for share in (usual, 0.87))
            if job.generation.record.slowness.speeds:
                speeds = {"kept": by_speed, "redivided": even, "speeds": ()}
            else:
                speeds = {"kept": even, "redivided": by_speed, "speeds": ((C, 0.5),)}
            tell(job, "c", replaced=1.0, without=0.75, **speeds)
            job.pass_time(10.0)
            if job.phase is not GenerationPhase.ACTIVE:
                go_on(job, job.generation.state.step + 9)
        assert job.generation.number == (2 if usual == 0.82 else 1), job.generation.reason
