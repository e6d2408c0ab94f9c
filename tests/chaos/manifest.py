"""The manifest of a campaign: which faults a job gets, when, and how the job must end.

A manifest is complete: on the same machine it causes the same faults at the same logical times.
"""

import enum
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from resilient_jax.config import JobConfig, decode_toml, load_toml, override_values
from resilient_jax.config.job_config import Seconds
from resilient_jax.errors import ConfigError
from resilient_jax.events import EventKind
from resilient_jax.protocol.failpoints import FailPoint
from tests.chaos.faults import (
    LAUNCHER_FAULTS,
    NETWORK_FAULTS,
    STORE_MEMBER_FAULTS,
    WORKER_FAULTS,
    BitFlip,
    ClockJump,
    DeviceLoss,
    Fault,
    FullDisk,
    PairPartition,
    ProcessKill,
    ProcessStop,
    SlowDevice,
    SlowInput,
    fault_kind,
    is_message_flip,
)

STORE_MEMBERS = ("member-0", "member-1", "member-2")
"""The members of a campaign's own etcd cluster, which goes on without one of them."""
SELECTORS = frozenset({"leader", "follower", "all"})
"""Names of hosts, and of members of the store, that are resolved at the incident."""
MAX_NUMBER = 1_000_000
"""The largest integer in a manifest; a larger one is mistyped."""
Count = Annotated[int, Meta(ge=0, le=MAX_NUMBER)]
HostIndex = Annotated[str, Meta(pattern="^(host-[0-9]+|leader|follower|all)$")]
TargetName = Annotated[str, Meta(pattern="^((host|member)-[0-9]+|leader|follower|all)$")]


class TargetPart(enum.StrEnum):
    """The part of a job that a fault hits.

    Of `launch` there are the store that it serves, the process from which it forks workers, and what surrounds it.
    """

    WORKER = "worker"
    AGENT = "agent"
    SNAPSHOTS = "snapshots"
    SERVICE = "service"
    STORE = "store"
    STORE_MEMBER = "store_member"
    ZYGOTE = "zygote"
    LAUNCHER = "launcher"
    HOST = "host"
    LINK = "link"


class Trigger(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The time of an incident: all given conditions are waited for, in the order of the attributes.

    Attributes:
        step: so many steps are committed.
        after_steps: so many more steps are committed than at the end of the previous incident.
        after_s: so many seconds have passed.
        event: events of this kind (`events.EventKind`) are recorded, with the values of `detail` in their detail.
        event_count: so many of them; default: one.
        failpoint: a worker reaches this failpoint, where the worker is held during the injection.
        host: the host whose worker is held there; default: the target's first.
    """

    step: Count | None = None
    after_steps: Count | None = None
    after_s: Annotated[float, Meta(ge=0, le=86_400)] | None = None
    event: str | None = None
    detail: dict[str, str] = {}
    event_count: Annotated[int, Meta(ge=1, le=MAX_NUMBER)] | None = None
    failpoint: FailPoint | None = None
    host: HostIndex | None = None


class FaultTarget(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The processes or links that a fault hits.

    Attributes:
        hosts: "host-2"; or resolved at the incident: "leader", "follower" (the last host that does not lead), "all".
            If the part is a member of the store: "member-1"; the member that leads etcd, the last that does not, all.
    """

    part: TargetPart
    hosts: tuple[TargetName, ...] = ("leader",)


class Incident(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One fault at one time.

    Attributes:
        overlaps: the incident comes during the recovery from the previous one.
        required_events: at least one of these must follow, besides the events that the fault implies; empty: none.
        forbidden_events: none of these may follow before the next incident.
    """

    trigger: Trigger
    target: FaultTarget
    fault: Fault
    overlaps: bool = False
    required_events: tuple[str, ...] = ()
    forbidden_events: tuple[str, ...] = ()


CHAOS_CONFIG: dict[str, float | int | str] = {
    "lease_ttl_s": 2.0,
    "max_restarts": 1000,
    "max_host_losses": 1000,
    "restart_backoff_s": 0.0,
    "forming_timeout_s": 20.0,
    "collective_timeout_s": 40.0,
}
"""Defaults for jobs with a fault every few seconds: no host is given up. A manifest can override these keys."""


class ChaosJob(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The job that runs the script.

    Attributes:
        steps: the number of steps that the script trains; 0: up to the step in the file that the environment variable
            RESILIENT_JAX_CHAOS_STOP_STEP names.
        store: "embedded": one in the launcher; "etcd": a cluster of three members, started for the campaign. Needs
            etcd 3.4 or later in PATH. A campaign with `--store` has neither.
        network: "namespaces": each host, and each member of the store, has a network namespace, with a link to a
            bridge. Needs root.
        reference_hosts: hosts of the run without faults; 1: no agents, the script alone; 0: none, as bits depend on the
            hosts. A replica that spans hosts has the bits of a job of so many.
        disk_mib: the size of a separate disk for the run folder; 0: none. Needs root.
        may_set_clock: whether this machine's wall clock, which belongs to all its programs, may be set. Needs root.
        forks_workers: workers are forked from one process, as `launch` does; false: each host has a process that its
            workers are forked from, as on a pod.
        environment: variables that only the job gets, not the run that it is compared with.
        config: keys of `JobConfig`, besides `CHAOS_CONFIG`.
    """

    hosts: Annotated[int, Meta(ge=1, le=64)] = 4
    devices_per_host: Annotated[int, Meta(ge=1, le=64)] = 1
    steps: Count = 0
    reference_hosts: Annotated[int, Meta(ge=0, le=64)] = 1
    store: Literal["embedded", "etcd"] = "embedded"
    network: Literal["loopback", "namespaces"] = "loopback"
    disk_mib: Count = 0
    may_set_clock: bool = False
    forks_workers: bool = True
    environment: dict[str, str] = {}
    config: dict[str, float | int | str] = {}

    @property
    def job_config(self) -> dict[str, float | int | str]:
        """Return all keys of `JobConfig` that differ from their defaults."""
        return {**CHAOS_CONFIG, **self.config}


class ExpectedExit(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The expected end of the job.

    Attributes:
        code: the exit code of `launch`. If not 0, the job must end within `recovery_timeout_s` of the last incident.
    """

    code: Annotated[int, Meta(ge=-64, le=255)] = 0


class CampaignManifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A campaign: its job, its incidents, and how the job must end.

    Attributes:
        seed: seed of the flipped bits; of a random campaign also the seed that drew the incidents.
        script: a script of this repository with its arguments, used if the command line names none. In arguments, also
            of the command line, {folder} stands for a folder of the run; the reference run has another.
        recovery_timeout_s: time within which all hosts must train again after an incident.
    """

    seed: Count = 0
    about: str = ""
    script: tuple[str, ...] = ()
    recovery_timeout_s: Seconds = 120.0
    job: ChaosJob = ChaosJob()
    expected_exit: ExpectedExit = ExpectedExit()
    incidents: tuple[Incident, ...] = ()


def expand_command(command: Sequence[str], folder: Path) -> tuple[str, ...]:
    """Return the script's command for a run with this folder: see `CampaignManifest.script`."""
    return tuple(word.replace("{folder}", str(folder)) for word in command)


def load_manifest(path: Path) -> CampaignManifest:
    """Return the manifest in a file.

    Raises:
        ConfigError: the file cannot be read, or a value is not valid; with file and key.
    """
    return _check(load_toml(path, CampaignManifest), str(path))


def parse_manifest(text: str, *, source: str) -> CampaignManifest:
    """Return the manifest in a string that messages call `source`; see `load_manifest`."""
    return _check(decode_toml(text, CampaignManifest, source=source), source)


def _check(manifest: CampaignManifest, source: str) -> CampaignManifest:
    override_values(JobConfig(), manifest.job.config, source=f"{source}, job.config")
    for number, incident in enumerate(manifest.incidents):
        for key, found, expected in _misfits(incident, manifest.job):
            raise ConfigError(
                f"{source}: key 'incidents[{number}].{key}': found {found}, expected {expected}. Change the value."
            )
    return manifest


def _trigger_misfits(trigger: Trigger) -> list[tuple[str, str, str]]:
    if trigger == Trigger():
        return [("trigger", "an empty table", "one of step, after_steps, after_s, event, failpoint")]
    if trigger.event_count is not None and trigger.event is None:
        return [("trigger.event_count", str(trigger.event_count), "an event to count")]
    return []


def _name_misfits(incident: Incident, job: ChaosJob) -> list[tuple[str, str, str]]:
    target = incident.target
    hosts = {f"host-{index}" for index in range(job.hosts)} | SELECTORS
    members = {*STORE_MEMBERS, *SELECTORS}
    known = members if target.part is TargetPart.STORE_MEMBER else hosts
    meant = [
        ("trigger.host", incident.trigger.host, hosts),
        *((f"target.hosts[{i}]", host, known) for i, host in enumerate(target.hosts)),
    ]
    found = [
        (key, repr(host), f"one of {', '.join(sorted(names))}")
        for key, host, names in meant
        if host is not None and host not in names
    ]
    return found if target.hosts else [*found, ("target.hosts", "none", "at least one")]


def _store_misfits(incident: Incident, job: ChaosJob) -> list[tuple[str, str, str]]:
    part, at = incident.target.part, incident.trigger
    if part is TargetPart.STORE and job.store != "embedded":
        return [("target.part", part, 'store_member, since job.store = "etcd"')]
    if part is not TargetPart.STORE_MEMBER:
        return []
    found: list[tuple[str, str, str]] = []
    if job.store != "etcd":
        found.append(("target.part", part, 'job.store = "etcd" beside it'))
    if not isinstance(incident.fault, STORE_MEMBER_FAULTS):
        found.append(("fault.kind", fault_kind(incident.fault), "a fault of a process, or of a link"))
    if at.failpoint is not None and at.host is None:
        found.append(("trigger.host", "none", "the host whose worker is held at the failpoint"))
    return found


def _launcher_misfits(incident: Incident, job: ChaosJob) -> list[tuple[str, str, str]]:
    part, fault = incident.target.part, incident.fault
    found: list[tuple[str, str, str]] = []
    if isinstance(fault, LAUNCHER_FAULTS) is not (part is TargetPart.LAUNCHER):
        expected = f"one of {', '.join(sorted(str(kind.__struct_config__.tag) for kind in LAUNCHER_FAULTS))}"
        if part is TargetPart.LAUNCHER:
            found.append(("fault.kind", fault_kind(fault), f"{expected} for a launcher"))
        else:
            found.append(("target.part", part, f"launcher for {fault_kind(fault)}"))
    if part is TargetPart.ZYGOTE:
        if not job.forks_workers:
            found.append(("target.part", part, "job.forks_workers = true beside it"))
        if not isinstance(fault, ProcessKill | ProcessStop):
            found.append(("fault.kind", fault_kind(fault), "kill or stop for a zygote"))
    return found


def _link_misfits(incident: Incident, job: ChaosJob) -> list[tuple[str, str, str]]:
    target, fault = incident.target, incident.fault
    found: list[tuple[str, str, str]] = []
    if isinstance(fault, PairPartition) and len(set(target.hosts)) != 2:
        found.append(("target.hosts", str(list(target.hosts)), "two hosts, which cannot reach each other"))
    if isinstance(fault, NETWORK_FAULTS) and (
        target.part not in (TargetPart.LINK, TargetPart.STORE_MEMBER) or job.network != "namespaces"
    ):
        expected = 'a link or a store_member as target and job.network = "namespaces"'
        found.append(("fault.kind", fault_kind(fault), expected))
    if target.part is TargetPart.LINK and not isinstance(fault, NETWORK_FAULTS):
        found.append(("target.part", "link", f"another part for {fault_kind(fault)}"))
    return found


def _device_misfits(incident: Incident, job: ChaosJob) -> list[tuple[str, str, str]]:
    fault, found = incident.fault, []
    if not isinstance(fault, DeviceLoss | SlowDevice):
        return []
    if isinstance(fault, DeviceLoss) and incident.target.part is not TargetPart.HOST:
        found.append(("target.part", str(incident.target.part), "a host for lose_device"))
    if fault.device >= job.devices_per_host:
        expected = f"a number below job.devices_per_host = {job.devices_per_host}"
        found.append(("fault.device", str(fault.device), expected))
    return found


def _misfits(incident: Incident, job: ChaosJob) -> list[tuple[str, str, str]]:
    """Return key, found and expected for each rule that the incident breaks."""
    found: list[tuple[str, str, str]] = []
    at, target, fault = incident.trigger, incident.target, incident.fault
    kinds = frozenset(map(str, EventKind))
    names = [
        ("trigger.event", at.event),
        *((f"required_events[{i}]", name) for i, name in enumerate(incident.required_events)),
        *((f"forbidden_events[{i}]", name) for i, name in enumerate(incident.forbidden_events)),
    ]
    names.append(("fault.until_event", getattr(fault, "until_event", None)))
    found += [(key, repr(n), "a kind of event: events.EventKind") for key, n in names if n and n not in kinds]
    found += _trigger_misfits(at)
    found += _name_misfits(incident, job)
    found += _store_misfits(incident, job)
    found += _launcher_misfits(incident, job)
    found += _link_misfits(incident, job)
    found += _device_misfits(incident, job)
    if isinstance(fault, WORKER_FAULTS) and (target.part is not TargetPart.WORKER or at.failpoint is None):
        found.append(("fault.kind", fault_kind(fault), "a worker as target and a failpoint in `trigger`"))
    if isinstance(fault, SlowInput) and at.failpoint is not FailPoint.BEFORE_INPUT:
        found.append(("trigger.failpoint", str(at.failpoint), f"{FailPoint.BEFORE_INPUT} for slow_input"))
    if isinstance(fault, SlowDevice) is not (at.failpoint is FailPoint.ON_DEVICE):
        expected = f"{FailPoint.ON_DEVICE} and slow_device together"
        found.append(("trigger.failpoint", str(at.failpoint), expected))
    if is_message_flip(fault) and (
        target.part is not TargetPart.SNAPSHOTS or at.failpoint is not FailPoint.BEFORE_SEND
    ):
        found.append(
            (
                "fault.region",
                "message",
                f"snapshots as target and {FailPoint.BEFORE_SEND} as failpoint in `trigger`",
            )
        )
    if isinstance(fault, ClockJump) and not job.may_set_clock:
        found.append(
            ("fault.kind", fault_kind(fault), "job.may_set_clock = true: all programs here will see it")
        )
    if isinstance(fault, FullDisk) and not job.disk_mib:
        found.append(("fault.kind", fault_kind(fault), "job.disk_mib, the size of the disk to fill"))
    if isinstance(fault, BitFlip) and fault.region == "checkpoint" and not fault.path:
        found.append(("fault.path", "nothing", "the folder that the script keeps checkpoints in"))
    return found
