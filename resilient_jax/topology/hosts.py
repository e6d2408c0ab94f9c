"""A host, in what order hosts stand, and which of them are alike."""

import dataclasses
import operator
import re
from collections import Counter
from collections.abc import Iterable

from resilient_jax.ids import HostName
from resilient_jax.topology.accelerator import Accelerator
from resilient_jax.topology.errors import TopologyError

_NUMBER = re.compile(r"([0-9]+)")

SortKey = tuple[object, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """A machine with its devices.

    Attributes:
        name: unique in its topology.
        accelerator: of all its devices.
        devices: how many.
        speed: how fast it computes now, as a part of what its accelerator can do; 1 is healthy. (0, 1]
        domains: names of the domains that it lies in, innermost first: one for each level between the host
            itself and the outermost, which has all hosts.
        source: where it is known from.
        order: what hosts are sorted by.
    """

    name: HostName
    accelerator: Accelerator
    devices: int
    speed: float = 1.0
    domains: tuple[str, ...] = ()
    source: str = dataclasses.field(default="", repr=False, compare=False)
    order: SortKey = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.devices < 1:
            raise TopologyError(
                f"host {self.name!r}: found {self.devices} devices, expected at least 1", key="hosts"
            )
        if not 0 < self.speed <= 1:
            raise TopologyError(
                f"host {self.name!r}: speed: found {self.speed}, expected a number > 0 and <= 1, the part of its "
                "healthy speed that it has now. Use without() for a host that does not compute any more",
                key="hosts",
            )
        domains = tuple(_natural(domain) for domain in reversed(self.domains))
        object.__setattr__(self, "order", (domains, _natural(self.name), self.name))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HostClass:
    """Hosts that compute alike: what a search has to look at once, not once per host."""

    accelerator: Accelerator
    devices: int
    speed: float
    hosts: int

    @property
    def device_count(self) -> int:
        """Of all its hosts together."""
        return self.devices * self.hosts


def sort_hosts(hosts: Iterable[Host]) -> tuple[Host, ...]:
    """By outermost domain, ..., innermost domain, name; numbers in names by their value.

    So the same hosts always stand in the same order, however they were lost and came back, and hosts of one
    domain stand together.
    """
    return tuple(sorted(hosts, key=operator.attrgetter("order")))


def classify_hosts(hosts: Iterable[Host]) -> tuple[HostClass, ...]:
    """The classes of hosts that differ in nothing but name and place, in the order of their first host."""
    # By identity first: an accelerator's own hash visits all its peaks, for each of a hundred thousand hosts.
    kinds: dict[int, Accelerator] = {}
    counts: Counter[tuple[int, int, float]] = Counter()
    for host in hosts:
        kinds[id(host.accelerator)] = host.accelerator
        counts[id(host.accelerator), host.devices, host.speed] += 1
    merged: Counter[tuple[Accelerator, int, float]] = Counter()
    for (kind, devices, speed), count in counts.items():
        merged[kinds[kind], devices, speed] += count
    return tuple(
        HostClass(accelerator=accelerator, devices=devices, speed=speed, hosts=count)
        for (accelerator, devices, speed), count in merged.items()
    )


def _natural(text: str) -> SortKey:
    """Sorts "host-9" before "host-10": digits by value, at every odd place, the text between them at even ones."""
    return tuple(int(part) if place % 2 else part for place, part in enumerate(_NUMBER.split(text)))
