"""Hosts that leave, die, return, lose the store or lose the network, in a job of real processes."""

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from resilient_jax.cluster.job_report import JobComponent, JobReport
from resilient_jax.cluster.run_directory import read_contact
from resilient_jax.events import Event, EventKind
from resilient_jax.ids import GenerationNumber
from resilient_jax.protocol.failpoints import FailPoint
from resilient_jax.protocol.generation import GenerationPhase
from resilient_jax.protocol.snapshots import SnapshotPhase
from resilient_jax.state.peer_transfer import DESCRIBE_PART, SERVICE, OfferRequest
from resilient_jax.transport import PeerChannel
from resilient_jax.transport.credentials import Credentials
from tests.chaos.network import build_network
from tests.jobs.pod import Pod, loopback_sites, may_build_networks, wait_steps
from tests.support.agents import served_store
from tests.support.patience import Deadline, patience, wait_until
from tests.support.tiny_job import (
    CONFIG_WITHOUT_STANDBYS,
    ONE_DEVICE,
    RECOVERY_S,
    TinyJob,
    protect,
    read_logs,
)

HOSTS = 4
INTERVAL_STEPS = 3
STILL_S = 3.0
"""A tiny step takes some hundredths of this: a host that commits no step for so long has stopped."""


def number_of(report: JobReport) -> GenerationNumber:
    assert report.generation is not None
    return report.generation.number


def test_a_notice_is_a_planned_leave_and_a_job_recovers_from_a_single_host(tmp_path: Path) -> None:
    with served_store() as store, Pod(tmp_path, store, loopback_sites(4)) as pod:
        report = pod.wait_training(4)
        leaving = next(host for host in pod.agents if host != report.leader)
        pod.agents[leaving].process.send_signal(signal.SIGTERM)
        assert pod.agents[leaving].wait() == 84, pod.output()
        report = pod.wait_training(3, number_of(report))
        assert_planned(pod.events())
        # Kills in a row, the leader first, down to one.
        dead = [leaving]
        for left in (2, 1):
            assert report.leader is not None
            pod.agents[report.leader].kill()
            dead.append(report.leader)
            report = pod.wait_training(left, number_of(report))
        alone = pod.step()
        wait_steps(pod, 5)
        for host in dead:
            pod.start(host)
        pod.wait_training(4, number_of(report))
        wait_until("their steps", lambda: all(pod.steps_of(host)[-1] > alone for host in dead), RECOVERY_S)
        pod.finish()


@pytest.mark.full  # joins and leaves are below, and in the simulated cluster
def test_a_job_grows_from_two_hosts_to_six_and_shrinks_back(tmp_path: Path) -> None:
    with served_store() as store, Pod(tmp_path, store, loopback_sites(6), num_hosts=2) as pod:
        number = number_of(pod.wait_training(2))
        more = [f"host-{index}" for index in range(2, 6)]
        for host in more:
            pod.start(host)
        number = number_of(pod.wait_training(6, number))
        wait_steps(pod, 3)
        for host in more:
            pod.agents[host].process.send_signal(signal.SIGTERM)
        assert {pod.agents.pop(host).wait() for host in more} == {84}, pod.output()
        pod.wait_training(2, number)
        pod.finish()
        kinds = {event.kind for event in pod.events()}
        assert EventKind.COLLECTIVE_FAILED not in kinds, "hosts come and go between steps"
    counted = {row["processes"] for rows in read_logs(tmp_path).values() for row in rows}
    assert {2, 6} <= counted


def assert_planned(events: list[Event]) -> None:
    """Assert that the change that began with the notice interrupted no step."""
    (notice,) = (event for event in events if event.kind is EventKind.HOST_DRAINING)
    later = [event for event in events if event.monotonic_s > notice.monotonic_s]
    phases = [e.detail["phase"] for e in later if e.kind is EventKind.GENERATION_PHASE]
    assert phases[:4] == ["pause", "boundary", "form", "active"], phases
    assert "quiesce" not in phases
    assert not any(e.kind in (EventKind.COLLECTIVE_FAILED, EventKind.WORKER_KILLED) for e in later)


def test_a_host_without_a_network_stops_while_the_others_continue(tmp_path: Path) -> None:
    if (why_not := may_build_networks()) is not None:
        pytest.skip(why_not)
    with (
        build_network(3) as network,
        served_store(f"{network.gateway}:0") as store,
        Pod(tmp_path, store, network.sites()) as pod,
    ):
        report = pod.wait_training(3)
        assert report.leader is not None
        lost = report.leader
        mend = network.cut_link(lost)
        pod.agents[lost].wait_said("training stops here until the store is back")
        report = pod.wait_training(2, number_of(report))
        stopped_at = pod.steps_of(lost)[-1]
        wait_steps(pod, 10)
        assert pod.steps_of(lost)[-1] == stopped_at, "the minority trains on"
        worker = [path for path in os.listdir(tmp_path) if path.startswith(f"steps-{lost}-")]
        mend()
        pod.wait_training(3, number_of(report))
        pod.finish()
        assert len(worker) >= 1
        assert pod.steps_of(lost)[-1] > stopped_at


def test_the_agent_that_serves_the_store_is_killed_and_started_again(tmp_path: Path) -> None:
    with Pod(tmp_path, None, loopback_sites(3)) as pod:
        report = pod.wait_training(3)
        journal = tmp_path / "host-0" / "store-pod.journal"
        assert journal.exists()
        pod.agents["host-0"].kill()
        pod.start("host-0")
        pod.agents["host-0"].wait_said("the store goes on from revision")
        pod.wait_training(3, number_of(report))
        pod.finish()
        assert not journal.exists(), "the job is over"


def test_a_single_host_trains_on_all_its_devices(tmp_path: Path) -> None:
    with TinyJob(tmp_path, 1, words=["pace=0"]) as tiny:
        wait_until("many steps", lambda: tiny.step() > 300, RECOVERY_S)
        tiny.finish()


def test_a_store_that_comes_back_empty_ends_the_job_with_what_to_do(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        with served_store() as store:
            pod = stack.enter_context(Pod(tmp_path, store, loopback_sites(2)))
            pod.wait_training(2)
        with served_store(store):
            codes = [agent.wait() for agent in pod.agents.values()]
    assert codes == [80, 80], pod.output()
    for agent in pod.agents.values():
        assert "start all its agents again, and it continues from its newest checkpoint" in agent.output()
        assert "Traceback" not in agent.output()


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinyJob]:
    """Yield the job that the tests below break, one after the other; check its invariants after them."""
    config = protect(CONFIG_WITHOUT_STANDBYS, INTERVAL_STEPS)
    with TinyJob(tmp_path_factory.mktemp("membership"), HOSTS, config, options=ONE_DEVICE) as tiny:
        yield tiny
        tiny.finish()


def test_a_death_during_a_recovery_is_survived(broken: TinyJob) -> None:
    report = broken.wait_training(HOSTS)
    assert report.generation is not None
    hosts = [member.host for member in report.generation.membership.members]
    first, second, *_ = hosts
    broken.job.hold(FailPoint.BEFORE_CONNECT, [first])
    broken.signal(JobComponent.WORKER, first, signal.SIGKILL)
    broken.job.wait_held([first], RECOVERY_S)  # the others resumed; the first is back and takes a seat
    broken.signal(JobComponent.WORKER, first, signal.SIGKILL)
    broken.signal(JobComponent.WORKER, second, signal.SIGKILL)
    broken.job.release()
    # Both may come back in the same generation, if a survivor takes long to leave its collective.
    after = broken.wait_training(HOSTS, number_of(report) + 1)
    for host in (first, second):
        assert read_incarnation(after, host) > read_incarnation(report, host)


def read_incarnation(report: JobReport, host: str) -> int:
    (status,) = [status for status in report.hosts if status.host == host]
    assert status.worker is not None
    return status.worker.incarnation


def test_the_copy_of_the_state_for_a_joining_host_is_freed_after_it_was_fetched(broken: TinyJob) -> None:
    before = number_of(broken.wait_training(HOSTS))
    broken.signal(JobComponent.WORKER, "host-1", signal.SIGKILL)
    report = broken.wait_training(HOSTS, before)
    fetches = [e for e in broken.job.read_events() if e.kind is EventKind.STATE_FETCHED]
    assert any(event.host == "host-1" and (event.generation or 0) > before for event in fetches)
    assert report.generation is not None
    credentials = Credentials(read_contact(broken.job.run_directory).token)
    holders = [m.endpoint for m in report.generation.membership.members if m.host != "host-1"]
    for holder in holders:
        assert holder is not None
        with PeerChannel(holder, credentials, SERVICE) as channel:
            # No state is offered, so the server waits for one; an offered state is of a later generation than 0, so the
            # request for 0 would be refused.
            request = OfferRequest(generation=GenerationNumber(0))
            answer = channel.call(DESCRIBE_PART, request, timeout_s=patience(5))
            assert answer.part is None


ATTEMPTS = 5
"""More than a survivor on a busy machine gives a collective up in a row."""


def test_a_service_that_dies_before_the_smaller_clique_exists_costs_nothing(broken: TinyJob) -> None:
    for _ in range(ATTEMPTS):
        report = broken.wait_training(HOSTS)
        assert report.generation is not None
        hosts = [member.host for member in report.generation.membership.members]
        victim = next(host for host in hosts if host != report.leader)
        survivors = [host for host in hosts if host != victim]
        step = broken.hold(FailPoint.BEFORE_REDUCE, survivors)
        broken.signal(JobComponent.WORKER, victim, signal.SIGKILL)
        # Another order for the same failpoint: the survivors enter the broken collective, and are held again in the
        # same step of the next generation, before its first collective.
        broken.job.hold(FailPoint.BEFORE_REDUCE, survivors[::-1], step)
        before = report.generation.number
        report = broken.wait_report(
            "the next generation",
            lambda now, before=before: (
                now.generation is not None
                and now.generation.phase is GenerationPhase.ACTIVE
                and now.generation.number > before
            ),
        )
        assert report.generation is not None
        if len(report.generation.membership.members) == HOSTS - 1:
            break
        # On a busy machine a survivor gives its collective up, and all form a new world, with the victim.
        broken.job.release()
    else:
        pytest.fail(f"no smaller generation after {ATTEMPTS} kills")
    broken.job.wait_held(survivors, RECOVERY_S)
    broken.signal(JobComponent.COORDINATION_SERVICE, "leader", signal.SIGKILL)
    broken.job.release()
    broken.wait_training(HOSTS, number_of(report))


def find_snapshot_step(report: JobReport) -> int:
    """Return the step of the newest snapshot that all hosts of the generation have; 0: there is none."""
    committed = [s.id for h in report.hosts for s in h.snapshots if s.phase is SnapshotPhase.COMMITTED]
    return max((id.step for id in committed if id.generation == number_of(report)), default=0)


def test_a_complete_state_outlives_all_workers_and_a_host_at_once(broken: TinyJob) -> None:
    hosts = [f"host-{index}" for index in range(HOSTS)]
    report = broken.wait_training(HOSTS)
    broken.wait_report("a snapshot", lambda now: find_snapshot_step(now) > 0)
    reached = broken.hold(FailPoint.BEFORE_COMMIT, hosts)  # the steps that are committed before this one
    report = broken.wait_report(
        "the last snapshot that is due", lambda now: find_snapshot_step(now) > reached - INTERVAL_STEPS
    )
    promised, number = find_snapshot_step(report), number_of(report)
    assert report.redundancy is not None
    assert (report.redundancy.copies, report.redundancy.losses) == (HOSTS, HOSTS - 1)
    for host in hosts:
        broken.signal(JobComponent.WORKER, host, signal.SIGKILL)
    broken.signal(JobComponent.HOST, "host-3", signal.SIGKILL)
    broken.job.release()
    broken.wait_training(HOSTS, number)
    events = [e for e in broken.job.read_events() if (e.generation or 0) > number]
    restored = {e.detail["step"] for e in events if e.kind is EventKind.SNAPSHOT_RESTORED}
    assert restored == {promised}
    assert reached - promised < INTERVAL_STEPS
    assert not any(e.kind is EventKind.STATE_LOST for e in events)


def test_hosts_without_a_store_stop_and_resume_when_the_store_is_back(broken: TinyJob) -> None:
    broken.wait_training(HOSTS)
    before = {event.monotonic_s for event in broken.job.read_events() if event.kind is EventKind.STORE_LOST}
    words = "training stops here until the store is back"
    said_before = broken.job.read_output().count(words)
    broken.job.process.send_signal(signal.SIGSTOP)
    for host in (f"host-{index}" for index in range(HOSTS)):
        broken.job.wait_event(
            f"{host} to notice",
            lambda e, h=host: e.kind is EventKind.STORE_LOST and e.host == h and e.monotonic_s not in before,
        )
    stopped_at = still_step(broken)
    broken.job.process.send_signal(signal.SIGCONT)
    wait_until("steps after the pause", lambda: broken.step() > stopped_at + 5, RECOVERY_S)
    broken.wait_training(HOSTS)
    assert broken.job.read_output().count(words) == said_before + HOSTS


def still_step(tiny: TinyJob) -> int:
    """Return the step after which no host has committed for `STILL_S`; fail if steps continue."""
    deadline = Deadline()
    while deadline.find_rest_s() > 0:
        step, since_s = tiny.step(), time.monotonic()
        while tiny.step() == step:
            if time.monotonic() - since_s > STILL_S:
                return step
            time.sleep(0.05)
    raise AssertionError("somebody trains on without the store")
