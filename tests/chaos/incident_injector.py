"""Carries out the incidents of a manifest on a running job, and records the processes that must die by them."""

import dataclasses
import functools
import random
import time
from collections.abc import Callable

from resilient_jax.cluster.job_report import JobReport
from resilient_jax.events import EventKind
from resilient_jax.local_job.local_job import LocalJob
from resilient_jax.protocol.failpoints import ANY_INDEX, ANY_STEP, FailPointAction, FailPointOrder, HoldAction
from tests.chaos.active_faults import ActiveFaults
from tests.chaos.expected_events import IncidentRecord
from tests.chaos.faults import (
    LAUNCHER_FAULTS,
    NETWORK_FAULTS,
    ClockJump,
    DeviceLoss,
    FullDisk,
    Notice,
    ProcessExit,
    ProcessKill,
    ProcessStop,
    SilentCorruption,
    SlowDevice,
    SlowInput,
    UserException,
)
from tests.chaos.injection import FaultEnvironment, FaultUnsupported, get_worker_action, inject_fault
from tests.chaos.job_monitor import JobMonitor
from tests.chaos.leaks import ProcessIdentity, identify_process
from tests.chaos.manifest import STORE_MEMBERS, CampaignManifest, Incident, TargetPart
from tests.chaos.targets import (
    find_service_host,
    find_target_pids,
    resolve_hosts,
    resolve_members,
)

STORE_PARTS = (TargetPart.STORE, TargetPart.STORE_MEMBER)
LAUNCHER_PARTS = (TargetPart.STORE, TargetPart.ZYGOTE, TargetPart.LAUNCHER)
"""What `launch` is and has: they belong to all hosts."""
FAULTS_WITHOUT_PROCESSES = (*NETWORK_FAULTS, *LAUNCHER_FAULTS, DeviceLoss, FullDisk, ClockJump)
FAILPOINT_TIMEOUT_S = 15.0
"""Timeout for a worker to reach the failpoint of an incident: the worker may have died for another reason."""
MEMBER_RESTART_DELAY_S = 3.0
"""How long a killed member of the store stays away: longer than an election takes, shorter than a usual lease."""
FOREIGN_STORE = "the store is a cluster that may serve others, too, which a campaign does not break"


class IncidentInjector:
    """Carries out the incidents of one campaign.

    Attributes:
        stopped_hosts: hosts that were stopped without a duration: they are not expected to train again.
        taken_out_hosts: hosts that compute wrongly, that an incident must bring into quarantine, or that have got a
            notice: they do not return.
        dead_processes: processes that must not run any more.
    """

    def __init__(
        self,
        manifest: CampaignManifest,
        job: LocalJob,
        monitor: JobMonitor,
        active_faults: ActiveFaults,
        environment: FaultEnvironment,
        log: Callable[[str], None],
    ) -> None:
        self.stopped_hosts: set[str] = set()
        self.taken_out_hosts: set[str] = set()
        self.dead_processes: set[ProcessIdentity] = set()
        self._job = job
        self._monitor = monitor
        self._active_faults = active_faults
        self._environment = environment
        self._log = log
        self._recovery_timeout_s = manifest.recovery_timeout_s
        self._hosts = tuple(f"host-{index}" for index in range(manifest.job.hosts))
        self._rng = random.Random(manifest.seed)

    def carry_out(self, index: int, incident: Incident) -> IncidentRecord:
        """Inject an incident's fault, with a failpoint once the worker is there, and return the record.

        Raises:
            InvariantBroken: the store does not answer.
            JobEnded: the job ended before.
        """
        report = self._monitor.wait_report(
            "the store's records", lambda report: True, self._recovery_timeout_s
        )
        if incident.target.part in STORE_PARTS and self._environment.is_store_foreign:
            return IncidentRecord(index=index, incident=incident, skip_reason=FOREIGN_STORE)
        hosts = self._find_hosts(incident, report)
        if not hosts:
            return IncidentRecord(
                index=index, incident=incident, skip_reason="the target matches no host now"
            )
        record = IncidentRecord(index=index, incident=incident, hosts=hosts, started_s=time.monotonic())
        if incident.trigger.failpoint is None:
            return self._inject_from_outside(record, report)
        try:
            if (action := get_worker_action(incident.fault)) is not None:
                self._order(record, hosts, action)
                return self._await_worker(record, report)
            host = incident.trigger.host
            self._order(
                record, resolve_hosts((host,), report) if host is not None else hosts[:1], HoldAction()
            )
            # The fault counts from now, not from when the worker was awaited at its failpoint.
            record = dataclasses.replace(record, started_s=time.monotonic())
            return self._inject_from_outside(record, self._monitor.poll() or report)
        finally:
            release = functools.partial(self._job.failpoints.release, _order_name(record))
            match incident.fault:
                case SilentCorruption(is_repeated=True):
                    pass
                case (
                    SlowInput(duration_s=duration_s, until_event=until)
                    | SlowDevice(duration_s=duration_s, until_event=until)
                ):
                    self._active_faults.add(release, after_s=duration_s, until=until)
                case _:
                    release()

    def _order(self, record: IncidentRecord, hosts: tuple[str, ...], action: FailPointAction) -> None:
        """Order workers to hold or fail at the incident's failpoint, and wait until they have reached the failpoint."""
        trigger, name, fault = record.incident.trigger, _order_name(record), record.incident.fault
        assert trigger.failpoint is not None, "asked by the caller"
        # A device belongs to no step: it is slow from the time at which the others are awaited.
        is_of_device = isinstance(fault, SlowDevice)
        step = ANY_STEP if trigger.step is None or is_of_device else trigger.step
        index = fault.device if is_of_device else ANY_INDEX
        self._job.failpoints.set_order(
            FailPointOrder(
                failpoint=trigger.failpoint, step=step, hosts=hosts, index=index, action=action, name=name
            )
        )
        timeout_s = FAILPOINT_TIMEOUT_S if trigger.step is None else self._recovery_timeout_s
        if not self._monitor.try_wait(lambda: self._arrived(record) >= set(hosts), timeout_s):
            missing = sorted(set(hosts) - self._arrived(record))
            self._log(f"{', '.join(missing)} did not come to {trigger.failpoint} within {timeout_s:g} s")

    def _arrived(self, record: IncidentRecord) -> frozenset[str]:
        return self._job.failpoints.list_held_hosts(_order_name(record))

    def _await_worker(self, record: IncidentRecord, report: JobReport) -> IncidentRecord:
        """Return the completed record of a fault that the worker injects itself, which counts from the order on.

        `report` is from before the order: afterwards another process may have replaced the dead one.
        """
        incident, arrived = record.incident, self._arrived(record)
        if isinstance(incident.fault, ProcessExit | UserException):
            pids = [pid for host in arrived for pid in find_target_pids(incident.target, host, report)]
            self.dead_processes |= set(_identify(pids))
        if isinstance(incident.fault, SilentCorruption):
            self.taken_out_hosts |= arrived
        if not arrived:
            return dataclasses.replace(record, skip_reason=f"no worker came to {incident.trigger.failpoint}")
        return dataclasses.replace(record, hosts=tuple(sorted(arrived)))

    def _inject_from_outside(self, record: IncidentRecord, report: JobReport) -> IncidentRecord:
        incident, hosts = record.incident, record.hosts
        fault, part = incident.fault, incident.target.part
        processes = self._find_processes(incident, hosts, report)
        needs_processes = not isinstance(fault, FAULTS_WITHOUT_PROCESSES)
        if needs_processes and not processes:
            return dataclasses.replace(record, skip_reason=f"{', '.join(hosts)} runs no {part} now")
        pids = tuple(process.pid for process in processes)
        try:
            done = inject_fault(fault, hosts, pids, self._environment, self._active_faults, self._rng)
        except FaultUnsupported as unsupported:
            return dataclasses.replace(record, skip_reason=str(unsupported))
        is_told_to_leave = isinstance(fault, Notice) and part in (TargetPart.AGENT, TargetPart.HOST)
        if is_told_to_leave or EventKind.HOST_QUARANTINED in incident.required_events:
            self.taken_out_hosts |= set(hosts)
        self._log(done)
        if (store := self._environment.store) is not None and part is TargetPart.STORE_MEMBER:
            if isinstance(fault, ProcessKill):
                for member in hosts:
                    restart = functools.partial(store.start, STORE_MEMBERS.index(member))
                    self._active_faults.add(restart, after_s=MEMBER_RESTART_DELAY_S)
            return record
        is_for_good = (
            isinstance(fault, ProcessStop) and fault.duration_s is None and fault.until_event is None
        )
        if is_for_good and part in (TargetPart.AGENT, TargetPart.HOST):
            self.stopped_hosts |= set(hosts)
        elif is_for_good or isinstance(fault, ProcessKill):
            # Killed by the fault, or soon by the agent, which kills a worker that stays stopped.
            self.dead_processes |= set(processes)
        return record

    def _find_hosts(self, incident: Incident, report: JobReport) -> tuple[str, ...]:
        if incident.target.part is TargetPart.SERVICE and "leader" in incident.target.hosts:
            found = find_service_host(report)
            return (found,) if found is not None else ()
        if incident.target.part in LAUNCHER_PARTS:
            return tuple(sorted(self._hosts))
        if (store := self._environment.store) is not None and incident.target.part is TargetPart.STORE_MEMBER:
            return resolve_members(incident.target.hosts, STORE_MEMBERS[store.find_leader()])
        return resolve_hosts(incident.target.hosts, report)

    def _find_processes(
        self, incident: Incident, hosts: tuple[str, ...], report: JobReport
    ) -> tuple[ProcessIdentity, ...]:
        """Return the live processes of the target: the store's records may still contain dead ones."""
        if incident.target.part in (TargetPart.STORE, TargetPart.LAUNCHER):
            return _identify([self._job.process.pid])
        if incident.target.part is TargetPart.ZYGOTE:
            events = self._job.events.records
            started = [event.detail["pid"] for event in events if event.kind is EventKind.ZYGOTE_STARTED]
            return _identify([int(started[-1])] if started else [])
        if (store := self._environment.store) is not None and incident.target.part is TargetPart.STORE_MEMBER:
            pids = [store.find_pid(STORE_MEMBERS.index(member)) for member in hosts]
            return _identify([pid for pid in pids if pid is not None])
        return _identify([pid for host in hosts for pid in find_target_pids(incident.target, host, report)])


def _order_name(record: IncidentRecord) -> str:
    return f"incident-{record.index}"


def _identify(pids: list[int]) -> tuple[ProcessIdentity, ...]:
    return tuple(found for pid in pids if (found := identify_process(pid)) is not None)
