"""The groups of hosts that keep parity for each other: nearly equal in size, with failure domains spread over them.

The hosts, sorted by failure domain, are assigned to the groups round robin. So sizes differ by one at most, and of a
domain of d hosts none of g groups gets more than ceil(d / g), which is optimal. The name of a domain begins with that
of the wider domain that contains it (pod-1/rack-3), so the same is true of the wider one.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

from resilient_jax.errors import SnapshotRefused
from resilient_jax.ids import HostName
from resilient_jax.protocol.snapshots import ParityGroup

DEFAULT_GROUP_SIZE = 8
"""With parity 2 it costs a third more memory, and a lost part is decoded from six hosts."""
MAX_GROUP_SIZE = 255
"""Shards of a Reed-Solomon code over GF(2^8), see `erasure/code.py`."""

_MAX_HOSTS_LISTED = 6
"""How many hosts of a domain a message lists."""


def form_parity_groups(
    hosts: Sequence[HostName],
    parity: int,
    *,
    group_size: int = DEFAULT_GROUP_SIZE,
    domain_of: Mapping[HostName, str] | None = None,
) -> tuple[ParityGroup, ...]:
    """Form groups of about `group_size` hosts, each with more hosts than parity.

    No failure domain has more than `parity` hosts in a group if any grouping achieves that; groups are made smaller for
    it. `describe_weaknesses` describes what could not be achieved.

    Args:
        hosts: all different; the same order on every host gives the same groups.
        parity: m, how many hosts of a group may be lost; lowered to the number of hosts minus 1.
        group_size: hosts in a group, as nearly as equal sizes allow; more than `parity`.
        domain_of: the rack or slice that each host fails together with. None, or a host without an entry: the host is a
            domain of its own.

    Raises:
        SnapshotRefused: no groups satisfy the arguments; the message proposes ones that do.
    """
    _check(hosts, parity, group_size)
    if not hosts:
        return ()
    parity = min(parity, len(hosts) - 1)
    domains = _list_domains(hosts, domain_of or {})
    count = _count_groups(len(hosts), parity, group_size, [len(domain) for domain in domains])
    ordered = [host for domain in domains for host in domain]
    place = {host: index for index, host in enumerate(hosts)}
    groups = (sorted(ordered[first::count], key=place.__getitem__) for first in range(count))
    return tuple(ParityGroup(hosts=tuple(group), parity=parity) for group in groups)


def describe_weaknesses(
    groups: Sequence[ParityGroup], parity: int, domain_of: Mapping[HostName, str] | None = None
) -> tuple[str, ...]:
    """Describe in sentences how the groups protect less than requested; return none if they protect as requested.

    Args:
        groups: from `form_parity_groups`.
        domain_of: the same as passed to `form_parity_groups`.
    """
    found = min((group.parity for group in groups), default=parity)
    lowered: tuple[str, ...] = ()
    if found < parity:
        lowered = (
            f"parity is {found}, {parity} was asked for: there are {sum(len(group.hosts) for group in groups)} hosts, "
            f"and {parity} parity needs {parity + 1}",
        )
    return lowered + tuple(text for group in groups for text in _describe_exposed(group, domain_of or {}))


def _describe_exposed(group: ParityGroup, domain_of: Mapping[HostName, str]) -> list[str]:
    # Without parity no loss is covered at all, so the domains need not be listed.
    counted = Counter(domain_of[host] for host in group.hosts if host in domain_of) if group.parity else {}
    exposed = [domain for domain, count in counted.items() if count > group.parity]
    return [
        f"losing failure domain {domain} loses snapshots: {_members(group, domain, domain_of)}"
        for domain in exposed
    ]


def _members(group: ParityGroup, domain: str, domain_of: Mapping[HostName, str]) -> str:
    members = [host for host in group.hosts if domain_of.get(host) == domain]
    listed = ", ".join(members[:_MAX_HOSTS_LISTED]) + (", ..." if len(members) > _MAX_HOSTS_LISTED else "")
    return (
        f"it has {len(members)} hosts of a group of {len(group.hosts)} ({listed}), "
        f"whose parity covers {group.parity}"
    )


def _check(hosts: Sequence[HostName], parity: int, group_size: int) -> None:
    if len(set(hosts)) < len(hosts):
        twice = sorted(host for host, count in Counter(hosts).items() if count > 1)
        raise SnapshotRefused(f"hosts {', '.join(twice)} are named twice, expected every host once")
    if parity < 0:
        raise SnapshotRefused(f"parity: found {parity}, expected 0 (no protection) or more")
    if not parity < group_size <= MAX_GROUP_SIZE:
        raise SnapshotRefused(
            f"group size: found {group_size} with parity {parity}, expected from {parity + 1} to {MAX_GROUP_SIZE} "
            "hosts, data and parity together; change one of them"
        )


def _list_domains(hosts: Sequence[HostName], domain_of: Mapping[HostName, str]) -> list[list[HostName]]:
    """Return the hosts of each failure domain; domains of a wider one, such as racks of one pod, are adjacent."""
    named: dict[str, list[HostName]] = {}
    alone: list[list[HostName]] = []
    for host in hosts:
        if host in domain_of:
            named.setdefault(domain_of[host], []).append(host)
        else:
            alone.append([host])
    return [*(named[domain] for domain in sorted(named)), *alone]


def _count_groups(hosts: int, parity: int, group_size: int, domains: Sequence[int]) -> int:
    # A group has at least parity + 1 hosts, and at most MAX_GROUP_SIZE.
    most = hosts // (parity + 1)
    fewest = -(-hosts // MAX_GROUP_SIZE)
    if fewest > most:
        raise SnapshotRefused(
            f"{hosts} hosts with parity {parity}: found no groups of more than {parity} and at most {MAX_GROUP_SIZE} "
            f"hosts; lower the parity to {hosts // fewest - 1}"
        )
    # hosts / group size, rounded to the nearest: floor(hosts / size + 1 / 2).
    nearest = (2 * hosts + group_size) // (2 * group_size)
    # A domain that no number of groups can spread thinly enough does not count.
    # g groups get up to ceil(d / g) of a domain's d hosts, which is at most the parity for g >= d / parity.
    spread = [-(-domain // parity) for domain in domains if parity and domain <= parity * most]
    return min(most, max(fewest, nearest, 1, *spread))
