"""What a leader prints while a job trains: what a notice to all hosts would lose, and whose network all wait for."""

import dataclasses
import itertools

import pytest

from resilient_jax.cluster.decision_log import NOTE_OF_UNSAVED, DecisionLog
from resilient_jax.membership.facts import MembershipState
from resilient_jax.protocol.record_parts import change_fields
from resilient_jax.protocol.worker_report import WorkerFailure, WorkerFailureKind
from resilient_jax.telemetry.event_log import EventLog
from tests.support.membership_job import training


def with_progress(state: MembershipState, progress: int) -> MembershipState:
    return dataclasses.replace(state, generation=change_fields(state.generation, progress=progress))


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


def test_where_nobody_can_be_spared_it_says_once_whom_all_wait_for() -> None:
    job = training("a", "b", min_hosts=2)
    said: list[str] = []
    decisions = DecisionLog(EventLog(None, "a"), said.append, job.config)
    job.cut.add(frozenset("ab"))
    job.report("a", failure=WorkerFailure(kind=WorkerFailureKind.COLLECTIVE, text="reset"))
    for _ in range(2):
        job.acknowledge("a", "b")
        decisions.tell_of_separation(job.state)
    (line,) = said
    assert line.startswith("a and b cannot reach each other, and no host is taken out: ")
    job.cut.clear()
    job.look_around("a")
    job.look_around("b")
    decisions.tell_of_separation(job.state)
    assert len(said) == 1
