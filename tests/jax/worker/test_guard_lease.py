"""When a worker counts its host's lease as expired: a slow one, too, only if it was not renewed."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from resilient_jax.ids import HostName
from resilient_jax.protocol.worker_messages import HoldTraining, LeaseRenewed
from resilient_jax.protocol.worker_report import WorkerState
from resilient_jax.worker import guard_thread
from resilient_jax.worker.guard_thread import LEASE_CHECK_INTERVAL_S, GuardThread
from resilient_jax.worker.hang_detection import HangLimits

TTL_S = 2.0
LIMITS = HangLimits(regular_s=60.0, other_s=60.0, forming_timeout_s=60.0)


class Ended(Exception):
    """The script of a test is over."""


def list_orders(
    monkeypatch: pytest.MonkeyPatch, renewed: Callable[[float], bool], slow_s: float
) -> list[Any]:
    """Return what a guard ordered in 20 s.

    Args:
        renewed: whether the agent renews the lease at a time, by the second.
        slow_s: how long the guard waits for a processor between what it has read and what it makes of that.
    """
    clock, handled = SimpleNamespace(now_s=100.0), []
    sent: list[float] = []

    def receive(timeout_s: float) -> list[Any]:
        if clock.now_s > 120.0:
            raise Ended
        clock.now_s += timeout_s
        times = [second / 2 for second in range(200, int(2 * clock.now_s) + 1)]
        new = [at_s for at_s in times if at_s not in sent and renewed(at_s)]
        sent.extend(new)
        return [SimpleNamespace(message=LeaseRenewed(valid_until_s=at_s + TTL_S)) for at_s in new]

    handler: Any = SimpleNamespace(
        state=WorkerState.RUNNING,
        is_interrupted=False,
        record_event=lambda *_, **__: None,
        handle_order=handled.append,
    )
    connection: Any = SimpleNamespace(receive=receive, send=lambda _: None)
    monkeypatch.setattr(guard_thread.time, "monotonic", lambda: clock.now_s)
    guard = GuardThread(HostName("a"), connection, handler, lambda: None, LIMITS)
    guard._watch = SimpleNamespace(look=lambda: None, feed_dump=lambda: None)  # pyright: ignore[reportAttributeAccessIssue]
    hold = guard._hold_if_lease_expired

    def starve(looked_s: float) -> None:
        clock.now_s += slow_s
        hold(looked_s)

    monkeypatch.setattr(guard, "_hold_if_lease_expired", starve)
    with pytest.raises(Ended):
        guard._listen()
    return handled


@pytest.mark.parametrize("slow_s", [0.0, 1.0, 5.0])
def test_a_worker_that_reads_renewals_late_keeps_its_lease(monkeypatch: pytest.MonkeyPatch, slow_s: float):
    assert list_orders(monkeypatch, lambda at_s: True, slow_s) == []


@pytest.mark.parametrize("slow_s", [0.0, 1.0])
def test_a_lease_that_is_not_renewed_ends_training(monkeypatch: pytest.MonkeyPatch, slow_s: float):
    held = list_orders(monkeypatch, lambda at_s: at_s < 105.0, slow_s)
    assert set(held) == {HoldTraining()}


def test_it_is_noticed_within_two_looks(monkeypatch: pytest.MonkeyPatch):
    late_s = 2 * LEASE_CHECK_INTERVAL_S
    held = list_orders(monkeypatch, lambda at_s: at_s <= 120.0 - TTL_S - late_s - 0.5, 0.0)
    assert held
