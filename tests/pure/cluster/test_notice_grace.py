"""How long a notice leaves, by the signal that it came with and by what the scheduler says."""

import signal

import pytest

from resilient_jax.cluster.notice_grace import NoticeGrace

NOW_S = 1_000.0


@pytest.mark.parametrize(
    ("end_wall_s", "notice", "seconds"),
    [
        (None, signal.SIGTERM, 25.0),
        (None, signal.SIGUSR1, 25.0),
        (NOW_S + 300, signal.SIGUSR1, 300.0),
        (NOW_S + 300, signal.SIGHUP, 300.0),
        # After `scancel` the limit is far, and SIGKILL near; at the limit it is over, and the grace left.
        (NOW_S + 300, signal.SIGTERM, 25.0),
        (NOW_S - 1, signal.SIGTERM, 25.0),
        (NOW_S - 1, signal.SIGUSR2, 25.0),
    ],
)
def test_only_a_signal_that_was_asked_for_before_the_limit_leaves_the_time_until_it(
    end_wall_s: float | None, notice: signal.Signals, seconds: float
) -> None:
    assert NoticeGrace(seconds=25.0, end_wall_s=end_wall_s).find_s(notice, NOW_S) == seconds
