"""The leader and standbys in seats: it gives them their seats, and forms generations with those that took over."""

import msgspec
from membership_job import Job, sharded, training

from resilient_jax.ids import HostName, Incarnation
from resilient_jax.protocol.records import (
    GenerationPhase,
    Member,
    SeatId,
    StandbyState,
    StandbyStatus,
    WorkerFailure,
    WorkerFailureKind,
    WorkerReport,
    WorkerState,
    WorkerStatus,
    WorldChange,
)

INCARNATION = Incarnation(9)


def stand_by(job: Job, name: str, **report) -> None:
    """Have the agent of a host report its standby."""
    status = WorkerStatus(
        incarnation=INCARNATION, pid=9, report=WorkerReport(**{"state": WorkerState.IDLE, **report})
    )
    job.change(name, standby=StandbyStatus(state=StandbyState.STARTING, pid=9, worker=status))


def find_seat(job: Job, name: str) -> SeatId | None:
    newcomer = job.generation.find_newcomer(HostName(name), INCARNATION)
    return SeatId(job.generation.world, newcomer.seat) if newcomer is not None else None


def take_seats(job: Job, names: str) -> None:
    """Have these hosts' standbys take the seats that they were given."""
    for name in names:
        stand_by(job, name)
    for name in names:
        seat = find_seat(job, name)
        assert seat is not None
        stand_by(job, name, seat=seat, world=seat.world)


def take_over(job: Job, name: str) -> None:
    """Have the agent of a host report the death of its worker, and the standby that is the worker now."""
    standby = job.status(name).standby
    assert standby is not None
    job.change(name, worker=standby.worker, standby=None)


def list_seats(members: tuple[Member, ...]) -> list[tuple[str, int]]:
    return [(m.host, m.seat) for m in members]


def test_the_standbys_of_members_get_seats_while_all_train():
    job = training("a", "b", spare_seats=4)
    stand_by(job, "b", state=WorkerState.STARTING)
    assert job.generation.newcomers == ()
    take_seats(job, "ab")
    job.wait(100.0)
    assert (job.phase, job.members) == (GenerationPhase.ACTIVE, ["a", "b"])
    assert list_seats(job.generation.newcomers) == [("a", 2), ("b", 3)]


def test_standbys_share_the_seats_that_are_left_after_those_who_return():
    job = training("a", "b", "c", spare_seats=2)
    job.report("d", state=WorkerState.IDLE)
    for name in "abc":
        stand_by(job, name)
    assert list_seats(job.generation.newcomers) == [("d", 3), ("a", 4)]


def test_after_a_death_the_next_world_has_the_standby_in_place_of_the_dead():
    for names in ("abc", "ab"):  # one survivor is enough
        job = training(*names, spare_seats=8)
        take_seats(job, names)
        asked = len(job.asked)
        take_over(job, "b")
        assert (job.phase, job.members) == (GenerationPhase.QUIESCE, [name for name in names if name != "b"])
        job.acknowledge(*job.members, step=5, holds_state=True)
        new = job.generation
        assert (new.phase, new.change, new.world) == (GenerationPhase.FORM, WorldChange.GROW, 1)
        assert sorted(job.members) == list(names)
        assert new.receivers == ("b",)
        assert len(job.asked) == asked, "no other coordination service"
        # The others' standbys keep their seats.
        assert {m.host for m in new.newcomers} == set(names) - {"b"}


def test_a_failure_that_comes_to_light_before_its_death_changes_nothing():
    job = training("a", "b", "c", spare_seats=8)
    take_seats(job, "abc")
    failure = WorkerFailure(kind=WorkerFailureKind.COLLECTIVE, text="reset")
    job.report("a", state=WorkerState.IDLE, failure=failure)
    job.acknowledge("a", "c", step=5, holds_state=True)
    assert (job.phase, job.members) == (GenerationPhase.QUIESCE, list("abc"))
    take_over(job, "b")
    job.acknowledge("a", "c", step=5, holds_state=True)
    assert (job.phase, job.generation.change) == (GenerationPhase.FORM, WorldChange.GROW)
    assert sorted(job.members) == list("abc")


def test_a_standby_that_is_not_ready_is_not_waited_for():
    job = training("a", "b", "c", spare_seats=8)
    stand_by(job, "b")
    seat = find_seat(job, "b")
    assert seat is not None
    stand_by(job, "b", state=WorkerState.PREPARING, seat=seat)
    take_over(job, "b")
    job.acknowledge("a", "c", step=5, holds_state=True)
    assert (job.generation.change, job.members) == (WorldChange.SHRINK, ["a", "c"])
    assert list_seats(job.generation.newcomers) == [("b", seat.seat)], "it may still join in its seat"


def test_where_the_seats_are_used_up_a_standby_takes_over_by_a_reform_with_new_ones():
    job = training("a", "b", "c", spare_seats=0)
    stand_by(job, "b")
    assert find_seat(job, "b") is None
    take_over(job, "b")
    job.acknowledge("a", "c", step=5, holds_state=True)
    job.serve()
    assert (job.generation.change, sorted(job.members)) == (WorldChange.REFORM, list("abc"))


def test_a_reform_takes_the_seats_and_gives_others():
    job = training("a", "b", "c", spare_seats=8)
    take_seats(job, "a")
    job.change("a", services=())
    assert job.phase is GenerationPhase.PAUSE
    for name in job.members:
        job.report(name, generation=job.generation.number, earliest_stop_step=6)
    for name in job.members:
        job.report(name, state=WorkerState.IDLE, step=6, earliest_stop_step=6, has_formed=False)
    job.serve()
    assert (job.generation.change, job.generation.newcomers) == (WorldChange.REFORM, ())
    job.form()
    job.train(7)
    assert find_seat(job, "a") == SeatId(job.generation.world, job.generation.newcomers[0].seat)


def test_where_all_are_replaced_the_standbys_go_on_in_the_same_world():
    job = sharded("abcd", replaces_workers=True, spare_seats=8)
    take_seats(job, "abcd")
    asked = len(job.asked)
    for name in "bacd":
        take_over(job, name)
    new = job.generation
    assert (new.phase, new.change, new.world) == (GenerationPhase.FORM, WorldChange.GROW, 1)
    assert list_seats(new.members) == [("a", 4), ("b", 5), ("c", 6), ("d", 7)]
    assert new.snapshot is not None
    assert len(job.asked) == asked


def test_standbys_go_on_without_a_host_that_starts_a_worker_but_wait_for_workers_to_be_replaced():
    job = sharded("abcd", replaces_workers=True, spare_seats=8, parity=2)
    take_seats(job, "abc")
    take_over(job, "a")
    take_over(job, "b")
    job.report("c", state=WorkerState.IDLE)  # it left its collective before it is replaced
    assert job.phase is GenerationPhase.QUIESCE
    job.worker("d", exit_code=-9)
    assert job.phase is GenerationPhase.QUIESCE
    take_over(job, "c")
    assert (job.generation.change, sorted(job.members)) == (WorldChange.GROW, list("abc"))


def test_where_all_died_hosts_without_a_seat_are_not_left_out():
    job = sharded("abcd", spare_seats=8, num_hosts=4, parity=2)
    take_seats(job, "ab")
    for name in "cd":
        job.worker(name, exit_code=-9)
    for name in "ab":
        take_over(job, name)
    assert job.phase is GenerationPhase.QUIESCE
    for name in "cd":
        job.restart(name)
    job.serve()
    assert (job.generation.change, job.members) == (WorldChange.REFORM, list("abcd"))


def test_the_standby_of_a_host_that_lost_its_worker_gets_no_seat():
    job = training("a", "b", "c", spare_seats=8)
    job.worker("b", exit_code=-9)
    job.acknowledge("a", "c", step=5, holds_state=True)
    job.form()
    stand_by(job, "b")
    job.train(6)
    assert find_seat(job, "b") is None


def test_a_standby_that_died_leaves_its_seat_unused():
    job = training("a", "b", "c", spare_seats=8)
    take_seats(job, "b")
    standby = job.status("b").standby
    assert standby is not None
    assert standby.worker is not None
    dead = msgspec.structs.replace(standby.worker, is_dying=True)
    job.change("b", standby=msgspec.structs.replace(standby, worker=dead))
    job.worker("c", exit_code=-9)
    job.acknowledge("a", "b", step=5, holds_state=True)
    assert (job.generation.change, job.generation.newcomers) == (WorldChange.SHRINK, ())
