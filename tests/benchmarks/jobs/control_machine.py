"""Measure what decisions cost a leader, in a process of its own.

    control_machine.py FOUND ROUNDS SIZES PLAIN_SIZES SAMPLED_SIZES

The sizes are numbers of hosts, separated by commas; "-" is none. It writes `MachineMeasurements` to FOUND. The plain
machine, which is the specification in the tests, applies the rules to all hosts after each event; of jobs of the last
sizes it is given only some of the events.
"""

import sys
from pathlib import Path

import msgspec

from resilient_jax.membership.commands import MembershipCommand
from resilient_jax.membership.config import MembershipConfig
from resilient_jax.membership.facts import MembershipState
from resilient_jax.membership.machine import MembershipEvent, MembershipMachine
from tests.benchmarks.control.machine_cost import MachineCost, MachineMeasurements, measure_machine
from tests.support.checked_membership import handle_plainly

TRAINING_ROUNDS = 3
"""Of events of every host while all train."""
SAMPLED_EVENTS = 20


class PlainMachine:
    """The rules, applied to all hosts after each event."""

    def __init__(self, state: MembershipState, config: MembershipConfig) -> None:
        self._state = state
        self._config = config

    def handle(self, event: MembershipEvent, now: float) -> tuple[MembershipCommand, ...]:
        self._state, commands = handle_plainly(self._state, event, now, self._config)
        return commands


def measure_sizes(sizes: str, rounds: int) -> dict[int, list[MachineCost]]:
    return {
        size: [measure_machine(size, TRAINING_ROUNDS, MembershipMachine) for _ in range(rounds)]
        for size in read_sizes(sizes)
    }


def measure_plain(sizes: str, sampled_sizes: str) -> dict[int, list[MachineCost]]:
    limits = dict.fromkeys(read_sizes(sizes)) | dict.fromkeys(read_sizes(sampled_sizes), SAMPLED_EVENTS)
    return {size: [measure_machine(size, 1, PlainMachine, limit)] for size, limit in limits.items()}


def read_sizes(text: str) -> list[int]:
    return [] if text == "-" else [int(size) for size in text.split(",")]


def main() -> None:
    found, rounds, sizes, plain, sampled = sys.argv[1:]
    measured = MachineMeasurements(
        ours=measure_sizes(sizes, int(rounds)), plain=measure_plain(plain, sampled)
    )
    Path(found).write_bytes(msgspec.json.encode(measured))


if __name__ == "__main__":
    main()
