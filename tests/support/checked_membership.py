"""The membership machine, held against its specification: the rules applied to all hosts after every event."""

import dataclasses

from resilient_jax.membership.config import MembershipConfig
from resilient_jax.membership.facts import MembershipState
from resilient_jax.membership.machine import (
    HostChanged,
    HostLeft,
    HostProgressed,
    MembershipEvent,
    MembershipMachine,
    QuarantineChanged,
    apply_progress,
)
from resilient_jax.membership.rules import MembershipCommand, decide


class CheckedMachine(MembershipMachine):
    """The machine of a leader; an event after which it commands anything else than the specification fails the test."""

    def __init__(self, state: MembershipState, config: MembershipConfig) -> None:
        super().__init__(state, config)
        self._specified = state

    def handle(self, event: MembershipEvent, now: float) -> tuple[MembershipCommand, ...]:
        commands = super().handle(event, now)
        self._specified, expected = handle_plainly(self._specified, event, now, self._config)
        assert commands == expected, event
        assert self.state == self._specified
        return commands


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
