"""What a leader prints while a job trains: whether a notice to all hosts would lose its steps."""

import dataclasses
import itertools

import msgspec
import pytest

from resilient_jax.cluster.decision_log import NOTE_OF_UNSAVED, DecisionLog
from resilient_jax.membership.facts import MembershipState
from resilient_jax.telemetry.event_log import EventLog
from tests.support.membership_job import training


def with_progress(state: MembershipState, progress: int) -> MembershipState:
    return dataclasses.replace(state, generation=msgspec.structs.replace(state.generation, progress=progress))


@pytest.mark.parametrize("saves", [False, True])
def test_a_job_that_tells_of_no_checkpoints_says_once_what_a_notice_would_cost(saves: bool) -> None:
    job = training("a", "b")
    job.report("a", saves_on_notice=saves)
    said: list[str] = []
    decisions = DecisionLog(EventLog(None, "a"), said.append, job.config)
    states = [with_progress(job.state, progress) for progress in (0, 1, 5, 9, 12)]
    decisions.tell_of_unsaved(None, states[0])
    decisions.tell_of_unsaved(states[0].generation, states[1])
    assert said == [], "workers may not have told yet"
    for before, state in itertools.pairwise(states[1:]):
        decisions.tell_of_unsaved(before.generation, state)
    assert said == ([] if saves else [NOTE_OF_UNSAVED])
