"""Whether enough hosts are ready for the next generation, or others are waited for. Pure."""

import enum

from resilient_jax.errors import ExitCode
from resilient_jax.membership.config import MembershipConfig
from resilient_jax.membership.facts import (
    MembershipState,
    count_unreplaced,
    find_seat,
    has_service,
    is_on_its_way,
    is_snapshot_settling,
)
from resilient_jax.membership.redundancy import is_last_copy_without
from resilient_jax.membership.spare_hosts import count_missing_places, count_places
from resilient_jax.membership.world_formation import StateOrigin, can_change_in_place, can_go_on_by_mail
from resilient_jax.protocol.generation import JobOutcome, JobOutcomeKind
from resilient_jax.protocol.host_status import HostStatus


class Rendezvous(enum.Enum):
    """Whether the next generation is formed."""

    COMPLETE = enum.auto()
    WAITING = enum.auto()
    """More hosts are expected."""


def decide_to_wait(
    state: MembershipState,
    kept: list[HostStatus],
    joiners: list[HostStatus],
    waited_s: float,
    origin: StateOrigin,
    config: MembershipConfig,
) -> Rendezvous | JobOutcome:
    """Decide whether to go on with these hosts or to wait; end the job if too few have been ready for too long.

    Args:
        joiners: joining hosts, no more than there are places.
        waited_s: time since all members are idle, or since the job began.
        origin: origin of the state that these hosts resume from.
    """
    # Who comes to members that go on without a service joins after their step.
    is_awaited = has_service(state) or not can_go_on_by_mail(state, kept, joiners, origin)
    if is_awaited and waited_s <= config.last_copy_grace_s and _may_gain_copy(state, kept, joiners, config):
        return Rendezvous.WAITING
    kept_in = None if origin.part_holders else origin.snapshot
    if kept_in and waited_s <= config.snapshot_grace_s and is_snapshot_settling(state, kept_in):
        return Rendezvous.WAITING
    present = len(kept) + len(joiners)
    is_beginning = not kept and state.generation.membership.world == 0 and not origin.exists
    if kept:
        enough = present >= config.min_hosts
    elif is_beginning:
        enough = _can_begin(joiners, waited_s, config)
    else:
        enough = present >= _count_expected(state, joiners, waited_s, origin, config)
    if enough:
        return Rendezvous.COMPLETE
    if waited_s <= config.start_timeout_s:
        return Rendezvous.WAITING
    if is_beginning and joiners and all(status.is_spare for status in joiners):
        message = (
            f"all {present} hosts that are ready after {waited_s:.0f} s were started with --spare, expected at least "
            "one that was not: spares only take the place of others. Start the agents of the job's own hosts, without "
            "--spare"
        )
    else:
        message = (
            f"{present} of the {config.min_hosts} hosts that the job needs at least are ready after "
            f"{waited_s:.0f} s; start more agents, or lower min_hosts, or the number of hosts that a replica spans"
        )
    return JobOutcome(
        kind=JobOutcomeKind.TOO_FEW_HOSTS, exit_code=int(ExitCode.TOO_FEW_HOSTS), message=message
    )


def _can_begin(joiners: list[HostStatus], waited_s: float, config: MembershipConfig) -> bool:
    """Return whether a job may begin with these hosts: spares only in the place of hosts that do not come in time."""
    regular = sum(not status.is_spare for status in joiners)
    if waited_s <= config.start_timeout_s:
        return regular >= max(config.num_hosts, config.min_hosts, 1)
    return regular > 0 and len(joiners) >= config.min_hosts


def _count_expected(
    state: MembershipState,
    joiners: list[HostStatus],
    waited_s: float,
    origin: StateOrigin,
    config: MembershipConfig,
) -> int:
    """Return how many hosts are waited for where no member is left."""
    # No member waits for a decision: waiting for all hosts is cheaper than another world for each that comes later.
    # If there is a state to continue from, the wait is short.
    patience_s = config.regroup_grace_s if origin.exists else config.start_timeout_s
    num_hosts = config.num_hosts - count_missing_places(state)
    if config.replaces_workers and state.generation.record.progress > 0:
        # Hosts whose workers are replaced stay registered, so no other is waited for, but these for longer.
        here = [status for host, status in state.hosts.items() if host not in state.quarantined]
        num_hosts = min(config.num_hosts, len(here))
        if any(map(is_on_its_way, here)):
            patience_s = max(patience_s, config.forming_timeout_s)
        if origin.exists and can_change_in_place(state, [], joiners):
            # Standbys that stand in the world already; a host without one joins them as one that returns.
            places = count_places(state, joiners, config.num_hosts)
            num_hosts = min(len(joiners) + count_unreplaced(state), places)
    expected = 0 if waited_s > patience_s else num_hosts
    return max(expected, config.min_hosts, 1)


def _may_gain_copy(
    state: MembershipState, kept: list[HostStatus], joiners: list[HostStatus], config: MembershipConfig
) -> bool:
    """Return whether these hosts would continue with the last copy of the state, and another one may soon join.

    Where there are seats, one whose worker has just started takes a seat while they train: it is not waited for.
    """
    coming = [status for status in state.hosts.values() if is_on_its_way(status)]
    if config.spare_seats and len(kept) >= config.min_hosts:
        coming = [status for status in coming if find_seat(state.generation, status) is not None]
    if not kept or joiners or not coming:
        return False
    if len(kept) >= count_places(state, kept, config.num_hosts):
        return False
    names = {status.host for status in kept}
    members = tuple(m for m in state.generation.membership.members if m.host in names)
    return state.generation.record.progress > 0 and is_last_copy_without(state, members)
