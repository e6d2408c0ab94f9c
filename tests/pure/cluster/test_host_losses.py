"""A host that is lost again and again is quarantined: which losses count, and for how long."""

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from resilient_jax.cluster.agent_context import AgentContext
from resilient_jax.cluster.host_losses import (
    SingleLosses,
    forget_host_losses,
    is_loss_counted,
    list_lost_before,
    note_host_loss,
)
from resilient_jax.cluster.quarantine import clear_quarantine, read_quarantine
from resilient_jax.config import JobConfig
from resilient_jax.config.job_config import RESTART_WINDOW_S
from resilient_jax.events import EventKind
from resilient_jax.ids import HostName, JobName, Revision
from resilient_jax.membership.job_start import make_initial_state
from resilient_jax.protocol.recovery_records import NeededHosts
from resilient_jax.protocol.store_keys import make_leader_key
from resilient_jax.store.interface import NO_LEASE, PutOp
from resilient_jax.store.memory import MemoryStore
from resilient_jax.telemetry.event_log import EventLog
from tests.support.agent_parts import make_agent_settings
from tests.support.manual_clock import ManualClock
from tests.support.membership_job import Job, training

HOST, OTHER = HostName("b"), HostName("c")


def count_losses(
    tmp_path: Path,
    gaps_s: list[float],
    *,
    max_host_losses: int = 2,
    host: HostName = HOST,
    token: int = 0,
    before_last: Callable[[MemoryStore, JobName], Awaitable[object]] | None = None,
) -> tuple[list[str], list[str]]:
    """Return who is in quarantine, and who was by the events, when a host was lost after each of these gaps."""

    async def run() -> tuple[list[str], list[str]]:
        clock, log = ManualClock(), EventLog(None, "a")
        async with MemoryStore() as store:
            config = JobConfig(max_host_losses=max_host_losses)
            context = AgentContext(
                settings=make_agent_settings(tmp_path / "train.py", config),
                store=store,
                clock=clock,
                log=log,
                print_line=lambda line: None,
            )
            leads = PutOp(make_leader_key(context.settings.job), b"a", NO_LEASE)
            revision = (await store.transaction([], [leads])).revision
            for number, gap_s in enumerate(gaps_s, 1):
                clock.advance(gap_s)
                if before_last is not None and number == len(gaps_s):
                    await before_last(store, context.settings.job)
                await note_host_loss(context, host, Revision(token or revision))
            found = await read_quarantine(store, context.settings.job)
        events = [event for event in log.recent if event.kind is EventKind.HOST_QUARANTINED]
        return [record.host for record in found], [str(event.detail["quarantined"]) for event in events]

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("gaps_s", "is_quarantined"),
    [
        ([1.0, 1.0], False),
        ([1.0, 1.0, 1.0], True),
        ([1.0, 1.0, RESTART_WINDOW_S], False),
        ([1.0, 240.0, 240.0], True),
    ],
)
def test_losses_count_within_the_window(tmp_path: Path, gaps_s: list[float], is_quarantined: bool) -> None:
    assert count_losses(tmp_path, gaps_s) == (["b"] * is_quarantined,) * 2


@pytest.mark.parametrize("is_over", [True, False])
def test_a_job_that_is_over_leaves_no_losses_to_another_of_its_name(tmp_path: Path, is_over: bool) -> None:
    def end(store: MemoryStore, job: JobName) -> Awaitable[object]:
        return forget_host_losses(store, job) if is_over else asyncio.sleep(0)

    expected = ([] if is_over else ["b"],) * 2
    assert count_losses(tmp_path, [1.0] * 3, before_last=end) == expected


def test_a_host_whose_quarantine_an_operator_ends_begins_anew(tmp_path: Path) -> None:
    assert count_losses(
        tmp_path, [1.0] * 4, before_last=lambda store, job: clear_quarantine(store, job, HOST)
    ) == (
        [],
        ["b"],
    )


def test_an_agent_that_leads_no_more_quarantines_nobody(tmp_path: Path) -> None:
    assert count_losses(tmp_path, [1.0] * 4, token=99) == ([], [])


def test_the_loss_of_a_host_that_took_part_counts() -> None:
    job = training("a", "b", "c")
    assert is_loss_counted(job.state, HOST, min_hosts=2)
    assert not is_loss_counted(job.state, HOST, min_hosts=3), "the job would wait for it"
    assert not is_loss_counted(job.state, HostName("unknown"), min_hosts=1)
    alone = training("a")
    assert not is_loss_counted(alone.state, HostName("a"), min_hosts=1), "nobody else is left"


def test_a_leader_that_is_lost_with_its_host_is_counted_by_the_next_one() -> None:
    generation = training("a", "b", "c").generation

    def find_lost(*left: str, min_hosts: int = 1) -> list[HostName]:
        statuses = [training("a", "b", "c").status(name) for name in left]
        return list_lost_before(make_initial_state(generation, statuses, 0.0), min_hosts)

    assert find_lost("a", "c") == [HOST]
    assert find_lost("a", "b", "c") == []
    assert find_lost("a", "c", min_hosts=3) == [], "the job would wait for it"


def test_a_host_that_one_replica_needs_is_waited_for_as_one_of_min_hosts() -> None:
    job = training("a", "b", "c")
    job.report("a", needed_hosts=NeededHosts(generation=job.generation.number, count=3, num_hosts=2))
    assert not is_loss_counted(job.state, HOST, min_hosts=1), "the others wait for it"
    left = {host: status for host, status in job.state.hosts.items() if host != HOST}
    assert list_lost_before(dataclasses.replace(job.state, hosts=left), min_hosts=1) == []


def test_a_host_that_said_that_it_leaves_is_not_lost() -> None:
    job: Job = training("a", "b", "c")
    job.change("b", is_draining=True)
    assert not is_loss_counted(job.state, HOST, min_hosts=1)
    assert is_loss_counted(job.state, OTHER, min_hosts=1)


def test_losses_within_a_lease_have_a_common_cause() -> None:
    losses = SingleLosses(lease_ttl_s=3.0)
    losses.add(HOST, 0.0, is_counted=True)
    assert losses.take(2.9) == []
    assert losses.take(3.1) == [HOST]
    assert losses.take(3.2) == [], "once"
    losses.add(HOST, 20.0, is_counted=True)
    losses.add(OTHER, 22.0, is_counted=False)
    assert losses.take(23.5) == losses.take(26.0) == []
    losses.add(OTHER, 40.0, is_counted=False)
    assert losses.take(43.5) == [], "it had a notice to leave"


def test_a_host_that_is_lost_again_within_a_lease_counts_each_time() -> None:
    losses = SingleLosses(lease_ttl_s=3.0)
    losses.add(HOST, 0.0, is_counted=True)
    losses.add(HOST, 2.0, is_counted=True)
    assert losses.take(5.5) == [HOST, HOST]
