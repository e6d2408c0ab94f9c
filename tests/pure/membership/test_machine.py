"""The membership machine commands what its rules decide, applied after every event; and an event costs little.

`CheckedMachine` compares both after each event. Here the events are random: sensible answers of hosts in any order,
among changes of any part of a status, whether a host could report it or not.
"""

import random

import msgspec
import pytest
from hypothesis import event, example, given
from hypothesis import strategies as st

from resilient_jax.ids import GenerationNumber, HostName, Incarnation
from resilient_jax.membership import machine
from resilient_jax.membership.machine import HostLeft, MembershipMachine, Tick
from resilient_jax.membership.state_loss import StateLossPolicy
from resilient_jax.protocol.generation import GenerationPhase, SeatId
from resilient_jax.protocol.host_status import StandbyState, StandbyStatus, WorkerStatus
from resilient_jax.protocol.slow_hosts import Slowdown, SlowHost
from resilient_jax.protocol.snapshots import SnapshotPhase
from resilient_jax.protocol.worker_report import WorkerFailure, WorkerFailureKind, WorkerReport, WorkerState
from tests.support.membership_job import Job, keep, server, sharded, snapshot, training

NAMES = "abcde"
WAITS_S = (0.0, 0.0, 0.1, 1.0, 4.0, 6.0, 11.0, 25.0)


def start(chance: random.Random) -> Job:
    """Return a job of any kind that trains."""
    config = {
        "start_timeout_s": 30.0,
        "regroup_grace_s": 5.0,
        "compile_timeout_s": 20.0,
        "forming_timeout_s": 12.0,
        "spare_seats": chance.choice((0, 0, 2, 4)),
        "replaces_workers": chance.random() < 0.3,
        "min_hosts": chance.choice((1, 1, 2)),
        "max_collective_retries": chance.choice((0, 1, 3)),
        "state_loss_policy": chance.choice(list(StateLossPolicy)),
    }
    if chance.random() < 0.2:
        return Job(*NAMES, **config)
    if chance.random() < 0.5:
        return training(*NAMES, step=3, **config)
    return sharded(NAMES, step=3, parity=chance.choice((1, 2)), **config)


def answer(job: Job, name: str) -> None:
    """Have a host do what the generation asks for, or one of the next things that it may."""
    generation = job.generation
    is_member = name in job.members
    match generation.phase:
        case GenerationPhase.QUIESCE:
            job.report(name, state=WorkerState.IDLE, generation=generation.number, has_formed=False)
        case GenerationPhase.PAUSE:
            step = job.worker_of(name).report.held.step + 1
            job.report(name, generation=generation.number, earliest_stop_step=step)
        case GenerationPhase.BOUNDARY:
            job.report(
                name, state=WorkerState.IDLE, step=generation.planned.boundary_step or 0, has_formed=False
            )
        case GenerationPhase.FORM if is_member:
            job.form(name)
        case GenerationPhase.ACTIVE if is_member:
            report = job.worker_of(name).report
            holds = not any(job.status(other).snapshots for other in NAMES)
            job.report(name, step=report.held.step + 1, has_finished_step=True, holds_state=holds)
        case _:
            pass
    if job.asked and not is_member:
        job.serve(name)


def report_slow(number: GenerationNumber, chance: random.Random) -> dict:
    """Return what a first worker may report of slow hosts, one of which need not be a member."""
    slowest = HostName(chance.choice(NAMES))
    slow = SlowHost(host=slowest, kind="compute", factor=2.0, since_step=100 * number)
    slowdown = Slowdown(
        generation=number,
        host=chance.choice((slowest, HostName(""))),
        kept=chance.uniform(0.3, 1.0),
        replaced=1.0,
        without=chance.choice((0.0, 0.8)),
        redivided=chance.choice((0.0, 0.7)),
        speeds=chance.choice(((), ((slowest, 0.5),))),
        devices=chance.choice(((), (1,))),
        slow_devices=(1,),
        fewer_devices=chance.choice((0.0, 0.9)),
    )
    return chance.choice(
        ({"slow_hosts": (slow,), "slowdown": slowdown}, {"slow_hosts": (slow,)}, {"slowdown": None})
    )


def report_anything(job: Job, name: str, chance: random.Random) -> None:
    """Change any part of a worker's report."""
    generation = job.generation
    near = GenerationNumber(max(0, generation.number + chance.choice((-1, 0, 0, 0, 1))))
    failure = WorkerFailure(kind=chance.choice(list(WorkerFailureKind)), text="failed")
    changes = [
        {"state": chance.choice(list(WorkerState))},
        {"generation": near},
        {"world": chance.choice((None, generation.membership.world))},
        {
            "seat": SeatId(
                generation.membership.world, type(generation.membership.next_seat)(chance.randrange(8))
            )
        },
        {"step": chance.randrange(8)},
        {"holds_state": chance.random() < 0.5},
        {"snapshot": snapshot(chance.randrange(3, 6), NAMES).id},
        {"snapshot": None},
        {"copied": snapshot(chance.randrange(3, 8), NAMES).id},
        {"copied": None},
        {"checkpoint_step": chance.choice((None, 2))},
        {"is_polling_checkpoints": chance.random() < 0.5},
        {"earliest_stop_step": chance.choice((None, 4, 5))},
        {"has_formed": chance.random() < 0.5},
        {"has_finished_step": chance.random() < 0.5},
        {"is_compiling": chance.random() < 0.5},
        {"is_done": chance.random() < 0.2},
        {"failure": failure if chance.random() < 0.2 else None},
        {"trusted_step": chance.randrange(6) if chance.random() < 0.2 else None},
        report_slow(near, chance),
    ]
    job.report(name, **chance.choice(changes))


def change_anything(job: Job, name: str, chance: random.Random) -> None:
    """Change any part of a host's status, or end its lease."""
    worker = job.status(name).worker
    incarnation = Incarnation(worker.incarnation + 1 if worker is not None else 1)
    fresh = WorkerStatus(
        incarnation=incarnation, pid=2, report=WorkerReport(state=chance.choice(list(WorkerState)))
    )
    kept = [
        msgspec.structs.replace(snapshot(step, NAMES, generation=step // 3), phase=phase)
        for step in range(3, 7)
        for phase in SnapshotPhase
    ]
    actions = [
        lambda: job.give(HostLeft(HostName(name))),
        lambda: job.worker(name, exit_code=chance.choice((-9, -9, -9, 0, 1))),
        lambda: job.worker(name, is_unresponsive=chance.random() < 0.5),
        lambda: job.worker(name, is_dying=chance.random() < 0.5),
        lambda: job.change(name, worker=fresh),
        lambda: job.restart(name, incarnation),
        lambda: job.change(name, is_draining=chance.random() < 0.3),
        lambda: job.change(name, is_spare=chance.random() < 0.3),
        lambda: job.change(name, step=(step := chance.randrange(9)), num_standby=step % 3),
        lambda: job.change(name, num_devices=4, num_used=chance.randrange(4)),
        lambda: job.change(name, services=()),
        lambda: job.change(name, snapshot_server=chance.choice((None, server(name)))),
        lambda: keep(job, name, *chance.sample(kept, chance.randrange(3))),
        lambda: job.change(
            name, standby=StandbyStatus(state=StandbyState.READY, pid=3, worker=chance.choice((None, fresh)))
        ),
    ]
    chance.choice(actions)()


@given(seed=st.integers(0, 2**32))
@example(seed=88607524)  # a host taken out was quarantined again and again
def test_any_order_of_events_gives_the_commands_of_the_rules(seed):
    chance = random.Random(seed)
    job = start(chance)
    for _ in range(150):
        name = chance.choice(NAMES)
        kind = chance.random()
        if job.status(name).worker is None or HostName(name) not in job.state.hosts:
            job.restart(name, chance.randrange(1, 9))
        elif kind < 0.72:
            answer(job, name)
        elif kind < 0.84:
            job.now_s += chance.choice(WAITS_S)
            job.give(Tick())
        elif kind < 0.92:
            report_anything(job, name, chance)
        else:
            change_anything(job, name, chance)
        if job.phase is GenerationPhase.FINISHED:
            break
    for phase in {generation.phase for generation in job.published}:
        event(f"{phase}")


def test_a_snapshot_is_released_by_the_first_report_of_a_newer_one():
    job = sharded("abcd")
    job.worker("b", exit_code=-9)
    job.acknowledge("a", "c", "d", step=5)
    job.form()
    for name in "acd":
        job.report(name, has_finished_step=True, step=6)
    assert job.generation.state.snapshot is not None, "b's server has a part of it, and b does not train"
    newer = snapshot(6, "acd", generation=job.generation.number)
    keep(job, "acd", newer)
    assert job.generation.state.snapshot is not None
    before = job.generation.record.losses_left
    keep(job, "a", msgspec.structs.replace(newer, phase=SnapshotPhase.COMMITTED))
    assert job.generation.state.snapshot is None
    assert job.generation.record.losses_left == before, "nothing else was to be recorded"


def count_applications(num_hosts: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """Return how often the rules are applied from the start of a job that loses a host to its end."""
    count = 0
    apply = machine.decide

    def decide(*args):
        nonlocal count
        count += 1
        return apply(*args)

    with monkeypatch.context() as patch:
        patch.setattr(machine, "decide", decide)
        patch.setattr("tests.support.membership_job.CheckedMachine", MembershipMachine)
        names = [f"host-{index}" for index in range(num_hosts)]
        job = training(*names, step=1)
        kept = snapshot(1, "x")
        kept = msgspec.structs.replace(
            kept, group=msgspec.structs.replace(kept.group, hosts=tuple(map(HostName, names)))
        )
        for name in names:
            job.change(
                name, snapshot_server=server(name), standby=StandbyStatus(state=StandbyState.READY, pid=3)
            )
        for step in (2, 3):
            for name in names:
                newer = msgspec.structs.replace(kept, id=msgspec.structs.replace(kept.id, step=step))
                job.change(name, snapshots=(newer,), step=step)
        job.give(HostLeft(HostName(names[1])))
        job.acknowledge(*(name for name in names if name != names[1]), step=5)
        assert job.phase is GenerationPhase.FORM
        job.form()
        job.train(6)
        for name in job.members:
            job.report(name, is_done=True)
        assert job.phase is GenerationPhase.FINISHED
        assert len(job.members) == num_hosts - 1
    return count


def test_how_often_the_rules_are_applied_does_not_grow_with_the_number_of_hosts(monkeypatch):
    assert count_applications(48, monkeypatch) == count_applications(12, monkeypatch) < 20
