"""The membership machine, held against its specification: the rules applied to all hosts after every event.

And what it decides at a change of members, against what another leader would.
"""

import dataclasses

from resilient_jax.membership.commands import MembershipCommand
from resilient_jax.membership.config import MembershipConfig
from resilient_jax.membership.facts import MembershipState
from resilient_jax.membership.leader_memory import LeaderMemory
from resilient_jax.membership.machine import (
    HostChanged,
    HostLeft,
    HostProgressed,
    MembershipEvent,
    MembershipMachine,
    QuarantineChanged,
    apply_progress,
)
from resilient_jax.membership.rules import decide
from resilient_jax.protocol.record_parts import change_fields
from resilient_jax.protocol.recovery_records import WAITING_ACTIONS


class CheckedMachine(MembershipMachine):
    """The machine of a leader; an event after which it commands anything else than the specification fails the test."""

    def __init__(self, state: MembershipState, config: MembershipConfig) -> None:
        super().__init__(state, config)
        self._specified = state

    def handle(self, event: MembershipEvent, now: float) -> tuple[MembershipCommand, ...]:
        commands = super().handle(event, now)
        before = self._specified
        self._specified, expected = handle_plainly(self._specified, event, now, self._config)
        assert commands == expected, event
        assert self.state == self._specified
        self._check_decision(before, event, now)
        return commands

    def _check_decision(self, before: MembershipState, event: MembershipEvent, now: float) -> None:
        """Check that another leader, whose term begins at this moment, would take the same decision.

        What this leader has measured just now counts from its next transition on, which may be one of the same event.
        So the other one begins with the history that is recorded before the event, or after it.
        """
        slowness = before.generation.record.slowness.decision, self.state.generation.record.slowness.decision
        if slowness[0] != slowness[1]:
            self._check_choice_about_slow_hosts(before, event, now)
        recorded, decision = before.generation.record.decision, self.state.generation.record.decision
        if decision == recorded or (recorded is not None and recorded.action in WAITING_ACTIONS):
            return  # none; or the end of a wait, whose time begins anew with a term
        assert decision is not None
        others = []
        for history in (before.generation.record.history, self.state.generation.record.history):
            generation = change_fields(before.generation, history=history)
            memory = LeaderMemory(observed_until_s=now, decided_s=now)
            successor = dataclasses.replace(before, generation=generation, memory=memory)
            other = handle_plainly(successor, event, now, self._config)[0].generation.record.decision
            assert other is not None
            others.append((other.action, other.joining, other.awaited))
        assert (decision.action, decision.joining, decision.awaited) in others

    def _check_choice_about_slow_hosts(
        self, before: MembershipState, event: MembershipEvent, now: float
    ) -> None:
        """Check the same of a decision about slow hosts, which follows from reports and the generation alone."""
        decision, others = self.state.generation.record.slowness.decision, []
        assert decision is not None
        for history in (before.generation.record.history, self.state.generation.record.history):
            generation = change_fields(before.generation, history=history)
            memory = LeaderMemory(observed_until_s=now, decided_s=now)
            successor = dataclasses.replace(before, generation=generation, memory=memory)
            other = handle_plainly(successor, event, now, self._config)[0].generation.record.slowness.decision
            others.append(None if other is None else (other.action, other.number, other.slow))
        assert (decision.action, decision.number, decision.slow) in others


def handle_plainly(
    state: MembershipState, event: MembershipEvent, now: float, config: MembershipConfig
) -> tuple[MembershipState, tuple[MembershipCommand, ...]]:
    """Take in one event, and apply the rules whatever it is."""
    hosts = dict(state.hosts)
    if isinstance(event, HostChanged):
        hosts[event.status.host] = event.status
    elif isinstance(event, HostLeft):
        hosts.pop(event.host, None)
    elif isinstance(event, HostProgressed) and (status := apply_progress(hosts, event)) is not None:
        hosts[event.host] = status
    elif isinstance(event, QuarantineChanged):
        state = dataclasses.replace(state, quarantined=event.hosts)
    return decide(dataclasses.replace(state, hosts=hosts), now, config)
