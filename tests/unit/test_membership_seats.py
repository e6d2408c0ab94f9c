"""Workers that join while others train: by a seat of the same world, else by a re-form."""

import msgspec
from membership_job import Job, stop_at_boundary, training

from resilient_jax.ids import WorldId
from resilient_jax.membership.world_formation import StartCoordinationService
from resilient_jax.protocol.records import GenerationPhase, Member, WorkerState, WorldChange


def seats_of(members: tuple[Member, ...]) -> list[tuple[str, int]]:
    return [(m.host, m.seat) for m in members]


def lose_and_restart(job: Job, name: str) -> None:
    """Kill a worker; the others shrink and train, and a new worker is idle."""
    job.worker(name, exit_code=-9)
    job.acknowledge(*job.members, step=5, holds_state=True)
    job.form()
    job.train(6)
    job.now_s += 5.0  # a worker needs some time to start
    job.restart(name)


def test_a_worker_is_given_a_seat_and_the_others_train_until_it_has_taken_it():
    job = training("a", "b", "c", spare_seats=4)
    assert (job.generation.num_seats, job.generation.next_seat) == (7, 3)
    lose_and_restart(job, "b")
    assert seats_of(job.generation.newcomers) == [("b", 3)]
    assert (job.phase, job.members, job.generation.next_seat) == (GenerationPhase.ACTIVE, ["a", "c"], 4)
    job.report("b", state=WorkerState.PREPARING, seat=job.find_seat("b"))
    job.wait(100.0)
    assert job.phase is GenerationPhase.ACTIVE, "no host waits for a worker that loads its programs"
    job.take_seat("b")
    assert (job.phase, job.generation.reason) == (GenerationPhase.PAUSE, "b asked to join")


def test_a_worker_with_a_seat_joins_in_place_and_fetches_the_state():
    job = training("a", "b", "c", spare_seats=4)
    asked = len(job.asked)
    lose_and_restart(job, "b")
    job.take_seat("b")
    stop_at_boundary(job, 8)
    new = job.generation
    assert (new.phase, new.change, new.world, new.step) == (GenerationPhase.FORM, WorldChange.GROW, 1, 8)
    assert seats_of(new.members) == [("a", 0), ("c", 2), ("b", 3)]
    assert (new.receivers, new.newcomers) == (("b",), ())
    assert len(job.asked) == asked, "no other coordination service"


def test_a_host_that_was_never_there_joins_in_place_too():
    job = training("a", "b", spare_seats=1)
    job.report("c", state=WorkerState.IDLE)
    job.take_seat("c")
    stop_at_boundary(job, 7)
    assert (job.generation.change, job.members) == (WorldChange.GROW, ["a", "b", "c"])


def test_hosts_that_come_at_once_get_a_seat_each_also_if_their_workers_started_in_the_same_millisecond():
    job = training("a", "b", "c", "d", spare_seats=4)
    for name in "bd":
        job.worker(name, exit_code=-9)
    job.acknowledge("a", "c", step=5, holds_state=True)
    for name in "bd":
        job.restart(name, incarnation=2)
    job.form()
    job.train(6)
    assert sorted(seats_of(job.generation.newcomers)) == [("b", 4), ("d", 5)]


def test_a_worker_that_cannot_take_its_seat_joins_by_a_reform():
    job = training("a", "b", "c", spare_seats=4)
    lose_and_restart(job, "b")
    job.report("b", state=WorkerState.PREPARING, seat=job.find_seat("b"))
    job.report("b", state=WorkerState.IDLE, world=None)
    stop_at_boundary(job, 8)
    job.serve()
    assert (job.generation.change, job.members) == (WorldChange.REFORM, ["a", "b", "c"])
    assert (job.generation.num_seats, job.generation.next_seat) == (7, 3), "and the seats are there again"


def test_without_a_seat_left_all_form_a_new_world():
    job = training("a", "b", "c", spare_seats=1)
    lose_and_restart(job, "b")
    job.take_seat("b")
    stop_at_boundary(job, 8)
    job.form()
    job.train(9)
    job.worker("c", exit_code=-9)
    job.acknowledge(*job.members, step=9, holds_state=True)
    job.form()
    job.train(10)
    job.restart("c", incarnation=3)
    assert (job.phase, job.generation.reason) == (GenerationPhase.PAUSE, "c asked to join")
    stop_at_boundary(job, 11)
    assert job.asked[-1] == StartCoordinationService(WorldId(job.generation.number), 3, 4)


def test_the_others_shrink_in_place_without_a_worker_that_has_no_seat_yet():
    job = training("a", "b", "c", "d", spare_seats=4)
    lose_and_restart(job, "b")
    job.worker("c", exit_code=-9)
    job.acknowledge("a", "d", step=6, holds_state=True)
    new = job.generation
    assert (new.phase, new.change, job.members) == (GenerationPhase.FORM, WorldChange.SHRINK, ["a", "d"])
    assert seats_of(new.newcomers) == [("b", 4)], "it keeps the seat that it was given"


def test_a_worker_that_has_its_seat_joins_in_an_unplanned_change():
    job = training("a", "b", "c", "d", spare_seats=4)
    lose_and_restart(job, "b")
    job.take_seat("b")
    assert job.phase is GenerationPhase.PAUSE
    job.worker("c", exit_code=-9)
    job.acknowledge("a", "d", step=6, holds_state=True)
    assert (job.generation.change, job.members) == (WorldChange.GROW, ["a", "d", "b"])


def test_a_newcomer_that_dies_loses_its_seat_and_its_successor_gets_another():
    job = training("a", "b", "c", spare_seats=4)
    lose_and_restart(job, "b")
    job.worker("b", exit_code=-9)
    job.restart("b", incarnation=3)
    assert seats_of(job.generation.newcomers) == [("b", 4)]


def test_two_workers_left_out_of_too_few_hosts_are_waited_for():
    job = training("a", "b", "c", spare_seats=4, min_hosts=3)
    job.worker("b", exit_code=-9)
    job.restart("b")
    job.acknowledge("a", "c", step=5, holds_state=True)
    job.serve()
    assert (job.generation.change, job.members) == (WorldChange.REFORM, ["a", "b", "c"])


def test_a_generation_with_newcomers_is_written_and_read_again():
    job = training("a", "b", "c", spare_seats=4)
    lose_and_restart(job, "b")
    encoded = msgspec.msgpack.encode(job.generation)
    assert msgspec.msgpack.decode(encoded, type=type(job.generation)) == job.generation
