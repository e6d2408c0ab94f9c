"""Which hosts keep parity for each other: groups as equal as they can be, failure domains spread over them.

The hosts, sorted by failure domain, are dealt to the groups like cards. So sizes differ by one at most, and of a domain
of d hosts no group of g gets more than ceil(d / g): as few as any way to make g groups could give. Domains that lie in
a wider one carry its name in front (pod-1/rack-3), so the same is true of the wider one.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

from resilient_jax.errors import SnapshotRefused
from resilient_jax.ids import HostName
from resilient_jax.protocol.snapshots import ParityGroup

DEFAULT_GROUP_SIZE = 8
"""With parity 2 a third more memory; a lost part is decoded from six hosts."""
MAX_GROUP_SIZE = 255
"""Shards of a Reed-Solomon code over GF(2^8), see `erasure/code.py`."""

_MEMBERS_SAID = 6
"""How many hosts of a domain a message lists."""


def form_parity_groups(
    hosts: Sequence[HostName],
    parity: int,
    *,
    group_size: int = DEFAULT_GROUP_SIZE,
    domain_of: Mapping[HostName, str] | None = None,
) -> tuple[ParityGroup, ...]:
    """Groups of about `group_size` hosts, every one with more hosts than parity.

    No failure domain has more than `parity` hosts in a group wherever any way to group the hosts can do that; groups
    are made smaller for it. What could not be had, `describe_weaknesses` says in words, for an event.

    Args:
        hosts: all different; the same order on every host gives the same groups.
        parity: m, how many hosts of a group may be lost. Lowered to one less than there are hosts.
        group_size: hosts in a group, as nearly as equal sizes allow; more than `parity`.
        domain_of: the rack or slice whose failure takes its hosts together. A host that is not named is a domain
            of its own.

    Raises:
        SnapshotRefused: the numbers fit no groups; says which would.
    """
    _check(hosts, parity, group_size)
    if not hosts:
        return ()
    parity = min(parity, len(hosts) - 1)
    domains = _domains(hosts, domain_of or {})
    count = _count_groups(len(hosts), parity, group_size, [len(domain) for domain in domains])
    dealt = [host for domain in domains for host in domain]
    place = {host: index for index, host in enumerate(hosts)}
    groups = (sorted(dealt[first::count], key=place.__getitem__) for first in range(count))
    return tuple(ParityGroup(hosts=tuple(group), parity=parity) for group in groups)


def describe_weaknesses(
    groups: Sequence[ParityGroup], parity: int, domain_of: Mapping[HostName, str] | None = None
) -> tuple[str, ...]:
    """In words, how the groups protect less than was asked for; empty if they do not.

    Args:
        groups: of `form_parity_groups`.
        parity: that was asked for.
        domain_of: as it was given to `form_parity_groups`.
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
    # Without parity no loss is covered, so that a domain's is not says nothing new.
    counted = Counter(domain_of[host] for host in group.hosts if host in domain_of) if group.parity else {}
    exposed = [domain for domain, count in counted.items() if count > group.parity]
    return [
        f"losing failure domain {domain} loses snapshots: {_members(group, domain, domain_of)}"
        for domain in exposed
    ]


def _members(group: ParityGroup, domain: str, domain_of: Mapping[HostName, str]) -> str:
    members = [host for host in group.hosts if domain_of.get(host) == domain]
    more = ", ..." if len(members) > _MEMBERS_SAID else ""
    return (
        f"it has {len(members)} hosts of a group of {len(group.hosts)} ({', '.join(members[:_MEMBERS_SAID])}{more}), "
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


def _domains(hosts: Sequence[HostName], domain_of: Mapping[HostName, str]) -> list[list[HostName]]:
    """The hosts of each failure domain; neighbours by name, such as racks of one pod, come one after the other."""
    named: dict[str, list[HostName]] = {}
    alone: list[list[HostName]] = []
    for host in hosts:
        if host in domain_of:
            named.setdefault(domain_of[host], []).append(host)
        else:
            alone.append([host])
    return [*(named[domain] for domain in sorted(named)), *alone]


def _count_groups(hosts: int, parity: int, group_size: int, domains: Sequence[int]) -> int:
    most = hosts // (parity + 1)
    fewest = -(-hosts // MAX_GROUP_SIZE)
    if fewest > most:
        raise SnapshotRefused(
            f"{hosts} hosts with parity {parity}: found no groups of more than {parity} and at most {MAX_GROUP_SIZE} "
            f"hosts; lower the parity to {hosts // fewest - 1}"
        )
    nearest = (2 * hosts + group_size) // (2 * group_size)
    # A domain that no number of groups can spread thin enough asks for none.
    spread = [-(-domain // parity) for domain in domains if parity and domain <= parity * most]
    return min(most, max(fewest, nearest, 1, *spread))
