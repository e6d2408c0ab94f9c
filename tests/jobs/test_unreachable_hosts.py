"""Hosts that cannot reach each other, although all reach the store, in a real job; what is decided is in
`pure/membership`."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from resilient_jax.cluster.job_report import JobReport
from resilient_jax.events import EventKind
from tests.chaos.network import Network, build_network
from tests.jobs.pod import Pod, may_build_networks
from tests.support.agents import served_store
from tests.support.patience import wait_until
from tests.support.tiny_job import CONFIG_WITHOUT_STANDBYS, HANGS_ARE_NAMED

pytestmark = pytest.mark.full

NOBODY = "02:00:00:00:00:01"
"""A hardware address that no machine has: what is sent there is lost without a word, as by a firewall that drops it."""


def separate(network: Network, one: str, other: str) -> None:
    """Have two hosts lose all that they send to each other, on connections that are open, too."""
    sites = {f"host-{index}": site for index, site in enumerate(network.sites())}
    for sender, receiver in ((one, other), (other, one)):
        neighbour = ["neigh", "replace", sites[receiver].address, "lladdr", NOBODY, "dev", "eth0"]
        subprocess.run([*sites[sender].command_prefix, "ip", *neighbour, "nud", "permanent"], check=True)


@pytest.fixture
def network() -> Iterator[Network]:
    if (why_not := may_build_networks()) is not None:
        pytest.skip(why_not)
    with build_network(3) as network:
        yield network


@pytest.mark.parametrize("does_leader_leave", [False, True])
def test_in_a_step_the_fewest_hosts_leave_and_the_pairs_are_named(
    tmp_path: Path, network: Network, *, does_leader_leave: bool
) -> None:
    with (
        served_store(f"{network.gateway}:0") as store,
        Pod(tmp_path, store, network.sites(), config=HANGS_ARE_NAMED) as pod,
    ):
        report = pod.wait_training(3)
        leader = report.leader
        assert leader is not None
        others = sorted(set(pod.agents) - {leader})
        for other in others if does_leader_leave else others[:1]:
            separate(network, leader, other)
        after = wait_without_one(pod)
        (record,) = after.quarantine
        assert record.host == (leader if does_leader_leave else others[0])
        assert (after.leader == leader) is not does_leader_leave
        assert all(host in record.reason for host in (leader, others[0]))
        # The first world, and one without that host: none is formed in vain.
        assert len(list_worlds(pod)) == 2
        pod.finish()


def test_from_the_start_a_pair_costs_one_of_the_two(tmp_path: Path, network: Network) -> None:
    separate(network, "host-0", "host-1")
    with (
        served_store(f"{network.gateway}:0") as store,
        Pod(tmp_path, store, network.sites(), config=CONFIG_WITHOUT_STANDBYS) as pod,
    ):
        after = wait_without_one(pod)
        (record,) = after.quarantine
        assert record.host in ("host-0", "host-1")
        assert "host-0 and host-1 cannot reach each other" in record.reason
        assert len(list_worlds(pod)) == 2
        pod.finish()


def wait_without_one(pod: Pod) -> JobReport:
    """Wait until two of three hosts train together, as the third was taken out."""
    wait_until("a host is taken out", lambda: bool((now := pod.report()) and now.quarantine), pod.patience_s)
    return pod.wait_training(2)


def list_worlds(pod: Pod) -> set[object]:
    """Return the generations that have begun to form a world."""
    return {
        event.generation
        for event in pod.events()
        if event.kind is EventKind.GENERATION_PHASE and event.detail["phase"] == "form"
    }
