"""Replicas over several processes keep their cliques when a process of another replica dies: same world, same programs.

Four processes of two devices; programs over all of them, and over pairs.
"""

import signal
from collections.abc import Iterator

import pytest

from tests.process.jax_runtime.jax_processes import Pool, Worker, everyone, interrupt, strike, sum_to

SEATS = 12
PAIR_SUM = sum_to(4)


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    found = Pool()
    yield found
    found.close()


@pytest.fixture
def workers(pool: Pool) -> Iterator[list[Worker]]:
    """Four processes in one world, in whose first generation all have been in a program over all of them."""
    found = pool.take(4)
    pool.join(found, SEATS)
    assert everyone_adds_up(found) == [sum_to(8)] * 4
    yield list(found)
    pool.leave([worker for worker in found if worker.process.poll() is None])
    pool.end_services()


def everyone_adds_up(workers: list[Worker]) -> list[float]:
    found = everyone(workers, "reduce")
    assert all("total" in one for one in found), found
    return [one["total"] for one in found]


def pairs_add_up(workers: list[Worker], *pairs: tuple[int, int]) -> None:
    for pair in pairs:
        for place in pair:
            workers[place].tell("reduce_in_replica", seats=list(pair))
    for pair in pairs:
        for place in pair:
            found = workers[place].answer()
            assert found.get("total") == PAIR_SUM, (pair, place, found)


def begin(workers: list[Worker], members: list[int]) -> None:
    everyone([workers[member] for member in members], "end", is_intact=False)
    found = everyone([workers[member] for member in members], "begin", members=members)
    assert not any(one["broken"] for one in found), found


def test_a_death_in_a_program_of_all_leaves_the_pairs_of_others_as_they_are(
    pool: Pool, workers: list[Worker]
) -> None:
    pairs_add_up(workers, (0, 1), (2, 3))
    for member in (0, 1, 2):
        workers[member].tell("reduce")
    strike(pool, workers[3], signal.SIGKILL)
    for found in interrupt(workers[:3]):
        assert found["collective"], found
    begin(workers, [0, 1, 2])
    assert everyone_adds_up(workers[:3]) == [sum_to(6)] * 3
    pairs_add_up(workers, (0, 1))
    pairs_add_up(workers, (1, 2))


def test_a_pair_finishes_what_it_has_begun_while_a_process_of_another_pair_dies(
    pool: Pool, workers: list[Worker]
) -> None:
    pairs_add_up(workers, (0, 1), (2, 3))
    await_each_other(pool, workers)
    pairs_add_up(workers, (0, 1))


def test_a_pair_forms_its_clique_while_a_process_of_another_pair_dies(
    pool: Pool, workers: list[Worker]
) -> None:
    await_each_other(pool, workers)
    pairs_add_up(workers, (0, 1))


def await_each_other(pool: Pool, workers: list[Worker]) -> None:
    """Have process 0 wait for 1 in a program of the two, while 3 dies and 2, which waits for it, unwinds."""
    workers[0].tell("reduce_in_replica", seats=[0, 1])
    workers[2].tell("reduce_in_replica", seats=[2, 3])
    strike(pool, workers[3], signal.SIGKILL)
    workers[0].tell("interrupt")
    workers[2].tell("break_replica")  # what waits for a clique that is not complete yet is given up
    (found,) = interrupt([workers[2]])
    assert found["collective"], found
    workers[1].tell("reduce_in_replica", seats=[0, 1])
    for place in (0, 1):
        found = workers[place].answer()
        assert found.get("total") == PAIR_SUM, found
    begin(workers, [0, 1, 2])
    assert everyone_adds_up(workers[:3]) == [sum_to(6)] * 3


def test_a_process_whose_partner_dies_is_freed_and_goes_on_in_another_pair(
    pool: Pool, workers: list[Worker]
) -> None:
    pairs_add_up(workers, (0, 1), (2, 3))
    workers[0].tell("reduce_in_replica", seats=[0, 1])
    strike(pool, workers[1], signal.SIGKILL)
    (found,) = interrupt([workers[0]])
    assert found["collective"], found
    begin(workers, [0, 2, 3])
    assert everyone_adds_up([workers[0], *workers[2:]]) == [sum_to(6)] * 3
    pairs_add_up(workers, (2, 3))
    pairs_add_up(workers, (0, 2))


def test_a_process_whose_partner_is_stopped_is_freed_once_the_pair_is_given_up(
    pool: Pool, workers: list[Worker]
) -> None:
    pairs_add_up(workers, (0, 1), (2, 3))
    workers[0].tell("reduce_in_replica", seats=[0, 1])
    strike(pool, workers[1], signal.SIGSTOP)
    workers[0].tell("break_replica")
    found = workers[0].answer()
    assert found["collective"], found
    found = everyone([workers[0]], "reduce_in_replica", seats=[0, 1])
    assert found[0]["error"] == "FormingFailed", "a clique is not made twice"
    pool.drop(workers[1])
    begin(workers, [0, 2, 3])
    pairs_add_up(workers, (2, 3))
    pairs_add_up(workers, (0, 2))


def test_two_deaths_in_two_pairs_leave_two_processes_that_form_a_pair(
    pool: Pool, workers: list[Worker]
) -> None:
    pairs_add_up(workers, (0, 1), (2, 3))
    for place, pair in ((0, [0, 1]), (2, [2, 3])):
        workers[place].tell("reduce_in_replica", seats=pair)
    for place in (1, 3):
        strike(pool, workers[place], signal.SIGKILL)
    for found in interrupt([workers[0], workers[2]]):
        assert found["collective"], found
    begin(workers, [0, 2])
    pairs_add_up(workers, (0, 2))
    assert everyone_adds_up([workers[0], workers[2]]) == [PAIR_SUM] * 2


def test_a_process_that_joins_completes_a_pair(pool: Pool, workers: list[Worker]) -> None:
    pairs_add_up(workers, (0, 1), (2, 3))
    workers[2].tell("reduce_in_replica", seats=[2, 3])
    strike(pool, workers[3], signal.SIGKILL)
    interrupt([workers[2]])
    begin(workers, [0, 1, 2])
    pairs_add_up(workers, (0, 1))
    everyone(workers[:3], "end", is_intact=True)
    newcomer = pool.start()
    newcomer.tell("take_seat", address=pool.address, seat=4, seats=SEATS, members=[0, 1, 2])
    assert "error" not in (found := newcomer.answer()), found
    everyone([newcomer], "end", is_intact=True)
    by_seat = {0: workers[0], 1: workers[1], 2: workers[2], 4: newcomer}
    everyone(list(by_seat.values()), "begin", members=list(by_seat))
    for pair in ((0, 1), (2, 4)):
        for seat in pair:
            by_seat[seat].tell("reduce_in_replica", seats=list(pair))
    for seat, worker in by_seat.items():
        found = worker.answer()
        assert found.get("total") == PAIR_SUM, (seat, found)
    pool.leave([newcomer])
