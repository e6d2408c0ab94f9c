"""Worlds of real processes that die, stop and rejoin, on CPU with gloo."""

import itertools
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from resilient_jax.jax_runtime.gloo import GLOO_THREAD_NICENESS
from tests.process.jax_runtime.jax_processes import (
    DEADLINE_S,
    Child,
    Pool,
    Worker,
    await_struck,
    everyone,
    find_forge,
    interrupt,
    strike,
    sum_to,
)
from tests.support.full_only import full_but
from tests.support.patience import Deadline, wait_until

LONG_MESSAGE = 3_000_000
"""Floats: a message takes some ten milliseconds, and the kill a fraction of one."""


@pytest.fixture(scope="module")
def shared_pool() -> Iterator[Pool]:
    pool = Pool()
    yield pool
    pool.close()


@pytest.fixture
def pool(shared_pool: Pool, request: pytest.FixtureRequest) -> Iterator[Pool]:
    """Give new workers to the test after one that failed, which leaves workers in unknown states."""
    failed_before = request.session.testsfailed
    yield shared_pool
    shared_pool.end_services()
    if request.session.testsfailed > failed_before:
        shared_pool.drop_all()


def faults(*quick: signal.Signals) -> pytest.MarkDecorator:
    """Break a process in both ways; `make test` in one, and in the other elsewhere."""
    return pytest.mark.parametrize("fault", full_but([signal.SIGKILL, signal.SIGSTOP], quick.__contains__))


@faults(signal.SIGKILL)
def test_survivors_unwind_from_a_hung_collective_and_shrink_in_place(
    pool: Pool, fault: signal.Signals
) -> None:
    a, b, victim = workers = pool.take(3)
    assert [found["devices"] for found in pool.join(workers)] == [6, 6, 6]
    assert [found["total"] for found in everyone(workers, "reduce")] == [21.0] * 3
    everyone(workers, "keep")
    for worker in (a, b):
        worker.tell("reduce")
    strike(pool, victim, fault)
    for found in interrupt([a, b]):
        assert found["collective"], found
    # The survivors' shards: 1, 2 of process 0 and 3, 4 of process 1; their sum is 10.
    assert [found["total"] for found in everyone([a, b], "reduce_kept", without=2)] == [10.0, 10.0]
    pool.drop(victim)
    for found in pool.leave([a, b]):
        assert (found["backends"], found["clients"]) == (0, 0)


def test_a_peer_that_dies_in_the_middle_of_a_message_does_not_keep_the_survivors(pool: Pool) -> None:
    a, b, victim = workers = pool.take(3)
    pool.join(workers)
    devices = 6
    assert [found["sum"] for found in everyone(workers, "exchange", elements=10)] == [2 * devices * 10] * 3
    before = written_bytes(victim)
    everyone(workers, "exchange", elements=10)
    for worker in workers:
        worker.tell("exchange", elements=LONG_MESSAGE)
    wait_until_written(victim, before + LONG_MESSAGE)  # a quarter of its first message to another process
    strike(pool, victim, signal.SIGKILL)
    for found in interrupt([a, b]):
        assert found["collective"], found
    pool.drop(victim)
    # What was given up keeps the backend of its world, until gloo's own timeout; the process joins the next one.
    pool.leave([a, b])
    pool.join([a, b])
    assert [found["total"] for found in everyone([a, b], "reduce")] == [sum_to(4)] * 2
    for worker in (a, b):
        pool.drop(worker)  # a client of the old world lives on, and would end its process with the service


def written_bytes(worker: Child) -> int:
    """Return how many bytes the process has written, to sockets or files."""
    fields = dict(
        line.split(": ") for line in Path(f"/proc/{worker.process.pid}/io").read_text().splitlines()
    )
    return int(fields["wchar"])


def wait_until_written(worker: Child, count: int) -> None:
    wait_until("the worker sends", lambda: written_bytes(worker) >= count, DEADLINE_S)


def test_survivors_form_a_smaller_world_and_then_a_larger_one_with_a_newcomer(pool: Pool) -> None:
    a, b, victim = pool.take(3)
    pool.join([a, b, victim])
    everyone([a, b, victim], "reduce")
    for worker in (a, b):
        worker.tell("reduce")
    strike(pool, victim, signal.SIGKILL)
    interrupt([a, b])
    pool.leave([a, b])
    pool.join([b, a])  # in reverse order: the new indexes need not be the old ones
    assert [found["total"] for found in everyone([a, b], "reduce")] == [sum_to(4)] * 2
    everyone([a, b], "meet")
    pool.leave([a, b])
    trio = pool.take(3)
    pool.join(trio)
    assert [found["total"] for found in everyone(trio, "reduce")] == [sum_to(6)] * 3
    everyone(trio, "meet")
    pool.leave(trio)


def test_gloos_thread_leaves_the_processor_to_those_that_compute(pool: Pool) -> None:
    a, b = pool.take(2)
    pool.join([a, b])
    for worker in (a, b):
        threads = [int(name) for name in os.listdir(f"/proc/{worker.process.pid}/task")]
        niceness = [os.getpriority(os.PRIO_PROCESS, thread) for thread in threads]
        own = os.getpriority(os.PRIO_PROCESS, worker.process.pid)
        assert niceness.count(own + GLOO_THREAD_NICENESS) == 1
        assert niceness.count(own) == len(threads) - 1
    pool.leave([a, b])


def test_forming_is_interrupted_while_a_peer_never_registers(pool: Pool) -> None:
    a, b = pool.take(2)
    address = pool.serve(3)
    for index, worker in enumerate((a, b)):
        worker.tell("connect", address=address, index=index, count=3)
    assert_forming_is_interrupted(pool, [a, b])
    await_clients_gone([a, b])


def test_forming_is_interrupted_while_the_service_does_not_answer(pool: Pool) -> None:
    a, b = pool.take(2)
    address = pool.serve(2)
    pool.newest_service.process.send_signal(signal.SIGSTOP)
    for index, worker in enumerate((a, b)):
        worker.tell("connect", address=address, index=index, count=2)
    assert_forming_is_interrupted(pool, [a, b])
    for worker in (a, b):
        pool.drop(worker)  # their abandoned clients exist until the timeout of `connect`


@faults(signal.SIGSTOP)
def test_forming_is_interrupted_while_a_peer_does_not_exchange_its_topology(
    pool: Pool, fault: signal.Signals
) -> None:
    a, b, victim = pool.take(3)
    address = pool.serve(3)
    victim.tell("register_and", signal_number=fault, address=address, index=2, count=3)
    for index, worker in enumerate((a, b)):
        worker.tell("connect", address=address, index=index, count=3)
    await_struck(victim, fault)
    assert_forming_is_interrupted(pool, [a, b])
    await_clients_gone([a, b])
    pool.drop(victim)


def assert_forming_is_interrupted(pool: Pool, workers: list[Worker]) -> None:
    for found in interrupt(workers):
        # FormingFailed: the interruption of the other worker, which breaks the world for all, came first.
        assert found["error"] in ("FormingInterrupted", "FormingFailed"), found
        assert found["collective"]
    joined, reduced = pool.join(workers), everyone(workers, "reduce")
    assert [found.get("total") for found in reduced] == [sum_to(2 * len(workers))] * len(workers), (
        joined,
        reduced,
    )
    everyone(workers, "meet")
    pool.leave(workers)


def await_clients_gone(workers: list[Worker]) -> None:
    """Wait until abandoned waits in C++ have ended; until then no other process may close its connection.

    The stand-in of a process that was interrupted while registering ends after 6 or 7 s. If the replaced client
    registered again, that client ends after the timeout of its own `connect`, 20 s, and the service's 5 s of grace.
    """
    wait_until(
        "the end of abandoned clients",
        lambda: not any(found["clients"] for found in everyone(workers, "count_clients")),
        DEADLINE_S,
    )


@pytest.mark.parametrize(
    ("order", "fault"),
    full_but(
        itertools.product(["kill_self", "publish_and"], [signal.SIGKILL, signal.SIGSTOP]),
        [("kill_self", signal.SIGSTOP), ("publish_and", signal.SIGKILL)].__contains__,
    ),
)
def test_a_clique_is_interrupted_while_it_waits_for_a_peer(
    pool: Pool, order: str, fault: signal.Signals
) -> None:
    a, b, victim = workers = pool.take(3)
    pool.join(workers)
    if order == "publish_and":
        victim.tell(order, signal_number=fault)
    else:
        victim.process.send_signal(fault)
    await_struck(victim, fault)
    for worker in (a, b):
        worker.tell("reduce")
    for found in interrupt([a, b]):
        assert found["collective"], found
    pool.drop(victim)
    for found in pool.leave([a, b]):
        assert (found["backends"], found["clients"]) == (0, 0)
    pool.join([a, b])
    assert [found["total"] for found in everyone([a, b], "reduce")] == [sum_to(4)] * 2
    everyone([a, b], "meet")
    pool.leave([a, b])


def test_a_clique_is_interrupted_while_the_service_does_not_answer(pool: Pool) -> None:
    a, b, victim = workers = pool.take(3)
    pool.join(workers)
    for stopped in (pool.newest_service, victim):
        strike(pool, stopped, signal.SIGSTOP)
    for worker in (a, b):
        worker.tell("reduce")
    for found in interrupt([a, b]):
        assert found["collective"], found
    pool.drop(victim)
    for found in pool.leave([a, b]):
        assert (found["backends"], found["clients"]) == (0, 0)
    pool.join([a, b])
    assert [found["total"] for found in everyone([a, b], "reduce")] == [sum_to(4)] * 2
    everyone([a, b], "meet")
    pool.leave([a, b])


def test_connect_fails_at_its_timeout(pool: Pool) -> None:
    (a,) = pool.take(1)
    a.tell("connect", address=pool.serve(2), index=0, count=2, timeout_s=0.5)
    found = a.answer()
    assert found["error"] == "FormingFailed"
    assert "seat 0 of 2" in found["text"]
    assert found["seconds"] >= 0.5
    pool.join([a])
    assert everyone([a], "reduce")[0]["total"] == sum_to(2)
    pool.leave([a])


def test_an_abort_leaves_the_users_sockets_alone(pool: Pool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as log:
        a, b = pool.take(2)
        pool.join([a, b])
        everyone([a, b], "reduce")
        everyone([a], "open_user_sockets", port=log.getsockname()[1])
        a.tell("reduce")
        interrupt([a])
        (found,) = everyone([a], "use_user_sockets")
        assert found["inner"] == "x"
        connection, _ = log.accept()
        with connection:
            connection.settimeout(DEADLINE_S)
            assert connection.recv(64) == b"log line\n"
        pool.leave([a, b])


@pytest.mark.full
def test_ten_rejoins_leave_no_descriptor_and_less_than_30_mib(pool: Pool) -> None:
    a, b = pool.take(2)
    settled = before = everyone([a, b], "measure")
    for number in range(11):
        pool.join([a, b])
        everyone([a, b], "reduce")
        everyone([a, b], "meet")
        for found in pool.leave([a, b]):
            assert (found["backends"], found["clients"]) == (0, 0)
        pool.end_services()
        if number == 0:
            settled = await_descriptors([a, b], before)  # the first world loads what all others use
    for first, last in zip(settled, await_descriptors([a, b], before), strict=True):
        assert last["resident_bytes"] - first["resident_bytes"] < 30 * 2**20


def await_descriptors(workers: list[Worker], before: list[dict]) -> list[dict]:
    """Return new measurements once no worker has more descriptors than `before`: gRPC closes some with a delay."""
    deadline = Deadline()
    while True:
        found = everyone(workers, "measure")
        if all(f["descriptors"] <= b["descriptors"] for f, b in zip(found, before, strict=True)):
            return found
        assert deadline.find_rest_s() > 0, f"descriptors leak: {before} became {found}"
        time.sleep(0.02)


def test_a_world_that_is_left_while_a_thread_compiles_for_it_keeps_its_traces(pool: Pool) -> None:
    a, b = pair = pool.take(2)
    # A worker of an earlier test may still have the client of an attempt that it abandoned there.
    abandoned = [found["clients"] for found in everyone(pair, "count_clients")]
    pool.join(pair)
    before = everyone(pair, "count_traces")
    everyone(pair, "begin_compiling", turns=10_000)
    # Without `is_borrowed`, b drops its traces: they may be what keeps the devices alive.
    pool.leave([b])
    a.tell("disconnect", is_borrowed=True)
    assert a.answer()["backends"] == 1
    pool.join(pair)
    assert [found["total"] for found in everyone(pair, "reduce")] == [sum_to(4)] * 2
    again = everyone(pair, "count_traces")
    # Operations outside of `jit` are dropped where the devices are still in use: they may refer to them.
    for counted, expected in (("traces", [0, 1]), ("lowerings", [1, 2])):
        assert [now[counted] - then[counted] for now, then in zip(again, before, strict=True)] == expected
    everyone(pair, "end_compiling")
    everyone(pair, "meet")
    assert [found["backends"] for found in pool.leave(pair)] == [0, 0]
    left = [found["clients"] for found in everyone(pair, "count_clients")]
    assert all(now <= then for now, then in zip(left, abandoned, strict=True)), (left, abandoned)


def test_threads_that_use_jax_wait_while_there_is_no_world(pool: Pool) -> None:
    pair = pool.take(2)
    pool.join(pair)
    everyone(pair, "begin_using")
    for number in range(4):
        pool.leave(pair)
        between = everyone(pair, "count_uses")
        if number == 2:  # a failed attempt
            pair[0].tell("connect", address=pool.serve(2), index=0, count=2, timeout_s=0.5)
            assert pair[0].answer()["error"] == "FormingFailed"
        assert [found["devices"] for found in pool.join(pair)] == [4, 4]
        assert [found["total"] for found in everyone(pair, "reduce")] == [sum_to(4)] * 2
        await_more_uses(pair, between)
    failures = [failure for found in everyone(pair, "count_uses") for failure in found["failures"]]
    assert len(failures) <= 2 * 4, "in flight as the world was left, at most"
    pool.leave(pair)
    between = everyone(pair, "count_uses")
    assert [found["devices"] for found in everyone(pair, "end_worlds")] == [2, 2]
    await_more_uses(pair, between)
    for worker in pair:
        pool.drop(worker)


def await_more_uses(workers: list[Worker], before: list[dict]) -> None:
    wait_until(
        f"more uses than {before}",
        lambda: all(
            now["uses"] > then["uses"] + 3
            for now, then in zip(everyone(workers, "count_uses"), before, strict=True)
        ),
        DEADLINE_S,
    )


class CachingWorkers:
    """Three workers of two devices each that share a compilation cache."""

    def __init__(self, folder: Path) -> None:
        self.pool = Pool()
        self._folder = folder
        self.workers = [Worker(str(folder), find_forge(number % 2)) for number in range(3)]
        for worker in self.workers:
            worker.answer()
        assert [found["warning"] for found in everyone(self.workers, "share_cache")] == [None] * 3
        self.pool.join(self.workers)

    def rotate(self, *over: tuple[int, int]) -> bool:
        """Run a program over these devices, (process, index) each; return whether it was a cache hit for all."""
        before = self._entries()
        answers = everyone(
            [self.workers[index] for index in sorted({place[0] for place in over})], "rotate", over=over
        )
        assert all(all(answer["places"]) for answer in answers)
        values = {int(place): value for answer in answers for place, value in answer["values"].items()}
        assert values == {
            place: ((place + len(over) - 1) % len(over) + 1) * 10.0**place for place in range(len(over))
        }
        is_new = self._entries() != before
        assert is_new or all(answer["hits"] > 0 for answer in answers)
        return not is_new

    def close(self) -> None:
        for worker in self.workers:
            worker.end()
        self.pool.close()

    def _entries(self) -> set[str]:
        return {path.name for path in self._folder.glob("*-cache")}


@pytest.fixture
def caching(tmp_path: Path) -> Iterator[CachingWorkers]:
    caching = CachingWorkers(tmp_path)
    yield caching
    caching.close()


def test_a_local_program_compiled_by_one_process_is_a_hit_for_every_other(
    caching: CachingWorkers, tmp_path: Path
) -> None:
    assert not caching.rotate((2, 0), (2, 1))
    assert caching.rotate((0, 0), (0, 1))
    assert caching.rotate((1, 0), (1, 1))
    assert caching.rotate((1, 1), (1, 0))
    everyone(caching.workers, "meet")
    caching.pool.leave(caching.workers)
    caching.workers.pop(0).end()
    caching.pool.join(caching.workers)  # a smaller world, other indexes
    assert caching.rotate((1, 0), (1, 1))
    assert caching.rotate((0, 0), (0, 1))
    assert not list(tmp_path.glob(".*-cache.*")), "a half-written entry stayed behind"


def test_a_program_over_some_processes_is_a_hit_for_as_many_others_and_for_no_other_grouping(
    caching: CachingWorkers,
) -> None:
    assert not caching.rotate((0, 0), (0, 1), (1, 0), (1, 1))
    assert caching.rotate((1, 0), (1, 1), (2, 0), (2, 1))
    assert caching.rotate((2, 0), (2, 1), (0, 0), (0, 1)), "in another order, but with the same neighbours"
    assert not caching.rotate((0, 0), (1, 0), (0, 1), (1, 1)), (
        "as many devices, but all neighbours are elsewhere"
    )
    assert not caching.rotate((0, 0), (0, 1), (1, 0), (2, 0)), "as many devices, but of three processes"
    assert not caching.rotate((0, 0), (1, 0), (1, 1), (2, 0)), (
        "of three processes, but grouped in another way"
    )
    assert caching.rotate((2, 0), (0, 0), (0, 1), (1, 0))
