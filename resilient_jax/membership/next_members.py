"""The members that a planned change leads to: the members of a pipeline copy blocks for them while training goes on.

Copies are an optimization. Where they would not be ready in time, or cannot be made, blocks move in the pause.
"""

from typing import Final

from resilient_jax.membership.config import MembershipConfig
from resilient_jax.membership.facts import MembershipState, find_worker
from resilient_jax.membership.job_history import measure_step_s
from resilient_jax.membership.spare_hosts import choose_joiners
from resilient_jax.membership.world_formation import can_change_in_place, keep_seats
from resilient_jax.protocol.records import HostStatus
from resilient_jax.protocol.slow_hosts import HostSpeeds
from resilient_jax.protocol.state_records import NextMembers, are_parts_complete

COPY_TIMEOUT_S: Final = 60.0
NOTICE_COPY_TIMEOUT_S: Final = 10.0
"""A host leaves 25 s after its notice at the latest. Three more steps of `MAX_NOTICE_STEP_S` end before that."""
MAX_NOTICE_STEP_S: Final = 4.0


def expect_members(
    state: MembershipState, kept: list[HostStatus], speeds: HostSpeeds, config: MembershipConfig
) -> NextMembers | None:
    """Return the members after a planned change, with hosts that are ready; None: no blocks are copied for them.

    None are where the members have no parts of a state, or leave their world, in which copies are; or where those that
    stay lack a part: then all read a snapshot, which is taken at the boundary.

    Args:
        state: of the machine, whose members train, as it is about to be.
        kept: the members that stay.
        speeds: by which layers are divided then.
        config: of the machine.
    """
    # Those that leave, too: all members have to hold the pause, or none.
    workers = [find_worker(state, member) for member in state.generation.members]
    if not all(worker is not None and worker.report.part is not None for worker in workers):
        return None
    parts = [status.worker.report.part for status in kept if status.worker is not None]
    if not are_parts_complete([part for part in parts if part is not None]):
        return None
    joiners = choose_joiners(state, kept, config)
    if not can_change_in_place(state, kept, joiners):
        return None
    hosts = tuple(member.host for member in keep_seats(state.generation, kept, joiners))
    return NextMembers(
        hosts=hosts,
        layer_speeds=tuple(one for one in speeds if one[0] in hosts),
        copy_timeout_s=COPY_TIMEOUT_S,
    )


def is_notice_long_enough(state: MembershipState, now: float) -> bool:
    """Return whether a host that got a notice is still there when steps have passed in which blocks are copied."""
    return 0.0 < measure_step_s(state, now) <= MAX_NOTICE_STEP_S
