"""The last holders of the state: nothing ends or leaves them before what they have is copied. Pure.

A worker that is left out is ended by its agent, and its memory goes with it. So whoever decides that members go asks
here what is left without them: another member with the state, or a snapshot that can be rebuilt. If there is neither,
the members stay: to be interrupted and to go on, to serve the others for one more generation, or to let another host
go in their place. The new generation copies the state first of all (`protection`).

Where all members are gone, a host in quarantine that has the state is let in with it, and leaves again once others have
it.

Where members do not answer at all, to wait for them is all that can be done (rule 9 of `rules`). Then they are left
out, and the reason says what may be lost with them.
"""

from collections.abc import Iterable

from resilient_jax.ids import HostName
from resilient_jax.membership.doubt import have_state
from resilient_jax.membership.facts import MembershipState, find_snapshot, is_draining, list_able
from resilient_jax.protocol.generation import Generation, Member
from resilient_jax.protocol.host_status import HostStatus


def have_last_copy(state: MembershipState, generation: Generation, members: Iterable[Member]) -> bool:
    """Return whether the state is on these members alone: they have it, and no snapshot of it can be rebuilt.

    Args:
        generation: the present generation, or the next, which says which states are in doubt.
        members: members whose workers live.
    """
    hosts = [state.hosts[member.host] for member in members if member.host in state.hosts]
    return have_state(generation, hosts) and find_snapshot(state) is None


def is_needed_by_others(
    state: MembershipState, members: tuple[Member, ...], leaving: Iterable[HostName]
) -> bool:
    """Return whether some of the members are not to go: what they have is on none of the others, and in no snapshot.

    Args:
        members: members whose workers live.
        leaving: hosts of the members that would go.
    """
    gone = set(leaving)
    if not gone:
        return False
    left = [state.hosts[member.host] for member in members if member.host not in gone]
    return not have_state(state.generation, left) and have_last_copy(state, state.generation, members)


def list_quarantined_holders(
    state: MembershipState, kept: Iterable[HostStatus], joiners: Iterable[HostStatus]
) -> list[HostStatus]:
    """Return the hosts in quarantine that are to join because they alone have the state.

    Args:
        kept: members that go on.
        joiners: hosts that join without this.
    """
    if have_state(state.generation, [*kept, *joiners]) or find_snapshot(state) is not None:
        return []
    able = list_able(state, state.quarantined)
    return able if have_state(state.generation, able) else []


def find_suspect(state: MembershipState, min_hosts: int) -> tuple[HostName | None, HostName | None]:
    """Return the host to take out after attempts that failed, and the one that is spared as the last holder.

    The first is the host that reported most of the attempts, the latest of several. One without which the state would
    be lost is spared, and the next one goes in its place, or a member that has reported none.

    Args:
        state: the members of the state are idle.

    Returns:
        None for the first: no host can be spared. None for the second: the host is no last holder.
    """
    generation = state.generation
    here = [host for host in generation.failures.suspects if host in state.hosts]
    num_left = sum(
        status.worker is not None and status.worker.is_alive and not is_draining(state, host)
        for host, status in state.hosts.items()
    )
    if not here or num_left <= min_hosts:
        return None, None
    others = [member.host for member in generation.membership.members if member.host not in here]
    ranked = [*sorted(dict.fromkeys(reversed(here)), key=here.count, reverse=True), *reversed(others)]
    if not is_needed_by_others(state, generation.membership.members, ranked[:1]):
        return ranked[0], None
    instead = (
        host for host in ranked[1:] if not is_needed_by_others(state, generation.membership.members, [host])
    )
    return next(instead, None), ranked[0]
