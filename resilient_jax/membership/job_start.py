"""From which state a leader begins: what the store has, or a job that begins anew. Pure."""

from collections.abc import Iterable

from resilient_jax.ids import GenerationNumber, HostName
from resilient_jax.membership.facts import MembershipState
from resilient_jax.membership.leader_memory import LeaderMemory
from resilient_jax.protocol.generation import Generation, GenerationPhase, JobOutcomeKind
from resilient_jax.protocol.host_status import HostStatus
from resilient_jax.protocol.record_parts import change_fields

FIRST_GENERATION = Generation(
    number=GenerationNumber(1), phase=GenerationPhase.QUIESCE, reason="the job starts"
)


def make_initial_state(
    generation: Generation | None,
    statuses: Iterable[HostStatus],
    now: float,
    *,
    quarantined: frozenset[HostName] = frozenset(),
) -> MembershipState:
    """Return the state from which a new leader starts: the stored statuses and generation, or the first one."""
    hosts = {status.host: status for status in statuses}
    return MembershipState(
        generation=generation or FIRST_GENERATION,
        hosts=hosts,
        phase_since_s=now,
        quarantined=quarantined,
        memory=LeaderMemory(observed_until_s=now, decided_s=now),
    )


def is_interrupted(generation: Generation | None) -> bool:
    """Return whether the job has ended by a notice to all its hosts: it begins anew with the next hosts that start."""
    outcome = generation.outcome if generation is not None else None
    return outcome is not None and outcome.kind is JobOutcomeKind.INTERRUPTED


def begin_anew(ended: Generation) -> Generation:
    """Return the first generation of a job that was interrupted, and is started again under its name.

    Its number is a new one. Nothing of the ended one counts but what is on storage.
    """
    number = GenerationNumber(ended.number + 1)
    return change_fields(
        FIRST_GENERATION, number=number, initial_generation=number, reason="the job starts again"
    )
