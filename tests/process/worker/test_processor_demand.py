"""A process that computes or is starved of processor time is not taken for one that hangs."""

import threading
import time

from resilient_jax.worker.processor_demand import BlockedTime, measure_processor_demand_s


def test_a_thread_that_computes_is_not_blocked_and_one_that_waits_is() -> None:
    """More threads than processors: those that wait for one count as those that run."""
    began = threading.Barrier(4)
    ends = threading.Event()

    def compute() -> None:
        began.wait()
        while not ends.is_set():
            pass

    threads = [threading.Thread(target=compute) for _ in range(3)]
    for thread in threads:
        thread.start()
    began.wait()
    started_s = time.monotonic()
    blocked = BlockedTime(started_s)
    main = BlockedTime(started_s, frozenset((threading.get_native_id(),)))
    demand_s = measure_processor_demand_s()
    assert demand_s is not None
    while (now_s := measure_processor_demand_s()) is not None and now_s < demand_s + 0.2:
        time.sleep(0.001)
    elapsed_s = time.monotonic() - started_s
    assert blocked.measure_s(time.monotonic()) < elapsed_s
    assert main.measure_s(started_s + elapsed_s) == elapsed_s
    ends.set()
    for thread in threads:
        thread.join()


def test_a_process_without_work_is_blocked() -> None:
    now_s = time.monotonic()
    blocked = BlockedTime(now_s)
    assert blocked.measure_s(now_s + 100.0) > 99.0
