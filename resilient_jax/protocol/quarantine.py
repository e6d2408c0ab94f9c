"""Records of hosts that keep failing, and of hosts and devices that take no part in a job for a while."""

import msgspec

from resilient_jax.ids import HostName


class QuarantineRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Why a host takes no part. Bound to a lease, with which it ends.

    Attributes:
        host: the host's name.
        reason: text for people.
        since_wall_s: when the quarantine began, in seconds since 1970.
        until_wall_s: when the quarantine ends by itself, in seconds since 1970.
    """

    host: HostName
    reason: str
    since_wall_s: float
    until_wall_s: float


class DeviceQuarantineRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Why a device of a host computes nothing. Bound to a lease, with which it ends.

    Attributes:
        host: the host's name.
        device: number of the device, from 0, among those that a worker of the host sees if all are well.
        reason: text for people.
        since_wall_s: when the quarantine began, in seconds since 1970.
        until_wall_s: when the quarantine ends by itself, in seconds since 1970.
        uuid: id of a GPU, which the GPU keeps when numbers change; empty: the number says which device is meant.
    """

    host: HostName
    device: int
    reason: str
    since_wall_s: float
    until_wall_s: float
    uuid: str = ""

    @property
    def label(self) -> str:
        """The device as commands name it, such as "host-2:0"."""
        return f"{self.host}:{self.device}"


class HostLosses(msgspec.Struct, frozen=True, kw_only=True):
    """When a host was lost without a notice. Bound to a lease, with which it ends if no loss follows.

    Attributes:
        lost_wall_s: times of the losses in seconds since 1970, by the clocks of the leaders of those times; the oldest
            first.
    """

    host: HostName
    lost_wall_s: tuple[float, ...]
