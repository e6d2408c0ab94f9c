"""What each host counts by its devices: one that works with half of them is half a host. Pure."""

import math
from collections.abc import Iterable
from typing import NamedTuple

from resilient_jax.ids import HostName
from resilient_jax.membership.facts import MembershipState
from resilient_jax.protocol.host_status import HostStatus


class HostShares(NamedTuple):
    """What hosts count, as parts of the host that has most devices.

    A host counts as a complete one while it is gone, or if its agent does not know how many devices it has.

    Attributes:
        most: devices of the host that has most; 0: no agent knows.
    """

    state: MembershipState
    most: int

    @classmethod
    def of(cls, state: MembershipState) -> "HostShares":
        """Return the shares of a job's hosts."""
        return cls(state, max((status.devices.num_devices for status in state.hosts.values()), default=0))

    def count_used(self, host: HostName) -> float:
        """Return what a host counts with the devices that a worker uses which starts now."""
        status = self.state.hosts.get(host)
        return self._divide(status, status.devices.num_used if status is not None else 0)

    def count_complete(self, host: HostName) -> float:
        """Return what a host counts with all of its devices."""
        return self._divide(self.state.hosts.get(host), 0)

    # The exact sum, so that it is the same on each leader, in whatever order a set has its hosts.
    def sum_used(self, hosts: Iterable[HostName]) -> float:
        """Return the sum of `count_used`."""
        return math.fsum(map(self.count_used, hosts))

    def sum_complete(self, hosts: Iterable[HostName]) -> float:
        """Return the sum of `count_complete`."""
        return math.fsum(map(self.count_complete, hosts))

    def _divide(self, status: HostStatus | None, num_used: int) -> float:
        """Return what a host counts that uses so many devices; 0: all."""
        num_devices = status.devices.num_devices if status is not None else 0
        return min((num_used or num_devices or self.most) / self.most, 1.0) if self.most else 1.0
