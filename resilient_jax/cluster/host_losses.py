"""Counts how often each host is lost without a notice, so that one that comes and goes is quarantined at last.

Its agent cannot count that, as it does the restarts of its worker: it is gone each time. The leader does, in the store,
so that the count outlives leaders.
"""

from resilient_jax.cluster.agent_context import AgentContext
from resilient_jax.cluster.quarantine import quarantine_host
from resilient_jax.cluster.stored_records import ENCODER, decode_record
from resilient_jax.config.job_config import RESTART_WINDOW_S
from resilient_jax.ids import HostName, JobName, Revision
from resilient_jax.membership.facts import MembershipState, find_needed_hosts, is_draining
from resilient_jax.membership.severities import Action, Evidence, Tries, choose_action
from resilient_jax.protocol.generation import GenerationPhase
from resilient_jax.protocol.quarantine import HostLosses
from resilient_jax.protocol.store_keys import make_leader_key, make_losses_key, make_losses_prefix
from resilient_jax.store.interface import (
    Compare,
    CompareOperator,
    CompareTarget,
    DeleteOp,
    PutOp,
    Store,
)


class SingleLosses:
    """The losses of a leader's term that have no common cause: no other host is lost within a lease of them.

    Args:
        lease_ttl_s: time of a lease of the job's hosts. Hosts that a switch cuts off together are lost within one
            lease.
    """

    def __init__(self, lease_ttl_s: float) -> None:
        self._lease_ttl_s = lease_ttl_s
        self._lost: list[tuple[float, HostName, bool]] = []

    def add(self, host: HostName, now: float, *, is_counted: bool) -> None:
        """Note the loss of a host, in the order of time.

        Args:
            now: monotonic time in seconds.
            is_counted: as `is_loss_counted` says. False: the loss only tells that another loss was not the only one.
        """
        self._lost.append((now, host, is_counted))

    def take(self, now: float) -> list[HostName]:
        """Return the losses, each once, of which it is known by now that they were the only ones."""
        found: list[HostName] = []
        kept: list[tuple[float, HostName, bool]] = []
        for lost_s, host, is_counted in self._lost:
            if now - lost_s > 2 * self._lease_ttl_s:
                continue
            near = [other for other_s, other, _ in self._lost if abs(other_s - lost_s) <= self._lease_ttl_s]
            is_known = is_counted and now - lost_s > self._lease_ttl_s
            if is_known and set(near) == {host}:
                found.append(host)
            kept.append((lost_s, host, is_counted and not is_known))
        self._lost = kept
        return found


def is_loss_counted(state: MembershipState, host: HostName, min_hosts: int) -> bool:
    """Return whether a host that is gone was there without a notice to leave, and enough hosts are left without it.

    Where too few are left for one replica, too, the others wait for it.
    """
    is_over = state.generation.phase is GenerationPhase.FINISHED
    if is_over or host not in state.hosts or is_draining(state, host):
        return False
    num_left = sum(not is_draining(state, other) for other in state.hosts if other != host)
    return num_left >= _count_needed(state, min_hosts)


def list_lost_before(state: MembershipState, min_hosts: int) -> list[HostName]:
    """Return the members that were gone when a leader's term began, such as the leader before it with its host.

    Nobody has counted these losses; none is returned if too few hosts are left.

    Args:
        state: state of what the new leader has read.
        min_hosts: hosts that the job needs.
    """
    if state.generation.phase is GenerationPhase.FINISHED or len(state.hosts) < _count_needed(
        state, min_hosts
    ):
        return []
    return [member.host for member in state.generation.membership.members if member.host not in state.hosts]


def _count_needed(state: MembershipState, min_hosts: int) -> int:
    return max(min_hosts, find_needed_hosts(state).count)


async def note_host_loss(context: AgentContext, host: HostName, leader_token: Revision) -> None:
    """Count a host's loss; quarantine the host if it was lost more than `max_host_losses` times in `RESTART_WINDOW_S`.

    Args:
        leader_token: token of the leader; nothing is written if another leads by now.

    Raises:
        PeerError: the store did not answer.
    """
    config, job, store = context.settings.config, context.settings.job, context.store
    key, now_s = make_losses_key(job, host), context.clock.wall_s()
    stored = await store.get(key)
    before = () if stored is None else decode_record(stored, HostLosses).lost_wall_s
    recent = tuple(lost_s for lost_s in before if now_s - lost_s < RESTART_WINDOW_S)
    tries = {Tries.HOST_LOSSES: config.max_host_losses}
    if choose_action(Evidence.HOST_LOST, len(recent), tries) is Action.TAKE_HOST_OUT:
        reason = (
            f"it was lost {len(recent) + 1} times within {RESTART_WINDOW_S:g} s, more often than "
            f"max_host_losses = {config.max_host_losses} allows"
        )
        await quarantine_host(context, host, reason, leader_token=leader_token)
    lease = await store.grant(RESTART_WINDOW_S)
    leads = Compare(make_leader_key(job), CompareTarget.CREATE_REVISION, CompareOperator.EQUAL, leader_token)
    record = HostLosses(host=host, lost_wall_s=(*recent, now_s))
    await store.transaction([leads], [PutOp(key, ENCODER.encode(record), lease)])


async def forget_host_losses(store: Store, job: JobName) -> None:
    """Delete the counts of a job that is over: another one of the same name begins without them.

    Raises:
        PeerError: the store did not answer.
    """
    await store.transaction([], [DeleteOp(make_losses_prefix(job), is_prefix=True)])
