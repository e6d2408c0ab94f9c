"""Hosts, their order, and classes of equal hosts."""

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
        accelerator: kind of all its devices.
        devices: number of devices.
        speed: current part of its accelerator's rates in (0, 1]; 1 is healthy.
        domains: names of the domains that contain it, innermost first: one for each level between the host itself and
            the outermost, which has all hosts.
        source: source of the information.
        order: sort key of hosts.
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
    """Hosts that compute alike: a search visits a class once, not each of its hosts."""

    accelerator: Accelerator
    devices: int
    speed: float
    hosts: int

    @property
    def device_count(self) -> int:
        """Devices of all its hosts together."""
        return self.devices * self.hosts


def sort_hosts(hosts: Iterable[Host]) -> tuple[Host, ...]:
    """Return hosts by outermost domain, ..., innermost domain, name; numbers in names by their value.

    So the same hosts always have the same order, however they were lost and came back, and hosts of one domain are
    consecutive.
    """
    return tuple(sorted(hosts, key=operator.attrgetter("order")))


def classify_hosts(hosts: Iterable[Host]) -> tuple[HostClass, ...]:
    """Return the classes of hosts that differ only in name and domains, in the order of their first host."""
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
    """Return a key that sorts "host-9" before "host-10".

    Digits compare by value at odd indexes, the text between them at even ones.
    """
    return tuple(int(part) if place % 2 else part for place, part in enumerate(_NUMBER.split(text)))
