"""What is known of each host's computations: how many steps it had finished when they last agreed with another's.

The record is in the memory of every worker that trains, and outlives generations. At the start of each the hosts take
over that of a host which has trained last: others were away, and may have missed that steps were done again, or that
another host joined. If none has trained before, all workers are new, and the state that they begin with counts as
verified.
"""

from collections.abc import Sequence
from typing import Final

import msgspec

from resilient_jax.ids import GenerationNumber, HostName

UNKNOWN: Final = -1


class AuditKnowledge(msgspec.Struct, frozen=True, array_like=True):
    """What a host tells the others at the begin of a generation.

    Attributes:
        generation: number of the one in which its worker has trained last; 0: in none.
        verified_step: how many steps it had finished when its computations last agreed with another's; -1: unknown.
    """

    generation: int
    verified_step: int


class AuditRecord:
    """How far each host's computations are verified."""

    def __init__(self) -> None:
        self._verified: dict[HostName, int] = {}
        self._generation = 0
        """In which this worker has trained last; 0: in none."""

    def describe(self, host: HostName) -> AuditKnowledge:
        """Return what this host tells the others about itself."""
        return AuditKnowledge(self._generation, self._verified.get(host, UNKNOWN))

    def list_steps(self, hosts: Sequence[HostName]) -> tuple[int, ...]:
        """Return for each host: a state of so many steps was not touched by the host since it was last verified.

        `UNKNOWN` where this worker does not know.
        """
        return tuple(self._verified.get(host, UNKNOWN) for host in hosts)

    def take_over(
        self,
        generation: GenerationNumber,
        hosts: Sequence[HostName],
        step: int,
        knowledge: Sequence[AuditKnowledge],
        newest: Sequence[int],
    ) -> None:
        """Take over what the host knows that has trained last; all hosts then know the same of each other.

        Args:
            generation: number of the generation that begins.
            hosts: members of that generation.
            step: steps of the state that the generation begins with.
            knowledge: what each member knows, see `describe`.
            newest: `list_steps` of a member that has trained last.
        """
        last = max(one.generation for one in knowledge)
        found: dict[HostName, int] = {}
        for host, known, own in zip(hosts, newest, knowledge, strict=True):
            steps = known if last and known != UNKNOWN else own.verified_step
            # Steps that are done again are computed after the audits that passed when they were done first. A host that
            # is seen for the first time has had no part in the state.
            found[host] = step if steps == UNKNOWN else min(steps, step)
        absent = self._verified if self._generation == last else {}
        self._verified = {host: min(steps, step) for host, steps in absent.items()} | found
        self._generation = generation

    def pass_audit(self, hosts: Sequence[HostName], step: int) -> None:
        """Record that what these hosts computed in a step agrees with what others did."""
        self._verified |= dict.fromkeys(hosts, step + 1)
