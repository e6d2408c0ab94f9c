"""Only an agent of a host that the job never let in can end the job."""

import pytest

from resilient_jax.cluster.agent_end import AgentEnd, describe_agent_end, judge_end
from resilient_jax.errors import ExitCode

LEFT, DOWN, REFUSED, ENDS_JOB = AgentEnd.LEFT, AgentEnd.DOWN, AgentEnd.REFUSED, AgentEnd.ENDS_JOB
KILLED, STRANGE, NOT_FOUND = -9, 1, 127

ENDS = {
    # code: what it means for a host that was never let in, and for one that was
    KILLED: (DOWN, DOWN),
    STRANGE: (REFUSED, REFUSED),
    NOT_FOUND: (REFUSED, REFUSED),
    ExitCode.DONE: (LEFT, LEFT),
    ExitCode.USAGE: (ENDS_JOB, REFUSED),
    ExitCode.OUT_OF_RESOURCES: (DOWN, DOWN),
    ExitCode.STORE_LOST: (REFUSED, REFUSED),
    ExitCode.RESTART_BUDGET_EXHAUSTED: (LEFT, LEFT),
    ExitCode.TOO_FEW_HOSTS: (LEFT, LEFT),
    ExitCode.JOIN_REFUSED: (ENDS_JOB, REFUSED),
    ExitCode.DRAINED: (LEFT, LEFT),
    ExitCode.STATE_LOST: (LEFT, LEFT),
    ExitCode.SCRIPT_DIFFERS: (LEFT, LEFT),
    ExitCode.HOST_CORRUPT: (LEFT, LEFT),
    ExitCode.INTERNAL_ERROR: (ENDS_JOB, REFUSED),
    ExitCode.INTERRUPTED: (LEFT, LEFT),
}


@pytest.mark.parametrize("code", ENDS, ids=describe_agent_end)
def test_what_the_end_of_an_agent_means(code: int) -> None:
    assert tuple(judge_end(code, was_let_in=let_in) for let_in in (False, True)) == ENDS[code]


def test_each_exit_code_of_an_agent_has_a_meaning() -> None:
    assert set(ENDS) - {KILLED, STRANGE, NOT_FOUND} == set(ExitCode)


def test_no_code_of_a_host_that_was_let_in_ends_the_job() -> None:
    assert not [code for code in range(-64, 256) if judge_end(code, was_let_in=True) is ENDS_JOB]
