"""The record of a host that takes no part in a job for a while, though its agent runs."""

import msgspec

from resilient_jax.ids import HostName


class QuarantineRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Why a host takes no part. Bound to a lease, with which it ends.

    Attributes:
        host: the host's name.
        reason: why, for people.
        since_wall_s: when it began, in seconds since 1970.
        until_wall_s: when it ends by itself.
    """

    host: HostName
    reason: str
    since_wall_s: float
    until_wall_s: float
