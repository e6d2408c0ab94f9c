"""What each host counts by its devices: one that works with half of them is half a host. Pure."""

from collections.abc import Iterable
from typing import NamedTuple

from resilient_jax.ids import HostName
from resilient_jax.membership.facts import MembershipState
from resilient_jax.protocol.records import HostStatus


class HostShares(NamedTuple):
    """What hosts count, as parts of the host that has most devices.

    A host counts as a complete one while it is gone, or if its agent does not know how many devices it has.

    Attributes:
        state: of the machine.
        most: the devices of that host; 0: no agent knows.
    """

    state: MembershipState
    most: int

    @classmethod
    def of(cls, state: MembershipState) -> "HostShares":
        """Return the shares of a job's hosts."""
        return cls(state, max((status.num_devices for status in state.hosts.values()), default=0))

    def sum_used(self, hosts: Iterable[HostName]) -> float:
        """Return what hosts count with the devices that their workers use."""
        return sum(map(self.find, hosts))

    def find(self, host: HostName) -> float:
        """Return the same of one host."""
        status = self.state.hosts.get(host)
        return self._divide(status, status.num_used if status is not None else 0)

    def sum_complete(self, hosts: Iterable[HostName]) -> float:
        """Return what hosts count with all of their devices."""
        return sum(self._divide(self.state.hosts.get(host), 0) for host in hosts)

    def _divide(self, status: HostStatus | None, num_used: int) -> float:
        """Return what a host counts that uses so many devices; 0: all."""
        num_devices = status.num_devices if status is not None else 0
        # A device more than the agent counts is none: its numbers are of different moments.
        return min((num_used or num_devices or self.most) / self.most, 1.0) if self.most else 1.0
