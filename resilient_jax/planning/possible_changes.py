"""The losses that a cluster may meet, and the hosts and devices that may become slow: one of each kind."""

import collections
import dataclasses
from collections.abc import Iterable, Iterator
from typing import Final

from resilient_jax.topology import Host, Topology

SLOW_SPEEDS: Final = (0.8, 0.5, 0.25)
"""As parts of the speed of its peers: a little slow, half, and as slow as what is throttled by heat."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PossibleChange:
    """One change, for all that are like it.

    Attributes:
        kind: such as "a device", "a rack", or "a host at 0.5".
        names: what is lost or slow, as `Topology.without` and `Topology.slowed` take it.
        num_alike: how many changes of this kind there are.
        speed: speed of what is slow as a part of the speed before; None: it is lost.
    """

    kind: str
    names: tuple[str, ...]
    num_alike: int
    speed: float | None = None

    def describe(self) -> str:
        """Return a text such as "a rack: host-0 to host-3, 4 hosts"."""
        first, last = self.names[0], self.names[-1]
        named = (
            f"{first} to {last}, {len(self.names)} hosts" if len(self.names) > 2 else " and ".join(self.names)
        )
        return f"{self.kind}: {named}"

    def apply(self, topology: Topology) -> Topology:
        """Return the topology after the change."""
        if self.speed is None:
            return topology.without(*self.names)
        return topology.slowed(self.names[0], self.speed)


def list_possible_losses(topology: Topology) -> list[PossibleChange]:
    """Return a loss of each kind: a device, a host, two hosts, and a failure domain of each level and size.

    Two hosts are of different failure domains where there are several. A loss that leaves no host is none of them.
    """
    # Of names that two kinds share, such as a rack of one host, the last kind is shown.
    losses = {
        loss.names: loss
        for loss in reversed(list(_list_losses(topology)))
        if "/" in loss.names[0] or len(loss.names) < len(topology.hosts)
    }
    return list(losses.values())[::-1]


def list_possible_slowness(topology: Topology) -> list[PossibleChange]:
    """Return a host of each kind, and a device of it if it has several, at each of `SLOW_SPEEDS`."""
    found: list[PossibleChange] = []
    for hosts in _group_alike(topology.hosts):
        last = hosts[-1]
        kinds: list[tuple[str, str, int]] = [("a host", last.name, len(hosts))]
        if last.devices > 1:
            kinds.append(("a device", f"{last.name}/{last.living_devices[-1]}", len(hosts) * last.devices))
        found += [
            PossibleChange(kind=f"{kind} at {speed:g}", names=(name,), num_alike=number, speed=speed)
            for kind, name, number in kinds
            for speed in SLOW_SPEEDS
        ]
    return found


def _group_alike(hosts: Iterable[Host]) -> list[list[Host]]:
    """Return hosts in groups that are alike by accelerator, devices and speeds: the last of a group stands for all."""
    alike: dict[object, list[Host]] = collections.defaultdict(list)
    for host in hosts:
        alike[host.accelerator, host.devices, host.device_speeds, host.speed].append(host)
    return list(alike.values())


def _list_losses(topology: Topology) -> Iterator[PossibleChange]:
    alike = _group_alike(topology.hosts)
    for hosts in alike:
        last = hosts[-1]
        if last.devices > 1:
            names = (f"{last.name}/{last.living_devices[-1]}",)
            yield PossibleChange(kind="a device", names=names, num_alike=len(hosts) * last.devices)
    for hosts in alike:
        yield PossibleChange(kind="a host", names=(hosts[-1].name,), num_alike=len(hosts))
    if (pair := _find_pair(topology)) is not None:
        num_hosts = len(topology.hosts)
        yield PossibleChange(kind="two hosts", names=pair, num_alike=num_hosts * (num_hosts - 1) // 2)
    for level in topology.failure_levels[1:]:
        sizes: dict[int, list[tuple[str, ...]]] = collections.defaultdict(list)
        for domain in topology.domains(level):
            sizes[len(domain.hosts)].append(tuple(domain.hosts))
        for domains in sizes.values():
            yield PossibleChange(kind=f"a {level}", names=domains[-1], num_alike=len(domains))


def _find_pair(topology: Topology) -> tuple[str, str] | None:
    if len(topology.hosts) < 3:
        return None
    *others, last = topology.hosts
    apart = [host for host in others if host.domains[-1:] != last.domains[-1:]]
    return (apart or others)[-1].name, last.name
