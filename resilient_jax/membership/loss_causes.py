"""Why members were lost, read from the statuses of hosts. Pure."""

import math
from collections.abc import Iterable

from resilient_jax.ids import HostName
from resilient_jax.membership.facts import MembershipState
from resilient_jax.membership.worker_errors import find_user_error_on
from resilient_jax.protocol.generation import Generation
from resilient_jax.protocol.recovery_records import LossCause


def find_loss_causes(state: MembershipState, lost: Iterable[HostName]) -> dict[HostName, LossCause]:
    """Return the cause of each loss; without hosts whose worker was started again because a device is back.

    Args:
        state: the generation of the state has the lost hosts as members.
    """
    causes = {host: _find_cause(state, host) for host in lost}
    return {host: cause for host, cause in causes.items() if cause is not None}


def find_left(state: MembershipState, after: Generation) -> dict[HostName, LossCause]:
    """Return the members that leave after a notice when `after` is formed; none that is in quarantine."""
    return {
        member.host: LossCause.NOTICE
        for member in state.generation.membership.members
        if after.membership.find_member(member.host) is None and has_notice(state, member.host)
    }


def has_notice(state: MembershipState, host: HostName) -> bool:
    """Return whether a host has got a notice to leave, or had when it was last seen."""
    status = state.hosts.get(host)
    return host in state.memory.noticed if status is None else status.is_draining


def _find_cause(state: MembershipState, host: HostName) -> LossCause | None:
    status = state.hosts.get(host)
    if has_notice(state, host):
        return LossCause.NOTICE
    if status is None:
        return LossCause.HOST
    member, worker = state.generation.membership.find_member(host), status.worker
    if member is not None and member.incarnation == status.devices.ended_for_return:
        return None
    # 0: all.
    before, now = (used or math.inf for used in (state.memory.num_used.get(host, 0), status.devices.num_used))
    if now != before:
        return LossCause.DEVICE if now < before else None
    is_there = (
        worker is not None
        and member is not None
        and worker.incarnation == member.incarnation
        and worker.exit_code is None
        and not worker.is_dying
        and find_user_error_on(status) is None
    )
    return LossCause.LEFT_OUT if is_there else LossCause.WORKER
