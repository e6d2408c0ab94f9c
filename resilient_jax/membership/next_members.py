"""The members that a planned change leads to: the members of a pipeline copy blocks for them while training goes on.

Copies are an optimization. Where they would not be ready in time, or cannot be made, blocks move in the pause.
"""

from typing import Final

from resilient_jax.ids import HostName
from resilient_jax.membership.config import MembershipConfig
from resilient_jax.membership.facts import MembershipState, find_worker
from resilient_jax.membership.job_history import bound_step_s
from resilient_jax.membership.spare_hosts import choose_joiners
from resilient_jax.membership.world_formation import can_change_in_place, keep_seats
from resilient_jax.protocol.host_status import HostStatus
from resilient_jax.protocol.slow_hosts import HostSpeeds
from resilient_jax.protocol.state_records import NextMembers, UnitKind, are_parts_complete

LEAVING_COPY_TIMEOUT_S: Final = 10.0
"""Where a member is to leave: until then it trains on, slow or broken as it may be."""
NOTICE_STEPS: Final = 5
"""Which end in that time, beside the copies: one until the commit after the time-out, one until all members let the
pause come, and the one that they may have begun then. Two more, since not every step takes as long as the mean."""
MIN_NOTICE_COPY_S: Final = 5.0
"""In less, blocks would hardly be copied."""


def expect_members(
    state: MembershipState,
    kept: list[HostStatus],
    speeds: HostSpeeds,
    config: MembershipConfig,
    copy_timeout_s: float,
) -> NextMembers | None:
    """Return the members after a planned change, with hosts that are ready; None: no blocks are copied for them.

    None are where the members have no blocks, or leave their world, in which copies are; or where those that stay lack
    some: then all read a snapshot, which is taken at the boundary.

    Args:
        state: the state as it is about to be; its members train.
        speeds: speeds by which layers are divided after the change.
        copy_timeout_s: after this time the members pause, whether all have their copies or not.
    """
    # Those that leave, too: all members have to hold the pause, or none.
    workers = [find_worker(state, member) for member in state.generation.membership.members]
    if not all(worker is not None and worker.report.held.part is not None for worker in workers):
        return None
    parts = [status.worker.report.held.part for status in kept if status.worker is not None]
    if not are_parts_complete([part for part in parts if part is not None]):
        return None
    if any(part is not None and part.kind is not UnitKind.BLOCKS for part in parts):
        return None
    joiners = choose_joiners(state, kept, config)
    if not can_change_in_place(state, kept, joiners):
        return None
    hosts = tuple(member.host for member in keep_seats(state.generation, kept, joiners))
    return NextMembers(
        hosts=hosts,
        layer_speeds=tuple(one for one in speeds if one[0] in hosts),
        copy_timeout_s=copy_timeout_s,
    )


def limit_notice_copies_s(state: MembershipState, now: float, config: MembershipConfig) -> float:
    """Return how long blocks may be copied so that a host which got a notice is there to the end; 0: there is no time.

    Args:
        state: the members of the state train.
        now: monotonic time in seconds.
    """
    left_s = config.notice_s - NOTICE_STEPS * bound_step_s(state, now)
    return min(left_s, LEAVING_COPY_TIMEOUT_S) if left_s >= MIN_NOTICE_COPY_S else 0.0


def is_wait_too_long_for(state: MembershipState, host: HostName) -> bool:
    """Return whether a member, in a pause that waits for copies, must leave before: by a notice or quarantine since."""
    members, status = state.generation.planned.next_members, state.hosts.get(host)
    if members is None or status is None:
        return False
    # A new leader does not know when the notice came.
    if status.is_draining and host not in state.memory.noticed:
        return True
    return host in state.quarantined and members.copy_timeout_s > LEAVING_COPY_TIMEOUT_S
