"""The end of a job all of whose hosts must leave: what is saved first, and what is lost. Pure.

A time limit, `scancel` and SIGTERM to `launch` reach all hosts, within a moment or one after the other. Members save a
checkpoint in the last step before a boundary that ends the job (`ends_job`). If they stopped at another one,
because the others had got no notice yet, or lost a host meanwhile, they go on together to do so. No host waits longer
than its notice allows: one that is out of time ends the job as it is.

Ctrl-C on all hosts ends the job as it is, at once. Agents stay only so long that the end can be recorded: a job that is
started again can tell that it was interrupted, and has not lost its hosts. An agent that is interrupted alone leaves.
"""

from collections.abc import Collection, Iterable
from typing import Final

from resilient_jax.errors import ExitCode
from resilient_jax.ids import HostName
from resilient_jax.membership.config import MembershipConfig
from resilient_jax.membership.facts import MembershipState, find_newest_step, list_live_workers
from resilient_jax.protocol.generation import JobOutcome, JobOutcomeKind
from resilient_jax.protocol.host_status import HostStatus

NOTICE_TEXT: Final = "all hosts got a notice to leave"
INTERRUPT_TEXT: Final = "its user pressed Ctrl-C"


def have_all_notice(state: MembershipState) -> bool:
    """Return whether all members' hosts got a notice; a quarantine is none."""
    hosts = [state.hosts.get(member.host) for member in state.generation.membership.members]
    return bool(hosts) and all(status is not None and status.is_draining for status in hosts)


def is_any_staying(
    hosts: Iterable[HostStatus], host: HostName, quarantined: Collection[HostName] = ()
) -> bool:
    """Return whether another host than `host` got no notice, and is in no quarantine.

    It leads the job, as one that leaves must not.
    """
    return any(
        not other.is_draining and other.host not in quarantined and other.host != host for other in hosts
    )


def saves_on_notice(state: MembershipState) -> bool:
    """Return whether the members save checkpoints, as one of them says."""
    return any(worker.report.checkpoints.saves_on_notice for worker in list_live_workers(state))


def decide_to_end_now(state: MembershipState, config: MembershipConfig) -> JobOutcome | None:
    """Return how the job ends in the middle of a step, as its hosts have no time left; None: it does not."""
    if are_all_interrupted(state, config):
        return make_interrupt_outcome(state)
    return make_notice_outcome(state) if is_out_of_time(state) else None


def are_all_interrupted(state: MembershipState, config: MembershipConfig) -> bool:
    """Return whether the job's user pressed Ctrl-C on every host, spares as well.

    Before there was a world, all that are awaited must have come: what one host's user ends is not the job of others.
    """
    hosts = state.hosts.values()
    least = 1 if state.generation.membership.world > 0 else max(config.num_hosts, 1)
    return len(hosts) >= least and all(status.is_interrupted for status in hosts)


def is_out_of_time(state: MembershipState) -> bool:
    """Return whether all members must leave, and one of them now."""
    return have_all_notice(state) and any(
        state.hosts[member.host].is_out_of_time for member in state.generation.membership.members
    )


def decide_to_end(state: MembershipState, waited_s: float, config: MembershipConfig) -> JobOutcome | None:
    """Return how the job ends, all of whose members are idle and must leave; None: not yet.

    Args:
        waited_s: time since the last decision.
    """
    reports = [worker.report for worker in list_live_workers(state)]
    if all(report.is_done for report in reports):
        return JobOutcome(kind=JobOutcomeKind.DONE, exit_code=int(ExitCode.DONE))
    # They look for what is saved just now. Storage that hangs must not keep them.
    if (
        any(r.checkpoints.is_polling_checkpoints for r in reports)
        and waited_s <= config.checkpoint_poll_timeout_s
    ):
        return None
    return make_notice_outcome(state)


def must_save_first(state: MembershipState) -> bool:
    """Return whether the members, which are idle and must leave, are to go on for a checkpoint of their last steps."""
    if state.generation.planned.ends_job or not saves_on_notice(state):
        return False
    reports = [worker.report for worker in list_live_workers(state)]
    # As long as one looks for what is saved, it may be that all is.
    if any(report.is_done or report.checkpoints.is_polling_checkpoints for report in reports):
        return False
    return find_newest_step(state) > (_find_saved_step(state) or 0)


def make_notice_outcome(state: MembershipState) -> JobOutcome:
    """Return the outcome of a job that all hosts leave: up to which step it is saved, and what is lost."""
    step, saved = find_newest_step(state), _find_saved_step(state)
    if step == 0:
        message = f"interrupted before the first step: {NOTICE_TEXT}"
    elif saved is not None and saved >= step:
        message = (
            f"interrupted, saved at step {saved}: {NOTICE_TEXT}. Started again, the job goes on from there"
        )
    elif saved is not None:
        message = (
            f"interrupted after {step} steps, saved at step {saved}: {NOTICE_TEXT}; the steps since then are lost"
            f"{_explain_time(state)}. Started again, the job goes on from there"
        )
    else:
        message = (
            f"interrupted after {step} steps, none of them saved as far as is known: {NOTICE_TEXT}"
            f"{_explain_time(state)}. To save: rj.Checkpoints in the trainer; in a loop of your own look at "
            "world.is_leaving, and say what is saved by rj.run(..., find_latest_checkpoint=...)"
        )
    return JobOutcome(kind=JobOutcomeKind.INTERRUPTED, exit_code=int(ExitCode.DRAINED), message=message)


def make_interrupt_outcome(state: MembershipState) -> JobOutcome:
    """Return the outcome of a job that its user interrupted on all hosts.

    Which checkpoint is the newest is known only of idle workers: what is named is what it is at least.
    """
    step, saved = find_newest_step(state), _find_saved_step(state)
    workers = [status.worker for status in state.hosts.values() if status.worker is not None]
    if step == 0:
        message = f"interrupted before the first step: {INTERRUPT_TEXT}"
    elif saved is not None or any(worker.report.checkpoints.saves_on_notice for worker in workers):
        at_least = f", of step {saved} or later" if saved is not None else ""
        message = (
            f"interrupted at step {step}: {INTERRUPT_TEXT}. Started again, the job goes on from its newest "
            f"checkpoint{at_least}; the steps since then are lost. SIGTERM saves them first"
        )
    else:
        message = (
            f"interrupted at step {step}, none saved as far as is known: {INTERRUPT_TEXT}. To save: rj.Checkpoints in "
            "the trainer; in a loop of your own rj.run(..., find_latest_checkpoint=...)"
        )
    return JobOutcome(kind=JobOutcomeKind.INTERRUPTED, exit_code=int(ExitCode.INTERRUPTED), message=message)


def _explain_time(state: MembershipState) -> str:
    """Return that no time was left, if so."""
    if not is_out_of_time(state):
        return ""
    return ", as the notice left too little time to save more (--grace-s)"


def _find_saved_step(state: MembershipState) -> int | None:
    hosts: list[HostStatus] = [
        state.hosts[member.host]
        for member in state.generation.membership.members
        if member.host in state.hosts
    ]
    seen = [status.worker.report.checkpoints.checkpoint_step for status in hosts if status.worker is not None]
    trusted = state.generation.state.trusted_step
    counted = [step for step in seen if step is not None and (trusted is None or step <= trusted)]
    return max(counted, default=None)
