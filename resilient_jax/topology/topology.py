"""A cluster as a value: hosts, devices, links, failure domains; and its changes."""

import dataclasses
import difflib
from collections import Counter
from collections.abc import Iterable, Mapping

from resilient_jax.ids import HostName
from resilient_jax.topology.accelerator import Accelerator
from resilient_jax.topology.domains import (
    DomainHosts,
    FailureDomain,
    group_by_domain,
    list_failure_domains,
    validate_domains,
)
from resilient_jax.topology.errors import TopologyError, UnknownHost
from resilient_jax.topology.hosts import Host, HostClass, classify_hosts, sort_hosts
from resilient_jax.topology.links import HOST_LEVEL, LinkLevel

LINK = "link"
"""After a host's name and a slash: its links to other hosts."""
_NEAREST = 3
"""How many names an error suggests."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Topology:
    """The hosts of a cluster, the figures of their devices, and the links between them.

    A value: changes return new ones, which share the hosts that did not change. Equal hosts in any order are the same
    topology. Constructing one takes time in proportion to its hosts; of its methods only `domains` and `domain_of` do.

    Attributes:
        name: the topology's name, such as "h100_32x8".
        levels: links, from inside a host outward; the last level connects all hosts.
        hosts: sorted by domain and name, see `sort_hosts`. Their devices in this order are the devices' order.
        description: what the cluster is, in words.
        classes: classes of hosts that compute alike, with counts.

    Example:
        >>> from resilient_jax.topology import *
        >>> chip = Accelerator(
        ...     name="chip",
        ...     peaks=(Peak(number_format=NumberFormat.BF16, flops_per_s=1e14),),
        ...     memory_bytes=16 * 10**9,
        ...     memory_bandwidth_bytes_per_s=1e12,
        ... )
        >>> inside = LinkLevel(name="host", bandwidth_bytes_per_s=1e11, port=Port.DEVICE, latency_s=1e-6)
        >>> network = LinkLevel(name="cluster", bandwidth_bytes_per_s=1e10, port=Port.HOST, latency_s=1e-5)
        >>> hosts = tuple(Host(name=HostName(f"host-{i}"), accelerator=chip, devices=4) for i in range(8))
        >>> full = Topology(name="small", levels=(inside, network), hosts=hosts)
        >>> full.without("host-3").slowed("host-5", 0.6)
        Topology('small': 7 hosts, 28 devices)
        >>> full.without("host-3").with_hosts([full.host("host-3")]) == full
        True
    """

    name: str
    levels: tuple[LinkLevel, ...]
    hosts: tuple[Host, ...]
    description: str = dataclasses.field(default="", compare=False)
    classes: tuple[HostClass, ...] = dataclasses.field(init=False, compare=False)
    _places: dict[HostName, int] = dataclasses.field(init=False, compare=False)

    def __post_init__(self) -> None:
        hosts = sort_hosts(self.hosts)
        places = {host.name: place for place, host in enumerate(hosts)}
        self._check(hosts, places)
        object.__setattr__(self, "hosts", hosts)
        object.__setattr__(self, "_places", places)
        object.__setattr__(self, "classes", classify_hosts(hosts))

    def __repr__(self) -> str:
        hosts, devices = len(self.hosts), self.device_count
        return (
            f"Topology({self.name!r}: {hosts} host{'s'[: hosts != 1]}, {devices} device{'s'[: devices != 1]})"
        )

    @property
    def device_count(self) -> int:
        """Devices of all hosts together."""
        return sum(kind.device_count for kind in self.classes)

    @property
    def accelerators(self) -> tuple[Accelerator, ...]:
        """Each kind of accelerator once, in the order of the hosts."""
        return tuple(dict.fromkeys(kind.accelerator for kind in self.classes))

    @property
    def failure_levels(self) -> tuple[str, ...]:
        """Names of the levels whose domains are lost as one, from "host" outward, without the outermost level."""
        return (HOST_LEVEL, *(level.name for level in self.levels[1:-1]))

    def host(self, name: str) -> Host:
        """Return the host of that name.

        Raises:
            UnknownHost: there is no such host.
        """
        return self.hosts[self._place(name)]

    def level_between(self, first: str, second: str) -> LinkLevel:
        """Return the innermost level that connects two hosts; for a host and itself the first.

        Raises:
            UnknownHost: there is no such host.
        """
        one, other = self.host(first), self.host(second)
        if one.name == other.name:
            return self.levels[0]
        # Domains nest, so the first common one from inside outward is the innermost.
        for level, mine, its in zip(self.levels[1:], one.domains, other.domains, strict=False):
            if mine == its:
                return level
        return self.levels[-1]

    def failure_domains(self, host: str) -> tuple[FailureDomain, ...]:
        """Return the failure domains that contain this host: the host itself, then its rack, ..., outward.

        Raises:
            UnknownHost: there is no such host.
        """
        return list_failure_domains(self.host(host), self.failure_levels)

    def domains(self, level: str) -> tuple[DomainHosts, ...]:
        """Return the failure domains of one level with their hosts; domains without a host are omitted.

        Raises:
            TopologyError: the level is none of `failure_levels`.
        """
        if level not in self.failure_levels:
            raise TopologyError(
                f"topology {self.name!r}: found no failure domains {level!r}, expected one of "
                f"{', '.join(self.failure_levels)}",
                key="links",
            )
        return group_by_domain(self.hosts, level, self.failure_levels.index(level))

    def domain_of(self, level: str) -> dict[HostName, str]:
        """Return for each host the name of its failure domain of one level.

        Raises:
            TopologyError: the level is none of `failure_levels`.
        """
        return {host: group.domain.name for group in self.domains(level) for host in group.hosts}

    def without(self, *names: str) -> "Topology":
        """Return this topology after hosts, single devices ("host-07/3") or links of hosts ("host-07/link") were lost.

        A host without a link, or without its last device, is lost.

        Raises:
            UnknownHost: there is no such host or device; also if it was lost before.
            TopologyError: no host would be left.
        """
        changed: dict[int, Host | None] = {}
        for name in names:
            place, index = self._find(name, changed)
            host = changed.get(place, self.hosts[place])
            is_whole = host is None or index in (None, LINK) or host.devices == 1
            changed[place] = None if is_whole else host.without_device(int(index))  # type: ignore[arg-type]
        return self._with_changes(changed)

    def slowed(self, name: str, speed: float) -> "Topology":
        """Return this topology with a host, a device ("host-07/3") or a link ("host-07/link") at a part of its speed.

        Args:
            name: name of the host, device or link. A slow host has healthy links.
            speed: part of its healthy speed in (0, 1], whatever it was before; 1 heals it.

        Raises:
            UnknownHost: there is no such host or device.
            TopologyError: the speed is out of range.
        """
        place, index = self._find(name, {})
        host = self.hosts[place]
        match index:
            case None:
                slow = dataclasses.replace(host, speed=speed, device_speeds=())
            case str():
                slow = dataclasses.replace(host, link_speed=speed)
            case _:
                slow = host.slowed_device(index, speed)
        return self._with_changes({place: slow})

    def with_hosts(self, hosts: Iterable[Host]) -> "Topology":
        """Return this topology with more hosts: new ones, or those that come back (`full.host(name)`).

        Raises:
            TopologyError: a name is taken, or the domains do not fit the levels.
        """
        return dataclasses.replace(self, hosts=(*self.hosts, *hosts))

    def _with_changes(self, changed: Mapping[int, Host | None]) -> "Topology":
        """Return this topology with other hosts in some places; None: without the host."""
        if not changed:
            return self
        now = (changed.get(place, host) for place, host in enumerate(self.hosts))
        return dataclasses.replace(self, hosts=tuple(host for host in now if host is not None))

    def _find(self, name: str, changed: Mapping[int, Host | None]) -> tuple[int, int | str | None]:
        """Return the place of a host, and which of its devices or `LINK` is named; None: the host."""
        whole, slash, part = name.rpartition("/")
        if not slash or HostName(name) in self._places:
            return self._place(name), None
        place = self._place(whole)
        host = changed.get(place, self.hosts[place])
        if part == LINK:
            return place, LINK
        if not part.isdecimal() or (host is not None and int(part) not in host.living_devices):
            devices = "none" if host is None else ", ".join(map(str, host.living_devices))
            raise UnknownHost(
                f"device {name!r}: found no such device on host {whole!r}, expected HOST/INDEX with one of its devices "
                f"({devices}), or HOST/{LINK}"
            )
        return place, int(part)

    def _place(self, name: str) -> int:
        place = self._places.get(HostName(name))
        if place is not None:
            return place
        names = list(self._places)
        nearest = difflib.get_close_matches(name, names, n=_NEAREST)
        hint = f"Did you mean {' or '.join(nearest)}?" if nearest else "Check the name."
        raise UnknownHost(
            f"host {name!r}: found no such host in topology {self.name!r}, expected one of its {len(names)} hosts "
            f"({names[0]} to {names[-1]}); one that was lost is no longer among them. {hint}"
        )

    def _check(self, hosts: tuple[Host, ...], places: dict[HostName, int]) -> None:
        if not hosts:
            raise TopologyError(
                f"topology {self.name!r}: found no hosts, expected at least one; there is nothing left to train on",
                key="hosts",
            )
        if len(places) < len(hosts):
            twice = Counter(host.name for host in hosts).most_common(1)[0][0]
            raise TopologyError(
                f"host {twice!r}: found it twice, expected every host once. Rename or leave out one of them",
                key="hosts",
            )
        names = [level.name for level in self.levels]
        if not names or names[0] != HOST_LEVEL or len(set(names)) < len(names):
            raise TopologyError(
                f"topology {self.name!r}: found the link levels {names}, expected {HOST_LEVEL!r} first and every name "
                "once",
                key="links",
            )
        if len(hosts) > 1 and len(names) == 1:
            raise TopologyError(
                f"topology {self.name!r}: found links inside a host only, for {len(hosts)} hosts, expected also a "
                f"level that connects the hosts. Add one after the level {HOST_LEVEL!r}",
                key="links",
            )
        validate_domains(hosts, names[1:-1])
