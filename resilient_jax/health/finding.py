"""What `health` says of a host, a device or the links between hosts."""

import enum

import msgspec


class FindingKind(enum.StrEnum):
    """What is slow."""

    COMPUTE = "compute"
    """The processor or accelerator: microbatches take longer, with the data at hand."""
    MEMORY = "memory"
    """Memory: the update of the state, which reads and writes all of it and computes little, takes longer."""
    INPUT = "input"
    """The input pipeline: the host waits for its data."""
    LINK = "link"
    """The reduction takes longer although all hosts have come to it. A measurement of all links shows which one."""
    OTHER = "other"
    """Something else of the host: its devices are as fast as those of its peers. The script, which does more there, or
    waits for something; or other programs, from time to time."""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """Something is slow.

    Attributes:
        host: the host; "": the links between the hosts.
        input_share: how much of the additional time are waits for data.
        device: which of the host's replicas; None: the host as a whole.
        device_speeds: (number, speed as a part of that of its fastest one) of each device of the host, as a measurement
            has found; (): it found all alike.
        slow_devices: the numbers of those that are slower than its other ones.
        kind: what of it is slow.
        factor: how many times as long it takes as predicted.
        since_step: the first step of which that is true.
        evidence: what was observed and expected, as a sentence.
    """

    host: str
    kind: FindingKind
    factor: float
    since_step: int
    evidence: str
    input_share: float = 0.0
    device: int | None = None
    device_speeds: tuple[tuple[int, float], ...] = ()
    slow_devices: tuple[int, ...] = ()
