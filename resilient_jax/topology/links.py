"""The network as nested levels: within a host, between the hosts of a rack, between racks, ...

Two devices communicate over the innermost level that has both. Every figure is for one direction; links carry both
at once.
"""

import dataclasses
import enum
import math

from resilient_jax.topology.errors import TopologyError

HOST_LEVEL = "host"
"""The innermost level: links between the devices of one host."""


class Port(enum.StrEnum):
    """The owner of a bandwidth: each device has it for itself, or the devices of a host share it."""

    DEVICE = "device"
    HOST = "host"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LinkLevel:
    """The links between those domains of the level below that are in one domain of this level.

    Attributes:
        name: such as "host", "rack", "cluster".
        bandwidth_bytes_per_s: bandwidth of one port, each way.
        latency_s: latency of one message, from sender to receiver.
        oversubscription: how many times more the ports below could send than this level carries; 1 if it carries all.
            The top of a fat tree is thinner than its leaves.
    """

    name: str
    bandwidth_bytes_per_s: float
    port: Port
    latency_s: float
    oversubscription: float = 1.0
    source: str = dataclasses.field(default="", compare=False)

    def __post_init__(self) -> None:
        if not 0 < self.bandwidth_bytes_per_s < math.inf:
            raise self._misfit("bandwidth_bytes_per_s", self.bandwidth_bytes_per_s, "> 0")
        if not 0 <= self.latency_s < math.inf:
            raise self._misfit("latency_s", self.latency_s, ">= 0")
        if not 1 <= self.oversubscription < math.inf:
            raise self._misfit("oversubscription", self.oversubscription, ">= 1")

    def bandwidth_of_device(self, senders: int) -> float:
        """Return the bytes per second, each way, that one device gets when all hosts send at once.

        Formula: `bandwidth / oversubscription`, and `/ senders` where the port is the host's. With fewer hosts sending,
        an oversubscribed level may carry more for each: this is the guaranteed bandwidth.

        Args:
            senders: devices of each host that send at the same time, at least 1.
        """
        # bytes per second = bandwidth / oversubscription / (devices that share the port).
        sharing = senders if self.port is Port.HOST else 1
        return self.bandwidth_bytes_per_s / self.oversubscription / sharing

    def _misfit(self, name: str, found: float, expected: str) -> TopologyError:
        return TopologyError(
            f"level {self.name!r}: {name}: found {found}, expected a number {expected}", key="links"
        )
