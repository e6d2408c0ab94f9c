"""What a host does that has another state than the others: it goes on, starts again, or ends the job."""

import subprocess
import sys
from collections.abc import Sequence

import numpy as np
import pytest

from resilient_jax.errors import StateError
from resilient_jax.events import Event, EventKind
from resilient_jax.ids import HostName
from resilient_jax.protocol.worker_messages import RESTART_EXIT_CODE
from resilient_jax.worker.host_comparison import HostComparison
from resilient_jax.worker.standalone import StandaloneControl
from tests.support.paths import ROOT
from tests.support.patience import patience

HOSTS = [HostName("h0"), HostName("h1"), HostName("h2")]
COMPLETE = 1
"""Key of what hosts have that have everything."""
NOTHING = (0, 0, 0)


class Control(StandaloneControl):
    """Keeps what is recorded."""

    def __init__(self) -> None:
        super().__init__(host="h0")
        self.recorded: list[tuple[EventKind, dict]] = []

    def record_event(self, kind: EventKind, **detail: str | float | bool) -> Event:
        self.recorded.append((kind, detail))
        return super().record_event(kind, **detail)


def complete(lanes: tuple[int, int]) -> tuple[int, ...]:
    """Return the digests of a host with a complete state."""
    return (COMPLETE, *lanes, *NOTHING)


def sharded(key: int, lanes: tuple[int, int]) -> tuple[int, ...]:
    """Return the digests of a host with a shard."""
    return (*NOTHING, key, *lanes)


def compare(digests: Sequence[tuple[int, ...]], host: str = "h0") -> list[tuple[EventKind, dict]]:
    """Compare in this process; return what was recorded."""
    control = Control()
    HostComparison(HOSTS[: len(digests)], HostName(host), control).compare_states(
        np.array(digests, np.int32), 64
    )
    return control.recorded


SAME, OTHER, THIRD = (3, 4), (3, 5), (2, 4)
DIFFERS = [(EventKind.STATE_DIFFERS, {"hosts": "h1", "steps": 64})]


@pytest.mark.parametrize(
    "digests",
    [
        [complete(SAME)],
        [complete(SAME)] * 3,
        [(*NOTHING, *NOTHING)] * 3,
        [complete(SAME), (*NOTHING, *NOTHING), complete(SAME)],
        [sharded(7, SAME), sharded(8, OTHER), sharded(9, THIRD)],
        [sharded(7, SAME), sharded(8, OTHER), sharded(8, OTHER)],
    ],
)
def test_equal_states_are_no_event(digests: list[tuple[int, ...]]) -> None:
    assert compare(digests) == []


@pytest.mark.parametrize("host", ["h0", "h2"])
@pytest.mark.parametrize("other", [OTHER, THIRD])
def test_the_hosts_that_most_agree_with_name_the_other_and_go_on(host: str, other: tuple[int, int]) -> None:
    assert compare([complete(SAME), complete(other), complete(SAME)], host) == DIFFERS


@pytest.mark.parametrize(
    "digests",
    [
        [complete(SAME), complete(OTHER)],
        [complete(SAME), complete(OTHER), complete(THIRD)],
        [sharded(7, SAME), sharded(8, THIRD), sharded(8, OTHER)],
    ],
)
def test_without_a_majority_the_job_ends_and_says_after_which_step_and_where(
    digests: list[tuple[int, ...]],
) -> None:
    with pytest.raises(StateError, match=r"the state after 64 steps: found another on each of (h0, )?h1"):
        compare(digests)


def test_the_host_that_differs_ends_its_process_at_once_and_says_so() -> None:
    """To unwind would wait for peers, which wait for this host."""
    program = f"""
import atexit, numpy as np
from tests.process.worker.test_host_comparison import *
atexit.register(print, "unwound")
try:
    compare({[complete(SAME), complete(OTHER), complete(SAME)]!r}, "h1")
finally:
    print("unwound")
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=patience(6),
        check=False,
    )
    assert done.returncode == RESTART_EXIT_CODE, done.stderr
    assert done.stdout == ""
    assert (
        "the state of h1 after 64 steps differs from that of most hosts; starting again with theirs"
        in done.stderr
    )
