"""The poller reports the newest checkpoint while the worker is idle, and never delays the worker."""

import queue
import threading

import numpy as np
import pytest

from resilient_jax.events import EventKind
from resilient_jax.worker import checkpoint_poller
from resilient_jax.worker.checkpoint_poller import CheckpointPoller
from tests.support.patience import patience

DEADLINE_S = patience(2)


class Storage:
    """Answers with what is put in, one look at a time, and so shows when it is looked at."""

    def __init__(self) -> None:
        self.answers: queue.Queue = queue.Queue()
        self.told: queue.Queue = queue.Queue()
        self.noted: queue.Queue = queue.Queue()
        self.looks = 0

    def find(self):
        self.looks += 1
        answer = self.answers.get()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def note(self, kind, **detail):
        self.noted.put((kind, detail))

    def make_poller(self):
        return CheckpointPoller(self.find, self.told.put, self.note)


@pytest.fixture(autouse=True)
def _looks_often(monkeypatch):
    monkeypatch.setattr(checkpoint_poller, "POLL_INTERVAL_S", 0.001)


def test_a_change_is_reported_while_the_worker_is_idle():
    storage = Storage()
    watch = storage.make_poller()
    watch.resume()
    for answer in (None, None, 3, 3, 5):
        storage.answers.put(answer)
    assert [storage.told.get(timeout=DEADLINE_S) for _ in range(3)] == [None, 3, 5]


def test_storage_that_hangs_delays_no_worker():
    storage = Storage()
    watch = storage.make_poller()
    watch.resume()
    watch.pause()
    watch.resume()
    storage.answers.put(4)
    assert storage.told.get(timeout=DEADLINE_S) == 4


def test_storage_is_not_polled_while_the_worker_trains():
    storage = Storage()
    watch = storage.make_poller()
    watch.resume()
    storage.answers.put(4)
    assert storage.told.get(timeout=DEADLINE_S) == 4
    watch.pause()
    storage.answers.put(4)  # of a look that had begun
    watch.resume()
    storage.answers.put(6)
    assert set(iter(lambda: storage.told.get(timeout=DEADLINE_S), 6)) <= {4}, (
        "told again, for it is idle anew"
    )


def test_an_unchanged_checkpoint_is_reported_once_each_time_the_worker_becomes_idle():
    storage = Storage()
    watch = storage.make_poller()
    for _ in range(2):
        watch.resume()
        for _ in range(3):
            storage.answers.put(4)
        assert storage.told.get(timeout=DEADLINE_S) == 4
        watch.pause()


def test_a_poll_that_fails_is_an_event_and_the_next_poll_follows():
    storage = Storage()
    watch = storage.make_poller()
    watch.resume()
    storage.answers.put(4)
    storage.answers.put(OSError("stale file handle"))
    storage.answers.put(OSError("stale file handle"))
    storage.answers.put(4)
    assert [storage.told.get(timeout=DEADLINE_S) for _ in range(3)] == [4, None, 4]
    kind, detail = storage.noted.get(timeout=DEADLINE_S)
    assert kind is EventKind.CHECKPOINT_POLL_FAILED
    assert detail["reason"] == "OSError: stale file handle"
    assert storage.noted.empty(), "once, as long as it is the same"


def test_a_job_without_checkpoints_starts_no_poller_thread():
    before = threading.active_count()
    watch = CheckpointPoller(None, lambda step: None, lambda kind, **detail: None)
    watch.resume()
    watch.pause()
    assert threading.active_count() == before


def test_a_numpy_integer_is_a_step():
    storage = Storage()
    storage.answers.put(np.int64(7))
    storage.make_poller().resume()
    told = storage.told.get(timeout=DEADLINE_S)
    assert (told, type(told)) == (7, int)
    storage.answers.put(7)
