"""Members meet before their first collective, and a member that is given up in the meeting is waited for no more."""

import signal
from collections.abc import Iterator

import pytest

from tests.process.jax_runtime.jax_processes import Pool, Worker, everyone, interrupt, strike
from tests.support.full_only import full_but
from tests.support.patience import patience

SEATS = 3
ALL = [0, 1, 2]
QUIET_S = 0.3
"""A meeting takes 1 to 4 ms: one that has not ended after this time waits."""
WAIT_S = patience(1)
"""Until those that wait are released: some milliseconds."""
FAULTS = pytest.mark.parametrize(
    "fault", full_but([signal.SIGKILL, signal.SIGSTOP], lambda fault: fault == signal.SIGSTOP)
)


@pytest.fixture(scope="module")
def shared_pool() -> Iterator[Pool]:
    found = Pool()
    yield found
    found.close()


@pytest.fixture
def world(shared_pool: Pool) -> Iterator[tuple[Pool, list[Worker]]]:
    """Three processes that are registered with a new service, and have met."""
    workers = shared_pool.take(SEATS)
    address = shared_pool.serve(SEATS)
    for seat, worker in enumerate(workers):
        worker.tell("register", address=address, seat=seat, seats=SEATS)
    for worker in workers:
        assert "error" not in (found := worker.answer()), found
    assert [found["waiting"] for found in everyone(workers, "meet_members", members=ALL)] == [0] * SEATS
    shared_pool.address = address
    yield shared_pool, workers
    shared_pool.drop_all()
    shared_pool.end_services()


@FAULTS
def test_a_member_that_is_given_up_in_the_meeting_is_waited_for_no_more_and_its_seat_is_free(
    world: tuple[Pool, list[Worker]], fault: signal.Signals
) -> None:
    pool, (a, b, victim) = world
    strike(pool, victim, fault)
    for worker in (a, b):
        worker.tell("meet_members", members=ALL)
    with pytest.raises(TimeoutError):  # neither its death nor its stop says anything to the service
        a.answer(QUIET_S)
    word, seat, seconds = pool.newest_service.lose(2).split()
    assert (word, seat) == ("lost", "2")
    assert float(seconds) >= 0
    for worker in (a, b):
        found = worker.answer(WAIT_S)
        assert (found["error"], found["collective"]) == ("FormingFailed", True), found
        assert "seats [2] are gone" in found["text"]
    assert [found["waiting"] for found in everyone([a, b], "meet_members", members=[0, 1])] == [0, 0]
    newcomer = pool.start()
    newcomer.tell("register", address=pool.address, seat=2, seats=SEATS)
    assert "error" not in (found := newcomer.answer()), found
    # While the one that was stopped is there still, as until its agent kills it.
    assert [found["waiting"] for found in everyone([a, b, newcomer], "meet_members", members=ALL)] == [0] * 3
    if fault == signal.SIGSTOP:
        victim.process.send_signal(signal.SIGCONT)  # a zombie that wakes up disturbs nobody
        everyone([victim], "count_clients")
        found = everyone([a, b, newcomer], "meet_members", members=ALL)
        assert [answer["waiting"] for answer in found] == [0] * 3


def test_a_meeting_is_interrupted_and_its_thread_ends_when_the_process_leaves(
    world: tuple[Pool, list[Worker]],
) -> None:
    _, (a, b, _) = world
    a.tell("meet_members", members=ALL)
    with pytest.raises(TimeoutError):
        a.answer(QUIET_S)
    (found,) = interrupt([a])
    assert found["error"] == "FormingInterrupted", found
    assert [found["waiting"] for found in everyone([a, b], "meet_members", members=[0, 1])] == [1, 0]
    (found,) = everyone([a], "end_waiting_threads")
    assert found["waiting"] == 0
    (found,) = everyone([a], "count_clients")
    assert found["clients"] == 0, "a thread keeps the client of a world that was left"


def test_a_meeting_to_which_a_member_does_not_come_fails_at_its_timeout(
    world: tuple[Pool, list[Worker]],
) -> None:
    _, (a, _, _) = world
    (found,) = everyone([a], "meet_members", members=ALL, timeout_s=0.2)
    assert (found["error"], found["collective"]) == ("FormingFailed", True)
    assert "within 0.2 s" in found["text"]


def test_an_order_that_names_no_seat_of_the_world_is_refused(world: tuple[Pool, list[Worker]]) -> None:
    pool, workers = world
    assert "expected lost <seat> with a seat below 3" in pool.newest_service.lose(3)
    assert [found["waiting"] for found in everyone(workers, "meet_members", members=ALL)] == [0] * SEATS
