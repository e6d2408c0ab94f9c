"""A pipeline whose links become slow: which one is named, and no bit changes. Each host has a network of its own."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from resilient_jax.events import EventKind
from resilient_jax.health.finding import FindingKind
from tests.chaos.network import Network
from tests.jobs.pod import Pod, may_build_networks
from tests.support.patience import patience, wait_until
from tests.support.pipelined_job import PATIENCE_S, SCRIPT, check_units
from tests.support.tiny_job import CONFIG_WITHOUT_STANDBYS, prolong_leases

HOSTS = 3
ROWS = 64
"""Of a microbatch: what a stage sends for it are 32 KiB then."""
SLOW_MBIT_PER_S = 8.0
"""These 32 KiB take 33 ms then, six times in a step."""
SLOW = "host-1"
NAMED_S = patience(40)
"""A timeout for a busy machine, on which devices seem to be slow and are measured first; it takes some 30 s."""


@pytest.fixture
def network() -> Iterator[Network]:
    if (why_not := may_build_networks()) is not None:
        pytest.skip(why_not)
    found = Network(HOSTS)
    try:
        found.build()
        yield found
    finally:
        found.remove()


@pytest.mark.full
def test_a_slow_link_of_a_pipeline_is_named_and_no_bit_changes(network: Network, tmp_path: Path) -> None:
    words = [str(HOSTS), "pace=0", f"rows={ROWS}"]
    # A host that is lost on a busy machine would be another cause for everything to begin anew.
    config = prolong_leases(CONFIG_WITHOUT_STANDBYS, 30.0)
    with Pod(
        tmp_path, None, network.sites(), script=SCRIPT, words=words, config=f"{config}snapshot_parity = 1\n"
    ) as pod:
        wait_until("links to compare with", lambda: are_links_known(pod), NAMED_S)
        assert list_slow(pod) == [], "nothing is wrong yet"
        lift = network.throttle_link(SLOW, SLOW_MBIT_PER_S)
        try:
            wait_until("a slow link", lambda: list_slow(pod) != [], NAMED_S)
            wait_until("a slow link in the report", lambda: is_shown(pod), PATIENCE_S)
        finally:
            lift()
        assert list_slow(pod) == [SLOW]
        pod.end()
        assert set(list_slow(pod)) == {SLOW}
        check_units(tmp_path, "\n".join(agent.output() for agent in pod.agents.values()), words=words[2:])


def are_links_known(pod: Pod) -> bool:
    """Return whether it was measured what links take: in step 128, or later on a busy machine."""
    return any(event.kind is EventKind.LINKS_MEASURED for event in pod.events())


def list_slow(pod: Pod) -> list[str]:
    """Return the hosts whose links were named as slow."""
    return [
        str(event.detail["slow"])
        for event in pod.events()
        if event.kind is EventKind.HOST_SLOW and event.detail["part"] == FindingKind.LINK
    ]


def is_shown(pod: Pod) -> bool:
    """Return whether a worker reports the slow link, which `status` then shows."""
    report = pod.report()
    shown = [
        slow
        for host in (report.hosts if report is not None else ())
        if host.worker is not None
        for slow in host.worker.report.findings.slow_hosts
    ]
    return any((slow.host, slow.kind) == (SLOW, FindingKind.LINK) for slow in shown)
