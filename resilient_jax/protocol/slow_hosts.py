"""Hosts that are slow, as the first worker of a generation reports them, and what the leader has made of it."""

from typing import Final

import msgspec

from resilient_jax.ids import GenerationNumber, HostName, Incarnation
from resilient_jax.protocol.recovery_records import HostFailures, RecoveryDecision

HostSpeeds = tuple[tuple[HostName, float], ...]
"""Hosts that are slower than their peers, each with its speed as a part of theirs, by name."""

COMMON_CAUSE_STEPS: Final = 64
"""Hosts that became slow so few steps apart, and in the same way, have a cause in common."""


class SlowHost(msgspec.Struct, frozen=True, kw_only=True):
    """A host that is slow, as a measurement has confirmed.

    Attributes:
        host: name of the slow host.
        kind: what of the host is slow: a value of `health.finding.FindingKind`.
        factor: how many times as long the host takes as its peers.
        since_step: the first step in which the host was slow.
        devices: the numbers of the host's devices that are slower than its other ones; (): the host has no others, or
            all are alike.
    """

    host: HostName
    kind: str
    factor: float
    since_step: int
    devices: tuple[int, ...] = ()

    def describe(self) -> str:
        """Return a text such as "slow (compute): 2.1 times since step 83, because of its device 2"."""
        text = f"slow ({self.kind}): {self.factor:.1f} times since step {self.since_step}"
        return f"{text}, because of its {name_devices(self.devices)}" if self.devices else text


def name_devices(devices: tuple[int, ...]) -> str:
    """Return a text such as "device 2", or "devices 0, 2"."""
    return f"device{'s' * (len(devices) > 1)} {', '.join(map(str, devices))}"


class Slowdown(msgspec.Struct, frozen=True, kw_only=True):
    """What slow hosts cost a job, once that has lasted. Speeds are parts of that with all hosts as fast as their peers.

    Attributes:
        generation: generation in which the cost was measured; the cost says nothing about another generation.
        kept: the present speed, with shares by speed. Where layers are divided by speeds that hosts have no longer,
            `kept` is below 1 although no host is slow.
        host: the slowest host; empty: none is slow.
        replaced: the speed with a sound host in the place of the slowest host.
        without: the speed without the slowest host; 0: the others cannot do without that host.
        redivided: the speed with a pipeline's layers divided by `speeds`; 0: layers are divided so, or the job is no
            pipeline.
        speeds: speeds of hosts by which layers would be divided.
        devices: numbers of the slowest host's devices that would be left out because they are slower than its other
            ones; (): no device would.
        slow_devices: numbers of all devices of the slowest host that are slower than its other ones.
        fewer_devices: the speed without `devices`, if no other device takes their place; 0: the host cannot do without
            them.
        why_all_devices: why no device would be left out, or why the host cannot do without `devices`.
    """

    generation: GenerationNumber
    kept: float
    host: HostName = HostName("")
    replaced: float = 0.0
    without: float = 0.0
    redivided: float = 0.0
    speeds: HostSpeeds = ()
    devices: tuple[int, ...] = ()
    slow_devices: tuple[int, ...] = ()
    fewer_devices: float = 0.0
    why_all_devices: str = ""


class DeviceTakenOut(msgspec.Struct, frozen=True):
    """A device that was taken out because it was slow.

    Attributes:
        host: the device's host.
        device: the device's number on that host, from 0.
        count: how often the device was taken out.
    """

    host: HostName
    device: int
    count: int


class SlownessRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What a job's leaders have done about slow hosts; kept in the generation.

    Attributes:
        decision: the last choice; None: there was none to make.
        speeds: speeds of hosts by which a pipeline's layers are divided.
        divided_in: the number of the generation in which the division has changed last; 0: never.
        taken_out: how often hosts were taken out because they were slow, the latest last.
        out: the hosts that were taken out because they were slow, and were no members since, the last one last.
        taken_out_as: the hosts that were taken out last, each as it was reported then, the latest last.
        devices: devices that were taken out because they were slow, the latest last. Their hosts stay members.
        restarting: the members, by host and incarnation, whose hosts are to start these members again without such
            devices.
    """

    decision: RecoveryDecision | None = None
    speeds: HostSpeeds = ()
    divided_in: GenerationNumber = GenerationNumber(0)
    taken_out: tuple[HostFailures, ...] = ()
    out: tuple[HostName, ...] = ()
    taken_out_as: tuple[SlowHost, ...] = ()
    devices: tuple[DeviceTakenOut, ...] = ()
    restarting: tuple[tuple[HostName, Incarnation], ...] = ()

    def count_taken_out(self, host: HostName) -> int:
        """Return how often a host was taken out because it was slow."""
        return next((one.count for one in self.taken_out if one.host == host), 0)

    def count_device(self, host: HostName, device: int) -> int:
        """Return how often a device was taken out because it was slow."""
        return next((one.count for one in self.devices if (one.host, one.device) == (host, device)), 0)
