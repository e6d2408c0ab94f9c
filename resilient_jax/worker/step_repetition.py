"""A step that other members have committed, and that this worker finishes before it goes on with them.

A failure may meet the hosts when some have all that they need for the update of their shards, and others lack a number
that all of them have added up. The first ones have committed; the others are a step behind, and may be the only ones
with their shards. They get those numbers, and call the train function for this step: sums of shards are here, whole
numbers are what the others found, and nothing is computed but the update.
"""

from collections.abc import Callable

import jax

from resilient_jax.errors import PeerUnreachable
from resilient_jax.protocol.generation import Generation
from resilient_jax.protocol.state_records import PartHolder, UnitKind
from resilient_jax.protocol.worker_messages import FormWorld
from resilient_jax.step.reducer import Reducer
from resilient_jax.worker.committed_state import CommittedState
from resilient_jax.worker.generation_info import describe_generation
from resilient_jax.worker.mail_opening import MailOpener
from resilient_jax.worker.rehearsal import OneStepControl
from resilient_jax.worker.session import Session
from resilient_jax.worker.step_results import RepeatedResults
from resilient_jax.worker.training_control import GenerationEnded, TrainingControl
from resilient_jax.worker.world import World


def list_behind(generation: Generation) -> list[PartHolder]:
    """Return the members whose shards are of the step before the one that the generation resumes from."""
    state = generation.state
    return [
        holder
        for holder in state.part_holders
        if holder.part.kind is UnitKind.RANKS and holder.step < state.step
    ]


def repeat_step(
    train_fn: Callable[[World], None],
    before: FormWorld,
    committed: CommittedState,
    results: RepeatedResults,
    agent: TrainingControl,
    mail: MailOpener,
) -> None:
    """Run a step of `train_fn` to its commit, in the world of the generation before, whose devices are still here.

    Raises:
        PeerUnreachable: the step does not come to its commit with what is known.
        Exception: whatever `train_fn` raises.
        GenerationEnded: this worker has another order.
    """
    info = describe_generation(before, ())
    control = OneStepControl(before.host, agent)
    session = Session(committed, control)
    session.repeated = results
    reducer = Reducer(jax.devices, info.process_index, committed.contributions, session)
    reducer.held_ranks = lambda _: info.held_ranks
    try:
        train_fn(World(info, session, control, reducer, mail=mail))
    except GenerationEnded:
        agent.raise_if_ended()
    if not control.has_committed:
        raise PeerUnreachable(
            "a step that others have committed is run again: found a train function that returns without its commit"
        )
