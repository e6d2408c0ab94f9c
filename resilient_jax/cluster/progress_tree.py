"""The tree by which progress reaches the leader: which agent each host reports to. Pure.

The leader is the root. Hosts take places in the order in which they come, and the agent in place i collects the reports
of the places FANOUT * (i + 1) and up, FANOUT of them. A host that leaves frees its place for the next that comes, so no
other host moves; until then, and while an agent does not answer, its hosts report to the one above it.
"""

import heapq
from collections.abc import Collection
from typing import Final

from resilient_jax.ids import HostName

FANOUT: Final = 32
"""How many hosts report to one agent: to collect that many reports a second takes a hundredth of a core."""


class ProgressTree:
    """The hosts that report, and where."""

    def __init__(self) -> None:
        self._places: dict[HostName, int] = {}
        self._endpoints: list[str] = []
        """By place; empty: the place is free."""
        self._free: list[int] = []
        """A heap, so that places near the root are taken first."""

    def __len__(self) -> int:
        """Return the number of hosts."""
        return len(self._places)

    def __contains__(self, host: HostName) -> bool:
        """Return whether a host has a place."""
        return host in self._places

    def add(self, host: HostName, endpoint: str) -> None:
        """Give a host a place, or note where its agent listens now."""
        if host not in self._places:
            if self._free:
                self._places[host] = heapq.heappop(self._free)
            else:
                self._places[host] = len(self._endpoints)
                self._endpoints.append("")
        self._endpoints[self._places[host]] = endpoint

    def remove(self, host: HostName) -> None:
        """Free the place of a host, if it has one."""
        if (place := self._places.pop(host, None)) is not None:
            self._endpoints[place] = ""
            heapq.heappush(self._free, place)

    def find_parent(self, host: HostName, avoided: Collection[str] = ()) -> str:
        """Return the endpoint of the agent that a host reports to; empty: the leader.

        Args:
            avoided: endpoints of agents that do not answer the host.
        """
        place = self._places.get(host, 0)
        while place >= FANOUT:
            place = place // FANOUT - 1
            endpoint = self._endpoints[place]
            if endpoint and endpoint not in avoided:
                return endpoint
        return ""
