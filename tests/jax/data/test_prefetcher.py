"""The prefetcher reads each microbatch once, within its buffer, and a failed read fails only its own callers."""

import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from resilient_jax.data.prefetcher import MicrobatchKey, Prefetcher
from resilient_jax.errors import DataError
from tests.support.patience import patience

DEADLINE_S = patience(3)
WHOLE = (0, 1)


def key(index: int) -> MicrobatchKey:
    return (0, index, WHOLE)


def keys(*indexes: int) -> list[MicrobatchKey]:
    return [key(index) for index in indexes]


class LoggedSource:
    """A source that logs each read; reads of the indexes in `held` wait until `let_go`."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.begun: list[MicrobatchKey] = []
        self.ended: list[MicrobatchKey] = []
        self.threads: set[str] = set()
        self.held: set[int] = set()
        self.failing: dict[int, BaseException] = {}
        self.on_begin: Callable[[], None] = lambda: None

    def batch(self, step: int, index: int, part: tuple[int, int] = WHOLE) -> np.ndarray:
        with self.changed:
            self.begun.append((step, index, part))
            self.threads.add(threading.current_thread().name)
            self.on_begin()
            self.changed.notify_all()
            assert self.changed.wait_for(lambda: index not in self.held, DEADLINE_S)
            self.ended.append((step, index, part))
            self.changed.notify_all()
            if index in self.failing:
                raise self.failing[index]
        return np.array([step, index, *part])

    def lengths(self, step: int, index: int) -> np.ndarray:
        return np.array([step, index], np.int32)

    def wait_for(self, is_true: Callable[[], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(is_true, DEADLINE_S)

    def wait_begun(self, *indexes: int) -> None:
        self.wait_for(lambda: {index for _, index, _ in self.begun} >= set(indexes))

    def wait_ended(self, *indexes: int) -> None:
        self.wait_for(lambda: {index for _, index, _ in self.ended} >= set(indexes))

    def hold(self, *indexes: int) -> None:
        with self.changed:
            self.held |= set(indexes)

    def let_go(self, *indexes: int) -> None:
        with self.changed:
            self.held -= set(indexes)
            self.changed.notify_all()

    def count(self) -> Counter[int]:
        with self.changed:
            return Counter(index for _, index, _ in self.begun)


@pytest.fixture
def source() -> LoggedSource:
    return LoggedSource()


@pytest.fixture
def prefetcher(source: LoggedSource) -> Iterator[Prefetcher]:
    with Prefetcher(source, buffer_size=4, num_threads=2) as made:
        yield made
        source.let_go(*source.held)


def test_every_wanted_microbatch_is_read_exactly_once(source: LoggedSource, prefetcher: Prefetcher) -> None:
    wanted = [(step, index, (k, 2)) for step in range(3) for index in range(5) for k in range(2)]
    prefetcher.expect(wanted)
    for step, index, part in wanted:
        assert prefetcher.get(step, index, part).tolist() == [step, index, *part]
    assert sorted(source.begun) == wanted


def test_expected_microbatches_are_read_ahead_on_the_prefetchers_threads(
    source: LoggedSource, prefetcher: Prefetcher
) -> None:
    prefetcher.expect(keys(0, 1, 2))
    source.wait_ended(0, 1, 2)
    for index in range(3):
        prefetcher.get(0, index)
    assert source.threads <= {"resilient-jax-data-0", "resilient-jax-data-1"}


def test_microbatches_are_read_in_the_expected_order(source: LoggedSource) -> None:
    with Prefetcher(source, buffer_size=4, num_threads=1) as prefetcher:
        prefetcher.expect(keys(2, 0, 3, 1))
        source.wait_ended(2, 0, 3, 1)
    assert source.begun == keys(2, 0, 3, 1)


def test_threads_read_concurrently(source: LoggedSource, prefetcher: Prefetcher) -> None:
    source.hold(0)
    prefetcher.expect(keys(0, 1))
    source.wait_ended(1)
    assert prefetcher.get(0, 1)[1] == 1
    assert source.ended == keys(1)
    source.let_go(0)
    assert prefetcher.get(0, 0)[1] == 0


def test_the_buffer_size_bounds_the_unrequested_microbatches(source: LoggedSource) -> None:
    asked, most = 0, 0

    def note() -> None:
        nonlocal most
        most = max(most, len(source.begun) - asked)

    source.on_begin = note
    with Prefetcher(source, buffer_size=3, num_threads=4) as prefetcher:
        prefetcher.expect(keys(*range(40)))
        source.wait_ended(0, 1, 2)
        for index in range(40):
            with source.changed:
                asked += 1
            prefetcher.get(0, index)
    assert most == 3
    assert source.count() == Counter(range(40))


def test_a_repeated_get_returns_the_same_arrays_while_they_are_expected(
    source: LoggedSource, prefetcher: Prefetcher
) -> None:
    prefetcher.expect(keys(0))
    first = prefetcher.get(0, 0)
    assert prefetcher.get(0, 0) is first
    prefetcher.expect(keys(0, 1))
    assert prefetcher.get(0, 0) is first
    prefetcher.expect(keys(1))
    assert prefetcher.get(0, 0) is not first
    assert source.count()[0] == 2


def test_after_a_failure_only_new_microbatches_are_read(source: LoggedSource, prefetcher: Prefetcher) -> None:
    source.hold(2)
    prefetcher.expect(keys(0, 1, 2, 3))
    source.wait_begun(0, 1, 2, 3)
    prefetcher.get(0, 0)
    source.wait_ended(1, 3)
    prefetcher.expect(keys(0, 1, 2, 3, 6, 7))  # another host died; 2 is being read
    source.let_go(2)
    for index in (0, 1, 2, 3, 6, 7):
        assert prefetcher.get(0, index)[1] == index
    assert source.count() == Counter([0, 1, 2, 3, 6, 7])


def test_a_requested_microbatch_frees_room_in_the_buffer(
    source: LoggedSource, prefetcher: Prefetcher
) -> None:
    prefetcher.expect(keys(*range(8)))
    source.wait_ended(0, 1, 2, 3)
    for index in range(4):
        prefetcher.get(0, index)
    source.wait_ended(4, 5, 6, 7)


def test_a_dropped_microbatch_frees_room_in_the_buffer(source: LoggedSource, prefetcher: Prefetcher) -> None:
    prefetcher.expect(keys(0, 1, 2, 3))
    source.wait_ended(0, 1, 2, 3)
    prefetcher.expect(keys(4, 5, 6, 7))
    source.wait_ended(4, 5, 6, 7)


def test_a_microbatch_that_is_no_longer_expected_is_never_read(source: LoggedSource) -> None:
    source.hold(0)
    with Prefetcher(source, buffer_size=2, num_threads=1) as prefetcher:
        prefetcher.expect(keys(0, 1))
        source.wait_begun(0)
        prefetcher.expect(keys(2))
        source.let_go(0)
        prefetcher.get(0, 2)
    assert source.count() == Counter([0, 2])


def test_an_unexpected_microbatch_is_read_on_the_callers_thread_and_not_kept(
    source: LoggedSource, prefetcher: Prefetcher
) -> None:
    assert prefetcher.get(4, 2, (1, 3)).tolist() == [4, 2, 1, 3]
    assert prefetcher.get(4, 2, (1, 3)).tolist() == [4, 2, 1, 3]
    assert source.begun == [(4, 2, (1, 3))] * 2
    assert source.threads == {threading.current_thread().name}


def test_a_get_out_of_order_does_not_wait_for_room(source: LoggedSource) -> None:
    with Prefetcher(source, buffer_size=1, num_threads=1) as prefetcher:
        prefetcher.expect(keys(0, 1, 2))
        source.wait_ended(0)
        for index in (2, 1, 0):
            assert prefetcher.get(0, index)[1] == index
    assert source.count() == Counter([0, 1, 2])


def test_concurrent_gets_of_one_microbatch_share_one_read(
    source: LoggedSource, prefetcher: Prefetcher
) -> None:
    source.hold(0)
    prefetcher.expect(keys(0))
    with ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(prefetcher.get, 0, 0) for _ in range(2)]
        source.wait_begun(0)
        source.let_go(0)
        assert asked[0].result(DEADLINE_S) is asked[1].result(DEADLINE_S)
    assert source.count()[0] == 1


def test_expect_may_be_called_while_a_get_waits(source: LoggedSource, prefetcher: Prefetcher) -> None:
    source.hold(0)
    prefetcher.expect(keys(0, 1))
    source.wait_begun(0)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(prefetcher.get, 0, 0)
        prefetcher.expect(keys(1, 2))
        source.wait_ended(1, 2)
        source.let_go(0)
        assert waiting.result(DEADLINE_S)[1] == 0


class Halt(BaseException):
    """An error that is no `Exception`."""


@pytest.mark.parametrize("error", [ValueError("bad record"), StopIteration(), Halt()])
def test_a_failed_read_fails_only_the_get_of_its_microbatch(
    source: LoggedSource, prefetcher: Prefetcher, error: BaseException
) -> None:
    source.failing[1] = error
    prefetcher.expect(keys(0, 1, 2))
    source.wait_ended(0, 1, 2)
    assert prefetcher.get(0, 0)[1] == 0
    with pytest.raises(type(error)) as caught:
        prefetcher.get(0, 1)
    assert caught.value is error
    assert prefetcher.get(0, 2)[1] == 2


def test_get_repeats_a_failed_read_ahead(source: LoggedSource, prefetcher: Prefetcher) -> None:
    source.failing = {0: OSError("the devices went away")}
    prefetcher.expect(keys(0))
    source.wait_ended(0)
    source.failing.clear()
    assert prefetcher.get(0, 0)[1] == 0


def test_a_failed_read_is_retried_when_requested_or_expected_again(
    source: LoggedSource, prefetcher: Prefetcher
) -> None:
    source.failing = {0: OSError("disk"), 1: OSError("disk")}
    prefetcher.expect(keys(0, 1))
    source.wait_ended(0, 1)
    with pytest.raises(OSError, match="disk"):
        prefetcher.get(0, 0)
    source.failing.clear()
    assert prefetcher.get(0, 0)[1] == 0
    prefetcher.expect(keys(0, 1))
    assert prefetcher.get(0, 1)[1] == 1
    assert source.count() == Counter({0: 3, 1: 2}), "ahead, by who asked, and by who asked again"


def test_lengths_come_from_the_source(prefetcher: Prefetcher) -> None:
    lengths = prefetcher.lengths(3, 4)
    assert lengths is not None
    assert lengths.tolist() == [3, 4]


def test_close_ends_the_threads_and_later_calls_are_refused(source: LoggedSource) -> None:
    before = set(threading.enumerate())
    prefetcher = Prefetcher(source, buffer_size=1, num_threads=3)
    mine = set(threading.enumerate()) - before
    prefetcher.expect(keys(0, 1, 2))
    source.wait_ended(0)
    prefetcher.close()
    prefetcher.close()
    assert len(mine) == 3
    assert not any(thread.is_alive() for thread in mine)
    with pytest.raises(DataError, match="closed Prefetcher"):
        prefetcher.get(0, 0)
    with pytest.raises(DataError, match="closed Prefetcher"):
        prefetcher.expect(keys(1))


def test_a_read_in_progress_is_delivered_although_another_thread_closes(source: LoggedSource) -> None:
    source.hold(0)
    prefetcher = Prefetcher(source, num_threads=1)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(prefetcher.get, 0, 0)
        source.wait_begun(0)
        prefetcher.close()
        source.let_go(0)
        assert waiting.result(DEADLINE_S)[1] == 0


@pytest.mark.parametrize("options", [{"buffer_size": 0}, {"num_threads": 0}])
def test_numbers_below_one_are_refused(source: LoggedSource, options: dict[str, int]) -> None:
    with pytest.raises(DataError, match="found 0, expected at least 1"):
        Prefetcher(source, **options)


PROGRAM = """
import threading
from resilient_jax.data.prefetcher import Prefetcher

class Hanging:
    begun = threading.Event()
    def batch(self, step, index, part=(0, 1)):
        self.begun.set()
        threading.Event().wait()
    def lengths(self, step, index):
        return None

prefetcher = Prefetcher(Hanging())
prefetcher.expect([(0, 0, (0, 1))])
assert Hanging.begun.wait(60)
"""


def test_a_read_that_hangs_does_not_keep_the_process_alive() -> None:
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=patience(6), check=False
    )
    assert (result.returncode, result.stderr) == (0, "")
