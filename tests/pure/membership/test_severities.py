"""Each action is tried as often as the table says, and then the next, harder one."""

import pytest

from resilient_jax.config.job_config import JobConfig
from resilient_jax.membership.severities import (
    ESCALATIONS,
    Action,
    Evidence,
    Tries,
    choose_action,
)

SETTINGS = {Tries.COLLECTIVE: 2, Tries.RESTARTS: 1, Tries.HOST_LOSSES: 3, Tries.ERROR_RESTARTS: 2}


@pytest.mark.parametrize(
    ("evidence", "actions"),
    [
        (
            Evidence.COLLECTIVE_FAILED,
            [Action.RETRY_IN_PLACE, Action.RETRY_IN_PLACE, Action.TAKE_HOST_OUT, *[Action.STOP_JOB] * 2],
        ),
        (Evidence.WORKER_HANGS, [Action.RESTART_WORKER, *[Action.TAKE_HOST_OUT] * 4]),
        (Evidence.HOST_LOST, [*[Action.RESTART_WORKER] * 3, *[Action.TAKE_HOST_OUT] * 2]),
        (Evidence.RAISED, [*[Action.RESTART_WORKER] * 2, *[Action.TAKE_HOST_OUT] * 3]),
    ],
)
def test_what_did_not_help_is_followed_by_something_harder(evidence: Evidence, actions: list[Action]) -> None:
    assert [choose_action(evidence, number, SETTINGS) for number in range(5)] == actions


def test_an_escalation_only_gets_harder_and_has_an_end() -> None:
    for evidence, levels in ESCALATIONS.items():
        hardness = [list(Action).index(level.action) for level in levels]
        assert hardness == sorted(set(hardness)), evidence
        assert [level.tries is None for level in levels] == [*[False] * (len(levels) - 1), True], evidence


def test_tries_are_keys_of_a_jobs_settings() -> None:
    assert {str(tries) for tries in Tries} <= set(JobConfig.__struct_fields__)
