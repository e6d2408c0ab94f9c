"""How every planned change of members begins. Pure."""

from resilient_jax.ids import GenerationNumber, HostName
from resilient_jax.protocol.generation import Generation, GenerationPhase
from resilient_jax.protocol.record_parts import change_fields
from resilient_jax.protocol.state_records import NextMembers


def begin_pause(
    generation: Generation,
    reason: str,
    next_members: NextMembers | None,
    taken_out: HostName | None = None,
    *,
    ends_job: bool = False,
) -> Generation:
    """Return the next number, in PAUSE: what was wrong in the present one, whose members train, is over.

    Args:
        next_members: members that blocks are copied for; None: no blocks are copied.
        taken_out: slow host that the change leaves out; None: the change leaves none out.
    """
    return change_fields(
        generation,
        number=GenerationNumber(generation.number + 1),
        phase=GenerationPhase.PAUSE,
        hang="",
        attempts=0,
        are_parts_doubtful=False,
        taken_out=taken_out,
        reason=reason,
        next_members=next_members,
        ends_job=ends_job,
    )
