"""Which phase of a generation may follow which: the table that every transition is held against. Pure."""

import dataclasses
from typing import Final

from resilient_jax.protocol.generation import Generation, GenerationPhase


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PhaseMove:
    """One way in which a generation goes on.

    Attributes:
        opens_number: whether the phase that follows is of the next number.
        when: what makes the leader go on.
    """

    before: GenerationPhase
    after: GenerationPhase
    opens_number: bool = False
    when: str


UNFINISHED: Final = tuple(phase for phase in GenerationPhase if phase is not GenerationPhase.FINISHED)
PHASE_MOVES: Final = (
    PhaseMove(
        before=GenerationPhase.ACTIVE,
        after=GenerationPhase.PAUSE,
        opens_number=True,
        when="hosts join, leave after a notice, or take another part, at a step that all can agree on",
    ),
    PhaseMove(
        before=GenerationPhase.PAUSE,
        after=GenerationPhase.BOUNDARY,
        when="each member has said before which step it can stop",
    ),
    PhaseMove(
        before=GenerationPhase.BOUNDARY,
        after=GenerationPhase.FORM,
        when="all members have stopped before the agreed step",
    ),
    *(
        PhaseMove(
            before=phase,
            after=GenerationPhase.QUIESCE,
            opens_number=True,
            when="a member dies, is left out, hangs, or fails",
        )
        for phase in UNFINISHED
    ),
    PhaseMove(
        before=GenerationPhase.QUIESCE,
        after=GenerationPhase.FORM,
        when="all members have stopped, the state to go on from is known, and no other host is waited for",
    ),
    PhaseMove(
        before=GenerationPhase.FORM,
        after=GenerationPhase.ACTIVE,
        when="all members have joined the world and have the state",
    ),
    *(
        PhaseMove(
            before=phase,
            after=GenerationPhase.FINISHED,
            when="the training is done, or cannot go on",
        )
        for phase in UNFINISHED
    ),
)
"""A generation also changes within its phase: newcomers get seats, decisions and progress are recorded."""

_ALLOWED: Final = frozenset((move.before, move.after, move.opens_number) for move in PHASE_MOVES)


def may_follow(before: Generation, after: Generation) -> bool:
    """Return whether a generation, or its next phase, may follow another."""
    steps = after.number - before.number
    if (steps, before.phase) == (0, after.phase):
        return before.phase is not GenerationPhase.FINISHED
    return 0 <= steps <= 1 and (before.phase, after.phase, steps == 1) in _ALLOWED
