"""The figures of the stall benchmark, computed from known events."""

import pytest

from resilient_jax.errors import InternalError
from resilient_jax.events import Event, EventKind
from tests.benchmarks.stall.state_share import find_largest_share
from tests.benchmarks.stall.trainer_stalls import find_recovery_s


def make_event(host, generation, here, whole=300, kind=EventKind.STATE_SHARDED):
    return Event(
        kind=kind,
        host=host,
        monotonic_s=0.0,
        wall_s=0.0,
        generation=generation,
        detail={"bytes": whole, "bytes_here": here, "bytes_everywhere": 0},
    )


def test_the_share_is_the_largest_of_the_newest_generation_times_its_hosts():
    before = [make_event(host, 1, 300) for host in "abcd"]
    after = [make_event(host, 3, here) for host, here in (("a", 100), ("b", 101), ("c", 99))]
    other = make_event("d", 4, 300, kind=EventKind.STEP_COMMITTED)
    assert find_largest_share([*after, *before, other], 3) == pytest.approx(1.01)


@pytest.mark.parametrize("hosts", ["", "ab"])
def test_shares_of_fewer_hosts_are_refused(hosts):
    with pytest.raises(InternalError, match=f"found {len(hosts)} hosts that recorded theirs, expected 3"):
        find_largest_share([make_event(host, 1, 100) for host in hosts], 3)


def make_commit(host, generation, at_s):
    return Event(
        kind=EventKind.STEP_COMMITTED,
        host=host,
        monotonic_s=at_s,
        wall_s=at_s,
        generation=generation,
        detail={},
    )


def test_a_job_has_recovered_when_the_last_host_has_made_its_first_step_with_all_others():
    before = [make_commit(host, 1, 1.0) for host in "abc"]
    without = [make_commit(host, 2, 3.0) for host in "ab"]
    back = [make_commit(host, 3, at_s) for host, at_s in (("a", 5.0), ("b", 5.5), ("c", 5.25))]
    later = [make_commit(host, 4, 9.0) for host in "abc"]
    assert find_recovery_s([*later, *before, *without, *back], 2.0, 3) == pytest.approx(3.5)
    assert find_recovery_s([*before, *without, *back[:2]], 2.0, 3) is None
