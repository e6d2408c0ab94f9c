"""The quotas of unequal teams: whole microbatches, of another size in each team, that add up to the batch."""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from resilient_jax.pipeline_schedule.makespan import MachineClass

HALVINGS = 30
"""Halvings of the interval of the makespan: to a billionth."""


class TeamRate(NamedTuple):
    """What quotas depend on: the sequences of a team's microbatch, and its replicas."""

    sequences: int
    machines: Sequence[MachineClass]

    @property
    def sequences_per_s(self) -> float:
        """The team's speed in the long run."""
        return self.sequences * sum(one.count / one.task_s for one in self.machines)

    def count_microbatches(self, until_s: float) -> int:
        """Return how many microbatches the team has computed by a time."""
        return sum(
            one.count * max(0, math.floor((until_s - one.start_s) / one.task_s + 1e-9))
            for one in self.machines
        )


def find_quotas(
    sequences: int, teams: Sequence[TeamRate], limit_s: float = math.inf
) -> tuple[int, ...] | None:
    """Return the microbatches of each team with which the last team is done soonest.

    None if no numbers add up, or none by the limit.

    Bisection over the makespan: by a time t team i can have computed 0 to c_i(t) microbatches of m_i sequences, and t
    is enough if numbers n_i <= c_i(t) have `sum_i n_i m_i = sequences`. That is a bounded subset sum, kept as the bits
    of one integer: bit k says that k sequences can be made up.

    >>> find_quotas(9, [TeamRate(2, [MachineClass(count=1, start_s=0, task_s=1)]),
    ...                 TeamRate(1, [MachineClass(count=1, start_s=0, task_s=1)])])
    (3, 3)
    """
    if not _reach(sequences, teams, limit_s)[-1] >> sequences & 1:
        return None
    low = sequences / sum(team.sequences_per_s for team in teams)
    high = 2 * low + max(one.start_s + one.task_s for team in teams for one in team.machines)
    while not _reach(sequences, teams, high)[-1] >> sequences & 1:
        low, high = high, 2 * high
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        is_enough = _reach(sequences, teams, middle)[-1] >> sequences & 1
        low, high = (low, middle) if is_enough else (middle, high)
    return tuple(_trace(sequences, teams, high))


def _reach(sequences: int, teams: Sequence[TeamRate], until_s: float) -> list[int]:
    """Return the numbers of sequences that the first 0, 1, ... teams can make up by a time, as bits."""
    within = (1 << sequences + 1) - 1
    found = [1]
    for team in teams:
        most = sequences // team.sequences
        left = min(team.count_microbatches(until_s), most) if until_s < math.inf else most
        bits, step = found[-1], 1
        # 0 to c microbatches are any choice of 1, 2, 4, ... of them and a rest.
        while left > 0:
            taken = min(step, left)
            bits |= bits << taken * team.sequences & within
            left, step = left - taken, step * 2
        found.append(bits)
    return found


def _trace(sequences: int, teams: Sequence[TeamRate], until_s: float) -> Iterator[int]:
    """Yield a number for each team: of those that work, the last team's nearest to its share of speed."""
    found = _reach(sequences, teams, until_s)
    left, numbers = sequences, []
    for index in range(len(teams) - 1, -1, -1):
        team = teams[index]
        speed = sum(other.sequences_per_s for other in teams[: index + 1])
        wanted = left * team.sequences_per_s / speed / team.sequences
        most = min(team.count_microbatches(until_s), left // team.sequences)
        allowed = [n for n in range(most + 1) if found[index] >> left - n * team.sequences & 1]
        numbers.append(min(allowed, key=lambda n: abs(n - wanted)))
        left -= numbers[-1] * team.sequences
    yield from reversed(numbers)
