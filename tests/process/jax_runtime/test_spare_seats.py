"""A process that takes a spare seat of a world in which others live: the others keep backend, arrays and programs."""

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.process.jax_runtime.jax_processes import Pool, Worker, everyone, interrupt, strike, sum_to

SEATS = 40
RETURNS = 20
EVERY_PLACE = 6
"""In so many returns the lost one is that of each place in turn; afterwards one process stays to the end."""
SOME_TURNS = 4
MAX_GROWTH_MIB = 5.0
"""Of the process that stays, in the last ten returns or so: programs and connections of old members must not stay."""
DEATH_INTERVAL = 5
"""Every fifth leaves by SIGKILL, and another process returns; the others leave their world, and take another seat."""


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    found = Pool()
    yield found
    found.close()


class Seats:
    """The members of one world, by their seats."""

    def __init__(self, pool: Pool, workers: list[Worker]) -> None:
        self.pool = pool
        pool.join(workers, SEATS)
        self.workers = dict(enumerate(workers))
        self.next_seat = len(workers)
        self.begin()

    def begin(self) -> list[dict]:
        """Begin a generation of the present members; return what JAX counts in each."""
        found = everyone(list(self.workers.values()), "begin", members=sorted(self.workers))
        assert all("error" not in one for one in found), found
        return found

    def end(self, *, is_intact: bool) -> None:
        everyone(list(self.workers.values()), "end", is_intact=is_intact)

    def add_up(self) -> list[float]:
        found = everyone(list(self.workers.values()), "reduce")
        assert all("total" in one for one in found), found
        return [one["total"] for one in found]

    def leave(self, seat: int) -> Worker:
        """Have a member leave the world between two generations; return it."""
        worker = self.workers.pop(seat)
        everyone([worker], "disconnect")
        return worker

    def seat(self, returning: Worker | None = None) -> int:
        """Have a process, by default a new one, take the next seat; return it."""
        worker = returning or self.pool.start()
        seat, self.next_seat = self.next_seat, self.next_seat + 1
        worker.tell(
            "take_seat", address=self.pool.address, seat=seat, seats=SEATS, members=sorted(self.workers)
        )
        assert "error" not in (found := worker.answer()), found
        worker.tell("end", is_intact=True)
        worker.answer()
        self.workers[seat] = worker
        return seat

    def close(self) -> None:
        self.pool.leave(list(self.workers.values()))

    def kill(self, seat: int) -> None:
        """Kill a member in a collective, and let the others unwind."""
        victim = self.workers.pop(seat)
        survivors = list(self.workers.values())
        for worker in survivors:
            worker.tell("reduce")
        strike(self.pool, victim, signal.SIGKILL)
        for found in interrupt(survivors):
            assert found["collective"], found
        self.pool.drop(victim)


@pytest.mark.full
def test_twenty_deaths_and_returns_leave_the_survivors_in_their_world_and_leak_nothing(pool: Pool) -> None:
    seats = Seats(pool, pool.take(3))
    assert seats.add_up() == [sum_to(6)] * 3
    measured: list[dict] = []
    for turn in range(RETURNS):
        # Each place in turn, seat 0 of the world first; later the two that came last.
        lost = sorted(seats.workers)[turn % 3 if turn < EVERY_PLACE else 1 + turn % 2]
        if turn % DEATH_INTERVAL == 0:
            seats.kill(lost)
            returning = None
        else:
            seats.end(is_intact=True)
            returning = seats.leave(lost)
        seats.end(is_intact=turn % DEATH_INTERVAL != 0)
        for index, found in enumerate(seats.begin()):
            assert (found["processes"], found["devices"], found["local"]) == (2, 4, 2)
            assert (found["index"], found["indices"]) == (index, [0, 1])
            assert not found["broken"]
        assert seats.add_up() == [sum_to(4)] * 2
        seats.end(is_intact=True)
        seats.seat(returning)
        assert [found["processes"] for found in seats.begin()] == [3, 3, 3]
        assert seats.add_up() == [sum_to(6)] * 3
        if turn >= EVERY_PLACE:
            measured += everyone([seats.workers[min(seats.workers)]], "measure")
    seats.close()
    first, last = measured[:SOME_TURNS], measured[-SOME_TURNS:]
    assert max(m["descriptors"] for m in last) <= max(m["descriptors"] for m in first)
    grown_mib = (min(m["resident_bytes"] for m in last) - max(m["resident_bytes"] for m in first)) / 2**20
    assert grown_mib <= MAX_GROWTH_MIB


def test_members_go_on_in_their_old_clique_when_a_newcomer_dies(pool: Pool) -> None:
    seats = Seats(pool, pool.take(3))
    assert seats.add_up() == [sum_to(6)] * 3
    for _ in range(2):
        seats.end(is_intact=True)
        newcomer = seats.seat()
        seats.begin()
        assert seats.add_up() == [sum_to(8)] * 4
        seats.kill(newcomer)
        seats.end(is_intact=False)
        assert not any(found["broken"] for found in seats.begin())
        assert seats.add_up() == [sum_to(6)] * 3, "with the connections of before"
    seats.kill(2)
    seats.end(is_intact=False)
    assert not any(found["broken"] for found in seats.begin())
    assert seats.add_up() == [sum_to(4)] * 2


def test_a_program_compiled_for_a_seat_that_nobody_has_serves_whoever_takes_it(tmp_path: Path) -> None:
    with contextlib.closing(Pool(str(tmp_path))) as pool:
        workers = pool.take(2)
        everyone(workers, "share_cache")
        seats = Seats(pool, workers)
        assert [found["devices"] for found in everyone(workers[:1], "rotate_ahead")] == [6]
        assert "jit_turn" in everyone(workers, "list_missed")[0]["missed"]
        seats.end(is_intact=True)
        newcomer = pool.start()
        everyone([newcomer], "share_cache")
        seats.seat(newcomer)
        seats.begin()
        everywhere = [(process, place) for process in range(3) for place in range(2)]
        found = everyone(list(seats.workers.values()), "rotate", over=everywhere)
        missed = everyone(list(seats.workers.values()), "list_missed")
        assert not any("jit_turn" in one["missed"] for one in missed)
        assert all(all(one["places"]) for one in found)
        values = {int(place): value for one in found for place, value in one["values"].items()}
        assert values == {place: (place or 6) * 10.0**place for place in range(6)}
