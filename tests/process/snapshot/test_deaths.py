"""Every set of servers that parity covers is killed in every phase of the protocol, and the survivors continue."""

import itertools
import signal

import pytest

from resilient_jax.events import EventKind
from resilient_jax.protocol.failpoints import FailPoint
from resilient_jax.snapshot.snapshot_choice import choose_snapshot
from tests.process.snapshot.served_snapshots import (
    COMMITTED,
    assert_rebuilds,
    commit_all,
    held_at,
    open_all,
    part_of,
    take_all,
)
from tests.support.full_only import full_but
from tests.support.patience import patience, wait_until
from tests.support.snapshot_servers import make_id, running, take

PLACES = (
    FailPoint.BEFORE_PARITY,
    FailPoint.DURING_PARITY,
    FailPoint.BEFORE_COMPLETE,
    FailPoint.BEFORE_COMMITTED,
)
VICTIMS = [(1, (v,)) for v in range(4)] + [(2, pair) for pair in itertools.combinations(range(4), 2)]
"""Of four hosts, every set that parity m covers; the first host is the root."""
REPRESENTATIVES = [(1, (0,)), (1, (2,)), (2, (0, 1)), (2, (2, 3))]
"""The root and another, alone and with one more."""
each_victim = pytest.mark.parametrize(("parity", "victims"), full_but(VICTIMS, REPRESENTATIVES.__contains__))


def assert_goes_on(layout, hosts, parity, victims):
    """Check that survivors resume from the newest recoverable snapshot, without newer ones or blocked slots."""
    rest = [host for index, host in enumerate(hosts) if index not in victims]
    held = {host.name: (host.endpoint, host.holding) for host in rest}
    complete = [sum(s.id.step == step for _, holding in held.values() for s in holding) for step in (1, 2)]
    committed = max(s.id for _, holding in held.values() for s in holding if s.phase is COMMITTED)
    plan = choose_snapshot(held)
    assert plan is not None
    assert plan.id == make_id(2 if complete[1] >= len(hosts) - parity else 1) >= committed
    next_layout, next_workers = open_all(
        rest, min(parity, len(rest) - 1), generation=layout.generation + 1, restored=plan.id
    )
    assert_rebuilds(layout, hosts, hosts, plan.id, parity, set(victims))
    for host in rest:
        host.wait(lambda host=host: all(s.phase is COMMITTED for s in host.holding))
        assert max(status.id for status in host.holding) == plan.id
    for step in (3, 4):
        commit_all(next_layout, rest, next_workers, make_id(step, layout.generation + 1))
    return plan.id


@pytest.mark.parametrize("place", PLACES)
@each_victim
def test_training_resumes_from_the_newest_recoverable_snapshot_wherever_hosts_are_killed(
    tmp_path, place, parity, victims
):
    with held_at(tmp_path, 4) as (hosts, controller):
        layout, workers = open_all(hosts, parity)
        commit_all(layout, hosts, workers, make_id(1))
        killed = [hosts[victim] for victim in victims]
        controller.hold(place, [host.name for host in killed], step=2)
        take_all(layout, hosts, workers, make_id(2))
        there = {host.name for host in killed}
        if place is FailPoint.BEFORE_COMMITTED and layout.root in there:
            # While the root is stopped, no other host is notified that the snapshot is complete.
            there = {layout.root}
        wait_until("hosts at the place", lambda: controller.list_held_hosts() == there)
        # With one parity row no host waits for the encoder of another stripe.
        nobody_waits = parity == 1 or place in (FailPoint.BEFORE_COMPLETE, FailPoint.BEFORE_COMMITTED)
        for host in hosts if nobody_waits else ():
            if host not in killed:
                host.wait(lambda host=host: host.phase_of(make_id(2)) is not None)
        for host in killed:
            host.kill()
        controller.release()
        found = assert_goes_on(layout, hosts, parity, victims)
        assert not nobody_waits or found == make_id(2)


@each_victim
def test_hosts_that_die_during_a_copy_lose_that_snapshot_but_not_the_previous_one(parity, victims):
    with running(4) as hosts:
        layout, workers = open_all(hosts, parity)
        commit_all(layout, hosts, workers, make_id(1))
        for index, (host, worker) in enumerate(zip(hosts, workers, strict=True)):
            if index in victims:
                worker.begin(make_id(2))[:1] = b"?"
            else:
                take(worker, make_id(2), host.name, part_of(layout, host, make_id(2)))
        for victim in victims:
            hosts[victim].kill()
        assert assert_goes_on(layout, hosts, parity, victims) == make_id(1)


@pytest.mark.parametrize(
    ("first", "second"),
    full_but(itertools.permutations(range(4), 2), lambda pair: pair in {(0, 1), (1, 0), (2, 3)}),
)
def test_a_host_lost_before_new_groups_commit_is_covered_by_the_old_stripes(tmp_path, first, second):
    with held_at(tmp_path, 4) as (hosts, controller):
        layout, workers = open_all(hosts, 2)
        commit_all(layout, hosts, workers, make_id(1))
        hosts[first].kill()
        rest = [host for index, host in enumerate(hosts) if index != first]
        next_layout, next_workers = open_all(rest, 2, generation=2, restored=make_id(1))
        controller.hold(FailPoint.DURING_PARITY, [host.name for host in rest], step=2)
        take_all(next_layout, rest, next_workers, make_id(2, 2))
        wait_until("hosts at the place", lambda: controller.list_held_hosts() == {host.name for host in rest})
        hosts[second].kill()
        controller.release()
        left = [host for host in rest if host is not hosts[second]]
        plan = choose_snapshot({host.name: (host.endpoint, host.holding) for host in left})
        assert plan is not None
        assert plan.id == make_id(1)
        open_all(left, 1, generation=3, restored=plan.id)
        assert_rebuilds(layout, hosts, hosts, plan.id, 2, {first, second})


def test_two_servers_killed_together_are_covered_by_two_parity_rows():
    with running(6) as hosts:
        layout, workers = open_all(hosts, 2)
        commit_all(layout, hosts, workers, make_id(1))
        for victims in itertools.combinations(range(6), 2):
            assert_rebuilds(layout, hosts, hosts, make_id(1), 2, set(victims))
        for victim in (1, 2):
            hosts[victim].kill()
        assert_rebuilds(layout, hosts, hosts, make_id(1), 2, {1, 2})


HASTY_SERVER = "tests.process.snapshot.hasty_server:main"
CONNECT_TIMEOUT_S = patience(0.1)


def list_failed_peers(host):
    """Return the peers of whose failures at the first snapshot a server has told."""
    return [
        event.detail["peer"]
        for event in host.events
        if event.kind is EventKind.SNAPSHOT_PEER_FAILED and event.step == 1
    ]


def test_a_suspended_server_delays_a_snapshot_and_is_named_in_an_event(tmp_path):
    with running(3, call=(HASTY_SERVER, str(CONNECT_TIMEOUT_S))) as hosts:
        layout, workers = open_all(hosts, 1)
        hosts[1].process.send_signal(signal.SIGSTOP)
        try:
            for i in (0, 2):
                take(workers[i], make_id(1), hosts[i].name, part_of(layout, hosts[i], make_id(1)))
            hosts[0].wait(lambda: hosts[1].name in list_failed_peers(hosts[0]))
        finally:
            hosts[1].process.send_signal(signal.SIGCONT)
        take(workers[1], make_id(1), hosts[1].name, part_of(layout, hosts[1], make_id(1)))
        for host in hosts:
            host.wait_phase(make_id(1), COMMITTED)
