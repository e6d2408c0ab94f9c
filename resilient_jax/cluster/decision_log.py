"""What a leader records, and prints for people, of what it has decided."""

from collections.abc import Callable
from typing import Final

from resilient_jax.events import EventKind
from resilient_jax.ids import HostName
from resilient_jax.membership.config import MembershipConfig
from resilient_jax.membership.facts import MembershipState, join_names
from resilient_jax.membership.job_end import saves_on_notice
from resilient_jax.membership.reachability import find_separation
from resilient_jax.membership.redundancy import measure_redundancy
from resilient_jax.membership.severities import Action
from resilient_jax.membership.spare_hosts import list_unseated
from resilient_jax.membership.state_loss import count_lost_steps, explain_state_loss
from resilient_jax.protocol.generation import Generation, GenerationPhase
from resilient_jax.protocol.recovery_records import RecoveryDecision
from resilient_jax.protocol.state_records import StateLoss
from resilient_jax.telemetry.event_log import EventLog

NOTE_OF_UNSAVED: Final = (
    "note: the job tells of no checkpoints: a notice to all its hosts (SIGTERM, a time limit) ends it, and all steps "
    "are lost"
)


class DecisionLog:
    """The events and lines of one term of leadership."""

    def __init__(self, log: EventLog, print_line: Callable[[str], None], config: MembershipConfig) -> None:
        """Write events to `log`, and lines by `print_line`."""
        self._log = log
        self._print_line = print_line
        self._config = config
        self._is_saving_known = False
        self._waits_because = ""
        """Which members cannot reach each other, and why none of them leaves; empty: none waits."""
        self._unseated: list[HostName] = []
        """The spares that were last found to have no seat."""

    def record_redundancy(self, state: MembershipState) -> None:
        """Record how many hosts may be lost before the state is; nothing where there is none."""
        redundancy = measure_redundancy(state)
        if redundancy is None:
            return  # the job begins, or its state is lost, which is an event of its own
        self._log.record(
            EventKind.STATE_REDUNDANCY,
            generation=state.generation.number,
            step=redundancy.step,
            losses=redundancy.losses,
            copies=redundancy.copies,
            snapshot=redundancy.snapshot is not None,
        )

    def tell_of_unsaved(self, before: Generation | None, state: MembershipState) -> None:
        """Print, when the job has trained for a while, that a notice to all hosts would lose its steps, if so."""
        generation = state.generation
        # With the second record of progress: by then each worker has said whether it saves checkpoints.
        has_trained = before is not None and 0 < before.record.progress < generation.record.progress
        if self._is_saving_known or not has_trained or generation.phase is not GenerationPhase.ACTIVE:
            return
        self._is_saving_known = True
        if not saves_on_notice(state):
            self._print_line(NOTE_OF_UNSAVED)

    def record_decision(self, generation: Generation, decision: RecoveryDecision) -> None:
        """Record what was chosen at a change of members."""
        self._log.record(
            EventKind.RECOVERY_DECIDED,
            generation=decision.number,
            step=generation.record.progress,
            action=str(decision.action),
            reason=decision.reason,
            options="; ".join(option.describe() for option in decision.options),
            next_failure_s=round(decision.next_failure_s, 1),
            wait_s=round(decision.wait_s, 3),
        )

    def record_hang(self, before: Generation | None, generation: Generation) -> None:
        """Record and print what hangs, and what is done about it."""
        trained = before.membership.members if before is not None else ()
        left_out = [
            member.host for member in trained if generation.membership.find_member(member.host) is None
        ]
        is_left_out = generation.membership.keeps_workers and bool(left_out)
        action = Action.RESTART_WORKER if left_out else Action.RETRY_IN_PLACE
        self._log.record(
            EventKind.HANG_NAMED,
            generation=generation.number,
            step=generation.state.step,
            hosts=", ".join(left_out) if is_left_out else generation.failures.failed_host or "",
            why=generation.failures.hang,
            action=action.value,
        )
        self._print_line(f"{generation.failures.hang}; {action}")

    def record_used(self, spare: HostName, generation: Generation) -> None:
        """Record and print that a spare takes part."""
        self._log.record(
            EventKind.HOST_SPARE_USED,
            generation=generation.number,
            step=generation.state.step,
            spare=spare,
            change=str(generation.membership.change),
        )
        self._print_line(f"{spare} spared, and takes part from step {generation.state.step} on")

    def record_unseated(self, state: MembershipState) -> None:
        """Record which spares have no seat, whenever there are others, and print what to do about it."""
        before, self._unseated = self._unseated, list_unseated(state, self._config)
        if not self._unseated or self._unseated == before:
            return
        generation = state.generation
        spares, seats = join_names(self._unseated), generation.membership.num_seats
        self._log.record(
            EventKind.HOST_SPARE_UNSEATED, generation=generation.number, spares=spares, seats=seats
        )
        self._print_line(
            f"{spares}: found no seat for this spare, expected one of the {seats} of this world to be free; a spare "
            "without a seat joins by a re-form, which takes seconds longer. Raise spare_seats, or start fewer spares"
        )

    def tell_of_separation(self, state: MembershipState) -> None:
        """Print, once, for whose network all members wait, where none of those that reach no other can be spared."""
        is_quiet = state.generation.phase is GenerationPhase.QUIESCE
        found = find_separation(state, self._config) if is_quiet else None
        before, self._waits_because = self._waits_because, found.reason if found is not None else ""
        if self._waits_because not in ("", before):
            self._print_line(f"{self._waits_because}; all keep their state and wait for the network")

    def record_state_loss(self, generation: Generation, lost: StateLoss) -> None:
        """Record that steps are lost, and print it for the user."""
        self._log.record(
            EventKind.STATE_LOST,
            generation=generation.number,
            step=lost.step,
            source="the initial state" if lost.checkpoint_step is None else "checkpoint",
            goes_on_from=lost.checkpoint_step or 0,
            steps_lost=count_lost_steps(lost),
            at_least=lost.is_lower_bound,
            reason=lost.reason,
        )
        self._print_line(f"{explain_state_loss(lost)}: {lost.reason}")
