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
        host: "": the finding is about the links between the hosts.
        input_share: part of the additional time that is spent in waits for data.
        device: index of the host's replica; None: the host as a whole.
        device_speeds: (number, speed as a part of the speed of the host's fastest device) of each device of the host,
            as measured; (): all devices are alike.
        slow_devices: numbers of devices that are slower than the host's other ones.
        factor: observed time over predicted time.
        since_step: first step in which the factor was seen.
        evidence: what was observed and expected, in a sentence.
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
