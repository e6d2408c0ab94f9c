"""What hosts tell each other of their last steps, and what they measure when something seems to be slow."""

import enum

import msgspec


class Measurement(enum.IntFlag):
    """What all hosts measure at once, devices before links."""

    NOTHING = 0
    DEVICES = 1
    LINKS = 2


class WatchReport(msgspec.Struct, frozen=True, array_like=True):
    """What a host tells the others about its last steps.

    Attributes:
        timings: timings of all steps since the last exchange, by `slow_host_watch.encode_timings`.
        due: what all hosts are to measure; only the first host says it, which judges.
    """

    timings: bytes = b""
    due: Measurement = Measurement.NOTHING
