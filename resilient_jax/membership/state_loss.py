"""The decision after no host's memory has the state of a job that had made progress. Pure.

The last tier is storage: the newest checkpoint that a host sees. Hosts see its name only; the hosts that resume from it
find out whether it can be read, and if none can, the job ends with what was lost.
"""

import enum
from collections.abc import Iterable, Sequence
from typing import assert_never

from resilient_jax.errors import ExitCode
from resilient_jax.membership.facts import MembershipState, explain_snapshots, find_newest_step
from resilient_jax.protocol.generation import JobOutcome, JobOutcomeKind
from resilient_jax.protocol.host_status import HostStatus
from resilient_jax.protocol.state_records import StateLoss


class StateLossPolicy(enum.StrEnum):
    """What to do when no host has the state of a job that had made progress."""

    STOP = "stop"
    CHECKPOINT = "checkpoint"
    """Resume from the newest checkpoint on storage; stop if there is none."""
    RESTART = "restart"
    """Resume from the newest checkpoint on storage; begin with the initial state if there is none."""


def find_newest_checkpoint(hosts: Iterable[HostStatus], trusted_step: int | None = None) -> int | None:
    """Return the step of the newest checkpoint that any of these hosts sees on storage, and that is not in doubt.

    Hosts see only the newest: the trainer has renamed those that are in doubt, a loop of one's own has not.
    """
    seen = [s.worker.report.checkpoints.checkpoint_step for s in hosts if s.worker is not None]
    counted = [s for s in seen if s is not None and (trusted_step is None or s <= trusted_step)]
    return max(counted, default=None)


def is_any_polling_checkpoints(hosts: Iterable[HostStatus], policy: StateLossPolicy) -> bool:
    """Return whether one of these hosts may yet see a checkpoint that counts."""
    return policy is not StateLossPolicy.STOP and any(
        host.worker is not None and host.worker.report.checkpoints.is_polling_checkpoints for host in hosts
    )


def decide_after_state_loss(
    state: MembershipState, hosts: Sequence[HostStatus], policy: StateLossPolicy
) -> StateLoss | JobOutcome:
    """Decide from which state these hosts resume, or how the job ends."""
    trusted = state.generation.state.trusted_step
    checkpoint = find_newest_checkpoint(hosts, trusted)
    step = max(
        find_newest_step(state), checkpoint or 0
    )  # a checkpoint was committed, even if no live host committed it
    loss = StateLoss(
        step=step,
        is_lower_bound=all(_step_of(host) < step for host in hosts),
        reason=explain_snapshots(state) if trusted is None else _explain_doubt(state, trusted),
        checkpoint_step=checkpoint,
    )
    match policy:
        case StateLossPolicy.STOP:
            goes_on = False
        case StateLossPolicy.CHECKPOINT:
            goes_on = checkpoint is not None
        case StateLossPolicy.RESTART:
            goes_on = True
        case _:
            assert_never(policy)
    return loss if goes_on else _stop(loss, trusted)


def _explain_doubt(state: MembershipState, trusted_step: int) -> str:
    text = state.generation.failures.failure_text
    return f"states of more than {trusted_step} steps are in doubt{f' ({text})' if text else ''}"


def count_lost_steps(loss: StateLoss) -> int:
    """Return how many steps must be repeated; a lower bound if the newest step is unknown."""
    return max(0, loss.step - (loss.checkpoint_step or 0))


def explain_state_loss(loss: StateLoss) -> str:
    """Describe the loss and its consequence, for the progress line."""
    what = f"the state of step {loss.step}{' or a later one' if loss.is_lower_bound else ''} is lost"
    if loss.checkpoint_step is None:
        return f"{what}; beginning again with the initial state"
    where = f"{what}; going on from the checkpoint of step {loss.checkpoint_step}"
    back = count_lost_steps(loss)
    if not back:
        return where
    more = " or more" if loss.is_lower_bound else ""
    return f"{where}, {back} step{'' if back == 1 and not more else 's'}{more} back"


def make_state_loss_outcome(loss: StateLoss, error: JobOutcome) -> JobOutcome:
    """Return the outcome of a job that could not resume from its checkpoint or initial state."""
    return JobOutcome(
        kind=JobOutcomeKind.STATE_LOST,
        exit_code=int(ExitCode.STATE_LOST),
        host=error.host,
        message=f"{explain_state_loss(loss)}: {loss.reason}.\nThat failed:\n{error.message}",
    )


def _step_of(host: HostStatus) -> int:
    """Return the newest step that this host itself reports as committed."""
    return max(host.progress.step, host.worker.report.held.step if host.worker is not None else 0)


def _stop(loss: StateLoss, trusted_step: int | None) -> JobOutcome:
    if trusted_step is None:
        what = "too many of the hosts that held the training state were lost at once"
    else:
        what = "a host computed wrongly, and the training state may be wrong"
    if loss.checkpoint_step is None:
        rest = (
            "no host sees a checkpoint on storage. Launch the job again to begin with the initial state. Against the "
            "next such loss: a larger snapshot_parity, or checkpoints (rj.Checkpoints in the trainer); with "
            'state_loss_policy = "restart" a job begins again by itself'
        )
    else:
        rest = (
            f"the checkpoint of step {loss.checkpoint_step} is on storage. Launch the job again to resume from it; "
            'with state_loss_policy = "checkpoint" a job does so by itself'
        )
    return JobOutcome(
        kind=JobOutcomeKind.STATE_LOST,
        exit_code=int(ExitCode.STATE_LOST),
        message=f"{what}, after {loss.step} committed steps{' or more' if loss.is_lower_bound else ''}: {loss.reason}; "
        f"{rest}",
    )
