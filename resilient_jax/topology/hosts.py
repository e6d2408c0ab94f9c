"""Hosts, their order, and classes of equal hosts."""

import dataclasses
import operator
import re
from collections import Counter
from collections.abc import Iterable
from typing import Self

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
        accelerator: kind of all devices of the host.
        speed: current part of the accelerator's rates in (0, 1]; 1 is healthy. All wait for the slowest device.
        lost_devices: indexes of devices that do not compute any more.
        device_speeds: the speed of each device that computes, in the order of their indexes; empty: all have `speed`.
        link_speed: current part of the bandwidth of the host's links to other hosts in (0, 1].
        domains: names of the domains that contain the host, innermost first: one for each level between the host itself
            and the outermost, which has all hosts.
    """

    name: HostName
    accelerator: Accelerator
    devices: int
    speed: float = 1.0
    domains: tuple[str, ...] = ()
    source: str = dataclasses.field(default="", repr=False, compare=False)
    lost_devices: tuple[int, ...] = ()
    device_speeds: tuple[float, ...] = ()
    link_speed: float = 1.0
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
        if not 0 < self.link_speed <= 1:
            raise TopologyError(
                f"host {self.name!r}: link: found {self.link_speed}, expected a number > 0 and <= 1, the part of its "
                "healthy bandwidth. Use without() for a host that cannot be reached any more",
                key="hosts",
            )
        domains = tuple(_natural(domain) for domain in reversed(self.domains))
        object.__setattr__(self, "order", (domains, _natural(self.name), self.name))

    @property
    def living_devices(self) -> tuple[int, ...]:
        """The indexes of the devices that compute."""
        every = range(self.devices + len(self.lost_devices))
        return tuple(index for index in every if index not in self.lost_devices)

    def without_device(self, index: int) -> Self:
        """Return the host after one of its devices was lost; it must have another one."""
        left = [(speed, other) for speed, other in self._list_speeds() if other != index]
        return self._with_speeds(left, tuple(sorted((*self.lost_devices, index))))

    def slowed_device(self, index: int, speed: float) -> Self:
        """Return the host with one device at a part of its healthy speed."""
        speeds = [(speed if other == index else old, other) for old, other in self._list_speeds()]
        return self._with_speeds(speeds, self.lost_devices)

    def _list_speeds(self) -> list[tuple[float, int]]:
        speeds = self.device_speeds or (self.speed,) * self.devices
        return list(zip(speeds, self.living_devices, strict=True))

    def _with_speeds(self, speeds: list[tuple[float, int]], lost: tuple[int, ...]) -> Self:
        values = tuple(speed for speed, _ in speeds)
        return dataclasses.replace(
            self,
            devices=len(values),
            speed=min(values, default=self.speed),
            device_speeds=values if len(set(values)) > 1 else (),
            lost_devices=lost,
        )


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
