"""What follows an error that a host's script raised: another try, without the host, or the end of the job. Pure.

A host that raises alone may have a bad device, disk or shard: its worker is started again, and after
`max_error_restarts` of these at one step the host is taken out. Where a second host raises the same at the same step,
the program raises it on any host: the job ends with it, without another try. So it does with an error that its text
shows to be the program's, and where nobody would be left, or nothing of the state. Errors whose text blames a device,
a host or the network may come to several hosts at once (shared storage, a switch): they end the job only where the
host's tries are used up.
"""

from resilient_jax.health.error_texts import Blame
from resilient_jax.membership.config import MembershipConfig
from resilient_jax.membership.disruptions import Disruption
from resilient_jax.membership.facts import (
    MembershipState,
    find_newest_step,
    find_recoverable_step,
    find_snapshot,
    is_draining,
    list_survivors,
)
from resilient_jax.membership.generation_end import break_off, finish
from resilient_jax.membership.severities import Action, Evidence, Tries, choose_action
from resilient_jax.membership.state_loss import (
    StateLossPolicy,
    find_newest_checkpoint,
    is_any_polling_checkpoints,
    make_state_loss_outcome,
)
from resilient_jax.membership.worker_errors import find_error, read_error, summarize_worker_error
from resilient_jax.protocol.generation import Generation, GenerationPhase, JobOutcome, JobOutcomeKind
from resilient_jax.protocol.host_status import HostStatus
from resilient_jax.protocol.raised_error import RaisedError
from resilient_jax.protocol.record_parts import change_fields


def react_to_errors(state: MembershipState, config: MembershipConfig) -> Generation | None:
    """Return what follows the errors that no generation has dealt with yet; None: there are none, or they wait."""
    generation = state.generation
    # By name, so that each leader would name the same host.
    found = [
        (status, outcome)
        for _, status in sorted(state.hosts.items())
        if (outcome := find_error(generation, status)) is not None
    ]
    if not found:
        return None
    raised = [read_error(status) for status, _ in found]
    for (status, outcome), error in zip(found, raised, strict=True):
        if _is_programs(state, status, error, raised, config):
            lost = generation.state.state_loss
            return finish(generation, outcome if lost is None else make_state_loss_outcome(lost, outcome))
    return _try_again(state, raised[0], found[0][1], config)


def _is_programs(
    state: MembershipState,
    status: HostStatus,
    error: RaisedError,
    others: list[RaisedError],
    config: MembershipConfig,
) -> bool:
    """Return whether another try, with or without this host, would end the same way."""
    worker = status.worker
    assert worker is not None, "a worker has raised it"
    blame = summarize_worker_error(worker).blame
    if blame is Blame.PROGRAM or (worker.exit_code == 0 and worker.report.entered == 0):
        return True  # a script that never comes to its training does so on no host
    action = _choose(state, error, config)
    known = (*state.generation.failures.raised, *others)
    is_common = any(one.host != error.host and one.is_same_error(error) for one in known)
    if is_common and (blame is Blame.UNKNOWN or action is not Action.RESTART_WORKER):
        return True
    if action is not Action.RESTART_WORKER and _count_left(state, others) < max(config.min_hosts, 1):
        return True
    return not _can_state_survive(state, others, config)


def _choose(state: MembershipState, error: RaisedError, config: MembershipConfig) -> Action:
    """Return what to do about an error, by how often its host has raised one at this step."""
    before = sum((one.host, one.step) == (error.host, error.step) for one in state.generation.failures.raised)
    return choose_action(Evidence.RAISED, before, {Tries.ERROR_RESTARTS: config.max_error_restarts})


def _count_left(state: MembershipState, raised: list[RaisedError]) -> int:
    """Return how many hosts may train without those that have raised an error just now."""
    out = {error.host for error in raised}
    return sum(
        host not in out
        and not is_draining(state, host)
        and status.worker is not None
        and status.worker.is_alive
        for host, status in state.hosts.items()
    )


def _can_state_survive(state: MembershipState, raised: list[RaisedError], config: MembershipConfig) -> bool:
    """Return whether training can go on once these workers have ended, as far as their error shows: with a state."""
    out = {error.host for error in raised}
    left = [member for member in list_survivors(state) if member.host not in out]
    if left or find_recoverable_step(state) == 0 or find_snapshot(state) is not None:
        return True
    hosts = [state.hosts[host] for host in out]
    policy = config.state_loss_policy
    return (
        policy is StateLossPolicy.RESTART
        or is_any_polling_checkpoints(hosts, policy)
        or (policy is StateLossPolicy.CHECKPOINT and find_newest_checkpoint(hosts, None) is not None)
    )


def explain_by_error(generation: Generation, outcome: JobOutcome) -> JobOutcome:
    """Return the outcome of a job that cannot go on without a state: an error, if it was that which lost the state."""
    last = generation.failures.raised[-1] if generation.failures.raised else None
    if last is None or last.host != generation.failures.failed_host:
        return outcome
    text = generation.failures.failure_text
    return JobOutcome(kind=JobOutcomeKind.USER_ERROR, exit_code=1, host=last.host, message=text)


def _try_again(
    state: MembershipState, error: RaisedError, outcome: JobOutcome, config: MembershipConfig
) -> Generation | None:
    """Return the next generation: without the worker, whose agent starts another, or without its host."""
    generation = state.generation
    is_out = _choose(state, error, config) is not Action.RESTART_WORKER
    what = f"the script on {error.host} {error.describe()}"
    if is_out:
        what = (
            f"{error.host} is taken out: its script {error.describe()}, and at step {error.step} it has been "
            f"started again as often as max_error_restarts = {config.max_error_restarts} allows"
        )
    raised = (*_list_open(state), error)
    members = tuple(m for m in list_survivors(state) if m.host != error.host)
    member = generation.membership.find_member(error.host)
    if member is not None and member.incarnation == error.incarnation:
        why = Disruption(what, error.host, outcome.message)
        without = break_off(state, why, config, members)
    elif generation.phase in (GenerationPhase.ACTIVE, GenerationPhase.QUIESCE):
        without = generation  # the members do not stop for one that is none
    else:
        return None
    taken_out = error.host if is_out else without.failures.taken_out
    reason = what if is_out else without.reason
    return change_fields(without, raised=raised, taken_out=taken_out, reason=reason)


def _list_open(state: MembershipState) -> tuple[RaisedError, ...]:
    """Return the records that count: of a step that no host has passed, or of a worker whose end is in its status."""
    newest = find_newest_step(state)
    return tuple(
        error
        for error in state.generation.failures.raised
        if error.step >= newest or _is_shown(state.hosts.get(error.host), error)
    )


def _is_shown(status: HostStatus | None, error: RaisedError) -> bool:
    worker = status.worker if status is not None else None
    return worker is not None and worker.incarnation == error.incarnation
