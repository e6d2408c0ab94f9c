"""Failure domains: what is lost together. A host, then each level around it but the outermost."""

import dataclasses
from collections.abc import Iterable, Sequence

from resilient_jax.ids import HostName
from resilient_jax.topology.errors import TopologyError
from resilient_jax.topology.hosts import Host


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FailureDomain:
    """One host, rack, slice, ...; its name is unique among those of its level."""

    level: str
    name: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DomainHosts:
    """A failure domain with the hosts that are in it now, in the topology's order."""

    domain: FailureDomain
    hosts: tuple[HostName, ...]
    device_count: int


def list_failure_domains(host: Host, levels: Sequence[str]) -> tuple[FailureDomain, ...]:
    """Return the failure domains of a host, from the host itself outward.

    Args:
        levels: names of the failure levels, "host" first.
    """
    names = (host.name, *host.domains)
    return tuple(FailureDomain(level=level, name=name) for level, name in zip(levels, names, strict=True))


def group_by_domain(hosts: Iterable[Host], level: str, place: int) -> tuple[DomainHosts, ...]:
    """Return the domains of one level that have hosts.

    Args:
        hosts: hosts of the topology, in the topology's order.
        place: index of the level: 0 for hosts, 1 for what is around them, ...
    """
    members: dict[str, list[Host]] = {}
    for host in hosts:
        members.setdefault(host.domains[place - 1] if place else host.name, []).append(host)
    return tuple(
        DomainHosts(
            domain=FailureDomain(level=level, name=name),
            hosts=tuple(host.name for host in group),
            device_count=sum(host.devices for host in group),
        )
        for name, group in members.items()
    )


def validate_domains(hosts: Iterable[Host], between: Sequence[str]) -> None:
    """Raise an error for hosts whose domains do not fit the levels, or do not nest.

    Args:
        between: names of the levels between the host and the outermost.

    Raises:
        TopologyError: a host has too many or too few domains, or a domain is in two domains of the next level.
    """
    around: dict[tuple[int, str], tuple[str, ...]] = {}
    # Hosts share domains, so few combinations remain.
    distinct = {host.domains: host.name for host in hosts}
    for domains, host in distinct.items():
        if len(domains) != len(between):
            raise TopologyError(
                f"host {host!r}: found the domains {list(domains)}, expected one for each of the levels "
                f"{list(between)}",
                key="hosts",
            )
        for place, name in enumerate(domains):
            # Domains nest if each has the same domains around it with every one of its hosts.
            outer = around.setdefault((place, name), domains[place + 1 :])
            if outer != domains[place + 1 :]:
                raise TopologyError(
                    f"{between[place]} {name!r}: found it in {between[place + 1]} {outer[0]!r} and, with host "
                    f"{host!r}, in {domains[place + 1]!r}, expected it in one of them. Give two domains two names",
                    key="hosts",
                )
