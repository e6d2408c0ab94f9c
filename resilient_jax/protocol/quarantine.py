"""Records of hosts that keep failing, and of those that take no part in a job for a while, though their agents run."""

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


class HostLosses(msgspec.Struct, frozen=True, kw_only=True):
    """When a host was lost without a notice. Bound to a lease, with which it ends if no loss follows.

    Attributes:
        host: the host's name.
        lost_wall_s: in seconds since 1970, by the clocks of the leaders of those times; the oldest first.
    """

    host: HostName
    lost_wall_s: tuple[float, ...]
