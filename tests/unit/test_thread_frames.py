"""Where a thread is, also while it runs on."""

import threading
from types import SimpleNamespace

import pytest

from resilient_jax import threads
from resilient_jax.threads import MAX_WALKS, list_frames


def wait_here(begun: threading.Event, end: threading.Event) -> None:
    begun.set()
    end.wait(60)


def test_the_frames_of_a_thread_are_its_calls_the_innermost_first():
    begun, end = threading.Event(), threading.Event()
    thread = threading.Thread(target=wait_here, args=(begun, end))
    thread.start()
    assert begun.wait(60)
    assert thread.ident is not None
    names = [frame.f_code.co_name for frame in list_frames(thread.ident)]
    end.set()
    thread.join()
    assert names.index("wait_here") < names.index("run")
    assert list_frames(thread.ident) == []


@pytest.mark.parametrize(("num_broken", "found"), [(0, 2), (MAX_WALKS - 1, 2), (MAX_WALKS, 1)])
def test_a_stack_that_changed_meanwhile_is_walked_again(
    monkeypatch: pytest.MonkeyPatch, num_broken: int, found: int
):
    """CPython gives something that is no frame."""
    outer = SimpleNamespace(f_back=None)
    walks = [*num_broken * ["no frame"], *MAX_WALKS * [outer]]
    monkeypatch.setattr(threads, "FrameType", SimpleNamespace)
    monkeypatch.setattr(threads.sys, "_current_frames", lambda: {7: SimpleNamespace(f_back=walks.pop(0))})
    assert len(list_frames(7)) == found
