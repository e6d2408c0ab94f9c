"""How the snapshots of a new generation follow the risk of the state: when the first is due, and how often others are.

Pure. The leader decides it when it forms the generation, and all members obey the record: hosts must take the same
snapshots. A first snapshot delays no step but the second one, whose copy runs beside it; without it a generation that
ends early leaves nothing behind, and a job of short generations is never protected.
"""

from typing import Final

from resilient_jax.policy.failure_forecast import expect_failure_s
from resilient_jax.protocol.generation import Generation
from resilient_jax.protocol.snapshots import Protection, SnapshotPlan

ENOUGH_LOSSES: Final = 2
"""So many more losses the state outlives, whichever they are, where the first snapshot of a generation may wait for
some steps: with one, a failure during the recovery from another one would leave the last copy."""


def choose_protection(before: Generation, formed: Generation, snapshot: SnapshotPlan | None) -> Protection:
    """Return when the members of a generation take snapshots.

    Args:
        before: the record that the generation was formed from, with the step that members resumed from before.
        formed: has its history, and how many losses its state stands.
        snapshot: newest snapshot that can be rebuilt; None: there is none.
    """
    # Of the generation before, or of all that it has committed.
    is_recent = snapshot is not None and (
        snapshot.id.step > before.state.step or snapshot.id.step >= formed.state.step
    )
    has_enough = formed.record.losses_left is not None and formed.record.losses_left >= ENOUGH_LOSSES
    # Where all workers are replaced, nothing but snapshots outlives a loss.
    can_wait = is_recent and has_enough and formed.membership.keeps_workers
    return Protection(
        from_first_commit=not can_wait,
        next_failure_s=expect_failure_s(
            formed.record.history, [member.host for member in formed.membership.members]
        ),
    )
