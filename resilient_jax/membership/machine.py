"""The membership machine `(event, now) -> commands`: applies the `rules` when one may decide. Pure.

To apply the rules costs a walk over all hosts; to take in an event must not, where each of thousands of hosts reports
each phase of a generation. The commands are those of a machine that applies the rules after every event:
- the counts of `tally` say that most changes cannot matter yet (nine of ten members have joined the world);
- the rules read the time only to compare it with fixed limits, and with the end of a wait that was decided, so that as
  long as it passes none of these, and no status changes, they decide what they decided before;
- while all members train, of their reports only what the counts give matters.
"""

import bisect
import dataclasses
from collections.abc import Mapping
from typing import assert_never

from resilient_jax.ids import HostName
from resilient_jax.membership.commands import MembershipCommand
from resilient_jax.membership.config import MembershipConfig
from resilient_jax.membership.facts import MembershipState
from resilient_jax.membership.recovery_decision import is_wait_over
from resilient_jax.membership.rules import decide
from resilient_jax.membership.tally import MembershipTally
from resilient_jax.membership.world_formation import StartCoordinationService
from resilient_jax.protocol.generation import Generation, GenerationPhase
from resilient_jax.protocol.host_status import HostStatus
from resilient_jax.protocol.record_parts import change_fields


@dataclasses.dataclass(frozen=True, slots=True)
class HostChanged:
    """A host appeared, or its status changed."""

    status: HostStatus


@dataclasses.dataclass(frozen=True, slots=True)
class HostLeft:
    """A host's lease expired or was given back."""

    host: HostName


@dataclasses.dataclass(frozen=True, slots=True)
class HostProgressed:
    """A host's agent reported beside the store how many steps its worker has committed."""

    host: HostName
    agent_id: str
    step: int


@dataclasses.dataclass(frozen=True, slots=True)
class QuarantineChanged:
    """The store's records of hosts in quarantine have changed: these are in it now."""

    hosts: frozenset[HostName]


@dataclasses.dataclass(frozen=True, slots=True)
class Tick:
    """Nothing happened, but time has passed: timeouts are looked at."""


MembershipEvent = HostChanged | HostLeft | HostProgressed | QuarantineChanged | Tick


class MembershipMachine:
    """A leader's view of the job, from the stored records on."""

    def __init__(self, state: MembershipState, config: MembershipConfig) -> None:
        """Begin with the stored generation and statuses; the first event may be a `Tick`."""
        self._config = config
        self._hosts = dict(state.hosts)
        self._limits_s = config.list_limits_s()
        self._enter(dataclasses.replace(state, hosts=self._hosts))
        self._is_changed = True

    @property
    def state(self) -> MembershipState:
        """The present generation, and the newest status of each host, which changes with the next event."""
        return self._state

    def handle(self, event: MembershipEvent, now: float) -> tuple[MembershipCommand, ...]:
        """Take in one event; return the shell's commands, in order.

        Args:
            now: monotonic time in seconds.
        """
        self._take_in(event)
        waited_s = now - self._state.phase_since_s
        if not self._tally.may_decide(waited_s, self._config):
            self._is_changed = True
            return ()
        num_passed = bisect.bisect_left(self._limits_s, waited_s)
        is_changed = (
            self._is_changed
            or num_passed != self._num_passed
            or is_wait_over(self._state, now) != self._was_wait_over
        )
        if is_changed or self._tally.is_over() or self._is_record_due(waited_s):
            return self._decide(now)
        # They would decide what they have decided before: to ask for a service, until it runs.
        return self._repeated

    def _take_in(self, event: MembershipEvent) -> None:
        match event:
            case HostChanged(status):
                self._replace(status)
            case HostProgressed():
                if (status := apply_progress(self._hosts, event)) is not None:
                    self._replace(status)
            case HostLeft(host):
                if self._hosts.pop(host, None) is not None:
                    self._tally.look_at(host)
                    self._is_changed = True
            case QuarantineChanged(hosts):
                if hosts != self._state.quarantined:
                    self._enter(dataclasses.replace(self._state, quarantined=hosts))
                    self._is_changed = True
            case Tick():
                pass
            case _:
                assert_never(event)

    def _replace(self, status: HostStatus) -> None:
        before = self._hosts.get(status.host)
        self._hosts[status.host] = status
        self._tally.look_at(status.host)
        self._is_changed |= self._is_relevant(before, status)

    def _is_relevant(self, before: HostStatus | None, status: HostStatus) -> bool:
        """Return whether a rule may read what has changed, beside what is counted anyway."""
        generation = self._state.generation
        if before is None or generation.phase is not GenerationPhase.ACTIVE:
            return True
        return _get_changing_part(generation, before) != _get_changing_part(generation, status)

    def _is_record_due(self, waited_s: float) -> bool:
        """Return whether the generation is to say something else of a state that the members have in common."""
        generation, tally = self._state.generation, self._tally
        if generation.phase is not GenerationPhase.ACTIVE:
            return False
        if (generation.state.state_loss, generation.state.trusted_step, generation.failures.separated) != (
            None,
            None,
            (),
        ) or (generation.state.snapshot is not None and tally.is_snapshot_released()):
            return True
        if tally.count_losses_left() != generation.record.losses_left:
            return True
        is_due = generation.record.progress == 0 or waited_s >= self._config.progress_interval_s
        return is_due and tally.find_recoverable_step() > generation.record.progress

    def _decide(self, now: float) -> tuple[MembershipCommand, ...]:
        state, commands = decide(self._state, now, self._config)
        if state is not self._state:
            self._enter(state)
        waited_s = now - state.phase_since_s
        # Where the counts close the way to a rule, it has not been applied yet to what else there is.
        self._is_changed = not self._tally.may_decide(waited_s, self._config)
        self._num_passed = bisect.bisect_left(self._limits_s, waited_s)
        self._was_wait_over = is_wait_over(state, now)
        self._repeated = tuple(c for c in commands if isinstance(c, StartCoordinationService))
        return commands

    def _enter(self, state: MembershipState) -> None:
        self._state = state
        self._tally = MembershipTally(state)
        self._repeated: tuple[MembershipCommand, ...] = ()
        self._num_passed = 0
        """How many of the limits of time had passed when the rules were last applied."""
        self._was_wait_over = False


def apply_progress(hosts: Mapping[HostName, HostStatus], event: HostProgressed) -> HostStatus | None:
    """Return the new status of a host that has made progress; None if it has not, or is another agent's by now."""
    status = hosts.get(event.host)
    if status is None or status.agent.id != event.agent_id or status.progress.step >= event.step:
        return None
    return change_fields(status, step=event.step)


def _get_changing_part(generation: Generation, status: HostStatus) -> tuple[object, ...]:
    """Return what may lead to a change of members while all members train, beside what is counted."""
    worker, standby = status.worker, status.standby
    member = generation.membership.find_member(status.host)
    trains = worker is not None and member is not None and worker.incarnation == member.incarnation
    read: object = worker
    if worker is not None and trains:
        report = worker.report
        found = report.findings
        read = (
            report.held.holds_state,
            report.overdue,
            found.slow_hosts,
            found.slowdown,
            found.needed_hosts,
        )
    return (
        read,
        standby.worker if standby is not None else None,
        status.services,
        status.is_draining,
        status.is_spare,
        status.devices.num_standby,
        status.reach,
    )
