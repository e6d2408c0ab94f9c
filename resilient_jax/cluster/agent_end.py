"""What the end of an agent means for its host and for a job on this machine. Pure.

Only an agent of a host that the job never let in can end the job: all agents were started with what that one was
refused for. A host that was let in has shown that it can train. What keeps its next agent out (a full disk, a file that
is away or half written, an address or a name that is still taken) may pass, and the other hosts train meanwhile.
"""

import enum

from resilient_jax.cluster.child_process import get_signal_name
from resilient_jax.errors import ExitCode

OWN_EXIT_CODES = frozenset(map(int, ExitCode)) - {int(ExitCode.USAGE)}
"""With any other positive code an agent passes on the script's, once the job is over; before that it has failed in a
way that it does not know, such as a Python that could not be started."""
FATAL_EXIT_CODES = frozenset({int(ExitCode.USAGE), int(ExitCode.JOIN_REFUSED), int(ExitCode.INTERNAL_ERROR)})
"""Exit codes with which an agent would end again, wherever it is started, if it never got further."""
PASSING_EXIT_CODES = FATAL_EXIT_CODES | {int(ExitCode.STORE_LOST)}
"""Exit codes for reasons that may pass."""


class AgentEnd(enum.Enum):
    """What the end of an agent means while its job runs."""

    LEFT = enum.auto()
    """The host has left the job, by order or for good: its agent is not started again."""
    DOWN = enum.auto()
    """The host went down, as by a kill: its agent is started again after the restart delay."""
    REFUSED = enum.auto()
    """The agent failed for a reason that may pass: it is tried again after pauses that grow."""
    ENDS_JOB = enum.auto()
    """No agent of the job could do better."""


def judge_end(code: int, *, was_let_in: bool) -> AgentEnd:
    """Return what the end of an agent means.

    Args:
        code: exit code of the agent; negative for a signal.
        was_let_in: whether the job has ever let an agent of this host in.
    """
    if code < 0 or code == ExitCode.OUT_OF_RESOURCES:
        return AgentEnd.DOWN
    if code == ExitCode.DONE or (code in OWN_EXIT_CODES and code not in PASSING_EXIT_CODES):
        return AgentEnd.LEFT
    if code in FATAL_EXIT_CODES and not was_let_in:
        return AgentEnd.ENDS_JOB
    return AgentEnd.REFUSED


def describe_agent_end(code: int) -> str:
    """Return an agent's exit code in words, as the predicate of a sentence."""
    if code < 0:
        return f"was ended by {get_signal_name(-code)}"
    if code in OWN_EXIT_CODES or code == ExitCode.USAGE:
        return f"ended with {ExitCode(code).name} ({code})"
    return f"exited with code {code}"
