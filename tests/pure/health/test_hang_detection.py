"""When a silence of a worker is too long: a multiple of this job's own times, with excuses."""

import threading

import pytest

from resilient_jax.protocol.worker_tasks import WorkerTask
from resilient_jax.telemetry.worker_activity import Activity, WorkerActivity
from resilient_jax.worker.hang_detection import (
    FORMING_SHARE,
    HANG_FACTOR,
    UNWINDING_TIMEOUT_S,
    HangDetector,
    HangLimits,
    find_deadline_s,
)

LIMITS = HangLimits(regular_s=5.0, other_s=20.0, forming_timeout_s=60.0)
LOOK_S = 0.25


def activity(*path: WorkerTask, since_s: float = 0.0, silences_s: tuple[float, ...] = ()) -> Activity:
    return Activity(path=path, step=7, since_s=since_s, thread=1, silences_s=silences_s)


def test_a_deadline_is_a_multiple_of_the_longest_silence_of_late() -> None:
    assert find_deadline_s(activity(WorkerTask.INPUT, silences_s=(1.0, 4.0, 2.0)), LIMITS) == 4 * HANG_FACTOR


@pytest.mark.parametrize(
    ("task", "silences_s", "deadline_s"),
    [
        (WorkerTask.INPUT, (0.01,) * 3, LIMITS.regular_s),
        (WorkerTask.INPUT, (0.01,) * 2, LIMITS.other_s),
        (WorkerTask.SUM, (1.0, 1.0, 90.0), 1.0 * HANG_FACTOR),
        (WorkerTask.USER_CODE, (0.01,) * 9, LIMITS.other_s),
        (WorkerTask.CHECKPOINT, (3.0,), 3 * HANG_FACTOR),
        (WorkerTask.FORMING, (), LIMITS.forming_timeout_s * FORMING_SHARE),
        (WorkerTask.STORAGE, (), float("inf")),
        (WorkerTask.PAUSED, (), float("inf")),
    ],
)
def test_a_deadline_has_a_floor_by_task(
    task: WorkerTask, silences_s: tuple[float, ...], deadline_s: float
) -> None:
    assert find_deadline_s(activity(task, silences_s=silences_s), LIMITS) == deadline_s


def look_until(
    detector: HangDetector, found: Activity, end_s: float, *, start_s: float = 0.0, is_excused: bool = False
) -> list[float]:
    """Look several times a second; return the times at which the silence was reported."""
    times = [start_s + LOOK_S * number for number in range(1, round((end_s - start_s) / LOOK_S) + 1)]
    return [
        now_s
        for now_s in times
        if detector.look(found, now_s, is_excused=is_excused, interrupted_s=None) is not None
    ]


REGULAR = activity(WorkerTask.INPUT, silences_s=(0.1,) * 3)


def test_a_silence_is_reported_at_its_deadline_and_whenever_it_has_doubled() -> None:
    reported = look_until(HangDetector(LIMITS, 0.0), REGULAR, 25.0)
    assert reported == [5.25, 10.75, 21.75]


def test_a_wait_in_a_sum_is_reported_early_and_again_at_its_deadline() -> None:
    slow_sum = activity(WorkerTask.SUM, silences_s=(1.5,) * 3)
    assert look_until(HangDetector(LIMITS, 0.0), slow_sum, 35.0) == [5.25, 15.25, 30.75]


def test_progress_ends_a_silence() -> None:
    detector = HangDetector(LIMITS, 0.0)
    assert look_until(detector, REGULAR, 6.0)
    assert detector.is_reported
    later = activity(WorkerTask.INPUT, since_s=6.0, silences_s=(0.1,) * 3)
    assert not look_until(detector, later, 10.0, start_s=6.0)
    assert not detector.is_reported


def test_compilation_is_no_silence_however_long() -> None:
    detector = HangDetector(LIMITS, 0.0)
    assert not look_until(detector, REGULAR, 900.0, is_excused=True)
    assert not look_until(detector, REGULAR, 904.0, start_s=900.0)
    assert look_until(detector, REGULAR, 907.0, start_s=904.0), "a hang after it is one"


def test_time_in_which_the_process_was_stopped_is_no_silence() -> None:
    detector = HangDetector(LIMITS, 0.0)
    look_until(detector, REGULAR, 2.0)
    assert detector.look(REGULAR, 500.0, is_excused=False, interrupted_s=None) is None
    assert look_until(detector, REGULAR, 504.0, start_s=500.0) == [503.25]


def test_a_main_thread_that_does_not_unwind_is_reported_soon() -> None:
    detector = HangDetector(LIMITS, 0.0)
    user_code = activity(WorkerTask.USER_CODE)
    assert detector.look(user_code, 0.5, is_excused=False, interrupted_s=0.5) is None
    assert detector.look(user_code, 1.4, is_excused=False, interrupted_s=1.2) == (1.2, UNWINDING_TIMEOUT_S)


class Now:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.time_s = 0.0

    def __call__(self) -> float:
        return self.time_s


def test_an_activity_knows_the_task_its_beginning_and_how_long_the_last_ones_took() -> None:
    now, main = Now(), threading.get_ident()
    tasks = WorkerActivity(now)
    for step in range(4):
        tasks.begin_step(step)
        with tasks.task(WorkerTask.EVALUATION), tasks.task(WorkerTask.INPUT):
            now.time_s += step + 1.0
    with tasks.task(WorkerTask.EVALUATION), tasks.task(WorkerTask.INPUT):
        found = tasks.read(main)
    assert found.path == (WorkerTask.EVALUATION, WorkerTask.INPUT)
    assert (found.step, found.since_s) == (3, 10.0)
    assert found.silences_s == (2.0, 3.0, 4.0), "without the first, which may have compiled"
    assert tasks.read(main).path == (WorkerTask.USER_CODE,)


def test_input_that_is_read_ahead_hangs_where_its_thread_is() -> None:
    tasks, main, reads = WorkerActivity(Now()), threading.get_ident(), threading.Event()

    def read() -> None:
        with tasks.help_reading():
            reads.wait()

    thread = threading.Thread(target=read)
    thread.start()
    try:
        assert tasks.read(main).thread == main, "nothing waits for it"
        with tasks.task(WorkerTask.INPUT):
            assert tasks.read(main).thread == thread.ident
    finally:
        reads.set()
        thread.join()


def test_of_several_replicas_the_one_counts_that_works_longest() -> None:
    now, main, computes = Now(), threading.get_ident(), threading.Event()
    tasks = WorkerActivity(now)

    def compute() -> None:
        with tasks.task(WorkerTask.COMPUTE):
            computes.wait()

    threads = [threading.Thread(target=compute) for _ in range(2)]
    try:
        for thread in threads:
            now.time_s += 1.0
            thread.start()
            while tasks.read(main).since_s != now.time_s:
                pass
        assert tasks.read(main).thread == threads[0].ident
    finally:
        computes.set()
        for thread in threads:
            thread.join()
