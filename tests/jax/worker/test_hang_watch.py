"""The guard thread's ordinary looks walk no stack: that costs more than a look may, and was the death of workers."""

import dataclasses
import itertools

import pytest

from resilient_jax import threads
from resilient_jax.protocol.worker_report import WorkerState
from resilient_jax.worker import hang_watch
from resilient_jax.worker.hang_detection import HangLimits
from resilient_jax.worker.hang_watch import HangWatch

LOOKS = 1_000


@dataclasses.dataclass
class Reporter:
    state: WorkerState = WorkerState.RUNNING
    is_interrupted: bool = False

    def report_found(self, change, found) -> None:
        raise AssertionError("nothing is overdue")

    def record_event(self, kind, **detail) -> object:
        raise AssertionError("nothing is overdue")


def test_a_look_at_a_worker_that_is_in_time_reads_no_stack(monkeypatch: pytest.MonkeyPatch):
    clock = itertools.count()
    monkeypatch.setattr(hang_watch.time, "monotonic", lambda: next(clock) * hang_watch.LOOK_INTERVAL_S * 2)
    monkeypatch.setattr(threads.sys, "_current_frames", lambda: pytest.fail("a stack was read"))
    watch = HangWatch(None, Reporter(), HangLimits(regular_s=1e6, other_s=1e6, forming_timeout_s=1e6))  # pyright: ignore[reportArgumentType]
    for _ in range(LOOKS):
        watch.look()
    assert next(clock) > LOOKS
